"""Shared set-up: one thread for torch, Ctrl-C as in the foreground, hypothesis profiles, GPU marker, the browser."""

import gc
import importlib.util
import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from .browser import Browser, find_chromium

# `make test` runs the first, `make check` the second. No deadline: machines are noisy and tests assert behaviour.
settings.register_profile("test", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("check", deadline=None, max_examples=1500, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "test"))


# Packages that tell somebody of their use, or look for models there, are to leave the network alone.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config):
    # A shell starts what runs in the background with SIGINT ignored, and processes under test would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("torch") is not None:
        import torch
        import torch.utils.data

        torch.set_num_threads(1)
        # After an error in a DataLoader its workers are collected as garbage, together with the queues that would tell
        # them to end; torch 2.13 waits this long for each worker before it ends it, 5 seconds by itself.
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("needs_cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    # Out of memory collects garbage, and would look at every object of every package and test each time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_gradient_state():
    """Let optimizers of Accelerate step again after a test that ended in the middle of an accumulation."""
    yield
    if "accelerate.state" in sys.modules:
        shared = sys.modules["accelerate.state"].GradientState._shared_state
        if shared:
            shared["sync_gradients"] = True


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep the budgets that a test finds out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if find_chromium() is None:
        pytest.skip("needs a browser: install the Debian package chromium (apt-get install chromium)")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
