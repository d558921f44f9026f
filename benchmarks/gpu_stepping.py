"""Training throughput on a GPU: fixed sizes, dynabatch's own batches, token budgets, a calibrated memory budget.

    python benchmarks/gpu_stepping.py --output benchmarks/results/gpu_stepping.json

One model (the shape of NLLB-600M, random weights), one corpus of length pairs, one loop for every arm: bf16 autocast,
fused AdamW, random ids. Every arm runs its batches twice; the second pass, when every shape was seen, is `steady`. The
allocator is capped to stand for a smaller card. `dynabatch` batches are planned beforehand by the package itself
(`--write-peer-plan`, which needs dynabatch installed, writes them to a file) since planning needs no GPU. It is given
the source lengths; the corpus has no text, so its word and character counts are set to 3/4 word a token and 5
characters a word. A batch that runs out of memory still counts as done in examples a second: read rows with `ooms`
above 0 as too fast.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

# Shapes vary from step to step; growing segments keep the allocator from fragmenting. The same for every arm.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np

import batchwright as bw

PEER_PLAN = Path(__file__).parent / "results" / "dynabatch_plan.json"
GIB = 2**30


def make_lengths(num: int, seed: int = 0) -> np.ndarray:
    """Return (source, target) lengths: short sentences with a heavy tail, as translation corpora have."""
    rng = np.random.default_rng(seed)
    source = np.exp(rng.normal(np.log(16), 0.95, num))
    target = source * np.exp(rng.normal(0, 0.25, num))
    return np.clip(np.round(np.stack([source, target], axis=1)), 3, 512).astype(np.int64)


def write_peer_plan(num: int, size: int) -> None:
    """Plan with dynabatch on the source lengths, as its README does, and keep the batches."""
    from dynabatch import dynabatch_sampler

    source = make_lengths(num)[:, 0]
    words = np.maximum(1, source * 3 // 4)
    sampler = dynabatch_sampler(
        texts=[""] * num, tokenizer=None, batch_size=size, max_batch_range=5.0, num_workers=1,
        token_lengths=source.tolist(), word_lengths=words.tolist(), char_lengths=(5 * words).tolist(),
    )  # fmt: skip
    batches = [[int(index) for index in batch] for batch in sampler.batches]
    PEER_PLAN.write_text(json.dumps({"num": num, "batch_size": size, "max_batch_range": 5.0, "batches": batches}))


def make_model(device: str, *, small: bool) -> Any:
    import torch
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    torch.manual_seed(0)
    size: dict[str, int] = (
        {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 500}
        if small
        else {"d_model": 1024, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 4096,
              "decoder_ffn_dim": 4096, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
              "vocab_size": 256_206}
    )  # fmt: skip
    config = M2M100Config(**size, max_position_embeddings=1024)
    return M2M100ForConditionalGeneration(config).to(device).train()


class Loop:
    """Forward, backward and update of one shape, the same for every arm."""

    def __init__(self, device: str, *, small: bool) -> None:
        import torch

        self.torch = torch
        self.device = device
        self.model = make_model(device, small=small)
        fused = {"fused": True} if device == "cuda" else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, **fused)
        self.vocabulary = self.model.config.vocab_size

    def backward(self, shape: tuple[int, ...]) -> None:
        torch = self.torch
        num, source, target = shape
        ids = torch.randint(5, self.vocabulary, (num, source), device=self.device)
        labels = torch.randint(5, self.vocabulary, (num, target), device=self.device)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        loss.backward()

    def step(self, shape: tuple[int, ...]) -> None:
        self.backward(shape)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def free(self) -> None:
        import gc

        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()


def run_arm(loop: Loop, name: str, lengths: np.ndarray, shapes: list[tuple[int, ...]], num_examples: int) -> dict:
    """Run an epoch twice and report both."""
    torch = loop.torch
    row: dict[str, Any] = {"arm": name, "examples": num_examples, "batches": len(shapes), "shapes": len(set(shapes))}
    padded = sum(n * (s + t) for n, s, t in shapes)
    row["padding"] = 1 - float(lengths.sum()) / padded
    loop.free()
    if loop.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ooms = 0
    for visit in ("first", "steady"):
        loop.synchronize()
        start = time.perf_counter()
        for shape in shapes:
            failed = False
            try:
                loop.step(shape)
            except torch.OutOfMemoryError:
                failed = True
            if failed:  # outside the except block, where the traceback no longer holds the activations
                ooms += 1
                loop.free()
        loop.synchronize()
        row[f"{visit}_per_second"] = num_examples / (time.perf_counter() - start)
    row["ooms"] = ooms
    row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB if loop.device == "cuda" else None
    print(json.dumps(row), flush=True)
    return row


def shapes_of(batches: list[list[int]], lengths: np.ndarray) -> list[tuple[int, ...]]:
    return [(len(batch), *lengths[batch].max(axis=0).tolist()) for batch in batches]


def planned(lengths: np.ndarray, budget: bw.Budget, grouping: bw.Grouping, **options: Any) -> list[tuple[int, ...]]:
    plan = bw.plan_batches(lengths, budget, grouping=grouping, balance_over=1, **options)
    return [tuple(shape) for shape in plan.shapes.tolist()]


def dense_limit(loop: Loop, lengths: np.ndarray, shapes: list[tuple[int, ...]]) -> dict:
    """Return the throughput of batches without padding, at the best of some dense shapes."""
    best: dict[str, Any] = {"arm": "dense limit", "tokens_per_second": 0.0}
    for shape in shapes:
        for _ in range(2):
            loop.step(shape)
        loop.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            loop.step(shape)
        loop.synchronize()
        speed = 5 * shape[0] * (shape[1] + shape[2]) / (time.perf_counter() - start)
        if speed > best["tokens_per_second"]:
            best.update(tokens_per_second=speed, shape=shape)
    best["steady_per_second"] = best["tokens_per_second"] / float(lengths.sum(axis=1).mean())
    print(json.dumps(best), flush=True)
    return best


def calibrated_budget(loop: Loop, cap_bytes: float | None, *, small: bool) -> tuple[bw.Budget, dict]:
    """Measure a few shapes and return the budget of 0.92 of the cap, with what was measured."""
    from batchwright.step import calibrate, default_shapes

    shapes = [(n, s, t) for n in (4, 8) for s, t in ((16, 16), (32, 64), (64, 32), (128, 128))]
    if not small:
        # A first guess of the limit, only to place the probes: about 8,000 tokens fit the cap.
        shapes = [tuple(shape) for shape in default_shapes(make_lengths(4000), bw.MaxTokens(13_000), num=12)]
    start = time.perf_counter()
    found = calibrate(loop.backward, shapes, restore=(loop.model, loop.optimizer), max_bytes=cap_bytes, progress=False)
    info = {"seconds": time.perf_counter() - start, "errors": repr(found.errors), "shapes": len(shapes)}
    if found.memory is None:
        return bw.MaxTokens(2048), info
    info["memory"] = found.memory.coefficients
    info["margin"] = found.memory.margin
    info["time"] = found.time.coefficients
    print(json.dumps(info), flush=True)
    assert cap_bytes is not None
    return found.memory.budget(0.95 * cap_bytes), info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="write the rows as JSON")
    parser.add_argument("--cap-gib", type=float, default=32.0, help="cap of the allocator (default: 32)")
    parser.add_argument("--num", type=int, default=40_000, help="pairs for the fast arms (default: 40,000)")
    parser.add_argument("--num-slow", type=int, default=4_000, help="pairs for the slow arms (default: 4,000)")
    parser.add_argument("--default-attention", action="store_true", help="leave cuDNN attention on")
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU, to see that it runs")
    parser.add_argument("--write-peer-plan", action="store_true", help="plan with dynabatch, write the file, stop")
    options = parser.parse_args()
    if options.write_peer_plan:
        write_peer_plan(options.num_slow, 10)
        return
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        raise SystemExit("no CUDA device; --quick runs a tiny model on the CPU")
    if options.quick:
        options.num, options.num_slow = 400, 200
        torch.set_num_threads(1)
    cap = None
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        cap = options.cap_gib * GIB
        torch.cuda.set_per_process_memory_fraction(cap / total)
        torch.backends.cuda.enable_cudnn_sdp(options.default_attention)
    loop = Loop(device, small=options.quick)
    few, many = make_lengths(options.num_slow), make_lengths(options.num)
    budget, calibration = calibrated_budget(loop, cap, small=options.quick)
    tokens = bw.MaxTokens(8_192 if not options.quick else 2_048)
    rng = np.random.default_rng(0)
    shuffled = [part.tolist() for part in np.array_split(rng.permutation(len(few)), max(1, len(few) // 10))]
    by_length = np.lexsort((few[:, 1], few[:, 0]))
    in_order = [part.tolist() for part in np.array_split(by_length, max(1, len(few) // 10))]
    rows = [
        run_arm(loop, "fixed 10, shuffled", few, shapes_of(shuffled, few), len(few)),
        run_arm(loop, "fixed 10, sorted", few, shapes_of(in_order, few), len(few)),
    ]
    if PEER_PLAN.exists():
        peer = json.loads(PEER_PLAN.read_text())
        if peer["num"] == len(few):
            rows.append(run_arm(loop, "dynabatch, range 5", few, shapes_of(peer["batches"], few), len(few)))
    arms: list[tuple[str, np.ndarray, bw.Budget, bw.Grouping]] = [
        ("MaxTokens(8192), WindowSort", few, tokens, bw.WindowSort()),
        ("calibrated, Sorted", few, budget, bw.Sorted()),
        ("calibrated, WindowSort", few, budget, bw.WindowSort()),
        ("calibrated, Buckets((16, 4))", few, budget, bw.Buckets((16, 4))),
        ("calibrated, Sorted", many, budget, bw.Sorted()),
        ("calibrated, WindowSort", many, budget, bw.WindowSort()),
    ]
    for arm, lengths, limit, grouping in arms:
        rows.append(run_arm(loop, arm, lengths, planned(lengths, limit, grouping), len(lengths)))
    dense = [(n, length, length) for length in (16, 32, 64, 128) for n in (64, 128, 256, 512, 1024)]
    fits = budget.fraction(np.array([n for n, *_ in dense]), np.array([shape[1:] for shape in dense])) <= 1
    rows.append(dense_limit(loop, many, [shape for shape, good in zip(dense, fits, strict=True) if good]))
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    result = {
        "device": name, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
        "cap_gib": options.cap_gib, "cudnn_attention": options.default_attention, "calibration": calibration,
        "rows": rows,
    }  # fmt: skip
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
