"""The flow of dynabatch's notebook that compares trainers, for any module that has its names.

    python -m tests.integrations.dynabatch.notebook_training_script batchwright.integrations.dynabatch

Pairs of texts in a table become a tokenized data set; a sampler with a range of 5 trains a model of random weights with
a scaled rate, evaluation, accumulation and a fallback that is needed; a plain trainer trains a fresh one. What came out
is printed as JSON.
"""

import gc
import importlib
import json
import random
import sys
import tempfile
from copy import deepcopy
from datetime import datetime

import pandas as pd
import torch
from datasets import Dataset, DatasetDict
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from .failing import fail_above
from .models import make_model
from .tokenizers import WORDS, make_fast

BATCH_SIZE = 10
MAX_LENGTH = 128
NUM_TRAIN, NUM_VAL, EPOCHS, WINDOW = 240, 12, 1, 3


def make_pairs(num, seed):
    """Return a table of sentences in two languages, a few of them long."""
    rng = random.Random(seed)
    rows = []
    for number in range(num):
        length = 150 if number % 20 == 0 else rng.randint(1, 8)
        pair = {"br": " ".join(rng.choices(WORDS, k=min(length, 9))), "en": " ".join(rng.choices(WORDS, k=length))}
        rows.append({"translation": pair})
    table = pd.DataFrame(rows)
    table[["brenton", "english"]] = table["translation"].apply(pd.Series)
    return table


class Recording:
    """Collates as a collator does, and remembers how long the sources of a batch are."""

    def __init__(self, collator):
        self.collator, self.seen = collator, []

    def __call__(self, features, *args, **options):
        self.seen.append([len(feature["input_ids"]) for feature in features])
        return self.collator(features, *args, **options)


def make_datasets(tokenizer, train, val):
    def tokenize(examples):
        english = tokenizer(examples["english"], max_length=MAX_LENGTH, truncation=True)
        brenton = tokenizer(examples["brenton"], max_length=MAX_LENGTH, truncation=True)
        return {**{name: english[name] for name in ("input_ids", "attention_mask")}, "labels": brenton["input_ids"]}

    datasets = DatasetDict({"train": Dataset.from_pandas(train), "val": Dataset.from_pandas(val)})
    options = {"remove_columns": datasets["train"].column_names, "batched": True, "batch_size": 100}
    return datasets.map(tokenize, desc="tokenizing", **options)


def make_arguments():
    return Seq2SeqTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        learning_rate=1e-3,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        weight_decay=0.01,
        num_train_epochs=EPOCHS,
        predict_with_generate=True,
        dataloader_pin_memory=False,
        dataloader_num_workers=0,
        save_strategy="no",
        remove_unused_columns=True,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        gradient_accumulation_steps=WINDOW,
        logging_first_step=True,
        eval_strategy="steps",
        eval_steps=6,
        logging_strategy="steps",
        logging_steps=6,
        report_to=[],
        disable_tqdm=True,
    )


def scaled_arguments(args, num_train, sampler):
    """Evaluate and log as often as the plain trainer does."""
    scaled = deepcopy(args)
    multiplier = len(sampler) / (num_train // BATCH_SIZE)
    scaled.eval_steps = max(1, int(scaled.eval_steps * multiplier))
    scaled.logging_steps = max(1, int(scaled.logging_steps * multiplier))
    return scaled


def training(module):
    """Train both ways; return what must agree whichever package plans the batches."""
    train, val = make_pairs(NUM_TRAIN, 1), make_pairs(NUM_VAL, 2)
    tokenizer, model, args = make_fast(), make_model("t5").float(), make_arguments()
    datasets = make_datasets(tokenizer, train, val)
    sampler = module.dynabatch_sampler(
        texts=train["english"].tolist(),
        tokenizer=tokenizer,
        batch_size=BATCH_SIZE,
        max_input_token_length=MAX_LENGTH,
        max_batch_range=5.0,
        shuffle=True,
        shuffle_seed=21,
    )

    def make_collator(model):
        options = {"padding": True, "return_tensors": "pt", "pad_to_multiple_of": 8}
        return Recording(DataCollatorForSeq2Seq(tokenizer=tokenizer, model=model, **options))

    common = {"train_dataset": datasets["train"], "eval_dataset": datasets["val"], "processing_class": tokenizer}
    fail_above(model, BATCH_SIZE, "forward", torch.cuda.OutOfMemoryError("CUDA out of memory."))
    collator = make_collator(model)
    trainer = module.make_dynabatch_trainer(Seq2SeqTrainer)(
        dynabatch_sampler=sampler,
        model=model,
        args=scaled_arguments(args, NUM_TRAIN, sampler),
        auto_scale_lr=True,
        data_collator=collator,
        callbacks=[module.MemoryCleanupCallback()],
        oom_fallback="split_retry",
        oom_min_batch_size=BATCH_SIZE,
        **common,
    )
    steps = len(trainer.get_train_dataloader())
    rate = trainer.args.learning_rate
    start = datetime.now()
    output = trainer.train()
    grown = (datetime.now() - start).total_seconds()
    history, global_step = trainer.state.log_history, trainer.state.global_step
    trained = [batch for batch in collator.seen if len(batch) > BATCH_SIZE]
    del model, trainer
    gc.collect()

    model = make_model("t5").float()
    plain = Seq2SeqTrainer(model=model, args=args, data_collator=make_collator(model), **common)
    start = datetime.now()
    plain.train()
    fixed = (datetime.now() - start).total_seconds()
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    return {
        "every_example": sum(map(len, collator.seen)) == EPOCHS * NUM_TRAIN + len(losses) * NUM_VAL,
        "fewer_steps": steps < len(plain.get_train_dataloader()) == NUM_TRAIN // BATCH_SIZE,
        "rate_is_larger": rate > 1e-3,
        "updates": global_step == EPOCHS * -(-steps // WINDOW),
        "grows": max(map(len, trained)) > BATCH_SIZE,
        "within_range": max(map(len, trained)) <= 5 * BATCH_SIZE,
        "metrics": sorted(set(output.metrics) & {"train_loss", "train_runtime", "epoch"}),
        "evaluated": len(losses) > 0 and bool(torch.isfinite(torch.tensor(losses)).all()),
        "eval_keys": sorted(name for name in next(entry for entry in history if "eval_loss" in entry)),
        "failed": [entry["oom_failed"] for entry in history if "oom_failed" in entry][:2],
        "speedup": fixed / grown > 0,
    }


def main(name):
    torch.set_num_threads(1)
    print(json.dumps(training(importlib.import_module(name)), indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
