"""Every GPU measurement in turn, as many as the time allows, the most important first.

    python benchmarks/gpu_all.py --prepare FOLDER --corpora CORPORA      # data and packages; needs a network and no GPU
    python benchmarks/gpu_all.py --data FOLDER --output build/gpu_all     # runs what fits into --budget-seconds
    python benchmarks/gpu_all.py --data FOLDER --output build/gpu_all     # goes on with what is left
    python benchmarks/gpu_all.py --list --output build/gpu_all
    python benchmarks/gpu_all.py --rehearse --data FOLDER                  # the smallest form of each, on a CPU

Each measurement is a command of its own with a time limit; its output goes to ``logs`` in the folder of results, and
``status.json`` says how it ended. One that is complete for this kind of GPU and this source (the package and its
script) is not run again; one that was cut off on this very GPU goes on where its script can; one that failed is tried
again after all others. Other results are moved to ``earlier`` first. A result file is named as in
``benchmarks/results``, and ``tools/measured.py`` reads it there. Tests that need a CUDA device are measurements too:
their junit files are kept, and what failed is printed last. ``--archive`` packs the whole folder into one file after
every measurement, for a machine that gives few files back. A rehearsal writes to ``--output`` only if it is given.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from _gpu_all.entries import ENTRIES, Entry, chosen
from _gpu_all.preparing import check, prepare
from _gpu_all.results import Gpu, Row, find_gpu, read_status, read_tests
from _gpu_all.running import Setting, environment, run_all, run_process, state_of

MOST_FAILURES = 40
OUTPUT = Path("build/gpu_all")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-seconds", type=float, default=540.0, help="of this command (default: %(default)s)")
    parser.add_argument("--output", type=Path, help=f"folder of results (default: {OUTPUT})")
    parser.add_argument("--archive", type=Path, help="pack the folder into this file after every measurement")
    parser.add_argument("--data", type=Path, default=Path("build/gpu_data"), help="what --prepare made")
    parser.add_argument("--only", metavar="NAME,...", help="of the measurements that --list shows")
    parser.add_argument("--list", action="store_true", help="show the measurements and which are done, stop")
    parser.add_argument(
        "--rehearse", action="store_true", help="run the smallest forms on the CPU; status 1 on failure"
    )
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make --data, stop")
    parser.add_argument("--corpora", type=Path, help="with --prepare: the folder of corpora")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python-version", default=here, help="of the GPU machine (default: %(default)s)")
    parser.add_argument("--platform", default="manylinux2014_x86_64", help="of the GPU machine (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.prepare is not None and options.corpora is None:
        raise SystemExit("--prepare needs --corpora, the folder of texts")
    if not options.budget_seconds > 0:
        raise SystemExit(f"--budget-seconds must be above 0, got {options.budget_seconds:g}")
    return options


def table(entries: Sequence[Entry], setting: Setting) -> str:
    """Return the measurements with their seconds and how far they are."""
    status = read_status(setting.output)
    lines = [
        "| name | s | at least | state | took s | result | shows |",
        "| --- | ---: | ---: | --- | ---: | --- | --- |",
    ]
    for entry in entries:
        took = f"{status[entry.name]['seconds']:.0f}" if entry.name in status else ""
        cells = [entry.name, str(entry.seconds), str(entry.least), state_of(entry, setting, status), took, entry.result]
        lines.append("| " + " | ".join([*cells, entry.shows]) + " |")
    return "\n".join([*lines, "", f"{sum(entry.seconds for entry in entries):,} s in all, on {setting.gpu.name}"])


def failures(entries: Sequence[Entry], setting: Setting) -> str:
    """Return what the tests say that have run, the failed ones one by one."""
    lines, failed = [], []
    for entry in entries:
        result = setting.output / entry.result
        if entry.is_tests and result.exists():
            found = read_tests(result)
            failed += list(found.failed)
            counts = f"{found.passed} passed, {len(found.failed)} failed, {found.skipped} skipped"
            lines.append(f"{entry.name}: {counts}")
    more = [f"and {len(failed) - MOST_FAILURES} more"] if len(failed) > MOST_FAILURES else []
    return "\n".join([*lines, *failed[:MOST_FAILURES], *more])


def rehearse(entries: Sequence[Entry], options: argparse.Namespace) -> int:
    """Run the smallest form of everything, and return 1 if one of them does not end well with a result."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.output is None else options.output.resolve()
        setting = Setting(folder, options.data.resolve(), Gpu("the CPU", ""), 1e9, smoke=True)
        run = partial(run_process, variables=environment(setting.data, smoke=True))
        status = run_all(entries, setting, run=run)
        print(failures(entries, setting))
    bad = {name: row for name, row in status.items() if row["state"] != "done"}
    for name, row in bad.items():
        print(f"{name}: {row['state']}, status {row['status']}; lacks {row['missing']}; errors {row['errors']}")
    print(f"{len(status) - len(bad)} of {len(entries)} measurements ran to their end")
    return 1 if bad or len(status) < len(entries) else 0


def measure(entries: Sequence[Entry], setting: Setting, started: float) -> dict[str, Row]:
    """Run what fits, then print how far all are and which tests failed."""
    check(entries, setting.data)
    run = partial(run_process, variables=environment(setting.data, smoke=False))
    status = run_all(entries, setting, run=run, started=started)
    print(table(entries, setting))
    print(failures(entries, setting))
    return status


def main() -> None:
    started = time.perf_counter()
    options = parse()
    if options.prepare is not None:
        prepare(options.prepare, options.corpora, python_version=options.python_version, platform=options.platform)
        return
    entries = ENTRIES if options.only is None else chosen(options.only)
    if options.rehearse:
        raise SystemExit(rehearse(entries, options))
    archive = None if options.archive is None else options.archive.resolve()
    output, data = (options.output or OUTPUT).resolve(), options.data.resolve()
    gpu = find_gpu()
    setting = Setting(output, data, gpu or Gpu("no GPU", ""), options.budget_seconds, archive)
    if options.list:
        print(table(entries, setting))
        return
    if gpu is None:
        raise SystemExit("nvidia-smi shows no GPU; --rehearse runs the smallest forms on the CPU")
    measure(entries, setting, started)


if __name__ == "__main__":
    main()
