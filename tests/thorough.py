"""How much of a test runs: ``make test`` takes a part of what is drawn or crossed, ``make check`` all of it."""

import os
from itertools import product

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "check"


def num_cases(usual, thorough):
    """Return how many cases a test draws."""
    return thorough if IS_THOROUGH else usual


def crossed(*axes, is_thorough=IS_THOROUGH):
    """Return cases for ``parametrize``: all combinations, or those that ``make test`` takes of them.

    The index along the shortest axis (the last of several) is the sum of the other indices, modulo its length. So two
    axes meet with every value of each, and of three axes every value meets every value of the other two.

    >>> crossed("abc", [0, 1], is_thorough=False)
    [('a', 0), ('b', 1), ('c', 0)]
    >>> len(crossed("abc", "xyz", [0, 1], is_thorough=False)), len(crossed("abc", "xyz", [0, 1], is_thorough=True))
    (9, 18)
    """
    axes = [list(axis) for axis in axes]
    lengths = [len(axis) for axis in axes]
    shortest = max(range(len(axes)), key=lambda place: (-lengths[place], place))
    cases = []
    for indices in product(*map(range, lengths)):
        others = sum(indices) - indices[shortest]
        if is_thorough or indices[shortest] == others % lengths[shortest]:
            cases.append(tuple(axis[index] for axis, index in zip(axes, indices, strict=True)))
    return cases
