"""Every documented feature of dynabatch in one script, for any module that has its names.

    python -m tests.integrations.dynabatch.readme_script batchwright.integrations.dynabatch

It prints what kinds of results came out, as JSON; two modules that print the same can replace each other.
"""

import importlib
import json
import sys
import tempfile
from types import SimpleNamespace

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from .failing import fail_above
from .models import collate, make_examples, make_model
from .tokenizers import WORDS, make_fast

# A few long texts and many short ones: where growing batches helps.
TEXTS = [" ".join((WORDS * 30)[: 1 + (11 * number) % 12 + 480 * (number % 15 == 0)]) for number in range(240)]
TOKENIZER = make_fast()
DATASET = [{"text": text} for text in TEXTS]
COMMON = {"texts": TEXTS, "tokenizer": TOKENIZER, "max_input_token_length": 512, "num_workers": 1}


def collate_texts(batch):
    return TOKENIZER([row["text"] for row in batch], padding=True, truncation=True, max_length=512, return_tensors="pt")


def collate_short(batch):
    return TOKENIZER([row["text"] for row in batch], padding=True, truncation=True, max_length=24, return_tensors="pt")


def lengths_of(batch):
    return [len(TEXTS[index].split()) for index in batch]


def covers(batches):
    return sorted(index for batch in batches for index in batch) == list(range(len(TEXTS)))


def quick_start(module):
    """Sort, first batch of exactly batch_size, a DataLoader around the sampler."""
    sampler = module.dynabatch_sampler(TEXTS, TOKENIZER, batch_size=4, max_input_token_length=512, num_workers=1)
    loader = DataLoader(DATASET, batch_sampler=sampler, collate_fn=collate_texts)
    sizes = [len(batch["input_ids"]) for batch in loader]
    first = next(iter(sampler))
    return {
        "class": type(sampler).__name__,
        "covers": covers(list(sampler)),
        "len": len(sampler) == len(sizes) == len(sampler.batches),
        "first": sizes[0],
        "first_is_longest": sorted(lengths_of(first)) == sorted(len(text.split()) for text in TEXTS)[-4:],
        "grows": max(sizes) > 4,
        "within_range": max(sizes) <= sampler.max_batch_size == 8,
        "attributes": [sampler.min_batch_size, sampler.threshold, sampler.shuffle, sampler.dynamic_batch_mode],
    }


def first_blocks(module):
    """The first blocks word for word but for names: a data set of the datasets package, one example at a time."""
    lengths = [2, 10, 2, 15, 31, 4, 1]
    texts = [" ".join(WORDS[number : number + 1] + (WORDS * 2)[: length - 1]) for number, length in enumerate(lengths)]
    dataset = Dataset.from_dict({"text": texts})

    def collate_fn(batch):
        return TOKENIZER([row["text"] for row in batch], padding=True, truncation=True, return_tensors="pt")

    sampler = module.dynabatch_sampler(texts, TOKENIZER, batch_size=1, max_input_token_length=64)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn)
    sizes = [len(batch["input_ids"]) for batch in loader]
    built = module.build_dynabatch_dataloader(texts, TOKENIZER, batch_size=1, max_input_token_length=64)
    common = {"texts": texts, "tokenizer": TOKENIZER, "batch_size": 32, "max_input_token_length": 256}
    both = [
        DataLoader(
            dataset,
            batch_sampler=module.dynabatch_sampler(**common, dynamic_batch_mode=is_dynamic),
            collate_fn=collate_fn,
        )
        for is_dynamic in (True, False)
    ]
    return {
        "all": sum(sizes) == len(texts),
        "one_first": sizes[0] == 1 == len(next(iter(built))["texts"]),
        "built": sorted(text for batch in built for text in batch["texts"]) == sorted(texts),
        "modes": [sum(len(batch["input_ids"]) for batch in loader) for loader in both],
    }


def built_in_loader(module):
    """A ready loader with collation, raw texts, and arguments for the tokenizer."""
    loader = module.build_dynabatch_dataloader(**COMMON, batch_size=4, truncation=True, max_length=512)
    batches = list(loader)
    return {
        "class": isinstance(loader, DataLoader),
        "keys": sorted(batches[0].keys()),
        "texts": sorted(text for batch in batches for text in batch["texts"]) == sorted(TEXTS),
        "types": [type(batches[0]["input_ids"]).__name__, type(batches[0]["texts"]).__name__],
    }


