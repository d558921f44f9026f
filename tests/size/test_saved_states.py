"""States that an earlier version saved: each loads into the same policy and goes on with the same sizes."""

import json
from pathlib import Path

import pytest

from batchwright.errors import StateMismatchError
from batchwright.size import BatchSizeController, linear, noise_driven

from .makers import figures, make

# Written after 14 observations by the version that kept numbers as they were given, NumPy's too; with the sizes after.
SAVED = json.loads((Path(__file__).parent / "saved_states.json").read_text(encoding="utf-8"))


# What goes on from the size before rounding takes other sizes than the version that went on from the whole one.
UNROUNDED = {
    "memory_driven(high=1, low=0.5, factor=1.5)": [9, 9, 9, 14, 20, 20, 20, 30, 46, 46],  # 6 · 1.5^n
    'loss_driven("ema", mode="linear", up=4, down=8, gain=50)': None,
    "chain(noise_driven(), rate_limit(2), smooth(0.5), multiple_of(8), clamp(32, 4096))": None,
    # Batches that stay as they are were formed before the size changed, and do not change it again.
    "switch({0: constant(32), 2: memory_driven()})": None,
    'noise_driven(estimator="ratio", low=1, high=2, up=3, down=0.25, per="step")': None,
}


SAME = [saved for saved in SAVED if saved["call"] not in UNROUNDED]


def control(policy):
    return BatchSizeController(policy, min_size=1, max_size=4096)


@pytest.mark.parametrize("saved", SAVED, ids=[saved["call"] for saved in SAVED])
def test_a_state_of_an_earlier_version_goes_on_with_the_same_sizes(saved):
    controller = control(make(saved["call"]))
    controller.load_state_dict(saved["state"])
    assert [controller.observe(**figures(step)) for step in range(14, 24)] == (
        UNROUNDED.get(saved["call"]) or saved["later"]
    )


@pytest.mark.parametrize("saved", SAME, ids=[saved["call"] for saved in SAME])
def test_a_run_of_this_version_leaves_the_state_that_the_earlier_one_left(saved):
    controller = control(make(saved["call"]))
    for step in range(14):
        controller.observe(**figures(step))
    state = controller.state_dict()
    earlier = saved["state"]
    assert [key for key in state if key not in ("exact_size", "num_changes")] == list(earlier)
    if "ratio" in saved["call"]:  # the ratio remembers of how many parts it was
        assert state["policy_state"].pop("num_parts") == 4
    for key in ("size", "policy_state", "counts"):
        assert state[key] == earlier[key]
    assert [{**change, "reason": ""} for change in state["history"][-1:]] == [
        {**change, "reason": ""} for change in earlier["history"]
    ]
    assert "np." not in state["policy"]


@pytest.mark.parametrize(
    "text",
    [
        "NoiseScale(target=2, horizon=50000, num_examples=None)",
        "NoiseScale(target=np.float64(2.0), horizon=np.int64(50000), num_examples=None)",
        "NoiseScale(target=np.float32(2.0), horizon=5e+04, num_examples=None)",
        "NoiseScale(target=np.longdouble('2.0'), horizon=array(50000), num_examples=None)",
    ],
)
def test_the_same_number_may_be_written_in_another_form(text):
    controller = control(noise_driven(2, horizon=50_000))
    controller.load_state_dict({**controller.state_dict(), "policy": text})


@pytest.mark.parametrize(
    "text",
    [
        "NoiseScale(target=2.5, horizon=50000, num_examples=None)",
        "NoiseScale(target=np.float64(2.5), horizon=50000, num_examples=None)",
        "NoiseScale(target=20, horizon=50000, num_examples=None)",
        "NoiseScale(target=2.0.0, horizon=50000, num_examples=None)",
        "NoiseScale(target=np.float31(2.0), horizon=50000, num_examples=None)",
        "noise_driven(target=2, horizon=50000)",
        "",
        None,
        7,
    ],
)
def test_another_number_or_text_is_refused(text):
    controller = control(noise_driven(2, horizon=50_000))
    with pytest.raises(StateMismatchError, match="the state was saved with policy"):
        controller.load_state_dict({**controller.state_dict(), "policy": text})


def test_whole_numbers_beyond_the_digits_of_floats_are_told_apart():
    policy = linear(32, 8, per="examples", every=2**60)
    other = linear(32, 8, per="examples", every=2**60 + 1)
    with pytest.raises(StateMismatchError, match=str(2**60)):
        control(other).load_state_dict(control(policy).state_dict())


@pytest.mark.parametrize("slope", [0.0, -0.0])
def test_a_zero_is_the_same_with_and_without_a_sign(slope):
    controller, other = control(linear(8, slope)), control(linear(8, 0))
    state = controller.state_dict()
    assert state == other.state_dict()
    controller.load_state_dict({**state, "policy": state["policy"].replace("slope=0.0", "slope=-0.0")})
