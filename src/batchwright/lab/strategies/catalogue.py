"""The ready strategies by name, in the order in which a lab runs them.

The first ones know their sizes before training. Then come those that look at training: loss, entropy, gradient noise,
a curriculum, memory. The last ones share a decay between the learning rate and the batch size; the noise of the updates
falls alike in all of them. They follow one schedule, which divides the rate at milestones. Once the batch has reached
its largest size, the rate takes the rest of the decay, so that none of them anneals less than the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

from ... import size
from ...errors import ArgumentError
from .strategy import Conditions, Make, Setup, Strategy

Growth: TypeAlias = Callable[[Conditions, int], size.Policy]
Measure: TypeAlias = Literal["difference", "ema", "variance"]
Mode: TypeAlias = Literal["linear", "exponential"]

_READY: dict[str, Strategy] = {}
_REPLAY = "replay_"
# Adaptive strategies whose sizes are repeated by default, to tell adapting from growing.
_REPLAYED = ("loss_difference_exponential", "entropy", "noise")
# A rate that is many times the tuned one is reached over this share of the examples (Goyal et al. 2017).
_WARM_UP = 0.05
_NUM_CYCLES = 4
# Smaller relative changes of an epoch's loss count as no change.
_TOLERANCE = 0.005
# The weight of the newest epoch in the moving average: about three epochs count.
_ALPHA = 0.3
# Epochs in the window of the variance; a run has about 16.
_WINDOW = 3
_NOISE_PARTS = 4
# Epochs over which the averages of noise forget, and the pause between two changes.
_NOISE_HORIZON = 4
_NOISE_PAUSE = 0.25
_START_FRACTION = 0.25


def names() -> tuple[str, ...]:
    """Return the names of the ready strategies, the baseline first.

    >>> names()[:4]
    ('constant', 'constant_large', 'constant_large_scaled', 'linear')
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
        raise ArgumentError(f"no strategy {name!r}; there are {', '.join(names())}")
    return Strategy(
        name=name,
        group="replay",
        make=_replay,
        about=f"The batch sizes of a run of {source.name} with another seed, as a fixed schedule.",
        needs_classes=source.needs_classes,
        replays=source.name,
    )


def schedule_of(record: Mapping[str, Any]) -> dict[int, int]:
    """Return the batch sizes of a recorded run: the size from each number of examples on.

    >>> schedule_of({"curve": [{"batch_size": 16}], "decisions": [{"examples": 90, "old": 16, "new": 32}]})
    {0: 16, 90: 32}
    """
    sizes = {int(decision["examples"]): int(decision["new"]) for decision in record["decisions"]}
    return {0: int(record["curve"][0]["batch_size"]), **sizes}


def _replay(conditions: Conditions) -> Setup:
    if conditions.schedule is None:
        raise ArgumentError("a replay needs the record of the run it repeats; give run_one replay_of=record")
    return Setup(policy=size.milestones(conditions.schedule, per="examples"))


def _ready(group: str, name: str, about: str) -> Callable[[Make], Make]:
    """Add a strategy to the catalogue; it decorates the function that makes the setup."""

    def add(make: Make) -> Make:
        # Only the entropy of an output needs classes to choose between.
        _READY[name] = Strategy(name=name, group=group, make=make, about=about, needs_classes=group == "entropy")
        return make

    return add


@_ready("constant", "constant", "The base size throughout: the baseline.")
def _constant(conditions: Conditions) -> Setup:
    return Setup(policy=size.constant(conditions.settings.base_size))


@_ready("constant", "constant_large", "The largest size from the start, at the baseline's learning rate.")
def _constant_large(conditions: Conditions) -> Setup:
    return Setup(policy=size.constant(conditions.settings.max_size))


@_ready(
    "constant",
    "constant_large_scaled",
    "The largest size from the start, the rate scaled with it (SGD linearly, Adam by the root), warmed up.",
)
def _constant_large_scaled(conditions: Conditions) -> Setup:
    settings = conditions.settings
    num_warm = max(1, round(_WARM_UP * settings.num_examples))
    rule = "sqrt" if settings.optimizer == "adam" else "linear"
    return Setup(
        policy=size.constant(settings.max_size),
        lr_factor=lambda examples: min(1.0, (examples + settings.max_size) / num_warm),
        stepper={"lr_rule": rule, "base_size": settings.base_size},
    )


def _linear_growth(conditions: Conditions, num_epochs: int) -> size.Policy:
    """Return ``B_i = B_init + a·i`` with ``a`` such that the last of some epochs has the largest size."""
    settings = conditions.settings
    return size.linear(settings.base_size, (settings.max_size - settings.base_size) / (num_epochs - 1))


def _exponential_growth(conditions: Conditions, num_epochs: int) -> size.Policy:
    """Return ``B_i = B_init·a^i`` with ``a`` such that the last of some epochs has the largest size."""
    return size.exponential(conditions.settings.base_size, conditions.growth ** (1 / (num_epochs - 1)))


@_ready("linear", "linear", "B_i = B_init + a·i over the epochs.")
def _linear(conditions: Conditions) -> Setup:
    return Setup(policy=_linear_growth(conditions, conditions.num_epochs))


@_ready("exponential", "exponential", "B_i = B_init·a^i over the epochs.")
def _exponential(conditions: Conditions) -> Setup:
    return Setup(policy=_exponential_growth(conditions, conditions.num_epochs))


