"""How well a few probes predict peak memory: seven architectures, training and inference, held-out shapes.

    python benchmarks/gpu_memory.py --output benchmarks/results/gpu_memory.json
    python benchmarks/gpu_memory.py --refit benchmarks/results/gpu_memory.json    # fits measured peaks anew, no GPU
    python benchmarks/gpu_memory.py --counted --output benchmarks/results/memory_counted.json    # full size, no GPU
    python benchmarks/gpu_memory.py --smoke

Encoder, decoders, sequence-to-sequence models, images (a shape counts patches) and speech (it counts samples), random
weights. Training is bf16 autocast with AdamW and gradients kept between micro-batches; inference is in bf16. Text in
training is measured only by `calibrate_huggingface`, everything else by `calibrate` with a run of its own and
`growing_shapes`. Then shapes that were not probed, half of them near the limit, are measured and compared
with `predict` and with `upper`. `--counted` runs the same models with tensors that have a size but no data, and counts
the bytes of those that live: no workspaces of kernels, no rounding of an allocator, but every operation of the model. A
model that reads a number from a tensor cannot be counted.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _architectures import ARCHITECTURES, Architecture, Shape
from _gpu import GIB, Device, Row, make_parser, markdown, write

import batchwright as bw
from batchwright.step import Calibration, calibrate, calibrate_huggingface, growing_shapes
from batchwright.step.calibration.running import restored

SMOKE_CAP_GIB = 0.012
FILL = 0.9
MOST_ITEMS = 512
COLUMNS = (
    ("model", "model", ""), ("mode", "mode", ""), ("a shape counts", "kind", ""), ("probes", "probes", "d"),
    ("mean error", "mean_error", ".2%"), ("worst error", "worst_error", ".2%"), ("margin", "margin", ".2%"),
    ("held out", "held_out", "d"), ("over upper", "over_upper", "d"), ("ran out", "ran_out", "d"),
    ("seconds", "seconds", ".0f"), ("did not run", "error", ""),
)  # fmt: skip


def make_run(model: Any, architecture: Architecture, device: Device, *, trains: bool) -> Callable[[Shape], None]:
    """Return one forward and backward pass of a shape, or only a forward pass."""

    def train(shape: Shape) -> None:
        inputs = architecture.inputs(shape, device.name)
        with torch.autocast(device.name, dtype=torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()

    def infer(shape: Shape) -> None:
        inputs = architecture.inputs(shape, device.name)
        inputs.pop("labels")
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.ones((shape[0], shape[-1]), dtype=torch.long, device=device.name)
        for name in ("pixel_values", "input_values"):
            if name in inputs:
                inputs[name] = inputs[name].to(torch.bfloat16)
        with torch.inference_mode():
            model(**inputs)

    return train if trains else infer


def held_out(architecture: Architecture, budget: bw.Budget, known: set[Shape], *, small: bool) -> list[Shape]:
    """Return shapes that fit the budget and were not probed, random in size and length, half near the limit."""
    rng = np.random.default_rng(1)
    lengths = architecture.lengths(small)
    low, high = lengths.min(axis=0), lengths.max(axis=0)
    shapes: list[Shape] = []
    while len(shapes) < (4 if small else 12):
        row = [architecture.snap(int(x)) for x in np.exp(rng.uniform(np.log(low), np.log(high)))]
        most = min(MOST_ITEMS, int(budget.max_items(np.array([row]))[0]))
        share = rng.uniform(0.8, 1.0) if len(shapes) % 2 else rng.uniform(0.1, 0.8)
        shape = (int(most * share), *row)
        if shape[0] >= 1 and shape not in known and shape not in shapes:
            shapes.append(shape)
    return shapes


def calibrated(model: Any, architecture: Architecture, device: Device, *, trains: bool) -> tuple[Calibration, Any]:
    """Probe as a user would; return what was found, and the optimizer that training goes on with."""
    lengths = architecture.lengths(device.is_small)
    options: dict[str, Any] = {
        "max_bytes": FILL * device.cap_bytes, "monitor": device.monitor, "progress": False,
        "repeats": 1,  # memory repeats itself; a second run would only tell about time
    }  # fmt: skip
    growing = growing_shapes(lengths, max_tokens=MOST_ITEMS * int(lengths.max(axis=0).sum()))
    if not trains:
        run = make_run(model, architecture, device, trains=False)
        return calibrate(run, growing, restore=(model, None), **options), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **({} if device.is_cpu else {"fused": True}))
    if architecture.is_text:
        found = calibrate_huggingface(model, optimizer=optimizer, lengths=lengths, autocast=torch.bfloat16, **options)
        return found, optimizer
    run = make_run(model, architecture, device, trains=True)
    return calibrate(run, growing, restore=(model, optimizer), **options), optimizer


def measure(run: Callable[[Shape], None], shape: Shape, device: Device) -> int | None:
    """Return the peak of a shape, None where memory ran out."""
    device.monitor.reset_peak()
    if not device.fits(lambda: run(shape)):
        return None
    device.synchronize()
    return device.monitor.peak_bytes


def make_model(architecture: Architecture, device: Device, *, trains: bool) -> Any:
    dtype = torch.float32 if trains else torch.bfloat16
    if device.is_counted:  # tensors without data cannot be converted in place
        torch.set_default_dtype(dtype)
        model = architecture.make(device.is_small)
        torch.set_default_dtype(torch.float32)
    else:
        model = architecture.make(device.is_small).to(device.name, dtype)
    return model.train(trains)


def run_model(architecture: Architecture, device: Device, *, trains: bool) -> Row:
    torch.manual_seed(0)
    start = time.perf_counter()
    model = make_model(architecture, device, trains=trains)
    found, optimizer = calibrated(model, architecture, device, trains=trains)
    assert found.memory is not None
    shapes = held_out(architecture, found.budget(), set(found.shapes), small=device.is_small)
    run = make_run(model, architecture, device, trains=trains)
    # Where the host is the device, the copies that calibrate keeps there count as well.
    with restored([model]) if device.is_cpu else contextlib.nullcontext():
        if trains:  # gradients and the optimizer's state lie there, as in training
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        predicted = zip(shapes, found.memory.predict(shapes), found.memory.upper(shapes), strict=True)
        rows = [
            {"shape": shape, "peak": measure(run, shape, device), "predict": float(one), "upper": float(two)}
            for shape, one, two in predicted
        ]
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "probes": len(found.shapes),
        "probed": list(zip(found.shapes, found.peak_bytes or (), strict=True)),
        "largest_probe_of_cap": max(found.peak_bytes or [0]) / device.cap_bytes,
        "stopped": found.stopped,
        "seconds": time.perf_counter() - start,
        **judge(found.memory, rows),
        "rows": rows,
    }


def judge(memory: bw.MemoryModel, rows: list[Row]) -> Row:
    """Return the errors of a model on measured shapes."""
    measured = [row for row in rows if row["peak"] is not None]
    errors = [abs(row["predict"] / row["peak"] - 1) for row in measured]
    return {
        "memory": json.loads(memory.to_json()),
        "margin": memory.margin,
        "held_out": len(rows),
        "mean_error": float(np.mean(errors)),
        "worst_error": float(np.max(errors)),
        "over_upper": sum(row["peak"] > row["upper"] for row in measured),
        "ran_out": len(rows) - len(measured),
    }


def refit(path: Path) -> list[Row]:
    """Fit the model to the peaks that were measured before, and judge it on the same held-out shapes."""
    report = json.loads(path.read_text())
    for row in report["models"]:
        if "probed" not in row:
            continue
        shapes, peaks = zip(*row["probed"], strict=True)
        memory = bw.MemoryModel.fit(shapes, peaks)
        wanted = [held["shape"] for held in row["rows"]]
        found = zip(row["rows"], memory.predict(wanted), memory.upper(wanted), strict=True)
        rows = [{**held, "predict": float(one), "upper": float(two)} for held, one, two in found]
        row.pop("coefficients", None)
        row.update({**judge(memory, rows), "rows": rows})
    report["refitted"] = True
    write(path, report)
    return list(report["models"])


def run(device: Device, architectures: list[Architecture], output: Path | None) -> list[Row]:
    """Measure training and inference of every architecture, and return the rows."""
    rows: list[Row] = []
    report = {**device.describe(), "fill": FILL, "models": rows}
    for architecture in architectures:
        for trains in (True, False):
            row: Row = {"model": architecture.name, "mode": "train" if trains else "infer", "kind": architecture.kind}
            try:
                row.update(run_model(architecture, device, trains=trains))
            except Exception as error:  # the other models still have something to tell
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(row)
            print(json.dumps({key: value for key, value in row.items() if key not in ("rows", "probed")}), flush=True)
            device.free()
            write(output, report)
    return rows


def main() -> None:
    parser = make_parser(__doc__, cap_gib=32.0)
    parser.add_argument("--counted", action="store_true", help="full size without a GPU: tensors without data")
    parser.add_argument("--models", default="", help="only those whose name contains this")
    parser.add_argument("--refit", type=Path, help="a file of results: fit its measured peaks anew, and stop")
    options = parser.parse_args()
    if options.refit:
        print(markdown(refit(options.refit), COLUMNS))
        return
    chosen = [architecture for architecture in ARCHITECTURES if options.models.lower() in architecture.name.lower()]
    cap_bytes = (SMOKE_CAP_GIB if options.smoke else options.cap_gib) * GIB
    with Device(cap_bytes, smoke=options.smoke, counted=options.counted) as device:
        rows = run(device, chosen, options.output)
    print(markdown(rows, COLUMNS))
    if any("error" in row for row in rows) and not options.counted:  # a model that reads its data cannot be counted
        raise SystemExit(1)


if __name__ == "__main__":
    main()
