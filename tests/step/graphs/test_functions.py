"""graphed: what an eager call returns, by replay; and what runs eagerly, with the reason."""

import copy
import pickle
import random
import threading
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import graphed
from batchwright.step.graphs._function_graphs import FunctionGraphs
from batchwright.testing import EagerGraphs

from .tape import TapeGraphs

SHAPES = [(4, 8), (2, 16), (1, 8)]
PAD = {"x": 0}
Pair = namedtuple("Pair", "total twice")


def make_net(*, width=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, 3)).eval()


def weighted(x):
    """A function of rows that does not see zeros on their right."""
    return (x * (1 + torch.arange(x.shape[1]))).sum(1)


def rows(num, length, seed=0):
    return torch.randn(num, length, generator=torch.Generator().manual_seed(seed))


def taped(fn, shapes=SHAPES, **options):
    return graphed(fn, shapes, graphs=TapeGraphs(), **options)


def reasons_of(function):
    return " ".join(function.summary().reasons)


# Padding, replaying, cutting


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 17)), min_size=1, max_size=8))
def test_any_call_gives_what_it_gives_eagerly(calls):
    function = taped(weighted, pad=PAD)
    for seed, (num, length) in enumerate(calls):
        x = rows(num, length, seed)
        torch.testing.assert_close(function(x), weighted(x))


def test_a_call_is_padded_to_the_planned_shape_of_the_fewest_elements():
    function = taped(weighted, pad=PAD)
    for size in ((1, 3), (1, 8), (2, 3), (4, 8), (2, 9), (1, 16)):
        function(rows(*size))
    assert function.summary().shapes == {"4x8": 2, "2x16": 2, "1x8": 2}
    assert function.summary().num_captures == 3


@pytest.mark.parametrize("size", [(5, 8), (3, 9), (1, 17)])
def test_a_call_that_no_planned_shape_holds_runs_as_it_came(size):
    function = taped(weighted, pad=PAD)
    x = rows(*size)
    assert torch.equal(function(x), weighted(x))
    assert function.summary().reasons == {"a shape was not planned": 1}
    assert function.summary().num_captures == 0


def test_without_pad_only_calls_of_exactly_a_planned_shape_are_replayed():
    function = taped(weighted)
    for size in ((4, 8), (2, 16), (3, 8), (4, 8)):
        assert torch.equal(function(rows(*size)), weighted(rows(*size)))
    assert (function.summary().num_replayed, function.summary().num_eager) == (3, 1)


def test_shapes_may_be_a_plan_or_a_sampler():
    lengths = [3, 5, 7, 8, 2, 4]
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(16), grouping=bw.Buckets(2))
    for shapes in (sampler, sampler.plan, sampler.plan.shapes, sampler.pad_to):
        function = taped(weighted, shapes, pad=PAD)
        for batch in sampler.plan:
            x = rows(len(batch), max(lengths[index] for index in batch))
            torch.testing.assert_close(function(x), weighted(x))
        assert function.summary().num_eager == 0


def test_shapes_without_lengths_pad_rows_only():
    net = make_net()
    function = taped(net, [(8,), (2,)], pad={"input": None})
    for num in range(1, 9):
        torch.testing.assert_close(function(rows(num, 5)), net(rows(num, 5)).detach())
    assert function.summary().num_replayed == 8


def test_named_arguments_positions_and_nested_fields_are_padded():
    def run(batch, scale, *, mask):
        return ((batch["x"] * mask).sum(1) + batch["bias"]) * scale

    function = taped(run, pad={"x": 7.0, "mask": 0, "bias": None})
    x, bias, mask = rows(3, 5), rows(3, 1)[:, 0], torch.ones(3, 5)
    call = ({"x": x, "bias": bias}, torch.tensor(2.0))
    torch.testing.assert_close(function(*call, mask=mask), run(*call, mask=mask))
    assert function.summary().num_replayed == 1


def test_flags_are_padded():
    function = taped(lambda x, mask: (x * mask).sum(1), pad={"x": 1.0, "mask": False})
    x, mask = rows(3, 5), torch.ones(3, 5, dtype=torch.bool)
    torch.testing.assert_close(function(x, mask), x.sum(1))
    assert function.summary().num_replayed == 1


