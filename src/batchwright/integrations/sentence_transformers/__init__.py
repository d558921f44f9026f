"""sentence-transformers: ``encode`` in place of ``model.encode``, without a batch size."""

from ..._optional import require

require("torch", extra="sentence-transformers")
require("sentence_transformers", extra="sentence-transformers")

# After the check, so that its message is read.
from .encoding import encode  # noqa: E402

__all__ = ["encode"]
