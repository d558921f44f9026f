"""Lengths and batches that a user gives instead of having them measured or planned."""

import json

import numpy as np
import pytest
import torch

from batchwright.errors import ArgumentError, LengthsError, StateMismatchError
from batchwright.integrations.dynabatch import DynaBatchSampler, dynabatch_sampler

# Lengths


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        (["1", "2", "3"], "token_lengths must be whole numbers, got <U1; count tokens"),
        ({0: 1, 1: 2, 2: 3}, "in the order of the examples, got dict"),
        ({90, 10, 50}, "in the order of the examples, got set"),
        ({1: 90, 2: 10}.keys(), "in the order of the examples, got dict_keys"),
        ([[1], [2, 3], [4]], r"token_lengths must form an array of shape \(N,\) or \(N, axes\)"),
        (3, "token_lengths must have one number per example, got int"),
        ("123", "in the order of the examples, got str"),
        (np.array([1, 2, 3], dtype="m8[s]"), r"token_lengths must be whole numbers, got timedelta64\[s\]"),
        (np.ma.array([9, 500, 7], mask=[0, 1, 0]), "token_lengths is masked in 1 of 3 examples, first in example 1"),
        ([2**40, 1, 1], "token_lengths must be at most 2147483647, got 1099511627776"),
        ([10**30, 1, 1], "token_lengths must be at most 2147483647"),
        ([True, False, True], "token_lengths must be whole numbers, got bool"),
    ],
    ids=["texts", "dict", "set", "keys", "ragged", "number", "text", "seconds", "masked", "large", "huge", "flags"],
)
def test_wrong_lengths_are_refused_in_a_sentence(lengths, reason):
    with pytest.raises(LengthsError, match=reason):
        DynaBatchSampler(lengths, None, None, 2)
    with pytest.raises(LengthsError, match=reason):
        dynabatch_sampler([""] * 3, None, 2, token_lengths=lengths)


@pytest.mark.parametrize(
    "lengths",
    [
        torch.tensor([9.0, 5.0, 7.0], dtype=torch.bfloat16),
        torch.tensor([9, 5, 7]),
        np.ma.array([9, 5, 7], mask=False),
        np.array([9, 5, 7], dtype=object),
        iter([9, 5, 7]),
    ],
    ids=["bfloat16", "tensor", "nothing masked", "objects", "iterator"],
)
def test_lengths_of_other_kinds_are_taken(lengths):
    assert list(DynaBatchSampler(lengths, None, None, 2)) == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (np.array([1, 2, 3], dtype="m8[s]"), r"word_lengths must be whole numbers, got timedelta64\[s\]"),
        ([2**40, 1, 1], "word_lengths must be at most 2147483647"),
        ([[1], [2], [3]], r"word_lengths must be a whole number of 0 or more per example, got shape \(3, 1\)"),
        ([1, -1, 1], "word_lengths must be a whole number of 0 or more per example, got -1"),
        ({1, 2, 3}, "in the order of the examples, got set"),
    ],
    ids=["seconds", "too many", "axes", "negative", "set"],
)
def test_word_lengths_are_checked_as_token_lengths_are(words, reason):
    with pytest.raises(LengthsError, match=reason):
        DynaBatchSampler([3, 2, 1], words, None, 1, save_input_features=True)


# Batches


GIVEN = [[3, 1], [0, 4, 2], [5]]


def make_given(batches=GIVEN, **options):
    sampler = DynaBatchSampler([9, 8, 7, 6, 5, 4], None, None, 2, **options)
    sampler.batches = batches
    return sampler


@pytest.mark.parametrize("batches", [GIVEN, [np.array(batch) for batch in GIVEN], tuple(map(tuple, GIVEN))])
def test_batches_can_be_set(batches):
    sampler = make_given(batches)
    assert (list(sampler), len(sampler), sampler.batches) == (GIVEN, 3, GIVEN)
    assert sampler.epoch == 1


