"""Run a module once for every rank, and leave no process behind."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_ranks(module, world_size, *arguments, python=()):
    """Run ``module rank world_size *arguments`` for all ranks and return what they printed.

    ``python`` are options of the interpreter. Fails with all outputs if a rank does, or if one waits for ever.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, *python, "-m", module, str(rank), str(world_size), *map(str, arguments)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # of one that has ended, nothing
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(outputs)
    return outputs


def leave_group():
    """Leave the process group of this rank, as the last thing it does.

    A thread of gloo that lets go of the tensor of the last collective needs the interpreter for a moment. One that
    comes while Python ends is stopped inside a destructor, and the process aborts. DDP never lets go of its group, so
    those threads cannot be joined (torch 2.13): they are given the interpreter instead.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    time.sleep(0.2)
