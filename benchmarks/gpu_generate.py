"""Generation throughput on a GPU: fixed sizes, dynabatch's loop, and `batchwright.step.generate`.

    python benchmarks/gpu_generate.py --output benchmarks/results/gpu_generate.json
    python benchmarks/gpu_generate.py --smoke

The shape of M2M100-418M in fp16, random weights, greedy, the same `max_new_tokens` for every arm. Random weights would
never end a sentence, so each row is made to end after as many tokens as its input has; a batch ends with its longest
row, as in translation. The allocator is capped at 16 GiB to stand for a smaller card, and cuDNN attention is off
(`--default-attention` leaves it on): it plans anew for every decoding step.

`generate` is measured as a user would call it: with nothing else, and with a memory budget from `calibrate` where input
and output lengths are two axes. dynabatch runs its own batches, planned beforehand by the package with its defaults
(`--write-peer-plan`), through the loop of its README: a batch that runs out of memory is run again in pieces of the
first size. Every arm brings its results to the CPU; every arm runs twice.
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
from torch import Tensor
from transformers import LogitsProcessor, M2M100Config, M2M100ForConditionalGeneration

import batchwright as bw
from batchwright.step import Calibration, MemoryMonitor, calibrate, default_shapes, generate

PEER_PLAN = Path(__file__).parent / "results" / "dynabatch_generate_plan.json"
NUM, SIZE, MOST_NEW = 1_500, 64, 128
SMOKE_NUM, SMOKE_MOST_NEW, SMOKE_CAP_GIB = 96, 12, 0.02
# A first guess of what fits, only to place the probes; running out of memory ends their list.
PROBE_TOKENS, SMOKE_PROBE_TOKENS = 200_000, 2_000
COLUMNS = (
    ("arm", "arm", ""), ("batches", "batches", ",d"), ("first /s", "first_per_second", ",.0f"),
    ("steady /s", "steady_per_second", ",.0f"), ("÷ dynabatch", "to_peer", ".2f"), ("÷ fixed", "to_fixed", ".2f"),
    ("OOMs", "ooms", "d"), ("peak/cap", "peak_of_cap", ".1%"),
)  # fmt: skip


def make_lengths(num: int, *, longest: int) -> IntArray:
    """Return input lengths: median 40, a heavy tail."""
    rng = np.random.default_rng(0)
    return np.clip(np.round(np.exp(rng.normal(np.log(40), 1.0, num))), 3, longest).astype(np.int64)


class EndLikeInput(LogitsProcessor):
    """Ends each row after its own number of tokens, never before."""

    def __init__(self, num_new: Tensor, end: int) -> None:
        self._num_new, self._end = num_new, end

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        is_last = self._num_new <= input_ids.shape[1]  # the start token stands for the one being made
        scores[:, self._end] = torch.where(is_last, torch.inf, -torch.inf).to(scores.dtype)
        return scores


class Translator(M2M100ForConditionalGeneration):
    """A model that was not trained and ends its sentences all the same."""

    monitor: MemoryMonitor
    num_calls = 0
    num_ooms = 0
    most_bytes = 0

    def generate(self, input_ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        """Generate as every model does, and count calls and those that ran out of memory."""
        Translator.num_calls += 1
        ends = EndLikeInput(attention_mask.sum(dim=1), self.config.eos_token_id)
        try:
            return super().generate(
                input_ids=input_ids, attention_mask=attention_mask, logits_processor=[ends], do_sample=False, **options
            )
        except torch.OutOfMemoryError:
            Translator.num_ooms += 1
            raise
        finally:  # here, since an arm may begin a new peak with every batch
            Translator.most_bytes = max(Translator.most_bytes, Translator.monitor.peak_bytes)

    def generate_exactly(self, num_new: int, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Generate this many tokens for every row, whatever its input has."""
        ids = {"input_ids": input_ids, "attention_mask": attention_mask}
        super().generate(**ids, min_new_tokens=num_new, max_new_tokens=num_new, do_sample=False)


def make_model(device: Device) -> Translator:
    torch.manual_seed(0)
    small = device.is_cpu
    layers, width, heads, vocabulary = (1, 32, 2, 500) if small else (12, 1024, 16, 128_112)
    config = M2M100Config(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width, encoder_attention_heads=heads, decoder_attention_heads=heads, vocab_size=vocabulary,
    )  # fmt: skip
    model = Translator(config)
    Translator.monitor = device.monitor
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
            found: Tensor = self._model.generate(ids, (ids != PAD).long(), max_new_tokens=self._most_new)
        return found.cpu()


