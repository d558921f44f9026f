import numpy as np
import pytest

import batchwright as bw
from batchwright._random import Purpose, below, bit_stream, order_of, permutation, words


def test_streams_of_seeds_epochs_and_purposes_differ():
    keys = [(seed, epoch, purpose) for seed in (0, 1) for epoch in (0, 1, 1 << 32) for purpose in Purpose]
    first = {int(words(1, bit_stream(*key))[0]) for key in keys}
    assert len(first) == len(keys)


def test_data_drawn_with_the_seed_of_the_plan_are_not_sorted_by_their_own_chance():
    lengths = np.random.default_rng(0).integers(100, 3501, 60_000)
    padding = [bw.plan_batches(lengths, bw.MaxTokens(120_000), seed=seed).report().padding for seed in (0, 1)]
    assert abs(padding[0] - padding[1]) < 0.1 * padding[1]  # a shared stream made the windows one global sort


def test_a_permutation_holds_every_number_once():
    assert sorted(permutation(50, bit_stream(3, 0, Purpose.ORDER)).tolist()) == list(range(50))


def test_numbers_below_a_limit_reach_both_ends():
    stream = bit_stream(0, 0, Purpose.ORDER)
    assert {below(3, stream) for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("low_bits", [0, 3, 40])
@pytest.mark.parametrize("num", [0, 1, 2, 900, 5000])
def test_the_order_of_words_is_that_of_a_stable_sort(num, low_bits):
    # Words that differ only in their low bits, or not at all, are settled too.
    chance = words(num, bit_stream(0, 0, Purpose.ORDER))
    chance = chance >> np.uint64(64 - low_bits) if low_bits else chance
    ranks = words(num, bit_stream(0, 1, Purpose.ORDER)) % np.uint64(7)
    assert order_of(chance).tolist() == np.argsort(chance, kind="stable").tolist()
    assert order_of(chance, ranks).tolist() == np.lexsort((chance, ranks)).tolist()


def test_words_that_share_their_high_bits_are_ordered_by_all_of_them():
    chance = np.full(40, 1 << 60, dtype=np.uint64)
    chance[[3, 9, 30]] = (1 << 61) + np.array([2, 1, 0], dtype=np.uint64)
    assert order_of(chance)[-3:].tolist() == [30, 9, 3]
