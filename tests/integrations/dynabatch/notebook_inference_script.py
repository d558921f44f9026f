"""The flow of dynabatch's notebook that compares loaders for generation, for any module that has its names.

    python -m tests.integrations.dynabatch.notebook_inference_script batchwright.integrations.dynabatch

A table of texts; models of random weights; per model a loader that grows its batches, the same loader with fixed ones,
a bucketed and a plain one; ``generate`` on every batch of each. It prints what came out, as JSON.
"""

import gc
import importlib
import json
import random
import sys
from datetime import datetime

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Sampler
from tqdm import tqdm
from transformers import M2M100Config, M2M100ForConditionalGeneration

from .models import NUM_TOKENS, make_model
from .tokenizers import WORDS, make_fast

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}the{% endif %}"
)
MAX_LENGTH = 32
NUM_TEXTS = 40
BATCH_SIZE = 4


def make_table():
    """Return texts in two languages, a few of them longer than the limit."""
    rng = random.Random(21)
    rows = []
    for number in range(3 * NUM_TEXTS):
        length = 45 if number % 11 == 0 else rng.randint(1, 14)
        rows.append({"text": " ".join(rng.choices(WORDS, k=length)), "lang": ("es", "de")[number % 2]})
    return pd.DataFrame(rows)


class BucketSampler(Sampler):
    """Shortest first, in data order otherwise."""

    def __init__(self, data, batch_size):
        self.batch_size = batch_size
        self.lengths = np.array([len(text) for text in data])

    def __iter__(self):
        yield from np.argsort(self.lengths, kind="stable").tolist()

    def __len__(self):
        return len(self.lengths)


def make_translator():
    torch.manual_seed(0)
    sizes = {"d_model": 8, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    config = M2M100Config(vocab_size=NUM_TOKENS, **sizes, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    config.decoder_start_token_id = 1
    return M2M100ForConditionalGeneration(config).double()


def inference(model, tokenizer, loader, device, **options):
    """Generate for every batch; return what came out by text, the seconds it took, and what the batches are."""
    model.eval()
    answers, sizes, keys = {}, [], set()
    start = datetime.now()
    with torch.inference_mode():
        for batch in tqdm(loader, total=len(loader), disable=True):
            input_ids = batch["input_ids"].to(device)
            attention_mask = batch["attention_mask"].to(device)
            tokens = model.generate(input_ids=input_ids, attention_mask=attention_mask, **options)
            sizes.append(len(input_ids))
            keys |= set(batch.keys())
            texts = tokenizer.batch_decode(input_ids, skip_special_tokens=True)
            answers.update(zip(texts, tokenizer.batch_decode(tokens, skip_special_tokens=True), strict=True))
    seconds = (datetime.now() - start).total_seconds()
    del input_ids, attention_mask, tokens
    gc.collect()
    torch.cuda.empty_cache()
    return {"answers": answers, "sizes": sizes, "keys": sorted(keys), "seconds": seconds}


def compare(module, model, texts, **options):
    """Run one model with the four loaders."""
    tokenizer, device = make_fast(), torch.device("cpu")
    built = {"batch_size": BATCH_SIZE, "max_input_token_length": MAX_LENGTH}
    dynamic = module.build_dynabatch_dataloader(texts, tokenizer=tokenizer, **built)
    fixed = module.build_dynabatch_dataloader(texts, tokenizer=tokenizer, **built, dynamic_batch_mode=False)

    def collate(batch):
        return tokenizer(text=batch, padding=True, truncation=True, return_tensors="pt", max_length=MAX_LENGTH)

    bucket = DataLoader(texts, batch_size=BATCH_SIZE, sampler=BucketSampler(texts, BATCH_SIZE), collate_fn=collate)
    normal = DataLoader(texts, batch_size=BATCH_SIZE, collate_fn=collate)
    loaders = {"dynamic": dynamic, "fixed": fixed, "bucket": bucket, "normal": normal}
    runs = {name: inference(model, tokenizer, loader, device, **options) for name, loader in loaders.items()}
    speedups = pd.DataFrame({name: [run["seconds"] / runs["dynamic"]["seconds"]] for name, run in runs.items()})
    first = next(iter(dynamic))
    return {
        "keys": runs["dynamic"]["keys"],
        "types": [type(first).__name__, type(first["input_ids"]).__name__, type(first["texts"]).__name__],
        "all_texts": sum(runs["dynamic"]["sizes"]) == sum(runs["fixed"]["sizes"]) == len(texts),
        "fixed": set(runs["fixed"]["sizes"]) == {BATCH_SIZE},
        "first": runs["dynamic"]["sizes"][0],
        "no_more_batches": len(dynamic) <= len(fixed) == len(normal),
        "longest": int(first["input_ids"].shape[1]),
        "same_answers": runs["dynamic"]["answers"] == runs["fixed"]["answers"] == runs["normal"]["answers"],
        "speedups": bool((speedups > 0).all(axis=None)),
    }


def translation(module):
    """An encoder and a decoder: what a text gets does not depend on its batch."""
    table = make_table()
    texts = table[table["lang"] == "es"]["text"].sample(NUM_TEXTS, random_state=21).tolist()
    model = make_translator()
    result = compare(module, model, texts, max_new_tokens=4, forced_bos_token_id=3)
    return {**result, "footprint": model.get_memory_footprint() > 0}


def chat(module):
    """A decoder alone, with texts in a template; padding on the right, as in the notebook, so answers may differ."""
    table = make_table()
    tokenizer = make_fast()
    messages = [
        [{"role": "system", "content": "green field"}, {"role": "user", "content": text}]
        for text in table[table["lang"] == "de"].sample(NUM_TEXTS, random_state=21)["text"].to_list()
    ]
    options = {"tokenize": False, "add_generation_prompt": True}
    texts = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, **options)
    result = compare(module, make_model("llama"), texts, max_new_tokens=2, pad_token_id=0)
    return {name: value for name, value in result.items() if name != "same_answers"}


def recovery(module):
    """The helpers that the notebook imports: a batch that fails is cut, run in pieces and joined."""
    model, tokenizer = make_translator().eval(), make_fast()
    texts = make_table()["text"].tolist()[:10]
    batch = tokenizer(text=texts, padding=True, truncation=True, return_tensors="pt", max_length=MAX_LENGTH)
    whole = model.generate(**batch, max_new_tokens=4)
    try:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
    except torch.cuda.OutOfMemoryError as error:
        module.clear_gpu_memory(error, input_ids=batch["input_ids"])
    pieces = [model.generate(**piece, max_new_tokens=4).cpu() for piece in module.split_batch(batch, chunk_size=4)]
    merged = module.merge_outputs(pieces, pad_token_id=model.config.pad_token_id)
    return {"pieces": list(map(len, pieces)), "same": torch.equal(merged, whole)}


SECTIONS = (translation, chat, recovery)


def main(name):
    torch.set_num_threads(1)
    module = importlib.import_module(name)
    print(json.dumps({section.__name__: section(module) for section in SECTIONS}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
