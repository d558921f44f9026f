"""One request against all: whatever its length, its result or its error is, the batcher serves the next one."""

import asyncio
import math

import pandas
import pytest

from batchwright.errors import ArgumentError, ResultError
from batchwright.serve import Batcher


class MuteError(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class FalseError(Exception):
    def __bool__(self):
        raise ValueError("neither")


class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("no object behind this proxy")


class Liar(list):
    def __len__(self):
        return 1


class Shy(list):
    def __len__(self):
        raise OverflowError("too many to count")


def raising(error):
    def run(items):
        if "attack" in items:
            raise error
        return items

    return run


def returning(value):
    return lambda items: value if "attack" in items else items


def serves_the_next_one(batcher):
    assert batcher.submit_sync("next") == "next"
    assert batcher.stats().is_healthy
    batcher.close_sync()


@pytest.mark.parametrize("length", [10**400, 2**64, -1, math.nan, math.inf, True, "long", None])
def test_a_length_that_is_none_fails_its_own_request(length):
    batcher = Batcher(list, length_of=lambda item: length if item == "attack" else 4, deadline_ms=60_000)
    with pytest.raises(ArgumentError, match="the result of length_of must be"):
        batcher.submit_sync("attack")
    serves_the_next_one(batcher)


@pytest.mark.parametrize("deadline_ms", [1e300, 10**400, math.inf])
def test_a_deadline_beyond_every_clock_is_no_deadline(deadline_ms):
    batcher = Batcher(list)
    assert batcher.submit_sync("patient", deadline_ms=deadline_ms) == "patient"
    serves_the_next_one(batcher)


@pytest.mark.parametrize("error", [MuteError(), StopIteration(), MemoryError(), GeneratorExit()])
def test_an_error_of_any_kind_fails_its_own_request(error):
    batcher = Batcher(raising(error))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        batcher.submit_sync("attack")
    assert caught.value is error or caught.value.__cause__ is error
    serves_the_next_one(batcher)


def test_an_error_that_is_neither_true_nor_false_fails_its_own_request():
    batcher = Batcher(raising(FalseError()))
    with pytest.raises((FalseError, ValueError)):  # a future asks whether its exception is true
        batcher.submit_sync("attack")
    serves_the_next_one(batcher)


@pytest.mark.parametrize(
    "value",
    [None, {}, {"a": 1}, Liar("ab"), pandas.DataFrame({"a": [1, 2]}), "a", {"a"}, 3],
    ids=lambda value: type(value).__name__,
)
def test_a_result_that_is_none_fails_its_own_request(value):
    batcher = Batcher(returning(value))
    with pytest.raises(ResultError):
        batcher.submit_sync("attack")
    serves_the_next_one(batcher)


def test_a_result_without_a_length_or_a_class_fails_nobody_else():
    batcher = Batcher(returning(Shy([1])))
    with pytest.raises(OverflowError):
        batcher.submit_sync("attack")
    serves_the_next_one(batcher)
    batcher = Batcher(returning([proxy := Proxy()]))
    assert batcher.submit_sync("attack") is proxy
    serves_the_next_one(batcher)


async def double_later(items):
    await asyncio.sleep(0.05)
    return [2 * item for item in items]


def test_to_wait_in_the_thread_of_the_loop_that_runs_the_function_is_refused():
    async def main():
        batcher = Batcher(double_later)
        answer = asyncio.ensure_future(batcher.submit(1))
        await asyncio.sleep(0.01)
        with pytest.raises(ArgumentError, match="await close"):
            batcher.close_sync()
        with pytest.raises(ArgumentError, match="async for"):
            list(batcher.map([1]))
        assert await answer == 2
        batcher.close_sync()  # nothing runs any more

    asyncio.run(asyncio.wait_for(main(), 30))
