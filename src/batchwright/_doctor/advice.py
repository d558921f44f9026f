"""From measurements to plain sentences: what to set on this machine, and why."""

from __future__ import annotations

from .records import Advice, Findings, Launch, Machine
from .shape_advice import about_shapes, milliseconds

GIB = 2**30
# A larger batch that takes less time by this factor shows that something else was running.
NOISY = 1.5
# Less free memory than this share means that something else holds it.
MOSTLY_FREE = 0.9


def advise(findings: Findings) -> list[Advice]:
    """Say what the measurements mean, the most useful first.

    Args:
        findings: of this machine, or made by hand.

    Returns:
        At least one piece of advice on shapes and one on sizes.
    """
    machine = findings.machine
    return [
        *_about_noise(findings.launch),
        *([] if machine.device != "cpu" else [_no_accelerator()]),
        about_shapes(findings.attention, machine),
        _about_sizes(findings.launch, machine),
        *_about_memory(machine),
        *_about_numbers(machine),
        *_about_packages(machine),
    ]


def _about_noise(launch: Launch) -> list[Advice]:
    if launch.noise < NOISY:
        return []
    text = (
        f"A step took {launch.noise:.1f} times as long as one of a larger batch: something else is running. Measure "
        "again when the machine is quiet, before you trust these numbers."
    )
    return [Advice("noise", text)]


def _no_accelerator() -> Advice:
    return Advice(
        "device",
        "torch sees no GPU. On a CPU time follows padded tokens, so that less padding is the whole gain, and memory is "
        "not measured: budgets in bytes need a GPU.",
    )


def _about_sizes(launch: Launch, machine: Machine) -> Advice:
    flat, largest = launch.flat_tokens, launch.rows[-1].tokens
    each = f"{1e6 * launch.kernel_seconds:.0f} us each"
    why = "calling operations" if machine.device == "cpu" else f"launching kernels ({each})"
    if flat == launch.rows[0].tokens:
        text = f"Steps grow with their batch from {flat:,} tokens on: no batch is too small."
    else:
        text = (
            f"Steps of up to {flat:,} tokens take the same {milliseconds(launch.floor_seconds)} with {launch.model}: "
            f"time goes into {why}, and a smaller batch gains nothing."
        )
    if launch.knee_tokens == largest:
        text += f" Throughput still grew at {largest:,} tokens, the largest that was tried."
    else:
        text += f" Nine tenths of the best throughput is reached at {launch.knee_tokens:,} tokens; more takes memory."
    text += " Your own model has its own numbers: `calibrate` finds them."
    return Advice("sizes", text, f"bw.MaxTokens({launch.knee_tokens})")


def _about_memory(machine: Machine) -> list[Advice]:
    if machine.device != "cuda":
        return []
    found: list[Advice] = []
    if machine.free_bytes < MOSTLY_FREE * machine.total_bytes:
        found.append(
            Advice(
                "memory",
                f"Only {machine.free_bytes / GIB:.1f} of {machine.total_bytes / GIB:.1f} GiB are free: other processes "
                "or a cap hold the rest. Calibrate when they are gone, or give max_bytes.",
            )
        )
    if not any(setting in machine.allocator for setting in ("expandable_segments:True", "cudaMallocAsync")):
        found.append(
            Advice(
                "memory",
                "Batches of varying shape leave gaps in the allocator's blocks, and memory runs out before it is full. "
                "Let blocks grow, or use backend:cudaMallocAsync, which was faster close to the limit:",
                "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            )
        )
    return found


def _about_numbers(machine: Machine) -> list[Advice]:
    if machine.has_bfloat16:
        return []
    return [
        Advice(
            "numbers",
            f"{machine.name} does not compute in bfloat16. Use float16 with a scaler, which needs weight_of.",
            'Stepper(..., autocast=torch.float16, scaler=torch.amp.GradScaler("cuda"), weight_of=...)',
        )
    ]


def _about_packages(machine: Machine) -> list[Advice]:
    if machine.versions.get("numba") is not None:
        return []
    text = "numba is not installed; with it Packed() forms the same rows in less time."
    return [Advice("packages", text, "pip install 'batchwright[numba]'")]
