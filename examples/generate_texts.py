"""Generation: any number of prompts in batches that fit, each continued as it would be on its own.

    python examples/generate_texts.py

You see prompts of up to 64 words continued one by one and in batches: the same words, in the order of the prompts, and
how many seconds it took. Then a stand-in for a small memory refuses batches of more than 8: they are split, and the
words stay the same. Change the model; a ``budget`` from ``calibrate`` fills a GPU from the first batch on.
"""

import sys
import time
from typing import Any

import torch
from texts import VOCABULARY, read_texts, to_ids
from transformers import LlamaConfig, LlamaForCausalLM

import batchwright as bw
from batchwright.step import generate


class SmallMemory(LlamaForCausalLM):
    """Runs out of memory above 8 rows, as a GPU would above some number; on a GPU, leave it out."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Count the rows, then run."""
        rows = len(kwargs["input_ids"])
        if rows > 8:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {rows} rows")
        return super().forward(*args, **kwargs)


def main(quick: bool = False) -> dict[str, Any]:
    """Generate in three ways, print and return the figures."""
    torch.manual_seed(0)
    prompts = [to_ids(text, longest=64) for text in read_texts(48 if quick else 400)]
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=1, pad_token_id=0, **shape)
    model, small = LlamaForCausalLM(config).eval(), SmallMemory(config).eval()
    small.load_state_dict(model.state_dict())
    options = {"max_new_tokens": 16, "do_sample": False}

    began = time.perf_counter()
    alone = [generate(model, [prompt], **options)[0].tolist() for prompt in prompts]
    middle = time.perf_counter()
    together = [ids.tolist() for ids in generate(model, prompts, budget=bw.MaxTokens(2048), **options)]
    ended = time.perf_counter()
    split = [ids.tolist() for ids in generate(small, prompts, budget=bw.MaxTokens(2048), **options)]
    print(f"{len(prompts)} prompts one by one: {middle - began:.1f} s; in batches: {ended - middle:.1f} s")
    print(f"the same words: {together == alone}; also after running out of memory: {split == alone}")
    return {"same": together == alone, "same_after_split": split == alone, "num": len(split)}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
