"""What an update trains, asked anew every time, and its gradients: set aside, summed over pieces and ranks."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .._ranks import Ranks, half_to_float, is_expanded, is_sharded, mark_of
from ..errors import ArgumentError
from ._optimizers import check_parameters, optimizer_parameters

T = TypeVar("T")
Existing: TypeAlias = Literal["clear", "add"]
# Gradients taken off their parameters, in the order of the parameters.
_Sums: TypeAlias = "list[Tensor | None]"


@final
class Trained:
    """The parameters that an optimizer updates now, of the model or not.

    Attributes:
        parameters: those with ``requires_grad``, each once, in the order of the optimizer.
        gradients: of these parameters.
        optimizer: the optimizer.
    """

    def __init__(self, ranks: Ranks, optimizer: Optimizer) -> None:
        self._ranks = ranks
        self.optimizer = optimizer
        self._names: dict[int, str] = {}
        self._mark = self._mark_of_names = 0
        self.parameters: list[nn.Parameter] = []
        self.gradients = Gradients([], [])
        self.refresh()
        if not self.parameters:
            raise ArgumentError(
                "the optimizer updates no trainable parameter; set requires_grad on those to train, and give them to it"
            )

    def has_changed(self) -> bool:
        """Return whether the optimizer updates other parameters now than at the last ``refresh``."""
        found = optimizer_parameters(self.optimizer)
        return len(found) != len(self.parameters) or not all(map(_is, found, self.parameters))

    def refresh(self) -> bool:
        """Ask the optimizer again, and return whether it updates other parameters than before."""
        found = optimizer_parameters(self.optimizer)
        check_parameters(found)
        if len(found) == len(self.parameters) and all(map(_is, found, self.parameters)):
            return False
        self._ranks.check_reached(found)
        own = list(self._ranks.module.named_parameters())
        known = {id(parameter) for parameter in found}
        in_groups = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        others = {id(one): one for one in [*(value for _, value in own), *in_groups] if id(one) not in known}
        self._names = {id(parameter): name for name, parameter in own}
        self.parameters = found
        self.gradients = Gradients(found, list(others.values()))
        if self._ranks.world_size > 1:
            self._mark = self._mark_of_unshared()
            self._mark_of_names = mark_of([(name, tuple(value.shape), value.dtype) for name, value in self.named()])
        return True

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with their names; one that the model does not own is named by its place."""
        return [
            (self._names.get(id(value), f"optimizer.{place}"), value) for place, value in enumerate(self.parameters)
        ]

    def marks(self) -> list[int]:
        """Return numbers that must be the same on all ranks; see ``check_marks``."""
        return [self._ranks.mark_of_buffers(), self._mark, self._mark_of_names]

    def check_marks(self, are_equal: Sequence[bool]) -> None:
        """Refuse, on all ranks alike, what differs between them; each of ``marks`` was compared."""
        same_buffers, same_values, same_names = are_equal
        if not same_buffers:
            raise ArgumentError(
                "buffers of the model have other shapes on other ranks, so they cannot be shared; give them the same "
                "shape everywhere, or use DDP(broadcast_buffers=False)"
            )
        if not same_names:
            raise ArgumentError(
                "the optimizer trains other parameters on other ranks, or in another order; build it in the same way, "
                "and freeze and unfreeze on all ranks alike"
            )
        if not same_values:
            raise ArgumentError(
                "the optimizer trains parameters that the wrapped model does not own, and their values differ between "
                "ranks; make them with the same seed on all ranks, or put them into the model before it is wrapped"
            )

    def _mark_of_unshared(self) -> int:
        """Return a checksum of the parameters that no wrapper has made equal on all ranks."""
        mark = 0
        for parameter in self.parameters:
            if not self._ranks.is_equal(parameter):
                mark = zlib.crc32(_bytes_of(parameter), mark)
        return mark


