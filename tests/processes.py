"""Run a module in processes of its own, one for every rank, and leave none behind."""

import atexit
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 240

# What ranks import, or frameworks when they are first used. A nursery imports it once, for all ranks after that.
TORCH = ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pytest")
HUGGING_FACE = (*TORCH, "accelerate", "peft", "datasets", "transformers.trainer")
FRAMEWORKS = {
    "tests.integrations.accelerate": HUGGING_FACE,
    "tests.integrations.dynabatch": HUGGING_FACE,
    "tests.integrations.huggingface.trl_ranks": (*HUGGING_FACE, "trl.trainer.sft_trainer", "sentence_transformers"),
    "tests.integrations.huggingface": HUGGING_FACE,
    "tests.integrations.lightning": (*TORCH, "lightning.pytorch"),
}


def run_ranks(module, world_size, *arguments, python=(), fresh=False):
    """Run ``module rank world_size *arguments`` for all ranks and return what they printed.

    ``python`` are options of the interpreter. Fails with all outputs if a rank does, or if one waits for ever.

    Every rank is a new process, forked from one that has imported the frameworks: see nursery.py. With ``fresh`` it is
    a new interpreter, for what is decided while a framework is imported; options other than ``-W`` need one as well.
    """
    lines = [[module, str(rank), str(world_size), *map(str, arguments)] for rank in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(rank) for rank in range(world_size)]
        if fresh or set(python[::2]) - {"-W"}:
            codes = run_interpreters(lines, paths, python)
        else:
            codes = run_forks(lines, paths, python[1::2])
        outputs = [path.read_text() for path in paths]
    assert codes == [0] * world_size, "\n".join([f"exit codes {codes}", *outputs])
    return outputs


def run_alone(module, *arguments):
    """Run ``module *arguments`` in a new process, forked as ranks are, and return its exit code and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        (code,) = run_forks([[module, *map(str, arguments)]], [output], ())
        return code, output.read_text()


def run_interpreters(lines, paths, options):
    """Run every line in an interpreter of its own and return the exit codes."""
    processes = []
    for line, path in zip(lines, paths, strict=True):
        with path.open("wb") as output:
            command = [sys.executable, *options, "-m", *line]
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT)
            )
    limit = time.monotonic() + LIMIT_SECONDS
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, limit - time.monotonic()))
    finally:
        for process in processes:
            process.kill()  # of one that has ended, nothing
    return [process.wait() for process in processes]


def run_forks(lines, paths, warnings):
    """Run every line in a fork of a nursery and return the exit codes.

    Ranks take turns in two nurseries: hashes of texts, and with them the order of sets, differ between ranks as they do
    between interpreters.
    """
    frameworks = next((names for start, names in FRAMEWORKS.items() if lines[0][0].startswith(start)), TORCH)
    ranks = [
        {"line": line, "output": str(path), "warnings": warnings, "environment": environment()}
        for line, path in zip(lines, paths, strict=True)
    ]
    shares = [share for share in (ranks[0::2], ranks[1::2]) if share]
    nurseries = [Nursery.number(place) for place in range(len(shares))]
    try:
        for nursery, share in zip(nurseries, shares, strict=True):
            nursery.ask(share, frameworks)
        codes = [nursery.answer() for nursery in nurseries]
    except BaseException:
        for nursery in nurseries:
            nursery.close()  # and with it the ranks that still run
        raise
    return [codes[rank % 2][rank // 2] for rank in range(len(lines))]


def environment():
    """Return the environment of every rank, forked or not: one thread each.

    A fork has none of the threads of a pool that stands, and would wait for them.
    """
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Nursery:
    """A process that runs nursery.py, from the first test that needs it to the last test."""

    everyone: "dict[int, Nursery]" = {}  # noqa: RUF012

    @classmethod
    def number(cls, place):
        if place not in cls.everyone:
            cls.everyone[place] = cls(place)
        return cls.everyone[place]

    def __init__(self, place):
        self.place = place
        self.connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "tests.nursery", str(theirs.fileno())]
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=[theirs.fileno()])
        theirs.close()
        atexit.register(self.close)

    def ask(self, ranks, frameworks):
        self.connection.send({"ranks": ranks, "frameworks": frameworks, "limit_seconds": LIMIT_SECONDS})

    def answer(self):
        """Return the exit codes of the ranks that were asked for."""
        if not self.connection.poll(LIMIT_SECONDS + 60):
            raise TimeoutError("the process that forks the ranks does not answer")
        return self.connection.recv()

    def close(self):
        atexit.unregister(self.close)
        self.everyone.pop(self.place, None)
        self.connection.close()
        self.process.wait()


def act_as_torchrun(rank, world_size, store):
    """Set the environment that torchrun would; the first rank chooses a free port and writes it to a file."""
    path = Path(store)
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        path.with_suffix(".new").write_text(str(port))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.05)
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"OMP_NUM_THREADS": "1", **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": path.read_text()}


def leave_group():
    """Leave the process group of this rank, as the last thing it does.

    A thread of gloo that lets go of the tensor of the last collective needs the interpreter for a moment. One that
    comes while Python ends is stopped inside a destructor, and the process aborts. DDP never lets go of its group, so
    those threads cannot be joined (torch 2.13): they are given the interpreter instead.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    time.sleep(0.2)
