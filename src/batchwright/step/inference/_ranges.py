"""Attention of decoding rows over ranges of keys, instead of over all that a batch has room for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from ..._optional import is_installed

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
NAME = "batchwright_decoding"
_HALF = (torch.float16, torch.bfloat16)
_SIZES = (16, 32, 64, 128, 256)
# What other kinds of attention are asked for with; none of these is a range of keys.
_OTHERS = ("position_bias", "softcap", "s_aux", "sliding_window", "cache", "head_mask")


@final
class Range(NamedTuple):
    """The keys that count, of each row: from ``start`` up to ``stop``, in int32."""

    start: Tensor
    stop: Tensor


@final
class Active(NamedTuple):
    """What a step attends with.

    Attributes:
        ranges: by the address of the keys.
        attend: attends over a range.
    """

    ranges: Mapping[int, Range]
    attend: Attend


@final
class Noted:
    """Attends over ranges of keys, and notes that it was asked to.

    Args:
        attend: attends.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend, self.was_called = attend, False

    def __call__(self, *args: Any) -> Tensor:
        """Return what it gives."""
        self.was_called = True
        return self._attend(*args)


_ACTIVE: ContextVar[Active | None] = ContextVar("active ranges", default=None)


def make_attend(base: Any, device: torch.device) -> Attend | None:
    """Return what attends over ranges of keys on a device, None where the model's own attention serves.

    In single precision the model's own attention stays, so that tokens are those of eager generation.
    """
    is_half = next(base.parameters()).dtype in _HALF
    if device.type != "cuda" or not is_half or base.config._attn_implementation != "sdpa" or not is_installed("triton"):
        return None
    from ._decode_kernel import attend_on_cuda

    return attend_on_cuda


@contextmanager
def attending(base: Any, active: Active | None) -> Iterator[None]:
    """Let the attention of a model read ranges of keys."""
    if active is None:
        yield
        return
    _register()
    held = {id(part.config): part.config for part in base.modules() if hasattr(part, "config")}
    configs = [one for one in held.values() if getattr(one, "_attn_implementation_internal", None) == "sdpa"]
    token = _ACTIVE.set(active)
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config in configs:
            config._attn_implementation_internal = "sdpa"
        _ACTIVE.reset(token)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' functions do, over a range where the keys have one."""
    active = _ACTIVE.get()
    found = None if active is None else active.ranges.get(key.data_ptr())
    is_plain = all(options.get(name) is None for name in _OTHERS)
    if active is None or found is None or not is_plain or not _fits(query, key, value):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return result, None
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    num = len(query)
    attended = active.attend(query, key, value, found.start[:num], found.stop[:num], scale)
    return attended.transpose(1, 2), None


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    size = query.shape[3]
    return query.shape[2] == 1 and size in _SIZES and key.shape[3] == value.shape[3] == size


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, start: Tensor, stop: Tensor, scale: float) -> Tensor:
    """Return the attention of one query per row over its range of keys; a row without keys gives 0.

    Args:
        query: ``(rows, heads, 1, size)``.
        key: ``(rows, heads of keys, width, size)``.
        value: as ``key``.
        start: the first key of each row.
        stop: the place after its last key.
        scale: of the scores.

    >>> one = torch.ones(1, 1, 1, 2)
    >>> keys = torch.tensor([[[[1.0, 1.0], [5.0, 5.0], [9.0, 9.0]]]])
    >>> attend_plainly(one, keys, keys, torch.tensor([0]), torch.tensor([1]), 1.0).flatten()
    tensor([1., 1.])
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    places = torch.arange(key.shape[2], device=key.device)
    inside = (places >= start[:, None]) & (places < stop[:, None])
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~inside[:, None, None], -torch.inf)
    return scores.softmax(dim=-1).nan_to_num() @ value
