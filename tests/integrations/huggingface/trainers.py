"""Adaptive trainers on tiny models, what they were fed, and the gradients their updates should have."""

import gc
import inspect
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

import batchwright as bw
from batchwright import size
from batchwright.integrations.huggingface import adaptive

from ..dynabatch.models import MODELS, collate, make_examples, make_model
from ..dynabatch.trainer.training import Gradients, flat_gradient, make_args, relative_error

__all__ = ["MODELS", "collate", "flat_gradient", "make_args", "make_examples", "make_model", "relative_error"]

TOLERANCE = 1e-6  # norms of T5 and Llama, and the loss of causal models, always round to float32
BUDGET = bw.MaxTokens(80)
MOST_EXAMPLES = 25
# Older trainers divide a sum over labels by how many there were before the shift, so their own losses are no means.
counts_after_shift = pytest.mark.skipif(
    "shift_labels" not in inspect.getsource(Trainer._get_num_items_in_batch),
    reason="the trainer of this transformers counts labels before the shift",
)
ARGUMENTS = {Seq2SeqTrainer: Seq2SeqTrainingArguments}


@contextmanager
def quick():
    """Let many small trainings run quickly: each collects garbage, and the modules of transformers are not garbage."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def numbered(num=24, *, causal=False):
    """Return examples that know their place."""
    return [{**example, "number": place} for place, example in enumerate(make_examples(num, causal=causal))]


def recording(seen, examples):
    """Collate, and note the places of the examples."""
    seen.append([example["number"] for example in examples])
    return collate(examples)


def make_trainer(name, folder, *, examples=None, model=None, trainer_cls=Trainer, callbacks=(), **options):
    """Return a trainer, the micro-batches it collates and the callback that keeps its gradients."""
    examples = numbered(causal=MODELS[name][3]) if examples is None else examples
    gradients, seen = Gradients(), []
    kind = ARGUMENTS.get(trainer_cls, TrainingArguments)
    args = {key: options.pop(key) for key in list(options) if key in kind.__dataclass_fields__}
    settings = {"budget": BUDGET, "data_collator": partial(recording, seen), **options}
    trainer = adaptive(trainer_cls)(
        model=make_model(name) if model is None else model,
        args=make_args(folder, kind, **{"remove_unused_columns": False, **args}),
        train_dataset=examples,
        callbacks=[gradients, *callbacks],
        **settings,
    )
    return trainer, seen, gradients


@cache
def _sums(name):
    """Return the gradient and the loss of every single example, summed over its labels, and the number of labels."""
    model, rows = make_model(name).train(), []
    for example in numbered(MOST_EXAMPLES, causal=MODELS[name][3]):
        batch = collate([example])
        logits, labels = model(**batch).logits, batch["labels"]
        if MODELS[name][3]:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        model.zero_grad()
        loss.backward()
        rows.append((flat_gradient(model), loss.detach(), labels.numel()))
    gradients, losses, counts = zip(*rows, strict=True)
    return torch.stack(gradients), torch.stack(losses), torch.tensor(counts, dtype=torch.float64)


def exact(name, numbers, weighting="tokens"):
    """Return the gradient and the loss of the mean over labels, or over examples, of an untrained model."""
    gradients, losses, counts = (values[list(numbers)] for values in _sums(name))
    if weighting == "tokens":
        return gradients.sum(dim=0) / counts.sum(), float(losses.sum() / counts.sum())
    return (gradients / counts[:, None]).mean(dim=0), float((losses / counts).mean())


def flat(lists):
    """Return the items of lists as one list."""
    return list(chain.from_iterable(lists))


def windows(batches, num):
    """Return the examples of every update: those of ``num`` micro-batches each, of fewer in the last."""
    return [flat(batches[start : start + num]) for start in range(0, len(batches), num)]


def flat_parameters(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def make_controller(*sizes):
    """Return a controller that goes through sizes, one per update."""
    policy = size.milestones(dict(enumerate(sizes)), per="step")
    return bw.BatchSizeController(policy, min_size=1, max_size=24)


def check(name, trainer, gradients, updates, weighting="tokens"):
    """Compare the gradients and logged losses of a training with the exact ones."""
    assert len(gradients.seen) == len(updates)
    losses = []
    for found, numbers in zip(gradients.seen, updates, strict=True):
        expected, loss = exact(name, numbers, weighting)
        assert relative_error(found, expected) < TOLERANCE
        losses.append(loss)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-5)


@cache
def entropies(name):
    """Return the summed entropy of every example by itself, by the definition, and its number of labels."""
    model, rows = make_model(name).train(), []
    for example in numbered(MOST_EXAMPLES, causal=MODELS[name][3]):
        logits = model(**collate([example])).logits.detach()[0]
        logits = logits[:-1] if MODELS[name][3] else logits
        p = torch.exp(logits) / torch.exp(logits).sum(dim=-1, keepdim=True)
        rows.append((float(-(p * torch.log(p)).sum()), len(logits)))
    return np.array(rows)


def mean_entropy(name, numbers):
    total, num = entropies(name)[list(numbers)].sum(axis=0)
    return total / num


def watching(observed, sizes, needs=("entropy",)):
    """Return a controller that notes what it observes, and goes through sizes."""

    def choose(observation):
        observed.append(observation)
        return sizes[min(observation.step, len(sizes) - 1)]

    policy = size.track(choose, needs=needs)
    return bw.BatchSizeController(policy, min_size=1, max_size=24, initial=sizes[0])


def by_update(observed):
    """Return one observation per update: a policy is asked again for its reason."""
    return list({o.step: o for o in observed}.values())
