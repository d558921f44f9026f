"""Generation throughput on a GPU: fixed sizes, dynabatch's loop, and `batchwright.step.generate` with graphs or not.

    python benchmarks/gpu_generate.py --output benchmarks/results/gpu_generate.json
    python benchmarks/gpu_generate.py --smoke

The shape of M2M100-418M in fp16, random weights, greedy, the same `max_new_tokens` for every arm. Random weights would
never end a sentence, so the model itself ends each row after as many tokens as its input has, by the logit of the end
token: no arm is told how long a result will be, and every arm runs the same forward pass. A batch of `model.generate`
ends with its longest row; graphs look at which rows have ended and go on with the others. The allocator is capped at
16 GiB to stand for a smaller card, and cuDNN attention is off (`--default-attention` leaves it on): it plans anew for
every decoding step. With `--own-attention` graphs too attend by the model's own kernels, over all that a batch has room
for, and not over the keys that each row has. "graphs that stay" are those of a `Generator`: it is made once, and later
passes find their graphs.

`generate` is measured as a user would call it: with nothing else, and with a memory budget from `calibrate` where input
and output lengths are two axes. The arm with `graphs=False` is given the lengths that results will have, as a good
guess would; graphs make room for the longest result. dynabatch runs its own batches, planned beforehand by the package
with its defaults (`--write-peer-plan`), through the loop of its README: a batch that runs out of memory is run again in
pieces of the first size. Every arm brings its results to the CPU; every arm runs twice, and arms of graphs a third time
with a clock around each replay. `capture s` is what graphs cost in that run, `replay s` what the device spends in
replays, and `÷ bytes` how many times as long that is as reading the weights once a step and the cache of each row that
has not ended, at 4.8 TB/s.

Arms that are in the file already are not run again, so a command that was cut off can be given once more.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _gpu import GIB, Device, Row, make_parser, markdown, write
from _pairs import FIRST_TOKEN, PAD, IntArray, digest
from _peer_plan import read_peer_plan, write_peer_plan
from _resuming import check_alike, read_report
from torch import Tensor
from transformers import M2M100Config, M2M100ForConditionalGeneration

import batchwright as bw
from batchwright.step import Calibration, Generator, MemoryMonitor, calibrate, default_shapes, generate
from batchwright.step.graphs.backend import CudaGraphs
from batchwright.step.inference import _ranges
from batchwright.testing import EagerGraphs

PEER_PLAN = Path(__file__).parent / "results" / "dynabatch_generate_plan.json"
NUM, SIZE, MOST_NEW = 1_500, 64, 128
SMOKE_NUM, SMOKE_MOST_NEW, SMOKE_CAP_GIB = 96, 12, 0.02
# A first guess of what fits, only to place the probes; running out of memory ends their list.
PROBE_TOKENS, SMOKE_PROBE_TOKENS = 200_000, 2_000
COLUMNS = (
    ("arm", "arm", ""), ("prompts", "prompts", ",d"), ("first /s", "first_per_second", ",.0f"),
    ("steady /s", "steady_per_second", ",.0f"), ("tokens/s", "tokens_per_second", ",.0f"),
    ("÷ dynabatch", "to_peer", ".2f"), ("÷ fixed", "to_fixed", ".2f"), ("÷ graphs off", "to_eager", ".2f"),
    ("OOMs", "ooms", "d"), ("peak/cap", "peak_of_cap", ".1%"), ("graphs", "captures", "d"),
    ("capture s", "capture_seconds", ".2f"), ("replay s", "replay_seconds", ".2f"), ("÷ bytes", "to_bytes", ".1f"),
)  # fmt: skip
ALIKE = ("device", "cap_gib", "cudnn_attention", "own_attention", "lengths", "max_new_tokens", "fill")
BYTES_PER_SECOND = 4.8e12  # of an H200
EAGER = {
    "graphs, calibrated budget": "eager, calibrated budget",
    "graphs that stay, calibrated budget": "eager, calibrated budget",
    "graphs, no budget": "eager, no budget",
}


def make_lengths(num: int, *, longest: int) -> IntArray:
    """Return input lengths: median 40, a heavy tail."""
    rng = np.random.default_rng(0)
    return np.clip(np.round(np.exp(rng.normal(np.log(40), 1.0, num))), 3, longest).astype(np.int64)


class Translator(M2M100ForConditionalGeneration):
    """A model that was not trained and ends its sentences all the same, each after as many tokens as its input has."""

    num_prompts = 0

    def forward(
        self, attention_mask: Tensor, past_key_values: Any = None, decoder_input_ids: Any = None, **kwargs: Any
    ) -> Any:
        """Run as every model does, and decide on the end token by the number of tokens."""
        num_before = past_key_values.get_seq_length()
        found = super().forward(
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            decoder_input_ids=decoder_input_ids,
            **kwargs,
        )
        counts = attention_mask if attention_mask.ndim == 2 else (attention_mask[:, 0, 0] == 0).long()
        is_last = counts.sum(dim=1) <= num_before + 1
        score = torch.where(is_last, 60_000.0, -60_000.0).to(found.logits.dtype)
        found.logits[:, -1, self.config.eos_token_id] = score
        return found

    def prepare_inputs_for_generation(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        """Count passes over prompts; what forward itself changed would be a change of the model to its graphs."""
        Translator.num_prompts += past_key_values.get_seq_length() == 0
        return super().prepare_inputs_for_generation(*args, past_key_values=past_key_values, **kwargs)

    def generate_exactly(self, num_new: int, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Generate this many tokens for every row, whatever its input has."""
        ids = {"input_ids": input_ids, "attention_mask": attention_mask}
        self.generate(**ids, min_new_tokens=num_new, max_new_tokens=num_new, do_sample=False)


