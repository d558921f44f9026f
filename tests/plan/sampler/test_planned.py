"""BatchSampler: epochs, lengths, states and ranks, without any loader."""

import json
import pickle
from itertools import chain, islice

import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import ArgumentError, BudgetError, LengthsError, StateMismatchError

LENGTHS = np.random.default_rng(0).integers(1, 60, size=300)
BUDGET = bw.MaxTokens(240)


def make(**options):
    return bw.BatchSampler(LENGTHS, BUDGET, **options)


def epoch_of(number, **options):
    """The batches of an epoch, planned without a sampler."""
    return list(bw.plan_batches(LENGTHS, BUDGET, epoch=number, **options))


def state_after(num, **options):
    """The state after `num` batches of the first epoch."""
    sampler = make(**options)
    iterator = iter(sampler)
    for _ in range(num):
        next(iterator)
    return sampler.state_dict()


def resumed(state, **options):
    sampler = make(**options)
    sampler.load_state_dict(state)
    return sampler


def examples(batches):
    return [index for batch in batches for index in batch]


# Epochs and lengths.


def test_every_epoch_is_the_plan_of_its_number():
    sampler = make(seed=7)
    for number in range(3):
        assert sampler.epoch == number
        assert list(sampler) == epoch_of(number, seed=7)


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2), (2, 3)])
def test_len_is_exact_in_every_epoch(rank, world_size):
    sampler = make(rank=rank, world_size=world_size, grouping=bw.WindowSort(2))
    announced = []
    for _ in range(12):
        announced.append(len(sampler))
        assert sum(1 for _ in iter(sampler)) == announced[-1]
    if world_size == 1:
        assert len(set(announced)) > 1  # epochs do differ in length, or the test would show nothing


def test_len_after_resuming_is_what_is_left():
    full = len(make())
    for num in (0, 1, full // 2, full - 1, full):
        sampler = resumed(state_after(num))
        assert len(sampler) == full - num == sum(1 for _ in iter(sampler))
        assert len(sampler) == len(epoch_of(1))


def test_iter_fixes_its_epoch_before_the_first_batch():
    sampler = make()
    iterator = iter(sampler)
    sampler.set_epoch(5)
    assert list(iterator) == epoch_of(0)
    assert sampler.epoch == 5


def test_only_exhausting_moves_to_the_next_epoch():
    sampler = make()
    iterator = iter(sampler)
    assert len(list(islice(iterator, len(sampler)))) == len(epoch_of(0))
    assert sampler.epoch == 0
    assert next(iterator, None) is None
    assert sampler.epoch == 1


def test_leaving_a_loop_and_iterating_again_restarts_the_epoch():
    sampler = make()
    for _, _ in zip(range(3), sampler, strict=False):
        pass
    assert list(sampler) == epoch_of(0)


def test_leaving_a_resumed_loop_and_iterating_again_restarts_at_the_resumed_place():
    sampler = resumed(state_after(4))
    next(iter(sampler))
    assert list(sampler) == epoch_of(0)[4:]


def test_set_epoch_goes_forwards_and_backwards():
    sampler = make()
    for number in (3, 0, 3):
        sampler.set_epoch(number)
        assert list(sampler) == epoch_of(number)


def test_set_epoch_of_the_resumed_epoch_keeps_the_place():
    sampler = resumed(state_after(4))
    sampler.set_epoch(0)
    assert list(sampler) == epoch_of(0)[4:]


def test_set_epoch_of_another_epoch_forgets_the_place():
    sampler = resumed(state_after(4))
    sampler.set_epoch(2)
    assert list(sampler) == epoch_of(2)
    sampler.set_epoch(0)
    assert list(sampler) == epoch_of(0)


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None])
def test_an_epoch_that_is_no_whole_number_is_refused(epoch):
    with pytest.raises(ArgumentError, match="epoch must be a whole number of 0 or more"):
        make().set_epoch(epoch)


