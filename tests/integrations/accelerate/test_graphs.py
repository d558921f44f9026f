"""prepare with graphs: the shapes come from the sampler, and training is the one without graphs."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations.accelerate import prepare
from batchwright.plan.sampler.resizable import ResizableBatchSampler
from batchwright.step import PadCollator
from batchwright.testing import EagerGraphs

LENGTHS = np.random.default_rng(0).integers(2, 30, size=80)
DATA = [{"input_ids": [1 + (place * 7 + step) % 15 for step in range(length)]} for place, length in enumerate(LENGTHS)]
BUDGET = bw.MaxTokens(150)


@pytest.fixture(autouse=True)
def _forget_the_accelerator():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16))


def loss_fn(model, batch):
    ids = batch["input_ids"]
    logits, targets = model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits.float(), targets, ignore_index=0, reduction="sum")
    return loss, (targets != 0).sum()


def make_loader(grouping, **collating):
    sampler = bw.BatchSampler(LENGTHS, BUDGET, grouping=grouping)
    return DataLoader(DATA, batch_sampler=sampler, collate_fn=PadCollator(**{"pad_to": sampler.pad_to, **collating}))


def prepared(graphs, *, loader=None, precision="no", cpu=True, model=None, **options):
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision)
    model = make_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=60)
    loader = make_loader(bw.Buckets(4)) if loader is None else loader
    if graphs is not None:
        options["graphs"] = graphs
    return prepare(
        accelerator, model, optimizer, loader, loss_fn=loss_fn, scheduler=scheduler, clip_norm=0.5, **options
    )


def train(graphs, num_epochs=3, **options):
    """Return the weights and losses of a training, and its stepper."""
    model, _, loader, stepper = prepared(graphs, **options)
    losses = [stepper.step(batch).loss for _ in range(num_epochs) for batch in loader]
    return torch.cat([one.detach().flatten() for one in model.parameters()]), losses, stepper


def check_same(tolerance, **options):
    """Train with and without graphs and compare; return the summary of the graphs."""
    weights, losses, _ = train(None, **options)
    found, seen, stepper = train(EagerGraphs(), **options)
    assert seen == pytest.approx(losses, rel=tolerance)
    assert torch.allclose(found, weights, rtol=tolerance, atol=tolerance)
    return stepper.graph_summary()


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-5), ("bf16", 2e-2)])
def test_training_with_graphs_is_training_without(precision, tolerance):
    summary = check_same(tolerance, precision=precision)
    assert summary.num_replayed > 10
    assert summary.num_updates_replayed > 10


@pytest.mark.filterwarnings("ignore:16 micro-batches ran eagerly, as none had a planned shape")
def test_micro_batches_that_are_not_planned_run_eagerly():
    summary = check_same(1e-5, micro_batch=3)
    assert summary.reasons["a shape was not planned"] > 10


def test_every_planned_shape_is_captured_before_it_comes_a_second_time():
    _, _, loader, stepper = prepared(EagerGraphs())
    batches = iter(loader)
    for _ in range(2):
        stepper.step(next(batches))
    shapes = [tuple(row) for row in loader.sampler.plan.shapes.tolist()]
    planned = {shape for shape in shapes if shapes.count(shape) > 1}
    assert stepper.graph_summary().num_captures >= len(planned) - 1 > 1


def test_sizes_of_a_controller_work_with_the_shapes_of_a_grouping():
    def make():
        sampler = ResizableBatchSampler(
            len(LENGTHS), 20, lengths=LENGTHS, budget=BUDGET, grouping=bw.Buckets(4), seed=1
        )
        options = {
            "lengths": lambda example: len(example["input_ids"]),
            "collate": PadCollator(pad_to=sampler.pad_to),
            "micro_batch": BUDGET,
        }
        return {"loader": DataLoader(DATA, batch_sampler=sampler, collate_fn=list), **options}

    weights, losses, _ = train(None, 6, **make())
    found, seen, stepper = train(EagerGraphs(), 6, **make())
    assert seen == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(found, weights, rtol=1e-5, atol=1e-6)
    assert stepper.graph_summary().num_replayed > 10


def test_a_plan_of_many_shapes_is_refused_and_auto_runs_eagerly():
    lengths = np.random.default_rng(0).integers(2, 200, size=400)
    loader = DataLoader(DATA, batch_sampler=bw.BatchSampler(lengths, bw.MaxTokens(300)))
    with pytest.raises(ArgumentError, match=r"graphs=True cannot be, as the plan has \d+ shapes.*Buckets\(32\)"):
        prepared(EagerGraphs(), loader=loader)
    with pytest.warns(UserWarning, match=r"steps run eagerly, without graphs: the plan has \d+ shapes"):
        stepper = prepared("auto", loader=loader).stepper
    assert stepper.graph_summary().num_replayed == 0


def test_a_collator_that_pads_to_the_longest_is_refused():
    loader = make_loader(bw.Buckets(4), pad_to=bw.PadTo())
    with pytest.raises(ArgumentError, match=r"pads to the longest example of a batch; give it pad_to=sampler.pad_to"):
        prepared(EagerGraphs(), loader=loader)


def test_a_sampler_without_planned_shapes_is_refused():
    loader = DataLoader(DATA, batch_sampler=ResizableBatchSampler(len(DATA), 8))
    with pytest.raises(ArgumentError, match=r"shapes of this ResizableBatchSampler are not planned; give it grouping"):
        prepared(EagerGraphs(), loader=loader)


@pytest.mark.parametrize("kind", ["sampler", "array", "list"])
def test_more_than_64_given_shapes_are_refused_and_auto_runs_eagerly(kind):
    many = bw.BatchSampler(np.random.default_rng(0).integers(2, 200, size=400), bw.MaxTokens(300))
    shapes = {"sampler": many, "array": many.plan.shapes, "list": many.plan.shapes.tolist()}[kind]
    with pytest.raises(ArgumentError, match=r"graphs=True cannot be, as the plan has \d+ shapes.*Buckets\(32\)"):
        prepared(EagerGraphs(), shapes=shapes)
    with pytest.warns(UserWarning, match=r"steps run eagerly, without graphs: the plan has \d+ shapes"):
        prepared("auto", shapes=shapes)


def test_auto_on_a_cpu_says_so_once():
    with pytest.warns(UserWarning, match="steps run eagerly, without graphs: graphs need a model on a CUDA") as caught:
        train("auto", 2)
    assert len([warning for warning in caught if "without graphs" in str(warning.message)]) == 1


def test_graphs_need_cuda():
    with pytest.raises(ArgumentError, match="graphs=True needs a model on a CUDA device"):
        prepared(True)
    with pytest.raises(ArgumentError, match="graphs must be False, 'auto' or True, got 1"):
        prepared(1)


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_accelerator_on_cuda_replays_what_it_would_run_eagerly(precision):
    _, losses, _ = train(None, precision=precision, cpu=False)
    _, seen, stepper = train(True, precision=precision, cpu=False)
    assert seen == pytest.approx(losses, rel=2e-2 if precision == "bf16" else 1e-4)
    assert stepper.graph_summary().num_replayed > 10
    assert stepper.graph_summary().num_updates_replayed > 10
