"""DynaBatchSampler: the documented behaviour, epochs, ranks and states."""

import json
from itertools import islice

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.integrations.dynabatch import DynaBatchSampler, _features
from batchwright.integrations.dynabatch._longest_first import relative_memory
from batchwright.testing import check_batch_sampler

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3.2, 0.8, 400), 1, 200).astype(int)


def make(lengths=LENGTHS, batch_size=8, **options):
    return DynaBatchSampler(lengths, None, None, batch_size, **{"threshold": 0.9, **options})


def sizes(sampler):
    return [len(batch) for batch in sampler.batches]


def test_the_first_batch_holds_exactly_the_longest():
    first = make().batches[0]
    assert sorted(LENGTHS[first]) == sorted(LENGTHS)[-8:]


def test_every_example_comes_once_and_lengths_fall_from_batch_to_batch():
    batches = list(make())
    assert sorted(index for batch in batches for index in batch) == list(range(400))
    longest = [LENGTHS[batch].max() for batch in batches]
    assert longest == sorted(longest, reverse=True)


def test_batches_grow_within_the_range_and_the_threshold():
    sampler = make(max_batch_range=3.0)
    longest = [int(LENGTHS[batch].max()) for batch in sampler.batches]
    predicted = relative_memory(sizes(sampler), longest, 8, longest[0], task="generate")
    assert max(sizes(sampler)) > 8
    assert max(sizes(sampler)) <= 24
    assert predicted[1:].max() <= 0.9


def test_numbers_of_numpy_are_kept_as_plain_ones():
    two = np.int64(2)
    numbers = {"threshold": np.float32(0.5), "shuffle_seed": two, "rank": two - 1, "world_size": two}
    sampler = make(batch_size=np.int64(8), **numbers)
    plain = make(batch_size=8, **{name: number.item() for name, number in numbers.items()})
    assert json.dumps(sampler.state_dict()) == json.dumps(plain.state_dict())
    assert json.dumps(sampler.for_rank(np.int64(0), np.int64(4)).state_dict())


def test_static_mode_gives_every_batch_the_batch_size():
    assert sizes(make(LENGTHS[:30], dynamic_batch_mode=False, keep_batch_size_even=True)) == [8, 8, 8, 6]


def test_even_and_friendly_sizes_but_for_the_first_and_the_last():
    assert all(size % 2 == 0 for size in sizes(make(batch_size=7, keep_batch_size_even=True))[1:-1])
    friendly = {2**n for n in range(9)} | {3 * 2**n for n in range(9)}
    assert set(sizes(make(batch_size=7, friendly_batch_size=True))[1:-1]) <= friendly


def test_the_attributes_of_dynabatch_are_there():
    sampler = make(max_batch_range=0.5, shuffle=True, friendly_batch_size=True)
    assert (sampler.batch_start_range, sampler.batch_end_range) == (1.0, 1.0)
    assert (sampler.min_batch_size, sampler.max_batch_size, sampler.threshold) == (8, 8, 0.9)
    assert (sampler.shuffle, sampler.shuffle_keep_first_n, sampler.is_first_shuffle) == (True, 5, True)
    assert (sampler.friendly_batch_size, sampler.keep_batch_size_even) == (True, False)
    assert (sampler.dynamic_batch_mode, sampler.smooth_batches, sampler.smooth_batches_max_diff) == (True, True, 0.2)
    assert (sampler.debug, sampler.save_input_features, sampler.input_features) == (False, False, [])
    assert isinstance(sampler, torch.utils.data.Sampler)


def test_a_loader_takes_it_as_batch_sampler():
    loader = DataLoader(torch.arange(400), batch_sampler=make(), num_workers=0)
    assert len(loader) == len(make())
    assert [batch.tolist() for batch in loader] == list(make())


def test_shuffling_mixes_the_examples_inside_a_batch():
    assert all(list(LENGTHS[batch]) == sorted(LENGTHS[batch], reverse=True) for batch in make().batches)
    shuffled = [list(LENGTHS[batch]) for batch in make(shuffle=True).batches if len(set(LENGTHS[batch])) > 2]
    assert sum(lengths == sorted(lengths, reverse=True) for lengths in shuffled) < len(shuffled) / 4


def test_debug_prints_a_line_a_batch(capsys):
    sampler = make([9, 8, 7, 1, 1], batch_size=2, debug=True, task="train")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(sampler)
    # 2 items of length 7, compared with 2 of length 9.
    assert lines[1] == "batch 2: 2 items, longest 7, predicted 0.78 of the first batch"


def test_debug_in_static_mode_says_sizes_alone(capsys):
    make([9, 8, 7], batch_size=2, debug=True, dynamic_batch_mode=False)
    assert capsys.readouterr().out.splitlines() == ["batch 1: 2 items, longest 9", "batch 2: 1 items, longest 7"]


