"""Costs: what they return, and what a saved state knows of them."""

import warnings
from dataclasses import dataclass

import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import BatchwrightError, StateMismatchError
from batchwright.plan.budget import fingerprint_of

LENGTHS = np.random.default_rng(0).integers(1, 500, 400)


def _table(scale):
    costs = np.arange(1024) * scale

    def cost(num_items, lengths):
        return num_items * costs[lengths[:, 0]]

    return cost


def test_a_state_is_not_continued_with_another_table_of_costs():
    # Expected: refused, "it is not continued with other values". Found: taken. The table ends at 1023, the fixed shapes
    # go to 20,000, so every table is known by the word IndexError alone. (NaN at one shape does the same.)
    sampler = bw.BatchSampler(LENGTHS, bw.MaxCost(_table(1.0), 2000))
    state = sampler.state_dict()
    with pytest.raises(StateMismatchError):
        bw.BatchSampler(LENGTHS, bw.MaxCost(_table(2.0), 2000)).load_state_dict(state)


def test_rounding_in_single_precision_is_not_another_cost():
    # Expected: equal, "six digits count, so that another machine's rounding does not". Found: values that differ by
    # 1e-7 (a torch cost on another device, another order of a sum) give another fingerprint, and the state is refused.
    one = np.float32

    def expanded(num_items, lengths):
        n, x = num_items.astype(one), lengths[:, 0].astype(one)
        return one(1.7) * n * x + one(0.003) * n * x * x + one(11.3)

    def factored(num_items, lengths):
        n, x = num_items.astype(one), lengths[:, 0].astype(one)
        return n * x * (one(1.7) + one(0.003) * x) + one(11.3)

    assert fingerprint_of(expanded) == fingerprint_of(factored)


@dataclass(frozen=True)
class Linear:
    slope: float

    def __call__(self, num_items, lengths):
        return self.slope * num_items * lengths[:, 0]


def test_how_numpy_prints_is_not_another_cost():
    # Expected: taken, the cost is the same. Found: refused, 'Linear(slope=np.float64(2.5))' against
    # 'Linear(slope=2.5)': NumPy 1.26, which is allowed, and 2 print scalars differently; arrays follow printoptions.
    budget = bw.MaxCost(Linear(np.float64(2.5)), 5000)
    state = bw.BatchSampler(LENGTHS, budget).state_dict()
    with np.printoptions(legacy="1.25"):
        bw.BatchSampler(LENGTHS, budget).load_state_dict(state)


def test_a_complex_cost_is_refused():
    # Expected: a sentence. Found: one batch of all 400 examples; the imaginary part is dropped.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(BatchwrightError):
            bw.plan_batches(LENGTHS, bw.MaxCost(lambda n, lengths: n * lengths[:, 0] * 1j, 5000))


@pytest.mark.parametrize("kind", ["parameter", "bfloat16", "texts", "ragged"])
def test_what_is_no_array_of_numbers_is_refused_with_a_sentence(kind):
    # Expected: a BatchwrightError, or the right plan for tensors. Found: RuntimeError "Can't call numpy() on Tensor
    # that requires grad", TypeError "unsupported ScalarType BFloat16", ValueError of NumPy.
    torch = pytest.importorskip("torch")

    def cost(num_items, lengths):
        tokens = torch.from_numpy(num_items * lengths[:, 0])
        if kind == "parameter":
            return tokens * torch.ones(1, requires_grad=True)
        if kind == "bfloat16":
            return tokens.bfloat16()
        return ["a"] * len(num_items) if kind == "texts" else [[1], [1, 2]]

    try:
        plan = bw.plan_batches(LENGTHS, bw.MaxCost(cost, 5000))
    except BatchwrightError:
        return
    assert kind in ("parameter", "bfloat16")
    assert len(plan) > 1


def test_a_cost_for_balancing_is_not_called_for_every_state():
    # Expected: the fingerprint is taken once, as that of MaxCost is. Found: three calls for each state_dict().
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