def tuning(module):
    """Static mode, range, threshold, friendly and even sizes, shuffling with the first batches kept."""
    sizes = {}
    for name, options in {
        "static": {"dynamic_batch_mode": False},
        "dynamic": {"dynamic_batch_mode": True},
        "wide": {"max_batch_range": 4.0, "threshold": 1.0},
        "friendly": {"friendly_batch_size": True},
        "rough": {"smooth_batches": False},
        "steps": {"smooth_batches_max_diff": 0.5},
    }.items():
        sampler = module.dynabatch_sampler(**COMMON, batch_size=8, **options)
        sizes[name] = [len(batch) for batch in sampler]
    shuffled = module.dynabatch_sampler(**COMMON, batch_size=8, shuffle=True, shuffle_seed=3, shuffle_keep_first_n=2)
    first, second = list(shuffled), list(shuffled)
    friendly = {2**n for n in range(6)} | {3 * 2**n for n in range(6)}
    return {
        "static": set(sizes["static"]) == {8},
        "fewer": len(sizes["dynamic"]) < len(sizes["static"]),
        "wide": max(sizes["wide"]) > 16,
        "friendly": all(size in friendly for size in sizes["friendly"][:-1]),
        "even": all(size % 2 == 0 for size in sizes["dynamic"][:-1]),
        "rough": max(sizes["rough"][1:]) > 8,
        "shuffled": first != second and covers(first) and covers(second),
        "kept": [max(lengths_of(batch)) for batch in first[:2]] == sorted(map(max, map(lengths_of, first)))[::-1][:2],
    }


def precomputed(module):
    """Lengths once, then samplers without a tokenizer."""
    tokens, words, chars, texts = module.compute_lengths(TEXTS, TOKENIZER, 512, max_workers=1)
    given = {"token_lengths": tokens, "word_lengths": words, "char_lengths": chars}
    sampler = module.dynabatch_sampler(TEXTS, None, 4, save_input_features=True, **given)
    try:
        module.dynabatch_sampler(
            TEXTS, None, 4, token_lengths=list(tokens)[:-1], word_lengths=words, char_lengths=chars
        )
        refused = False
    except ValueError:
        refused = True
    return {
        "tokens": list(tokens) == [len(text.split()) + 1 for text in TEXTS],
        "words": list(words) == [len(text.split()) for text in TEXTS],
        "chars": list(chars) == [len(text) for text in TEXTS],
        "texts": list(texts) == TEXTS,
        "covers": covers(list(sampler)),
        "features": {"batch_size_y", "token_max_diff"} <= set(sampler.input_features[0]),
        "refused": refused,
    }


def generation(module):
    """Generation with a fallback, and the helpers it is made of."""
    batch = collate(make_examples(9, causal=False))
    del batch["labels"]
    results = {}
    for name, most in {"fits": 9, "fallback": 4}.items():
        model = make_model("t5")
        whole = model.generate(**batch, max_new_tokens=4)
        generate = model.generate

        def limited(most=most, generate=generate, **kwargs):
            if len(kwargs["input_ids"]) > most:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            return generate(**kwargs)

        model.generate = limited
        with torch.inference_mode():
            output, did_fallback = module.generate_with_oom_fallback(
                model, batch, min_batch_size=4, device=torch.device("cpu"), pad_token_id=0, max_new_tokens=4
            )
        results[name] = [did_fallback, torch.equal(output, whole)]
    pieces = module.split_batch(batch, 4)
    inputs = module.split_inputs_dict({**batch, "scale": 2.0}, 4, batch_size_key="attention_mask")
    merged = module.merge_outputs([torch.ones(2, 3), torch.ones(1, 2)], pad_token_id=0)
    module.clear_gpu_memory(RuntimeError("CUDA out of memory."), spare=torch.zeros(1))
    return {
        **results,
        "pieces": [len(piece["input_ids"]) for piece in pieces],
        "inputs": [(len(piece["input_ids"]), piece["scale"]) for piece in inputs],
        "merged": merged.tolist(),
        "empty": module.merge_outputs([], pad_token_id=0),
    }


def generation_loop(module):
    """Generation over a loader, batch by batch, with and without a failure."""
    texts = TEXTS[:48]
    sampler = module.dynabatch_sampler(texts, TOKENIZER, batch_size=8, max_input_token_length=24, num_workers=1)
    loader = DataLoader([{"text": text} for text in texts], batch_sampler=sampler, collate_fn=collate_short)
    model = make_model("t5").eval()
    generate, results = model.generate, []

    def limited(**kwargs):
        if len(kwargs["input_ids"]) > 8:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return generate(**kwargs)

    model.generate = limited
    with torch.inference_mode():
        for batch in loader:
            tokens, did_fallback = module.generate_with_oom_fallback(
                model, batch, min_batch_size=8, device=torch.device("cpu"), max_new_tokens=4
            )
            results.append((len(tokens), did_fallback == (len(tokens) > 8), tokens.dtype))
    return {
        "rows": sum(rows for rows, *_ in results) == len(texts),
        "flags": all(is_right for _, is_right, _ in results),
        "types": {str(dtype) for *_, dtype in results} == {"torch.int64"},
    }


