import pytest

from .trainers import quick


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with quick():
        yield
