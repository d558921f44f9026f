"""The ready strategies by name, and those that look at training or at the machine.

Schedules, which know their sizes before training, are in their own file. Here are the loss, the entropy of the output,
the noise of the gradient, a curriculum, memory and time. Every signal can be read per epoch or per batch; a single
batch says little, so what is read per batch is averaged more where the rule has a setting for it. Memory and seconds
are simulated, so that the same seed gives the same sizes on every machine.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, final

from ... import size
from ...errors import ArgumentError
from . import schedules
from .schedules import schedule_of as schedule_of
from .strategy import GROUPS, Conditions, Ready, Seconds, Setup, Strategy, add_to

Measure: TypeAlias = Literal["difference", "ema", "variance"]
Mode: TypeAlias = Literal["linear", "exponential"]
Per: TypeAlias = Literal["epoch", "step"]

_HERE: Ready = {}
_ready = partial(add_to, _HERE)
_REPLAY = "replay_"
# Adaptive strategies whose sizes are repeated by default, to tell adapting from growing.
_REPLAYED = ("loss_difference_exponential", "entropy", "noise")
# One strategy per idea, the baseline first: what a first look at data of your own compares.
HANDFUL = (
    *("constant", "constant_large", "exponential", "cyclic_linear", "loss_difference_exponential"),
    *("entropy", "noise", "lr_coupled_linear", "curriculum"),
)
# How names and sentences tell the unit in which a signal is read.
_PER: dict[Per, tuple[str, str]] = {"epoch": ("", "epoch"), "step": ("_per_batch", "batch")}
_UNITS: dict[Per, str] = {"epoch": "epochs", "step": "batches"}
# Smaller relative changes of an epoch's loss count as no change. Averages over batches change less at a time.
_TOLERANCE: dict[Per, float] = {"epoch": 0.005, "step": 0.0}
# The weight of the newest loss in the moving average: about three epochs, or twenty batches, count.
_ALPHA: dict[Per, float] = {"epoch": 0.3, "step": 0.05}
# Losses in the window of the variance; a run has about 16 epochs.
_WINDOW: dict[Per, int] = {"epoch": 3, "step": 16}
# Times the gain of a difference: a loss that falls by 10 % per epoch has a variance of 0.0074 over three, and
# 15 × 0.0074 is 0.11. Batches fluctuate by about a third, which would take the whole step every time.
_VARIANCE_GAIN: dict[Per, float] = {"epoch": 15.0, "step": 1.0}
# A standard deviation of about a third of the loss counts as fluctuating; a fall of 30 % per epoch does not yet.
_FLUCTUATING = 0.1
# The share of the loss of a model that knows nothing below which the batch grows.
_LOW_LOSS = 0.5
# The largest difference of three epochs' losses, as a share, at which the loss has settled.
_SETTLED = 0.1
_NOISE_PARTS = 4
# Epochs over which the averages of noise forget, and the pause between two changes.
_NOISE_HORIZON = 4
_NOISE_PAUSE = 0.25
_START_FRACTION = 0.25
# How near the time of an update must be to its target, as a share, and over how many updates it is measured.
_NEAR = 0.001
_NUM_TIMED = 4


def _loss(conditions: Conditions, measure: Measure, mode: Mode, per: Per) -> Setup:
    up, down, gain = _linear_response(conditions) if mode == "linear" else (2.0, 0.5, 1.0)
    steps: dict[str, Any] = {"mode": mode, "up": up, "down": down, "per": per}
    if measure == "variance":
        window, gain = _WINDOW[per], gain * _VARIANCE_GAIN[per]
        return Setup(policy=size.loss_driven("variance", window=window, gain=gain, fluctuating=_FLUCTUATING, **steps))
    policy = size.loss_driven(measure, alpha=_ALPHA[per], gain=gain, tolerance=_TOLERANCE[per], **steps)
    return Setup(policy=policy)


def _linear_response(conditions: Conditions) -> tuple[float, float, float]:
    """Return the limits of a step and the gain with which both responses cross the range on the same fall of the loss.

    The exponential response with a gain of 1 makes the batch about proportional to ``1 / loss``, so it crosses the
    range while the loss falls by the factor ``max_size / base_size``; the relative falls then add up to about its
    logarithm.
    """
    settings = conditions.settings
    gain = (settings.max_size - settings.base_size) / math.log(max(2.0, conditions.growth))
    return 2.0 * settings.base_size, 2.0 * settings.base_size, max(1.0, gain)


_MEASURES: dict[Measure, str] = {
    "difference": "Grows while the loss falls from {unit} to {unit}",
    "ema": "Grows while the moving average of the losses falls from {unit} to {unit}",
    "variance": "Changes with the variance of the loss over {window} {units}: up while it falls, else down",
}
_MODES: tuple[Mode, ...] = ("linear", "exponential")
for _unit, (_suffix, _word) in _PER.items():
    for _measure, _what in _MEASURES.items():
        for _mode in _MODES:
            _about = f"{_what.format(unit=_word, units=_UNITS[_unit], window=_WINDOW[_unit])}; the response is {_mode}."
            _ready("loss", f"loss_{_measure}_{_mode}{_suffix}", _about)(
                partial(_loss, measure=_measure, mode=_mode, per=_unit)
            )


def _loss_below(conditions: Conditions, per: Per) -> Setup:
    # A model that knows nothing has a loss of log C; of a standardised target, one that predicts the mean has 1.
    at_first = 1.0 if conditions.num_classes is None else math.log(max(2, conditions.num_classes))
    return Setup(policy=size.loss_below(_LOW_LOSS * at_first, per=per))


for _unit, (_suffix, _word) in _PER.items():
    _about = f"Doubles after each {_word} whose loss is below half of what a model that knows nothing has."
    _ready("loss", f"loss_below{_suffix}", _about)(partial(_loss_below, per=_unit))


@_ready("loss", "loss_settled", "Doubles when the loss has converged: three epochs within 10 %.")
def _loss_settled(conditions: Conditions) -> Setup:
    return Setup(policy=size.loss_settled(tolerance=_SETTLED))


def _entropy(conditions: Conditions, per: Per) -> Setup:
    smallest, largest = conditions.settings.base_size, conditions.settings.max_size
    if smallest == largest:  # nothing to choose from
        return Setup()
    return Setup(policy=size.entropy_driven(_num_classes(conditions), smallest=smallest, largest=largest, per=per))


def _entropy_threshold(conditions: Conditions, per: Per) -> Setup:
    return Setup(policy=size.entropy_driven(_num_classes(conditions), mode="threshold", per=per))


def _num_classes(conditions: Conditions) -> int:
    if conditions.num_classes is None:
        raise ArgumentError("entropy needs a choice between classes; regression has none")
    return conditions.num_classes


for _unit, (_suffix, _word) in _PER.items():
    _about = f"The mean entropy per {_word} sets the size: the base size at log C, the largest at 0."
    _ready("entropy", f"entropy{_suffix}", _about)(partial(_entropy, per=_unit))
    _about = f"Doubles after each {_word} below 30 % of the largest entropy, halves above 70 %."
    _ready("entropy", f"entropy_threshold{_suffix}", _about)(partial(_entropy_threshold, per=_unit))


@_ready("noise", "noise", "Follows the unbiased noise scale tr(Σ)/|G|², in examples.")
def _noise(conditions: Conditions) -> Setup:
    # The average needs several updates of the largest size before it is reliable.
    horizon = max(_NOISE_HORIZON * conditions.num_train, 16 * conditions.settings.max_size)
    pause = max(1, round(_NOISE_PAUSE * conditions.num_train))
    follow = size.noise_driven(horizon=horizon, num_examples=conditions.num_train)
    policy = size.chain(follow, size.rate_limit(2), size.hysteresis(0.25), size.cooldown(examples=pause))
    return Setup(policy=policy, noise_parts=_NOISE_PARTS)


def _noise_ratio(conditions: Conditions, per: Per) -> Setup:
    return Setup(policy=size.noise_driven(estimator="ratio", per=per), noise_parts=_NOISE_PARTS)


for _unit, (_suffix, _word) in _PER.items():
    _about = (
        f"Doubles after each {_word} whose gradient variance over {_NOISE_PARTS} parts is high for its squared norm, "
        "halves where low."
    )
    _ready("noise", f"noise_ratio{_suffix}", _about)(partial(_noise_ratio, per=_unit))


@_ready("curriculum", "curriculum", "Easy examples first; the batch grows with the share of examples in use.")
def _curriculum(conditions: Conditions) -> Setup:
    curriculum = _easy_first(conditions)
    return Setup(policy=curriculum.policy(conditions.settings.base_size), curriculum=curriculum)


@_ready("curriculum", "curriculum_constant", "Easy examples first, at the base size.")
def _curriculum_constant(conditions: Conditions) -> Setup:
    return Setup(curriculum=_easy_first(conditions))


def _easy_first(conditions: Conditions) -> size.Curriculum:
    if conditions.difficulty is None:
        raise ArgumentError("a curriculum needs a score for every example; give Conditions a difficulty")
    # Early epochs are short, so that all examples are in use after about a third of the run.
    full_at = conditions.num_epochs / 2
    return size.Curriculum(conditions.difficulty(), start_fraction=_START_FRACTION, full_at=full_at)


def _room(conditions: Conditions) -> int:
    return max(2, conditions.settings.max_size // 2)


def _memory_batch(conditions: Conditions, per: Per) -> Setup:
    return Setup(policy=size.memory_driven(per=per), room=_room(conditions))


for _name, _unit, _when in (("memory_batch", "step", "batch"), ("memory_batch_per_epoch", "epoch", "epoch")):
    _about = f"Doubles after each {_when} that leaves a simulated memory under 48 % full, halves above 80 %."
    _ready("memory", _name, _about)(partial(_memory_batch, per=_unit))


@_ready(
    "memory",
    "memory_micro",
    "The base size, run in micro-batches that fit a simulated memory: the same updates as the baseline.",
)
def _memory_micro(conditions: Conditions) -> Setup:
    return Setup(room=conditions.settings.base_size, fit_micro_batch=True)


@_ready(
    "memory",
    "memory_and_speed",
    "Doubles after an epoch in which memory is low and speed has stopped rising, halves where memory is high.",
)
def _memory_and_speed(conditions: Conditions) -> Setup:
    policy = size.minimum(size.memory_driven(per="epoch"), size.speed_driven())
    return Setup(policy=SimulatedSeconds(policy, _seconds(conditions)), room=_room(conditions))


@_ready("time", "step_time", "Holds the simulated time of an update at that of the size halfway to the largest.")
def _step_time(conditions: Conditions) -> Setup:
    seconds = _seconds(conditions)
    # Simulated seconds are exact, so few are enough, and a small difference counts: where an update has a large
    # fixed part, its time hardly follows the batch.
    policy = size.step_time(1000 * seconds(schedules.medium_size(conditions)), tolerance=_NEAR, every=_NUM_TIMED)
    return Setup(policy=SimulatedSeconds(policy, seconds))


def _seconds(conditions: Conditions) -> Seconds:
    if conditions.seconds is None:
        raise ArgumentError("a strategy that follows time needs the seconds of an update; give Conditions seconds")
    return conditions.seconds


@final
@dataclass(frozen=True, repr=False)
class SimulatedSeconds(size.Policy):
    """A policy that is shown simulated seconds, the same on every machine, instead of those that were measured."""

    policy: size.Policy
    seconds: Seconds

    def init(self) -> Any:
        """Return the state of the policy."""
        return self.policy.init()

    def check_state(self, state: Any, name: str = "policy_state") -> None:
        """Check the state of the policy."""
        self.policy.check_state(state, name)

    def start(self) -> float | None:
        """Return the first size of the policy."""
        return self.policy.start()

    def update(self, state: Any, observation: size.Observation) -> tuple[float, Any]:
        """Return what the policy answers to simulated seconds."""
        return self.policy.update(state, self._simulate(observation))

    def explain(self, state: Any, observation: size.Observation) -> str:
        """Return the words of the policy."""
        return f"simulated: {self.policy.explain(state, self._simulate(observation))}"

    def __repr__(self) -> str:
        return f"SimulatedSeconds({self.policy!r})"

    def _simulate(self, observation: size.Observation) -> size.Observation:
        if observation.batch_size is None:
            return observation
        return replace(observation, seconds=self.seconds(observation.batch_size))


_READY: Ready = {
    strategy.name: strategy
    for group in GROUPS
    for strategy in (*schedules.READY.values(), *_HERE.values())
    if strategy.group == group
}


def names() -> tuple[str, ...]:
    """Return the names of the ready strategies, the baseline first, group after group.

    >>> names()[:4]
    ('constant', 'constant_small', 'constant_medium', 'constant_large')
    """
    return (*_READY, *(f"{_REPLAY}{name}" for name in _REPLAYED))


def get(name: str) -> Strategy:
    """Return a ready strategy; ``replay_`` before the name of any other repeats the sizes of a recorded run.

    >>> get("replay_noise").replays
    'noise'
    """
    if name in _READY:
        return _READY[name]
    source = _READY.get(name.removeprefix(_REPLAY))
    if source is None:
        close = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {close[0]!r}? there are" if close else "there are"
        raise ArgumentError(f"no strategy {name!r}; {hint} {', '.join(names())}")
    return Strategy(
        name=name,
        group="replay",
        make=schedules.replay,
        about=f"The batch sizes of a run of {source.name} with another seed, as a fixed schedule.",
        needs_classes=source.needs_classes,
        replays=source.name,
        min_epochs=source.min_epochs,
    )