def test_a_function_as_cut_is_used_for_every_call():
    def cut(output, shape):
        return {"y": output["y"][: shape[0], : shape[1]]}

    function = taped(lambda x: {"y": 2 * x, "not wanted": x}, pad=PAD, cut=cut)
    for size in ((3, 5), (4, 8), (9, 9)):
        found = function(rows(*size))
        assert found.keys() == {"y"}
        assert torch.equal(found["y"], 2 * rows(*size))
    assert (function.summary().num_replayed, function.summary().num_eager) == (2, 1)


def test_tensors_that_disagree_about_rows_or_lengths_are_refused():
    function = taped(lambda x, y: x.sum(1) + y.sum(1), pad={"x": 0, "y": 0})
    with pytest.raises(ArgumentError, match="share their rows: x has 2, y has 3"):
        function(rows(2, 4), rows(3, 4))
    with pytest.raises(ArgumentError, match="share their lengths: x has 4, y has 5"):
        function(rows(2, 4), rows(2, 5))
    with pytest.raises(ArgumentError, match="no tensor has any"):
        taped(weighted, pad={"z": 0})(rows(2, 4))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pad": {}}, "pad must name"),
        ({"pad": {"x": "0"}}, "pad gives '0' for 'x'"),
        ({"pad": {"x": float("nan")}}, "pad gives nan"),
        ({"pad": PAD, "cut": "columns"}, "cut must be"),
        ({"cut": lambda output, shape: output}, "needs pad="),
        ({"graphs": "never"}, "graphs must be"),
        ({"shapes": [(2, 3, 4)], "pad": PAD}, r"\(rows, length\) or \(rows,\)"),
        ({"shapes": [(1, length) for length in range(1, 300)], "pad": PAD}, "299 different ones"),
        ({"shapes": []}, "shapes"),
        ({"fn": 3}, "fn must be"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(ArgumentError, match=text):
        graphed(**{"fn": weighted, "shapes": SHAPES, **options})


def test_a_fill_that_a_type_cannot_hold_is_refused():
    function = taped(weighted, pad={"x": 0.5})
    with pytest.raises(ArgumentError, match=r"0\.5 for a tensor of torch.int64"):
        function(torch.ones(2, 3, dtype=torch.int64))


# What an output may be


@dataclass
class Both:
    total: torch.Tensor
    name: str


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.sum(1),
        lambda x: (x.sum(1), [x.amax(1), {"n": x.shape[0], "none": None}]),
        lambda x: Pair(x.sum(1), 2 * x.sum(1)),
        lambda x: Both(x.sum(1), "both"),
        lambda x: transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x[..., None], hidden_states=(x, x)),
    ],
)
def test_nested_outputs_are_returned_as_they_are_eagerly(make):
    function, x = taped(make), rows(4, 8)
    found, wanted = function(x), make(x)
    assert type(found) is type(wanted)
    assert repr(found) == repr(wanted)
    assert function.summary().num_replayed == 1


def test_a_later_replay_overwrites_nothing_that_a_caller_holds():
    function = taped(weighted, pad=PAD)
    found = [function(rows(3, 5, seed)) for seed in range(5)]
    for seed, one in enumerate(found):
        torch.testing.assert_close(one, weighted(rows(3, 5, seed)))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x[:, :2],
        lambda x: x.t(),
        lambda x: x[:1].expand(4, 8),
        lambda x: (x, x.view(-1), x + 1),
        lambda x: x[:, :0],
        lambda x: x.new_zeros(0),
    ],
)
def test_outputs_that_are_inputs_views_or_empty_have_memory_of_their_own(make):
    function, x = taped(make), rows(4, 8)
    found, wanted = function(x), make(x.clone())
    for one in found if isinstance(found, tuple) else [found]:
        if one.numel():
            one.zero_()
    again = function(x)
    torch.testing.assert_close(again, wanted)
    assert torch.equal(x, rows(4, 8))
    assert function.summary().num_replayed == 2


@pytest.mark.filterwarnings("ignore:calls run eagerly")
def test_an_output_with_more_than_tensors_runs_eagerly():
    class Cache:
        def __init__(self, x):
            self.x = x

    function = taped(Cache)
    first, second = function(rows(4, 8, 1)), function(rows(4, 8, 2))
    assert torch.equal(first.x, rows(4, 8, 1))
    assert torch.equal(second.x, rows(4, 8, 2))
    assert "more than nested tensors" in reasons_of(function)


@pytest.mark.filterwarnings("ignore:calls run eagerly")
def test_an_output_without_rows_needs_a_cut():
    function = taped(lambda x: x.sum(), pad=PAD)
    assert torch.equal(function(rows(3, 5)), rows(3, 5).sum())
    assert 'cut="rows" needs outputs with' in reasons_of(function)


