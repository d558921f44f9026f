"""Measure what batches take on a GPU, over architectures, sizes, attention kernels and types; one CSV row a shape.

    python benchmarks/memory_prior/collect.py [--output benchmarks/memory_prior/raw.csv] [--minutes 7]

Weights are random: memory does not depend on them. A row holds the bytes at the peak above what was allocated before
the batch, for one training step (forward, backward; gradients included) or for one `generate` call.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FIELDS = (
    "family", "task", "attention", "dtype", "vocabulary", "width", "layers", "num_items", "length", "output_length",
    "bytes", "parameter_bytes", "torch", "device",
)  # fmt: skip
TRAIN_LENGTHS = (16, 48, 96, 160, 256, 512)
TRAIN_TOKENS = (512, 2_048, 6_144, 12_288, 24_576)
GENERATE_LENGTHS = (8, 32, 96, 256, 512)
GENERATE_ITEMS = (4, 32, 160)
OUTPUT_LENGTHS = (16, 48)


@dataclass(frozen=True)
class Architecture:
    """A family with a width, and how to build it."""

    family: str
    width: int
    layers: int
    vocabulary: int
    kind: str  # "encoder" | "decoder" | "seq2seq"


ARCHITECTURES = (
    Architecture("bert", 768, 12, 30_522, "encoder"),
    Architecture("gpt2", 768, 12, 50_257, "decoder"),
    Architecture("llama", 1024, 12, 32_000, "decoder"),
    Architecture("qwen2", 896, 12, 151_936, "decoder"),
    Architecture("opt", 768, 12, 50_272, "decoder"),
    Architecture("t5", 768, 12, 32_128, "seq2seq"),
    Architecture("m2m100", 1024, 6, 128_112, "seq2seq"),
    Architecture("marian", 512, 6, 58_101, "seq2seq"),
    Architecture("bart", 768, 6, 50_265, "seq2seq"),
)


def build(architecture: Architecture, attention: str) -> Any:
    import transformers as hf

    a = architecture
    heads = a.width // 64
    encoder_decoder = {
        "d_model": a.width, "encoder_layers": a.layers, "decoder_layers": a.layers,
        "encoder_attention_heads": heads, "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * a.width, "decoder_ffn_dim": 4 * a.width, "max_position_embeddings": 1024,
    }  # fmt: skip
    decoder = {
        "hidden_size": a.width, "num_hidden_layers": a.layers, "num_attention_heads": heads,
        "num_key_value_heads": 2 if heads % 4 else heads // 4, "intermediate_size": 3 * a.width,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    makers: dict[str, Callable[[], Any]] = {
        "bert": lambda: hf.BertForMaskedLM(
            hf.BertConfig(
                vocab_size=a.vocabulary,
                hidden_size=a.width,
                num_hidden_layers=a.layers,
                num_attention_heads=heads,
                intermediate_size=4 * a.width,
                attn_implementation=attention,
            )
        ),
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=a.vocabulary, n_embd=a.width, n_layer=a.layers, n_head=heads, attn_implementation=attention
            )
        ),
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(vocab_size=a.vocabulary, attn_implementation=attention, **decoder)
        ),
        "qwen2": lambda: hf.Qwen2ForCausalLM(
            hf.Qwen2Config(vocab_size=a.vocabulary, attn_implementation=attention, **decoder)
        ),
        "opt": lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=a.vocabulary,
                hidden_size=a.width,
                word_embed_proj_dim=a.width,
                num_hidden_layers=a.layers,
                num_attention_heads=heads,
                ffn_dim=4 * a.width,
                max_position_embeddings=1024,
                attn_implementation=attention,
            )
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=a.vocabulary, d_model=a.width, d_kv=64, d_ff=4 * a.width, num_layers=a.layers,
                num_heads=heads, decoder_start_token_id=0,
            )
        ),
        "m2m100": lambda: hf.M2M100ForConditionalGeneration(
            hf.M2M100Config(vocab_size=a.vocabulary, attn_implementation=attention, **encoder_decoder)
        ),
        "marian": lambda: hf.MarianMTModel(
            hf.MarianConfig(
                vocab_size=a.vocabulary, pad_token_id=0, decoder_start_token_id=0,
                attn_implementation=attention, **encoder_decoder,
            )
        ),
        "bart": lambda: hf.BartForConditionalGeneration(
            hf.BartConfig(vocab_size=a.vocabulary, attn_implementation=attention, **encoder_decoder)
        ),
    }  # fmt: skip
    return makers[a.family]()


def train_shapes() -> Iterator[tuple[int, int]]:
    """Return (num_items, length), smallest first."""
    for tokens, length in itertools.product(TRAIN_TOKENS, TRAIN_LENGTHS):
        if tokens // length >= 1:
            yield tokens // length, length


def measure(run: Callable[[], Any]) -> int | None:
    """Return the bytes at the peak above what was there before; None where it did not fit."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        run()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return None
    return torch.cuda.max_memory_allocated() - before


