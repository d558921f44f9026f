"""Serving: requests come one by one and are answered in batches, and a bad request fails alone.

    python examples/serve_requests.py

You see an encoder answer many requests that come at once, one by one and in batches of texts of similar length. Answers
are the same, and only the one text that has no vector gets an error. Change ``encode`` to your model and pass
``deadline_ms``, the time that a request may take. Over HTTP: ``batchwright serve my_module:encode --deadline-ms 50``.
"""

import asyncio
import sys
import time
from typing import Any

import torch
from texts import VOCABULARY, read_texts, to_ids
from torch import nn

from batchwright.serve import Batcher
from batchwright.step import PadCollator

torch.manual_seed(0)
LAYER = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
MODEL, EMBED = nn.TransformerEncoder(LAYER, 4, enable_nested_tensor=False).eval(), nn.Embedding(VOCABULARY, 64)


@torch.inference_mode()
def encode(texts: list[str]) -> list[list[float]]:
    """Return a vector per text: a list in, a list out."""
    if "" in texts:
        raise ValueError("an empty text has no vector")
    batch = PadCollator()([{"input_ids": to_ids(text)} for text in texts])
    states = MODEL(EMBED(batch["input_ids"]), src_key_padding_mask=batch["attention_mask"] == 0)
    return states[:, 0].tolist()


async def serve(texts: list[str], **options: Any) -> tuple[list[Any], float, Any]:
    """Send all texts at once; return the answers or errors, the seconds, and the figures of the batcher."""
    async with Batcher(encode, **options) as batcher:
        began = time.perf_counter()
        answers = await asyncio.gather(*(batcher.submit(text) for text in texts), return_exceptions=True)
        return answers, time.perf_counter() - began, batcher.stats()


def main(quick: bool = False) -> dict[str, Any]:
    """Answer the same requests twice, print and return the figures."""
    texts, found = ["", *read_texts(60 if quick else 600)], {}
    for name, options in {"one by one": {"max_items": 1}, "in batches": {"max_items": 32}}.items():
        answers, seconds, stats = asyncio.run(serve(texts, **options))
        found[name] = answers
        failed = [text for text, answer in zip(texts, answers, strict=True) if isinstance(answer, Exception)]
        print(f"{name}: {stats.num_answered} answers in {seconds:.2f} s, {stats.num_calls} calls; failed: {failed}")
    pairs = zip(*(map(torch.tensor, answers[1:]) for answers in found.values()), strict=True)
    apart = max(float((alone - together).abs().max()) for alone, together in pairs)
    print(f"the vectors of both differ by {apart:.0e} at most")
    return {"apart": apart, "answers": found, "num_calls": stats.num_calls, "num_texts": len(texts)}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
