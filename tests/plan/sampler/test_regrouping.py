"""regroup: sizes that apply at once, ranks that end together, exact resume over the loaders people use."""

import json
import pickle
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

import batchwright as bw
from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.plan.sampler.regrouping import Regrouped, regroup
from batchwright.plan.sampler.resizable import ResizableBatchSampler

from .loops import Sizes, run

NUM = 100
DATA = list(range(NUM))
LENGTHS = np.random.default_rng(0).integers(1, 60, size=NUM)
BUDGET = bw.MaxTokens(300)


class Recording:
    """A data set that notes what is loaded from it."""

    def __init__(self):
        self.loaded = []

    def __len__(self):
        return NUM

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


def sizes_of(batches):
    return [len(batch) for batch in batches]


def flat(batches):
    return [index for batch in batches for index in batch]


def load(**options):
    return DataLoader(DATA, collate_fn=list, **{"batch_size": 8, **options})


def seeded():
    return torch.Generator().manual_seed(3)


# Sizes.


def test_chunks_of_any_sizes_become_batches_of_the_wanted_sizes():
    chunks = [[0, 1, 2, 3, 4], [], [5], (6, 7), [8, 9, 10]]
    assert run(regroup(chunks, Sizes(2, 1, 6))) == [[0, 1], [2], [3, 4, 5, 6, 7, 8], [9, 10]]


