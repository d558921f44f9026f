"""Plans are the same from version to version, and are made without a line of Python for each batch."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright._lengths import as_lengths
from batchwright.plan.plan import PlanSettings, plan_epoch

NUM = 6000
NUMBERS = np.arange(NUM, dtype=np.int64)
ONE = 1 + (37 * NUMBERS + 11 * NUMBERS**2 + NUMBERS**3 // 7) % 211
PAIRS = np.stack([ONE, 1 + (ONE + 13 * NUMBERS + NUMBERS**2 // 5) % 97], axis=1)
TRIPLES = np.stack([ONE, PAIRS[:, 1], 1 + NUMBERS % 5], axis=1)

PLANS = {
    "window": (ONE, bw.MaxTokens(900), {}),
    "window of two": (ONE, bw.MaxItems(2), {}),
    "window of one": (ONE, bw.MaxItems(1), {}),
    "window, ladder": (ONE, bw.MaxTokens(900), {"size_ladder": "pow2", "pad_multiple_of": 8, "drop_last": True}),
    "sorted of about one": (ONE, bw.MaxTokens(211), {"grouping": bw.Sorted()}),
    "in order of about one": (ONE, bw.MaxTokens(211), {"grouping": bw.InOrder(), "drop_last": True}),
    "buckets of one": (ONE, bw.MaxItems(1), {"grouping": bw.Buckets()}),
    "two axes": (PAIRS, bw.MaxTokens(4000), {}),
    "two axes, large": (PAIRS, bw.MaxTokens(50_000), {"size_multiple_of": 8, "drop_last": True}),
    "two axes of one": (PAIRS, bw.MaxItems(1), {}),
    "two axes of about one": (PAIRS, bw.MaxTokens(312), {"pad_multiple_of": 4}),
    "two axes, sorted": (PAIRS, bw.MaxTokens(4000), {"grouping": bw.Sorted(), "size_ladder": "pow2x3"}),
    "two axes, in order": (PAIRS, bw.MaxTokens(4000) & bw.MaxItems(30), {"grouping": bw.InOrder()}),
    "two axes, buckets": (PAIRS, bw.MaxTokens(4000), {"grouping": bw.Buckets()}),
    "one axis, few buckets": (ONE, bw.MaxTokens(4000), {"grouping": bw.Buckets(5), "pad_multiple_of": 8}),
    "two axes, few buckets": (PAIRS, bw.MaxTokens(4000), {"grouping": bw.Buckets((5, 3)), "pad_multiple_of": 8}),
    "two axes, misfits": (PAIRS, bw.MaxTokens(250), {"grouping": bw.Buckets((12, 12)), "oversize": "drop"}),
    "two axes, misfits, multiples": (
        PAIRS,
        bw.MaxTokens(280),
        {"grouping": bw.Buckets((4, 4)), "oversize": "alone", "size_ladder": "pow2", "drop_last": True},
    ),
    "three axes": (TRIPLES, bw.MaxTokens(4000), {}),
    "three axes, buckets": (TRIPLES, bw.MaxTokens(4000), {"grouping": bw.Buckets(12), "size_ladder": "pow2"}),
}

# Of the plans as they were before they were made faster; those of Buckets as they are since it counts shapes in all.
DIGESTS = {
    "window": "f5efd6371fcbf12b-26e4e720576223f5",
    "window of two": "e22386b5519cfb0d-b497b35cf7b63331",
    "window of one": "fb7422e63c162f04-d9737c62d9a424aa",
    "window, ladder": "8557cc6b1605b2a8-71a2e5af3f97fb51",
    "sorted of about one": "f8dcacb8683a2d47-abf4a9eb2d13e16f",
    "in order of about one": "9df36b81036d739d-9df36b81036d739d",
    "buckets of one": "c37679512b9a82c8-aeda07ab2875d22a",
    "two axes": "e96f63fa59370eb2-338aea4d63b8ebc6",
    "two axes, large": "8de9b159c99e3d64-441d712604f6afd3",
    "two axes of one": "7ba8b6cb07d4da63-ede0258560bc49ad",
    "two axes of about one": "1a845d6ea14d34b0-1c8f022a2a3573e7",
    "two axes, sorted": "dd564c0786cc3268-1ba5df56733a1967",
    "two axes, in order": "a589f1ced938001b-a589f1ced938001b",
    "two axes, buckets": "931533ef3ee5b9c1-2f8658ba7270e60f",
    "one axis, few buckets": "a8f60f1b3aac3a4e-38b168293dd4300a",
    "two axes, few buckets": "c6520505f93981bd-445d0503969d8a68",
    "two axes, misfits": "404861844e822edf-fbc34ab151d025ce",
    "two axes, misfits, multiples": "b8d3dd2439017974-387abc1b89733ea4",
    "three axes": "388ed7639bd5116b-d126255767012ab8",
    "three axes, buckets": "be005a16c5b6ff01-47412c08d5f6cb91",
}


def digest(plan):
    arrays = [plan.indices.astype("<i4"), plan.offsets.astype("<i8"), plan.shapes.astype("<i4")]
    return hashlib.blake2b(b"".join(array.tobytes() for array in arrays), digest_size=8).hexdigest()


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_what_it_always_was(name):
    lengths, budget, options = PLANS[name]
    settings = PlanSettings(rules=1, balance_over=1, seed=3, **options)  # as states saved before need them
    plans = [plan_epoch(as_lengths(lengths), budget, settings, epoch) for epoch in (0, 1)]
    assert "-".join(map(digest, plans)) == DIGESTS[name]


def lines_of_python(function):
    """Run a function and count the lines that the groupings execute."""
    folder, num = str(Path(bw.plan.grouping.__file__).parent), 0

    def trace(frame, event, argument):
        nonlocal num
        if not frame.f_code.co_filename.startswith(folder):
            return None
        num += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return num


def lines_for_more(lengths, budget, grouping):
    """The lines that the groupings execute for five times as many examples, beyond those for the examples."""
    more = np.tile(lengths, (5,) + (1,) * (lengths.ndim - 1))
    few, many = (
        lines_of_python(lambda lengths=lengths: bw.plan_batches(lengths, budget, grouping=grouping))
        for lengths in (lengths, more)
    )
    return many - few


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("grouping", [bw.InOrder(), bw.Sorted(), bw.WindowSort(), bw.Buckets()], ids=repr)
def test_batches_of_one_take_no_line_of_python_each(grouping, axes):
    assert lines_for_more(ONE if axes == 1 else PAIRS, bw.MaxItems(1), grouping) < 4 * NUM / 4


@pytest.mark.parametrize("grouping", [bw.Sorted(), bw.WindowSort()], ids=repr)
def test_batches_of_two_take_less_than_a_line_of_python_each(grouping):
    assert lines_for_more(ONE, bw.MaxItems(2), grouping) < 2 * NUM / 2


class Counting(bw.plan.budget.Budget):
    """A budget of tokens that counts how often it is asked."""

    def __init__(self, limit):
        self.tokens, self.num_calls = bw.MaxTokens(limit), 0

    def fraction(self, num_items, lengths):
        self.num_calls += 1
        return self.tokens.fraction(num_items, lengths)

    def max_items(self, lengths):
        self.num_calls += 1
        return self.tokens.max_items(lengths)


@pytest.mark.parametrize("limit", [310, 1000, 4000])
def test_small_batches_on_two_axes_ask_the_budget_for_thousands_of_places_at_once(limit):
    budget = Counting(limit)
    plan = bw.plan_batches(np.tile(PAIRS, (5, 1)), budget, grouping=bw.InOrder())
    assert len(plan) > 300
    # 14 calls or fewer for 4,096 places, and a few for the whole.
    assert budget.num_calls < 14 * -(-5 * NUM // 4096) + 10
