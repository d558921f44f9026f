"""Training on a GPU: loss against seconds, examples per second, allocators, trainers, packed rows."""

from __future__ import annotations

from .reading import Record, Row, StaleResult, read, summary_of
from .tables import named, number, percent, raw, short, table

TRANSLATION = "gpu_quality_translation.json"
ARMS = {
    "fixed-16": "16 texts, shuffled",
    "batch_rebalance-64-4": "transformers' `batch_rebalance`, 64 texts in 4 parts",
    "group_by_length-128": "transformers' `group_by_length`, 128 texts",
    "dynabatch-16": "dynabatch's own batches, 16, range 5",
    "buckets-16-4096": "`MaxTokens(4096)`, `Buckets(16)`",
    "max_tokens-8192": "`MaxTokens(8192)`",
    "grouped-128": "128 texts of similar length, the best size of a sweep",
    "dynabatch-64": "dynabatch's own batches, 64, range 5",
    "graphs-16-4096": "`MaxTokens(4096)`, `Buckets(16)`, **graphs**",
    "graphs-16-8192": "`MaxTokens(8192)`, `Buckets(16)`, **graphs**",
}
DECODER_ARMS = {
    "fixed-32": "32 texts, shuffled",
    "max_tokens-16384": "`MaxTokens(16384)`",
    "graphs-16-4096": "`MaxTokens(4096)`, `Buckets(16)`, **graphs**",
}
TRAINER_ARMS = {
    "fixed-10": "Trainer, 10 examples",
    "dynabatch-10": "dynabatch's own trainer, first batch of 10",
    "auto": '`budget="auto"`',
    "graphs-12-2048": "`MaxTokens(2048)`, `Buckets(12)`, **graphs**",
    "graphs-12-4096": "`MaxTokens(4096)`, `Buckets(12)`, **graphs**",
    "group_by_length-10": "`group_by_length`, 10 examples",
    "batch_rebalance-10": "`batch_rebalance`, 10 examples",
}


def render() -> str:
    """Return the sections."""
    return "\n".join([_quality(), _through_the_trainer(), _examples(), _allocators(), _packing()])


def best_of_peers() -> tuple[Row, Row]:
    """Return the arm that is drawn as ours, and the peer with the least loss."""
    ours, *peers = summary_of(TRANSLATION, "translation", ["graphs-16-8192", "dynabatch-64", "grouped-128"])
    return ours, min(peers, key=lambda row: float(row["loss"]))


def _quality() -> str:
    found = sorted(summary_of(TRANSLATION, "translation", list(ARMS)), key=lambda row: -row["loss"])
    decoder = summary_of("gpu_quality_decoder.json", "decoder", list(DECODER_ARMS))
    ours, peer = best_of_peers()
    return f"""\
## Loss against seconds

A small step is bound by the host, which launches thousands of kernels, whatever the step holds.
`Stepper(graphs=True, shapes=sampler)` captures every planned shape once and replays it. A translation model of 48
million
parameters from scratch, {number(ours["curve"][-1][0])} s of training for every arm on one H200, capture inside the
clock.
An arm counts at its best learning rate; a range is over seeds. `python benchmarks/gpu_quality.py --data
translation.npz`;
raw: {raw(TRANSLATION)}.

{_losses(found, ARMS)}

![Validation loss against seconds of training](images/loss_against_seconds.svg)

`MaxTokens(8192)`, `Buckets(16)` and graphs pass the best peer's loss ({named(ARMS, peer["arm"])}) after
{_or(ours["to_peer"])} s: {_or(ours["times_peer"])} times as fast.

**Where arithmetic binds** the gain is smaller. A decoder of 110 million parameters ({raw("gpu_quality_decoder.json")}):

{_losses(decoder, DECODER_ARMS)}

Without graphs the same plans end above the best fixed size of a sweep: a plan under a budget that was not swept is not
a better batch size. [When graphs pay](graphs.md), [how near `goodput` comes to a sweep](batch_size.md).
"""


DEMO_ARMS = {
    "fixed-16": "16 texts, shuffled",
    "grouped-128": "128 texts by length, best of a sweep",
    "max_tokens-8192": "planned, MaxTokens(8192)",
    "graphs-16-8192": "planned shapes, replayed as graphs",
}
DEMO_DECODER_ARMS = {
    "fixed-32": "32 texts, shuffled",
    "max_tokens-16384": "planned, MaxTokens(16384)",
    "graphs-16-4096": "planned shapes, replayed as graphs",
}


