"""loss_below and loss_settled: values by hand, periods of epochs and steps, and losses that are no numbers."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright import size
from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size import BatchSizeController
from batchwright.size.policy import TIMES


def control(policy, initial=16, max_size=4096):
    return BatchSizeController(policy, min_size=4, max_size=max_size, initial=initial)


def follow(policy, losses, **options):
    """Return the size after each epoch's loss."""
    controller = control(policy, **options)
    return [controller.observe(epoch=epoch, loss=loss) for epoch, loss in enumerate(losses, start=1)]


def test_a_loss_below_the_threshold_grows_the_batch_each_epoch():
    assert follow(size.loss_below(0.5), [0.9, 0.5, 0.49, 0.6, 0.3, 0.2]) == [16, 16, 32, 32, 64, 128]


def test_linear_growth_adds_examples():
    assert follow(size.loss_below(0.5, mode="linear"), [0.4, 0.6, 0.4]) == [24, 24, 32]
    assert follow(size.loss_below(0.5, mode="linear", up=3), [0.4, 0.4]) == [19, 22]


def test_small_factors_add_up():
    assert follow(size.loss_below(1.0, up=1.02), [0.5] * 100)[-1] == 116  # 16 · 1.02^100


def test_a_threshold_per_step_decides_after_each_update():
    controller = control(size.loss_below(0.5, per="step"))
    assert [controller.observe(batch_size=8, loss=loss) for loss in (0.4, 0.6, 0.4)] == [32, 32, 64]


def test_an_epoch_is_judged_by_its_mean_weighted_by_examples():
    controller = control(size.loss_below(0.5))
    # (30 · 0.4 + 10 · 0.9) / 40 = 0.525, then (30 · 0.4 + 10 · 0.7) / 40 = 0.475
    for epoch, last in enumerate([0.9, 0.7]):
        controller.observe(epoch=epoch, batch_size=30, loss=0.4)
        controller.observe(epoch=epoch, batch_size=10, loss=last)
        controller.observe(epoch=epoch + 1)
    assert [decision.new for decision in controller.history] == [32]
    assert controller.history[0].reason == f"loss 0.475 over the epoch, below 0.5: 16 {TIMES} 2 = 32"


def test_why_the_size_stays_is_said():
    controller = control(size.loss_below(0.5))
    controller.observe(epoch=1, loss=0.75)
    assert controller.explain() == "loss 0.75 over the epoch, not below 0.5: holds 16"


def test_a_loss_that_has_settled_grows_the_batch_and_begins_a_new_window():
    # 0.9, 0.896, 0.892: (0.9 − 0.892) / 0.896 = 0.89 %. The next window of three has to settle on its own.
    losses = [2.0, 1.0, 0.9, 0.896, 0.892, 0.892, 0.892, 0.892]
    assert follow(size.loss_settled(), losses) == [16, 16, 16, 16, 32, 32, 32, 64]


def test_the_limit_itself_counts_as_settled():
    # (1.25 − 0.75) / 1 = 0.5 exactly
    assert follow(size.loss_settled(tolerance=0.5, window=2), [1.25, 0.75]) == [16, 32]
    assert follow(size.loss_settled(tolerance=0.49, window=2), [1.25, 0.75]) == [16, 16]


def test_a_change_that_is_not_relative_is_in_the_unit_of_the_loss():
    policy = size.loss_settled(tolerance=0.1, window=2, relative=False, mode="linear", up=4)
    assert follow(policy, [-0.05, 0.05, 3.0, 3.2]) == [16, 20, 20, 20]


def test_losses_around_zero_have_no_share():
    assert follow(size.loss_settled(window=2), [-1.0, 1.0, 0.0, 0.0]) == [16, 16, 16, 32]


def test_a_window_of_steps_settles_within_an_epoch():
    controller = control(size.loss_settled(window=2, per="step", every=2))
    sizes = [controller.observe(batch_size=8, loss=loss) for loss in (2.0, 1.0, 1.5, 1.505)]
    assert sizes == [16, 16, 16, 32]
    assert controller.history[0].reason == (
        f"loss moved by 0.1665 % over 4 steps, at most 1 %: 16 {TIMES} 2 = 32"  # 0.0025 / 1.50125
    )


def test_the_words_of_a_loss_that_moves():
    controller = control(size.loss_settled(window=2))
    said = []
    for epoch, loss in enumerate([1.0, 0.5, math.nan], start=1):
        controller.observe(epoch=epoch, loss=loss)
        said.append(controller.explain())
    assert said == [
        "1 of 2 losses since the size changed: holds 16",
        "loss moved by 66.67 % over 2 epochs, above 1 %: holds 16",
        "loss is nan and left out of the epoch: holds 16",
    ]


POLICIES = [
    size.loss_below(0.5),
    size.loss_below(0.5, mode="linear", per="step"),
    size.loss_settled(tolerance=0.1),
    size.loss_settled(tolerance=0.5, window=2, relative=False, per="step"),
]
losses = st.lists(st.floats() | st.floats(0.1, 1), min_size=1, max_size=20)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@given(losses=losses, cut=st.integers(0, 20))
def test_whatever_the_loss_bounds_hold_and_a_state_at_any_step_goes_on_the_same(policy, losses, cut):
    whole, first, second = (control(policy, max_size=64) for _ in range(3))
    course = [{"epoch": step // 2, "batch_size": 8, "loss": loss} for step, loss in enumerate(losses)]
    sizes = [whole.observe(**figures) for figures in course]
    for figures in course[:cut]:
        first.observe(**figures)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert [second.observe(**figures) for figures in course[cut:]] == sizes[cut:]
    assert sizes == sorted(sizes)
    assert all(4 <= size <= 64 for size in sizes)


@pytest.mark.parametrize("policy", POLICIES[::2], ids=repr)
def test_what_is_missing_is_named(policy):
    with pytest.raises(MissingSignalError, match=f"{policy.name} needs loss, which was not observed"):
        control(policy).observe(epoch=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: size.loss_below(math.nan), "threshold must be a number, got nan"),
        (lambda: size.loss_below(1, up=1), "up=1 never changes the size"),
        (lambda: size.loss_below(1, up=0, mode="linear"), "up=0 never changes the size"),
        (lambda: size.loss_below(1, up=0.5), "takes factors, up of 1 or more"),
        (lambda: size.loss_below(1, mode="square"), "mode must be one of 'exponential', 'linear', got 'square'"),
        (lambda: size.loss_below(1, per="examples"), "loss_below per examples needs every"),
        (lambda: size.loss_settled(tolerance=-1), "tolerance must be a number of 0 or more, got -1"),
        (lambda: size.loss_settled(window=1), "window must be a whole number of 2 or more, got 1"),
        (lambda: size.loss_settled(relative=1), "relative must be True or False, got 1"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
