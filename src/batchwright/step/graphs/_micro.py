"""Forward and backward of one kind of micro-batch, captured and replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._ranks import Ranks
from ..._tree import leaves, map_leaves
from ..report import MicroSums, Sum
from ._inputs import Signature, StaticInputs
from .backend import GraphBackend, Replay


@final
@dataclass(frozen=True)
class Work:
    """What a micro-batch is put through, and where its gradients go.

    Attributes:
        loss_fn: returns ``(loss_sum, weight)`` and metrics.
        ranks: has the model.
        precision: the context of the forward pass.
        scaler: scales the loss, or None.
        parameters: that are trained.
        aliases: stand for the parameters in the forward pass, and share their memory.
        buffers: one static gradient for each.
        divisor: the loss is divided by this number on the device.
    """

    loss_fn: Callable[[Any, Any], Any]
    ranks: Ranks
    precision: Callable[[], AbstractContextManager[Any]]
    scaler: torch.amp.GradScaler | None
    parameters: Sequence[nn.Parameter]
    aliases: Sequence[Tensor]
    buffers: Sequence[Tensor]
    divisor: Tensor

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the aliases."""
        by_id = {id(value): alias for value, alias in zip(self.parameters, self.aliases, strict=True)}
        held: list[tuple[dict[str, Any], str, Any]] = [
            (part._parameters, name, value)
            for part in self.ranks.module.modules()
            for name, value in part._parameters.items()
            if by_id.get(id(value), value) is not value
        ]
        try:
            for place, name, value in held:
                place[name] = by_id[id(value)]
            yield
        finally:
            for place, name, value in held:
                place[name] = value


def aliases_of(parameters: Sequence[nn.Parameter], ranks: Ranks) -> Sequence[Tensor]:
    """Return the parameters themselves, or under DDP others in the same memory.

    DDP keeps the nodes at which gradients of its parameters arrive, on the stream that it was made on; a capture on
    another stream must not touch them.
    """
    if ranks.world_size == 1 and not ranks.has_ddp:
        return parameters
    return [parameter.detach().requires_grad_() for parameter in parameters]


class NotGraphableError(Exception):
    """A step does what no graph can hold; the text says what.

    Attributes:
        sums: of the eager run that showed it, None if there was none.
    """

    def __init__(self, reason: str, sums: MicroSums | None = None) -> None:
        super().__init__(reason)
        self.sums = sums


@final
class _Names(NamedTuple):
    """Which of a micro-batch's numbers stay on the device, and the others."""

    weight: float | None  # on the host
    on_device: list[str]  # metrics
    on_host: Mapping[str, float]

    @property
    def num_on_device(self) -> int:
        """Return how many numbers a replay writes: the loss, the weight, metrics."""
        return 1 + (self.weight is None) + len(self.on_device)


