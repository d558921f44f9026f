"""Out of memory is recognised without torch, and its ceiling falls and rises."""

import pytest

from batchwright.serve._oom import Ceiling, is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error and nothing else of it."""


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("no words"),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:30],
)
def test_it_is_recognised_by_class_or_text(error):
    assert is_out_of_memory(error)


def test_it_is_recognised_behind_another_error():
    error = ValueError("the model failed")
    error.__cause__ = KeyError("state")
    error.__cause__.__context__ = MemoryError()
    assert is_out_of_memory(error)


def test_other_errors_are_not_taken_for_it():
    assert not is_out_of_memory(ValueError("out of memory is what this text is about"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_the_torch_error_itself_is_recognised():
    torch = pytest.importorskip("torch")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))


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
