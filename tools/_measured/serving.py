"""Serving: live requests beside other batchers, real encoders, real arrivals, and what offline work adds."""

from __future__ import annotations

from .reading import Record, read
from .tables import named, number, percent, raw, table

ARMS = {
    "ours": "**batchwright**",
    "bentoml": "BentoML",
    "ray": "Ray Serve",
    "async-batcher": "async-batcher",
    "batched": "batched",
    "window": "batchwright, a window of 10 ms",
    "greedy": "batchwright, in order of arrival",
    "ours-slow": "batchwright, times predicted 30 % too long",
    "ours-fast": "batchwright, times predicted 30 % too short",
    "ours-constant": "batchwright, equal lengths",
    "greedy-constant": "in order of arrival, equal lengths",
    "adaptive": "**batchwright**",
    "window 10 ms": "a window of 10 ms",
}
ENCODERS = {
    "serving_encoder.json": "all-MiniLM-L6-v2 over HTTP, one CPU thread",
    "serving_encoder_gpu.json": "BERT of the base shape, one H200",
    "serving_encoder_gpu_default.json": "the same with cuDNN attention, which plans again for every shape",
}


def render() -> str:
    """Return the section."""
    earlier = read("serving_peers.json")
    versions = earlier["environment"]["versions"]
    known = ", ".join(f"{name} {versions[name]}" for name in versions.keys() if versions[name])
    return f"""\
## Serving

Live requests, Poisson arrivals on a stub of a model that takes 4 ms and 0.25 ms for each item of 64 padded tokens,
lengths lognormal, due within 50 ms, every batcher with its defaults; medians of the passes, latency from the intended
arrival. `python benchmarks/serving.py --rates 200 1000 2000 3000 5000 --arms ours bentoml`; raw: {raw("serving.json")}.

{_loads(read("serving.json"))}

An earlier version of batchwright, without admission by predicted wait, beside more peers. `python
benchmarks/serving.py`; {known}; raw: {raw("serving_peers.json")}.

{_loads(earlier)}

**Where we do not win.** Where all items are equally long, the default and the order of arrival do the same (that
version):

{_loads(earlier, "constant")}

Differences of half a millisecond at 200 requests per second are noise. A time model that is 30 % wrong, by
{raw("serving_controls.json")}:

{_loads(read("serving_controls.json"), "lognormal", ("ours", "ours-slow", "ours-fast"))}

With real arrivals and lengths, sped up ({raw("serving_traces.json")}):

{_traces(read("serving_traces.json"))}

### Real encoders

`python benchmarks/serving_encoder.py`, one run each; answered in time per second, and missed.

{_encoders()}

On a GPU that is far from busy any batching will do, and one request at a time is what loses.

### Everything at once

`python benchmarks/serving_stress.py` sends requests while functions raise, hang, exit and are killed
({raw("serving_stress.json")}): {_stress()}
"""


def _loads(results: Record, load: str = "lognormal", arms: tuple[str, ...] = ()) -> str:
    found = [row for row in results.rows("summary", load=load) if not arms or row["arm"] in arms]
    rates = sorted({row["rate"] for row in found})
    names = list(dict.fromkeys(row["arm"] for row in found))
    rows = []
    for arm in sorted(names, key=lambda name: list(ARMS).index(name) if name in ARMS else len(ARMS)):
        cells = [[row for row in found if (row["arm"], row["rate"]) == (arm, rate)] for rate in rates]
        rows.append([named(ARMS, arm), *(_load(cell[0]) if cell else "" for cell in cells)])
    return table(["p50, p99 ms; in time", *(f"{rate:,}/s" for rate in rates)], rows)


def _load(row: Record) -> str:
    return f"{_ms(row['p50_ms'])}, {_ms(row['p99_ms'])}; {percent(1 - row['missed'])}"


def _ms(value: float | None) -> str:
    return "none" if value is None else number(value, 1 if value < 100 else 0)


def _traces(results: Record) -> str:
    loads = [load for load in dict.fromkeys(row["load"] for row in results.rows("summary")) if load != "lognormal"]
    arms = list(dict.fromkeys(row["arm"] for row in results.rows("summary") if row["load"] in loads))
    cells = {(row["load"], row["arm"]): percent(row["missed"]) for row in results.rows("summary")}
    rows = [[named(ARMS, arm), *(cells.get((load, arm), "") for load in loads)] for arm in arms]
    return table(["missed", *loads], rows)


def _encoders() -> str:
    parts = []
    for file, what in ENCODERS.items():
        results = read(file)
        rates = list(dict.fromkeys(row["rate"] for row in results.rows()))
        rows = []
        for arm in dict.fromkeys(row["arm"] for row in results.rows()):
            cells = [f"{number(row['goodput'])}/s, {percent(row['missed'])}" for row in results.rows(arm=arm)]
            rows.append([named(ARMS, arm), *cells])
        deadline = f"due within {number(results['deadline_ms'])} ms"
        head = f"{what}: {number(results['one_alone_ms'], 1)} ms for one request, {deadline} ({raw(file)})."
        parts.append(head + "\n\n" + table(["in time, missed", *(f"{number(rate)}/s" for rate in rates)], rows))
    return "\n\n".join(parts)


def _stress() -> str:
    results = read("serving_stress.json")
    return (
        f"{number(results['num_requests'])} requests in {number(results['seconds'])} s, {results['num_kills']} "
        f"processes killed; {results['num_lost']} lost, {results['num_wrong']} wrong, {results['num_duplicated']} "
        f"answered twice, {results['num_good_failed_by_a_mate']} failed by a mate."
    )
