"""torch.compile over planned batches, with the real compiler; back ends that only trace keep the tests short."""

import shutil
import subprocess
import sys
from collections import namedtuple
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import CompileCounter, MarkShapes, PadCollator, Stepper
from batchwright.step.compiling import num_compilations

LIMIT = 8  # torch's own, unless it is changed
IS_OLD = not hasattr(torch._dynamo.config, "recompile_limit")  # torch 2.6 has other names
LIMIT_NAME = "cache_size_limit" if IS_OLD else "recompile_limit"
FAILS_AT_LIMIT = "fail_on_cache_limit_hit" if IS_OLD else "fail_on_recompile_limit_hit"
# Two full shapes, with one rest each.
FEW = [[8, 16], [4, 32], [3, 32], [5, 16]]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Tagger(nn.Module):
    """One attention layer over tokens, as small as possible."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(20, 12)
        self.layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 20)

    def forward(self, input_ids, attention_mask):
        return self.head(self.layer(self.tokens(input_ids), src_key_padding_mask=attention_mask == 0))


def lengths_of_texts(num, longest=40):
    return np.clip(np.random.default_rng(0).lognormal(2.2, 0.7, num), 2, longest).astype(int)


def batches_of(sampler, lengths):
    collate = PadCollator(pad_to=sampler.pad_to)
    return [collate([{"input_ids": [1] * lengths[index]} for index in batch]) for batch in sampler]


def compilations(batches, mark, backend="eager", **options):
    """Return how many compilations each batch took, forward and backward, and the sum of all outputs."""
    model = torch.compile(Tagger(), backend=backend, **options)
    counts, total = [], 0.0
    for batch in batches:
        counter = CompileCounter()
        out = model(**mark({name: tensor.clone() for name, tensor in batch.items()})).square().sum()
        out.backward()
        counts.append(counter.num)
        total += out.item()
    return counts, total


def unmarked(batch):
    return batch


def static_of(tensor):
    return getattr(tensor, "_dynamo_static_indices", set())


def dynamic_of(tensor):
    return getattr(tensor, "_dynamo_weak_dynamic_indices", set())


# Which sizes are static


def test_few_shapes_are_static_in_every_size():
    mark = MarkShapes(FEW)
    assert (mark.are_rows_static, mark.are_lengths_static, mark.num_expected) == (True, True, 4)
    assert repr(mark) == "MarkShapes(static rows, static lengths, 4 compilations expected)"


def test_few_lengths_with_many_rests_keep_static_lengths():
    # Two lengths, each with 2 to 11 rows: 20 shapes.
    mark = MarkShapes([[rows, length] for rows in range(2, 12) for length in (16, 32)])
    assert (mark.are_rows_static, mark.are_lengths_static, mark.num_expected) == (False, True, 2)


def test_a_single_row_costs_a_compilation_for_each_static_length():
    mark = MarkShapes([[rows, length] for rows in range(1, 11) for length in (16, 32)])
    assert (mark.are_rows_static, mark.are_lengths_static, mark.num_expected) == (False, True, 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_rows", [3, 12])
def test_a_plan_with_batches_of_one_row_does_not_run_into_the_limit_of_torch(num_rows):
    # Six lengths would take 12 compilations, as torch compiles a single row apart.
    shapes = [(rows, length) for rows in (3, 1, *range(5, num_rows + 3)) for length in (8, 16, 24, 32, 40, 48)]
    mark, counter, layer = MarkShapes(shapes), CompileCounter(), nn.Linear(7, 5)
    table, seen = nn.Embedding(10, 7), []

    def forward(ids):
        if not torch.compiler.is_compiling():
            seen.append(tuple(ids.shape))  # ran eagerly
        return layer(table(ids)).sum()

    compiled = torch.compile(forward, backend="eager")
    for shape in shapes:
        compiled(mark(torch.ones(shape, dtype=torch.long)))
    assert seen == []
    assert not mark.are_lengths_static
    assert counter.num <= mark.num_expected + 1


def test_a_fixed_number_of_rows_stays_static_beside_many_lengths():
    plan = bw.plan_batches(range(10, 110), bw.MaxItems(4))
    mark = MarkShapes(plan)
    assert len(np.unique(plan.shapes[:, 1])) > LIMIT
    assert (mark.are_rows_static, mark.are_lengths_static, mark.num_expected) == (True, False, 1)


def test_many_shapes_are_dynamic_in_every_size():
    mark = MarkShapes([[rows, 100 - rows] for rows in range(2, LIMIT + 3)])
    assert (mark.are_rows_static, mark.are_lengths_static, mark.num_expected) == (False, False, 1)
    assert MarkShapes([[rows, 100 - rows] for rows in range(1, LIMIT + 3)]).num_expected == 2


def test_the_limit_of_torch_is_the_default_and_the_most():
    nine = [[rows, 64] for rows in range(1, LIMIT + 2)]
    assert not MarkShapes(nine).are_rows_static
    assert MarkShapes(nine[:-1]).are_rows_static
    with torch._dynamo.config.patch({LIMIT_NAME: 9}):
        assert MarkShapes(nine).are_rows_static
        assert not MarkShapes(nine, max_compilations=8).are_rows_static
    with pytest.raises(
        ArgumentError,
        match=rf"at most torch's own limit of 8, got 9; .* so set torch._dynamo.config.{LIMIT_NAME} = 9 first",
    ):
        MarkShapes(nine, max_compilations=9)


@given(
    st.integers(1, 3).flatmap(
        lambda axes: st.lists(st.lists(st.integers(1, 30), min_size=1 + axes, max_size=1 + axes), min_size=1)
    ),
    st.integers(1, LIMIT),
)
def test_static_sizes_never_ask_for_more_than_the_limit(shapes, most):
    mark = MarkShapes(shapes, max_compilations=most)
    ones = [[size == 1 for size in row] for row in shapes]
    kept = {
        (
            row[0] if mark.are_rows_static else one[0],
            tuple(row[1:]) if mark.are_lengths_static else tuple(one[1:]),
        )
        for row, one in zip(shapes, ones, strict=True)
    }
    assert len(kept) == mark.num_expected
    assert len(kept) <= most or not (mark.are_rows_static or mark.are_lengths_static)


# Where shapes come from


def test_a_sampler_its_plan_and_its_shapes_say_the_same():
    lengths = lengths_of_texts(60)
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(128), grouping=bw.Buckets(3))
    texts = {repr(MarkShapes(source)) for source in (sampler, sampler.plan, sampler.plan.shapes)}
    assert len(texts) == 1


def test_tables_have_rows_only():
    mark = MarkShapes([[32], [5]])
    assert (mark.are_rows_static, mark.num_expected) == (True, 2)
    assert static_of(mark(torch.zeros(32, 5))) == {0}


def test_a_catalogue_gives_its_full_shapes():
    mark = MarkShapes(bw.PadTo(shapes=((16,), (32,)), sizes=(8, 4)))
    assert mark.num_expected == 2
    batch = mark({"x": torch.zeros(4, 32), "short": torch.zeros(4, 16)})
    assert [static_of(tensor) for tensor in batch.values()] == [{0, 1}, {0, 1}]


def test_a_resizable_sampler_gives_the_catalogue_of_its_grouping():
    controller = bw.BatchSizeController(bw.size.constant(3), min_size=1, max_size=8)
    planned = {"lengths": [3, 4, 4, 4, 8, 7, 8, 8], "budget": bw.MaxTokens(16), "grouping": bw.Buckets(2)}
    # Four of 4 tokens, and two of 8.
    assert MarkShapes(bw.ResizableBatchSampler(8, controller, **planned)).num_expected == 2


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            bw.PadTo(multiple_of=8),
            "a PadTo without static shapes says nothing of later batches; give plan.shapes",
        ),
        (np.zeros((0, 2), dtype=int), "shapes is empty"),
        ([8, 16], r"shapes must be plan.shapes, rows of \(num_items, padded lengths\)"),
        (None, "shapes must be plan.shapes"),
    ],
    ids=["pad_to", "empty", "flat", "none"],
)
def test_what_holds_no_shapes_is_refused(shapes, message):
    with pytest.raises(ArgumentError, match=message):
        MarkShapes(shapes)


def test_a_sampler_that_plans_no_shapes_is_refused():
    controller = bw.BatchSizeController(bw.size.constant(4), min_size=1, max_size=8)
    sampler = bw.ResizableBatchSampler(20, controller)
    with pytest.raises(ArgumentError, match="a ResizableBatchSampler without static shapes says nothing"):
        MarkShapes(sampler)


@pytest.mark.parametrize("value", [0, 1.5, True, "8"])
def test_max_compilations_is_a_whole_number(value):
    with pytest.raises(ArgumentError, match="max_compilations must be a whole number of 1 or more"):
        MarkShapes(FEW, max_compilations=value)


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16])
def test_numpy_numbers_count(kind):
    mark = MarkShapes(FEW, max_compilations=kind(4))
    assert repr(mark) == repr(MarkShapes(FEW, max_compilations=4))
    assert type(mark.num_expected) is int


# Which axes of a tensor are marked


def test_rows_and_lengths_are_marked_and_nothing_else():
    mark = MarkShapes(FEW)
    # A batch of 8 rows of 16 tokens with 7 features; 16 rows do not belong to it.
    batch = mark({
        "x": torch.zeros(8, 16, 7), "mask": torch.zeros(8, 1, 16, 16), "label": torch.zeros(8),
        "scale": torch.tensor(1.0), "table": torch.zeros(5, 7), "name": "a",
    })  # fmt: skip
    found = {name: static_of(tensor) for name, tensor in batch.items() if isinstance(tensor, torch.Tensor)}
    assert found == {"x": {0, 1}, "mask": {0, 2, 3}, "label": {0}, "scale": set(), "table": set()}
    assert not any(dynamic_of(tensor) for tensor in batch.values())


def test_marks_reach_nested_batches_and_the_batch_itself_is_returned():
    Pair = namedtuple("Pair", "x y")
    batch = Pair(torch.zeros(8, 16), [torch.zeros(8, 32), {"z": torch.zeros(8)}])
    assert MarkShapes(FEW)(batch) is batch
    assert static_of(batch.x) == static_of(batch.y[0]) == {0, 1}
    assert static_of(batch.y[1]["z"]) == {0}


def test_rows_that_are_not_planned_are_dynamic_and_lengths_that_are_not_stay_unmarked():
    x = MarkShapes(FEW)(torch.zeros(7, 15))
    assert (static_of(x), dynamic_of(x)) == (set(), {0})


def test_dynamic_lengths_are_all_between_the_shortest_and_the_longest():
    mark = MarkShapes([[rows, 5 * rows] for rows in range(2, 2 + 2 * LIMIT)])
    # From 10 to 85: 11 is no length of this epoch but may be one of the next; 86 and 9 are features.
    x = mark(torch.zeros(40, 11, 85, 86, 9))
    assert (static_of(x), dynamic_of(x)) == (set(), {0, 1, 2})


def test_a_batch_without_tensors_passes():
    assert MarkShapes(FEW)({"name": "a"}) == {"name": "a"}


def test_a_copy_has_no_marks():
    x = MarkShapes(FEW)(torch.zeros(8, 16))
    assert static_of(x.clone()) == static_of(x.to(torch.float64)) == set()


# What the compiler makes of it


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_plan_of_few_shapes_compiles_once_per_shape(backend):
    lengths = lengths_of_texts(60)
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(160), grouping=bw.Buckets(3))
    mark = MarkShapes(sampler)
    batches = batches_of(sampler, lengths)
    shapes = {tuple(batch["input_ids"].shape) for batch in batches}
    assert (mark.are_rows_static, mark.num_expected) == (True, len(shapes))
    counts, _ = compilations(batches, mark, backend)
    assert sum(counts) == len(shapes) <= LIMIT
    # Each at its first visit.
    seen = set()
    for batch, count in zip(batches, counts, strict=True):
        shape = tuple(batch["input_ids"].shape)
        assert count == (shape not in seen)
        seen.add(shape)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_plan_of_many_shapes_compiles_once_for_all(backend):
    lengths = lengths_of_texts(150)
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(160), grouping=bw.WindowSort(4))
    mark = MarkShapes(sampler)
    batches = batches_of(sampler, lengths)
    assert len({tuple(batch["input_ids"].shape) for batch in batches}) > LIMIT
    assert (mark.are_rows_static, mark.are_lengths_static) == (False, False)
    marked, with_marks = compilations(batches, mark, backend)
    torch._dynamo.reset()
    plain, without_marks = compilations(batches, unmarked, backend)
    assert sum(marked) <= 2
    assert sum(marked) < sum(plain)
    assert with_marks == pytest.approx(without_marks, rel=1e-5)


def test_shapes_marked_static_beyond_the_limit_would_run_eagerly():
    # Twelve shapes: torch compiles eight of them when all are static, and gives up for the others.
    batches = [
        {"input_ids": torch.ones(rows, 30 - rows, dtype=torch.int64), "attention_mask": torch.ones(rows, 30 - rows)}
        for rows in range(2, 14)
    ]
    shapes = [batch["input_ids"].shape for batch in batches]
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit), failing_at_the_limit():
        compilations(batches, unmarked, dynamic=False)
    torch._dynamo.reset()
    with failing_at_the_limit():
        counts, _ = compilations(batches, MarkShapes(shapes))
    assert sum(counts) <= 2


def test_features_that_look_like_a_length_do_not_stop_the_compiler():
    # 12 features lie between the shortest and the longest length, and the layer takes no other number of them.
    mark = MarkShapes([[rows, 4 * rows] for rows in range(2, 2 + 2 * LIMIT)])
    model = torch.compile(nn.Linear(12, 3), backend="eager")
    counter = CompileCounter()
    for rows in (2, 3, 5, 9):
        model(mark(torch.ones(rows, 4 * rows, 12)))
    assert counter.num <= 2


def test_a_single_row_is_compiled_apart_and_not_refused():
    shapes = [[rows, 30] for rows in range(1, 12)]
    model = torch.compile(nn.Linear(30, 3), backend="eager")
    counter = CompileCounter()
    for rows in (4, 1, 7, 1, 9):
        model(MarkShapes(shapes)(torch.ones(rows, 30)))
    assert counter.num == 2


def test_marks_inside_the_loss_reach_the_micro_batches_of_a_stepper():
    lengths = lengths_of_texts(60)
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(160), grouping=bw.Buckets(3))
    mark = MarkShapes(sampler)
    batches = batches_of(sampler, lengths)
    model = torch.compile(Tagger(), backend="eager")

    def loss_fn(model, batch):
        out = model(**mark(batch))
        return out.square().sum(), len(out)

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1e-3), loss_fn)
    first = CompileCounter()
    for batch in batches:
        stepper.step(batch)
    assert first.num == mark.num_expected
    for batch in batches:
        stepper.step(batch)
    assert first.num == mark.num_expected


@pytest.mark.skipif(shutil.which("gcc") is None and shutil.which("cc") is None, reason="inductor needs a C compiler")
@pytest.mark.filterwarnings("ignore")  # inductor's own, which differ between versions
def test_the_default_back_end_takes_the_marks():
    from torch._inductor import config  # it takes seconds to import

    mark = MarkShapes([[4, 6], [2, 12]])
    sums = torch.compile(lambda x: x.square().sum(1))
    counter = CompileCounter()
    with config.patch(compile_threads=1):
        for rows, length in ((4, 6), (2, 12), (4, 6), (2, 12)):
            assert sums(mark(torch.ones(rows, length))).tolist() == [length] * rows
    assert counter.num == 2


@contextmanager
def failing_at_the_limit():
    with torch._dynamo.config.patch({FAILS_AT_LIMIT: True}):
        yield


# Counting


def test_the_number_of_the_process_only_grows():
    before = num_compilations()
    torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(3))
    assert num_compilations() == before + 1


def test_compilations_are_counted_from_the_moment_of_the_counter():
    double = torch.compile(lambda x: 2 * x, backend="eager")
    first = CompileCounter()
    double(torch.ones(3))
    second = CompileCounter()
    assert (first.num, second.num) == (1, 0)
    double(torch.ones(3))
    double(torch.ones(3, 1))  # another number of axes
    assert (first.num, second.num) == (2, 1)


def test_every_break_makes_another_graph():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    counter = CompileCounter()
    torch.compile(broken, backend="eager")(torch.ones(3))
    assert counter.num == 2


def test_counters_that_were_cleared_never_give_a_negative_number():
    double = torch.compile(lambda x: 2 * x, backend="eager")
    double(torch.ones(3))
    counter = CompileCounter()
    torch._dynamo.utils.counters.clear()
    assert counter.num == 0
    double(torch.ones(3, 1))
    assert counter.num == 1


def test_counting_does_not_import_the_compiler():
    code = (
        "import sys\n"
        "from batchwright.step import CompileCounter, MarkShapes\n"
        "from batchwright.step.compiling import num_compilations\n"
        "assert (num_compilations(), CompileCounter().num) == (0, 0)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
