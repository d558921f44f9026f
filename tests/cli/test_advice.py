import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.cli.advice import PROXY, WORTH, Gain, Question, advise, rank_correlation, verdict_of
from batchwright.cli.compare import Settings, compare, fixed_plans, groupings, make_plan


def heavy_tailed(num=2000, seed=0):
    lengths = np.clip(np.random.default_rng(seed).lognormal(3, 1, num).astype(int), 1, 500)
    lengths[-1] = 500
    return lengths


def answers(inputs, *, noise):
    """Pairs whose outputs are as long as the inputs, up to noise."""
    outputs = inputs * np.random.default_rng(1).uniform(1 - noise, 1 + noise, len(inputs))
    return np.stack([inputs, np.maximum(outputs.astype(int), 1)], axis=1)


def test_the_two_ends_are_ratios_of_tokens_and_of_steps():
    advice = advise(heavy_tailed(), Settings(max_tokens=8000))
    gain = advice.against_sorted
    assert gain.compute_bound == advice.sorted.padded_tokens / advice.planned.padded_tokens
    assert gain.launch_bound == advice.sorted.num_batches / advice.planned.num_batches
    assert gain.low == gain.compute_bound < gain.launch_bound == gain.high


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_yes_needs_the_whole_range_and_no_needs_none_of_it(compute_bound, launch_bound):
    verdict = verdict_of(Gain(compute_bound=compute_bound, launch_bound=launch_bound))
    ends = [compute_bound >= WORTH, launch_bound >= WORTH]
    assert verdict == ("yes" if all(ends) else "depends" if any(ends) else "no")


def test_a_range_that_reaches_below_one_is_no_yes():
    # Sorted by length, a fixed size pads less than the plan does: only the steps are fewer.
    advice = advise(heavy_tailed(), Settings(max_tokens=8000), Question(against="sorted"))
    assert advice.gain.low < 1 < advice.gain.high
    assert advice.verdict == "depends"
    assert advise(heavy_tailed(), Settings(max_tokens=8000)).verdict == "yes"


@pytest.mark.parametrize("shift", [0, 300])
@pytest.mark.parametrize("max_items", [None, 40])
def test_advice_pads_as_the_comparison_says(shift, max_items):
    lengths, settings = heavy_tailed() + shift, Settings(max_tokens=8000, max_items=max_items)
    advice, comparison = advise(lengths, settings), compare(lengths, settings)
    assert advice.planned == comparison[advice.planned.name]
    assert (advice.shuffled, advice.sorted) == (comparison.shuffled, comparison.sorted)


def test_multiples_of_eight_are_offered_only_where_they_cost_little():
    rounded = advise(heavy_tailed() + 300, Settings(max_tokens=8000)).rounded
    assert rounded == compare(heavy_tailed() + 300, Settings(max_tokens=8000, pad_multiple_of=8))[rounded.name]
    # Lengths near 12 would all become 16.
    short = np.random.default_rng(0).integers(9, 13, 5000)
    assert advise(short, Settings(max_tokens=800)).rounded is None
    assert advise(np.append(heavy_tailed(), 999), Settings(max_tokens=999)).rounded is None
    assert advise(heavy_tailed(), Settings(max_tokens=8000, pad_multiple_of=16)).rounded is None


def test_a_decoder_only_model_packs_where_that_pads_less():
    advice = advise(heavy_tailed(), Settings(max_tokens=4000), Question(model_kind="decoder"))
    assert advice.verdict == "pack"
    assert advice.packed.padding < advice.planned.padding
    for kind in (None, "encoder", "seq2seq"):
        assert advise(heavy_tailed(), Settings(max_tokens=4000), Question(model_kind=kind)).verdict == "yes"


def test_packing_is_not_advised_where_it_needs_many_more_steps_than_planned_batches():
    # A budget of 1.9 rows holds one: packed rows save 0.5 % of the tokens and need 1.9 times as many steps.
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 0.6, 20_000).astype(int), 1, 620)
    lengths[-1] = 620
    advice = advise(lengths, Settings(max_tokens=1200), Question(model_kind="decoder"))
    assert advice.packed.num_batches > 1.5 * advice.planned.num_batches
    assert 1 < advice.planned.padded_tokens / advice.packed.padded_tokens < 1.02
    assert advice.verdict == "depends"


def test_a_decoder_only_model_with_equal_lengths_keeps_its_batches():
    advice = advise(np.full(1000, 50), Settings(max_tokens=1000), Question(model_kind="decoder"))
    assert advice.verdict == "no"


def test_a_decoder_only_model_reads_both_texts_as_one():
    pairs = np.stack([heavy_tailed(), heavy_tailed(seed=1)], axis=1)
    joined = advise(pairs, Settings(max_tokens=8000), Question(model_kind="decoder"))
    assert joined.packed.name == f"Packed(capacity={pairs.sum(axis=1).max()})"
    assert joined.planned == compare(pairs.sum(axis=1), Settings(max_tokens=8000))[joined.planned.name]


def test_generation_without_outputs_never_gets_a_yes():
    assert advise(heavy_tailed(), Settings(max_tokens=8000), Question(task="generate")).verdict == "depends"
    assert advise(np.full(1000, 50), Settings(max_tokens=1000), Question(task="generate")).verdict == "no"


def test_outputs_that_follow_the_inputs_are_foreseen():
    advice = advise(answers(heavy_tailed(), noise=0.01), Settings(max_tokens=8000), Question(task="generate"))
    assert advice.outputs.correlation > 0.99
    # Twice the tokens in and out in every batch, so the cache grows no more than the inputs do.
    assert advice.outputs.cache_ratio == pytest.approx(1, abs=0.05)
    assert advice.verdict == "yes"


