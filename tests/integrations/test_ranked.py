from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations._ranked import controller_of, give_rank, is_at_end, num_batches, sampler_of
from batchwright.plan.sampler.regrouping import regroup
from batchwright.plan.sampler.resizable import ResizableBatchSampler

DATA = list(range(8))


def make_sampler(**options):
    return bw.BatchSampler([1] * 8, bw.MaxItems(2), **options)


def make_regrouped():
    return regroup(DataLoader(DATA, batch_size=4, collate_fn=list), SimpleNamespace(size=2))


def test_samplers_are_found_wherever_a_loader_has_them():
    sampler, regrouped = make_sampler(), make_regrouped()
    assert sampler_of(DataLoader(DATA, batch_sampler=sampler)) is sampler
    assert sampler_of(DataLoader(DATA, batch_size=None, sampler=sampler)) is sampler
    assert sampler_of(regrouped) is regrouped
    assert sampler_of(DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0), batch_size=2)) is None


def test_a_sampler_for_one_process_is_given_its_rank_once():
    sampler = make_sampler()
    assert give_rank(sampler, rank=1, world_size=2)
    assert not give_rank(sampler, rank=1, world_size=2)
    # Four batches of two, over two ranks.
    assert (len(sampler), list(sampler)) == (2, list(make_sampler(rank=1, world_size=2)))


def test_a_batch_taken_before_the_rank_was_known_does_not_count():
    sampler = make_sampler()
    next(iter(sampler))
    give_rank(sampler, rank=0, world_size=2)
    assert sampler.state_dict()["position"] == 0


def test_what_regroup_made_is_not_divided_afterwards():
    with pytest.raises(ArgumentError, match="rank 0 of 1, this process is rank 1 of 2; pass rank and world_size"):
        give_rank(make_regrouped(), rank=1, world_size=2, is_loader=True)


def test_the_end_of_an_epoch_is_known_by_batches_or_by_examples():
    assert is_at_end(make_sampler(), 0)
    assert not is_at_end(make_sampler(), 1)
    resizable = ResizableBatchSampler(8, SimpleNamespace(size=5))
    assert num_batches(resizable) is None
    assert [is_at_end(resizable, None) for _ in resizable] == [False, True]
    assert not is_at_end(make_regrouped(), None)  # its loader may have more


def test_the_controller_is_the_given_one_or_that_of_the_sampler():
    observing = SimpleNamespace(size=2, observe=None, state_dict=None)
    assert controller_of(SimpleNamespace(controller=observing), None) is observing
    assert controller_of(SimpleNamespace(controller=SimpleNamespace(size=2)), None) is None  # it decides by itself
    assert controller_of(make_sampler(), observing) is observing
    with pytest.raises(ArgumentError, match="needs observe and state_dict"):
        controller_of(make_sampler(), SimpleNamespace(size=2))
