"""Generation by replays: prompts are read eagerly, tokens decoded by graphs, and what cannot be runs eagerly."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError
from .._copies import sent
from ..graphs._micro import NotGraphableError
from ..graphs.backend import GraphBackend
from ..oom import is_out_of_memory
from ._choosing import uniforms
from ._comparison import Compared, Comparison, compared, key_of, remember
from ._decoding import Counts, Decoder
from ._options import Options
from ._ranges import Attend, Noted
from ._reading import Batch, Read, read_rows
from ._rounds import Rounds
from ._sizing import Sizes
from ._slots import NUM_COMPARED, Slots
from ._windows import Layers

_HALF = (torch.float16, torch.bfloat16)
# So many rows are compared with eager steps, and measured, before a larger batch.
NUM_FIRST = 8
# What transformers makes of the logits of a prompt: a copy in float32, and copies that processors make.
_LOGITS_BYTES = 3 * 4


class WouldNotFitError(torch.OutOfMemoryError):
    """A batch is larger than the memory that is left; nothing was taken."""


@final
class Replaying:
    """Runs batches through graphs, and eagerly from the first thing on that graphs cannot follow.

    Args:
        decoder: runs a batch eagerly, and knows the model.
        options: what to generate.
        make_backend: returns what captures; each layout of the memory has its own.
        seed: of all that is drawn.
        give_up: is told why everything runs eagerly from now on, and may raise.
        has_limits: examples have limits of their own.
        attend: attends over ranges of keys, None to leave attention to the model.
        room: returns the bytes for a batch, None if no memory is measured; it is told what will be given back.
    """

    def __init__(
        self,
        decoder: Decoder,
        options: Options,
        make_backend: Callable[[], GraphBackend],
        *,
        seed: int,
        give_up: Callable[[str], None],
        has_limits: bool = True,
        attend: Attend | None = None,
        room: Callable[[int], float | None] = lambda held_bytes: None,
    ) -> None:
        self._decoder, self._options, self._make_backend = decoder, options, make_backend
        self._seed, self._give_up = seed, give_up
        self._has_given_up = False
        self._is_half = next(decoder.base.parameters()).dtype in _HALF
        self._has_limits = has_limits or options.max_new_tokens is None
        self._attend, self._room = None if attend is None else Noted(attend), room
        self._shown: dict[_Kind, Compared] = {}
        self._measured: Sizes | None = None
        self._layers: Layers | None = None
        self._backend: GraphBackend | None = None
        self._rounds: Rounds | None = None

    def run(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        """Return the token ids of each example."""
        found = self._tried(lambda: self._replayed(examples, indices, limits))
        return self._decoder.run(examples, limits, indices) if found is None else found

    def learn(self, examples: list[Any], limits: Counts | None) -> Sizes | None:
        """Return what decoding takes, from an earlier call or from these examples; None if that is not known.

        Args:
            examples: a few of the longest; they are compared with eager steps for some tokens, if that was not done.
            limits: the most new tokens of each, None if all have the same.
        """

        def look() -> Sizes | None:
            batch = Batch.of(self._decoder, examples)
            most = int(self._most_new(batch, limits, batch.num_prompt).max())
            return self._known(batch, most) or (self._probe(batch, examples, most) if most > 1 else None)

        try:
            return self._tried(look)
        except torch.OutOfMemoryError:
            return None  # a batch will say which example does not fit

    def _tried(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns, None if it showed that graphs cannot follow."""
        if self._has_given_up:
            return None
        try:
            # Not in inference mode, whose tensors could not be written to by a later call outside of it.
            with torch.inference_mode(False), torch.no_grad(), _without_planning():
                return function()
        except Exception as error:
            if is_out_of_memory(error) or isinstance(error, ArgumentError):
                self._drop()
                raise
            reason = _text_of(error)
        self._drop()
        self._has_given_up = True
        self._give_up(reason)
        return None

    @property
    def held_bytes(self) -> int:
        """Return the memory of the cache, which stays for the next batch."""
        return 0 if self._layers is None else self._layers.num_bytes

    def _drop(self) -> None:
        """Let graphs and caches go."""
        self._rounds = self._layers = self._backend = None

    def _replayed(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        batch = Batch.of(self._decoder, examples)
        if self._options.rules.repetition_penalty is not None and batch.hides_tokens:
            raise NotGraphableError("repetition_penalty is given, and a mask leaves out tokens in front of others")
        most = self._most_new(batch, limits, batch.num_prompt)
        sizes = self._known(batch, int(most.max()))
        if sizes is None and most.max() > 1:
            if len(batch) > NUM_FIRST:
                sizes = self._probe(batch, examples, int(most.max()))
            else:
                return self._compare_all(batch, examples, indices, limits)
        return self._decoder.cut(*self._decoded(batch, limits, indices, sizes))

    def _compare_all(
        self, batch: Batch, examples: list[Any], indices: list[int], limits: Counts | None
    ) -> list[Tensor]:
        """Decode a few rows, all of which are compared, in the order of a comparison."""
        order = batch.extremes(len(batch))
        few = Batch.of(self._decoder, [examples[place] for place in order])
        limits = None if limits is None else limits[order]
        rows = self._decoder.cut(*self._compared(few, limits, [indices[place] for place in order], goes_on=True))
        return [rows[order.index(place)] for place in range(len(order))]

    def _most_new(self, batch: Batch, limits: Counts | None, num_prompt: int) -> Counts:
        """Return how many new tokens each row may get."""
        if limits is not None:
            return limits
        if self._options.max_new_tokens is not None:
            return np.full(len(batch), self._options.max_new_tokens)
        own = self._decoder.most_new(batch.fields)
        return np.full(len(batch), self._options.max_length - num_prompt) if own is None else own

    def _known(self, batch: Batch, most: int) -> Sizes | None:
        """Return what decoding such batches takes, if they were compared with eager steps."""
        uses_ranges, width = self._uses_ranges(batch), batch.layout(most).width
        for kind in [_Kind(uses_ranges, is_even=False), *([_Kind(uses_ranges, is_even=True)] if batch.is_even else [])]:
            found = self._shown.get(kind) or compared(self._decoder.base, self._key(kind))
            if found is not None and found.width >= width:
                self._shown[kind] = found
                return found.sizes
        return None

    def _probe(self, batch: Batch, examples: list[Any], most: int) -> Sizes:
        """Compare a few rows with eager steps, the shortest and the longest, and return what decoding takes."""
        few = Batch.of(self._decoder, [examples[place] for place in batch.extremes(NUM_FIRST)])
        self._compared(few, np.full(len(few), most), list(range(len(few))), goes_on=False)
        self._drop()
        assert self._measured is not None
        return self._measured

    def _uses_ranges(self, batch: Batch) -> bool:
        return self._attend is not None and batch.is_plain

    def _key(self, kind: _Kind) -> Any:
        base, options = self._decoder.base, self._options
        return key_of(base, options.rules, options.settings, kind, type(self._make_backend()))

    def _decoded(
        self, batch: Batch, limits: Counts | None, indices: list[int], sizes: Sizes | None
    ) -> tuple[Tensor, Tensor, Counts]:
        """Return what the decoder has read, the new tokens with anything after an end, and the most of each row.

        Args:
            batch: prompts.
            limits: the most new tokens of each, None if all have the same.
            indices: places of the examples among all.
            sizes: what decoding takes, None if that is not known.
        """
        self._make_room(batch, self._most_new(batch, limits, batch.num_prompt), sizes)
        started, rounds = self._start(batch, limits, indices, sizes)
        rounds.run(started.most, started.num_read)
        return self._results(started, rounds)

    def _results(self, started: _Started, rounds: Rounds) -> tuple[Tensor, Tensor, Counts]:
        most = started.most
        # A copy in any case: the next batch writes to the same place.
        new = rounds.slots.results[: len(most), : int(most.max())].to("cpu", copy=True)
        return started.ids.cpu(), new, most

    def _make_room(self, batch: Batch, most: Counts, sizes: Sizes | None) -> None:
        """Keep the memory of the batch before if that will do, else drop it with its graphs for new, if that fits."""
        layout = batch.layout(int(most.max()))
        # A model whose attention is of another kind looks at all of a cache, so that a wide one costs time.
        in_ranges = self._uses_ranges(batch) and self._attend is not None and self._attend.was_called
        if self._layers is not None and self._layers.layout.holds(layout, uses_ranges=in_ranges):
            return
        self._drop()
        room = None if len(batch) == 1 else self._room(0)
        needed = 0.0 if sizes is None or room is None else sizes.of_batch(layout, batch.width, room)
        if room is not None and needed > room:
            raise WouldNotFitError(f"out of memory: a batch would take {needed:,.0f} bytes, {room:,.0f} are left")
        self._layers, self._backend = Layers(layout), self._make_backend()

    def _start(
        self, batch: Batch, limits: Counts | None, indices: list[int], sizes: Sizes | None
    ) -> tuple[_Started, Rounds]:
        """Read prompts, piece by piece, and choose their first tokens."""
        assert self._layers is not None
        started, rounds = None, None
        # The cache of the batch before counts as given back, for pieces as large as in a new one.
        for rows in batch.pieces(sizes, self._room(self.held_bytes)):
            read, num_bytes = self._read(batch, rows, is_measured=sizes is None)
            if started is None or rounds is None:
                num_read = read.ids.shape[1] if batch.is_encoder_decoder else batch.num_prompt
                started = _Started(num_read, self._most_new(batch, limits, num_read), [], [], [])
                rounds = self._begin(batch, started, read.prompt.logits, indices, keeps_logits=sizes is None)
            started.add(read.ids, read.prompt.logits, num_bytes, batch)
            rounds.slots.fill(rows.start, started.num_read, read.prompt)
        assert started is not None
        assert rounds is not None
        rounds.slots.go()
        return started, rounds

    def _read(self, batch: Batch, rows: slice, *, is_measured: bool) -> tuple[Read, int]:
        """Read some rows, and return what that took besides the cache; 0 if it is not measured."""
        assert self._layers is not None
        assert self._backend is not None
        found: list[Read] = []
        read = partial(read_rows, self._decoder.base, self._options.settings, batch, self._layers, rows)
        if not is_measured:
            return read(), 0
        held_bytes = self.held_bytes
        num_bytes = self._backend.measure(lambda: found.append(read()))
        return found[0], num_bytes - (self.held_bytes - held_bytes)

    def _begin(
        self, batch: Batch, started: _Started, logits: Tensor, indices: list[int], *, keeps_logits: bool
    ) -> Rounds:
        """Return rounds whose slots wait for the rows of a batch."""
        most, device = started.most, logits.device
        if most.min() < 1:
            raise NotGraphableError("a prompt leaves no room for new tokens")
        uniform = None
        if self._options.rules.draws:
            uniform = sent(uniforms(self._seed, indices, int(most.max())), device)
        rounds = self._rounds_for(batch, started.num_read, logits, keeps_logits=keeps_logits)
        rounds.slots.begin(len(batch), started.num_read, sent(most, device), uniform)
        return rounds

    def _rounds_for(self, batch: Batch, num_read: int, logits: Tensor, *, keeps_logits: bool) -> Rounds:
        assert self._layers is not None
        assert self._backend is not None
        rounds, layers = self._rounds, self._layers
        attend = self._attend if batch.is_plain else None
        if rounds is None or rounds.slots.is_other_prompt(num_read) or rounds.slots.attend is not attend:
            slots = Slots(
                self._decoder.base, layers, self._options.rules, logits, num_read, attend,
                has_limits=self._has_limits, keeps_logits=keeps_logits,
            )  # fmt: skip
            if rounds is not None:
                self._backend = self._make_backend()
            self._rounds = rounds = Rounds(slots, self._backend)
        return rounds

    def _compared(
        self, batch: Batch, limits: Counts | None, indices: list[int], *, goes_on: bool
    ) -> tuple[Tensor, Tensor, Counts]:
        """Decode a batch, measure what that takes, and compare its first steps with eager ones."""
        self._drop()
        self._make_room(batch, self._most_new(batch, limits, batch.num_prompt), None)
        started, rounds = self._start(batch, limits, indices, None)
        comparison = Comparison(torch.cat(started.logits), is_half=self._is_half)
        rounds.run(started.most, started.num_read, comparison.gather, goes_on=goes_on)
        self._measured = self._sizes_from(batch, started, rounds)
        if comparison.has_steps:
            difference = comparison.difference(
                self._decoder.base, self._options, batch, rounds, started.most, started.num_read
            )
            if difference is not None:
                raise NotGraphableError(difference)
        if comparison.num_compared > 1:
            kind = _Kind(self._uses_ranges(batch), batch.is_even)
            self._shown[kind] = Compared(self._measured, rounds.slots.layout.width)
            remember(self._decoder.base, self._key(kind), self._shown[kind])
        return self._results(started, rounds)

    def _sizes_from(self, batch: Batch, started: _Started, rounds: Rounds) -> Sizes:
        assert self._layers is not None
        own, source = self._layers.bytes_per_token
        num, vocabulary = max(1, len(batch) - 1), started.logits[0].shape[1]  # the first row is read by itself
        rules, size = self._options.rules, self._layers.dtype.itemsize
        per_row = vocabulary * (_LOGITS_BYTES + size)
        return Sizes(
            own=own,
            source=source,
            per_token=max(0.0, started.reading_bytes[-1] - num * per_row) / (num * batch.width),
            per_row=per_row,
            per_step=(rounds.step_bytes or 0) / rounds.slots.layout.num_rows,
            per_slot=size + 8 + 8 * rules.draws,
            per_start=vocabulary if rules.repetition_penalty is not None else 0,
        )


@final
class _Kind(NamedTuple):
    """What a comparison holds for.

    Attributes:
        uses_ranges: attention is over ranges of keys.
        is_even: no row had any padding.
    """

    uses_ranges: bool
    is_even: bool


@final
class _Started(NamedTuple):
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


def _text_of(error: Exception) -> str:
    if isinstance(error, NotGraphableError):
        return str(error)
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {textwrap.shorten(lines[0], width=160, placeholder=' …')}"


@contextmanager
def _without_planning() -> Iterator[None]:
    """Switch cuDNN's attention off: it plans anew for every shape, which takes longer than it saves."""
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
