"""Recognise that memory ran out, without importing the library that ran out."""

from __future__ import annotations

# Classes by name, so that nothing has to be imported: torch and JAX, TensorFlow, Python, NumPy.
_NAMES = frozenset({"OutOfMemoryError", "ResourceExhaustedError", "MemoryError", "_ArrayMemoryError"})
# Texts of errors of other classes: libraries under torch, other back ends, wrapped errors.
_TEXTS = (
    "out of memory",  # CUDA, HIP, MPS, XPU
    "alloc_failed",  # cuBLAS, cuDNN, cuSOLVER, hipBLAS
    "allocfailed",  # MIOpen
    "cublas_status_not_initialized",  # what cuBLAS says when its handle cannot be allocated
    "device_allocation_failed",
    "cusparse_status_insufficient_resources",
    "resource_exhausted",
    "can't allocate memory",
    "failed to allocate memory",
    "not enough memory: you tried to allocate",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out: by the name of its class, by its text, or by one of its causes.

    >>> is_out_of_memory(MemoryError())
    True
    >>> is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(ValueError("out of luck"))
    False
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if any(kind.__name__ in _NAMES for kind in type(current).__mro__):
            return True
        if isinstance(current, RuntimeError) and any(text in str(current).lower() for text in _TEXTS):
            return True
        pending += [current.__cause__, current.__context__]
    return False
