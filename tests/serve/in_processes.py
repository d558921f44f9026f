"""Functions that tests run in processes of workers: a process imports this module by name."""

import os
import signal
import sys
import threading
import time

from batchwright.serve import batched


class Mute(Exception):
    """An error that pickles, and cannot be made again."""

    def __init__(self, first, second):
        super().__init__(first)


def obey(items):
    """Do what the items say; numbers are doubled."""
    return [ORDERS[item]() if isinstance(item, str) and item in ORDERS else 2 * item for item in items]


async def obey_later(items):
    return obey(items)


@batched(worker="process")
def decorated(items):
    return [(os.getpid(), item) for item in items]


@batched(worker="process", background=[[1, 2], [3]])
def decorated_with_background(items):
    return [10 * item for item in items]


class Encoder:
    @batched(worker="process")
    def encode(self, items):
        return items


class Model:
    """Loaded from a file, by the process that reads it."""

    def __init__(self, path):
        self.path = path

    def __call__(self, items):
        return items

    def __setstate__(self, state):
        if not os.path.exists(state["path"]):
            raise FileNotFoundError("no model")


class KilledOnce:
    """A function whose first process is killed from outside while it reads it, as by a system short of memory."""

    def __init__(self, path):
        self.path = path

    def __call__(self, items):
        return items

    def __setstate__(self, state):
        vars(self).update(state)
        if not os.path.exists(self.path):
            open(self.path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


class Obeying:
    """An object that pickles, and does something to the process that reads it."""

    def __init__(self, order):
        self.order = order

    def __call__(self, items):
        return items

    def __setstate__(self, state):
        ORDERS[state["order"]]()


def rows_of_one_tensor(items):
    import torch

    return list(torch.arange(1000 * len(items)).reshape(len(items), 1000))


def mute():
    raise Mute("one", "two")


def memory():
    raise MemoryError("full")


def bad():
    raise ValueError("bad")


ORDERS = {
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda: time.sleep(3600),
    "sys.exit": lambda: sys.exit(4),
    "raise": bad,
    "mute": mute,
    "memory": memory,
    "lambda": lambda: lambda: 1,
    "pid": os.getpid,
    "torch": lambda: "torch" in sys.modules,
    "only there": lambda: LoadsOnlyInWorker(),
}


class LoadsNowhere:
    """An item that can be pickled, and not read again."""

    def __reduce__(self):
        return _fail, ()


class Unloadable:
    """A function that cannot be read in the process."""

    def __call__(self, items):
        return items

    def __reduce__(self):
        return _fail, ()


def _fail():
    raise OSError("no such model")


class Raises:
    """An item that cannot be pickled, whatever its class raises."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class LoadsOnlyInWorker:
    """A result that the process can pickle and its parent cannot read."""

    def __reduce__(self):
        return _fail_in, (os.getppid(),)


def _fail_in(pid):
    if os.getpid() == pid:
        raise SystemExit("not here")


def leave_a_fork(items):
    """Fork for the items "fork" and "fork and raise"; the child comes back from this function."""
    for item in items:
        if isinstance(item, str) and os.fork() == 0:
            if item == "fork":
                return ["from the fork"] * len(items)
            raise ValueError("from the fork")
    return list(items)


def stop_afterwards(items):
    """Answer, and after the item "stop" stop the whole process a moment later."""
    if "stop" in items:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return [len(item) for item in items]


def hold_the_interpreter(items):
    """Never return, and let no other thread run."""
    return [sum(range(10**15)) for _ in items]


def end_the_process(items):
    os._exit(3)
