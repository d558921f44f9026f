"""Corpora from real texts, a byte-level BPE of their own, and the orders that other packages give their examples.

Runs where `tokenizers`, `transformers` and `dynabatch` are installed; a GPU machine then needs only the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from _corpora import read_lines

from .corpus import END, START, Corpus, IntArray, Part, Texts, Update

NUM_HELD_OUT = {"translation": 1_000, "decoder": 942}
VOCABULARY = {"translation": 8_000, "decoder": 16_000}
LONGEST = {"translation": 255, "decoder": 512}
PAIRS = {"tatoeba-en-de.tsv.gz": 29_000, "europarl10k-en-de.tsv.gz": 4_000, "pythondocs-en-es.tsv.gz": 7_000}
SEEDS = (0, 1, 2)
FIXED_SIZES, FIRST_BATCHES, REBALANCED = (32, 128), (16, 64), ((64, 4),)
RANGE = 5.0  # how far dynabatch may grow its first batch


def prepare(task: str, folder: Path, *, with_peers: bool = True) -> Corpus:
    """Return the corpus of a task, in a fixed random order, with the orders of peers if they are wanted."""
    texts = list(_pairs(folder) if task == "translation" else _instructions(folder))
    texts = [texts[place] for place in np.random.default_rng(0).permutation(len(texts))]
    columns = _encode(task, texts)
    corpus = Corpus(task, columns, VOCABULARY[task], NUM_HELD_OUT[task])
    if not with_peers:
        return corpus
    first = [text[0] for text in texts[: -corpus.num_held_out]]
    return add_orders(corpus, np.array([len(text.split()) for text in first]), np.array([len(text) for text in first]))


def prepare_lengths(folder: Path) -> IntArray:
    """Return lengths of 40,000 real pairs of three corpora, German or Spanish to English, cut at 512 tokens."""
    return prepare_pairs(folder).lengths


def prepare_pairs(folder: Path, *, first_batch: int | None = None) -> Corpus:
    """Return 40,000 real pairs of three corpora, German or Spanish to English, cut at 512 tokens, and some held out.

    Args:
        folder: of the corpora.
        first_batch: the size of dynabatch's first batch, and of the parts of ``batch_rebalance``, whose batches are
            kept with the pairs; None keeps none.
    """
    rng = np.random.default_rng(0)
    pairs: list[list[str]] = []
    held_out: list[list[str]] = []
    for name, num in PAIRS.items():
        found = [line.split("\t")[1::-1] for line in read_lines(folder / name)]
        places = rng.permutation(len(found))
        pairs += [found[place] for place in places[:num]]
        held_out += [found[place] for place in places[num : num + num // 100]]
    tokenizer = train_bpe((text for pair in pairs for text in pair), 8_000)
    pairs = [*(pairs[place] for place in rng.permutation(len(pairs))), *held_out]
    columns = tuple(
        Texts.of([[*row.ids[:511], END] for row in tokenizer.encode_batch([pair[side] for pair in pairs])])
        for side in (0, 1)
    )
    corpus = Corpus("translation", columns, 8_000, len(held_out))
    return corpus if first_batch is None else with_batches(corpus, [pair[0] for pair in pairs], first_batch)


def with_batches(corpus: Corpus, texts: list[str], size: int) -> Corpus:
    """Return the corpus with the batches of dynabatch and of ``batch_rebalance`` for the Trainer."""
    lengths, first = corpus.lengths[:, 0], texts[: len(corpus.lengths)]
    words, chars = np.array([len(text.split()) for text in first]), np.array([len(text) for text in first])
    orders = planned_by_dynabatch(lengths, words, chars, size, seeds=(0,))
    for name, found in rebalanced_by_transformers(lengths, 4 * size, 4, seeds=(0,)).items():
        orders[name.replace(f"-{4 * size}-", f"-{size}-", 1)] = found  # named by the size of a part, as in the Trainer
    return Corpus(corpus.task, corpus.columns, corpus.vocabulary, corpus.num_held_out, orders)


def add_orders(corpus: Corpus, words: IntArray, chars: IntArray, *, small: bool = False) -> Corpus:
    """Return the corpus with the orders of every peer that is installed here."""
    lengths = corpus.lengths[:, 0]  # of the source, as these packages take them
    orders: dict[str, list[Update]] = {}
    for size in (8,) if small else FIXED_SIZES:
        orders |= grouped_by_transformers(lengths, size)
    for size, parts in ((8, 2),) if small else REBALANCED:
        orders |= rebalanced_by_transformers(lengths, size, parts)
    for size in (4,) if small else FIRST_BATCHES:
        orders |= planned_by_dynabatch(lengths, words, chars, size)
    return Corpus(corpus.task, corpus.columns, corpus.vocabulary, corpus.num_held_out, orders)


def grouped_by_transformers(lengths: IntArray, size: int) -> dict[str, list[Update]]:
    """Return the batches of ``train_sampling_strategy="group_by_length"``."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    orders: dict[str, list[Update]] = {}
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        sampler = LengthGroupedSampler(size, lengths=lengths.tolist(), generator=generator)
        for epoch in (0, 1):
            order = np.fromiter(sampler, dtype=np.int64)
            orders[f"group_by_length-{size}/{seed}/{epoch}"] = [
                (Part(order[start : start + size]),) for start in range(0, len(order), size)
            ]
    return orders


