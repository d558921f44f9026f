"""What the tests of processes share."""

import sys

import pytest

from ..tools import ROOT


@pytest.fixture(scope="module")
def importable():
    """Have processes find the functions of these tests by name."""
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))