def test_a_last_batch_that_is_short_can_be_left_out():
    assert run(regroup([DATA[:10]], Sizes(4), drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sizes_of(run(regroup([DATA[:8]], Sizes(4), drop_last=True))) == [4, 4]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_new_size_applies_to_the_very_next_batch_whatever_the_workers_prefetched(persistent):
    loader = load(num_workers=2, prefetch_factor=8, persistent_workers=persistent)
    regrouped = regroup(loader, Sizes(10, 3, 40, 1))
    for _ in range(2):
        regrouped.controller.step = 0
        batches = run(regrouped)
        assert sizes_of(batches) == [10, 3, 40, 1, 10, 3, 33]
        assert flat(batches) == DATA


def test_the_loader_is_read_no_further_than_the_next_batch_needs():
    read = []

    class Noted(list):
        def __iter__(self):
            for chunk in super().__iter__():
                read.append(chunk)
                yield chunk

    loop = iter(regroup(Noted([[0, 1], [2, 3], [4, 5]]), Sizes(2)))
    assert read == []
    assert next(loop) == [0, 1]
    assert read == [[0, 1]]
    assert next(loop) == [2, 3]
    assert read == [[0, 1], [2, 3]]


def test_an_empty_loader_has_no_batch():
    regrouped = regroup([], Sizes(4))
    assert (run(regrouped), regrouped.epoch) == ([], 1)


# Ranks.


def ranks(num_examples, world_size, chunk, *sizes, **options):
    """Every rank reads its own examples, dealt in turn: rank 1 of 3 has 1, 4, 7, …"""
    shares = []
    for rank in range(world_size):
        own = list(range(num_examples))[rank::world_size]
        chunks = [own[start : start + chunk] for start in range(0, len(own), chunk)]
        shares.append(run(regroup(chunks, Sizes(*sizes), rank=rank, world_size=world_size, **options)))
    return shares


def test_the_example_more_goes_round_so_that_totals_stay_within_one():
    # Batches of five on two ranks are the examples 0 to 4, 5 to 9 and 10 to 11; odd ones belong to rank 1.
    assert ranks(12, 2, 4, 5) == [[[0, 2, 4], [6, 8], [10]], [[1, 3], [5, 7, 9], [11]]]


def test_examples_fewer_than_ranks_at_the_end_join_the_last_batch():
    # Batches of four on three ranks would leave one example of nine: the second batch takes it.
    assert ranks(9, 3, 2, 4) == [[[0, 3], [6]], [[1], [4, 7]], [[2], [5, 8]]]


def test_a_size_below_the_number_of_ranks_counts_as_one_example_a_rank():
    assert ranks(6, 3, 2, 1) == [[[0], [3]], [[1], [4]], [[2], [5]]]


size_lists = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(st.integers(0, 15), st.integers(1, 8), st.integers(1, 9), size_lists)
def test_ranks_with_equally_many_examples_end_together_and_lose_nothing(each, world_size, chunk, sizes):
    total = each * world_size
    shares = ranks(total, world_size, chunk, *sizes)
    left, step = total, 0
    for pieces in zip(*shares, strict=True):  # equal steps
        counts = sizes_of(pieces)
        wanted = max(sizes[step % len(sizes)], world_size)
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1
        left, step = left - sum(counts), step + 1
        if left:
            assert sum(counts) == wanted
        else:
            assert sum(counts) < wanted + world_size
    assert sorted(flat(map(flat, shares))) == list(range(total))


@given(st.integers(0, 15), st.integers(1, 8), st.integers(1, 9), size_lists)
def test_ranks_that_leave_out_a_short_last_batch_end_together(each, world_size, chunk, sizes):
    total = each * world_size
    shares = ranks(total, world_size, chunk, *sizes, drop_last=True)
    given_out = 0
    for step, pieces in enumerate(zip(*shares, strict=True)):
        assert sum(sizes_of(pieces)) == max(sizes[step % len(sizes)], world_size)
        given_out += sum(sizes_of(pieces))
    next_size = max(sizes[len(shares[0]) % len(sizes)], world_size)
    assert given_out <= total < given_out + next_size
    assert sorted(flat(map(flat, shares))) == list(range(given_out))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_of_a_distributed_sampler_end_together_in_every_epoch(num_workers):
    regrouped = []
    for rank in range(3):
        sampler = DistributedSampler(DATA, num_replicas=3, rank=rank, seed=1)
        loader = load(sampler=sampler, num_workers=num_workers)
        regrouped.append(regroup(loader, Sizes(10, 25), rank=rank, world_size=3))
    orders = []
    for _ in range(2):
        shares = [run(part) for part in regrouped]
        assert len(set(map(len, shares))) == 1
        orders.append(flat(map(flat, shares)))
        # The sampler itself fills 100 examples up to 102, so that 34 fall to each rank.
        assert (set(orders[-1]), len(orders[-1])) == (set(DATA), 102)
    assert orders[0] != orders[1]  # the sampler was told the epoch


def test_a_rank_that_differs_from_that_of_the_sampler_is_refused():
    loader = load(sampler=DistributedSampler(DATA, num_replicas=4, rank=1))
    with pytest.raises(ArgumentError, match="sampled for rank 1 of 4, regroup was told 0 of 1"):
        regroup(loader, Sizes(8))
    assert regroup(loader, Sizes(8), rank=1, world_size=4).world_size == 4


@pytest.mark.parametrize("told", [1, 2])
def test_samplers_of_ours_are_refused_over_ranks_for_their_examples_are_not_equally_many(told):
    sampler = ResizableBatchSampler(NUM, Sizes(8), world_size=2)
    with pytest.raises(ArgumentError, match="the same number of examples on every rank, which ResizableBatchSampler"):
        regroup(DataLoader(DATA, batch_sampler=sampler, collate_fn=list), Sizes(8), world_size=told)


# Resume.


def lists():
    return [DATA[start : start + 7] for start in range(0, NUM, 7)]


SOURCES = {
    "lists": lists,
    "in order": load,
    "generator": lambda: load(shuffle=True, generator=seeded()),
    "sampler with a generator": lambda: load(sampler=RandomSampler(DATA, generator=seeded())),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=bw.BatchSampler(LENGTHS, BUDGET), collate_fn=list),
    "resizable": lambda: DataLoader(DATA, batch_sampler=ResizableBatchSampler(NUM, Sizes(9)), collate_fn=list),
    "batches of torch": lambda: DataLoader(
        DATA, batch_sampler=TorchBatchSampler(RandomSampler(DATA, generator=seeded()), 8, False), collate_fn=list
    ),
    "two workers": lambda: load(shuffle=True, generator=seeded(), num_workers=2),
    "batch sampler, two workers": lambda: DataLoader(
        DATA, batch_sampler=bw.BatchSampler(LENGTHS, BUDGET), collate_fn=list, num_workers=2, persistent_workers=True
    ),
}
every_source = pytest.mark.parametrize("make_source", SOURCES.values(), ids=SOURCES.keys())


def resumed(source, state, step=0, *, sizes=(13, 30, 8), **options):
    regrouped = regroup(source, Sizes(*sizes), **options)
    regrouped.load_state_dict(json.loads(json.dumps(state)))
    regrouped.controller.step = step
    return regrouped


@every_source
@pytest.mark.parametrize("epoch", [0, 2])
def test_resuming_after_any_batch_of_any_epoch_gives_the_rest_and_then_the_next_epoch(make_source, epoch):
    regrouped = regroup(make_source(), Sizes(13, 30, 8))
    for _ in range(epoch):
        list(regrouped)
    states, full = [regrouped.state_dict()], []
    for batch in regrouped:
        full.append(batch)
        states.append(regrouped.state_dict())
        regrouped.controller.step += 1
    following = list(islice(regrouped, 2))
    assert (sorted(flat(full)), regrouped.epoch) == (DATA, epoch + 1)
    step = len(full)
    for num in (0, 1, step // 2, step):
        again = resumed(make_source(), states[num], num)
        assert run(again) == full[num:]
        assert again.epoch == epoch + 1
        assert list(islice(again, 2)) == following


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 9), size_lists, st.data())
def test_every_rank_resumes_exactly_after_any_step(each, world_size, chunk, sizes, data):
    rank = data.draw(st.integers(0, world_size - 1))
    own = list(range(each * world_size))[rank::world_size]
    chunks = [own[start : start + chunk] for start in range(0, len(own), chunk)]
    options = {"rank": rank, "world_size": world_size}
    regrouped = regroup(chunks, Sizes(*sizes), **options)
    states, full = [regrouped.state_dict()], []
    for batch in regrouped:
        full.append(batch)
        states.append(regrouped.state_dict())
        regrouped.controller.step += 1
    for num, state in enumerate(states):
        assert run(resumed(chunks, state, num, sizes=sizes, **options)) == full[num:]


