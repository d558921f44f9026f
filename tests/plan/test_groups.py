"""Examples that stay together: hand-made plans, labels of every kind, what is refused, states."""

import json

import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import ArgumentError, BudgetError, LengthsError, StateMismatchError

from .grouped import assert_whole_groups

GROUPINGS = [bw.InOrder(), bw.Sorted(), bw.WindowSort(), bw.Buckets(8), bw.Packed(40)]


def test_a_group_is_one_item_as_long_as_its_longest_member():
    # Groups: a = 0, 2; b = 1, 4; c = 3, 5. By falling longest: c (9, 9), b (5, 5), a (3, 3) with 20 tokens.
    plan = bw.plan_batches([3, 5, 2, 9, 4, 4], bw.MaxTokens(20), groups=list("abacbc"), shuffle=False)
    assert list(plan) == [[3, 5], [1, 4, 0, 2]]
    assert plan.shapes.tolist() == [[2, 9], [4, 5]]


def test_groups_of_several_sizes_are_counted_by_their_examples():
    # Lengths fall: c has 3 rows of 6 = 18, then b with 1 row of 5, a with 2: 3 × 5 = 15; all six would be 36.
    plan = bw.plan_batches([3, 5, 2, 6, 4, 4], bw.MaxTokens(20), groups=list("abaccc"), shuffle=False)
    assert list(plan) == [[3, 4, 5], [1, 0, 2]]
    assert plan.shapes.tolist() == [[3, 6], [3, 5]]


def test_in_order_a_group_stands_where_its_first_member_does():
    plan = bw.plan_batches([1] * 7, bw.MaxItems(3), groups=[7, 9, 7, 8, 5, 9, 8], grouping=bw.InOrder())
    assert list(plan) == [[0, 2], [1, 5], [3, 6, 4]]


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_groups_of_one_example_give_the_plan_without_groups(grouping, world_size):
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    options = {"grouping": grouping, "world_size": world_size}
    plain = bw.plan_batches(lengths, bw.MaxTokens(120), **options)
    plan = bw.plan_batches(lengths, bw.MaxTokens(120), groups=range(200), **options)
    assert list(plan) == list(plain)
    assert plan.shapes.tolist() == plain.shapes.tolist()


def labels_of_every_kind():
    numbers = [4, 4, 7, 7, 1, 4]
    pandas, torch, pyarrow = (pytest.importorskip(name) for name in ("pandas", "torch", "pyarrow"))
    texts = [f"prompt {number}" for number in numbers]
    return [
        numbers,
        tuple(texts),
        np.array(numbers, dtype=np.int8),
        np.array(texts),
        np.array(numbers) - 2**62,
        np.array(numbers, dtype=np.uint64) + np.uint64(2**63),
        [2**70 + number for number in numbers],
        np.array(numbers) / 2,
        np.array(numbers, dtype="datetime64[D]"),
        torch.tensor(numbers),
        torch.tensor(numbers, dtype=torch.bfloat16),
        pandas.Series(texts, index=range(5, 11)),
        pandas.Series(texts, dtype="category"),
        pyarrow.chunked_array([texts[:2], texts[2:]]),
        [("a", number) for number in numbers],
        [True, True, "b", "b", None.__class__, True],
    ]


def test_labels_of_every_kind_make_the_same_groups():
    plans = [bw.plan_batches([3, 4, 5, 6, 7, 8], bw.MaxItems(3), groups=labels) for labels in labels_of_every_kind()]
    assert_whole_groups(plans[0], [4, 4, 7, 7, 1, 4])
    assert all(list(plan) == list(plans[0]) for plan in plans)


def test_a_number_and_its_text_are_different_groups():
    plan = bw.plan_batches([1, 1], bw.MaxItems(1), groups=[1, "1"])
    assert len(plan) == 2


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([1, None, 1], ArgumentError, "no label for 1 examples, first for example 1; give a label of its own"),
        ([1.0, 2.0, np.nan], ArgumentError, "no label for 1 examples, first for example 2"),
        (np.array([np.nan, 2.0, np.nan]), ArgumentError, "no label for 2 examples, first for example 0"),
        (np.array(["a", None, "a"], dtype=object), ArgumentError, "no label for 1 examples, first for example 1"),
        (np.array(["2026-01-01", "NaT", "NaT"], "datetime64[D]"), ArgumentError, "no label for 2 examples"),
        (np.ma.array([1, 2, 3], mask=[0, 1, 0]), ArgumentError, "groups is masked in 1 of 3 examples"),
        (np.ones((3, 2)), ArgumentError, r"one label per example, got ndarray of shape \(3, 2\); join several columns"),
        ([[1], [1], [2]], ArgumentError, "one number or text per example: unhashable type: 'list'"),
        (5, ArgumentError, r"one label per example, got int of shape \(\)"),
        ("abc", ArgumentError, r"one label per example, got str of shape \(\)"),
        ([1, 2], LengthsError, "one label per example, 3, got 2; give a label of its own to an example"),
        ([], LengthsError, "one label per example, 3, got 0"),
    ],
)
def test_labels_that_name_no_group_per_example_are_refused(labels, error, message):
    for make in (bw.plan_batches, bw.BatchSampler):
        with pytest.raises(error, match=message):
            make([3, 4, 5], bw.MaxTokens(20), groups=labels)


