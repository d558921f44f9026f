"""BatchSampler under the loaders people use: DataLoader with workers, and torchdata's StatefulDataLoader."""

import pickle
from itertools import islice

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

import batchwright as bw
from batchwright.errors import ArgumentError, LengthsError

from .loops import KINDS, every_kind, first_four, halves

LENGTHS = np.random.default_rng(0).integers(1, 60, size=60)
BUDGET = bw.MaxTokens(200)
DATA = list(range(60))


# With prefetch_factor=8 two workers are sent 16 batches at once: more than an epoch has.
def make(state=None):
    sampler = bw.BatchSampler(LENGTHS, BUDGET)
    if state is not None:
        sampler.load_state_dict(state)
    return sampler


def epoch_of(number):
    return list(bw.plan_batches(LENGTHS, BUDGET, epoch=number))


FULL = epoch_of(0)


def loader_of(sampler, kind=KINDS["two workers"], data=DATA):
    return DataLoader(data, batch_sampler=sampler, collate_fn=list, **kind)


def test_the_epochs_here_are_longer_than_the_usual_prefetch_and_shorter_than_the_large_one():
    assert 2 * 2 < min(len(epoch_of(number)) for number in range(4)) <= max(map(len, map(epoch_of, range(4)))) < 16


# DataLoader.


@every_kind
def test_states_taken_in_a_tracked_loop_resume_exactly_in_every_epoch(kind):
    sampler = make()
    loader = loader_of(sampler, kind)
    for number in range(3):
        full, received = epoch_of(number), []
        for batch in sampler.track(loader):
            received.append(batch)
            resumed = make(sampler.state_dict())
            assert (sampler.epoch, len(sampler)) == (number, len(full))
            assert received + list(resumed) == full
            assert list(resumed) == epoch_of(number + 1)
        assert received == full


