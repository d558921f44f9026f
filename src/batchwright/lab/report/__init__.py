"""A report about a lab: one self-contained page, the same as Markdown, a table of runs as CSV, and a server."""

from .files import ReportFiles as ReportFiles
from .files import render_csv as render_csv
from .files import render_markdown as render_markdown
from .files import write_report as write_report
from .folder import Lab as Lab
from .folder import LabFolder as LabFolder
from .folder import read_lab as read_lab
from .page import render_html as render_html
from .server import HOST as HOST
from .server import make_server as make_server

__all__ = [
    "HOST",
    "Lab",
    "LabFolder",
    "ReportFiles",
    "make_server",
    "read_lab",
    "render_csv",
    "render_html",
    "render_markdown",
    "write_report",
]