def test_missing_labels_of_pandas_are_refused():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ArgumentError, match="no label for 1 examples, first for example 1"):
        bw.plan_batches([1, 1], bw.MaxItems(2), groups=pandas.Series([1, None], dtype="Int64"))


# Group a is examples 0 and 2 and needs 2 × 12 tokens; b is 1 and 3 and needs 2 × 8; c needs 9.
LENGTHS, IDS, BUDGET = [12, 8, 3, 7, 9], ["a", "b", "a", "b", "c"], bw.MaxTokens(20)
PADDED = [bw.InOrder(), bw.Sorted(), bw.WindowSort()]


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        (IDS, {}, r"group 'a' of 2 examples \(the first is 0\) with a longest length of 12 is over MaxTokens\(20\) by"),
        ([5, 5, 5, 7, 7], {}, r"group 5 of 3 examples \(the first is 0\) with a longest length of 12 is over"),
        (np.array([7, 5, 5, 5, 5]), {}, r"group 5 of 4 examples \(the first is 1\) with a longest length of 9 is over"),
        (IDS, {"pad_multiple_of": 16}, r"group 'a' of 2 examples \(the first is 0\) \(and 1 more\) with a longest"),
        (IDS, {"grouping": bw.Packed(14)}, r"over MaxTokens\(20\) in rows of Packed\(capacity=14\) by itself"),
    ],
)
def test_an_oversize_group_is_named(ids, options, message):
    with pytest.raises(BudgetError, match=message):
        bw.plan_batches(LENGTHS, BUDGET, groups=ids, **options)


@pytest.mark.parametrize("grouping", PADDED)
def test_an_oversize_group_runs_alone(grouping):
    plan = bw.plan_batches(LENGTHS, BUDGET, groups=IDS, grouping=grouping, oversize="alone")
    batches = {tuple(batch): shape for batch, shape in zip(plan, plan.shapes.tolist(), strict=True)}
    assert batches == {(0, 2): [2, 12], (1, 3): [2, 8], (4,): [1, 9]}
    assert plan.report().largest == 1.2


@pytest.mark.parametrize("grouping", PADDED)
def test_an_oversize_group_is_dropped_as_a_whole(grouping):
    plan = bw.plan_batches(LENGTHS, BUDGET, groups=IDS, grouping=grouping, oversize="drop")
    assert sorted(map(tuple, plan)) == [(1, 3), (4,)]
    assert plan.num_dropped == 2


@pytest.mark.parametrize("grouping", PADDED)
def test_an_oversize_group_is_cut_to_what_fits(grouping):
    plan = bw.plan_batches(LENGTHS, BUDGET, groups=IDS, grouping=grouping, oversize="truncate")
    assert plan.truncate_to.tolist() == [10, 8, 3, 7, 9]  # 2 × 10 tokens
    assert plan.num_truncated == 1
    assert_whole_groups(plan, IDS)
    assert plan.report().largest <= 1


def test_a_group_that_no_cutting_makes_fit_is_refused():
    with pytest.raises(BudgetError, match=r"group 0 of 3 examples \(the first is 0\) does not fit MaxItems\(2\) even"):
        bw.plan_batches([5, 5, 5, 5], bw.MaxItems(2), groups=[0, 0, 0, 1], oversize="truncate")


def test_dropping_every_group_is_refused():
    with pytest.raises(BudgetError, match=r"every group is over MaxItems\(1\), so oversize='drop' leaves nothing"):
        bw.plan_batches([5, 5], bw.MaxItems(1), groups=[0, 0], oversize="drop")


def test_the_last_step_is_split_between_groups_only():
    # One batch of 3 pairs, two ranks: 2 pairs and 1 pair.
    plan = bw.plan_batches([4] * 6, bw.MaxItems(6), groups=[0, 0, 1, 1, 2, 2], world_size=2, grouping=bw.InOrder())
    assert list(plan) == [[0, 1, 2, 3], [4, 5]]
    assert (plan.num_repeated, plan.num_repeated_batches) == (0, 0)


