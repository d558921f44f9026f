"""What dynabatch gets wrong in planning and this sampler does not; one test a finding."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

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


@pytest.mark.parametrize("lengths", [[3, -1], [[[3]]], ["a", "b"]])
def test_invalid_lengths_are_refused(lengths):
    with pytest.raises(LengthsError):
        DynaBatchSampler(lengths, None, None, 2)


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ([3.0, math.nan], "got nan at example 1"),
        ([3.0, math.inf], "got inf at example 1"),
        (np.array([[3, 4], [2.5, 1]]), r"got \[2.5, 1.0\] at example 1"),
        ([3, None], "got nan at example 1"),
        ([3, "many"], "got values? of type"),
    ],
)
def test_lengths_that_are_not_whole_are_refused_with_the_reason(lengths, reason):
    with pytest.raises(LengthsError, match=f"token_lengths must be whole numbers, {reason}"):
        DynaBatchSampler(np.array(lengths, dtype=object) if "many" in lengths else lengths, None, None, 2)


@pytest.mark.parametrize(
    "lengths",
    [
        [9.0, 2.0, 7.0, 1.0],
        np.array([9, 2, 7, 1], dtype=np.float32),
        [np.float64(9), np.float32(2), np.float16(7), np.float64(1)],
        pd.Series([9.0, 2.0, 7.0, 1.0], index=[3, 1, 2, 0]),
        pd.DataFrame({"n": [9.0, 2.0, 7.0, 1.0]})["n"],
        pd.Series([9, 2, 7, 1], dtype="Int64"),
        np.array([9, 2, 7, 1], dtype=object),
        torch.tensor([9.0, 2.0, 7.0, 1.0]),
    ],
    ids=["floats", "float32", "numpy floats", "series", "column", "nullable", "objects", "tensor"],
)
def test_lengths_may_be_floats_that_are_whole(lengths):
    assert list(make(lengths, 2)) == list(make([9, 2, 7, 1], 2))


def test_empty_texts_count_as_one_token_given_or_measured():
    given = make([5, 0, 0, 3], 2)
    assert given.plan.lengths.ravel().tolist() == [5, 1, 1, 3]
    measured = dynabatch_sampler(["a b c", "", " ", "d"], str.split, 2, progress=False)
    assert measured.plan.lengths.ravel().tolist() == [3, 1, 1, 1]


@pytest.mark.parametrize("friendly", [False, True])
@pytest.mark.parametrize("task", ["generate", "train"])
@pytest.mark.parametrize("batch_size", [1, 3, 5, 7, 9, 13, 31])
def test_an_odd_batch_size_never_makes_more_batches_than_static(batch_size, task, friendly):
    options = {"friendly_batch_size": friendly, "task": task}
    for lengths in (LENGTHS[:2000], np.full(2000, 40), np.random.default_rng(0).integers(30, 40, 2000)):
        sampler = make(lengths, batch_size, **options)
        assert len(sampler) <= -(-2000 // batch_size)
        assert min(sizes(sampler)[:-1]) >= batch_size


def test_the_case_of_three_makes_as_many_batches_as_a_fixed_size():
    # Of equal lengths none can grow; rounding 3 down to 2 gave 1,000 batches.
    assert len(make(np.full(2000, 40), 3)) == 667


@pytest.mark.parametrize("task", ["generate", "train"])
def test_a_wider_range_gives_fewer_batches_where_texts_are_much_shorter_than_the_longest(task):
    two, five, ten = (len(make(max_batch_range=range_, task=task)) for range_ in (2.0, 5.0, 10.0))
    assert two > five > ten


@pytest.mark.parametrize("task", ["generate", "train"])
def test_a_higher_threshold_gives_fewer_batches(task):
    numbers = [len(make(max_batch_range=8.0, task=task, threshold=threshold)) for threshold in (0.3, 0.6, 0.9)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]


@pytest.mark.parametrize("task", ["generate", "train"])
@pytest.mark.parametrize("range_", [2.0, 5.0])
def test_a_batch_size_of_one_grows(task, range_):
    assert max(sizes(make(LENGTHS[:600], 1, max_batch_range=range_, task=task))) == int(range_) // 2 * 2


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


CORPORA = {
    "lognormal": LENGTHS[:160],
    "short": np.random.default_rng(1).poisson(8, 160) + 1,
    "near the longest": np.random.default_rng(2).integers(400, 512, 120),
}


@pytest.mark.parametrize("name", CORPORA)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_range": 8.0},
        {"friendly_batch_size": True, "threshold": 0.6},
        {"batch_size": 5, "max_batch_range": 5.0},
        {"batch_size": 24, "smooth_batches": False},
    ],
    ids=["defaults", "range 8", "friendly", "five", "not smoothed"],
)
def test_training_never_makes_more_batches_than_dynabatch_unless_those_take_more_memory(name, options):
    theirs = pytest.importorskip("dynabatch", reason="dynabatch is not installed")
    lengths, options = CORPORA[name], {"batch_size": 16, **options}
    tokens = lengths.tolist()
    given = {"token_lengths": tokens, "word_lengths": tokens, "char_lengths": tokens}
    plan = theirs.dynabatch_sampler([""] * len(lengths), None, **options, **given)
    mine = dynabatch_sampler([""] * len(lengths), None, **options, **given).for_training()
    shapes = [(len(batch), int(lengths[batch].max())) for batch in plan.batches]
    largest = relative_memory(*zip(*shapes, strict=True), options["batch_size"], int(lengths.max()), task="train").max()
    assert len(mine) <= len(plan) or largest > 1
    assert len(mine) <= -(-len(lengths) // options["batch_size"])


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