def for_the_demo() -> dict[str, object]:
    """Return the few figures of a GPU that the package brings along, for the page of its demo."""
    return {
        "device": read(TRANSLATION).rows("commands")[0]["device"],
        "command": "benchmarks/gpu_quality.py",
        "tasks": [
            _demo_task(
                TRANSLATION,
                "translation",
                DEMO_ARMS,
                "Translation, 48 million parameters",
                "Small steps: most of the time goes into starting kernels.",
            ),
            _demo_task(
                "gpu_quality_decoder.json",
                "decoder",
                DEMO_DECODER_ARMS,
                "A decoder, 110 million parameters",
                "Larger steps: more of the time is arithmetic, so there is less to gain.",
            ),
        ],
    }


def _demo_task(file: str, task: str, arms: dict[str, str], title: str, note: str) -> dict[str, object]:
    found = summary_of(file, task, list(arms))
    rows = [
        {
            "name": arms[row["arm"]],
            "tokens_per_second": int(round(row["tokens_per_second"], -3)),
            "padding": round(row["padding"], 3),
            "updates": round(row["updates"]),
            "loss": round(row["loss"], 2),
        }
        for row in found
    ]
    return {"title": title, "note": note, "seconds": round(found[0]["curve"][-1][0]), "rows": rows}


def _or(value: float | None) -> str:
    return "never" if value is None else short(value)


def _losses(found: list[Row], names: dict[str, str]) -> str:
    rows = []
    for row in found:
        spread = f" ({row['spread']})" if row["spread"] else ""
        speed = f"{round(row['tokens_per_second'], -3):,.0f}"
        cells = [speed, number(row["updates"]), percent(row["padding"], 0), f"{row['loss']:.2f}{spread}"]
        rows.append([names[row["arm"]], *cells, f"{row['seeds']}"])
    return table(["", "real tokens/s", "updates", "padding", "validation loss", "seeds"], rows)


def _through_the_trainer() -> str:
    return f"""\
## Through the Trainer

A model of NLLB-600M's shape, 40,000 real pairs, memory capped at 32 GiB on one H200, 25 s for every arm.
`python benchmarks/gpu_trainer.py --data pairs.npz`; raw: {raw("gpu_trainer.json")}.

{_trainer("gpu_trainer.json")}

{_passes("gpu_trainer.json", "auto")} Planned shapes replayed as CUDA graphs, on another machine, capture inside the
clock
({raw("gpu_trainer_graphs.json")}):

{_trainer("gpu_trainer_graphs.json")}

{_passes("gpu_trainer_graphs.json", "graphs-12-2048")}

**Where we do not win.** The seconds before the first update are those of measuring, and they are not in the examples
per second; a second start reads what the first one found. Early in training a loss takes updates, not examples: five
times
the examples per second of dynabatch are not five times the progress. Where that binds, small batches by replay do more.
"""


def _passes(file: str, arm: str) -> str:
    """Return when an arm has the loss that dynabatch ends with, each at its best rate."""
    found = read(file).rows()
    ours, peer = (min((row for row in found if row["arm"] == name), key=_loss) for name in (arm, "dynabatch-10"))
    points = list(zip(ours["curve"], ours["curve"][1:], strict=False))
    for (before, higher), (after, lower) in points:
        if higher > peer["loss"] >= lower:
            seconds = before + (higher - peer["loss"]) / (higher - lower) * (after - before)
            return (
                f"{named(TRAINER_ARMS, arm)} has the loss that dynabatch ends with after {number(seconds, 1)} s: "
                f"{short(peer['seconds'] / seconds)} times as fast."
            )
    raise StaleResult(f"{file}: {arm} never has the loss of dynabatch")


def _loss(row: Record) -> float:
    return float(row["loss"])


def _trainer(file: str) -> str:
    found = read(file).rows()
    rows = []
    for row in found:
        fixed = [each for each in found if each["arm"] == "fixed-10" and each["lr"] == row["lr"]]
        peers = [each for each in found if each["arm"] == "dynabatch-10" and each["lr"] == row["lr"]]
        ratios = [_ratio(row, others) for others in (fixed, peers)]
        rows.append([
            named(TRAINER_ARMS, row["arm"]), f"{row['lr']:g}", number(row["examples_per_second"]), *ratios,
            percent(row["padding"], 0), percent(row["peak_of_cap"]), f"{row['ooms']}",
            f"{number(row['startup_seconds'], 1)} s", number(row["loss"], 2),
        ])  # fmt: skip
    header = [
        "",
        "rate",
        "examples/s",
        "÷ fixed",
        "÷ dynabatch",
        "padding",
        "peak ÷ cap",
        "OOMs",
        "before the first update",
        "loss",
    ]
    return table(header, rows)


def _ratio(row: Record, others: list[Record]) -> str:
    return short(row["examples_per_second"] / others[0]["examples_per_second"] if others else None)


