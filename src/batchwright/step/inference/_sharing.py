"""Prompts as one batch: padded on one side, and what they must not share one with, such as a longest row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..._types import IntArray
from ...errors import ArgumentError
from ...plan import PadTo
from .._loss_probe import unwrapped
from ..graphs._comparing import NEAR, NEAR_ROUGHLY
from ..graphs._rotary import num_learned

# Fields that have a length of their own.
_OTHERS = ("decoder_", "negative_prompt_")
_HALF = (torch.float16, torch.bfloat16)
# These are called with all that a row holds, the padding in front of its prompt included.
_READERS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
# N-grams that must not come again are those of all that a row holds too.
_NGRAMS = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
# Of the prompt that is tried with padding and without.
_NUM_TRIED, _NUM_PADS = 8, 5


@final
class Group(NamedTuple):
    """Examples that may share batches.

    Attributes:
        places: of the examples.
        obstacle: why no graph decodes them, None if nothing is known.
    """

    places: IntArray
    obstacle: str | None = None


def has_positions(base: Any) -> bool:
    """Say whether a model is told the positions of tokens, as transformers finds out."""
    return "position_ids" in inspect.signature(base.forward).parameters


def is_doubtful(model: Any) -> bool:
    """Say whether padding on the left may change what a model without an encoder computes.

    It does not where transformers tells positions and masks keys: neither holds for a state that runs over all tokens,
    for positions that are counted from the first column, and for learned tokens in front of the padding. In double
    precision some kinds of attention make no numbers of a token that sees none: they add the lowest number of that type
    to scores in single precision.
    """
    if num_learned(model):
        return True
    inner: Any = unwrapped(model)
    if not hasattr(inner, "_supports_default_dynamic_cache"):
        return False  # not of transformers
    configs = (inner.config, inner.config.get_text_config(decoder=True))
    if any(getattr(one, "_attn_implementation", None) != "sdpa" for one in configs):
        if any(one.dtype is torch.float64 for one in inner.parameters()):
            return True
    is_stateful = getattr(inner, "_is_stateful", False) or not inner._supports_default_dynamic_cache()
    return is_stateful or not has_positions(inner)


def pads_freely(model: Any, ids: Tensor, pad: int) -> bool:
    """Say whether a prompt gives the same logits with padding on its left; where it cannot be tried, it does not.

    Args:
        model: what ``generate`` is called on.
        ids: of the prompt, on the model's device.
        pad: the padding token.
    """
    ids = ids[:_NUM_TRIED]
    try:
        plain, padded = (_first_logits(model, ids, num, pad) for num in (0, _NUM_PADS))
    except Exception:  # whatever it is, batches without padding do not need an answer
        return False
    return bool(are_near(padded, plain, NEAR_ROUGHLY if plain.dtype in _HALF else NEAR).all())


def _first_logits(model: Any, ids: Tensor, num_pads: int, pad: int) -> Tensor:
    row = torch.cat([ids.new_full((num_pads,), pad), ids])[None]
    mask = (torch.arange(row.shape[1], device=ids.device) >= num_pads).long()[None]
    found = model.generate(
        input_ids=row, attention_mask=mask, max_new_tokens=1, do_sample=False, num_beams=1, pad_token_id=pad,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    logits: Tensor = found.logits[0]
    return logits


def are_near(own: Tensor, eager: Tensor, near: float) -> Tensor:
    """Say of each row whether logits differ by rounding only.

    >>> are_near(torch.tensor([[1.0, 2.0], [1.0, 2.5]]), torch.tensor([[1.0, 2.0], [1.0, 2.0]]), 0.1)
    tensor([ True, False])
    """
    own, eager = own.double(), eager.double()
    distance = torch.where(own == eager, 0.0, (own - eager).abs()).nan_to_num(nan=torch.inf)
    return distance.amax(dim=1) <= near * scale(eager)


def scale(scores: Tensor) -> Tensor:
    """Return the largest size of a finite score of each row."""
    return torch.where(scores.isfinite(), scores, 0.0).abs().amax(dim=1).clamp(min=1e-6)


@final
class Filling:
    """What fills prompts up to a width, and which prompts must have none because a setting of generation sees it.

    Args:
        setting: returns a setting of generation by its name.
        known: the padding token, None if there is none.
        ends: the tokens that end a row.
        is_encoder_decoder: prompts are sources, which stand apart from what is generated.

    Attributes:
        token: fills rows up, None for the first token of each.
        reader: the setting that sees padding wherever it stands, None if none does.
    """

    def __init__(
        self, setting: Callable[[str], Any], known: int | None, ends: Sequence[int], *, is_encoder_decoder: bool
    ) -> None:
        self._size = max(int(setting(name) or 0) for name in _NGRAMS)
        self._longest = 0 if is_encoder_decoder else _longest_sequence(setting)
        has_penalty = (setting("repetition_penalty") or 1.0) != 1.0
        self.token, self.reader = known, _reader_of(setting, is_encoder_decoder=is_encoder_decoder)
        if is_encoder_decoder:
            self._size = 0
        elif has_penalty:
            # A penalty on repetition counts a row's own first token anyway.
            self.token = None
        elif self._size:
            self.token = ends[0] if ends else None
        if self.reader is None and self._size and (self.token is None or self._size == 1):
            self.reader = next(name for name in _NGRAMS if setting(name))

    def meets(self, ids: Any) -> bool:
        """Say whether a rule about several tokens would read the padding in front of a prompt together with it.

        Every n-gram with padding begins with it. A token that ends a row stands before nothing that is generated, so
        that such an n-gram cannot come again, unless the prompt itself has that token near its end. A word of several
        tokens is looked for in as many as it has.

        >>> filling = Filling({"no_repeat_ngram_size": 3}.get, 1, [2], is_encoder_decoder=False)
        >>> filling.token, filling.meets([2, 5, 6]), filling.meets([5, 2, 6])
        (2, False, True)
        """
        tail = ids[-(self._size - 1) :] if self._size > 1 else ()
        return len(ids) < self._longest or any(int(token) == self.token for token in tail)


def _longest_sequence(setting: Callable[[str], Any]) -> int:
    """Return the tokens of the longest word of several that is banned or preferred."""
    biased = setting("sequence_bias") or ()
    rows = [*(setting("bad_words_ids") or ()), *(biased if isinstance(biased, Mapping) else (row[0] for row in biased))]
    return max((len(row) for row in rows if hasattr(row, "__len__") and len(row) > 1), default=0)


def _reader_of(setting: Callable[[str], Any], *, is_encoder_decoder: bool) -> str | None:
    if (setting("encoder_repetition_penalty") or 1.0) != 1.0:
        return "encoder_repetition_penalty"
    if is_encoder_decoder:  # n-grams of a source are counted with its padding
        return "encoder_no_repeat_ngram_size" if setting("encoder_no_repeat_ngram_size") else None
    # The first token is forced where there is one token so far.
    if setting("forced_bos_token_id") is not None:
        return "forced_bos_token_id"
    return next((name for name in _READERS if setting(name)), None)


def check_unpadded(rows: Sequence[Any], pad: int | None) -> None:
    """Refuse token ids that seem to be padded: as many in each row, and padding at an edge of some rows only.

    Args:
        rows: token ids.
        pad: the padding token, None if it is not known or may be a token as others.

    >>> check_unpadded([[5, 6], [7, 0], [0]], 0)
    """
    if pad is None or len(rows) < 2 or len({len(row) for row in rows}) > 1 or not len(rows[0]):
        return
    for edge, place in (("begin", 0), ("end", -1)):
        num = sum(bool(row[place] == pad) for row in rows)
        if 0 < num < len(rows):
            raise ArgumentError(
                f"all examples have {len(rows[0])} token ids, and {num} of {len(rows)} {edge} with the padding token, "
                f"{pad}, so they seem to be padded; tokenize without padding, or, if these are real tokens, give "
                "mappings with input_ids and attention_mask"
            )


def by_number(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places of equal numbers, the largest first.

    >>> list(by_number([3, 5, 3]))
    [[1], [0, 2]]
    """
    places: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number, []).append(place)
    return (places[number] for number in sorted(places, reverse=True))


