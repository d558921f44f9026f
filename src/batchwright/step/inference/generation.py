"""Generation: text for any number of prompts, in batches that fit, by graphs where these are exact."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..._checks import as_whole
from ..._lengths import pad_up
from ..._progress import ProgressBar
from ..._types import IntArray
from ...errors import ArgumentError
from ...plan import Budget
from .._loss_probe import evaluating
from ..graphs.backend import Choice, GraphBackend, make_backend
from ..memory.monitor import MemoryMonitor
from ._decoding import Collate, Counts, Decoder
from ._keeping import Kept, Settings
from ._limits import MOST_ITEMS_KNOWN, Limit, Meter, as_limits, first_limit
from ._sharing import Group
from ._sizing import GraphBytes, Sizes, room_of
from .pieces import run_in_pieces

# With fewer examples than this there is nothing to learn for others.
_FEW = 8
# Of the room for batches: a little less is free when one begins, as the allocator and other streams keep some.
_PLANNED = 0.97
# With "auto": a comparison and the first captures take about as long as so many eager steps.
_LEAST_STEPS = 24
_SAID: set[str] = set()


def generate(
    model: Any,
    examples: Sequence[Any],
    *,
    budget: Budget | None = None,
    collate: Collate | None = None,
    lengths: npt.ArrayLike | Callable[[Any], Any] | None = None,
    count_output: bool = False,
    pad_token_id: int | None = None,
    pad_multiple_of: int = 1,
    memory: MemoryMonitor | None = None,
    progress: bool = False,
    graphs: Choice = "auto",
    **generate_kwargs: Any,
) -> list[Tensor]:
    """Generate from every example as ``model.generate`` does, in batches of similar length that fit.

    Decoder-only models are padded on the left and give their new tokens; encoder-decoders are padded on the right and
    give what ``model.generate`` does, including the start token. A result ends with its first end-of-sequence token, so
    greedy and beam search give each example what it gets on its own; sampling draws differently. The longest examples
    run first, so that one that does not fit shows at once.

    On a CUDA device tokens are decoded by replays of graphs, where a step has no launches to wait for, and rows that
    have ended make room. A few rows of a model are compared with eager steps before. What graphs do not follow, such as
    beams, runs through ``model.generate`` as elsewhere, and a warning says why, once. Tokens drawn by replays have the
    same distribution, and with ``torch.manual_seed`` each example gets the same ones whichever batch it is in.

    Args:
        model: a transformers model in any mode; it generates in evaluation mode.
        examples: token ids (lists or 1-D tensors), or mappings with ``input_ids``; anything with ``collate``.
        budget: what a batch may cost. A batch that still runs out of memory is split, and later batches keep to the
            number of tokens that fitted. None begins with 8 examples and lets the peak of each batch decide how large
            the next can be, up to 0.8 of the memory; on a CPU it doubles up to 32 examples. Graphs know the bytes of
            their cache before they take it: batches are as large as fits into 0.8 of the memory, or into the bytes of
            a budget that counts bytes.
        collate: makes the keyword arguments of ``model.generate`` from a list of examples.
        lengths: ``(N,)`` or ``(N, axes)``, or a function of an example; None counts the ids.
        count_output: add the most new tokens as one more axis of length, for the budget to count.
        pad_token_id: None takes the model's, or its end-of-sequence token if it has none.
        pad_multiple_of: pad to multiples of this, for few shapes.
        memory: reads the peak of every batch when there is no budget; None reads that of a CUDA device.
        progress: show a progress bar.
        graphs: ``"auto"`` decodes with CUDA graphs where that is exact and there are at least 24 steps to gain from;
            ``True`` refuses what they cannot do; ``False`` always calls ``model.generate``.
        **generate_kwargs: for ``model.generate``, e.g. ``max_new_tokens=128, num_beams=4``. ``max_new_tokens`` may be a
            sequence with one number per example.

    Returns:
        One 1-D tensor of token ids per example, on the CPU, in the order of the examples.

    >>> import torch
    >>> class Echo(torch.nn.Linear):
    ...     def generate(self, input_ids, attention_mask, **options):
    ...         return torch.cat([input_ids, input_ids[:, -1:]], dim=1)
    >>> generate(Echo(1, 1), [[3, 4], [5]], max_new_tokens=1)
    [tensor([4]), tensor([5])]
    """
    kept = Kept(releases=not isinstance(graphs, bool | str))
    settings = Settings(collate, count_output, pad_token_id, pad_multiple_of, memory, progress, graphs)
    try:
        return generated(model, examples, kept, settings, generate_kwargs, budget=budget, lengths=lengths)
    finally:
        kept.drop()


def generated(
    model: Any,
    examples: Sequence[Any],
    kept: Kept,
    settings: Settings,
    generate_kwargs: dict[str, Any],
    *,
    budget: Budget | None,
    lengths: npt.ArrayLike | Callable[[Any], Any] | None,
) -> list[Tensor]:
    """Return what ``generate`` does with these arguments.

    Args:
        model: a transformers model.
        examples: token ids.
        kept: memory and graphs of earlier calls; what this call adds stays there.
        settings: the other arguments.
        generate_kwargs: for ``model.generate``.
        budget: what a batch may cost.
        lengths: of the examples.
    """
    collate, count_output, pad_token_id, pad_multiple_of, memory, progress, graphs = settings
    if isinstance(examples, Mapping | str):
        raise ArgumentError(f"examples must be a list with one entry per example, got {type(examples).__name__}")
    if not hasattr(examples, "__len__") or hasattr(examples, "iloc"):  # of pandas, which finds by label
        examples = list(examples)
    if len(examples) == 0:
        return []
    pad_multiple_of = as_whole("pad_multiple_of", pad_multiple_of, least=1)
    limits = as_limits(generate_kwargs.get("max_new_tokens"), len(examples))
    if limits is not None:
        generate_kwargs["max_new_tokens"] = int(limits.max())
    decoder = Decoder(model, generate_kwargs, collate, pad_token_id, pad_multiple_of, has_limits=limits is not None)
    decoder.check_unpadded(examples)
    has_output = count_output or budget is None
    axes = decoder.lengths(examples, lengths, limits=limits, with_output=has_output)
    most = int(decoder.lengths(examples, lengths, limits=limits, with_output=True)[:, -1].max())
    meter = Meter.of(budget, memory, decoder.device)
    longest = int(pad_up(axes, pad_multiple_of).sum(axis=1).max())
    with ProgressBar(label="generating", total=len(examples), enabled=progress) as bar, evaluating(model):
        groups = decoder.groups(examples, limits)
        if decoder.why_alone is not None and len(examples) > 1:
            _say_once(f"generate runs examples one by one: {decoder.why_alone}")
        elif decoder.reader is not None and collate is None and len(groups) > 1:
            _say_once(
                f"generate puts only prompts of one length into a batch: {decoder.reader} sees padding; give a "
                "collate= to pad all the same"
            )
        room = room_of(budget, memory, decoder.device)
        kept.count_call()
        runner = make_runner(decoder, graphs, len(examples), most, has_limits=limits is not None, room=room, kept=kept)
        is_plain = lengths is None and collate is None
        known = _known(runner, decoder, examples, axes, limits, room, groups[-1], kept) if is_plain else None
        most_new = None if has_output else most  # else they are the last axis of length
        known = None if known is None else replace(known, most_new=most_new)
        obstacle = next((group.obstacle for group in groups if group.obstacle is not None), None)
        if obstacle is not None and not isinstance(runner, Eager):
            give_up(graphs, obstacle)
        work, eager = _Work(examples, axes, limits, pad_multiple_of, meter, bar, kept), Eager(decoder)
        work.expects, work.most_new = is_plain, most_new
        limit = first_limit(budget, longest, decoder.device, meter, known)
        for group in groups:
            limit = work.run(runner if group.obstacle is None else eager, group, limit)
    return [work.results[index] for index in range(len(examples))]


@final
class _Work:
    """All examples, and the results so far by their places.

    Args:
        examples: what to generate from.
        axes: their lengths, as the budget counts them.
        limits: the most new tokens of each, None if all have the same.
        pad_multiple_of: pad to multiples of this.
        meter: measures batches.
        bar: shows progress.
        kept: gives way where memory runs out.

    Attributes:
        results: those so far.
        expects: the first axis of length is that of the prompts, so that a plan says which caches will be needed.
        most_new: the most new tokens, None if they are the last axis of length.
    """

    expects = False
    most_new: int | None = None

    def __init__(
        self,
        examples: Sequence[Any],
        axes: npt.NDArray[np.int32],
        limits: Counts | None,
        pad_multiple_of: int,
        meter: Meter,
        bar: ProgressBar,
        kept: Kept,
    ) -> None:
        self._examples, self._axes, self._limits = examples, axes, limits
        self._pad_multiple_of, self._meter, self._bar, self._kept = pad_multiple_of, meter, bar, kept
        self.results: dict[int, Tensor] = {}

    def run(self, runner: Runner, group: Group, limit: Limit) -> Limit:
        """Run a group, the longest first, and return what its batches have taught."""
        waiting = group.places
        while len(waiting):
            plan = limit.plan(self._axes[waiting], self._pad_multiple_of)
            if self.expects:
                new = plan.shapes[:, -1] if self.most_new is None else np.full(len(plan), self.most_new)
                runner.expect(np.column_stack([plan.shapes[:, :2], new]))
            for number in np.argsort(-plan.shapes[:, 1:].sum(axis=1), kind="stable"):
                num_fitting = self._run_batch(runner, waiting[plan[number]].tolist())
                before, limit = limit, limit.after(plan.shapes[number].tolist(), num_fitting, self._meter)
                if limit != before:
                    break
            waiting = np.setdiff1d(waiting, list(self.results))
        return limit

    def _run_batch(self, runner: Runner, indices: list[int]) -> int:
        """Run a batch, in pieces if it does not fit, and return how many examples fitted at once."""
        self._meter.begin(runner.held_bytes)
        axes, limits = self._axes, self._limits
        pieces = run_in_pieces(
            lambda chosen: runner.run(
                [self._examples[index] for index in chosen], chosen, None if limits is None else limits[chosen]
            ),
            lambda start, stop: indices[start:stop],
            len(indices),
            describe=lambda place: f"example {indices[place]} of length {axes[indices[place]].tolist()}",
            give_way=self._kept.give_way,
        )
        # Cloned outside inference mode: tensors made inside it cannot be trained on.
        rows = [row.clone() for piece in pieces.results for row in piece]
        self.results.update(zip(indices, rows, strict=True))
        self._bar.update(len(indices))
        return pieces.size


def _known(
    runner: Runner,
    decoder: Decoder,
    examples: Sequence[Any],
    axes: npt.NDArray[np.int32],
    limits: Counts | None,
    room: Callable[[int], float | None],
    group: Group,
    kept: Kept,
) -> GraphBytes | None:
    """Return what the memory has room for, None if that is not known before batches of a group run."""
    if len(group.places) <= _FEW or group.obstacle is not None:
        return None
    order = group.places[np.argsort(-axes[group.places, 0], kind="stable")]
    few = np.concatenate([order[: _FEW - 2], order[-2:]])
    # As far as any batch may reach, so that none of them has to be compared once more.
    limits = None if limits is None else np.full(len(few), limits.max())
    sizes = runner.learn([examples[index] for index in few], limits)
    left = None if sizes is None else kept.steady(room(kept.num_bytes))
    if sizes is None or left is None:
        return None
    return GraphBytes(sizes, _PLANNED * left, 1 if decoder.is_encoder_decoder else None, None)


class Runner(Protocol):
    """Runs batches."""

    def run(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        """Return the token ids of each example.

        Args:
            examples: those of one batch.
            indices: their places among all.
            limits: the most new tokens of each, None if all have the same.
        """

    def learn(self, examples: list[Any], limits: Counts | None) -> Sizes | None:
        """Return what batches take of the memory, None if that is not known.

        Args:
            examples: a few of the longest.
            limits: the most new tokens of each, None if all have the same.
        """

    def expect(self, shapes: IntArray) -> None:
        """Take note of what is planned.

        Args:
            shapes: of batches, ``(batches, 3)``: examples, tokens of the longest, new tokens.
        """

    @property
    def held_bytes(self) -> int:
        """Return the memory that is held from batch to batch."""


@final
class Eager:
    """Runs batches through ``model.generate``."""

    held_bytes = 0

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def run(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        """Return the token ids of each example."""
        return self._decoder.run(examples, limits, indices)

    def learn(self, examples: list[Any], limits: Counts | None) -> Sizes | None:
        """Return None: the peaks of batches tell."""
        return None

    def expect(self, shapes: IntArray) -> None:
        """Do nothing: nothing is held."""


def make_runner(
    decoder: Decoder,
    graphs: Choice,
    num: int,
    most: int,
    *,
    has_limits: bool,
    room: Callable[[int], float | None],
    kept: Kept | None = None,
) -> Runner:
    """Return what runs a batch.

    Args:
        decoder: runs a batch eagerly.
        graphs: what was asked for.
        num: the number of examples.
        most: the most new tokens.
        has_limits: examples have limits of their own.
        room: returns the bytes for a batch, see ``Replaying``.
        kept: memory and graphs of earlier calls.
    """
    kept = Kept() if kept is None else kept
    backend = None if graphs is False else make_backend(graphs, decoder.device)
    if backend is None:
        kept.drop()
    if backend is None or (isinstance(graphs, str) and -(-num // MOST_ITEMS_KNOWN) * (most - 1) < _LEAST_STEPS):
        return Eager(decoder)
    from ._options import read_options

    options = read_options(decoder.base, decoder.model, decoder.kwargs)
    if not isinstance(options, str):
        from ._ranges import make_attend
        from ._replaying import Replaying

        seed = int(torch.randint(2**62, ())) if options.rules.draws else 0
        return Replaying(
            decoder,
            options,
            partial(_another, backend, graphs, decoder.device),
            seed=seed,
            give_up=partial(give_up, graphs),
            has_limits=has_limits,
            attend=make_attend(decoder.base, decoder.device),
            room=room,
            kept=kept,
        )
    kept.drop()
    give_up(graphs, options)
    return Eager(decoder)


def give_up(graphs: Choice, reason: str) -> None:
    """Say why batches run eagerly, with ``"auto"`` once for each reason; refuse where graphs are a must."""
    if graphs is True:
        raise ArgumentError(f"graphs=True cannot be followed: {reason}; pass graphs='auto' or graphs=False")
    text = f"generate runs eagerly: {reason}"
    if isinstance(graphs, str):
        _say_once(text)
    else:
        warnings.warn(text, stacklevel=_stacklevel())


def _say_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        warnings.warn(text, stacklevel=_stacklevel())


def _stacklevel() -> int:
    """Return the level of the line outside of this package that is to blame, however deep decoding stands."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("batchwright."):
        frame, level = frame.f_back, level + 1
    return level


def _another(given: GraphBackend, graphs: Choice, device: torch.device) -> GraphBackend:
    """Return what captures for a new layout of the memory; CUDA graphs of the one before go with their pool."""
    return (make_backend(graphs, device) or given) if isinstance(graphs, bool | str) else given
