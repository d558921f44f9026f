"""Who decides the size of the next update, and how the learning rate follows.

constant-64x3   64 examples, 3 times the task's rate as its rule scales it to 64
goodput         size.goodput(), which learns times and noise on the way
goodput_betas   the same, with Adam's betas as they are
goodput_oracle  the same, where noise is that of a thousand other examples, and takes no time
measured        size.measured(), which reads experiments of step.measure_size, at most 5 % of the time
measured_early  the same, where experiments may take half of the time
measured_plan   the same, at most 5 % of the planned time, so that a short experiment comes early
mixed           the larger of size.measured() and size.goodput(); experiments take at most 5 % of the time so far
mixed_plan      the same, at most 5 % of the planned time, so that a short experiment comes early
smith           the batch grows where the rate would fall (Smith et al. 2017): for SGD as 1 / rate, for Adam its square
seesaw          the batch grows as 1 / rate, the rate falls as its root (arXiv 2510.14717)
warmup          the batch doubles after an eighth, a quarter and half of the time, the rate follows by the rule: as the
                critical size does, it grows fast at first and then slowly (OLMo, arXiv 2505.23971)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import nn

import batchwright as bw
from batchwright import size
from batchwright.size import learning_rate
from batchwright.step import Stepper, StepReport, measure_size

from .clocks import Clock
from .tasks import LOSS, Task

STRATEGIES = ("goodput", "measured", "measured_plan", "mixed", "smith", "seesaw", "warmup")
WARM_UP = 0.05  # of the time
PARTS = 1000  # of the time, in which schedules count
LARGEST = 64  # times the base size
NOISE_EVERY = 2  # updates
ORACLE_EXAMPLES = 1024
# Of the time, that experiments may take: what ``size.ExperimentBudget`` has by itself, and one that lets the first of
# them be made in these short runs, after about a quarter of the time.
SHARES = {"measured": 0.05, "measured_early": 0.5, "measured_plan": 0.05, "mixed": 0.05, "mixed_plan": 0.05}
PLANNED = ("measured_plan", "mixed_plan")

_RULES = {"linear": learning_rate.linear, "sqrt": learning_rate.sqrt}


@final
class Design(NamedTuple):
    """An experiment: what is trained on, what losses are compared on, and the factors.

    Attributes:
        num_batches: to train on.
        factors: of the size.
        num_held_out: batches to compare losses on.
        held_out_size: examples of one, by the size in force: fewer and larger passes take less time for the same error.
    """

    num_batches: int
    factors: tuple[int, ...]
    num_held_out: int
    held_out_size: Callable[[int], int]


# 8 updates at 4 times the size.
LONG = Design(32, (1, 2, 4), 8, lambda size: 4 * size)
# 2 of them: the longest that 5 % of the planned time allow at the base.
SHORT = Design(8, (1, 4), 4, lambda size: max(64, size))

Batches = Callable[[int, int], list[Any]]
TimeOf = Callable[[int, int], float] | None
Work = dict[str, int]
Row = dict[str, Any]


def decay(part: int) -> float:
    """Return the rate after so many parts of the time: up over the first ones, then down to 0, both linear.

    >>> [decay(part) for part in (0, 25, 50, 1000)]
    [0.0, 0.5, 1.0, 0.0]
    """
    gone = part / PARTS
    return min(gone / WARM_UP, (1 - gone) / (1 - WARM_UP))


@final
class Strategy:
    """A strategy in a run: the size of the next update, a factor of the rate, and what it does after an update.

    Args:
        name: of a strategy.
        task: gives the base size and the rules.
        seconds: that the run is planned to take.
    """

    def __init__(self, name: str, task: Task, seconds: float = math.inf) -> None:
        self.name, self.task = name, task
        self.stepper_options: dict[str, Any] = {}
        self._rate_of: Callable[[int], float] = decay
        share = SHARES.get(name)
        planned = seconds if name in PLANNED and math.isfinite(seconds) else None
        self._budget = None if share is None else size.ExperimentBudget(share, planned_seconds=planned)
        self._design = SHORT if name in PLANNED else LONG
        self._oracle: Callable[[], Row] | None = None
        self.controller = self._make()

    @property
    def size(self) -> int:
        """Return the examples of the next update."""
        return int(self.controller.size)

    def rate(self, gone: float) -> float:
        """Return the factor of the task's rate, by the part of the time that is gone."""
        return self._rate_of(min(PARTS, int(PARTS * gone)))

    def after(self, report: StepReport, *, seconds: float, gone: float) -> None:
        """Let the policy see an update: its own seconds, and the part of the time that is gone."""
        if self.name.startswith(("goodput", "mixed")):
            known = self._oracle() if self._oracle is not None else {}
            self.controller.observe(**{**report.observation(), "seconds": seconds, **known})
        elif self.name in ("smith", "seesaw", "warmup"):
            self.controller.observe(epoch=min(PARTS, int(PARTS * gone)))
        if self._budget is not None:
            self._budget = self._budget.after_update(seconds)

    def watch(self, model: nn.Module, draw: Callable[[int], Any]) -> None:
        """Let an oracle measure the noise of a model on other examples, while the clock stands still."""
        if self.name == "goodput_oracle":
            self._oracle = _Oracle(model, draw)

    def experiment(self, stepper: Stepper, take: Batches, clock: Clock) -> float:
        """Measure larger sizes if the budget allows it, and return the seconds of it."""
        design = self._design
        if self._budget is None or not self._budget.allows(design.num_batches, design.factors):
            return 0.0
        began, before = clock.stopwatch, self.size
        work = experiment(self.controller, stepper, take, clock.time_of, design)
        clock.passed(passes=work["passes"], examples=work["examples"])
        took, counts = clock.stopwatch - began, {"num_batches": design.num_batches, "factors": design.factors}
        self._budget = self._budget.after_experiment(took, **counts, has_grown=self.size > before)
        return took

    def _make(self) -> bw.BatchSizeController:
        base, task = self.task.base_size, self.task
        found = re.fullmatch(r"constant-(\d+)x([\d.]+)", self.name)
        if found is not None:
            number, factor = int(found[1]), float(found[2])
            scaled = factor * _RULES[task.lr_rule](number, base)
            self._rate_of = lambda part: scaled * decay(part)
            return bw.BatchSizeController(size.constant(number), min_size=number, max_size=number)
        limits: dict[str, Any] = {"min_size": base, "max_size": LARGEST * base}
        after = int(WARM_UP * PARTS)
        if self.name == "smith":
            power = 1.0 if task.optimizer == "sgd" else 2.0
            self._rate_of = lambda part: decay(part) * _held(part, after, power)
            policy = size.from_lr(decay, start=base, power=power, after=after, max_factor=LARGEST)
            return bw.BatchSizeController(policy, **limits)
        if self.name == "seesaw":
            policy, self._rate_of = size.seesaw(decay, start=base, after=after, max_factor=LARGEST)
            return bw.BatchSizeController(policy, **limits)
        self.stepper_options = follow_size(task)
        if self.name == "warmup":
            policy = size.milestones({0: base, 125: 2 * base, 250: 4 * base, 500: 8 * base}, per="epoch")
            return bw.BatchSizeController(policy, **limits)
        if self.name.startswith("measured"):
            return bw.BatchSizeController(size.measured(), initial=base, **limits)
        if self.name.startswith("mixed"):
            self.stepper_options |= {"measure_noise": NOISE_EVERY, "noise_from": "vectors"}
            return bw.BatchSizeController(size.maximum(size.measured(), size.goodput()), initial=base, **limits)
        if self.name in ("goodput", "goodput_betas", "goodput_oracle"):
            if self.name != "goodput_oracle":
                self.stepper_options |= {"measure_noise": NOISE_EVERY, "noise_from": "vectors"}
            if self.name == "goodput_betas":
                self.stepper_options.pop("beta2_rule", None)
            limits["min_size"] = max(2, base // 8)  # the policy's own limit
            return bw.BatchSizeController(size.goodput(), initial=base, **limits)
        known = ", ".join(("constant-SIZExFACTOR", *STRATEGIES))
        raise SystemExit(f"{self.name!r} is no strategy; strategies are {known}")


@final
class _Oracle:
    """Measures noise in the whole gradient of many examples, at every fourth call; weights stay as they are."""

    def __init__(self, model: nn.Module, draw: Callable[[int], Any]) -> None:
        still = torch.optim.SGD(model.parameters(), lr=0.0)
        self._stepper = Stepper(model, still, LOSS, micro_batch=ORACLE_EXAMPLES // 8, measure_noise=True)
        self._draw, self._num = draw, 0

    def __call__(self) -> Row:
        """Return the noise of now, or nothing."""
        self._num += 1
        if self._num % 4 != 1:
            return {}
        noise = self._stepper.step(self._draw(ORACLE_EXAMPLES)).noise
        assert noise is not None
        return {"noise_s": noise.s, "noise_g2": noise.g2}


def _held(part: int, after: int, power: float) -> float:
    """Return what the growing batch takes off the decay: all of it until the batch reaches its largest size."""
    if part <= after:
        return 1.0
    fallen = decay(part)
    return min(1 / fallen, LARGEST ** (1 / power)) if fallen > 0 else 1.0


def follow_size(task: Task) -> dict[str, Any]:
    """Return the options of a ``Stepper`` whose rate, and Adam's second moment, follow the size."""
    options: dict[str, Any] = {"lr_rule": task.lr_rule, "base_size": task.base_size}
    return options if task.optimizer == "sgd" else {**options, "beta2_rule": "half_life"}


def experiment(
    controller: bw.BatchSizeController, stepper: Stepper, take: Batches, time_of: TimeOf, design: Design = LONG
) -> Work:
    """Branch training at multiples of the size in force, let the policy read it, and return the work of it."""
    size_before, num, factors = controller.size, design.num_batches, design.factors
    held_out_size = design.held_out_size(size_before)
    held_out = take(design.num_held_out, held_out_size)
    result = measure_size(stepper, take(num, size_before), factors=factors, evaluate=held_out)
    observation = result.observation()
    if time_of is not None:
        found = observation["experiment"]
        for branch in result.branches:
            whole = time_of(num // branch.factor, num * size_before)
            found["seconds"][str(branch.factor)] = whole
            found["curve"][str(branch.factor)] = [
                [whole * seconds / branch.seconds, list(losses)] for seconds, losses in branch.curve
            ]
    controller.observe(**observation)
    # An evaluation is a forward pass, a third of a whole one; held-out batches run before, and along each branch.
    evaluated = (1 + sum(len(branch.curve) for branch in result.branches)) * design.num_held_out / 3
    passes = sum(num // factor for factor in factors) + evaluated
    examples = len(factors) * num * size_before + held_out_size * evaluated
    return {"passes": round(passes), "examples": round(examples)}
