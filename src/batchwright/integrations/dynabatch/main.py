"""``dynabatch_sampler`` and ``build_dynabatch_dataloader``: from texts to batches. The names are dynabatch's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset

from ..._checks import as_flag, as_whole, shared_options
from ..._machine import num_cores
from ...errors import ArgumentError, LengthsError
from ...plan.models.prior import Task
from ._given import as_whole_numbers
from ._signatures import arguments_of
from .lengths import as_rows, as_texts, measure_tokens, truncated
from .lengths import compute_lengths as compute_lengths
from .sampler import DynaBatchSampler


def dynabatch_sampler(
    texts: Iterable[str],
    tokenizer: Any,
    batch_size: int,
    max_input_token_length: int = 512,
    threshold: float = 0.9,
    max_batch_range: float = 2.0,
    shuffle: bool = False,
    shuffle_seed: int = 21,
    shuffle_keep_first_n: int = 3,
    friendly_batch_size: bool = False,
    keep_batch_size_even: bool = True,
    num_workers: int = 4,
    debug: bool = False,
    dynamic_batch_mode: bool = True,
    smooth_batches: bool = True,
    smooth_batches_max_diff: float = 0.2,
    save_input_features: bool = False,
    token_lengths: Any = None,
    word_lengths: Any = None,
    char_lengths: Any = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    task: Task | None = None,
    max_new_tokens: int | None = None,
    drop_last: bool = False,
    progress: bool = True,
    cache: str | os.PathLike[str] | None = None,
) -> DynaBatchSampler:
    """Make a batch sampler of texts: longest first, and larger batches as they get shorter.

    Args:
        texts: one string per example, in the order of the data set.
        tokenizer: a tokenizer of transformers; may be None if ``token_lengths`` are given.
        batch_size: items of the first batch: the most of the longest texts that run safely.
        max_input_token_length: texts count as cut to this many tokens. Given lengths are not cut.
        num_workers: the largest number of processes that measure with a slow tokenizer; ``debug`` uses none.
        token_lengths: lengths measured already, one per example; then no text is read. An empty text counts as one
            token, given or measured.
        word_lengths: not needed, and of no effect on the batches: the memory of a device depends only on tokens.
        char_lengths: likewise.
        progress: show a progress bar while texts are measured.
        cache: a directory that keeps measured lengths for the next run, or None.
        threshold: this and all other arguments are as for ``DynaBatchSampler``.

    >>> sampler = dynabatch_sampler(["a"] * 3, None, batch_size=2, token_lengths=[5, 9, 7])
    >>> list(sampler)
    [[1, 2], [0]]
    """
    options = shared_options(DynaBatchSampler, locals())
    options["min_batch_size"] = as_whole("batch_size", batch_size, least=1)
    if token_lengths is None:
        _refuse_without_tokens(word_lengths, char_lengths)
        workers = 0 if as_flag("debug", debug) else num_workers
        options["token_lengths"] = measure_tokens(
            as_texts(texts), tokenizer, max_input_token_length, workers, progress=progress, cache=cache
        )
    else:
        options["token_lengths"] = _check_given(token_lengths, texts, max_input_token_length)
    return DynaBatchSampler(**options)


def build_dynabatch_dataloader(
    texts: Iterable[str],
    tokenizer: Any,
    batch_size: int,
    max_input_token_length: int = 512,
    threshold: float = 0.9,
    max_batch_range: float = 2.0,
    shuffle: bool = False,
    shuffle_seed: int = 21,
    shuffle_keep_first_n: int = 3,
    friendly_batch_size: bool = False,
    keep_batch_size_even: bool = True,
    num_workers: int = 4,
    debug: bool = False,
    dynamic_batch_mode: bool = True,
    smooth_batches: bool = True,
    smooth_batches_max_diff: float = 0.2,
    save_input_features: bool = False,
    token_lengths: Any = None,
    word_lengths: Any = None,
    char_lengths: Any = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    task: Task | None = None,
    max_new_tokens: int | None = None,
    drop_last: bool = False,
    progress: bool = True,
    cache: str | os.PathLike[str] | None = None,
    **tokenizer_kwargs: Any,
) -> DataLoader[Any]:
    """Make a loader of padded token ids: the batches of ``dynabatch_sampler``, tokenized when they are asked for.

    A batch is what the tokenizer returns with ``padding=True, return_tensors="pt"``, with its texts under ``"texts"``,
    cut to ``max_input_token_length`` if lengths were measured here. Where a cut text would have other tokens than the
    tokenizer gives when it cuts, the text stays whole, and only its tokens are cut.

    Args:
        num_workers: also the largest number of worker processes of the loader.
        **tokenizer_kwargs: further arguments of the tokenizer, such as ``padding_side="left"``.
        texts: this and all other arguments are as for ``dynabatch_sampler``.
    """
    options = shared_options(dynabatch_sampler, locals())
    texts = as_texts(texts) if token_lengths is None else as_rows(texts)
    workers = 0 if as_flag("debug", debug) else min(num_cores(), as_whole("num_workers", num_workers, least=0))
    if token_lengths is None:
        _refuse_without_tokens(word_lengths, char_lengths)
        limit = max_input_token_length
        token_lengths = measure_tokens(texts, tokenizer, limit, workers, progress=progress, cache=cache)
        # A text cut inside a word may have other tokens than before: it stays whole, for the tokenizer to cut.
        tokenizer_kwargs = {"truncation": True, **tokenizer_kwargs}
        is_cut_again = (
            bool(tokenizer_kwargs["truncation"]) and tokenizer_kwargs.setdefault("max_length", limit) == limit
        )
        texts = truncated(texts, token_lengths, tokenizer, limit, exact=is_cut_again)
    sampler = dynabatch_sampler(**{**options, "texts": texts, "token_lengths": token_lengths})
    return DataLoader(
        TextDataset(texts),
        batch_sampler=sampler,
        collate_fn=TextCollator(tokenizer, {"padding": True, "return_tensors": "pt", **tokenizer_kwargs}),
        num_workers=workers,
        worker_init_fn=_start_worker if workers else None,
    )


@final
class TextDataset(Dataset[dict[str, str]]):
    """Texts as examples ``{"text": …}``."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"text": self.texts[index]}


