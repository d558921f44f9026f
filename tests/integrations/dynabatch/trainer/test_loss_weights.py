"""The weights of micro-batches in an update, as ``docs/dynabatch.md`` names them for both packages."""

import importlib

import pytest
from transformers import Trainer

from ..models import MODELS, collate, make_examples, make_model
from ..packages import OURS, PACKAGES
from .training import Gradients, flat_gradient, make_args, relative_error

# Two micro-batches of examples of equal length, in one update.
BATCHES = [list(range(4)), list(range(4, 20))]
WEIGHTS = {
    (OURS, "llama"): (0.2, 0.8),
    (OURS, "t5"): (0.2, 0.8),
    ("dynabatch", "llama"): (0.2, 3.2),
    ("dynabatch", "t5"): (1.0, 4.0),
}


def make_equal(causal):
    """Return 20 examples of 6 tokens."""
    rows = [example["input_ids"] for example in make_examples(60, causal=causal) if len(example["input_ids"]) >= 6]
    return [{"input_ids": row[:6], "labels": row[:6]} for row in rows[:20]]


def mean_gradient(name, examples, batch):
    model = make_model(name).train()
    model(**collate([examples[index] for index in batch])).loss.backward()
    return flat_gradient(model)


def make_sampler(package, examples):
    lengths = [6] * len(examples)
    sampler = importlib.import_module(f"{package}.sampler").DynaBatchSampler(lengths, lengths, lengths, 4)
    sampler.batches = BATCHES
    return sampler


@pytest.mark.filterwarnings("default")  # dynabatch's own are not ours to answer for
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("package", PACKAGES)
def test_micro_batches_of_4_and_16_examples_have_the_named_weights(package, name, tmp_path):
    examples, gradients = make_equal(MODELS[name][3]), Gradients()
    importlib.import_module(f"{package}.trainer").make_dynabatch_trainer(Trainer)(
        model=make_model(name),
        args=make_args(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4),
        train_dataset=examples,
        data_collator=collate,
        callbacks=[gradients],
        dynabatch_sampler=make_sampler(package, examples),
    ).train()
    first, second = (mean_gradient(name, examples, batch) for batch in BATCHES)
    weights = WEIGHTS[package, name]
    # llama computes its norms in single precision
    assert relative_error(gradients.seen[0], weights[0] * first + weights[1] * second) < 1e-5
