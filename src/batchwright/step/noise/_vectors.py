"""Which parameters of a model are vectors whose gradient of every example one backward pass shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, final

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..._ranks import half_to_float

Normalize: TypeAlias = Callable[[Tensor], Tensor]
# What RMS norms of transformers and others call the number that keeps them from dividing by 0.
_EPSILONS = ("variance_epsilon", "eps", "epsilon")


@final
class Tap(NamedTuple):
    """A module with a vector: ``y = … + shift`` or ``y = scale ⊙ normalize(x)`` over its feature axis.

    The gradient of an example is ``sum(dy)`` for the shift and ``sum(dy ⊙ normalize(x))`` for the scale, over all axes
    but those of examples and features. A module with a shift is measured in that alone: it reads nothing but ``dy``.
    """

    module: nn.Module
    scale: nn.Parameter | None
    shift: nn.Parameter | None
    normalize: Normalize | None  # None for a shift
    axis: int  # of the features: 1 or -1

    @property
    def vector(self) -> nn.Parameter | None:
        """Return the parameter that is measured: the shift, or without one the scale."""
        return self.scale if self.shift is None else self.shift

    def of(self, known: set[int]) -> Tap:
        """Return the tap with one of its parameters that are known by their identity, the shift if it is."""
        if id(self.shift) in known:
            return self._replace(scale=None, normalize=None)
        scale = self.scale if id(self.scale) in known else None
        return self._replace(scale=scale, shift=None, normalize=None if scale is None else self.normalize)

    def rows_of(self, gradient: Tensor, inputs: Tensor | None) -> Tensor:
        """Return the gradient of every example in the vector, from that of the module's output."""
        if self.normalize is not None and inputs is not None:
            gradient = gradient * self.normalize(inputs.to(half_to_float(inputs.dtype)))
        dtype, num_axes = half_to_float(gradient.dtype), gradient.dim()
        if num_axes == 2:
            return gradient.to(dtype)
        if self.axis == 1:
            return gradient.flatten(2).sum(2, dtype=dtype)
        return (gradient if num_axes == 3 else gradient.flatten(1, -2)).sum(1, dtype=dtype)


def find_taps(model: nn.Module, trained: Iterable[nn.Parameter]) -> list[Tap]:
    """Return the norm layers with trained vectors; without one, the layers with trained biases.

    Classes that look like a norm are returned too: whether they are one is seen when their gradients are checked.
    """
    known = {id(one) for one in trained}
    modules = list(model.modules())
    return _taps(modules, known, _norm_of) or _taps(modules, known, _layer_of)


def compiled_parts(model: nn.Module) -> set[nn.Module]:
    """Return the modules that run inside of compiled ones, or are compiled themselves."""
    return {inner for part in model.modules() if _is_compiled(part) for inner in part.modules()}


def _is_compiled(part: nn.Module) -> bool:
    is_wrapper = "_orig_mod" in part._modules
    return is_wrapper or part._compiled_call_impl is not None or hasattr(part.forward, "_torchdynamo_orig_callable")


def _taps(modules: list[nn.Module], known: set[int], tap_of: Callable[[nn.Module], Tap | None]) -> list[Tap]:
    return [tap for found in map(tap_of, modules) if found is not None and (tap := found.of(known)).vector is not None]


def _norm_of(module: nn.Module) -> Tap | None:
    weight, bias = _vector(module, "weight"), _vector(module, "bias")
    if isinstance(module, nn.GroupNorm):
        return Tap(module, weight, bias, _group_norm(module), 1)
    if isinstance(module, nn.LayerNorm):
        return None if len(module.normalized_shape) != 1 else Tap(module, weight, bias, _layer_norm(module.eps), -1)
    if isinstance(module, nn.RMSNorm):
        return None if len(module.normalized_shape) != 1 else Tap(module, weight, None, _rms_norm(module.eps), -1)
    epsilon = next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    is_leaf = next(module.children(), None) is None
    if epsilon is None or weight is None or not is_leaf or isinstance(module, nn.modules.batchnorm._NormBase):
        return None
    return Tap(module, weight, bias, _rms_norm(epsilon) if bias is None else _layer_norm(epsilon), -1)


def _layer_of(module: nn.Module) -> Tap | None:
    bias = _vector(module, "bias")
    if bias is None or not isinstance(module, nn.Linear | _ConvNd):
        return None
    return Tap(module, None, bias, None, 1 if isinstance(module, _ConvNd) else -1)


def _vector(module: nn.Module, name: str) -> nn.Parameter | None:
    value: Any = getattr(module, name, None)
    return value if isinstance(value, nn.Parameter) and value.dim() == 1 else None


def _layer_norm(epsilon: float) -> Normalize:
    return lambda x: nn.functional.layer_norm(x, x.shape[-1:], eps=epsilon)


def _rms_norm(epsilon: float | None) -> Normalize:
    return lambda x: nn.functional.rms_norm(x, x.shape[-1:], eps=epsilon)


def _group_norm(module: nn.GroupNorm) -> Normalize:
    return lambda x: nn.functional.group_norm(x, module.num_groups, eps=module.eps)
