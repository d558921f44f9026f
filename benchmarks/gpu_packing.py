"""Decoder-only training on instructions: padded batches, packed rows with position ids, packed rows without padding.

    python benchmarks/gpu_packing.py --prepare FOLDER --data decoder.npz      # needs no GPU
    python benchmarks/gpu_packing.py --data decoder.npz --output benchmarks/results/gpu_packing.json
    python benchmarks/gpu_packing.py --report benchmarks/results/gpu_packing.json
    python benchmarks/gpu_packing.py --data decoder.npz --models 350M --profile flat,padded,plain --output profile.json
    python benchmarks/gpu_packing.py --smoke

Llama shapes of 350 million and 1 billion parameters, random weights, 16,384 tokens per step, bf16 autocast, fused
AdamW, gradients clipped at 1, through ``Stepper`` and ``huggingface_loss``; cuDNN attention is off. Arms:

plain       the batches of ``padded`` in a loop by hand: ``model(**batch).loss``, without ``Stepper``; the control
padded      ``WindowSort``, padded to the longest, SDPA with a mask
positions   ``Packed``, rows of ``--capacity`` tokens; the model finds the borders in ``position_ids``, SDPA with a mask
flat        the same rows without padding, ``torch.nn.attention.varlen`` by ``use_varlen``
graphs      ``Buckets(16)``, padded, every shape captured and replayed

``--weights bfloat16`` holds weights, gradients and the optimizer's state in bf16, as ``from_pretrained`` of
transformers 5 loads most decoders; autocast stays. ``--profile`` runs three updates of arms under torch's profiler,
after ten that are timed without: kernels, gaps of the device, and where the host waits.

Batches are made and pinned before the clock starts, for every arm alike, and three updates warm up; ``graphs`` also
captures its shapes before. Real tokens count, no padding. Before the arms, the loss per label of the same examples
with the same weights is taken in every layout: ``difference`` is how far it is from that of padded batches, as a share
of it, and may be 1e-3.

Results are written after every arm; arms that stand in ``--output`` are not run again. A command stops before an arm
that would not end within ``--budget-seconds``.
"""

from __future__ import annotations

import argparse
import datetime
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from _gpu import GIB, Device, Row, make_parser, markdown, write
from _profiling import profile_steps, render_profile
from _quality.corpus import END, PAD, START, Corpus, Texts
from _quality.training import Pace
from _resuming import check_alike, check_data, data_digest, read_report
from torch import Tensor

import batchwright as bw
from batchwright.step import PackCollator, PadCollator, Stepper, huggingface_loss
from batchwright.testing import EagerGraphs

ARMS = "padded,positions,flat,graphs"
ALL_ARMS = (*ARMS.split(","), "plain")
WEIGHTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# layers, width, inner width, heads, heads of keys
MODELS = {"350M": (24, 1024, 2_816, 16, 16), "1B": (16, 2048, 8_192, 32, 8), "tiny": (1, 32, 64, 4, 2)}
PADDED = ("padded", "plain")
NUM_CHECKED = 96  # examples that the losses are compared on
TOLERANCE = 1e-3
EXPECTED_OVERHEAD = 30.0
ALIKE = ("seconds", "data", "smoke", "tokens", "capacity", "device", "weights")
COLUMNS = (
    ("model", "model", ""), ("arm", "arm", ""), ("real tokens/s", "tokens_per_second", ",.0f"),
    ("÷ padded", "to_padded", ".2f"), ("÷ positions", "to_positions", ".2f"),
    ("updates/s", "updates_per_second", ".1f"), ("padding", "padding", ".1%"), ("peak GiB", "peak_gib", ".1f"),
    ("loss per label", "loss", ".5f"),
    ("difference", "difference", ".1e"),
)  # fmt: skip


Step = Callable[[dict[str, Any]], Any]


