"""A step that peaks in one of two phases, fitted as the larger of two sets of terms."""

import json

import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.plan.models._terms import Terms
from batchwright.plan.models.memory import one_phase, peak_of, two_phases

UPDATE = Terms(1, (5000.0, 0.0, 0.5, 0.0))
LOSS = Terms(1, (2000.0, 0.0, 3.0, 0.0))
SHAPES = np.array([(b, length) for b in (1, 4, 16, 40, 64, 100) for length in (8, 32, 64, 128)])
PEAKS = np.maximum(UPDATE.predict(SHAPES), LOSS.predict(SHAPES))


def test_the_larger_phase_counts():
    # 10 × 100 tokens: 5000 + 500 against 2000 + 3000; 20 × 100: 5000 + 1000 against 2000 + 6000
    assert peak_of((UPDATE, LOSS), [[10, 100], [20, 100]]).tolist() == [5500.0, 8000.0]


def test_two_phases_are_found_from_measured_peaks():
    large, small = two_phases(SHAPES, PEAKS)
    assert large.named() == pytest.approx(LOSS.named(), abs=1e-6, rel=1e-6)
    assert small.named() == pytest.approx(UPDATE.named(), abs=1e-6, rel=1e-6)


def test_one_phase_cannot_follow_the_bend():
    error = np.abs(peak_of(one_phase(SHAPES, PEAKS), SHAPES) / PEAKS - 1).max()
    assert error > 0.1


def test_one_phase_is_kept_where_two_gain_nothing():
    assert len(two_phases(SHAPES, LOSS.predict(SHAPES))) == 1


def test_an_encoder_and_a_decoder_may_peak_in_turn():
    encoder, decoder = Terms(2, (100.0, 0.0, 9.0, 1.0, 0.0, 0.0, 0.0)), Terms(2, (100.0, 0.0, 2.0, 7.0, 0.0, 0.0, 0.0))
    shapes = np.array([(b, one, two) for b in (1, 4, 16) for one in (8, 30, 64) for two in (8, 32, 60)])
    peaks = np.maximum(encoder.predict(shapes), decoder.predict(shapes))
    model = bw.MemoryModel.fit(shapes, peaks)
    unseen = np.array([(7, 50, 20), (7, 20, 50), (30, 64, 10)])
    expected = np.maximum(encoder.predict(unseen), decoder.predict(unseen))
    np.testing.assert_allclose(model.predict(unseen), expected, rtol=0.03)  # one phase is 16 % off


def test_a_phase_seen_at_one_length_alone_takes_no_more_at_others():
    # An encoder with squared cost beside a decoder: a T5-base without gradients, as measured on a GPU, in kB.
    encoder = Terms(2, (514e3, 0.0, 0.0, 0.0, 175e-3, 0.0, 0.0))
    decoder = Terms(2, (520e3, 0.0, 37.0, 110.0, 0.0, 0.0, 0.0))
    shapes = np.array(
        [
            (b, one, two)
            for b in (1, 8, 64, 200)
            for one, two in ((24, 24), (110, 110), (512, 512), (24, 512), (512, 24))
        ]
    )
    peaks = np.maximum(encoder.predict(shapes), decoder.predict(shapes))
    is_encoder = encoder.predict(shapes) > decoder.predict(shapes)
    assert {tuple(row) for row in shapes[is_encoder, 1:]} == {(512, 24)}
    phases = two_phases(shapes, peaks)
    np.testing.assert_allclose(peak_of(phases, shapes), peaks, rtol=1e-6)
    # Terms that share equally what (512, 24) takes would be 2.3 times it at half the length, and 66 % over the peak.
    unseen = np.array([(100, 256, 24), (100, 110, 24), (50, 300, 300)])
    expected = np.maximum(encoder.predict(unseen), decoder.predict(unseen))
    np.testing.assert_allclose(peak_of(phases, unseen), expected, rtol=0.2)


def test_a_model_keeps_two_phases_where_they_foretell_better():
    model = bw.MemoryModel.fit(SHAPES, PEAKS)
    assert model.other is not None
    assert model.margin <= 0.01
    assert model.least_bytes == pytest.approx(5000)


def test_few_shapes_are_fitted_with_one_phase():
    assert bw.MemoryModel.fit(SHAPES[:11], PEAKS[:11]).other is None


def test_a_model_of_two_phases_survives_json():
    model = bw.MemoryModel.fit(SHAPES, PEAKS)
    assert bw.MemoryModel.from_json(model.to_json()) == model


def test_a_broken_second_phase_is_refused():
    state = json.loads(bw.MemoryModel.fit(SHAPES, PEAKS).to_json())
    state["other"]["b*L0"] = -1
    with pytest.raises(ArgumentError, match=r"needs b\*L0, a number of 0 or more"):
        bw.MemoryModel.from_json(json.dumps(state))


@pytest.mark.parametrize("limit", [4999, 5100, 6000, 9000, 50_000])
def test_a_budget_fills_up_to_the_larger_phase(limit):
    model = bw.MemoryModel(LOSS, 0.0, UPDATE)
    lengths = np.arange(1, 200)[:, None]
    budget = model.budget(limit)
    most = budget.max_items(lengths)

    def peak(num):
        return np.maximum(5000 + num * lengths[:, 0] * 0.5, 2000 + num * lengths[:, 0] * 3.0)

    assert (peak(most)[most > 0] <= limit).all()
    assert (peak(most + 1) > limit).all()
    assert (budget.fraction(most + 1, lengths) > 1).all()
