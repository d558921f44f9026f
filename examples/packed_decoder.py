"""A decoder on packed rows: several texts share a row, none sees another, and hardly anything is padding.

    python examples/packed_decoder.py

You see the padding of one text per row and of packed rows, and that a packed batch has the loss of the same texts one
per row. Change ``Packed(256)`` to the context of your model. On a GPU in bf16 call ``use_varlen(model)`` and take
``PackCollator(layout="flat")``, which leaves out the rest of the padding and the mask of all pairs of tokens.
"""

import sys

import torch
from texts import VOCABULARY, read_examples
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import batchwright as bw
from batchwright.step import PackCollator, PadCollator, Stepper, huggingface_loss


def main(quick: bool = False) -> dict[str, float]:
    """Pack, train on the rows, print and return the figures."""
    data = read_examples(200 if quick else 2000)
    lengths = [len(example["input_ids"]) for example in data]
    budget = bw.MaxTokens(2048)  # a packed batch has 8 rows of 256 tokens
    sampler = bw.BatchSampler(lengths, budget, grouping=bw.Packed(256), seed=0)
    fixed = bw.plan_batches(lengths, bw.MaxItems(16), grouping=bw.InOrder()).report()
    planned, packed = bw.plan_batches(lengths, budget).report(), sampler.report()
    names = {"16 texts as they come": fixed, "planned, a text per row": planned, "packed rows": packed}
    for name, report in names.items():
        print(f"{name:>23}: {report.num_batches:>3} batches, {report.padding:5.1%} padding")

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attn_implementation="sdpa", **shape))
    loss_fn = huggingface_loss()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loss_fn)
    loader = DataLoader(bw.Rows(data), batch_sampler=sampler, collate_fn=list)  # a batch is a list of rows of texts
    collate, losses, apart = PackCollator(), [], 0.0
    for rows in sampler.track(loader):
        with torch.no_grad():
            loss_sum, weight = loss_fn(model, PadCollator()([text for row in rows for text in row]))
        losses.append(stepper.step(collate(rows)).loss)
        apart = max(apart, abs(losses[-1] - float(loss_sum / weight)))
    print(f"loss from {losses[0]:.2f} to {losses[-1]:.2f}; packed and padded differ by {apart:.0e} at most")
    padding = {"fixed": fixed.padding, "planned": planned.padding, "packed": packed.padding}
    return {**padding, "apart": apart, "first": losses[0], "last": losses[-1]}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
