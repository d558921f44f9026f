"""Costs: what they may return, and by what a saved state knows them again."""

import json
import re
import warnings
from dataclasses import dataclass

import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import BudgetError, StateMismatchError
from batchwright.plan._cost import as_saved, with_values

LENGTHS = np.random.default_rng(0).integers(1, 500, 400)


def squares(num_items, padded):
    return num_items * padded[:, 0] ** 2


def make_cost(power, *, axis=0):
    def cost(num_items, padded):
        return num_items * padded[:, axis].astype(float) ** power

    return cost


def is_known_again(cost, other):
    saved = with_values("cost", cost)
    try:
        return as_saved(with_values("cost", other), saved) == saved
    except StateMismatchError:
        return False


@pytest.mark.parametrize(
    "other",
    [
        make_cost(2),
        lambda n, padded: padded[:, 0] * n * padded[:, 0],
        lambda n, padded: squares(n, padded) * (1 + 1e-12),
        lambda n, padded: squares(n.astype(np.float32), padded.astype(np.float32)),
    ],
    ids=["a power", "another order", "rounding", "single precision"],
)
def test_a_cost_is_known_by_its_values_and_not_by_its_code(other):
    assert is_known_again(squares, other)


def test_rounding_in_single_precision_is_not_another_cost():
    one = np.float32

    def expanded(num_items, lengths):
        n, x = num_items.astype(one), lengths[:, 0].astype(one)
        return one(1.7) * n * x + one(0.003) * n * x * x + one(11.3)

    def factored(num_items, lengths):
        n, x = num_items.astype(one), lengths[:, 0].astype(one)
        return n * x * (one(1.7) + one(0.003) * x) + one(11.3)

    assert is_known_again(expanded, factored)


@pytest.mark.parametrize(
    "other",
    [
        make_cost(1),
        make_cost(2.01),
        make_cost(2, axis=1),
        lambda n, padded: squares(n, padded) + 1000,
        lambda n, padded: squares(n, padded) * 1.0001,
        lambda n, padded: np.where(n > 500, np.inf, squares(n, padded)),
        lambda n, padded: np.where(padded[:, 0] > 10_000, np.nan, squares(n, padded)),
    ],
    ids=["power 1", "power 2.01", "axis 1", "plus 1000", "times 1.0001", "infinite", "nan at one shape"],
)
def test_other_values_are_another_cost(other):
    assert not is_known_again(squares, other)


def test_a_cost_of_two_axes_only_is_known_too():
    first, second = ((lambda n, padded, by=by: n * padded[:, 1] * by) for by in (1, 2))
    assert is_known_again(first, first)
    assert not is_known_again(first, second)
    one, other = ((lambda n, padded, a=a: n * (2 * padded[:, a] + padded[:, 1 - a])) for a in (0, 1))
    assert not is_known_again(one, other)


def table_of(scale):
    costs = np.arange(1024) * scale

    def cost(num_items, lengths):
        return num_items * costs[lengths[:, 0]]

    return cost


def test_a_table_that_ends_somewhere_is_known_by_what_it_holds():
    # Longer examples raise IndexError in both: that must not be all that is known of them.
    state = bw.BatchSampler(LENGTHS, bw.MaxCost(table_of(1.0), 2000)).state_dict()
    with pytest.raises(StateMismatchError, match="whose cost had other values than here"):
        bw.BatchSampler(LENGTHS, bw.MaxCost(table_of(2.0), 2000)).load_state_dict(state)
    bw.BatchSampler(LENGTHS, bw.MaxCost(table_of(1.0), 2000)).load_state_dict(state)


def samplers(cost):
    lengths = [3, 5, 2, 9, 4, 4, 7, 1]
    budget = bw.MaxItems(6) & bw.MaxCost(cost, 200)
    return [
        bw.BatchSampler(lengths, budget),
        bw.BatchSampler(lengths, bw.MaxTokens(12), cost=cost),
        bw.ResizableBatchSampler(8, 2, lengths=lengths, budget=budget),
        bw.StreamBatcher(lengths, length_of=int, budget=budget),
    ]


KINDS = pytest.mark.parametrize("kind", range(4), ids=["planned", "cost=", "resizable", "stream"])


