"""Speech: batches by seconds of padded audio, with the transcript as a second length.

    python examples/speech_lengths.py

The recordings are noise; their lengths are drawn as those of read speech are, from 1 to 30 seconds, with 15 characters
per second. You see the padded audio of 8 recordings as they come and of batches of at most 240 padded seconds, the same
limit. Then a small model trains with the CTC loss in planned batches. Change ``SECONDS`` to what your device holds.
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.step import PadCollator, Stepper

FRAMES_PER_SECOND, SECONDS = 50, 240


def padded_frames(num_items: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return what a batch costs: its frames of audio with padding; characters cost next to nothing."""
    return num_items * lengths[:, 0]


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Return the summed CTC loss, and the number of recordings."""
    logits = model(batch["frames"][..., None]).log_softmax(dim=-1).transpose(0, 1)
    lengths = batch["mask"].sum(dim=1), (batch["labels"] != -100).sum(dim=1)
    return nn.functional.ctc_loss(logits, batch["labels"].clamp(min=0), *lengths, reduction="sum"), len(batch["frames"])


def main(quick: bool = False) -> dict[str, float]:
    """Plan, train for an epoch, print and return the figures."""
    rng, num = np.random.default_rng(0), 96 if quick else 640
    seconds = rng.lognormal(np.log(6), 0.6, num).clip(1, SECONDS / 8)  # 8 of the longest are at the limit
    lengths = np.stack([seconds * FRAMES_PER_SECOND, seconds * 15], axis=1).astype(int)
    audio = [rng.normal(size=frames).astype(np.float32) for frames in lengths[:, 0]]
    data = [{"frames": one, "labels": rng.integers(1, 27, num)} for one, num in zip(audio, lengths[:, 1], strict=True)]
    sampler = bw.BatchSampler(lengths, bw.MaxCost(padded_frames, SECONDS * FRAMES_PER_SECOND), seed=0)
    plans = {"8 recordings": bw.plan_batches(lengths, bw.MaxItems(8), grouping=bw.InOrder()), "planned": sampler.plan}
    figures = {"seconds": float(seconds.sum())}
    for name, plan in plans.items():
        figures[name] = float((plan.shapes[:, 0] * plan.shapes[:, 1]).sum()) / FRAMES_PER_SECOND
        print(f"{name:>12}: {len(plan):>3} batches, {figures[name]:>6,.0f} s padded, {seconds.sum():,.0f} s real")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 27))
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn)
    collate = PadCollator(axis_fields=("frames", "labels"), mask_field="mask")
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    reports = [stepper.step(batch) for batch in sampler.track(loader)]
    print(f"{len(reports)} updates; loss per recording from {reports[0].loss:.0f} to {reports[-1].loss:.0f}")
    return {**figures, "recordings": sum(report.batch_size for report in reports)}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
