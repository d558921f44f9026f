"""Generation by replays: prompts are read eagerly, tokens decoded by graphs, and what cannot be runs eagerly."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ..._types import IntArray
from ...errors import ArgumentError
from .._copies import sent
from ..graphs._micro import NotGraphableError
from ..graphs.backend import GraphBackend
from ..oom import is_out_of_memory
from ._choosing import uniforms
from ._comparison import Compared, Comparison, Kind, compared, key_of, remember
from ._decoding import Counts, Decoder
from ._keeping import Kept, Space, Wanted
from ._options import Options
from ._ranges import Attend
from ._reading import Batch, Read, Started, read_rows, worth_of
from ._rounds import Rounds
from ._sizing import Sizes, layout_of
from ._slots import Slots

_HALF = (torch.float16, torch.bfloat16)
# So many rows are compared with eager steps, and measured, before a larger batch.
NUM_FIRST = 8
# What transformers makes of the logits of a prompt: a copy in float32, and copies that processors make.
_LOGITS_BYTES = 3 * 4


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
        kept: memory and graphs of earlier batches, and of earlier calls.
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
        kept: Kept | None = None,
    ) -> None:
        self._decoder, self._options, self._make_backend = decoder, options, make_backend
        self._seed, self._give_up = seed, give_up
        self._has_given_up = False
        self._is_half = next(decoder.base.parameters()).dtype in _HALF
        self._has_limits = has_limits or options.max_new_tokens is None
        self._room, self._expected, self._worth = room, 0, worth_of(decoder.base)
        self._shown: dict[Kind, Compared] = {}
        self._measured: Sizes | None = None
        self._kept = Kept() if kept is None else kept
        self._model_key: Hashable = None
        with _computing():
            self._kept.begin(partial(self._key, (attend is not None, self._has_limits)), attend)
        self._attend = self._kept.attend
        self._space: Space | None = None
        self._reading_room: float | None = None

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
            # A batch will say which example does not fit.
            return self.learn(examples, limits) if self._kept.give_way() else None

    def expect(self, shapes: IntArray) -> None:
        """Note how much room the largest cache takes.

        Args:
            shapes: of the batches that are planned, ``(batches, 3)``: examples, tokens of the longest, new tokens.
        """
        sizes = self._measured or next((shown.sizes for shown in self._shown.values()), None)
        if sizes is None:
            return
        has_source = self._decoder.is_encoder_decoder
        layouts = [
            layout_of(num, 1 if has_source else width, most, width if has_source else None)
            for num, width, most in shapes.tolist()
        ]
        self._expected = max(map(sizes.of_cache, layouts))

    def _tried(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns, None if it showed that graphs cannot follow."""
        if self._has_given_up:
            return None
        try:
            with _computing():
                return function()
        except Exception as error:
            if is_out_of_memory(error):
                self._space, self._expected = None, 0
                self._kept.run_out()
                raise
            self._drop()
            if isinstance(error, ArgumentError):
                raise
            reason = _text_of(error)
        except BaseException:  # such as an interrupt of the user, after which nobody knows what is filled
            self._drop()
            raise
        self._drop()
        self._has_given_up = True
        self._give_up(reason)
        return None

    @property
    def held_bytes(self) -> int:
        """Return the memory of the cache, which stays for the next batch."""
        return self._kept.num_bytes

    def _drop(self) -> None:
        """Let graphs and caches go."""
        self._space = None
        self._kept.drop()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Decode in memory of its own, which is given back: what a batch takes is not known yet."""
        kept, self._kept = self._kept, Kept()
        try:
            yield
        finally:
            self._drop()
            self._kept = kept

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
        batch, order = batch.in_order()
        limits, indices = None if limits is None else limits[order], [indices[place] for place in order]
        with self._aside() if sizes is None else nullcontext():
            rows = self._decoder.cut(*self._decoded(batch, limits, indices, sizes))
        return [rows[place] for place in np.argsort(order)]

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
        for kind in [Kind(uses_ranges, is_even=False), *([Kind(uses_ranges, is_even=True)] if batch.is_even else [])]:
            found = self._shown.get(kind) or compared(self._decoder.base, self._key(kind))
            if found is not None and found.width >= width:
                self._shown[kind] = found
                return found.sizes
        return None

    def _probe(self, batch: Batch, examples: list[Any], most: int) -> Sizes:
        """Compare a few rows with eager steps, the shortest and the longest, and return what decoding takes."""
        few = Batch.of(self._decoder, [examples[place] for place in batch.extremes(NUM_FIRST)])
        self._compared(few, np.full(len(few), most), list(range(len(few))), goes_on=False)
        assert self._measured is not None
        return self._measured

    def _uses_ranges(self, batch: Batch) -> bool:
        return self._attend is not None and batch.is_plain

    def _key(self, other: Hashable) -> Any:
        if self._model_key is None:
            base, options = self._decoder.base, self._options
            self._model_key = key_of(base, options.rules, options.settings, type(self._make_backend()))
        return self._model_key, other

    def _key_now(self, other: Hashable) -> Any:
        """Return the key of a model that may have made something at its first call."""
        self._model_key = None
        return self._key(other)

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
        self._kept.check()
        rounds.run(started.most, started.num_read)
        self._kept.look(self._decoder.base, partial(self._key_now, (self._attend is not None, self._has_limits)))
        return self._results(started, rounds)

    def _results(self, started: Started, rounds: Rounds) -> tuple[Tensor, Tensor, Counts]:
        most = started.most
        # A copy in any case: the next batch writes to the same place.
        new = rounds.slots.results[: len(most), : int(most.max())].to("cpu", copy=True)
        return started.ids.cpu(), new, most

    def _make_room(self, batch: Batch, most: Counts, sizes: Sizes | None) -> None:
        """Keep the memory of the batch before if that will do, else drop it with its graphs for new, if that fits."""
        # A model whose attention is of another kind looks at all of a cache, so that a wide one costs time.
        in_ranges = self._uses_ranges(batch) and self._attend is not None and self._attend.was_called
        self._space = None  # it may have to go
        wanted = Wanted(batch.layout(int(most.max())), batch.width, sizes, in_ranges, len(batch) == 1)
        self._space, self._reading_room = self._kept.space_for(
            wanted, self._room, self._expected, self._decoder.device, self._make_backend
        )

    def _start(
        self, batch: Batch, limits: Counts | None, indices: list[int], sizes: Sizes | None
    ) -> tuple[Started, Rounds]:
        """Read prompts, piece by piece, and choose their first tokens."""
        started, rounds = None, None
        for rows in batch.pieces(sizes, self._reading_room, self._worth):
            read, num_bytes = self._read(batch, rows, is_measured=sizes is None)
            if started is None or rounds is None:
                num_read = read.ids.shape[1] if batch.is_encoder_decoder else batch.num_prompt
                started = Started(num_read, self._most_new(batch, limits, num_read), [], [], [])
                rounds = self._begin(batch, started, read.prompt.logits, indices, keeps_logits=sizes is None)
            started.add(read.ids, read.prompt.logits, num_bytes, batch)
            rounds.slots.fill(rows.start, started.num_read, read.prompt)
        assert started is not None
        assert rounds is not None
        rounds.slots.go()
        return started, rounds

    def _read(self, batch: Batch, rows: slice, *, is_measured: bool) -> tuple[Read, int]:
        """Read some rows, and return what that took besides the cache; 0 if it is not measured."""
        assert self._space is not None
        assert self._kept.backend is not None
        found: list[Read] = []
        read = partial(read_rows, self._decoder.base, self._options.settings, batch, self._space.layers, rows)
        if not is_measured:
            return read(), 0
        held_bytes = self.held_bytes
        num_bytes = self._kept.backend.measure(lambda: found.append(read()))
        return found[0], num_bytes - (self.held_bytes - held_bytes)

    def _begin(
        self, batch: Batch, started: Started, logits: Tensor, indices: list[int], *, keeps_logits: bool
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
        assert self._space is not None
        assert self._kept.backend is not None
        attend = self._attend if batch.is_plain else None
        for rounds in self._space.rounds:
            if not rounds.slots.is_other_prompt(num_read) and rounds.slots.attend is attend:
                return rounds
        slots = Slots(
            self._decoder.base, self._space.layers, self._options.rules, logits, num_read, attend,
            has_limits=self._has_limits, keeps_logits=keeps_logits,
        )  # fmt: skip
        self._space.rounds.append(Rounds(slots, self._kept.backend))
        return self._space.rounds[-1]

    def _compared(
        self, batch: Batch, limits: Counts | None, indices: list[int], *, goes_on: bool
    ) -> tuple[Tensor, Tensor, Counts]:
        """Decode a batch, measure what that takes, and compare its first steps with eager ones."""
        with self._aside():
            return self._compared_aside(batch, limits, indices, goes_on=goes_on)

    def _compared_aside(
        self, batch: Batch, limits: Counts | None, indices: list[int], *, goes_on: bool
    ) -> tuple[Tensor, Tensor, Counts]:
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
            kind = Kind(self._uses_ranges(batch), batch.is_even)
            self._shown[kind] = Compared(self._measured, rounds.slots.layout.width)
            remember(self._decoder.base, self._key_now(kind), self._shown[kind])
        return self._results(started, rounds)

    def _sizes_from(self, batch: Batch, started: Started, rounds: Rounds) -> Sizes:
        assert self._space is not None
        own, source = self._space.layers.bytes_per_token
        num, vocabulary = max(1, len(batch) - 1), started.logits[0].shape[1]  # the first row is read by itself
        rules, size = self._options.rules, self._space.layers.dtype.itemsize
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


def _text_of(error: Exception) -> str:
    if isinstance(error, NotGraphableError):
        return str(error)
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {textwrap.shorten(lines[0], width=160, placeholder=' …')}"


@contextmanager
def _computing() -> Iterator[None]:
    """Switch gradients off, and cuDNN's attention: it plans anew for every shape, which takes longer than it saves."""
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        # Not in inference mode, whose tensors could not be written to by a later call outside of it.
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)
