"""Random planning problems for hypothesis: small enough to be fast, odd enough to be dangerous."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

import batchwright as bw


@dataclass(frozen=True)
class Case:
    lengths: np.ndarray
    budget: bw.Budget
    options: dict[str, Any]

    def plan(self, **more):
        return bw.plan_batches(self.lengths, self.budget, **{**self.options, **more})

    def sampler(self, **more):
        return bw.BatchSampler(self.lengths, self.budget, **{**self.options, **more})


def quadratic(num_items, padded):
    total = padded.sum(axis=1).astype(np.float64)
    return num_items * total * (1 + total / 50)


@st.composite
def cases(draw, max_examples=60, **fixed):
    axes = draw(st.sampled_from([1, 1, 1, 2, 3]))
    longest = draw(st.sampled_from([1, 4, 30, 300]))
    num = draw(st.integers(1, max_examples))
    rows = st.lists(st.integers(1, longest), min_size=axes, max_size=axes)
    lengths = np.array(draw(st.lists(rows, min_size=num, max_size=num)))
    pad = draw(st.sampled_from([1, 1, 4, 8]))
    grouping = draw(groupings(axes, longest, pad))
    # The largest example padded costs at most this, so that it always fits alone.
    alone = axes * (-(-longest // pad) * pad)
    if isinstance(grouping, bw.Packed):
        alone = grouping.capacity
    budget = draw(budgets(alone))
    options = {
        "grouping": grouping,
        "pad_multiple_of": pad,
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 5)),
        "size_multiple_of": draw(st.sampled_from([1, 1, 2, 8])),
        "size_ladder": draw(st.sampled_from([None, None, "pow2", "pow2x3"])),
        "keep_first": draw(st.sampled_from([0, 0, 1, 5])),
        "balance_over": draw(st.sampled_from([None, None, 64, 1, 6])),
    }
    return Case(lengths[:, 0] if axes == 1 else lengths, budget, {**options, **fixed})


def groupings(axes, longest, pad):
    padded = -(-longest // pad) * pad
    kinds = [
        st.just(bw.InOrder()),
        st.just(bw.Sorted()),
        st.builds(bw.WindowSort, st.sampled_from([1, 3, 256])),
    ]
    kinds.append(st.builds(bw.Buckets, st.sampled_from([1, 3, 64])))
    if axes == 2:
        kinds.append(st.builds(bw.Buckets, st.sampled_from([(1, 3), (4, 4)])))
    if axes == 1:
        kinds.append(st.builds(bw.Packed, st.sampled_from([padded, 3 * padded])))
    return st.one_of(kinds)


def budgets(alone):
    tokens = st.integers(alone, 12 * alone).map(bw.MaxTokens)
    items = st.integers(1, 20).map(bw.MaxItems)
    cost = st.floats(1, 12).map(lambda k: bw.MaxCost(quadratic, k * alone * (1 + alone / 50)))
    return st.one_of(tokens, items, cost, st.tuples(tokens, items).map(lambda pair: pair[0] & pair[1]))
