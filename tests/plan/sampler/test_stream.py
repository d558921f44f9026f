"""StreamBatcher: the same examples out as in, a bounded buffer, exact resume."""

import copy
import csv
import io
import json
import pickle
import weakref
from collections import Counter
from itertools import count, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import batchwright as bw
from batchwright.errors import ArgumentError, BudgetError, LengthsError, StateMismatchError

torch.set_num_threads(1)
WORDS = ["x" * int(length) for length in np.random.default_rng(0).integers(1, 40, size=95)]
NUMBERS = list(range(95))


def length_of(number):
    return len(WORDS[number])


def make(source=NUMBERS, **options):
    settings = {"length_of": length_of, "budget": bw.MaxTokens(120), "buffer_size": 30, **options}
    return bw.StreamBatcher(source, **settings)


def flat(batches):
    return [example for batch in batches for item in batch for example in (item if isinstance(item, list) else [item])]


class Counted:
    """A source that can be read again and counts what it gave."""

    def __init__(self):
        self.num_given = 0

    def __iter__(self):
        for number in NUMBERS:
            self.num_given += 1
            yield number


class Stateful:
    """A source that goes on from its state; it answers with its own dict, which it changes as it reads."""

    def __init__(self):
        self.place = {"next": 0}
        self.num_given = 0

    def __iter__(self):
        while self.place["next"] < len(NUMBERS):
            self.place["next"] += 1
            self.num_given += 1
            yield NUMBERS[self.place["next"] - 1]
        self.place["next"] = 0

    def state_dict(self):
        return self.place

    def load_state_dict(self, state):
        self.place = state


GROUPINGS = [bw.InOrder(), bw.Sorted(), bw.WindowSort(), bw.WindowSort(1), bw.Buckets(4), bw.Packed(60)]
SOURCES = {"plain": lambda: NUMBERS, "stateful": Stateful, "one-shot": lambda: iter(NUMBERS)}
every_source = pytest.mark.parametrize("new_source", SOURCES.values(), ids=SOURCES.keys())


@pytest.mark.parametrize("buffer_size", [1, 7, 95, 1000, 2**63])
@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
def test_the_same_examples_come_out_as_went_in_and_the_budget_is_kept(grouping, buffer_size):
    batches = list(make(grouping=grouping, buffer_size=buffer_size))
    assert sorted(flat(batches)) == NUMBERS
    for batch in batches:
        widest = 60 if isinstance(batch[0], list) else max(map(length_of, batch))
        assert len(batch) * widest <= 120


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(1, 30), st.integers(0, 40))
def test_resuming_anywhere_gives_the_rest(lengths, buffer_size, num):
    def new():
        numbered = list(enumerate(lengths))
        settings = {"length_of": lambda pair: pair[1], "budget": bw.MaxTokens(100), "buffer_size": buffer_size}
        return bw.StreamBatcher(numbered, **settings)

    full, batcher, resumed = list(new()), new(), new()
    taken = list(islice(batcher, min(num, len(full))))
    resumed.load_state_dict(json.loads(json.dumps(batcher.state_dict())))
    assert taken + list(resumed) == full


def test_two_lengths_an_example_are_padded_separately():
    pairs = [(1, 9), (9, 1), (5, 5), (1, 1)]
    # Alone each pair costs at most 10; (1, 9) and (9, 1) together would cost 2 x 18.
    batches = list(bw.StreamBatcher(pairs, length_of=lambda pair: pair, budget=bw.MaxTokens(20)))
    assert sorted(flat([batches])) == sorted(pairs)
    assert all(len(batch) * np.max(batch, axis=0).sum() <= 20 for batch in batches)


def test_in_order_batches_are_cut_at_the_budget_and_at_the_end_of_a_buffer():
    batcher = bw.StreamBatcher("abcdefg", length_of=len, budget=bw.MaxItems(2), grouping=bw.InOrder(), buffer_size=3)
    assert list(batcher) == [["a", "b"], ["c"], ["d", "e"], ["f"], ["g"]]


def test_no_more_than_a_buffer_is_read_ahead():
    source = Counted()
    num_received = 0
    for batch in make(source):
        num_received += len(batch)
        assert source.num_given - num_received < 30
    assert source.num_given == 95


