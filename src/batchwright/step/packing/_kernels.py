"""Attention functions over the sequences of a flat batch: torch's, a plain one, and what transformers calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...errors import ArgumentError

INSTEAD = "train on padded batches, with WindowSort and a collator that pads"
_is_plain: ContextVar[bool] = ContextVar("is_plain", default=False)


class Attend(Protocol):
    """Attention within the sequences of a flat batch."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        longest: int,
        *,
        scale: float,
        is_causal: bool,
        window: tuple[int, int] | None,
    ) -> Tensor:
        """Return ``(tokens, heads, size)`` from a query of that shape; keys and values may have fewer heads.

        Args:
            query: of all sequences, one after the other.
            key: likewise.
            value: likewise.
            bounds: where sequences begin and end, ``(sequences + 1,)``.
            longest: the tokens of the longest sequence.
            scale: of the scores.
            is_causal: a token sees no later one.
            window: how many earlier and later tokens one sees; None for all of them.
        """


@cache
def torch_varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "scale" in inspect.signature(varlen_attn).parameters else None


@cache
def _names() -> frozenset[str]:
    varlen = torch_varlen()
    return frozenset() if varlen is None else frozenset(inspect.signature(varlen).parameters)


def has_windows() -> bool:
    return "window_size" in _names()


def attend_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> Tensor:
    """Attend with torch's kernel; see ``Attend``."""
    varlen = torch_varlen()
    assert varlen is not None
    options: dict[str, Any] = {"scale": scale}
    if "enable_gqa" in _names():  # older versions take grouped heads as they are
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    if has_windows():
        options["window_size"] = window or (-1, 0 if is_causal else -1)
    else:
        options["is_causal"] = is_causal
    found: Tensor = varlen(query, key, value, bounds, bounds, longest, longest, **options)
    return found


def attend_plainly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> Tensor:
    """Attend by a softmax per sequence, on any device and in any type; see ``Attend``."""
    repeats, found = query.shape[1] // key.shape[1], []
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    before, after = window or (longest, longest)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        places = torch.arange(end - start, device=query.device)
        distance = places[None] - places[:, None]  # of the token that is seen
        sees = (distance >= -before) & (distance <= (0 if is_causal else after))
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) * scale
        weights = scores.masked_fill(~sees, -torch.inf).softmax(dim=-1)
        found.append(torch.einsum("hqk,khd->qhd", weights, value[start:end]))
    return torch.cat(found)


@contextmanager
def attending_plainly() -> Iterator[None]:
    """Attend without torch's kernel inside the context, and so in any type; it is slow."""
    token = _is_plain.set(True)
    try:
        yield
    finally:
        _is_plain.reset(token)


def is_mark(mask: Any) -> bool:
    return isinstance(mask, Tensor) and tuple(mask.shape) == (1, 1, 1, 1)


def attention(
    attend: Attend,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks its attention functions to: ``(1, heads, tokens, size)`` of a flat batch."""
    bounds, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    if bounds is None:
        if is_mark(attention_mask) and query.shape[2] > 1:
            raise ArgumentError(
                f"{type(module).__name__} gets no cu_seq_lens_q, as the model does not hand it on; {INSTEAD}"
            )
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    _check(module, query, key, value, attention_mask, dropout, kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None
    if sliding_window is not None:  # transformers counts the token itself
        window = (sliding_window - 1, 0 if causal else sliding_window - 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    query, key, value = (states[0].transpose(0, 1) for states in _in_one_type(query, key, value))
    longest = int((bounds[1:] - bounds[:-1]).max() if longest is None else longest)
    bounds = bounds.to(query.device, torch.int32)
    if _is_plain.get() and attend is attend_on_cuda:
        attend = attend_plainly
    return attend(query, key, value, bounds, longest, scale=scale, is_causal=causal, window=window)[None], None


def _in_one_type(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return states in the type of autocast: rotary positions leave queries and keys in float32."""
    dtype = value.dtype
    if torch.is_autocast_enabled(value.device.type):
        dtype = torch.get_autocast_dtype(value.device.type)
    return tuple(states.to(dtype) for states in (query, key, value))


def _check(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    kwargs: Mapping[str, Any],
) -> None:
    """Refuse what attention over sequences does not compute."""
    added = [name for name in ("softcap", "s_aux", "position_bias", "alibi") if kwargs.get(name) is not None]
    reason = None
    if dropout > 0:
        reason = f"has dropout {dropout} of attention, which there is none of; set it to 0"
    elif added:
        reason = f"asks for {added[0]}, which there is none of"
    elif mask is not None and not is_mark(mask):
        reason = f"adds a mask or bias of shape {tuple(mask.shape)} to its scores"
    elif len(query) != 1:
        reason = f"gets {len(query)} rows, but a flat batch is a single one"
    elif key.shape[2] != query.shape[2]:
        reason = f"lets {query.shape[2]} tokens look at {key.shape[2]}, as between encoder and decoder or with a cache"
    elif value.shape[-1] != query.shape[-1]:
        reason = f"has values of size {value.shape[-1]} and queries of {query.shape[-1]}"
    if reason is not None:
        raise ArgumentError(f"{type(module).__name__} {reason}; {INSTEAD}")
