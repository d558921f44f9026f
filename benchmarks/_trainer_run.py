"""One arm of ``gpu_trainer.py``: a Trainer for some seconds of a clock that stands still while the loss is taken."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from _gpu import GIB, Device, Row
from _quality.corpus import IGNORED, PAD, Corpus, Made
from _quality.tasks import validation_loss
from _quality.training import Clock
from _trainer_arms import Examples, make_collator, set_up
from _training import make_model
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

NUM_WORKERS = 4
WARM_UP_UPDATES = 20
HELD_OUT_TOKENS = 2_048  # that the held-out loss is taken on at once: less than any arm trains on


class Plan(NamedTuple):
    """What every arm has in common.

    Args:
        seconds: of training.
        marks: the seconds at which the held-out loss is taken, the last one at the end.
        least_updates: of a trial run on a CPU, whatever its seconds.
    """

    seconds: float
    marks: tuple[float, ...]
    least_updates: int = 1


@final
class Counter:
    """Counts what the Trainer trains on, on the device, without waiting for it."""

    def __init__(self, trainer: Any) -> None:
        self.num_updates = 0
        self._counts: list[torch.Tensor] = []
        self._padded = 0
        self._fetch = trainer.get_batch_samples
        trainer.get_batch_samples = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of an update, and count them."""
        items, num_items = self._fetch(*args, **kwargs)
        self.num_updates += bool(items)
        # With a controller an item is a list of micro-batches.
        for batch in (batch for item in items for batch in (item if isinstance(item, list) else [item])):
            is_label = batch["labels"] != IGNORED
            is_example = is_label.any(dim=1)  # rows that fill a static shape up have no label
            tokens = is_label.sum() + (batch["attention_mask"] * is_example[:, None]).sum()
            self._counts.append(torch.stack([is_example.sum(), tokens]))
            self._padded += batch["labels"].numel() + batch["input_ids"].numel()
        return items, num_items

    def result(self, seconds: float) -> Row:
        """Return rates over some seconds, and the share of padding."""
        examples, tokens = torch.stack([counts.cpu() for counts in self._counts]).sum(dim=0).tolist()
        return {
            "updates": self.num_updates,
            "examples": examples,
            "examples_per_update": examples / self.num_updates,
            "examples_per_second": examples / seconds,
            "tokens_per_second": tokens / seconds,
            "padding": 1 - tokens / self._padded,
        }


@final
class Memory:
    """The largest memory since it was reset, and how often it ran out; the held-out loss is left out."""

    def __init__(self, device: Device) -> None:
        self._device, self._ooms = device, 0
        self._allocated = self._reserved = 0
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._allocated = self._reserved = 0
        self._ooms = self._device.num_ooms
        self.skip()

    def skip(self) -> None:
        """Forget what was used since the last note."""
        if not self._device.is_cpu:
            torch.cuda.reset_peak_memory_stats()

    def note(self) -> None:
        """Look at the peak; something else may reset it."""
        if not self._device.is_cpu:
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated())
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())

    def result(self) -> Row:
        """Return the peaks as shares of the cap, and the failures."""
        if self._device.is_cpu:
            return {"ooms": 0}
        cap = self._device.cap_bytes
        return {
            "ooms": self._device.num_ooms - self._ooms,
            "peak_gib": self._allocated / GIB,
            "peak_of_cap": self._allocated / cap,
            "reserved_of_cap": self._reserved / cap,
        }


@final
class Watch(TrainerCallback):
    """Starts the clock with the first update, takes the held-out loss at the marks, and ends the training."""

    def __init__(self, device: Device, plan: Plan, held_out: Sequence[Made]) -> None:
        self.clock, self.memory = Clock(device), Memory(device)
        self.curve: list[tuple[float, float]] = []
        self.before: Row = {}
        self.started_at = 0.0
        self._device, self._plan, self._held_out = device, plan, held_out
        self._is_started = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; what came before is the beginning of ``train``, with any calibration."""
        if not self._is_started:
            self._is_started = True
            self._device.synchronize()
            self.started_at = time.perf_counter()
            self.memory.note()
            self.before = self.memory.result()
            self._take(kwargs["model"])
            self.memory.reset()
            self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the held-out loss if a mark has passed, and stop at the end."""
        self.memory.note()
        seconds, marks = self.clock.seconds, self._plan.marks
        is_last = seconds >= self._plan.seconds and state.global_step >= self._plan.least_updates
        passed = sum(mark <= seconds for mark in marks)
        if is_last or passed >= len(self.curve):  # the first point is that of second 0
            self.clock.pause()
            self._take(kwargs["model"])
            self.memory.skip()
            if is_last:
                control.should_training_stop = True
            else:
                self.clock.start()

    def _take(self, model: Any) -> None:
        loss = validation_loss(model, self._held_out, self._device.name)
        model.train()
        self.curve.append((self.clock.seconds, loss))


