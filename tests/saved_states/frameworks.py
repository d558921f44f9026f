"""Checkpoints of training under Hugging Face's Trainer, Lightning and Accelerate."""

import json
import shutil
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright import size
from batchwright.integrations.accelerate import prepare
from batchwright.integrations.dynabatch import DynaBatchSampler, make_dynabatch_trainer
from batchwright.integrations.huggingface import adaptive
from batchwright.integrations.lightning import AdaptiveBatching, ExactUpdates, PlannedDataModule

from .cases import FolderCase, plain

NUM = 24
LENGTHS = [3 + (7 * i + i * i) % 11 for i in range(NUM)]


def make_controller():
    return bw.BatchSizeController(size.linear(3, 2, per="step"), min_size=3, max_size=9)


def totals(model):
    """Return two sums of every parameter, which a change of any weight would move."""
    values = {name: value.detach().double().flatten() for name, value in model.named_parameters()}
    return {
        name: [float(value.sum()), float((value * torch.arange(1, len(value) + 1)).sum())]
        for name, value in values.items()
    }


@contextmanager
def copy_of(folder):
    """Lend a copy, which a framework may write to."""
    with tempfile.TemporaryDirectory() as place:
        yield Path(shutil.copytree(folder, Path(place) / folder.name))


# Hugging Face


EXAMPLES = [
    {"input_ids": [3 + (5 * i + j * j) % 20 for j in range(length)], "number": i} for i, length in enumerate(LENGTHS)
]


def make_llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).double()


def collate(examples):
    width = max(len(example["input_ids"]) for example in examples)
    ids = torch.tensor([example["input_ids"] + [0] * (width - len(example["input_ids"])) for example in examples])
    numbers = torch.tensor([example["number"] for example in examples])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": ids.where(ids != 0, -100),
        "number": numbers,
    }


def note(trained, module, args, kwargs):
    """Note the examples that a model is trained on, in a hook before its forward pass."""
    numbers = kwargs.pop("number")
    if torch.is_grad_enabled():
        trained.append(numbers.tolist())
    return args, kwargs