class Made(NamedTuple):
    """A batch, with what it counts."""

    batch: dict[str, Any]
    real_tokens: int
    padded_tokens: int


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__, cap_gib=120.0)
    parser.add_argument("--data", type=Path, help="the file that --prepare wrote, or that of gpu_quality.py")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make --data from a folder of corpora, stop")
    parser.add_argument("--models", default=None, help="names with commas (default: 350M,1B)")
    parser.add_argument("--arms", default=ARMS, help="names with commas (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a step (default: %(default)s)")
    parser.add_argument("--capacity", type=int, default=2_048, help="of a packed row (default: %(default)s)")
    parser.add_argument("--weights", choices=WEIGHTS, default="float32", help="their type (default: %(default)s)")
    parser.add_argument("--profile", metavar="ARMS", help="profile three updates of arms instead, with commas")
    parser.add_argument("--seconds", type=float, default=12.0, help="of training (default: %(default)s)")
    parser.add_argument("--budget-seconds", type=float, default=560.0, help="of the command (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="only print the table of these results")
    options = parser.parse_args()
    options.models = (options.models or ("tiny" if options.smoke else "350M,1B")).split(",")
    options.arms = options.arms.split(",")
    profiled = options.profile.split(",") if options.profile else []
    options.profile = profiled
    takes = (
        ("--models", options.models, MODELS),
        ("--arms", options.arms, ALL_ARMS),
        ("--profile", profiled, ALL_ARMS),
    )
    for option, given, known in takes:
        unknown = [name for name in given if name not in known]
        if unknown:
            raise SystemExit(f"{option} takes {', '.join(known)}; got {', '.join(unknown)}")
    if options.smoke:
        options.tokens, options.capacity, options.seconds = 256, 64, min(options.seconds, 0.2)
    return options


def drawn_corpus() -> Corpus:
    """Return a tiny corpus of random tokens, to see that everything runs."""
    rng = np.random.default_rng(0)
    texts = [[START, *rng.integers(4, 60, rng.integers(2, 30)), END] for _ in range(220)]
    return Corpus("decoder", (Texts.of(texts),), 64, 20)


def make_model(name: str, vocabulary: int, device: str, weights: str = "float32") -> Any:
    """Return a Llama of a shape, the same weights for every arm."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, inner_width, heads, key_heads = MODELS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner_width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=2_048, pad_token_id=PAD,
        bos_token_id=START, eos_token_id=END, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model.to(WEIGHTS[weights]).train()


def examples_of(corpus: Corpus) -> list[dict[str, Any]]:
    """Return the texts as examples; every token is a label."""
    texts, num = corpus.columns[0], len(corpus.lengths)
    rows = np.split(texts.ids.astype(np.int64), texts.offsets[1:-1])[:num]
    return [{"input_ids": row, "labels": row} for row in rows]


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, **options: Any) -> Tensor:
    """Stand for torch's function on the CPU: one sequence after the other."""
    options = {"scale": options["scale"], "is_causal": options["is_causal"], "enable_gqa": True}
    cuts = bounds[1:-1].tolist()
    parts = zip(*(states.transpose(0, 1).tensor_split(cuts, dim=1) for states in (query, key, value)), strict=True)
    found = [F.scaled_dot_product_attention(*(part[None] for part in three), **options) for three in parts]
    return torch.cat(found, dim=2)[0].transpose(0, 1)


@contextmanager
def attention_of(arm: str, model: Any, device: Device) -> Iterator[None]:
    """Give a model the attention of an arm."""
    if arm != "flat":
        yield
        return
    from batchwright.step import use_varlen

    handle = use_varlen(model, dtype=torch.bfloat16, attend=attend_plainly if device.is_cpu else None)
    try:
        yield
    finally:
        handle.remove()


def sampler_of(arm: str, lengths: Any, options: argparse.Namespace) -> bw.BatchSampler:
    """Return the batches of an arm."""
    groupings: dict[str, Callable[[], bw.Grouping]] = {
        "padded": bw.WindowSort,
        "plain": bw.WindowSort,
        "graphs": lambda: bw.Buckets(16),
    }
    grouping = groupings.get(arm, lambda: bw.Packed(options.capacity))()
    return bw.BatchSampler(lengths, bw.MaxTokens(options.tokens), grouping=grouping, seed=0)


def collator_of(arm: str, sampler: bw.BatchSampler | None = None) -> Callable[[Any], dict[str, Any]]:
    """Return the collator of an arm; that of ``graphs`` pads to the shapes of a sampler."""
    if arm == "graphs":
        assert sampler is not None
        return PadCollator(pad_to=sampler.pad_to, fill_rows=True, pad_values={"input_ids": PAD})
    if arm in PADDED:
        return PadCollator(pad_values={"input_ids": PAD})
    return PackCollator(layout="flat" if arm == "flat" else "positions", pad_id=PAD)


def made_batches(arm: str, corpus: Corpus, device: Device, options: argparse.Namespace) -> tuple[list[Made], Any]:
    """Return the batches of an epoch in memory, pinned, and the sampler that planned them."""
    lengths, examples = corpus.lengths[:, 0], examples_of(corpus)
    sampler = sampler_of(arm, lengths, options)
    collate, rows = collator_of(arm, sampler), bw.Rows(examples)
    found = []
    for indices in sampler:
        is_packed = arm in ("positions", "flat")
        batch = collate([rows[row] for row in indices] if is_packed else [examples[index] for index in indices])
        flat = np.concatenate([np.atleast_1d(row) for row in indices])
        pinned = batch if device.is_cpu else _of_tensors(batch, Tensor.pin_memory)
        found.append(Made(pinned, int(lengths[flat].sum()), batch["input_ids"].numel()))
    return found, sampler


def _of_tensors(batch: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {name: change(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def send(batch: dict[str, Any], device: Device) -> dict[str, Any]:
    """Copy a batch to the device, without waiting."""
    return batch if device.is_cpu else _of_tensors(batch, lambda tensor: tensor.to("cuda", non_blocking=True))


def check_losses(model: Any, corpus: Corpus, device: Device, arms: list[str], capacity: int) -> dict[str, Any]:
    """Return the loss per label of the same examples with the same weights, by arm, or the error in its place."""
    examples = examples_of(corpus)[:NUM_CHECKED]
    lengths = corpus.lengths[:NUM_CHECKED, 0]
    plan = bw.plan_batches(lengths, bw.MaxTokens(2**30), grouping=bw.Packed(capacity))
    packed = [[examples[index] for index in row] for batch in plan for row in batch]
    found: dict[str, Any] = {}
    for arm in dict.fromkeys(["padded", *(arm for arm in arms if arm not in ("graphs", "plain"))]):
        batch = send(collator_of(arm)(examples if arm == "padded" else packed), device)
        precise = nullcontext() if device.is_cpu else torch.autocast("cuda", dtype=torch.bfloat16)
        try:
            with torch.no_grad(), attention_of(arm, model, device), precise:
                loss, weight = huggingface_loss()(model, batch)[:2]
            found[arm] = float(loss) / float(weight)
        except Exception as error:
            found[arm] = f"{type(error).__name__}: {error}"
    return found


def run_arm(name: str, arm: str, corpus: Corpus, device: Device, options: argparse.Namespace) -> Row:
    """Train for some seconds, and return the figures."""
    if not device.is_cpu:
        torch.cuda.reset_peak_memory_stats()
    with prepared(name, arm, corpus, device, options) as (step, batches):
        return {"model": name, "arm": arm, **timed(step, batches, device, options.seconds), **_peak(device)}


@contextmanager
def prepared(
    name: str, arm: str, corpus: Corpus, device: Device, options: argparse.Namespace
) -> Iterator[tuple[Step, list[Made]]]:
    """Make what runs the updates of an arm, warm, and its batches."""
    batches, sampler = made_batches(arm, corpus, device, options)
    model = make_model(name, corpus.vocabulary, device.name, options.weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with attention_of(arm, model, device):
        step = step_of(arm, model, optimizer, sampler, device)
        for made in islice(batches, 3 if arm != "graphs" else len(batches) if device.is_cpu else 64):
            step(send(made.batch, device))
        yield step, batches


def step_of(arm: str, model: Any, optimizer: torch.optim.Optimizer, sampler: Any, device: Device) -> Step:
    """Return what runs an update of an arm: a ``Stepper``, or the loop by hand."""
    if arm == "plain":
        return loop_by_hand(model, optimizer, device)
    autocast: Row = {} if device.is_cpu else {"autocast": torch.bfloat16}
    graphs: Row = {"graphs": EagerGraphs() if device.is_cpu else True, "shapes": sampler} if arm == "graphs" else {}
    return Stepper(model, optimizer, huggingface_loss(), clip_norm=1.0, **autocast, **graphs).step


def loop_by_hand(model: Any, optimizer: torch.optim.Optimizer, device: Device) -> Step:
    """Return the update that one would write: the mean loss of the model, clipped gradients."""
    parameters = list(model.parameters())

    def step(batch: dict[str, Any]) -> None:
        with nullcontext() if device.is_cpu else torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _peak(device: Device) -> Row:
    return {} if device.is_cpu else {"peak_gib": torch.cuda.max_memory_reserved() / GIB}


def timed(step: Step, batches: list[Made], device: Device, seconds: float) -> Row:
    """Run updates for some seconds, and return the rates."""
    pace = Pace(device)
    device.synchronize()
    start, num, real, padded = time.perf_counter(), 0, 0, 0
    for made in cycle(batches):
        step(send(made.batch, device))
        pace.wait()
        num, real, padded = num + 1, real + made.real_tokens, padded + made.padded_tokens
        if time.perf_counter() - start >= seconds:
            break
    device.synchronize()
    gone = time.perf_counter() - start
    return {
        "seconds": gone, "updates": num, "updates_per_second": num / gone, "tokens_per_second": real / gone,
        "padding": 1 - real / padded,
    }  # fmt: skip


def run_model(name: str, device: Device, corpus: Corpus, options: argparse.Namespace, todo: list[str]) -> Iterator[Row]:
    """Compare the losses of a model, then run its arms."""
    model = make_model(name, corpus.vocabulary, device.name, options.weights)
    losses = check_losses(model, corpus, device, todo, options.capacity)
    del model
    device.free()
    for arm in todo:
        row: Row = {"model": name, "arm": arm}
        try:
            row = run_arm(name, arm, corpus, device, options)
            row |= compared(losses.get(arm), losses["padded"])
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
        device.free()
        yield row


def compared(loss: Any, padded: Any) -> Row:
    """Return how far a loss is from that of padded batches, or why one of them could not be taken."""
    for found in (loss, padded):
        if not isinstance(found, float):
            return {} if found is None else {"loss_error": found}
    difference = abs(loss / padded - 1)
    return {"loss": loss, "difference": difference, "is_equal": difference <= TOLERANCE}


def run_all(device: Device, corpus: Corpus, options: argparse.Namespace, started: float) -> list[Row]:
    """Run what is not in the results yet, as long as the command's time suffices, and return all rows."""
    report = read_report(options.output)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    command = {
        "id": now, **device.describe(), "seconds": options.seconds, "data": data_digest(options.data),
        "smoke": options.smoke, "tokens": options.tokens, "capacity": options.capacity,
        "weights": options.weights,
    }  # fmt: skip
    for earlier in report["commands"]:
        earlier.setdefault("weights", "float32")  # there was no other type
    check_alike(report, command, ALIKE)
    report["commands"].append(command)
    rows: list[Row] = report["rows"]
    done = {(row["model"], row["arm"]) for row in rows if "error" not in row}
    for name in options.models:
        todo = [arm for arm in options.arms if (name, arm) not in done]
        for row in run_model(name, device, corpus, options, todo) if todo else ():
            rows.append({"command": now, **row})
            write(options.output, report)
            print(row, flush=True)
            if time.perf_counter() - started + options.seconds + EXPECTED_OVERHEAD > options.budget_seconds:
                print("the rest is left for another command", flush=True)
                return rows
    return rows


def run_profiles(device: Device, corpus: Corpus, options: argparse.Namespace) -> str:
    """Profile arms, write what was found, and return it as text."""
    rows: list[Row] = []
    for name, arm in product(options.models, options.profile):
        with prepared(name, arm, corpus, device, options) as (step, batches):
            turns = cycle(batches)
            found = profile_steps(lambda: step(send(next(turns).batch, device)), device)  # noqa: B023
        rows.append({"model": name, "arm": arm, "weights": options.weights, **found})
        write(options.output, {"commands": [device.describe()], "rows": rows})
        device.free()
    return "\n\n".join(map(render_profile, rows))


def render(rows: list[Row]) -> str:
    """Return the table, and below it what failed."""
    done = [dict(row) for row in rows if "error" not in row]
    for row in done:
        for other in ("padded", "positions"):
            found = [one for one in done if (one["model"], one["arm"]) == (row["model"], other)]
            if found:
                row[f"to_{other}"] = row["tokens_per_second"] / found[0]["tokens_per_second"]
    failed = [f"{row['model']} {row['arm']}: failed: {row['error']}" for row in rows if "error" in row]
    unknown = [f"{row['model']} {row['arm']}: no loss: {row['loss_error']}" for row in done if "loss_error" in row]
    return "\n".join([markdown(done, COLUMNS), "", *unknown, *failed])


def prepare(options: argparse.Namespace) -> None:
    from _quality.preparing import prepare as prepare_corpus

    if options.data is None:
        raise SystemExit("--prepare needs --data, the file to write")
    corpus = prepare_corpus("decoder", options.prepare, with_peers=False)
    corpus.save(options.data)
    print(f"{len(corpus.lengths):,} texts, {options.data.stat().st_size / 2**20:.1f} MiB")


def main() -> None:
    started = time.perf_counter()
    options = parse()
    if options.prepare is not None:
        prepare(options)
        return
    if options.report is not None:
        print(render(read_report(options.report)["rows"]))
        return
    check_data(options.data, smoke=options.smoke)
    corpus = drawn_corpus() if options.data is None else Corpus.load(options.data)
    if corpus.task != "decoder":
        raise SystemExit(f"{options.data} holds data of {corpus.task}; prepare it with --task decoder")
    device = Device(options.cap_gib * GIB, smoke=options.smoke)
    if options.profile:
        print(run_profiles(device, corpus, options))
        return
    print(render(run_all(device, corpus, options, started)))


if __name__ == "__main__":
    main()
