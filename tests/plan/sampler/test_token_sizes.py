"""Sizes counted in tokens: ResizableBatchSampler(size_unit="tokens") and regroup(length_of=...)."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError, StateMismatchError

from .loops import Sizes, run

LENGTHS = [4, 4, 9, 1, 2, 3]
NUM = 200
RANDOM_LENGTHS = np.random.default_rng(3).integers(1, 40, size=NUM)


def make(size, lengths=LENGTHS, **options):
    return bw.ResizableBatchSampler(len(lengths), size, lengths=lengths, size_unit="tokens", **options)


def filled_by_hand(order, lengths, sizes, world_size=1):
    """The rule once more, in plain Python: add examples while the sum stays within the size; one per rank at least."""
    batches, left, step = [], list(order), 0
    while left:
        size, batch = sizes[step % len(sizes)], []
        while left and (len(batch) < world_size or sum(lengths[i] for i in [*batch, left[0]]) <= size):
            batch.append(left.pop(0))
        batches.append(batch)
        step += 1
    return batches


def test_a_batch_takes_examples_while_their_tokens_are_within_the_size():
    # 4 + 4 = 8, and 9 more would be 17; 9 is more than 8 by itself; 1 + 2 + 3 = 6 is what is left.
    assert list(make(8, shuffle=False)) == [[0, 1], [2], [3, 4, 5]]


def test_tokens_add_up_over_axes():
    lengths = [(3, 1), (2, 2), (4, 4), (1, 1)]
    assert list(make(8, lengths, shuffle=False)) == [[0, 1], [2], [3]]


def test_a_new_size_applies_to_the_next_batch():
    assert run(make(Sizes(4, 13, 100), shuffle=False)) == [[0], [1, 2], [3, 4, 5]]


@pytest.mark.parametrize("budget", [None, bw.MaxTokens(120)], ids=["shuffled", "planned"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_ranks_together_hold_the_batches_of_the_rule_and_every_example_once(budget, world_size, sizes, seed):
    planned = {} if budget is None else {"lengths": RANDOM_LENGTHS, "budget": budget}
    order = next(iter(bw.ResizableBatchSampler(NUM, NUM, seed=seed, **planned)))
    options = {"budget": budget, "seed": seed, "world_size": world_size}
    ranks = [run(make(Sizes(*sizes), RANDOM_LENGTHS, rank=rank, **options)) for rank in range(world_size)]
    expected = filled_by_hand(order, RANDOM_LENGTHS, sizes, world_size)
    assert {len(batches) for batches in ranks} == {len(expected)}
    for batch, *shares in zip(expected, *ranks, strict=True):
        assert {index for share in shares for index in share} == set(batch)
        assert all(shares)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        if len(batch) >= world_size:
            assert sum(map(len, shares)) == len(batch)


def test_a_large_size_is_met_to_within_one_example():
    tokens = [RANDOM_LENGTHS[batch].sum() for batch in make(300, RANDOM_LENGTHS)]
    assert max(tokens) <= 300
    assert min(tokens[:-1]) > 300 - RANDOM_LENGTHS.max()


def test_a_resumed_sampler_gives_the_batches_that_were_left():
    sizes = (30, 300, 90)
    whole = run(make(Sizes(*sizes), RANDOM_LENGTHS, seed=1))
    sampler = make(Sizes(*sizes), RANDOM_LENGTHS, seed=1)
    begun = run(sampler, 4)
    again = make(Sizes(*sizes, step=4), RANDOM_LENGTHS, seed=1)
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert begun + run(again) == whole


def test_a_state_resumes_on_another_number_of_ranks():
    sampler = make(100, RANDOM_LENGTHS)
    begun = list(islice(sampler, 3))
    rest = []
    for rank in range(2):
        share = make(100, RANDOM_LENGTHS, rank=rank, world_size=2)
        share.load_state_dict(sampler.state_dict())
        rest += share
    assert {index for batch in begun + rest for index in batch} == set(range(NUM))
    assert sum(map(len, begun + rest)) == NUM + share.num_repeated


def test_a_state_of_the_other_unit_is_refused():
    options = {"lengths": LENGTHS, "budget": bw.MaxTokens(12)}
    by_examples = bw.ResizableBatchSampler(6, 2, **options)
    by_tokens = bw.ResizableBatchSampler(6, 2, size_unit="tokens", **options)
    with pytest.raises(StateMismatchError, match="size_unit"):
        by_tokens.load_state_dict(by_examples.state_dict())
    with pytest.raises(StateMismatchError, match="size_unit"):
        by_examples.load_state_dict(by_tokens.state_dict())
    by_tokens.load_state_dict(by_tokens.state_dict())


def test_the_repr_names_the_unit():
    assert "size 8 tokens" in repr(make(8))


def test_tokens_need_lengths():
    with pytest.raises(ArgumentError, match='size_unit="tokens" counts the tokens of examples by their lengths'):
        bw.ResizableBatchSampler(6, 8, size_unit="tokens")


def test_an_unknown_unit_is_refused():
    with pytest.raises(ArgumentError, match="size_unit must be"):
        bw.ResizableBatchSampler(6, 8, lengths=LENGTHS, size_unit="words")


def test_a_policy_that_counts_the_other_unit_is_refused():
    controllers = {
        unit: bw.BatchSizeController(size.goodput(unit=unit), min_size=4, max_size=64)
        for unit in ("examples", "tokens")
    }
    with pytest.raises(ArgumentError, match="counts tokens, but size_unit is 'examples'"):
        bw.ResizableBatchSampler(6, controllers["tokens"])
    with pytest.raises(ArgumentError, match="counts examples, but size_unit is 'tokens'"):
        make(controllers["examples"])
    assert list(make(controllers["tokens"], shuffle=False)) == [[0], [1], [2], [3, 4], [5]]


def test_lengths_without_a_budget_are_still_refused_where_examples_are_counted():
    with pytest.raises(ArgumentError, match="lengths and budget go together, budget is missing"):
        bw.ResizableBatchSampler(6, 8, lengths=LENGTHS)


# regroup

CHUNKS = [["six", "five", "four"], ["a", "b"], [], ["seven letters"], ["end"]]


def test_regrouped_batches_take_examples_while_their_tokens_are_within_the_size():
    # 3 + 4 = 7; 4 + 1 + 1 = 6; 13 by itself; 3.
    assert list(bw.regroup(CHUNKS, 8, length_of=len)) == [
        ["six", "five"],
        ["four", "a", "b"],
        ["seven letters"],
        ["end"],
    ]


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    chunk=st.integers(1, 7),
)
def test_regrouped_batches_follow_the_rule_whatever_the_chunks(lengths, sizes, chunk):
    chunks = [list(range(len(lengths)))[i : i + chunk] for i in range(0, len(lengths), chunk)]
    found = run(bw.regroup(chunks, Sizes(*sizes), length_of=lambda index: lengths[index]))
    assert found == filled_by_hand(range(len(lengths)), lengths, sizes)


@pytest.mark.parametrize(("last", "is_kept"), [(4, True), (3, False)])
def test_a_last_batch_with_too_few_tokens_is_dropped_on_request(last, is_kept):
    found = list(bw.regroup([[5, 3], [4, last]], 8, length_of=int, drop_last=True))
    assert found == [[5, 3], [4, 4]][: 1 + is_kept]


def test_regrouped_tokens_resume_with_the_very_next_batch():
    chunks = [RANDOM_LENGTHS[i : i + 7].tolist() for i in range(0, NUM, 7)]
    whole = list(bw.regroup(chunks, 100, length_of=int))
    batches = bw.regroup(chunks, 100, length_of=int)
    begun = list(islice(batches, 5))
    again = bw.regroup(chunks, 100, length_of=int)
    again.load_state_dict(json.loads(json.dumps(batches.state_dict())))
    assert begun + list(again) == whole


def test_a_regrouped_state_of_the_other_unit_is_refused():
    with pytest.raises(StateMismatchError, match="size_unit"):
        bw.regroup(CHUNKS, 8).load_state_dict(bw.regroup(CHUNKS, 8, length_of=len).state_dict())


def test_regrouped_tokens_need_one_rank():
    with pytest.raises(ArgumentError, match="length_of counts tokens on one rank only"):
        bw.regroup(CHUNKS, 8, length_of=len, world_size=2)


@pytest.mark.parametrize(
    ("length_of", "said"),
    [(7, "length_of must be a function of an example, got 7"), (float, r"length_of\(example\) must be")],
    ids=["a number", "a function of parts"],
)
def test_lengths_that_are_not_whole_are_refused(length_of, said):
    with pytest.raises(ArgumentError, match=said):
        list(bw.regroup([["1.5", "2.5"]], 8, length_of=length_of))


def controller_of(policy):
    return size.BatchSizeController(policy, min_size=64, max_size=4096)


@pytest.mark.parametrize(
    "policy",
    [
        size.chain(size.goodput(unit="tokens"), size.multiple_of(8)),
        size.switch({0: size.goodput(unit="tokens")}),
        size.minimum(size.goodput(unit="tokens"), size.constant(512)),
    ],
    ids=repr,
)
def test_a_policy_that_counts_tokens_inside_another_is_refused_by_a_sampler_of_examples(policy):
    with pytest.raises(ArgumentError, match="counts tokens, but size_unit is 'examples'"):
        bw.ResizableBatchSampler(1000, controller_of(policy))


def test_regroup_refuses_a_policy_that_counts_tokens_without_length_of():
    with pytest.raises(ArgumentError, match="counts tokens, but without length_of a size counts examples; let both"):
        bw.regroup([list(range(100))], controller_of(size.goodput(unit="tokens")))


def test_regroup_refuses_a_policy_that_counts_examples_with_length_of():
    with pytest.raises(ArgumentError, match="counts examples, but with length_of a size counts tokens; let both"):
        bw.regroup([["a", "b"]], controller_of(size.goodput()), length_of=len)
