"""Strategies whose batch sizes are known before training: constants, growth, cycles, and growth with the rate."""

from __future__ import annotations

from ..size import constant, cyclic, exponential, linear
from ..size.policy import Policy
from ._run_settings import Conditions, OptimizerName
from .strategies import Setup, Strategy

# A rate that is many times the tuned one is reached over this share of the examples (Goyal et al. 2017).
_WARM_UP = 0.05
_NUM_CYCLES = 4
_SCALING: dict[OptimizerName, str] = {"sgd": "linear", "adam": "sqrt"}


def linear_growth(conditions: Conditions, num_epochs: int) -> Policy:
    """Return ``B_i = B_init + a·i`` with ``a`` such that the last of some epochs has the largest size."""
    settings = conditions.settings
    return linear(settings.base_size, (settings.max_size - settings.base_size) / (num_epochs - 1))


def exponential_growth(conditions: Conditions, num_epochs: int) -> Policy:
    """Return ``B_i = B_init·a^i`` with ``a`` such that the last of some epochs has the largest size."""
    return exponential(conditions.settings.base_size, conditions.growth ** (1 / (num_epochs - 1)))


def _constant(conditions: Conditions) -> Setup:
    return Setup(policy=constant(conditions.settings.base_size))


def _constant_large(conditions: Conditions) -> Setup:
    return Setup(policy=constant(conditions.settings.max_size))


def _constant_large_scaled(conditions: Conditions) -> Setup:
    settings = conditions.settings
    num_warm = max(1, round(_WARM_UP * settings.num_examples))
    return Setup(
        policy=constant(settings.max_size),
        lr_factor=lambda examples: min(1.0, (examples + settings.max_size) / num_warm),
        stepper={"lr_rule": _SCALING[settings.optimizer], "base_size": settings.base_size},
    )


def _linear(conditions: Conditions) -> Setup:
    return Setup(policy=linear_growth(conditions, conditions.num_epochs))


def _exponential(conditions: Conditions) -> Setup:
    return Setup(policy=exponential_growth(conditions, conditions.num_epochs))


def _cyclic_linear(conditions: Conditions) -> Setup:
    period = _period(conditions)
    return Setup(policy=cyclic(linear_growth(conditions, period), period))


def _cyclic_exponential(conditions: Conditions) -> Setup:
    period = _period(conditions)
    return Setup(policy=cyclic(exponential_growth(conditions, period), period))


def _coupled_linear(conditions: Conditions) -> Setup:
    return _coupled(conditions, "linear")


def _coupled_sqrt(conditions: Conditions) -> Setup:
    return _coupled(conditions, "sqrt")


def _coupled(conditions: Conditions, rule: str) -> Setup:
    return Setup(
        policy=exponential_growth(conditions, conditions.num_epochs),
        stepper={"lr_rule": rule, "base_size": conditions.settings.base_size},
    )


def _period(conditions: Conditions) -> int:
    return max(2, conditions.num_epochs // _NUM_CYCLES)


STRATEGIES = (
    Strategy(name="constant", group="constant", make=_constant, about="The base size throughout: the baseline."),
    Strategy(
        name="constant_large",
        group="constant",
        make=_constant_large,
        about="The largest size from the start, at the baseline's learning rate.",
    ),
    Strategy(
        name="constant_large_scaled",
        group="constant",
        make=_constant_large_scaled,
        about="The largest size from the start, the rate scaled with it (SGD linearly, Adam by the root), warmed up.",
    ),
    Strategy(name="linear", group="linear", make=_linear, about="B_i = B_init + a·i over the epochs."),
    Strategy(name="exponential", group="exponential", make=_exponential, about="B_i = B_init·a^i over the epochs."),
    Strategy(
        name="cyclic_linear",
        group="cyclical",
        make=_cyclic_linear,
        about="Linear growth that begins again, four times a run.",
    ),
    Strategy(
        name="cyclic_exponential",
        group="cyclical",
        make=_cyclic_exponential,
        about="Exponential growth that begins again, four times a run.",
    ),
    Strategy(
        name="lr_coupled_linear",
        group="lr-coupled",
        make=_coupled_linear,
        about="Exponential growth; the learning rate grows in proportion to the batch.",
    ),
    Strategy(
        name="lr_coupled_sqrt",
        group="lr-coupled",
        make=_coupled_sqrt,
        about="Exponential growth; the learning rate grows with the root of the batch.",
    ),
)
