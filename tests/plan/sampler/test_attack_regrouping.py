"""States of regroup that were changed by hand."""

import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import StateMismatchError

torch_data = pytest.importorskip("torch.utils.data")

LENGTHS = np.random.default_rng(0).integers(1, 50, 300)


def _regrouped():
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(200))
    loader = torch_data.DataLoader(list(range(300)), batch_sampler=sampler, collate_fn=list)
    return bw.regroup(loader, 7)


def _first_batch_from(state):
    regrouped = _regrouped()
    regrouped.load_state_dict(state)
    return next(iter(regrouped))


def _state():
    regrouped = _regrouped()
    batches = iter(regrouped)
    for _ in range(3):
        next(batches)
    return regrouped.state_dict()


@pytest.mark.parametrize("value", [3, False, [1], {"a": 1}])
def test_a_generator_that_is_no_text_is_refused(value):
    # Expected: StateMismatchError. Found: AttributeError 'NoneType' object has no attribute 'generator'.
    with pytest.raises(StateMismatchError):
        _regrouped().load_state_dict({**_state(), "generator": value})


@pytest.mark.parametrize("value", [2**63, 10**30])
def test_a_place_beyond_64_bits_is_refused(value):
    # Expected: StateMismatchError, here or when iterating. Found: OverflowError int too big to convert.
    with pytest.raises(StateMismatchError):
        _first_batch_from({**_state(), "consumed": value})


def test_two_epochs_in_one_state_are_refused():
    # Expected: StateMismatchError, as the sampler refuses a position that was changed. Found: regroup says epoch 5 and
    # hands out the order of epoch 0.
    with pytest.raises(StateMismatchError):
        _first_batch_from({**_state(), "epoch": 5})
