"""Damaged states and settings that get past the checks."""

import pytest

from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.size import (
    BatchSizeController,
    chain,
    constant,
    exponential,
    multiple_of,
    noise_driven,
    step_time,
    switch,
)


def control(policy, **options):
    return BatchSizeController(policy, **{"min_size": 1, "max_size": 512, "initial": 16, **options})


def saved_noise(policy):
    controller = control(policy)
    for step in range(12):
        controller.observe(epoch=0, batch_size=16, noise_s=5.0 + step % 3, noise_g2=0.5)
    return controller.state_dict()


# Expected: "a damaged policy_state is refused on load". Found: it loads, and the next observation ends with
# OverflowError (34, 'Numerical result out of range') from g2 ** 2; NoiseAverage itself leaves out values above 1e150.
@pytest.mark.parametrize("policy", [noise_driven(), noise_driven(per="step", every=3)], ids=repr)
def test_a_noise_whose_square_overflows_is_refused(policy):
    state = saved_noise(policy)
    state["policy_state"].get("average", state["policy_state"])["g2"] = 1e200
    with pytest.raises(StateMismatchError, match="g2"):
        control(policy).load_state_dict(state)


# Expected: StateMismatchError. Found: OverflowError "int too large to convert to float" out of load_state_dict.
def test_a_size_beyond_every_float_is_refused():
    state = control(constant(16)).state_dict() | {"size": 10**400}
    with pytest.raises(StateMismatchError):
        control(constant(16)).load_state_dict(state)


# Expected: refused, as 16.5 rounds to 16 and not to the saved size 17 ("exact_size must be a number that rounds to
# size"). Found: loaded, and the size is 16 although the state says 17.
def test_an_unrounded_size_that_rounds_to_another_size_is_refused():
    state = control(constant(16)).state_dict() | {"size": 17, "exact_size": 16.5}
    with pytest.raises(StateMismatchError, match="exact_size"):
        control(constant(16)).load_state_dict(state)


# Expected: refused on load, or survived. Found: loaded; the policy then divides by the size 0 (ZeroDivisionError).
def test_a_rounded_size_of_nothing_is_refused_or_survived():
    policy = chain(switch({0: exponential(12, 1.5), 1: step_time(1000, every=2)}), multiple_of(8))
    controller = control(policy)
    controller.observe(epoch=0, batch_size=16, seconds=0.1)
    state = controller.state_dict()
    assert state["policy_state"]["rounded"] == {"from": 12.0, "to": 16.0}
    state["policy_state"]["rounded"]["from"] = 0.0
    again = control(policy)
    try:
        again.load_state_dict(state)
    except StateMismatchError:
        return
    for _ in range(6):
        again.observe(epoch=1, batch_size=again.size, seconds=0.1)


# Expected: ArgumentError, or all changes kept. Found: OverflowError "Python int too large to convert to C ssize_t".
def test_a_history_longer_than_any_list_is_refused_in_words_or_kept():
    try:
        control(constant(16), max_history=10**30)
    except ArgumentError:
        pass


# Expected: refused as every other unit that does not exist. Found: taken as per="step" without a word.
def test_a_unit_without_a_name_is_refused():
    with pytest.raises(ArgumentError, match="per must be one of"):
        noise_driven(per="")