def ids_in(example: Any) -> Any:
    ids = example.get("input_ids") if isinstance(example, Mapping) else example
    if isinstance(ids, str) or not hasattr(ids, "__len__") or getattr(ids, "ndim", 1) != 1:
        raise ArgumentError(
            f"an example must be token ids or a mapping with input_ids, got {type(example).__name__}; "
            "tokenize texts first, without padding, or give collate= and lengths="
        )
    return ids


def as_ids(values: Any) -> Tensor:
    """Return whole numbers as they are, in int64; numbers of other types would be cut."""
    try:
        ids = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"an example must be token ids or a mapping with input_ids: {error}") from error
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise ArgumentError(f"token ids must be whole numbers, one per token, got {ids.ndim} axes of {ids.dtype}")
    return ids.long()


def pad(examples: list[Any], *, pad_id: int | None, on_left: bool, multiple_of: int) -> dict[str, Tensor]:
    """Pad token ids and fields of the same length, add a mask, and stack the other fields.

    Args:
        examples: token ids, or mappings with them.
        pad_id: fills rows up, None for the first token of each.
        on_left: put it in front.
        multiple_of: pad to multiples of this.
    """
    if all(type(example) is list for example in examples):
        return _pad_lists(examples, pad_id, on_left, multiple_of)
    rows = [_fields(example) for example in examples]
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ArgumentError(f"examples need the same fields, got {sorted({str(sorted(row)) for row in rows})}")
    (width,) = PadTo(multiple_of=multiple_of)([len(row["input_ids"]) for row in rows])
    fills = {"input_ids": pad_id}
    return {name: _column(name, rows, partial(_row, width, fills.get(name, 0), on_left)) for name in rows[0]}


