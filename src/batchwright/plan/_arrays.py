"""Names that have moved to the ground floor."""

from .._checks import as_whole as as_whole
from .._lengths import as_lengths as as_lengths
from .._lengths import pad_up as pad_up
from .._types import MAX_INT32 as MAX_INT32
from .._types import FloatArray as FloatArray
from .._types import IntArray as IntArray
