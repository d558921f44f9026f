"""Packed and padding-free batches: adaptive trainers make the updates of the plain trainer on the same batches."""

from functools import partial

import datasets
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer

import batchwright as bw
from batchwright.integrations.huggingface import adaptive

from ..dynabatch.models import MODELS, NUM_TOKENS, make_examples
from ..dynabatch.trainer.training import make_args
from .trainers import flat_parameters, relative_error

peft = pytest.importorskip("peft", reason="peft is not installed; it is in the group dev")
trl = pytest.importorskip("trl", reason="trl is not installed; it is in the group dev")

NUM = 24
ROWS = 3  # examples of a micro-batch
TRAINING = {
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "gradient_accumulation_steps": 2,
    "per_device_train_batch_size": ROWS,
    "num_train_epochs": 2,
    "remove_unused_columns": False,
    "bf16": False,
}


def make_llama():
    """Return a model whose attention honours position_ids that begin again: it keeps packed sequences apart."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODELS["llama"][2], attn_implementation="sdpa"))


def make_examples_with_prompts():
    """Return examples in which labels count after the first tokens only, so that rows hold 1 to 12 of them."""
    rows = []
    for number, example in enumerate(make_examples(NUM, causal=True)):
        ids = example["input_ids"]
        hidden = len(ids) - 2 if number % 3 else 1
        rows.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    return rows


class Batches:
    """The micro-batches of an adaptive trainer, epoch by epoch, for the loader of a plain one."""

    def __init__(self, trainer):
        loader, self.epochs, self.num_begun = trainer.get_train_dataloader(), [], 0
        for epoch in range(2):
            loader.set_epoch(epoch)
            self.epochs.append(list(loader.batch_sampler))

    def __len__(self):
        return len(self.epochs[0])

    def __iter__(self):
        self.num_begun += 1
        return iter(self.epochs[self.num_begun - 1])


def on(batches):
    """Return what makes a trainer class load these batches."""

    def wrap(trainer_cls):
        def get_train_dataloader(self):
            base = trainer_cls.get_train_dataloader(self)
            return DataLoader(base.dataset, batch_sampler=batches, collate_fn=base.collate_fn)

        return type("Plain", (trainer_cls,), {"get_train_dataloader": get_train_dataloader})

    return wrap


def run_both(make):
    """Train the adaptive trainer, then the plain one on the same batches; return the errors of losses and parameters.

    Args:
        make: called with a wrapper of the trainer's class and more arguments, it returns a trainer.
    """
    trainer = make(adaptive, budget=bw.MaxItems(ROWS))
    trainer.train()
    plain = on(Batches(make(adaptive, budget=bw.MaxItems(ROWS))))
    expected = make(plain)
    expected.train()
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (trainer, expected)]
    assert len(losses[0]) == len(losses[1]) > 3
    first = torch.cat([p.detach().flatten() for p in make(plain).model.parameters()])
    moved = flat_parameters(expected.model) - first
    assert moved.norm() > 1e-2
    errors = [abs(mine / other - 1) for mine, other in zip(*losses, strict=True)]
    return max(errors), relative_error(flat_parameters(trainer.model) - first, moved)


def make_flattening(folder, collator, wrap, model=None, **options):
    return wrap(Trainer)(
        model=make_llama() if model is None else model(),
        args=make_args(folder, **TRAINING),
        train_dataset=make_examples_with_prompts(),
        data_collator=collator,
        **options,
    )


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_flattened_batches_train_as_the_plain_trainer_does(with_kwargs, tmp_path):
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=with_kwargs, return_seq_idx=with_kwargs)
    errors = run_both(partial(make_flattening, tmp_path, collator))
    assert max(errors) < 1e-6, errors


def make_sft(folder, wrap, peft_config=None, **options):
    words = {f"w{number}": number for number in range(NUM_TOKENS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w2"
    )
    names = ("packing", "padding_free", "max_length", "packing_strategy")
    config = {name: options.pop(name) for name in names if name in options}
    return wrap(trl.SFTTrainer)(
        model=make_llama(),
        args=make_args(folder, trl.SFTConfig, **TRAINING, **config),
        train_dataset=datasets.Dataset.from_list(make_examples_with_prompts()),
        processing_class=tokenizer,
        peft_config=peft_config,
        **options,
    )


@pytest.mark.parametrize(
    "config",
    [
        {"packing": True, "max_length": 16},
        {"packing": True, "max_length": 16, "packing_strategy": "wrapped"},
        {"padding_free": True, "max_length": None},
        {"max_length": None},
    ],
    ids=["packing", "wrapped", "padding free", "padded"],
)
def test_trl_trains_as_it_does_by_itself(config, tmp_path):
    errors = run_both(partial(make_sft, tmp_path, **config))
    assert max(errors) < 1e-6, errors


@pytest.mark.parametrize("config", [{"packing": True, "max_length": 16}, {"max_length": None}])
def test_lora_trains_as_it_does_by_itself(config, tmp_path):
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian", lora_dropout=0.0)
    torch.manual_seed(0)
    errors = run_both(partial(make_sft, tmp_path, peft_config=lora, **config))
    assert max(errors) < 1e-6, errors
