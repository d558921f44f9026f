"""The prior: relative memory where nothing was measured."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.plan.models.prior import MemoryPrior

PRIOR = MemoryPrior("generate", fixed=10.0, per_item=20.0, square=0.0, longer_square=0.01)
sizes = st.integers(1, 2000)


def test_the_ratio_is_that_of_the_formula():
    # Reference: 10 + 4 × (20 + 100 + 30) = 610. Batch: 10 + 12 × (20 + 20 + 30) = 850.
    assert PRIOR.relative([[12, 20]], reference=(4, 100), new_tokens=30).tolist() == [850 / 610]


def test_a_batch_longer_than_the_reference_is_charged_for_stored_scores():
    # 10 + 4 × (20 + 100 + 30 + 0.01 × 100²) = 1010 for the reference, 10 + 2 × (20 + 200 + 30 + 400) = 1310.
    assert PRIOR.relative([[2, 200]], reference=(4, 100), new_tokens=30).tolist() == [1310 / 1010]


def test_axes_are_summed():
    prior = bw.MemoryModel.pretrained("train")
    one, two = prior.relative([[8, 60]], reference=(4, 100)), prior.relative([[8, 20, 40]], reference=(4, 50, 50))
    assert one.tolist() == two.tolist()


@pytest.mark.parametrize("task", ["train", "generate"])
@given(items=sizes, length=sizes, reference_items=sizes, reference_length=sizes)
def test_the_prior_grows_with_items_and_length_and_is_one_for_the_reference(
    task, items, length, reference_items, reference_length
):
    prior, reference = bw.MemoryModel.pretrained(task), (reference_items, reference_length)
    shapes = [(items, length), (items + 1, length), (items, length + 1), reference]
    here, more, longer, same = prior.relative(shapes, reference=reference, new_tokens=32)
    assert more >= here
    assert longer >= here
    assert same == 1


def test_a_budget_holds_in_a_plan():
    lengths = np.arange(1, 400)
    prior = bw.MemoryModel.pretrained("generate")
    plan = bw.plan_batches(lengths, prior.budget(reference=(8, 400), fraction=0.9, new_tokens=64))
    assert prior.relative(plan.shapes, reference=(8, 400), new_tokens=64).max() <= 0.9
    assert len(plan) < len(lengths) / 8


def test_in_generation_short_inputs_still_take_their_output():
    prior = bw.MemoryModel.pretrained("generate")
    # Tokens alone would allow 64 times the items at an input of 8 instead of 512.
    items = prior.budget(reference=(10, 512), fraction=1.0, new_tokens=128).max_items(np.array([[8]]))
    assert 20 < int(items[0]) < 60


@pytest.mark.parametrize(
    "reference", [(8,), 8, (0, 5), [[8, 5]], (8.5, 5), (True, 5), ("8", "5"), np.array([8.0, 5.0])]
)
def test_a_reference_that_is_no_shape_is_refused(reference):
    with pytest.raises(ArgumentError, match="reference must be a shape"):
        bw.MemoryModel.pretrained("train").budget(reference=reference)


def test_generation_without_an_output_length_is_refused():
    with pytest.raises(ArgumentError, match="needs new_tokens="):
        bw.MemoryModel.pretrained("generate").budget(reference=(8, 512))


def test_an_unknown_task_is_refused():
    with pytest.raises(ArgumentError, match="task must be 'train' or 'generate', got 'eval'"):
        bw.MemoryModel.pretrained("eval")


@pytest.mark.parametrize("shapes", [[[8, 512.5]], [[8, float("inf")]], [[8, float("nan")]], [["8", "5"]], [[8, 0]]])
def test_shapes_that_are_not_whole_are_refused(shapes):
    with pytest.raises(ArgumentError, match="shapes must be"):
        PRIOR.relative(shapes, reference=(8, 512))


def test_shapes_may_be_whole_floats_or_one_row():
    expected = PRIOR.relative([[12, 20]], reference=(4, 100), new_tokens=30).tolist()
    for shapes in ([[12.0, 20.0]], [12, 20], np.array([[12, 20]], dtype=np.uint8)):
        assert PRIOR.relative(shapes, reference=np.array([4, 100]), new_tokens=30).tolist() == expected


def test_lengths_of_other_axes_than_the_reference_are_refused():
    with pytest.raises(ArgumentError, match=r"as many axes as the reference \(.*\), 1, got 2"):
        bw.MemoryModel.pretrained("train").relative([[8, 5, 5]], reference=(8, 5))
