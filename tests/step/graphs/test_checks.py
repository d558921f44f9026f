"""How graphs are checked: out of memory at each stage, losses that write to their batch, checks that say nothing."""

import functools
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchwright.plan import MaxBytes, MemoryModel
from batchwright.plan.models.memory import Terms
from batchwright.step import Stepper

from . import models
from .tape import TapeGraphs
from .twins import SAME, distance, sgd

torch.set_num_threads(1)

SIX = [(num, 6) for num in (4, 6, 8, 10, 12, 14)]
DROPOUT = 0.3


def make_norm():
    """Return a model whose buffers and random numbers show every run that was not put back."""
    return models.seeded(
        lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(DROPOUT), nn.Tanh(), nn.Linear(16, 3))
    )


class Device(TapeGraphs):
    """A device with so many free bytes beside the pool, whose replays may fail or be wrong.

    Args:
        free_bytes: None for no limit; 0 for no room for an eager step.
        fails_at: the replay, counted from 1, after which memory runs out.
        wrong: numbers of captures, from 1, whose loss is 1 higher, or whose gradients are three times as large.
    """

    def __init__(self, *, free_bytes=None, fails_at=None, wrong=()):
        super().__init__()
        self._free_bytes, self._fails_at, self._wrong = free_bytes, fails_at, wrong

    def free_bytes(self):
        return self._free_bytes

    def capture(self, function, *, writes=()):
        replay = super().capture(function, writes=writes)
        is_wrong = self.num_captures in self._wrong

        def run():
            replay()
            if self.num_replays == self._fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            if is_wrong and len(writes) == 1:
                writes[0][0] += 1
            elif is_wrong:
                for tensor in writes:
                    tensor.data.mul_(3)

        return run


def train(
    backend,
    *,
    loss_fn=models.table_loss,
    make=make_norm,
    planned=SIX * 2,
    come=None,
    make_batch=models.tables,
    **options,
):
    """Return the state of a model after its training, the random state, the reports, the warnings and the summary."""
    model = make()
    if backend is not None:
        options.update(graphs=backend, shapes=planned)
    stepper = Stepper(model, sgd(list(model.parameters())), loss_fn, **options)
    torch.manual_seed(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = [stepper.step(make_batch(shape, seed=seed)) for seed, shape in enumerate(come or planned)]
    return types.SimpleNamespace(
        values=[value.detach().float() for value in model.state_dict().values()],
        random=torch.get_rng_state(),
        reports=reports,
        warnings=[str(one.message) for one in caught],
        summary=None if backend is None else stepper.graph_summary(),
    )


def assert_same(found, eager):
    assert distance(found.values, eager.values) <= 10 * SAME
    assert torch.equal(found.random, eager.random)


# Out of memory


def test_out_of_memory_in_a_forward_check_leaves_buffers_and_random_numbers_as_they_were():
    # Otherwise statistics of BatchNorm and draws of dropout would be those of the replays.
    assert_same(train(Device(fails_at=12)), train(None))


@pytest.mark.parametrize("fails_at", range(13, 19))
def test_out_of_memory_in_a_replay_of_two_rows_leaves_buffers_and_random_numbers_as_they_were(fails_at):
    assert_same(train(Device(free_bytes=0, fails_at=fails_at)), train(None))


def test_out_of_memory_in_the_eager_run_of_two_rows_leaves_buffers_and_random_numbers_as_they_were():
    # The likeliest place: memory is short, and this is the only eager run beside the pool.
    seen = types.ModuleType("seen")  # whose variables are not looked at
    seen.num = 0

    def loss_fn(model, batch):
        scores = model(batch["x"])
        seen.num += len(scores) == 2
        if len(scores) == 2 and seen.num == 3:  # before the capture, in it, and beside it
            raise torch.OutOfMemoryError("CUDA out of memory")
        return models.row_loss(scores, batch)

    found = train(Device(free_bytes=0), loss_fn=loss_fn)
    assert seen.num == 3
    assert_same(found, train(None))


# Graphs that are known to be wrong


def test_where_memory_is_short_a_graph_whose_forward_pass_gave_other_numbers_is_not_used():
    # Captures 1 and 2 are those of 14 rows; that two rows agree says nothing about them.
    assert_same(train(Device(free_bytes=0, wrong=(1, 2))), train(None))


def test_where_memory_is_short_a_rare_shape_whose_forward_pass_gave_other_numbers_is_not_used():
    planned = [(4, 6), (8, 6)] * 3 + [(12, 6)]
    come = [(4, 6), (8, 6), (4, 6), (12, 6), (12, 6), (4, 6), (12, 6)]
    # 1 to 4: the catalogue. 5 and 6: two rows. 7: the update. 8 and 9: the rare shape.
    options = {"planned": planned, "come": come, "make": models.make_mlp}
    assert_same(train(Device(free_bytes=0, wrong=(8, 9)), **options), train(None, **options))


def test_where_two_rows_differ_the_warning_says_so():
    found = train(Device(free_bytes=0, wrong=range(1, 99)))
    assert any("other results" in message for message in found.warnings), found.warnings


# Losses that write to their batch


def labels_from_one(shape, seed=0):
    batch = models.tables(shape, seed=seed)
    return {**batch, "labels": batch["labels"] + 1}


def from_zero(model, batch):
    batch["labels"].sub_(1)
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum"), len(batch["x"])


def test_a_loss_that_shifts_its_labels_in_place_is_captured_as_ever():
    # A second replay of the same inputs would see labels of -1; on CUDA that ends the process.
    found = train(Device(), loss_fn=from_zero, make_batch=labels_from_one)
    assert found.warnings == []
    assert found.reports[-1].graphed


def test_a_forward_check_that_fails_leaves_buffers_and_random_numbers_as_they_were():
    found = train(Device(), loss_fn=from_zero, make_batch=labels_from_one)
    assert_same(found, train(None, loss_fn=from_zero, make_batch=labels_from_one))


def halved(model, batch):
    batch["x"].mul_(0.1)
    batch["row_weight"].mul_(0.5)
    return models.table_loss(model, batch)


def test_a_wrong_graph_of_a_loss_that_writes_to_its_batch_is_found():
    # If the second replay ran on inputs that the first has changed, their distance would be taken for dropout.
    make = models.make_mlp
    found = train(Device(wrong=(1, 2)), loss_fn=halved, make=make)
    assert_same(found, train(None, loss_fn=halved, make=make))


def grown(model, batch):
    batch["x"].exp_()
    return models.table_loss(model, batch)


def test_two_rows_are_not_compared_on_inputs_that_the_checks_have_spoiled():
    # Every graph is wrong. On inputs of exp(exp(exp(x))) both sides would be infinite, and count as alike.
    make = models.make_mlp
    wrong = [number for number in range(1, 99) if number != 15]  # not the update
    found = train(Device(free_bytes=0, wrong=wrong), loss_fn=grown, make=make)
    assert_same(found, train(None, loss_fn=grown, make=make))


# Checks that say nothing


def late_labels(shape, seed=0):
    """Return labels of which only the last columns count, as those of an answer after a prompt."""
    rows, width = shape
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (rows, width), generator=generator)
    labels[:, : width - 3] = models.IGNORED
    return {"x": torch.randn(rows, width, generator=generator), "labels": labels}


