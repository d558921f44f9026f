"""Generation by replays: prompts are read eagerly, tokens decoded by graphs, and what cannot be runs eagerly."""

from __future__ import annotations

import copy
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError
from ..graphs._comparing import NEAR, NEAR_ROUGHLY
from ..graphs._micro import NotGraphableError
from ..graphs.backend import GraphBackend
from ..oom import is_out_of_memory
from ._choosing import uniforms
from ._decoding import Counts, Decoder
from ._options import Options, why_not_fields
from ._ranges import Attend
from ._rounds import Figures, Rounds
from ._slots import NUM_COMPARED, Prompt, Slots
from ._windows import Layers, Layout

_HALF = (torch.float16, torch.bfloat16)
# Kernels want sizes that are multiples of this.
_EIGHT = 8


@final
class Replaying:
    """Runs batches through graphs, and eagerly from the first thing on that graphs cannot follow.

    Args:
        decoder: runs a batch eagerly, and knows the model.
        options: what to generate.
        make_backend: returns what captures; each layout of the memory has its own.
        seed: of all that is drawn.
        is_wanted: refuse what cannot be graphed instead of running it eagerly.
        attend: attends over ranges of keys, None to leave attention to the model.

    Attributes:
        figures: what was done.
    """

    def __init__(
        self,
        decoder: Decoder,
        options: Options,
        make_backend: Callable[[], GraphBackend],
        *,
        seed: int,
        is_wanted: bool,
        attend: Attend | None = None,
    ) -> None:
        self._decoder, self._options, self._make_backend = decoder, options, make_backend
        self._seed, self._is_wanted, self.figures = seed, is_wanted, Figures()
        self._is_half = next(decoder.base.parameters()).dtype in _HALF
        self._is_checked, self._attend = False, attend
        self._layers: Layers | None = None
        self._rounds: Rounds | None = None

    def run(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        """Return the token ids of each example."""
        if self.figures.reason is None:
            try:
                # Not in inference mode, whose tensors could not be written to by a later call outside of it.
                with torch.inference_mode(False), torch.no_grad(), _without_planning():
                    return self._replayed(examples, indices, limits)
            except Exception as error:
                if is_out_of_memory(error) or isinstance(error, ArgumentError):
                    self._drop()
                    raise
                reason = _text_of(error)
            self._drop()
            self._give_up(reason)
        return self._decoder.run(examples, limits)

    @property
    def held_bytes(self) -> int:
        """Return the memory of the cache, which stays for the next batch."""
        return 0 if self._layers is None else self._layers.num_bytes

    def _give_up(self, reason: str) -> None:
        self.figures.reason = reason
        if self._is_wanted:
            raise ArgumentError(f"graphs=True cannot be followed: {reason}; pass graphs='auto' or graphs=False")
        warnings.warn(f"generate runs eagerly: {reason}", stacklevel=8)

    def _drop(self) -> None:
        """Let graphs and caches go."""
        self._rounds = self._layers = None

    def _replayed(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        decoder = self._decoder
        batch = decoder.collated(examples)
        is_encoder_decoder = decoder.is_encoder_decoder
        reason = why_not_fields(batch, is_encoder_decoder=is_encoder_decoder)
        if reason is not None:
            raise NotGraphableError(reason)
        # A start token may be put in front of the decoder's prompt.
        ids = batch["input_ids"] if not is_encoder_decoder else batch.get("decoder_input_ids")
        num_prompt = 1 if ids is None else ids.shape[1] + int(is_encoder_decoder)
        most = self._most_new(batch, limits, num_prompt)
        layers = self._layers_for(_room(batch, num_prompt, int(most.max()), is_encoder_decoder=is_encoder_decoder))
        read = _read_prompt(decoder.base, self._options.settings, batch, layers)
        most = self._most_new(batch, limits, read.ids.shape[1])
        if most.min() < 1 or read.num_kept != read.ids.shape[1]:
            raise NotGraphableError("a prompt leaves no room for new tokens, or is not in the cache as a whole")
        uniform = self._uniform(indices, int(most.max()))
        prompt = read.prompt(batch, most, uniform, is_encoder_decoder=is_encoder_decoder)
        rows = torch.cat([read.ids.cpu(), self._decode(batch, prompt, read, most)], dim=1)
        return [decoder.cut(row, batch, int(most[place])) for place, row in enumerate(rows)]

    def _most_new(self, batch: Mapping[str, Any], limits: Counts | None, num_prompt: int) -> Counts:
        """Return how many new tokens each row may get."""
        if limits is not None:
            return limits
        num = len(batch["input_ids"])
        if self._options.max_new_tokens is not None:
            return np.full(num, self._options.max_new_tokens)
        own = self._decoder.most_new(batch)
        return np.full(num, self._options.max_length - num_prompt) if own is None else own

    def _layers_for(self, room: Layout) -> Layers:
        """Return the memory of the batch before if that will do, else drop it with its graphs and take new."""
        layers = self._layers
        if layers is None or not layers.layout.holds(room):
            self._drop()
            self._layers = layers = Layers(room)
        return layers

    def _uniform(self, indices: list[int], num: int) -> Tensor | None:
        return torch.from_numpy(uniforms(self._seed, indices, num)) if self._options.rules.draws else None

    def _decode(self, batch: dict[str, Any], prompt: Prompt, read: _Read, most: Counts) -> Tensor:
        """Return the new tokens of each row, with anything after its end."""
        rounds = self._rounds_for(read, is_plain=prompt.is_plain)
        slots, num = rounds.slots, len(most)
        slots.begin(prompt, read.logits)
        self.figures.num_batches += 1
        comparison = None if self._is_checked else Comparison(read.logits, is_half=self._is_half)
        rounds.run(most, read.num_kept, None if comparison is None else comparison.gather)
        self._check(comparison, batch, slots, most, read.num_kept)
        return slots.results[:num, : int(most.max())].cpu()

    def _rounds_for(self, read: _Read, *, is_plain: bool) -> Rounds:
        assert self._layers is not None
        rounds, layers = self._rounds, self._layers
        attend = self._attend if is_plain else None
        if rounds is None or rounds.slots.is_other_prompt(read.num_kept) or rounds.slots.attend is not attend:
            slots = Slots(self._decoder.base, layers, self._options.rules, read.logits, read.num_kept, attend)
            self._rounds = rounds = Rounds(slots, self._make_backend(), self.figures)
        self.figures.cache_bytes = max(self.figures.cache_bytes, layers.num_bytes)
        return rounds

    def _check(
        self, comparison: Comparison | None, batch: dict[str, Any], slots: Slots, limits: Counts, num_read: int
    ) -> None:
        """Compare the first steps of the first batch with eager ones."""
        if comparison is None or not comparison.has_steps:
            return
        found = comparison.difference(self._decoder.base, self._options, batch, slots.results, limits, num_read)
        if found is not None:
            raise NotGraphableError(found)
        self._is_checked = True


@final
class _Read(NamedTuple):
    """A prompt that was read.

    Attributes:
        ids: what the decoder has read.
        logits: after it, in float32.
        num_kept: tokens in the cache.
    """

    ids: Tensor
    logits: Tensor
    num_kept: int

    def prompt(
        self, batch: Mapping[str, Any], limits: Counts, uniform: Tensor | None, *, is_encoder_decoder: bool
    ) -> Prompt:
        """Return what slots begin with."""
        mask = batch.get("attention_mask")
        mask = torch.ones_like(batch["input_ids"]) if mask is None else mask
        new = torch.from_numpy(limits).to(self.ids.device)
        uniform = None if uniform is None else uniform.to(self.ids.device)
        if is_encoder_decoder:
            return Prompt(self.ids, torch.ones_like(self.ids), mask, new, uniform)
        return Prompt(self.ids, mask, None, new, uniform)


def _read_prompt(base: Any, settings: Any, batch: Mapping[str, Any], layers: Layers) -> _Read:
    """Let transformers read a prompt into the cache."""
    settings = copy.deepcopy(settings)
    settings.max_new_tokens, settings.max_length, settings.min_length, settings.min_new_tokens = 1, None, None, 0
    settings.do_sample, settings.disable_compile = False, True
    settings.return_dict_in_generate = settings.output_logits = True
    cache = layers.filling()
    found = base.generate(**batch, generation_config=settings, past_key_values=cache)
    return _Read(found.sequences[:, :-1], found.logits[0], layers.keep(cache))


def _room(batch: Mapping[str, Any], num_prompt: int, most: int, *, is_encoder_decoder: bool) -> Layout:
    """Return the room for a batch: rows in eights, widths in steps of an eighth to a quarter."""
    num, width = batch["input_ids"].shape
    num_rows = num if num <= _EIGHT else -(-num // _EIGHT) * _EIGHT
    return Layout(num_rows, _rounded(num_prompt + most - 1), _rounded(width) if is_encoder_decoder else None)


def _rounded(width: int) -> int:
    step = max(_EIGHT, 2 ** ((width - 1).bit_length() - 3)) if width > 1 else _EIGHT
    return -(-width // step) * step


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


# New tokens to compare.
_NUM_TOKENS = 4


@final
class Comparison:
    """Gathers the logits of the first steps of a few rows.

    Args:
        logits: of the prompt.
        is_half: compare roughly.
    """

    def __init__(self, logits: Tensor, *, is_half: bool) -> None:
        self._num_rows = min(NUM_COMPARED, len(logits))
        self._logits = [logits[: self._num_rows].clone()]
        self._near = NEAR_ROUGHLY if is_half else NEAR

    def gather(self, slots: Slots) -> bool:
        """Keep the logits of a step, and say whether more are wanted."""
        assert slots.logits is not None
        self._logits.append(slots.logits[: self._num_rows].clone())
        return len(self._logits) < _NUM_TOKENS

    @property
    def has_steps(self) -> bool:
        """Say whether there is anything to compare."""
        return len(self._logits) > 1

    def difference(
        self, model: Any, options: Options, batch: Mapping[str, Any], tokens: Tensor, limits: Counts, num_read: int
    ) -> str | None:
        """Run the same rows eagerly with the tokens that were chosen, and say what differs, or None.

        Args:
            model: a transformers model.
            options: what to generate.
            batch: what the prompt was read from.
            tokens: those that were chosen, ``(rows, new tokens)``.
            limits: the most new tokens of each row.
            num_read: tokens of the decoder's prompt.
        """
        num = len(self._logits)
        tokens = tokens[: self._num_rows, :num]
        forced = _Forced(tokens)
        settings = copy.deepcopy(options.settings)
        settings.do_sample, settings.max_new_tokens, settings.max_length = False, num, None
        least = max(options.rules.min_new_tokens, options.rules.min_length - num_read, 0)
        settings.min_new_tokens, settings.min_length = min(least, num), None
        settings.return_dict_in_generate = settings.output_logits = True
        rows = {name: value[: self._num_rows] for name, value in batch.items()}
        found = model.generate(**rows, generation_config=settings, logits_processor=[forced])
        ends = tokens.new_tensor(options.rules.ends)
        most = torch.from_numpy(limits[: self._num_rows]).to(tokens.device)
        goes_on = most > 0
        for number, (own, eager) in enumerate(zip(self._logits, found.logits, strict=False)):
            if not bool(_are_near(own, eager, self._near)[goes_on].all()):
                return f"the logits of new token {number + 1} differ from those of an eager step"
            is_best = _is_best(forced.scores[number], tokens[:, number, None], self._near)
            if not options.rules.draws and not bool(is_best[goes_on].all()):
                return f"new token {number + 1} is not the one that an eager step takes"
            goes_on &= ~torch.isin(tokens[:, number], ends) & (most > number + 1)
        return None


def _are_near(own: Tensor, eager: Tensor, near: float) -> Tensor:
    """Say of each row whether logits differ by rounding only."""
    own, eager = own.double(), eager.double()
    distance = torch.where(own == eager, 0.0, (own - eager).abs()).nan_to_num(nan=torch.inf)
    return distance.amax(dim=1) <= near * _scale(eager)


def _is_best(scores: Tensor, tokens: Tensor, near: float) -> Tensor:
    """Say of each row whether a token has the highest score, or one as high but for rounding."""
    scores = scores.double()
    best, own = scores.amax(dim=1), scores.gather(1, tokens)[:, 0]
    return (own == best) | (own >= best - near * _scale(scores))


def _scale(scores: Tensor) -> Tensor:
    return torch.where(scores.isfinite(), scores, 0.0).abs().amax(dim=1).clamp(min=1e-6)


@final
class _Forced:
    """A logits processor that takes tokens which are given.

    Attributes:
        scores: what the processors of transformers have made of the logits.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of which one token is the best."""
        forced = torch.full_like(scores, -torch.inf)
        forced.scatter_(1, self._tokens[:, len(self.scores), None], 0.0)
        self.scores.append(scores.clone())
        return forced
