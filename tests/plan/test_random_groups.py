"""What holds for every plan with groups, whatever the data and options: random cases, many more in `make check`."""

from collections import Counter
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import BudgetError

from ..thorough import num_cases
from .grouped import assert_whole_groups, flat
from .strategies import Case, cases, quadratic


def assert_plan_is_right(case, ids, **options):
    """Plan and check what holds for every plan with groups; return the plan, None where none was possible."""
    lengths = np.asarray(case.lengths).reshape(len(case.lengths), -1)
    try:
        plan = case.plan(groups=ids, **options)
    except BudgetError as error:
        reasons = ("every group is over", "every example is over", "at one token each", "even one token", "is too few")
        assert any(reason in str(error) for reason in reasons)  # noqa: PT017 - nothing else may be refused
        return None
    assert_whole_groups(plan, ids)
    assert len(plan) % options["world_size"] == 0
    counts = Counter(chain.from_iterable(map(flat, plan)))
    assert sum(counts.values()) - len(counts) == plan.num_repeated
    assert len(counts) + plan.num_dropped == len(ids)
    may_drop = options["oversize"] == "drop" or options["drop_last"] or options["remainder"] == "drop"
    assert plan.num_dropped == 0 or may_drop
    planned = lengths if plan.truncate_to is None else plan.truncate_to.reshape(lengths.shape)
    assert (planned <= lengths).all()
    for batch, (num_items, *padded) in zip(plan, plan.shapes.tolist(), strict=True):
        assert num_items == len(batch)
        if plan.row_offsets is None:
            assert (planned[batch].max(axis=0) <= padded).all()
        else:
            assert all(planned[row].sum() <= padded[0] for row in batch)
        fits = case.budget.fraction(np.array([num_items]), np.array([padded]))[0] <= 1 + 1e-12
        assert fits or (options["oversize"] == "alone" and len({ids[one] for one in flat(batch)}) == 1)
    return plan