def test_an_endless_source_is_read_as_far_as_needed():
    batcher = bw.StreamBatcher(count(), length_of=lambda _: 1, budget=bw.MaxItems(4), buffer_size=12)
    assert sorted(flat(islice(batcher, 6))) == list(range(24))


class Example:
    """Something a weak reference can point at."""


def test_examples_of_one_buffer_are_held_and_not_of_two():
    alive = weakref.WeakSet()

    def source():
        for _ in range(50):
            example = Example()
            alive.add(example)
            yield example
            # The 10 of the buffer, the last batch of 2 in the loop below, and this one.
            assert len(alive) <= 13

    for _ in bw.StreamBatcher(source(), length_of=lambda _: 1, budget=bw.MaxItems(2), buffer_size=10):
        pass


def test_a_second_pass_gives_the_same_examples_in_another_order():
    batcher = make()
    first, second = list(batcher), list(batcher)
    assert batcher.epoch == 2
    assert sorted(flat(first)) == sorted(flat(second)) == NUMBERS
    assert flat(first) != flat(second)
    assert list(make()) == first  # and the same seed gives the same passes


def test_buffers_of_equal_lengths_are_shuffled_differently():
    batcher = bw.StreamBatcher(range(40), length_of=lambda _: 1, budget=bw.MaxItems(20), buffer_size=20)
    first, second = list(batcher)
    assert [number - 20 for number in second] != first


def test_without_shuffling_every_pass_is_the_same():
    batcher = make(shuffle=False)
    assert list(batcher) == list(batcher)


def test_another_seed_gives_another_order():
    assert list(make(seed=1)) != list(make(seed=2))


# Breaks, states and resuming.


@every_source
def test_after_a_break_the_loop_goes_on_where_it_was_left(new_source):
    batcher = make(new_source())
    received = []
    for num in (1, 4, 7, 1000):
        received += islice(batcher, num)
    assert received == list(make())


ONE_SHOT = {
    "iterator": lambda: iter(NUMBERS),
    "generator": lambda: (number for number in NUMBERS),
    "map": lambda: map(int, NUMBERS),
    "islice": lambda: islice(NUMBERS, 95),
}


@pytest.mark.parametrize("kind", ONE_SHOT)
def test_a_one_shot_source_gives_one_pass_and_refuses_a_second(kind):
    batcher = make(ONE_SHOT[kind]())
    assert sorted(flat(batcher)) == NUMBERS
    for _ in range(2):
        with pytest.raises(
            ArgumentError, match=r"\w+ can be read only once, and it has been read; pass something that can be"
        ):
            iter(batcher)
    assert batcher.epoch == 1


class Wrapped:
    """A source that hides its generator; like it, it can be read once."""

    def __init__(self):
        self.inside = iter(NUMBERS)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.inside)


class Shared:
    """A source whose every iterator reads on from one place, as with an open file."""

    def __init__(self):
        self.inside = iter(NUMBERS)

    def __iter__(self):
        yield from self.inside


def rows():
    """A reader of the standard library whose __iter__ is written in Python and begins nothing anew."""
    return csv.DictReader(io.StringIO("number\n" + "\n".join(map(str, NUMBERS))))


def length_of_row(row):
    return length_of(int(row["number"]))


def test_a_second_pass_that_gives_nothing_is_refused_whatever_the_source():
    batcher = make(Shared())
    assert sorted(flat(batcher)) == NUMBERS
    with pytest.raises(ArgumentError, match=r"\(Shared\) gave examples in an earlier pass and none in pass 1; pass"):
        list(batcher)


@pytest.mark.parametrize(
    ("source", "length"), [(Wrapped, length_of), (rows, length_of_row)], ids=["hand-written", "csv.DictReader"]
)
def test_what_is_its_own_iterator_is_read_once_and_does_not_go_back_to_a_state(source, length):
    batcher = make(source(), length_of=length)
    received = list(islice(batcher, 2))
    state = batcher.state_dict()
    received += list(islice(batcher, 1))
    with pytest.raises(
        ArgumentError, match=r"(Wrapped|DictReader) can be read only once, and it has been read; pass some"
    ):
        batcher.load_state_dict(state)
    received += list(batcher)  # the pass under way goes on
    assert len(flat(received)) == 95
    with pytest.raises(ArgumentError, match="can be read only once"):
        list(batcher)


