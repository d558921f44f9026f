"""Measure once how many tokens every text has."""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sized
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..._checks import as_flag, as_whole, is_whole
from ..._progress import ProgressBar
from ..._types import MAX_INT32
from ...errors import ArgumentError, BatchwrightError, LengthsError
from ._cache import ContentHash, LengthCache
from ._examples import choose, describe, num_sides_of_ids, num_sides_of_text
from ._tokenizers import IdCounter, TokenCounter, adapt, brief

if TYPE_CHECKING:
    from concurrent.futures import Future

Lengths: TypeAlias = npt.NDArray[np.int32]
Probes: TypeAlias = dict[int, Any]

# Enough that no worker waits for the reader, few enough that a stream is never held in memory.
BATCHES_IN_FLIGHT_PER_WORKER = 3
# Texts that are counted again before cached lengths are used.
NUM_PROBES = 16


class TextBatch(NamedTuple):
    """Neighbouring examples, checked: each is one text, or each is a pair."""

    num_sides: int
    examples: list[Any]

    def texts(self) -> list[str]:
        """Return all texts, one side after the other."""
        if self.num_sides == 1:
            return self.examples
        return [pair[side] for side in range(self.num_sides) for pair in self.examples]


def measure_lengths(
    texts: Any,
    tokenizer: Any = None,
    *,
    column: str | tuple[str, str] | None = None,
    max_length: int | None = None,
    num_workers: int = 0,
    batch_size: int = 1000,
    progress: bool = True,
    cache: str | os.PathLike[str] | None = None,
) -> Lengths:
    """Count the tokens of every text, special tokens included: ``len(tokenizer(text)["input_ids"])``.

    Texts are read and counted in batches; the ids of a batch are dropped before the next. An example without any
    token has length 0, which ``plan_batches`` refuses by position: drop it, or count it as 1 with
    ``np.maximum(lengths, 1)``.

    Without a tokenizer, token ids are counted: lists, arrays or tensors of whole numbers, one per example, without
    padding. A list of two lists of ids is two examples; a pair is a tuple, ``(source_ids, target_ids)``.

    Args:
        texts: an iterable of str, or of pairs ``(source, target)`` whose sides are counted each on its own; or a table
            with named columns: a DataFrame, a pyarrow table, a ``datasets.Dataset``, a dict of columns, rows as dicts.
        tokenizer: a tokenizer of transformers (fast or slow), a ``tokenizers.Tokenizer``, or a function from
            str to int or to a sequence, e.g. ``str.split``. A ``tokenizers.Tokenizer`` is left as it is; its
            padding is not counted, and its own truncation holds where ``max_length`` is None.
            None counts token ids.
        column: the column of a table to measure, or a pair of columns, ``("source", "target")``. A table with a single
            column needs no name.
        max_length: count as ``tokenizer(text, truncation=True, max_length=max_length)`` does, or at most this
            many for a function and for ids; None does not truncate.
        num_workers: processes that count; 0 counts here, where a fast tokenizer uses all cores already. They
            start as ``multiprocessing`` is set to start them, and the tokenizer must pickle.
        batch_size: texts per call of the tokenizer. It changes the speed, never the lengths.
        progress: show a bar on stderr.
        cache: a directory for the lengths, or None. They are found again by the texts, the tokenizer and
            ``max_length``. An iterable that is not a sequence is gathered into a list first. A function or object
            is known by its code, its class, its state and all that these hold, installed packages by their
            version; one that holds what cannot be described, such as an open file, is refused. A file that a
            function reads is not seen, nor what it imports: so 16 of the texts are counted again with every use, and
            all of them, with a warning, where one count differs. Token ids are always counted again: that is
            faster than to look them up.

    Returns:
        ``int32`` of shape ``(N,)``, or ``(N, 2)`` for pairs, in the order of the texts.

    >>> measure_lengths(["a b", "a b c"], str.split, progress=False).tolist()
    [2, 3]
    >>> measure_lengths([("a b", "x"), ("c", "x y z")], str.split, max_length=2, progress=False).tolist()
    [[2, 1], [1, 2]]
    >>> measure_lengths({"id": [7, 8], "text": ["a b", "c"]}, str.split, column="text", progress=False).tolist()
    [2, 1]
    >>> measure_lengths([[101, 7, 102], [101, 102]], progress=False).tolist()
    [3, 2]
    """
    num_workers = as_whole("num_workers", num_workers, least=0)
    batch_size = as_whole("batch_size", batch_size, least=1)
    progress = as_flag("progress", progress)
    if max_length is not None:
        max_length = as_whole("max_length", max_length, least=1)
    texts = choose(texts, column)
    if tokenizer is None:
        return _measure(texts, IdCounter(max_length), b"", 0, batch_size, progress)
    counter = adapt(tokenizer, max_length)
    # What cannot reach a worker is said now, not after the texts were hashed.
    payload = _pickled(counter) if num_workers else b""
    store = None if cache is None else LengthCache.open(cache)
    if store is None:
        return _measure(texts, counter, payload, num_workers, batch_size, progress)

    content = ContentHash().add(counter.identity()).add(repr(max_length).encode())
    if not (hasattr(texts, "__len__") and hasattr(texts, "__getitem__")):
        texts = list(texts)
    key, shape, probes = _add_texts(content, texts, counter, batch_size)
    lengths = store.load(key, shape)
    if lengths is None or not _are_still_right(lengths, probes, counter):
        lengths = _measure(texts, counter, payload, num_workers, batch_size, progress)
        store.save(key, lengths)
    return lengths


