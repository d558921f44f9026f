"""check_batch_sampler: it passes what keeps the contract and names the rule that is broken."""

from itertools import chain

import numpy as np
import pytest

import batchwright as bw
from batchwright.testing import check_batch_sampler

LENGTHS = np.random.default_rng(0).integers(1, 60, size=150)
PAIRS = np.random.default_rng(1).integers(1, 40, size=(150, 2))
BUDGET = bw.MaxTokens(200)


@pytest.mark.parametrize("lengths", [LENGTHS, PAIRS], ids=["one axis", "two axes"])
@pytest.mark.parametrize("grouping", [bw.InOrder(), bw.Sorted(), bw.WindowSort(3), bw.Buckets(5)], ids=str)
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])
def test_every_grouping_keeps_the_contract(lengths, grouping, shuffle):
    def make(rank, world_size):
        options = {"grouping": grouping, "shuffle": shuffle, "pad_multiple_of": 4}
        return bw.BatchSampler(lengths, BUDGET, rank=rank, world_size=world_size, **options)

    check_batch_sampler(make, num_examples=150, lengths=lengths, budget=BUDGET)


@pytest.mark.parametrize("capacity", [60, 200])
def test_packed_rows_keep_the_contract(capacity):
    def make(rank, world_size):
        return bw.BatchSampler(LENGTHS, BUDGET, rank=rank, world_size=world_size, grouping=bw.Packed(capacity))

    check_batch_sampler(make, num_examples=150, lengths=LENGTHS, budget=BUDGET, world_sizes=(1, 4, 3))


def test_fewer_examples_than_ranks_keep_the_contract():
    def make(rank, world_size):
        return bw.BatchSampler([3, 5], BUDGET, rank=rank, world_size=world_size)

    check_batch_sampler(make, num_examples=2, lengths=[3, 5], budget=BUDGET)


class Honest:
    """A sampler of a user's own, around one of ours; the samplers below have one fault each."""

    def __init__(self, rank, world_size):
        self.inner = bw.BatchSampler(LENGTHS, BUDGET, rank=rank, world_size=world_size)
        self.rank, self.world_size = rank, world_size

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        return iter(self.inner)

    def set_epoch(self, epoch):
        self.inner.set_epoch(epoch)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class Duplicates(Honest):
    def __iter__(self):
        return ([batch[0], *batch] if 7 in batch else batch for batch in self.inner)


class Loses(Honest):
    def __iter__(self):
        return ([index for index in batch if index != 7] or batch for batch in self.inner)


class Negative(Honest):
    def __iter__(self):
        return ([index - 1 for index in batch] for batch in self.inner)


