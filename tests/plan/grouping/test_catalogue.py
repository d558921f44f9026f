"""Buckets(K): at most K shapes in all, rows included, on one axis or several."""

import gzip
import os
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import ArgumentError, BudgetError
from batchwright.plan.grouping._boxes import Merging, Moving, make_cells
from batchwright.plan.grouping._covering import cover
from batchwright.plan.grouping._shelves import Shelves, largest_divisor
from batchwright.plan.grouping.base import Problem, SizeRounding

from ...thorough import num_cases


def log_normal(num, axes, seed=0, longest=255):
    random = np.random.default_rng(seed)
    common = random.normal(3.4, 0.8, (num, 1))
    return np.clip(np.exp(common + random.normal(0, 0.3, (num, axes))), 1, longest).astype(np.int64)


def make_problem(lengths, budget, **more):
    options = {"rounding": SizeRounding(), "pad_multiple_of": 1, "shuffle": True, "seed": 0, "epoch": 0, "rules": 3}
    return Problem(lengths=np.asarray(lengths, dtype=np.int32), budget=budget, **{**options, **more})


def bytes_of(num_items, padded):
    """As a memory model has it: something for every step, for every token and for attention."""
    total = padded.sum(axis=1).astype(np.float64)
    return 5_000 + num_items * (16 * total + 0.5 * total**2)


