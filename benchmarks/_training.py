"""One training loop for every arm, and what an arm does with a batch that does not fit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from _gpu import GIB, Device, Row
from _pairs import IntArray, Pairs, shape_of
from torch import Tensor

from batchwright.step import Stepper, huggingface_loss
from batchwright.testing import EagerGraphs

CLIP_NORM = 1.0  # as the Trainer of transformers does

Batch = dict[str, Tensor]


def make_model(device: str, *, small: bool, small_vocabulary: int = 1000) -> Any:
    """Return a model of the shape of NLLB-200-distilled-600M, random weights."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    torch.manual_seed(0)
    layers, width, heads, vocabulary = (1, 32, 2, small_vocabulary) if small else (12, 1024, 16, 256_206)
    config = M2M100Config(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, encoder_attention_heads=heads, decoder_attention_heads=heads, vocab_size=vocabulary,
        # Layers that are dropped at random would make memory and time a matter of chance; NLLB has none.
        encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    return M2M100ForConditionalGeneration(config).to(device).train()


@final
class Loop:
    """Forward, backward, clipping and update: bf16 autocast, fused AdamW; the same for every arm."""

    def __init__(self, device: Device, *, small: bool) -> None:
        self.device = device
        self.model = make_model(device.name, small=small)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.vocabulary = int(self.model.config.vocab_size)

    def send(self, batch: Batch) -> Batch:
        """Copy a batch to the device; from pinned memory, so that the loop does not wait for it."""
        if self.device.is_cpu:
            return batch
        return {name: tensor.pin_memory().to("cuda", non_blocking=True) for name, tensor in batch.items()}

    def backward(self, batch: Batch, share: float = 1.0) -> None:
        with torch.autocast(self.device.name, dtype=torch.bfloat16):
            loss = self.model(**batch).loss
        (loss * share).backward()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch: Batch) -> None:
        self.backward(batch)
        self.update()

    def free(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.device.free()


class Outcome(NamedTuple):
    """Of one batch: the examples that an update was made from, and how often memory ran out."""

    trained: int
    ooms: int = 0


Train = Callable[[Batch], Outcome]


def whole(loop: Loop, batch: Batch) -> Outcome:
    """Train on a batch; one that does not fit is lost."""
    num = len(batch["labels"])
    if loop.device.fits(lambda: loop.step(batch)):
        return Outcome(num)
    loop.free()
    return Outcome(0, 1)


def split_retry(loop: Loop, size: int, batch: Batch) -> Outcome:
    """Train on a batch; one that does not fit runs in pieces of ``size``, and a piece that does not is lost.

    This is what dynabatch's Trainer does with ``oom_fallback="split_retry"``: one level, the padding kept.
    """
    num = len(batch["labels"])
    if loop.device.fits(lambda: loop.step(batch)):
        return Outcome(num)
    loop.free()
    trained, ooms = 0, 1
    for start in range(0, num, size):
        part = {name: tensor[start : start + size] for name, tensor in batch.items()}
        num_part = len(part["labels"])
        if loop.device.fits(partial(loop.backward, part, num_part / num)):
            trained += num_part
        else:
            ooms += 1
    if trained:
        loop.update()
    return Outcome(trained, ooms)


@final
class Through:
    """Training through ``Stepper``: the same update, exact whatever has to be split.

    The stepper is made with its first batch and dropped after the arm, so that no graph holds memory of other arms.

    Args:
        loop: has the model and the optimizer.
        shapes: of a plan; with them steps are captured and replayed.
    """

    def __init__(self, loop: Loop, shapes: IntArray | None = None) -> None:
        self._loop, self._shapes = loop, shapes
        self._stepper: Stepper | None = None
        self.peak_bytes = 0

    def __call__(self, batch: Batch) -> Outcome:
        """Run one update."""
        if self._stepper is None:
            self._stepper = self._make()
        report = self._stepper.step(batch)
        self.peak_bytes = max(self.peak_bytes, report.peak_bytes or 0)
        return Outcome(report.batch_size, report.ooms)

    def _make(self) -> Stepper:
        graphs: Row = {}
        if self._shapes is not None:
            graphs = {"graphs": EagerGraphs() if self._loop.device.is_cpu else True, "shapes": self._shapes}
        model, optimizer = self._loop.model, self._loop.optimizer
        return Stepper(model, optimizer, huggingface_loss(), autocast=torch.bfloat16, clip_norm=CLIP_NORM, **graphs)

    def close(self) -> Row:
        """Drop the stepper, and return what its graphs did."""
        stepper, self._stepper = self._stepper, None
        if stepper is None or self._shapes is None:
            return {}
        summary = stepper.graph_summary()
        print(summary, flush=True)
        names = ("hit_rate", "pool_bytes", "predicted_pool_bytes", "capture_seconds", "saved_seconds")
        found = {name: getattr(summary, name) for name in names}
        return {**found, "reasons": dict(summary.reasons), "stepper_peak_gib": self.peak_bytes / GIB}


@final
@dataclass(frozen=True)
class Arm:
    """A way to train: which batches, and what is done with each.

    Args:
        name: for the table.
        pairs: the corpus.
        batches: indices, every example once.
        train: of one batch.
        epoch_seconds: an epoch ends after this.
        shapes: what each batch is padded to, (items, source, target); None for its longest.
    """

    name: str
    pairs: Pairs
    batches: list[IntArray]
    train: Train
    epoch_seconds: float
    shapes: IntArray | None = None

    def shape(self, place: int) -> tuple[int, ...]:
        """Return (items, source, target) of a batch, as padded."""
        if self.shapes is None:
            return shape_of(self.batches[place], self.pairs.lengths)
        return tuple(self.shapes[place].tolist())

    def describe(self) -> Row:
        shapes = [self.shape(place) for place in range(len(self.batches))]
        real = sum(int(self.pairs.lengths[batch].sum()) for batch in self.batches)
        return {
            "arm": self.name,
            "pairs": len(self.pairs.lengths),
            "batches": len(self.batches),
            "shapes": len(set(shapes)),
            "padding": 1 - real / sum(num * sum(widths) for num, *widths in shapes),
        }


class Epoch(NamedTuple):
    num_batches: int
    trained: int
    tokens: int
    ooms: int
    seconds: float


def run_arm(loop: Loop, arm: Arm) -> Row:
    """Run an epoch twice, in random order, and report both.

    An epoch that takes longer than ``epoch_seconds`` ends early; the second then runs the same batches, so that it has
    seen every shape. Examples per second count what was trained: a batch that ran out of memory counts only as time.
    Tokens are real ones; where an epoch was cut they depend less than examples on which batches it had.
    """
    loop.free()
    loop.device.monitor.reset_peak()
    retries = loop.device.num_retries
    order = np.random.default_rng(2).permutation(len(arm.batches))
    first = run_epoch(loop, arm, order, arm.epoch_seconds)
    steady = run_epoch(loop, arm, order[: first.num_batches], float("inf"))
    row = {
        **arm.describe(),
        "share_run": first.num_batches / len(arm.batches),
        "first_per_second": first.trained / first.seconds,
        "steady_per_second": steady.trained / steady.seconds,
        "tokens_per_second": steady.tokens / steady.seconds,
        "ooms": first.ooms + steady.ooms,
        "lost": 2 * int(sum(len(arm.batches[i]) for i in order[: first.num_batches])) - first.trained - steady.trained,
        "retries": loop.device.num_retries - retries,
        **loop.device.peak(arm.train.peak_bytes if isinstance(arm.train, Through) else 0),
        **(arm.train.close() if isinstance(arm.train, Through) else {}),
    }
    print(json.dumps(row), flush=True)
    return row


def run_epoch(loop: Loop, arm: Arm, order: IntArray, limit_seconds: float) -> Epoch:
    loop.device.synchronize()
    start = time.perf_counter()
    num = trained = tokens = ooms = 0
    for place in order:
        batch = arm.batches[place]
        outcome = arm.train(loop.send(arm.pairs.collate(batch, arm.shape(place))))
        done = min(outcome.trained, len(batch))  # rows that fill a shape up are no examples
        num, trained, ooms = num + 1, trained + done, ooms + outcome.ooms
        tokens += int(arm.pairs.lengths[batch].sum()) * done // len(batch)
        if time.perf_counter() - start > limit_seconds:
            break
    loop.device.synchronize()
    return Epoch(num, trained, tokens, ooms, time.perf_counter() - start)


def dense_limit(loop: Loop, shapes: list[tuple[int, ...]], tokens_a_pair: float, *, repeats: int = 5) -> Row:
    """Return the throughput of batches without padding, at the best of some shapes that fill memory."""
    best: Row = {"arm": "limit: no padding, best dense shape", "padding": 0.0, "steady_per_second": 0.0}
    for num, source, target in shapes:
        pairs = Pairs(np.tile([[source, target]], (num, 1)), loop.vocabulary)
        batch = loop.send(pairs.collate(np.arange(num)))
        loop.free()
        if not loop.device.fits(lambda batch=batch: [loop.step(batch) for _ in range(2)]):  # type: ignore[misc]
            continue
        loop.device.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            loop.step(batch)
        loop.device.synchronize()
        tokens_per_second = repeats * num * (source + target) / (time.perf_counter() - start)
        speed = tokens_per_second / tokens_a_pair
        if speed > best["steady_per_second"]:
            best.update(steady_per_second=speed, tokens_per_second=tokens_per_second, shape=[num, source, target])
    print(json.dumps(best), flush=True)
    return best
