"""From a text to one vector: token ids, the model, and the pool over its last hidden states."""

from __future__ import annotations

import copy
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._checks import as_flag, as_whole, check_choice, is_whole
from ..._lengths import is_transformers_tokenizer
from ..._types import MAX_INT32
from ...errors import ArgumentError
from ..graphs._comparing import NEAR, NEAR_ROUGHLY
from ..graphs._functions import is_rough
from ..graphs._rotary import renew, rotary_of, same_reach
from ..huggingface import unwrapped
from ._sharing import are_near, check_unpadded

POOLS = ("mean", "cls", "last")
# Tokenizers without a maximum give a number beyond all texts.
_MAX_LENGTH = 1_000_000
_MOST_KEPT = 4096
# Of the text that is tried with padding and without; rounding in single precision is a hundredth of what counts.
_NUM_TRIED, _NUM_PADS, _NEAR = 8, 5, 1e-4
# Beyond any rounding: of 32 layers in bfloat16 it was up to 0.08.
_FAR = 0.3


@final
class Pooled(nn.Module):
    """A model and the pool after it: ``(input_ids, attention_mask)`` to one vector per row, in single precision.

    Padding stands on the right. The mean is over real tokens, "cls" is the first and "last" the last of them.

    Args:
        model: of transformers, or another that takes these two by name and returns hidden states.
        pool: "mean", "cls" or "last".
        normalize: give every vector a length of 1.
    """

    def __init__(self, model: Any, *, pool: str, normalize: bool) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model must be a torch module, got {type(model).__name__}")
        check_choice("pool", pool, POOLS)
        self.model, self._pool, self._is_unit = _encoder_of(model), pool, as_flag("normalize", normalize)
        # A cache of keys and values would be made for nothing.
        takes = inspect.signature(unwrapped(self.model).forward).parameters
        _check_takes(self.model, takes)
        self._options = {"use_cache": False} if "use_cache" in takes else {}
        self.rotary = rotary_of(self.model.modules())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one vector per row."""
        found = self.model(input_ids=input_ids, attention_mask=attention_mask, **self._options)
        hidden = _hidden_of(found, tuple(input_ids.shape)).float()
        if self._pool == "cls":
            vectors = hidden[:, 0]
        elif self._pool == "last":
            last = attention_mask.sum(1) - 1
            vectors = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)
        else:
            weights = attention_mask.to(hidden.dtype)
            vectors = (hidden * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)
        return F.normalize(vectors, dim=-1) if self._is_unit else vectors

    def check_mode(self, is_training: bool) -> None:
        """Refuse requests in training mode."""
        if is_training:
            raise ArgumentError("the model is in training mode, where dropout changes its vectors; call model.eval()")

    def check_longest(self, length: int) -> None:
        """Refuse texts whose attention depends on padding, and on whether a shorter one came before (BigBird)."""
        base: Any = unwrapped(self.model)
        config: Any = getattr(base, "config", None)
        if getattr(base, "attention_type", None) != "block_sparse" or not hasattr(config, "num_random_blocks"):
            return
        most = (5 + 2 * config.num_random_blocks) * config.block_size
        if length > most:
            raise ArgumentError(
                f"texts may have {length} tokens, and beyond {most} the sparse attention of {type(base).__name__} "
                "depends on padding, until a shorter text switches it off for good; call "
                f"model.set_attention_type('original_full') first, or give max_length={most}"
            )

    def pads_freely(self, ids: Sequence[int], pad_id: int) -> bool | None:
        """Say whether a text keeps its vector with padding on its right, None if the model cannot run it.

        Convolutions, transforms over the whole row and attention to averages of keys see padding whatever a mask says.
        """
        room = min(self.most_positions or _MAX_LENGTH, same_reach(self.rotary) or _MAX_LENGTH)
        few = list(ids[: min(_NUM_TRIED, max(1, room // 2))])
        renew(self.rotary)
        num_pads = min(_NUM_PADS, room - len(few))
        row, mask = (tensor.to(self.device) for tensor in stacked([few], pad_id))

        def padded_with(value: int) -> Tensor:
            ids = F.pad(row, (0, num_pads), value=value)
            vectors: Tensor = self(input_ids=ids, attention_mask=F.pad(mask, (0, num_pads)))
            return vectors

        try:
            with torch.no_grad():
                plain, padded = self(input_ids=row, attention_mask=mask), padded_with(pad_id)
                is_half = any(value.dtype in (torch.float16, torch.bfloat16) for value in self.model.parameters())
                if not is_half and not is_rough(self.device):
                    return bool(are_near(padded, plain, _NEAR).all())
                is_near = bool(are_near(padded, plain, NEAR_ROUGHLY).all())
                if is_near or not are_near(padded, plain, _FAR).all():
                    return is_near
                # Kernels for another width round in another way; in the same width, what the padding is shows nothing.
                other = next((one for one in (*few, 0, 1) if one != pad_id), pad_id)
                return bool(are_near(padded_with(min(other, self.num_tokens - 1)), padded, NEAR).all())
        except Exception:  # whatever it is, the texts themselves will show it
            return None

    @property
    def device(self) -> torch.device:
        """Return where the model lies."""
        return next((value.device for value in self.model.parameters()), torch.device("cpu"))

    @property
    def num_tokens(self) -> int:
        """Return how many token ids the model knows."""
        base: Any = unwrapped(self.model)
        embeddings: Any = None
        with suppress(AttributeError, NotImplementedError):  # a model that has none, or does not say so
            embeddings = base.get_input_embeddings()
        return int(getattr(embeddings, "num_embeddings", MAX_INT32))

    @property
    def own_pad(self) -> int | None:
        """Return the padding token of the model, None if it does not say."""
        found: Any = getattr(getattr(unwrapped(self.model), "config", None), "pad_token_id", None)
        return int(found) if is_whole(found) else None

    @property
    def most_positions(self) -> int | None:
        """Return the longest text that the model has positions for, None if it does not say."""
        config = getattr(unwrapped(self.model), "config", None)
        most: Any = getattr(config, "max_position_embeddings", None)
        if not is_whole(most) or not 0 < int(most) < _MAX_LENGTH:
            return None
        # Positions of the RoBERTa kind begin behind that of the padding.
        table = next((one for name, one in self.model.named_modules() if name.endswith("position_embeddings")), None)
        skipped = getattr(table, "padding_idx", None)
        return int(most) - (0 if skipped is None else skipped + 1)


def _encoder_of(model: nn.Module) -> nn.Module:
    """Return the encoder of a model that also decodes, any other as it is."""
    base: Any = unwrapped(model)
    if not getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return model
    encoder = base.get_encoder() if hasattr(base, "get_encoder") else None
    if not isinstance(encoder, nn.Module):
        raise ArgumentError(f"a {type(base).__name__} also decodes, and has no get_encoder(); give its encoder")
    return encoder


def _check_takes(model: nn.Module, takes: Mapping[str, inspect.Parameter]) -> None:
    """Refuse a model that needs something else than ids and a mask."""
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [name for name, one in takes.items() if one.kind not in free and one.default is inspect.Parameter.empty]
    others = [name for name in needed if name not in ("input_ids", "attention_mask")]
    if others:
        raise ArgumentError(
            f"the model must take input_ids and attention_mask by name, and a {type(unwrapped(model)).__name__} needs "
            f"{others[0]}; a SentenceTransformer is encoded by batchwright.integrations.sentence_transformers.encode"
        )


def _hidden_of(output: Any, shape: tuple[int, ...]) -> Tensor:
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None and isinstance(output, tuple | list) and output:
        hidden = output[0]
    hidden = output if hidden is None else hidden
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or tuple(hidden.shape[:2]) != shape:
        came = f"{tuple(hidden.shape)}" if isinstance(hidden, Tensor) else type(output).__name__
        raise ArgumentError(
            f"the model must return last_hidden_state of shape {(*shape, 'width')}, got {came}; give the model without "
            "a head, as AutoModel loads it"
        )
    return hidden


@final
class TokenIds:
    """Turns texts into token ids, as the tokenizer does for one text, and passes token ids on.

    Ids of the latest texts are kept: a server measures a text when it comes, and runs it later.

    Args:
        tokenizer: of transformers, or a function from str to token ids; None for items that are token ids.
        max_length: texts are cut to so many tokens, ids that are longer are refused; None for no limit.
        num_tokens: ids are below this.
    """

    def __init__(self, tokenizer: Any, *, max_length: int | None, num_tokens: int) -> None:
        self.max_length, self._num_tokens = max_length, num_tokens
        self._read = None if tokenizer is None else _reader_of(tokenizer, max_length)
        self._kept: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, item: Any) -> list[int]:
        """Return the token ids of one item."""
        if not isinstance(item, str):
            return self._checked(item)
        with self._lock:
            if item in self._kept:
                return self._kept[item]
        if self._read is None:
            raise ArgumentError("a text needs a tokenizer=; without one, items are token ids")
        ids = self._checked(self._read(item))
        with self._lock:
            self._kept[item] = ids
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return ids

    def _checked(self, item: Any) -> list[int]:
        if isinstance(item, Mapping):
            _check_fields(item)
            if item.get("input_ids") is None:
                raise ArgumentError(f"an item has no input_ids, only {sorted(map(str, item))}; give a list of texts")
            item = item["input_ids"]
        ids = item.tolist() if isinstance(item, Tensor | np.ndarray) else item
        if not isinstance(ids, list | tuple) or not all(map(is_whole, ids)):
            raise ArgumentError(f"an item must be a text or a list of token ids, got {type(item).__name__}")
        if not ids:
            raise ArgumentError("an item has no tokens, so there is nothing to encode; leave it out")
        if min(ids) < 0 or max(ids) >= self._num_tokens:
            raise ArgumentError(f"token ids must be from 0 to {self._num_tokens - 1}, got {min(ids)} to {max(ids)}")
        if self.max_length is not None and len(ids) > self.max_length:
            raise ArgumentError(f"an item has {len(ids)} token ids, more than max_length={self.max_length}; cut it")
        return [int(one) for one in ids]


def check_texts(texts: Any) -> None:
    """Refuse one text, and mappings and tables, whose names would be taken for texts."""
    if isinstance(texts, str):
        raise ArgumentError("texts must be a list of texts, got one text; give [text]")
    if isinstance(texts, Mapping) or (hasattr(texts, "columns") and hasattr(texts, "iloc")):
        raise ArgumentError(
            f"texts must be a list of texts, got a {type(texts).__name__} with {', '.join(map(repr, texts))}; give the "
            "texts, such as table['text']"
        )


def read_all(tokens: TokenIds, texts: Iterable[Any], pad: int | None) -> list[list[int]]:
    """Return the token ids of each text.

    Args:
        tokens: reads a text.
        texts: all of them.
        pad: the padding token where these are token ids, which must not be padded; None if it is not known.
    """
    rows, has_masks = [], False
    for place, text in enumerate(texts):
        has_masks |= isinstance(text, Mapping)
        try:
            rows.append(tokens(text))
        except ArgumentError as error:
            raise ArgumentError(f"text {place}: {error}") from error
    if not has_masks:
        check_unpadded(rows, pad)
    return rows


def _check_fields(item: Mapping[str, Any]) -> None:
    """Refuse fields for a model that would count and are not read here; those of a plain text say nothing."""
    for name, plain in (("attention_mask", 1), ("token_type_ids", 0)):
        if item.get(name) is not None and (np.asarray(item[name]) != plain).any():
            raise ArgumentError(f"an item has {name} other than {plain}, but only its input_ids are read; leave it out")
    for name in ("position_ids", "inputs_embeds"):
        if item.get(name) is not None:
            raise ArgumentError(f"an item has {name}, but only its input_ids are read; leave it out")


def _reader_of(tokenizer: Any, max_length: int | None) -> Callable[[str], Any]:
    """Return a function from a text to its ids, cut to a length."""
    if not is_transformers_tokenizer(tokenizer):
        if not callable(tokenizer) or isinstance(tokenizer, type):
            raise ArgumentError(
                f"tokenizer must be a tokenizer of transformers or a function from str to token ids, got {tokenizer!r}"
            )
        return lambda text: tokenizer(text)[:max_length]
    own = tokenizer
    with suppress(Exception):  # a copy that nobody else changes at the same time
        own = copy.deepcopy(tokenizer)
    options = {} if max_length is None else {"truncation": True, "max_length": max_length}
    lock = threading.Lock()

    def read(text: str) -> Any:
        with lock:
            found = own(text, verbose=False, padding=False, **options)
        _check_fields(found)
        return found["input_ids"]

    return read


def longest_of(tokenizer: Any, pooled: Pooled, max_length: Any) -> int | None:
    """Return the most tokens of an item: what is given, the tokenizer's maximum or the model's, None without any."""
    if max_length is not None:
        given = as_whole("max_length", max_length, least=1)
        if pooled.most_positions is not None and given > pooled.most_positions:
            raise ArgumentError(f"max_length={given} is more than the {pooled.most_positions} positions of the model")
        return given
    own: Any = getattr(tokenizer, "model_max_length", None)
    known = [int(own)] if is_whole(own) and 0 < own < _MAX_LENGTH else []
    return min([*known, *([] if pooled.most_positions is None else [pooled.most_positions])], default=None)


def pad_id_of(tokenizer: Any, pooled: Pooled) -> int:
    """Return what pads token ids: the tokenizer's token, or the model's, or 0; the mask leaves it out."""
    config = getattr(unwrapped(pooled.model), "config", None)
    known: list[Any] = [getattr(one, "pad_token_id", None) for one in (tokenizer, config)]
    for found in known:
        if is_whole(found) and 0 <= int(found) < pooled.num_tokens:
            return int(found)
    return 0


def stacked(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return ids and the mask of real tokens, padded on the right to the longest row.

    >>> [tensor.tolist() for tensor in stacked([[5, 6], [7]], 0)]
    [[[5, 6], [7, 0]], [[1, 1], [1, 0]]]
    """
    width = max(map(len, rows))
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        mask[place, : len(row)] = 1
    return torch.from_numpy(ids), torch.from_numpy(mask)