def training_loader(module):
    """Friendly sizes, shuffled, with the hardest batches first: a loop of one's own over three epochs."""
    options = {"batch_size": 16, "max_input_token_length": 256, "num_workers": 1}
    shuffled = {"friendly_batch_size": True, "shuffle": True, "shuffle_keep_first_n": 3}
    sampler = module.dynabatch_sampler(TEXTS, TOKENIZER, **options, **shuffled)
    loader = DataLoader(DATASET, batch_sampler=sampler, collate_fn=collate_texts)
    epochs = [[tuple(batch["input_ids"].shape) for batch in loader] for _ in range(3)]
    return {
        "all": [sum(rows for rows, _ in epoch) for epoch in epochs] == [len(TEXTS)] * 3,
        "orders": len(set(map(tuple, epochs))) == 3,
        "hardest_first": [width for _, width in epochs[0][:3]] == sorted((w for _, w in epochs[0]), reverse=True)[:3],
    }


def other_modality(module):
    """Images: another input says how many examples a batch has."""
    sides = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **sides))
    examples = [{"pixel_values": torch.rand(1, 8, 8), "labels": number % 3} for number in range(20)]
    lengths = [20 - number for number in range(20)]
    given = {"token_lengths": lengths, "word_lengths": lengths, "char_lengths": lengths}
    sampler = module.dynabatch_sampler([""] * 20, None, 4, **given)
    kind = module.make_dynabatch_trainer(Trainer)
    options = {"gradient_accumulation_steps": 2, "remove_unused_columns": False}
    args = make_args(TrainingArguments, **options)
    trainer = kind(
        model=model, args=args, train_dataset=examples, dynabatch_sampler=sampler, batch_size_key="pixel_values"
    )
    return {"finite": bool(torch.isfinite(torch.tensor(trainer.train().metrics["train_loss"])))}


def training(module):
    """The trainer helpers: class factory, mixin, learning rate, fallbacks, callback."""
    examples = make_examples(80, causal=False)
    lengths = [30 * len(example["input_ids"]) for example in examples]  # as if the texts were longer
    given = {"token_lengths": lengths, "word_lengths": lengths, "char_lengths": lengths}
    growth = {"max_batch_range": 4.0, "threshold": 1.0, "smooth_batches": False}
    sampler = module.dynabatch_sampler([""] * 80, None, 4, shuffle=True, **growth, **given)
    made = module.make_dynabatch_trainer(Seq2SeqTrainer)
    mine = type("Mine", (module.DynabatchTrainerMixin, Seq2SeqTrainer), {})
    results = {"name": made.__name__, "cached": made is module.make_dynabatch_trainer(Seq2SeqTrainer)}
    for name, options in {
        "plain": {},
        "accumulated": {"gradient_accumulation_steps": 2},
        "scaled": {"auto_scale_lr": True},
        "split": {"oom_fallback": "split_retry", "oom_min_batch_size": 2},
        "skip": {"oom_fallback": "skip"},
    }.items():
        trainer = make_trainer(module, mine if name == "plain" else made, sampler, examples, options)
        batches = len(trainer.get_train_dataloader())  # planned for training, which len(sampler) need not be
        logs = trainer.train().metrics
        failed = [entry["oom_failed"] for entry in trainer.state.log_history if "oom_failed" in entry]
        results[name] = {
            "steps": trainer.state.global_step == -(-batches // options.get("gradient_accumulation_steps", 1)),
            "finite": bool(torch.isfinite(torch.tensor(logs["train_loss"]))),
            "failed": len(failed) > 0,
            "scaled": trainer.args.learning_rate > 0.01,
        }
    args = SimpleNamespace(learning_rate=1.0, per_device_train_batch_size=4)
    results["factor"] = module.scale_lr_for_dynabatch(args, range(5), 40).learning_rate
    results["baseline"] = module.scale_lr_for_dynabatch(args, range(5), 40, baseline_batch_size=8).learning_rate
    return results


def make_trainer(module, kind, sampler, examples, options):
    model = make_model("t5").float()
    if options.get("oom_fallback"):
        fail_above(model, 5, "forward", torch.cuda.OutOfMemoryError("CUDA out of memory."))
    window = options.get("gradient_accumulation_steps", 1)
    args = make_args(Seq2SeqTrainingArguments, gradient_accumulation_steps=window)
    return kind(
        dynabatch_sampler=sampler,
        model=model,
        args=args,
        train_dataset=examples,
        data_collator=collate,
        callbacks=[module.MemoryCleanupCallback()],
        **{name: value for name, value in options.items() if name != "gradient_accumulation_steps"},
    )


def make_args(kind, **options):
    return kind(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        learning_rate=0.01,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )


FEATURES = (
    quick_start,
    first_blocks,
    built_in_loader,
    tuning,
    precomputed,
    generation,
    generation_loop,
    training_loader,
    training,
    other_modality,
)


def main(name):
    torch.set_num_threads(1)
    module = importlib.import_module(name)
    print(json.dumps({feature.__name__: feature(module) for feature in FEATURES}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
