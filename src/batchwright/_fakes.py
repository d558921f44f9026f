"""Names that have moved to ``batchwright.testing``."""

from .testing import FakeClock as FakeClock
from .testing import FakeMemory as FakeMemory