def test_the_state_is_the_same_on_every_rank_and_counts_the_examples_of_all():
    states = []
    for rank in range(2):
        regrouped = regroup([DATA[rank::2]], Sizes(5), rank=rank, world_size=2)
        run(regrouped, 3)
        states.append(regrouped.state_dict())
    assert states[0] == states[1]
    assert states[0] == {
        "version": 2, "world_size": 2, "epoch": 0, "consumed": 15, "generator": None, "sampler": None,
    }  # fmt: skip


def test_over_a_resizable_sampler_nothing_that_was_consumed_is_loaded_again():
    first = regroup(SOURCES["resizable"](), Sizes(13))
    received = run(first, 3)
    data = Recording()
    loader = DataLoader(data, batch_sampler=ResizableBatchSampler(NUM, Sizes(9)), collate_fn=list)
    rest = run(resumed(loader, first.state_dict(), sizes=[13]))
    assert sorted(flat(received + rest)) == DATA
    assert data.loaded == flat(rest)


def test_over_a_batch_sampler_a_part_of_one_batch_is_loaded_again():
    first = regroup(SOURCES["batch sampler"](), Sizes(13))
    received = run(first, 3)
    data = Recording()
    loader = DataLoader(data, batch_sampler=bw.BatchSampler(LENGTHS, BUDGET), collate_fn=list)
    rest = run(resumed(loader, first.state_dict(), sizes=[13]))
    assert flat(received + rest) == flat(bw.plan_batches(LENGTHS, BUDGET))
    batch = next(batch for batch in bw.plan_batches(LENGTHS, BUDGET) if rest[0][0] in batch)
    assert data.loaded == batch[: batch.index(rest[0][0])] + flat(rest)


def test_packed_rows_are_regrouped_and_resumed_as_rows():
    def make_loader():
        sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(240), grouping=bw.Packed(60))
        return DataLoader(bw.Rows(DATA), batch_sampler=sampler, collate_fn=list)

    regrouped = regroup(make_loader(), Sizes(6))
    received = run(regrouped, 4)
    rest = run(resumed(make_loader(), regrouped.state_dict(), sizes=[6]))
    assert sorted(flat(flat(received + rest))) == DATA
    assert sizes_of(received) == [6, 6, 6, 6]


def test_a_place_left_in_the_sampler_itself_is_not_counted_twice():
    sampler = bw.BatchSampler(LENGTHS, BUDGET)
    loader = DataLoader(DATA, batch_sampler=sampler, collate_fn=list)
    regrouped = regroup(loader, Sizes(13))
    order = flat(bw.plan_batches(LENGTHS, BUDGET))
    for num in (0, 3):
        run(regrouped, num)
        state = regrouped.state_dict()
        next(iter(sampler))
        sampler.load_state_dict(sampler.state_dict())
        assert flat(run(resumed(loader, state))) == order[13 * num :]


