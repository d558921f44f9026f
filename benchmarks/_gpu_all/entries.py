"""The GPU measurements, the most important first: what runs, how long it takes, what it leaves, what it shows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

ROOT = Path(__file__).parents[2]
# Marks in the text of a test file that has cases for a CUDA device.
CUDA_MARKS = ("needs_cuda", "BACKENDS", "BLIND")
# Older releases of the frameworks warn of what they will change, which is no failure here; other warnings stay errors.
QUIET = ("Deprecation", "PendingDeprecation", "Future")


@final
@dataclass(frozen=True)
class Entry:
    """One measurement.

    Args:
        name: that ``--only`` takes.
        shows: what is learnt from it.
        script: a file of ``benchmarks``, or ``pytest``.
        arguments: of the script, without its result file; ``{data}`` is the folder of prepared data and ``{seconds}``
            the time that the script has. For ``pytest`` the folders and files whose CUDA tests run.
        smoke: arguments of the trial run on a CPU, which takes prepared data if there are some; ``pytest`` has none.
        seconds: that all of it is expected to take.
        least: seconds in which some of it is done; with less time left it is not begun.
        result: the file it writes, named as in ``benchmarks/results``.
        data: files of the prepared data that it reads.
        rows: what a complete result has among its rows, values by key.
        num_turns: how many ``turns`` a complete result has, 0 where it has none.
        cpu_error: what the error of a row says that cannot run on a CPU.
    """

    name: str
    shows: str
    script: str
    arguments: tuple[str, ...]
    smoke: tuple[str, ...]
    seconds: int
    least: int
    result: str
    data: tuple[str, ...] = ()
    rows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    num_turns: int = 0
    cpu_error: str = ""

    @property
    def is_tests(self) -> bool:
        """Return whether it runs tests, and no benchmark."""
        return self.script == "pytest"


def _tests(name: str, shows: str, paths: str, *, seconds: int) -> Entry:
    # What was cut off runs from the beginning again, so most of it is to fit.
    least = seconds * 3 // 4
    return Entry(name, shows, "pytest", tuple(paths.split()), (), seconds, least, f"{name.replace('-', '_')}.xml")


def _quality(name: str, shows: str, task: str, runs: str, smoke_arms: str, *, seconds: int, result: str) -> Entry:
    """Return some runs of ``gpu_quality.py``, each with the rate of the best cell of a stored sweep."""
    given = ("--data", f"{{data}}/{task}.npz", "--runs", runs, "--budget-seconds", "{seconds}")
    arms = tuple(dict.fromkeys(run.split(":")[0] for run in runs.split(",")))
    return Entry(
        name, shows, "gpu_quality.py", given, ("--task", task, "--arms", smoke_arms), seconds, 60, result,
        (f"{task}.npz",), {"arm": arms},
    )  # fmt: skip


def _packing(name: str, model: str, weights: str, *, seconds: int, result: str) -> Entry:
    arms = ("padded", "flat", "positions")
    options = ("--arms", ",".join(arms), "--weights", weights)
    return Entry(
        name, f"{model}, {weights} weights: flat rows beside padded and positions", "gpu_packing.py",
        ("--data", "{data}/decoder.npz", "--models", model, *options, "--budget-seconds", "{seconds}"),
        options, seconds, 60, result, ("decoder.npz",), {"arm": arms},
    )  # fmt: skip


def _noise(task: str, *, seconds: int) -> Entry:
    return Entry(
        f"noise-{task}", "what measuring noise adds to an update", "gpu_noise.py",
        ("--data", f"{{data}}/{task}.npz", "--turns", "16", "--budget-seconds", "{seconds}"),
        ("--data", f"{{data}}/{task}.npz"), seconds, 60,
        f"gpu_noise_{task}.json", (f"{task}.npz",), num_turns=16,
    )  # fmt: skip


_TRAINER_ARMS = (
    "graphs-12-2048", "dynabatch-10", "auto", "fixed-10", "graphs-12-4096", "group_by_length-10",
    "batch_rebalance-10-4",
)  # fmt: skip
_RATE_ARMS = ("graphs-12-2048", "dynabatch-10")
_GENERATE_ARMS = (
    "graphs that stay, calibrated budget", "eager, calibrated budget", "dynabatch, defaults",
    "graphs, calibrated budget", "graphs, no budget", "eager, no budget",
)  # fmt: skip
_DECODER_ARMS = ("generate, eager", "generate, graphs")
_ENGINE_ARMS = ("transformers, continuous batching",)

ENTRIES = (
    _tests(
        "tests-inference", "generate, Generator, encode on CUDA", "tests/step/inference", seconds=120,
    ),
    _tests("tests-functions", "graphed functions and encoders on CUDA", "tests/step/graphs/test_functions_on_cuda.py",
           seconds=40),
    _tests("tests-whole-batches", "losses of a whole batch on CUDA", "tests/step/whole_batches", seconds=30),
    _tests(
        "tests-integrations", "graphs through Trainer, Accelerator and Lightning on CUDA",
        "tests/integrations/huggingface tests/integrations/accelerate tests/integrations/lightning", seconds=50,
    ),
    Entry(
        "trainer", "through the Trainer: examples/s, peaks, losses beside fixed sizes and dynabatch", "gpu_trainer.py",
        ("--data", "{data}/pairs.npz", "--arms", ",".join(_TRAINER_ARMS), "--lrs", "3e-4", "--seconds", "25",
         "--budget-seconds", "{seconds}"),
        ("--data", "{data}/pairs.npz", "--arms", ",".join(_TRAINER_ARMS)),
        260, 75, "gpu_trainer.json", ("pairs.npz",), {"arm": _TRAINER_ARMS},
    ),
    Entry(
        "trainer-rates", "the same at other learning rates: a loss that more updates reach may want another one",
        "gpu_trainer.py",
        ("--data", "{data}/pairs.npz", "--arms", ",".join(_RATE_ARMS), "--lrs", "1e-3,1e-4", "--seconds", "25",
         "--budget-seconds", "{seconds}"),
        ("--data", "{data}/pairs.npz", "--arms", ",".join(_RATE_ARMS)),
        150, 75, "gpu_trainer_rates.json", ("pairs.npz",), {"arm": _RATE_ARMS},
    ),
    Entry(
        "generate", "a Generator whose graphs stay, beside eager generation and dynabatch", "gpu_generate.py",
        ("--arms", *_GENERATE_ARMS), ("--arms", *_GENERATE_ARMS), 120, 75, "gpu_generate.json", (),
        {"arm": _GENERATE_ARMS},
    ),
    _quality(
        "sizes-translation", "goodput and measured beside the best constants", "translation",
        "auto-32:5e-4:0,grouped-256:5e-4:0,trials-32:5e-4:0,grouped-128:5e-4:0", "auto-4,trials-4,grouped-8",
        seconds=145, result="gpu_quality_auto_translation.json",
    ),
    _quality(
        "sizes-decoder", "goodput and measured beside the best constants", "decoder",
        "auto-32:5e-4:0,grouped-64:1e-3:0,trials-32:5e-4:0,grouped-64:5e-4:0", "auto-4,trials-4,grouped-8",
        seconds=145, result="gpu_quality_auto_decoder.json",
    ),
    _packing("packing-350M", "350M", "float32", seconds=80, result="gpu_packing.json"),
    _packing("packing-1B", "1B", "float32", seconds=100, result="gpu_packing_1b.json"),
    _packing("packing-bf16", "350M", "bfloat16", seconds=75, result="gpu_packing_bf16.json"),
    _quality(
        "levels-translation", "sizes that change under graphs: goodput, measured, Smith, Seesaw, a warm-up",
        "translation",
        "graphs-16-8192:5e-4:0,goodput-16-4096:5e-4:0,measured-16-4096:5e-4:0,smith-16-4096:5e-4:0,"
        "seesaw-16-4096:5e-4:0,warmup-16-4096:5e-4:0",
        "graphs-2-128,goodput-2-128,measured-2-128,smith-2-128,seesaw-2-128,warmup-2-128",
        seconds=235, result="gpu_quality_levels_translation.json",
    ),
    _tests("tests-graphs", "training by graphs on CUDA",
           "tests/step/graphs --ignore=tests/step/graphs/test_functions_on_cuda.py", seconds=150),
    _tests("tests-rest", "everything else on CUDA",
           "tests --ignore=tests/step/graphs --ignore=tests/step/inference --ignore=tests/step/whole_batches "
           "--ignore=tests/integrations", seconds=90),
    _noise("translation", seconds=100),
    Entry(
        "encoder", "an Encoder beside eager encoding, alone and under load", "gpu_encoder.py", (), (), 75, 40,
        "gpu_encoder.json", (), {"phase": ("visits", "load", "closed", "warm_up", "difference")},
    ),
    Entry(
        "decoder", "a decoder by graphs beside eager generation", "gpu_decoder_generate.py", ("--arms", *_DECODER_ARMS),
        ("--arms", *_DECODER_ARMS), 75, 60, "gpu_decoder_generate.json", (), {"arm": _DECODER_ARMS},
    ),
    _noise("decoder", seconds=100),
    Entry(
        "engine", "a decoder beside the continuous batching of transformers", "gpu_decoder_generate.py",
        ("--arms", *_DECODER_ARMS, *_ENGINE_ARMS), ("--arms", *_ENGINE_ARMS), 240, 150, "gpu_decoder_engine.json", (),
        {"arm": (*_DECODER_ARMS, *_ENGINE_ARMS)}, cpu_error="needs a CUDA device",
    ),
)  # fmt: skip


def chosen(names: str | None) -> tuple[Entry, ...]:
    """Return the entries of some names with commas, in the order of the table; all of them for None."""
    if names is None:
        return ENTRIES
    wanted, known = names.split(","), [entry.name for entry in ENTRIES]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise SystemExit(f"--only takes {', '.join(known)}; got {', '.join(unknown)}")
    return tuple(entry for entry in ENTRIES if entry.name in wanted)


def cuda_tests(arguments: tuple[str, ...], root: Path = ROOT) -> list[str]:
    """Return the test files of some folders that have cases for a CUDA device; to collect all takes a minute."""
    left_out = "--ignore="
    ignored = {root / argument.removeprefix(left_out) for argument in arguments if argument.startswith(left_out)}
    paths = [root / argument for argument in arguments if not argument.startswith(left_out)]
    found = [path for one in paths for path in ([one] if one.is_file() else sorted(one.rglob("test_*.py")))]
    return [
        path.relative_to(root).as_posix()
        for path in found
        if not ignored & {path, *path.parents} and any(mark in path.read_text("utf-8") for mark in CUDA_MARKS)
    ]


def command_of(entry: Entry, result: Path, data: Path, *, seconds: float, smoke: bool = False) -> list[str]:
    """Return the command line of an entry.

    Args:
        entry: of the table.
        result: the file that it writes.
        data: the folder of prepared data.
        seconds: that it has.
        smoke: run it in its smallest form on the CPU.
    """
    if entry.is_tests:
        quiet = [part for kind in QUIET for part in ("-W", f"default::{kind}Warning")]
        files = cuda_tests(entry.arguments)
        assert files, f"{entry.name} has no test for a CUDA device, and pytest without files would collect all"
        return [
            sys.executable, "-m", "pytest", "-m", "needs_cuda", "-vv", "--tb=short", "--durations=8", "-rf", *quiet,
            # A file that asks for a package the machine lacks must not keep the others from running.
            "--continue-on-collection-errors",
            "-p", "no:cacheprovider", "-p", "pytest_timeout", "-o", "timeout=150", f"--junitxml={result}", *files,
        ]  # fmt: skip
    given = ("--smoke", *entry.smoke) if smoke else entry.arguments
    filled = [part.replace("{data}", str(data)).replace("{seconds}", str(int(seconds))) for part in given]
    if smoke and "--data" in filled:
        place = filled.index("--data")
        if not Path(filled[place + 1]).exists():
            del filled[place : place + 2]  # scripts draw a corpus then
    return [sys.executable, str(ROOT / "benchmarks" / entry.script), *filled, "--output", str(result)]