@st.composite
def problems(draw):
    """Lengths of one to three axes, and a budget that the longest lengths together keep."""
    axes, longest = draw(st.integers(1, 3)), draw(st.sampled_from([1, 6, 60, 3000]))
    random = np.random.default_rng(draw(st.integers(0, 10**9)))
    lengths = random.integers(1, longest + 1, size=(draw(st.integers(1, 120)), axes))
    if draw(st.booleans()):
        lengths = np.minimum(lengths, log_normal(len(lengths), axes, seed=int(random.integers(10**6))))
    pad = draw(st.sampled_from([1, 1, 8]))
    box = int((-(-lengths.max(axis=0) // pad) * pad).sum())
    factor = draw(st.sampled_from([1, 1.5, 4, 30]))
    alone = bytes_of(np.array([1]), np.array([[box]]))[0]
    budget = draw(
        st.sampled_from(
            [
                bw.MaxTokens(int(box * factor)),
                bw.MaxTokens(int(box * factor)) & bw.MaxItems(1 + int(random.integers(30))),
                bw.MaxItems(1 + int(random.integers(30))),
                bw.MaxCost(bytes_of, alone * factor),
            ]
        )
    )
    options = {
        "pad_multiple_of": pad,
        "seed": draw(st.integers(0, 3)),
        "size_multiple_of": draw(st.sampled_from([1, 1, 8])),
        "size_ladder": draw(st.sampled_from([None, None, "pow2", "pow2x3"])),
        "drop_last": draw(st.sampled_from([False, False, True])),
        "cost": draw(st.sampled_from([None, None, bytes_of])),
    }
    return lengths, budget, options


def assume_planned(count, options):
    """Leave out the plans that may be refused: one shape has no room for what a multiple of the size leaves."""


@settings(max_examples=num_cases(200, thorough=10_000))
@given(problems(), st.integers(1, 40))
def test_a_plan_has_at_most_so_many_shapes_and_is_collated_as_it_says(problem, count):
    lengths, budget, options = problem
    assume_planned(count, options)
    plan = bw.plan_batches(lengths, budget, grouping=bw.Buckets(count), **options)
    collated = [(len(batch), *plan.pad_to(lengths[batch])) for batch in plan]
    assert collated == [tuple(shape) for shape in plan.shapes.tolist()]
    assert len(set(collated)) <= count
    given_out = sorted(index for batch in plan for index in batch)
    assert len(set(given_out)) == len(given_out) == len(lengths) - plan.num_dropped
    assert options["drop_last"] or plan.num_dropped == 0
    for batch, (num_items, *padded) in zip(plan, collated, strict=True):
        assert (lengths[batch] <= padded).all()
        assert budget.fraction(np.array([num_items]), np.array([padded]))[0] <= 1


@settings(max_examples=60)
@given(problems(), st.integers(1, 12))
def test_the_report_counts_the_shapes_and_the_padding_of_what_was_collated(problem, count):
    lengths, budget, options = problem
    assume_planned(count, options)
    plan = bw.plan_batches(lengths, budget, grouping=bw.Buckets(count), **options)
    collated = [(len(batch), *plan.pad_to(lengths[batch])) for batch in plan]
    report = plan.report()
    assert report.num_shapes == len(set(collated)) <= count
    tokens = sum(num * sum(padded) for num, *padded in collated)
    assert report.padding == pytest.approx(1 - lengths[plan.indices].sum() / tokens if tokens else 0, abs=1e-12)


@settings(max_examples=40)
@given(problems(), st.integers(1, 12))
def test_the_catalogue_is_the_same_in_every_epoch_and_for_every_seed(problem, count):
    lengths, budget, options = problem
    assume_planned(count, options)
    rules = {
        bw.plan_batches(lengths, budget, grouping=bw.Buckets(count), epoch=epoch, **{**options, "seed": seed}).pad_to
        for epoch, seed in ((0, 0), (1, 0), (5, 9))
    }
    assert len(rules) == 1


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 8, 16, 40])
def test_more_shapes_pad_less_and_all_are_used(axes, count):
    lengths = log_normal(6000, axes)
    few, many = (
        bw.plan_batches(lengths, bw.MaxTokens(2048), grouping=bw.Buckets(num)).report() for num in (count, 2 * count)
    )
    assert count - 2 <= few.num_shapes <= count
    assert many.padding < few.padding


def test_sixteen_shapes_of_pairs_pad_less_than_a_grid_of_fifty():
    """The code before gave about 50 shapes for Buckets(8) on two axes."""
    lengths = log_normal(20_000, 2)
    catalogue, grid = (
        bw.plan_batches(lengths, bw.MaxTokens(4096), grouping=bw.Buckets(count)).report() for count in (16, (4, 4))
    )
    assert catalogue.num_shapes <= 16
    assert catalogue.padding < 0.8 * grid.padding


@pytest.mark.parametrize("axes", [2, 3])
def test_merged_and_moved_boxes_come_near_the_best_of_all_sets(axes):
    """Against every set of three boxes on a small grid, the whole box among them."""
    lengths = np.minimum(log_normal(400, axes, seed=3) // 16 + 1, 4 if axes == 3 else 6)
    values = [np.unique(column) for column in lengths.T]
    boxes = np.stack(np.meshgrid(*values, indexing="ij"), axis=-1).reshape(-1, axes)
    held = np.where((lengths[:, None] <= boxes).all(axis=2), boxes.sum(axis=1), 10**6)
    whole = held[:, -1]
    best = min(
        int(np.minimum(np.minimum(held[:, first], whole)[:, None], held[:, first:]).sum(axis=0).min())
        for first in range(len(boxes))
    )
    problem = make_problem(lengths, bw.MaxItems(8))
    cells = make_cells(problem, problem.lengths)
    base = np.full(len(cells.places), float(sum(column.max() for column in values)))
    merging = Merging(cells)
    moving = Moving(cells, merging.down_to(2), base)
    moving.improve()
    moving.exchange(merging.cells_merged)
    found = Shelves.of(problem, np.concatenate([cells.lengths(moving.boxes), lengths.max(axis=0, keepdims=True)]))
    assert len(found.units) <= 3
    total = found.units[found.place(problem.lengths)].sum()
    assert best <= total <= 1.03 * best


def test_leftovers_move_to_the_cheapest_shape_that_holds_them():
    # (2, 2) is held by (2, 9) of 11 tokens and by (5, 5) of 10.
    shelves = Shelves.of(make_problem([[2, 2]], bw.MaxItems(4)), np.array([[9, 9], [2, 9], [5, 5], [2, 2]]))
    assert shelves.units.tolist() == [[2, 2], [5, 5], [2, 9], [9, 9]]
    assert shelves.parents.tolist() == [1, 3, 3, -1]
    flow = shelves.flow(np.array([6, 3, 4, 5]))
    # Two of six move up to three: one batch of four, and one goes on with the five: six, so one batch and two.
    assert flow.full.tolist() == [1, 1, 1, 1]
    assert flow.rests.tolist() == [0, 0, 0, 2]


def test_one_shape_for_all_has_the_largest_size_that_divides_the_examples():
    lengths = [[3, 4]] * 60 + [[7, 2]] * 30
    plan = bw.plan_batches(lengths, bw.MaxTokens(40 * 11), grouping=bw.Buckets(1))
    assert plan.shapes.tolist() == [[30, 7, 4]] * 3
    full = bw.plan_batches(lengths, bw.MaxTokens(40 * 11), grouping=bw.Buckets(1), drop_last=True)
    assert full.shapes.tolist() == [[40, 7, 4]] * 2
    assert full.num_dropped == 10


def test_where_rounding_needs_more_sizes_than_shapes_the_rest_is_cut_into_equal_batches():
    # 64 + 13 examples: by powers of two the rest would be 8, 4 and 1.
    plan = bw.plan_batches([5] * 77, bw.MaxItems(64), grouping=bw.Buckets(2), size_ladder="pow2")
    assert sorted(plan.shapes.tolist()) == [[1, 5]] * 13 + [[64, 5]]
    many = bw.plan_batches([5] * 77, bw.MaxItems(64), grouping=bw.Buckets(4), size_ladder="pow2")
    assert sorted(many.shapes.tolist()) == [[1, 5], [4, 5], [8, 5], [64, 5]]


@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([1, 2, 8]), st.sampled_from([None, "pow2x3"]))
def test_the_largest_divisor_is_found(num, most, multiple, ladder):
    rounding = SizeRounding(multiple, ladder)
    allowed = [size for size in range(1, min(num, most) + 1) if num % size == 0 and rounding.round_one(size) == size]
    assert largest_divisor(num, most, rounding) == max(allowed)


def test_too_few_shapes_for_examples_long_on_different_axes_are_refused_with_the_number():
    lengths = [[9, 1], [1, 9], [5, 5]]
    words = r"Buckets\(count=2\) is too few shapes: 3 are needed, because examples that are long on different axes fit "
    with pytest.raises(BudgetError, match=words + r"MaxTokens\(10\) alone.*raise count or the budget"):
        bw.plan_batches(lengths, bw.MaxTokens(10), grouping=bw.Buckets(2))
    plan = bw.plan_batches(lengths, bw.MaxTokens(10), grouping=bw.Buckets(3))
    assert sorted(plan.shapes.tolist()) == [[1, 1, 9], [1, 5, 5], [1, 9, 1]]


def fewest_boxes(points, limit):
    """By trying: how many boxes of at most so many tokens hold all points, each a set of points joined."""
    groups = [[]]
    for point in points:
        groups = [
            [*split[:place], np.maximum(split[place], point), *split[place + 1 :]]
            for split in groups
            for place in range(len(split))
            if np.maximum(split[place], point).sum() <= limit
        ] + [[*split, point] for split in groups]
    return min(map(len, groups))


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6, unique=True), st.integers(0, 3)
)
def test_on_two_axes_the_fewest_boxes_are_found(pairs, spare):
    limit = max(map(sum, pairs)) + spare
    boxes = cover(make_problem(pairs, bw.MaxTokens(limit)), np.array(pairs), 6)
    assert len(boxes) == fewest_boxes(list(map(np.array, pairs)), limit)
    assert (boxes.sum(axis=1) <= limit).all()
    assert all((np.array(pair) <= boxes).all(axis=1).any() for pair in pairs)


