"""The flows of dynabatch's two notebooks run with only the import changed, and give the same kinds of results."""

import importlib

import pytest

from . import notebook_inference_script, notebook_training_script
from .packages import PACKAGES

LOADERS = {
    "keys": ["attention_mask", "input_ids", "texts"],
    "types": ["BatchEncoding", "Tensor", "list"],
    "all_texts": True,
    "fixed": True,
    "first": notebook_inference_script.BATCH_SIZE,
    "no_more_batches": True,
    "longest": notebook_inference_script.MAX_LENGTH,
    "speedups": True,
}
INFERENCE = {
    "translation": {**LOADERS, "same_answers": True, "footprint": True},
    "chat": LOADERS,
    "recovery": {"pieces": [4, 4, 2], "same": True},
}
TRAINING = {
    "every_example": True,
    "fewer_steps": True,
    "rate_is_larger": True,
    "updates": True,
    "grows": True,
    "within_range": True,
    "metrics": ["epoch", "train_loss", "train_runtime"],
    "evaluated": True,
    "eval_keys": ["epoch", "eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "step"],
    "failed": [1, 2],
    "speedup": True,
}


@pytest.mark.filterwarnings("default")  # dynabatch's own are not ours to answer for
@pytest.mark.parametrize("section", notebook_inference_script.SECTIONS, ids=lambda section: section.__name__)
@pytest.mark.parametrize("name", PACKAGES)
def test_the_notebook_on_generation_runs(name, section):
    assert section(importlib.import_module(name)) == INFERENCE[section.__name__]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", PACKAGES)
def test_the_notebook_on_training_runs(name):
    assert notebook_training_script.training(importlib.import_module(name)) == TRAINING
