"""Examples that stay together, whatever the grouping, the ranks and the options: 400 random plans, 10,000 in `make check`."""

import os
from collections import Counter
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import BudgetError

from .strategies import cases

_NUM_PLANS = 10_000 if os.environ.get("HYPOTHESIS_PROFILE") == "check" else 400
SORTING = [bw.InOrder(), bw.Sorted(), bw.WindowSort()]


def flat(batch):
    return list(chain.from_iterable(batch)) if batch and isinstance(batch[0], list) else batch


def members_of(ids):
    """Return the examples of each group by its label, by hand."""
    found = {}
    for example, label in enumerate(ids):
        found.setdefault(label, []).append(example)
    return found


def assert_whole_groups(plan, ids):
    """Every batch holds all members of each of its groups, once."""
    members = members_of(ids)
    for batch in plan:
        held = flat(batch)
        expected = sorted(chain.from_iterable(members[label] for label in {ids[example] for example in held}))
        assert sorted(held) == expected


@st.composite
def grouped_cases(draw):
    """Return a planning problem and labels: pairs, groups of one size or of several, next to each other or not."""
    case = draw(cases(max_examples=48))
    num = len(case.lengths)
    kind = draw(st.sampled_from(["pairs", "triples", "several", "one", "own"]))
    size = min(num, {"pairs": 2, "triples": 3, "several": 1, "one": num, "own": 1}[kind])
    ids = np.arange(num) // size
    if kind == "several" and not isinstance(case.options["grouping"], bw.Buckets):
        ids = np.array(draw(st.lists(st.integers(0, max(1, num // 2)), min_size=num, max_size=num)))
    if isinstance(case.options["grouping"], bw.Buckets):  # groups of one size
        kept = num // size * size
        ids, case = ids[:kept], type(case)(case.lengths[:kept], case.budget, case.options)
    order = draw(st.permutations(range(len(ids)))) if draw(st.booleans()) else range(len(ids))
    return case, [f"group {ids[place]}" for place in order]


@settings(max_examples=_NUM_PLANS)
@given(
    grouped_cases(),
    st.sampled_from([1, 1, 2, 3, 8]),
    st.sampled_from(["alone", "drop", "truncate"]),
    st.booleans(),
    st.sampled_from(["spread", "spread", "drop"]),
)
def test_no_group_is_split_and_no_budget_is_exceeded(grouped, world_size, oversize, drop_last, remainder):
    case, ids = grouped
    lengths = np.asarray(case.lengths).reshape(len(case.lengths), -1)
    if isinstance(case.options["grouping"], bw.Packed):
        return
    options = {"world_size": world_size, "oversize": oversize, "drop_last": drop_last, "remainder": remainder}
    try:
        plan = case.plan(groups=ids, **options)
    except BudgetError as error:
        assert "every group is over" in str(error) or "at one token each" in str(error) or "is too few" in str(error)  # noqa: PT017
        return
    assert_whole_groups(plan, ids)
    assert len(plan) % world_size == 0
    counts = Counter(chain.from_iterable(map(flat, plan)))
    assert sum(counts.values()) - len(counts) == plan.num_repeated
    assert len(counts) + plan.num_dropped == len(ids)
    if plan.num_dropped:
        assert oversize == "drop" or drop_last or remainder == "drop"
    planned = lengths if plan.truncate_to is None else plan.truncate_to.reshape(lengths.shape)
    for batch, (num_items, *padded) in zip(plan, plan.shapes.tolist(), strict=True):
        assert num_items == len(batch)
        if plan.row_offsets is None:
            assert (planned[batch].max(axis=0) <= padded).all()
        fits = case.budget.fraction(np.array([num_items]), np.array([padded]))[0] <= 1 + 1e-12
        assert fits or (oversize == "alone" and len({ids[example] for example in flat(batch)}) == 1)
