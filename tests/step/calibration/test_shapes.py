"""Which shapes are measured, on machines whose memory is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import ArgumentError, BudgetError
from batchwright.plan import MaxItems, MaxTokens
from batchwright.step import default_shapes, growing_shapes
from batchwright.step.calibration.result import Calibration, Measurement
from batchwright.step.calibration.shapes import GROWTH, in_turn

from ...thorough import num_cases

GIB = 2**30


def translation_model(shape):
    """The peak of a model with the shape of NLLB-600M, one batch an update: small batches peak in the update."""
    num, source, target = shape
    update = 10.85e9 + 4e4 * num * (source + target)
    loss = 8.66e9 + num * (96e3 + 521e3 * source + 3.127e6 * target + 32.5 * source**2 + 21 * source * target)
    return max(update, loss)


def encoder_decoder(shape, num_bytes):
    """The peak of a T5-base, as measured on a GPU, and up to ``num_bytes`` that the allocator rounds by."""
    num, source, target = shape
    loss = 634.4e3 * source + 1023.7e3 * target + 1301.1 * source**2 + 1299.3 * target**2 + 283.1 * source * target
    update = 626e3 * source + 868.2e3 * target + 1324 * source**2 + 1240.7 * target**2
    smooth = max(4.0742e9 + num * loss, 4.1667e9 + num * update)
    return smooth + num_bytes * np.random.default_rng(shape).random()


def encoder_decoder_without_gradients(shape):
    """The peak of a T5-base in inference, as measured on a GPU: in the encoder where the source is long."""
    num, source, target = shape
    decoder = 519.6e6 + num * (125e3 + 38.1e3 * source + 100.3e3 * target + 16.4 * target**2)
    encoder = 514.3e6 + num * (1442e3 + 15e3 * source + 140.4 * source**2)
    return max(decoder, encoder) * (1 + 0.003 * np.random.default_rng(shape).random())


def short_texts(num, seed=0):
    source = np.exp(np.random.default_rng(seed).normal(np.log(16), 0.95, num))
    target = source * np.exp(np.random.default_rng(seed + 1).normal(0, 0.25, num))
    return np.clip(np.round(np.stack([source, target], axis=1)), 3, 512).astype(int)


def explore(strategy, peak, total_bytes):
    """Run a strategy on a machine; return what was measured, what ran out of memory, and why it stopped."""
    found, failed = [], []
    try:
        shape = next(strategy)
        while True:
            fits = peak(shape) <= total_bytes
            (found if fits else failed).append(Measurement(shape, 0.1, 0.1, int(peak(shape))) if fits else shape)
            shape = strategy.send(found[-1] if fits else None)
    except StopIteration as end:
        return found, failed, end.value


@pytest.mark.parametrize("seed", range(num_cases(1, thorough=2)))
def test_a_budget_from_growing_probes_is_kept_and_filled(seed):
    lengths, limit = short_texts(5_000, seed), int(0.95 * 32 * GIB)
    found, _, _ = explore(growing_shapes(lengths)(limit), translation_model, 32 * GIB)
    budget = Calibration.fit(found, max_bytes=limit).budget()
    plan = bw.plan_batches(lengths, budget, grouping=bw.Sorted())
    shapes = [(len(batch), *lengths[np.asarray(batch)].max(axis=0)) for batch in plan]
    peaks = np.array([translation_model(shape) for shape in shapes])
    assert peaks.max() <= limit
    assert np.median(peaks) > 0.97 * limit


def test_every_row_of_lengths_is_measured_near_the_limit():
    lengths, limit = short_texts(5_000), 30 * GIB
    found, _, _ = explore(growing_shapes(lengths)(limit), translation_model, 32 * GIB)
    best = {}
    for row in found:
        best[row.shape[1:]] = max(best.get(row.shape[1:], 0), row.peak_bytes)
    levels = [np.quantile(lengths, level, axis=0, method="inverted_cdf") for level in (0.1, 0.5, 0.9, 1.0)]
    in_step = [tuple(level.tolist()) for level in levels]
    assert all(best[row] > 0.75 * limit for row in in_step)


@pytest.mark.parametrize("num_bytes", [0, 20e6, 50e6])
def test_what_one_axis_costs_is_told_from_what_the_other_does(num_bytes):
    rng = np.random.default_rng(7)
    lengths = np.exp(rng.uniform(np.log(24), np.log(512), (500, 2))).astype(int)
    found, failed, _ = explore(
        growing_shapes(lengths)(29 * GIB), lambda shape: encoder_decoder(shape, num_bytes), 32 * GIB
    )
    assert not failed
    budget = Calibration.fit(found, max_bytes=29 * GIB).budget()
    rows = np.exp(rng.uniform(np.log(24), np.log(512), (200, 2))).astype(int)
    shapes = [(num, *row) for num, row in zip(budget.max_items(rows).tolist(), rows.tolist(), strict=True)]
    ratios = np.array([encoder_decoder(shape, num_bytes) for shape in shapes]) / (29 * GIB)
    # Probes of rows that are long on both axes alone would leave others above the limit, by 5 % on a GPU.
    assert ratios.max() <= 1
    assert np.median(ratios) > 0.97


@pytest.mark.parametrize("max_tokens", [2**18, 2**20])
def test_how_an_encoder_grows_is_told_where_only_long_sources_peak_there(max_tokens):
    rng = np.random.default_rng(7)
    lengths = np.clip(np.exp(rng.normal(np.log(110), 1.2, (500, 2))), 24, 512).astype(int)
    found, _, _ = explore(
        growing_shapes(lengths, max_tokens=max_tokens)(29 * GIB), encoder_decoder_without_gradients, 32 * GIB
    )
    memory = Calibration.fit(found, max_bytes=29 * GIB).memory
    rows = np.exp(rng.uniform(np.log(24), np.log(512), (300, 2))).astype(int)
    shapes = [(1 + num // 3, *row) for num, row in zip(memory.budget(29 * GIB).max_items(rows), rows, strict=True)]
    ratios = memory.predict(shapes) / [encoder_decoder_without_gradients(shape) for shape in shapes]
    # Without rows of half the longest source 2 % too little, with phases that know nothing of each other 15 % off.
    assert np.abs(ratios - 1).max() < 0.015


def test_a_row_that_runs_out_of_memory_is_measured_with_fewer_items():
    lengths = np.array([(24, 24), (110, 110), (256, 256), (512, 512)] * 5)

    def surprising(shape):
        return encoder_decoder_without_gradients(shape) * (4 if shape[1] < shape[2] < 512 else 1)

    found, failed, stopped = explore(growing_shapes(lengths)(29 * GIB), surprising, 32 * GIB)
    assert {shape[1:] for shape in failed} == {(24, 256)}
    assert {row.shape[1:] for row in found} >= {(24, 110), (24, 256), (110, 24), (256, 24)}
    assert stopped == f"{failed[0]} ran out of memory"


def test_no_shape_is_far_from_what_was_measured():
    found, failed, _ = explore(growing_shapes(short_texts(5_000))(30 * GIB), translation_model, 32 * GIB)
    most = {}
    for shape in [*(row.shape for row in found[10:]), *failed]:
        is_new = shape[1:] not in most and shape[0] > 4 * GROWTH
        # Rows that are long on one axis alone come when all others are known, and stay below the limit.
        assert shape[0] <= GROWTH * most.get(shape[1:], 4) or (is_new and translation_model(shape) < 0.9 * 30 * GIB)
        most[shape[1:]] = shape[0]


def test_running_out_of_memory_is_not_the_end():
    found, failed, stopped = explore(growing_shapes(short_texts(5_000))(31 * GIB), translation_model, 20 * GIB)
    assert failed
    assert stopped == f"{failed[0]} ran out of memory"
    assert len(found) > 15


def test_nothing_as_large_as_what_failed_is_tried_again():
    _, failed, _ = explore(growing_shapes(short_texts(5_000))(31 * GIB), translation_model, 20 * GIB)
    for place, shape in enumerate(failed):
        assert not any(all(a >= b for a, b in zip(shape, other, strict=True)) for other in failed[:place])


def test_without_memory_to_measure_small_batches_are_all():
    found, _, stopped = explore(growing_shapes([8, 16, 32, 64] * 5)(None), lambda shape: 1, 10)
    assert stopped is None
    assert max(row.shape[0] for row in found) == 4


def test_a_batch_is_never_of_more_than_a_quarter_of_a_million_tokens():
    found, failed, _ = explore(growing_shapes([8, 16, 32, 64] * 5)(10**15), lambda shape: 1000 + shape[0], 10**16)
    assert not failed
    assert max(num * length for num, length in (row.shape for row in found)) == 2**18


def test_a_list_is_probed_until_a_shape_is_predicted_over_the_limit():
    found, _, stopped = explore(
        in_turn([(1, 10), (2, 10), (4, 10), (50, 10), (60, 10)], 1400), lambda shape: 1000 + 10 * shape[0], 10**9
    )
    assert [row.shape[0] for row in found] == [1, 2, 4]  # (50, 10) would take 1500
    assert stopped == "(50, 10) is predicted over 1400 bytes"


def test_default_shapes_spread_and_end_at_the_limit():
    lengths = np.random.default_rng(0).lognormal(3, 1, 1000).astype(int).clip(1, 400)
    shapes = np.array(default_shapes(lengths, MaxTokens(4096)))
    tokens = shapes[:, 0] * shapes[:, 1]
    assert len(shapes) == 10
    assert len(np.unique(shapes[:, 0])) >= 2
    assert len(np.unique(shapes[:, 1])) >= 3
    assert lengths.max() in shapes[:, 1]
    assert (np.diff(tokens) >= 0).all()
    assert 0.9 * 4096 < tokens[-1] <= 4096


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=50),
    st.integers(1000, 50_000),
    st.integers(4, 12),
)
def test_default_shapes_of_pairs_keep_the_budget_and_tell_axes_apart(pairs, limit, num):
    shapes = default_shapes(pairs, MaxTokens(limit), num=num)
    assert all(shape[0] * sum(shape[1:]) <= limit for shape in shapes)
    assert len(set(shapes)) == len(shapes) <= num
    longest = np.max(pairs, axis=0)
    for axis in (0, 1):
        assert longest[axis] in {shape[1 + axis] for shape in shapes}
        assert len({shape[1 + axis] for shape in shapes}) >= min(3, longest[axis])


def test_default_shapes_of_one_length_have_shorter_ones_too():
    assert {length for _, length in default_shapes([128] * 9, 8)} == {32, 64, 128}


def test_pairs_whose_longest_sides_never_meet_are_measured_one_side_at_a_time():
    # Each of 600 + 10 fits 1000 tokens, 600 + 600 would not.
    shapes = default_shapes([(600, 10), (10, 600), (50, 50)], MaxTokens(1000))
    assert all(shape[0] * (shape[1] + shape[2]) <= 1000 for shape in shapes)
    assert {600} <= {shape[1] for shape in shapes} & {shape[2] for shape in shapes}


def test_a_budget_no_longest_example_fits_is_refused():
    with pytest.raises(BudgetError, match=r"not one item of length \(600,\) fits MaxTokens\(500\)"):
        default_shapes([10, 600], MaxTokens(500))
    with pytest.raises(ArgumentError, match="num must be a whole number of 4 or more, got 3"):
        default_shapes([10, 600], MaxItems(5), num=3)