def test_batches_that_were_set_are_shuffled_whole_and_inside():
    lengths = np.arange(200, 0, -1)
    sampler = DynaBatchSampler(lengths, None, None, 8, shuffle=True, shuffle_keep_first_n=2)
    batches = [list(range(start, start + 5)) for start in range(0, 200, 5)]
    sampler.batches = batches
    first, second = list(sampler), list(sampler)
    assert first != second
    assert sorted(map(sorted, first)) == sorted(map(sorted, second)) == batches
    assert list(map(sorted, first[:2])) == list(map(sorted, second[:2])) == batches[:2]
    assert any(batch != sorted(batch) for batch in first)


def test_batches_that_were_set_are_divided_over_ranks():
    sampler = make_given([[3, 1], [0, 4], [2, 5]])
    # Three batches are no whole number of steps of two, so the last one is split.
    assert [list(sampler.for_rank(rank, 2)) for rank in range(2)] == [[[3, 1], [2]], [[0, 4], [5]]]


def test_training_keeps_batches_that_were_set():
    assert list(make_given().for_training()) == GIVEN


def test_a_state_of_batches_that_were_set_continues_in_them_alone():
    sampler = make_given()
    next(iter(sampler))
    state = json.loads(json.dumps(sampler.state_dict()))
    other = make_given()
    other.load_state_dict(state)
    assert list(other) == GIVEN[1:]
    for stranger in (make_given([[0, 1], [2, 3, 4], [5]]), DynaBatchSampler([9, 8, 7, 6, 5, 4], None, None, 2)):
        with pytest.raises(StateMismatchError):
            stranger.load_state_dict(state)


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (None, "must be a list of lists of indices, got NoneType"),
        ("abc", "must be a list of lists of indices, got str"),
        ([[0, 1, 2], [], [3, 4, 5]], r"each batch must be a list of one index or more, got \[\] as number 1"),
        ([0, 1, 2], "each batch must be a list of one index or more, got 0 as number 0"),
        ([[0.5]], "each batch must be a list of one index"),
        ([[0, 1, 2, 3, 4, 6]], "indices from 0 to 5, got 6; the sampler was made for 6 examples"),
        ([[0, 1, 2, 3, 4, -1]], "indices from 0 to 5, got -1"),
        ([[0, 1, 2], [2, 3, 4, 5]], "hold an example at most once: 1 come more than once, such as 2"),
        ([], "must hold one batch or more, got none"),
        ({0: [1]}, "must be a list of lists of indices, got dict"),
    ],
    ids=["none", "text", "empty", "flat", "fraction", "beyond", "negative", "twice", "nothing", "dict"],
)
def test_wrong_batches_are_refused_and_change_nothing(batches, reason):
    sampler = make_given()
    with pytest.raises(ArgumentError, match=reason):
        sampler.batches = batches
    assert list(sampler) == GIVEN


def test_the_list_of_batches_is_a_new_one():
    sampler = make_given()
    sampler.batches.pop()
    assert len(sampler) == 3


def test_examples_that_are_in_no_given_batch_are_left_out_and_counted_as_dropped():
    sampler = DynaBatchSampler([9, 8, 7, 6, 5, 4], None, None, 2, dynamic_batch_mode=False)
    sampler.batches = sampler.batches[:2]
    assert (len(sampler), list(sampler), list(sampler.for_training())) == (2, [[0, 1], [2, 3]], [[0, 1], [2, 3]])
    assert (sampler.report().dropped, sampler.num_examples) == (2, 6)
    assert [list(sampler.for_rank(rank, 2)) for rank in range(2)] == [[[0, 1]], [[2, 3]]]


def test_batches_that_were_set_stay_whatever_is_set_afterwards():
    sampler = make_given()
    sampler.threshold = 0.1
    assert list(sampler) == GIVEN
    assert repr(sampler) == "<DynaBatchSampler: 3 batches of 6 examples, sizes 1 to 3, batches as they were set>"