@KINDS
def test_a_state_is_not_continued_with_a_changed_cost_of_the_same_name(kind):
    sampler, other = samplers(make_cost(2))[kind], samplers(make_cost(1))[kind]
    next(iter(sampler))
    state = json.loads(json.dumps(sampler.state_dict()))
    with pytest.raises(StateMismatchError, match=r"saved with .*make_cost.*, whose cost had other values than here"):
        other.load_state_dict(state)
    same = samplers(make_cost(2))[kind]
    same.load_state_dict(state)
    assert same.state_dict() == state


@KINDS
def test_a_state_from_before_values_were_saved_is_continued(kind):
    sampler = samplers(make_cost(2))[kind]
    next(iter(sampler))
    state = json.loads(re.sub(r" #[\w=+/.!-]+", "", json.dumps(sampler.state_dict())))
    assert "#" not in json.dumps(state)
    resumed = samplers(make_cost(2))[kind]
    resumed.load_state_dict(state)
    assert resumed.state_dict() == sampler.state_dict()


@pytest.mark.parametrize("saved", ["#", "#zzz", "#AACAPw==", "#AACAPw==.!.!", "#!.!.!"])
def test_values_changed_by_hand_are_refused(saved):
    state = bw.BatchSampler(LENGTHS, bw.MaxCost(squares, 1e6)).state_dict()
    with pytest.raises(StateMismatchError):
        bw.BatchSampler(LENGTHS, bw.MaxCost(squares, 1e6)).load_state_dict(
            {**state, "budget": f"MaxCost(squares, 1000000.0) {saved}"}
        )


def test_a_budget_is_known_by_the_values_it_began_with():
    power = [2]
    budget = bw.MaxCost(lambda n, padded: n * padded[:, 0] ** power[0], 200)
    before = budget.to_state()
    power[0] = 1
    assert budget.to_state() == before
    assert "#" not in repr(budget)


@dataclass(frozen=True)
class Linear:
    slope: float

    def __call__(self, num_items, lengths):
        return self.slope * num_items * lengths[:, 0]


def test_how_numpy_prints_numbers_is_not_another_cost():
    budget = bw.MaxCost(Linear(np.float64(2.5)), 5000)
    assert repr(budget) == "MaxCost(Linear(slope=2.5), 5000)"
    state = bw.BatchSampler(LENGTHS, budget).state_dict()
    with np.printoptions(legacy="1.21" if np.__version__.startswith("1.") else "1.25"):
        bw.BatchSampler(LENGTHS, bw.MaxCost(Linear(np.float64(2.5)), 5000)).load_state_dict(state)


def test_a_cost_for_balancing_is_not_called_for_every_state():
    num_calls = 0

    def cost(num_items, lengths):
        nonlocal num_calls
        num_calls += 1
        return num_items * lengths[:, 0]

    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(2000), cost=cost)
    sampler.state_dict()
    before = num_calls
    for _ in range(10):
        sampler.state_dict()
    assert num_calls == before


@pytest.mark.parametrize(
    ("costs", "found"),
    [
        (lambda tokens: tokens * 1j, "ndarray of complex128"),
        (lambda tokens: ["a"] * len(tokens), "list of <U1"),
        (lambda tokens: [[1], [1, 2]], "list"),
        (lambda tokens: [None] * len(tokens), "list"),
    ],
    ids=["complex", "texts", "ragged", "none"],
)
def test_what_is_no_real_number_is_refused(costs, found):
    budget = bw.MaxCost(lambda n, lengths: costs(n * lengths[:, 0]), 5000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is converted on the way
        with pytest.raises(BudgetError, match=f"cost must return real numbers.*got {found}$"):
            bw.plan_batches(LENGTHS, budget)


@pytest.mark.parametrize("kind", ["plain", "parameter", "bfloat16"])
def test_a_tensor_is_taken_whatever_its_kind(kind):
    torch = pytest.importorskip("torch")

    def cost(num_items, lengths):
        tokens = torch.from_numpy(num_items * lengths[:, 0])
        if kind == "parameter":
            return tokens * torch.ones(1, requires_grad=True)
        return tokens.bfloat16() if kind == "bfloat16" else tokens

    plan = bw.plan_batches(LENGTHS, bw.MaxCost(cost, 5000))
    assert plan.report().largest <= 1
    if kind != "bfloat16":  # which rounds to two digits
        assert plan.indices.tolist() == bw.plan_batches(LENGTHS, bw.MaxTokens(5000)).indices.tolist()
