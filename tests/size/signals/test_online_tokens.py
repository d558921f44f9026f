"""goodput where updates tell their tokens: lengths give the curve, and short runs come near the best constant size."""

import json
import math
from statistics import median

import numpy as np
import pytest

from batchwright.errors import StateMismatchError
from batchwright.size import BatchSizeController, goodput
from batchwright.size.signals._token_times import add_tokens, mean_seconds, spans_enough, token_timings
from batchwright.testing import check_policy

from .drawn import noise

# Seconds of an update: launch, constant, per token; the mean of lengths and the spread of their logarithm. Like two
# models on an H200: translation is flat up to 256 examples, the decoder up to 64.
DEVICES = {
    "translation": (0.052, 0.012, 0.053 / (512 * 40), 40, 0.8),
    "decoder": (0.046, 0.020, 0.058 / (128 * 150), 150, 0.5),
    "decoder of one length": (0.046, 0.020, 0.058 / (128 * 150), 150, 0.0),
}
BASE, NUM_UPDATES = 32, 200
STARTING = (20.0, 5.0, 3.0)  # times that the first updates of a process take


class Run:
    """Training by the law of McCandlish et al. 2018 on a device, with lengths that differ from batch to batch."""

    def __init__(self, device, scale, seed, *, is_slow_at_first=True):
        self.launch, self.constant, self.each, self.mean, self.sigma = DEVICES[device]
        self.scale, self.rng, self.is_slow = scale, np.random.default_rng(seed), is_slow_at_first
        self.done = self.seconds = 0.0
        self.step, self.shapes = 0, set()

    def length(self):
        return max(1.0, self.mean * math.exp(self.sigma * self.rng.normal() - self.sigma**2 / 2))

    def time_of(self, tokens):
        return max(self.launch, self.constant + self.each * tokens)

    def update(self, size, least_updates):
        """Return the tokens and the seconds of an update; first visits of a shape take 2 to 5 times as long."""
        length = self.length()
        tokens, shape = round(size * length), (size, round(math.log(length, 4)))
        slow = 1.0 if shape in self.shapes or not self.is_slow else self.rng.uniform(2, 5)
        self.shapes.add(shape)
        if self.is_slow and self.step < len(STARTING):
            slow = max(slow, STARTING[self.step])
        seconds = slow * self.time_of(tokens) * math.exp(0.05 * self.rng.normal())
        self.done += 1 / (least_updates * (1 + self.scale(self.done) / size))
        self.seconds, self.step = self.seconds + seconds, self.step + 1
        return tokens, seconds


def best_constant(device, scale):
    """Return the best constant size, and the least updates for which it takes 200."""
    sizes = np.unique(np.rint(np.geomspace(8, 1024, 60)))
    some, done = Run(device, scale, 1), (np.arange(50) + 0.5) / 50
    lengths = [some.length() for _ in range(300)]
    work = {size: np.mean([1 + scale(share) / size for share in done]) for size in sizes}
    times = {size: work[size] * np.mean([some.time_of(size * length) for length in lengths]) for size in sizes}
    best = min(times, key=times.get)
    return int(best), NUM_UPDATES / work[best]


def constant_run(device, scale, seed, size, least_updates, **options):
    run = Run(device, scale, seed, **options)
    while run.done < 1:
        run.update(size, least_updates)
    return run.seconds


def goodput_run(device, scale, seed, least_updates, **options):
    run = Run(device, scale, seed, **options)
    controller = BatchSizeController(goodput(), min_size=4, max_size=2048, initial=BASE)
    while run.done < 1:
        size, measured = controller.size, {}
        if run.step % 8 == 0:
            measured = noise(run.rng, scale(run.done), size)
        tokens, seconds = run.update(size, least_updates)
        controller.observe(batch_size=size, batch_tokens=tokens, seconds=seconds, **measured)
    return run.seconds, controller


