"""The settings of a sampler: what is refused, how far sizes reach, and what setting them later does."""

import contextlib
import io

import numpy as np
import pytest

from batchwright.errors import ArgumentError
from batchwright.integrations.dynabatch import DynaBatchSampler, dynabatch_sampler

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3.2, 0.8, 400), 1, 200).astype(int)


def make(lengths=LENGTHS, batch_size=8, **options):
    return DynaBatchSampler(lengths, None, None, batch_size, **{"threshold": 0.9, **options})


FLAGS = [
    "shuffle",
    "drop_last",
    "dynamic_batch_mode",
    "smooth_batches",
    "keep_batch_size_even",
    "friendly_batch_size",
    "debug",
    "save_input_features",
]


@pytest.mark.parametrize("name", FLAGS)
def test_switches_must_be_true_or_false(name):
    with pytest.raises(ArgumentError, match=f"{name} must be True or False, got 'False'"):
        make(**{name: "False"})
    sampler = make()
    with pytest.raises(ArgumentError, match=f"{name} must be True or False, got 1"):
        setattr(sampler, name, 1)
    assert list(sampler) == list(make())


@pytest.mark.parametrize(("batch_size", "range_", "most"), [(1, 1.5, 2), (5, 1.5, 8), (3, 1.9, 6), (5, 0.1, 5)])
def test_the_largest_size_is_rounded_as_the_candidates_of_dynabatch_are(batch_size, range_, most):
    assert make(batch_size=batch_size, max_batch_range=range_).max_batch_size == most


@pytest.mark.parametrize(("batch_size", "range_"), [(1, 1.5), (5, 1.5), (3, 1.9)])
def test_a_broken_range_gives_no_more_batches_than_in_dynabatch(batch_size, range_):
    theirs = pytest.importorskip("dynabatch")
    lengths = [512] * batch_size + [2] * 200
    options = {"max_batch_range": range_, "smooth_batches": False, "keep_batch_size_even": False}
    given = {"token_lengths": lengths, "word_lengths": lengths, "char_lengths": lengths}
    texts = [""] * len(lengths)
    with contextlib.redirect_stderr(io.StringIO()):
        expected = theirs.dynabatch_sampler(texts, None, batch_size, num_workers=1, **options, **given)
    assert len(dynabatch_sampler(texts, None, batch_size, **options, **given).for_training()) <= len(expected)


@pytest.mark.parametrize(
    ("options", "num_batches"),
    [
        ({"max_batch_range": 1e300}, 3),
        ({"batch_size": 10**30}, 1),
        ({"batch_size": 10**400, "max_batch_range": 1e300, "smooth_batches_max_diff": 1e300}, 1),
        ({"smooth_batches_max_diff": 1e308}, 3),
    ],
    ids=["range", "size", "both", "growth"],
)
def test_huge_sizes_hold_all_examples(options, num_batches):
    lengths = [500, 499, 1, 1, 1, 1, 1]
    sampler = dynabatch_sampler([""] * 7, None, **{"batch_size": 2, **options}, token_lengths=lengths)
    assert sorted(index for batch in sampler for index in batch) == list(range(7))
    assert len(sampler) == num_batches


def test_features_of_too_many_candidates_are_refused():
    with pytest.raises(ArgumentError, match=r"keeps 20 candidates per unit of max_batch_range, got 1e\+09; choose at"):
        make(max_batch_range=1e9, save_input_features=True)


# Settings that are set later


CHANGES = {
    "min_batch_size": 5,
    "shuffle": True,
    "threshold": 0.5,
    "batch_end_range": 4.0,
    "shuffle_seed": 3,
    "shuffle_keep_first_n": 9,
    "keep_batch_size_even": True,
    "friendly_batch_size": True,
    "dynamic_batch_mode": False,
    "smooth_batches": False,
    "smooth_batches_max_diff": 0.9,
    "task": "train",
    "max_new_tokens": 7,
    "drop_last": True,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_setting_that_is_set_later_gives_the_batches_of_one_that_was_given(name, shuffle):
    sampler = make(shuffle=shuffle)
    setattr(sampler, name, CHANGES[name])
    argument = {"batch_end_range": "max_batch_range", "min_batch_size": "batch_size"}.get(name, name)
    other = make(**{"shuffle": shuffle, argument: CHANGES[name]})
    assert (repr(sampler), len(sampler)) == (repr(other), len(other))
    assert list(sampler.for_training()) == list(other.for_training())
    assert list(sampler) == list(other)
    assert sampler.state_dict() == other.state_dict()


def test_a_setting_that_is_refused_changes_nothing():
    sampler = make()
    with pytest.raises(ArgumentError, match="threshold must be a number of 0 or more, got -1"):
        sampler.threshold = -1
    assert (sampler.threshold, list(sampler)) == (0.9, list(make()))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_batch_size", "max_batch_size cannot be set; set batch_end_range"),
        ("batch_start_range", "batch_start_range cannot be set; batches never shrink below min_batch_size"),
    ],
)
def test_what_follows_from_other_settings_cannot_be_set(name, advice):
    with pytest.raises(ArgumentError, match=advice):
        setattr(make(), name, 3)


def test_features_are_those_of_the_settings_that_were_set_last():
    sampler = make()
    sampler.save_input_features = True
    assert len(sampler.input_features) == len(sampler) - 1
    sampler.threshold = 0.4
    assert len(sampler.input_features) == len(sampler) - 1 != len(make()) - 1


def test_batches_that_come_first_can_be_set():
    lengths = [100 - number for number in range(100)]
    sampler = make(lengths, 2, shuffle=True, shuffle_keep_first_n=0)
    sampler.shuffle_keep_first_n = 10
    for _ in range(2):
        first = [max(lengths[index] for index in batch) for batch in list(sampler)[:10]]
        assert first == sorted(first, reverse=True)


def test_the_first_shuffle_can_begin_again_but_not_end_early():
    sampler = make(shuffle=True)
    with pytest.raises(ArgumentError, match=r"can only be set to True, .* set shuffle_keep_first_n = 0"):
        sampler.is_first_shuffle = False
    list(sampler)
    assert not sampler.is_first_shuffle
    sampler.is_first_shuffle = False  # as it is
    sampler.is_first_shuffle = True
    assert sampler.is_first_shuffle
    list(sampler)
    assert not sampler.is_first_shuffle


def test_shuffle_can_be_turned_on_and_off():
    sampler = make()
    sampler.shuffle = True
    assert list(sampler) == list(make(shuffle=True))
    assert sampler.epoch == 1
    sampler.shuffle = False
    assert (sampler.epoch, list(sampler)) == (1, list(make()))


def test_setting_shuffle_leaves_a_running_epoch_alone_and_the_next_one_shows_it():
    sampler = make()
    seen = []
    for number, batch in enumerate(sampler):
        if number == 3:
            sampler.shuffle = True
        seen.append(batch)
    assert seen == list(make())
    other = make(shuffle=True)
    other.set_epoch(1)
    assert (sampler.epoch, list(sampler)) == (1, list(other))


def test_shuffle_must_be_true_or_false():
    with pytest.raises(ArgumentError, match="shuffle must be True or False, got 1"):
        make().shuffle = 1