# What an input may be


def test_types_and_single_values_are_captured_apart():
    def run(x, power=1, *, flip=False):
        return (x.flip(1) if flip else x) ** power

    function = taped(run)
    calls = [(rows(4, 8), 2, False), (rows(4, 8).double(), 2, False), (rows(4, 8), 3, False), (rows(4, 8), 3, True)]
    for x, power, flip in calls * 2:
        assert torch.equal(function(x, power, flip=flip), run(x, power, flip=flip))
    assert function.summary().num_replayed == 8
    for power in range(4, 8):
        assert torch.equal(function(rows(4, 8), power), rows(4, 8) ** power)
    assert "differ again and again" in reasons_of(function)


def test_inputs_of_any_memory_format_are_right():
    function = taped(lambda x: 2 * x.view(-1), [(4, 8)])
    for x in (rows(8, 4).t(), rows(4, 16)[:, ::2], rows(4, 8), rows(1, 8).expand(4, 8)):
        assert torch.equal(function(x), 2 * x.reshape(-1))
    assert function.summary().num_replayed == 4


@pytest.mark.filterwarnings("ignore:calls run eagerly")
@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x.data.add_(1), lambda x: x[0].zero_()])
def test_a_function_that_changes_its_inputs_runs_eagerly_on_them(change):
    def run(x):
        change(x)
        return x.sum(1)

    function, x, twin = taped(run), rows(4, 8), rows(4, 8)
    for _ in range(2):
        assert torch.equal(function(x), run(twin))
        assert torch.equal(x, twin)
    assert "changes its inputs in place" in reasons_of(function)


def test_inputs_that_require_gradients_are_refused_unless_gradients_are_off():
    function, x = taped(weighted), rows(4, 8).requires_grad_()
    with pytest.raises(ArgumentError, match="without gradients"):
        function(x)
    with torch.no_grad():
        assert torch.equal(function(x), weighted(x))
    assert function.summary().num_replayed == 1
    assert not function(x.detach()).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_calls_in_other_modes_than_the_capture_are_right(first, mode):
    net = make_net(width=8)
    function = taped(net, [(4, 8)])
    with first():
        function(rows(4, 8, 1))
    with mode():
        x = rows(4, 8, 2)
        found = function(x)
    torch.testing.assert_close(found, net(x.clone()).detach())
    assert not found.is_inference()
    assert (function.summary().num_replayed, function.summary().num_captures) == (2, 1)


