"""One run: a model trained for some seconds of a clock that stands still while the validation loss is taken."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, final

import torch
from _gpu import GIB, Device, Row
from torch import nn

from batchwright.step import Stepper

from .arms import Arm, make_sampler, updates_of
from .auto import Auto
from .corpus import Batch, Corpus, Made
from .levels import Levels
from .tasks import loss_sum, make_model, sums, validation_loss

CLIP_NORM = 1.0
BETAS = (0.9, 0.98)
WARM_UP = 0.05  # of the time
# More than an H200 can run of an eager or a replayed arm in a second; made before the clock starts.
MAX_UPDATES_PER_SECOND = {False: 40, True: 170}
_AHEAD = 2  # updates that the host may be ahead of the device


class Trains(Protocol):
    """Runs an update."""

    def __call__(self, update: Sequence[Made]) -> None: ...


@final
class Clock:
    """Seconds of training; ``pause`` waits for the device, so that work under way counts."""

    def __init__(self, device: Device) -> None:
        self._device, self._gone = device, 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds that count so far."""
        return self._gone + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        """Start, or go on."""
        self._device.synchronize()
        self._since = time.perf_counter()

    def pause(self) -> None:
        """Stand still."""
        self._device.synchronize()
        self._gone, self._since = self.seconds, None


@final
class Pace:
    """Keeps the host at most a few updates ahead of the device, so that the clock tells what was trained."""

    def __init__(self, device: Device) -> None:
        self._is_cpu = device.is_cpu
        self._events: deque[Any] = deque()

    def wait(self) -> None:
        """Mark an update, and wait for the one a few before."""
        if self._is_cpu:
            return
        event = torch.cuda.Event()
        event.record()
        self._events.append(event)
        if len(self._events) > _AHEAD:
            self._events.popleft().synchronize()


