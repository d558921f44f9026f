"""What adaptive trainers and Lightning log reaches TensorBoard and W&B, read back from their files."""

import json
import logging

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from transformers import TrainerCallback

import batchwright as bw
from batchwright import size
from batchwright.integrations.lightning import AdaptiveBatching

from ..dynabatch.failing import ERROR
from ..lightning import training as lightning_training
from .trainers import flat, make_controller, make_model, make_trainer, numbered

pytest.importorskip("tensorboard", reason="tensorboard is not installed; it is in the group dev")

EVERY_UPDATE = {"batch_size", "num_micro_batches", "padding", "ooms"}


def controlled():
    """Return options under which an adaptive trainer logs everything it can."""
    return {
        "controller": make_controller(4, 8, 12),
        "measure_noise": True,
        "measure_entropy": True,
        "lr_rule": "sqrt",
        "base_size": 4,
        "history": str,
    }


def events(folder):
    """Return the scalars and texts of TensorBoard's event files, each as a list of (step, value) by name."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    scalars, texts = {}, {}
    for path in folder.rglob("events.out.tfevents.*"):
        found = EventAccumulator(str(path), size_guidance={TENSORS: 0})
        found.Reload()
        for name in found.Tags()["scalars"]:
            scalars[name] = [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["tensors"]:
            texts[name] = [(event.step, event.tensor_proto.string_val[0].decode()) for event in found.Tensors(name)]
    return scalars, texts


def offline_history(folder):
    """Return the rows that an offline run of W&B holds."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    (path,) = folder.rglob("run-*.wandb")
    store, rows = DataStore(), []
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    store.close()
    return rows


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Return W&B in offline mode, which writes into a folder of the test."""
    package = pytest.importorskip("wandb", reason="wandb is not installed; it is in the group dev")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    yield package
    package.finish()
    package.teardown()


def updates_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def changes_of(trainer):
    return [entry for entry in trainer.state.log_history if "batch_size_reason" in entry]


def test_every_planned_update_reaches_tensorboard(tmp_path, caplog):
    trainer, seen, _ = make_trainer("t5", tmp_path, report_to="tensorboard", gradient_accumulation_steps=2)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    scalars, _ = events(tmp_path)
    assert {f"train/{name}" for name in EVERY_UPDATE} <= set(scalars)
    updates = [seen[start : start + 2] for start in range(0, len(seen), 2)]
    steps = range(1, len(updates) + 1)
    assert scalars["train/batch_size"] == list(zip(steps, [len(flat(update)) for update in updates], strict=True))
    assert scalars["train/num_micro_batches"] == list(zip(steps, map(len, updates), strict=True))
    data = trainer.train_dataset
    for (_, padding), update in zip(scalars["train/padding"], updates, strict=True):
        widths = [[[len(data[n][key]) for n in batch] for key in ("input_ids", "labels")] for batch in update]
        padded = sum(len(axis) * max(axis) for batch in widths for axis in batch)
        assert padding == pytest.approx(1 - sum(map(sum, flat(widths))) / padded, abs=1e-6)
    assert not [record for record in caplog.records if "scalar" in record.getMessage()]


def test_what_a_controller_adds_reaches_tensorboard_with_the_reasons(tmp_path, caplog):
    trainer, *_ = make_trainer("t5", tmp_path, report_to="tensorboard", **controlled())
    with caplog.at_level(logging.WARNING):
        trainer.train()
    scalars, texts = events(tmp_path)
    for name in (*EVERY_UPDATE, "batch_size_wanted", "noise_scale", "entropy", "lr_factor"):
        expected = [(place, entry[name]) for place, entry in enumerate(updates_of(trainer), 1) if name in entry]
        found = scalars[f"train/{name}"]
        assert [step for step, _ in found] == [step for step, _ in expected], name
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6), name
    assert [value for _, value in scalars["train/batch_size"]] == [4, 8, 12]
    changes = changes_of(trainer)
    assert [value for _, value in scalars["train/batch_size_new"]] == [8, 12]
    assert [value for _, value in scalars["train/batch_size_old"]] == [4, 8]
    reasons = texts["train/batch_size_reason/text_summary"]
    assert [text for _, text in reasons] == [entry["batch_size_reason"] for entry in changes]
    assert not [record for record in caplog.records if "scalar" in record.getMessage()]


class CountsUpdates(TrainerCallback):
    """Notes every run of the model that worked: how many updates were done before, and its rows."""

    def __init__(self):
        self.num, self.runs, self.num_failed = 0, [], 0

    def on_step_end(self, *args, **kwargs):
        self.num += 1

    def watch(self, module, args, kwargs):
        """Run out of memory on more than two rows in updates 2 and 3, and in the evaluation after update 4."""
        rows, trains = len(kwargs["input_ids"]), torch.is_grad_enabled()
        if (trains and rows > 2 and self.num in (2, 3)) or (not trains and rows > 4 and self.num == 4):
            self.num_failed += trains
            self.runs = [run for run in self.runs if run[0] != self.num]  # the pieces before it run again
            raise ERROR
        if trains:
            self.runs.append((self.num, rows))


def test_figures_are_those_of_the_updates_since_the_last_log_whatever_is_evaluated_between(tmp_path):
    model, watching = make_model("llama"), CountsUpdates()
    model.register_forward_pre_hook(watching.watch, with_kwargs=True)
    trainer, *_ = make_trainer(
        "llama",
        tmp_path,
        model=model,
        callbacks=[watching],
        report_to="tensorboard",
        eval_dataset=numbered(9, causal=True),
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=3,
        gradient_accumulation_steps=1,
        num_train_epochs=3,
        budget=bw.MaxTokens(60),
        eval_budget=bw.MaxItems(6),
    )
    trainer.train()
    scalars, _ = events(tmp_path)
    assert len(scalars["eval/loss"]) > 3
    steps = [step for step, _ in scalars["train/batch_size"]]
    assert steps == list(range(3, trainer.state.global_step + 1, 3))
    rows = [[num for place, num in watching.runs if place == update] for update in range(trainer.state.global_step)]
    assert [len(pieces) for pieces in rows[2:4]] != [1, 1]
    for place, step in enumerate(steps):
        recent = rows[step - 3 : step]
        assert scalars["train/batch_size"][place][1] == pytest.approx(sum(map(sum, recent)) / 3)
        assert scalars["train/num_micro_batches"][place][1] == pytest.approx(sum(map(len, recent)) / 3)
    assert scalars["train/ooms"][-1][1] == watching.num_failed >= 2


def test_every_update_and_every_change_reach_wandb(wandb, tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, report_to="wandb", **controlled())
    trainer.train()
    wandb.finish()
    wandb.teardown()  # what is written is on the disk then
    rows = offline_history(tmp_path)
    updates = [row for row in rows if "train/loss" in row]
    for name in (*EVERY_UPDATE, "batch_size_wanted", "entropy", "lr_factor"):
        expected = [entry[name] for entry in updates_of(trainer)]
        assert [row[f"train/{name}"] for row in updates] == pytest.approx(expected), name
    assert [row["train/global_step"] for row in updates] == [1, 2, 3]
    changes = [row for row in rows if "train/batch_size_reason" in row]
    assert [row["train/batch_size_new"] for row in changes] == [8, 12]
    assert [row["train/batch_size_reason"] for row in changes] == [
        entry["batch_size_reason"] for entry in changes_of(trainer)
    ]


def lightning_options():
    controller = bw.BatchSizeController(size.milestones({0: 4, 1: 8}, per="epoch"), min_size=4, max_size=8)
    return {
        "loader": lightning_training.DataLoader(
            lightning_training.DATA, batch_sampler=lightning_training.ResizableBatchSampler(61, controller)
        ),
        "batching": AdaptiveBatching(controller=controller, history=str, measure_noise=True),
        "max_epochs": 2,
        "log_every_n_steps": 1,
    }


def check_lightning(found, model):
    """Compare what a logger holds, lists of values by name, with the batches that a module was trained on."""
    assert found["batchwright/batch_size"] == [len(batch) for batch in model.batches]
    assert {4, 8} < set(found["batchwright/batch_size"])
    assert found["batchwright/batch_size_new"] == [8]
    assert found["batchwright/ooms"] == [0] * len(model.batches)
    names = {"loss", "num_micro_batches", "noise_scale", "batch_size_old"}
    assert {f"batchwright/{name}" for name in names} <= set(found)


def test_updates_of_lightning_reach_tensorboard(tmp_path):
    model, _ = lightning_training.fit(logger=TensorBoardLogger(tmp_path), **lightning_options())
    scalars, _ = events(tmp_path)
    check_lightning({name: [value for _, value in values] for name, values in scalars.items()}, model)


def test_the_padding_of_a_planned_epoch_reaches_tensorboard(tmp_path):
    lightning_training.fit(logger=TensorBoardLogger(tmp_path), max_epochs=1, log_every_n_steps=1)
    scalars, _ = events(tmp_path)
    expected = lightning_training.make_sampler().report().padding
    assert [value for _, value in scalars["batchwright/padding"]] == pytest.approx([expected])


def test_updates_of_lightning_reach_wandb(wandb, tmp_path):
    logger = WandbLogger(experiment=wandb.init(mode="offline", dir=str(tmp_path)))
    model, _ = lightning_training.fit(logger=logger, **lightning_options())
    logger.experiment.finish()
    wandb.teardown()  # ends the process that writes
    found = {}
    for row in offline_history(tmp_path):
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    check_lightning(found, model)
