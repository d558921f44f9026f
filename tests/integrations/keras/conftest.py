"""One thread for TensorFlow, as for torch, and quiet logs; read before Keras is imported."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")

import pytest

# Of Keras itself, on NumPy 2.4.
_IGNORED = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"


def pytest_collection_modifyitems(items):
    for item in items:
        if "integrations/keras" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings(_IGNORED))
