"""What cannot be captured trains eagerly: one warning says why, and every number is that of the eager stepper."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import Stepper
from batchwright.testing import EagerGraphs

from . import models
from .tape import TapeGraphs
from .twins import BACKENDS, Twins, sgd

torch.set_num_threads(1)
SHAPE = (4, 6)


class Layered(nn.Module):
    """Two layers, and something between them that no graph can hold."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 3)

    def between(self, hidden):
        return hidden

    def forward(self, x):
        return self.second(self.between(self.first(x)))


class ReadsAValue(Layered):
    def between(self, hidden):
        return hidden / (1 + hidden.detach().abs().max().item())


class Masks(Layered):
    """The number of positive activations decides the shape of a tensor."""

    def between(self, hidden):
        return hidden * hidden[hidden > 0].mean()


class DrawsFromPython(Layered):
    def between(self, hidden):
        return hidden * random.random()


class DrawsFromNumPy(Layered):
    def between(self, hidden):
        return hidden * np.random.rand()


class DrawsFromTorch(Layered):
    def between(self, hidden):
        return hidden * float(torch.rand([]))


class DrawsFromItsOwn(Layered):
    def __init__(self):
        super().__init__()
        self.chance = random.Random(3)

    def between(self, hidden):
        return hidden * self.chance.random()


class DrawsRarely(Layered):
    """Drops its activations once in fifty passes: a few trials may well not see it."""

    def between(self, hidden):
        return hidden * 0 if torch.rand([]) < 0.02 else hidden


class Counts(Layered):
    """Warms up over its first passes, by a counter of its own."""

    def __init__(self):
        super().__init__()
        self.passes = 0

    def between(self, hidden):
        self.passes += 1
        return hidden * min(1.0, self.passes / 5)


class KeepsAList(Layered):
    def __init__(self):
        super().__init__()
        self.seen = []

    def between(self, hidden):
        self.seen.append(len(hidden))
        return hidden * min(1.0, len(self.seen) / 5)


