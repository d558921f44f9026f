"""What needs a framework that is not installed is left out of doctests; its tests are skipped and say so."""

import importlib.util
from pathlib import Path

_ROOT = Path(__file__).parent
_NEEDS = {
    "keras": {_ROOT / "src/batchwright/integrations/keras", _ROOT / "tests/integrations/keras/models.py"},
    "sentence_transformers": {
        _ROOT / "src/batchwright/integrations/sentence_transformers",
        _ROOT / "tests/integrations/sentence_transformers/models.py",
    },
    "triton": {_ROOT / "src/batchwright/step/inference/_decode_kernel.py"},
}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave a folder out, or let pytest decide."""
    found = {collection_path, *collection_path.parents}
    is_missing = any(paths & found and importlib.util.find_spec(name) is None for name, paths in _NEEDS.items())
    return True if is_missing else None