def column_loss(model, batch):
    return models.token_loss(model(batch["x"][..., None]), batch["labels"])


def test_a_forward_check_in_which_nothing_counts_is_no_check():
    # Narrow shapes are made of the first columns of a wide batch: no label counts, and the loss is 0.
    # Such a check shows nothing, so the graph is compared on a batch that comes.
    planned = [(4, width) for width in (40, 36, 32, 28, 24, 10)]

    class Wrong(Device):
        """Losses and gradients of the narrowest shape are three times as large."""

        def capture(self, function, *, writes=()):
            replay, is_wrong = TapeGraphs.capture(self, function, writes=writes), self.num_captures in (11, 12)

            def run():
                replay()
                if is_wrong:
                    (writes[0][:1] if len(writes) == 1 else torch.zeros(1)).mul_(3)
                    for tensor in writes if len(writes) > 1 else ():
                        tensor.mul_(3)

            return run

    def make():
        return models.seeded(lambda: nn.Linear(1, 3))

    options = {"loss_fn": column_loss, "make": make, "planned": planned * 2, "make_batch": late_labels}
    assert_same(train(Wrong(), **options), train(None, **options))


# Tables that a backward pass keeps


@functools.lru_cache
def table_of(key):
    return torch.linspace(1, 2, 3) * key


