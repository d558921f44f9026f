"""A decoder-only model on a GPU: `batchwright.step.generate` without and with graphs, and the engine of transformers.

    python benchmarks/gpu_decoder_generate.py --output benchmarks/results/gpu_decoder_generate.json
    python benchmarks/gpu_decoder_generate.py --smoke

A Llama shape of 350 million parameters in bf16 with random weights, greedy, prompts of drawn lengths (median 100, at
most 512), and for each prompt a drawn number of new tokens (median 64, at most 256) that every arm is told. The engine
is the continuous batching of transformers: requests share a paged cache, and the next one begins where one has ended.
It is kept warm between the two runs, as a server would be; its first run has its warm-up in it. An arm that fails has
a row that says why; arms that stand in `--output` without an error are not run again. Memory is not capped, since the
engine sizes its cache by what the device has free.

Outputs are compared with those of `model.generate`: in half precision a near tie may fall the other way, and everything
after it differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _gpu import GIB, Device, Row, make_parser, markdown, write
from _pairs import FIRST_TOKEN, IntArray, digest
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from batchwright.step import generate
from batchwright.testing import EagerGraphs

NUM, SMOKE_NUM = 512, 24
# The engine must not hold up a command for longer.
MOST_SECONDS = 100.0
COLUMNS = (
    ("arm", "arm", ""), ("first /s", "first_per_second", ",.0f"), ("steady /s", "steady_per_second", ",.0f"),
    ("new tokens/s", "tokens_per_second", ",.0f"), ("÷ eager", "to_eager", ".2f"), ("÷ engine", "to_engine", ".2f"),
    ("OOMs", "ooms", "d"), ("peak GiB", "peak_gib", ".1f"), ("same tokens", "same_tokens", ".1%"),
    ("error", "error", ""),
)  # fmt: skip
EAGER, GRAPHS, ENGINE = "generate, eager", "generate, graphs", "transformers, continuous batching"
Results = list[list[int]]


def make_lengths(num: int, *, small: bool) -> IntArray:
    """Return prompts and new tokens, ``(num, 2)``."""
    rng = np.random.default_rng(0)
    most = (40, 12) if small else (512, 256)
    drawn = np.exp(rng.normal(np.log([100, 64]), 0.7, (num, 2)))
    return np.clip(np.round(drawn), [4, 2] if small else [8, 8], most).astype(np.int64)


def make_model(device: Device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    layers, width, heads, inner, vocabulary = (2, 32, 2, 64, 500) if device.is_cpu else (24, 1024, 16, 2816, 32_000)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, intermediate_size=inner, max_position_embeddings=1024,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    return model.eval() if device.is_cpu else model.to("cuda", torch.bfloat16).eval()


def make_prompts(lengths: IntArray) -> Results:
    rng = np.random.default_rng(1)
    return [rng.integers(FIRST_TOKEN, 500, length).tolist() for length in lengths[:, 0].tolist()]


def ours(model: LlamaForCausalLM, prompts: Results, num_new: list[int], graphs: Any) -> Results:
    """Generate with this library."""
    return [row.tolist() for row in generate(model, prompts, max_new_tokens=num_new, do_sample=False, graphs=graphs)]


def engine(model: LlamaForCausalLM, prompts: Results, num_new: list[int]) -> Results:
    """Generate with the continuous batching of transformers, whose manager is kept for the next call."""
    from transformers.generation import ContinuousBatchingConfig

    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    options = {name: value for name, value in {"auto_switch_to_flash": False}.items() if name in known}
    settings = GenerationConfig(do_sample=False, max_new_tokens=max(num_new), eos_token_id=-1, pad_token_id=0)
    context = model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(**options), block=True,
        timeout=5, persistent_manager=True,
    )  # fmt: skip
    found: dict[str, list[int]] = {}
    stop = time.perf_counter() + MOST_SECONDS
    with context as manager:
        names = [manager.add_request(ids, max_new_tokens=num) for ids, num in zip(prompts, num_new, strict=True)]
        while len(found) < len(names):
            result = manager.get_result(timeout=1)
            if result is None and (not manager.is_running() or time.perf_counter() > stop):
                raise RuntimeError(f"the engine gave {len(found)} of {len(names)} results")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"a request failed: {result.error}")
                found[result.request_id] = list(result.generated_tokens)
    return [found[name] for name in names]


def run_arm(device: Device, name: str, call: Callable[[], Results], num_new: list[int]) -> tuple[Row, Results]:
    """Run all prompts twice and report both."""
    row: Row = {"arm": name}
    device.free()
    device.monitor.reset_peak()
    before = device.num_ooms
    results: Results = []
    for visit in ("first", "steady"):
        device.synchronize()
        start = time.perf_counter()
        results = call()
        device.synchronize()
        seconds = time.perf_counter() - start
        row[f"{visit}_per_second"] = len(num_new) / seconds
    assert [len(one) for one in results] == num_new, "every prompt gets as many tokens as it asked for"
    row.update(
        tokens_per_second=sum(num_new) / seconds,
        ooms=device.num_ooms - before,
        peak_gib=device.monitor.peak_bytes / GIB,
    )
    return row, results


def share_alike(one: Results, other: Results) -> float:
    """Return the share of tokens up to the first that differs, over all prompts."""
    same = [int(np.cumprod(np.equal(a, b)).sum()) for a, b in zip(one, other, strict=True)]
    return sum(same) / sum(map(len, other))


def add_ratios(rows: list[Row]) -> None:
    """Add what each arm is to eager generation and to the engine."""
    speeds = {row["arm"]: row["steady_per_second"] for row in rows if "error" not in row}
    for row in rows:
        for key, arm in (("to_eager", EAGER), ("to_engine", ENGINE)):
            if "error" not in row and arm in speeds:
                row[key] = row["steady_per_second"] / speeds[arm]


def kept_rows(path: Path | None, report: Row) -> list[Row]:
    """Return the rows of an earlier command that need not run again."""
    if path is None or not path.exists():
        return []
    earlier = json.loads(path.read_text())
    for name in ("device", "lengths", "parameters"):
        if earlier.get(name) != report[name]:
            raise SystemExit(f"{path} differs in {name} ({earlier.get(name)}, {report[name]}); name another --output")
    return [row for row in earlier["rows"] if "error" not in row]


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, cap_gib=0.0)
    known = (EAGER, GRAPHS, ENGINE)
    parser.add_argument("--arms", nargs="*", choices=known, default=known, metavar="ARM", help=f"of {known}")
    return parser.parse_args()


def run(device: Device, options: argparse.Namespace) -> list[Row]:
    """Run every arm, and return the rows."""
    lengths = make_lengths(SMOKE_NUM if device.is_cpu else NUM, small=device.is_cpu)
    model, prompts, num_new = make_model(device), make_prompts(lengths), lengths[:, 1].tolist()
    report: Row = {**device.describe(), "lengths": digest(lengths), "rows": []}
    report["parameters"] = sum(one.numel() for one in model.parameters())
    report["rows"] = kept_rows(options.output, report)
    arms: dict[str, Callable[[], Results]] = {
        EAGER: partial(ours, model, prompts, num_new, False),
        GRAPHS: partial(ours, model, prompts, num_new, EagerGraphs() if device.is_cpu else True),
        ENGINE: partial(engine, model, prompts, num_new),
    }
    rows: list[Row] = report["rows"]
    expected: Results | None = None
    for name, call in arms.items():
        if name not in options.arms or any(row["arm"] == name for row in rows):
            continue
        try:
            if name == ENGINE and device.is_cpu:
                raise RuntimeError("needs a CUDA device")
            row, results = run_arm(device, name, call, num_new)
            expected = results if name == EAGER else expected
            if expected is not None:  # a command that does not run the eager arm has nothing to compare with
                row["same_tokens"] = share_alike(results, expected)
        except Exception as error:  # the other arms are worth having all the same
            row = {"arm": name, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        rows.append(row)
        print(json.dumps(row), flush=True)
        add_ratios(rows)
        write(options.output, report)
    return rows


def main() -> None:
    options = parse()
    total = 0.02 * GIB if options.smoke else torch.cuda.get_device_properties(0).total_memory
    with Device(total, smoke=options.smoke) as device:
        rows = run(device, options)
    print(markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
