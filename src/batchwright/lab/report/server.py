"""A server of the page on this machine's own address, which follows a lab while it runs."""

from __future__ import annotations

import html
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, final

from ..._charts.page import read_asset
from ..._checks import as_whole
from ...errors import ArgumentError, BatchwrightError
from .files import render_csv, render_markdown
from .folder import PLAN, RUNS, TUNING, LabFolder, Pace, Progress, count_lines, progress_of, read_begun, read_lab
from .page import render_html

HOST = "127.0.0.1"
# A page reloads at most this often, so that not every run interrupts the reader.
SECONDS_BETWEEN_PAGES = 15.0
_WAITING = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
    '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><title>batchwright lab</title>'
    '<style>{style}</style></head><body><header><p class="eyebrow">batchwright lab · {name}</p>'
    "<h1>Which batch size strategy, on which data?</h1>"
    '<p class="lead">{words} This page reloads by itself.</p>{bar}</header></body></html>'
)


@final
class LabPages:
    """What the server answers about a folder: the page, its state, the tables.

    Args:
        folder: the folder of the lab.
        clock: returns seconds that never go back.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._lab: LabFolder | None = None
        self._stamp = ""
        self._changed = -SECONDS_BETWEEN_PAGES
        self._page = ("", "")
        self._pace = Pace()

    def page(self) -> str:
        """Return the page of the newest state."""
        with self._lock:
            lab = self._look()
            if lab is None or not lab.records:
                return self._waiting()
            if self._page[0] != self._stamp:
                self._page = (self._stamp, render_html(lab, live="state", stamp=self._stamp))
            return self._page[1]

    def state(self) -> dict[str, Any]:
        """Return the stamp of the page and the progress of the lab, in words and numbers."""
        with self._lock:
            lab = self._look()
            if lab is None:
                return {"stamp": self._stamp, "text": ""}
            found = self._progress(lab)
            return {
                "stamp": self._stamp,
                "text": found.text,
                "done": found.num_done,
                "expected": found.num_expected if found.num_left else None,
            }

    def table(self, render: Callable[[LabFolder], str]) -> str:
        """Return the runs as text."""
        with self._lock:
            lab = self._look()
            return "" if lab is None or not lab.records else render(lab)

    def _look(self) -> LabFolder | None:
        """Read the runs again if the file has changed, but not too often."""
        stamp = _stamp_of(self._folder / RUNS)
        due = self._clock() - self._changed >= SECONDS_BETWEEN_PAGES
        if stamp and stamp != self._stamp and (due or self._lab is None):
            self._lab, self._stamp, self._changed = read_lab(self._folder), stamp, self._clock()
            self._pace.note(self._changed, len(self._lab.records))
        return self._lab

    def _progress(self, lab: LabFolder) -> Progress:
        found = progress_of(lab)
        return replace(found, seconds_left=self._pace.seconds_left(self._clock(), found.num_left))

    def _waiting(self) -> str:
        """Return a page for the time in which learning rates are chosen, or the first runs are under way."""
        expected = progress_of(read_begun(self._folder)).num_expected
        num_tuned = count_lines(self._folder / TUNING)
        words = f"No run of this lab has ended yet{'' if expected is None else f': 0 of {expected:,}'}."
        if num_tuned:
            words += f" Learning rates are chosen first: {num_tuned:,} {'run' if num_tuned == 1 else 'runs'} so far."
        return _WAITING.format(
            style=read_asset("batchwright._charts", "style.css"),
            name=html.escape(self._folder.resolve().name),
            words=words,
            bar="" if expected is None else f'<progress max="{expected}" value="0"></progress>',
        )


def make_server(folder: Path, *, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the page on the loopback address; ``serve_forever`` runs it.

    Args:
        folder: the folder of a lab, which may not have begun.
        port: the port; 0 takes any free one.
    """
    port = as_whole("port", port, least=0)
    if not (folder / RUNS).is_file() and not (folder / PLAN).is_file():
        read_lab(folder)  # says what is missing
    pages = LabPages(folder)
    handler = type("LabHandler", (_Handler,), {"pages": pages})
    try:
        return ThreadingHTTPServer((HOST, port), handler)
    except (OSError, OverflowError) as error:
        raise ArgumentError(f"cannot serve on port {port}: {error}; leave out --port to use a free one") from None


class _Handler(BaseHTTPRequestHandler):
    """Answers four addresses and nothing else; files of the folder cannot be read by name."""

    pages: ClassVar[LabPages]

    def do_GET(self) -> None:
        """Answer a request."""
        # Another host name means that a page from elsewhere tries to read this one.
        if self.headers.get("Host", "").rpartition(":")[0] not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        answers: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html", self.pages.page),
            "/state": ("application/json", lambda: json.dumps(self.pages.state())),
            "/report.md": ("text/markdown", lambda: self.pages.table(render_markdown)),
            "/report.csv": ("text/csv", lambda: self.pages.table(render_csv)),
        }
        kind, answer = answers.get(self.path.partition("?")[0], ("", None))
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            self._send(kind, answer())
        except BatchwrightError as error:
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))

    def _send(self, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a page asks every three seconds and would fill the terminal."""


def _stamp_of(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_size}-{found.st_mtime_ns}"