@st.composite
def grouped_cases(draw):
    """Return a planning problem and labels: pairs, groups of one size or of several, next to each other or not."""
    case = draw(cases(max_examples=48))
    num = len(case.lengths)
    kind = draw(st.sampled_from(["pairs", "triples", "several", "one", "own"]))
    size = min(num, {"pairs": 2, "triples": 3, "several": 1, "one": num, "own": 1}[kind])
    ids = np.arange(num) // size
    if isinstance(case.options["grouping"], bw.Buckets):  # groups of one size only
        kept = num // size * size
        ids, case = ids[:kept], Case(case.lengths[:kept], case.budget, case.options)
    elif kind == "several":
        ids = np.array(draw(st.lists(st.integers(0, max(1, num // 2)), min_size=num, max_size=num)))
    order = draw(st.permutations(range(len(ids)))) if draw(st.booleans()) else range(len(ids))
    return case, [f"group {ids[place]}" for place in order]


@settings(max_examples=num_cases(150, thorough=1500))
@given(
    grouped_cases(),
    st.sampled_from([1, 1, 2, 3, 8]),
    st.sampled_from(["alone", "drop", "truncate"]),
    st.booleans(),
    st.sampled_from(["spread", "spread", "drop"]),
)
def test_no_group_is_split_and_no_budget_is_exceeded(grouped, world_size, oversize, drop_last, remainder):
    options = {"world_size": world_size, "oversize": oversize, "drop_last": drop_last, "remainder": remainder}
    assert_plan_is_right(*grouped, **options)


def random_case(rng):
    """Return a planning problem with 1 to 80 examples and their groups, drawn much faster than by hypothesis."""
    axes = int(rng.choice([1, 1, 2]))
    longest, pad = int(rng.choice([4, 30, 300])), int(rng.choice([1, 1, 8]))
    padded = -(-longest // pad) * pad
    size = int(rng.integers(0, 5))  # 0: of several sizes
    num = int(rng.integers(1, 80)) if size == 0 else size * int(rng.integers(1, 80 // size + 1))
    ids = rng.integers(0, max(1, num // 2), num) if size == 0 else np.arange(num) // size
    kinds = [bw.InOrder(), bw.Sorted(), bw.WindowSort(int(rng.choice([1, 3, 256])))]
    kinds += [] if size == 0 else [bw.Buckets(int(rng.choice([3, 64])))]
    kinds += [bw.Packed(padded * int(rng.choice([1, 3])))] * 2 if axes == 1 else []
    grouping = kinds[rng.integers(len(kinds))]
    alone = grouping.capacity if isinstance(grouping, bw.Packed) else axes * padded
    tokens = bw.MaxTokens(int(rng.integers(alone, 12 * alone + 1)))
    limit = float(rng.uniform(1, 12)) * alone * (1 + alone / 50)
    budgets = [tokens, tokens & bw.MaxItems(int(rng.integers(1, 20))), bw.MaxCost(quadratic, limit)]
    options = {
        "grouping": grouping,
        "pad_multiple_of": pad,
        "shuffle": bool(rng.integers(2)),
        "seed": int(rng.integers(5)),
        "size_multiple_of": int(rng.choice([1, 1, 2, 8])),
        "size_ladder": [None, None, "pow2", "pow2x3"][rng.integers(4)],
        "keep_first": int(rng.choice([0, 0, 2])),
    }
    lengths = rng.integers(1, longest + 1, (num, axes))
    lengths = lengths[:, 0] if axes == 1 else lengths
    return Case(lengths, budgets[rng.integers(3)], options), rng.permutation(ids).tolist() if rng.integers(2) else ids


def test_many_random_plans_keep_their_groups():
    """250 plans, 10,000 in ``make check``."""
    rng = np.random.default_rng(20)
    num_planned: Counter[str] = Counter()
    for _ in range(num_cases(250, thorough=10_000)):
        case, ids = random_case(rng)
        options = {
            "world_size": int(rng.choice([1, 2, 3, 8])),
            "oversize": str(rng.choice(["alone", "drop", "truncate"])),
            "drop_last": bool(rng.integers(4) == 0),
            "remainder": str(rng.choice(["spread", "spread", "drop"])),
        }
        if assert_plan_is_right(case, ids, **options) is not None:
            num_planned[type(case.options["grouping"]).__name__] += 1
    assert min(num_planned.values()) > 20  # each of them was there
    assert len(num_planned) == 5


def run_ranks(case, ids, world_size, state, num_steps):
    """Run every rank for some steps; return the batches step by step and the state they agree on."""
    taken, states = [], []
    for rank in range(world_size):
        sampler = case.sampler(rank=rank, world_size=world_size, groups=ids, oversize="alone")
        if state is not None:
            sampler.load_state_dict(state)
        batches = iter(sampler)
        taken.append([flat(next(batches)) for _ in range(min(num_steps, len(sampler)))])
        states.append(sampler.state_dict())
    assert all(other == states[0] for other in states)
    return list(chain.from_iterable(zip(*taken, strict=True))), states[0]


@settings(max_examples=num_cases(50, thorough=500))
@given(grouped_cases(), st.integers(1, 5), st.integers(1, 5), st.integers(0, 6))
def test_resuming_on_any_world_size_keeps_groups_and_loses_nothing(grouped, first_world, second_world, num_steps):
    case, ids = grouped
    try:
        before, state = run_ranks(case, ids, first_world, None, num_steps)
    except BudgetError as error:
        assert "is too few" in str(error)  # noqa: PT017 - shapes of Buckets on several axes
        return
    after, _ = run_ranks(case, ids, second_world, state, 10**9)
    assert_whole_groups(before + after, ids)
    taken = list(chain.from_iterable(before + after))
    assert set(taken) == set(range(len(ids)))
    assert len(set(taken[: len(ids)])) == len(ids)  # repeats stand at the very end
