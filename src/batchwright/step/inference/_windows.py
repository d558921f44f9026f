"""Caches of keys and values that stay where they are: filled by a prompt, then read and written through windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..graphs._micro import NotGraphableError
from ._sizing import Layout

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache
except ImportError as error:  # pragma: no cover
    raise ImportError("graphs of generate need transformers; pip install 'batchwright[hf]'") from error

Cut: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor | None]

_ADDS = {"add", "__add__", "__radd__"}
_KEEPS = {"clone", "to", "detach", "contiguous"}
# By the name of the comparison: what it says if the smallest and the largest value agree.
_COMPARES: dict[str, Callable[[int, Any], bool]] = {
    "gt": lambda value, other: value > other, "ge": lambda value, other: value >= other,
    "lt": lambda value, other: value < other, "le": lambda value, other: value <= other,
    "eq": lambda value, other: value == other, "ne": lambda value, other: value != other,
}  # fmt: skip


@final
class Length(Tensor):
    """How many tokens a cache holds, on the device; what compares it with a number is told without waiting for it.

    Models ask whether a table of positions is long enough, or whether a prompt was read. The host knows bounds, and
    where these do not tell, no graph can hold the answer.
    """

    least: int
    most: int

    @staticmethod
    def of(value: Tensor, least: int, most: int) -> Length:
        """Return a tensor with bounds of its value, both included."""
        length = value.as_subclass(Length)
        length.least, length.most = least, most
        return length

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compare by the bounds, shift them by whole numbers, and compute anything else on plain tensors."""
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        compare = _COMPARES.get(name.strip("_"))
        with torch._C.DisableTorchFunctionSubclass():
            if compare is not None and isinstance(first, Length) and isinstance(args[1], int):
                return _agreed(compare(first.least, args[1]), compare(first.most, args[1]), args[1], name)
            plain = tree_map(_plain, (args, kwargs or {}))
            result = func(*plain[0], **plain[1])
            if name in _KEEPS and isinstance(first, Length) and result.ndim == 0:
                return Length.of(result, first.least, first.most)
            if name in _ADDS and isinstance(first, Length) and len(args) > 1 and isinstance(args[1], int):
                return Length.of(result, first.least + args[1], first.most + args[1])
            return result


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, Length) else value


def _agreed(at_least: bool, at_most: bool, other: int, name: str) -> bool:
    # Equality holds in between although neither bound has it.
    if at_least != at_most or name.strip("_") in ("eq", "ne"):
        raise NotGraphableError(f"the model compares the length of its cache with {other}")
    return at_least


@final
class Pair(NamedTuple):
    """The keys and the values of one layer, ``(rows, heads, width, size of a head)``."""

    keys: Tensor
    values: Tensor

    def move(self, source: Tensor, target: Tensor, width: int) -> None:
        """Copy rows onto others, as far as they are filled."""
        for held in self:
            part = held[:, :, :width]
            part.index_copy_(0, target, part.index_select(0, source))


