"""goodput that learns the time of an update: what it asks for, says and saves."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest

from batchwright.errors import ArgumentError, MissingSignalError, StateMismatchError
from batchwright.size import BatchSizeController, Observation, chain, goodput, multiple_of, rate_limit
from batchwright.testing import check_policy

from .drawn import noise


class Seconds:
    """``0.1 + 0.001 × num_items`` seconds, and 1e-5 more per token."""

    def predict(self, shapes):
        shapes = np.asarray(shapes)
        return 0.1 + 0.001 * shapes[:, 0] + 1e-5 * shapes[:, 0] * shapes[:, 1]


def drive(controller, num, *, scale=400.0, seconds=lambda size: 0.1 + 0.001 * size, **figures):
    """Observe updates of the size in force; return the sizes."""
    sizes = []
    for _ in range(num):
        ran = controller.size
        given = {name: value(ran) if callable(value) else value for name, value in figures.items()}
        noise = {} if scale is None else {"noise_s": scale, "noise_g2": 1.0}
        sizes.append(controller.observe(**{"batch_size": ran, "seconds": seconds(ran), **noise, **given}))
    return sizes


def control(policy=None, *, min_size=1, max_size=4096, initial=64):
    policy = goodput() if policy is None else policy
    return BatchSizeController(policy, min_size=min_size, max_size=max_size, initial=initial)


def test_the_base_and_twice_the_base_run_for_a_few_updates_each():
    sizes = drive(control(goodput(gain=1.0)), 14)
    # Two updates at the start and the first of a size pay for what is new and are not read: five readings take eight
    # updates, then six.
    assert sizes[:13] == [64] * 7 + [128] * 6
    assert sizes[13] > 128  # the time of twice as much is known, and the noise scale of 400 lets it grow


def test_the_best_size_of_a_device_nobody_knows_is_found():
    for scale in (100.0, 400.0, 2500.0):
        controller = control(goodput(gain=1.0, num_candidates=200), initial=32)
        drive(controller, 200, scale=scale)
        # B / ((c + gB)(N + B)) is largest at B = sqrt(N·c/g).
        assert controller.size == pytest.approx(math.sqrt(scale * 100), rel=0.05)


def test_where_twice_the_base_is_no_faster_it_goes_back():
    sizes = drive(control(initial=64), 40, seconds=lambda size: 0.001 * size + 0.001, noise_g2=-1.0)
    assert sizes[:13] == [64] * 7 + [128] * 6
    assert set(sizes[13:]) == {64}


def test_bounds_that_leave_no_room_above_let_it_look_below():
    controller = control(max_size=64)
    sizes = drive(controller, 60)
    assert 32 in sizes
    assert controller.size == 64  # the best within the bounds


def test_a_size_that_cannot_change_holds():
    assert set(drive(control(min_size=64, max_size=64), 100)) == {64}


def test_it_goes_twice_beyond_what_was_timed_at_a_time():
    controller = control(goodput(largest=100_000), max_size=100_000)
    drive(controller, 100, scale=1e9, seconds=lambda size: 1.0)  # the time is flat as far as anybody knows
    sizes = [decision.new for decision in controller.history]
    assert all(after <= 2.01 * before for before, after in pairwise(sizes))
    assert controller.size > 4000


def test_readings_of_the_clock_beat_the_curve_where_a_size_was_timed():
    def seconds(size):  # no line: 256 takes three times as long as it should
        return (0.1 + 0.001 * size) * (3 if size > 180 else 1)

    controller = control()
    drive(controller, 200, seconds=seconds)
    assert 128 <= controller.size <= 180


def test_the_noise_scale_is_taken_as_the_base_size_while_it_is_not_known():
    controller = control(goodput(gain=1.0, num_candidates=200))
    sizes = drive(controller, 100, noise_g2=-1.0)
    # sqrt(64 · 100) is 80; it never goes below the base for a noise that nobody measured.
    assert controller.size == pytest.approx(80, rel=0.05)
    assert min(sizes) == 64
    assert controller.history[-1].reason.startswith("noise scale not known yet, taken as the base size, 64: ")


@pytest.mark.parametrize(("constant", "per_example"), [(0.0, 0.001), (0.02, 0.001)])
def test_a_noise_that_is_not_known_never_shrinks_the_base(constant, per_example):
    controller = control()
    sizes = drive(controller, 200, noise_g2=-1.0, seconds=lambda size: constant + per_example * size)
    assert min(sizes) == 64
    assert controller.size == 64


def test_a_flat_time_lets_it_grow_to_its_end_before_the_noise_is_known():
    controller = control(initial=32)
    sizes = drive(controller, 120, noise_g2=-1.0, seconds=lambda size: max(0.05, 0.0002 * size))
    assert 200 <= controller.size <= 320  # flat up to 250
    assert sizes[40] >= 200


def test_a_noise_far_above_the_batch_lets_it_grow_before_it_is_known():
    # N is 100,000 and the base is 16: G2 is lost in its error, but the noise scale is surely not small.
    rng, controller = np.random.default_rng(0), control(initial=16, max_size=2048)
    reasons = []
    for _ in range(150):
        s, g2 = noise(rng, 100_000.0, controller.size).values()
        controller.observe(batch_size=controller.size, seconds=0.1, noise_s=s, noise_g2=g2)
        reasons.append(controller.explain())
    assert any("noise scale at least" in decision.reason for decision in controller.history)
    assert controller.size >= 1024


def test_a_noise_below_the_batch_never_lets_it_run_away_while_it_is_not_known():
    for seed in range(5):
        rng, controller = np.random.default_rng(seed), control(initial=64, max_size=65536)
        sizes = []
        for _ in range(300):
            s, g2 = noise(rng, 30.0, controller.size).values()
            sizes.append(
                controller.observe(batch_size=controller.size, seconds=0.01 * controller.size, noise_s=s, noise_g2=g2)
            )
        assert max(sizes) == 128  # the largest that was timed
        assert sizes[-1] <= 64


def test_it_comes_back_down_when_the_noise_falls():
    controller = control(initial=64)
    drive(controller, 150, scale=6400.0)
    high = controller.size
    assert high > 400  # sqrt(6400 · 100) is 800, and 470 is within 3 % of it
    drive(controller, 600, scale=100.0)
    assert controller.size < 200  # sqrt(100 · 100) is 100


def test_it_does_not_swing():
    rng, controller = np.random.default_rng(3), control()
    for _ in range(1500):
        s, g2 = noise(rng, 400.0, controller.size).values()
        seconds = (0.1 + 0.001 * controller.size) * math.exp(0.05 * rng.normal())
        controller.observe(batch_size=controller.size, seconds=seconds, noise_s=s, noise_g2=g2)
    assert controller.num_changes <= 8
    assert 120 <= controller.size <= 320


def test_a_device_that_slows_down_as_a_whole_does_not_move_the_size():
    controller = control()
    drive(controller, 150)
    before = controller.size
    sizes = drive(controller, 300, seconds=lambda size: 2 * (0.1 + 0.001 * size))
    assert set(sizes) == {before}


def test_noise_that_is_measured_now_and_then_will_do():
    controller = control()
    for step in range(300):
        noise = {"noise_s": 400.0, "noise_g2": 1.0} if step % 8 == 0 else {}
        controller.observe(batch_size=controller.size, seconds=0.1 + 0.001 * controller.size, **noise)
    assert 128 <= controller.size <= 270  # as below


def test_batches_formed_ahead_belong_to_the_size_that_they_have():
    controller, ahead = control(), [64] * 4
    for _ in range(200):  # four batches were formed before a size takes effect
        ahead.append(controller.size)
        ran = ahead.pop(0)
        controller.observe(batch_size=ran, seconds=0.1 + 0.001 * ran, noise_s=400.0, noise_g2=1.0)
    assert 128 <= controller.size <= 270  # 128 makes 0.96 of the progress of 200


def test_transforms_after_it_leave_it_working():
    controller = control(chain(goodput(), rate_limit(1.5), multiple_of(8)), initial=64)
    drive(controller, 300)
    assert controller.size % 8 == 0
    assert 128 <= controller.size <= 272


def test_the_reason_can_be_read():
    controller = control(initial=32)
    drive(controller, 40)
    reasons = [decision.reason for decision in controller.history]
    assert reasons[0] == "timing 64, 0 of 5 updates: 64"
    # 207 / 0.307 against 124 / 0.224 is 1.22, and (400 + 124) / (400 + 207) is 0.86.
    assert reasons[-1] == (
        "noise scale 400 over 12 updates: 1.22 times the examples per second of 124, each worth 0.86: 207"
    )
    assert controller.explain().split(": ")[-1].startswith("holds")


def test_tokens_are_the_unit_of_sizes_if_asked_for():
    # 20 tokens per example: a noise scale of 400 examples is 8,000 tokens, c / g is 0.1 / 5e-5 = 2,000 tokens.
    controller = control(goodput(unit="tokens", gain=1.0), max_size=100_000, initial=500)
    for _ in range(200):
        tokens = controller.size
        controller.observe(
            batch_size=tokens // 20, batch_tokens=tokens, seconds=0.1 + 5e-5 * tokens, noise_s=400.0, noise_g2=1.0
        )
    assert controller.size == pytest.approx(4000, rel=0.1)  # sqrt(8000 · 2000)
    assert "times the tokens per second" in controller.history[-1].reason


def test_tokens_may_come_as_a_count_of_all_so_far():
    runs = []
    for is_count in (False, True):
        controller, total = control(goodput(unit="tokens", base_size=1000), max_size=100_000), 0
        for _ in range(100):
            total += controller.size
            tokens = {"tokens": total} if is_count else {"batch_tokens": controller.size}
            figures = {"noise_s": 400.0, "noise_g2": 1.0, "seconds": 0.1 + 5e-5 * controller.size}
            controller.observe(batch_size=controller.size // 20, **tokens, **figures)
        runs.append([decision.new for decision in controller.history])
    assert runs[0] == runs[1]


def test_a_time_model_without_a_length_is_asked_at_the_tokens_per_example():
    policy = goodput(Seconds(), base_size=16, gain=1.0, num_candidates=200)
    controller = control(policy, initial=16)
    drive(controller, 100, batch_tokens=lambda size: 100 * size)
    # c / g = 0.1 / (0.001 + 1e-5 · 100) = 50: the best size is sqrt(400 · 50) = 141.
    assert controller.size == pytest.approx(141, rel=0.04)


def test_a_time_model_without_a_base_takes_the_first_size_in_force():
    controller = control(goodput(Seconds(), length=100, gain=1.0, num_candidates=200), initial=16)
    drive(controller, 100)
    assert controller.size == pytest.approx(141, rel=0.04)


def test_an_observation_without_a_batch_holds():
    controller = control()
    drive(controller, 30)
    before = controller.size
    assert controller.observe(epoch=1) == before
    assert controller.explain() == f"no batch ran: holds {before}"


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_a_reading_that_is_no_duration_is_left_out(seconds):
    controller = control()
    drive(controller, 30, seconds=lambda size: seconds)
    assert controller.num_changes == 0
    assert controller.explain() == "timing 64, 0 of 5 updates: 64"


@pytest.mark.parametrize(
    ("policy", "missing", "message"),
    [
        (goodput(), "seconds", "goodput needs seconds, which was not observed"),
        (goodput(), "noise_s", "goodput needs noise_s, which was not observed; build the Stepper with measure_noise"),
        (goodput(unit="tokens"), "batch_tokens", "goodput needs batch_tokens"),
        (goodput(Seconds(), base_size=8), "batch_tokens", "goodput needs batch_tokens"),
    ],
    ids=["seconds", "noise", "tokens", "tokens of a model"],
)
def test_what_is_missing_is_named(policy, missing, message):
    figures = {"batch_size": 8, "batch_tokens": 80, "seconds": 0.1, "noise_s": 1.0, "noise_g2": 1.0}
    del figures[missing]
    with pytest.raises(MissingSignalError, match=message):
        policy.update(policy.init(), Observation(size=8, **figures))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 8}, "length=8 belongs to a time_model; leave it out or choose that"),
        ({"max_items": 8, "world_size": 2}, "world_size=2, max_items=8 belongs to a time_model"),
        ({"unit": "words"}, "unit must be one of 'examples', 'tokens', got 'words'"),
        ({"base_size": 0}, "base_size must be a whole number of 1 or more, got 0"),
        ({"smallest": 64, "largest": 64}, "smallest must be below largest"),
        ({"base_size": 2, "smallest": 128}, "smallest must be below largest"),
        ({"gain": 0.9}, "gain must be a number of 1 or more, got 0.9"),
        ({"horizon": 0}, "horizon must be a number above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_nonsense_is_refused_when_the_policy_is_made(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        goodput(**arguments)


@pytest.mark.parametrize(
    "text",
    [
        "goodput()",
        "goodput(base_size=64, unit='tokens', smallest=8, largest=512, num_candidates=9, horizon=1000, gain=1.1)",
        "goodput(Seconds, length=64)",
        "goodput(Seconds, base_size=8, unit='tokens')",
    ],
)
def test_a_policy_is_written_as_the_call_that_makes_it(text):
    made = eval(text.replace("Seconds", "Seconds()"))
    assert repr(made) == text


@pytest.mark.parametrize("policy", [goodput(), goodput(unit="tokens"), goodput(Seconds())], ids=repr)
def test_the_contract_of_policies_is_kept(policy):
    check_policy(policy)


def test_a_run_that_was_saved_goes_on_the_same():
    plain, saved = control(), control()
    for step in range(120):
        if step % 10 == 5:
            state = json.loads(json.dumps(saved.state_dict(), allow_nan=False))
            saved = control()
            saved.load_state_dict(state)
        sizes = [
            controller.observe(
                batch_size=controller.size,
                seconds=0.1 + 0.001 * controller.size + 0.01 * math.sin(step),
                noise_s=400.0 + 100 * math.sin(3 * step),
                noise_g2=1.0,
            )
            for controller in (plain, saved)
        ]
        assert sizes[0] == sizes[1]
    assert saved.state_dict() == plain.state_dict()


def test_the_state_stays_small():
    rng, controller = np.random.default_rng(0), control()
    for _ in range(500):
        ran = int(rng.integers(1, 4000))  # whatever runs
        controller.observe(batch_size=ran, seconds=0.1 + 0.001 * ran, noise_s=400.0, noise_g2=1.0)
    assert len(json.dumps(controller.state_dict()["policy_state"])) < 12_000


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base": 0}, "base"),
        ({"has_noise": 1}, r"policy_state\['has_noise'\] must be True or False, got 1"),
        ({"scale": -1.0}, "scale"),
        ({"timings": None}, "must be a list of at most 12 timings, got None"),
        ({"timings": [{"work": 8, "seconds": [-1.0], "pace": None}]}, "seconds"),
        ({"timings": [{"work": 0, "seconds": [], "pace": None}]}, "work"),
        ({"average": {"horizon": 64.0}}, "average"),
        ({"average": None}, "average"),
        ({"explored": -1}, "explored"),
        ({"waited": 0.5}, "waited"),
        ({"more": 1}, "must be a dict with"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_damaged_state_is_refused_and_changes_nothing(changed, message):
    controller = control()
    drive(controller, 30)
    before, state = controller.state_dict(), controller.state_dict()
    state["policy_state"].update(changed)
    with pytest.raises(StateMismatchError, match=message):
        controller.load_state_dict(state)
    assert controller.state_dict() == before