def _measure(
    texts: Iterable[Any],
    counter: TokenCounter,
    payload: bytes,
    num_workers: int,
    batch_size: int,
    progress: bool,
) -> Lengths:
    total = _num_examples(texts)
    batches = _read_batches(texts, batch_size, counter)
    counts = _count_in_pool(batches, payload, num_workers) if num_workers else _count_here(batches, counter)
    parts = []
    # Closing ends the workers at once when anything here fails or is interrupted.
    with ProgressBar(label="measuring lengths", total=total, enabled=progress) as bar, closing(counts):
        for part in counts:
            parts.append(part)
            bar.update(len(part))
    return np.concatenate(parts)


def _num_examples(texts: Iterable[Any]) -> int | None:
    try:
        return len(texts) if isinstance(texts, Sized) else None
    except TypeError:  # a column of an iterable table
        return None


def _count_here(batches: Iterator[TextBatch], counter: TokenCounter) -> Generator[Lengths, None, None]:
    for batch in batches:
        yield _count_batch(counter, batch)


def _count_batch(counter: TokenCounter, batch: TextBatch) -> Lengths:
    """Return the lengths of a batch, one row per example."""
    texts = batch.texts()
    found = counter.count(texts)
    if max(found) > MAX_INT32:
        place = found.index(max(found))
        raise LengthsError(
            f"lengths must be at most {MAX_INT32}, the tokenizer returned {found[place]} for the text "
            f"{brief(texts[place])}; return the number of tokens"
        )
    counts = np.array(found, dtype=np.int32)
    return counts if batch.num_sides == 1 else np.ascontiguousarray(counts.reshape(batch.num_sides, -1).T)


def _read_batches(texts: Iterable[Any], batch_size: int, counter: TokenCounter) -> Iterator[TextBatch]:
    """Cut the texts into batches and refuse the first example that is not like the others."""
    examples = iter(texts)
    start = num_sides = 0
    while chunk := list(islice(examples, min(batch_size, sys.maxsize))):
        num_sides = num_sides or counter.num_sides(chunk[0])
        for offset, example in enumerate(chunk):
            if num_sides == 0 or counter.num_sides(example) != num_sides:
                raise _not_like_the_others(example, start + offset, num_sides, of_ids=isinstance(counter, IdCounter))
        yield TextBatch(num_sides, chunk)
        start += len(chunk)
    if start == 0:
        raise LengthsError("texts is empty; there is nothing to measure")


def _not_like_the_others(example: Any, number: int, num_sides: int, *, of_ids: bool) -> LengthsError:
    if of_ids:
        expected = ("token ids, or all tuples of two", "token ids", "tuples of two sequences of ids")[num_sides]
        advice = "texts need a tokenizer" if num_sides_of_text(example) else "give each as a flat list of whole numbers"
        if is_whole(example):
            advice += "; numbers that are lengths already need no measuring"
        return LengthsError(
            f"without a tokenizer token ids are counted: examples must be all {expected}, got {describe(example)} at "
            f"example {number}; {advice}"
        )
    expected = ("str, or all pairs of two str", "str", "pairs of two str")[num_sides]
    advice = "name or pass the column of texts, e.g. column='text' or [row['text'] for row in data]"
    if example is None or (isinstance(example, float) and math.isnan(example)):
        advice = "that text is missing: fill it in, e.g. with '', or leave that example out, of the data too"
    if isinstance(example, bytes):
        advice = "decode it, e.g. with .decode('utf-8')"
    if is_whole(example):
        advice += "; numbers that are lengths already need no measuring"
    if num_sides_of_ids(example):
        advice = "ids are counted without a tokenizer, measure_lengths(ids, None)"
    return LengthsError(f"texts must be all {expected}, got {describe(example)} at example {number}; {advice}")


