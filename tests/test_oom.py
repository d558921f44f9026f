"""Out of memory is recognised without torch."""

import pytest

from batchwright._oom import is_out_of_memory


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