@settings(max_examples=100)
@given(st.lists(st.tuples(*[st.integers(1, 9)] * 3), min_size=1, max_size=40), st.integers(0, 6))
def test_on_three_axes_the_boxes_that_are_needed_hold_every_example(triples, spare):
    limit = max(map(sum, triples)) + spare
    boxes = cover(make_problem(triples, bw.MaxTokens(limit)), np.array(triples), 40)
    assert (boxes.sum(axis=1) <= limit).all()
    assert all((np.array(triple) <= boxes).all(axis=1).any() for triple in triples)
    plan = bw.plan_batches(triples, bw.MaxTokens(limit), grouping=bw.Buckets(len(boxes)))
    assert plan.report().num_shapes <= len(boxes)


def test_on_three_axes_it_is_said_that_the_count_does_not_do():
    lengths = 1 + 8 * np.eye(3, dtype=int)
    words = r"Buckets\(count=2\) is too few shapes: the search needs more than 2, because examples that are long on "
    with pytest.raises(BudgetError, match=words):
        bw.plan_batches(lengths, bw.MaxTokens(11), grouping=bw.Buckets(2))
    assert len(bw.plan_batches(lengths, bw.MaxTokens(11), grouping=bw.Buckets(3))) == 3


def peak_of(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_pairs_that_share_a_context_are_planned_in_little_memory():
    # Prompt and completion fill a context together, so no pair holds another one, and the common box does not fit.
    prompt = np.arange(1, 6001)
    lengths = np.stack([prompt, 6001 - prompt], axis=1)
    assert peak_of(lambda: bw.plan_batches(lengths, bw.MaxTokens(7200), grouping=bw.Buckets(16))) < 8 * 2**20


def test_very_many_pairs_that_share_a_context_are_refused_with_the_number():
    # Two pairs together have at least one token more than the context, so each needs a shape of its own. Comparing all
    # with all would take minutes.
    prompt = np.arange(1, 65_536)
    lengths = np.stack([prompt, 65_536 - prompt], axis=1)
    with pytest.raises(BudgetError, match=r"is too few shapes: 65535 are needed, because"):
        bw.plan_batches(lengths, bw.MaxTokens(65_536), grouping=bw.Buckets(16))


@pytest.mark.parametrize("limit", [1300, 1600])
def test_very_many_triples_that_share_a_context_are_covered_in_little_memory(limit):
    first, second = (axis.ravel() for axis in np.mgrid[1:999:9, 1:999:9])
    triples = np.stack([first, second, 1000 - first - second], axis=1)
    triples = triples[triples[:, 2] > 0]  # 6,000 and none holds another
    found = []
    assert peak_of(lambda: found.append(cover(make_problem(triples, bw.MaxTokens(limit)), triples, 200))) < 8 * 2**20
    boxes = found[0]
    assert len(boxes) <= 200
    assert (boxes.sum(axis=1) <= limit).all()
    assert all((triple <= boxes).all(axis=1).any() for triple in triples)


def test_examples_whose_common_box_does_not_fit_are_not_padded_to_one():
    # More lengths than the grid has candidates, so that cells reach over the budget while their examples do not.
    random = np.random.default_rng(0)
    first = random.integers(1, 1000, 4000)
    lengths = np.stack([first, 1000 - first + random.integers(0, 30, 4000)], axis=1)
    budget = bw.MaxTokens(1200)
    plan = bw.plan_batches(lengths, budget, grouping=bw.Buckets(30))
    report = plan.report()
    assert report.num_shapes <= 30
    assert report.largest <= 1
    assert sorted(plan.indices.tolist()) == list(range(4000))


def test_examples_that_run_alone_have_shapes_beyond_the_count():
    lengths = [[3, 3]] * 12 + [[50, 1], [1, 60]]
    plan = bw.plan_batches(lengths, bw.MaxTokens(12), grouping=bw.Buckets(1), oversize="alone")
    assert sorted(set(map(tuple, plan.shapes.tolist()))) == [(1, 1, 60), (1, 50, 1), (2, 3, 3)]


def test_shapes_are_chosen_by_seconds_where_the_plan_has_a_time_model():
    # The first axis costs a hundred times the second, so its bounds must be fine.
    lengths = np.random.default_rng(0).integers(1, 200, size=(5000, 2))
    shapes = [[n, a, b] for n in (1, 4, 16) for a in (10, 100, 200) for b in (10, 100, 200)]
    model = bw.TimeModel.fit(shapes, [1e-3 + 1e-5 * n * a + 1e-7 * n * b for n, a, b in shapes])
    tokens, seconds = (
        bw.plan_batches(lengths, bw.MaxTokens(4000), grouping=bw.Buckets(8), cost=cost) for cost in (None, model.cost)
    )
    assert model.predict_plan(seconds.shapes) < 0.9 * model.predict_plan(tokens.shapes)
    assert seconds.report().padding > tokens.report().padding
    assert len(set(seconds.shapes[:, 1].tolist())) > len(set(seconds.shapes[:, 2].tolist()))


def test_on_one_axis_seconds_decide_too():
    lengths = np.random.default_rng(0).integers(1, 200, size=5000)

    def tiles_of_50(num_items, padded):  # as a kernel that works on tiles does
        return num_items * np.ceil(padded[:, 0] / 50)

    plan = bw.plan_batches(lengths, bw.MaxItems(10), grouping=bw.Buckets(5), cost=tiles_of_50)
    assert set(plan.shapes[:, 1].tolist()) == {50, 100, 150, 199}


CORPORA = Path(os.environ.get("BATCHWRIGHT_CORPORA", "corpora"))  # a folder of real texts, where there is one
PAIRS = "pythondocs-en-es.tsv.gz"


@pytest.mark.skipif(not (CORPORA / PAIRS).exists(), reason=f"needs {PAIRS} in the folder BATCHWRIGHT_CORPORA")
def test_sixteen_shapes_of_real_pairs_pad_at_most_13_per_cent_and_thirty_two_at_most_9():
    tokenizers = pytest.importorskip("tokenizers")
    with gzip.open(CORPORA / PAIRS, "rt", encoding="utf-8", newline="\n") as file:
        pairs = [line.rstrip("\n").split("\t")[:2] for line in file]
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text for pair in pairs[:20_000] for text in pair], vocab_size=8_000)
    columns = [[len(row.ids) for row in tokenizer.encode_batch(list(column))] for column in zip(*pairs, strict=True)]
    lengths = np.clip(np.array(columns).T, 1, 255)
    for max_tokens in (4096, 8192):
        for count, most in ((16, 0.13), (32, 0.09)):
            report = bw.plan_batches(lengths, bw.MaxTokens(max_tokens), grouping=bw.Buckets(count)).report()
            assert report.num_shapes <= count
            assert report.padding <= most


