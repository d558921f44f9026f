"""``model.encode`` of sentence-transformers in planned batches: the model does the work, the plan says on what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import DEBUG, INFO, getLogger
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings
from torch import Tensor

from ..._checks import check_choice
from ..._lengths import as_lengths
from ..._progress import ProgressBar
from ...errors import ArgumentError
from ...plan import Budget, MaxItems
from ...plan.budget import check_budget
from ...step.huggingface import evaluating
from ...step.inference.pieces import is_rounding, run_alike, run_in_pieces
from ...step.memory.monitor import MemoryMonitor

# Of model.encode; all others go to the modules of the model, which read and run texts with them.
_OWN = (
    "prompt", "prompt_name", "output_value", "precision", "convert_to_numpy", "convert_to_tensor", "device",
    "normalize_embeddings", "truncate_dim",
)  # fmt: skip
_ELSEWHERE = "one process encodes on one device here; call model.encode, or encode a part of the texts in each process"
_REFUSED = {"pool": _ELSEWHERE, "chunk_size": _ELSEWHERE, "batch_size": "the budget decides; give budget=MaxItems(n)"}
_MEASURED_AT_ONCE = 256
# A text is tried with at least so much padding, if it has more tokens than those around all texts.
_NUM_PADS, _FEWEST = 5, 2


def encode(
    model: SentenceTransformer,
    sentences: Any,
    *,
    budget: Budget | str = "auto",
    memory: MemoryMonitor | None = None,
    show_progress_bar: bool | None = None,
    **options: Any,
) -> Any:
    """Return what ``model.encode(sentences)`` returns, encoded in batches of similar length that fit.

    The model reads the texts with ``preprocess``, once to count tokens, and encodes each batch with its own ``encode``.
    So prompts, routers, pooling, normalization and all other modules do what they always do, and values differ by
    rounding only. A model that padding changes, which one padded text shows, gets batches of texts of one length. A
    batch that runs out of memory is split. Afterwards every module is in the mode that it had.

    Args:
        model: a SentenceTransformer.
        sentences: whatever ``model.encode`` takes: one text or a list, pairs, dicts, conversations, images; or a Series
            of pandas.
        budget: what a batch may cost, in tokens as the model reads them, prompts included. "auto" lets batches grow as
            ``batchwright.step.encode`` does. Inputs that are not tokenized, such as images, take ``MaxItems``.
        memory: reads the peak of every batch that runs without a budget; None reads that of a CUDA device.
        show_progress_bar: as for ``model.encode``: None shows it if sentence-transformers logs at the level INFO.
        options: all others of ``model.encode``, with its defaults: ``prompt``, ``prompt_name``, ``task``, ``device``,
            ``precision``, ``convert_to_tensor``, ``normalize_embeddings``, ``truncate_dim``, … Refused are
            ``batch_size``, several processes, and ``output_value=None``, whose features depend on the batches.

    Returns:
        As ``model.encode``: an array, a tensor, or a list, in the order of the sentences; for one sentence its vector.

    >>> from sentence_transformers.sentence_transformer.modules import BoW
    >>> model = SentenceTransformer(modules=[BoW(["red", "green", "blue"])], device="cpu")
    >>> encode(model, ["red green", "blue", "green"]).tolist()
    [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    _check_model(model)
    _check_options(options)
    if not isinstance(budget, Budget):
        check_choice("budget", budget, ("auto",))
    with evaluating(model):
        # The model checks its options, and moves to its device.
        nothing = model.encode([], show_progress_bar=False, **options)
        is_one, inputs = _as_list(model, sentences)
        if not inputs:
            return nothing
        texts = _Texts(model, inputs, options)
        measured = texts.measure()
        known = None if isinstance(budget, str) else check_budget(budget)
        _check_measured(measured, known, options)
        with ProgressBar(label="encoding", total=len(inputs), enabled=_is_shown(show_progress_bar)) as bar:
            run = _Run(texts, measured, bar)
            may_pad = texts.pads_freely(measured.lengths[:, 0])
            device = model.device
            run_alike(run, measured.lengths, model, may_pad=may_pad, budget=known, memory=memory, device=device)
        found = run.result()
    return found[0] if is_one else found


def _check_model(model: Any) -> None:
    if not isinstance(model, SentenceTransformer):
        raise ArgumentError(
            f"model must be a SentenceTransformer itself, got {type(model).__name__}; a wrapped one is compiled with "
            "model.compile(), a model of transformers is encoded by batchwright.step.encode, and others of "
            "sentence-transformers by their own methods"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse what would decide about batches, and results that depend on them."""
    for name, why in _REFUSED.items():
        if options.get(name) is not None:
            raise ArgumentError(f"{name} cannot be given: {why}")
    if isinstance(options.get("device"), list | tuple):
        raise ArgumentError(f"device must be one device, got {options['device']!r}: {_ELSEWHERE}")
    output = options.get("output_value", "sentence_embedding")
    if output is None:
        raise ArgumentError(
            "output_value=None returns features as wide as the batches they were in, which are others here; give "
            "'sentence_embedding' or 'token_embeddings', or call model.encode"
        )
    check_choice("output_value", output, ("sentence_embedding", "token_embeddings"))


def _is_shown(show_progress_bar: bool | None) -> bool:
    if show_progress_bar is not None:
        return bool(show_progress_bar)
    return getLogger(SentenceTransformer.__module__).getEffectiveLevel() in (INFO, DEBUG)


def _as_list(model: SentenceTransformer, sentences: Any) -> tuple[bool, list[Any]]:
    """Return whether it is one input, and all inputs."""
    if hasattr(sentences, "iloc") and not hasattr(sentences, "columns"):
        sentences = sentences.tolist()  # a Series, which the model takes for one input
    if model.is_singular_input(sentences):
        return True, [sentences]
    return False, sentences.tolist() if isinstance(sentences, np.ndarray) else list(sentences)


class _Measured(NamedTuple):
    """Tokens of each input, whether they were counted, and whether padding was seen on the left."""

    lengths: npt.NDArray[np.int32]
    is_counted: bool
    is_left: bool = False

    def describe(self, place: int) -> str:
        """Name an input."""
        return f"input {place}" + (f" of {self.lengths[place, 0]} tokens" if self.is_counted else "")


def _check_measured(measured: _Measured, budget: Budget | None, options: Mapping[str, Any]) -> None:
    if not measured.is_counted and budget is not None and not isinstance(budget, MaxItems):
        raise ArgumentError(
            f"these inputs have no tokens that could be counted, so {budget} says nothing about them; give MaxItems(n) "
            "or 'auto'"
        )
    if measured.is_left and options.get("output_value") == "token_embeddings":
        raise ArgumentError(
            "output_value='token_embeddings' holds the padding where that stands on the left, as much as a batch has, "
            "and batches are others here; set model.tokenizer.padding_side = 'right', or call model.encode"
        )


@final
class _Texts:
    """Inputs and the model that encodes any of them, with the options of ``model.encode``."""

    def __init__(self, model: SentenceTransformer, inputs: list[Any], options: Mapping[str, Any]) -> None:
        self.model, self.inputs, self.options = model, inputs, dict(options)

    def encode(self, places: Sequence[int], **others: Any) -> Any:
        """Return what the model makes of some inputs in one batch."""
        # A tuple is never one input, whatever is in it.
        chosen: Any = tuple(self.inputs[place] for place in places)
        return self.model.encode(
            chosen,
            batch_size=len(chosen),
            show_progress_bar=False,
            **{**self.options, "precision": "float32", **others},
        )

    def measure(self) -> _Measured:
        """Return how many tokens the model reads of each input; 1 of each where they cannot be counted."""
        num = len(self.inputs)
        uncounted = _Measured(as_lengths(np.ones(num, dtype=np.int32)), is_counted=False)
        sizes = [_num_letters(one) for one in self.inputs]
        if None in sizes or _counts(self._read([0]), 1) is None:
            return uncounted
        order, lengths, is_left = np.argsort(np.array(sizes)), np.ones(num, dtype=np.int32), False
        for start in range(0, num, _MEASURED_AT_ONCE):
            places = order[start : start + _MEASURED_AT_ONCE]
            features = self._read(places.tolist())
            counts = _counts(features, len(places))
            if counts is None:
                return uncounted
            lengths[places] = np.maximum(counts, 1)
            mask = features.get("attention_mask")
            is_left |= mask is not None and bool((mask[:, 0] == 0).any() and mask[:, -1].all())
        return _Measured(as_lengths(lengths), is_counted=True, is_left=is_left)

    def _read(self, places: list[int]) -> Mapping[str, Any]:
        """Return features of some inputs, as ``model.encode`` makes them."""
        prompt, name = self.options.get("prompt"), self.options.get("prompt_name")
        if prompt is None:
            name = self.model.default_prompt_name if name is None else name
            prompt = None if name is None else self.model.prompts.get(name)
        others = {key: value for key, value in self.options.items() if key not in _OWN}
        return self.model.preprocess([self.inputs[place] for place in places], prompt=prompt, **others)

    def pads_freely(self, lengths: npt.NDArray[np.int32]) -> bool:
        """Say whether a short text keeps its vector beside a longer one."""
        short = np.flatnonzero(lengths < lengths.max())
        if not len(short):
            return True
        # Of a text without words, zeros may be the mean with padding and without.
        telling = short[lengths[short] > _FEWEST]
        first = _shortest(telling if len(telling) else short, lengths)
        wide = np.flatnonzero(lengths >= min(lengths[first] + _NUM_PADS, lengths.max()))
        try:
            plain, padded = self._first([first]), self._first([first, _shortest(wide, lengths)])
        except Exception:  # whatever it is, the texts themselves will show it
            return False
        return is_rounding(plain, padded, self.model)

    def _first(self, places: list[int]) -> Tensor:
        """Return the result of the first of some texts as one row."""
        found: Tensor = self.encode(places, convert_to_numpy=False, convert_to_tensor=False)[0]
        return found.cpu().reshape(1, -1)


def _shortest(places: npt.NDArray[np.int64], lengths: npt.NDArray[np.int32]) -> int:
    return int(places[lengths[places].argmin()])


def _num_letters(item: Any) -> int | None:
    """Return the letters of a text, a pair or a conversation, None if there is anything else in it."""
    if isinstance(item, str):
        return len(item)
    parts = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else (None,)
    sizes = [None if part is None else _num_letters(part) for part in parts]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _counts(features: Mapping[str, Any], num: int) -> npt.NDArray[np.int64] | None:
    """Return the tokens of each input, None if the model does not say."""
    ends = features.get("cu_seq_lens_q")  # texts side by side in one row
    if isinstance(ends, Tensor) and len(ends) == num + 1:
        return ends.diff().cpu().numpy().astype(np.int64)
    mask = features.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) == num:
        return mask.sum(1).cpu().numpy().astype(np.int64)
    return None


@final
class _Run:
    """Encodes batches, and keeps what the model returned by places."""

    def __init__(self, texts: _Texts, measured: _Measured, bar: ProgressBar) -> None:
        self._texts, self._measured, self._bar = texts, measured, bar
        self._found: Any = None
        options = texts.options
        self._precision = options.get("precision")
        self._is_tensor = bool(options.get("convert_to_tensor", False))
        self._is_vector = options.get("output_value", "sentence_embedding") == "sentence_embedding"
        # Vectors that are quantized together wait for it on the CPU.
        waits = self._is_vector and self._precision not in (None, "float32")
        self._others = {"convert_to_numpy": True, "convert_to_tensor": False} if waits else {}

    def __call__(self, places: list[int]) -> int:
        """Encode some inputs, and return how many fitted at once."""
        pieces = run_in_pieces(
            lambda chosen: self._texts.encode(chosen, **self._others),
            lambda start, stop: places[start:stop],
            len(places),
            describe=lambda place: self._measured.describe(places[place]),
        )
        stops = np.cumsum(pieces.counts)
        for stop, num, found in zip(stops, pieces.counts, pieces.results, strict=True):
            self._keep(places[stop - num : stop], found)
        self._bar.update(len(places))
        return pieces.size

    def _keep(self, places: list[int], found: Any) -> None:
        num = len(self._texts.inputs)
        if isinstance(found, list):
            self._found = [None] * num if self._found is None else self._found
            for place, row in zip(places, found, strict=True):
                self._found[place] = row.clone()  # a part of it would keep the padding of its batch
            return
        if self._found is None:
            shape = (num, *found.shape[1:])
            self._found = found.new_empty(shape) if isinstance(found, Tensor) else np.empty(shape, found.dtype)
        self._found[places] = found

    def result(self) -> Any:
        """Return everything in the order of the inputs, as ``model.encode`` returns it."""
        found = self._found
        if self._precision in (None, "float32"):
            return found
        found = quantize_embeddings(found, precision=self._precision)
        if self._is_vector and self._is_tensor:
            return torch.as_tensor(found)
        if self._is_vector and self._texts.options.get("convert_to_numpy", True):
            return found
        return list(torch.from_numpy(found) if isinstance(found, np.ndarray) else found)
