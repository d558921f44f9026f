"""The ratio of the whole gradient's noise to that of a few vectors, from the updates that measured both."""

import math

import pytest

from batchwright.size.noise import NoiseRatio


def after(*updates, ratio=None):
    ratio = ratio or NoiseRatio()
    for whole, vectors in updates:
        ratio = ratio.update(whole, vectors)
    return ratio


def test_large_gradients_of_the_first_update_count_no_more_than_others():
    """Ten updates whose g2 is 4 times that of the vectors, after one of twice, a million times as large."""
    first, others = ((4e6, 2e6), (1e6, 1e6)), [((4.0, 0.4), (1.0, 0.1))] * 10
    assert after(first, *others).factors[1] == pytest.approx(after(((4.0, 2.0), (1.0, 1.0)), *others).factors[1])
    assert after(*others).factors == pytest.approx((4.0, 4.0))


def test_the_unit_of_the_loss_does_not_matter():
    updates = [((4.0 + place % 3, 0.4), (1.0, 0.1 + place / 50)) for place in range(8)]
    larger = [tuple(tuple(1e8 * value for value in pair) for pair in update) for update in updates]
    assert after(*larger).factors == pytest.approx(after(*updates).factors)
    assert after(*larger).trust == pytest.approx(after(*updates).trust)


def test_averages_of_an_earlier_version_go_on_in_the_unit_of_the_vectors():
    """Saved as they were measured: s of the vectors is 10 there, and 1 in averages of now."""
    now = after(*[((40.0, 2.0), (10.0, 1.0))] * 20)
    square, plain = ("g2_square", "g2_product", "g2_vectors_square"), ("s", "g2", "s_vectors", "g2_vectors")
    state = now.to_state()
    earlier = {**state, **{name: 10 * state[name] for name in plain}, **{name: 100 * state[name] for name in square}}
    read = NoiseRatio.from_state(earlier)
    assert read.factors == pytest.approx(now.factors)
    assert read.trust == pytest.approx(now.trust)
    update = ((44.0, 3.0), (10.0, 1.2))
    assert after(update, ratio=read).to_state() == pytest.approx(after(update, ratio=now).to_state())


@pytest.mark.parametrize(
    "update",
    [((4.0, 1.0), (0.0, 1.0)), ((4.0, 1.0), (-1.0, 1.0)), ((math.nan, 1.0), (1.0, 1.0)), ((4.0, 1e149), (1e-30, 1.0))],
    ids=["no noise", "below 0", "no number", "too large"],
)
def test_what_cannot_be_compared_is_left_out(update):
    known = after(((4.0, 2.0), (1.0, 1.0)))
    assert after(update, ratio=known) == known