def make_features(words=(5, 4, 3, 2), chars=(50, 40, 30, 20)):
    options = {"save_input_features": True, "task": "train"}
    (features,) = DynaBatchSampler([10, 8, 6, 4], words, chars, 2, **options).input_features  # the first has none
    return features


def test_saved_features_describe_every_candidate_of_every_later_batch():
    features = make_features()
    assert isinstance(features, pd.DataFrame)
    assert features["batch_size_y"].tolist() == [2, 3, 4]
    # Two items are left, so all candidates hold the same examples: 6 and 4 tokens, compared with 10 and 8.
    assert features["token_sum_y"].tolist() == [10, 10, 10]
    assert features["token_max_diff"].tolist() == [0.6, 0.6, 0.6]
    assert features["word_mean_x"].tolist() == [4.5, 4.5, 4.5]
    assert features["char_sum_diff"].tolist() == [50 / 90] * 3
    assert features.attrs["prediction"] == pytest.approx([0.6, 0.9, 1.2], rel=0.05)


def test_saved_features_are_the_frames_that_dynabatch_makes():
    theirs = pytest.importorskip("dynabatch.sampler")
    lengths = ([10, 8, 6, 4], [5, 4, 3, 2], [50, 40, 30, 20])
    (expected,) = theirs.DynaBatchSampler(*lengths, 2, save_input_features=True).input_features
    found = make_features()
    assert list(found.columns) == list(expected.columns)
    pd.testing.assert_frame_equal(found, expected)


def test_saved_features_are_lists_without_pandas(monkeypatch):
    monkeypatch.setattr(_features, "is_installed", lambda name: False)
    features = make_features(words=None, chars=None)
    assert features["batch_size_y"] == [2, 3, 4]
    assert list(features)[-1] == "prediction"
    assert not any(name.startswith(("word", "char")) for name in features)


def test_saved_features_of_training_are_those_of_its_plan():
    sampler = make(save_input_features=True, max_batch_range=8.0)
    assert len(sampler.for_training().input_features) == len(sampler.for_training()) - 1
    assert len(sampler.input_features) == len(sampler) - 1


def test_a_sampler_says_what_it_plans():
    # 8, 9, 10, … items, and the rest.
    sampler = make()
    found = sizes(sampler)
    assert repr(sampler) == (
        f"<DynaBatchSampler: {len(found)} batches of 400 examples, sizes {min(found)} to {max(found)}, task=None, "
        "threshold=0.9, max_batch_range=2.0>"
    )
    assert "task='train'" in repr(sampler.for_training())
    assert repr(sampler.for_rank(1, 2)).endswith("rank=1, world_size=2>")


# States.


@pytest.mark.parametrize("state", [None, [], 3, "state"], ids=["none", "list", "number", "text"])
def test_a_state_of_another_type_is_refused(state):
    with pytest.raises(StateMismatchError, match="load_state_dict of DynaBatchSampler needs the dict"):
        make().load_state_dict(state)


def test_the_middle_of_an_epoch_planned_in_other_sizes_is_refused():
    sampler = make(shuffle=True)
    next(iter(sampler))
    old = {name: value for name, value in sampler.state_dict().items() if name != "sizing"}
    other = make(shuffle=True)
    with pytest.raises(StateMismatchError, match="whose batches have other sizes \\(sizing 1, here 2\\); finish that"):
        other.load_state_dict(old)
    assert list(other) == list(make(shuffle=True))


def test_a_state_that_an_earlier_version_saved_is_refused_with_the_reason():
    lengths = [1 + (37 * i + 11 * i * i) % 60 for i in range(60)]
    rule = "SizeRule(batch_size=4, max_batch_size=8, threshold=0.7, max_diff=0.2, task='generate', new_tokens=None)"
    settings = {
        "grouping": f"LongestFirst(rule={rule}, batch_size=4, keep_first=5, drop_last=False)", "shuffle": False,
        "size_multiple_of": 1, "size_ladder": None, "pad_multiple_of": 1, "keep_first": 0, "oversize": "error",
        "drop_last": False, "remainder": "spread", "balance_over": 64, "cost": None,
    }  # fmt: skip
    state = {
        "version": 1, "num_examples": 60, "lengths": "994971f59d7b13931dcd935e0f276149", "budget": "MaxItems(8)",
        "settings": settings, "seed": 21, "epoch": 1, "position": 8, "balance_over": 1,
    }  # fmt: skip
    sampler = DynaBatchSampler(lengths, None, None, 4)
    with pytest.raises(StateMismatchError, match="in the middle of an epoch whose batches have other sizes"):
        sampler.load_state_dict(state)
    # At the start of an epoch nothing has been planned yet.
    sampler.load_state_dict({**state, "position": 0})
    assert sampler.epoch == 1


