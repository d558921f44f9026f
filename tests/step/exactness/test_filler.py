"""Filler rows: an update with them is the update without them, for every way a loss may leave them out."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

import batchwright as bw
from batchwright.step import PadCollator, Stepper, huggingface_loss
from batchwright.step.filler import ROW_WEIGHT

from ...thorough import crossed

torch.set_num_threads(1)

SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SEQ2SEQ = {"vocab_size": 40, "d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 2}


class Pooled(nn.Module):
    """Means over the real frames of a row, then two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, frames, attention_mask):
        mask = attention_mask[:, :, None].to(frames.dtype)
        return self.layers((frames * mask).sum(1) / mask.sum(1))[:, 0]


def make_t5():
    sizes = {"d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**SEQ2SEQ, **sizes))


def make_m2m100():
    sizes = {"layers": 2, "attention_heads": 2, "ffn_dim": 24, "layerdrop": 0.0}
    layers = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    off = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 64}
    return M2M100ForConditionalGeneration(M2M100Config(**SEQ2SEQ, **layers, **off))


def make_bert():
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 64}
    return BertForSequenceClassification(BertConfig(**SMALL, **off, num_labels=3))


MODELS = {
    "mlp": Pooled,
    "t5": make_t5,
    "m2m100": make_m2m100,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "bert": make_bert,
}
SOURCES = np.random.default_rng(0).integers(2, 20, size=37)
TARGETS = np.random.default_rng(1).integers(2, 20, size=37)


def make_examples(name, dtype):
    generator = torch.Generator().manual_seed(0)

    def tokens(length):
        return torch.randint(3, 40, (int(length),), generator=generator)

    if name == "mlp":
        frames = [torch.randn(int(length), 2, generator=generator, dtype=dtype) for length in SOURCES]
        return [{"frames": frame, "label": frame.sum().item()} for frame in frames]
    if name == "llama":
        return [{"input_ids": ids, "labels": ids} for ids in map(tokens, SOURCES)]
    if name == "bert":
        return [{"input_ids": tokens(length), "labels": int(length) % 3} for length in SOURCES]
    pairs = zip(SOURCES, TARGETS, strict=True)
    return [{"input_ids": tokens(source), "labels": tokens(target)} for source, target in pairs]


def axes_of(name):
    return {"mlp": ("frames",), "t5": ("input_ids", "labels"), "m2m100": ("input_ids", "labels")}.get(
        name, ("input_ids",)
    )


def inputs_of(batch):
    return {key: value for key, value in batch.items() if key != ROW_WEIGHT}


def each_row(model, batch, name):
    """Return the loss and the weight of every row, filler too."""
    if name == "mlp":
        error = model(batch["frames"], batch["attention_mask"]) - batch["label"].to(batch["frames"].dtype)
        return error.square(), torch.ones(len(error))
    logits, labels = model(**inputs_of(batch)).logits, batch["labels"]
    if name == "llama":
        logits, labels = logits[:, :-1], labels[:, 1:]
    if labels.ndim == 1:
        logits, labels = logits[:, None], labels[:, None]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum(1), (labels != -100).sum(1).to(torch.float32)


def loss_of(name, way):
    def by_labels(model, batch):
        losses, weights = each_row(model, batch, name)
        return losses.sum(), weights.sum()

    def by_rows(model, batch):
        losses, weights = each_row(model, batch, name)
        real = batch.get(ROW_WEIGHT, torch.ones(len(losses)))
        return (losses * real).sum(), (weights * real).sum()

    return {"labels": by_labels, "rows": by_rows, "huggingface": huggingface_loss()}[way]


def catalogue(num_axes):
    """Return two static shapes: 9 rows that are short, or 5 that are long."""
    return bw.PadTo(shapes=((9,) * num_axes, (20,) * num_axes), sizes=(9, 5))


def cut(examples):
    """Return micro-batches of 5, which are full, and short ones of 4, 3, 2 and 1, by their source from the shortest."""
    ordered = [examples[index] for index in np.argsort(SOURCES, kind="stable")]
    stops = np.cumsum([0, 4, 3, 5, 5, 5, 4, 4, 3, 2, 1, 1])
    assert stops[-1] == len(examples)
    return [ordered[start:stop] for start, stop in pairwise(stops)]


