"""Flat batches in a Stepper: every split gives the gradient of padded training, and examples are what is counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD
from transformers import DataCollatorWithFlattening

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.step import PackCollator, PadCollator, Stepper, huggingface_loss, use_varlen
from batchwright.step._settings import wrap_batch
from batchwright.step.packing._kernels import attend_plainly
from batchwright.step.packing.rows import FlatBatch
from batchwright.step.splitting import split

from .models import ENCODERS, LENGTHS, MODELS, gradient, make_examples, make_model

torch.set_num_threads(1)


def flat_batch(name, lengths=LENGTHS):
    examples = make_examples(name, lengths)
    return PackCollator(layout="flat", causal=name not in ENCODERS)([examples[:2], examples[2:]])


def flat_model(name):
    model = make_model(name)
    use_varlen(model, attend=attend_plainly)
    return model


def run(model, batch, loss_fn=None, **options):
    """Return the gradient of one update, and its report."""
    stepper = Stepper(model, SGD(model.parameters(), lr=0.0), loss_fn or huggingface_loss(), **options)
    stepper.accumulate(batch)
    stepper.reduce()
    return gradient(model), stepper.update()


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


SPLITS = {
    "whole": {},
    "one by one": {"micro_batch": 1},
    "by twos": {"micro_batch": 2},
    "by tokens": {"micro_batch": bw.MaxTokens(14), "lengths": PackCollator.lengths},
    "at random": {"micro_batch": 2, "measure_noise": True},
}


@pytest.mark.parametrize("name", [name for name in ("Llama", "GPT-2", "BERT", "ModernBERT") if name in MODELS])
@pytest.mark.parametrize("how", SPLITS)
def test_every_split_of_a_flat_batch_gives_the_gradient_of_padded_training(name, how):
    expected, reference = run(make_model(name), PadCollator()(make_examples(name)))
    found, report = run(flat_model(name), flat_batch(name), **SPLITS[how])
    assert expected.norm() > 0.1
    assert error(found, expected) < 2e-6
    assert report.loss == pytest.approx(reference.loss, rel=1e-6)
    assert (report.batch_size, report.weight, report.tokens) == (len(LENGTHS), reference.weight, sum(LENGTHS))
    assert report.num_micro_batches == {"whole": 1, "one by one": 5}.get(how, 3)


@pytest.mark.parametrize("name", ["Llama", "BERT"])
@pytest.mark.parametrize("most", [30, 13])
def test_a_flat_batch_that_runs_out_of_memory_is_run_in_smaller_ones(name, most):
    plain, sizes = huggingface_loss(), []

    def loss_fn(model, batch):
        sizes.append(batch["input_ids"].shape[1])
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(model, batch)

    expected, _ = run(make_model(name), PadCollator()(make_examples(name)))
    found, report = run(flat_model(name), flat_batch(name), loss_fn)
    assert error(found, expected) < 2e-6
    assert sizes[0] == sum(LENGTHS)
    assert report.ooms > 0
    assert max(sizes[-report.num_micro_batches :]) <= most


def test_an_example_of_a_flat_batch_that_does_not_fit_is_named():
    def loss_fn(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(DoesNotFitError, match=r"example 0 of the batch of length \[5\] does not fit on its own"):
        run(flat_model("Llama"), flat_batch("Llama"), loss_fn)


def test_a_micro_batch_has_bounds_and_positions_of_its_own():
    batch = wrap_batch(flat_batch("Llama"), collate=None, lengths=None, trim=None, split=None)
    part = batch.take([3, 0])
    examples = make_examples("Llama")
    assert part["input_ids"].tolist() == [examples[3]["input_ids"] + examples[0]["input_ids"]]
    assert part["cu_seq_lens_q"].tolist() == part["cu_seq_lens_k"].tolist() == [0, 3, 8]
    assert part["cu_seq_lens_q"].dtype == torch.int32
    assert (part["max_length_q"], part["max_length_k"], part["use_cache"]) == (5, 5, False)
    assert part["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert part["labels"][0, [0, 3]].tolist() == [-100, -100]


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    most=st.integers(20, 60),
    budget=st.sampled_from([bw.MaxTokens, bw.MaxItems]),
)
@settings(max_examples=60, deadline=None)
def test_parts_of_a_flat_batch_hold_every_example_once_and_count_no_padding(lengths, most, budget):
    rows = [[{"input_ids": list(range(1, length + 1))} for length in lengths]]
    batch = wrap_batch(PackCollator(layout="flat")(rows), collate=None, lengths=None, trim=None, split=None)
    parts = split(batch, budget=budget(most if budget is bw.MaxTokens else 3), limit=1.0)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    sums = [sum(lengths[place] for place in part) for part in parts]
    if budget is bw.MaxItems:
        assert max(map(len, parts)) <= 3
        return
    # As if all were equally long, rounded up: less than a token per example is lost.
    assert max(sums) <= most
    for part, total, following in zip(parts, sums, parts[1:], strict=False):
        assert total + lengths[following[0]] > most - len(part) - 1


def test_a_batch_that_runs_whole_is_not_read_from_the_device():
    batch = wrap_batch(flat_batch("Llama"), collate=None, lengths=None, trim=None, split=None)
    assert isinstance(batch, FlatBatch)
    assert [list(part) for part in split(batch, budget=None, limit=float("inf"))] == [[0, 1, 2, 3, 4]]
    assert batch.num_tokens == sum(LENGTHS)
    assert "lengths" not in vars(batch)
    assert batch.take(range(5)) is batch.source


def test_a_flattening_collator_of_transformers_is_cut_the_same_way():
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": example["input_ids"]} for example in make_examples("Llama")])
    expected, _ = run(make_model("Llama"), PadCollator()(make_examples("Llama")))
    found, report = run(make_model("Llama"), {**batch, "use_cache": False}, micro_batch=2)
    assert error(found, expected) < 2e-6
    assert (report.batch_size, report.num_micro_batches) == (5, 3)
    # With a cache, transformers masks nothing by position_ids, and examples see each other.
    with pytest.raises(ArgumentError, match=r"which it sees; .* pass use_cache=False if the batch does not"):
        run(make_model("Llama"), batch, micro_batch=2)


# What is refused


def test_an_encoder_whose_examples_would_see_each_other_is_refused():
    with pytest.raises(ArgumentError, match=r"of a sequence change with the tokens of another .*call use_varlen"):
        run(make_model("BERT"), flat_batch("BERT"))


def test_labels_that_the_example_before_would_predict_are_refused():
    batch = PackCollator(layout="flat", causal=False)([make_examples("Llama")])
    with pytest.raises(ArgumentError, match="the first label of a packed sequence counts"):
        run(flat_model("Llama"), batch)


def test_noise_of_single_examples_is_refused_as_they_have_no_rows():
    with pytest.raises(ArgumentError, match=r"does not have a row per example.*use noise_from='all'"):
        run(flat_model("Llama"), flat_batch("Llama"), measure_noise=True, noise_from="vectors")


def test_a_field_that_has_no_value_per_token_is_refused_when_the_batch_is_cut():
    batch = {**flat_batch("Llama"), "classes": torch.arange(5)}

    def loss_fn(model, part):
        return model(**{name: value for name, value in part.items() if name != "classes"}).loss, 1.0

    with pytest.raises(ArgumentError, match=r"'classes' of shape \(5,\) does not run along the 31 tokens"):
        run(flat_model("Llama"), batch, loss_fn, micro_batch=2)