@final
class Gradients:
    """What the parameters of an update gather in ``.grad``.

    Whatever changes a gradient must see that of the whole batch, since only sums of pieces are exact. So hooks that
    users have put on parameters wait until the sum is there, and parameters in half precision are summed in float32.

    Args:
        trained: what the optimizer updates.
        others: parameters of the model that it does not update; their gradients are dropped.

    Attributes:
        static: the buffers in which graphs gather gradients, by parameter.
    """

    def __init__(self, trained: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> None:
        self.trained = trained
        self.others = others
        self._all = [*trained, *others]
        self._half = [parameter for parameter in trained if half_to_float(parameter.dtype) is not parameter.dtype]
        self._wide: dict[nn.Parameter, Tensor] = {}  # float32 sums of parameters in half precision
        self._existing: _Sums = []
        self._deferred: list[tuple[nn.Parameter, dict[int, Any]]] = []  # hooks of the user that wait for the sum
        self._seen: list[tuple[Tensor | None, int]] = []
        self.static: dict[nn.Parameter, Tensor] = {}  # buffers that graphs write to

    @property
    def has_float16(self) -> bool:
        """Return whether a parameter is in float16, which has a short range."""
        return any(parameter.dtype is torch.float16 for parameter in self._half)

    def begin(self, existing: Existing, *, is_warned: bool) -> bool:
        """Begin an update without gradients; return whether some that were there were not zero and are lost.

        Args:
            existing: ``"clear"`` drops gradients that are there, ``"add"`` keeps them for ``finish``.
            is_warned: do not warn again.
        """
        found = [parameter.grad for parameter in self._all if parameter.grad is not None]
        is_lost = False
        if existing == "add":
            own = [parameter.grad for parameter in self.trained]
            self._existing = [one.clone() if one is not None and is_expanded(one) else one for one in own]
        elif found and not is_warned and _num_not_zero(found) > 0:
            is_lost = True
            warnings.warn(
                f"{_num_not_zero(found)} of {len(self._all)} parameters had a gradient when the update began; such "
                "gradients are cleared, now and later, as zero_grad() would; existing_gradients='add' adds them",
                stacklevel=5,
            )
        self.drop()
        return is_lost

    def take(self) -> _Sums:
        """Take the sums so far off the parameters, so that a batch that fails does not touch them."""
        taken = [self._wide.pop(parameter, parameter.grad) for parameter in self.trained]
        if self.static:  # the next batch may write to the same buffers
            pairs = zip(self.trained, taken, strict=True)
            taken = [one if one is None or one is not self.static.get(owner) else one.clone() for owner, one in pairs]
        self.drop()
        return taken

    def put_back(self, taken: _Sums) -> None:
        """Add what ``take`` returned to what has been gathered since; after an error only what was taken is there."""
        try:
            for parameter, before in zip(self.trained, taken, strict=True):
                self._add(parameter, before)
        except BaseException:
            self.drop()
            for parameter, before in zip(self.trained, taken, strict=True):
                if before is not None and before.dtype is not parameter.dtype:
                    self._wide[parameter] = before
                else:
                    parameter.grad = before
            raise

    def _add(self, parameter: nn.Parameter, before: Tensor | None) -> None:
        """Add to one sum, and leave ``before`` as it is."""
        now = self._wide.get(parameter, parameter.grad)
        if before is None:
            return
        if before.dtype is not parameter.dtype or parameter in self._wide:
            self._wide[parameter] = before.float() if now is None else _sum_of(before.float(), now.float())
            parameter.grad = None
        else:
            parameter.grad = before if now is None else _sum_of(before, now)

    def drop(self) -> None:
        """Forget what was gathered."""
        self._wide, self._seen = {}, []
        for parameter in self._all:
            parameter.grad = None

    def put_existing_back(self) -> None:
        """Give the parameters the gradients that they had before the update, if these were to be added."""
        for parameter, gradient in zip(self.trained, self._existing, strict=False):
            parameter.grad = gradient
        self._existing = []

    @contextmanager
    def gathering(self, *, in_pieces: bool) -> Iterator[None]:
        """Run backward passes inside this context; hooks of the user do not see their gradients.

        Args:
            in_pieces: several backward passes follow, whose gradients in half precision are summed in float32.
        """
        hooks = _foreign_hooks(self.trained)
        self._deferred = [(parameter, foreign) for parameter, _, foreign in hooks]
        for _, registered, foreign in hooks:
            registered.update(dict.fromkeys(foreign, _wait))
        handles = self._widening_hooks() if in_pieces and self._half else []
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for _, registered, foreign in hooks:
                for key in foreign.keys() - registered.keys():
                    del foreign[key]  # removed by its owner in the meantime
                registered.update(foreign)
        known = {id(parameter): set(foreign) for parameter, foreign in self._deferred}
        for parameter, _, foreign in _foreign_hooks(self.trained):
            if foreign.keys() - known.get(id(parameter), set()):
                raise ArgumentError(
                    f"loss_fn registered a hook on a parameter of shape {tuple(parameter.shape)}, which would see the "
                    "gradients of pieces; register it once, outside of loss_fn"
                )

    def _widening_hooks(self) -> list[RemovableHandle]:
        return [
            parameter.register_post_accumulate_grad_hook(self._widen)
            for parameter in self._half
            if not is_sharded(parameter)
        ]

    def _widen(self, parameter: Any) -> None:
        """Move the gradient of a parameter in half precision to its sum in float32."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        before = self._wide.get(parameter)
        if before is None:
            self._wide[parameter] = gradient.float()
        elif before.is_sparse or gradient.is_sparse:
            self._wide[parameter] = _sum_of(before, gradient.float())
        else:
            before.add_(gradient)

    def widen_shards(self) -> None:
        """Do the same for shards, which FSDP2 writes without a hook; call it after every backward pass."""
        for parameter in self._half:
            if is_sharded(parameter):
                self._widen(parameter)

    @property
    def num_hooked(self) -> int:
        """Return how many parameters have hooks of the user that wait for the sum."""
        return len(self._deferred)

    @property
    def has_any(self) -> bool:
        """Return whether a parameter has a gradient."""
        return bool(self._wide) or any(parameter.grad is not None for parameter in self._all)

    @property
    def are_finite(self) -> bool:
        """Return whether all gradients so far are finite numbers; this waits for the device."""
        found = [self._wide.get(parameter, parameter.grad) for parameter in self.trained]
        return all(one is None or bool(torch.isfinite(_values_of(one)).all()) for one in found)

    def show(self) -> None:
        """Write sums in float32 into ``.grad`` as well, rounded, for those who read it before ``finish``."""
        for parameter, total in self._wide.items():
            parameter.grad = total.to(parameter.dtype)

    def watch(self) -> None:
        """Remember the gradients as they are now, for ``check_untouched``."""
        self._seen = [_version_of(parameter) for parameter in self._all]

    def check_untouched(self) -> None:
        """Refuse gradients that somebody else has changed since ``watch``."""
        for parameter, (gradient, version) in zip(self._all, self._seen, strict=True):
            now = _version_of(parameter)
            if now[0] is not gradient or now[1] != version:
                raise ArgumentError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was changed between accumulate and "
                    "reduce, by another backward pass or by hand; finish one update before the next begins, and change "
                    "gradients only after reduce()"
                )

    def finish(self, ranks: Ranks, factor: float) -> None:
        """Turn sums into the gradient of the update, on all ranks: multiply and reduce."""
        sums = [self._wide.pop(parameter, parameter.grad) for parameter in self.trained]
        summed = ranks.add_up(sums, self.trained, factor)
        for parameter, gradient in zip(self.trained, summed, strict=True):
            if gradient is not None and gradient is not parameter.grad:
                parameter.grad = gradient.to(parameter.dtype)

    def run_hooks(self, ranks: Ranks, device: torch.device) -> None:
        """Show the gradient of the update to the hooks of the user; what they make of it on the first rank holds."""
        if not self._deferred:
            return
        _, error = attempt(self._run_hooks)
        ranks.agree(error, device)
        ranks.share([one.grad for one, _ in self._deferred if one.grad is not None and not one.grad.is_sparse])

    def _run_hooks(self) -> None:
        for parameter, foreign in self._deferred:
            for hook in foreign.values():
                changed = None if parameter.grad is None else hook(parameter.grad)
                parameter.grad = parameter.grad if changed is None else changed

    def add_existing(self, ranks: Ranks) -> None:
        """Add the gradients that were there before the update, if these were to be added."""
        existing, self._existing = self._existing, []
        if existing and ranks.world_size > 1:
            # Gradients of one rank are averaged as DDP would; those that all ranks share stay as they are.
            plain = [
                None if is_sharded(parameter) else one for parameter, one in zip(self.trained, existing, strict=True)
            ]
            averaged = ranks.add_up(plain, self.trained, 1 / ranks.world_size)
            existing = [
                new if old is None or not is_sharded(old) else old for new, old in zip(averaged, existing, strict=True)
            ]
        for parameter, before in zip(self.trained, existing, strict=False):
            if before is not None:
                parameter.grad = before if parameter.grad is None else _sum_of(before, parameter.grad)


def _sum_of(first: Tensor, second: Tensor) -> Tensor:
    """Add gradients as backward would, of which each may be sparse."""
    return second + first if first.is_sparse and not second.is_sparse else first + second


def _values_of(gradient: Tensor) -> Tensor:
    local: Tensor = gradient.to_local() if is_sharded(gradient) else gradient  # type: ignore[attr-defined]
    return local.coalesce().values() if local.is_sparse else local


def _num_not_zero(gradients: Sequence[Tensor]) -> int:
    return sum(bool(_values_of(gradient.detach()).any()) for gradient in gradients)


def _version_of(parameter: nn.Parameter) -> tuple[Tensor | None, int]:
    gradient = parameter.grad
    return gradient, -1 if gradient is None or gradient.is_inference() else gradient._version


def _foreign_hooks(parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Any, dict[int, Any]]]:
    """Return the parameters that have hooks which are not ours, all their hooks, and the foreign ones."""
    found = []
    for parameter in parameters:
        registered: Any = parameter._backward_hooks
        if registered and not is_sharded(parameter):
            foreign = {key: hook for key, hook in registered.items() if not _only_looks(hook)}
            if foreign:
                found.append((parameter, registered, foreign))
    return found


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run a function, and return its result or its error: other ranks must hear of it before it is raised."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _is(first: Any, second: Any) -> bool:
    return first is second


def _bytes_of(parameter: Tensor) -> bytes:
    flat = parameter.detach().cpu().contiguous()
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.reshape(-1).view(torch.uint8).numpy().tobytes()


def _wait(gradient: Tensor) -> None:
    """Stand in for a hook until the sum is there."""


def _only_looks(hook: Any) -> bool:
    """Return whether a hook does not change the gradient: ours, and those of ``register_multi_grad_hook``."""
    return hasattr(hook, "is_batchwright") or is_of_several(hook)


def is_of_several(hook: Any) -> bool:
    """Return whether ``register_multi_grad_hook`` made a hook; with ``mode="any"`` it has the name of the user's."""
    return getattr(hook, "__globals__", {}).get("__name__") == "torch.autograd.graph"