SCALES = {"constant noise": lambda done: 32.0, "growing noise": lambda done: 6.0 * 30.0**done}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("device", "limit", "limit_with_visits"),  # each size that is tried pays for its first visits once more
    [("translation", 1.1, 1.2), ("decoder", 1.1, 1.12), ("decoder of one length", 1.1, 1.15)],
)
def test_a_short_run_comes_near_the_best_constant_size(device, limit, limit_with_visits, scale):
    best, least_updates = best_constant(device, SCALES[scale])
    for most, is_slow in ((limit, False), (limit_with_visits, True)):
        ratios, changes = [], []
        for seed in range(7):
            options = {"is_slow_at_first": is_slow}
            seconds, controller = goodput_run(device, SCALES[scale], seed, least_updates, **options)
            least = constant_run(device, SCALES[scale], seed, best, least_updates, **options)
            ratios.append(seconds / least)
            changes.append(controller.num_changes)
        assert median(ratios) <= most
        assert max(ratios) <= most + 0.15
        assert max(changes) <= 8


def drive(controller, num, rng, *, seconds, scale=400.0, sigma=0.8, **figures):
    sizes = []
    for _ in range(num):
        size = controller.size
        tokens = max(1, round(size * 40 * math.exp(sigma * rng.normal())))
        known = {"noise_s": scale, "noise_g2": 1.0, **figures}
        sizes.append(controller.observe(batch_size=size, batch_tokens=tokens, seconds=seconds(tokens), **known))
    return sizes


def control(policy=None, *, initial=32, min_size=4, max_size=2048):
    return BatchSizeController(policy or goodput(), min_size=min_size, max_size=max_size, initial=initial)


def flat_to_ten_thousand(tokens):
    return max(0.05, 5e-6 * tokens)


def test_lengths_that_differ_give_the_curve_without_trying_another_size():
    controller = control()
    for step in range(40):
        tokens = controller.size * (10, 40, 160)[step % 3]
        figures = {"batch_tokens": tokens, "seconds": flat_to_ten_thousand(tokens), "noise_s": -1.0, "noise_g2": -1.0}
        controller.observe(batch_size=controller.size, **figures)
    # Three updates at the start are not read, and three readings make a group.
    first = controller.history[0]
    assert (first.step, first.reason.split(":")[0]) == (12, "noise scale not known yet, taken as the base size, 32")
    assert not any("timing" in decision.reason for decision in controller.history)


def test_lengths_that_do_not_differ_let_twice_the_base_run():
    controller = control()
    drive(controller, 30, np.random.default_rng(0), seconds=flat_to_ten_thousand, sigma=0.0)
    # Three updates at the start are not read.
    assert [(decision.step, decision.new) for decision in controller.history][:1] == [(15, 64)]
    assert controller.history[0].reason == "timing 64, 0 of 6 updates: 64"


def test_a_slow_start_does_not_make_larger_sizes_look_fast():
    for seed in range(5):
        rng, controller = np.random.default_rng(seed), control()
        sizes, started = [], iter((20.0, 5.0, 3.0, 2.5, 2.0))

        def seconds(tokens, started=started):  # no size is faster than another
            return next(started, 1.0) * (1e-3 + 1e-5 * tokens)

        sizes = drive(controller, 60, rng, seconds=seconds, noise_g2=-1.0)
        assert max(sizes) <= 64
        assert sizes[-1] == 32


def test_the_seconds_of_a_size_are_the_mean_over_the_lengths_of_recent_updates():
    readings = []
    for tokens in (100, 200, 400, 800, 1600, 3200):
        readings += [[float(tokens), max(1.0, tokens / 400)]] * 4
    found = mean_seconds(token_timings(readings), np.array([1.0, 4.0]), [100.0, 800.0])
    # One example: (1 + 2) / 2. Four: 400 tokens take 1, and 3,200 take 8.
    assert found == pytest.approx([1.5, 4.5], rel=0.01)


def test_readings_of_first_visits_are_left_out_of_a_group():
    rng = np.random.default_rng(0)
    readings = [[100.0, (1.0 if rng.random() < 0.5 else rng.uniform(2, 5))] for _ in range(40)]
    (timing,) = token_timings(readings)
    assert set(timing["seconds"]) == {1.0}


