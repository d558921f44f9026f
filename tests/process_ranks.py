"""Run by test_processes: a rank that does what it is told."""

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path


def describe():
    """Return what a process can leave behind for the next one, if it is the same process."""
    import numpy as np
    import torch

    own = [name for name in sys.modules if name.partition(".")[0] == "batchwright"]
    settings = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(), np.geterr()["divide"]
    is_changed = warnings.filters[0] == ("ignore", None, BytesWarning, None, 0)
    return [*settings, is_changed, own, os.environ.get("LEFT"), os.getcwd(), signal.getsignal(signal.SIGUSR1)]


def change_everything():
    import numpy as np
    import torch

    import batchwright

    batchwright.left = True
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    np.seterr(divide="raise")
    warnings.simplefilter("ignore", BytesWarning)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ["LEFT"] = "something"
    os.chdir("/")


def draw():
    import numpy as np
    import torch

    return hash("text"), random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()


def main(rank, world_size, action, value=None):
    print(f"rank {rank} of {world_size}: {action} {value}", flush=True)
    if action == "describe":
        print(describe())
    elif action == "change":
        change_everything()
    elif action == "environment":
        print(os.environ[value])
    elif action == "randomness":
        print(*draw())
    elif action == "optimized":
        print(__debug__)
    elif action == "warn":
        warnings.warn("as asked", UserWarning, stacklevel=1)
    elif rank == 1 and action == "raise":
        raise ValueError("as asked")
    elif rank == 1 and action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank == 1 and action == "hang":
        Path(value).write_text(str(os.getpid()))
        time.sleep(600)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
