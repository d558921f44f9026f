"""StreamBatcher on ranks and under workers: equal steps, every example once, a state that counts what was received."""

import json
import threading
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError, LengthsError, StateMismatchError

torch.set_num_threads(1)
LENGTHS = np.random.default_rng(3).integers(1, 40, size=103).tolist()
NUMBERS = list(range(len(LENGTHS)))
GROUPINGS = [bw.InOrder(), bw.WindowSort(), bw.WindowSort(1), bw.Buckets(4), bw.Packed(60)]


def length_of(number):
    return LENGTHS[number]


def make(source=NUMBERS, **options):
    settings = {"length_of": length_of, "budget": bw.MaxTokens(120), "buffer_size": 30, **options}
    return bw.StreamBatcher(source, **settings)


def flat(batches):
    return [example for batch in batches for item in batch for example in (item if isinstance(item, list) else [item])]


def on_ranks(world_size, source=NUMBERS, **options):
    return [make(source, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def without_repeats(stream):
    """Return the batches of a rank, and those of them that are its own."""
    batches, own = [], []
    for batch in stream:
        batches.append(batch)
        if stream.rank < stream.world_size - stream.num_repeated:
            own.append(batch)
    return batches, own


class Stateful:
    """A source that goes on from its state."""

    def __init__(self, numbers=NUMBERS):
        self.numbers, self.place = numbers, 0

    def __iter__(self):
        while self.place < len(self.numbers):
            self.place += 1
            yield self.numbers[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Told(Stateful):
    """A source that begins every pass anew, unless it was given a state of that pass; as streams of ``datasets``."""

    def __init__(self):
        super().__init__()
        self.epoch, self.loaded, self.shown = 0, None, {"epoch": 0, "place": 0}

    def __iter__(self):
        same = self.loaded is not None and self.loaded["epoch"] == self.epoch
        self.shown = {"epoch": self.epoch, "place": self.loaded["place"] if same else 0}
        for number in self.numbers[self.shown["place"] :]:
            self.shown["place"] += 1
            yield number

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return self.shown

    def load_state_dict(self, state):
        self.loaded = state


# The whole stream on every rank


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_ranks_take_equally_many_steps_and_every_example_once(grouping, world_size):
    found = [without_repeats(stream) for stream in on_ranks(world_size, grouping=grouping)]
    assert len({len(batches) for batches, _ in found}) == 1
    assert sorted(flat([batch for _, own in found for batch in own])) == NUMBERS
    for batches, _ in found:
        for batch in batches:
            widest = 60 if isinstance(batch[0], list) else max(map(length_of, batch))
            assert len(batch) * widest <= 120


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(1, 5), st.integers(5, 30))
def test_ranks_see_every_example_of_any_stream_once(lengths, world_size, buffer_size):
    options = {"length_of": lengths.__getitem__, "buffer_size": buffer_size}
    found = [without_repeats(stream) for stream in on_ranks(world_size, range(len(lengths)), **options)]
    assert len({len(batches) for batches, _ in found}) == 1
    assert sorted(flat([batch for _, own in found for batch in own])) == list(range(len(lengths)))


def test_a_buffer_is_divided_as_an_epoch_is():
    lengths = [3, 3, 3, 3, 3, 3, 3]
    expected = bw.plan_batches(lengths, bw.MaxItems(2), world_size=2, grouping=bw.InOrder())
    # Batches of two; the fourth, [6], would stand alone: two ranks share 4 batches in 2 steps.
    assert list(expected) == [[0, 1], [2, 3], [4, 5], [6]]
    options = {"length_of": lambda _: 3, "budget": bw.MaxItems(2), "grouping": bw.InOrder()}
    found = [list(stream) for stream in on_ranks(2, range(7), buffer_size=7, **options)]
    assert found == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_the_last_batch_of_a_buffer_is_split_or_dropped():
    options = {"length_of": lambda _: 1, "budget": bw.MaxItems(2), "grouping": bw.InOrder(), "buffer_size": 6}
    split = [list(stream) for stream in on_ranks(2, range(7), **options)]
    # A buffer of 6 has three batches: the third is cut in two. The second buffer has one example for two ranks.
    assert split == [[[0, 1], [4], [6]], [[2, 3], [5], [6]]]
    dropped = [list(stream) for stream in on_ranks(2, range(7), remainder="drop", **options)]
    assert dropped == [[[0, 1]], [[2, 3]]]


def test_a_rank_without_an_example_of_its_own_knows_that_it_repeats():
    streams = on_ranks(2, range(7), length_of=lambda _: 1, budget=bw.MaxItems(2), buffer_size=6)
    assert [[stream.num_repeated for _ in stream] for stream in streams] == [[0, 0, 1]] * 2


def test_steps_of_ranks_have_similar_costs_as_those_of_a_plan():
    streams = on_ranks(4, grouping=bw.WindowSort(2), buffer_size=103)
    plan = bw.plan_batches(LENGTHS, bw.MaxTokens(120), world_size=4, grouping=bw.WindowSort(2))
    assert [list(stream) for stream in streams] == [list(plan)[rank::4] for rank in range(4)]


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("new_source", [lambda: NUMBERS, Stateful, Told], ids=["plain", "stateful", "told"])
@pytest.mark.parametrize("num", [0, 1, 4, 7])
def test_a_pass_goes_on_exactly_on_another_number_of_ranks(before, after, new_source, num):
    streams = [make(new_source(), rank=rank, world_size=before) for rank in range(before)]
    taken = [list(islice(stream, num)) for stream in streams]
    states = [json.loads(json.dumps(stream.state_dict())) for stream in streams]
    assert all(state == states[0] for state in states)  # no rank in it
    rest = []
    for rank in range(after):
        stream = make(new_source(), rank=rank, world_size=after)
        stream.load_state_dict(states[0])
        rest.append(without_repeats(stream))
        assert stream.epoch == 1
    assert len({len(batches) for batches, _ in rest}) == 1
    own = [batch for _, batches in rest for batch in batches]
    assert sorted(flat(flat_ranks(taken) + own)) == NUMBERS
    if before == after:
        assert [a + b for a, (b, _) in zip(taken, rest, strict=True)] == [list(stream) for stream in on_ranks(before)]


def flat_ranks(lists):
    return [batch for batches in lists for batch in batches]


def test_the_next_pass_follows_the_ranks_of_today():
    begun, resumed = make(world_size=3), make(world_size=2)
    next(iter(begun))
    resumed.load_state_dict(begun.state_dict())
    assert resumed.settings.balance_over == 3
    list(resumed)
    assert resumed.settings.balance_over == 2
    fresh = make(world_size=2)
    list(fresh)
    assert list(resumed) == list(fresh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank must be below world_size"),
        ({"world_size": 31}, "buffer_size must be at least world_size, 31"),
        ({"remainder": "keep"}, "remainder must be"),
        ({"sharded": "yes"}, "sharded"),
        ({"world_size": 2, "sharded": True}, "sharded=True on 2 ranks needs agree"),
        ({"world_size": 2, "agree": all}, "for sharded=True; got agree="),
        ({"world_size": 2, "sharded": True, "agree": 3}, "agree must be a function"),
    ],
)
def test_anything_else_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        make(**options)


def test_the_repr_names_the_rank():
    assert repr(make(rank=1, world_size=2)).endswith("epoch 0, rank 1 of 2)")


# A stream that is divided beforehand


def run_threads(functions):
    """Run a function per rank at the same time, and return what they return or raise."""
    found = [None] * len(functions)

    def run(place, function):
        try:
            found[place] = function()
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    return found


class Meeting:
    """Ranks that agree, as threads."""

    def __init__(self, world_size):
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.answers = [True] * world_size

    def agree_of(self, rank):
        def agree(has_batch):
            self.answers[rank] = has_batch
            self.barrier.wait()
            found = all(self.answers)
            self.barrier.wait()
            return found

        return agree


def sharded(meeting, rank, source, **options):
    world_size = len(meeting.answers)
    return make(source, rank=rank, world_size=world_size, sharded=True, agree=meeting.agree_of(rank), **options)


def test_ranks_with_streams_of_their_own_stop_at_the_shortest():
    meeting, shards = Meeting(2), [NUMBERS[:70], NUMBERS[70:]]
    alone = [list(make(shard)) for shard in shards]
    least = min(map(len, alone))
    assert least < max(map(len, alone))
    found = run_threads([lambda r=r: list(sharded(meeting, r, shards[r])) for r in range(2)])
    assert found == [batches[:least] for batches in alone]


def test_a_pass_that_was_cut_short_begins_again_at_its_start():
    meeting, shards = Meeting(2), [NUMBERS[:70], NUMBERS[70:]]

    def two_passes(rank):
        stream = sharded(meeting, rank, shards[rank], shuffle=False)
        return list(stream), list(stream), stream.epoch

    for first, second, epoch in run_threads([lambda r=r: two_passes(r) for r in range(2)]):
        assert first == second
        assert epoch == 2


def test_a_source_that_would_go_on_in_the_middle_is_refused_after_a_pass_that_was_cut_short():
    meeting, shards = Meeting(2), [Stateful(NUMBERS[:70]), Stateful(NUMBERS[70:])]

    def two_passes(rank):
        stream = sharded(meeting, rank, shards[rank])
        list(stream)
        return len(list(stream))

    found = run_threads([lambda r=r: two_passes(r) for r in range(2)])
    assert isinstance(found[0], ArgumentError)
    assert "stands in the middle of a pass" in str(found[0])
    assert found[1] == 0  # nobody waits for a rank that is gone


def test_an_error_on_one_rank_ends_the_pass_of_the_others():
    meeting = Meeting(2)

    def failing(number):
        return 0 if number == 40 else 1

    lengths = [failing, lambda _: 1]
    found = run_threads(
        [lambda r=r: list(sharded(meeting, r, NUMBERS, length_of=lengths[r], buffer_size=30)) for r in range(2)]
    )
    assert isinstance(found[0], LengthsError)
    assert sorted(flat(found[1])) == NUMBERS[:30]


def test_the_state_of_a_shard_belongs_to_its_rank():
    meeting, shards = Meeting(2), [NUMBERS[:50], NUMBERS[50:]]
    whole = run_threads([lambda r=r: list(sharded(meeting, r, shards[r])) for r in range(2)])

    def some(rank):
        stream = sharded(meeting, rank, shards[rank])
        return list(islice(stream, 3)), json.loads(json.dumps(stream.state_dict()))

    begun = run_threads([lambda r=r: some(r) for r in range(2)])
    assert [state["shard"] for _, state in begun] == [[0, 2], [1, 2]]

    def rest(rank):
        stream = sharded(meeting, rank, shards[rank])
        stream.load_state_dict(begun[rank][1])
        return begun[rank][0] + list(stream)

    assert run_threads([lambda r=r: rest(r) for r in range(2)]) == whole
    for other in (sharded(meeting, 1, shards[0]), make(world_size=2), make()):
        with pytest.raises(StateMismatchError, match="shard"):
            other.load_state_dict(begun[0][1])


def test_one_rank_with_a_sharded_stream_needs_no_agreement():
    assert list(make(sharded=True)) == list(make())


# Workers that collate


def summed(batch):
    return [sum(LENGTHS[number] for number in batch), *batch]


def exploding(batch):
    if 40 in batch:
        raise ValueError("forty")
    return summed(batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_collate_in_order_and_the_state_counts_what_was_received(num_workers):
    expected = [summed(batch) for batch in make()]
    for num in (1, 5, 13, len(expected)):
        stream = make()
        loader = stream.loader(collate_fn=summed, num_workers=num_workers)
        received = list(islice(loader, num))
        resumed = make()
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        rest = list(resumed.loader(collate_fn=summed, num_workers=num_workers))
        assert received + rest == expected
        assert resumed.epoch == 1


def test_the_state_is_right_after_every_item_though_workers_run_ahead():
    stream, plain = make(), make()
    for item in stream.loader(collate_fn=summed, num_workers=2):
        assert item == summed(next(iter(plain)))
        assert stream.state_dict() == plain.state_dict()
        assert stream.epoch == 0
    assert stream.epoch == 1
    assert list(plain) == []
    assert stream.state_dict() == plain.state_dict()


@pytest.mark.parametrize(
    "source", [lambda: NUMBERS, lambda: iter(NUMBERS), Stateful], ids=["plain", "once", "stateful"]
)
def test_after_a_break_nothing_that_was_fetched_ahead_is_lost(source):
    expected = [summed(batch) for batch in make()]
    stream = make(source())
    loader = stream.loader(collate_fn=summed, num_workers=2)
    received = list(islice(loader, 3)) + list(islice(loader, 2)) + list(islice(loader, 9))
    received += [summed(batch) for batch in islice(stream, 2)]  # without the loader
    assert received + list(loader) == expected
    assert stream.epoch == 1


def test_batches_that_a_short_pass_fetched_ahead_to_its_end_are_given_after_a_break():
    stream = make(NUMBERS[:10])
    expected = [summed(batch) for batch in make(NUMBERS[:10])]
    loader = stream.loader(collate_fn=summed, num_workers=2)
    assert 1 < len(expected) <= 4  # all fetched ahead
    received = list(islice(loader, 1))
    assert stream.epoch == 0
    assert received + list(loader) == expected
    assert stream.epoch == 1


def test_an_error_of_a_worker_leaves_the_state_where_the_loop_stands():
    stream = make()
    received, expected = [], [summed(batch) for batch in make()]
    for _ in range(2):
        with pytest.raises(ValueError, match="forty"):
            received.extend(stream.loader(collate_fn=exploding, num_workers=2))
    assert received == expected[: len(received)]
    received.extend(stream.loader(collate_fn=summed, num_workers=2))
    assert received == expected


def test_an_error_of_a_length_comes_after_a_break_too():
    stream = make(length_of=lambda number: 1 // (number != 60))
    loader = stream.loader(collate_fn=list, num_workers=2)
    with pytest.raises(ZeroDivisionError):
        list(loader)
    with pytest.raises(ZeroDivisionError):
        list(loader)


def test_loading_a_state_ends_a_tracked_loop():
    stream, num = make(), 0
    start = stream.state_dict()
    for _ in stream.loader(collate_fn=summed, num_workers=2):
        num += 1
        if num == 3:
            stream.load_state_dict(start)
    assert num == 3
    assert list(stream) == list(make())


def test_ranks_may_have_workers():
    found = [list(stream.loader(collate_fn=list, num_workers=1)) for stream in on_ranks(2)]
    assert found == [list(stream) for stream in on_ranks(2)]


def test_the_source_may_be_a_loader_with_workers_too():
    source = DataLoader(NUMBERS, batch_size=None, num_workers=2)
    assert list(make(source).loader(collate_fn=list, num_workers=2)) == list(make())


def test_torch_collates_without_a_function():
    items = list(make(budget=bw.MaxItems(4)).loader())
    assert all(isinstance(item, torch.Tensor) for item in items)
    assert sorted(torch.cat(items).tolist()) == NUMBERS


@pytest.mark.parametrize("name", ["batch_size", "shuffle", "in_order", "sampler"])
def test_what_comes_from_the_stream_is_refused_in_its_loader(name):
    with pytest.raises(ArgumentError, match=f"leave {name} out of stream.loader"):
        make().loader(**{name: 1})


def test_a_loader_of_something_else_cannot_be_tracked():
    with pytest.raises(ArgumentError, match="the stream gave no batch"):
        list(make().track([1, 2, 3]))
    with pytest.raises(ArgumentError, match="in_order=False"):
        make().track(DataLoader(NUMBERS, in_order=False))


# Passes


def test_a_source_that_someone_looked_at_is_still_read_from_its_start_on_resume():
    source, expected = Told(), list(make())
    next(iter(source))  # to see what is in it
    stream = make(source)
    taken = list(islice(stream, 2))
    resumed = make(Told())
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert taken + list(resumed) == expected


def test_a_source_that_holds_to_a_state_of_the_pass_is_refused_where_its_start_is_needed():
    stream = make(Told())
    start = stream.state_dict()
    list(islice(stream, 9))
    stream.load_state_dict(stream.state_dict())
    next(iter(stream))
    stream.load_state_dict(start)
    with pytest.raises(ArgumentError, match="must begin at its start"):
        next(iter(stream))


def test_setting_the_pass_begins_it_and_keeps_a_place_in_it():
    stream, plain = make(), make()
    next(iter(stream))
    stream.set_epoch(0)
    assert stream.state_dict()["num_given"] == 1
    stream.set_epoch(1)
    list(plain)
    assert list(stream) == list(plain)
    with pytest.raises(ArgumentError, match="epoch"):
        stream.set_epoch(-1)


@pytest.mark.parametrize("kind", ["plain", "shuffled", "interleaved"])
def test_a_stream_of_datasets_resumes_exactly_though_a_shuffle_buffer_is_not_in_its_state(kind):
    datasets = pytest.importorskip("datasets")

    def new():
        stream = datasets.Dataset.from_dict({"number": NUMBERS}).to_iterable_dataset(num_shards=3)
        if kind == "plain":
            return stream
        stream = stream.shuffle(seed=1, buffer_size=20)
        return stream if kind == "shuffled" else datasets.interleave_datasets([stream.take(50), stream.skip(50)])

    def make_stream():
        return make(new(), length_of=lambda example: LENGTHS[example["number"]])

    full = list(make_stream())
    for num in (13, 7, 2):
        stream, resumed = make_stream(), make_stream()
        taken = list(islice(stream, num))
        resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert taken + list(resumed) == full
        assert (stream.state_dict()["source"] is None) == (kind != "plain" or num == 2)
