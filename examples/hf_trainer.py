"""Hugging Face Trainer: planned batches by one more argument, and a run that continues with the very next batch.

    python examples/hf_trainer.py

You see examples per update and padding as the trainer logs them, beside those of a fixed size. A second run starts from
a checkpoint in the middle of the epoch and ends with the weights of the first. Change ``budget`` to ``"auto"``, which
measures what your model and device can do, or add ``controller="auto"``, which looks for the best size of an update.
"""

import sys
import tempfile

import torch
from texts import VOCABULARY, read_examples
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils.logging import disable_progress_bar

import batchwright as bw
from batchwright.integrations.huggingface import adaptive
from batchwright.step import PadCollator


def make_trainer(data: list[dict[str, list[int]]], folder: str) -> Trainer:
    """Return a trainer of a small Llama that saves checkpoints every 2 updates."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    args = TrainingArguments(
        folder, num_train_epochs=1, learning_rate=3e-3, lr_scheduler_type="constant", logging_steps=1, save_steps=2,
        use_cpu=True, report_to="none", disable_tqdm=True, log_level="error",
    )  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape))
    options = {"model": model, "args": args, "train_dataset": data, "data_collator": PadCollator()}
    trainer = adaptive(Trainer)(**options, budget=bw.MaxTokens(2048))  # instead of Trainer(**options)
    trainer.remove_callback(PrinterCallback)  # what it prints is summed up below
    return trainer


def main(quick: bool = False) -> dict[str, float]:
    """Train, continue from the middle, print and return the figures."""
    disable_progress_bar()
    data = read_examples(200 if quick else 2000)
    lengths = [len(example["input_ids"]) for example in data]
    fixed = bw.plan_batches(lengths, bw.MaxItems(16), grouping=bw.InOrder()).report()
    with tempfile.TemporaryDirectory() as folder:
        first, second = make_trainer(data, folder), make_trainer(data, folder)
        first.train()
        second.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    logs = [entry for entry in first.state.log_history if "padding" in entry]
    padding, sizes = sum(entry["padding"] for entry in logs) / len(logs), [entry["batch_size"] for entry in logs]
    print(f"16 texts as they come: {fixed.num_batches} updates, {fixed.padding:.1%} padding")
    print(f"MaxTokens(2048): {len(logs)} updates of {min(sizes):.0f} to {max(sizes):.0f} texts, {padding:.1%} padding")
    pairs = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    apart = max(float((mine - other).abs().max()) for mine, other in pairs)
    print(f"from checkpoint 2 to the end: weights differ from those of the whole run by {apart:.0e}")
    return {"fixed": fixed.padding, "planned": padding, "updates": len(logs), "apart": apart}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
