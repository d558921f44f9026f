"""Rows that are decoded side by side: all that a step reads and writes, at places that never change."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from .._copies import sent
from ._choosing import Chooser, Rules
from ._ranges import Active, Attend, Range, attending
from ._windows import Layers

# Rows whose logits are kept, for comparisons.
NUM_COMPARED = 4


@final
class Prompt(NamedTuple):
    """What some slots begin with, one row per example.

    Attributes:
        ids: what the decoder has read, ``(rows, tokens)``.
        mask: which of these count.
        source_mask: which tokens of the source count, None without an encoder.
        logits: after what was read, ``(rows, vocabulary)``.
    """

    ids: Tensor
    mask: Tensor
    source_mask: Tensor | None
    logits: Tensor


@final
class Slots:
    """Rows of a layout, and the step that adds a token to each.

    A row that has ended stays where it is until another is moved onto it; results have places of their own.

    Args:
        model: a transformers model.
        layers: the memory of its cache, filled by a prompt.
        rules: how tokens are chosen.
        logits: of a prompt, ``(rows, vocabulary)``.
        num_read: tokens of the decoder's prompt.
        attend: attends over ranges of keys, None to leave attention to the model.
        has_limits: rows have limits of their own.
        keeps_logits: keep those of the first rows of each step.

    Attributes:
        place: where the next keys are written.
        finished: which rows have ended.
        results: new tokens by the place of an example in its batch.
        logits: of the first rows, of the last step.
        layout: the room.
    """

    def __init__(
        self,
        model: Any,
        layers: Layers,
        rules: Rules,
        logits: Tensor,
        num_read: int,
        attend: Attend | None = None,
        *,
        has_limits: bool = True,
        keeps_logits: bool = True,
    ) -> None:
        self._model, self._layers, self.rules = model, layers, rules
        self.layout = layout = layers.layout
        self._num_read = num_read
        self.attend, self._has_limits, self._keeps_logits = attend, has_limits, keeps_logits
        self._is_decoder_only = layout.source_width is None
        self._parameters = set(inspect.signature(model.forward).parameters)
        device, num = logits.device, layout.num_rows
        self._lowest = torch.finfo(layers.dtype).min
        self.place = torch.zeros(1, dtype=torch.long, device=device)
        self._num_new = torch.zeros(1, dtype=torch.long, device=device)
        self._token = torch.zeros((num, 1), dtype=torch.long, device=device)
        self._position = torch.zeros((num, 1), dtype=torch.long, device=device)
        self.finished = torch.zeros(num, dtype=torch.bool, device=device)
        self._limit = torch.zeros(num, dtype=torch.long, device=device)
        self._result = torch.arange(num, device=device)  # the row of ``results`` of each slot
        self._mask = torch.zeros((num, 1, 1, layout.width), dtype=layers.dtype, device=device)
        source_width = layout.source_width or 0
        self._source_mask = torch.zeros((num, 1, 1, source_width), dtype=layers.dtype, device=device)
        self._own = Range(*torch.zeros((2, num), dtype=torch.int32, device=device))
        self._from_source = Range(*torch.zeros((2, num), dtype=torch.int32, device=device))
        self._source_lengths = torch.zeros(num, dtype=torch.int32, device=device)
        config = model.config
        size = 1 if self._is_decoder_only else getattr(config, "d_model", None) or config.hidden_size
        self._states = torch.zeros((1, 1, size), dtype=layers.dtype, device=device)  # of the source, see _source
        vocabulary = logits.shape[1]
        has_penalty = rules.repetition_penalty is not None
        self._seen = torch.zeros((num, vocabulary), dtype=torch.bool, device=device) if has_penalty else None
        self._uniform = torch.zeros((num, layout.width), device=device, dtype=torch.float64) if rules.draws else None
        self.results = torch.zeros((num, layout.width), dtype=torch.long, device=device)
        self._chooser = Chooser(rules, vocabulary, num_read, device)
        self.logits: Tensor | None = None

    @property
    def written(self) -> list[Tensor]:
        """Return all that a step writes to."""
        held = [self.place, self._num_new, self._token, self._position, self.finished, self._mask, self.results]
        held += [self._own.stop, self._from_source.stop, *([] if self._seen is None else [self._seen])]
        return held + self._layers.written

    def is_other_prompt(self, num_read: int) -> bool:
        """Say whether rules that count the decoder's prompt would differ for a prompt of so many tokens."""
        return self.layout.source_width is not None and num_read != self._num_read

    def begin(self, num: int, num_read: int, limits: Tensor, uniform: Tensor | None) -> None:
        """Make the first rows ready for prompts.

        Args:
            num: rows of the batch.
            num_read: tokens of the longest prompt of the decoder; all prompts end with its last one.
            limits: the most new tokens of each row.
            uniform: numbers to draw with, ``(rows, new tokens)``, None if nothing is drawn.
        """
        self.place.fill_(num_read)
        self._num_new.zero_()
        self.finished.fill_(True)
        self.finished[:num] = False
        self._position[num:] = 0  # as if nothing had been there: some models look at the longest row
        self._limit[:num] = limits
        torch.arange(self.layout.num_rows, out=self._result)
        for mask in (self._mask, self._source_mask):
            mask.fill_(self._lowest)
            mask[num:, :, :, :1] = 0
        if self._seen is not None:
            self._seen.zero_()
        if self._uniform is not None and uniform is not None:
            self._uniform[:num, : uniform.shape[1]] = uniform

    def fill(self, first: int, num_read: int, prompt: Prompt) -> None:
        """Take rows of a prompt whose keys and values are in the layers, and choose their first tokens.

        Args:
            first: the slot of the first one.
            num_read: as for ``begin``.
            prompt: what was read.
        """
        num, width = prompt.ids.shape
        rows = slice(first, first + num)
        count = prompt.mask.sum(dim=1)
        self._position[rows, 0] = count
        self._mask[rows, 0, 0, num_read - width : num_read] = self._additive(prompt.mask)
        self._own.start[rows] = num_read - count
        if prompt.source_mask is not None:
            self._source_mask[rows, 0, 0, : prompt.source_mask.shape[1]] = self._additive(prompt.source_mask)
            self._source_lengths[rows] = prompt.source_mask.sum(dim=1)
        if self._seen is not None:
            self._seen[rows].scatter_(1, prompt.ids, True)
        self._choose(prompt.logits, rows, is_first=True)

    def go(self) -> None:
        """Count the first tokens, after all rows have theirs."""
        self._num_new.fill_(1)

    def _additive(self, mask: Tensor) -> Tensor:
        zeros = torch.zeros(mask.shape, dtype=self._mask.dtype, device=mask.device)
        return zeros.masked_fill(mask == 0, self._lowest)

    def step(self, num_rows: int, width: int) -> None:
        """Add one token to each of the first rows; nothing here waits for the device.

        Args:
            num_rows: rows to run.
            width: tokens of the cache to look at; the place to write at lies below.
        """
        mask = self._mask[:num_rows, :, :, :width]
        mask.index_fill_(3, self.place, 0.0)
        inputs = self._inputs(num_rows, width, mask)
        with attending(self._model, self._active(inputs["past_key_values"])):
            outputs = self._model(**inputs, use_cache=True, return_dict=True)
        logits = outputs.logits[:, -1]
        if self._keeps_logits:
            self.logits = logits[:NUM_COMPARED].float()  # only these: what is kept here is kept for each graph
        self.place.add_(1)
        self._choose(logits, slice(0, num_rows))
        if self._is_decoder_only:  # rows that have ended stay, as tables of positions may be no longer
            self._position[:num_rows, 0].add_(self.finished[:num_rows].logical_not())

    def _inputs(self, num_rows: int, width: int, mask: Tensor) -> dict[str, Any]:
        token = self._token[:num_rows]
        inputs: dict[str, Any] = {"past_key_values": self._layers.window(num_rows, width, self.place)}
        if self.layout.source_width is None:
            inputs |= {"input_ids": token, "attention_mask": mask}
            if "position_ids" in self._parameters:
                inputs["position_ids"] = self._position[:num_rows]
        else:
            inputs |= {"decoder_input_ids": token, "decoder_attention_mask": mask}
            inputs |= {"attention_mask": self._source_mask[:num_rows], "encoder_outputs": self._source(num_rows)}
        if "cache_position" in self._parameters:
            inputs["cache_position"] = self.place
        return inputs

    def _active(self, cache: Any) -> Active | None:
        """Return the ranges of keys; rows that have ended have none."""
        if self.attend is None:
            return None
        goes_on = self.finished.logical_not()
        torch.mul(goes_on, self.place + 1, out=self._own.stop)
        if not self._is_decoder_only:
            torch.mul(goes_on, self._source_lengths, out=self._from_source.stop)
        own, source = cache, None
        if self.layout.source_width is not None:
            own, source = cache.self_attention_cache, cache.cross_attention_cache
        ranges = {layer.keys.data_ptr(): self._own for layer in own.layers}
        ranges |= {layer.keys.data_ptr(): self._from_source for layer in ([] if source is None else source.layers)}
        return Active(ranges, self.attend)

    def _source(self, num_rows: int) -> Any:
        """Return hidden states of the source for their form only: their keys and values are in the cache."""
        from transformers.modeling_outputs import BaseModelOutput

        size = self._states.shape[2]
        expanded: Any = self._states.expand(num_rows, self.layout.source_width or 0, size)
        return BaseModelOutput(last_hidden_state=expanded)

    def _choose(self, logits: Tensor, rows: slice, *, is_first: bool = False) -> None:
        finished, number = self.finished[rows], self._num_new
        seen = None if self._seen is None else self._seen[rows]
        uniform = None if self._uniform is None else self._uniform[rows].index_select(1, number)
        chosen = self._chooser.choose(logits, number, seen, uniform)
        tokens = chosen.masked_fill_(finished, self.rules.pad)
        self.results.index_put_((self._result[rows], number), tokens)
        if self.rules.ends:
            finished.logical_or_(self._chooser.are_ends(tokens))
        num_new = 1 if is_first else number.add_(1)
        if self._has_limits:
            finished.logical_or_(self._limit[rows] <= num_new)
        self._token[rows, 0] = tokens
        if seen is not None:
            seen.scatter_(1, tokens[:, None], True)

    def move(self, source: list[int], target: list[int], width: int) -> None:
        """Move rows onto rows that have ended.

        Args:
            source: slots whose rows go on.
            target: slots that they go to.
            width: tokens in the cache so far.
        """
        places = sent(np.array([source, target]), self.place.device)
        held = [self._token, self._position, self.finished, self._limit, self._result, self._mask, self._source_mask]
        held += [self._own.start, self._source_lengths]
        for one in (*held, *(more for more in (self._seen, self._uniform) if more is not None)):
            one.index_copy_(0, places[1], one.index_select(0, places[0]))
        self._layers.move(places[0], places[1], width)
