"""The token limit of a batch falls when memory runs out, and rises again."""

from batchwright.serve._engine.calls import Garbage, TokenLimit
from batchwright.testing import FakeClock


def test_a_failed_size_halves_the_limit_and_a_larger_one_does_not_raise_it():
    limit = TokenLimit()
    assert limit.within(None) is None
    limit.lower(1000)
    limit.lower(4000)
    assert limit.within(None) == 500


def test_the_limit_rises_with_batches_near_it_only():
    limit = TokenLimit()
    limit.lower(2000)
    for _ in range(1000):
        limit.rise(100)
    assert limit.within(None) == 1000
    for _ in range(100):
        limit.rise(limit.within(None))
    # 1 % per batch up to 0.95 of what failed.
    assert limit.within(None) == 1900


def test_the_limit_of_a_device_with_memory_again_goes_past_what_failed():
    limit = TokenLimit()
    limit.lower(2000)
    for _ in range(1000):
        limit.rise(limit.within(None))
    assert limit.within(8192) == 8192


def test_memory_that_stays_short_fails_again_only_after_about_250_batches_near_the_limit():
    limit = TokenLimit()
    limit.lower(2000)
    num_batches = 0
    while limit.within(None) < 2000:
        limit.rise(limit.within(None))
        num_batches += 1
    assert 240 <= num_batches <= 270


def test_the_smallest_limit_rises_too():
    limit = TokenLimit()
    limit.lower(2)
    assert limit.within(None) == 1
    for _ in range(400):
        limit.rise(limit.within(None))
    assert limit.within(None) > 2


def test_a_failed_size_that_has_fitted_lowers_the_limit_only_if_it_fails_again():
    limit = TokenLimit()
    limit.rise(1000)
    limit.lower(1000)
    assert limit.within(None) is None
    limit.rise(900)
    limit.lower(1000)
    assert limit.within(None) == 500


def test_full_collections_of_garbage_take_a_twentieth_of_the_time_at_most():
    clock, collected = FakeClock(), []

    def collect(generation):
        collected.append(generation)
        clock.advance(0.3 if generation == 2 else 0.001)

    garbage = Garbage(clock, collect)
    for _ in range(60):  # one item per second runs out of memory, and has one full collection
        garbage.collect(full=False)
        garbage.collect(full=True)
        clock.advance(1.0)
    assert collected[:2] == [1, 2]
    # 0.3 s each, and 6 s until the next.
    assert 9 <= collected.count(2) <= 10


def test_a_small_program_collects_everything_whenever_it_is_due():
    clock, collected = FakeClock(), []
    garbage = Garbage(clock, collected.append)
    for _ in range(3):
        garbage.collect(full=True)
        clock.advance(0.01)
    assert collected == [2, 2, 2]
