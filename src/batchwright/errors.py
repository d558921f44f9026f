"""Every exception batchwright raises on purpose.

::

    BatchwrightError
    ├── ArgumentError            (ValueError)   an argument is not one of the allowed ones
    │   ├── LengthsError                        the lengths are empty, negative, not integers, …
    │   ├── BudgetError                         the budget is impossible, or an example does not fit it
    │   │   └── TooLarge                        one request is over the batcher's limit by itself
    │   └── MissingSignalError                  a policy needs a figure that it was not given
    ├── StateMismatchError       (ValueError)   a saved state belongs to other data or settings
    ├── DoesNotFitError          (RuntimeError) one example runs out of memory by itself
    ├── UpdateMemoryError        (RuntimeError) the optimizer ran out of memory; its update may be half done
    ├── RankError                (RuntimeError) another rank failed, so this one stopped with it
    ├── Closed                   (RuntimeError) a batcher takes no more requests
    ├── QueueFull                (RuntimeError) as many requests wait as are allowed
    ├── ResultError              (RuntimeError) a batched function did not return one result per item
    ├── RunInterrupted           (RuntimeError) a batched function raised SystemExit or the like
    ├── WorkerDied               (RuntimeError) the process that ran a batched function ended
    ├── RunTimeout               (TimeoutError) a call of a batched function took longer than it may
    ├── DeadlineExceeded         (TimeoutError) a request could not finish in time, so it was not run
    ├── StoreError               (OSError)      results of a lab cannot be written or read
    └── MissingDependencyError   (ImportError)  an optional package is needed; the message names the extra
"""

from __future__ import annotations

from typing import final

__all__ = [
    "ArgumentError",
    "BatchwrightError",
    "BudgetError",
    "Closed",
    "DeadlineExceeded",
    "DoesNotFitError",
    "LengthsError",
    "MissingDependencyError",
    "MissingSignalError",
    "QueueFull",
    "RankError",
    "ResultError",
    "RunInterrupted",
    "RunTimeout",
    "StateMismatchError",
    "StoreError",
    "TooLarge",
    "UpdateMemoryError",
    "WorkerDied",
]


class BatchwrightError(Exception):
    """Catch this to catch everything batchwright raises on purpose."""


class ArgumentError(BatchwrightError, ValueError):
    """An argument is not one of the allowed ones; the message says which are."""


class LengthsError(ArgumentError):
    """The lengths cannot be planned: empty, not integers, below one, or of the wrong shape."""


class BudgetError(ArgumentError):
    """The budget is impossible, or an example does not fit it by itself."""


class MissingSignalError(ArgumentError):
    """A policy needs a figure that it was not given; the message says which and where it comes from."""


class StateMismatchError(BatchwrightError, ValueError):
    """A saved state belongs to other data or other settings; the message names both values."""


class DoesNotFitError(BatchwrightError, RuntimeError):
    """One example runs out of memory by itself; the message gives its shape and the bytes."""


class UpdateMemoryError(BatchwrightError, RuntimeError):
    """The optimizer ran out of memory in its step; the message says whether parameters have changed.

    Args:
        message: says what has changed, and what to do.
        num_changed: parameters that certainly have new values.
        can_retry: neither parameters nor the optimizer's state have changed, so the same step can run again.
    """

    def __init__(self, message: str, *, num_changed: int = 0, can_retry: bool = False) -> None:
        super().__init__(message)
        self.num_changed = int(num_changed)
        self.can_retry = bool(can_retry)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the figures between processes."""
        return _update_memory_error, (type(self), str(self), self.num_changed, self.can_retry)


def _update_memory_error(
    kind: type[UpdateMemoryError], message: str, num_changed: int, can_retry: bool
) -> UpdateMemoryError:
    return kind(message, num_changed=num_changed, can_retry=can_retry)


class RankError(BatchwrightError, RuntimeError):
    """Another rank failed with an error of its own class; the message gives the rank, the class and the text."""


class MissingDependencyError(BatchwrightError, ImportError):
    """An optional package is not installed; the message holds the install command."""


@final
class Closed(BatchwrightError, RuntimeError):
    """The batcher takes no more requests, or was closed before this one ran."""


@final
class QueueFull(BatchwrightError, RuntimeError):
    """As many requests wait as are allowed; try again later."""


@final
class TooLarge(BudgetError):
    """The item is over ``max_tokens`` by itself."""


@final
class ResultError(BatchwrightError, RuntimeError):
    """The function did not return one result for each item."""

    num_results: int | None = None  # how many there were, where they could be counted


@final
class RunInterrupted(BatchwrightError, RuntimeError):
    """The function raised what would end a thread or an event loop, such as ``SystemExit``; that is the cause."""


@final
class WorkerDied(BatchwrightError, RuntimeError):
    """The process that ran the function ended or could not start; the message says how."""


@final
class RunTimeout(BatchwrightError, TimeoutError):
    """A call of the function took longer than ``run_timeout_ms`` and was given up."""


class StoreError(BatchwrightError, OSError):
    """Results cannot be written or read; the message says where and why, and what was kept."""


@final
class DeadlineExceeded(BatchwrightError, TimeoutError):
    """The request could not finish before its deadline, so it was not run.

    Args:
        message: says how long it waited and when it would have finished.
        waited_seconds: from its submission to the refusal.
        deadline_seconds: what was allowed, from its submission.
        predicted_seconds: when it would have finished by itself, from its submission; None where nothing was
            measured yet.
    """

    def __init__(
        self,
        message: str,
        *,
        waited_seconds: float = 0.0,
        deadline_seconds: float = 0.0,
        predicted_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.waited_seconds = float(waited_seconds)
        self.deadline_seconds = float(deadline_seconds)
        self.predicted_seconds = None if predicted_seconds is None else float(predicted_seconds)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the figures between processes."""
        figures = (self.waited_seconds, self.deadline_seconds, self.predicted_seconds)
        return _deadline_exceeded, (str(self), *figures)


def _deadline_exceeded(message: str, waited: float, deadline: float, predicted: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(message, waited_seconds=waited, deadline_seconds=deadline, predicted_seconds=predicted)
