"""What policies read under an Accelerator: entropy, memory, the examples of a curriculum; decisions as live lines."""

from itertools import chain

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.step import PadCollator, entropy_sum
from batchwright.step.huggingface import huggingface_loss
from batchwright.step.memory.sources import CpuMemory

from .test_preparation import DATA, forget, make_model, make_run, parameters, run_epochs

LENGTHS = np.random.default_rng(3).integers(2, 9, size=30)


@pytest.fixture(autouse=True)
def _forget_the_accelerator():
    forget()
    yield
    forget()


def controlled(policy, *, num=60, most=16, initial=4, **sampling):
    controller = bw.BatchSizeController(policy, min_size=2, max_size=most, initial=initial)
    return bw.ResizableBatchSampler(num, controller, **sampling), controller


class Tagger(nn.Module):
    """A token classifier with the outputs of transformers."""

    def __init__(self, *, has_logits=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.has_logits = nn.Embedding(20, 6), nn.Linear(6, 5), has_logits

    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.embedding(input_ids)) * attention_mask[..., None]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits} if self.has_logits else {"loss": loss}


def tagged():
    draw = np.random.default_rng(4)
    return [
        {"input_ids": draw.integers(1, 20, num).tolist(), "labels": draw.integers(0, 5, num).tolist()}
        for num in LENGTHS
    ]


def run_tagger(micro_batch, **options):
    """Train on micro-batches of static shapes, whose last rows are filler; return entropies and examples of updates."""
    observed, data, model = [], tagged(), Tagger(**options)
    policy = size.track(lambda o: observed.append(o) or 7, needs=["entropy"])
    sampler, _ = controlled(policy, num=30, initial=7, lengths=LENGTHS, budget=bw.MaxTokens(24), grouping=bw.Buckets(2))
    pad = PadCollator(pad_to=sampler.pad_to, axis_fields=("input_ids",), same_axis={"labels": 0}, fill_rows=True)
    rows = []

    def collate(examples):
        batch = pad(examples)
        rows.append(batch.get("row_weight"))
        return batch

    _, prepared = make_run(
        DataLoader(data, batch_sampler=sampler, collate_fn=list),
        model=model, lr=0.0, loss_fn=huggingface_loss(with_entropy=True), collate=collate,
        micro_batch=micro_batch, lengths=lambda example: len(example["input_ids"]),
    )  # fmt: skip
    batches = [batch for batch in prepared.loader if prepared.stepper.step(batch)]
    assert any(weight is not None and float(weight.min()) == 0 for weight in rows)  # or there was no filler
    return model, batches, [o.entropy for o in {o.step: o for o in observed}.values()]


@pytest.mark.parametrize("micro_batch", [3, 30], ids=str)
def test_entropy_is_exact_for_any_micro_batches_and_leaves_padding_and_filler_out(micro_batch):
    model, batches, found = run_tagger(micro_batch)
    expected = []
    for batch in batches:
        logits = torch.cat([model.head(model.embedding(torch.tensor(e["input_ids"]))) for e in batch]).detach()
        p = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
        expected.append(float(-(p * p.log()).sum() / len(p)))
    assert len(found) == len(expected) == 5
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_model_without_logits_and_a_loss_without_entropy_are_refused_in_words():
    with pytest.raises(ArgumentError, match="the model returns only loss; let it return 'logits'"):
        run_tagger(30, has_logits=False)
    sampler, _ = controlled(size.entropy_driven(5, smallest=2, largest=8, per="step"))
    _, prepared = make_run(DataLoader(DATA, batch_sampler=sampler))
    with pytest.raises(MissingSignalError, match=r"here, huggingface_loss\(with_entropy=True\) returns it too"):
        run_epochs(prepared, 1)


def test_a_curriculum_chooses_the_examples_of_an_epoch_and_resumes(tmp_path):
    difficulty = np.random.default_rng(1).permutation(60)

    def make():
        curriculum = size.Curriculum(difficulty, start_fraction=0.25, full_at=3)
        sampler, _ = controlled(curriculum.policy(5), most=20, initial=5, curriculum=curriculum)
        return make_run(DataLoader(DATA, batch_sampler=sampler))

    accelerator, whole = make()
    batches = run_epochs(whole, 3, after_step=lambda num: num == 4 and accelerator.save_state(tmp_path) and None)
    sizes = [len(batch) for batch in batches]
    assert sizes == [5, 5, 5, 10, 10, 10, 15, 15, 15]
    for num, epoch in zip((15, 30, 45), (batches[:3], batches[3:6], batches[6:]), strict=True):
        assert sorted(difficulty[list(chain(*epoch))]) == list(range(num))
    accelerator, resumed = make()
    accelerator.load_state(tmp_path)
    assert run_epochs(resumed, 3) == batches[4:]
    assert torch.equal(parameters(resumed), parameters(whole))


def test_a_policy_that_follows_memory_needs_no_argument(monkeypatch):
    monkeypatch.setattr(CpuMemory, "total_bytes", property(lambda self: 1 << 50))
    sampler, controller = controlled(size.memory_driven())
    _, prepared = make_run(DataLoader(DATA, batch_sampler=sampler))
    run_epochs(prepared, 1)
    assert [decision.new for decision in controller.history] == [8, 16]


class Tracker(GeneralTracker):
    """Keeps what is logged."""

    name, requires_logging_directory, main_process_only = "kept", False, True

    def __init__(self):
        super().__init__()
        self.logged = []

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.logged.append((step, values))


def test_history_prints_lines_and_feeds_the_trackers(capsys):
    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("run")
    sampler, _ = controlled(size.milestones({0: 4, 2: 8}, per="step"))
    _, prepared = make_run(DataLoader(DATA, batch_sampler=sampler), accelerator=accelerator, history=True)
    run_epochs(prepared, 1)
    line = "Batch size: epoch 0, step 2, examples 8: 4 -> 8 (milestones: 8 from milestone 2, at step 2)"
    assert capsys.readouterr().out.splitlines() == [line]
    assert tracker.logged == [(2, {"batch_size_old": 4.0, "batch_size_new": 8.0, "examples": 8.0})]


def test_a_function_gets_the_lines_also_where_a_controller_keeps_no_history():
    lines = []
    policy = size.milestones({0: 4, 2: 8}, per="step")
    controller = bw.BatchSizeController(policy, min_size=2, max_size=16, max_history=0)
    sampler = bw.ResizableBatchSampler(60, controller)
    _, prepared = make_run(DataLoader(DATA, batch_sampler=sampler), history=lines.append)
    run_epochs(prepared, 1)
    (line,) = lines
    assert "4 -> 8 (milestones: 8 from milestone 2, at step 2)" in line
    with pytest.raises(ArgumentError, match="history must be True, False or a function that takes a line, got 'on'"):
        make_run(history="on")


def test_a_policy_that_never_moves_trains_as_no_policy_to_the_bit():
    def loss_fn(model, batch):
        out = model(batch["x"])
        return out.square().sum(), len(batch["x"]), {"entropy": entropy_sum(torch.cat([out, -out], dim=1))}

    results = []
    for policy in (None, size.entropy_driven(2, smallest=2, largest=64, per="step"), size.memory_driven()):
        controller = 6 if policy is None else bw.BatchSizeController(policy, min_size=6, max_size=6)
        sampler = bw.ResizableBatchSampler(60, controller)
        _, prepared = make_run(DataLoader(DATA, batch_sampler=sampler), loss_fn=loss_fn, model=make_model())
        run_epochs(prepared, 2)
        results.append(parameters(prepared))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
