"""What needs a framework that is not installed is left out of doctests; its tests are skipped and say so."""

import importlib.util
from pathlib import Path

_ROOT = Path(__file__).parent
_KERAS = {_ROOT / "src/batchwright/integrations/keras", _ROOT / "tests/integrations/keras/models.py"}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave a folder out, or let pytest decide."""
    if importlib.util.find_spec("keras") is None and _KERAS & {collection_path, *collection_path.parents}:
        return True
    return None