def run_arm(device: Device, name: str, call: Callable[[], Any], num: int) -> Row:
    """Run all examples twice and report both."""
    row: Row = {"arm": name}
    device.free()
    device.monitor.reset_peak()
    Translator.num_ooms = Translator.most_bytes = 0
    for visit in ("first", "steady"):
        Translator.num_calls = 0
        device.synchronize()
        start = time.perf_counter()
        call()
        device.synchronize()
        row[f"{visit}_per_second"] = num / (time.perf_counter() - start)
        row["batches"] = Translator.num_calls
    most = Translator.most_bytes
    row.update(ooms=Translator.num_ooms, peak_gib=most / GIB, peak_of_cap=most / device.cap_bytes)
    print(json.dumps(row), flush=True)
    return row


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
    parser.add_argument("--write-peer-plan", action="store_true", help="plan with dynabatch, write the file, stop")
    options = parser.parse_args()
    if options.smoke:
        options.cap_gib = SMOKE_CAP_GIB
    return options


def make_arms(
    model: Translator, device: Device, examples: list[list[int]], pairs: IntArray, budget: bw.Budget
) -> list[tuple[str, Callable[[], Any]]]:
    lengths, most_new = pairs[:, 0], int(pairs[:, 1].max())
    num_parts = -(-len(lengths) // SIZE)
    shuffled = np.array_split(np.random.default_rng(0).permutation(len(lengths)), num_parts)
    in_order = np.array_split(np.argsort(-lengths, kind="stable"), num_parts)
    ours = partial(generate, model, examples, max_new_tokens=most_new)
    loop = partial(Peer, model, device, examples, most_new=most_new)
    peer = read_peer_plan(PEER_PLAN, lengths)
    return [
        ("generate(), calibrated budget", partial(ours, budget=budget, lengths=pairs)),
        ("generate(), no budget", ours),
        *([] if peer is None else [("dynabatch, defaults", loop(batches=peer))]),
        (f"fixed {SIZE}, sorted", loop(batches=in_order)),
        (f"fixed {SIZE}, shuffled", loop(batches=shuffled)),
    ]


def add_ratios(rows: list[Row]) -> None:
    """Add what each arm is to dynabatch and to the shuffled fixed size, in steady examples per second."""
    speeds = {row["arm"]: row["steady_per_second"] for row in rows}
    against = {"to_peer": speeds.get("dynabatch, defaults"), "to_fixed": speeds[f"fixed {SIZE}, shuffled"]}
    for row in rows:
        row.update({key: row["steady_per_second"] / speed for key, speed in against.items() if speed})


def run(device: Device, options: argparse.Namespace, lengths: IntArray, most_new: int) -> list[Row]:
    """Calibrate, run every arm, and return the rows."""
    model, examples = make_model(device), make_examples(lengths)
    pairs = np.stack([lengths, np.minimum(lengths, most_new)], axis=1)
    start = time.perf_counter()
    found = calibrated(model, device, pairs, options.fill * device.cap_bytes)
    assert found.memory is not None
    calibration = {
        "seconds": time.perf_counter() - start,
        "margin": found.memory.margin,
        "memory": found.memory.coefficients,
        "probed": list(zip(found.shapes, found.seconds, found.peak_bytes or (), strict=True)),
    }
    print(json.dumps(calibration), flush=True)
    rows: list[Row] = []
    report = {
        **device.describe(),
        "lengths": digest(lengths),
        "max_new_tokens": most_new,
        "fill": options.fill,
        "calibration": calibration,
        "rows": rows,
    }
    for name, call in make_arms(model, device, examples, pairs, found.budget()):
        rows.append(run_arm(device, name, call, len(lengths)))
        write(options.output, report)
    add_ratios(rows)
    write(options.output, report)
    return rows


def main() -> None:
    options = parse()
    num, most_new, longest = (SMOKE_NUM, SMOKE_MOST_NEW, 64) if options.smoke else (NUM, MOST_NEW, 512)
    lengths = make_lengths(num, longest=longest)
    if options.write_peer_plan:
        write_peer_plan(PEER_PLAN, lengths, batch_size=SIZE)
        return
    with Device(options.cap_gib * GIB, smoke=options.smoke, cudnn_attention=options.default_attention) as device:
        rows = run(device, options, lengths, most_new)
    print(markdown(rows, COLUMNS))


if __name__ == "__main__":
    main()