def run_arm(name: str, corpus: Corpus, device: Device, plan: Plan, *, lr: float, cache: Path) -> Row:
    """Train from the same weights for the seconds of the plan, and return the figures.

    Args:
        name: of the arm.
        corpus: that it trains on.
        device: that it runs on.
        plan: what every arm has in common.
        lr: the learning rate.
        cache: the folder in which budgets are kept. That of another arm would hide what calibration costs.
    """
    left_bytes = 0 if device.is_cpu else device.used_bytes  # of the arm before: should be nothing
    with torch.device(device.name):
        model = make_model(device.name, small=device.is_small, small_vocabulary=max(1000, corpus.vocabulary))
    os.environ["XDG_CACHE_HOME"] = str(cache)
    notes = {"knows_budget": cache.is_dir() and any(cache.iterdir())}
    with tempfile.TemporaryDirectory() as folder:
        setup = set_up(name, corpus, model, device)
        watch = Watch(device, plan, on_device(corpus.held_out(HELD_OUT_TOKENS), device))
        arguments = TrainingArguments(
            output_dir=folder, max_steps=10**6, learning_rate=lr, lr_scheduler_type="constant_with_warmup",
            warmup_steps=WARM_UP_UPDATES, optim="adamw_torch" if device.is_cpu else "adamw_torch_fused",
            bf16=not device.is_cpu, use_cpu=device.is_cpu, save_strategy="no", logging_steps=10, report_to=[],
            disable_tqdm=True, dataloader_num_workers=0 if device.is_cpu else NUM_WORKERS, seed=0,
            dataloader_pin_memory=not device.is_cpu, remove_unused_columns=False, **setup.training,
        )  # fmt: skip
        trainer = setup.make(
            model=model, args=arguments, train_dataset=Examples(corpus), data_collator=make_collator(PAD),
            callbacks=[watch], **setup.arguments,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        return {"arm": name, "lr": lr, "left_bytes": left_bytes, **notes, **setup.notes, **train(trainer, watch)}


def on_device(held_out: Sequence[Made], device: Device) -> list[Made]:
    """Return held-out batches on the device."""
    return [
        made._replace(batch={name: tensor.to(device.name) for name, tensor in made.batch.items()}) for made in held_out
    ]


def train(trainer: Any, watch: Watch) -> Row:
    """Train until the watch ends it."""
    counter, start = Counter(trainer), time.perf_counter()
    trainer.train()
    wall, seconds = time.perf_counter() - start, watch.clock.seconds
    # Our trainer's count since training began; the allocator's may lack what a library ran out of.
    logged = [row["ooms"] for row in trainer.state.log_history if "ooms" in row]
    found = watch.memory.result()
    found["ooms"] = max(found["ooms"], int(max(logged, default=0)), int(getattr(trainer, "_oom_failed_count", 0)))
    return {
        "seconds": seconds,
        "wall_seconds": wall,
        "startup_seconds": watch.started_at - start,
        **counter.result(seconds),
        **found,
        "before": watch.before,
        "loss": watch.curve[-1][1],
        "curve": watch.curve,
        **_found(trainer),
        **_graphs(trainer),
    }


def _found(trainer: Any) -> Row:
    """Return the budget that ``"auto"`` found."""
    found = getattr(trainer, "found_budget", None)
    return {} if found is None else {"found_budget": json.loads(found.to_json())}


def _graphs(trainer: Any) -> Row:
    """Return what graphs did, where there are some."""
    if not hasattr(trainer, "graph_summary"):
        return {}
    summary = trainer.graph_summary()
    if not summary.hit_rate:
        return {"graph_reasons": dict(summary.reasons)}
    names = ("hit_rate", "pool_bytes", "capture_seconds")
    return {name: getattr(summary, name) for name in names} | {"graph_reasons": dict(summary.reasons)}
