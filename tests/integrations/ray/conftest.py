"""One Ray on this machine for all tests of this folder: a controller, a proxy, replicas in their own processes."""

import contextlib
import socket
import sys

import pytest
import ray

from batchwright.integrations.ray.deployment import import_serve


def free_port():
    with contextlib.closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="package")
def address():
    """Start Ray and Serve; return where HTTP is served."""
    serve = import_serve()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of its next default
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        port = free_port()
        serve.start(http_options={"port": port}, logging_config={"log_level": "ERROR"})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _pickled_by_value(request):
    """Send what a test module defines to Ray's workers by value: they cannot import the tests."""
    module = sys.modules[request.module.__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    yield
    ray.cloudpickle.unregister_pickle_by_value(module)