def rebalanced_by_transformers(
    lengths: IntArray, size: int, parts: int, *, seeds: Iterable[int] = SEEDS
) -> dict[str, list[Update]]:
    """Return the batches of ``train_sampling_strategy="batch_rebalance"``, which balances the parts of an update."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    orders: dict[str, list[Update]] = {}
    for seed in seeds:
        sampler = BatchRebalanceSampler(lengths.tolist(), size, 1, parts, seed=42 + 100 * seed, drop_last=True)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            batches = [Part(np.array(batch)) for batch in sampler]
            orders[f"batch_rebalance-{size}-{parts}/{seed}/{epoch}"] = [
                tuple(batches[start : start + parts]) for start in range(0, len(batches), parts)
            ]
    return orders


def planned_by_dynabatch(
    lengths: IntArray, words: IntArray, chars: IntArray, size: int, *, seeds: Iterable[int] = SEEDS
) -> dict[str, list[Update]]:
    """Return dynabatch's own batches, shuffled by itself; its first batch has ``size`` texts."""
    from dynabatch import dynabatch_sampler  # type: ignore[import-untyped]

    sampler = dynabatch_sampler(
        texts=[""] * len(lengths), tokenizer=None, num_workers=1, token_lengths=lengths.tolist(),
        word_lengths=np.maximum(1, words).tolist(), char_lengths=np.maximum(1, chars).tolist(),
        batch_size=size, max_batch_range=RANGE, shuffle=True,
    )  # fmt: skip
    orders: dict[str, list[Update]] = {}
    for seed in seeds:
        for epoch in (0, 1):  # it makes the same batches in every epoch and shuffles their order
            orders[f"dynabatch-{size}/{seed}/{epoch}"] = [(Part(np.array(batch)),) for batch in sampler]
    return orders


def train_bpe(texts: Iterable[str], vocabulary: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """Return a byte-level BPE trained on texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(task: str, texts: list[tuple[str, ...]]) -> tuple[Texts, ...]:
    # Held-out texts are not seen by the tokenizer either.
    trained_on = (text for row in texts[: -NUM_HELD_OUT[task]] for text in row)
    tokenizer = train_bpe(trained_on, VOCABULARY[task])
    most, first = LONGEST[task], [START] if task == "decoder" else []
    columns = []
    for side in range(len(texts[0])):
        found = tokenizer.encode_batch([row[side] for row in texts])
        columns.append(Texts.of([[*[*first, *row.ids][: most - 1], END] for row in found]))
    return tuple(columns)


def _pairs(folder: Path) -> Iterator[tuple[str, ...]]:
    for line in read_lines(folder / "pythondocs-en-es.tsv.gz"):
        yield tuple(line.split("\t")[:2])


def _instructions(folder: Path) -> Iterator[tuple[str, ...]]:
    for line in read_lines(folder / "instruct-mix.jsonl.gz"):
        row = json.loads(line)
        yield (f"### Instruction:\n{row['prompt']}\n\n### Response:\n{row['response']}",)
