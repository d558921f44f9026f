"""Inference on a GPU: generating, a decoder beside an engine, and an encoder."""

from __future__ import annotations

from .reading import RESULTS, Record, read
from .tables import number, percent, raw, short, table

ENGINE = "gpu_decoder_generate.json"
ARMS = ("eager", "graphed")
NUM_INPUTS = 1_500


def render() -> str:
    """Return the sections; the engine has one once it was run."""
    engine = [_beside_an_engine()] if (RESULTS / ENGINE).exists() else []
    return "\n".join([_generating(), *engine, _encoding()])


def _generating() -> str:
    results = read("gpu_generate.json")
    command = results.rows("commands")[-1]
    rows = [
        [
            row["arm"],
            number(row["steady_per_second"]),
            number(row["first_per_second"]),
            short(row.get("to_peer")),
            short(row.get("to_eager")),
            f"{row['prompts']}",
            _share_in_replays(row),
            f"{row['ooms']}",
            percent(row["peak_of_cap"], 0),
        ]
        for row in results.rows()
    ]
    return f"""\
## Generating

M2M100-418M's shape in fp16 under {number(command["cap_gib"])} GiB, {number(NUM_INPUTS)} inputs of drawn lengths, at
most {command["max_new_tokens"]} new tokens, on one {command["device"]}. Every arm runs twice; `first` is the
first time. `prompts` are passes over prompts, comparisons with eager steps among them, and `in replays` the share of
a pass that the device spends in graphs. Every step of eager decoding waits for the host, and hosts differ.
`python benchmarks/gpu_generate.py`; raw: {raw("gpu_generate.json")}.

{table(["", "examples/s", "first", "÷ dynabatch", "÷ graphs off", "prompts", "in replays", "OOMs", "peak ÷ cap"], rows)}
"""


def _share_in_replays(row: Record) -> str:
    seconds = row.get("replay_seconds")
    return "" if seconds is None else percent(seconds * row["steady_per_second"] / NUM_INPUTS, 0)


def _beside_an_engine() -> str:
    results = read(ENGINE)
    rows = [
        [
            row["arm"],
            row["error"] if "error" in row else number(row["steady_per_second"]),
            number(row.get("tokens_per_second")),
            short(row.get("to_eager")),
            short(row.get("to_engine")),
            percent(row.get("same_tokens"), 0),
        ]
        for row in results.rows()
    ]
    has_engine = any("continuous batching" in row["arm"] for row in results.rows())
    title = "A decoder beside an engine" if has_engine else "A decoder"
    missing = (
        "" if has_engine else " transformers' continuous batching had not ended its warm-up when the run was cut off."
    )
    return f"""\
## {title}

A Llama shape of {number(results["parameters"] / 1e6)} million parameters in bf16, prompts of a median of 100 tokens and
64 new ones at the median, greedy, on one {results["device"]}. `same tokens` are those before the first that differs
from eager generation: bf16 rounds otherwise in another kernel, and the near ties of random weights fall the other way.
`python benchmarks/gpu_decoder_generate.py`; raw: {raw(ENGINE)}.{missing}

{table(["", "prompts/s", "new tokens/s", "÷ eager", "÷ engine", "same tokens"], rows)}
"""


def _encoding() -> str:
    results = read("gpu_encoder.json")
    command = results.rows("commands")[-1]
    by_phase = {phase: [results.row(phase=phase, arm=arm) for arm in ARMS] for phase in ("visits", "load", "closed")}
    rows = [
        ["first batch of a new length, ms", *(number(row["first_ms"], 2) for row in by_phase["visits"])],
        ["later batches of it, ms", *(number(row["later_ms"], 2) for row in by_phase["visits"])],
        ["answers missed", *(percent(row["missed"]) for row in by_phase["load"])],
        ["99 % within, ms", *(number(row["p99_ms"], 1) for row in by_phase["load"])],
        ["answers/s, callers that wait", *(number(row["throughput"]) for row in by_phase["closed"])],
    ]
    warm_up = results.row(phase="warm_up")
    return f"""\
## Encoding live requests

BERT's base shape in half precision on one {command["device"]}, torch's default attention, new lengths all the time:
eager, and as `Encoder`, whose {number(warm_up["shapes"])} shapes were captured before the first request in
{number(warm_up["seconds"], 1)} s. {number(command["rate"])} requests/s with a deadline of
{number(command["deadline_ms"])} ms, and {number(command["callers"])} callers that wait for their answers.
`python benchmarks/gpu_encoder.py`; raw: {raw("gpu_encoder.json")}.

{table(["", "eager", "`Encoder`"], rows)}
"""