def test_a_reader_that_cannot_begin_again_is_refused_after_an_error():
    def fails(row):
        return length_of_row(row) if row["number"] != "5" else 1 // 0

    batcher = make(rows(), length_of=fails)
    with pytest.raises(ZeroDivisionError):
        list(batcher)
    with pytest.raises(ArgumentError, match="DictReader can be read only once, and it has been read"):
        list(batcher)


def shared_function():
    reader = rows()
    return lambda: reader


@pytest.mark.parametrize(
    ("source", "length"), [(Shared, length_of), (shared_function, length_of_row)], ids=["object", "function"]
)
def test_a_pass_that_is_read_again_and_begins_elsewhere_is_refused(source, length):
    batcher = make(source(), length_of=length)
    list(islice(batcher, 2))
    batcher.load_state_dict(batcher.state_dict())
    with pytest.raises(
        ArgumentError,
        match=r"began pass 0 with another example before: .*, so examples would be lost; pa",
    ):
        list(batcher)


EXAMPLES = {
    "text": "a b",
    "row": {"text": "a", "ids": [1, 2], "score": float("nan"), "none": None},
    "array": {"ids": np.arange(3), "mask": np.ones(3, dtype=bool)},
    "tensor": (torch.arange(3), torch.ones(2, dtype=torch.bfloat16)),
    "bytes": b"a b",
}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_pass_that_is_read_again_and_begins_with_an_equal_example_goes_on(kind):
    def source():
        yield copy.deepcopy(EXAMPLES[kind])
        yield from range(9)

    batcher = make(source, length_of=lambda _: 1, budget=bw.MaxItems(2), shuffle=False, grouping=bw.InOrder())
    first = list(islice(batcher, 1))
    batcher.load_state_dict(batcher.state_dict())
    assert [len(batch) for batch in first + list(batcher)] == [2] * 5


def test_a_source_with_a_state_is_taken_up_again_after_an_error_in_its_first_buffer():
    broken = [True]

    def sometimes(number):
        if number == 5 and broken[0]:
            raise OSError("no answer")
        return length_of(number)

    batcher = make(Stateful(), length_of=sometimes)
    with pytest.raises(OSError, match="no answer"):
        list(batcher)
    broken[0] = False
    assert list(batcher) == list(make())


@pytest.mark.parametrize("source", [lambda: iter(NUMBERS), lambda: NUMBERS, Counted], ids=range(3))
def test_what_begins_anew_has_many_passes(source):
    if source is Counted:
        source = lambda: Counted()  # noqa: E731 - a class itself is refused
    batcher, listed = make(source), make()
    for _ in range(3):
        assert list(batcher) == list(listed)


def test_a_function_as_source_resumes_by_reading_again():
    batcher = make(lambda: iter(NUMBERS))
    list(islice(batcher, 9))
    resumed = make(lambda: iter(NUMBERS))
    resumed.load_state_dict(batcher.state_dict())
    assert list(resumed) == list(batcher)


def test_a_generator_that_was_read_cannot_go_back_to_a_state():
    batcher = make(number for number in NUMBERS)
    first = list(islice(batcher, 1))
    state = batcher.state_dict()
    first += list(islice(batcher, 3))
    with pytest.raises(ArgumentError, match="generator can be read only once, and it has been read"):
        batcher.load_state_dict(state)
    assert first + list(batcher) == list(make())  # the pass under way goes on


def test_a_failed_pass_over_a_generator_is_not_taken_up_where_examples_would_be_lost():
    def fails(number):
        return length_of(number) if number != 50 else 1 // 0

    batcher = make((number for number in NUMBERS), length_of=fails)
    with pytest.raises(ZeroDivisionError):
        list(batcher)
    with pytest.raises(ArgumentError, match="can be read only once"):
        list(batcher)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda: 3, "the function given as source must return something iterable, got int"),
        (lambda: None, "the function given as source must return something iterable, got NoneType"),
    ],
    ids=["int", "None"],
)
def test_a_function_must_return_something_iterable(source, words):
    with pytest.raises(ArgumentError, match=words):
        list(make(source))


