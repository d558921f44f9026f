"""Containers of several kinds, and whether two nested values are the same."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Pair = namedtuple("Pair", ["source", "target"])


@dataclass(frozen=True)
class Inputs:
    tokens: Any
    extra: Any = "a"


def same(first, second):
    """Say whether two values have the same form and hold the same."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and all(map(same, first.flat, second.flat))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, Inputs):
        return same(first.tokens, second.tokens) and same(first.extra, second.extra)
    return first == second