def test_three_groups_over_a_factor_of_four_are_enough():
    groups = [[[tokens, 1.0]] * 4 for tokens in (100.0, 200.0, 400.0)]
    assert spans_enough(token_timings([*groups[0], *groups[1], *groups[2]]))
    assert not spans_enough(token_timings(groups[0] + groups[2]))
    assert not spans_enough(token_timings(groups[0] + groups[1] + [[300.0, 1.0]] * 4))


def test_the_oldest_reading_of_what_was_read_most_leaves_first():
    readings = [[50.0, 9.0]]
    for number in range(300):
        readings = add_tokens(readings, 1000, 1 + number / 1e6)
    assert readings[0] == [50.0, 9.0]
    assert len(readings) == 160
    assert readings[-1][1] == 1 + 299 / 1e6


def test_readings_of_the_same_tokens_are_one_group_behind_a_few_smaller_ones():
    (one,) = token_timings([[1024.0, 0.5], *([[2048.0, 1.0]] * 20)])
    assert one["work"] == 2048
    # A group is full here after four readings, and the next one would begin one token further on.
    readings = [[1024.0, 0.5], *([[2047.0, 1.0], [2048.0, 1.01]] * 10)]
    assert len(token_timings(readings)) == 1


@pytest.mark.parametrize(("bounds", "last"), [((16, 16), 16), ((8, 16), 16)])
def test_epochs_that_end_with_half_a_batch_of_one_length_do_not_end_training(bounds, last):
    controller = BatchSizeController(goodput(), min_size=bounds[0], max_size=bounds[1], initial=16)
    left = 1000  # 62 batches of 16 and one of 8
    for _ in range(400):
        size = min(controller.size, left)
        left = left - size or 1000
        figures = {"batch_tokens": 128 * size, "seconds": 0.02 + 1e-4 * size}
        controller.observe(batch_size=size, noise_s=400.0, noise_g2=2.0, **figures)
    assert controller.size == last


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_a_reading_that_is_no_duration_is_left_out(seconds):
    assert add_tokens([], 100, seconds) == []


def test_a_device_that_slows_down_as_a_whole_does_not_move_the_size():
    rng, controller = np.random.default_rng(1), control()
    drive(controller, 200, rng, seconds=flat_to_ten_thousand)
    before, num = controller.size, controller.num_changes
    drive(controller, 300, rng, seconds=lambda tokens: 2 * flat_to_ten_thousand(tokens))
    assert controller.num_changes <= num + 1
    assert controller.size == pytest.approx(before, rel=0.35)


def test_it_does_not_swing_and_comes_down_when_the_noise_falls():
    rng, controller = np.random.default_rng(3), control()

    def seconds(tokens):
        return (0.1 + 2e-5 * tokens) * math.exp(0.05 * rng.normal())

    drive(controller, 1000, rng, seconds=seconds, scale=2000.0)
    high, num = controller.size, controller.num_changes
    assert 250 <= high <= 800  # sqrt(2000 · 0.1 / (2e-5 · 55)) is 426
    assert num <= 12
    drive(controller, 600, rng, seconds=seconds, scale=20.0)
    assert controller.size < 100  # sqrt(20 · 91) is 43


def test_tokens_that_come_after_the_first_updates_are_taken_up():
    rng, controller = np.random.default_rng(0), control()
    for _ in range(4):
        controller.observe(batch_size=32, seconds=0.05, noise_s=1.0, noise_g2=1.0)
    drive(controller, 30, rng, seconds=flat_to_ten_thousand)
    state = controller.state_dict()["policy_state"]
    assert state["timings"] == []
    assert len(state["readings"]) > 20


