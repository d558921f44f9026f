"""speed_driven and step_time: values by hand, noisy clocks, and nothing that swings."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright import size
from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size import BatchSizeController, Observation
from batchwright.size.policy import TIMES


class Clock:
    """``fixed + each · B`` seconds, give or take a share that is drawn for every batch."""

    def __init__(self, fixed, each, *, noise=0.0, seed=0):
        self.fixed, self.each, self.noise = fixed, each, noise
        self.draws = np.random.default_rng(seed)

    def __call__(self, num):
        return (self.fixed + self.each * num) * (1 + self.noise * self.draws.standard_normal())


def run(policy, clock, num, *, initial=16, max_size=4096, figures=None, restart=False):
    """Return the controller after some updates, and the sizes; with ``restart`` it is saved and loaded each time."""
    controller = BatchSizeController(policy, min_size=1, max_size=max_size, initial=initial)
    sizes = []
    for step in range(num):
        ran = controller.size
        more = {} if figures is None else figures(ran)
        sizes.append(controller.observe(batch_size=ran, seconds=max(1e-6, clock(ran)), epoch=(step + 1) // 10, **more))
        if restart:
            state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
            controller = BatchSizeController(policy, min_size=1, max_size=max_size)
            controller.load_state_dict(state)
    return controller, sizes


def turns(sizes):
    """Return how often a course of sizes changed from rising to falling or back."""
    ways = [math.copysign(1, new - old) for old, new in pairwise(sizes) if new != old]
    return sum(before != after for before, after in pairwise(ways))


def test_speed_by_hand():
    # 0.1 s per update and 0.01 s per example: 16 examples take 0.26 s, 61.5 per second; 32 take 0.42 s, 76.2, which is
    # 23.8 % more; 64: 86.5, 13.5 % more; 128: 92.8, 7.2 %; 256: 96.2, 3.8 %, no more than 5; 512: 98.1, 1.9 %.
    controller, sizes = run(size.speed_driven(per="step", every=3), Clock(0.1, 0.01), 100)
    assert sorted(set(sizes)) == [16, 32, 64, 128, 256, 512]
    assert sizes[-1] == 512
    assert controller.history[1].reason == (
        f"76.19 examples per second, 0 % more than before at 32 (plateau 5 %): 32 {TIMES} 2 = 64"
    )
    assert controller.history[-1].reason.startswith("96.24 examples per second, 3.759 % more than before at 128")
    for _ in range(3):
        controller.observe(batch_size=512, seconds=5.22)
    assert "2 larger batches in a row were no faster: holds 512" in " ".join(explanations(controller))


def explanations(controller):
    found = []
    for _ in range(3):
        controller.observe(batch_size=controller.size, seconds=5.22)
        found.append(controller.explain())
    return found


def test_speed_that_still_rises_holds_the_size():
    # Every period is 10 % faster than the one before, at one size: there is no plateau.
    policy = size.speed_driven(per="step", every=2)
    state, faster = policy.init(), 1.0
    for step in range(21):
        wanted, state = policy.update(state, Observation(size=16, batch_size=16, seconds=faster))
        assert wanted == 16
        faster /= 1.1 if step % 2 == 1 else 1
    assert "still rising" in policy.explain(
        {**state, "readings": {**state["readings"], "count": 1, "values": [1e6]}},
        Observation(size=16, batch_size=16, seconds=1e-6),
    )


def test_speed_without_patience_goes_on_to_the_maximum():
    _, sizes = run(size.speed_driven(per="step", every=2, patience=None), Clock(0, 0.01), 60, max_size=300)
    assert sizes[-1] == 300


def test_speed_tries_again_after_the_device_became_slower():
    policy = size.speed_driven(per="step", every=2, patience=1)
    clock = Clock(0.0, 0.01)
    controller, sizes = run(policy, clock, 20)
    assert sizes[-1] == 32  # the first growth brought nothing
    clock.fixed = 1.0  # now a larger batch is faster
    for _ in range(60):
        controller.observe(batch_size=controller.size, seconds=clock(controller.size))
    assert controller.size > 32


@pytest.mark.parametrize("seed", range(10))
def test_a_noisy_clock_does_not_take_speed_driven_beyond_what_is_faster(seed):
    # As by hand above, with 20 % noise: growth from 128 on brings less than the noise shows.
    _, sizes = run(size.speed_driven(per="step"), Clock(0.1, 0.01, noise=0.2, seed=seed), 1500)
    assert turns(sizes) == 0
    assert 64 <= sizes[-1] <= 1024
    assert len(set(sizes[700:])) == 1


def test_speed_grows_once_per_epoch_at_most():
    _, sizes = run(size.speed_driven(), Clock(0.1, 0.01), 200)
    changes = [step for step, (old, new) in enumerate(pairwise(sizes)) if new != old]
    assert all((step + 2) % 10 == 0 for step in changes)
    assert sizes[-1] == 512


def memory(num):
    return {"memory_fraction": 0.1 + 0.001 * num}


def document_rule(per="step", **options):
    return size.minimum(size.memory_driven(per=per, **options), size.speed_driven(per=per, **options))


def test_memory_low_and_speed_at_a_plateau_grows():
    # 256 examples fill 0.356 of memory, 512 fill 0.612, which is above low: memory holds it there.
    _, sizes = run(document_rule(every=3), Clock(0.0, 0.01), 200, figures=memory)
    assert sizes[-1] == 64  # two growths in vain: the speed is the same at every size
    _, sizes = run(document_rule(every=3), Clock(1.0, 0.001), 200, figures=memory)
    assert sizes[-1] == 512


def test_memory_low_and_speed_rising_holds():
    controller = BatchSizeController(document_rule(every=2), min_size=1, max_size=512, initial=16)
    seconds = 1.0
    for _ in range(20):
        for _ in range(2):
            controller.observe(batch_size=16, seconds=seconds, memory_fraction=0.1)
        seconds /= 1.1
    assert controller.size == 16


def test_memory_in_the_middle_holds_at_a_plateau_of_speed():
    _, sizes = run(document_rule(every=3), Clock(1.0, 0.001), 60, figures=lambda num: {"memory_fraction": 0.6})
    assert set(sizes) == {16}


def test_memory_pressure_shrinks_whatever_the_speed():
    controller, sizes = run(
        document_rule(every=3), Clock(1.0, 0.001), 12, figures=lambda num: {"memory_fraction": 0.9}, initial=64
    )
    assert sizes[-1] == 4
    assert controller.history[0].reason.startswith("minimum of 32, 64; memory 90.0 % full")


def test_the_rule_per_epoch_changes_only_with_the_epoch():
    _, sizes = run(document_rule(per="epoch"), Clock(1.0, 0.001), 200, figures=memory)
    changes = [step for step, (old, new) in enumerate(pairwise(sizes)) if new != old]
    assert changes
    assert all((step + 2) % 10 == 0 for step in changes)
    assert sizes[-1] == 512


@pytest.mark.parametrize("seed", range(5))
def test_the_rule_does_not_swing_with_a_noisy_clock(seed):
    clock = Clock(1.0, 0.001, noise=0.2, seed=seed)
    _, sizes = run(document_rule(), clock, 1500, figures=memory)
    assert turns(sizes) == 0
    assert 128 <= sizes[-1] <= 512


def test_step_time_by_hand():
    # 20 ms and 1 ms per example. 16: 36 ms, at most twice: 32. 52 ms: 32 · 100 / 52 = 61.5. 82 ms (62 ran):
    # 61.5 · 100 / 82 = 75.0: 95 ms, near enough.
    controller, sizes = run(size.step_time(100, every=3), Clock(0.02, 0.001), 60)
    assert sorted(set(sizes)) == [16, 32, 62, 75]
    assert sizes[-1] == 75
    assert controller.history[1].reason == f"52 ms per update, target 100 ms ± 10 %: 32 {TIMES} 1.923 = 61.54"
    assert controller.explain().endswith("holds 75")


def test_step_time_comes_down_to_the_target():
    # 512: 532 ms, at most half: 256, 276 ms: 128; 148 ms: 128 / 1.48 = 86.5; 106 ms is near enough.
    _, sizes = run(size.step_time(100, every=3), Clock(0.02, 0.001), 60, initial=512)
    assert sorted(set(sizes), reverse=True) == [512, 256, 128, 86]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("initial", [2, 2000])
def test_step_time_holds_a_noisy_clock_at_its_target_and_does_not_swing(seed, initial):
    # 20 % noise; 80 examples take 100 ms.
    clock = Clock(0.02, 0.001, noise=0.2, seed=seed)
    _, sizes = run(size.step_time(100), clock, 2000, initial=initial)
    assert 60 <= sizes[-1] <= 110
    assert turns(sizes) <= 2
    assert sum(new != old for old, new in pairwise(sizes[1000:])) <= 2


def test_step_time_ends_its_search_where_time_jumps():
    # 100 examples fit into one wave of 80 ms, 101 need two: no size is near 100 ms.
    _, sizes = run(size.step_time(100, every=2), lambda num: 0.08 * math.ceil(num / 100), 400)
    assert sizes[-1] == 100
    assert len(set(sizes[200:])) == 1


def test_step_time_grows_again_once_updates_are_faster():
    clock = Clock(0.0, 0.001)
    controller, _ = run(size.step_time(100, every=2), clock, 40, initial=400)
    assert controller.size == 100
    clock.each = 0.0005
    for _ in range(40):
        controller.observe(batch_size=controller.size, seconds=clock(controller.size))
    assert 180 <= controller.size <= 220


def test_a_stall_of_the_machine_is_not_followed():
    controller, _ = run(size.step_time(100, every=5), Clock(0.0, 0.001), 1, initial=100)
    for seconds in (0.1, 9.0, 0.1, 0.1, 30.0) * 4:  # two of five batches waited for something else
        controller.observe(batch_size=100, seconds=seconds)
    assert controller.size == 100


def test_batches_of_another_size_and_the_first_of_a_size_do_not_count():
    controller = BatchSizeController(size.step_time(100, every=2), min_size=1, max_size=512, initial=100)
    said = []
    for ran, seconds in [(100, 9.0), (20, 0.02), (100, math.nan), (100, 0.0), (100, 0.1), (100, 0.1)]:
        controller.observe(batch_size=ran, seconds=seconds)
        said.append(controller.explain())
    assert said == [
        "the first batch of a size is left out: holds 100",
        "a batch of 20 says little about the size in force: holds 100",
        "nan is no duration and left out: holds 100",
        "0.0 is no duration and left out: holds 100",
        "gathering the seconds of 2 steps: holds 100",
        "100 ms per update, target 100 ms ± 10 %, near it: holds 100",
    ]


@pytest.mark.parametrize("make", [size.speed_driven, lambda **options: size.step_time(10, **options)])
def test_an_observation_that_only_ends_an_epoch_needs_no_seconds(make):
    controller = BatchSizeController(make(per="epoch"), min_size=1, max_size=512, initial=16)
    for epoch in range(1, 5):
        for _ in range(4):
            controller.observe(epoch=epoch - 1, batch_size=controller.size, seconds=0.005)
        controller.observe(epoch=epoch)
    assert controller.size > 16


@pytest.mark.parametrize("policy", [size.speed_driven(), size.speed_driven(per="step"), size.step_time(10)], ids=repr)
@pytest.mark.parametrize(
    ("figures", "missing"),
    [({"epoch": 1}, "batch_size"), ({"epoch": 1, "batch_size": 8}, "seconds"), ({"seconds": 1.0}, "batch_size")],
)
def test_what_is_missing_is_named(policy, figures, missing):
    controller = BatchSizeController(policy, min_size=1, max_size=512, initial=16)
    with pytest.raises(MissingSignalError, match=f"{policy.name} needs {missing}, which was not observed"):
        controller.observe(**figures)


POLICIES = [
    size.speed_driven(per="step", every=2),
    size.speed_driven(),
    size.step_time(100, every=2),
    size.step_time(100, per="examples", every=64),
    document_rule(every=2),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_state_saved_after_every_update_gives_the_same_sizes(policy):
    plain = run(policy, Clock(0.02, 0.001, noise=0.2), 120, figures=memory)[1]
    saved = run(policy, Clock(0.02, 0.001, noise=0.2), 120, figures=memory, restart=True)[1]
    assert saved == plain
    assert len(set(plain)) > 1


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(readings=st.lists(st.tuples(st.integers(1, 200), st.floats() | st.floats(0.001, 1)), min_size=1, max_size=40))
def test_whatever_the_clock_says_the_size_stays_within_the_bounds(policy, readings):
    controller = BatchSizeController(policy, min_size=4, max_size=64)
    for step, (ran, seconds) in enumerate(readings):
        found = controller.observe(batch_size=ran, seconds=seconds, memory_fraction=0.1, epoch=step // 4)
        assert 4 <= found <= 64
        assert controller.explain()
    json.dumps(controller.state_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: size.speed_driven(plateau=-0.1), "plateau must be a number of 0 or more, got -0.1"),
        (lambda: size.speed_driven(factor=1), "factor must be a number above 1, got 1"),
        (lambda: size.speed_driven(patience=0), "patience must be a whole number of 1 or more, got 0"),
        (
            lambda: size.speed_driven(per="batch"),
            "'examples', 'tokens', got 'batch'",
        ),
        (lambda: size.speed_driven(per="examples"), "speed_driven per examples needs every"),
        (lambda: size.step_time(0), "target_ms must be a number above 0, got 0"),
        (lambda: size.step_time("1 s"), "target_ms must be a number above 0, got '1 s'"),
        (lambda: size.step_time(10, tolerance=1), "tolerance must be a number above 0 and below 1, got 1"),
        (lambda: size.step_time(10, max_factor=1), "max_factor must be a number above 1, got 1"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def sizes_by_time(policy, *, fixed, each, initial, num):
    """Return the sizes on a device with an exact clock."""
    return run(policy, Clock(fixed, each), num, initial=initial)[1]


def test_step_time_does_not_ask_for_a_size_that_is_rounded_to_one_that_was_too_slow():
    # 5 examples take 22.5 ms, too slow; 4 take 18 ms, and 4.44 · 20 / 18 = 4.94 would be 5 again.
    sizes = sizes_by_time(size.step_time(20, tolerance=0.05, every=3), fixed=0.0, each=0.0045, initial=16, num=400)
    assert set(sizes[200:]) == {4}


def test_step_time_settles_behind_a_multiple():
    # 24 examples take 58 ms, too slow, and 16 take 42 ms; nothing is between them.
    policy = size.chain(size.step_time(50), size.multiple_of(8))
    sizes = sizes_by_time(policy, fixed=0.01, each=0.002, initial=64, num=1600)
    assert set(sizes[800:]) == {16}


@given(st.floats(0, 0.02), st.floats(1e-4, 5e-3), st.integers(1, 200), st.sampled_from([1, 3, 8, 24]))
def test_step_time_behind_a_multiple_never_swings_on_an_exact_clock(fixed, each, initial, number):
    policy = size.chain(size.step_time(30, every=3), size.multiple_of(number))
    sizes = sizes_by_time(policy, fixed=fixed, each=each, initial=initial, num=300)
    assert len(set(sizes[200:])) == 1, sizes[-12:]


@pytest.mark.parametrize(
    ("target_ms", "options", "seconds"),
    [
        (1e308, {}, 1e-300),
        (1e-300, {}, 1e308),
        (50, {"max_factor": 1e308}, 1e-308),
        (1e308, {"max_factor": 1e308}, 0.1),
    ],
)
def test_step_time_survives_extremes(target_ms, options, seconds):
    policy = size.step_time(target_ms, every=2, **options)
    controller, sizes = run(policy, lambda num: 10.0 if num > 100 else 1e-6, 20)
    for _ in range(20):
        sizes.append(controller.observe(batch_size=controller.size, seconds=seconds))
    assert all(1 <= num <= 4096 for num in sizes)
    assert controller.explain()
