"""measure_size: train briefly at several batch sizes from the same state, compare, and put everything back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ..._checks import as_whole
from ..._ranks import mark_of
from ..._tree import join
from ...errors import ArgumentError
from ...size.learning_rate import innermost, linear, sqrt
from .._gradients import attempt
from ..filler import ROW_WEIGHT, without_filler
from ..losses import needs_whole_batch
from ..memory.monitor import MemoryMonitor
from ..noise import VectorMeter
from ..oom import drop_gradients
from ..report import MicroSums, StepReport
from ..splitting import ExampleBatch, TensorBatch
from ..stepper import Stepper
from ..whole_batches.loss import WholeBatchLoss
from ._contents import copied, hooked_step
from ._restoring import Held, free_host_bytes, has_room_for, sorted_out
from .result import SizeBranch, SizeExperiment


def measure_size(
    stepper: Stepper,
    batches: Sequence[Any],
    *,
    factors: Sequence[int] = (1, 2, 4),
    evaluate: Sequence[Any] | None = None,
    repeats: int = 1,
    restore: Sequence[nn.Module | Optimizer] = (),
) -> SizeExperiment:
    """Train on the same examples at several multiples of the batch size, and compare the losses by the second.

    The branch of factor ``c`` joins ``c`` batches to one update, with the learning rate and beta2 that the rules of the
    stepper give for that size. A stepper without ``lr_rule`` uses ``sqrt`` if its optimizer has betas and ``linear``
    otherwise. All branches begin with the same state, and all are evaluated on the same held-out batches in eval mode,
    with the same random numbers. With ``n`` batches to train on, a branch is evaluated after its last update, and after
    the ``n / c`` updates of every branch ``c`` that is larger: a larger branch ends sooner, and its loss is to be
    compared with what the smaller ones had reached by then. Training then goes on as if nothing had happened, to the
    bit, also if a branch fails: parameters, buffers, gradients, optimizer, scaler, random states, and what the stepper
    knows. Copies are kept on the device where it has room for them beside the largest updates, else in host memory.
    Call it between updates, on all ranks.

    Not put back are learning-rate schedulers and data loaders, which no branch touches, what ``loss_fn`` keeps outside
    the model, and what torch.compile and graphs have compiled or captured for new sizes.

    Args:
        stepper: trains the model.
        batches: of the size in force, as ``stepper.step`` takes them. Each branch trains on the first of them, and the
            last ``m`` are held out, where ``m`` is the least common multiple of the factors. The number that is trained
            on is a multiple of ``m × repeats``.
        factors: of the batch size, different and rising.
        evaluate: held-out batches; with them all ``batches`` are trained on.
        repeats: branch so many times, on other batches each. Losses are then paired by repeats instead of held-out
            batches, which also tells how much the order of examples matters.
        restore: more modules and optimizers that training changes, such as averaged weights. With them, hooks of the
            optimizer's step are allowed.

    Raises:
        ArgumentError: the numbers of batches do not fit, an update was begun, or something cannot be put back: shards
            of FSDP2, hooks of the optimizer's step without ``restore``, and objects in the model or the optimizer that
            can be neither read nor copied.

    >>> model = nn.Linear(2, 1)
    >>> def loss_fn(model, batch):
    ...     x, y = batch
    ...     return (model(x) - y).square().sum(), len(x)
    >>> stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    >>> batches = [(torch.randn(8, 2), torch.randn(8, 1)) for _ in range(12)]
    >>> found = measure_size(stepper, batches)
    >>> [(branch.factor, branch.num_updates, len(branch.losses)) for branch in found.branches]
    [(1, 8, 4), (2, 4, 4), (4, 2, 4)]
    """
    started = time.perf_counter()
    laboratory = _Laboratory(stepper, restore)
    plan, error = attempt(lambda: _plan(batches, factors, evaluate, repeats))
    laboratory.check(plan, error)
    assert plan is not None
    with laboratory.held(max(plan.factors)):
        before = laboratory.evaluate(plan.held_out)
        branches = [laboratory.branch(plan, factor) for factor in plan.factors]
        examples = laboratory.num_examples
    return SizeExperiment(
        branches=tuple(branches),
        # Every repeat begins with the same losses.
        before=tuple(before if plan.num_repeats == 1 else [fmean(before)] * plan.num_repeats),
        examples=examples,
        pairs="batch" if plan.num_repeats == 1 else "repeat",
        lr_rule=laboratory.lr_name,
        beta2_rule=laboratory.beta2_name,
        notes=tuple(laboratory.notes),
        total_seconds=time.perf_counter() - started,
        copy_bytes=laboratory.copy_bytes,
    )


@final
class _Plan(NamedTuple):
    """What is run: the batches of every repeat, and those that are held out."""

    factors: list[int]
    repeats: list[list[Any]]
    held_out: list[Any]

    @property
    def num_repeats(self) -> int:
        """Return how many times every branch is run."""
        return len(self.repeats)

    def marks(self, factor: int) -> list[int]:
        """Return after how many updates a branch is evaluated: those of each larger branch, and its own."""
        return [len(self.repeats[0]) // other for other in reversed(self.factors) if other >= factor]


def _plan(batches: Any, factors: Any, evaluate: Any, repeats: Any) -> _Plan:
    """Check the arguments and share the batches out."""
    wanted = [as_whole("a factor", factor, least=1) for factor in factors]
    if len(wanted) < 2 or sorted(set(wanted)) != wanted:
        raise ArgumentError(f"factors must be two or more different whole numbers that rise, got {tuple(factors)}")
    num_repeats, block = as_whole("repeats", repeats, least=1), math.lcm(*wanted)
    for name, given in (("batches", batches), ("evaluate", evaluate)):
        if given is not None and not isinstance(given, list | tuple):
            raise ArgumentError(f"{name} must be a list of batches, got {type(given).__name__}; use list(…)")
    held_out = list(batches[-block:] if evaluate is None else evaluate)
    trained = list(batches[:-block] if evaluate is None else batches)
    if not held_out:
        raise ArgumentError("evaluate must hold at least one batch; None holds the last batches out")
    if not trained or len(trained) % (block * num_repeats):
        rest = "" if evaluate is not None else f", and {block} more to hold out"
        raise ArgumentError(
            f"factors {tuple(wanted)} and {num_repeats} repeats need a multiple of {block * num_repeats} batches to "
            f"train on{rest}; got {len(batches)} batches"
        )
    size = len(trained) // num_repeats
    return _Plan(wanted, [trained[start : start + size] for start in range(0, len(trained), size)], held_out)


@final
class _Laboratory:
    """Runs branches on a stepper, each from the state at the beginning.

    Args:
        stepper: whose private parts are used here: this is a part of it that has a file of its own.
        restore: more modules and optimizers to put back.
    """

    def __init__(self, stepper: Stepper, restore: Sequence[nn.Module | Optimizer]) -> None:
        if not isinstance(stepper, Stepper):
            raise ArgumentError(f"measure_size needs a Stepper, got {type(stepper).__name__}")
        self._stepper, self._settings, self._ranks = stepper, stepper._settings, stepper._ranks
        self._gatherer, self._device = stepper._gatherer, stepper._device
        if self._gatherer.is_running:
            raise ArgumentError("a Stepper runs one batch at a time; loss_fn and other threads must not call it")
        self._optimizer = innermost(stepper._optimizer)
        self._modules = [self._ranks.module]
        if isinstance(self._settings.loss_fn, nn.Module):
            self._modules.append(self._settings.loss_fn)
        self._more = sorted_out(restore)
        self._memory = stepper._memory
        if self._memory is None and self._device.type == "cuda":
            self._memory = MemoryMonitor(self._device)
        self._held = Held()
        self.notes: list[str] = []
        self.num_examples = self.copy_bytes = 0
        self.beta2_name = _name_of(self._settings.beta2_rule)
        self.lr_name = _name_of(self._settings.lr_rule)

    def check(self, plan: _Plan | None, error: Exception | None) -> None:
        """Refuse, on all ranks alike, what cannot be run or put back."""
        if error is None:
            _, error = attempt(self._check_stepper)
        marks = [] if plan is None else [mark_of([plan.factors, plan.num_repeats, *map(len, plan.repeats)])]
        marks += [] if plan is None else [mark_of(len(plan.held_out))]
        same = self._ranks.agree(error, self._device, marks=marks or [0, 0])
        if not all(same):
            raise ArgumentError("ranks have other numbers of batches, or other factors; give all ranks equally many")

    def _check_stepper(self) -> None:
        if self._gatherer.pending is not None:
            raise ArgumentError("an update was begun; call update() or abandon() before measure_size")
        if self._ranks.is_sharded:
            raise ArgumentError("measure_size evaluates on its own, which shards of FSDP2 do not allow; use DDP")
        if isinstance(self._settings.loss_fn, WholeBatchLoss):
            raise ArgumentError("measure_size cannot evaluate a WholeBatchLoss in pieces; compare whole runs instead")
        self._look()
        hooked = hooked_step(self._held.optimizers)
        if hooked is not None and not any(self._more):
            raise ArgumentError(
                f"hooks of {hooked} step would see the branches, and what they change is not put back; "
                "name what they change in restore=, or remove them for the experiment"
            )
        free, needed = free_host_bytes(), self._held.num_bytes
        if free is not None and needed > free:  # even where the device turns out to have room
            raise ArgumentError(
                f"measure_size keeps copies of {needed:,} bytes in host memory, of which {free:,} are free; "
                "free some, or use a smaller model"
            )

    def _look(self) -> None:
        """Find everything that is to be put back; what cannot be is refused here."""
        modules, optimizers = self._more
        for module in [*self._modules, *modules]:
            self._held.add_module(module)
        # A wrapper notes that it stepped.
        for one in [self._stepper._optimizer, self._optimizer, *optimizers, self._settings.scaler]:
            self._held.add(one)

    @contextmanager
    def held(self, factor: int) -> Iterator[None]:
        """Hold everything beside updates of up to ``factor`` times the size; put it back in the end in any case."""
        self._hold(factor)
        stepper, rule = self._stepper, self._stepper._lr_rule
        try:
            yield
        finally:
            stepper._lr_rule = rule
            self._put_back()

    def _hold(self, factor: int) -> None:
        self.copy_bytes = self._held.num_bytes
        memory = self._memory if self._device.type == "cuda" else None
        self._is_near = has_room_for(self.copy_bytes, memory, factor=factor)
        self._held.keep(on_device=self._is_near)
        self._state = self._stepper.state_dict()
        self._usual_weight = self._gatherer.runner.usual_weight
        meter = self._gatherer.meter
        self._put_vectors_back = meter.hold() if isinstance(meter, VectorMeter) else lambda: None

    def _put_back(self) -> None:
        self._stepper.abandon()
        self._held.put_back()
        self._put_vectors_back()
        self._stepper.load_state_dict(self._state)
        self._gatherer.runner.usual_weight = self._usual_weight

    def branch(self, plan: _Plan, factor: int) -> SizeBranch:
        """Train at one factor, from the beginning in every repeat, and evaluate."""
        groups = [[batches[at : at + factor] for at in range(0, len(batches), factor)] for batches in plan.repeats]
        joined = self._joined(groups)
        if self._memory is not None:
            self._memory.reset_peak()
        reports, seconds, losses = [], [], []
        marks = plan.marks(factor)
        for group, whole in zip(groups, joined, strict=True):
            self._put_back()
            self._begin(plan)
            found = []
            for batches, one in zip(group, whole, strict=True):
                found.append(self._update(batches, one))
                if len(found) in marks:
                    losses.append(self._evaluate_aside(plan.held_out))
            times = [report.seconds for report in found]
            seconds += times[1:] or times
            reports += found
        sizes = [report.batch_size for report in reports]
        self.num_examples = sum(sizes) // plan.num_repeats
        update = float(np.median(seconds))
        curve = tuple(
            (update * mark, tuple(found[0] if plan.num_repeats == 1 else map(fmean, found)))
            for number, mark in enumerate(marks)
            for found in [losses[number :: len(marks)]]  # one per repeat
        )
        copies = self.copy_bytes if self._is_near else 0
        peaks = [report.peak_bytes - copies for report in reports if report.peak_bytes is not None]
        return SizeBranch(
            factor=factor,
            batch_size=sum(sizes) / len(sizes),
            num_updates=len(reports),
            losses=curve[-1][1],
            seconds=curve[-1][0],
            peak_bytes=max(peaks, default=None),
            is_joined=factor == 1 or joined[0][0] is not None,
            is_graphed=all(report.graphed for report in reports),
            curve=curve,
        )

    def _begin(self, plan: _Plan) -> None:
        """Begin a branch: without gradients, and with a rule for the learning rate."""
        drop_gradients([value for module in self._modules for value in module.parameters()])
        drop_gradients(self._stepper._trained.parameters)
        if self._stepper._lr_rule is not None:
            return
        rule = sqrt if any("betas" in group for group in self._optimizer.param_groups) else linear
        base = self._base_size(plan)
        self._stepper._lr_rule = lambda batch_size, _: rule(batch_size, base)
        self.lr_name = f"{rule.__name__}, base_size {base}"
        self.notes.append(
            f"The stepper has no lr_rule, so branches scaled the rate by {rule.__name__}; before the size grows, give "
            f"it lr_rule={rule.__name__!r} and base_size={base}."
        )

    def _base_size(self, plan: _Plan) -> int:
        (num,) = self._ranks.sum([float(self._settings.wrap(plan.repeats[0][0]).num_examples)], self._device)
        return round(num)

    def _joined(self, groups: list[list[list[Any]]]) -> list[list[Any]]:
        """Return every update's batches as one batch, or None for all of them where some rank cannot join one."""
        made, error = attempt(lambda: [[self._join(batches) for batches in group] for group in groups])
        is_short = made is None or any(one is None for group in made for one in group)
        if error is None and is_short and needs_whole_batch(self._settings.loss_fn):
            error = ArgumentError(
                "loss_fn needs the whole batch, and these batches cannot be joined to larger ones; give lists of "
                "examples with collate=, or tensors of one width"
            )
        self._ranks.agree(error, self._device)
        (is_short_anywhere,) = self._ranks.largest([float(is_short)], self._device)
        if made is not None and not is_short_anywhere:
            return made
        note = "Batches could not be joined and ran one after the other: a joined batch may take fewer seconds."
        self.notes += [] if note in self.notes else [note]
        return [[None] * len(group) for group in groups]

    def _join(self, batches: list[Any]) -> Any | None:
        """Return several batches as one, None if they cannot be joined."""
        if len(batches) == 1:
            return batches[0]
        logical = [self._settings.wrap(batch) for batch in batches]
        if all(isinstance(one, ExampleBatch) for one in logical):
            return [example for batch in batches for example in batch]
        return join(batches) if all(isinstance(one, TensorBatch) for one in logical) else None

    def _update(self, batches: list[Any], whole: Any) -> StepReport:
        if whole is not None:
            return self._stepper.step(self._copied(whole))
        for batch in batches:
            self._stepper.accumulate(self._copied(batch))
        return self._stepper.update()

    def _copied(self, batch: Any) -> Any:
        """Return a copy of a batch, as other branches and the caller need it as it is."""
        found, error = attempt(lambda: copied(batch))
        self._ranks.agree(error, self._device)
        return found

    def _evaluate_aside(self, batches: Sequence[Any]) -> list[float]:
        """Evaluate between updates, and let the next one be what it would have been."""
        moves = callable(getattr(self._optimizer, "eval", None))  # it moves the parameters, and back only nearly
        held = Held(parameters=moves)
        for module in self._modules:
            held.add_module(module)
        if moves:
            held.add(self._optimizer)
        held.keep()
        try:
            return self.evaluate(batches)
        finally:
            held.put_back()

    def evaluate(self, batches: Sequence[Any]) -> list[float]:
        """Return the mean loss of each batch over all ranks, infinite for one that is no number."""
        self._held.restore_random()
        for module in self._modules:
            module.eval()
        if callable(getattr(self._optimizer, "eval", None)):  # schedule-free optimizers evaluate at another point
            self._optimizer.eval()
        with self._gatherer.running():
            sums, error = attempt(lambda: [self._sums(batch) for batch in batches])
        self._ranks.agree(error, self._device)
        assert sums is not None
        flat = self._ranks.sum([value for pair in sums for value in pair], self._device)
        if not all(weight > 0 for weight in flat[1::2]):
            raise ArgumentError("a held-out batch has weight 0, so it has no mean loss; leave it out")
        means = [loss / weight for loss, weight in zip(flat[::2], flat[1::2], strict=True)]
        return [mean if math.isfinite(mean) else math.inf for mean in means]

    @torch.no_grad()
    def _sums(self, batch: Any) -> tuple[float, float]:
        """Return the summed loss and the weight of a batch on this rank, in micro-batches as training would run it."""
        logical = self._settings.wrap(copied(batch))
        loss_sum = weight_sum = 0.0
        for part in self._gatherer.runner.cut(logical, None):
            micro_batch = logical.take(part)
            if isinstance(micro_batch, dict) and ROW_WEIGHT in micro_batch:
                micro_batch = without_filler(micro_batch)
            with self._settings.precision(self._device):
                returned = self._settings.loss_fn(self._ranks.module, micro_batch)
            if not isinstance(returned, tuple):
                MicroSums(returned)  # which says what to return instead
            loss, weight, *_ = returned
            if float(weight):
                loss_sum, weight_sum = loss_sum + float(loss), weight_sum + float(weight)
        return loss_sum, weight_sum


def _name_of(rule: Any) -> str:
    return "none" if rule is None else rule if isinstance(rule, str) else getattr(rule, "__name__", "a function")
