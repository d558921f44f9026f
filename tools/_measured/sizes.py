"""Memory, the size of an update, and what steps and Keras cost."""

from __future__ import annotations

from .reading import Record, StaleResult, constants_of, read
from .tables import number, percent, raw, table

TASKS = ("images", "characters", "teacher")
STRATEGIES = {
    "goodput": "`goodput`, no sweep",
    "measured": "`measured`, no sweep",
    "measured_plan": "`measured`, the length of the run known",
    "mixed": "the larger of `measured` and `goodput`",
    "warmup": "a warm-up: 2, 4, 8 times the base",
    "smith": "Smith's ramp",
    "seesaw": "Seesaw",
}


def render() -> str:
    """Return the sections."""
    return "\n".join([_memory(), _sizes(), _overhead(), _keras()])


def _memory() -> str:
    results = read("gpu_memory.json")
    rows = []
    for name in dict.fromkeys(row["model"] for row in results.rows("models")):
        train, infer = (results.row("models", model=name, mode=mode) for mode in ("train", "infer"))
        cells = [percent(each[key], 2) for each in (train, infer) for key in ("mean_error", "worst_error")]
        rows.append([name, f"{train['probes']}, {infer['probes']}", *cells])
    over = sum(row["over_upper"] for row in results.rows("models"))
    return f"""\
## Memory predicted

Peak memory of unseen shapes, from a few probes, on an H200 ({number(results["cap_gib"])} GiB).
`python benchmarks/gpu_memory.py`; raw: {raw("gpu_memory.json")}. Batches that took more than `upper` said: {over}.

{table(["", "probes: train, infer", "training: mean error", "worst", "inference: mean error", "worst"], rows)}

**Where we do not win.** An encoder and a decoder that peak in turn, and convolutions that take less from 2³¹
elements on,
are off in inference. `--counted` tries the same without a GPU, on tensors without data
({raw("memory_counted.json")}); it
tests the fit, and does not replace a measurement.
"""


def _sizes() -> str:
    found = {task: {row["name"]: row for row in constants_of(task)} for task in TASKS}
    empty = [task for task, rows in found.items() if not rows]
    if empty:
        raise StaleResult(f"quality.json: the sweep of {', '.join(empty)} is not finished; run benchmarks/quality.py")
    best = [next(name for name in found[task] if name.startswith("best constant,")) for task in TASKS]
    rows = [["best constant of the sweep", *(name.removeprefix("best constant, constant-") for name in best)]]
    others = [name for name in dict.fromkeys(n for task in TASKS for n in found[task]) if not name.startswith("best")]
    for name in others:
        rows.append([STRATEGIES.get(name, name), *(_ratio(found[task].get(name)) for task in TASKS)])
    return f"""\
## The size of an update

The time to the loss of the best constant size of a sweep (6 sizes, 3 rates each), for policies without
a sweep, on a stated clock: a GPU that replays graphs. Below 1 is faster.
`python benchmarks/quality.py --clock graphs`; raw:
{raw("quality.json")}.

{table(["time ÷ best constant's (95 %)", *TASKS], rows)}

**Where we do not win.** Values above 1 are ours to explain: [how large?](batch_size.md) does, and has the runs on an
H200
with eager updates.
"""


def _ratio(row: dict[str, object] | None) -> str:
    return "" if row is None else f"{row['ratio']} ({row['interval']})"


def _overhead() -> str:
    results = read("stepper_overhead.json")
    arms = list(dict.fromkeys(row["arm"] for row in results.rows() if row["arm"] != "hand"))
    kinds = list(dict.fromkeys((row["model"], row["micro_batches"]) for row in results.rows()))
    rows = [[arm, *(_over(results, arm, *kind) for kind in kinds)] for arm in arms]
    header = ["over the loop by hand", *(f"{model}, {parts} micro-batches" for model, parts in kinds)]
    return f"""\
## What a step costs

`Stepper` beside the loop one would write by hand, on a CPU, in steps of 15 to 30 ms; `hand again` is the same loop
measured twice, so it is the noise. `python benchmarks/stepper_overhead.py`; raw: {raw("stepper_overhead.json")}.

{table(header, rows)}
"""


def _over(results: Record, arm: str, model: str, micro_batches: int) -> str:
    found = results.rows(arm=arm, model=model, micro_batches=micro_batches)
    return percent(found[0]["over_hand"]) if found else ""


def _keras() -> str:
    found = read("keras_padding.json")["rows"]
    rows = []
    for name in found.keys():
        row = found[name]
        clock = f"{number(row['ratio'], 2)} ({number(row['ratio_least'], 2)} to {number(row['ratio_most'], 2)})"
        cells = [f"{row['steps']}", percent(row["padding"]), f"{row['shapes']}"]
        rows.append([name, *cells, number(row["cpu_ratio"], 2), clock])
    return f"""\
## Keras beside tf.data

One epoch of 6,000 functions of the standard library at 8,192 padded tokens per batch, beside
`bucket_by_sequence_length`.
`python benchmarks/keras_padding.py`; raw: {raw("keras_padding.json")}.

{table(["", "steps", "padding", "shapes", "processor seconds ÷ first", "seconds ÷ first"], rows)}

**Where we do not win.** On the clock single rounds went both ways.
"""
