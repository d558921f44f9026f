"""Every exception batchwright raises on purpose.

::

    BatchwrightError
    ├── ArgumentError            (ValueError)   an argument is not one of the allowed ones
    │   ├── LengthsError                        the lengths are empty, negative, not integers, …
    │   ├── BudgetError                         the budget is impossible, or an example does not fit it
    │   └── MissingSignalError                  a policy needs a figure that it was not given
    ├── StateMismatchError       (ValueError)   a saved state belongs to other data or settings
    ├── DoesNotFitError          (RuntimeError) one example alone runs out of memory
    ├── UpdateMemoryError        (RuntimeError) the optimizer ran out of memory; its update may be half done
    └── MissingDependencyError   (ImportError)  an optional package is needed; the message names the extra
"""

__all__ = [
    "ArgumentError",
    "BatchwrightError",
    "BudgetError",
    "DoesNotFitError",
    "LengthsError",
    "MissingDependencyError",
    "MissingSignalError",
    "StateMismatchError",
    "UpdateMemoryError",
]


class BatchwrightError(Exception):
    """Catch this to catch everything batchwright raises on purpose."""


class ArgumentError(BatchwrightError, ValueError):
    """An argument is not one of the allowed ones; the message says which are."""


class LengthsError(ArgumentError):
    """The lengths cannot be planned: empty, not integers, below one, or of the wrong shape."""


class BudgetError(ArgumentError):
    """The budget is impossible, or an example alone does not fit it."""


class MissingSignalError(ArgumentError):
    """A policy needs a figure that it was not given; the message says which and where it comes from."""


class StateMismatchError(BatchwrightError, ValueError):
    """A saved state belongs to other data or other settings; the message names both values."""


class DoesNotFitError(BatchwrightError, RuntimeError):
    """One example alone runs out of memory; the message gives its shape and the bytes."""


class UpdateMemoryError(BatchwrightError, RuntimeError):
    """The optimizer ran out of memory in its step; the message says whether parameters have changed."""


class MissingDependencyError(BatchwrightError, ImportError):
    """An optional package is not installed; the message holds the install command."""