@pytest.mark.parametrize(
    ("grouping", "batches"),
    [
        (bw.InOrder(), [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]),
        (bw.Packed(6), [[[0, 1, 2]], [[3, 4]], [[0, 1, 2]], [[3, 4]]]),
        (bw.Packed(4), [[[0, 1], [2]], [[3], [4]], [[0, 1], [2]], [[3], [4]]]),  # 2 and 3 shared a row
    ],
)
def test_ranks_without_a_group_of_their_own_repeat_whole_groups(grouping, batches):
    ids = ["p", "p", "p", "q", "q"]
    plan = bw.plan_batches([2] * 5, bw.MaxTokens(12), groups=ids, world_size=4, grouping=grouping, shuffle=False)
    assert list(plan) == batches
    assert (plan.num_repeated, plan.num_repeated_batches) == (5, 2)
    assert plan.shapes[:, 0].tolist() == list(map(len, batches))


def test_one_repeated_example_per_rank_without_groups():
    plan = bw.plan_batches([2] * 2, bw.MaxItems(2), world_size=5)
    assert (plan.num_repeated, plan.num_repeated_batches) == (3, 3)


def test_packed_rows_hold_small_groups_in_one_row():
    lengths = np.random.default_rng(1).integers(1, 30, 400)
    ids = np.arange(400) // 2
    plan = bw.plan_batches(lengths, bw.MaxTokens(1600), groups=ids, grouping=bw.Packed(400))
    for batch in plan:
        assert_whole_groups(batch, ids)
    assert plan.report().padding < 0.05


def test_packed_rows_of_a_batch_share_groups_that_would_leave_a_row_half_empty():
    # Groups of 8 × 70 = 560 tokens on average: one per row of 1000, so 44 % would be empty.
    lengths = np.random.default_rng(1).integers(40, 100, 1600)
    ids = np.arange(1600) // 8
    plan = bw.plan_batches(lengths, bw.MaxTokens(8000), groups=ids, grouping=bw.Packed(1000))
    assert_whole_groups(plan, ids)
    assert plan.report().padding < 0.1


def test_groups_longer_than_a_row_lie_in_rows_of_one_batch_and_others_fill_them():
    # Pairs of 7 need two rows of 10 each, with room for 3; six single ones of 3 fill it: 6 full rows, 2 per batch.
    lengths, ids = [7] * 6 + [3] * 6, [0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8]
    plan = bw.plan_batches(lengths, bw.MaxTokens(20), groups=ids, grouping=bw.Packed(10))
    assert plan.shapes.tolist() == [[2, 10]] * 3
    assert plan.report().padding == 0
    assert_whole_groups(plan, ids)


def test_a_packed_group_that_needs_more_rows_than_a_batch_has_follows_oversize():
    # 3 × 7 tokens need three rows of 10; a batch has two.
    lengths, ids, options = [7, 7, 7, 4], [0, 0, 0, 1], {"grouping": bw.Packed(10)}
    alone = bw.plan_batches(lengths, bw.MaxTokens(20), groups=ids, oversize="alone", shuffle=False, **options)
    assert list(alone) == [[[3]], [[0], [1], [2]]]
    assert alone.shapes.tolist() == [[1, 10], [3, 7]]
    dropped = bw.plan_batches(lengths, bw.MaxTokens(20), groups=ids, oversize="drop", **options)
    assert (list(dropped), dropped.num_dropped) == ([[[3]]], 3)
    cut = bw.plan_batches(lengths, bw.MaxTokens(20), groups=ids, oversize="truncate", **options)
    assert cut.truncate_to.tolist() == [5, 5, 5, 4]  # 5 + 5 and 5
    assert_whole_groups(cut, ids)


def test_buckets_keep_their_promise_of_shapes_with_pairs():
    lengths = np.random.default_rng(2).integers(1, 200, 2000)
    ids = np.random.default_rng(3).permutation(2000) // 2
    plan = bw.plan_batches(lengths, bw.MaxTokens(2000), groups=ids, grouping=bw.Buckets(6))
    assert plan.report().num_shapes <= 6
    assert_whole_groups(plan, ids)
    for batch, shape in zip(plan, plan.shapes.tolist(), strict=True):
        assert plan.pad_to(lengths[batch]) == (shape[1],)


class Pairwise(bw.Grouping):
    """A grouping of a user, which knows nothing of weights."""

    def group(self, problem):
        raise AssertionError("not asked")


@pytest.mark.parametrize("grouping", [bw.Buckets(4), Pairwise()])
def test_groups_of_several_sizes_are_refused_where_batches_are_counted_by_groups(grouping):
    with pytest.raises(ArgumentError, match="equally many examples, which groups of 1 to 2 examples do not fill; give"):
        bw.plan_batches([3, 4, 5], bw.MaxTokens(20), groups=[0, 0, 1], grouping=grouping)


