"""What the measurements of a machine mean for batches; what their repeats contradict is not stated."""

from __future__ import annotations

from dataclasses import replace

from ..screen import counted
from .records import PAYS, Advice, Attention, Findings, Graphs, Launch, Load, Machine, Visits

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
GRAPHED = "Stepper(model, optimizer, loss_fn, graphs=True, shapes=sampler)"
ENCODED = "encode(model, tokenizer, texts)"
DECODED = "generate(model, examples, max_new_tokens=128)"
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
        _about_noise(findings),
        _about_device(machine),
        _about_shapes(findings.attention, machine),
        _about_sizes(launch, machine, findings.load),
        _about_graphs(findings.graphs, machine, findings.load),
        _about_encoding(findings.encoding, machine, findings.load),
        _about_decoding(findings.decoding, machine, findings.load),
        *_about_memory(machine),
        _about_numbers(machine),
        _about_packages(machine),
    ]
    return [advice for advice in found if advice is not None]


def free_memory(machine: Machine) -> str:
    """Write how much of the memory is free."""
    return f"{machine.free_bytes / GIB:.1f} of {machine.total_bytes / GIB:.1f} GiB"


def milliseconds(seconds: float) -> str:
    """Write seconds as milliseconds with at least two digits.

    >>> milliseconds(0.0853), milliseconds(0.51), milliseconds(0.0012)
    ('85 ms', '510 ms', '1.2 ms')
    """
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _about_noise(findings: Findings) -> Advice | None:
    load, launch = findings.load, findings.launch
    if load.is_busy:
        average = (
            "" if load.average is None else f" (load {load.average:.1f}, {counted(findings.machine.num_cores, 'core')})"
        )
        why = f"Other processes want the processor too: a loop took {load.wall_per_cpu:.1f} times its own time{average}"
    elif launch.noise >= NOISY:
        why = f"A step took {launch.noise:.1f} times as long as one of a larger batch: something else is running"
    elif launch.flat_range is None or launch.knee_range is None:
        why = f"The repeats of a step differ by up to {100 * launch.spread:.0f} %: something else is running"
    else:
        return None
    text = (
        f"{why}. Only what all repeats agree on is stated below; measure again when the machine is quiet before you "
        "trust these numbers."
    )
    return Advice("noise", text)


def _is_delayed(load: Load, launch: Launch) -> bool:
    """Say whether waiting for the processor is in every time."""
    return load.is_busy and not launch.in_processor_time


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
    costly = _is_notable(visits)
    num_costly = sum(map(_is_notable, default.each))
    # A CPU plans nothing for a shape, so a costly one was an accident.
    if num_costly not in (0, len(default.each)) or costly != (num_costly > 0) or (costly and machine.device == "cpu"):
        text = (
            f"Too busy to say what a new batch shape costs: {num_costly} of {len(default.each)} shapes took notably "
            f"longer when new ({first} against {later} at best). Measure again when the machine is quiet."
        )
        return Advice("shapes", text)
    if machine.device == "cpu":
        text = (
            f"On a CPU, attention plans nothing for a shape ({first} when new, {later} later): lengths may vary "
            "freely. Only torch.compile needs few shapes."
        )
        return Advice("shapes", text)
    if not costly:
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


def _is_notable(visits: Visits) -> bool:
    is_longer = visits.first_seconds >= NOTABLE * visits.later_seconds
    return is_longer and visits.extra_seconds >= NOTABLE_SECONDS


def _default(entries: tuple[Attention, ...]) -> Attention:
    """Return the default with its better measurement: as the default, or as the kernel that it picks."""
    by_name = {entry.backend: entry for entry in entries}
    default = by_name.get("default", Attention(backend="default"))
    same = by_name.get(default.picks or "", default)
    if default.visits is None or same.visits is None or same.takes_mask != default.takes_mask:
        return default
    better = default if default.visits.extra_seconds <= same.visits.extra_seconds else same
    return replace(default, visits=better.visits, repeats=better.repeats)


