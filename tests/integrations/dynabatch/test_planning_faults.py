"""What dynabatch gets wrong in planning and this sampler does not; one test a finding."""

import math

import numpy as np
import pytest

from batchwright.errors import ArgumentError, LengthsError
from batchwright.integrations.dynabatch import DynaBatchSampler, _longest_first, dynabatch_sampler
from batchwright.integrations.dynabatch._longest_first import relative_memory

LENGTHS = np.clip(np.random.default_rng(0).lognormal(np.log(24), 0.8, 4000), 1, 512).astype(int)


def make(lengths=LENGTHS, batch_size=32, **options):
    return dynabatch_sampler(range(len(lengths)), None, batch_size, token_lengths=lengths, **options)


def sizes(sampler):
    return [len(batch) for batch in sampler.batches]


def longest(sampler, lengths=LENGTHS):
    return [int(np.asarray(lengths)[batch].max()) for batch in sampler.batches]


def test_ddp_ranks_share_the_batches_and_steps_are_balanced():
    ranks = [make(shuffle=True, max_batch_range=8.0, rank=rank, world_size=4) for rank in range(4)]
    taken = [list(rank) for rank in ranks]
    assert sorted(index for batches in taken for batch in batches for index in batch) == list(range(4000))
    assert len({len(batches) for batches in taken}) == 1
    # Ranks wait for the slowest of a step; its batches are neighbours in cost, as the order for one rank's are not.
    single = make(shuffle=True, max_batch_range=8.0)
    assert ranks[0].report().straggler_waste < 0.6 * single.plan.report(world_size=4).straggler_waste


def test_resume_continues_in_the_middle_of_an_epoch():
    sampler = make(shuffle=True)
    list(sampler)  # the first epoch
    iterator = iter(sampler)
    seen = [next(iterator) for _ in range(9)]
    other = make(shuffle=True)
    other.load_state_dict(sampler.state_dict())
    rest = list(other)
    assert sorted(index for batch in seen + rest for index in batch) == list(range(4000))
    assert rest == list(iterator)


def test_epochs_bring_new_neighbours_among_equal_lengths_and_keep_their_sizes():
    sampler = make(shuffle=True)
    first, second = (list(sampler) for _ in range(2))
    assert sorted(map(len, first)) == sorted(map(len, second))
    # Only batches of lengths that nothing else has can come back whole.
    again = {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}
    assert len(again) < len(first) / 4


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_shuffle_keep_first_n_holds_in_every_epoch(epoch):
    sampler = make(shuffle=True, shuffle_keep_first_n=3)
    sampler.set_epoch(epoch)
    assert longest(sampler)[:3] == longest(make())[:3]
    assert longest(sampler)[3:] != longest(make())[3:]


def test_iterating_twice_gives_every_iterator_all_examples():
    sampler = make(shuffle=True)
    first = iter(sampler)
    begun = [next(first) for _ in range(20)]
    second = list(sampler)
    assert sorted(index for batch in begun + list(first) for index in batch) == list(range(4000))
    assert sorted(index for batch in second for index in batch) == list(range(4000))


def test_determinism_does_not_depend_on_how_often_iter_was_called():
    calm, nervous = make(shuffle=True), make(shuffle=True)
    for _ in range(5):
        next(iter(nervous))
    assert list(calm) == list(nervous)
    assert list(calm) == list(nervous)


@pytest.mark.parametrize("range_", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("options", [{}, {"friendly_batch_size": True}, {"task": "train"}, {"smooth_batches": False}])
def test_the_memory_promise_survives_the_post_passes(range_, options):
    sampler = make(max_batch_range=range_, **options)
    task = options.get("task", "generate")
    predicted = relative_memory(sizes(sampler), longest(sampler), 32, longest(sampler)[0], task=task)
    grown = np.array(sizes(sampler)) > 32
    assert grown.sum() > 10
    assert predicted[grown].max() <= 0.9
    assert predicted.max() == 1.0  # the first batch


def test_a_size_is_never_chosen_above_one_that_was_rejected():
    lengths = longest(make(smooth_batches=False))
    for length in lengths:
        predicted = relative_memory(np.arange(1, 257), length, 32, lengths[0], task="generate")
        assert (np.diff(predicted) > 0).all()


def test_words_and_characters_change_nothing():
    rng = np.random.default_rng(1)
    plain = make(max_batch_range=8.0)
    words, chars = rng.integers(0, 900, 4000), rng.integers(0, 9000, 4000)
    assert list(make(max_batch_range=8.0, word_lengths=words, char_lengths=chars)) == list(plain)


@pytest.mark.parametrize("range_", [2.0, 3.0, 4.0, 8.0])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_a_small_batch_size_grows_at_any_range(range_, batch_size):
    sampler = make(LENGTHS[:600], batch_size, max_batch_range=range_, task="train", keep_batch_size_even=False)
    assert max(sizes(sampler)) == min(int(batch_size * range_), sampler.max_batch_size)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 13])