@pytest.mark.parametrize(
    ("size", "options", "allowed"),
    [
        (2, {"size_multiple_of": 8}, lambda num: num % 8 == 0),
        (3, {"size_multiple_of": 4}, lambda num: num % 12 == 0),
        (2, {"size_ladder": "pow2"}, lambda num: num & (num - 1) == 0),
        (6, {"size_ladder": "pow2x3"}, lambda num: num in (6, 12, 24, 48, 96)),
        (5, {"size_ladder": "pow2"}, lambda num: num == 95),  # no power of two is a number of fives: as many as fit
    ],
)
def test_sizes_are_rounded_to_what_whole_groups_can_make(size, options, allowed):
    plan = bw.plan_batches(
        [1] * 60 * size, bw.MaxItems(97), groups=np.arange(60 * size) // size, drop_last=True, **options
    )
    sizes = plan.shapes[:, 0].tolist()
    assert sizes
    assert all(map(allowed, sizes))


def test_groups_of_several_sizes_are_rounded_where_they_can_be():
    ids = np.repeat(np.arange(400), np.random.default_rng(0).integers(1, 4, 400))
    plan = bw.plan_batches(np.ones(len(ids), int), bw.MaxItems(50), groups=ids, size_multiple_of=8, drop_last=True)
    sizes = plan.shapes[:, 0]
    assert (sizes % 8 == 0).mean() > 0.8  # 400 groups of 1 to 3; the others have no such sum
    assert sizes.min() >= 25


def test_drop_last_and_keep_first_move_whole_batches():
    lengths, ids = np.arange(1, 43), np.arange(42) // 3
    plan = bw.plan_batches(lengths, bw.MaxTokens(300), groups=ids, drop_last=True, keep_first=1)
    assert_whole_groups(plan, ids)
    demand = plan.shapes[:, 0] * plan.shapes[:, 1] * (1 + plan.shapes[:, 1] / 1024)
    assert demand[0] == demand.max()
    assert plan.num_dropped % 3 == 0


def test_pairs_pad_hardly_more_than_they_must():
    rng = np.random.default_rng(0)
    centres = rng.lognormal(3.2, 0.8, 20_000)
    lengths = np.clip(np.repeat(centres, 2) * rng.lognormal(0, 0.2, 40_000), 1, 512).astype(int)
    least = 1 - lengths.sum() / (2 * lengths.reshape(-1, 2).max(axis=1).sum())  # every pair padded by itself
    plan = bw.plan_batches(lengths, bw.MaxTokens(8192), groups=np.arange(40_000) // 2)
    assert least < plan.report().padding < least + 0.05
    plan = bw.plan_batches(lengths, bw.MaxTokens(8192), groups=np.arange(40_000) // 2, grouping=bw.Sorted())
    assert least < plan.report().padding < least + 0.02
    sizes = np.tile([1, 3, 2, 2], 5000)
    mixed = np.repeat(np.arange(20_000), sizes)
    lengths = np.clip(np.repeat(centres, sizes), 1, 512).astype(int)
    assert bw.plan_batches(lengths, bw.MaxTokens(8192), groups=mixed).report().padding < 0.05


def test_a_report_says_how_many_groups_there_are():
    plan = bw.plan_batches(LENGTHS, bw.MaxTokens(40), groups=["a", "b", "a", "a", "c"])
    report = plan.report()
    assert (report.num_groups, report.largest_group) == (3, 3)
    assert "groups / examples of the largest  3 / 3" in str(report)
    plain = bw.plan_batches(LENGTHS, bw.MaxTokens(40)).report()
    assert (plain.num_groups, plain.largest_group) == (0, 0)
    assert "groups" not in str(plain)


def test_a_state_without_groups_does_not_name_them():
    assert "groups" not in bw.BatchSampler(LENGTHS, bw.MaxTokens(40)).state_dict()["settings"]


def test_a_state_of_other_groups_is_refused_and_one_of_other_labels_is_not():
    first = bw.BatchSampler(LENGTHS, bw.MaxTokens(40), groups=IDS)
    state = json.loads(json.dumps(first.state_dict()))
    bw.BatchSampler(LENGTHS, bw.MaxTokens(40), groups=[9, 3, 9, 3, 1]).load_state_dict(state)
    for groups in (None, ["a", "a", "b", "b", "c"]):
        with pytest.raises(StateMismatchError, match="the state was saved with groups = "):
            bw.BatchSampler(LENGTHS, bw.MaxTokens(40), groups=groups).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="the state was saved with groups = None"):
        first.load_state_dict(bw.BatchSampler(LENGTHS, bw.MaxTokens(40)).state_dict())


def test_a_size_that_a_controller_chooses_refuses_groups():
    with pytest.raises(
        ArgumentError, match=r"takes no groups: a controller counts.*use BatchSampler\(..., groups=...\)"
    ):
        bw.ResizableBatchSampler(4, 2, groups=[0, 0, 1, 1])