class Peaks:
    """A source of memory figures that remembers the highest peak over all that were begun anew."""

    def __init__(self, monitor: MemoryMonitor) -> None:
        self._monitor, self._most = monitor, 0

    used_bytes = property(lambda self: self._monitor.used_bytes)
    peak_bytes = property(lambda self: self._monitor.peak_bytes)
    total_bytes = property(lambda self: self._monitor.total_bytes)

    def reset_peak(self) -> None:
        self._most = max(self._most, self._monitor.peak_bytes)
        self._monitor.reset_peak()

    @property
    def highest_bytes(self) -> int:
        return max(self._most, self._monitor.peak_bytes)

    def forget(self) -> None:
        self._monitor.reset_peak()
        self._most = 0


class ClockedGraphs:
    """CUDA graphs with a clock around captures and around each replay."""

    def __init__(self) -> None:
        self._inner = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
        self.forget()

    def forget(self) -> None:
        """Count from here on."""
        self.captures, self.capture_seconds = 0, 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare(self) -> None:
        self._inner.prepare()

    def can_capture_update(self, group: dict[str, Any]) -> bool:
        return self._inner.can_capture_update(group)

    def pool_bytes(self) -> int:
        return self._inner.pool_bytes()

    def used_bytes(self) -> int:
        return self._inner.used_bytes()

    def free_bytes(self) -> int:
        return self._inner.free_bytes()

    def measure(self, function: Callable[[], None]) -> int:
        return self._inner.measure(function)

    @property
    def lost_peak_bytes(self) -> int:
        return self._inner.lost_peak_bytes

    def release(self) -> None:
        self._inner.release()

    def seconds(self) -> float:
        return self._inner.seconds()

    def capture(self, function: Callable[[], None], *, writes: Any = ()) -> Callable[[], None]:
        start = self._inner.seconds()
        replay = self._inner.capture(function, writes=writes)
        self.captures += 1
        self.capture_seconds += self._inner.seconds() - start

        def clocked() -> None:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            replay()
            pair[1].record()
            self._events.append(pair)

        return clocked

    def figures(self) -> Row:
        torch.cuda.synchronize()
        seconds = sum(start.elapsed_time(end) for start, end in self._events) / 1000
        return {
            "captures": self.captures,
            "capture_seconds": self.capture_seconds,
            "replays": len(self._events),
            "replay_seconds": seconds,
        }


