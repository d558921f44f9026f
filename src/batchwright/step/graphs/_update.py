"""The update captured and replayed: unscale, clip, and the optimizer's step with its rates in tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import is_
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...size.learning_rate import innermost
from ...size.momentum import Beta2s, ChangedBeta2, follow_beta2
from .._optimizers import clip, forget_unscaling
from .._settings import Settings
from ..oom import is_out_of_memory
from .backend import GraphBackend, Replay

# Optimizers whose step was compared with an eager one by tests, and the state that they have for every parameter.
_STATE: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.SGD: (),
}


def why_not(optimizer: Any, scaler: torch.amp.GradScaler | None, backend: GraphBackend) -> str | None:
    """Return why the step of an optimizer cannot be captured, None if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in _STATE:
        return f"the step of {name} is not captured; Adam, AdamW and SGD are"
    groups = optimizer.param_groups
    needs_fused = type(optimizer) is torch.optim.SGD or (scaler is not None and scaler.is_enabled())
    if needs_fused and not all(group.get("fused") for group in groups):
        return f"the step of {name} is captured only with fused=True here"
    if not all(backend.can_capture_update(group) for group in groups):
        return f"the step of {name} keeps its counts on the host; {name}(…, fused=True) keeps them on the device"
    step = vars(optimizer).get("step")  # schedulers put one there, to count
    if step is not None and getattr(step, "__code__", None) not in _codes_of_schedulers():
        return f"the step of {name} was replaced by another, which does not run at a replay"
    has_double = any(value.dtype is torch.float64 and value.is_cuda for group in groups for value in group["params"])
    if has_double and any(group.get("fused") for group in groups):
        return f"the fused step of {name} takes its rate in float32, and float64 parameters would notice"
    if any((_global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
        return "hooks of all optimizers do not run at a replay"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"hooks of {name}'s step do not run at a replay"
    return None


@cache
def _codes_of_schedulers() -> frozenset[Any]:
    """Return the code of the step that schedulers put in place of an optimizer's."""
    optimizer = torch.optim.SGD([torch.zeros(())])
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return frozenset({getattr(vars(optimizer).get("step"), "__code__", None)})


def has_state(optimizer: Any) -> bool:
    """Say whether parameters with a gradient have the state of later steps: the first one makes it."""
    needed = _STATE[type(optimizer)]
    for group in optimizer.param_groups:
        names = ("momentum_buffer",) if group.get("momentum") else needed
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if parameter.grad is not None and any(not isinstance(state.get(name), Tensor) for name in names):
                return False
    return True


@final
class _Fixed(NamedTuple):
    """What a captured update takes for granted."""

    has_gradient: list[bool]
    options: list[dict[str, Any]]  # of the groups, without rates, parameters and notes of users
    members: list[list[nn.Parameter]]  # of the groups
    places: list[int]  # of the parameters in memory
    state: list[Tensor]
    scale: Tensor | None
    factors: tuple[float, ...]  # by which the scale grows and falls


@final
class _Key(NamedTuple):
    """What tells captured updates apart."""

    has_gradient: tuple[bool, ...]
    beta2s: Beta2s | None  # as a rule made them, None without one


@final
class UpdateGraph:
    """A captured update of the parameters that have a gradient now, which lies in their static buffers."""

    def __init__(
        self,
        optimizer: Any,
        parameters: Sequence[nn.Parameter],
        clip_norm: float | None,
        scaler: torch.amp.GradScaler | None,
        backend: GraphBackend,
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._clip_norm, self._scaler = clip_norm, scaler
        device = parameters[0].device
        # As wide as the parameters: in float32 a rate of 0.1 is off in the eighth digit.
        dtype = max((parameter.dtype for parameter in parameters), key=lambda kind: kind.itemsize)
        self._rates = [torch.zeros((), dtype=dtype, device=device) for _ in optimizer.param_groups]
        self._norm = torch.zeros((), dtype=dtype, device=device)
        self._fixed = self._look()
        writes = [self._norm, *parameters, *self._fixed.state]
        writes += [parameter.grad for parameter in parameters if parameter.grad is not None]
        writes += [] if self._fixed.scale is None else [self._fixed.scale, scaler._growth_tracker]  # type: ignore[union-attr, list-item]
        self._replay: Replay = backend.capture(self._run, writes=writes)

    def _run(self) -> None:
        if self._scaler is not None:
            self._scaler.unscale_(self._optimizer)
        if self._clip_norm is not None:
            self._norm.copy_(clip(self._parameters, self._clip_norm))
        with _capturable(self._optimizer, self._rates):
            if self._scaler is None:
                self._optimizer.step()
            else:
                self._scaler.step(self._optimizer)
                self._scaler.update()

    def fits(self) -> bool:
        """Say whether everything is as the capture saw it, except for values in tensors and rates."""
        now, then = self._look(), self._fixed
        return (
            now.has_gradient == then.has_gradient
            and now.options == then.options
            and now.places == then.places
            and now.scale is then.scale
            and now.factors == then.factors
            and len(now.state) == len(then.state)
            and all(map(is_, now.state, then.state))
            and len(now.members) == len(then.members)
            and all(len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(now.members, then.members, strict=True))
        )

    def _look(self) -> _Fixed:
        groups = self._optimizer.param_groups
        state, scaler = self._optimizer.state, self._scaler
        known = self._optimizer.defaults.keys() - _NOT_FIXED
        return _Fixed(
            [parameter.grad is not None for parameter in self._parameters],
            [{name: group.get(name) for name in known} for group in groups],
            [list(group["params"]) for group in groups],
            [parameter.data_ptr() for parameter in self._parameters],
            [value for held in state.values() for value in held.values() if isinstance(value, Tensor)],
            None if scaler is None else scaler._scale,
            () if scaler is None else (
                scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
            ),
        )  # fmt: skip

    def run(self, rates: Sequence[float | Tensor]) -> Tensor | None:
        """Replay the update with the rates of the groups; return the norm of the gradient before clipping."""
        for tensor, rate in zip(self._rates, rates, strict=True):
            tensor.fill_(rate) if not isinstance(rate, Tensor) else tensor.copy_(rate)
        self._replay()
        return None if self._clip_norm is None else self._norm.clone()


@final
class Updates:
    """Captures the update when it can be, and replays it.

    Attributes:
        reason: why updates run eagerly for good, None if they do not.
        note: why some updates run eagerly, None if none does.
        is_new: the last ``prepare`` has captured.
        num_replayed: updates so far.
    """

    def __init__(self, optimizer: Any, settings: Settings, backend: GraphBackend) -> None:
        self._optimizer, self._settings, self._backend = optimizer, settings, backend
        self._graphs: dict[_Key, UpdateGraph] = {}  # the one used last is at the end
        self._seen: dict[Beta2s, None] = {}  # that ran eagerly once; when one comes again, it is captured
        self._num_beta2s = 0  # captures for another beta2
        self._beta2s: Beta2s | None = None
        self._graph: UpdateGraph | None = None
        self._num_changes = self._num_replaced = self._num_short = 0
        self.num_replayed = 0
        self.is_new = False
        self.reason: str | None = None
        self.note: str | None = None

    def is_ready(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Say whether the optimizer can be captured and has the state of its later steps, which a capture needs."""
        if self.reason is not None:
            return False
        if innermost(self._optimizer) is not self._optimizer:
            self.reason = "a wrapped optimizer is not captured"
        else:
            self.reason = why_not(self._optimizer, self._settings.scaler, self._backend)
        return self.reason is None and (bool(self._graphs) or has_state(self._optimizer))

    def prepare(self, parameters: Sequence[nn.Parameter], beta2s: Beta2s | None = None) -> bool:
        """Capture the update if it is not what was captured before; return whether it can be replayed.

        Args:
            parameters: that are trained.
            beta2s: of the groups in this update, None for those that they have.
        """
        self._beta2s = beta2s
        with ChangedBeta2(self._optimizer, beta2s):
            return self._prepare(parameters, _Key(tuple(one.grad is not None for one in parameters), beta2s))

    def _prepare(self, parameters: Sequence[nn.Parameter], key: _Key) -> bool:
        self._graph = self._graphs.pop(key, None)
        if self._graph is not None:
            self._graphs[key] = self._graph
        self.is_new = (self._graph is None or not self._graph.fits()) and not self._waits(key)
        if not self.is_new:
            return self._graph is not None
        self._num_changes += self._graphs.pop(key, None) is not None
        self._graph = None
        if not has_state(self._optimizer):
            return False
        if len(self._graphs) >= (_MOST_SETS if key.beta2s is None else _MOST_HELD):
            del self._graphs[next(iter(self._graphs))]
            self._num_replaced += key.beta2s is None
        if self._num_changes >= _MOST_CAPTURES:
            self.reason = "options of the optimizer change again and again"
        elif self._num_replaced >= _MOST_CAPTURES:
            self.reason = "other parameters get gradients again and again"
        else:
            self._capture(key, parameters)
        return self._graph is not None

    def _waits(self, key: _Key) -> bool:
        """Say whether a beta2 is not worth a capture: it came for the first time, or too many have come.

        A captured update holds beta2 as a number, so that each batch size has one of its own.
        """
        beta2s = key.beta2s
        if beta2s is None or key in self._graphs or all(one.has_gradient != key.has_gradient for one in self._graphs):
            return False
        is_new = beta2s not in self._seen
        if is_new and len(self._seen) < _MOST_SEEN:
            self._seen[beta2s] = None
        if is_new or self._num_beta2s >= _MOST_BETA2S:
            self.note = "a beta2 of beta2_rule is captured when it comes again, and of many only the first"
            return True
        self._num_beta2s += 1
        return False

    def _capture(self, key: _Key, parameters: Sequence[nn.Parameter]) -> None:
        settings = self._settings
        try:
            self._graph = UpdateGraph(self._optimizer, parameters, settings.clip_norm, settings.scaler, self._backend)
            self._graphs[key] = self._graph
        except Exception as error:
            if is_out_of_memory(error):
                self._num_short += 1
                self.reason = "its capture ran out of memory" if self._num_short == _MOST_CAPTURES else None
            else:
                self.reason = f"its capture failed with {type(error).__name__}: {str(error)[:200]}"
        if self._graph is None and settings.scaler is not None:
            forget_unscaling(settings.scaler, self._optimizer)  # the eager update unscales by itself

    def run(self, factor: float) -> Tensor | None:
        """Replay the update with the rates of the groups, times a factor; return the norm before clipping."""
        assert self._graph is not None
        self.num_replayed += 1
        follow_beta2(self._optimizer, self._beta2s)  # in place, where the captured step reads
        with ChangedBeta2(self._optimizer, self._beta2s):
            return self._graph.run([group["lr"] * factor for group in self._optimizer.param_groups])


# Options that change at every update, such as a cycle of momenta, are not worth a capture each.
_MOST_CAPTURES = 8
# Sets of parameters that get gradients, such as heads that take turns, are captured each, up to so many.
_MOST_SETS = 4
# With a rule for beta2, so many updates are held, and so many are captured in all.
_MOST_HELD = 16
_MOST_BETA2S = 64
_MOST_SEEN = 4096
# Schedulers keep their first rate in the group.
_NOT_FIXED = frozenset({"params", "lr", "initial_lr", "capturable"})


@contextmanager
def _capturable(optimizer: Any, rates: Sequence[Tensor]) -> Iterator[None]:
    """Give the groups their rates as tensors, and allow a capture; afterwards they are as they were."""
    groups = optimizer.param_groups
    before = [(group, {name: group[name] for name in ("lr", "capturable") if name in group}) for group in groups]
    try:
        for (group, had), rate in zip(before, rates, strict=True):
            group["lr"] = rate
            if "capturable" in had and rate.is_cuda:
                group["capturable"] = True
        yield
    finally:
        for group, had in before:
            group.update(had)
