"""The ceiling of a batch falls when memory runs out, and rises again."""

from batchwright.serve._engine.core import Ceiling


def test_a_failed_size_halves_the_ceiling_and_a_larger_one_does_not_raise_it():
    ceiling = Ceiling()
    assert ceiling.limit(None) is None
    ceiling.lower(1000)
    ceiling.lower(4000)
    assert ceiling.limit(None) == 500


def test_the_ceiling_rises_with_batches_near_it_only():
    ceiling = Ceiling()
    ceiling.lower(2000)
    for _ in range(1000):
        ceiling.rise(100)
    assert ceiling.limit(None) == 1000
    for _ in range(100):
        ceiling.rise(ceiling.limit(None))
    # 1 % a batch up to 0.9 of what failed, then 0.05 %: past 1800, not yet at 2000.
    assert 1800 <= ceiling.limit(None) < 2000


def test_the_ceiling_of_a_device_with_memory_again_goes_past_what_failed():
    ceiling = Ceiling()
    ceiling.lower(2000)
    for _ in range(1000):
        ceiling.rise(ceiling.limit(None))
    assert ceiling.limit(8192) == 8192
