"""Every strategy by name: the sizes that the course's formulas give, by hand."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.lab.datasets import load
from batchwright.lab.datasets.dataset import difficulty_of, distance_to_mean, rarity
from batchwright.lab.runner._training import run_one
from batchwright.lab.strategies import (
    GROUPS,
    HANDFUL,
    Conditions,
    RunSettings,
    Setup,
    Strategy,
    get,
    names,
    schedule_of,
)
from batchwright.size import BatchSizeController, Observation, Policy
from batchwright.testing import check_policy

# 16 epochs of 1,000 examples, sizes 8 to 128: the batch may grow 16-fold.
SETTINGS = RunSettings.fit(1000, num_epochs=16)


def conditions(**changes):
    usual = {
        "settings": SETTINGS,
        "num_train": 1000,
        "num_classes": 10,
        "difficulty": lambda: np.arange(1000.0),
        "schedule": {0: 8, 500: 32},
        "seconds": lambda num_examples: (5.8 + 0.1 * num_examples) / 1000,
    }
    return Conditions(**{**usual, **changes})


def sizes(name, observations, **changes):
    """The sizes that a controller gives, the first before anything was observed."""
    policy = get(name).make(conditions(**changes)).policy
    controller = BatchSizeController(policy, min_size=1, max_size=10**6, initial=None if policy.start() else 8)
    return [controller.size, *(controller.observe(**observation) for observation in observations)]


def test_all_groups_of_the_document_and_the_others_are_there():
    assert {get(name).group for name in names()} == set(GROUPS)
    assert names()[0] == "constant"
    assert len(set(names())) == len(names())


def test_every_loss_rule_is_there_linear_and_exponential_per_epoch_and_per_batch():
    rules = {
        f"loss_{measure}_{mode}{per}"
        for measure in ("difference", "ema", "variance")
        for mode in ("linear", "exponential")
        for per in ("", "_per_batch")
    }
    assert len(rules) == 12
    assert rules <= set(names())


def test_names_are_ordered_by_group_and_the_handful_follows_that_order():
    groups = [GROUPS.index(get(name).group) for name in names()]
    assert groups == sorted(groups)
    places = [names().index(name) for name in HANDFUL]
    assert places == sorted(places)
    assert HANDFUL[0] == "constant"
    assert len(HANDFUL) < 10


def test_the_handful_has_one_strategy_per_idea():
    ideas = [get(name).group for name in HANDFUL[1:]]
    assert len(set(ideas)) == len(ideas)
    assert {"constant", "exponential", "cyclical", "loss", "entropy", "noise", "lr-coupled", "curriculum"} == set(ideas)


@pytest.mark.parametrize("name", names())
def test_every_policy_keeps_the_contract(name):
    policy = get(name).make(conditions()).policy
    if policy is not None:
        check_policy(policy, min_size=SETTINGS.min_size, max_size=SETTINGS.max_size)


@pytest.mark.parametrize("name", names())
def test_every_strategy_stands_sizes_that_cannot_change(name):
    fixed = RunSettings(num_examples=8000, base_size=8, min_size=8, max_size=8)
    assert isinstance(get(name).make(conditions(settings=fixed)), Setup)


def test_sizes_are_fitted_to_the_data():
    # 1,000 // 64 = 15, so 8; 16 × 8 = 128 is under a quarter of 1,000.
    assert (SETTINGS.min_size, SETTINGS.base_size, SETTINGS.max_size, SETTINGS.num_examples) == (4, 8, 128, 16_000)
    # A quarter of 142 is 35: the power of two below it.
    assert RunSettings.fit(142, num_epochs=1).max_size == 32
    big = RunSettings.fit(50_000, num_epochs=1)
    assert (big.min_size, big.base_size, big.max_size) == (16, 32, 1024)
    # A quarter of 4,000 is 1,000: 512 is the power of two below it.
    assert RunSettings.fit(4_000, num_epochs=1).max_size == 512


def test_small_medium_and_large_constants_stand_side_by_side():
    constants = ("constant_small", "constant", "constant_medium", "constant_large")
    # In the middle: the root of 8 × 128 is 32.
    assert [sizes(name, [{"epoch": 5}]) for name in constants] == [[4, 4], [8, 8], [32, 32], [128, 128]]


def test_with_examples_enough_the_constants_are_small_medium_and_large_as_usually_said():
    # Small up to 32, medium from 64 to 512, large from 1,024.
    big = {"settings": RunSettings.fit(50_000, num_epochs=16), "num_train": 50_000}
    found = [sizes(f"constant_{name}", [], **big)[0] for name in ("small", "medium", "large")]
    assert found == [16, 128, 1024]


def test_linear_adds_the_same_every_epoch_up_to_the_largest():
    # (128 − 8) / 15 = 8 examples an epoch.
    assert sizes("linear", [{"epoch": epoch} for epoch in (1, 2, 15)]) == [8, 16, 24, 128]


def test_exponential_multiplies_by_the_same_every_epoch():
    # 16^(1/15) an epoch: 16^(5/15) = 2.52 after 5, 16 after 15.
    assert sizes("exponential", [{"epoch": epoch} for epoch in (5, 15)]) == [8, 20, 128]


def test_cycles_begin_again_four_times_in_sixteen_epochs():
    # A period of 4 epochs: 40 more each, or times 16^(1/3).
    epochs = [{"epoch": epoch} for epoch in (1, 2, 3, 4, 7, 8)]
    assert sizes("cyclic_linear", epochs) == [8, 48, 88, 128, 8, 128, 8]
    assert sizes("cyclic_exponential", epochs) == [8, 20, 51, 128, 8, 128, 8]


def test_a_cycle_grows_for_several_epochs_in_a_short_run_too():
    # 6 epochs are 2 cycles of 3, in which the size rises twice; it must not jump to and fro every epoch.
    short = {"settings": RunSettings.fit(1000, num_epochs=6)}
    epochs = [{"epoch": epoch} for epoch in range(1, 6)]
    assert sizes("cyclic_linear", epochs, **short) == [8, 68, 128, 8, 68, 128]
    assert sizes("cyclic_exponential", epochs, **short) == [8, 32, 128, 8, 32, 128]


@given(num_epochs=st.integers(6, 200))
def test_cycles_last_three_epochs_or_more_and_come_at_least_twice(num_epochs):
    course = {"settings": RunSettings.fit(1000, num_epochs=num_epochs)}
    found = sizes("cyclic_linear", [{"epoch": epoch} for epoch in range(1, num_epochs)], **course)
    starts = [epoch for epoch, size in enumerate(found) if size == 8]
    lengths = [after - before for before, after in pairwise([*starts, num_epochs])]
    assert 2 <= len(starts) <= 4
    assert min(lengths[:-1]) >= 3
    assert lengths[-1] >= lengths[0] - 1 > 1


@pytest.mark.parametrize("name", ["cyclic_linear", "cyclic_exponential"])
def test_a_run_too_short_for_cycles_is_refused(name):
    message = r"at least 6 epochs, 2 cycles of 3; got 5\. Make the run longer or leave the cyclic strategies out"
    with pytest.raises(ArgumentError, match=message):
        get(name).make(conditions(settings=RunSettings.fit(1000, num_epochs=5)))
    assert not get(name).fits(10, num_epochs=5)
    assert not get(f"replay_{name}").fits(10, num_epochs=5)
    assert get(name).fits(10, num_epochs=6)
    assert get("linear").fits(10, num_epochs=1)


def test_a_falling_loss_grows_the_batch_and_a_rising_one_shrinks_it():
    losses = [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0}, {"epoch": 3, "loss": 1.5}]
    # Exponential: 8·e^0.5 = 13.2, then 13·e^−0.5 = 7.9. Linear: gain 120 / ln 16 = 43, steps of 16 at most.
    assert sizes("loss_difference_exponential", losses) == [8, 8, 13, 8]
    assert sizes("loss_difference_linear", losses) == [8, 8, 24, 8]


def test_the_moving_average_answers_more_slowly():
    losses = [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0}]
    # The average falls from 2 to 0.3·1 + 0.7·2 = 1.7, by 15 %: 8·e^0.15 = 9.3.
    assert sizes("loss_ema_exponential", losses) == [8, 8, 9]


def test_the_size_follows_the_variance_of_the_loss_linearly_and_exponentially():
    # 1, 0.9, 0.81: the variance is 0.006022, as a share of the squared mean 0.00738, and 15 times that 0.1107.
    fall = [{"epoch": epoch, "loss": 0.9 ** (epoch - 1)} for epoch in (1, 2, 3)]
    variance = sum((0.9**k - 2.71 / 3) ** 2 for k in range(3)) / 3 / (2.71 / 3) ** 2
    assert 15 * variance == pytest.approx(0.1107, abs=1e-4)
    assert sizes("loss_variance_exponential", fall) == [8, 8, 8, 9]  # 8·e^0.1107 = 8.94
    assert sizes("loss_variance_linear", fall) == [8, 8, 8, 13]  # 8 + 43.28·0.1107 = 12.79
    rise = [{"epoch": epoch, "loss": 0.9 ** (3 - epoch)} for epoch in (1, 2, 3)]
    assert sizes("loss_variance_exponential", rise)[-1] == 7  # 8·e^−0.1107 = 7.16
    still = [{"epoch": epoch, "loss": 1.0} for epoch in (1, 2, 3)]
    assert sizes("loss_variance_linear", still)[-1] == 8


def test_a_loss_that_fluctuates_shrinks_the_batch():
    # 1, 2, 1 has a variance of 0.125 of the squared mean: at most half of the batch, or 16 examples, goes.
    swing = [{"epoch": epoch, "loss": loss} for epoch, loss in enumerate((1.0, 2.0, 1.0), start=1)]
    assert sizes("loss_variance_exponential", swing)[-1] == 4
    assert sizes("loss_variance_linear", swing)[-1] == 1


def test_the_batch_grows_once_the_loss_is_below_half_of_that_of_a_model_that_knows_nothing():
    # log 10 / 2 = 1.151 for ten classes, 1 / 2 for a standardised target.
    losses = [{"epoch": epoch, "loss": loss} for epoch, loss in enumerate((1.2, 1.1, 0.9), start=1)]
    assert sizes("loss_below", losses) == [8, 8, 16, 32]
    assert sizes("loss_below", losses, num_classes=None) == [8, 8, 8, 8]
    batches = [{"epoch": 0, "batch_size": 8, "loss": loss} for loss in (1.2, 1.1, 0.9)]
    assert sizes("loss_below_per_batch", batches) == [8, 8, 16, 32]
    assert sizes("loss_below", batches) == [8, 8, 8, 8]


def test_the_batch_grows_once_the_loss_has_converged():
    # 0.52 to 0.5 is 3.9 % of their mean, 0.51; 0.6 to 0.51 is 17 %.
    losses = [{"epoch": epoch, "loss": loss} for epoch, loss in enumerate((0.6, 0.52, 0.51, 0.5), start=1)]
    assert sizes("loss_settled", losses) == [8, 8, 8, 8, 16]


def updates(count, epoch, batch_size, memory_fraction):
    """The observations of an epoch; only its last update completes it."""
    figures = {"batch_size": batch_size, "memory_fraction": memory_fraction, "seconds": 9.0}
    return [{"epoch": epoch + (place == count - 1), **figures} for place in range(count)]


def test_memory_and_speed_grow_the_batch_only_together():
    # Seconds are simulated: 5.8 ms and 0.1 ms per example, whatever was measured.
    low = [*updates(3, 0, 8, 0.3), *updates(3, 1, 8, 0.3)]
    assert sizes("memory_and_speed", low) == [8] * 6 + [16]  # the first epoch has nothing to compare with
    # At 16 the speed is 16 / 7.4 after 8 / 6.6, 78 % more: it still rises, and the batch waits an epoch.
    more = [*low, *updates(3, 2, 16, 0.3), *updates(3, 3, 16, 0.3)]
    assert sizes("memory_and_speed", more)[-4:] == [16, 16, 16, 32]
    full = [*updates(3, 0, 8, 0.6), *updates(3, 1, 8, 0.6)]
    assert sizes("memory_and_speed", full) == [8] * 7  # a plateau, but no room
    over = [*low, *updates(3, 2, 16, 0.9)]
    assert sizes("memory_and_speed", over)[-1] == 8  # memory alone shrinks it


def test_memory_per_epoch_decides_by_the_highest_reading_of_the_epoch():
    epoch = [
        {**update, "memory_fraction": share} for update, share in zip(updates(2, 0, 8, 0), (0.3, 0.4), strict=True)
    ]
    assert sizes("memory_batch_per_epoch", epoch) == [8, 8, 16]
    assert sizes("memory_batch", epoch) == [8, 16, 16]  # 8 of 16 say little about the size in force


def test_the_time_of_an_update_is_held_at_its_target():
    # The target is the time of 32: 5.8 + 3.2 = 9 ms. 8 take 6.6 ms: 8 × 9 / 6.6 = 10.9, and so on to 32.
    controller = BatchSizeController(get("step_time").make(conditions()).policy, min_size=1, max_size=10**6, initial=8)
    course = [controller.observe(batch_size=controller.size, seconds=1.0) for _ in range(200)]
    assert controller.history[0].new == 11
    assert course[-1] in (31, 32)
    assert course == sorted(course)
    assert "simulated" in controller.history[0].reason


@pytest.mark.parametrize("name", ["step_time", "memory_and_speed"])
def test_a_strategy_that_follows_time_needs_the_seconds_of_an_update(name):
    with pytest.raises(ArgumentError, match="needs the seconds of an update; give Conditions seconds"):
        get(name).make(conditions(seconds=None))


def test_simulated_seconds_come_from_the_conditions_of_the_run():
    slow = get("step_time").make(conditions(seconds=lambda num_examples: 0.5 * num_examples)).policy
    controller = BatchSizeController(slow, min_size=1, max_size=10**6, initial=8)
    for _ in range(100):
        controller.observe(batch_size=controller.size, seconds=1.0)
    # 32 take 16 s and 8 take 4: four times as many, at most twice as many at once.
    assert [decision.new for decision in controller.history] == [16, 32]


def test_a_damaged_state_of_simulated_seconds_is_refused_as_that_of_the_policy_is():
    policy = get("step_time").make(conditions()).policy
    controller = BatchSizeController(policy, min_size=1, max_size=64, initial=8)
    state = controller.state_dict()
    state["policy_state"]["too_slow"] = "late"
    with pytest.raises(StateMismatchError, match="too_slow"):
        controller.load_state_dict(state)


def test_entropy_maps_certainty_to_size():
    half = [{"epoch": 1, "entropy": math.log(10) / 2}]
    # Halfway between 8 and 128 in factors: 8·16^0.5 = 32.
    assert sizes("entropy", half) == [8, 32]
    assert sizes("entropy_threshold", [{"epoch": 1, "entropy": 0.1}]) == [8, 16]


PER_BATCH = [name for name in names() if name.endswith("_per_batch")]


def test_entropy_per_batch_decides_after_every_batch_and_per_epoch_after_every_epoch():
    # Halfway is 32, certain 128; the mean of both entropies, a quarter of the largest, is 8·16^0.75 = 64.
    batches = [
        {"epoch": 0, "batch_size": 8, "entropy": math.log(10) / 2},
        {"epoch": 1, "batch_size": 8, "entropy": 0.0},
    ]
    assert sizes("entropy_per_batch", batches) == [8, 32, 128]
    assert sizes("entropy", batches) == [8, 8, 64]


def test_the_loss_per_batch_is_compared_after_every_batch():
    batches = [{"epoch": 0, "batch_size": 8, "loss": loss} for loss in (2.0, 1.0)]
    assert sizes("loss_difference_exponential_per_batch", batches) == [8, 8, 13]  # 8·e^0.5
    assert sizes("loss_difference_linear_per_batch", batches) == [8, 8, 24]  # 16 more at most
    # The average falls from 2 to 0.05·1 + 0.95·2 = 1.95, by 2.5 %: gain 120 / ln 16 = 43.3, so 1.08 more.
    assert sizes("loss_ema_linear_per_batch", batches) == [8, 8, 9]
    assert sizes("loss_difference_exponential", batches) == [8, 8, 8]  # the epoch goes on


@pytest.mark.parametrize("name", ["noise", "noise_ratio", "noise_ratio_per_batch"])
def test_noise_is_measured_on_exactly_four_parts_whatever_the_size(name):
    # 21 batches of 6 and a rest of 16, then every size that the strategy asks for: four parts each.
    wine, seen = load("wine"), set()
    made = get(name).make
    settings = RunSettings(num_examples=284, base_size=6, min_size=5, max_size=30, lr=0.01)

    def watched(conditions):
        setup = made(conditions)
        follow = setup.policy

        class Watched(Policy):
            def init(self):
                return follow.init()

            def update(self, state, observation):
                seen.add((observation.batch_size, observation.noise_parts))
                return follow.update(state, observation)

        return replace(setup, policy=Watched())

    run_one(wine, "logistic", Strategy(name="watched", group="noise", make=watched), 0, settings)
    assert {parts for size, parts in seen if size >= 4} == {4}
    assert 6 in {size for size, _ in seen}


def test_noise_per_batch_is_compared_after_every_batch():
    # 4 parts of 2: S = 100, G2 = 0.5 give 3·(100/8) / (0.5 + 100/8) = 2.9 of at most 3.
    batch = {"epoch": 0, "batch_size": 8, "noise_s": 100.0, "noise_g2": 0.5, "noise_parts": 4}
    assert sizes("noise_ratio_per_batch", [batch]) == [8, 16]
    assert sizes("noise_ratio", [batch]) == [8, 8]


@pytest.mark.parametrize("name", PER_BATCH)
def test_strategies_per_batch_change_within_an_epoch_of_a_real_run(name):
    wine = load("wine")
    record = run_one(wine, "logistic", name, 0, RunSettings.fit(142, num_epochs=2, num_evaluations=2, lr=0.01))
    assert record["status"] == "ok"
    assert any(change["examples"] % 142 for change in record["decisions"])


MACHINE = ("memory_and_speed", "memory_batch_per_epoch", "step_time", "loss_below", "loss_settled")


@pytest.mark.parametrize("name", MACHINE)
def test_strategies_of_the_machine_and_of_the_level_of_the_loss_move_in_a_real_run_and_repeat(name):
    data = load("breast_cancer")
    settings = RunSettings.fit(len(data.train), num_epochs=12, num_evaluations=2, lr=0.01)
    first, again = (run_one(data, "logistic", name, 0, settings) for _ in range(2))
    assert first["status"] == "ok"
    assert first["decisions"] == again["decisions"]
    assert any(change["new"] > change["old"] for change in first["decisions"])


def test_the_rate_follows_the_batch_where_they_are_coupled():
    setup = get("lr_coupled_sqrt").make(conditions())
    assert dict(setup.stepper) == {"lr_rule": "sqrt", "base_size": 8}
    assert get("lr_coupled_linear").make(conditions()).stepper["lr_rule"] == "linear"


def test_large_batches_scale_the_rate_as_suits_the_optimizer():
    adam = RunSettings.fit(1000, num_epochs=16, optimizer="adam")
    assert get("constant_large_scaled").make(conditions(settings=adam)).stepper["lr_rule"] == "sqrt"
    setup = get("constant_large_scaled").make(conditions())
    assert setup.stepper["lr_rule"] == "linear"
    # Warm-up over 5 % of 16,000: 400 of 800 examples are half of it.
    assert setup.lr_factor(400 - 128) == 0.5
    assert setup.lr_factor(800) == 1


ANNEALING = ("lr_decay", "batch_ramp", "hybrid")


@pytest.mark.parametrize("max_size", [128, 16])
@pytest.mark.parametrize("examples", [0, 7_999, 8_000, 12_000])
def test_sgd_strategies_that_anneal_have_the_same_noise(examples, max_size):
    # The noise of an update goes with lr / B, whoever takes the decay and wherever the batch ends.
    settings = RunSettings.fit(1000, num_epochs=16, max_size=max_size)
    ratios = []
    for name in ANNEALING:
        setup = get(name).make(conditions(settings=settings))
        size = 8 if setup.policy is None else setup.policy.update(None, Observation(examples=examples))[0]
        assert size <= max_size
        ratios.append(setup.lr_factor(examples) * 8 / size)
    expected = {0: 1, 7_999: 1, 8_000: 1 / 4, 12_000: 1 / 16}[examples]
    assert ratios == pytest.approx([expected] * 3)


def test_the_ramp_grows_at_the_milestones_of_the_decay():
    after = [{"examples": examples} for examples in (7_999, 8_000, 12_000)]
    assert sizes("batch_ramp", after) == [8, 8, 32, 128]
    assert sizes("hybrid", after) == [8, 8, 16, 32]


def test_seesaw_halves_the_rate_where_the_batch_grows_fourfold():
    setup = get("seesaw").make(conditions())
    assert [setup.lr_factor(examples) for examples in (0, 8_000, 12_000)] == [1, 0.5, 0.25]
    assert sizes("seesaw", [{"examples": 12_000}]) == [8, 128]


def test_a_curriculum_begins_with_the_easy_and_grows_with_the_examples():
    setup = get("curriculum").make(conditions(difficulty=lambda: -np.arange(1000.0)))
    # A quarter at first, all of them from epoch 8 on.
    assert sorted(setup.curriculum.prefix(0)) == list(range(750, 1000))
    assert len(setup.curriculum.prefix(8)) == 1000
    assert sizes("curriculum", [{"epoch": 8}]) == [8, 32]
    assert get("curriculum_constant").make(conditions()).policy is None


def test_a_replay_plays_the_sizes_of_a_record():
    record = {
        "curve": [{"batch_size": 8}],
        "decisions": [{"examples": 100, "old": 8, "new": 16}, {"examples": 250, "old": 16, "new": 12}],
    }
    schedule = schedule_of(record)
    assert schedule == {0: 8, 100: 16, 250: 12}
    after = [{"examples": examples} for examples in (99, 100, 249, 250)]
    assert sizes("replay_entropy", after, schedule=schedule) == [8, 8, 16, 16, 12]


def test_any_strategy_can_be_replayed_and_a_replay_without_a_record_is_refused():
    assert get("replay_linear").replays == "linear"
    with pytest.raises(ArgumentError, match="replay_of=record"):
        get("replay_linear").make(conditions(schedule=None))


def test_entropy_is_not_for_regression():
    assert not get("entropy").fits(None)
    assert not get("replay_entropy").fits(None)
    assert get("noise").fits(None)
    with pytest.raises(ArgumentError, match="regression has none"):
        get("entropy").make(conditions(num_classes=None))


@pytest.mark.parametrize("name", ["nothing", "replay_", "replay_replay_noise", ""])
def test_an_unknown_name_is_refused_with_those_there_are(name):
    with pytest.raises(ArgumentError, match="constant_large_scaled"):
        get(name)


def test_a_strategy_of_an_unknown_group_is_refused():
    with pytest.raises(ArgumentError, match="lr-decay"):
        Strategy(name="mine", group="own", make=lambda conditions: Setup())


@pytest.mark.parametrize(
    "change",
    [
        {"max_size": 4},
        {"min_size": 9},
        {"num_examples": 0},
        {"lr": 0.0},
        {"optimizer": "lion"},
        {"momentum": 1.0},
        {"decay_at": (0.75, 0.5)},
        {"decay_at": (1.0,)},
        {"decay_at": 0.5},
        {"decay_at": ("0.5",)},
        {"decay_factor": 0.5},
    ],
)
def test_settings_that_make_no_sense_are_refused(change):
    with pytest.raises(ArgumentError):
        RunSettings(**{"num_examples": 100, "base_size": 8, "min_size": 4, "max_size": 16, **change})


def test_settings_survive_json():
    assert RunSettings.from_dict(SETTINGS.to_dict()) == SETTINGS


def test_difficulty_suits_the_data():
    texts = load("python_functions", limit=40, max_length=32)
    assert difficulty_of(texts).tolist() == texts.lengths.tolist()
    windows = load("python_chars", limit=30)
    assert difficulty_of(windows).shape == (len(windows.train),)
    digits = load("digits", limit=100)
    rows = digits.train.features.reshape(len(digits.train), -1)
    mean = rows[digits.train.labels == digits.train.labels[0]].mean(axis=0)
    assert difficulty_of(digits)[0] == pytest.approx(np.linalg.norm(rows[0] - mean), rel=1e-5)
    assert difficulty_of(load("diabetes")).shape == (354,)


def test_rare_tokens_are_hard():
    # 1 is one of 6 tokens, 0 five: −ln(5/6) and the mean of −ln(5/6) and −ln(1/6).
    found = rarity(np.array([[0, 0], [0, 0], [0, 1]]))
    common, rare = -math.log(5 / 6), -math.log(1 / 6)
    assert found.tolist() == pytest.approx([common, common, (common + rare) / 2])


def test_distance_is_to_the_mean_of_the_own_class():
    rows = np.array([[0.0, 0.0], [6.0, 8.0], [1.0, 1.0]])
    assert distance_to_mean(rows, np.array([3, 3, 7])).tolist() == [5.0, 5.0, 0.0]
