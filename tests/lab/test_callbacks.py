"""Figures of updates, for any logger and for TensorBoard."""

import sys

import pytest
import torch

from batchwright._optional import is_installed
from batchwright.errors import ArgumentError, MissingDependencyError
from batchwright.lab.callbacks import StepLogger, TensorBoardLogger, figures_of
from batchwright.size import BatchSizeController, linear
from batchwright.step import MemoryMonitor, Stepper, entropy_sum
from batchwright.testing import FakeMemory


class Notebook:
    def __init__(self):
        self.lines = []

    def log(self, figures, step):
        self.lines.append((step, dict(figures)))


def make_stepper(loss_fn=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Stepper(model, optimizer, loss_fn or (lambda model, x: (model(x).square().sum(), len(x))), **options)


def test_what_was_not_measured_is_left_out():
    figures = figures_of(make_stepper(micro_batch=3).step(torch.ones(8, 2)))
    assert set(figures) == {
        *("batch/size", "batch/micro_batches", "memory/ooms", "train/loss", "train/lr", "train/seconds")
    }
    assert (figures["batch/size"], figures["batch/micro_batches"], figures["memory/ooms"]) == (8, 3, 0)
    assert figures["train/lr"] == 0.5


def test_everything_that_was_measured_is_there():
    def loss_fn(model, x):
        logits = model(x)
        return logits.square().sum(), len(x), {"entropy": entropy_sum(logits)}

    memory = FakeMemory(1000, used_bytes=250)
    stepper = make_stepper(loss_fn, measure_noise=True, clip_norm=1.0, memory=MemoryMonitor(source=memory))
    report = stepper.step(torch.randn(8, 2))
    figures = figures_of(report, padding=0.125, nothing=None)
    assert figures["noise/s"] == report.noise.s
    assert figures["noise/g2"] == report.noise.g2
    assert figures["memory/fraction"] == 0.25
    assert figures["memory/peak_bytes"] == 250
    assert figures["train/entropy"] == report.entropy
    assert figures["train/grad_norm"] == report.grad_norm
    assert figures["batch/padding"] == 0.125
    assert "batch/nothing" not in figures
    assert all(type(value) is float for value in figures.values())


def test_out_of_memory_is_counted():
    def loss_fn(model, x):
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(x).square().sum(), len(x)

    notebook = Notebook()
    log = StepLogger(notebook, every=100)
    log(make_stepper().step(torch.ones(4, 2)))
    log(make_stepper().step(torch.ones(4, 2)))
    log(make_stepper(loss_fn).step(torch.ones(8, 2)))
    # The first, and the one that ran out of memory, though it was not its turn.
    assert [(step, figures["memory/ooms"] > 0) for step, figures in notebook.lines] == [(1, False), (3, True)]


def test_the_controller_adds_the_next_size():
    controller = BatchSizeController(linear(8, 4), min_size=1, max_size=100)
    controller.observe(epoch=2)
    notebook = Notebook()
    StepLogger(notebook, controller=controller)(make_stepper().step(torch.ones(8, 2)))
    [(step, figures)] = notebook.lines
    assert (step, figures["batch/size"], figures["batch/next_size"], figures["batch/num_changes"]) == (1, 8, 16, 1)


def test_every_nth_update_is_logged():
    notebook, stepper = Notebook(), make_stepper()
    log = StepLogger(notebook, every=3)
    for _ in range(7):
        log(stepper.step(torch.ones(2, 2)))
    assert [step for step, _ in notebook.lines] == [1, 4, 7]


@pytest.mark.parametrize(
    ("logger", "every", "match"), [(print, 1, r"log\(figures, step\)"), (Notebook(), 0, "every must be")]
)
def test_what_cannot_log_is_refused(logger, every, match):
    with pytest.raises(ArgumentError, match=match):
        StepLogger(logger, every=every)


@pytest.mark.skipif(is_installed("tensorboard"), reason="tensorboard is installed")
def test_without_tensorboard_the_way_to_it_is_named(tmp_path):
    with pytest.raises(MissingDependencyError, match="pip install tensorboard"):
        TensorBoardLogger(tmp_path)


@pytest.mark.skipif(not is_installed("tensorboard"), reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardLogger(tmp_path) as logger:
        logger.log({"batch/size": 8.0}, step=3)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("batch/size")] == [(3, 8.0)]


def test_scalars_go_to_the_writer_of_torch(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("batchwright.lab.callbacks.is_installed", lambda name: True)
    with TensorBoardLogger(tmp_path) as logger:
        StepLogger(logger)(make_stepper().step(torch.ones(2, 2)))
    assert written[0] == str(tmp_path)
    assert ("batch/size", 2.0, 1) in written
    assert written[-1] == "closed"
