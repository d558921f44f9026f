"""What holds for every plan, whatever the data and options: 2,700 random cases, 13,500 in `make check`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw

from ..thorough import num_cases
from .grouped import flat
from .strategies import Case, cases


def draws(num):
    return settings(max_examples=num_cases(num, thorough=10 * num))


def examples(plan):
    return [index for batch in plan for index in flat(batch)]


@draws(250)
@given(cases())
def test_every_index_appears_once(case):
    assert sorted(examples(case.plan())) == list(range(len(case.lengths)))


@draws(250)
@given(cases(), st.sampled_from([1, 2, 3, 8]))
def test_the_budget_is_never_exceeded_by_what_a_collator_pads(case, world_size):
    lengths = np.asarray(case.lengths).reshape(len(case.lengths), -1)
    plan = case.plan(world_size=world_size)
    for batch, (num_items, *padded) in zip(plan, plan.shapes.tolist(), strict=True):
        assert num_items == len(batch)
        assert case.budget.fraction(np.array([num_items]), np.array([padded]))[0] <= 1 + 1e-12
        if plan.row_offsets is None:
            assert (lengths[batch].max(axis=0) <= padded).all()
            assert all(length % case.options["pad_multiple_of"] == 0 for length in padded)
        else:
            assert all(lengths[row].sum() <= case.options["grouping"].capacity for row in batch)


@draws(100)
@given(cases())
def test_the_same_seed_and_epoch_give_the_same_plan(case):
    first, second = case.plan(epoch=3), case.plan(epoch=3)
    assert list(first) == list(second)
    assert (first.shapes == second.shapes).all()


@draws(150)
@given(cases(), st.integers(1, 64))
def test_ranks_take_equally_many_batches_and_lose_nothing(case, world_size):
    plan = case.plan(world_size=world_size)
    given_out = examples(plan)
    assert len(plan) % world_size == 0
    assert all(flat(batch) for batch in plan)
    assert set(given_out) == set(range(len(case.lengths)))
    assert len(given_out) - len(case.lengths) == plan.num_repeated <= world_size - 1


@draws(100)
@given(cases(balance_over=64))
def test_the_order_is_the_same_for_every_world_size_dividing_64(case):
    alone = case.plan().indices
    for world_size in (2, 4, 8, 16, 32, 64):
        plan = case.plan(world_size=world_size)
        assert (plan.indices[: len(alone)] == alone).all()


def consume(case, world_size, state, num_steps):
    """Run every rank for some steps; return the examples in the order of the plan and the common state."""
    taken = []
    states = []
    for rank in range(world_size):
        sampler = case.sampler(rank=rank, world_size=world_size)
        if state is not None:
            sampler.load_state_dict(state)
        iterator = iter(sampler)
        taken.append([flat(next(iterator)) for _ in range(min(num_steps, len(sampler)))])
        states.append(sampler.state_dict())
    assert all(other == states[0] for other in states)
    return [index for step in zip(*taken, strict=True) for batch in step for index in batch], states[0]


@draws(250)
@given(cases(max_examples=40), st.data())
def test_resuming_at_any_point_on_any_world_size_loses_and_repeats_nothing(case, data):
    first_world = data.draw(st.integers(1, 9))
    second_world = data.draw(st.integers(1, 9))
    steps = data.draw(st.integers(0, len(case.sampler(world_size=first_world))))
    before, state = consume(case, first_world, None, steps)
    after, _ = consume(case, second_world, state, 10**9)
    everything = list(range(len(case.lengths)))
    assert sorted(set(before) | set(after)) == everything
    num_repeated = len(before) + len(after) - len(everything)
    assert num_repeated <= max(first_world, second_world) - 1
    if num_repeated:
        # Only a last step with fewer examples than ranks repeats any.
        ended_before = len(set(before)) == len(everything)
        last_world, last = (first_world, before) if ended_before else (second_world, after)
        assert len(set(last[-last_world:])) < last_world


@draws(250)
@given(cases(max_examples=40), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), max_size=5), st.booleans())
def test_an_epoch_that_moves_from_world_to_world_keeps_one_order(case, worlds, begins_earlier):
    state, taken = None, []
    # As the version before wrote it; that of Buckets is refused.
    begins_earlier = begins_earlier and not isinstance(case.options["grouping"], bw.Buckets)
    if begins_earlier:
        state = case.sampler(balance_over=64).state_dict()
        state = {**state, "version": 1}
        case = Case(case.lengths, case.budget, {**case.options, "balance_over": None})
    for world_size, num_steps in [*worlds, (2, 10**9)]:
        some, state = consume(case, world_size, state, num_steps)
        taken += some
        if state["position"] == len(case.lengths):
            break  # every batch was handed out
    assert set(taken) == set(range(len(case.lengths)))
    # Only a last step with fewer examples than ranks repeats any, at the very end.
    assert len(set(taken[: len(case.lengths)])) == len(case.lengths)
    number = state["settings"]["balance_over"]
    first = case.sampler(balance_over=number)
    if begins_earlier:
        first.load_state_dict({**first.state_dict(), "version": 1})
    assert taken[: len(case.lengths)] == examples(first.plan)[: len(case.lengths)]


@pytest.mark.parametrize("num", [1, 2, 7])
@pytest.mark.parametrize("grouping", [bw.InOrder(), bw.Sorted(), bw.WindowSort(), bw.Buckets(), bw.Packed(64)])
def test_tiny_data_sets_work(num, grouping):
    plan = bw.plan_batches(np.arange(1, num + 1), bw.MaxTokens(64), grouping=grouping)
    assert sorted(examples(plan)) == list(range(num))
    assert plan.report().num_batches == len(plan)
