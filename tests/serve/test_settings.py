"""Settings: what is wrong is said at once, with what would be right."""

import math

import numpy as np
import pytest

from batchwright.errors import ArgumentError
from batchwright.serve import Batcher, Settings
from batchwright.serve.settings import as_deadline, as_length


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"policy": "fifo"}, "policy must be one of 'adaptive', 'greedy', 'window', got 'fifo'"),
        ({"max_items": 0}, "max_items must be a whole number of 1 or more, got 0"),
        ({"max_items": True}, "max_items"),
        ({"max_queue": 1.5}, "max_queue"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_wait_ms": -1}, "max_wait_ms must be a number of 0 or more"),
        ({"max_wait_ms": math.inf}, "max_wait_ms"),
        ({"deadline_ms": 0}, "deadline_ms must be a number above 0"),
        ({"deadline_ms": math.nan}, "deadline_ms"),
        ({"on_error": "ignore"}, "on_error must be one of 'bisect', 'raise'"),
        ({"on_oom": "retry"}, "on_oom must be one of 'split', 'raise'"),
    ],
)
def test_an_impossible_setting_is_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        Settings(**wrong)


def test_numbers_of_numpy_become_plain_ones():
    settings = Settings(
        max_items=np.int64(4),
        max_queue=np.uint8(9),
        max_tokens=np.int32(512),
        max_wait_ms=np.float32(2.5),
        deadline_ms=np.int64(50),
    )
    numbers = {name: value for name, value in vars(settings).items() if not isinstance(value, str)}
    assert numbers == {"max_items": 4, "max_queue": 9, "max_tokens": 512, "max_wait_ms": 2.5, "deadline_ms": 50}
    assert {type(value) for value in numbers.values()} == {int, float}


def test_a_request_takes_numbers_of_numpy():
    with Batcher(list, num_workers=np.int64(1), length_of=np.size) as batcher:
        assert batcher.submit_sync("one", deadline_ms=np.float32(5000), priority=np.int64(2)) == "one"
        assert list(batcher.map(["two"], max_in_flight=np.int64(3))) == ["two"]


def test_the_batcher_refuses_what_is_no_function_and_no_workers():
    with pytest.raises(ArgumentError, match="run must be a function"):
        Batcher("model")
    with pytest.raises(ArgumentError, match="num_workers"):
        Batcher(list, num_workers=0)


def test_an_unknown_setting_cannot_be_changed():
    with pytest.raises(ArgumentError, match="cannot change num_workers; it can change deadline_ms"):
        Batcher(list).configure(num_workers=3)


def test_a_refused_change_leaves_the_settings_as_they_were():
    batcher = Batcher(list, max_items=8)
    with pytest.raises(ArgumentError):
        batcher.configure(max_items=4, policy="fifo")
    assert batcher.settings.max_items == 8


@pytest.mark.parametrize("length", [10**400, 2**64, 2**53 + 1, 10**5000], ids=int.bit_length)
def test_a_length_beyond_every_sane_one_is_refused(length):
    with pytest.raises(ArgumentError, match=r"the result of length_of must be at most 9007199254740992, got a whole"):
        as_length(length)


@pytest.mark.parametrize("length", [-1, True, 2.5, float("nan"), float("inf"), "3", None])
def test_a_length_that_is_no_whole_number_is_refused(length):
    with pytest.raises(ArgumentError, match="the result of length_of must be a whole number of 0 or more"):
        as_length(length)


@pytest.mark.parametrize("deadline", [1e300, 10**400, float("inf"), 1e12])
def test_a_deadline_beyond_a_year_is_none(deadline):
    assert as_deadline(deadline) == float("inf")
    assert Settings(deadline_ms=deadline).deadline_ms == float("inf")


@pytest.mark.parametrize("deadline", [float("nan"), -1, 0, "50", True])
def test_a_deadline_that_is_no_time_is_refused(deadline):
    with pytest.raises(ArgumentError, match="deadline_ms must be a number above 0"):
        as_deadline(deadline)


@pytest.mark.parametrize(
    "option", [{"max_items": 10**400}, {"max_tokens": 10**400}, {"max_queue": 2**63}, {"max_wait_ms": 1e300}]
)
def test_limits_that_no_float_or_clock_holds_are_refused(option):
    with pytest.raises(ArgumentError, match=f"{next(iter(option))} must be"):
        Settings(**option)
