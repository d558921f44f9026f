"""The front page: what is exported and what importing it costs."""

import subprocess
import sys
import types

import batchwright as bw


def test_the_public_names_are_sorted_and_complete():
    public = {
        name
        for name in dir(bw)
        if name not in ("TYPE_CHECKING", "Any") and not name.startswith("_")
        if not isinstance(getattr(bw, name), types.ModuleType) or name in bw.__all__
    }
    assert bw.__all__ == sorted(bw.__all__)
    assert set(bw.__all__) == public


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_batchwright_leaves_optional_packages_unimported():
    code = "import sys, batchwright, batchwright.testing; print(*sys.modules)"
    loaded = {name.split(".")[0] for name in run(code).split()}
    assert not loaded & {"torch", "transformers", "tokenizers", "numba", "scipy", "pandas", "torchdata"}


def test_importing_batchwright_is_quick_once_numpy_is_there():
    code = "import numpy, time; start = time.process_time(); import batchwright; print(time.process_time() - start)"
    # The promise is 0.3 s, here of the processor. The best of five, since the machine may be busy with something else.
    assert min(float(run(code)) for _ in range(5)) <= 0.3


def test_every_error_is_a_batchwright_error_and_listed():
    errors = [getattr(bw.errors, name) for name in bw.errors.__all__]
    assert all(issubclass(error, bw.errors.BatchwrightError) for error in errors)
    assert bw.errors.__all__ == sorted(bw.errors.__all__)
    assert issubclass(bw.errors.ArgumentError, ValueError)
    assert all(name in bw.errors.__doc__ for name in bw.errors.__all__)
