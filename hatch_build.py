"""What the build does beside packing files: links of the README lead somewhere from the package index too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ModuleNotFoundError:  # a test, which needs only the function
    MetadataHookInterface = object


def with_addresses(text: str, repository: str) -> str:
    """Return a README whose relative links lead to the repository, and its pictures to the files themselves.

    >>> with_addresses("![a](docs/a.svg) [b](docs/b.md#c) [d](https://e.org)", "https://h.org/p")
    '![a](https://h.org/p/raw/main/docs/a.svg) [b](https://h.org/p/blob/main/docs/b.md#c) [d](https://e.org)'
    """
    pictures = re.sub(r"(!\[[^\]]*\]\()(?!https?://)", rf"\1{repository}/raw/main/", text)
    return re.sub(r"(?<=\]\()(?!https?://|#)", f"{repository}/blob/main/", pictures)


class CustomMetadataHook(MetadataHookInterface):
    """Fills in ``readme``, which ``pyproject.toml`` calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README to the metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        address = metadata["urls"]["Repository"]
        metadata["readme"] = {"content-type": "text/markdown", "text": with_addresses(text, address)}