def test_a_stream_has_no_length_and_is_not_false():
    with pytest.raises(TypeError, match="the number of batches of a stream is not known before it is read"):
        len(make())
    assert make()


def test_a_torch_loader_hands_the_batches_on():
    stream = make()
    assert list(DataLoader(stream, batch_size=None)) == list(make())
    loader = DataLoader(stream, batch_size=None, collate_fn=tuple)
    second = make()
    second.load_state_dict(stream.state_dict())
    assert [list(batch) for batch in loader] == list(second)
    assert stream.epoch == 2


def test_the_state_is_exact_under_a_torch_loader():
    stream, full = make(), list(make())
    received = list(islice(DataLoader(stream, batch_size=None), 5))
    resumed = make()
    resumed.load_state_dict(stream.state_dict())
    assert received + list(resumed) == full


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_torch_loader_with_workers_is_refused_since_each_would_read_all(num_workers):
    loader = DataLoader(make(), batch_size=None, num_workers=num_workers)
    with pytest.raises(ArgumentError, match="would read the whole source in every worker; give the workers to the"):
        list(loader)


class Sharded(IterableDataset):
    """A data set that divides the examples over the workers by itself, and batches inside each."""

    def __iter__(self):
        info = get_worker_info()
        return iter(make(NUMBERS[info.id :: info.num_workers]))


def test_a_stream_inside_a_worker_that_has_its_own_shard_is_fine():
    loader = DataLoader(Sharded(), batch_size=None, num_workers=2)
    assert sorted(flat(loader)) == NUMBERS


@every_source
def test_a_state_resumes_in_the_middle_and_at_the_end_of_a_buffer_and_of_the_stream(new_source):
    full = list(make())
    for num in range(len(full) + 1):
        batcher = make(new_source())
        assert list(islice(batcher, num)) == full[:num]
        resumed = make(new_source())
        resumed.load_state_dict(json.loads(json.dumps(batcher.state_dict())))
        assert list(resumed) == full[num:]
        assert resumed.epoch == 1


@pytest.mark.parametrize("new_source", [Counted, Stateful])
def test_a_state_after_the_end_begins_the_next_pass(new_source):
    batcher = make(new_source())
    list(batcher)
    resumed = make(new_source())
    resumed.load_state_dict(batcher.state_dict())
    assert resumed.epoch == 1
    assert list(resumed) == list(batcher)
    assert sorted(flat(list(resumed))) == NUMBERS


@pytest.mark.parametrize("new_source", [Counted, Stateful])
def test_a_state_of_the_second_pass_resumes_in_the_second_pass(new_source):
    batcher, expected = make(new_source()), make()
    list(batcher), list(expected)
    taken = list(islice(batcher, 5))
    resumed = make(new_source())
    resumed.load_state_dict(batcher.state_dict())
    assert taken + list(resumed) == list(expected)


def test_a_source_with_a_state_is_not_read_again_from_its_start():
    batcher = make(Stateful())
    num = len(list(batcher)) - 1
    list(islice(batcher, num))
    resumed = make(Stateful())
    resumed.load_state_dict(batcher.state_dict())
    list(resumed)
    assert resumed.source.num_given == 95 % 30  # the last buffer alone


class Sticky:
    """A source that begins at the state it was given in every pass, until it is told of another one."""

    def __init__(self):
        self.epoch, self.place, self.loaded = 0, {"epoch": 0, "next": 0}, None

    def __iter__(self):
        same = self.loaded is not None and self.loaded["epoch"] == self.epoch
        self.place = {"epoch": self.epoch, "next": self.loaded["next"] if same else 0}
        for number in NUMBERS[self.place["next"] :]:
            self.place["next"] += 1
            yield number

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return self.place

    def load_state_dict(self, state):
        self.loaded = state


@pytest.mark.parametrize("num_passes", [0, 1])
@pytest.mark.parametrize("num", [0, 2, 14])
def test_a_source_that_is_told_the_pass_resumes_and_begins_the_next_from_its_start(num_passes, num):
    batcher, expected, resumed = make(Sticky()), make(), make(Sticky())
    for _ in range(num_passes):
        assert list(batcher) == list(expected)
    received = list(islice(batcher, num))
    resumed.load_state_dict(json.loads(json.dumps(batcher.state_dict())))
    assert received + list(resumed) == list(expected)
    assert list(resumed) == list(expected)


