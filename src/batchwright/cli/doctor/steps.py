"""Training steps from small to large: run kernel by kernel, and replayed as CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from statistics import median
from typing import Any, final

import torch

from ...errors import DoesNotFitError
from ...step.calibration.running import Prober
from ...step.oom import free_memory, is_out_of_memory
from .machine import clock_for
from .passes import Shape, Steps, training, transformer
from .records import Effort, GraphRow, Graphs, Launch, LaunchRow

_NUM_LAUNCHES = 500


def measure_launch(
    device: torch.device,
    effort: Effort,
    *,
    run: Callable[[Shape], None] | None = None,
    done: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] | None = None,
) -> Launch:
    """Time whole training steps, each with twice as many examples as the one before.

    All sizes run in turn, round after round, so that other work on the machine meets all of them alike.

    Args:
        device: where to run.
        effort: the sizes.
        run: runs a step of a shape; None trains a small model.
        done: called after each size that is tried, and after each round.
        clock: seconds that never go back; None is the one for the device.

    Returns:
        Tokens and seconds, up to the largest size, the first long step, or the end of the memory.
    """
    clock = clock_for(device) if clock is None else clock
    prober = Prober(_training_step(device, effort) if run is None else run, device, None, 1, [], clock)
    prober.measure((1, effort.length))  # allocates the state of the optimizer and loads kernels
    tried = _sizes_that_run(prober, sizes(effort), effort, done)
    rounds = _rounds(prober, tried, effort, done)
    if not rounds[0]:
        raise DoesNotFitError(f"one example of {effort.length} tokens does not fit {device}; free some of its memory")
    columns = zip(*rounds, strict=True)
    rows = [LaunchRow(num * effort.length, median(each)) for num, each in zip(tried, columns, strict=False)]
    even = _without_peaks([row.seconds for row in rows])
    return Launch(
        model=_in_words(effort),
        rows=tuple(replace(row, seconds=seconds) for row, seconds in zip(rows, even, strict=True)),
        kernel_seconds=_kernel_seconds(device, clock),
        noise=max(row.seconds / lower for row, lower in zip(rows, even, strict=True)),
        rounds=tuple(tuple(_without_peaks(seconds)) for seconds in rounds),
        in_processor_time=clock is time.process_time,
    )


def _sizes_that_run(prober: Prober, wanted: Sequence[int], effort: Effort, done: Callable[[], Any]) -> list[int]:
    """Return the numbers of examples that fit, up to the first step that takes long; each has then run."""
    tried: list[int] = []
    for num_items in wanted:
        found = prober.measure((num_items, effort.length))
        done()
        if found is None:
            break
        tried.append(num_items)
        if found.seconds > effort.most_seconds:
            break
    return tried


def _rounds(
    prober: Prober, tried: list[int], effort: Effort, done: Callable[[], Any] = lambda: None
) -> list[list[float]]:
    """Return the seconds of all sizes that fit in every round, once per round."""
    rounds: list[list[float]] = []
    for _ in range(effort.rounds):
        rounds.append(_round(prober, tried, effort))
        tried = tried[: len(rounds[-1])]
        done()
    return [seconds[: len(tried)] for seconds in rounds]


def _round(prober: Prober, tried: list[int], effort: Effort) -> list[float]:
    """Return the seconds of every size, the shorter of two steps; fewer if memory runs out."""
    found = (prober.measure((num_items, effort.length)) for num_items in tried)
    return [min(row.seconds, row.first_visit_seconds) for row in takewhile(lambda row: row is not None, found) if row]


def sizes(effort: Effort) -> list[int]:
    """Return the numbers of examples to try: powers of two.

    >>> from batchwright.cli.doctor.records import CPU
    >>> sizes(replace(CPU, max_items=8))
    [1, 2, 4, 8]
    """
    return [2**power for power in range(effort.max_items.bit_length())]


def _without_peaks(seconds: list[float]) -> list[float]:
    """Lower the time of steps that took longer than a larger one, because something else was running.

    >>> _without_peaks([9.0, 5.0, 6.0])
    [5.0, 5.0, 6.0]
    """
    return [*accumulate(reversed(seconds), min)][::-1]


def _in_words(effort: Effort) -> str:
    return f"{effort.num_layers} layers of width {effort.width:,}"


def _training_step(device: torch.device, effort: Effort) -> Callable[[Shape], None]:
    model = transformer(device, effort)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True if device.type == "cuda" else None)

    def run(shape: Shape) -> None:
        x = torch.randn(*shape, effort.width, device=device)
        with _autocast(device):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def _kernel_seconds(device: torch.device, clock: Callable[[], float]) -> float:
    """Return the seconds to launch one small operation, from many that are launched without waiting."""
    x = torch.zeros(16, device=device)
    for _ in range(2):  # the first round only loads the kernel
        x.sum().item()
        start = clock()
        for _ in range(_NUM_LAUNCHES):
            x.add_(1)
        seconds = clock() - start
    return seconds / _NUM_LAUNCHES


def measure_graphs(
    device: torch.device,
    effort: Effort,
    *,
    make_steps: Callable[[], Steps] | None = None,
    done: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] | None = None,
) -> Graphs:
    """Time forward and backward passes of several sizes, kernel by kernel and replayed as CUDA graphs.

    Passes run in rounds as those of ``measure_launch`` do. The captures come after them, so that the memory of the
    graphs is never needed beside that of a pass. What fails on the device is no error but a finding.

    Args:
        device: where to run.
        effort: the sizes.
        make_steps: makes the passes; None makes those of a small model, on CUDA only.
        done: called after each size that is tried, and after each capture.
        clock: seconds that never go back; None is the one for the device.

    Returns:
        Seconds by tokens for all sizes that were captured, and why others were not.
    """
    if make_steps is None:
        if device.type != "cuda":
            return Graphs(problem="CUDA graphs need a CUDA device, and torch sees none")
        make_steps = partial(training, device, effort)
    try:
        return _compare(make_steps(), device, effort, done, clock_for(device) if clock is None else clock)
    except RuntimeError as error:
        problem = f"the measurement ended with an error: {_first_line(error)}"
    finally:
        free_memory([device])
    return Graphs(model=_in_words(effort), problem=problem)


def _compare(
    steps: Steps, device: torch.device, effort: Effort, done: Callable[[], Any], clock: Callable[[], float]
) -> Graphs:
    eager = Prober(steps.run, device, None, 1, [], clock)
    tried = _sizes_that_run(eager, effort.graph_items, effort, done)
    slow = _seconds_of(eager, tried, effort)
    free_memory([device])
    start = clock()
    replays, problem = _capture_all(steps, list(slow), effort, device, done)
    capture_seconds = clock() - start
    fast = _seconds_of(Prober(lambda shape: replays[shape[0]](), device, None, 1, [], clock), sorted(replays), effort)
    return Graphs(
        model=_in_words(effort),
        rows=tuple(GraphRow(num * effort.length, median(slow[num]), median(fast[num])) for num in fast),
        rounds=tuple(tuple(slow[num][place] / fast[num][place] for num in fast) for place in range(effort.rounds)),
        capture_seconds=capture_seconds,
        problem=problem,
    )


def _seconds_of(prober: Prober, tried: list[int], effort: Effort) -> dict[int, tuple[float, ...]]:
    """Return the seconds of every round for each size that fits in all of them."""
    columns = zip(*_rounds(prober, tried, effort), strict=True)
    return dict(zip(tried, columns, strict=False))


def _capture_all(
    steps: Steps, tried: list[int], effort: Effort, device: torch.device, done: Callable[[], Any]
) -> tuple[dict[int, Callable[[], Any]], str]:
    """Capture from the largest size down, so that all share the memory of the largest; say what went wrong."""
    replays: dict[int, Callable[[], Any]] = {}
    if not tried:
        return replays, f"a step of {effort.graph_items[0] * effort.length:,} tokens does not fit {device}"
    problem = ""
    steps.warm_up((tried[0], effort.length))
    for num_items in reversed(tried):
        found = _attempt(steps, (num_items, effort.length))
        done()
        if not isinstance(found, _Failure):
            replays[num_items] = found
            continue
        # Outside the except block the traceback is gone, and with it the activations that it held.
        free_memory([device])
        problem = f"a step of {num_items * effort.length:,} tokens could not be captured: {found.text}"
        if not found.is_full:  # what breaks one capture breaks the others
            break
    return replays, problem


@final
@dataclass(frozen=True)
class _Failure:
    is_full: bool
    text: str


def _attempt(steps: Steps, shape: Shape) -> Callable[[], Any] | _Failure:
    try:
        return steps.capture(shape)
    except RuntimeError as error:
        # Ending a capture that failed may fail as well; the reason is the error before.
        cause = error if error.__context__ is None else error.__context__
        is_full = is_out_of_memory(cause) or is_out_of_memory(error)
        return _Failure(is_full, "out of memory" if is_full else _first_line(cause))


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without its full stop; the name of its class if it says nothing.

    >>> _first_line(RuntimeError("CUDA error: not permitted.\\nCompile with TORCH_USE_CUDA_DSA"))
    'CUDA error: not permitted'
    """
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
