"""A process that has imported what takes long, and forks one rank after the other from there.

Every rank is a process of its own, which has nothing of the ranks before it: it starts from the frameworks as they were
imported, and imports the package and the tests itself. Started by processes.py as ``-m tests.nursery DESCRIPTOR``.
"""

import importlib
import os
import runpy
import signal
import sys
import time
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection

SECONDS_BETWEEN_LOOKS = 0.01


def serve(connection):
    """Fork what is asked for until nobody asks any more; return, in a rank, what it is to run, and None at the end."""
    while (request := receive(connection)) is not None:
        for name in request["frameworks"]:
            with suppress(ImportError):  # the rank says what it misses
                importlib.import_module(name)
        pids = []
        for rank in request["ranks"]:
            pid = fork()
            if pid == 0:
                connection.close()
                return rank
            pids.append(pid)
        codes = wait(connection, pids, request["limit_seconds"])
        if codes is None:
            return None
        connection.send(codes)
    return None


def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads: the one of Arrow's allocator knows of forks
        return os.fork()


def receive(connection):
    try:
        return connection.recv()
    except EOFError:
        return None


def wait(connection, pids, limit_seconds):
    """Return how the ranks ended, those that run too long by SIGKILL, or None when whoever asked is gone."""
    codes, limit = {}, time.monotonic() + limit_seconds
    while len(codes) < len(pids):
        is_alone = connection.poll(SECONDS_BETWEEN_LOOKS)  # nothing is sent while ranks run: it was closed
        for pid in set(pids) - set(codes):
            if is_alone or time.monotonic() > limit:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if is_alone else os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if is_alone:
            return None
    return [codes[pid] for pid in pids]


def become(rank):
    """Turn this process into the one that ``python -m module`` would have started."""
    with open(rank["output"], "wb", buffering=0) as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(rank["environment"])
    for action in rank["warnings"]:
        warnings.simplefilter(action)
    forget_randomness()
    module, *arguments = rank["line"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def forget_randomness():
    """Seed what Python does not seed itself after a fork, with seeds that nobody knows, as in a new process."""
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    if (found := serve(Connection(int(sys.argv[1])))) is not None:
        become(found)
