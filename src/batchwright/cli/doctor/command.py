"""The command ``doctor``: its options and the text that it prints."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace

from ..._optional import require
from ..options import Commands, add_command, add_option
from ..screen import Screen, render_table
from .records import Advice, Attention, Findings, Launch, Machine, Visits

_DOCTOR = """\
Measure this machine and say what to set (needs torch).

What it measures:

  memory      how much this process can use, and what holds the rest
  attention   which attention kernels run here, and what a new batch shape costs with each of them: some
              plan again for every shape, and then few shapes or another kernel save time
  sizes       the batch size below which a step takes only as long as launching its kernels, and the one
              above which throughput hardly grows

Each result comes with what it means for your batches, and a line to copy. Takes about half a minute; it
trains small models of its own and changes nothing.
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

    findings = examine(quick=arguments.quick, progress=sys.stderr.isatty() and not arguments.json)
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
    ]


def machine_lines(machine: Machine) -> list[str]:
    """Describe the machine: device, memory, versions and missing packages."""
    where = "no GPU" if machine.device == "cpu" else machine.device
    count = f"{machine.num_devices} x " if machine.num_devices > 1 else ""
    known = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version is not None)
    missing = [name for name, version in machine.versions.items() if version is None]
    return [
        f"device    {count}{machine.name} ({where}), {machine.num_cores} cores",
        f"memory    {_free(machine)} free",
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


def advice_lines(found: list[Advice], screen: Screen) -> list[str]:
    """Write numbered advice, each with its line to copy below it."""
    lines: list[str] = []
    for number, advice in enumerate(found, start=1):
        lines += screen.wrap(f"{number}. {advice.text}", indent="   ")
        lines += [f"       {advice.code}"] if advice.code else []
    return lines


def _free(machine: Machine) -> str:
    return f"{machine.free_bytes / GIB:.1f} of {machine.total_bytes / GIB:.1f} GiB"


def _row(entry: Attention) -> list[str]:
    name = entry.backend if entry.picks is None else f"{entry.backend} ({entry.picks})"
    visits = entry.visits
    if visits is None:
        return [name, "not here", "", "", ""]
    seconds = (visits.first_seconds, visits.later_seconds, visits.extra_seconds)
    return [name, *(f"{1000 * each:.1f} ms" for each in seconds), "masked" if entry.takes_mask else "none"]


GIB = 2**30
# If a step took this many times as long as one of a larger batch, something else was running.
NOISY = 1.5
# If less than this share of the memory is free, something else holds it.
MOSTLY_FREE = 0.9
# A new shape is worth a word if its first step takes this many times as long as a later one, and this much longer.
NOTABLE = 1.5
NOTABLE_SECONDS = 0.01
# Another kernel is worth a change if at most this share of the cost of a new shape remains.
WORTH = 0.5
FEW_SHAPES = "bw.plan_batches(lengths, budget, grouping=bw.Buckets(count=16))"
TURN_OFF = {
    "cudnn": "torch.backends.cuda.enable_cudnn_sdp(False)",
    "flash": "torch.backends.cuda.enable_flash_sdp(False)",
    "efficient": "torch.backends.cuda.enable_mem_efficient_sdp(False)",
}


def advise(findings: Findings) -> list[Advice]:
    """Say what the measurements mean, the most useful first.

    Args:
        findings: the measurements of a machine.

    Returns:
        At least one piece of advice on shapes and one on sizes.
    """
    machine, launch = findings.machine, findings.launch
    found = [
        _about_noise(launch),
        _about_device(machine),
        _about_shapes(findings.attention, machine),
        _about_sizes(launch, machine),
        *_about_memory(machine),
        _about_numbers(machine),
        _about_packages(machine),
    ]
    return [advice for advice in found if advice is not None]


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds with at least two digits.

    >>> milliseconds(0.0853), milliseconds(0.51), milliseconds(0.0012)
    ('85 ms', '510 ms', '1.2 ms')
    """
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _about_noise(launch: Launch) -> Advice | None:
    if launch.noise < NOISY:
        return None
    text = (
        f"A step took {launch.noise:.1f} times as long as one of a larger batch: something else is running. Measure "
        "again when the machine is quiet before you trust these numbers."
    )
    return Advice("noise", text)


def _about_device(machine: Machine) -> Advice | None:
    text = (
        "torch sees no GPU. On a CPU, time grows with padded tokens, so less padding is the whole gain. Memory is "
        "not measured: budgets in bytes need a GPU."
    )
    return Advice("device", text) if machine.device == "cpu" else None


def _about_shapes(entries: tuple[Attention, ...], machine: Machine) -> Advice:
    """Say whether to plan few shapes, and whether another attention kernel is the better choice."""
    default = _default(entries)
    visits = default.visits
    if visits is None:
        return Advice("shapes", "Attention could not be timed, so the cost of a new batch shape is unknown.")
    first, later = milliseconds(visits.first_seconds), milliseconds(visits.later_seconds)
    if machine.device == "cpu":
        text = (
            f"On a CPU, attention plans nothing for a shape ({first} when new, {later} later): lengths may vary "
            "freely. Only torch.compile needs few shapes."
        )
        return Advice("shapes", text)
    if visits.first_seconds < NOTABLE * visits.later_seconds or visits.extra_seconds < NOTABLE_SECONDS:
        text = (
            f"A new batch shape costs little here: {first}, compared with {later} later. Lengths may vary freely; "
            "only torch.compile and CUDA graphs need few shapes."
        )
        return Advice("shapes", text)
    picked = "" if default.picks is None else f" ({default.picks})"
    cost = (
        f"The first step with a new batch shape takes {first} with the default attention{picked}, a later one {later}."
    )
    better = _better(default, visits, entries)
    if better is None:
        return Advice("shapes", f"{cost} No other kernel is better, so plan few shapes.", FEW_SHAPES)
    what = "the default" if default.picks is None else f"{default.picks} attention"
    text = f"{cost} {_comparison(visits, *better, what=what)}"
    return Advice("shapes", text, TURN_OFF.get(default.picks or "", FEW_SHAPES))


def _default(entries: tuple[Attention, ...]) -> Attention:
    """Return the default with its better measurement: as the default, or as the kernel that it picks."""
    by_name = {entry.backend: entry for entry in entries}
    default = by_name.get("default", Attention(backend="default"))
    same = by_name.get(default.picks or "", default)
    if default.visits is None or same.visits is None or same.takes_mask != default.takes_mask:
        return default
    return replace(default, visits=min(default.visits, same.visits, key=lambda visits: visits.extra_seconds))


def _better(default: Attention, visits: Visits, entries: tuple[Attention, ...]) -> tuple[str, Visits] | None:
    """Return the kernel with the cheapest first visit if it saves enough; it must run padded batches as well."""
    rest = [
        (entry.backend, entry.visits)
        for entry in entries
        if entry.visits is not None
        and entry.backend not in ("default", default.picks)
        and entry.visits.extra_seconds <= WORTH * visits.extra_seconds
        and (entry.takes_mask or not default.takes_mask)
    ]
    return min(rest, key=lambda pair: pair[1].first_seconds, default=None)


def _comparison(default: Visits, name: str, other: Visits, *, what: str) -> str:
    """Say what the other kernel gives, and when the default is still the better one."""
    first, later = milliseconds(other.first_seconds), milliseconds(other.later_seconds)
    gives = f"With {name} attention it is {first} and {later}"
    slower = other.later_seconds - default.later_seconds
    if slower <= 0:
        return f"{gives}: turn {what} off, or plan few shapes with {FEW_SHAPES}."
    # What the other kernel saves once per shape, over what it loses in every step.
    visits = round((default.extra_seconds - other.extra_seconds) / slower)
    return (
        f"{gives}: turn {what} off if a shape comes fewer than about {visits:,} times. If it comes more often, keep "
        f"it and plan few shapes with {FEW_SHAPES}."
    )


def _about_sizes(launch: Launch, machine: Machine) -> Advice:
    flat, largest = launch.flat_tokens, launch.rows[-1].tokens
    each = f"{1e6 * launch.kernel_seconds:.0f} us each"
    why = "calling operations" if machine.device == "cpu" else f"launching kernels ({each})"
    if flat == launch.rows[0].tokens:
        text = f"The time of a step grows from {flat:,} tokens on: no batch is too small."
    else:
        text = (
            f"Steps of up to {flat:,} tokens all take {milliseconds(launch.floor_seconds)} with {launch.model}: the "
            f"time goes into {why}, and a smaller batch gains nothing."
        )
    if launch.knee_tokens == largest:
        text += f" Throughput still grew at {largest:,} tokens, the largest batch that was tried."
    else:
        text += (
            f" 90 % of the best throughput is reached at {launch.knee_tokens:,} tokens; more tokens only take memory."
        )
    text += " Your own model has other numbers: `calibrate` finds them."
    return Advice("sizes", text, f"bw.MaxTokens({launch.knee_tokens})")


def _about_memory(machine: Machine) -> list[Advice]:
    if machine.device != "cuda":
        return []
    found: list[Advice] = []
    if machine.free_bytes < MOSTLY_FREE * machine.total_bytes:
        text = (
            f"Only {_free(machine)} are free: other processes or a memory limit hold the rest. Calibrate when they "
            "are gone, or pass max_bytes."
        )
        found.append(Advice("memory", text))
    if not any(setting in machine.allocator for setting in ("expandable_segments:True", "cudaMallocAsync")):
        text = (
            "Batches of varying shape leave gaps between the allocator's blocks, and memory runs out before it is "
            "full. Let the blocks grow, or use backend:cudaMallocAsync, which was faster close to the limit:"
        )
        found.append(Advice("memory", text, "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"))
    return found


def _about_numbers(machine: Machine) -> Advice | None:
    text = f"{machine.name} does not compute in bfloat16. Use float16 with a scaler, which needs weight_of."
    code = 'Stepper(..., autocast=torch.float16, scaler=torch.amp.GradScaler("cuda"), weight_of=...)'
    return None if machine.has_bfloat16 else Advice("numbers", text, code)


def _about_packages(machine: Machine) -> Advice | None:
    if machine.versions.get("numba") is not None:
        return None
    text = "numba is not installed; with it, Packed() forms the same rows in less time."
    return Advice("packages", text, "pip install 'batchwright[numba]'")