@final
class Loop:
    """The loop that one would write by hand; peers run in it, and so does torch.compile."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: Device, run: Any = None) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._run = model if run is None else run  # a compiled one shares the weights
        self._parameters = list(model.parameters())

    def __call__(self, update: Sequence[Made]) -> None:
        """Run an update of one or several parts."""
        total = sum(made.num_labels for made in update)
        for made in update:
            self.backward(made.batch, total)
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def backward(self, batch: Batch, total: int) -> None:
        """Add the gradient of a part."""
        batch = {name: tensor.to(self._device.name, non_blocking=True) for name, tensor in batch.items()}
        with torch.autocast(self._device.name, dtype=torch.bfloat16):
            loss = loss_sum(self._run, batch)
        (loss / total).backward()


@final
class Through:
    """Updates through ``Stepper``."""

    def __init__(self, stepper: Stepper, device: Device, *, is_graphed: bool) -> None:
        self.stepper = stepper
        self.num_graphed = self.num_updates = self.peak_bytes = 0
        self._device, self._is_graphed = device, is_graphed

    def __call__(self, update: Sequence[Made]) -> None:
        """Run an update of one part."""
        (made,) = update
        batch = made.batch
        if not self._is_graphed:  # a replayed step copies the batch into its own buffers
            batch = {name: tensor.to(self._device.name, non_blocking=True) for name, tensor in batch.items()}
        report = self.stepper.step(batch)
        self.num_updates += 1
        self.num_graphed += bool(getattr(report, "graphed", False))
        self.peak_bytes = max(self.peak_bytes, report.peak_bytes or 0)

    def describe(self) -> Row:
        """Return what the stepper says about its graphs."""
        if not self._is_graphed:
            return {}
        summary = self.stepper.graph_summary()
        names = ("hit_rate", "pool_bytes", "capture_seconds", "saved_seconds")
        found = {name: getattr(summary, name, None) for name in names}
        peak = {"stepper_peak_gib": self.peak_bytes / GIB}
        return {**found, **peak, "graphed_updates": self.num_graphed, "graph_summary": str(summary)}


@final
class Settings(NamedTuple):
    """What is the same for every arm."""

    seconds: float
    marks: tuple[float, ...]
    small: bool
    compile_backend: str = "inductor"
    least_updates: int = 1  # however long they take, so that a trial run says the same on a busy machine


@final
class Run:
    """One arm with one learning rate and one seed.

    Everything that an arm needs before it can train, such as capture or compilation, happens inside the clock. Batches
    are made and pinned before it for every arm alike, as workers would make them; their copies to the device count.
    """

    def __init__(self, arm: Arm, corpus: Corpus, device: Device, settings: Settings, *, lr: float, seed: int) -> None:
        self.arm, self.corpus, self.device, self.settings, self.lr, self.seed = arm, corpus, device, settings, lr, seed
        self.model = make_model(corpus.task, corpus.vocabulary, device.name, seed=seed, small=settings.small)
        self.twin = make_model(corpus.task, corpus.vocabulary, device.name, seed=seed, small=settings.small)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=BETAS, fused=True)
        self.levels = self._make_levels() if arm.is_levelled else None
        self.updates = [] if arm.is_levelled or arm.is_sized else self._make_updates()
        self.held_out = [_sent(part, device) for part in corpus.held_out(512 if settings.small else 16_384)]
        self.extra: Row = {}
        self.train = self._make_training()

    def _make_updates(self) -> list[tuple[Made, ...]]:
        limit = max(4, int(self.settings.seconds * MAX_UPDATES_PER_SECOND[self.arm.is_graphed]))
        updates = updates_of(self.arm, self.corpus, seed=self.seed, limit=limit)
        made = pin([self.corpus.make(part) for update in updates for part in update], self.device)
        return list(_regroup(made, [len(update) for update in updates]))

    def _make_levels(self) -> Levels:
        return Levels(
            self.arm, self.corpus, self.device, optimizer=self.optimizer, seed=self.seed, seconds=self.settings.seconds,
            make_stepper=self._make_graphed, pin=pin,
        )  # fmt: skip

    def _make_graphed(self, shapes: Any, **options: Any) -> Stepper:
        return Stepper(
            self.model, self.optimizer, sums, clip_norm=CLIP_NORM, autocast=torch.bfloat16,
            graphs=_graph_backend(self.device), shapes=shapes, **options,
        )  # fmt: skip

    def _make_training(self) -> Trains | Levels:
        if self.levels is not None:
            return self.levels
        if self.arm.is_sized:
            return Auto(
                self.arm, self.corpus, self.device, model=self.model, optimizer=self.optimizer, loss_fn=sums,
                clip_norm=CLIP_NORM, seed=self.seed, pin=pin,
            )  # fmt: skip
        if not self.arm.is_ours:
            return Loop(self.model, self.optimizer, self.device)
        if self.arm.is_compiled:
            return self._make_compiled()
        if self.arm.is_graphed:
            stepper = self._make_graphed(make_sampler(self.arm, self.corpus, seed=self.seed))
        else:
            stepper = Stepper(self.model, self.optimizer, sums, clip_norm=CLIP_NORM, autocast=torch.bfloat16)
        return Through(stepper, self.device, is_graphed=self.arm.is_graphed)

    def _make_compiled(self) -> Loop:
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 256  # one for each static shape, and those of the layers
        is_dynamic = "dynamic" in self.arm.kind
        compiled = torch.compile(self.model, dynamic=is_dynamic, backend=self.settings.compile_backend)
        loop = Loop(self.model, self.optimizer, self.device, compiled)
        if self.arm.kind.endswith("apart"):
            self.extra["compile_seconds"] = self._compile_all(loop)
        return loop

    def _compile_all(self, loop: Loop) -> float:
        """Run every shape once without an update, and return the seconds."""
        start, seen = time.perf_counter(), set()
        for (made,) in self.updates:
            shape = tuple(tuple(tensor.shape) for tensor in made.batch.values())
            if shape not in seen:
                seen.add(shape)
                loop.backward(made.batch, made.num_labels)
                self.optimizer.zero_grad(set_to_none=True)
        self.device.synchronize()
        return time.perf_counter() - start

    def rate(self, seconds: float) -> float:
        """Return the learning rate: up over the first 5 % of the time, then down to 0, both linear in time."""
        gone = min(1.0, seconds / self.settings.seconds)
        return self.lr * min(gone / WARM_UP, (1 - gone) / (1 - WARM_UP))

    def run(self) -> Row:
        """Train until the time is over, and return what was found."""
        curve = [(0.0, self._validate())]
        self.device.free()
        self.device.monitor.reset_peak()
        clock, pace = Clock(self.device), Pace(self.device)
        done = 0
        for mark in self.settings.marks:
            if clock.seconds >= mark:  # one update took longer than several marks, as compilation may
                continue
            clock.start()
            while clock.seconds < mark or done < self.settings.least_updates:
                self.step(done, clock)
                pace.wait()
                done += 1
            clock.pause()
            curve.append((clock.seconds, self._validate()))
        return {**self._describe(curve, done), **self.device.peak(getattr(self.train, "peak_bytes", 0)), **self.extra}

    def step(self, number: int, clock: Clock) -> None:
        """Run one update at the rate of its time; where more updates run than were made, from the first on again."""
        if isinstance(self.train, Levels):
            self.train.step(clock.seconds / self.settings.seconds)
            return
        rate = self.rate(clock.seconds)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.train(self._next(number, clock))

    def _next(self, number: int, clock: Clock) -> tuple[Made, ...]:
        if not isinstance(self.train, Auto):
            return self.updates[number % len(self.updates)]
        if self.train.is_due:
            clock.pause()
            found = self.train.take_experiment()
            clock.start()
            self.train.experiment(*found)
        if not self.train.is_ready:  # nobody knew the size, so batches are made now
            clock.pause()
            self.train.make_ready()
            clock.start()
        return (self.train.take(),)

    def _validate(self) -> float:
        """Take the validation loss of a twin, so that evaluation leaves the trained model and its graphs alone."""
        with torch.no_grad():
            ours = [*self.model.parameters(), *self.model.buffers()]
            for copy, value in zip([*self.twin.parameters(), *self.twin.buffers()], ours, strict=True):
                copy.copy_(value)
        return validation_loss(self.twin, self.held_out, self.device.name)

    def _trained(self, num_updates: int) -> list[Made]:
        if isinstance(self.train, (Levels, Auto)):
            return self.train.trained
        return [part for number in range(num_updates) for part in self.updates[number % len(self.updates)]]

    def _describe(self, curve: list[tuple[float, float]], num_updates: int) -> Row:
        seconds = curve[-1][0]
        trained = self._trained(num_updates)
        real = sum(part.real_tokens for part in trained)
        shapes = {tuple(part.batch["input_ids"].shape) + tuple(part.batch["labels"].shape) for part in trained}
        return {
            "seconds": seconds,
            "updates": num_updates,
            "examples": sum(part.num_examples for part in trained),
            "tokens_per_second": real / seconds,
            "padding": 1 - real / sum(part.padded_tokens for part in trained),
            "shapes": len(shapes),
            "repeated_updates": max(0, num_updates - len(self.updates)) if self.updates else None,
            "curve": curve,
            "loss": curve[-1][1],
            **(self.train.describe() if isinstance(self.train, (Through, Levels, Auto)) else {}),
        }


def _graph_backend(device: Device) -> Any:
    if not device.is_cpu:
        return True
    from batchwright.testing import EagerGraphs

    return EagerGraphs()


def pin(parts: list[Made], device: Device) -> list[Made]:
    """Return parts in pinned memory, one block for each type: to pin each tensor by itself would take longer."""
    if device.is_cpu:
        return parts
    totals: dict[torch.dtype, int] = {}
    for part in parts:
        for tensor in part.batch.values():
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.numel()
    blocks = {dtype: torch.empty(num, dtype=dtype, pin_memory=True) for dtype, num in totals.items()}
    used = dict.fromkeys(totals, 0)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        start = used[tensor.dtype]
        used[tensor.dtype] = start + tensor.numel()
        return blocks[tensor.dtype][start : start + tensor.numel()].view(tensor.shape).copy_(tensor)

    return [part._replace(batch={name: place(tensor) for name, tensor in part.batch.items()}) for part in parts]


def _sent(part: Made, device: Device) -> Made:
    return part._replace(batch={name: tensor.to(device.name) for name, tensor in part.batch.items()})


def _regroup(parts: list[Made], sizes: list[int]) -> Any:
    place = 0
    for size in sizes:
        yield tuple(parts[place : place + size])
        place += size


def warm_device(device: Device, make: Callable[[], Run]) -> None:
    """Start the libraries of the device with another small model, so that the first arm does not pay for them."""
    run = make()
    for number in range(5):
        run.step(number, Clock(device))
    device.synchronize()
