"""Where the text goes: how wide it is and which characters it can show."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

# What a terminal without Unicode shows in place of the characters used here.
_PLAIN = str.maketrans({"─": "-", "█": "#", "…": "...", "·": "-"})
_PLAIN.update(dict.fromkeys(map(ord, "▌▋▊▉"), "#"))
_PLAIN.update(dict.fromkeys(map(ord, "▏▎▍"), "."))


@final
@dataclass(frozen=True, kw_only=True)
class Screen:
    """Width in characters, and whether only ASCII can be shown."""

    width: int = 80
    ascii_only: bool = False

    @classmethod
    def of_stdout(cls) -> Screen:
        """Return what standard output can show; 80 characters where it is no terminal."""
        try:
            "█─".encode(sys.stdout.encoding or "ascii")
            ascii_only = False
        except (UnicodeEncodeError, LookupError):
            ascii_only = True
        return cls(width=max(40, shutil.get_terminal_size().columns), ascii_only=ascii_only)

    def show(self, lines: Iterable[str]) -> None:
        """Print lines, in ASCII where that is all there is."""
        for line in lines:
            print(line.translate(_PLAIN).encode("ascii", "replace").decode() if self.ascii_only else line)

    def wrap(self, text: str, *, indent: str = "") -> list[str]:
        """Break a sentence into lines of at most 100 characters.

        >>> Screen(width=40).wrap("one sentence that is longer than the screen", indent="  ")
        ['one sentence that is longer than the', '  screen']
        """
        return textwrap.wrap(text, min(self.width, 100), subsequent_indent=indent, break_on_hyphens=False)
