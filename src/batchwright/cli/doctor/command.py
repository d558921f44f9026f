"""The command ``doctor``: its options and the text that it prints."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ..._optional import require
from ..options import Commands, add_command, add_option
from ..screen import Screen, counted, render_table
from .advice import advise, free_memory
from .records import Advice, Attention, Findings, Graphs, Launch, Machine

_DOCTOR = """\
Measure this machine and say what to set (needs torch).

What it measures:

  memory      how much this process can use, and what holds the rest
  attention   which attention kernels run here, and what a new batch shape costs with each of them: some
              plan again for every shape, and then few shapes or another kernel save time
  sizes       the batch size below which a step takes only as long as launching its kernels, and the one
              above which throughput hardly grows
  graphs      what CUDA graphs save, and up to which size of step they pay (needs a CUDA device)
  encoding    the same for forward passes without gradients, as an encoder runs them

Each result comes with what it means for your batches, and a line to copy. Everything is measured several
times, and what the repeats contradict is not stated: on a busy machine the answer is that it is too busy.
Takes about half a minute; it trains small models of its own and changes nothing.
"""

_EXAMPLES = """\
  batchwright doctor
  batchwright doctor --quick            a few seconds, rougher numbers
  batchwright doctor --json > machine.json
"""

_ATTENTION_LEGEND = (
    "The time of a step through a stack of attention layers, forward and backward: the first one with a shape, and a "
    "later one. Batches are padded and masked if the kernel takes a mask."
)


def add_doctor(commands: Commands) -> None:
    """Add the command ``doctor``."""
    command = add_command(commands, "doctor", _DOCTOR, _EXAMPLES, run=_run)
    add_option(command, "--quick", "measure fewer shapes and sizes: a few seconds")
    add_option(command, "--json", "print one JSON object and nothing else")


def _run(arguments: argparse.Namespace) -> None:
    require("torch", extra="torch")
    from .examine import examine
    from .machine import default_device

    progress = sys.stderr.isatty() and not arguments.json
    findings = examine(default_device(), quick=arguments.quick, progress=progress)
    found = advise(findings)
    if arguments.json:
        print(json.dumps({**findings.to_dict(), "advice": [asdict(advice) for advice in found]}, indent=2))
        return
    screen = Screen.of_stdout()
    screen.show([*findings_lines(findings, screen), *advice_lines(found, screen)])


def findings_lines(findings: Findings, screen: Screen) -> list[str]:
    """Write everything that was measured."""
    return [
        *machine_lines(findings.machine),
        "",
        *attention_lines(findings.attention),
        *screen.wrap(_ATTENTION_LEGEND),
        "",
        *launch_lines(findings.launch),
        "",
        *graph_lines("graphs", "tokens per step, forward and backward", findings.graphs, screen),
        "",
        *more_graph_lines("encoding", "tokens per batch, forward only", findings.encoding, findings, screen),
        *more_graph_lines("decoding", "rows, one more token for each", findings.decoding, findings, screen),
    ]


def machine_lines(machine: Machine) -> list[str]:
    """Describe the machine: device, memory, versions and missing packages."""
    where = "no GPU" if machine.device == "cpu" else machine.device
    count = f"{machine.num_devices} x " if machine.num_devices > 1 else ""
    known = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version is not None)
    missing = [name for name, version in machine.versions.items() if version is None]
    return [
        f"device    {count}{machine.name} ({where}), {counted(machine.num_cores, 'core')}",
        f"memory    {free_memory(machine)} free",
        f"versions  {known}",
        *([f"missing   {', '.join(missing)}"] if missing else []),
    ]


def attention_lines(entries: tuple[Attention, ...]) -> list[str]:
    """Lay out the attention kernels side by side."""
    header = ["attention", "new shape", "seen before", "extra", "padding"]
    return render_table(header, [_row(entry) for entry in entries])


def launch_lines(launch: Launch) -> list[str]:
    """Lay out training steps by their tokens."""
    rows = [
        [f"{row.tokens:,}", f"{1000 * row.seconds:.1f} ms", f"{row.tokens / row.seconds:,.0f}"] for row in launch.rows
    ]
    return render_table([f"tokens per step, {launch.model}", "time", "tokens/s"], rows)


def graph_lines(topic: str, title: str, graphs: Graphs, screen: Screen) -> list[str]:
    """Lay out passes without and with a CUDA graph; say what is missing and why."""
    missing = screen.wrap(f"{topic:<10}{graphs.problem or 'not measured'}.", indent="          ")
    if not graphs.rows:
        return missing
    rows = [
        [
            f"{row.tokens:,}",
            f"{1000 * row.eager_seconds:.1f} ms",
            f"{1000 * row.replay_seconds:.1f} ms",
            f"{row.gain:.1f} x",
        ]
        for row in graphs.rows
    ]
    lines = render_table([title, "eager", "CUDA graph", "gain"], rows)
    took = f"Capturing all of these took {graphs.capture_seconds:.1f} s."
    return [*lines, *screen.wrap(took), *(missing if graphs.problem else [])]


def more_graph_lines(topic: str, title: str, graphs: Graphs, findings: Findings, screen: Screen) -> list[str]:
    """Lay out other passes without and with a CUDA graph, unless what is missing was said of steps already."""
    if not graphs.rows and graphs.problem == findings.graphs.problem:
        return []
    return [*graph_lines(topic, title, graphs, screen), ""]


def advice_lines(found: list[Advice], screen: Screen) -> list[str]:
    """Write numbered advice, each with its line to copy below it."""
    lines: list[str] = []
    for number, advice in enumerate(found, start=1):
        lines += screen.wrap(f"{number}. {advice.text}", indent="   ")
        lines += [f"       {advice.code}"] if advice.code else []
    return lines


def _row(entry: Attention) -> list[str]:
    name = entry.backend if entry.picks is None else f"{entry.backend} ({entry.picks})"
    visits = entry.visits
    if visits is None:
        return [name, "not here", "", "", ""]
    seconds = (visits.first_seconds, visits.later_seconds, visits.extra_seconds)
    return [name, *(f"{1000 * each:.1f} ms" for each in seconds), "masked" if entry.takes_mask else "none"]