class NewBuffer(Layered):
    """Puts another tensor in place of its buffer, instead of writing to it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def between(self, hidden):
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(dim=0)
        return hidden - self.mean


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 3, sparse=True)

    def forward(self, x):
        return self.embed(x.long().clamp(0, 22)).mean(dim=1)


def hooked(kind):
    model = Layered()
    if kind == "forward":
        model.first.register_forward_hook(lambda module, inputs, output: output * 2)
    else:
        model.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    return model


# What cannot be captured, on which backends it is noticed, and a word of the reason.
# "again" runs the function again, so what only waits for the device is right there, captured or not. For a model on the
# CPU torch's generator is that of the device, from which replays draw anew; only for one on CUDA it is the host's.
_EVERYWHERE, _BLIND, _CUDA = ("again", "tape", "cuda"), ("tape", "cuda"), ("cuda",)
_CASES = {
    "item": (ReadsAValue, _BLIND, "."),
    "mask": (Masks, _BLIND, "."),
    "random": (DrawsFromPython, _EVERYWHERE, "random"),
    "numpy": (DrawsFromNumPy, _EVERYWHERE, "NumPy"),
    "torch": (DrawsFromTorch, _CUDA, "generator"),
    "own-generator": (DrawsFromItsOwn, _EVERYWHERE, "chance"),
    "rarely": (DrawsRarely, _CUDA, "generator"),
    "counter": (Counts, _EVERYWHERE, "passes"),
    "list": (KeepsAList, _EVERYWHERE, "."),
    "new-buffer": (NewBuffer, _EVERYWHERE, "mean"),
    "forward-hook": (lambda: hooked("forward"), _EVERYWHERE, "hook"),
    "backward-hook": (lambda: hooked("backward"), _EVERYWHERE, "hook"),
}


def seed_everything():
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)


def run_both(twins, batches):
    """Train one side after the other, each with the same draws; return the warnings of the graphed one."""
    seen = []
    for side in twins.sides:
        seed_everything()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in batches:
                side.report = side.stepper.step(twins.here(batch))
        seen.append([str(warning.message) for warning in caught])
    assert seen[0] == []
    return seen[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", _CASES)
def test_what_no_graph_can_hold_runs_eagerly_with_one_warning(case, backend):
    make, backends, word = _CASES[case]
    if backend == "tape" and backends == _CUDA:
        pytest.skip("a tape on the CPU cannot tell the generator of the host from that of the device")
    twins = Twins(backend, models.seeded(make), models.table_loss, [SHAPE])
    messages = run_both(twins, [models.tables(SHAPE, seed=seed) for seed in range(8)])
    twins.check()
    if backend in backends:
        assert not twins.graphed.report.graphed
        assert len(messages) == 1, messages
        assert "eager" in messages[0]
        assert word == "." or word in messages[0]
        assert sum(twins.graphed.stepper.graph_summary().reasons.values()) > 0
    assert len(messages) <= 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_gradients_run_eagerly(backend):
    twins = Twins(
        backend, models.seeded(Sparse), models.table_loss, [SHAPE],
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    messages = run_both(twins, [models.tables(SHAPE, seed=seed) for seed in range(4)])
    twins.check()
    assert not twins.graphed.report.graphed
    assert len(messages) == 1
    assert "sparse" in messages[0]


@pytest.mark.parametrize("backend", ["again", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
@pytest.mark.parametrize("layerdrop", [0.5, 0.05])
def test_layer_drop_drops_as_the_eager_stepper_does(layerdrop, backend):
    """On CUDA it is refused; on the CPU the stand-in runs the function again, so every replay drops anew."""
    twins = Twins(
        backend, models.make_m2m100(layerdrop=layerdrop), models.pair_loss, [(4, 12, 9)],
        make_optimizer=lambda parameters: sgd(parameters, momentum=0.0),
    )  # fmt: skip
    messages = run_both(twins, [models.pairs((4, 12, 9), seed=seed) for seed in range(12)])
    twins.check()
    if backend == "cuda":
        assert not twins.graphed.report.graphed
        assert len(messages) == 1
        assert "generator" in messages[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["m2m100", "wav2vec2"])
def test_a_draw_that_decides_nothing_is_no_obstacle(name, backend):
    """Both draw a number for every layer, though they are built to drop none."""
    one = models.BY_NAME[name]
    twins = Twins.of(backend, name)
    assert run_both(twins, [one.make_batch(one.shapes[0], seed=seed) for seed in range(4)]) == []
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_validation_that_collects_hidden_states_is_no_obstacle(backend):
    """Models of transformers then keep hooks of their own for ever, which do nothing unless somebody collects."""
    one = models.BY_NAME["llama"]
    twins = Twins.of(backend, "llama")
    for seed in range(8):
        twins.step(one.make_batch(one.shapes[0], seed=seed))
        if seed == 3:
            batch = twins.here(one.make_batch(one.shapes[0], seed=seed))
            with torch.no_grad():
                twins.each(lambda side, ids=batch["input_ids"]: side.model(ids, output_hidden_states=True))
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_that_numpy_draws_run_eagerly(backend):
    twins = Twins(backend, models.make_wav2vec2(mask_time_prob=0.5), models.sound_loss, [(4, 60)])
    messages = run_both(twins, [models.sounds((4, 60), seed=seed) for seed in range(6)])
    twins.check()
    assert not twins.graphed.report.graphed
    assert len(messages) == 1
    assert "NumPy" in messages[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_shape_that_cannot_be_captured_is_said_once(backend):
    def loss_fn(model, batch):
        scale = random.random() if batch["x"].shape[0] == 8 else 1.0
        loss, weight = models.table_loss(model, batch)
        return loss * scale, weight

    twins = Twins(backend, models.make_mlp(), loss_fn, [SHAPE, (8, 6)])
    batches = [models.tables((4 + 4 * (seed % 2), 6), seed=seed) for seed in range(9)]
    messages = run_both(twins, batches)
    twins.check()
    assert len(messages) == 1


def counts_rows(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["labels"].clamp(min=0), reduction="sum"), len(logits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_counts_filler_gets_the_real_rows_only(backend):
    """It returns the number of rows as its weight, so filler would count: short batches run eagerly, without it."""
    twins = Twins(backend, models.make_mlp(), counts_rows, [(8, 6)])
    graphed = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for num_real in (8, 8, 8, 5, 8, 3, 7):
            batch = models.tables((8, 6), seed=num_real)
            report = twins.step(models.filled(batch, num_real), eager_batch=models.rows_of(batch, num_real))
            graphed.append(report.graphed)
            assert (report.batch_size, report.weight) == (num_real, num_real)
    twins.check(1e-5)
    assert graphed[2:] == [True, False, True, False, False]
    messages = [str(one.message) for one in caught]
    assert len(messages) == 1
    assert "row_weight" in messages[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_counts_filler_in_the_loss_alone_is_found_out(backend):
    """The weight is right, but the sum is not multiplied with it."""

    def loss_fn(model, batch):
        return counts_rows(model, batch)[0], batch[models.ROW_WEIGHT].sum()

    twins = Twins(backend, models.make_mlp(), loss_fn, [(8, 6)])
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for num_real in (8, 8, 8, 5, 3, 7):
            batch = models.tables((8, 6), seed=num_real)
            report = twins.step(models.filled(batch, num_real), eager_batch=models.rows_of(batch, num_real))
            assert report.weight == num_real
    twins.check(1e-5)


def make_stepper(model=None, loss_fn=models.table_loss, **options):
    model = models.make_mlp() if model is None else model
    return Stepper(model, sgd(model.parameters()), loss_fn, **options)


def test_graphs_on_the_cpu_say_that_they_need_cuda():
    """By a refusal or by a warning, which is an error in these tests."""

    def run():
        make_stepper(graphs=True, shapes=[SHAPE]).step(models.tables(SHAPE))

    with pytest.raises((ArgumentError, UserWarning), match="CUDA"):
        run()


def test_auto_on_the_cpu_runs_eagerly_without_a_word():
    stepper = make_stepper(graphs="auto", shapes=[SHAPE])
    assert not any(stepper.step(models.tables(SHAPE, seed=seed)).graphed for seed in range(3))


def test_without_graphs_nothing_is_graphed_and_the_summary_is_empty():
    stepper = make_stepper()
    assert stepper.step(models.tables(SHAPE)).graphed is False
    summary = stepper.graph_summary()
    assert (summary.hit_rate, summary.pool_bytes, len(summary.shapes)) == (0, 0, 0)
    assert str(summary)


@pytest.mark.parametrize("graphs", ["yes", "Auto", 1, 0, None, 2.0, [], EagerGraphs], ids=repr)
def test_graphs_must_be_one_of_the_settings(graphs):
    with pytest.raises(ArgumentError, match="graphs"):
        make_stepper(graphs=graphs, shapes=[SHAPE])


@pytest.mark.parametrize(
    "shapes",
    [[], [(4, 6.5)], [(0, 6)], [(4, -1)], [4, 6], "abc", [(4, 6), (4,)], np.zeros((2, 2)), 7, [("a", "b")]],
    ids=str,
)
def test_shapes_must_be_rows_of_whole_numbers(shapes):
    with pytest.raises(ArgumentError, match="shapes"):
        make_stepper(graphs=EagerGraphs(), shapes=shapes)


def test_shapes_without_graphs_are_checked_too():
    with pytest.raises(ArgumentError, match="shapes"):
        make_stepper(shapes=[(4, 0)])


def test_shapes_may_be_an_array_of_a_plan_with_repeats():
    stepper = make_stepper(graphs=EagerGraphs(), shapes=np.array([[4, 6]] * 5 + [[8, 6]]))
    for seed in range(3):
        report = stepper.step(models.tables(SHAPE, seed=seed))
    assert report.graphed
    assert not stepper.step(models.tables((3, 6))).graphed


def test_shapes_may_be_a_sampler():
    lengths = [6] * 24
    sampler = bw.BatchSampler(lengths, bw.MaxItems(4), shuffle=False)
    stepper = make_stepper(graphs=EagerGraphs(), shapes=sampler)
    for seed in range(3):
        report = stepper.step(models.tables(SHAPE, seed=seed))
    assert report.graphed


def test_a_batch_of_more_axes_than_the_shapes_runs_eagerly_or_is_captured_but_is_right():
    twins = Twins("tape", models.make_m2m100(), models.pair_loss, [(4, 12)])
    for seed in range(5):
        twins.step(models.pairs((4, 12, 5 + seed % 3), seed=seed))
    twins.check()


def test_the_summary_counts_shapes_hits_and_bytes():
    twins = Twins.of("tape", "llama")
    one = models.BY_NAME["llama"]
    for seed in range(12):
        twins.step(one.make_batch(one.shapes[seed % 2], seed=seed))
    for seed in range(3):
        twins.step(one.make_batch(one.unplanned, seed=seed))
    summary = twins.graphed.stepper.graph_summary()
    assert len(summary.shapes) == 2
    assert 0.5 < summary.hit_rate <= 12 / 15
    assert summary.pool_bytes > 0
    assert summary.capture_seconds > 0
    assert summary.reasons
    text = str(summary)
    assert "\n" in text
    assert f"{summary.hit_rate:.0%}"[:1] in text


def test_the_catalogue_is_captured_once_and_not_at_every_step():
    twins = Twins.of("tape", "llama")
    one = models.BY_NAME["llama"]
    for seed in range(6):
        twins.step(one.make_batch(one.shapes[seed % 2], seed=seed))
    num = twins.backend.num_captures
    for seed in range(6, 20):
        assert twins.step(one.make_batch(one.shapes[seed % 2], seed=seed)).graphed
    assert twins.backend.num_captures == num


def test_out_of_memory_while_a_graph_is_captured_loses_nothing():
    """The second capture runs out; training goes on with what there is, or eagerly, and no step is lost."""

    class Full(TapeGraphs):
        def capture(self, function, *, writes=()):
            if self.num_captures >= self.room:
                self.num_captures += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().capture(function, writes=writes)

    for room in range(4):
        twins = Twins.of("tape", "llama")
        backend = Full()
        backend.room = room
        model = twins.graphed.model
        twins.graphed.stepper = Stepper(
            model, twins.graphed.optimizer, models.text_loss, graphs=backend, shapes=models.BY_NAME["llama"].shapes
        )
        one = models.BY_NAME["llama"]
        messages = run_both(twins, [one.make_batch(one.shapes[seed % 2], seed=seed) for seed in range(6)])
        twins.check()
        assert twins.graphed.report.ooms == 0
        assert len(messages) <= 1
        assert all("memory" in message for message in messages)


def test_out_of_memory_of_an_unplanned_batch_is_split_as_ever():
    def loss_fn(model, batch):
        if len(batch["x"]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return models.table_loss(model, batch)

    twins = Twins("tape", models.make_mlp(), loss_fn, [SHAPE])
    for seed in range(6):
        twins.step(models.tables((4 + 4 * (seed % 2), 6), seed=seed))
    twins.check()
    assert twins.eager.stepper.state_dict() == twins.graphed.stepper.state_dict()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", [False, True])
def test_a_field_that_only_some_batches_have_is_used_where_it_is(first, backend):
    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        return (loss * batch["scale"].mean() if "scale" in batch else loss), weight

    twins = Twins(backend, models.make_mlp(), loss_fn, [SHAPE])
    for seed in range(12):
        batch = models.tables(SHAPE, seed=seed)
        twins.step({**batch, "scale": torch.full((4,), 3.0 + seed)} if (seed // 3) % 2 == first else batch)
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_value_in_a_batch_is_not_frozen(backend):
    """Batches may hold numbers of Python, such as the switch ``use_cache`` of transformers."""

    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        return loss * batch["scale"], weight

    twins = Twins(backend, models.make_mlp(), loss_fn, [SHAPE])
    for seed in range(10):
        batch = twins.here(models.tables(SHAPE, seed=seed))
        for side in twins.sides:
            side.report = side.stepper.step({**batch, "scale": 1.0 + seed % 2})
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_fails_in_one_batch_raises_and_the_next_batch_trains(backend):
    """The labels of a bad batch are refused on the host, before anything runs on the device."""
    twins = Twins(backend, models.make_mlp(), models.table_loss, [SHAPE])
    for seed in range(3):
        twins.step(models.tables(SHAPE, seed=seed))
    for side in twins.sides:
        bad = twins.here(models.tables(SHAPE, seed=9))
        del bad["labels"]
        with pytest.raises(KeyError, match="labels"):
            side.stepper.step(bad)
    twins.step(models.tables(SHAPE, seed=4))
    twins.check()
