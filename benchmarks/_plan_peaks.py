"""Measured peaks of planned shapes: a small T5 of random weights, a training step and ``generate``.

Peaks are counted above what lies on the device before the batch: parameters, and gradients in training. Weights do not
matter for memory; generation runs to the last token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from _gpu import Device, Row

Shape = tuple[int, int]
Run = Callable[[Shape], None]


def choose_shapes(shapes: Iterable[Shape], first: Shape, most: int) -> list[Shape]:
    """Return distinct shapes, the first batch before all others; of many those of the most tokens, and a spread.

    >>> choose_shapes([(2, 9), (4, 3), (2, 9), (3, 5), (8, 1)], (2, 9), 3)
    [(2, 9), (3, 5), (8, 1)]
    """
    others = sorted(set(shapes) - {first}, key=lambda shape: (-shape[0] * shape[1], shape))
    if len(others) >= most:
        places = {round(place * (len(others) - 1) / max(1, most - 2)) for place in range(most - 1)}
        others = [others[place] for place in sorted(places)]
    return [first, *others]


def make_model(device: Device) -> Any:
    """Return a T5 of 60 million parameters; for a trial run a tiny one."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    if not device.is_small:
        sizes = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32_128}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
    return model.to(device.name, torch.float32 if device.is_small else torch.bfloat16)


def training(model: Any, device: Device) -> Run:
    """Return a function that trains on a shape once; targets are as long as inputs."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run(shape: Shape) -> None:
        ids = _ids(model, shape, device)
        model.train()(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()

    return run


def generation(model: Any, device: Device, *, max_new_tokens: int | None) -> Run:
    """Return a function that generates for a shape; None generates as many tokens as the inputs have."""
    model.zero_grad(set_to_none=True)

    def run(shape: Shape) -> None:
        num = shape[1] if max_new_tokens is None else max_new_tokens
        ids = _ids(model, shape, device)
        with torch.inference_mode():
            model.eval().generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, min_new_tokens=num,
                do_sample=False, num_beams=1,
            )  # fmt: skip

    return run


def measure(run: Run, shapes: list[Shape], device: Device, deadline: float) -> Row:
    """Return the peak of every shape relative to the first one; a shape that does not fit is named.

    Args:
        run: runs a batch of a shape.
        shapes: the first is the reference.
        device: where it runs.
        deadline: no shape is begun after this time, in seconds of ``time.monotonic``.
    """
    run(shapes[0])  # the first call of a process allocates workspaces that later ones find there
    peaks: dict[Shape, int | None] = {}
    for shape in shapes:
        if time.monotonic() > deadline:
            break
        peaks[shape] = _peak(run, shape, device)
    reference = peaks.get(shapes[0])
    if not reference:
        return {"num_shapes": len(shapes), "num_measured": 0}
    ratios = {shape: peak / reference for shape, peak in peaks.items() if peak is not None}
    worst = max(ratios, key=lambda shape: ratios[shape])
    return {
        "num_shapes": len(shapes),
        "num_measured": len(ratios),
        "reference_bytes": reference,
        "largest": ratios[worst],
        "largest_shape": list(worst),
        "num_over": sum(ratio > 1 for ratio in ratios.values()),
        "ran_out": [list(shape) for shape, peak in peaks.items() if peak is None],
        "ratios": [[*shape, round(ratio, 4)] for shape, ratio in ratios.items()],
    }


def _peak(run: Run, shape: Shape, device: Device) -> int | None:
    device.free()
    device.monitor.reset_peak()
    before = device.monitor.peak_bytes  # just reset, so what is there now
    if not device.fits(lambda: run(shape)):
        return None
    device.synchronize()
    return device.monitor.peak_bytes - before


def _ids(model: Any, shape: Shape, device: Device) -> torch.Tensor:
    return torch.randint(2, model.config.vocab_size, shape, device=device.name)
