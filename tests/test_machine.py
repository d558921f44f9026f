"""What a machine says about itself, and one thread where sums must keep their order."""

import os
import platform

import numpy as np
import pytest

from batchwright import _machine
from batchwright._machine import num_cores, one_thread, processor_name, versions_of


def test_the_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert num_cores() == 3


@pytest.mark.parametrize(("counted", "expected"), [(6, 6), (None, 1)])
def test_without_affinity_all_cores_count(monkeypatch, counted, expected):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert num_cores() == expected


def test_the_processor_is_called_by_its_first_model_name(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_bytes(b"vendor_id\t: X\nmodel name\t: Fast: 3 GHz \xff\nmodel name\t: other\n")
    monkeypatch.setattr(_machine, "Path", lambda path: info)
    assert processor_name() == "Fast: 3 GHz \ufffd"


@pytest.mark.parametrize(("processor", "kind", "expected"), [("arm", "x", "arm"), ("", "x", "x"), ("", "", "unknown")])
def test_without_that_file_python_is_asked(monkeypatch, tmp_path, processor, kind, expected):
    monkeypatch.setattr(_machine, "Path", lambda path: tmp_path / "missing")
    monkeypatch.setattr(platform, "processor", lambda: processor)
    monkeypatch.setattr(platform, "machine", lambda: kind)
    assert processor_name() == expected


def test_versions_are_those_of_python_and_what_is_installed():
    assert versions_of("numpy", "no_such_package") == {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "no_such_package": None,
    }


def fail_in_one_thread(torch):
    with one_thread():
        raise KeyError(torch.get_num_threads())


def test_one_thread_is_undone_after_an_error():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(KeyError, match="1"):
            fail_in_one_thread(torch)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