def train_rows(model: Any, architecture: Architecture, deadline: float) -> Iterator[dict[str, int]]:
    for num_items, length in train_shapes():
        if time.monotonic() > deadline:
            return

        def run(num_items: int = num_items, length: int = length) -> None:
            ids = torch.randint(5, architecture.vocabulary - 5, (num_items, length), device="cuda")
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()

        used = measure(run)
        model.zero_grad(set_to_none=True)
        if used is not None:
            output = length if architecture.kind == "seq2seq" else 0
            yield {"num_items": num_items, "length": length, "output_length": output, "bytes": used}


def generate_rows(model: Any, architecture: Architecture, deadline: float) -> Iterator[dict[str, int]]:
    for output, length, num_items in itertools.product(OUTPUT_LENGTHS, GENERATE_LENGTHS, GENERATE_ITEMS):
        if time.monotonic() > deadline:
            return

        def run(output: int = output, length: int = length, num_items: int = num_items) -> None:
            ids = torch.randint(5, architecture.vocabulary - 5, (num_items, length), device="cuda")
            with torch.inference_mode():
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    min_new_tokens=output,
                    max_new_tokens=output,
                    do_sample=False,
                    num_beams=1,
                    pad_token_id=0,
                )

        used = measure(run)
        if used is not None:
            yield {"num_items": num_items, "length": length, "output_length": output, "bytes": used}


def settings() -> Iterator[tuple[Architecture, str, str, str]]:
    """Return (architecture, task, attention, dtype): every family first, variants later, so that a short run is fair.

    T5 has an attention of its own, which keeps the scores as the eager one does.
    """
    for kernel, dtype in (("sdpa", "bfloat16"), ("eager", "bfloat16"), ("sdpa", "float32")):
        for architecture in ARCHITECTURES:
            if architecture.family == "t5" and kernel == "eager":
                continue
            attention = "eager" if architecture.family == "t5" else kernel
            yield architecture, "train", attention, dtype
            if architecture.kind != "encoder" and dtype == "bfloat16":
                yield architecture, "generate", attention, dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "raw.csv")
    parser.add_argument("--minutes", type=float, default=7.0, help="stop after this time; rows so far are kept")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    torch.backends.cuda.enable_cudnn_sdp(False)
    done = already_measured(arguments.output)
    with arguments.output.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if not done:
            writer.writeheader()
        for setting in settings():
            if time.monotonic() > deadline:
                print("out of time", flush=True)
                break
            if (setting[0].family, *setting[1:]) not in done:
                writer.writerows(rows_of(*setting, deadline))
                file.flush()


def already_measured(path: Path) -> set[tuple[str, ...]]:
    """Return the settings that a file has rows of; a run that was cut short goes on where it stopped."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {(row["family"], row["task"], row["attention"], row["dtype"]) for row in csv.DictReader(file)}


def rows_of(architecture: Architecture, task: str, attention: str, dtype: str, deadline: float) -> list[dict[str, Any]]:
    """Measure all shapes of one setting; a setting that fails is reported and left out."""
    started = time.monotonic()
    make_rows = train_rows if task == "train" else generate_rows
    try:
        model = build(architecture, attention).to("cuda", getattr(torch, dtype))
        model.train(task == "train")
        # The first call of a process allocates workspaces that later ones find there.
        next(make_rows(model, architecture, deadline), None)
        found = list(make_rows(model, architecture, deadline))
    except RuntimeError as error:
        print(f"{architecture.family} {task} {attention} {dtype} failed: {error}", flush=True)
        return []
    common = {
        "family": architecture.family,
        "task": task,
        "attention": attention,
        "dtype": dtype,
        "vocabulary": architecture.vocabulary,
        "width": architecture.width,
        "layers": architecture.layers,
        "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    seconds = time.monotonic() - started
    print(f"{architecture.family:8} {task:8} {attention:6} {dtype:9} {len(found):3} rows {seconds:6.1f} s", flush=True)
    return [{**common, **row} for row in found]


if __name__ == "__main__":
    main()
