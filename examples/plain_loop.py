"""A training loop of your own: planned batches, and updates in pieces that do not change them.

    python examples/plain_loop.py

You see how much of the batches is padding, for 16 texts as they come and for planned batches under the same limit of
tokens. Then two copies of a model train on the planned batches: one on whole batches, by the loop that you would write
by hand, one through ``Stepper`` in pieces of at most 512 tokens. They end with the same weights, up to rounding.
Change ``MaxTokens`` to what your device holds, and ``micro_batch`` to ``"auto"``: then only what does not fit is cut.
"""

import copy
import sys

import torch
from texts import VOCABULARY, read_examples
from torch import Tensor, nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.step import PadCollator, Stepper


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the next words, and how many they are."""
    logits, targets = model(batch["input_ids"][:, :-1]).flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def main(quick: bool = False) -> dict[str, float]:
    """Train, print what padding and pieces do, and return the figures."""
    data = read_examples(300 if quick else 3000)
    lengths = [len(example["input_ids"]) for example in data]  # the longest has 128 words, and 16 × 128 are 2,048
    fixed = bw.plan_batches(lengths, bw.MaxItems(16), grouping=bw.InOrder()).report()
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(2048), seed=0)
    planned = sampler.report()
    for name, report in {"16 texts as they come": fixed, "MaxTokens(2048)": planned}.items():
        print(f"{name:>21}: {report.num_batches:>3} batches, {report.padding:5.1%} padding")

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    cut = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)  # of the loop by hand
    widths = {"micro_batch": bw.MaxTokens(512), "lengths": lambda batch: batch["attention_mask"].sum(dim=1)}
    stepper = Stepper(cut, torch.optim.SGD(cut.parameters(), lr=0.5), loss_fn, **widths)
    loader, num_pieces = DataLoader(data, batch_sampler=sampler, collate_fn=PadCollator()), 0
    for batch in sampler.track(loader):  # sampler.state_dict() is the place to continue from, for a checkpoint
        loss_sum, weight = loss_fn(whole, batch)
        optimizer.zero_grad()
        (loss_sum / weight).backward()
        optimizer.step()
        num_pieces += stepper.step(batch).num_micro_batches
    pairs = zip(whole.state_dict().values(), cut.state_dict().values(), strict=True)
    apart = max(float((first - second).abs().max()) for first, second in pairs)
    print(f"{len(sampler)} updates in {num_pieces} pieces: weights differ from those of whole batches by {apart:.0e}")
    return {"fixed": fixed.padding, "planned": planned.padding, "pieces": num_pieces, "apart": apart}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
