"""The figures of a report, computed on paper."""

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings

import batchwright as bw

from .strategies import cases

LENGTHS = [3, 5, 2, 9, 4, 4]
IN_ORDER = {"grouping": bw.InOrder()}
TOKENS = bw.MaxTokens(10)


def tokens(num_items, padded):
    return num_items * padded[:, 0]


def test_a_tiny_plan_is_what_the_figures_below_assume():
    plan = bw.plan_batches(LENGTHS, TOKENS, **IN_ORDER)
    assert list(plan) == [[0, 1], [2], [3], [4, 5]]
    assert plan.shapes.tolist() == [[2, 5], [1, 2], [1, 9], [2, 4]]


def test_padding_and_budget():
    report = bw.plan_batches(LENGTHS, TOKENS, **IN_ORDER).report()
    # 10 + 2 + 9 + 8 = 29 padded tokens, 27 of them real.
    assert report.padding == pytest.approx(2 / 29)
    assert report.budget_used == pytest.approx((1.0 + 0.2 + 0.9 + 0.8) / 4)
    assert report.largest == 1.0
    assert (report.num_batches, report.num_shapes) == (4, 4)


def test_equal_shapes_count_once():
    assert bw.plan_batches([4, 4, 4, 3], bw.MaxItems(1), **IN_ORDER).report().num_shapes == 2


def test_the_largest_share_is_over_all_parts_of_the_budget():
    report = bw.plan_batches([1, 1, 8], bw.MaxTokens(10) & bw.MaxItems(2), **IN_ORDER).report()
    # Two items of length 1 use 0.2 of the tokens and all the items; the 8 alone uses 0.8 of the tokens.
    assert report.largest == 1.0
    assert report.budget_used == pytest.approx(0.9)


def test_straggler_waste_by_a_given_cost():
    report = bw.plan_batches(LENGTHS, TOKENS, cost=tokens, world_size=2, **IN_ORDER).report()
    # Steps (10, 2) and (9, 8): the mean work is 6 + 8.5, the slowest rank needs 10 + 9.
    assert report.straggler_waste == pytest.approx(1 - 14.5 / 19)
    assert report.world_size == 2


def test_straggler_waste_by_the_default_cost():
    report = bw.plan_batches([512, 1024], bw.MaxItems(1), **IN_ORDER).report(world_size=2)
    # 512 × 1.5 = 768 and 1024 × 2 = 2048: mean 1408.
    assert report.straggler_waste == pytest.approx(1 - 1408 / 2048)


def test_straggler_waste_of_packed_rows_is_that_of_the_examples_inside():
    lengths = [512, 512, 1024]
    plan = bw.plan_batches(lengths, bw.MaxItems(1), grouping=bw.Packed(1024), shuffle=False)
    # Rows (512, 512) and (1024): 2 × 768 = 1536 and 2048, mean 1792.
    assert plan.report(world_size=2).straggler_waste == pytest.approx(1 - 1792 / 2048)


def test_the_cost_of_the_report_counts_in_64_bits():
    squares = {"cost": lambda num_items, padded: num_items * padded[:, 0] ** 2}
    report = bw.plan_batches([60_000, 30_000], bw.MaxItems(1), **IN_ORDER, **squares).report(world_size=2)
    # 3.6e9 and 0.9e9: mean 2.25e9.
    assert report.straggler_waste == pytest.approx(1 - 2.25 / 3.6)


def test_order_correlation_is_that_of_consecutive_mean_lengths():
    report = bw.plan_batches(LENGTHS, TOKENS, **IN_ORDER).report()
    # Means 4, 2, 9, 4: (4, 2, 9) and (2, 9, 4) deviate by (-1, -3, 4) and (-3, 4, -1); 3 - 12 - 4 = -13 over 26.
    assert report.order_correlation == pytest.approx(-0.5)


def test_order_correlation_takes_the_mean_of_a_step():
    report = bw.plan_batches([1, 3, 9, 5, 3, 3, 6, 10], bw.MaxItems(1), **IN_ORDER).report(world_size=2)
    # Steps of mean 2, 7, 3, 8: (2, 7, 3) and (7, 3, 8) deviate by (-2, 3, -1) and (1, -3, 2); -2 - 9 - 2 over 14.
    assert report.order_correlation == pytest.approx(-13 / 14)


