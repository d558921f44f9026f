"""A report about a lab: one page that needs nothing else, the same as Markdown, and a table of runs as CSV."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ..errors import ArgumentError
from ._report_html import render_html as render_html
from ._report_records import Lab as Lab
from ._report_records import read_lab as read_lab
from ._report_text import render_csv as render_csv
from ._report_text import render_markdown as render_markdown
from ._store import write_atomic
from .observations import observe

__all__ = ["Lab", "ReportFiles", "read_lab", "render_csv", "render_html", "render_markdown", "write_report"]


@final
@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    """Where a report was written."""

    html: Path
    markdown: Path
    csv: Path


def write_report(folder: str | os.PathLike[str]) -> ReportFiles:
    """Write ``report.html``, ``report.md`` and ``report.csv`` into the folder of a lab.

    Args:
        folder: with ``runs.jsonl``; the lab may still be at work.

    Returns:
        The three files.

    Raises:
        ArgumentError: the folder is missing, or holds no run.
    """
    place = Path(folder)
    lab = read_lab(place)
    if not lab.records:
        raise ArgumentError(f"{place} has no finished run yet; wait for the first one")
    files = ReportFiles(html=place / "report.html", markdown=place / "report.md", csv=place / "report.csv")
    observations = observe(lab.records)
    for path, content in (
        (files.html, render_html(lab, observations=observations)),
        (files.markdown, render_markdown(lab, observations=observations)),
        (files.csv, render_csv(lab)),
    ):
        write_atomic(path, content)
    return files