def make_model(device: Device) -> Translator:
    torch.manual_seed(0)
    small = device.is_cpu
    layers, width, heads, vocabulary = (1, 32, 2, 500) if small else (12, 1024, 16, 128_112)
    config = M2M100Config(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, encoder_attention_heads=heads, decoder_attention_heads=heads, vocab_size=vocabulary,
    )  # fmt: skip
    model = Translator(config)
    return model.eval() if small else model.half().cuda().eval()


def make_examples(lengths: IntArray) -> list[list[int]]:
    tokens = np.random.default_rng(1).integers(FIRST_TOKEN, 500, int(lengths.max())).tolist()
    return [tokens[:length] for length in lengths.tolist()]


class Peer:
    """The loop that others write: pad a batch, generate, split once where memory ran out.

    Args:
        model: what generates.
        device: where it lies.
        examples: token ids.
        batches: which examples run together.
        most_new: ``max_new_tokens``.
    """

    def __init__(
        self, model: Translator, device: Device, examples: list[list[int]], batches: list[IntArray], most_new: int
    ) -> None:
        self._model, self._device, self._examples, self._batches = model, device, examples, batches
        self._most_new = most_new

    def __call__(self) -> None:
        for batch in self._batches:
            if not self._device.fits(partial(self._run, batch)):
                for start in range(0, len(batch), SIZE):
                    self._run(batch[start : start + SIZE])

    def _run(self, batch: IntArray) -> Tensor:
        rows = [torch.tensor(self._examples[index]) for index in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(self._device.name)
        with torch.inference_mode():
            options = {"max_new_tokens": self._most_new, "do_sample": False}
            found: Tensor = self._model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), **options)
        return found.cpu()


class Again:
    """A `Generator` over the same examples, which stays from pass to pass until it is closed.

    Args:
        model: what generates.
        examples: token ids.
        **options: of the generator.
    """

    def __init__(self, model: Translator, examples: list[list[int]], **options: Any) -> None:
        self._model, self._examples, self._options = model, examples, options
        self._generator: Generator | None = None

    def __call__(self, graphs: ClockedGraphs | None = None) -> None:
        if graphs is not None:  # a second pass of its own is clocked
            self.close()
            with Generator(self._model, **{**self._options, "graphs": graphs}) as generator:
                generator(self._examples)
                graphs.forget()
                generator(self._examples)
            return
        self._generator = self._generator or Generator(self._model, **self._options)
        self._generator(self._examples)

    def close(self) -> None:
        """Give the memory back."""
        if self._generator is not None:
            self._generator.close()
            self._generator = None


def run_arm(device: Device, peaks: Peaks, name: str, call: Callable[[], Any], num_new: IntArray) -> Row:
    """Run all examples twice and report both."""
    row: Row = {"arm": name}
    device.free()
    peaks.forget()
    ooms = device.num_ooms
    for visit in ("first", "steady"):
        Translator.num_prompts = 0
        device.synchronize()
        start = time.perf_counter()
        call()
        device.synchronize()
        seconds = time.perf_counter() - start
        row[f"{visit}_per_second"] = len(num_new) / seconds
        row["prompts"] = Translator.num_prompts
    row["tokens_per_second"] = int(num_new.sum()) / seconds
    most = peaks.highest_bytes
    row.update(ooms=device.num_ooms - ooms, peak_gib=most / GIB, peak_of_cap=most / device.cap_bytes)
    return row


