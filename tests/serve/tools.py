"""What the tests of serving share: requests by hand, and a function whose calls can be held and looked at."""

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

from batchwright.serve._engine.request import Request, State

ROOT = Path(__file__).parents[2]


def make_requests(lengths, *, gap_seconds=0.001, deadline_seconds=float("inf")):
    """Requests that arrive one after the other; the item is the index."""
    times = [index * gap_seconds for index in range(len(lengths))]
    return [
        Request(index, length, at, at + deadline_seconds)
        for index, (length, at) in enumerate(zip(lengths, times, strict=True))
    ]


def items_of(requests):
    return [request.item for request in requests]


class Recorder:
    """Doubles numbers, remembers every call, and stands still while ``gate`` is closed."""

    def __init__(self, *, held=False, bad=()):
        self.calls, self.bad = [], set(bad)
        self.started, self.gate = threading.Event(), threading.Event()
        if not held:
            self.gate.set()

    def __call__(self, items):
        self.calls.append(list(items))
        self.started.set()
        assert self.gate.wait(30), "nobody opened the gate"
        for item in items:
            if item in self.bad:
                raise ValueError(f"bad item {item}")
        return [2 * item for item in items]

    @property
    def items_run(self):
        return [item for call in self.calls for item in call]


def run_script(text):
    """Run a program in another interpreter, where warnings are errors."""
    code = textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def finish(requests, state=State.ANSWERED):
    for request in requests:
        request.state = state


async def call_and_leave(app, path, body, leave):
    """Post a request as a server does, say that the client has gone once ``leave`` is set, and return the status."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        if messages:
            return messages.pop()
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await app(scope, receive, send)
    return sent[0]["status"]


def wait_until(is_so):
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end, "it did not happen within 30 seconds"
        time.sleep(0.001)