def test_eight_axes_are_planned_in_little_memory_and_nine_are_refused():
    lengths = np.random.default_rng(0).integers(1, 100, size=(500, 9))
    budget, grouping = bw.MaxTokens(16_000), bw.Buckets(16)
    assert peak_of(lambda: bw.plan_batches(lengths[:, :8], budget, grouping=grouping)) < 32 * 2**20
    with pytest.raises(ArgumentError, match=r"Buckets takes lengths with up to 8 axes, got 9; join axes .* WindowSort"):
        bw.plan_batches(lengths, budget, grouping=grouping)


def test_the_catalogue_is_the_same_in_every_epoch_though_not_each_has_all_of_it():
    # What is left differs by epoch, and the rule of PadTo looks at it.
    lengths = [[2, 1]] * 3 + [[1, 2]] * 3 + [[1, 1]] + [[2, 1]] * 3 + [[1, 1]]
    options = {"grouping": bw.Buckets(4), "seed": 548}
    plans = [bw.plan_batches(lengths, bw.MaxTokens(18) & bw.MaxItems(4), epoch=epoch, **options) for epoch in range(4)]
    assert len({plan.pad_to for plan in plans}) == 1
    catalogue = plans[0].pad_to
    for plan in plans:
        assert plan.report().num_shapes <= 4
        assert set(map(tuple, plan.shapes[:, 1:].tolist())) <= set(catalogue.shapes)
    assert len({frozenset(map(tuple, plan.shapes.tolist())) for plan in plans}) > 1


