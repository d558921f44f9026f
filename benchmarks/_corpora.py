"""Corpora as lengths: tokens, words and characters of every text, without a tokenizer from a hub.

A word counts as 1.3 tokens, rounded up. Texts are cut to 512 tokens.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from _pairs import IntArray, digest

TOKENS_PER_WORD = 1.3
LONGEST = 512
MAX_EXAMPLES = 4_000


@final
@dataclass(frozen=True)
class Corpus:
    """The lengths of one corpus."""

    name: str
    tokens: IntArray
    words: IntArray
    chars: IntArray

    @property
    def longest(self) -> int:
        """Return the most tokens of a text."""
        return int(self.tokens.max())

    def describe(self) -> dict[str, Any]:
        """Return what a report says about it."""
        quantiles = np.quantile(self.tokens, [0.5, 0.9]).round().astype(int).tolist()
        return {
            "num_examples": len(self.tokens), "median": quantiles[0], "p90": quantiles[1], "longest": self.longest,
            "digest": digest(self.tokens),
        }  # fmt: skip


def load_corpora(folder: Path | None, max_examples: int = MAX_EXAMPLES) -> list[Corpus]:
    """Return the corpora in a folder and those that are drawn; a file that is not there is left out."""
    files = {name: entry for name, entry in _FILES.items() if folder is not None and (folder / entry[0]).exists()}
    found = [of_texts(name, list(read(folder / file)), max_examples) for name, (file, read) in files.items()]  # type: ignore[operator]
    return [*found, drawn("lognormal", 24, 0.8, max_examples), drawn("long tail", 12, 1.2, max_examples)]


def of_texts(name: str, texts: list[str], max_examples: int = MAX_EXAMPLES) -> Corpus:
    """Return the lengths of texts; of many, a sample spread evenly over the file.

    >>> of_texts("two", ["a b c", "d"]).tokens.tolist()
    [4, 2]
    """
    texts = texts[:: max(1, len(texts) // max_examples)][:max_examples]
    words = np.array([max(1, len(text.split())) for text in texts])
    chars = np.array([max(1, len(text)) for text in texts])
    return _cut(name, words, chars)


def drawn(name: str, median: float, sigma: float, num_examples: int) -> Corpus:
    """Return lognormal lengths of words; a word and its space have six characters."""
    words = np.exp(np.random.default_rng(0).normal(np.log(median / TOKENS_PER_WORD), sigma, num_examples))
    words = np.maximum(1, words.round()).astype(np.int64)
    return _cut(name, words, 6 * words)


def _cut(name: str, words: IntArray, chars: IntArray) -> Corpus:
    kept = np.minimum(words, int(LONGEST / TOKENS_PER_WORD))
    tokens = np.ceil(kept * TOKENS_PER_WORD).astype(np.int64)
    return Corpus(name, tokens, kept, np.maximum(1, chars * kept // words))


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a compressed file that are not blank."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        yield from (line for line in (line.rstrip("\n") for line in file) if line.strip())


def _sources(path: Path) -> Iterator[str]:
    yield from (line.split("\t")[0] for line in read_lines(path))


def _field(*names: str) -> Callable[[Path], Iterator[str]]:
    def read(path: Path) -> Iterator[str]:
        for line in read_lines(path):
            row = json.loads(line)
            yield " ".join(row[name] for name in names)

    return read


_FILES: dict[str, tuple[str, Callable[[Path], Iterator[str]]]] = {
    "europarl10k": ("europarl10k-en-de.tsv.gz", _sources),
    "tatoeba": ("tatoeba-en-de.tsv.gz", _sources),
    "movie-reviews": ("movie-reviews.jsonl.gz", _field("text")),
    "wikitext2": ("wikitext2-raw-valid.txt.gz", read_lines),
    "instruct-mix": ("instruct-mix.jsonl.gz", _field("prompt", "response")),
    "clinc150": ("clinc150.jsonl.gz", _field("text")),
}