def test_the_first_batch_has_exactly_batch_size_items_though_odd(batch_size):
    assert sizes(make(batch_size=batch_size))[0] == batch_size
    assert sizes(make(batch_size=batch_size, friendly_batch_size=True))[0] == batch_size
    assert sizes(make(LENGTHS[:7], 7)) == [7]


def test_a_tiny_set_is_one_batch():
    assert sizes(make([5, 4, 3, 2, 1], 8)) == [5]


def test_empty_input_is_refused_in_a_sentence():
    with pytest.raises(LengthsError, match="nothing to batch"):
        make([])
    with pytest.raises(LengthsError, match="nothing to measure"):
        dynabatch_sampler([], str.split, 4)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True, None])
def test_an_invalid_batch_size_is_refused_at_once(batch_size):
    with pytest.raises(ArgumentError, match="batch_size must be a whole number of 1 or more"):
        make(batch_size=batch_size)


@pytest.mark.parametrize("lengths", [[3, -1], [3, 0], [3.0, math.nan], [[[3]]], ["a", "b"]])
def test_invalid_lengths_are_refused(lengths):
    with pytest.raises(LengthsError):
        DynaBatchSampler(lengths, None, None, 2)


@pytest.mark.parametrize("name", ["threshold", "max_batch_range", "smooth_batches_max_diff"])
@pytest.mark.parametrize("value", [math.nan, -0.1, math.inf, "0.9", None])
def test_invalid_numbers_are_refused_by_name(name, value):
    with pytest.raises(ArgumentError, match=name):
        make(**{name: value})


def test_lists_of_lengths_must_match():
    with pytest.raises(LengthsError, match="token_lengths must have one number per text, 3, got 2"):
        dynabatch_sampler(["a"] * 3, None, 2, token_lengths=[1, 2])
    with pytest.raises(LengthsError, match="word_lengths must have one number per example, 2, got 3"):
        DynaBatchSampler([1, 2], [1, 2, 3], None, 2)
    with pytest.raises(LengthsError, match="char_lengths must be whole numbers"):
        DynaBatchSampler([1, 2], [1, 2], [0.5, 1], 2)
    with pytest.raises(ArgumentError, match="need token_lengths"):
        dynabatch_sampler(["a"], None, 2, word_lengths=[1])


def test_sequences_above_the_limit_are_warned_about():
    with pytest.warns(UserWarning, match="2 of the given token_lengths are over max_input_token_length=512"):
        dynabatch_sampler(["a"] * 3, None, 2, token_lengths=[5000, 600, 512])


def test_the_length_of_labels_can_be_an_axis():
    # Two short sources with long targets: judged only by the source, they would share a batch with many others.
    source, target = np.full(90, 10), np.full(90, 10)
    target[:2] = 500
    pairs = make(np.stack([source, target], axis=1), 2, max_batch_range=8.0, task="train")
    assert sorted(pairs.batches[0]) == [0, 1]
    assert make(source, 2, max_batch_range=8.0, task="train").batches[0] == [0, 1]
    assert max(sizes(pairs)) == 16  # the others still grow
    assert max(sizes(make(source, 2, max_batch_range=8.0, task="train"))) == 2


def test_images_and_audio_need_one_length_alone():
    frames = np.random.default_rng(0).integers(100, 480, 50)
    assert sorted(index for batch in make(frames, 4) for index in batch) == list(range(50))


class LazyColumn:
    """A column that reads its storage at every access, as those of data sets do."""

    def __init__(self, values):
        self.values, self.reads = values, 0

    def __len__(self):
        return len(self.values)

    def __getitem__(self, key):
        self.reads += 1
        return self.values[key]


def test_a_lazy_column_is_read_once():
    column = LazyColumn(LENGTHS.tolist())
    sampler = DynaBatchSampler(column, column, column, 32)
    assert column.reads == 3  # once as tokens, as words and as characters
    assert len(sampler.batches[0]) == 32


def test_planning_asks_for_few_predictions_however_many_batches(monkeypatch):
    calls = []

    def counted(num_items, *args, **options):
        calls.append(np.size(num_items))
        return relative_memory(num_items, *args, **options)

    monkeypatch.setattr(_longest_first, "relative_memory", counted)
    for num in (400, 4000, 40_000):
        calls.clear()
        make(np.resize(LENGTHS, num), max_batch_range=8.0)
        # Sizes from 1 to 256 are bisected in 8 steps, for the at most 512 distinct lengths at once.
        assert len(calls) <= 9
        assert max(calls) <= 512