def _cycling(conditions: Conditions, growth: Growth) -> Setup:
    period = max(2, conditions.num_epochs // _NUM_CYCLES)
    return Setup(policy=size.cyclic(growth(conditions, period), period))


for _name, _growth in (("linear", _linear_growth), ("exponential", _exponential_growth)):
    _about = f"{_name.capitalize()} growth that begins again, four times per run."
    _ready("cyclical", f"cyclic_{_name}", _about)(partial(_cycling, growth=_growth))


def _coupled(conditions: Conditions, rule: str) -> Setup:
    policy = _exponential_growth(conditions, conditions.num_epochs)
    return Setup(policy=policy, stepper={"lr_rule": rule, "base_size": conditions.settings.base_size})


for _rule, _how in (("linear", "in proportion to"), ("sqrt", "with the root of")):
    _about = f"Exponential growth; the learning rate grows {_how} the batch."
    _ready("lr-coupled", f"lr_coupled_{_rule}", _about)(partial(_coupled, rule=_rule))


def _loss(conditions: Conditions, measure: Measure, mode: Mode) -> Setup:
    up, down, gain = _linear_response(conditions) if mode == "linear" else (2.0, 0.5, 1.0)
    if measure == "variance":  # it has no sign, so the response has no gain
        return Setup(policy=size.loss_driven("variance", window=_WINDOW, mode=mode, up=up, down=down))
    return Setup(
        policy=size.loss_driven(measure, alpha=_ALPHA, mode=mode, up=up, down=down, gain=gain, tolerance=_TOLERANCE)
    )


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
    "difference": "the difference of two epochs' losses",
    "ema": "the moving average of the epochs' losses",
    "variance": "the variance of the loss over three epochs",
}
_MODES: tuple[Mode, ...] = ("linear", "exponential")
for _measure, _what in _MEASURES.items():
    for _mode in _MODES:
        _about = f"Grows while the loss falls, by {_what}; the response is {_mode}."
        _ready("loss", f"loss_{_measure}_{_mode}", _about)(partial(_loss, measure=_measure, mode=_mode))


@_ready("entropy", "entropy", "Every entropy of the output has its size: the base size at log C, the largest at 0.")
def _entropy(conditions: Conditions) -> Setup:
    smallest, largest = conditions.settings.base_size, conditions.settings.max_size
    if smallest == largest:  # nothing to choose from
        return Setup()
    return Setup(policy=size.entropy_driven(_num_classes(conditions), smallest=smallest, largest=largest))


@_ready("entropy", "entropy_threshold", "Doubles below 30 % of the largest entropy, halves above 70 %.")
def _entropy_threshold(conditions: Conditions) -> Setup:
    return Setup(policy=size.entropy_driven(_num_classes(conditions), mode="threshold"))


def _num_classes(conditions: Conditions) -> int:
    if conditions.num_classes is None:
        raise ArgumentError("entropy needs a choice between classes; regression has none")
    return conditions.num_classes


@_ready("noise", "noise", "Follows the unbiased noise scale tr(Σ)/|G|², in examples.")
def _noise(conditions: Conditions) -> Setup:
    # The average needs several updates of the largest size before it is reliable.
    horizon = max(_NOISE_HORIZON * conditions.num_train, 16 * conditions.settings.max_size)
    pause = max(1, round(_NOISE_PAUSE * conditions.num_train))
    follow = size.noise_driven(horizon=horizon, num_examples=conditions.num_train)
    policy = size.chain(follow, size.rate_limit(2), size.hysteresis(0.25), size.cooldown(examples=pause))
    return Setup(policy=policy, noise_parts=_NOISE_PARTS)


@_ready(
    "noise",
    "noise_ratio",
    "Doubles where the ratio of gradient variance to squared norm over 4 parts is high, halves where low.",
)
def _noise_ratio(conditions: Conditions) -> Setup:
    return Setup(policy=size.noise_driven(estimator="ratio"), noise_parts=_NOISE_PARTS)


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


@_ready("memory", "memory_batch", "The batch doubles while a simulated memory is under 48 % full, halves above 80 %.")
def _memory_batch(conditions: Conditions) -> Setup:
    return Setup(policy=size.memory_driven(), room=max(2, conditions.settings.max_size // 2))


@_ready(
    "memory",
    "memory_micro",
    "The base size, run in micro-batches that fit a simulated memory: the same updates as the baseline.",
)
def _memory_micro(conditions: Conditions) -> Setup:
    return Setup(room=conditions.settings.base_size, fit_micro_batch=True)


@_ready("lr-decay", "lr_decay", "The base size; the learning rate is divided at milestones.")
def _lr_decay(conditions: Conditions) -> Setup:
    return Setup(lr_factor=conditions.settings.decay)


def _shared_decay(conditions: Conditions, power: float) -> Setup:
    """Let the batch take the decay to a power, and the learning rate the rest of it."""
    settings, most = conditions.settings, conditions.growth
    policy = size.from_lr(settings.decay, start=settings.base_size, power=power, per="examples", max_factor=most)

    def lr_factor(examples: int) -> float:
        decay = settings.decay(examples)
        return decay * min(math.pow(decay, -power), most)

    return Setup(policy=policy, lr_factor=lr_factor)


for _name, _power, _about in (
    ("batch_ramp", 1.0, "The batch is multiplied where the rate would be divided (Smith et al. 2017)."),
    ("hybrid", 0.5, "At each milestone the batch grows and the rate falls, each by the root of the decay."),
):
    _ready("lr-decay", _name, _about)(partial(_shared_decay, power=_power))


@_ready(
    "lr-decay", "seesaw", "At each milestone the batch takes the decay and the rate its root, for Adam (Seesaw 2025)."
)
def _seesaw(conditions: Conditions) -> Setup:
    settings, most = conditions.settings, conditions.growth
    policy, lr_factor = size.seesaw(settings.decay, start=settings.base_size, per="examples", max_factor=most)
    return Setup(policy=policy, lr_factor=lr_factor)
