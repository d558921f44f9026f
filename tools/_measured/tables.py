"""Markdown made of numbers: tables, ratios, shares, and where a number comes from."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from .reading import read

_HELD = "\x00"  # a space inside a command, where no line may break


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: words on the left, the rest on the right.

    >>> print(table(["", "ms"], [["ours", "3"]]))
    |  | ms |
    | --- | ---: |
    | ours | 3 |
    """
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 0) -> str:
    """Return a number with its thousands, nothing where there is none.

    >>> number(12345.6), number(0.75, 2), number(None)
    ('12,346', '0.75', '')
    """
    return "" if value is None else f"{value:,.{digits}f}"


def short(value: float | None) -> str:
    """Return about three digits.

    >>> short(0.7612), short(12.34), short(214.2), short(None)
    ('0.76', '12.3', '214', '')
    """
    return "" if value is None else number(value, 2 if value < 10 else 1 if value < 100 else 0)


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in per cent.

    >>> percent(0.123), percent(None)
    ('12.3 %', '')
    """
    return "" if share is None else f"{100 * share:.{digits}f} %"


def raw(*files: str) -> str:
    """Return links to result files, as a page in ``docs`` has them; each is read, so that a missing one is named."""
    for name in files:
        read(name)
    return ", ".join(f"[{name.removesuffix('.json')}](../benchmarks/results/{name})" for name in files)


def named(names: dict[str, str], arm: Any) -> str:
    """Return how the page calls an arm; one without a name is called as in its file."""
    return names.get(arm, str(arm))


def filled(page: str) -> str:
    """Return a page whose paragraphs have lines of at most 120 characters; tables, pictures and titles stay.

    >>> print(filled("one\\ntwo\\n\\n| a |\\n| b |"))
    one two
    <BLANKLINE>
    | a |
    | b |
    """
    parts = page.strip().split("\n\n")
    return "\n\n".join(part if part.startswith(("|", "#", "!")) else _filled(part) for part in parts)


def _filled(paragraph: str) -> str:
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", _HELD), paragraph.replace("\n", " "))
    return textwrap.fill(whole, 120, break_long_words=False, break_on_hyphens=False).replace(_HELD, " ")
