"""How well a few probes predict peak memory: five architectures, held-out shapes.

    python benchmarks/gpu_memory.py --output benchmarks/results/gpu_memory.json

For each model (random weights, bf16 autocast) `calibrate_huggingface` measures its own probes; then shapes that were
not probed are measured and compared with `predict` and with `upper`.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np

GIB = 2**30


def make_models() -> dict[str, Any]:
    """Return constructors by name; made one at a time."""
    import transformers as t

    return {
        "BERT-large, eager attention": lambda: t.BertForMaskedLM(
            t.BertConfig(
                hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
                attn_implementation="eager",
            )
        ),
        "Llama 1B": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(
                hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
                intermediate_size=8192, vocab_size=32_000,
            )
        ),
        "GPT-2 medium": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=1024, n_layer=24, n_head=16)),
        "T5-base": lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                d_model=768, d_ff=3072, num_layers=12, num_heads=12, vocab_size=32_128, decoder_start_token_id=0
            )
        ),
        "NLLB-600M shape": lambda: t.M2M100ForConditionalGeneration(
            t.M2M100Config(
                d_model=1024, encoder_layers=12, decoder_layers=12, encoder_ffn_dim=4096, decoder_ffn_dim=4096,
                encoder_attention_heads=16, decoder_attention_heads=16, vocab_size=256_206,
            )
        ),
    }  # fmt: skip


def measure(model: Any, shape: tuple[int, ...]) -> float | None:
    """Return the peak bytes of one forward and backward with gradients already allocated, None where it ran out."""
    import torch

    ids = torch.randint(5, 1000, (shape[0], shape[1]), device="cuda")
    labels = torch.randint(5, 1000, (shape[0], shape[-1]), device="cuda")
    mask = torch.ones_like(ids)
    mask[1:, -1] = 0
    torch.cuda.reset_peak_memory_stats()
    try:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    return float(torch.cuda.max_memory_allocated())


def held_out(num_axes: int, budget: Any, longest: int, num: int = 12) -> list[tuple[int, ...]]:
    """Return shapes that fit the budget, random in size and length, half of them near the limit."""
    rng = np.random.default_rng(1)
    shapes = []
    while len(shapes) < num:
        lengths = [int(x) for x in np.exp(rng.uniform(np.log(16), np.log(longest), num_axes))]
        most = int(budget.max_items(np.array([lengths]))[0])
        if most >= 2:
            share = rng.uniform(0.8, 1.0) if len(shapes) % 2 else rng.uniform(0.1, 0.8)
            shapes.append((max(1, min(512, int(most * share))), *lengths))
    return shapes


def run_model(name: str, make: Any, cap_bytes: float) -> dict[str, Any]:
    import torch

    from batchwright.step import calibrate_huggingface

    model = make().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    found = calibrate_huggingface(model, optimizer=optimizer, autocast=torch.bfloat16, progress=False)
    assert found.memory is not None
    assert found.peak_bytes is not None
    budget = found.memory.budget(0.9 * cap_bytes)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    allocated = [torch.zeros_like(p) for p in model.parameters() for _ in range(2)]  # AdamW's two averages
    rows = []
    for shape in held_out(found.memory.num_axes, budget, 512):
        peak = measure(model, shape)
        if peak is None:
            gc.collect()
            torch.cuda.empty_cache()
        rows.append(
            {"shape": shape, "peak": peak, "predict": float(found.memory.predict([shape])[0]),
             "upper": float(found.memory.upper([shape])[0])}
        )  # fmt: skip
    del allocated
    errors = [abs(row["predict"] / row["peak"] - 1) for row in rows if row["peak"] is not None]
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "probes": len(found.shapes),
        "margin": found.memory.margin,
        "mean_error": float(np.mean(errors)),
        "worst_error": float(np.max(errors)),
        "largest_probe": max(zip(found.peak_bytes, found.shapes, strict=True)),
        "stopped": found.stopped,
        "ran_out": sum(row["peak"] is None for row in rows),
        "under_upper": sum(row["peak"] is not None and row["peak"] <= row["upper"] for row in rows) / len(rows),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--cap-gib", type=float, default=32.0)
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    cap = options.cap_gib * GIB
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    torch.backends.cuda.enable_cudnn_sdp(False)
    results = []
    for name, make in make_models().items():
        try:
            row = run_model(name, make, cap)
            print({key: value for key, value in row.items() if key != "rows"}, flush=True)
        except Exception as error:
            row = {"model": name, "error": f"{type(error).__name__}: {error}"}
            print(row, flush=True)
        results.append(row)
        gc.collect()
        torch.cuda.empty_cache()
        if options.output is not None:  # after each, so that what was measured is kept
            report = {
                "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                "python": platform.python_version(), "cap_gib": options.cap_gib, "models": results,
            }  # fmt: skip
            options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
