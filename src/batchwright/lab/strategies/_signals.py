"""Strategies that look at training: loss, entropy, gradient noise, memory, and a curriculum."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, TypeAlias

from ...errors import ArgumentError
from ...size import (
    Curriculum,
    chain,
    cooldown,
    entropy_driven,
    hysteresis,
    loss_driven,
    memory_driven,
    noise_driven,
    rate_limit,
)
from .strategy import Conditions, Setup, Strategy, in_group

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

Measure: TypeAlias = Literal["difference", "ema", "variance"]
Mode: TypeAlias = Literal["linear", "exponential"]


def _loss(conditions: Conditions, *, measure: Measure, mode: Mode) -> Setup:
    up, down, gain = _linear_response(conditions) if mode == "linear" else (2.0, 0.5, 1.0)
    if measure == "variance":  # it has no sign, so the response has no gain
        return Setup(policy=loss_driven("variance", window=_WINDOW, mode=mode, up=up, down=down))
    return Setup(
        policy=loss_driven(measure, alpha=_ALPHA, mode=mode, up=up, down=down, gain=gain, tolerance=_TOLERANCE)
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


def _entropy(conditions: Conditions) -> Setup:
    smallest, largest = conditions.settings.base_size, conditions.settings.max_size
    if smallest == largest:  # nothing to choose from
        return Setup()
    return Setup(policy=entropy_driven(_num_classes(conditions), smallest=smallest, largest=largest))


def _entropy_threshold(conditions: Conditions) -> Setup:
    return Setup(policy=entropy_driven(_num_classes(conditions), mode="threshold"))


def _noise(conditions: Conditions) -> Setup:
    # The average needs several updates of the largest size before it is reliable.
    horizon = max(_NOISE_HORIZON * conditions.num_train, 16 * conditions.settings.max_size)
    pause = max(1, round(_NOISE_PAUSE * conditions.num_train))
    policy = chain(
        noise_driven(horizon=horizon, num_examples=conditions.num_train),
        rate_limit(2),
        hysteresis(0.25),
        cooldown(examples=pause),
    )
    return Setup(policy=policy, noise_parts=_NOISE_PARTS)


def _noise_ratio(conditions: Conditions) -> Setup:
    return Setup(policy=noise_driven(estimator="ratio"), noise_parts=_NOISE_PARTS)


def _memory_batch(conditions: Conditions) -> Setup:
    return Setup(policy=memory_driven(), room=max(2, conditions.settings.max_size // 2))


def _memory_micro(conditions: Conditions) -> Setup:
    return Setup(room=conditions.settings.base_size, fit_micro_batch=True)


def _curriculum(conditions: Conditions) -> Setup:
    curriculum = _easy_first(conditions)
    return Setup(policy=curriculum.policy(conditions.settings.base_size), curriculum=curriculum)


def _curriculum_constant(conditions: Conditions) -> Setup:
    return Setup(curriculum=_easy_first(conditions))


def _easy_first(conditions: Conditions) -> Curriculum:
    if conditions.difficulty is None:
        raise ArgumentError("a curriculum needs a score for every example; give Conditions a difficulty")
    # Early epochs are short, so that all examples are in use after about a third of the run.
    full_at = conditions.num_epochs / 2
    return Curriculum(conditions.difficulty(), start_fraction=_START_FRACTION, full_at=full_at)


def _num_classes(conditions: Conditions) -> int:
    if conditions.num_classes is None:
        raise ArgumentError("entropy needs a choice between classes; regression has none")
    return conditions.num_classes


def _loss_strategies() -> list[Strategy]:
    words: dict[Measure, str] = {
        "difference": "the difference of two epochs' losses",
        "ema": "the moving average of the epochs' losses",
        "variance": "the variance of the loss over three epochs",
    }
    modes: tuple[Mode, ...] = ("linear", "exponential")
    return [
        Strategy(
            name=f"loss_{measure}_{mode}",
            group="loss",
            make=partial(_loss, measure=measure, mode=mode),
            about=f"Grows while the loss falls, by {text}; the response is {mode}.",
        )
        for measure, text in words.items()
        for mode in modes
    ]


SIGNALS = (
    *_loss_strategies(),
    *in_group(
        "entropy",
        needs_classes=True,
        entropy=(_entropy, "Every entropy of the output has its size: the base size at log C, the largest at 0."),
        entropy_threshold=(_entropy_threshold, "Doubles below 30 % of the largest entropy, halves above 70 %."),
    ),
    *in_group(
        "noise",
        noise=(_noise, "Follows the unbiased noise scale tr(Σ)/|G|², in examples."),
        noise_ratio=(
            _noise_ratio,
            "Doubles where the ratio of gradient variance to squared norm over 4 parts is high, halves where low.",
        ),
    ),
    *in_group(
        "curriculum",
        curriculum=(_curriculum, "Easy examples first; the batch grows with the share of examples in use."),
        curriculum_constant=(_curriculum_constant, "Easy examples first, at the base size."),
    ),
    *in_group(
        "memory",
        memory_batch=(
            _memory_batch,
            "The batch doubles while a simulated memory is under 48 % full, halves above 80 %.",
        ),
        memory_micro=(
            _memory_micro,
            "The base size, run in micro-batches that fit a simulated memory: the same updates as the baseline.",
        ),
    ),
)
