"""What goodput knows of the noise: how far a scale counts, and over how many updates it is averaged."""

import pytest

from batchwright.size import BatchSizeController, Observation, goodput
from batchwright.size.noise import NoiseAverage
from batchwright.size.signals.noise_scale import lean


def drive(controller, num, *, scale, seconds=lambda size: 0.1 + 0.001 * size):
    for _ in range(num):
        ran = controller.size
        controller.observe(batch_size=ran, seconds=seconds(ran), noise_s=scale, noise_g2=1.0)


def control(initial):
    return BatchSizeController(goodput(), min_size=1, max_size=4096, initial=initial)


def test_a_noise_scale_below_the_base_is_drawn_to_it_as_long_as_little_was_measured():
    # 16 measured updates of 32: halfway between the noise scale of 4 and the base of 64, sqrt(4 · 64) = 16.
    assert lean(4.0, 64.0, 16.0) == (pytest.approx(16.0), ", which grows, taken as 16")
    assert lean(4.0, 64.0, 32.0) == (4.0, "")
    assert lean(100.0, 64.0, 2.0) == (100.0, "")


def test_a_low_noise_scale_of_the_first_updates_does_not_shrink_a_batch_that_costs_no_more_time():
    # Launches take 50 ms whatever the batch holds: a noise scale of a tenth of the base is no reason to stay at first.
    controller = control(initial=32)
    drive(controller, 24, scale=3.2, seconds=lambda size: 0.05)
    assert controller.size > 64


def test_the_average_forgets_over_half_of_what_was_measured_within_bounds():
    controller = BatchSizeController(goodput(), min_size=64, max_size=64)
    horizons = []
    for num in (10, 31, 40, 119):  # the newest update comes after 9, 40, 80 and 199 others
        drive(controller, num, scale=64.0)
        horizons.append(controller.state_dict()["policy_state"]["average"]["horizon"])
    assert horizons == [64 * 12, 64 * 20, 64 * 40, 64 * 64]


def test_a_state_without_a_count_of_measured_updates_goes_on_with_what_its_average_holds():
    controller = control(initial=32)
    drive(controller, 40, scale=400.0)
    state = controller.state_dict()["policy_state"]
    old = {name: value for name, value in state.items() if name != "measured"}
    goodput().check_state(old)
    now = Observation(size=controller.size, batch_size=controller.size, seconds=0.3, noise_s=800.0, noise_g2=2.0)
    after = goodput().update(old, now)[1]
    assert state["measured"] == 40
    assert 10 <= after["measured"] <= 41


def observe(policy, state, num, **figures):
    """Return the state after updates of the base of 64 in which every figure stays the same."""
    for _ in range(num):
        figures = {"batch_size": 64, "seconds": 0.1, "noise_s": 640.0, **figures}
        figures["batch_tokens"] = figures["batch_size"]
        state = policy.update(state, Observation(size=64, **figures))[1]
    return state


@pytest.mark.parametrize("unit", ["examples", "tokens"])
def test_the_few_examples_of_an_epochs_last_batch_do_not_push_out_what_whole_ones_told(unit):
    """Two examples count for 1 / 32 of an update of 64, of which the average holds some 64."""
    policy = goodput(base_size=64, unit=unit)
    state = observe(policy, policy.init(), 200, noise_g2=2.0)
    before = NoiseAverage(**state["average"])
    last = observe(policy, state, 1, batch_size=2, noise_g2=98.0)
    after = NoiseAverage(**observe(policy, last, 3, noise_g2=2.0)["average"])
    assert NoiseAverage(**last["average"]).g2 == pytest.approx(2.0, abs=96 * 2 / (64 * 40))
    assert after.g2 == pytest.approx(2.0, abs=96 * 2 / (64 * 40))
    assert after.num_updates == pytest.approx(before.num_updates, rel=0.1)


def test_what_was_measured_at_a_smaller_size_counts_by_its_examples_after_the_size_has_grown():
    """64 updates of 64 are as many examples as 8 of 512: after 8 of these both halves weigh about the same."""
    policy = goodput(base_size=64)
    state = observe(policy, policy.init(), 200, noise_g2=2.0)
    for _ in range(8):
        large = Observation(size=512, batch_size=512, seconds=0.1, noise_s=640.0, noise_g2=4.0)
        state = policy.update(state, large)[1]
    assert NoiseAverage(**state["average"]).g2 == pytest.approx(3.0, abs=0.1)