@final
class MicroGraph:
    """A captured forward and backward pass.

    They are two graphs, so that the host can read the weight while the backward pass runs.

    Attributes:
        signature: of the micro-batches that it can run.
        touched: the places of the parameters that get a gradient.
        is_trusted: a replay was compared with an eager run, or need not be.
        is_checked: replays gave what an eager run gave before the capture.
        eager_seconds: of that eager run.
        seconds: of that replay.
        num_replayed: micro-batches of training.
    """

    def __init__(self, signature: Signature, like: Any, work: Work, backend: GraphBackend) -> None:
        self.signature = signature
        self.touched: list[int] = []
        self.is_trusted = self.is_checked = False
        self.eager_seconds = self.seconds = math.nan
        self.num_replayed = 0
        self._work = work
        self._inputs = StaticInputs(like, work.divisor.device)
        self._loss: Tensor | None = None
        self._names: _Names | None = None
        self._numbers = torch.zeros(0, dtype=torch.float64, device=work.divisor.device)
        self._capture(backend)

    def _capture(self, backend: GraphBackend) -> None:
        # How many numbers the loss function returns is known only after a first run, which the caller has made.
        self._numbers = torch.zeros(_MOST_NUMBERS, dtype=torch.float64, device=self._work.divisor.device)
        try:
            self._forward_replay: Replay = backend.capture(self._forward, writes=[self._numbers])
            self._backward_replay: Replay = backend.capture(self._backward, writes=list(self._work.buffers))
        finally:
            self._loss = None  # what lies in the pool is free for the next capture

    def _forward(self) -> None:
        work = self._work
        # Containers of its own, since a loss may take fields out of them.
        batch = map_leaves(self._inputs.batch, lambda tensor: tensor)
        with work.precision(), without_autocast_cache(), work.in_place(), ConstantsOnDevice():
            sums = MicroSums(work.loss_fn(work.ranks.module, batch), is_replayed=True)
        if sums.is_empty or sums.is_doubtful:
            raise NotGraphableError("a micro-batch has a weight of 0 on the host, and such are left out")
        self._loss = sums.loss
        metrics = {name: value for name, value in sums.metrics.items() if isinstance(value, Tensor)}
        weight = sums.weight
        numbers = [sums.loss.detach(), *([weight] if isinstance(weight, Tensor) else []), *metrics.values()]
        if len(numbers) > _MOST_NUMBERS:
            raise NotGraphableError(f"loss_fn returns {len(numbers)} numbers; a graph keeps up to {_MOST_NUMBERS}")
        self._numbers[: len(numbers)].copy_(torch.stack([number.double() for number in numbers]))
        on_host = {name: float(value) for name, value in sums.metrics.items() if not isinstance(value, Tensor)}
        self._names = _Names(None if isinstance(weight, Tensor) else float(weight), list(metrics), on_host)

    def _backward(self) -> None:
        work = self._work
        assert self._loss is not None
        loss = self._loss / work.divisor.to(self._loss.dtype)
        if work.scaler is not None:
            loss = work.scaler.scale(loss)
        # Not loss.backward(): its nodes that accumulate belong to the stream of the first eager step, or to DDP.
        gradients = torch.autograd.grad(loss, list(work.aliases), allow_unused=True)
        self.touched = [place for place, gradient in enumerate(gradients) if gradient is not None]
        for places in _by_kind(work.buffers, self.touched):
            found = [gradients[place] for place in places]
            if any(gradient.is_sparse for gradient in found):
                raise NotGraphableError("sparse gradients have no static buffer")
            torch._foreach_add_([work.buffers[place] for place in places], found)
        self._loss = None

    def run(self, batch: Any, divisor: float) -> MicroSums:
        """Replay a micro-batch of the same signature; its gradients are added to the buffers."""
        self._inputs.fill(batch)
        self._work.divisor.fill_(divisor)
        self._forward_replay()
        sums = self._sums()
        self._backward_replay()
        return sums

    def run_forward(self, batch: Any) -> MicroSums:
        """Replay only the forward pass of a micro-batch of the same signature."""
        self._inputs.fill(batch)
        self._forward_replay()
        return self._sums()

    def _sums(self) -> MicroSums:
        assert self._names is not None
        names = self._names
        values = list(self._numbers[: names.num_on_device].clone().unbind())
        loss, rest = values[0], values[1:]
        weight: Any = names.weight if names.weight is not None else rest.pop(0)
        metrics: dict[str, Sum] = {**dict(zip(names.on_device, rest, strict=True)), **names.on_host}
        return MicroSums.of_replay(loss, weight, metrics)

    @property
    def host_weight(self) -> float | None:
        """Return the weight that every micro-batch of this kind has, None where it depends on the values."""
        return None if self._names is None else self._names.weight

    @property
    def types(self) -> str:
        """Return the types of the inputs, for people."""
        return " ".join(str(tensor.dtype).removeprefix("torch.") for tensor in leaves(self._inputs.batch))


# Loss, weight and metrics of a micro-batch.
_MOST_NUMBERS = 32


def _by_kind(buffers: Sequence[Tensor], places: Sequence[int]) -> list[list[int]]:
    """Return the places of buffers of one type together, which one call can add to."""
    kinds: dict[torch.dtype, list[int]] = {}
    for place in places:
        kinds.setdefault(buffers[place].dtype, []).append(place)
    return list(kinds.values())


class without_autocast_cache:
    """Cast every parameter inside the graph: what autocast keeps would be as old as the capture."""

    def __enter__(self) -> None:
        self._before = torch.is_autocast_cache_enabled()
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(self._before)


_NUMBERS = frozenset({bool, int, float})


def _has_places(index: Any) -> bool:
    """Say whether an index names places by numbers: a mask is filled on the device anyway."""
    tensors = [one for one in (index if isinstance(index, tuple) else (index,)) if isinstance(one, Tensor)]
    return bool(tensors) and all(one.dtype not in (torch.bool, torch.uint8) for one in tensors)


class ConstantsOnDevice(TorchFunctionMode):
    """Make numbers on the device, as in ``torch.tensor(0.0, device="cuda")`` and ``mask[rows, columns] = 1``.

    A copy from the host cannot be captured.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or one that gives the same."""
        options = dict(kwargs or {})
        if func is torch.Tensor.__setitem__ and args[0].is_cuda and type(args[2]) in _NUMBERS and _has_places(args[1]):
            value = torch.full((), args[2], dtype=args[0].dtype, device=args[0].device)
            return func(args[0], args[1], value)
        is_single = func is torch.tensor and len(args) == 1 and type(args[0]) in _NUMBERS
        if not is_single or options.get("device") is None or torch.device(options["device"]).type != "cuda":
            return func(*args, **options)
        requires_grad = options.pop("requires_grad", False)
        options.pop("pin_memory", None)
        return torch.full((), args[0], **options).requires_grad_(requires_grad)
