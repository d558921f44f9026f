import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


def _load(name):
    """Import a module of benchmarks/, which is a folder of scripts and no package."""
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


metrics = _load("_metrics")
Batches = metrics.Batches

# Three batches of lengths (10, 20), (30,), (40, 5, 5).
LENGTHS = np.array([10, 20, 30, 40, 5, 5])
BATCHES = Batches.from_lists([[0, 1], [2], [3, 4, 5]])


def test_lists_become_indices_and_offsets():
    assert BATCHES.indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert BATCHES.offsets.tolist() == [0, 2, 3, 6]


def test_a_fixed_size_leaves_a_smaller_last_batch():
    assert Batches.of_size([4, 3, 2, 1, 0], 2).offsets.tolist() == [0, 2, 4, 5]


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="a batch is empty"):
        Batches.from_lists([[0], [], [1]])


def test_offsets_that_leave_indices_out_are_refused():
    with pytest.raises(ValueError, match="offsets must run from 0 to 3"):
        Batches(np.array([0, 1, 2]), np.array([0, 2]))


def test_padded_tokens_are_the_size_times_the_longest():
    assert BATCHES.real_tokens(LENGTHS).tolist() == [30, 30, 50]
    assert BATCHES.padded_tokens(LENGTHS).tolist() == [2 * 20, 1 * 30, 3 * 40]


def test_padding_to_a_bound_counts_the_bound():
    bounded = Batches(BATCHES.indices, BATCHES.offsets, padded_lengths=np.array([32, 32, 64]))
    assert bounded.padded_tokens(LENGTHS).tolist() == [64, 32, 192]


def test_a_bound_below_the_longest_example_is_refused():
    bounded = Batches(BATCHES.indices, BATCHES.offsets, padded_lengths=np.array([32, 29, 64]))
    with pytest.raises(ValueError, match="less than its longest"):
        bounded.padded_tokens(LENGTHS)


def test_a_packed_row_counts_its_whole_capacity():
    packed = Batches.from_lists([[0, 1], [2], [3, 4, 5]], capacity=50)
    assert packed.padded_tokens(LENGTHS).tolist() == [50, 50, 50]
    assert packed.shapes(LENGTHS).tolist() == [[1, 50]] * 3


def test_an_overfull_row_shows_what_it_holds():
    packed = Batches.from_lists([[0, 1], [2], [3, 4, 5]], capacity=40)
    assert packed.padded_tokens(LENGTHS).tolist() == [40, 40, 50]


def test_a_batch_of_several_rows_counts_every_row():
    indices, offsets = np.arange(6), np.array([0, 3, 6])
    packed = Batches(indices, offsets, capacity=50, num_rows=np.array([2, 1]))
    assert packed.padded_tokens(LENGTHS).tolist() == [100, 50]


def test_the_cost_of_a_padded_batch_grows_with_its_length():
    # 2 x 1024 tokens at twice the price of a short token, 1 x 512 at 1.5 times.
    lengths = np.array([1024, 100, 512])
    assert Batches.from_lists([[0, 1], [2]]).costs(lengths).tolist() == [4096, 768]


def test_the_cost_of_a_packed_row_is_the_sum_over_its_examples():
    # 1024 x (1 + 1) + 512 x (1 + 0.5), without the padding of the row.
    lengths = np.array([1024, 512])
    assert Batches.from_lists([[0, 1]], capacity=4096).costs(lengths).tolist() == [2816]


def test_the_floor_rounds_up():
    assert metrics.floor_batches(LENGTHS, 55) == 2  # 110 tokens
    assert metrics.floor_batches(LENGTHS, 54) == 3


def test_straggler_waste_compares_the_mean_with_the_slowest():
    # Means 2 and 4, slowest 3 and 4: 1 - 6 / 7. The fifth batch fills no step of two.
    costs = np.array([1.0, 3.0, 4.0, 4.0, 9.0])
    assert metrics.straggler_waste(costs, world_size=2) == pytest.approx(1 / 7)


def test_straggler_waste_is_not_defined_without_a_full_step():
    assert metrics.straggler_waste(np.ones(7), world_size=8) is None


def test_order_correlation_of_alternating_batches_is_minus_one():
    batches = Batches.of_size(np.arange(6), 1)
    alternating = np.array([1, 9, 1, 9, 1, 9])
    assert metrics.order_correlation(batches, alternating, world_size=1) == pytest.approx(-1)


def test_order_correlation_of_evenly_rising_steps_is_one():
    # Steps of two batches have mean lengths 1.5, 3.5, 5.5, 7.5.
    batches = Batches.of_size(np.arange(8), 1)
    assert metrics.order_correlation(batches, np.arange(1, 9), world_size=2) == pytest.approx(1)