def test_the_start_of_an_epoch_planned_in_other_sizes_is_taken():
    sampler = make(shuffle=True)
    sampler.set_epoch(4)
    old = {name: value for name, value in sampler.state_dict().items() if name != "sizing"}
    other = make(shuffle=True)
    other.load_state_dict(old)
    assert (other.epoch, list(other)) == (4, list(sampler))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_keeps_the_contract_of_batch_samplers(shuffle, dynamic):
    check_batch_sampler(
        lambda rank, world_size: make(shuffle=shuffle, dynamic_batch_mode=dynamic, rank=rank, world_size=world_size),
        num_examples=400,
        lengths=LENGTHS,
        budget=bw.MaxItems(16),
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_ranks_take_equally_many_steps_and_lose_nothing(lengths, batch_size, world_size, shuffle):
    ranks = [make(lengths, batch_size, shuffle=shuffle, rank=r, world_size=world_size) for r in range(world_size)]
    taken = [list(rank) for rank in ranks]
    assert len({len(batches) for batches in taken}) == 1
    given_out = [index for batches in taken for batch in batches for index in batch]
    assert set(given_out) == set(range(len(lengths)))
    assert len(given_out) - len(lengths) < world_size


def test_a_state_survives_json_and_continues_on_other_ranks():
    # The order follows the ranks an epoch was begun on; a state brings it along.
    old = [make(shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(sampler) for sampler in old]
    before = [index for iterator in iterators for batch in islice(iterator, 7) for index in batch]
    state = json.loads(json.dumps(old[0].state_dict()))
    single = make(shuffle=True)
    single.load_state_dict(state)
    after = [index for batch in single for index in batch]
    assert sorted(before + after) == list(range(400))


def test_a_state_of_other_settings_is_refused_and_changes_nothing():
    state = make(shuffle=True).state_dict()
    sampler = make(shuffle=True, threshold=0.8)
    before = sampler.batches
    with pytest.raises(StateMismatchError, match="grouping"):
        sampler.load_state_dict(state)
    assert sampler.batches == before


def test_another_rank_of_the_same_data_begins_the_same_epoch():
    sampler = make(shuffle=True)
    sampler.set_epoch(3)
    next(iter(sampler))
    second = sampler.for_rank(1, 2)
    assert (second.rank, second.world_size, second.epoch) == (1, 2, 3)
    assert len(second) == (len(sampler) + 1) // 2


def test_for_training_plans_the_same_data_as_training():
    sampler = make(shuffle=True, max_batch_range=8.0)
    sampler.set_epoch(3)
    training = sampler.for_training()
    assert (sampler.task, training.task, training.epoch) == (None, "train", 3)
    chosen = make(shuffle=True, max_batch_range=8.0, task="train")
    chosen.set_epoch(3)
    assert list(training) == list(chosen)


@pytest.mark.parametrize("task", ["train", "generate"])
def test_for_training_keeps_a_task_that_was_chosen(task):
    sampler = make(task=task, rank=1, world_size=2)
    training = sampler.for_training()
    assert (training.task, training.rank, training.world_size) == (task, 1, 2)
    assert list(training) == list(sampler)


def test_no_task_plans_for_generation():
    assert list(make()) == list(make(task="generate"))


def test_tracking_counts_what_the_loop_received():
    sampler = make(shuffle=True)
    loader = DataLoader(torch.arange(400), batch_sampler=sampler, num_workers=1, prefetch_factor=4)
    seen = [batch.tolist() for batch in islice(sampler.track(loader), 5)]
    other = make(shuffle=True)
    other.load_state_dict(sampler.state_dict())
    assert seen + list(other) == list(make(shuffle=True))


def test_drop_last_leaves_out_the_short_batch_and_what_fills_no_step():
    lengths = list(range(100, 79, -1))  # 21 examples, 2 a batch: the eleventh batch has one, ten fill five steps
    options = {"dynamic_batch_mode": False, "batch_size": 2, "drop_last": True}
    assert len(make(lengths, world_size=2, **options)) == 5
    assert all(len(batch) == 2 for batch in make(lengths, shuffle=True, **options))


@pytest.mark.parametrize("options", [{"rank": 2, "world_size": 2}, {"task": "translate"}, {"max_new_tokens": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ArgumentError):
        make(**options)


def test_more_new_tokens_leave_less_room_for_growth():
    few, some, many = (make(max_batch_range=8.0, max_new_tokens=tokens) for tokens in (1, 50, 1000))
    assert max(sizes(many)) < max(sizes(some)) < max(sizes(few))


def test_without_new_tokens_short_inputs_have_short_outputs():
    # A fixed output of half the longest input leaves less room than half of each batch's own.
    fixed = make(max_batch_range=8.0, max_new_tokens=LENGTHS.max() // 2)
    assert max(sizes(fixed)) < max(sizes(make(max_batch_range=8.0)))


def test_the_report_measures_padding():
    assert 0 < make().report().padding < 0.2