def _add_texts(
    content: ContentHash, texts: Any, counter: TokenCounter, batch_size: int
) -> tuple[str, tuple[int, ...], Probes]:
    """Return the key with the texts, the shape their lengths will have, and a few of the texts by their place."""
    places = set(np.linspace(0, len(texts) - 1, NUM_PROBES, dtype=int).tolist())
    probes: Probes = {}
    num_examples = num_sides = 0
    for batch in _read_batches(texts, batch_size, counter):
        if num_examples == 0:
            content.add(str(batch.num_sides).encode())
        num_sides = batch.num_sides
        for place, example in enumerate(batch.examples, start=num_examples):
            content.add_texts((example,) if num_sides == 1 else example)
            if place in places:
                probes[place] = example
        num_examples += len(batch.examples)
    return content.key(), (num_examples,) if num_sides == 1 else (num_examples, num_sides), probes


def _are_still_right(lengths: Lengths, probes: Probes, counter: TokenCounter) -> bool:
    """Count a few texts again and compare: no description of a tokenizer sees the files it reads."""
    counts = _count_batch(counter, TextBatch(lengths.ndim, list(probes.values())))
    different = (counts != lengths[list(probes)]).reshape(len(probes), -1).any(axis=1)
    if different.any():
        place = list(probes)[int(different.argmax())]
        warnings.warn(
            f"the tokenizer counts example {place} otherwise than when its lengths were cached, so it reads something "
            "that changed and is not part of it; measuring again",
            stacklevel=3,
        )
    return not different.any()


def _pickled(counter: TokenCounter) -> bytes:
    try:
        return pickle.dumps(counter)
    except Exception as error:  # a failing pickle raises nearly anything
        raise ArgumentError(
            f"the tokenizer cannot be sent to worker processes ({error}); "
            "pass num_workers=0, or a function defined at the top of a module"
        ) from error


def _count_in_pool(batches: Iterator[TextBatch], payload: bytes, num_workers: int) -> Generator[Lengths, None, None]:
    """Count batches in processes, in order, with a bounded number of them under way."""
    # Here, because few call this and the two take a tenth as long to import as NumPy does.
    import multiprocessing
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

    context = multiprocessing.get_context()
    waiting: deque[Future[Lengths]] = deque()
    with _sequential_tokenizers():
        pool = ProcessPoolExecutor(num_workers, context, initializer=_start_worker, initargs=(payload,))
        try:
            for batch in batches:
                waiting.append(pool.submit(_count_in_worker, batch))
                if len(waiting) > BATCHES_IN_FLIGHT_PER_WORKER * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise BatchwrightError(
                "a worker process ended before its work; put what the script runs under "
                "`if __name__ == '__main__':`, use fewer workers if memory ran out, or pass num_workers=0"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _sequential_tokenizers() -> Iterator[None]:
    """Make tokenizers in child processes use one thread each: threads do not survive a fork."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# Set once in each worker process, by its initializer.
_worker_counter: TokenCounter | ArgumentError | None = None


def _start_worker(payload: bytes) -> None:
    global _worker_counter
    # The parent is the one to answer an interrupt; otherwise every worker prints a traceback of its own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _worker_counter = pickle.loads(payload)
    except Exception as error:  # kept for the first batch: an error here would only break the pool, without its reason
        _worker_counter = ArgumentError(
            f"the tokenizer cannot be loaded in a worker process ({error}); "
            "define it in a module that can be imported, or pass num_workers=0"
        )


def _count_in_worker(batch: TextBatch) -> Lengths:
    if isinstance(_worker_counter, ArgumentError):
        raise _worker_counter
    assert _worker_counter is not None
    return _count_batch(_worker_counter, batch)
