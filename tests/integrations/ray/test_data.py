"""Data sets in planned batches: windows, columns of lengths, and Ray's own workers."""

import importlib.util
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import ArgumentError, BudgetError, LengthsError
from batchwright.integrations.ray import PlannedDataset, plan_dataset
from batchwright.integrations.ray.data import WindowPlanner
from batchwright.plan._settings import PlanSettings

# Ray Data sets its own deprecated options.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")

# Ray Data needs both; they come with ray[data].
needs_data = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("pandas", "pyarrow")), reason="ray.data is not installed"
)

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=200)


@given(LENGTHS, st.integers(50, 500), st.booleans())
def test_a_window_is_planned_within_the_budget_and_every_row_once(lengths, limit, shuffle):
    window = {"id": np.arange(len(lengths)), "length": np.array(lengths)}
    batches = list(WindowPlanner("length", bw.MaxTokens(limit), PlanSettings(shuffle=shuffle, balance_over=1))(window))
    assert sorted(np.concatenate([batch["id"] for batch in batches])) == list(range(len(lengths)))
    assert all(len(batch["id"]) * batch["length"].max() <= limit for batch in batches)
    assert all((window["length"][batch["id"]] == batch["length"]).all() for batch in batches)


def test_a_window_without_a_row_that_fits_has_no_batch():
    planner = WindowPlanner("length", bw.MaxTokens(5), PlanSettings(oversize="drop", balance_over=1))
    assert list(planner({"length": np.array([6, 7])})) == []


@pytest.mark.parametrize(
    ("length_of", "words"),
    [("tokens", "no column 'tokens'; the columns are text"), ("text", "neither integers nor lists")],
)
def test_a_column_without_lengths_is_refused(length_of, words):
    with pytest.raises(LengthsError, match=words):
        list(WindowPlanner(length_of, bw.MaxItems(2), PlanSettings(balance_over=1))({"text": np.array(["a", "b"])}))


class Shard:
    """What the planner asks of a shard of Ray Train: windows of columns."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)

    def iter_batches(self, *, batch_size, batch_format, prefetch_batches):
        assert batch_format == "numpy"
        for start in range(0, len(self.lengths), batch_size):
            yield {"length": self.lengths[start : start + batch_size]}


def test_another_epoch_shuffles_differently_and_the_same_one_alike():
    planned = plan_dataset(Shard(range(1, 101)), bw.MaxTokens(300), length_of="length", buffer_size=50)
    passes = [[batch["length"].tolist() for batch in planned.iter_batches(epoch=epoch)] for epoch in (0, 0, 1)]
    assert passes[0] == passes[1] != passes[2]
    assert [sorted(chain(*batches)) for batches in passes] == [list(range(1, 101))] * 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grouping": bw.Packed(capacity=8)}, "joins rows"),
        ({"oversize": "truncate"}, "cut them before"),
        ({"length_of": ()}, "length_of must be"),
        ({"buffer_size": 0}, "buffer_size must be"),
    ],
)
def test_what_columns_cannot_do_is_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        plan_dataset(Shard([1]), bw.MaxItems(2), **{"length_of": "length", **options})


def test_a_list_is_not_a_dataset_and_a_shard_cannot_be_mapped():
    with pytest.raises(ArgumentError, match="got list"):
        plan_dataset([1, 2], bw.MaxItems(2), length_of="length")
    with pytest.raises(ArgumentError, match="Shard cannot be mapped"):
        plan_dataset(Shard([1]), bw.MaxItems(2), length_of="length").map_batches(dict)


@pytest.fixture(scope="module")
def dataset(address):
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    lengths = np.random.default_rng(0).integers(1, 40, size=300)
    rows = [{"id": index, "ids": np.arange(length)} for index, length in enumerate(lengths.tolist())]
    return ray.data.from_items(rows, override_num_blocks=4)


def plan_of(dataset) -> PlannedDataset:
    return plan_dataset(dataset, bw.MaxTokens(200), length_of="ids", buffer_size=64)


@needs_data
def test_every_row_of_a_dataset_comes_once_within_the_budget(dataset):
    batches = list(plan_of(dataset).iter_batches())
    assert sorted(np.concatenate([batch["id"] for batch in batches])) == list(range(300))
    assert max(len(batch["ids"]) * max(map(len, batch["ids"])) for batch in batches) <= 200


@needs_data
def test_planned_batches_reach_the_workers_whole(dataset):
    def measure(batch, times):
        longest = max(map(len, batch["ids"]))
        return {"id": batch["id"], "tokens": np.full(len(batch["id"]), times * len(batch["id"]) * longest)}

    rows = plan_of(dataset).map_batches(measure, fn_args=(2,)).take_all()
    assert sorted(row["id"] for row in rows) == list(range(300))
    assert 200 < max(row["tokens"] for row in rows) <= 400  # twice the padded tokens of a batch


@needs_data
def test_a_class_is_made_once_per_actor_and_may_yield(dataset):
    class Halves:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, batch):
            ids = batch["id"] * self.factor
            yield {"id": ids[:1]}
            yield {"id": ids[1:]}

    mapped = plan_of(dataset).map_batches(Halves, fn_constructor_args=(10,), concurrency=1)
    assert sorted(row["id"] for row in mapped.take_all()) == list(range(0, 3000, 10))


@needs_data
def test_the_size_of_a_batch_is_the_budgets_and_a_row_over_it_an_error(dataset):
    with pytest.raises(ArgumentError, match="batch_size cannot be given"):
        plan_of(dataset).map_batches(dict, batch_size=8)
    with pytest.raises(BudgetError, match="over MaxTokens"):
        list(plan_dataset(dataset, bw.MaxTokens(10), length_of=lambda row: len(row["ids"])))