def infinite_above(longest):
    return lambda num_items, padded: np.where(padded[:, 0] > longest, np.inf, num_items * padded.sum(axis=1))


@pytest.mark.parametrize("grouping", [bw.Buckets(8), bw.WindowSort()], ids=str)
@pytest.mark.parametrize("num_axes", [1, 2])
def test_a_cost_that_is_infinite_for_a_batch_that_fits_is_refused(num_axes, grouping):
    lengths = np.random.default_rng(0).integers(1, 100, size=(500, num_axes))
    budget = bw.MaxTokens(400 * num_axes)
    with pytest.raises(
        BudgetError, match=r"cost is infinite for \d+ items of length \[.*; give a finite cost, and keep"
    ):
        bw.plan_batches(lengths, budget, grouping=grouping, cost=infinite_above(50))


def test_a_cost_may_be_infinite_where_the_budget_allows_no_item():
    # Either axis is short, so the grid of candidates has boxes that are over the budget.
    random = np.random.default_rng(0)
    lengths = random.integers(1, 40, size=(500, 2))
    lengths[np.arange(500), random.integers(0, 2, 500)] = 1

    def cost(num_items, padded):
        return np.where(padded.sum(axis=1) > 60, np.inf, num_items * padded.sum(axis=1))

    options = {"grouping": bw.Buckets(8)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = bw.plan_batches(lengths, bw.MaxTokens(60), cost=cost, **options)
    assert plan.shapes.tolist() == bw.plan_batches(lengths, bw.MaxTokens(60), **options).shapes.tolist()


def test_one_shape_has_equal_batches_though_no_multiple_divides_the_examples():
    plan = bw.plan_batches([1] * 500, bw.MaxItems(8), grouping=bw.Buckets(1), size_multiple_of=8)
    assert set(map(len, plan)) == {5}
    full = bw.plan_batches([1] * 500, bw.MaxItems(8), grouping=bw.Buckets(1), size_multiple_of=8, drop_last=True)
    assert set(map(len, full)) == {8}
