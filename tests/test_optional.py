import sys

import pytest

from batchwright._optional import is_installed, require
from batchwright.errors import MissingDependencyError


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(MissingDependencyError, match=r"pip install 'batchwright\[ray\]'") as caught:
        require("surely_not_installed", extra="ray")
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "surely_not_installed"


def test_a_package_outside_the_extras_is_installed_by_its_own_name():
    with pytest.raises(MissingDependencyError, match=r"run: pip install no_such_package$"):
        require("no_such_package", extra=None)


def test_a_package_that_lacks_its_own_dependency_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed") as caught:
        require("half_there", extra="ray")
    assert not isinstance(caught.value, MissingDependencyError)


def test_looking_a_package_up_does_not_import_it(tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("never_imported")
    assert "never_imported" not in sys.modules
