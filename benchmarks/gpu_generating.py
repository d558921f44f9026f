"""Generation throughput on a GPU: fixed sizes, dynabatch's own batches, a calibrated memory budget.

    python benchmarks/gpu_generating.py --output benchmarks/results/gpu_generating.json

The shape of M2M100-418M in fp16, random weights, greedy, exactly `min(128, longest input of the batch)` new tokens;
every arm runs the same loop. The allocator is capped to stand for a smaller card. dynabatch's batches are planned
beforehand by the package itself (`--write-peer-plan`), from the lengths and word and character counts that are set to
3/4 word a token and 5 characters a word, since there is no text.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import numpy as np

import batchwright as bw

PEER_PLAN = Path(__file__).parent / "results" / "dynabatch_generate_plan.json"
GIB = 2**30
NUM, SIZE, MOST = 1_500, 64, 128


def make_lengths() -> np.ndarray:
    """Return input lengths: median 40, a heavy tail, at most 512."""
    rng = np.random.default_rng(0)
    return np.clip(np.round(np.exp(rng.normal(np.log(40), 1.0, NUM))), 3, 512).astype(np.int64)


def write_peer_plan() -> None:
    from dynabatch import dynabatch_sampler

    lengths = make_lengths()
    words = np.maximum(1, lengths * 3 // 4)
    sampler = dynabatch_sampler(
        texts=[""] * NUM, tokenizer=None, batch_size=SIZE, num_workers=1,
        token_lengths=lengths.tolist(), word_lengths=words.tolist(), char_lengths=(5 * words).tolist(),
    )  # fmt: skip
    PEER_PLAN.write_text(json.dumps({"batches": [[int(index) for index in batch] for batch in sampler.batches]}))


def make_model() -> Any:
    import torch
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    torch.manual_seed(0)
    config = M2M100Config(
        d_model=1024, encoder_layers=12, decoder_layers=12, encoder_ffn_dim=4096, decoder_ffn_dim=4096,
        encoder_attention_heads=16, decoder_attention_heads=16, vocab_size=128_112,
    )  # fmt: skip
    return M2M100ForConditionalGeneration(config).half().cuda().eval()


def run(model: Any, shape: tuple[int, ...]) -> None:
    """Generate for one batch of a shape (items, input, new tokens)."""
    import torch

    num, length, new = shape
    ids = torch.randint(5, 1000, (num, length), device="cuda")
    with torch.inference_mode():
        model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False
        )


def run_arm(model: Any, name: str, shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    import torch

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ooms = 0
    torch.cuda.synchronize()
    start = time.perf_counter()
    for shape in shapes:
        try:
            run(model, shape)
        except torch.OutOfMemoryError:
            ooms += 1
    torch.cuda.synchronize()
    row = {
        "arm": name,
        "batches": len(shapes),
        "per_second": NUM / (time.perf_counter() - start),
        "ooms": ooms,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }
    print(json.dumps(row), flush=True)
    return row


def shapes_of(batches: list[list[int]], lengths: np.ndarray) -> list[tuple[int, ...]]:
    longest = [int(lengths[batch].max()) for batch in batches]
    return [(len(batch), length, min(MOST, length)) for batch, length in zip(batches, longest, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--cap-gib", type=float, default=16.0)
    parser.add_argument("--write-peer-plan", action="store_true")
    options = parser.parse_args()
    if options.write_peer_plan:
        write_peer_plan()
        return
    import torch

    from batchwright.step import calibrate, default_shapes

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    cap = options.cap_gib * GIB
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = make_model()
    lengths = make_lengths()
    pairs = np.stack([lengths, np.minimum(lengths, MOST)], axis=1)
    probes = default_shapes(pairs, bw.MaxTokens(60_000), num=10)
    start = time.perf_counter()
    found = calibrate(
        lambda shape: run(model, shape), probes, restore=(model, None), max_bytes=0.9 * cap, repeats=1, progress=False
    )
    seconds = time.perf_counter() - start
    assert found.memory is not None
    budget = found.memory.budget(0.9 * cap)
    plan = bw.plan_batches(pairs, budget, grouping=bw.Sorted(), balance_over=1)
    rng = np.random.default_rng(0)
    shuffled = [part.tolist() for part in np.array_split(rng.permutation(NUM), -(-NUM // SIZE))]
    in_order = [part.tolist() for part in np.array_split(np.argsort(-lengths), -(-NUM // SIZE))]
    rows = [run_arm(model, "calibrated, Sorted", shapes_of(list(plan), lengths))]  # type: ignore[arg-type]
    rows.append(run_arm(model, "calibrated, Sorted, again", shapes_of(list(plan), lengths)))  # type: ignore[arg-type]
    if PEER_PLAN.exists():
        peer = json.loads(PEER_PLAN.read_text())["batches"]
        rows.append(run_arm(model, "dynabatch, defaults", shapes_of(peer, lengths)))
    rows.append(run_arm(model, f"fixed {SIZE}, sorted", shapes_of(in_order, lengths)))
    rows.append(run_arm(model, f"fixed {SIZE}, shuffled", shapes_of(shuffled, lengths)))
    report = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "cap_gib": options.cap_gib, "calibration_seconds": seconds, "margin": found.memory.margin, "rows": rows,
    }  # fmt: skip
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