def test_another_autocast_is_captured_anew():
    net = make_net(width=8)
    function, x = taped(net, [(4, 8)]), rows(4, 8)
    plain = function(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = function(x)
        torch.testing.assert_close(rough, net(x).detach(), rtol=3e-2, atol=3e-2)
    assert rough.dtype is torch.bfloat16
    assert torch.equal(function(x), plain)
    assert function.summary().num_captures == 3


@pytest.mark.parametrize(
    "value", [np.ones((4, 8)), object(), torch.ones(4, 8).to_sparse(), nn.Parameter(torch.ones(1))]
)
def test_what_no_capture_can_take_in_runs_eagerly_or_as_a_plain_tensor(value):
    function, x = taped(lambda x, other: 2 * x, [(4, 8)]), rows(4, 8)
    with torch.no_grad():
        assert torch.equal(function(x, value), 2 * x)


# Guards


def test_a_changed_module_is_captured_anew_and_right():
    net = make_net(width=8)
    net.append(nn.Dropout(0.5).eval())
    function, x = taped(net, [(4, 8)]), rows(4, 8)
    changes = [
        lambda: net[0].weight.data.mul_(2),
        lambda: setattr(net[0], "weight", nn.Parameter(torch.ones_like(net[0].weight))),
        lambda: net.load_state_dict(make_net(width=8).state_dict()),
        lambda: net.double(),
        lambda: net.float(),
        lambda: setattr(net, "1", nn.ReLU()),
    ]
    for change in changes:
        function(x.to(net[0].weight.dtype))
        with torch.no_grad():
            change()
            x = x.to(net[0].weight.dtype)
            torch.testing.assert_close(function(x), net(x))
    assert function.summary().num_eager == 0


def test_weights_that_change_in_place_need_no_new_capture():
    net = make_net(width=8)
    function, x = taped(net, [(4, 8)]), rows(4, 8)
    function(x)
    net[0].weight.data.mul_(2)
    torch.testing.assert_close(function(x), net(x).detach())
    assert function.summary().num_captures == 1


@pytest.mark.filterwarnings("ignore:calls run eagerly")
def test_hooks_run_because_calls_run_eagerly():
    net, seen = make_net(width=8), []
    function, x = taped(net, [(4, 8)]), rows(4, 8)
    function(x)
    net[1].register_forward_hook(lambda *call: seen.append(1))
    for _ in range(3):
        function(x)
    assert len(seen) >= 3
    assert "hooks" in reasons_of(function)


def test_values_of_closures_and_objects_are_watched():
    scale = {"by": 2.0}
    function, x = taped(lambda x: x * scale["by"]), rows(4, 8)
    assert torch.equal(function(x), x * 2)
    scale["by"] = 3.0
    assert torch.equal(function(x), x * 3)


class Scaled:
    by = 2.0

    def factor(self):
        return self.by * getattr(self, "more", 1.0)

    def __call__(self, x):
        return x * self.factor()


@pytest.mark.parametrize(
    ("name", "value", "factor"), [("by", 5.0, 5.0), ("more", 3.0, 6.0), ("factor", lambda: 7.0, 7.0)]
)
@pytest.mark.parametrize("form", [lambda one: one, lambda one: lambda x: one(x)], ids=["object", "closure"])
def test_an_attribute_that_an_object_gets_later_counts(name, value, factor, form):
    """In front of one of its class, in place of a default, or in front of a method."""
    scaled = Scaled()
    function, x = taped(form(scaled)), rows(4, 8)
    for _ in range(2):
        assert torch.equal(function(x), x * 2)
    setattr(scaled, name, value)
    assert torch.equal(function(x), x * factor)
    delattr(scaled, name)
    assert torch.equal(function(x), x * 2)
    assert not function.summary().num_eager


def test_a_model_that_changes_at_every_call_runs_eagerly_and_that_is_said_once():
    scale = {"by": 0.0}
    function, x = taped(lambda x: x * scale["by"]), rows(4, 8)

    def call_often():
        for number in range(14):
            scale["by"] = float(number)
            assert torch.equal(function(x), x * number)

    with pytest.warns(UserWarning, match="again and again") as found:
        call_often()
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore:calls run eagerly")
@pytest.mark.parametrize(
    ("run", "text"),
    [
        (lambda x: x * x.sum().item(), "waits for the device|a capture failed"),
        (lambda x: x[x > 0], "depends on values|a capture failed"),
        (lambda x: x * random.random(), "draws random numbers on the host"),
        (lambda x: x * np.random.rand(), "draws random numbers on the host"),
    ],
)
def test_what_no_graph_can_hold_runs_eagerly_with_the_reason(run, text):
    function = taped(run)

    def seeded(fn, seed):
        random.seed(seed)
        np.random.seed(seed)
        return fn(rows(4, 8, seed))

    with pytest.warns(UserWarning, match=text) as found:
        results = [seeded(function, seed) for seed in range(3)]
    assert all(torch.equal(result, seeded(run, seed)) for seed, result in enumerate(results))
    assert len(found) == 1
    assert function.summary().num_eager == 3


def test_dropout_is_drawn_anew_at_every_replay():
    function, x = taped(nn.Dropout(0.5).train(), [(64, 64)]), torch.ones(64, 64)
    first, second = function(x), function(x)
    assert not torch.equal(first, second)
    assert 0.4 < float((first == 0).float().mean()) < 0.6
    assert function.summary().num_replayed == 2


def test_a_call_too_many_of_a_module_with_running_statistics_is_never_made():
    """In training mode a replay writes to the statistics; the change to eval is seen before one runs."""
    norm, twin = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    function = taped(norm, [(4, 8)])
    for seed in range(3):
        torch.testing.assert_close(function(rows(4, 8, seed)), twin(rows(4, 8, seed)).detach())
    norm.eval()
    twin.eval()
    torch.testing.assert_close(function(rows(4, 8, 9)), twin(rows(4, 8, 9)).detach())
    torch.testing.assert_close(norm.running_mean, twin.running_mean)
    assert norm.num_batches_tracked == twin.num_batches_tracked == 3


def test_padding_that_changes_results_is_noticed_and_not_used():
    def mean(x):
        return x.mean(1)

    function, x = taped(mean, pad=PAD), rows(3, 5)
    with pytest.warns(UserWarning, match="padding changes what the function returns"):
        assert torch.equal(function(x), mean(x))
    assert torch.equal(function(x), mean(x))
    assert function.summary().num_replayed == 0


def test_rows_that_mix_are_noticed_with_padding():
    function, x = taped(lambda x: x.sum(1) - x.sum(), pad=PAD), rows(3, 5)
    with pytest.warns(UserWarning, match="padding changes"):
        assert torch.equal(function(x), x.sum(1) - x.sum())


@pytest.mark.parametrize("fn", [lambda x: x.flip(0), lambda x: x - x[-1]], ids=["turned", "last"])
@pytest.mark.parametrize("backend", [TapeGraphs, EagerGraphs], ids=lambda one: one.__name__)
def test_rows_that_mix_are_noticed_after_a_first_call_of_one_row(fn, backend):
    """Filler beside one row is that row again, and shows nowhere; a later call of several rows is looked at too."""
    function = graphed(fn, [(4,), (8,)], pad={"x": None}, graphs=backend())
    for call in (rows(1, 8), rows(1, 8, 1)):
        torch.testing.assert_close(function(call), fn(call))
    with pytest.warns(UserWarning, match="padding changes"):
        torch.testing.assert_close(function(rows(3, 8, 2)), fn(rows(3, 8, 2)))
    for num in (2, 5, 7, 8):
        torch.testing.assert_close(function(rows(num, 8, num)), fn(rows(num, 8, num)))


def test_rows_that_mix_are_noticed_where_the_first_one_changes_no_other():
    """A copy of the largest row is below none."""

    def ranks(x):
        return (x[:, :1] > x[:, 0]).sum(1)

    function, first = taped(ranks, [(4,), (8,)], pad={"x": None}), rows(3, 8).sort(0, descending=True).values
    with pytest.warns(UserWarning, match="padding changes"):
        assert torch.equal(function(first), ranks(first))
    assert torch.equal(function(rows(3, 8, 1)), ranks(rows(3, 8, 1)))


def test_a_function_of_rows_is_looked_at_once_more_after_a_first_call_of_one_row_and_then_replayed():
    function = taped(weighted, pad=PAD)
    for number, num in enumerate((1, 3, 2, 4, 1)):
        torch.testing.assert_close(function(rows(num, 8, num)), weighted(rows(num, 8, num)))
        assert function.summary().num_replayed == number + 1
    assert not function._graphs.has_doubts


def test_a_look_that_runs_out_of_memory_is_made_at_another_call(monkeypatch):
    prove, num_failures = FunctionGraphs.prove, 0

    def full(self, *args):
        nonlocal num_failures
        num_failures += 1
        if num_failures == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        prove(self, *args)

    function = taped(weighted, pad=PAD)
    function(rows(1, 8))
    num_failures = 0
    monkeypatch.setattr(FunctionGraphs, "prove", full)
    for seed in range(3):
        torch.testing.assert_close(function(rows(3, 8, seed)), weighted(rows(3, 8, seed)))
    assert function.summary().num_eager == 1
    assert "did not fit into memory" in reasons_of(function)


def test_a_replay_with_other_results_is_noticed_and_not_used():
    function, x = graphed(lambda x: x.cumsum(1), [(4, 8)], graphs=_Stale()), rows(4, 8)
    with pytest.warns(UserWarning, match="other results"):
        assert torch.equal(function(x), x.cumsum(1))
    assert function.summary().num_replayed == 0


class _Stale(EagerGraphs):
    """Replays with other inputs than were given."""

    def capture(self, function, *, writes=()):
        replay = super().capture(function, writes=writes)
        inputs = function.__self__._inputs._buffers

        def wrong():
            for one in inputs:
                one.add_(1)
            replay()

        return wrong


# Errors and memory


def test_an_error_of_the_function_is_its_own_and_later_calls_are_captured():
    def run(x):
        if x.dtype is torch.float64:
            raise ValueError("no doubles")
        return 2 * x

    function = taped(run)
    for _ in range(2):
        with pytest.raises(ValueError, match="no doubles"):
            function(rows(4, 8).double())
    assert torch.equal(function(rows(4, 8)), 2 * rows(4, 8))
    assert function.summary().num_replayed == 1


def test_shapes_that_do_not_fit_into_memory_run_eagerly():
    function = graphed(weighted, SHAPES, pad=PAD, graphs=EagerGraphs(max_captures=2))
    for size in ((4, 8), (2, 16), (1, 8)):
        torch.testing.assert_close(function(rows(*size)), weighted(rows(*size)))
    summary = function.summary()
    assert (summary.num_replayed, summary.num_eager) == (2, 1)
    assert "did not fit into memory" in reasons_of(function)


@pytest.mark.parametrize(("replay_seconds", "is_replayed"), [(0.9, True), (0.97, False)])
def test_auto_replays_only_what_gains(monkeypatch, replay_seconds, is_replayed):
    """A comparison asks for the time around a replay, then around an eager run."""
    times = iter(np.cumsum([1.0, replay_seconds, 1.0, 1.0] * 100).tolist())
    backend = EagerGraphs(clock=lambda: next(times))
    monkeypatch.setattr("batchwright.step.graphs.functions.make_backend", lambda choice, device: backend)
    function, x = graphed(weighted, SHAPES, pad=PAD), rows(3, 5)
    torch.testing.assert_close(function(x), weighted(x))
    assert function.summary().num_replayed == is_replayed
    assert function.summary().num_eager == (not is_replayed)


def test_a_cpu_runs_eagerly_and_says_so_once():
    function, x = graphed(weighted, SHAPES, pad=PAD), rows(3, 5)
    with pytest.warns(UserWarning, match="graphs need a CUDA device") as found:
        results = [function(x) for _ in range(3)]
    assert all(torch.equal(result, weighted(x)) for result in results)
    assert len(found) == 1
    assert "graphs need a CUDA device" in str(function.summary())


def test_graphs_true_needs_a_cuda_device():
    with pytest.raises(ArgumentError, match="needs a model on a CUDA device"):
        graphed(weighted, SHAPES, graphs=True)(rows(4, 8))


def test_no_graphs_are_silent():
    function = graphed(weighted, SHAPES, graphs=False)
    assert torch.equal(function(rows(4, 8)), weighted(rows(4, 8)))


def test_a_warm_up_captures_everything_before_the_first_call():
    function = taped(weighted, pad=PAD)
    assert function.warm_up(rows(1, 2)).num_captures == 3
    for size in ((4, 8), (2, 16), (1, 8)):
        function(rows(*size))
    assert function.summary().num_captures == 3
    with pytest.raises(TypeError):
        taped(weighted, pad=PAD).warm_up(x=rows(1, 2), y=3)


def test_captures_come_from_the_most_memory_down():
    function = taped(weighted, [(1, 8), (4, 16), (2, 8)], pad=PAD)
    function.warm_up(rows(1, 3))
    assert [*function.summary().shapes] == ["4x16", "2x8", "1x8"]


@pytest.mark.filterwarnings("ignore:calls run eagerly")
def test_a_graphed_function_inside_another_is_right():
    inner = taped(lambda x: 2 * x, [(4, 8)])
    outer = taped(lambda x: inner(x) + 1, [(4, 8)])
    for seed in range(3):
        x = rows(4, 8, seed)
        assert torch.equal(outer(x), 2 * x + 1)


def test_several_threads_get_their_own_results():
    net = make_net(width=8)

    function = taped(lambda x, mask: (net(x) * mask[..., None]).sum((1, 2)), pad={"x": 0, "mask": 0})
    calls = [(torch.randn(1 + n % 4, 1 + n % 8, 8), torch.ones(1 + n % 4, 1 + n % 8)) for n in range(24)]
    with torch.no_grad():
        wanted = [net(x).sum((1, 2)) for x, _ in calls]
    wrong = []

    def work(start):
        for number in range(start, len(calls), 4):
            if not torch.allclose(function(*calls[number]), wanted[number], atol=1e-5):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert function.summary().num_replayed == 24


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_graphed_function_stays_in_its_process(make):
    with pytest.raises(TypeError, match="belongs to its process"):
        make(taped(weighted))


def test_a_bert_over_padded_shapes_is_the_bert_itself():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
    )
    model = transformers.BertModel(config).eval()

    def cut(output, shape):
        return output.last_hidden_state[: shape[0], : shape[1]], output.pooler_output[: shape[0]]

    function = taped(model, pad={"input_ids": 0, "attention_mask": 0}, cut=cut)
    for seed, size in enumerate([(3, 5), (4, 8), (1, 1), (2, 13)]):
        ids = torch.randint(1, 50, size, generator=torch.Generator().manual_seed(seed))
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            torch.testing.assert_close(function(**call), cut(model(**call), size), atol=1e-5, rtol=1e-4)
    assert function.summary().num_replayed == 4