@every_kind
@pytest.mark.parametrize("num", [1, len(FULL) // 2, len(FULL) - 1, len(FULL)])
def test_a_fresh_loader_goes_on_where_a_tracked_loop_was_left(kind, num):
    sampler = make()
    received = list(islice(sampler.track(loader_of(sampler, kind)), num))
    resumed = make(sampler.state_dict())
    loader = loader_of(resumed, kind)
    assert received + list(resumed.track(loader)) == FULL
    assert list(resumed.track(loader)) == epoch_of(1)


@every_kind
def test_a_state_taken_before_the_first_batch_is_that_of_the_start(kind):
    sampler = make()
    loader = loader_of(sampler, kind)
    assert sampler.state_dict()["position"] == 0
    assert list(sampler.track(loader)) == FULL
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)


@every_kind
def test_leaving_a_tracked_loop_and_looping_again_restarts_the_epoch(kind):
    sampler = make()
    loader = loader_of(sampler, kind)
    for _, batch in zip(range(3), sampler.track(loader), strict=False):
        assert batch
    assert sampler.epoch == 0
    assert list(sampler.track(loader)) == FULL
    assert list(sampler.track(loader)) == epoch_of(1)


def test_leaving_a_tracked_loop_keeps_the_place_until_the_next_loop():
    sampler = make()
    for step, _ in enumerate(sampler.track(loader_of(sampler, KINDS["all prefetched"]))):
        if step == 2:
            break
    assert sampler.state_dict()["position"] == sum(map(len, FULL[:3]))


def test_going_back_to_a_state_inside_a_tracked_loop_holds():
    sampler = make()
    loader = loader_of(sampler)
    for step, _ in enumerate(sampler.track(loader)):
        if step == 2:
            state = sampler.state_dict()
        if step == 5:
            sampler.load_state_dict(state)
            break
    assert list(sampler.track(loader)) == FULL[3:]


def test_without_workers_a_plain_loop_is_counted_exactly():
    sampler = make()
    for step, _ in enumerate(loader_of(sampler, KINDS["no workers"])):
        assert list(make(sampler.state_dict())) == FULL[step + 1 :]
    assert list(make(sampler.state_dict())) == epoch_of(1)


@every_kind
def test_a_plain_loop_over_several_epochs_is_right(kind):
    loader = loader_of(make(), kind)
    for number in range(3):
        assert len(loader) == len(epoch_of(number))
        assert list(loader) == epoch_of(number)


def test_a_resumed_epoch_with_nothing_left_is_empty_and_the_next_is_whole():
    sampler = make()
    for _ in sampler.track(sampler):
        state = sampler.state_dict()
    resumed = make(state)
    loader = loader_of(resumed)
    assert (len(loader), list(resumed.track(loader))) == (0, [])
    assert list(resumed.track(loader)) == epoch_of(1)


# What stands around a loader.


def to_device(loader):
    yield from loader


@pytest.mark.parametrize("wrap", [to_device, lambda loader: tqdm(loader, disable=True)], ids=["generator", "tqdm"])
def test_a_wrapper_that_begins_its_loader_late_is_tracked(wrap):
    sampler = make()
    loader = loader_of(sampler, KINDS["all prefetched"])
    received = list(islice(sampler.track(wrap(loader)), 4))
    assert received + list(make(sampler.state_dict())) == FULL


def test_a_wrapper_that_ends_early_does_not_end_the_epoch():
    sampler = make()
    loader = loader_of(sampler, KINDS["all prefetched"])
    assert list(sampler.track(first_four(loader))) == FULL[:4]
    assert sampler.epoch == 0
    assert list(make(sampler.state_dict())) == FULL[4:]


def test_a_loader_that_does_not_draw_from_the_sampler_is_refused():
    sampler = make()
    next(iter(sampler))
    with pytest.raises(ArgumentError, match="needs a loader that draws from this sampler"):
        next(sampler.track(loader_of(make())))
    with pytest.raises(ArgumentError, match="needs a loader that draws from this sampler"):
        list(sampler.track([]))


def test_a_loader_that_has_begun_is_refused():
    sampler = make()
    begun = enumerate(sampler)
    with pytest.raises(ArgumentError, match="has not begun yet"):
        next(sampler.track(begun))


def test_a_loader_of_more_items_than_batches_is_refused():
    sampler = make()
    with pytest.raises(ArgumentError, match="one item per batch, and the loader gave more"):
        list(sampler.track(halves(loader_of(sampler))))


def test_a_loader_that_gives_batches_out_of_order_is_refused():
    sampler = make()
    with pytest.raises(ArgumentError, match="in_order=False"):
        next(sampler.track(loader_of(sampler, {"num_workers": 2, "in_order": False})))


def test_a_data_set_of_another_size_is_refused_before_the_first_batch():
    sampler = make()
    with pytest.raises(LengthsError, match="the data set has 61 examples but there are 60 lengths"):
        next(sampler.track(loader_of(sampler, KINDS["no workers"], data=[*DATA, 60])))
    assert sampler.state_dict()["position"] == 0


# StatefulDataLoader.


# torchdata 0.11 calls a function that newer releases of torch warn of.
quietly = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def stateful(num_workers, state=None, **options):
    loader = StatefulDataLoader(DATA, batch_sampler=make(), collate_fn=list, num_workers=num_workers, **options)
    if state is not None:
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return loader


@quietly
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num", [0, 1, len(FULL) // 2, len(FULL)])
def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(num_workers, num):
    loader = stateful(num_workers)
    received = list(islice(iter(loader), num))
    restored = stateful(num_workers, loader.state_dict())
    assert received + list(restored) == FULL
    assert list(restored) == epoch_of(1)


@quietly
@pytest.mark.parametrize(
    "options", [{}, {"persistent_workers": True}, {"snapshot_every_n_steps": 3}], ids=["plain", "persistent", "rare"]
)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_saved_at_the_end_of_an_epoch_begins_the_next(num_workers, options):
    options = options if num_workers else {}
    loader = stateful(num_workers, **options)
    assert list(loader) == FULL
    restored = stateful(num_workers, loader.state_dict(), **options)
    assert list(restored) == epoch_of(1)
    assert list(restored) == epoch_of(2)


@quietly
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_goes_on_in_a_later_epoch_and_from_a_restored_one(num_workers):
    loader = stateful(num_workers)
    assert list(loader) == FULL
    received = list(islice(iter(loader), 3))
    restored = stateful(num_workers, loader.state_dict())
    received += list(islice(iter(restored), 2))
    again = stateful(num_workers, restored.state_dict())
    assert received + list(again) == epoch_of(1)
    assert list(again) == epoch_of(2)