class Joins(Honest):
    """Two batches as one: over the budget."""

    def __len__(self):
        return -(-len(self.inner) // 2)

    def __iter__(self):
        batches = list(self.inner)
        return iter([list(chain(*batches[place : place + 2])) for place in range(0, len(batches), 2)])


class Unequal(Honest):
    """One step more on the last rank."""

    def __len__(self):
        return len(self.inner) + (self.rank == 1)

    def __iter__(self):
        first, *rest = self.inner
        return iter([first[:1], first[1:], *rest] if self.rank == 1 else [first, *rest])


class CountsIterations(Honest):
    """The more often it was iterated, the later it begins."""

    num_iterations = 0

    def __iter__(self):
        batches = list(self.inner)
        self.num_iterations += 1
        return iter(batches[self.num_iterations - 1 :] + batches[: self.num_iterations - 1])


class MovesOnAtOnce(Honest):
    """A loop that is left counts as an epoch."""

    def __iter__(self):
        batches = list(self.inner)
        return iter(batches)


class ForgetsItsPlace(Honest):
    def load_state_dict(self, state):
        self.inner.load_state_dict({**state, "position": 0})


class CountsItsOwnBatches(Honest):
    """A place in batches of this rank, which means another thing on another number of ranks."""

    def state_dict(self):
        position = self.inner.state_dict()["position"]
        return {"batches": int(np.searchsorted(self.inner.plan.offsets, position)) // self.world_size}

    def load_state_dict(self, state):
        place = self.inner.plan.offsets[min(state["batches"] * self.world_size, len(self.inner.plan))]
        self.inner.load_state_dict({**self.inner.state_dict(), "position": int(place)})


class StateOfBytes(Honest):
    def state_dict(self):
        return {**self.inner.state_dict(), "lengths": b"1234"}


class StateOfTuples(Honest):
    def state_dict(self):
        return {**self.inner.state_dict(), "place": (1, 2)}


class WrongLength(Honest):
    def __len__(self):
        return len(self.inner) + 1


class LengthOfTheWholeEpoch(Honest):
    """Right until it is resumed."""

    def __len__(self):
        return len(Honest(self.rank, self.world_size).inner)


class SharesItsPlace(Honest):
    """It is its own iterator, as a file is."""

    def __iter__(self):
        self.running = iter(self.inner)
        return self

    def __next__(self):
        return next(self.running)


class Unpicklable(Honest):
    def __init__(self, rank, world_size):
        super().__init__(rank, world_size)
        self.key = lambda index: index


class Random(Honest):
    """Another order in every run."""

    def __iter__(self):
        batches = list(self.inner)
        return iter([batches[place] for place in np.random.default_rng().permutation(len(batches))])


class GivesEmptyBatches(Honest):
    def __len__(self):
        return len(self.inner) + 1

    def __iter__(self):
        return chain([[]], self.inner)


FAULTS = {
    Duplicates: r"every index appears once per epoch: .* repeated on 1 ranks",
    Loses: r"every index appears once per epoch: 1 lost on 1 ranks, e\.g\. \[7\]",
    Negative: r"indices are from 0 to 149: got \[-1\]",
    Joins: r"the budget is kept: .* of MaxTokens\(200\)",
    Unequal: "every rank takes the same number of steps",
    CountsIterations: "the order depends on the epoch, not on how often the sampler was iterated",
    MovesOnAtOnce: "only a finished epoch leads to the next",
    ForgetsItsPlace: r"resuming after \d+ of \d+ batches continues there",
    CountsItsOwnBatches: "resuming on 2 ranks after 1 loses nothing",
    StateOfBytes: "the state survives JSON: .* bytes",
    StateOfTuples: "the state survives JSON: .* became",
    WrongLength: "len.. is exact: rank 0 of 1 announced",
    LengthOfTheWholeEpoch: "len.. is exact: after resuming it announced",
    SharesItsPlace: "two iterators at once do not disturb each other",
    Unpicklable: "a sampler can be pickled",
    Random: "the same seed and epoch give the same order",
    GivesEmptyBatches: "no batch is empty",
}


def test_a_sampler_of_a_users_own_without_faults_passes():
    check_batch_sampler(Honest, num_examples=150, lengths=LENGTHS, budget=BUDGET)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_the_broken_rule_named(fault):
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        check_batch_sampler(fault, num_examples=150, lengths=LENGTHS, budget=BUDGET)


class WideRows(Honest):
    """Packed rows, planned with a larger budget than the one they are checked against."""

    def __init__(self, rank, world_size):
        self.inner = bw.BatchSampler(LENGTHS, BUDGET, rank=rank, world_size=world_size, grouping=bw.Packed(200))
        self.pad_to = self.inner.pad_to


def test_packed_rows_over_the_budget_are_found():
    with pytest.raises(AssertionError, match=r"the budget is kept: 1 items padded to \[200\] use 1.053"):
        check_batch_sampler(WideRows, num_examples=150, lengths=LENGTHS, budget=bw.MaxTokens(190))


def test_an_empty_epoch_is_found():
    class Empty(Honest):
        def __len__(self):
            return 0

        def __iter__(self):
            return iter([])

    with pytest.raises(AssertionError, match="150 lost on 1 ranks"):
        check_batch_sampler(Empty, num_examples=150)