def clocked(model: Translator, call: Callable[..., Any], pairs: IntArray) -> Row:
    """Run once more with clocks, and compare the replays with the bytes that they have to read."""
    graphs = ClockedGraphs()
    call(graphs=graphs)
    found = graphs.figures()
    graphs.release()
    config = model.config
    per_token = 2 * 2 * config.decoder_layers * config.d_model  # keys and values of two bytes
    source, new = pairs[:, 0].astype(float), pairs[:, 1].astype(float)
    cache = per_token * float((new * source + new * (new + 1) / 2).sum())
    weights = sum(one.nbytes for one in {*model.model.decoder.parameters(), *model.lm_head.parameters()})
    return {**found, "to_bytes": found["replay_seconds"] * BYTES_PER_SECOND / (cache + weights * found["replays"])}


def calibrated(model: Translator, device: Device, pairs: IntArray, max_bytes: float) -> Calibration:
    """Measure what generation takes by shape (items, input, new tokens)."""

    def run(shape: tuple[int, ...]) -> None:
        num, length, new = shape
        ids = torch.full((num, length), FIRST_TOKEN, device=device.name)
        mask = torch.ones_like(ids)
        mask[1:, -1] = 0  # as in real batches: without padding some attention kernels take less memory
        with torch.inference_mode():
            model.generate_exactly(new, ids, mask)

    most = bw.MaxTokens(SMOKE_PROBE_TOKENS if device.is_cpu else PROBE_TOKENS) & bw.MaxItems(len(pairs))
    # A list, not growing shapes: an output of 128 tokens takes a second whatever its batch, so few are measured.
    return calibrate(
        run, default_shapes(pairs, most, num=16), restore=(model, None), max_bytes=max_bytes, repeats=1,
        monitor=device.monitor, progress=False,
    )  # fmt: skip


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, cap_gib=16.0)
    parser.add_argument("--fill", type=float, default=0.92, help="share of the cap to plan for (default: 0.92)")
    parser.add_argument("--default-attention", action="store_true", help="leave cuDNN attention on")
    parser.add_argument("--own-attention", action="store_true", help="graphs leave attention to the model")
    parser.add_argument("--arms", nargs="*", default=[], help="run these only")
    parser.add_argument("--write-peer-plan", action="store_true", help="plan with dynabatch, write the file, stop")
    options = parser.parse_args()
    if options.smoke:
        options.cap_gib = SMOKE_CAP_GIB
    return options


def graphs_of(device: Device) -> Any:
    """Return what captures: CUDA graphs, in a trial run a stand-in that runs the same functions again."""
    return EagerGraphs() if device.is_cpu else True


