"""Packing: rows of several examples without padding, and the attention that keeps them apart."""

from .rows import BOUNDS as BOUNDS
from .rows import FlatBatch as FlatBatch
from .rows import PackedRow as PackedRow
from .rows import flat_lengths as flat_lengths
from .rows import is_flat as is_flat
from .rows import is_packed as is_packed

__all__ = ["BOUNDS", "FlatBatch", "PackedRow", "flat_lengths", "is_flat", "is_packed"]