class Weighted(torch.autograd.Function):
    """Weights gradients with a table that is kept per kind of shape."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * table_of(gradient.shape[0] // 4)


def weighted_loss(model, batch):
    return models.row_loss(Weighted.apply(model(batch["x"])), batch)


@pytest.mark.parametrize("free_bytes", [None, 0])
def test_a_table_that_the_backward_pass_keeps_is_made_by_an_eager_run(free_bytes):
    # 10 and 8 rows share a table; the capture of 10 makes it, and 8 rows come first.
    # If only forward passes ran ahead of the captures, the replay of 8 rows would read a table without values.
    come = [(rows, 6) for rows in (4, 6, 12, 14, 4, 8, 10, 8, 10)]
    options = {"loss_fn": weighted_loss, "make": models.make_mlp, "planned": SIX * 2, "come": come}
    table_of.cache_clear()
    device = Device(free_bytes=free_bytes)
    device.spoiled = 7.0
    found = train(device, **options)
    table_of.cache_clear()
    assert_same(found, train(None, **options))


# Budgets in bytes


class Measuring(TapeGraphs):
    """A device on which a step takes what the loss notes; the forward passes that were captured are listed."""

    def __init__(self, noted):
        super().__init__()
        self._noted, self.captured = noted, []

    def measure(self, function):
        function()
        return self._noted.bytes

    def capture(self, function, *, writes=()):
        replay = super().capture(function, writes=writes)
        if len(writes) == 1:
            self.captured.append(self._noted.bytes)
        return replay


def bytes_budget(max_bytes):
    model = MemoryModel(Terms(1, (0.0, 0.0, 1.0, 0.0)), margin=0.005)
    return {"micro_batch": MaxBytes(model, max_bytes), "lengths": lambda batch: [6] * len(batch["x"])}


def train_rows(max_bytes, planned, come):
    noted = types.ModuleType("noted")

    def loss_fn(model, batch):
        noted.bytes = 100 * len(batch["x"])
        return models.table_loss(model, batch)

    backend = Measuring(noted)
    return train(backend, loss_fn=loss_fn, make=models.make_mlp, planned=planned, come=come, **bytes_budget(max_bytes))


def test_a_shape_beyond_a_budget_in_bytes_costs_smaller_ones_no_graph():
    # A shape of 12 rows is rare and runs eagerly, 1,200 bytes. Beside it 8 rows do not fit into 1,900, but 6 and 4 do.
    planned = [(4, 6), (6, 6), (8, 6)] * 3 + [(12, 6)]
    found = train_rows(1900, planned, [(4, 6), (6, 6), (8, 6), (4, 6), (6, 6)] * 3)
    assert list(found.summary.shapes) == ["6x6 6", "4x6 4"]


def test_the_predicted_bytes_are_those_of_a_shape_that_was_captured():
    found = train_rows(1399, SIX * 2, SIX * 3)
    assert (len(found.summary.shapes), found.summary.predicted_pool_bytes) == (5, 1200)


def test_a_shape_with_fewer_elements_that_takes_more_memory_stays_inside_a_budget_in_bytes():
    # It comes later, and takes 480 bytes.
    noted = types.ModuleType("noted")

    def loss_fn(model, batch):
        noted.bytes = 10 * batch["y"].numel()  # the decoder takes the memory
        return (model(batch["x"][..., None]).mean(1) - batch["y"].mean(1, keepdim=True)).square().sum(), len(batch["x"])

    def pairs(shape, seed=0):
        generator = torch.Generator().manual_seed(seed)
        rows, source, target = shape
        return {
            "x": torch.randn(rows, source, generator=generator),
            "y": torch.randn(rows, target, generator=generator),
        }

    backend, planned = Measuring(noted), [(4, 9, 9), (4, 5, 12)]
    # Two batches of 9 and 9 do not tell which length is which, so the other shape is captured when it comes.
    train(
        backend, loss_fn=loss_fn, make=lambda: models.seeded(lambda: nn.Linear(1, 1)), planned=planned * 3,
        come=[(4, 9, 9), (4, 9, 9), (4, 5, 12), (4, 9, 9), (4, 5, 12)], make_batch=pairs, **bytes_budget(400),
    )  # fmt: skip
    assert max(backend.captured) <= 400


class Tables(nn.Module):
    """Keeps a table for each number of rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.tables = {}

    def forward(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.full((1,), 1.5)
        return self.layer(x) * self.tables[len(x)]


def test_a_made_up_batch_that_the_loss_refuses_takes_nothing_from_the_other_shapes():
    # The smallest shape runs ahead as the last one; the tables of the others must still be there at their captures.
    def picky(model, batch):
        if len(batch["x"]) == 4:
            raise ValueError("too few rows")
        return models.row_loss(model(batch["x"]), batch)

    options = {"loss_fn": picky, "make": lambda: models.seeded(Tables), "planned": SIX * 2, "come": SIX[1:] * 2}
    found = train(TapeGraphs(), **options)
    assert found.warnings == []
    assert found.reports[-1].graphed
    assert_same(found, train(None, **options))
