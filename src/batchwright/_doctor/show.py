"""What ``doctor`` prints."""

from __future__ import annotations

from .._cli.screen import Screen
from .._cli.table import render_table
from .advice import GIB
from .records import Advice, Attention, Findings, Launch, Machine

_ATTENTION_LEGEND = (
    "A step through attention layers alone, forward and backward: the first with a shape, and a later one. Batches are "
    "padded and masked where the kernel takes a mask."
)


def machine_lines(machine: Machine) -> list[str]:
    """Say what the machine is, one line each."""
    where = "no GPU" if machine.device == "cpu" else machine.device
    count = f"{machine.num_devices} x " if machine.num_devices > 1 else ""
    known = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version is not None)
    missing = [name for name, version in machine.versions.items() if version is None]
    return [
        f"device    {count}{machine.name} ({where}), {machine.num_cores} cores",
        f"memory    {machine.free_bytes / GIB:.1f} of {machine.total_bytes / GIB:.1f} GiB free",
        f"versions  {known}",
        *([f"absent    {', '.join(missing)}"] if missing else []),
    ]


def attention_lines(entries: tuple[Attention, ...]) -> list[str]:
    """Lay out the attention kernels side by side."""
    return render_table(
        ["attention", "new shape", "seen before", "extra", "padding"], [_row(entry) for entry in entries]
    )


def launch_lines(launch: Launch) -> list[str]:
    """Lay out training steps by their tokens."""
    rows = [
        [f"{row.tokens:,}", f"{1000 * row.seconds:.1f} ms", f"{row.tokens / row.seconds:,.0f}"] for row in launch.rows
    ]
    return render_table([f"tokens a step, {launch.model}", "time", "tokens/s"], rows)


def advice_lines(found: list[Advice], screen: Screen) -> list[str]:
    """Write numbered advice, each with its line to copy below."""
    lines: list[str] = []
    for number, advice in enumerate(found, start=1):
        lines += screen.wrap(f"{number}. {advice.text}", indent="   ")
        lines += [f"       {advice.code}"] if advice.code else []
    return lines


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
    ]


def _row(entry: Attention) -> list[str]:
    name = entry.backend if entry.picks is None else f"{entry.backend} ({entry.picks})"
    visits = entry.visits
    if visits is None:
        return [name, "not here", "", "", ""]
    times = (visits.first_seconds, visits.later_seconds, visits.extra_seconds)
    return [name, *(f"{1000 * seconds:.1f} ms" for seconds in times), "masked" if entry.takes_mask else "none"]
