"""Counting in tokens: where only the count of tokens is observed."""

from __future__ import annotations

import pytest

from batchwright import size


@pytest.mark.parametrize(
    "policy",
    [size.loss_driven(per="tokens", every=1000), size.noise_driven(per="tokens", every=1000)],
    ids=["loss", "noise"],
)
def test_the_count_of_tokens_with_every_update_is_enough_for_a_period_of_tokens(policy: size.Policy) -> None:
    # Expected: "pass it, or the tokens completed with every update: controller.observe(tokens=…)".
    # Found: the first update, of which the count is given as asked, raises that very MissingSignalError: the tokens of
    # an update are a difference of counts, and there is none before the first.
    controller = size.BatchSizeController(policy, min_size=16, max_size=64)
    for step in range(1, 30):
        figures = {"loss": 1.0 / step, "noise_s": 800.0, "noise_g2": 2.0}
        controller.observe(batch_size=16, tokens=160 * step, **figures)
