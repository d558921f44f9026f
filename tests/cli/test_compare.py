import json
from dataclasses import asdict

import numpy as np
import pytest

import batchwright as bw
from batchwright.cli.compare import Settings, compare, default_max_tokens, fixed_size
from batchwright.errors import ArgumentError


def heavy_tailed(num=2000, seed=0):
    lengths = np.clip(np.random.default_rng(seed).lognormal(3, 1, num).astype(int), 1, 500)
    lengths[-1] = 500
    return lengths


def test_the_fixed_size_fits_at_the_longest_example():
    lengths = np.array([[10], [100]])
    assert fixed_size(lengths, Settings(max_tokens=1000)) == 10
    # Padded to multiples of 64 the longest is 128: 1000 // 128 = 7.
    assert fixed_size(lengths, Settings(max_tokens=1000, pad_multiple_of=64)) == 7
    assert fixed_size(lengths, Settings(max_tokens=1000, max_items=4)) == 4


def test_the_fixed_size_of_pairs_counts_the_longest_of_each_side():
    # The longest source is 90 and the longest target 60, though no pair has both: 1000 // 150 = 6.
    assert fixed_size(np.array([[90, 10], [20, 60]]), Settings(max_tokens=1000)) == 6
    # Both pairs fit 100 alone, the two longest sides together do not.
    assert fixed_size(np.array([[90, 10], [20, 60]]), Settings(max_tokens=100)) == 1


def test_fixed_sizes_and_groupings_by_hand():
    # Sorted, the pairs are (1, 1) and (9, 9): no padding. A batch of two holds 2 × 9 at most, so 18 fits two.
    comparison = compare(np.array([1, 9, 1, 9]), Settings(max_tokens=18))
    assert comparison.fixed_size == 2
    assert comparison.sorted.padding == 0
    assert comparison.sorted.num_batches == 2
    # In order: (1, 9), (1, 9), each padded to 18 of which 10 are real.
    assert comparison["InOrder()"].padding == pytest.approx(1 - 20 / 36)
    assert comparison["InOrder()"].padded_tokens == 36
    assert comparison["InOrder()"].budget_used == 1.0


def test_no_grouping_goes_over_the_budget():
    comparison = compare(heavy_tailed(), Settings(max_tokens=4000, max_items=100))
    assert all(entry.budget_used <= 1 for entry in comparison.entries)
    assert comparison["Sorted()"].padding <= comparison["WindowSort()"].padding < comparison.shuffled.padding
    assert comparison["Packed(capacity=500)"].padding < 0.05


def test_every_grouping_has_the_same_real_tokens():
    lengths = heavy_tailed()
    for entry in compare(lengths, Settings(max_tokens=4000)).entries:
        assert entry.padded_tokens * (1 - entry.padding) == pytest.approx(lengths.sum())


def test_a_shuffled_neighbour_comes_back_by_chance():
    # A batch of 8 holds 7 of the 1,999 others.
    comparison = compare(heavy_tailed(), Settings(max_tokens=4000))
    assert comparison.fixed_size == 8
    assert comparison.shuffled.recurrence == pytest.approx(7 / 1999)


def test_pairs_are_compared_without_packing():
    pairs = np.stack([heavy_tailed(), heavy_tailed(seed=1)], axis=1)
    names = [entry.name for entry in compare(pairs, Settings(max_tokens=4000)).entries]
    assert "WindowSort()" in names
    assert not any(name.startswith("Packed") for name in names)


def test_an_example_over_the_budget_is_refused_with_a_way_out():
    with pytest.raises(ArgumentError, match=r"needs 104 padded tokens, over --max-tokens 100; .* --max-length 96"):
        compare(np.array([5, 100]), Settings(max_tokens=100, pad_multiple_of=8))


def test_the_budget_chosen_holds_64_long_examples():
    # 1 % of 20,000 are 200 long, so p99 is 30; 64 × 30 = 1,920, a multiple of 64.
    lengths = np.array([30] * 19_850 + [200] * 150)
    assert default_max_tokens(lengths) == (1920, "64 times the p99 length")
    # Padded to multiples of 32 the p99 length is 32: 2,048.
    assert default_max_tokens(lengths, pad_multiple_of=32) == (2048, "64 times the p99 length")


def test_the_budget_chosen_for_little_data_leaves_50_batches():
    # 1,000 × 40 tokens in 50 batches are 800, rounded up to 832.
    assert default_max_tokens(np.array([40] * 1000)) == (832, "1/50 of all tokens")


def test_the_budget_chosen_holds_four_of_the_longest():
    assert default_max_tokens(np.array([5] * 1000 + [3000])) == (12288, "4 times the longest example")


def test_a_comparison_is_plain_data():
    comparison = compare(heavy_tailed(200), Settings(max_tokens=2000, world_size=2))
    assert json.loads(json.dumps(asdict(comparison)))["fixed_size"] == comparison.fixed_size


def test_more_ranks_than_examples_are_refused():
    with pytest.raises(ArgumentError, match=r"--world-size 3 is more than the examples, 2; lower it"):
        compare(np.array([5, 6]), Settings(max_tokens=100, world_size=3))


@pytest.mark.parametrize("pad_multiple_of", [1, 8])
def test_the_entries_are_what_the_planner_itself_reports(pad_multiple_of):
    lengths, settings = heavy_tailed(), Settings(max_tokens=4000, pad_multiple_of=pad_multiple_of, seed=5)
    for name in ("InOrder()", "Sorted()", "WindowSort()", "Buckets(count=16)"):
        plan = bw.plan_batches(
            lengths, bw.MaxTokens(4000), grouping=eval(f"bw.{name}"), seed=5, pad_multiple_of=pad_multiple_of
        )
        assert compare(lengths, settings)[name].padding == plan.report().padding


def test_a_budget_that_needs_more_shapes_than_16_leaves_that_grouping_out():
    """Pairs that are long on one side each fit alone, but no two of them in one shape."""
    steps = np.arange(1, 100)
    lengths = np.stack([steps * 10, 1000 - steps * 10], axis=1)
    found = compare(lengths, Settings(max_tokens=1000), progress=False)
    assert found.get("Buckets(count=16)") is None
    assert found.recommended.name == "WindowSort()"
