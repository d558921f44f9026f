"""What several folders of these tests use."""

import pytest

from batchwright.serve.demo import Demo, DemoEncoder


@pytest.fixture
def demo():
    return Demo(DemoEncoder(), deadline_ms=1000)
