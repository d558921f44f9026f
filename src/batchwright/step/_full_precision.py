"""Verdicts about a model that rounding cannot change: where half precision is in doubt, the model runs in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import nn

from .._tree import leaves
from .packing._kernels import attending_plainly

T = TypeVar("T")
HALF = (torch.float16, torch.bfloat16)
# A loss moves by a few units in the last place of the logits that it comes from.
_ULPS = 2.5
# float32 may be computed in TF32 there.
_TOLERANCE_ON_GPU = 1e-3


@contextmanager
def noting_half(model: nn.Module) -> Iterator[list[torch.dtype]]:
    """Note inside the context the types of half precision that layers compute in, by their weights or by autocast."""
    found: list[torch.dtype] = []

    def note(module: nn.Module, args: Any, outputs: Any) -> None:
        found.extend({tensor.dtype for tensor in leaves(outputs) if tensor.dtype in HALF} - set(found))

    layers = [module for module in model.modules() if not any(True for _ in module.children())]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Let a model compute in float32 inside the context, where it can.

    There is no autocast, not even one that a wrapper of ``forward`` begins. Weights in half precision are widened while
    their module runs, so that there is room for one module more and not for a second model. ``use_varlen`` attends
    without its kernels, which take half precision only.
    """
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    held: dict[nn.Module, list[tuple[Any, Any]]] = {}

    def begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
        torch.set_autocast_enabled(device, False)
        own = [*module._parameters.values(), *module._buffers.values()]
        half = [value for value in own if value is not None and value.dtype in HALF]
        if half:
            held[module] = [(value, value.data) for value in half]
        for value in half:
            value.data = value.data.float()
        return _widened(args), _widened(kwargs)

    def end(module: nn.Module, *_: Any) -> None:
        for value, data in held.pop(module, ()):
            value.data = data

    with ExitStack() as stack:
        # always_call runs them after errors too, so that nothing is held when the context ends.
        stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(attending_plainly())
        for module in model.modules():
            before = module.register_forward_pre_hook(begin, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)
        yield


def _widened(values: Any) -> Any:
    """Return arguments with float32 in place of half precision."""
    if isinstance(values, dict):
        return {name: _widened(value) for name, value in values.items()}
    if isinstance(values, tuple) and type(values) is tuple:
        return tuple(map(_widened, values))
    return values.float() if isinstance(values, torch.Tensor) and values.dtype in HALF else values


@final
class InHalf(NamedTuple):
    """No verdict yet: what it would come from is rounded to half precision."""

    dtype: torch.dtype


def settled(
    model: nn.Module, judge: Callable[[float, bool], T | InHalf], is_refusal: Callable[[T], bool], *, tolerance: float
) -> T:
    """Return a verdict about a model that half precision has no part in.

    A verdict that is no refusal holds in any precision. A refusal may come from rounding where layers compute in half
    precision: other kernels, for other shapes or masks, round in other ways. Then the model is judged in float32. Only
    where it cannot run so, it is judged again with the tolerance of its type, and told so.

    Args:
        model: that is judged.
        judge: ``judge(tolerance, is_half)`` returns a verdict; ``is_half`` says that the tolerance is a wide one, and
            that there is no better one, so that ``InHalf`` is no answer.
        is_refusal: says whether a verdict is one.
        tolerance: of float32.
    """
    first = judge(tolerance, False)
    if not isinstance(first, InHalf) and not is_refusal(first):
        return first
    with _eagerly(model), noting_half(model) as halves:
        first = judge(tolerance, False)
    if isinstance(first, InHalf):
        halves.append(first.dtype)
    elif not halves:
        return first
    with _eagerly(model):
        found = _judged_in_float32(model, judge, tolerance)
    if isinstance(found, InHalf):
        found = judge(_ULPS * max(torch.finfo(dtype).eps for dtype in halves), True)
    assert not isinstance(found, InHalf)
    return found


def _judged_in_float32(model: nn.Module, judge: Callable[[float, bool], T | InHalf], tolerance: float) -> T | InHalf:
    """Return the verdict about a model in float32, none if some part of it does not compute so or there is no room."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    try:
        with in_float32(model), noting_half(model) as halves:
            found = judge(tolerance if device == "cpu" else max(tolerance, _TOLERANCE_ON_GPU), False)
    except Exception:
        return InHalf(torch.bfloat16)
    return InHalf(halves[0]) if halves else found


def _eagerly(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run as they were written, where hooks are called."""
    is_compiled = any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
