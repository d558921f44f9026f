"""DemoEncoder: vectors that depend on their own text only, for as many bytes as are counted."""

import numpy as np
import pytest

from batchwright.serve.demo import DemoEncoder
from batchwright.serve.demo.encoder import length_of


@pytest.fixture(scope="module")
def encoder():
    return DemoEncoder(width=8, num_layers=2)


def test_a_vector_does_not_depend_on_the_other_texts(encoder):
    alone = encoder(["to be"])[0]
    assert encoder(["a much longer text", "to be"])[1] == alone
    assert np.abs(np.array(encoder(["or not"])[0]) - alone).max() > 0.01
    assert np.linalg.norm(alone) == pytest.approx(1)


def test_the_order_of_the_bytes_counts(encoder):
    assert np.abs(np.subtract(*encoder(["ab", "ba"]))).max() > 0.01


def test_every_encoder_has_the_same_weights(encoder):
    assert DemoEncoder(width=8, num_layers=2)(["to be"]) == encoder(["to be"])


def test_the_time_of_a_batch_grows_with_its_padded_tokens(encoder, monkeypatch):
    shapes = []

    def multiply(formula, x, weights):
        shapes.append(x.shape[:2])
        return np.tensordot(x, weights, axes=1) if weights.ndim == 2 and formula.endswith("v") else x.sum(1)

    monkeypatch.setattr(np, "einsum", multiply)
    encoder(["to be", "x" * 100])
    assert shapes == [(2, 100)] * 3  # two layers and the mean, padding included


@pytest.mark.parametrize(("text", "length"), [("", 1), ("é", 2), ("x" * 300, 256)])
def test_the_length_of_a_text_is_what_the_encoder_pads(encoder, text, length):
    assert length_of(text) == length
    assert len(encoder([text])[0]) == 8
