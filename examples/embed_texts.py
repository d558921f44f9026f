"""Embeddings: texts of all lengths through an encoder, in batches that fit, with vectors in the order of the texts.

    python examples/embed_texts.py

You see how many tokens an encoder reads for batches of 32 texts as they come and for planned ones, and that the vectors
are those of each text on its own. A stand-in for a small memory refuses batches above 1,024 tokens, fewer than planned:
``oom_safe`` runs those in halves. Change ``encode`` to your encoder and ``MaxTokens`` to what your device holds.
"""

import sys
from collections.abc import Callable

import torch
from texts import VOCABULARY, read_texts, to_ids
from torch import Tensor
from transformers import BertConfig, BertModel

import batchwright as bw
from batchwright.step import PadCollator, oom_safe


def make_encode(model: BertModel, seen: list[int]) -> Callable[[list[list[int]]], Tensor]:
    """Return a function from texts to vectors, the mean over the words of each; it notes how many tokens it reads."""

    def encode(texts: list[list[int]]) -> Tensor:
        batch = PadCollator()([{"input_ids": ids} for ids in texts])
        if batch["input_ids"].numel() > 1024:  # a GPU says so by itself
            raise torch.OutOfMemoryError("CUDA out of memory")
        seen.append(batch["input_ids"].numel())
        mask = batch["attention_mask"][..., None]
        return (model(**batch).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)

    return encode


def main(quick: bool = False) -> dict[str, float]:
    """Embed in three ways, print and return the figures."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=VOCABULARY, **shape), add_pooling_layer=False).eval()
    texts = [to_ids(text) for text in read_texts(100 if quick else 1000)]
    numbers, vectors, tokens = range(len(texts)), {}, {}
    plans = {
        "as they come": [list(numbers[start : start + 32]) for start in numbers[::32]],
        "planned": bw.plan_batches(list(map(len, texts)), bw.MaxTokens(2048), grouping=bw.Sorted()),
        "one by one": [[number] for number in numbers],
    }
    for name, plan in plans.items():
        seen, vectors[name] = [], torch.zeros(len(texts), 64)  # a place per text, in the order of the data
        for batch in plan:
            vectors[name][batch] = oom_safe(make_encode(model, seen), [texts[index] for index in batch])
        tokens[name] = sum(seen)
        print(f"{name:>12}: {len(plan):>4} batches, run in {len(seen):>4}, {tokens[name]:>7,} tokens read")
    apart = float((vectors["planned"] - vectors["one by one"]).abs().max())
    print(f"vectors of planned batches differ from those of single texts by {apart:.0e} at most")
    return {"apart": apart, **tokens}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