def train(make, folder, checkpoint=None, **options):
    settings = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "num_train_epochs": 2}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}
    settings |= {"logging_steps": 1, "save_strategy": "no", "dataloader_pin_memory": False}
    trainer = make({**settings, "output_dir": str(folder), **options})
    trained = []
    trainer.model.register_forward_pre_hook(partial(note, trained), with_kwargs=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, trained


def make_adaptive(options, arguments):
    options = {**options, **({"controller": make_controller()} if "measure_noise" in options else {})}
    arguments = {
        **arguments,
        **{name: options.pop(name) for name in ("gradient_accumulation_steps",) if name in options},
    }
    return adaptive(transformers.Trainer)(
        model=make_llama(),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=EXAMPLES,
        data_collator=collate,
        budget=bw.MaxTokens(48),
        **options,
    )


def make_dynabatch(arguments):
    sampler = DynaBatchSampler(LENGTHS, None, None, 3, threshold=0.9, max_batch_range=3.0, task="train", shuffle=True)
    return make_dynabatch_trainer(transformers.Trainer)(
        model=make_llama(),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=EXAMPLES,
        data_collator=collate,
        dynabatch_sampler=sampler,
    )


def save_huggingface(make, folder, stop=2):
    with tempfile.TemporaryDirectory() as place:
        train(make, place, max_steps=stop, save_strategy="steps", save_steps=stop)
        shutil.copytree(Path(place) / f"checkpoint-{stop}", folder)
    for name in ("training_args.bin", "rng_state.pth", "generation_config.json"):  # not needed: nothing is drawn
        (folder / name).unlink(missing_ok=True)


def go_on_huggingface(make, folder):
    with tempfile.TemporaryDirectory() as place, copy_of(folder) as checkpoint:
        trainer, trained = train(make, place, str(checkpoint))
    state = trainer.state
    logs = [{name: entry[name] for name in ("epoch", "batch_size") if name in entry} for entry in state.log_history]
    return {
        "trained": trained,
        "weights": totals(trainer.model),
        "steps": state.global_step,
        "epoch": state.epoch,
        "logs": logs,
    }


def state_huggingface(folder):
    callbacks = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["stateful_callbacks"]
    return {name: value for name, value in callbacks.items() if name != "TrainerControl"}


def huggingface_cases():
    makers = {
        "planned": partial(make_adaptive, {"grouping": bw.WindowSort(batches_per_window=1)}),
        "accumulated": partial(make_adaptive, {"gradient_accumulation_steps": 2, "grouping": bw.Sorted()}),
        "controlled": partial(make_adaptive, {"measure_noise": True}),
        "dynabatch": make_dynabatch,
    }
    for name, make in makers.items():
        parts = (partial(part, make) for part in (save_huggingface, go_on_huggingface))
        yield FolderCase(f"huggingface_{name}", *parts, state_huggingface, tolerance=1e-5)


# Lightning


ROWS = torch.tensor([[(3 * i + 5 * j) % 7 / 7 - 0.5 for j in range(4)] for i in range(NUM)], dtype=torch.float64)
DATA = [{"x": row, "index": index} for index, row in enumerate(ROWS)]


def make_net():
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        for number, value in enumerate(net.parameters()):
            value.copy_(torch.linspace(-0.5, 0.5 + number / 8, value.numel(), dtype=torch.float64).reshape(value.shape))
    return net


class Module(ExactUpdates, pl.LightningModule):
    """A small net that notes the batches it is trained on."""

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.batches = []

    def loss_sums(self, batch):
        return (self.net(batch["x"]) - 1).square().sum(), len(batch["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)

    def on_train_batch_start(self, batch, batch_idx):
        self.batches.append(batch["index"].tolist())


class Save(pl.Callback):
    """Saves a checkpoint after some updates, and ends training."""

    def __init__(self, path, stop):
        self.path, self.stop = path, stop

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.stop:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def make_planned():
    return bw.BatchSampler(LENGTHS, bw.MaxTokens(48), grouping=bw.WindowSort(batches_per_window=1))


def make_resizable():
    return bw.ResizableBatchSampler(NUM, make_controller())


def fit(make_sampler, *callbacks, checkpoint=None):
    settings = {"max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(**settings, callbacks=[AdaptiveBatching(measure_noise=True, micro_batch=2), *callbacks])
    model = Module()
    loader = DataLoader(DATA, batch_sampler=make_sampler())
    trainer.fit(model, PlannedDataModule(loader), ckpt_path=checkpoint)
    return trainer, model


def save_lightning(make_sampler, folder):
    folder.mkdir()
    fit(make_sampler, Save(folder / "last.ckpt", 7))


def go_on_lightning(make_sampler, folder):
    trainer, model = fit(make_sampler, checkpoint=folder / "last.ckpt")
    return {"trained": model.batches, "weights": totals(model), "steps": trainer.global_step}


def state_lightning(folder):
    return plain(torch.load(folder / "last.ckpt", weights_only=True)["callbacks"]["AdaptiveBatching"])


# Accelerate


@contextmanager
def accelerator():
    """Lend an accelerator that leaves nothing in the process."""
    _forget()
    try:
        yield Accelerator(cpu=True)
    finally:
        _forget()


def _forget():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def loss_fn(model, batch):
    return (model(batch["x"]) - 1).square().sum(), len(batch["x"])


def make_prepared(make_sampler, accelerator):
    net = make_net()
    loader = DataLoader(DATA, batch_sampler=make_sampler())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    return prepare(accelerator, net, optimizer, loader, loss_fn=loss_fn, micro_batch=2, measure_noise=True)


def save_accelerate(make_sampler, folder, stop=6):
    with accelerator() as device:
        prepared, num = make_prepared(make_sampler, device), 0
        while num < stop:
            for batch in prepared.loader:
                prepared.stepper.step(batch)
                num += 1
                if num == stop:
                    device.save_state(folder)
                    break
    for path in folder.glob("random_states_*.pkl"):  # not needed: nothing is drawn
        path.unlink()


def go_on_accelerate(make_sampler, folder):
    with accelerator() as device, copy_of(folder) as checkpoint:
        prepared, trained = make_prepared(make_sampler, device), []
        device.load_state(checkpoint)
        for _ in range(prepared.loader.epoch, 3):
            for batch in prepared.loader:
                prepared.stepper.step(batch)
                trained.append(batch["index"].tolist())
        return {"trained": trained, "weights": totals(prepared.model), "epoch": prepared.loader.epoch}


def state_accelerate(folder):
    return plain(torch.load(folder / "custom_checkpoint_0.pkl", weights_only=True))


def sampler_cases():
    for name, make in (("planned", make_planned), ("resizable", make_resizable)):
        parts = (partial(part, make) for part in (save_lightning, go_on_lightning))
        yield FolderCase(f"lightning_{name}", *parts, state_lightning, tolerance=1e-5)
        parts = (partial(part, make) for part in (save_accelerate, go_on_accelerate))
        yield FolderCase(f"accelerate_{name}", *parts, state_accelerate, tolerance=1e-5)


CASES = [*huggingface_cases(), *sampler_cases()]
