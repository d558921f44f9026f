"""The extension that mkdocstrings loads: what docstrings are before they are parsed, see ``docs_site.as_markdown``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from griffe import Extension

sys.path.insert(0, str(Path(__file__).parent))  # this file is loaded by its path

from docs_site import as_markdown


class Docstrings(Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        del kwargs
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