def test_two_iterators_at_once_do_not_disturb_each_other():
    sampler = make()
    pairs = list(zip(sampler, sampler, strict=True))
    assert [first for first, _ in pairs] == [second for _, second in pairs] == epoch_of(0)


def test_the_state_counts_the_newest_iterator():
    sampler = make()
    older, newer = iter(sampler), iter(sampler)
    next(newer)
    list(islice(older, 5))
    assert sampler.state_dict() == state_after(1)
    next(newer)
    assert sampler.state_dict() == state_after(2)


def test_an_epoch_that_is_over_is_over_though_a_newer_iterator_was_left_open():
    sampler = make()
    loop = iter(sampler)
    next(loop)
    next(iter(sampler))  # a look at the first batch
    list(loop)
    assert sampler.epoch == sampler.state_dict()["epoch"] == 1
    assert sampler.state_dict()["position"] == 0


def test_going_back_to_a_state_is_not_undone_by_the_loop_it_was_called_in():
    sampler = make()
    for step, _ in enumerate(sampler):
        if step == 8:
            sampler.load_state_dict(state_after(4))
    assert list(sampler) == epoch_of(0)[4:]


# States.


def test_a_state_is_json_and_of_the_same_size_for_any_number_of_examples():
    large = bw.BatchSampler(np.resize(LENGTHS, 30_000), BUDGET)
    next(iter(large))
    texts = [json.dumps(state) for state in (state_after(3), large.state_dict())]
    assert all(json.loads(text) for text in texts)
    assert abs(len(texts[0]) - len(texts[1])) < 5  # digits of the two counts
    assert len(texts[0]) < 700


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_a_state_is_the_same_on_every_rank_and_names_none(world_size):
    states = [state_after(2, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert all(state == states[0] for state in states)
    assert set(states[0]) == {
        "version", "num_examples", "lengths", "budget", "settings", "seed", "epoch", "position",
    }  # fmt: skip
    assert not {"rank", "world_size"} & set(states[0]["settings"])


@pytest.mark.parametrize("num", [0, 1, 7])
def test_the_position_is_the_number_of_examples_consumed_on_all_ranks(num):
    alone = len(examples(epoch_of(0, balance_over=2)[: 2 * num]))
    assert state_after(num, world_size=2)["position"] == state_after(2 * num, balance_over=2)["position"] == alone


@pytest.mark.parametrize("grouping", [bw.InOrder(), bw.Sorted(), bw.WindowSort(3), bw.Buckets(4), bw.Packed(120)])
def test_resuming_after_any_batch_gives_the_rest_and_then_the_next_epoch(grouping):
    full, following = epoch_of(0, grouping=grouping), epoch_of(1, grouping=grouping)
    for num in range(len(full) + 1):
        sampler = resumed(state_after(num, grouping=grouping), grouping=grouping)
        assert list(sampler) == full[num:]
        assert sampler.epoch == 1
    assert list(sampler) == following


def test_a_state_that_was_loaded_is_the_state_at_once():
    sampler = make()
    next(iter(sampler))
    sampler.load_state_dict(state_after(4))
    assert sampler.state_dict() == state_after(4)


def test_a_resumed_epoch_can_be_saved_and_resumed_again():
    sampler = resumed(state_after(4))
    iterator = iter(sampler)
    list(islice(iterator, 3))
    assert sampler.state_dict() == state_after(7)
    assert list(resumed(sampler.state_dict())) == epoch_of(0)[7:]


def test_a_state_of_a_later_epoch_is_resumed_in_that_epoch():
    sampler = make()
    sampler.set_epoch(3)
    iterator = iter(sampler)
    list(islice(iterator, 5))
    other = resumed(sampler.state_dict())
    assert (other.epoch, list(other), other.epoch) == (3, epoch_of(3)[5:], 4)


def test_an_exhausted_epoch_is_saved_as_the_start_of_the_next():
    sampler = make()
    list(sampler)
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    assert list(resumed(state)) == epoch_of(1)


def test_loading_a_state_leaves_the_dict_of_the_caller_alone():
    state = state_after(3)
    text = json.dumps(state)
    list(resumed(state))
    assert json.dumps(state) == text


OTHER = {
    "lengths": (LENGTHS[::-1].copy(), BUDGET, {}, "", ""),
    "num_examples": (LENGTHS[:-1], BUDGET, {}, "300", "299"),
    "budget": (LENGTHS, bw.MaxTokens(241), {}, r"'MaxTokens\(240\)'", r"'MaxTokens\(241\)'"),
    "seed": (LENGTHS, BUDGET, {"seed": 1}, "0", "1"),
    "grouping": (LENGTHS, BUDGET, {"grouping": bw.Sorted()}, "'WindowSort.*'", r"'Sorted\(\)'"),
    "pad_multiple_of": (LENGTHS, BUDGET, {"pad_multiple_of": 4}, "1", "4"),
    "size_ladder": (LENGTHS, BUDGET, {"size_ladder": "pow2"}, "None", "'pow2'"),
    "keep_first": (LENGTHS, BUDGET, {"keep_first": 2}, "0", "2"),
    "shuffle": (LENGTHS, BUDGET, {"shuffle": False}, "True", "False"),
    "oversize": (LENGTHS, BUDGET, {"oversize": "drop"}, "'error'", "'drop'"),
}


@pytest.mark.parametrize("field", OTHER)
def test_a_state_of_something_else_is_refused_naming_the_field_and_both_values(field):
    lengths, budget, options, saved, mine = OTHER[field]
    sampler = bw.BatchSampler(lengths, budget, **options)
    with pytest.raises(StateMismatchError, match=f"saved with {field} = {saved}.*, here it is {mine}"):
        sampler.load_state_dict(state_after(3))


def test_a_state_of_another_version_is_refused_naming_both():
    state = {**state_after(3), "version": 99}
    with pytest.raises(StateMismatchError, match="saved with version = 99, here it is 2"):
        make().load_state_dict(state)


@pytest.mark.parametrize("change", [{"seed": 9}, {"version": None}, {"position": 1}, {"epoch": "2"}, {"lengths": ""}])
def test_a_refused_state_leaves_the_sampler_as_it_was(change):
    sampler = resumed(state_after(2))
    iterator = iter(sampler)
    next(iterator)
    with pytest.raises(StateMismatchError):
        sampler.load_state_dict({**state_after(8), **change})
    assert sampler.state_dict() == state_after(3)
    assert list(iterator) == epoch_of(0)[3:]
    assert sampler.epoch == 1


@pytest.mark.parametrize("position", [1, -1, 301, 10**9, 2.0, "4", None, True])
def test_a_position_changed_by_hand_is_refused(position):
    assert epoch_of(0)[0][1:], "the first batch has several examples, so no batch begins at 1"
    with pytest.raises(StateMismatchError, match="position"):
        make().load_state_dict({**state_after(3), "position": position})


@pytest.mark.parametrize("epoch", [-1, 1.0, True, None])
def test_an_epoch_changed_by_hand_is_refused(epoch):
    with pytest.raises(StateMismatchError, match="the state needs epoch as a whole number"):
        make().load_state_dict({**state_after(0), "epoch": epoch})


# Ranks.


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("num", [0, 5, "all"])
def test_two_ranks_resume_on_three_and_on_one_with_nothing_lost_or_repeated(new, num):
    num = len(make(world_size=2)) if num == "all" else num
    before = [list(islice(make(rank=rank, world_size=2), num)) for rank in range(2)]
    state = state_after(num, world_size=2)
    after = [list(resumed(state, rank=rank, world_size=new)) for rank in range(new)]
    assert len({len(batches) for batches in after}) == 1
    assert sorted(examples(chain(*before, *after))) == list(range(300))


def test_ranks_take_the_batches_of_the_plan_in_turn():
    whole = epoch_of(0, world_size=3)
    for rank in range(3):
        assert list(make(rank=rank, world_size=3)) == whole[rank::3]


def test_a_repeated_example_keeps_the_shape_of_its_own_bucket():
    # Two batches are left for eight ranks: those of lengths 1 and 2, each given to four.
    lengths = np.array([1] * 17 + [2])
    plan = bw.plan_batches(lengths, bw.MaxItems(1), grouping=bw.Buckets(2), shuffle=False, world_size=8)
    assert [lengths[batch].tolist() for batch in plan][16:] == [[1], [2]] * 4
    assert plan.shapes[16:].tolist() == [[1, 1], [1, 2]] * 4


def test_dropping_the_remainder_keeps_whole_batches_only():
    whole = epoch_of(0, balance_over=5)
    sampler = make(rank=1, world_size=5, remainder="drop")
    assert len(whole) % 5, "or nothing is dropped"
    assert (len(sampler.plan), sampler.plan.num_repeated) == (len(whole) // 5 * 5, 0)
    assert sampler.plan.num_dropped == len(examples(whole[len(whole) // 5 * 5 :]))
    assert list(sampler) == whole[1 : len(whole) // 5 * 5 : 5]


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (0.0, 1)])
def test_ranks_outside_the_world_are_refused(rank, world_size):
    with pytest.raises(ArgumentError, match=r"rank|world_size"):
        make(rank=rank, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("grouping", [bw.WindowSort(), bw.Sorted(), bw.Buckets(6), bw.InOrder()])
def test_the_most_demanding_batches_come_first_in_every_epoch(grouping, world_size):
    sampler = make(grouping=grouping, keep_first=4, world_size=world_size)
    for number in range(4):
        sampler.set_epoch(number)
        num_items, padded = sampler.plan.shapes.T.astype(float)
        demand = num_items * padded * (1 + padded / 1024)  # share of the budget, more for long examples
        assert (demand[:4] == sorted(demand, reverse=True)[:4]).all()


# The order of an epoch: by the number of ranks it began on, or by a number given.


def order_of(sampler):
    return examples(sampler.plan)


@pytest.mark.parametrize("new", [1, 3, 8])
def test_an_epoch_that_began_on_two_ranks_keeps_its_order_on_others_and_the_next_follows_theirs(new):
    state = state_after(5, world_size=2)
    assert state["settings"]["balance_over"] == 2
    sampler = resumed(state, world_size=new)
    began = bw.plan_batches(LENGTHS, BUDGET, balance_over=2)
    assert order_of(sampler)[: 300 - state["position"]] == began.indices[state["position"] :].tolist()
    assert sampler.report().balance_over == 2
    assert sampler.state_dict() == state
    list(sampler)
    assert order_of(sampler) == examples(epoch_of(1, world_size=new))
    assert sampler.state_dict()["settings"]["balance_over"] == sampler.report().balance_over == new


def test_the_order_taken_over_is_that_of_the_epoch_and_of_no_other():
    state = state_after(5, world_size=2)
    sampler = resumed(state, world_size=3)
    sampler.set_epoch(0)
    assert sampler.state_dict() == state
    sampler.set_epoch(1)
    sampler.set_epoch(0)
    assert order_of(sampler) == examples(epoch_of(0, world_size=3))


def test_a_refused_state_takes_nothing_over():
    sampler = make(world_size=3)
    with pytest.raises(StateMismatchError, match="is not where a batch begins"):
        sampler.load_state_dict({**state_after(5, world_size=2), "position": 1})
    assert sampler.report().balance_over == 3
    assert order_of(sampler) == examples(epoch_of(0, world_size=3))


def test_a_number_that_was_given_is_kept_and_compared_with_the_one_of_the_state():
    assert list(resumed(state_after(4, balance_over=8), balance_over=8)) == epoch_of(0, balance_over=8)[4:]
    assert len(resumed(state_after(1, world_size=8), balance_over=8)) == len(epoch_of(0)) - 8
    with pytest.raises(StateMismatchError, match="saved with balance_over = 8, here it is 64"):
        resumed(state_after(4, balance_over=8), balance_over=64)
    with pytest.raises(StateMismatchError, match="saved with balance_over = 1, here it is 64"):
        resumed(state_after(4), balance_over=64)


@pytest.mark.parametrize("number", [0, -1, None, 2.0, "8", True])
def test_a_number_changed_by_hand_is_refused(number):
    state = state_after(4)
    with pytest.raises(StateMismatchError, match="balance_over"):
        make().load_state_dict({**state, "settings": {**state["settings"], "balance_over": number}})


def earlier(state, number=64):
    """A state as the version before wrote it, whose plans had runs of 64, shortened where batches are few."""
    return {**state, "version": 1, "settings": {**state["settings"], "balance_over": number}}


def test_an_epoch_that_began_under_the_earlier_rules_ends_under_them():
    # The 48 or so batches of the epoch make runs of 8.
    base = bw.plan_batches(LENGTHS, BUDGET, balance_over=8)
    state = earlier({**state_after(0), "position": int(base.offsets[10])})
    for options in ({"world_size": 1}, {"world_size": 3}, {"balance_over": 64}):
        sampler = resumed(state, **options)
        assert order_of(sampler)[: 300 - state["position"]] == base.indices[state["position"] :].tolist()
        assert sampler.state_dict() == state
        iterator = iter(sampler)
        next(iterator)
        again = resumed(sampler.state_dict(), **options)
        assert examples(iterator) == examples(again)
        assert sampler.state_dict()["version"] == 2
    with pytest.raises(StateMismatchError, match="saved with balance_over = 64, here it is 8"):
        resumed(state, balance_over=8)


# Pickling, and what is checked when a sampler is made.


def test_a_pickled_sampler_goes_on_from_the_resumed_place():
    sampler = resumed(state_after(6))
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy.state_dict() == sampler.state_dict() == state_after(6)
    assert list(copy) == epoch_of(0)[6:]
    assert list(copy) == epoch_of(1)


def test_a_pickled_sampler_begins_where_iterating_would_and_the_original_goes_on():
    sampler = make()
    iterator = iter(sampler)
    next(iterator)
    copy = pickle.loads(pickle.dumps(sampler))
    assert list(copy) == list(sampler) == epoch_of(0)
    assert list(iterator) == epoch_of(0)[1:]


def test_a_pickle_holds_the_lengths_and_no_plan():
    sampler = bw.BatchSampler(np.resize(LENGTHS, 30_000), BUDGET, grouping=bw.Buckets(8))
    next(iter(sampler))
    assert sampler.pad_to([1])
    assert len(pickle.dumps(sampler)) < 4 * 30_000 + 3_000  # four bytes a length


def test_a_data_set_of_another_size_is_refused():
    with pytest.raises(LengthsError, match="the data set has 299 examples but there are 300 lengths"):
        make(dataset=range(299))
    assert list(make(dataset=range(300))) == epoch_of(0)


def test_data_over_the_budget_are_refused_when_the_sampler_is_made():
    with pytest.raises(BudgetError, match=r"example 1 of length 9 is over MaxTokens\(8\) by itself"):
        bw.BatchSampler([3, 9], bw.MaxTokens(8))


def test_an_oversize_example_can_be_alone_or_dropped():
    lengths, budget = [3, 9, 2], bw.MaxTokens(8)
    assert sorted(bw.BatchSampler(lengths, budget, oversize="alone")) == [[0, 2], [1]]
    assert sorted(bw.BatchSampler(lengths, budget, oversize="drop")) == [[0, 2]]


def test_a_number_is_no_budget():
    with pytest.raises(ArgumentError, match=r"write MaxItems\(64\) or MaxTokens\(64\)"):
        bw.BatchSampler([3], 64)


def test_the_report_of_a_resumed_sampler_is_that_of_the_rest():
    sampler = resumed(state_after(6), world_size=1)
    assert sampler.report().num_batches == len(sampler.plan) == len(epoch_of(0)) - 6
    assert resumed(state_after(len(make()))).report().num_batches == 0
