"""Whole numbers on the command line."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read a whole number of one or more."""
    return count(text, least=1)


def count(text: str, *, least: int = 0) -> int:
    """Read a whole number; underscores and commas may group its digits.

    >>> count("16,384")
    16384
    """
    try:
        number = int(text.replace(",", ""))
    except ValueError:
        number = -1
    if number < least:
        raise argparse.ArgumentTypeError(f"needs a whole number of {least} or more, got {text!r}")
    return number
