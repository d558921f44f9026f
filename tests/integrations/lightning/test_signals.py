"""What policies read under Lightning: entropy, memory, the examples of a curriculum; decisions as live lines."""

from itertools import chain

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.integrations.lightning import AdaptiveBatching, ExactUpdates
from batchwright.step import entropy_sum
from batchwright.step.memory.sources import CpuMemory

from .training import DATA, INPUTS, fit, indices, parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Classifier(ExactUpdates, pl.LightningModule):
    """A classifier that leaves every fifth target out, and returns the entropy of its logits."""

    def __init__(self, lr=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.lr, self.batches = nn.Linear(4, 3), lr, []

    def loss_sums(self, batch):
        logits, targets = self.net(batch["x"]), targets_of(batch["index"])
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
        return loss, (targets != -100).sum(), {"entropy": entropy_sum(logits, targets)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_batch_start(self, batch, batch_idx):
        self.batches.append(indices(batch))


def targets_of(index):
    return torch.where(index % 5 == 0, -100, index % 3)


def make_loader(policy, *, least=2, most=16, initial=4, **sampling):
    controller = bw.BatchSizeController(policy, min_size=least, max_size=most, initial=initial)
    sampler = bw.ResizableBatchSampler(61, controller, **sampling)
    return DataLoader(DATA, batch_sampler=sampler), controller


@pytest.mark.parametrize("micro_batch", [3, "auto"])
def test_entropy_is_the_mean_over_the_targets_that_count_whatever_the_micro_batches(micro_batch):
    observed = []
    loader, _ = make_loader(size.track(lambda o: observed.append(o) or 7, needs=["entropy"]), initial=7)
    model, _ = fit(Classifier(), loader, batching=AdaptiveBatching(micro_batch=micro_batch), max_epochs=1)
    expected = []
    for batch in model.batches:
        counted = [index for index in batch if index % 5]
        logits = model.net(INPUTS[counted]).detach()
        p = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
        expected.append(float(-(p * p.log()).sum() / len(counted)))
    found = [o.entropy for o in {o.step: o for o in observed}.values()]
    assert len(found) == 9
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_loss_without_entropy_is_told_where_to_return_it():
    class Silent(Classifier):
        def loss_sums(self, batch):
            return super().loss_sums(batch)[:2]

    loader, _ = make_loader(size.entropy_driven(3, smallest=2, largest=8, per="step"))
    with pytest.raises(MissingSignalError, match=r"'entropy': .*; here, loss_fn is your loss_sums"):
        fit(Silent(), loader, max_epochs=1)


def test_a_curriculum_chooses_the_examples_of_an_epoch_and_resumes(tmp_path):
    difficulty = np.random.default_rng(1).permutation(61)

    def train(num_epochs, checkpoint=None):
        curriculum = size.Curriculum(difficulty, start_fraction=0.25, full_at=3)
        loader, _ = make_loader(size.constant(6), initial=6, curriculum=curriculum)
        model, trainer = fit(Classifier(0.1), loader, max_epochs=num_epochs, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{num_epochs}.ckpt")
        return model

    whole = train(3)
    nums = [16, 31, 46]  # 61 × 1/4, 1/2 and 3/4, rounded up
    numbers = list(chain(*whole.batches))
    for num in nums:
        epoch, numbers = numbers[:num], numbers[num:]
        assert sorted(difficulty[epoch]) == list(range(num))
    assert numbers == []
    first = train(1)
    second = train(3, checkpoint=str(tmp_path / "1.ckpt"))
    assert first.batches + second.batches == whole.batches
    assert torch.equal(parameters(second), parameters(whole))


def test_a_policy_that_follows_memory_needs_no_argument(monkeypatch):
    monkeypatch.setattr(CpuMemory, "total_bytes", property(lambda self: 1 << 50))
    loader, controller = make_loader(size.memory_driven())
    fit(Classifier(), loader, max_epochs=1)
    assert [decision.new for decision in controller.history] == [8, 16]


def test_history_prints_lines_and_feeds_the_loggers(tmp_path, capsys):
    loader, _ = make_loader(size.milestones({0: 4, 2: 8}, per="step"))
    batching = AdaptiveBatching(history=True)
    fit(Classifier(), loader, batching=batching, logger=CSVLogger(tmp_path), max_epochs=1)
    line = "Batch size: epoch 0, step 2, examples 8: 4 -> 8 (milestones: 8 from milestone 2, at step 2)"
    assert [text for text in capsys.readouterr().out.splitlines() if text.startswith("Batch size")] == [line]
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(text[0].split(","), row.split(","), strict=True)) for row in text[1:]]
    (row,) = [row for row in rows if row["batchwright/batch_size_new"]]
    figures = [float(row[f"batchwright/{name}"]) for name in ("batch_size_old", "batch_size_new", "examples")]
    assert figures == [4, 8, 8]
    assert row["step"] == "2"


def test_a_function_gets_the_lines_and_anything_else_is_refused():
    lines = []
    loader, _ = make_loader(size.milestones({0: 4, 2: 8}, per="step"))
    fit(Classifier(), loader, batching=AdaptiveBatching(history=lines.append), max_epochs=1)
    assert len(lines) == 1
    with pytest.raises(ArgumentError, match="history must be True, False or a function that takes a line, got 1"):
        AdaptiveBatching(history=1)


def test_a_policy_that_never_moves_trains_as_no_policy_to_the_bit():
    results = []
    for policy in (size.constant(6), size.entropy_driven(3, smallest=2, largest=64, per="step"), size.memory_driven()):
        loader, _ = make_loader(policy, least=6, most=6, initial=6)
        results.append(parameters(fit(Classifier(0.1), loader, max_epochs=2)[0]))
    without = DataLoader(DATA, batch_sampler=bw.ResizableBatchSampler(61, 6))
    expected = parameters(fit(Classifier(0.1), without, max_epochs=2)[0])
    assert all(torch.equal(found, expected) for found in results)
