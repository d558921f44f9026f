"""Run the demo: read, train every arm in turn, write the page."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import batchwright as bw

from .._cli.compare import Settings, compare
from .._cli.screen import Screen
from .._cli.table import percent, render_table, times
from .._types import IntArray
from ..errors import ArgumentError
from .arms import make_arms
from .corpus import lengths_of, load_corpus
from .model import make_model
from .page import Run, render_page
from .results import ArmResult
from .settings import FULL, QUICK
from .training import train_arm


def run_demo(output: Path, *, quick: bool = False) -> Path:
    """Train every arm, print a table, write ``index.html`` and ``results.json``.

    Args:
        output: the folder to write to; made where it is missing.
        quick: a few seconds of training in place of minutes.

    Returns:
        The path of the page.
    """
    start = time.perf_counter()
    screen = Screen.of_stdout()
    settings = QUICK if quick else FULL
    _make_folder(output)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads on shared cores are slower than one, and time less evenly
    try:
        screen.show(["Reading the functions of Python's standard library …"])
        corpus = load_corpus(settings)
        lengths = lengths_of(corpus.train)
        num_parameters = sum(p.numel() for p in make_model(settings, len(corpus.vocabulary)).parameters())
        screen.show([_data_line(lengths, num_parameters, settings.max_tokens), ""])
        results = [train_arm(arm, corpus, settings) for arm in make_arms(corpus.train, settings)]
    finally:
        torch.set_num_threads(num_threads)
    screen.show(["", *result_table(results), ""])
    run = Run(
        settings=settings,
        lengths=lengths,
        comparison=compare(lengths, Settings(max_tokens=settings.max_tokens, seed=settings.seed)),
        results=results,
        num_parameters=num_parameters,
        versions=versions(),
        seconds=time.perf_counter() - start,
    )
    page = _write(run, output)
    screen.show([f"The page: {page}"])
    return page


def result_table(results: Sequence[ArmResult]) -> list[str]:
    """Lay the arms out side by side; ratios are to the first."""
    header = ["", "real tokens/s", "ratio", "padding", "updates", "CPU seconds", "loss"]
    return render_table(
        header,
        [
            [
                result.name,
                f"{result.tokens_per_second:,.0f}",
                times(result.tokens_per_second / results[0].tokens_per_second),
                percent(result.padding),
                f"{result.num_steps:,}",
                f"{result.seconds:.1f}",
                f"{result.loss:.3f}",
            ]
            for result in results
        ],
    )


def versions() -> dict[str, str]:
    """Return what the run depended on, by name."""
    return {
        "batchwright": bw.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "NumPy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()}, one thread",
    }


def _data_line(lengths: IntArray, num_parameters: int, max_tokens: int) -> str:
    return (
        f"{len(lengths):,} functions, {int(lengths.sum()):,} tokens, longest {int(lengths.max())}; "
        f"a model of {num_parameters:,} parameters; at most {max_tokens:,} padded tokens a batch"
    )


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"cannot make the folder {output}: {error.strerror}; name another with --output") from None


def _write(run: Run, output: Path) -> Path:
    page = output / "index.html"
    page.write_text(render_page(run), encoding="utf-8")
    figures = {
        "settings": asdict(run.settings),
        "versions": dict(run.versions),
        "seconds": run.seconds,
        "arms": [result.to_dict() for result in run.results],
    }
    (output / "results.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return page