class Passes(IterableDataset):
    """A stream that is told its epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([100 * self.epoch + index for index in range(20)])


def test_a_stream_is_told_its_epoch_and_skipped():
    regrouped = regroup(DataLoader(Passes(), batch_size=4, collate_fn=list), Sizes(7))
    run(regrouped)
    assert run(regrouped, 2) == [list(range(100, 107)), list(range(107, 114))]
    again = resumed(DataLoader(Passes(), batch_size=4, collate_fn=list), regrouped.state_dict(), sizes=[7])
    assert run(again) == [list(range(114, 120))]


@pytest.mark.parametrize("make_loader", [lambda: load(shuffle=True), lambda: load(sampler=RandomSampler(DATA))])
def test_an_order_that_cannot_be_repeated_is_not_resumed(make_loader):
    regrouped = regroup(make_loader(), Sizes(7))
    run(regrouped, 2)
    with pytest.raises(ArgumentError, match="RandomSampler without a generator cannot be repeated; pass generator="):
        regrouped.load_state_dict(regrouped.state_dict())


def test_a_loader_out_of_order_is_not_resumed():
    regrouped = regroup(load(num_workers=2, in_order=False), Sizes(7))
    with pytest.raises(ArgumentError, match="in_order=False"):
        regrouped.load_state_dict(regrouped.state_dict())


BAD_STATES = {
    "version": ({"version": 9}, "saved with version = 9"),
    "world_size": ({"world_size": 2}, "saved with world_size = 2, here it is 1"),
    "epoch": ({"epoch": -1}, "epoch as a whole number"),
    "consumed": ({"consumed": 1.5}, "consumed as a whole number"),
    "generator": ({"generator": "AAAA"}, "saved with a generator of the sampler, here there is no generator"),
}


@pytest.mark.parametrize("kind", BAD_STATES)
def test_a_state_of_something_else_is_refused_and_nothing_changes(kind):
    change, complaint = BAD_STATES[kind]
    regrouped = regroup(lists(), Sizes(7))
    loop = iter(regrouped)
    next(loop)
    before = regrouped.state_dict()
    with pytest.raises(StateMismatchError, match=complaint):
        regrouped.load_state_dict({**before, **change})
    assert regrouped.state_dict() == before
    assert next(loop) == DATA[7:14]


def test_a_state_without_a_generator_is_refused_where_there_is_one():
    state = regroup(lists(), Sizes(7)).state_dict()
    with pytest.raises(StateMismatchError, match="saved without a generator of the sampler, here there is one"):
        regroup(load(shuffle=True, generator=seeded()), Sizes(7)).load_state_dict(state)


def test_a_place_behind_the_end_of_the_data_is_refused_when_it_is_read():
    state = {**regroup(lists(), Sizes(7)).state_dict(), "consumed": NUM + 4}
    with pytest.raises(StateMismatchError, match="saved after 104 examples, and the loader ended 4 examples earlier"):
        next(iter(resumed(lists(), state)))


# Epochs.


@every_source
def test_leaving_a_loop_and_iterating_again_restarts_the_same_order(make_source):
    regrouped = regroup(make_source(), Sizes(13))
    first = list(islice(regrouped, 3))
    assert list(regrouped)[:3] == first
    assert regrouped.epoch == 1


def test_leaving_a_resumed_loop_restarts_at_the_resumed_place():
    regrouped = regroup(lists(), Sizes(10))
    run(regrouped, 4)
    again = resumed(lists(), regrouped.state_dict(), sizes=[10])
    assert next(iter(again)) == next(iter(again)) == DATA[40:50]


def test_iter_fixes_its_epoch_and_only_exhausting_moves_it():
    regrouped = regroup(SOURCES["resizable"](), Sizes(50))
    loop = iter(regrouped)
    regrouped.set_epoch(3)
    order = ResizableBatchSampler(NUM, Sizes(NUM))
    assert flat(loop) == next(iter(order))
    assert regrouped.epoch == 3
    order.set_epoch(3)
    assert flat(regrouped) == next(iter(order))
    assert regrouped.epoch == 4


@pytest.mark.parametrize("kind", ["lists", "generator", "batch sampler", "resizable"])
def test_two_iterators_at_once_do_not_disturb_each_other(kind):
    regrouped = regroup(SOURCES[kind](), Sizes(13))
    pairs = list(zip(regrouped, regrouped, strict=True))
    assert [first for first, _ in pairs] == [second for _, second in pairs] == list(regroup(SOURCES[kind](), Sizes(13)))


def test_a_pickled_object_begins_where_iterating_would():
    regrouped = regroup(SOURCES["resizable"](), Sizes(13))
    full = run(regrouped)
    regrouped.set_epoch(0)
    run(regrouped, 2)
    again = resumed(SOURCES["resizable"](), regrouped.state_dict(), sizes=[13])
    next(iter(again))
    assert list(pickle.loads(pickle.dumps(again))) == full[2:]


# Bad input.


def test_a_loader_that_collates_is_refused():
    with pytest.raises(ArgumentError, match="it has the default collate_fn; pass collate_fn=list"):
        regroup(DataLoader(DATA, batch_size=4), Sizes(4))
    with pytest.raises(ArgumentError, match="must yield lists of examples, got Tensor; pass collate_fn=list"):
        next(iter(regroup(DataLoader(DATA, batch_size=4, collate_fn=torch.tensor), Sizes(4))))


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        ((3, Sizes(4)), {}, "loader must be iterable, got int"),
        (([], 0), {}, r"controller must be a whole number of 1 or more, or have one as \.size"),
        (([], Sizes(0)), {}, r"controller\.size must be a whole number of 1 or more, got 0"),
        (([], Sizes(4)), {"rank": 1}, "rank must be below world_size"),
        (([], Sizes(4)), {"drop_last": 1}, "drop_last must be True or False, got 1"),
    ],
)
def test_bad_arguments_are_refused(arguments, options, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        regroup(*arguments, **options)


@pytest.mark.parametrize("size", [3, np.int64(3)])
def test_a_whole_number_is_a_size_that_never_changes(size):
    assert [len(batch) for batch in regroup([[1, 2, 3, 4], [5, 6]], size)] == [3, 3]


def test_regroup_makes_a_regrouped():
    assert isinstance(regroup([], Sizes(1)), Regrouped)


# The order of a planned loader.


def planned(**options):
    sampler = bw.BatchSampler(LENGTHS, BUDGET, **options)
    return regroup(DataLoader(DATA, batch_sampler=sampler, collate_fn=list), Sizes(9))


def saved(**options):
    regrouped = planned(**options)
    batches = run(regrouped, 4)
    return [index for batch in batches for index in batch], regrouped.state_dict()


def test_a_state_of_other_data_or_another_order_is_refused():
    _, state = saved()
    other = bw.BatchSampler(LENGTHS[::-1].copy(), BUDGET)
    with pytest.raises(StateMismatchError, match="saved with lengths"):
        regroup(DataLoader(DATA, batch_sampler=other, collate_fn=list), Sizes(9)).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="saved with balance_over = 1, here it is 8"):
        planned(balance_over=8).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="saved with a BatchSampler in the loader, here there is none"):
        regroup([DATA], Sizes(9)).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="saved without a BatchSampler in the loader, here there is one"):
        planned().load_state_dict({**state, "sampler": None})


def test_a_saved_order_is_kept_for_the_rest_of_its_epoch_only():
    before, state = saved(balance_over=4)
    regrouped = planned()
    regrouped.load_state_dict(state)
    assert sorted(before + [index for batch in run(regrouped) for index in batch]) == DATA
    assert regrouped.state_dict()["sampler"]["settings"]["balance_over"] == 1
    fresh = planned()
    run(fresh)
    assert [index for batch in run(regrouped) for index in batch] == [index for batch in run(fresh) for index in batch]


def first_batch_from(state):
    regrouped = planned()
    regrouped.load_state_dict(state)
    return next(iter(regrouped))


@pytest.mark.parametrize("value", [3, False, [1], {"a": 1}])
def test_a_generator_that_is_no_text_is_refused(value):
    with pytest.raises(StateMismatchError):
        planned().load_state_dict({**saved()[1], "generator": value})


@pytest.mark.parametrize("value", [2**63, 10**30])
def test_a_place_beyond_64_bits_is_refused(value):
    with pytest.raises(StateMismatchError):
        first_batch_from({**saved()[1], "consumed": value})


def test_two_epochs_in_one_state_are_refused():
    with pytest.raises(StateMismatchError):
        first_batch_from({**saved()[1], "epoch": 5})
