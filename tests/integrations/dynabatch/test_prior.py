"""The memory of a batch relative to the first one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.integrations.dynabatch._prior import relative_memory

tasks = st.sampled_from(["train", "generate"])
counts = st.integers(1, 500)


@given(st.integers(1, 10_000), st.integers(1, 100_000), tasks)
def test_the_first_batch_costs_exactly_one(items, length, task):
    assert relative_memory(items, length, items, length, task=task) == 1.0


@given(counts, counts, counts, counts, tasks)
def test_it_grows_with_the_items_and_with_the_length(items, length, first, longest, task):
    here = relative_memory(items, length, first, longest, task=task)
    assert here < relative_memory(items + 1, length, first, longest, task=task)
    assert here < relative_memory(items, length + 1, first, longest, task=task)


@given(counts, counts, counts, st.integers(0, 500))
def test_a_grown_batch_that_is_safe_for_generation_is_safe_for_training(first, more, length, longer):
    shape = (first + more, length, first, length + longer)
    # Within a percent: what a batch takes whatever its size is fitted to each task on its own.
    assert relative_memory(*shape, task="train") <= 1.01 * relative_memory(*shape, task="generate")


def test_it_is_the_pretrained_model_with_half_the_longest_input_as_output():
    prior = bw.MemoryModel.pretrained("generate")
    expected = prior.relative([[16, 64]], reference=(8, 512), new_tokens=256)
    assert relative_memory(16, 64, 8, 512, task="generate") == pytest.approx(expected[0])
    given = prior.relative([[16, 64]], reference=(8, 512), new_tokens=20)
    assert relative_memory(16, 64, 8, 512, task="generate", new_tokens=20) == pytest.approx(given[0])


def test_many_batches_are_predicted_at_once():
    predicted = relative_memory(np.arange(1, 4)[:, None], [10, 20], 1, 20, task="train")
    assert predicted.shape == (3, 2)
    assert predicted[2, 0] == relative_memory(3, 10, 1, 20, task="train")
