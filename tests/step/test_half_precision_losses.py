"""What a loss is a mean over, read in half precision: rounding refuses no honest model, and hides no defect."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import PackCollator, PadCollator, huggingface_loss, use_varlen
from batchwright.step._full_precision import in_float32, noting_half
from batchwright.step.packing._kernels import attend_on_cuda, attend_plainly, attention

from .packing.models import by_softmax, make_model

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
NUM_TOKENS = 60


class Rounding:
    """Rounds the outputs of a layer in half precision to a neighbour at random, as kernels that are chosen anew do.

    Its generator goes on from run to run, so that no two runs of the same inputs are the same.
    """

    def __init__(self, layer, seed):
        self._generator = torch.Generator().manual_seed(seed)
        layer.register_forward_hook(self)

    def __call__(self, module, args, outputs):
        if outputs.dtype is torch.float32:
            return None
        ulps = torch.randint(-2, 3, outputs.shape, generator=self._generator)
        return outputs + ulps.to(outputs) * outputs.abs() * torch.finfo(outputs.dtype).eps


def examples(seed, num=6):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 14, (num,), generator=generator).tolist()
    rows = [torch.randint(3, NUM_TOKENS, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def batch_of(layout, seed):
    rows = examples(seed)
    return PadCollator()(rows) if layout == "padded" else PackCollator(layout="flat")([rows])


def in_precision(model, how, name):
    """Return a model and the context of its forward pass: half precision by autocast or by its weights."""
    if how == "weights":
        return model.to(HALF[name]), nullcontext()
    return model, torch.autocast("cpu", dtype=HALF[name])


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("how", ["autocast", "weights"])
@pytest.mark.parametrize("layout", ["padded", "flat"])
def test_a_model_whose_kernels_round_at_random_is_read_right(layout, how, name):
    for seed in range(6):
        model, precision = in_precision(make_model("Llama").train(), how, name)
        Rounding(model.lm_head, seed)
        if layout == "flat":
            use_varlen(model, attend=by_softmax)
        batch = batch_of(layout, seed)
        with precision:
            loss, weight = huggingface_loss()(model, batch)
        assert int(weight) == sum(len(row["input_ids"]) - 1 for row in examples(seed))
        assert float(loss.detach()) / float(weight) == pytest.approx(4.09, abs=0.3)  # log 60, as weights are random


class Model(nn.Module):
    """A decoder of one layer per token, whose loss has the defect that a function gives it."""

    def __init__(self, loss, seed, *, only_half=False, is_loss_wide=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Embedding(NUM_TOKENS, 32), nn.Linear(32, NUM_TOKENS)
        self._loss, self._only_half, self._is_loss_wide = loss, only_half, is_loss_wide

    def forward(self, input_ids, labels, attention_mask=None):
        logits = self.head(self.embed(input_ids))
        if self._only_half and logits.dtype is torch.float32:
            raise RuntimeError("this kernel takes half precision only")
        wide = logits.float() if self._is_loss_wide else logits
        return {"loss": self._loss(wide[:, :-1], labels[:, 1:]), "logits": logits}


def per_label(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def right(logits, labels):
    return per_label(logits, labels).sum() / (labels != -100).sum()


def mean_of_rows(logits, labels):
    is_used = labels != -100
    return (per_label(logits, labels).sum(dim=1) / is_used.sum(dim=1)).mean()


def sum_of_labels(logits, labels):
    return per_label(logits, labels).sum()


def mean_of_places(logits, labels):
    """Padding counts too."""
    return per_label(logits, labels).mean()


def one_too_many(logits, labels):
    return per_label(logits, labels).sum() / ((labels != -100).sum() + 1)


def one_too_many_a_row(logits, labels):
    return per_label(logits, labels).sum() / ((labels != -100).sum() + len(labels))


def comparing(logits, labels):
    """Rows are pushed apart, as in a contrastive loss."""
    rows = logits.mean(dim=1)
    return right(logits, labels) + 2 * torch.pdist(rows.float()).mean() if len(rows) > 1 else right(logits, labels)


DEFECTS = (mean_of_rows, sum_of_labels, mean_of_places, one_too_many, one_too_many_a_row, comparing)


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("how", ["autocast", "weights"])
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_refused_in_half_precision(defect, how, name):
    for seed in range(6):
        model, precision = in_precision(Model(defect, seed), how, name)
        Rounding(model.head, seed)
        with precision, pytest.raises(ArgumentError, match="is not a mean over its labels"):
            huggingface_loss()(model, batch_of("padded", seed))


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_refused_where_the_loss_itself_is_in_half_precision(defect):
    for seed in range(6):
        model = Model(lambda *given: defect(*given).to(given[0].dtype), seed, is_loss_wide=False).to(torch.bfloat16)
        with pytest.raises(ArgumentError, match="is not a mean over its labels"):
            huggingface_loss()(model, batch_of("padded", seed))


def test_a_loss_in_half_precision_without_a_defect_is_taken():
    for seed in range(12):
        model = Model(lambda *given: right(*given).to(given[0].dtype), seed, is_loss_wide=False).to(torch.bfloat16)
        _, weight = huggingface_loss()(model, batch_of("padded", seed))
        assert model.head.weight.dtype is torch.bfloat16
        assert int(weight) == sum(len(row["input_ids"]) - 1 for row in examples(seed))


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("how", ["autocast", "weights"])
def test_the_same_model_without_a_defect_is_taken(how, name):
    for seed in range(12):
        model, precision = in_precision(Model(right, seed), how, name)
        Rounding(model.head, seed)
        with precision:
            _, weight = huggingface_loss()(model, batch_of("padded", seed))
        assert int(weight) == sum(len(row["input_ids"]) - 1 for row in examples(seed))


@pytest.mark.parametrize("defect", [sum_of_labels, mean_of_places, one_too_many_a_row])
def test_a_defect_is_refused_where_a_model_runs_in_half_precision_only(defect):
    for seed in range(6):
        model = Model(defect, seed, only_half=True).to(torch.bfloat16)
        Rounding(model.head, seed)
        with pytest.raises(ArgumentError, match="is not a mean over its labels"):
            huggingface_loss()(model, batch_of("padded", seed))


@pytest.mark.parametrize("seed", [0, 2])
def test_a_model_that_runs_in_half_precision_only_is_read_where_losses_differ_by_more_than_rounding(seed):
    model = half_only(seed)
    _, weight = huggingface_loss()(model, batch_of("padded", seed))
    assert int(weight) == sum(len(row["input_ids"]) - 1 for row in examples(seed))


def test_a_model_that_runs_in_half_precision_only_is_not_guessed_where_they_do_not():
    model = half_only(1)  # the labels cost 9.2 and 10.8: with rounding, a mean of rows would do as well
    with pytest.raises(ArgumentError, match="this batch does not show it"):
        huggingface_loss()(model, batch_of("padded", 1))


def half_only(seed):
    model = Model(right, seed, only_half=True)
    nn.init.normal_(model.head.weight, std=0.5)
    Rounding(model.to(torch.bfloat16).head, seed)
    return model


def test_weights_buffers_and_autocast_are_as_before():
    model = make_model("Llama").to(torch.bfloat16)
    before = {name: (value.data_ptr(), value.dtype) for name, value in model.named_parameters()}
    ids = torch.tensor([[5, 6, 7]])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        with in_float32(model), noting_half(model) as halves:
            logits = model(input_ids=ids).logits
        assert torch.is_autocast_enabled("cpu")
    assert halves == []
    assert logits.dtype is torch.float32
    assert {name: (value.data_ptr(), value.dtype) for name, value in model.named_parameters()} == before
    with torch.no_grad(), noting_half(model) as halves:
        model(input_ids=ids)
    assert halves == [torch.bfloat16]


def test_an_error_inside_leaves_the_weights_as_they_were():
    model = Model(right, 0, only_half=True).to(torch.float16)
    with pytest.raises(RuntimeError, match="half precision only"), in_float32(model):
        model(torch.tensor([[1, 2]]), torch.tensor([[1, 2]]))
    assert {value.dtype for value in model.parameters()} == {torch.float16}
    assert not model.head._forward_hooks
    assert not model.head._forward_pre_hooks


def test_float32_logits_are_those_of_widened_weights():
    model = make_model("Llama").eval().to(torch.bfloat16)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        with in_float32(model):
            found = model(input_ids=ids).logits
        expected = model.float()(input_ids=ids).logits
    assert torch.equal(found, expected)


def test_attention_that_takes_half_precision_only_is_replaced_in_float32(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("the kernel was called")

    monkeypatch.setattr("batchwright.step.packing._kernels.torch_varlen", lambda: refuse)
    states = torch.randn(1, 2, 3, 4)
    bounds = {"cu_seq_lens_q": torch.tensor([0, 2, 3]), "max_length_q": 2}
    run = partial(attention, attend_on_cuda, nn.Identity(), states, states, states, None, **bounds)
    with pytest.raises(AssertionError, match="kernel was called"):
        run()
    with in_float32(nn.Linear(1, 1)):
        found, _ = run()
    flat = states[0].transpose(0, 1)
    expected = attend_plainly(flat, flat, flat, bounds["cu_seq_lens_q"], 2, scale=0.5, is_causal=True, window=None)
    assert torch.equal(found[0], expected)


class Leaking:
    """Attends within sequences, but lets one in ten parts of all values through."""

    def __call__(self, query, key, value, bounds, longest, **options):
        found = by_softmax(query, key, value, bounds, longest, **options)
        return found + 0.1 * value.mean(dim=0, keepdim=True).repeat_interleave(query.shape[1] // value.shape[1], 1)


@pytest.mark.parametrize("name", HALF)
def test_rounding_at_random_does_not_hide_that_sequences_see_each_other(name):
    for seed in range(6):
        model = make_model("Llama").train()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        handle = use_varlen(model, attend=Leaking())
        Rounding(model.lm_head, seed)
        with torch.autocast("cpu", dtype=HALF[name]), pytest.raises(ArgumentError, match=r"sees its neighbour|alone"):
            huggingface_loss()(model, batch_of("flat", seed))
        handle.remove()


@pytest.mark.parametrize("loss", [right, mean_of_rows])
def test_a_compiled_part_is_read_as_it_was_written(loss):
    model = Model(loss, 0)
    Rounding(model.head, 0)
    model.to(torch.bfloat16)
    model.embed.compile(backend="eager")
    if loss is right:
        _, weight = huggingface_loss()(model, batch_of("padded", 0))
        assert int(weight) == sum(len(row["input_ids"]) - 1 for row in examples(0))
    else:
        with pytest.raises(ArgumentError, match="is not a mean over its labels"):
            huggingface_loss()(model, batch_of("padded", 0))
    assert model.embed.weight.dtype is torch.bfloat16