def _better(default: Attention, visits: Visits, entries: tuple[Attention, ...]) -> tuple[str, Visits] | None:
    """Return the kernel with the cheapest first visit if it saves enough; it must run padded batches as well.

    It must save enough in every repeat: its dearest new shape counts against the default's cheapest.
    """
    least = min(each.extra_seconds for each in (visits, *default.each))
    rest = [
        (entry.backend, entry.visits)
        for entry in entries
        if entry.visits is not None
        and entry.backend not in ("default", default.picks)
        and max(each.extra_seconds for each in entry.each) <= WORTH * least
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


def _about_sizes(launch: Launch, machine: Machine, load: Load) -> Advice:
    knee, largest = launch.knee_range, launch.rows[-1].tokens
    if knee is None or _is_delayed(load, launch):
        text = (
            f"Too busy to say which batches are too small: the repeats of a step differ by up to "
            f"{100 * launch.spread:.0f} %. Measure again when the machine is quiet."
        )
        return Advice("sizes", text)
    text = _about_small_steps(launch, machine)
    if knee[0] == largest:
        text += f" Throughput still grew at {largest:,} tokens, the largest batch that was tried."
    else:
        text += f" 90 % of the best throughput is reached at {_either(knee)} tokens; "
        # The next run may find it still growing, as some repeats of this one do.
        may_grow = f"the repeats do not agree whether it still grew at {largest:,}, the largest batch that was tried."
        text += may_grow if knee[1] == largest else "more tokens only take memory."
    text += " Your own model has other numbers: `calibrate` finds them."
    return Advice("sizes", text, f"bw.MaxTokens({knee[1]})")


def _about_small_steps(launch: Launch, machine: Machine) -> str:
    flat = launch.flat_range
    if flat is None:
        return "The repeats do not agree on which steps take as long as the shortest one."
    if flat[1] == launch.rows[0].tokens:
        return f"The time of a step grows from {flat[1]:,} tokens on: no batch is too small."
    each = f"{1e6 * launch.kernel_seconds:.0f} us each"
    why = "calling operations" if machine.device == "cpu" else f"launching kernels ({each})"
    return (
        f"Steps of up to {_either(flat)} tokens all take {milliseconds(launch.floor_seconds)} with {launch.model}: "
        f"the time goes into {why}, and a smaller batch gains nothing."
    )


def _either(ends: tuple[int, int]) -> str:
    """Write a number, or two if the repeats disagree on it."""
    low, high = ends
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _about_graphs(graphs: Graphs, machine: Machine, load: Load) -> Advice | None:
    """Say up to which size a step is worth capturing."""
    if machine.device != "cuda" or not (graphs.rows or graphs.problem):
        return None
    if not graphs.rows:
        return Advice("graphs", f"What CUDA graphs would save is unknown: {graphs.problem}.")
    paying = graphs.paying_range
    if paying is None or load.is_busy:
        text = (
            "Too busy to say for which steps CUDA graphs pay: the time of a step without one is that of the processor. "
            "Measure again when the machine is quiet."
        )
        return Advice("graphs", text)
    first, largest = graphs.rows[0], graphs.rows[-1]
    if paying[1] == 0:
        text = (
            f"CUDA graphs gain less than {100 * (PAYS - 1):.0f} % here, even with {first.tokens:,} tokens a step: "
            "leave graphs=False."
        )
        return Advice("graphs", text)
    most = f"{_either(paying)} tokens a step on this machine"
    if paying[0] == largest.tokens:
        end = ", the most that could be captured" if graphs.problem else " and more, the most that was tried"
        most = f"{largest.tokens:,} tokens a step{end}"
    text = (
        f"As a CUDA graph, forward and backward of {first.tokens:,} tokens take {milliseconds(first.replay_seconds)} "
        f"instead of {milliseconds(first.eager_seconds)} ({first.gain:.1f} times as fast) with {graphs.model}. Graphs "
        f"pay up to about {most}: there a small batch costs only its arithmetic. They need few shapes, such as those "
        "of a sampler with grouping=bw.Buckets(16)."
    )
    return Advice("graphs", text, GRAPHED)


def _about_encoding(graphs: Graphs, machine: Machine, load: Load) -> Advice | None:
    """Say up to which size a batch that is only encoded is worth capturing."""
    paying = graphs.paying_range
    if machine.device != "cuda" or not graphs.rows or paying is None or load.is_busy:
        return None  # what is said of training steps holds here too
    first = graphs.rows[0]
    if paying[1] == 0:
        text = f"Encoding {first.tokens:,} tokens gains less than {100 * (PAYS - 1):.0f} % by a CUDA graph here."
        return Advice("encoding", text)
    text = (
        f"Encoding {first.tokens:,} tokens takes {milliseconds(first.replay_seconds)} as a CUDA graph instead of "
        f"{milliseconds(first.eager_seconds)} ({first.gain:.1f} times as fast); graphs pay up to about "
        f"{_either(paying)} tokens a batch. A server has few shapes with Encoder(model, tokenizer).batcher()."
    )
    return Advice("encoding", text, ENCODED)


def _about_decoding(graphs: Graphs, machine: Machine, load: Load) -> Advice | None:
    """Say up to how many rows a step of decoding is worth capturing."""
    paying = graphs.paying_range
    if machine.device != "cuda" or not graphs.rows or paying is None or load.is_busy:
        return None
    first = graphs.rows[0]
    if paying[1] == 0:
        return Advice("decoding", f"Decoding {first.tokens:,} rows gains less than {100 * (PAYS - 1):.0f} % by graphs.")
    text = (
        f"One more token for {first.tokens:,} rows takes {milliseconds(first.replay_seconds)} as a CUDA graph instead "
        f"of {milliseconds(first.eager_seconds)} ({first.gain:.1f} times as fast) with {graphs.model}; graphs pay up "
        f"to about {_either(paying)} rows. generate uses them where they are exact; for live prompts, shared prefixes "
        "or several devices an engine with a paged cache serves better (vLLM, or generate_batch of transformers)."
    )
    return Advice("decoding", text, DECODED)


def _about_memory(machine: Machine) -> list[Advice]:
    if machine.device != "cuda":
        return []
    found: list[Advice] = []
    if machine.free_bytes < MOSTLY_FREE * machine.total_bytes:
        text = (
            f"Only {free_memory(machine)} are free: other processes or a memory limit hold the rest. Calibrate when "
            "they are gone, or pass max_bytes."
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