def test_a_step_mean_weighs_every_example_once():
    # Means by hand: 2, (1 + 1 + 7) / 3 = 3, 8, 1. The lagged pairs (2, 3), (3, 8), (8, 1) give
    # deviations (-7, -4, 11) / 3 and (-1, 4, -3): -42 / sqrt(186 * 26) after clearing the thirds.
    lengths = np.array([2, 1, 1, 7, 8, 1])
    batches = Batches.from_lists([[0], [1, 2, 3], [4], [5]])
    found = metrics.order_correlation(batches, lengths, world_size=1)
    assert found == pytest.approx(-42 / np.sqrt(186 * 26))


def test_order_correlation_of_constant_lengths_is_not_defined():
    batches = Batches.of_size(np.arange(64), 2)
    assert metrics.order_correlation(batches, np.full(64, 128), world_size=8) is None


def test_recurrence_counts_the_pairs_that_meet_again():
    # Epoch one pairs: {0,1,2} has three, {3,4} one. Only 0 and 1 meet again.
    first = Batches.from_lists([[0, 1, 2], [3, 4]])
    second = Batches.from_lists([[0, 1, 3], [2, 4]])
    assert metrics.recurrence(first, second, num_examples=5) == 1 / 4


def test_recurrence_of_the_same_batches_in_another_order_is_one():
    first = Batches.from_lists([[0, 1, 2], [3, 4]])
    second = Batches.from_lists([[4, 3], [2, 0, 1]])
    assert metrics.recurrence(first, second, num_examples=5) == 1


def test_a_pair_lost_in_the_next_epoch_does_not_meet_again():
    first, second = Batches.from_lists([[0, 1], [2, 3]]), Batches.from_lists([[0, 1]])
    assert metrics.recurrence(first, second, num_examples=4) == 1 / 2


def test_recurrence_is_not_defined_when_nobody_shares_a_batch():
    single = Batches.of_size([0, 1, 2], 1)
    assert metrics.recurrence(single, single, num_examples=3) is None


@given(st.lists(st.integers(0, 4), min_size=2, max_size=20), st.randoms(use_true_random=False))
def test_recurrence_equals_counting_every_pair(rooms, rng):
    others = rng.sample(rooms, len(rooms))
    first, second = _by_room(rooms), _by_room(others)
    pairs = [(i, j) for j in range(len(rooms)) for i in range(j)]
    shared = [(i, j) for i, j in pairs if rooms[i] == rooms[j]]
    again = [(i, j) for i, j in shared if others[i] == others[j]]
    expected = len(again) / len(shared) if shared else None
    assert metrics.recurrence(first, second, num_examples=len(rooms)) == expected


def test_coverage_counts_missing_and_repeated_examples():
    batches = Batches.from_lists([[0, 1], [1, 1], [3]])
    assert metrics.coverage(batches, num_examples=5) == (2, 2)  # 2 and 4 missing; 1 stands twice too often


def test_the_summary_holds_every_figure_by_hand():
    # Padded 40, 30, 120 of real 30, 30, 50 under a budget of 100: each figure follows from these.
    found = metrics.summarize(BATCHES, BATCHES, LENGTHS, 100)
    assert (found["batches"], found["floor"], found["shapes"]) == (3, 2, 3)
    assert found["padding"] == pytest.approx(80 / 190)
    assert found["budget_used"] == pytest.approx((0.3 + 0.3 + 0.5) / 3)
    assert found["largest"] == pytest.approx(1.2)
    assert (found["straggler_waste"], found["recurrence"]) == (None, 1)
    assert (found["missing"], found["repeated"]) == (0, 0)


def test_equal_shapes_count_once():
    lengths = np.array([7, 3, 7, 7])
    found = metrics.summarize(batches := Batches.of_size(np.arange(4), 2), batches, lengths, 14)
    assert found["shapes"] == 1


def _by_room(rooms):
    return Batches.from_lists([[i for i, r in enumerate(rooms) if r == room] for room in sorted(set(rooms))])


def test_two_axes_are_padded_separately_and_counted_together():
    # Batches (3, 10), (5, 2) and (4, 4): 2 × (5 + 10) and 1 × (4 + 4) tokens, of which 20 and 8 are real.
    pairs = np.array([[3, 10], [5, 2], [4, 4]])
    batches = Batches.from_lists([[0, 1], [2]])
    assert batches.real_tokens(pairs).tolist() == [20, 8]
    assert batches.shapes(pairs).tolist() == [[2, 5, 10], [1, 4, 4]]
    assert batches.padded_tokens(pairs).tolist() == [30, 8]
    assert batches.costs(pairs).tolist() == [30 * (1 + 15 / 1024), 8 * (1 + 8 / 1024)]
    assert metrics.floor_batches(pairs, 30) == 1
    bounded = Batches(batches.indices, batches.offsets, padded_lengths=np.array([[5, 9], [4, 4]]))
    with pytest.raises(ValueError, match="less than its longest"):
        bounded.shapes(pairs)
