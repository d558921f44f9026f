import numpy as np

import batchwright as bw
from batchwright._random import Purpose, below, bit_stream, permutation, words


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
