"""A policy that counts tokens under a sampler that counts examples."""

from __future__ import annotations

import pytest

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError


def controller_of(policy: size.Policy) -> size.BatchSizeController:
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
def test_a_policy_that_counts_tokens_inside_another_is_refused_by_a_sampler_of_examples(policy: size.Policy) -> None:
    # Expected: refused, as goodput(unit="tokens") by itself is. Found: 4096 tokens are taken as 4096 examples.
    with pytest.raises(ArgumentError, match="tokens"):
        bw.ResizableBatchSampler(1000, controller_of(policy))


def test_regroup_refuses_a_policy_that_counts_tokens_without_length_of() -> None:
    # Expected: refused, as ResizableBatchSampler does. Found: 64 tokens are taken as 64 examples.
    with pytest.raises(ArgumentError, match="tokens"):
        bw.regroup([list(range(100))], controller_of(size.goodput(unit="tokens")))


def test_regroup_refuses_a_policy_that_counts_examples_with_length_of() -> None:
    # Expected: refused. Found: 64 examples are taken as 64 tokens.
    with pytest.raises(ArgumentError, match="examples"):
        bw.regroup([["a", "b"]], controller_of(size.goodput()), length_of=len)


def test_mixed_units_in_one_maximum_are_refused() -> None:
    # Expected: tokens and examples are not compared. Found: the larger number wins.
    with pytest.raises(ArgumentError):
        size.maximum(size.goodput(unit="tokens"), size.goodput())