@final
class Filling(CacheLayerMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """A layer that some rows of a prompt are read into; its memory stays.

    Args:
        num_rows: rows to make room for.
        width: tokens to make room for.
        pair: memory of that size from before, None to take some.
        first: the row that the first one is written to.
        end: the place after the last token of a prompt, None for one that begins at the first place.
        cut: gives memory of zeros, None where it has none left.
    """

    is_sliding = False

    def __init__(
        self,
        num_rows: int,
        width: int,
        pair: Pair | None = None,
        *,
        first: int = 0,
        end: int | None = None,
        cut: Cut | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._num_rows, self._width, self.pair, self._cut = num_rows, width, pair, cut
        self._first, self._end = first, end
        self._num_filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take memory; what no token was written to counts as 0, since nothing times no number is no number."""
        if self.pair is None:
            self.pair = Pair(*(self._empty_like(states) for states in (key_states, value_states)))
        self.is_initialized = True

    def _empty_like(self, states: Tensor) -> Tensor:
        shape = (self._num_rows, states.shape[1], self._width, states.shape[3])
        made = None if self._cut is None else self._cut(shape, states.dtype)
        return states.new_zeros(shape) if made is None else made

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a prompt, and return it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._num_filled or self.pair is None:
            raise NotGraphableError("the model reads its prompt in several pieces")
        num, width = key_states.shape[0], key_states.shape[2]
        rows, start = slice(self._first, self._first + num), 0 if self._end is None else self._end - width
        if start < 0:
            raise NotGraphableError("a prompt is not in the cache as a whole")
        for held, states in zip(self.pair, (key_states, value_states), strict=True):
            if held.dtype != states.dtype or held.shape[1] != states.shape[1] or held.shape[3] != states.shape[3]:
                raise NotGraphableError("the layers of the cache change their form from batch to batch")
            held[rows, :, start : start + width] = states
        self._num_filled = width
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the tokens read so far."""
        return self._num_filled

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the length of the keys with those to come, and where they begin; transformers 5.3 gives places."""
        num = len(query_length) if isinstance(query_length, Tensor) else query_length
        return self._num_filled + num, 0

    def get_max_length(self) -> int:
        """Return -1: no most is known, so that nothing is planned by it."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 5.3


@final
class Window(CacheLayerMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """The first rows and tokens of a layer, where each call writes one token at a place that the device knows.

    Args:
        pair: the layer.
        num_rows: rows to see.
        width: tokens to see.
        place: the place to write at, one number on the device; None for keys of the source, which stay.
    """

    is_sliding = False

    def __init__(self, pair: Pair, num_rows: int, width: int, place: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._seen = Pair(pair.keys[:num_rows, :, :width], pair.values[:num_rows, :, :width])
        self.keys, self.values = self._seen  # where models look for keys of the source
        self._width, self._place = width, place
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory is there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token, and return all of the window."""
        if self._place is None or key_states.shape[2] != 1:
            raise NotGraphableError("the model writes to its cache in another way than token by token")
        self._seen.keys.index_copy_(2, self._place, key_states)
        self._seen.values.index_copy_(2, self._place, value_states)
        return self._seen

    def get_seq_length(self) -> Any:
        """Return the tokens before the one to write."""
        return self._width if self._place is None else Length.of(self._place.view(()), 1, self._width - 1)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the width of the window, and where it begins."""
        return self._width, 0

    def get_max_length(self) -> int:
        """Return the width of the window."""
        return self._width

    get_max_cache_shape = get_max_length  # its name in transformers 5.3


def _cache_of(layers: list[Any]) -> Any:
    return Cache(layers=layers)


@final
class Layers:
    """The memory of all layers: keys and values of what is decoded, and of the source for an encoder-decoder.

    Args:
        layout: the room.
        cut: gives memory of zeros, None to take some where it is needed.
    """

    def __init__(self, layout: Layout, cut: Cut | None = None) -> None:
        self.layout, self._cut = layout, cut
        self._own: list[Pair] = []
        self._source: list[Pair] = []

    def filling(self, first: int, num_prompt: int) -> Any:
        """Return an empty cache whose layers are filled by some rows of a prompt.

        Args:
            first: the place of the first of these rows.
            num_prompt: tokens of the longest prompt; without an encoder, all prompts end with its last one.
        """
        source_width = self.layout.source_width
        if source_width is None:
            return self._fillings(self._own, self.layout.width, first=first, end=num_prompt)
        own = self._fillings(self._own, self.layout.width, first=first)
        return EncoderDecoderCache(own, self._fillings(self._source, source_width, first=first))

    def _fillings(self, pairs: Sequence[Pair], width: int, *, first: int, end: int | None = None) -> Any:
        num_rows = self.layout.num_rows
        if pairs:
            return _cache_of([Filling(num_rows, width, pair, first=first, end=end) for pair in pairs])
        make: Any = partial(Filling, num_rows, width, first=first, end=end, cut=self._cut)
        return Cache(layer_class_to_replicate=make)

    def clear(self) -> None:
        """Let nothing of an earlier batch count: what is no number there would be none times 0 too."""
        for held in (*self._own, *self._source):
            held.keys.zero_()
            held.values.zero_()

    def keep(self, cache: Any) -> int:
        """Keep the memory of a cache that was filled, and return how many tokens it holds."""
        caches = (
            (cache,) if self.layout.source_width is None else (cache.self_attention_cache, cache.cross_attention_cache)
        )
        found = [[self._kept(layer) for layer in one.layers] for one in caches]
        self._own, self._source = found[0], found[1] if len(found) > 1 else []
        if not self._own:
            raise NotGraphableError("the model does not fill the cache that it is given")
        return int(caches[0].layers[0].get_seq_length())

    def _kept(self, layer: Any) -> Pair:
        if not isinstance(layer, Filling) or layer.pair is None or not layer.get_seq_length():
            raise NotGraphableError(f"the model fills its cache with layers of its own ({type(layer).__name__})")
        return layer.pair

    def window(self, num_rows: int, width: int, place: Tensor) -> Any:
        """Return a cache that sees the first rows and tokens."""
        own = _cache_of([Window(pair, num_rows, width, place) for pair in self._own])
        if self.layout.source_width is None:
            return own
        source = [Window(pair, num_rows, self.layout.source_width, None) for pair in self._source]
        return EncoderDecoderCache(own, _cache_of(source))

    def move(self, source: Tensor, target: Tensor, width: int) -> None:
        """Copy rows onto others; of the decoder's own keys, the first ``width`` tokens."""
        for pair in self._own:
            pair.move(source, target, width)
        for pair in self._source:
            pair.move(source, target, pair.keys.shape[2])

    @property
    def written(self) -> list[Tensor]:
        """Return what decoding writes to."""
        return [held for pair in self._own for held in pair]

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the keys."""
        return self._own[0].keys.dtype

    @property
    def num_bytes(self) -> int:
        """Return the memory of all layers."""
        own, source = self.bytes_per_token
        return self.layout.num_rows * (own * self.layout.width + source * (self.layout.source_width or 0))

    @property
    def bytes_per_token(self) -> tuple[int, int]:
        """Return the memory of one token in one row: of the decoder's own, and of the source."""
        pairs = (self._own, self._source)
        own, source = (sum(held[0, :, 0].nbytes for pair in one for held in pair) for one in pairs)
        return own, source