def gradient_of(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def expected(model, loss_fn, batch):
    """Return the gradient of a batch in one piece, by hand."""
    model.zero_grad()
    loss, weight = loss_fn(model, batch)
    (loss / weight).backward()
    found = gradient_of(model)
    model.zero_grad(set_to_none=True)
    return found


def stepped(model, loss_fn, parts, collate):
    """Return the gradient that the optimizer of a Stepper is given, and the report."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, seen = copy.deepcopy(model.state_dict()), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradient_of(model)))
    stepper = Stepper(model, optimizer, loss_fn, collate=collate)
    for part in parts:
        stepper.accumulate(part)
    report = stepper.update()
    model.load_state_dict(before)
    return seen[0], report


CASES = [
    *((name, way) for name in MODELS for way in ("labels", "rows") if (name, way) != ("mlp", "labels")),
    *((name, "huggingface") for name in MODELS if name != "mlp"),
]


@pytest.mark.parametrize(("case", "dtype"), crossed(CASES, [torch.float64, torch.float32]), ids=str)
def test_the_gradient_with_filler_is_that_of_the_batch_without(case, dtype):
    name, way = case
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).train()
    examples, axes = make_examples(name, dtype), axes_of(name)
    pad_to, parts = catalogue(len(axes)), cut(examples)
    loss_fn, plain = loss_of(name, way), PadCollator(pad_to=pad_to, axis_fields=axes)
    # A loss by weights of rows must not need ignored labels, so there they stay copies.
    options = {"label_fields": ()} if way == "rows" else {}
    filling = PadCollator(pad_to=pad_to, axis_fields=axes, fill_rows=True, **options)
    found, report = stepped(model, loss_fn, parts, filling)
    without, _ = stepped(model, loss_fn, parts, plain)
    in_one_piece = expected(model, loss_of(name, "rows"), PadCollator(axis_fields=axes)(examples))
    assert sum(len(filling(part)[ROW_WEIGHT]) > len(part) for part in parts) >= 8
    assert (report.num_micro_batches, report.batch_size) == (len(parts), len(examples))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert (found - without).norm() <= tolerance * without.norm()
    # T5 and Llama take gradients of their norms in float32, and those of a sum are rounded otherwise than of a mean.
    tolerance = max(tolerance, 1e-6) if name in ("t5", "llama") else tolerance
    assert (found - in_one_piece).norm() <= tolerance * in_one_piece.norm()


def test_a_loss_that_counts_filler_trains_without_it():
    model, examples = Pooled().double(), make_examples("mlp", torch.float64)
    pad_to, parts = catalogue(1), cut(examples)
    filling, plain = (PadCollator(pad_to=pad_to, axis_fields=("frames",), fill_rows=flag) for flag in (True, False))
    with pytest.warns(UserWarning, match="two examples of weight 2 have 5 with three of them"):
        found, _ = stepped(model, loss_of("mlp", "labels"), parts, filling)
    without, _ = stepped(model, loss_of("mlp", "labels"), parts, plain)
    assert (found - without).norm() <= 1e-12 * without.norm()


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_a_model_of_transformers_with_one_label_per_example_leaves_filler_out(kind):
    torch.manual_seed(0)
    model = make_bert().double().train()
    examples = make_examples("bert", torch.float64)
    if kind == "regression":
        model.config.problem_type, model.num_labels, model.classifier = "regression", 1, nn.Linear(16, 1).double()
        examples = [{**example, "labels": float(example["labels"])} for example in examples]
    collate = PadCollator(pad_to=bw.PadTo(((20,),), (16,)), fill_rows=True)
    for num in (1, 5, 16):
        batch, alone = collate(examples[:num]), PadCollator()(examples[:num])
        found, wanted = huggingface_loss()(model, batch), huggingface_loss()(model, alone)
        assert found[0].item() == pytest.approx(wanted[0].item(), rel=1e-12)
        assert found[1].item() == wanted[1].item() == num
