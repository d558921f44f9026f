"""What a request may end with, other than its answer or the exception of its own item."""

from __future__ import annotations

from typing import final

from ..errors import BatchwrightError, BudgetError


@final
class Closed(BatchwrightError, RuntimeError):
    """The batcher takes no more requests, or was closed before this one ran."""


@final
class QueueFull(BatchwrightError, RuntimeError):
    """As many requests wait as are allowed; try again later."""


@final
class TooLarge(BudgetError):
    """The item alone is over ``max_tokens``."""


@final
class ResultError(BatchwrightError, RuntimeError):
    """The function did not return one result for each item."""


@final
class DeadlineExceeded(BatchwrightError, TimeoutError):
    """The request could not finish before its deadline, so it was not run.

    Args:
        message: says how long it waited and when it would have finished.
        waited_seconds: from its submission to the refusal.
        deadline_seconds: what was allowed, from its submission.
        predicted_seconds: when it would have finished alone, from its submission; None where nothing was measured yet.
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
        self.waited_seconds = waited_seconds
        self.deadline_seconds = deadline_seconds
        self.predicted_seconds = predicted_seconds
