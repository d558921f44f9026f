"""Plans are the same from version to version, and are made without a line of Python for each batch."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw

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
    "two axes, few buckets": (PAIRS, bw.MaxTokens(4000), {"grouping": bw.Buckets((5, 3)), "pad_multiple_of": 8}),
    "two axes, misfits": (PAIRS, bw.MaxTokens(250), {"grouping": bw.Buckets(12), "oversize": "drop"}),
    "two axes, misfits, multiples": (
        PAIRS,
        bw.MaxTokens(280),
        {"grouping": bw.Buckets(4), "oversize": "alone", "size_ladder": "pow2", "drop_last": True},
    ),
    "three axes": (TRIPLES, bw.MaxTokens(4000), {}),
}

# Of the plans as they were before they were made faster.
DIGESTS = {
    "window": "a19ef37dfa320d03-66d95fd17c4c4de8",
    "window of two": "04b440468bf9aded-9d1092473447930e",
    "window of one": "00efdbd6a3843792-52cec4f7b43ffee0",
    "window, ladder": "6e68e7bace4e28e9-6dc4b162e5675609",
    "sorted of about one": "4783ee2df3989a34-e56040f70eeab5f1",
    "in order of about one": "9df36b81036d739d-9df36b81036d739d",
    "buckets of one": "e15f89ed3a7415af-be9567970296487e",
    "two axes": "e3939ab0ea93f130-031bd7a3549aa3c6",
    "two axes, large": "9a994c9dc5d656ba-c87aa1aedc35dd15",
    "two axes of one": "414814659a919426-310e31ea2737162e",
    "two axes of about one": "bbefe4196b03f0c7-84ec54eac5fa4121",
    "two axes, sorted": "90d859855df87bc4-cbd268a79f5c651c",
    "two axes, in order": "a589f1ced938001b-a589f1ced938001b",
    "two axes, buckets": "763fc6ae5419cb12-c787e3c515a759b0",
    "two axes, few buckets": "85e51636b048570b-9b9a6ca532e2d1c3",
    "two axes, misfits": "71339d61ce43d620-97b077540521895d",
    "two axes, misfits, multiples": "564aaaf6eba9c97b-fdf2dbed1e79dad7",
    "three axes": "a32d0f9d3ef27c33-f925d2a1ba0cb3e0",
}


def digest(plan):
    arrays = [plan.indices.astype("<i4"), plan.offsets.astype("<i8"), plan.shapes.astype("<i4")]
    return hashlib.blake2b(b"".join(array.tobytes() for array in arrays), digest_size=8).hexdigest()


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_what_it_always_was(name):
    lengths, budget, options = PLANS[name]
    plans = [bw.plan_batches(lengths, budget, epoch=epoch, seed=3, balance_over=64, **options) for epoch in (0, 1)]
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