def _pad_lists(examples: list[list[Any]], pad_id: int | None, on_left: bool, multiple_of: int) -> dict[str, Tensor]:
    """Do the same for lists of token ids, all at once."""
    lengths = np.array([len(ids_in(example)) for example in examples])
    (width,) = PadTo(multiple_of=multiple_of)(lengths)
    places = np.arange(width)
    is_real = places >= width - lengths[:, None] if on_left else places < lengths[:, None]
    flat = as_ids([token for example in examples for token in example]).numpy()
    fill = flat[np.cumsum(lengths) - lengths, None] if pad_id is None else pad_id  # as in ``_row``
    ids = np.broadcast_to(np.asarray(fill, dtype=np.int64), is_real.shape).copy()
    ids[is_real] = flat
    return {"attention_mask": torch.from_numpy(is_real.astype(np.int64)), "input_ids": torch.from_numpy(ids)}


def _fields(example: Any) -> dict[str, Tensor]:
    ids = as_ids(ids_in(example))
    given = {name: _tensor(name, value) for name, value in example.items()} if isinstance(example, Mapping) else {}
    return {"attention_mask": torch.ones_like(ids), **given, "input_ids": ids}


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"field {name!r} of an example is no numbers but {type(value).__name__}; keep what model.generate takes, "
            "such as input_ids and attention_mask, or give a collate="
        ) from error


def _column(name: str, rows: list[dict[str, Tensor]], pad: Callable[[Tensor], Tensor]) -> Tensor:
    values = [row[name] for row in rows]
    # The inputs of a decoder and other prompts have a length of their own, even if it is the same by chance.
    if not name.startswith(_OTHERS) and all(row[name].shape == row["input_ids"].shape for row in rows):
        values = [pad(value) for value in values]
    if len({value.shape for value in values}) > 1:
        raise ArgumentError(f"field {name!r} has unequal lengths that are not those of input_ids; give a collate=")
    return torch.stack(values)


def _row(width: int, fill: int | None, on_left: bool, values: Tensor) -> Tensor:
    # Without a padding token the row's own first token fills it up: a penalty on repetition counts that one anyway,
    # but would punish a row for an end-of-sequence token.
    filler = int(values[0]) if fill is None else fill
    gap = width - len(values)
    return F.pad(values, (gap, 0) if on_left else (0, gap), value=filler)
