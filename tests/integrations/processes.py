"""Run a script once for every rank, and leave no process behind."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def run_ranks(script, world_size, folder):
    """Fail with all outputs if a rank does, or if one waits for ever."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / script), str(rank), str(world_size), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # of one that has ended, nothing
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(outputs)
