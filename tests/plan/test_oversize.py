"""Examples that do not fit the budget even alone: refused, alone, dropped or cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright._lengths import as_lengths
from batchwright.errors import BudgetError
from batchwright.plan._batches import batch_cost, make_batches
from batchwright.plan._oversize import admit
from batchwright.plan._settings import PlanSettings
from batchwright.plan.plan import make_problem

LENGTHS = [5, 30, 8, 12, 7]
BUDGET = bw.MaxTokens(10)
GROUPINGS = [bw.InOrder(), bw.Sorted(), bw.WindowSort(), bw.Buckets()]


def plan_of(oversize, lengths=LENGTHS, budget=BUDGET, **options):
    return bw.plan_batches(lengths, budget, oversize=oversize, **options)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (LENGTHS, {}, r"example 1 \(and 1 more\) of length 30 is over MaxTokens\(10\) by itself"),
        (
            [5, 30, 57, 12],
            {},
            r"example 1 \(and 2 more\) of length 30 is over .* itself, and example 2 of 57 by the most; ",
        ),
        ([5, 11], {}, r"example 1 of length 11 is over MaxTokens\(10\) by itself"),
        ([[5, 5], [6, 5]], {}, r"example 1 of length \(6, 5\) is over MaxTokens\(10\) by itself"),
        ([5, 10], {"pad_multiple_of": 8}, r"example 1 of length 10 is over MaxTokens\(10\) by itself"),
        ([5, 9], {"grouping": bw.Packed(8)}, r"example 1 of length 9 is over Packed\(capacity=8\) by itself"),
    ],
)
def test_the_error_names_the_example_its_length_and_the_limit(lengths, options, message):
    with pytest.raises(BudgetError, match=message):
        plan_of("error", lengths, **options)


def test_the_error_names_the_ways_out():
    with pytest.raises(BudgetError, match='raise the limit, or pass oversize="alone", "drop" or "truncate"'):
        plan_of("error")


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_alone_gives_each_a_batch_of_its_own(grouping):
    plan = plan_of("alone", grouping=grouping)
    batches = {tuple(batch): tuple(shape) for batch, shape in zip(plan, plan.shapes.tolist(), strict=True)}
    assert batches[1,] == (1, 30)
    assert batches[3,] == (1, 12)
    assert sorted(plan.indices.tolist()) == [0, 1, 2, 3, 4]
    report = plan.report()
    assert (report.largest, report.dropped, report.truncated) == (3.0, 0, 0)  # 30 tokens of 10


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_drop_leaves_out_these_and_no_others(grouping):
    plan = plan_of("drop", grouping=grouping)
    assert sorted(plan.indices.tolist()) == [0, 2, 4]
    report = plan.report()
    assert (report.dropped, report.truncated) == (2, 0)
    assert report.largest <= 1


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_truncate_plans_them_at_what_fits(grouping):
    plan = plan_of("truncate", grouping=grouping)
    assert plan.truncate_to.tolist() == [5, 10, 8, 10, 7]
    assert sorted(plan.indices.tolist()) == [0, 1, 2, 3, 4]
    report = plan.report()
    assert (report.dropped, report.truncated) == (0, 2)
    assert report.largest <= 1


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_on_two_axes_the_longest_axes_are_cut(grouping):
    pairs = [[30, 2], [7, 9], [3, 4]]
    plan = plan_of("truncate", pairs, grouping=grouping)
    # (8, 2) and (5, 5) have 10 tokens; a common cap of 9 or 6 would give 11 or 12.
    assert plan.truncate_to.tolist() == [[8, 2], [5, 5], [3, 4]]
    assert plan.num_truncated == 2
    assert sorted(plan_of("drop", pairs, grouping=grouping).indices.tolist()) == [2]
    assert [1, 30, 2] in plan_of("alone", pairs, grouping=grouping).shapes.tolist()


def test_truncation_counts_on_padding():
    # At most 10 tokens in multiples of 4: a length of 8, since 9 would be padded to 12.
    assert plan_of("truncate", pad_multiple_of=4).truncate_to.tolist() == [5, 8, 8, 8, 7]


def test_truncate_to_is_none_unless_asked_for():
    assert plan_of("drop").truncate_to is None
    assert plan_of("truncate", [3, 4]).truncate_to.tolist() == [3, 4]


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=12),
    st.integers(2, 60),
    st.sampled_from([1, 4]),
)
def test_one_more_token_would_not_fit(pairs, limit, pad):
    budget = bw.MaxCost(lambda n, padded: n * (padded[:, 0] + padded[:, 1] ** 1.2), limit + 12)
    plan = bw.plan_batches(pairs, budget, oversize="truncate", pad_multiple_of=pad)

    def fits(lengths):
        padded = -(-lengths // pad) * pad
        return budget.fraction(np.ones(len(lengths), dtype=int), padded) <= 1

    given_, planned = np.array(pairs), plan.truncate_to.astype(int)
    assert fits(planned).all()
    cut = (given_ > planned).any(axis=1)
    assert (cut == ~fits(given_)).all()
    higher_cap = planned[cut].max(axis=1, keepdims=True) + 1
    assert not fits(np.minimum(given_[cut], higher_cap)).any()


PACKED = {"grouping": bw.Packed(8), "lengths": [3, 20, 5, 8, 9], "budget": bw.MaxTokens(16)}


def test_packed_rows_leave_long_examples_alone_in_a_batch_of_one_row():
    plan = plan_of("alone", **PACKED)
    shapes = {tuple(map(tuple, batch)): shape for batch, shape in zip(plan, plan.shapes.tolist(), strict=True)}
    assert shapes[(1,),] == [1, 20]
    assert shapes[(4,),] == [1, 9]
    # 3 + 5 and 8 fill two rows of 8.
    assert sorted(shape for shape in shapes.values() if shape[1] == 8) == [[2, 8]]
    assert sorted(plan.indices.tolist()) == [0, 1, 2, 3, 4]


def test_packed_rows_drop_or_cut_what_is_longer_than_a_row():
    dropped = plan_of("drop", **PACKED)
    assert sorted(dropped.indices.tolist()) == [0, 2, 3]
    assert dropped.report().dropped == 2
    cut = plan_of("truncate", **PACKED)
    assert cut.truncate_to.tolist() == [3, 8, 5, 8, 8]
    assert cut.report().truncated == 2
    assert cut.report().padding == 0  # four rows, all full


def test_the_work_of_packed_rows_is_not_that_of_dropped_ones():
    # Two rows a batch; drop_last leaves out the third row, and example 3 has a batch of its own behind it.
    lengths, budget = as_lengths([8, 8, 8, 80]), bw.MaxItems(2)
    settings = PlanSettings(grouping=bw.Packed(8), oversize="alone", drop_last=True, shuffle=False)
    admitted = admit(lengths, budget, settings)
    batches = make_batches(make_problem(admitted, budget, settings, 0), admitted, settings)
    assert batches.num_items.tolist() == [2, 1]
    # 2 × 8 × (1 + 8 / 1024) and 80 × (1 + 80 / 1024)
    assert batch_cost(batches, lengths, settings).tolist() == [16.125, 86.25]


@pytest.mark.parametrize("grouping", [*GROUPINGS, bw.Packed(2)])
def test_alone_works_where_nothing_fits(grouping):
    plan = plan_of("alone", [5, 3, 4], bw.MaxTokens(2), grouping=grouping)
    assert plan.shapes[:, 0].tolist() == [1, 1, 1]
    assert sorted(plan.shapes[:, 1].tolist()) == [3, 4, 5]


def test_drop_that_leaves_nothing_is_refused():
    with pytest.raises(BudgetError, match=r"every example is over MaxTokens\(2\)"):
        plan_of("drop", [5, 3], bw.MaxTokens(2))


def test_a_budget_below_one_token_cannot_be_met_by_cutting():
    with pytest.raises(BudgetError, match="not even one token of an example fits"):
        plan_of("truncate", [5, 3], bw.MaxCost(lambda n, padded: 10.0 * n, 2))
