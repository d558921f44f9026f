"""The next token: rules in the order of transformers, and draws by one number each."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.step.inference._choosing import Chooser, Rules, draw, uniforms

NONE = torch.zeros(1, dtype=torch.long)


def choose(rules, logits, num_new=0, num_prompt=1, **options):
    chooser = Chooser(rules, logits.shape[1], num_prompt, logits.device)
    return chooser.choose(logits, NONE + num_new, options.get("seen"), options.get("uniform")).tolist()


def test_the_best_token_is_taken_the_first_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 2.0, 1.0]])
    assert choose(Rules(ends=(), pad=0), logits) == [1, 0]
    assert choose(Rules(ends=(), pad=0), logits.half()) == [1, 0]


def test_an_end_waits_for_the_least_number_of_tokens():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    rules = Rules(ends=(1,), pad=0, min_new_tokens=2)
    assert [choose(rules, logits, num_new)[0] for num_new in (0, 1, 2)] == [2, 2, 1]
    # Of 3 tokens in all, 2 are the prompt's: one new token comes before an end.
    rules = Rules(ends=(1,), pad=0, min_length=3)
    assert [choose(rules, logits, num_new, num_prompt=2)[0] for num_new in (0, 1)] == [2, 1]


def test_a_forced_token_comes_first_and_what_is_suppressed_at_first_after_it():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    rules = Rules(ends=(), pad=0, forced_first=0, suppressed_first=(1,))
    assert [choose(rules, logits, num_new)[0] for num_new in (0, 1, 2)] == [0, 2, 1]
    # After a longer prompt nothing is forced.
    assert [choose(rules, logits, num_new, num_prompt=2)[0] for num_new in (0, 1)] == [2, 1]


@given(st.integers(0, 10**6), st.floats(0.3, 3.0))
@settings(max_examples=30, deadline=None)
def test_a_penalty_is_that_of_transformers(seed, penalty):
    torch.manual_seed(seed)
    logits, ids = torch.randn(3, 11), torch.randint(11, (3, 5))
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone()).argmax(dim=1)
    seen = torch.zeros(3, 11, dtype=torch.bool).scatter_(1, ids, True)
    assert choose(Rules(ends=(), pad=0, repetition_penalty=penalty), logits, seen=seen) == expected.tolist()


def test_every_token_is_drawn_as_often_as_its_share():
    shares = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64)
    numbers = (torch.arange(1000, dtype=torch.float64)[:, None] + 0.5) / 1000
    drawn = draw(shares.log().expand(1000, 4), numbers)
    assert torch.bincount(drawn, minlength=4).tolist() == [100, 0, 600, 300]


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_ends_of_the_unit_interval_draw_tokens_that_can_come(seed):
    torch.manual_seed(seed)
    scores = torch.randn(4, 9).masked_fill(torch.rand(4, 9) < 0.5, -torch.inf)
    scores[:, 4] = 0.0
    for number in (0.0, 1 - 2**-53):
        drawn = draw(scores, torch.full((4, 1), number, dtype=torch.float64))
        assert scores.gather(1, drawn[:, None]).isfinite().all()


def test_numbers_belong_to_an_example_and_not_to_its_batch():
    together = uniforms(3, [0, 1, 2, 3], 6)
    assert np.array_equal(uniforms(3, [2], 4)[0], together[2, :4])
    assert not np.array_equal(together[0], together[1])
    assert not np.array_equal(uniforms(4, [0], 6)[0], together[0])
    assert 0 <= together.min() <= together.max() < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rules_compute_in_single_precision(dtype):
    logits = torch.tensor([[1.0, 3.0]], dtype=dtype)
    seen = torch.tensor([[False, True]])
    assert choose(Rules(ends=(), pad=0, repetition_penalty=3.001), logits, seen=seen) == [0]
