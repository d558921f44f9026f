"""Lightning: a module whose updates are exact, in pieces of any size.

    python examples/lightning_module.py

You see two fits on the same planned batches: whole, and in pieces of 8 texts. They end with the same weights, up to
rounding; the mean of the pieces' means would not. Change ``loss_sums`` to your loss, as a sum and a weight, and
``micro_batch`` to ``"auto"``. ``AdaptiveBatching(controller="auto")`` looks for the best size of an update.
"""

import sys

import lightning.pytorch as pl
import torch
from texts import VOCABULARY, read_examples
from torch import Tensor, nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.integrations.lightning import AdaptiveBatching, ExactUpdates, PlannedDataModule
from batchwright.step import PadCollator


class Model(ExactUpdates, pl.LightningModule):
    """Predicts the next word from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))

    def loss_sums(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the number of words in it; this takes the place of ``training_step``."""
        logits, targets = self.net(batch["input_ids"][:, :-1]).flatten(0, 1), batch["labels"][:, 1:].flatten()
        return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.5)


def main(quick: bool = False) -> dict[str, float]:
    """Fit twice, print and return the figures."""
    data, weights, found = read_examples(200 if quick else 2000), {}, {}
    for micro_batch in ("auto", 8):
        torch.manual_seed(0)
        model, batching = Model(), AdaptiveBatching(micro_batch=micro_batch)
        sampler = bw.BatchSampler([len(example["input_ids"]) for example in data], bw.MaxTokens(2048), seed=0)
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=PadCollator())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(max_epochs=2, accelerator="cpu", callbacks=[batching], enable_model_summary=False, **quiet)
        trainer.fit(model, PlannedDataModule(loader))
        weights[micro_batch], report = model.state_dict(), batching.report
        found[micro_batch] = num = report.num_micro_batches
        print(f"{trainer.global_step} updates; pieces of the last, {report.batch_size} texts: {num}")
    apart = max(float((weights["auto"][name] - weights[8][name]).abs().max()) for name in weights[8])
    print(f"{sampler.report().padding:.1%} padding; the weights of both fits differ by {apart:.0e} at most")
    return {"apart": apart, "whole": found["auto"], "pieces": found[8], "padding": sampler.report().padding}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
