"""A name that has moved to ``batchwright.testing``."""

from .testing import check_policy as check_policy