@pytest.mark.parametrize("new_source", [Counted, Stateful, Sticky])
def test_a_pass_can_be_saved_and_resumed_after_every_batch(new_source):
    full, received = list(make()), []
    batcher = make(new_source())
    for _ in full:
        received += islice(batcher, 1)
        state = batcher.state_dict()
        batcher = make(new_source())
        batcher.load_state_dict(state)
    assert (received, list(batcher)) == (full, [])


def test_a_batcher_goes_back_to_a_state_of_its_own():
    batcher = make(Stateful())
    list(islice(batcher, 4))
    state = batcher.state_dict()
    rest = list(batcher)
    for _ in range(2):
        batcher.load_state_dict(state)
        assert list(batcher) == rest


def test_loading_a_state_ends_the_loop_it_is_called_in():
    batcher = make()
    start = batcher.state_dict()
    for num, _ in enumerate(batcher):
        if num == 3:
            batcher.load_state_dict(start)
    assert num == 3
    assert list(batcher) == list(make())


def test_a_state_can_be_loaded_between_iter_and_the_first_batch():
    batcher = make()
    iter(batcher)
    batcher.load_state_dict(batcher.state_dict())
    assert list(batcher) == list(make())


def test_the_state_is_small_and_the_dict_of_the_caller_stays_as_it_was():
    batcher, resumed = make(Stateful()), make(Stateful())
    list(islice(batcher, 9))
    state = batcher.state_dict()
    text = json.dumps(state)
    resumed.load_state_dict(state)
    list(resumed)
    assert json.dumps(state) == text
    assert len(text) < 600


def test_a_pickled_batcher_goes_on_where_the_original_stands():
    batcher = make()
    list(islice(batcher, 5))
    copy = pickle.loads(pickle.dumps(batcher))
    assert list(copy) == list(batcher)


def test_a_failed_pass_can_be_taken_up_again():
    broken = [True]

    def sometimes(number):
        if number == 50 and broken[0]:
            raise OSError("no answer")
        return length_of(number)

    batcher = make(length_of=sometimes)
    received = []
    with pytest.raises(OSError, match="no answer"):
        received.extend(iter(batcher))
    broken[0] = False
    assert received + list(batcher) == list(make())


OTHER = {
    "budget": ({"budget": bw.MaxTokens(121)}, r"'MaxTokens\(120\)'", r"'MaxTokens\(121\)'"),
    "seed": ({"seed": 1}, "0", "1"),
    "buffer_size": ({"buffer_size": 31}, "30", "31"),
    "grouping": ({"grouping": bw.Sorted()}, "'WindowSort.*'", r"'Sorted\(\)'"),
    "shuffle": ({"shuffle": False}, "True", "False"),
    "oversize": ({"oversize": "drop"}, "'error'", "'drop'"),
}


@pytest.mark.parametrize("field", OTHER)
def test_a_state_of_something_else_is_refused_naming_both_values(field):
    options, saved, mine = OTHER[field]
    batcher = make(**options)
    with pytest.raises(StateMismatchError, match=f"saved with {field} = {saved}.*, here it is {mine}"):
        batcher.load_state_dict(make().state_dict())


@pytest.mark.parametrize("change", [{"version": 3}, {"seed": 5}, {"num_given": -1}, {"buffer": None}, {"epoch": "0"}])
def test_a_refused_state_leaves_the_batcher_as_it_was(change):
    batcher = make()
    received = list(islice(batcher, 4))
    with pytest.raises(StateMismatchError):
        batcher.load_state_dict({**make().state_dict(), **change})
    assert received + list(batcher) == list(make())


@pytest.mark.parametrize("change", [{"num_given": 50}, {"num_read": 95, "num_given": 1}, {"num_read": 96}])
def test_a_state_beyond_what_the_source_gives_is_refused(change):
    batcher = make()
    batcher.load_state_dict({**make().state_dict(), **change})
    with pytest.raises(StateMismatchError, match="give the same source, from its start"):
        list(batcher)