def test_order_correlation_is_zero_where_it_is_not_defined():
    assert bw.plan_batches([5, 5, 5, 5], bw.MaxItems(1), **IN_ORDER).report().order_correlation == 0
    assert bw.plan_batches([5, 6], bw.MaxItems(1), **IN_ORDER).report().order_correlation == 0


def test_recurrence_is_one_for_fixed_neighbours_and_zero_without_pairs():
    assert bw.plan_batches(LENGTHS, TOKENS, **IN_ORDER).report().recurrence == 1
    assert bw.plan_batches(LENGTHS, bw.MaxItems(1)).report().recurrence == 0


def pairs_of(plan):
    batches = [[i for row in batch for i in row] if plan.row_offsets is not None else batch for batch in plan]
    return {frozenset(pair) for batch in batches for pair in combinations(batch, 2)}


@settings(max_examples=60)
@given(cases())
def test_recurrence_is_the_share_of_pairs_that_meet_again(case):
    plan = case.plan(epoch=3)
    here, there = pairs_of(plan), pairs_of(case.plan(epoch=4))
    expected = len(here & there) / len(here) if here else 0
    assert plan.report().recurrence == pytest.approx(expected)


def test_repeated_dropped_and_truncated_are_counted():
    spread = bw.plan_batches([1, 1], bw.MaxItems(1), world_size=3).report()
    assert (spread.repeated, spread.dropped, spread.truncated) == (1, 0, 0)
    dropped = bw.plan_batches([1, 1, 1, 1], bw.MaxItems(1), world_size=3, remainder="drop").report()
    assert (dropped.repeated, dropped.dropped, dropped.truncated) == (0, 1, 0)
    cut = bw.plan_batches([1, 12, 11], TOKENS, oversize="truncate").report()
    assert (cut.repeated, cut.dropped, cut.truncated) == (0, 0, 2)


@pytest.mark.parametrize("options", [{"drop_last": True}, {"world_size": 8, "remainder": "drop"}])
def test_an_empty_plan_has_a_report(options):
    report = bw.plan_batches([3, 4], bw.MaxItems(9), **options).report()
    assert (report.num_batches, report.dropped, report.padding, report.recurrence) == (0, 2, 0, 0)


def test_the_text_is_a_table():
    text = str(bw.plan_batches(LENGTHS, TOKENS, world_size=2, **IN_ORDER).report())
    assert text.splitlines() == [
        "batches                         4",
        "padding                         6.90%",
        "budget used                     72.5%",
        "largest batch / budget          1.000",
        "shapes                          4",
        "straggler waste, 2 ranks        23.77%",
        "recurrence                      1.0000",
        "balanced in runs of             1",
        "order correlation               +0.00",
        "repeated / dropped / truncated  0 / 0 / 0",
    ]


def test_the_dictionary_is_json():
    report = bw.plan_batches(np.array(LENGTHS), TOKENS, world_size=np.int64(2), **IN_ORDER).report()
    values = json.loads(json.dumps(report.to_dict()))
    assert values["num_batches"] == 4
    assert bw.PlanReport(**values) == report


def test_ranks_of_a_report_are_checked():
    with pytest.raises(bw.errors.ArgumentError, match="world_size must be a whole number of 1 or more, got 0"):
        bw.plan_batches(LENGTHS, TOKENS).report(world_size=0)


@pytest.mark.parametrize("options", [{"grouping": bw.InOrder()}, {"shuffle": False}])
def test_a_report_names_no_runs_where_nothing_is_balanced(options):
    lengths = np.random.default_rng(0).integers(1, 50, 300)
    assert bw.plan_batches(lengths, bw.MaxTokens(300), world_size=4, **options).report().balance_over == 1


def test_a_report_names_the_runs_of_an_epoch_begun_by_an_earlier_version():
    # About 30 batches made runs of 4 there.
    lengths = np.random.default_rng(0).integers(1, 50, 300)
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(300))
    state = sampler.state_dict()
    sampler.load_state_dict({**state, "version": 1, "settings": {**state["settings"], "balance_over": 64}})
    assert sampler.report().balance_over == 4