def test_outputs_that_the_inputs_do_not_tell_make_it_depend():
    pairs = np.stack([heavy_tailed(), heavy_tailed(seed=1)], axis=1)
    advice = advise(pairs, Settings(max_tokens=8000), Question(task="generate"))
    assert abs(advice.outputs.correlation) < PROXY
    assert advice.verdict != "yes"


def test_the_cache_of_a_batch_holds_inputs_and_outputs():
    # 40 padded tokens: fixed batches hold two, planned ones two of 20 or ten of 4. Every output is 10 long.
    # A fixed batch holds at most 2 × (20 + 10) = 60 tokens, ten short ones 10 × (4 + 10) = 140.
    pairs = np.stack([np.array([20, 20] + [4] * 20), np.full(22, 10)], axis=1)
    advice = advise(pairs, Settings(max_tokens=40), Question(task="generate"))
    assert advice.fixed_size == 2
    assert advice.outputs.cache_ratio == pytest.approx(140 / 60)
    assert advice.outputs.correlation is None
    # 11 fixed batches decode 10 steps each, three planned ones do; 2 × 30 + 20 × 14 tokens are the least.
    assert advice.against_sorted.launch_bound == pytest.approx(11 / 3)
    assert advice.against_sorted.compute_bound == pytest.approx(1)


def test_several_ranks_wait_for_each_other_in_the_compute_bound_gain():
    rng = np.random.default_rng(2)
    lengths = np.maximum(1, rng.normal(100, rng.uniform(2, 30), 1600)).astype(int)
    settings = Settings(max_tokens=20_000, max_items=2, world_size=8)
    advice = advise(lengths, settings)
    column = lengths[:, None].astype(np.int32)

    def seconds(plan):
        tokens = plan.shapes[:, 0].astype(np.int64) * plan.shapes[:, 1]
        return tokens.reshape(-1, 8).max(axis=1).sum()

    fixed = next(iter(fixed_plans(column, settings).values()))()
    planned = make_plan(column, groupings(column, settings)[advice.planned.name], settings)
    assert advice.gain.compute_bound == pytest.approx(seconds(fixed) / seconds(planned))
    # Counted over all ranks without waiting, it would be 1.05.
    assert advice.gain.compute_bound > 1.15
    assert advice.shuffled.padded_tokens / advice.planned.padded_tokens < WORTH


def test_one_rank_waits_for_nobody():
    advice = advise(heavy_tailed(), Settings(max_tokens=8000))
    for entry in (advice.planned, advice.shuffled, advice.sorted, advice.packed):
        assert entry.waited_tokens == entry.padded_tokens


@pytest.mark.parametrize("against", ["shuffled", "sorted"])
def test_the_cache_is_compared_with_the_batches_that_were_asked_for(against):
    # One output in a hundred is long, wherever its input is: 14,400 tokens at most shuffled, 12,000 sorted.
    rng = np.random.default_rng(5)
    inputs = np.clip(rng.lognormal(3, 1, 3000).astype(int), 1, 500)
    outputs = np.where(rng.random(3000) < 0.01, 400, np.maximum(1, inputs // 2))
    settings, question = Settings(max_tokens=8000), Question(task="generate", against=against)
    advice = advise(np.stack([inputs, outputs], axis=1), settings, question)
    column = inputs[:, None].astype(np.int32)
    planned = make_plan(column, groupings(column, settings)[advice.planned.name], settings)
    largest = max(len(b) * (inputs[b].max() + outputs[b].max()) for b in (planned[i] for i in range(len(planned))))
    assert advice.outputs.cache_ratio == pytest.approx(largest / {"shuffled": 14_400, "sorted": 12_000}[against])


def test_lengths_that_are_even_vary_alike_at_any_fixed_size():
    # Lengths of 100 to 200 vary, lengths of 100 to 110 hardly do, in batches of 2 as in batches of 50.
    for high, hardly in ((200, False), (110, True)):
        lengths = np.random.default_rng(0).integers(100, high + 1, 5000)
        for max_items in (2, 5, 50):
            advice = advise(lengths, Settings(max_tokens=50 * high, max_items=max_items))
            assert advice.lengths_hardly_vary is hardly


def test_ranks_that_are_equal_are_shared():
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: covariance 0.75, variances 0.75 and 1.
    assert rank_correlation(np.array([5, 5, 9]), np.array([1, 2, 3])) == pytest.approx(0.75 / (0.75**0.5))
    assert rank_correlation(np.array([1, 2, 3]), np.array([9, 5, 1])) == -1.0


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=3, max_size=40))
def test_rank_correlation_is_that_of_scipy(pairs):
    stats = pytest.importorskip("scipy.stats")
    first, second = map(np.array, zip(*pairs, strict=True))
    found = rank_correlation(first, second)
    if found is None:
        assert np.ptp(first) == 0 or np.ptp(second) == 0
    else:
        assert found == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-9)


@pytest.mark.parametrize("task", ["train", "generate"])
@pytest.mark.parametrize(
    "lengths",
    [np.full(100, 7), heavy_tailed(500), np.stack([heavy_tailed(500)] * 2, axis=1)],
    ids=["equal", "heavy", "pairs"],
)
def test_advice_is_plain_data(lengths, task):
    found = json.loads(json.dumps(asdict(advise(lengths, Settings(max_tokens=4000), Question(task=task)))))
    assert found["against_shuffled"].keys() == {"compute_bound", "launch_bound"}
    assert found["verdict"] in ("yes", "depends", "no")