def test_a_state_of_a_stateful_source_needs_one():
    batcher = make(Stateful())
    next(iter(batcher))
    with pytest.raises(StateMismatchError, match="list has no load_state_dict; give the same source"):
        make().load_state_dict(batcher.state_dict())


# Loaders as sources.


def test_a_batcher_that_is_dropped_drops_the_pass_under_way():
    # Without waiting for the garbage collector: it is slow to end the workers of a loader.
    alive = weakref.WeakSet()

    def source():
        for _ in range(20):
            example = Example()
            alive.add(example)
            yield example

    batcher = bw.StreamBatcher(source(), length_of=lambda _: 1, budget=bw.MaxItems(2))
    next(iter(batcher))
    assert alive
    del batcher
    assert not alive


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_without_batches_is_a_source(num_workers):
    batcher = make(DataLoader(NUMBERS, batch_size=None, num_workers=num_workers))
    received = list(islice(batcher, 5))
    resumed = make(DataLoader(NUMBERS, batch_size=None, num_workers=num_workers))
    resumed.load_state_dict(batcher.state_dict())
    assert received + list(resumed) == list(make())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 on newer torch
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num", [5, 12])
def test_a_stateful_loader_is_a_source_that_goes_on(num_workers, num):
    def new():
        return make(StatefulDataLoader(NUMBERS, batch_size=None, num_workers=num_workers))

    batcher, expected, resumed = new(), make(), new()
    received = list(islice(batcher, num))
    resumed.load_state_dict(batcher.state_dict())
    assert received + list(resumed) == list(expected)
    assert list(resumed) == list(expected)


# Lengths that do not fit, and wrong arguments.


def test_an_oversize_example_is_refused_naming_its_buffer():
    with pytest.raises(BudgetError, match=r"buffer that begins at example 2: example 1 of length 9 .* over MaxTokens"):
        list(bw.StreamBatcher([1, 2, 3, 9], length_of=int, budget=bw.MaxTokens(8), buffer_size=2))


@pytest.mark.parametrize(("oversize", "kept"), [("alone", [1, 2, 3, 8, 9]), ("drop", [1, 2, 3, 8])])
@pytest.mark.parametrize("buffer_size", [1, 2, 10])
def test_oversize_examples_are_alone_or_dropped_though_they_fill_a_buffer(oversize, kept, buffer_size):
    options = {"budget": bw.MaxTokens(8), "buffer_size": buffer_size, "oversize": oversize}
    batches = list(bw.StreamBatcher([1, 9, 2, 3, 8], length_of=int, **options))
    assert sorted(flat(batches)) == kept
    assert ([9] in batches) == (oversize == "alone")


@pytest.mark.parametrize(
    ("length", "message"), [(0, "1 or more"), (1.5, "integers"), (None, "integers"), ("3", "integers")]
)
def test_a_length_of_zero_or_of_no_whole_number_is_refused_naming_the_buffer(length, message):
    with pytest.raises(LengthsError, match=f"in the buffer that begins at example 2: .*{message}"):
        list(bw.StreamBatcher([1, 1, 1, length], length_of=lambda x: x, budget=bw.MaxItems(2), buffer_size=2))


def test_an_error_of_length_of_reaches_the_caller_after_the_batches_before_it():
    batcher = bw.StreamBatcher(["a", "b", 3], length_of=len, budget=bw.MaxItems(2), buffer_size=2)
    iterator = iter(batcher)
    assert Counter(next(iterator)) == Counter("ab")
    with pytest.raises(TypeError, match="has no len"):
        next(iterator)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": 3}, "source must be iterable, or a function that returns something iterable, got int"),
        ({"source": list}, "got the class list"),
        ({"source": None}, "got NoneType"),
        ({"length_of": 3}, "length_of must be a function"),
        ({"buffer_size": 0}, "buffer_size must be a whole number of 1 or more"),
        ({"budget": 64}, "write MaxItems"),
        ({"grouping": bw.Sorted}, r"write Sorted\(\)"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        make(**options)


def test_an_empty_source_gives_nothing():
    assert list(make([])) == []


def test_truncation_is_refused_since_nothing_could_say_how_far():
    with pytest.raises(ArgumentError, match="a stream cannot truncate"):
        bw.StreamBatcher(["a"], length_of=len, budget=bw.MaxTokens(4), oversize="truncate")
