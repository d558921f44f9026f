"""TRL: SFTTrainer on planned batches, padded or packed, with the loss on completions only.

    python examples/trl_sft.py

Prompts are the first lines of docstrings, completions the rest. You see updates, padding and tokens for 16 texts as
they come, for batches that ``adaptive(SFTTrainer)`` plans, and for rows that TRL packs, planned the same way. Tokens
are what TRL counted: every text was there once. Change the model; ``adaptive(DPOTrainer)`` plans pairs too.
"""

import sys
import tempfile

import torch
import trl
from datasets import Dataset, disable_progress_bars
from texts import make_tokenizer, read_texts
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback

import batchwright as bw
from batchwright.integrations.huggingface import adaptive


def make_trainer(texts: list[str], folder: str, **options: object) -> trl.SFTTrainer:
    """Return a trainer of a small Llama; the options are TRL's."""
    tokenizer, parts = make_tokenizer(texts), [text.partition("\n") for text in texts]
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    trainer = adaptive(trl.SFTTrainer)(  # instead of trl.SFTTrainer
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **shape)),
        args=trl.SFTConfig(
            folder, num_train_epochs=1, max_length=128, logging_steps=1, save_strategy="no", report_to="none",
            use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, **options),
        train_dataset=Dataset.from_list([{"prompt": head, "completion": end + rest} for head, end, rest in parts]),
        processing_class=tokenizer, budget=bw.MaxTokens(2048),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # what it prints is summed up below
    return trainer


def main(quick: bool = False) -> dict[str, tuple[int, float, int]]:
    """Train twice, print and return updates, padding and tokens."""
    disable_progress_bars()
    texts, rows = [text.strip() for text in read_texts(150 if quick else 1500)], {}
    for name, options in {"planned": {}, "packed by TRL": {"packing": True}}.items():
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(texts, folder, **options)
            lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
            trainer.train()
        logs = [entry for entry in trainer.state.log_history if "padding" in entry]
        if not rows:  # before packing
            fixed = bw.plan_batches(lengths, bw.MaxItems(16), grouping=bw.InOrder()).report()
            rows["16 texts as they come"] = (fixed.num_batches, fixed.padding, sum(lengths))
        rows[name] = (len(logs), sum(entry["padding"] for entry in logs) / len(logs), int(logs[-1]["num_tokens"]))
    for name, (num, padding, tokens) in rows.items():
        print(f"{name:>21}: {num:>3} updates, {padding:5.1%} padding, {tokens:,} tokens")
    return rows


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
