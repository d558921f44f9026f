"""Which parameters of a model are vectors whose gradient of every example one backward pass shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..._ranks import half_to_float

Normalize: TypeAlias = Callable[[Tensor], Tensor]
# What RMS norms of transformers and others call the number that keeps them from dividing by 0.
_EPSILONS = ("variance_epsilon", "eps", "epsilon")


@final
class Tap(NamedTuple):
    """A module with vectors: ``y = scale ⊙ normalize(x) + shift`` over its feature axis.

    The gradient of an example is ``sum(dy ⊙ normalize(x))`` for the scale and ``sum(dy)`` for the shift, over all axes
    but those of examples and features.
    """

    module: nn.Module
    scale: nn.Parameter | None
    shift: nn.Parameter | None
    normalize: Normalize | None  # None for a module with a shift only
    axis: int  # of the features: 1 or -1

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the vectors that are there."""
        return [one for one in (self.scale, self.shift) if one is not None]

    def of(self, known: set[int]) -> Tap:
        """Return the tap with those of its parameters that are known by their identity."""
        scale = self.scale if id(self.scale) in known else None
        shift = self.shift if id(self.shift) in known else None
        return self._replace(scale=scale, shift=shift, normalize=None if scale is None else self.normalize)

    def rows_of(self, gradient: Tensor, inputs: Tensor | None) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the gradient of every example in each vector, from that of the module's output, and its input."""
        rows: list[tuple[nn.Parameter, Tensor]] = []
        if self.scale is not None and self.normalize is not None and inputs is not None:
            rows.append((self.scale, self.sum_of(gradient * self.normalize(inputs.to(half_to_float(inputs.dtype))))))
        if self.shift is not None:
            rows.append((self.shift, self.sum_of(gradient)))
        return rows

    def quick_rows_of(self, gradient: Tensor, output: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the same from the module's output in place of its input; see ``quick_rows``."""
        rows = [one.squeeze(0) for one in quick_rows([Call(self, gradient, None, output)])]
        return list(zip(self.parameters, rows, strict=True))

    def sum_of(self, values: Tensor) -> Tensor:
        """Return the sums of every example over all axes but that of the features, in float32 or wider."""
        dtype = half_to_float(values.dtype)
        if values.dim() == 2:
            return values.to(dtype)
        if self.axis == 1:
            return values.flatten(2).sum(2, dtype=dtype)
        return (values if values.dim() == 3 else values.flatten(1, -2)).sum(1, dtype=dtype)


@final
class Call(NamedTuple):
    """What a call of a module has shown: the gradient of its output, and its input or its output."""

    tap: Tap
    gradient: Tensor
    inputs: Tensor | None
    output: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what calls have in common that can be computed together."""
        scale, shift, _, axis = self.tap[1:]
        gradient, bias = self.gradient, getattr(self.tap.module, "bias", None)
        return gradient.shape, gradient.dtype, gradient.device, axis, scale is None, shift is None, bias is None


def quick_rows(calls: Sequence[Call]) -> list[Tensor]:
    """Return gradients ``(calls, examples, features)`` in the scales, and in the shifts, of modules of one kind.

    The scale's comes from the output ``y``: ``(sum(dy ⊙ y) - shift ⊙ sum(dy)) / scale``. That is wrong where the scale
    is near 0, or the module is no such product. A few operations serve all modules, since on small tensors it is the
    number of operations that takes time.
    """
    tap = calls[0].tap
    num, num_rows = len(calls), len(calls[0].gradient)
    gradients = calls[0].gradient if num == 1 else torch.cat([call.gradient for call in calls])
    biases = [bias for call in calls if isinstance(bias := getattr(call.tap.module, "bias", None), Tensor)]
    rows = []
    sums = tap.sum_of(gradients).unflatten(0, (num, num_rows)) if biases or tap.shift is not None else None
    if tap.scale is not None:
        outputs = [call.output for call in calls if call.output is not None]
        products = gradients * (outputs[0] if num == 1 else torch.cat(outputs))
        scaled = tap.sum_of(products).unflatten(0, (num, num_rows))
        if biases and sums is not None:
            scaled = torch.addcmul(scaled, sums, _stacked(biases, sums), value=-1)
        scales = [call.tap.scale for call in calls if call.tap.scale is not None]
        rows.append(scaled / _stacked(scales, scaled))
    if tap.shift is not None and sums is not None:
        rows.append(sums)
    return rows


def _stacked(parameters: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.stack([one.detach() for one in parameters]).unsqueeze(1).to(like.dtype)


def find_taps(model: nn.Module, trained: Iterable[nn.Parameter]) -> list[Tap]:
    """Return the norm layers with trained vectors; without one, the layers with trained biases.

    Classes that look like a norm are returned too: whether they are one is seen when their gradients are checked.
    """
    known = {id(one) for one in trained}
    modules = list(model.modules())
    return _taps(modules, known, _norm_of) or _taps(modules, known, _layer_of)


def _taps(modules: list[nn.Module], known: set[int], tap_of: Callable[[nn.Module], Tap | None]) -> list[Tap]:
    return [tap for found in map(tap_of, modules) if found is not None and (tap := found.of(known)).parameters]


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
