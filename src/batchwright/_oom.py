"""Recognise that memory ran out, without importing the library that ran out."""

from __future__ import annotations

import errno
import re

# Classes by name, so that nothing has to be imported: torch and JAX, TensorFlow, Python, NumPy.
_NAMES = frozenset({"OutOfMemoryError", "ResourceExhaustedError", "MemoryError", "_ArrayMemoryError"})
# Texts of errors of other classes, in lower case: libraries under torch, other back ends, wrapped errors.
_TEXTS = re.compile(
    "|".join(
        [
            r"out[ _]?of[ _]?(?:device[ _]?|host[ _]?)?memory",  # CUDA, HIP, NCCL, Metal, Level Zero (XPU), XLA
            r"cudaerrormemoryallocation",
            r"alloc_?failed",  # cuBLAS, cuDNN, cuSOLVER, cuFFT, hipBLAS, MIOpen
            r"device_allocation_failed",
            r"devmem allocation failed",  # Gaudi
            r"cublas_status_not_initialized",  # what cuBLAS says when its handle cannot be allocated
            r"cusparse_status_insufficient_resources",
            r"resource_exhausted",
            r"can(?:'t|not| not) allocate memory",  # the CPU, and blocks that a device cannot have in one piece
            r"failed to (?:cuda )?c?alloc(?:ate)? (?:memory|request for|\d)",  # XLA, ONNX Runtime, NCCL
            r"not enough memory: you tried to allocate",
            r"std::bad_alloc|bad allocation",
            r"invalid buffer size: \d",  # Metal
            # torch tries one algorithm after another, swallows that a workspace did not fit, and then says only this.
            # The second text also stands for operations that cuDNN does not have: these fail in the smallest piece
            # too, and the error that is raised then has this one as its cause.
            r"unable to find a valid cudnn algorithm",
            r"unable to find an engine to execute this computation",
        ]
    )
)
# What happened in a loader's process: no smaller piece of the batch helps against it.
_ELSEWHERE = "dataloader worker"


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that memory ran out: by the name of its class, by its text, or by one of its causes.

    Causes are those of ``raise … from …`` and what a compiler of torch wraps. An error that was only raised while
    another one was handled is an error of its own: a bug in an ``except`` block is not hidden.

    >>> is_out_of_memory(MemoryError())
    True
    >>> is_out_of_memory(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(ValueError("out of luck"))
    False
    """
    seen: set[int] = set()
    pending: list[object] = [error]
    while pending:
        current = pending.pop()
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        if _says_so(current):
            return True
        pending += [current.__cause__, vars(current).get("inner_exception")]
    return False


def text_of(error: BaseException) -> str:
    """Return the text of an error, also of one whose class cannot write it.

    >>> class Mute(Exception):
    ...     def __str__(self):
    ...         return None
    >>> text_of(ValueError("odd")), text_of(Mute())
    ('odd', 'an error whose text cannot be read')
    """
    try:
        return str(error)
    except BaseException:  # whatever a class of the user's raises, the error itself is what counts
        return "an error whose text cannot be read"


def _says_so(error: BaseException) -> bool:
    text = text_of(error).lower()
    if _ELSEWHERE in text:
        return False
    if any(kind.__name__ in _NAMES for kind in type(error).__mro__):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _TEXTS.search(text) is not None