def make_arms(
    model: Translator, device: Device, examples: list[list[int]], pairs: IntArray, budget: bw.Budget, memory: Any
) -> dict[str, Callable[..., Any]]:
    lengths, most_new = pairs[:, 0], int(pairs[:, 1].max())
    num_parts = -(-len(lengths) // SIZE)
    shuffled = np.array_split(np.random.default_rng(0).permutation(len(lengths)), num_parts)
    in_order = np.array_split(np.argsort(-lengths, kind="stable"), num_parts)
    options = {"max_new_tokens": most_new, "do_sample": False, "memory": memory}
    ours: Any = partial(generate, model, examples, **options)
    loop = partial(Peer, model, device, examples, most_new=most_new)
    peer = read_peer_plan(PEER_PLAN, lengths)
    return {
        "graphs, calibrated budget": partial(ours, budget=budget, count_output=True, graphs=graphs_of(device)),
        "graphs that stay, calibrated budget": Again(
            model, examples, budget=budget, count_output=True, graphs=graphs_of(device), **options
        ),
        "graphs, no budget": partial(ours, graphs=graphs_of(device)),
        "eager, calibrated budget": partial(ours, budget=budget, lengths=pairs, graphs=False),
        "eager, no budget": partial(ours, graphs=False),
        **({} if peer is None else {"dynabatch, defaults": loop(batches=peer)}),
        f"fixed {SIZE}, sorted": loop(batches=in_order),
        f"fixed {SIZE}, shuffled": loop(batches=shuffled),
    }


def add_ratios(rows: list[Row]) -> None:
    """Add what each arm is to dynabatch, to the shuffled fixed size and to itself without graphs."""
    speeds = {row["arm"]: row["steady_per_second"] for row in rows}
    for row in rows:
        others = {
            "to_peer": "dynabatch, defaults",
            "to_fixed": f"fixed {SIZE}, shuffled",
            "to_eager": EAGER.get(row["arm"]),
        }
        row.update({key: row["steady_per_second"] / speeds[arm] for key, arm in others.items() if arm in speeds})


def check_results(model: Translator, device: Device, examples: list[list[int]], pairs: IntArray) -> Row:
    """Compare results of graphs with eager ones: in half precision a near tie may fall the other way."""
    few = np.linspace(0, len(examples) - 1, 32).astype(int).tolist()
    options = {"max_new_tokens": int(pairs[:, 1].max()), "do_sample": False, "budget": bw.MaxItems(32)}
    chosen = [examples[index] for index in few]
    one, other = (generate(model, chosen, graphs=choice, **options) for choice in (graphs_of(device), False))
    lengths = [len(row) for row in one]
    assert lengths == [len(row) for row in other] == [1 + int(pairs[index, 1]) for index in few], lengths
    return {"compared": len(few), "equal": sum(torch.equal(a, b) for a, b in zip(one, other, strict=True))}


def run(device: Device, options: argparse.Namespace, lengths: IntArray, most_new: int) -> list[Row]:
    """Calibrate, run every arm that is not in the file yet, and return the rows."""
    model, examples = make_model(device), make_examples(lengths)
    pairs = np.stack([lengths, np.minimum(lengths, most_new)], axis=1)
    command = {**device.describe(), "lengths": digest(lengths), "max_new_tokens": most_new, "fill": options.fill}
    command["own_attention"] = options.own_attention
    report = read_report(options.output)
    check_alike(report, command, ALIKE)
    report["commands"].append(command)
    rows: list[Row] = report["rows"]
    command["results"] = check_results(model, device, examples, pairs)
    print(json.dumps(command["results"]), flush=True)
    start = time.perf_counter()
    found = calibrated(model, device, pairs, options.fill * device.cap_bytes)
    assert found.memory is not None
    command["calibration"] = {
        "seconds": time.perf_counter() - start,
        "margin": found.memory.margin,
        "memory": found.memory.coefficients,
        "probed": list(zip(found.shapes, found.seconds, found.peak_bytes or (), strict=True)),
    }
    print(json.dumps(command["calibration"]), flush=True)
    peaks = Peaks(device.monitor)
    arms = make_arms(model, device, examples, pairs, found.budget(), MemoryMonitor(source=peaks))
    for name, call in arms.items():
        if any(row["arm"] == name for row in rows) or (options.arms and name not in options.arms):
            continue
        row = run_arm(device, peaks, name, call, pairs[:, 1])
        if name in EAGER and not device.is_cpu:
            row.update(clocked(model, call, pairs))
        if isinstance(call, Again):
            call.close()
        print(json.dumps(row), flush=True)
        rows.append(row)
        add_ratios(rows)
        write(options.output, report)
    return rows


def main() -> None:
    options = parse()
    num, most_new, longest = (SMOKE_NUM, SMOKE_MOST_NEW, 64) if options.smoke else (NUM, MOST_NEW, 512)
    lengths = make_lengths(num, longest=longest)
    if options.own_attention:
        _ranges.make_attend = lambda base, device: None
    if options.write_peer_plan:
        write_peer_plan(PEER_PLAN, lengths, batch_size=SIZE)
        return
    with Device(options.cap_gib * GIB, smoke=options.smoke, cudnn_attention=options.default_attention) as device:
        rows = run(device, options, lengths, most_new)
    print(markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
