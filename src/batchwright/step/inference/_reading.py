"""Prompts: read by transformers, some rows at a time, into a cache that has room for all of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from .._copies import sent
from ..graphs._micro import NotGraphableError
from ._decoding import Counts, Decoder
from ._options import cleared, why_not_fields
from ._sharing import has_positions
from ._sizing import Layout, Sizes, layout_of
from ._slots import NUM_COMPARED, Prompt
from ._windows import Layers

_FIELDS = ("input_ids", "attention_mask")
# Of an H200 in half precision while the host launches a pass over prompts, about 0.01 s; slower devices gain more.
_OPERATIONS = 5e12


@final
@dataclass(frozen=True)
class Batch:
    """Prompts of a batch, with what the host knows of them.

    Attributes:
        fields: what ``model.generate`` is given, on the device.
        is_encoder_decoder: what kind of model reads them.
        widths: tokens of each row up to its last that counts, or from its first for a model without an encoder.
        is_plain: the tokens that count lie side by side in every row.
        multiple_of: pad to multiples of this.
    """

    fields: dict[str, Any]
    is_encoder_decoder: bool
    widths: Counts
    is_plain: bool
    multiple_of: int

    @staticmethod
    def of(decoder: Decoder, examples: list[Any]) -> Batch:
        """Return examples as a batch, or say why no graph decodes it."""
        fields, is_encoder_decoder = decoder.collated(examples), decoder.is_encoder_decoder
        reason = why_not_fields(fields, is_encoder_decoder=is_encoder_decoder)
        if reason is not None:
            raise NotGraphableError(reason)
        widths, is_plain = _looked_at(fields, is_encoder_decoder=is_encoder_decoder)
        if not is_encoder_decoder and not has_positions(decoder.base):
            # Where keys lie tells such a model how far apart tokens are, so all rows are read with all columns.
            widths = np.full_like(widths, fields["input_ids"].shape[1])
        return Batch(fields, is_encoder_decoder, widths, is_plain, decoder.multiple_of)

    def __len__(self) -> int:
        return len(self.fields["input_ids"])

    @property
    def width(self) -> int:
        """Return the tokens of the prompts, padding included."""
        return int(self.fields["input_ids"].shape[1])

    @property
    def num_prompt(self) -> int:
        """Return the tokens of the decoder's prompt; a start token may be put in front of one that is given."""
        if not self.is_encoder_decoder:
            return self.width
        ids = self.fields.get("decoder_input_ids")
        return 1 if ids is None else int(ids.shape[1]) + 1

    @property
    def is_even(self) -> bool:
        """Say whether no row has any padding."""
        return bool((self.widths == self.widths[0]).all())

    @property
    def hides_tokens(self) -> bool:
        """Say whether a mask leaves out tokens in front of a row that stand nowhere else in it.

        Releases of transformers differ in whether a penalty on repetition counts these.
        """
        mask = self.fields.get("attention_mask")
        if self.is_encoder_decoder or mask is None:
            return False
        counts, ids = mask.cpu().numpy() != 0, self.fields["input_ids"].cpu().numpy()
        starts = counts.argmax(axis=1)
        return any(not np.isin(row[:start], row[start:]).all() for row, start in zip(ids, starts, strict=True))

    def extremes(self, num: int) -> list[int]:
        """Return the places of the shortest row, some of the longest, and one more of the shortest."""
        order = np.argsort(self.widths, kind="stable").tolist()
        chosen = [order[0], order[-1], order[-2], order[1], *order[-3:1:-1]] if len(order) > 3 else order
        return chosen[:num]

    def layout(self, most_new: int) -> Layout:
        """Return the room for the batch."""
        return layout_of(len(self), self.num_prompt, most_new, self.width if self.is_encoder_decoder else None)

    def in_order(self) -> tuple[Batch, list[int]]:
        """Return the batch with its longest rows first, and the place that each row had."""
        order = np.argsort(-self.widths, kind="stable")
        places = sent(order, self.fields["input_ids"].device)
        fields = {name: value.index_select(0, places) for name, value in self.fields.items()}
        return replace(self, fields=fields, widths=self.widths[order]), order.tolist()

    def pieces(self, sizes: Sizes | None, room: float | None, worth: float = math.inf) -> Iterator[slice]:
        """Yield rows that are read at once, such as memory has room for.

        Without sizes, those are the first row, and all others: so a comparison sees pieces too.

        Args:
            sizes: what decoding takes, None if that is not known.
            room: the bytes of which reading may take a share, None if that is not known.
            worth: tokens of padding that are as much work as one more piece.
        """
        first = 0
        if sizes is None and len(self) > 1:
            yield slice(0, 1)
            first = 1
        while first < len(self):
            num = len(self) - first
            while sizes is not None:
                # Fewer rows may be shorter, and then more of them are read at once.
                fitting = sizes.rows_of_piece(int(self.widths[first : first + num].max()), room)
                if fitting >= num:
                    break
                num = max(fitting, num // 2)
            places = [first, *cuts(self.widths, first, first + num, worth), first + num]
            yield from map(slice, places, places[1:])
            first += num

    def rows(self, rows: slice) -> dict[str, Any]:
        """Return some rows, without columns that are padding in all of them."""
        fields = {name: value[rows] for name, value in self.fields.items()}
        width = -(-int(self.widths[rows].max()) // self.multiple_of) * self.multiple_of
        columns = slice(0, width) if self.is_encoder_decoder else slice(max(0, self.width - width), None)
        return {name: value[:, columns] if name in _FIELDS else value for name, value in fields.items()}


def cuts(widths: Counts, first: int, last: int, worth: float) -> list[int]:
    """Return where rows are cut, each time where it saves the most padding, as long as that is worth a piece.

    Args:
        widths: of the rows; nothing is saved where they grow.
        first: the first row.
        last: the place after the last row.
        worth: tokens of padding that a cut has to save.

    >>> cuts(np.array([90, 80, 10, 10, 10]), 0, 5, worth=50)
    [2]
    """
    places = np.arange(first + 1, last)
    saved = (last - places) * (widths[first] - widths[first + 1 : last])
    if not len(saved) or saved.max() < worth:
        return []
    place = int(places[saved.argmax()])
    return [*cuts(widths, first, place, worth), place, *cuts(widths, place, last, worth)]


def worth_of(base: Any) -> float:
    """Return how many tokens of a prompt an accelerator reads in the time that the host launches one more pass."""
    is_source = getattr(base.config, "is_encoder_decoder", False) and hasattr(base, "get_encoder")
    part = base.get_encoder() if is_source else base
    tables = {id(one.weight) for one in part.modules() if isinstance(one, nn.Embedding)}
    num = sum(one.numel() for one in part.parameters() if one.ndim > 1 and id(one) not in tables)
    return _OPERATIONS / (2 * max(1, num))


def _looked_at(fields: Mapping[str, Any], *, is_encoder_decoder: bool) -> tuple[Counts, bool]:
    """Return the width of each row, and whether what counts lies side by side."""
    mask = fields.get("attention_mask")
    if mask is None:
        num, width = fields["input_ids"].shape
        return np.full(num, width), True
    counts: npt.NDArray[np.bool_] = mask.cpu().numpy() != 0
    if not is_encoder_decoder:
        counts = counts[:, ::-1]  # from the last column on
    # The last that counts; a row without any keeps all columns.
    widths = counts.shape[1] - counts[:, ::-1].argmax(axis=1)
    return widths.astype(np.int64), bool((counts.sum(axis=1) == widths).all())


@final
class Read(NamedTuple):
    """Rows of a prompt that were read.

    Attributes:
        ids: what the decoder has read.
        prompt: what slots take.
    """

    ids: Tensor
    prompt: Prompt


@final
class Started(NamedTuple):
    """A batch whose prompts were read.

    Attributes:
        num_read: tokens of the longest prompt of the decoder.
        most: the most new tokens of each row.
        read: what the decoder has read, piece by piece; of a model without an encoder nothing, as results leave it out.
        logits: of the first row, and of some of the next piece.
        reading_bytes: what reading each piece took.
    """

    num_read: int
    most: Counts
    read: list[Tensor]
    logits: list[Tensor]
    reading_bytes: list[int]

    def add(self, ids: Tensor, logits: Tensor, num_bytes: int, batch: Batch) -> None:
        """Keep what the decoder has read, and the logits of a few rows."""
        if len(self.logits) < 2:
            self.logits.append(logits[:NUM_COMPARED].clone())
        if batch.is_encoder_decoder and ids.shape[1] != self.num_read:
            raise NotGraphableError("prompts of the decoder have unequal lengths")
        self.reading_bytes.append(num_bytes)
        self.read.append(ids if batch.is_encoder_decoder else ids[:, :0])

    @property
    def ids(self) -> Tensor:
        """Return what results begin with."""
        return torch.cat(self.read)


def read_rows(base: Any, settings: Any, batch: Batch, layers: Layers, rows: slice) -> Read:
    """Let transformers read some rows of a prompt into the cache.

    Args:
        base: a transformers model.
        settings: a generation configuration.
        batch: all prompts.
        layers: the cache.
        rows: which rows.
    """
    off, settings = cleared(base, settings), copy.deepcopy(settings)
    settings.max_new_tokens, settings.max_length, settings.min_length, settings.min_new_tokens = 1, None, None, 0
    settings.do_sample, settings.disable_compile = False, True
    settings.return_dict_in_generate = settings.output_logits = True
    fields = batch.rows(rows)
    cache = layers.filling(rows.start, batch.num_prompt)
    found = base.generate(**fields, **off, generation_config=settings, past_key_values=cache)
    ids, num_kept = found.sequences[:, :-1], layers.keep(cache)
    if num_kept != ids.shape[1]:
        raise NotGraphableError("a prompt is not in the cache as a whole")
    mask = fields.get("attention_mask")
    mask = torch.ones_like(fields["input_ids"]) if mask is None else mask
    logits = found.logits[0]
    if batch.is_encoder_decoder:
        return Read(ids, Prompt(ids, torch.ones_like(ids), mask, logits))
    return Read(ids, Prompt(ids, mask, None, logits))
