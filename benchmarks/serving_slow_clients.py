"""Do good clients get answers while others hold half-open requests, with fewer files than connections?

    python benchmarks/serving_slow_clients.py                        # 1,100 of each kind, a limit of 1,024 files
    python benchmarks/serving_slow_clients.py --connections 200 --files 160

Starts `batchwright serve` under a limit on open files, opens connections that send nothing, half of their headers, or
headers and half of a body, and keeps them. Then asks for answers one after the other, each on a connection of its own,
and prints how many came and how long they took. Connections that the server closes are opened again, as an attacker
would.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import re
import resource
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

KINDS = {
    "silent": b"",
    "headers": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    "body": b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n[",
}
START = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0})); from batchwright.cli import main; "
)


@contextlib.contextmanager
def serving(num_files: int, *, loop: str) -> Iterator[int]:
    """Run a server under a limit on open files and yield its port."""
    code = START.format(num_files)
    if loop == "asyncio":
        code += "sys.modules['uvloop'] = None; "
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "echo.py").write_text("def echo(items):\n    return items\n", encoding="utf-8")
        command = [sys.executable, "-c", code + "sys.exit(main(['serve', 'echo:echo', '--port', '0']))"]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)/", process.stdout.readline())
            assert found is not None, "the server did not start"
            yield int(found[1])
        finally:
            process.kill()
            process.communicate()


def connect(port: int, first: bytes) -> socket.socket | None:
    try:
        made = socket.create_connection(("127.0.0.1", port), timeout=2)
        made.sendall(first)
    except OSError:
        return None
    return made


def renew(held: list[socket.socket], port: int, first: bytes) -> int:
    """Open again what the server has closed, and return how many that were."""
    poll = select.poll()
    by_number = {one.fileno(): one for one in held}
    for number in by_number:
        poll.register(number, select.POLLIN | select.POLLHUP)
    closed = [by_number[number] for number, _ in poll.poll(0)]
    for one in closed:
        held.remove(one)
        one.close()
    held.extend(again for _ in closed if (again := connect(port, first)) is not None)
    return len(closed)


def ask(port: int) -> float | None:
    """Return the seconds of one good request, None if it failed or took more than ten."""
    start = time.perf_counter()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/", body="21")
        answer = connection.getresponse()
        is_right = answer.status == 200 and answer.read() == b"21"
        connection.close()
    except (OSError, http.client.HTTPException):
        return None
    return time.perf_counter() - start if is_right else None


def measure(kind: str, options: argparse.Namespace) -> str:
    with serving(options.files, loop=options.loop) as port, contextlib.ExitStack() as stack:
        assert ask(port) is not None, "the server answers nothing at all"
        held = [made for _ in range(options.connections) if (made := connect(port, KINDS[kind])) is not None]
        stack.callback(lambda: [one.close() for one in held])
        answers, num_closed = [], 0
        for _ in range(options.requests):
            num_closed += renew(held, port, KINDS[kind])
            answers.append(ask(port))
    seconds = [one for one in answers if one is not None]
    times = f"{1e3 * statistics.median(seconds):.1f} ms, at most {1e3 * max(seconds):.0f} ms" if seconds else "-"
    return f"| {kind} | {len(held)} | {num_closed} | {len(seconds)} of {len(answers)} | {times} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1100)
    parser.add_argument("--files", type=int, default=1024, help="the server's limit on open files")
    parser.add_argument("--requests", type=int, default=50, help="good requests")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--loop", choices=("auto", "asyncio"), default="auto", help="auto takes uvloop if it is there")
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print("| half-open | held | closed by the server | good requests answered | median |\n|---|---|---|---|---|")
    for kind in options.kinds:
        print(measure(kind, options), flush=True)


if __name__ == "__main__":
    main()