def _examples() -> str:
    drawn, default = read("gpu_training_drawn.json"), read("gpu_training_default.json")
    best = drawn.row(arm="calibrated, Sorted()", pairs=40_000)
    sudden = [row for row in default.rows() if row["arm"].startswith("calibrated")]
    return f"""\
## Examples per second under a cap

The same shape in a plain loop (random weights, bf16), memory capped at 32 GiB, cuDNN attention off and the allocator
`cudaMallocAsync` for every arm; lengths of real pairs (Python's documentation in English and Spanish: median 29 and 31
tokens, longest 512 after cutting), once every shape was seen. One run, epochs of at most 9 s, of 24 s on 40,000 pairs.
`python benchmarks/gpu_training.py --lengths lengths.npy`; raw: {raw("gpu_training.json")}.

{_training(read("gpu_training.json"))}

Steps are bound by the host that launches them, so the same batches differ by a tenth from run to run. On drawn lengths
(median 16, longest 512) and whole epochs the calibrated budget with `Sorted()` came to {short(best["to_fixed"])}
times the
fixed size, {short(best["to_peer"])} times dynabatch and {percent(best["to_limit"], 0)} of the limit
({raw("gpu_training_drawn.json")}). With cuDNN attention on, the first visit of a shape is slow for every arm; once
all were
seen the calibrated budget is {_range(sudden, "to_fixed")} times the fixed size and {_range(sudden, "to_peer")} times
dynabatch ({raw("gpu_training_default.json")}). `batchwright doctor` finds that out on your machine. dynabatch was
given the
lengths with assumed word and character counts, because the corpus is only lengths.

**Where we do not win.** Sorting at the fixed size changes little here, because the host binds; and `MaxTokens` with a
number that was not measured leaves memory and speed unused.
"""


def _training(results: Record) -> str:
    rows = []
    for row in results.rows():
        rows.append([
            row["arm"], number(row.get("pairs")), number(row["steady_per_second"]), short(row["to_fixed"]),
            short(row["to_peer"]), number(row["to_limit"], 2), percent(row["padding"], 0),
            "" if "ooms" not in row else f"{row['ooms']}", number(row.get("peak_of_cap"), 2),
        ])  # fmt: skip
    header = ["", "pairs", "examples/s", "÷ fixed", "÷ dynabatch", "÷ limit", "padding", "OOMs", "peak ÷ cap"]
    return table(header, rows)


def _range(rows: list[Record], key: str) -> str:
    if not rows:
        raise StaleResult("gpu_training_default.json: no arm is called calibrated; run gpu_training.py again")
    values = sorted(row[key] for row in rows)
    return f"{number(values[0])} to {number(values[-1])}"


def _allocators() -> str:
    results = read("gpu_allocators.json")
    rows = [
        [
            f"`{row['allocator']}`",
            f"{round(row['tokens_per_second'], -3):,.0f}",
            f"{row['ooms']}",
            f"{row['retries']}",
            percent(row["peak_of_cap"]),
        ]
        for row in results.rows()
    ]
    return f"""\
## Allocators

The same plan of a calibrated budget, {number(results["cap_gib"])} GiB, under PyTorch's allocators: batches of many
shapes
break up the memory of the default one. `python benchmarks/gpu_allocators.py --lengths lengths.npy`; raw:
{raw("gpu_allocators.json")}.

{table(["`PYTORCH_CUDA_ALLOC_CONF`", "tokens/s", "OOMs", "blocks given back", "peak ÷ cap"], rows)}
"""


def _packing() -> str:
    rows = [
        [
            row["model"],
            weights,
            row["arm"],
            number(row["tokens_per_second"]),
            *(_to(row, others, arm) for arm in ("padded", "positions")),
            percent(row["padding"]),
            number(row["peak_gib"], 1),
        ]
        for file, weights in PACKING.items()
        for others in [read(file).rows()]
        for row in others
    ]
    return f"""\
## Packed rows

Real tokens per second on an H200, Llama shapes, instructions, 16,384 tokens per step, bf16, through `Stepper`:
`padded` is
`WindowSort`, `flat` packed rows without padding, `positions` packed rows with position ids.
`python benchmarks/gpu_packing.py --data decoder.npz`; raw: {raw(*PACKING)}.

{table(["parameters", "weights", "", "real tokens/s", "÷ padded", "÷ positions", "padding", "peak GiB"], rows)}

**Where we do not win.** `WindowSort` leaves under 2 % of padding, so packing gains what attention without a mask saves,
and the more of it the less the rest of a step takes: weights in bf16 (`--weights bfloat16`) against weights in fp32.
"""


PACKING = {"gpu_packing.json": "fp32", "gpu_packing_1b.json": "fp32", "gpu_packing_bf16.json": "bf16"}


def _to(row: Record, others: list[Record], arm: str) -> str:
    found = [each for each in others if each["model"] == row["model"] and each["arm"] == arm]
    return f"{row['tokens_per_second'] / found[0]['tokens_per_second']:.3f}" if found else ""
