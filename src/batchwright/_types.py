"""Array types that every room shares, and the largest number their indices can hold."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.signedinteger[Any]]
FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]

# Indices and lengths are held in 32 bits: half the memory of NumPy's default, and enough for two billion examples.
MAX_INT32 = 2**31 - 1
