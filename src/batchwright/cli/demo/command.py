"""The command ``demo``: read the corpus, train every arm in turn, write the page."""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path

import batchwright as bw

from ..._files import make_folder, write_atomic
from ..._machine import one_thread, versions_of
from ..._optional import require
from ..._types import IntArray
from ..compare import Settings, compare
from ..options import Commands, add_command, add_option
from ..screen import Screen, render_table
from .page import RESULT_HEADER, Run, render_page, result_rows
from .records import FULL, QUICK

_DEMO = """\
Train a small model with and without planned batches (needs torch).

The model learns the functions of Python's standard library, with fixed-size batches and with planned
batches, and one page compares them. Needs no network; takes about two minutes.
"""

_EXAMPLES = """\
  batchwright demo
  batchwright demo --quick --output /tmp/demo
"""


def add_demo(commands: Commands) -> None:
    """Add the command ``demo``."""
    command = add_command(commands, "demo", _DEMO, _EXAMPLES, run=_run)
    add_option(command, "--output DIR", "folder for index.html and results.json", type=Path, default=Path("demo_out"))
    add_option(command, "--quick", "train for a few seconds, to see that it runs")


def _run(arguments: argparse.Namespace) -> None:
    """Train every arm, print a table, and write ``index.html`` and ``results.json``."""
    require("torch", extra="torch")
    from .training import lengths_of, load_corpus, make_arms, make_model, train_arm

    start = time.perf_counter()
    screen = Screen.of_stdout()
    settings = QUICK if arguments.quick else FULL
    make_folder(arguments.output)
    with one_thread():  # two threads on shared cores are slower than one, and their times vary more
        screen.show(["Reading the functions of Python's standard library …"])
        corpus = load_corpus(settings)
        lengths = lengths_of(corpus.train)
        num_parameters = sum(p.numel() for p in make_model(settings, len(corpus.vocabulary)).parameters())
        screen.show([_data_line(lengths, num_parameters, settings.max_tokens), ""])
        results = [train_arm(arm, corpus, settings) for arm in make_arms(corpus.train, settings)]
    screen.show(["", *render_table(RESULT_HEADER, result_rows(results)), ""])
    machine = f"{platform.system()} {platform.machine()}, one thread"
    run = Run(
        settings=settings,
        lengths=lengths,
        comparison=compare(lengths, Settings(max_tokens=settings.max_tokens, seed=settings.seed)),
        results=results,
        num_parameters=num_parameters,
        versions={"batchwright": bw.__version__, **versions_of("torch", "numpy"), "machine": machine},
        seconds=time.perf_counter() - start,
    )
    _write(run, arguments.output)
    screen.show([f"The page: {arguments.output / 'index.html'}"])


def _data_line(lengths: IntArray, num_parameters: int, max_tokens: int) -> str:
    return (
        f"{len(lengths):,} functions, {int(lengths.sum()):,} tokens, the longest has {int(lengths.max())}; "
        f"a model with {num_parameters:,} parameters; at most {max_tokens:,} padded tokens per batch"
    )


def _write(run: Run, output: Path) -> None:
    write_atomic(output / "index.html", render_page(run))
    figures = {
        "settings": asdict(run.settings),
        "versions": dict(run.versions),
        "seconds": run.seconds,
        "arms": [result.to_dict() for result in run.results],
    }
    write_atomic(output / "results.json", json.dumps(figures, indent=2) + "\n")