@final
@dataclass(frozen=True)
class TextCollator:
    """Tokenizes and pads the texts of a batch, and returns them together with the texts."""

    tokenizer: Any
    tokenizer_kwargs: dict[str, Any]

    def __call__(self, examples: list[dict[str, str]]) -> Any:
        """Return what the tokenizer returns, with ``"texts"``."""
        texts = [example["text"] for example in examples]
        # By name, as in dynabatch: of a processor for images and texts, the images come first.
        arguments = arguments_of(self.tokenizer)
        if "text" in arguments.names or not arguments.names:
            batch = self.tokenizer(text=texts, **self.tokenizer_kwargs)
        else:
            batch = self.tokenizer(texts, **self.tokenizer_kwargs)
        batch["texts"] = texts
        return batch


def _start_worker(worker: int) -> None:
    # Only in a worker process: the threads of a tokenizer do not survive the fork that made it.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _check_given(token_lengths: Any, texts: Any, max_length: int) -> npt.NDArray[Any]:
    """Return given lengths as an array that matches the texts; warn of those over the limit, as nothing cuts them."""
    lengths = as_whole_numbers("token_lengths", token_lengths)
    num_texts = len(texts) if hasattr(texts, "__len__") else len(lengths)
    if len(lengths) != num_texts:
        raise LengthsError(f"token_lengths must have one number per text, {num_texts}, got {len(lengths)}")
    max_length = as_whole("max_input_token_length", max_length, least=1)
    num_long = int(np.count_nonzero(lengths > max_length))
    if num_long:
        warnings.warn(
            f"{num_long} of the given token_lengths are over max_input_token_length={max_length}, the longest is "
            f"{int(lengths.max())}; they are planned as given, so cut the texts or raise the limit",
            stacklevel=3,
        )
    return lengths


def _refuse_without_tokens(word_lengths: Any, char_lengths: Any) -> None:
    if word_lengths is not None or char_lengths is not None:
        raise ArgumentError("word_lengths and char_lengths need token_lengths too; give those, or none of the three")