def test_a_run_that_timed_sizes_before_goes_on_with_them():
    controller = control()
    for _ in range(40):
        size = controller.size
        controller.observe(batch_size=size, seconds=0.1 + 0.001 * size, noise_s=400.0, noise_g2=1.0)
    state = controller.state_dict()
    for name in ("readings", "lengths"):  # as an earlier version saved it
        del state["policy_state"][name]
    again = control()
    again.load_state_dict(state)
    drive(again, 40, np.random.default_rng(0), seconds=lambda tokens: 0.2, sigma=0.0)
    assert again.state_dict()["policy_state"]["readings"] == []
    assert len(again.state_dict()["policy_state"]["timings"]) >= 2


def test_a_run_that_was_saved_goes_on_the_same():
    plain, saved, rng = control(), control(), np.random.default_rng(0)
    for step in range(150):
        if step % 10 == 5:
            state = json.loads(json.dumps(saved.state_dict(), allow_nan=False))
            saved = control()
            saved.load_state_dict(state)
        length, off = 40 * math.exp(0.8 * rng.normal()), math.exp(0.05 * rng.normal())
        for controller in (plain, saved):
            tokens = round(controller.size * length)
            figures = {"batch_tokens": np.int64(tokens), "seconds": np.float32(off * flat_to_ten_thousand(tokens))}
            controller.observe(batch_size=controller.size, noise_s=400.0 + step, noise_g2=np.float64(1.0), **figures)
        assert saved.size == plain.size
    assert saved.state_dict() == plain.state_dict()


def test_the_state_stays_small():
    rng, controller = np.random.default_rng(0), control()
    drive(controller, 600, rng, seconds=lambda tokens: float(rng.random()), sigma=2.0)
    assert len(json.dumps(controller.state_dict()["policy_state"])) < 9_000


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"readings": None}, r"policy_state\['readings'\] must be a list of at most 160 pairs, got None"),
        ({"readings": [[1.0]]}, r"\['readings'\]\[0\] must hold tokens and seconds, got \[1.0\]"),
        ({"readings": [[1.0, 0.0]]}, "must be a number above 0"),
        ({"lengths": [0.0]}, "must be a number above 0"),
        ({"lengths": [1.0] * 33}, "must be a list of at most 32 numbers"),
        ({"lengths": []}, r"\['lengths'\] must not be empty beside readings"),
    ],
    ids=["none", "one number", "no seconds", "no length", "too many", "no lengths"],
)
def test_a_damaged_state_is_refused(changed, message):
    controller = control()
    drive(controller, 60, np.random.default_rng(0), seconds=flat_to_ten_thousand)
    state = controller.state_dict()
    state["policy_state"].update(changed)
    with pytest.raises(StateMismatchError, match=message):
        control().load_state_dict(state)


def test_readings_of_one_amount_alone_let_sizes_be_timed_again_at_the_next_look():
    controller = control()
    drive(controller, 60, np.random.default_rng(0), seconds=flat_to_ten_thousand)
    state = controller.state_dict()
    state["policy_state"].update(readings=[[1.0, 1.0]] * 9, waited=127)
    again = control()
    again.load_state_dict(state)
    again.observe(batch_size=again.size, batch_tokens=1, seconds=1.0)
    assert again.state_dict()["policy_state"]["explored"] is not None


def test_a_pace_that_changes_is_seen_though_most_updates_are_not_grouped():
    rng, controller = np.random.default_rng(0), control()
    drive(controller, 100, rng, seconds=flat_to_ten_thousand)
    before = {tuple(pair) for pair in controller.state_dict()["policy_state"]["readings"]}
    drive(controller, 30, rng, seconds=lambda tokens: 3 * flat_to_ten_thousand(tokens))
    kept = [tuple(pair) for pair in controller.state_dict()["policy_state"]["readings"][:-30]]
    assert sum(pair in before for pair in kept) <= 5  # others were scaled; a few were among the newest then


def test_the_contract_of_policies_is_kept():
    rng = np.random.default_rng(0)
    figures = {"noise_s": 400.0, "noise_g2": 1.0, "seconds": 0.1}
    tokens = [int(320 * math.exp(0.8 * rng.normal())) for _ in range(40)]
    course = [{"batch_size": 8, "batch_tokens": number, **figures} for number in tokens]
    check_policy(goodput(), observations=course)
