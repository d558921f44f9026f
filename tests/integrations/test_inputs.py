"""The padding of a model's inputs that can be cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.integrations._inputs import trim_padding

from .dynabatch.models import MODELS, collate, make_examples, make_model


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(0, 6), st.integers(0, 6), st.integers(0, 9))
def test_trimming_changes_no_loss(name, num, wider, longer, seed):
    causal = MODELS[name][3]
    batch = collate(make_examples(num, causal=causal, seed=seed))
    more = {"input_ids": (wider, 0), "attention_mask": (wider, 0), "labels": (wider if causal else longer, -100)}
    padded = {key: torch.nn.functional.pad(batch[key], (0, by), value=fill) for key, (by, fill) in more.items()}
    cut = trim_padding(padded)
    model = make_model(name)
    assert float(model(**cut).loss.detach()) == pytest.approx(float(model(**padded).loss.detach()), rel=1e-6)
    # A target as wide as the source might be its labels; then both keep the wider of the two.
    if causal or padded["labels"].shape != padded["input_ids"].shape:
        assert {key: value.shape for key, value in cut.items()} == {key: value.shape for key, value in batch.items()}


def test_left_padding_is_left_alone():
    batch = {"input_ids": torch.tensor([[0, 5]]), "attention_mask": torch.tensor([[0, 1]])}
    assert trim_padding(batch)["input_ids"].tolist() == [[0, 5]]


def test_where_a_tensor_is_not_understood_nothing_is_cut():
    batch = {
        "input_ids": torch.tensor([[5, 0]]),
        "attention_mask": torch.tensor([[1, 0]]),
        "boxes": torch.zeros(1, 2, 4),
    }
    assert trim_padding(batch) is batch
    assert trim_padding({"pixel_values": torch.zeros(2, 3)})["pixel_values"].shape == (2, 3)
