"""Encoder and decoder: source and target are padded apart, so a plan knows both lengths.

    python examples/seq2seq_two_axes.py

You see the padding of three plans under one limit of tokens, source and target together: in the order of the data, by
the length of the source alone, which has to guess what targets need, and by both. Then a small T5 trains on the last;
that no batch is above the limit is checked on the tensors. Change the model and the pairs; ``grouping=bw.Buckets(16)``
with ``PadCollator(pad_to=sampler.pad_to, …)`` gives at most 16 shapes.
"""

import sys

import numpy as np
import torch
from texts import VOCABULARY, read_pairs
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

import batchwright as bw
from batchwright.step import PadCollator, Stepper, huggingface_loss

LIMIT = bw.MaxTokens(2048)


def main(quick: bool = False) -> dict[str, dict[str, float]]:
    """Plan in three ways, train on the last, print and return the figures."""
    data = read_pairs(300 if quick else 2000)
    lengths = np.array([(len(pair["input_ids"]), len(pair["labels"])) for pair in data])
    sampler = bw.BatchSampler(lengths, LIMIT, seed=0)
    plans = {
        "in order": bw.plan_batches(lengths, LIMIT, grouping=bw.InOrder()),
        "by source": bw.plan_batches(lengths[:, 0], bw.MaxTokens(1500)),  # leaves 548 for targets: a guess
        "by both": sampler.plan,
    }
    figures = {}
    for name, plan in plans.items():
        tokens = [len(batch) * int(lengths[batch].max(axis=0).sum()) for batch in plan]  # each side as its longest
        figures[name] = {"padding": 1 - lengths.sum() / sum(tokens), "largest": max(tokens)}
        print(f"{name:>9}: {len(plan):>3} batches, {figures[name]['padding']:5.1%} padding, up to {max(tokens)} tokens")

    torch.manual_seed(0)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **shape))
    collate = PadCollator(axis_fields=("input_ids", "labels"))
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=3e-3), huggingface_loss(), clip_norm=1.0)
    losses = []
    for batch in sampler.track(loader):
        assert batch["input_ids"].numel() + batch["labels"].numel() <= 2048
        losses.append(stepper.step(batch).loss)  # a mean over the labels, whatever the number of pairs
    print(f"loss per label from {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} updates")
    return {**figures, "loss": {"first": losses[0], "last": losses[-1]}}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
