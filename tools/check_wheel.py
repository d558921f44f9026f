"""Build sdist and wheel, install the wheel into an empty environment with NumPy only, and try it out.

    python tools/check_wheel.py                 # needs build and twine, as `make wheel` installs them
    python tools/check_wheel.py --output DIR    # keeps the files there instead of in dist/
    python tools/check_wheel.py --extras        # then the wheel with each extra by itself, about 4 GB from the index

What it checks: both files describe themselves well; the wheel is small and holds what it needs; NumPy is all that comes
with it; ``import batchwright`` takes little longer than NumPy's own import; ``batchwright advise`` answers; and every
part whose package is missing says which extra brings it. With ``--extras`` every extra, in an environment that has
nothing else, brings what its part needs to do something.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
# This finds data that was packed by mistake: nearly all of the wheel is Python source, a quarter of it docstrings. Of
# 1,224,000 bytes, 1,115,000 were .py files, 57,000 what zip writes for each file, 27,000 metadata. The highest level of
# deflate saves 0.1 %, zopfli 3 %.
MAX_WHEEL_BYTES = 1_400_000
# Of the processor's time. The import by itself loads no room and no NumPy: 0.15 was seen. With the first name the rooms
# come: 2.4 were seen while others ran. The room above is for busy machines, so that this finds a heavy import and
# nothing else.
MAX_IMPORT_RATIO = 1.3
MAX_USE_RATIO = 3.5
NUM_IMPORTS = 20
NEEDED = (
    "py.typed",
    "_charts/style.css",
    "plan/models/memory_prior.json",
    "cli/demo/charts.js",
    "cli/demo/gpu.json",
    "serve/http/live/script.js",
)
# What a user without the extra imports or calls, the package that is missing first, and the extra that brings it.
MODULES = (
    ("batchwright.step", "torch", "torch"),
    ("batchwright.integrations.huggingface", "torch", "hf"),
    ("batchwright.integrations.accelerate", "torch", "accelerate"),
    ("batchwright.integrations.lightning", "torch", "lightning"),
    ("batchwright.integrations.keras", "keras", "keras"),
    ("batchwright.integrations.ray", "ray", "ray"),
    ("batchwright.integrations.sentence_transformers", "torch", "sentence-transformers"),
    ("batchwright.lab.runner", "torch", "lab"),
)
# What each extra is for, tried where nothing else is installed.
_STEP = """
import torch
from torch import nn
from batchwright.step import Stepper, supervised_loss
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = supervised_loss(nn.MSELoss(reduction='sum'))
assert Stepper(model, optimizer, loss_fn, micro_batch=2).step((torch.ones(4, 2), torch.ones(4, 1))).batch_size == 4
"""
EXTRAS = {
    "torch": _STEP,
    "accelerate": f"{_STEP}\nimport accelerate, batchwright.integrations.accelerate",
    "hf": "import batchwright.integrations.huggingface as hf, transformers\nhf.adaptive(transformers.Trainer)",
    "lightning": "from batchwright.integrations.lightning import AdaptiveBatching\nAdaptiveBatching()",
    "lab": "from batchwright.lab.datasets import load\nassert len(load('digits').train.labels) > 1000",
    "numba": "import numba, batchwright as bw\nbw.plan_batches([3, 5], bw.MaxItems(2), grouping=bw.Packed(capacity=8))",
    "ray": "from batchwright.integrations.ray import batched_deployment, plan_dataset",
    "sentence-transformers": "from batchwright.integrations.sentence_transformers import encode",
    "serve": "import batchwright.serve as serve, batchwright.serve.http as http\nhttp.make_app(serve.Batcher(list))",
    "keras": "import os\nos.environ['KERAS_BACKEND'] = 'torch'\nfrom batchwright.integrations.keras import adaptive",
}
COMMANDS = (("doctor", "torch"), ("demo", "torch"), ("lab run quick", "lab"), ("serve json:dumps", "serve"))


def build(output: Path) -> tuple[Path, Path]:
    """Return sdist and wheel, freshly built and checked by twine."""
    for old in (*output.glob("batchwright-*.whl"), *output.glob("batchwright-*.tar.gz")):
        old.unlink()
    _run([sys.executable, "-m", "build", "--outdir", str(output), str(ROOT)])
    (sdist,), (wheel,) = output.glob("batchwright-*.tar.gz"), output.glob("batchwright-*.whl")
    _run([sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)])
    return sdist, wheel


def check_contents(wheel: Path) -> str:
    """Return what was found; refuse a wheel that is too large, lacks a file or has links that lead nowhere."""
    size = wheel.stat().st_size
    _require(size <= MAX_WHEEL_BYTES, f"the wheel has {size:,} bytes, more than {MAX_WHEEL_BYTES:,}")
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        metadata = files.read(next(name for name in names if name.endswith("METADATA"))).decode()
    missing = [name for name in NEEDED if f"batchwright/{name}" not in names]
    _require(not missing, f"the wheel lacks {', '.join(missing)}")
    foreign = sorted({name.split("/")[0] for name in names if not name.startswith("batchwright")})
    _require(not foreign, f"the wheel installs {', '.join(foreign)} beside batchwright")
    relative = re.findall(r"\]\((?!https?://|#)[^)]+\)", metadata)
    _require(not relative, f"links of the README lead nowhere on the package index: {', '.join(relative)}")
    return f"{size:,} bytes, {len(names)} files ({_rooms(wheel)})"


def _rooms(wheel: Path) -> str:
    """Return the rooms and their compressed bytes, the largest first."""
    sizes: Counter[str] = Counter()
    with zipfile.ZipFile(wheel) as files:
        for file in files.infolist():
            room, *inside = file.filename.removeprefix("batchwright/").split("/")
            sizes["metadata" if room.endswith(".dist-info") else room if inside else "files beside"] += (
                file.compress_size
            )
    sizes["zip itself"] = wheel.stat().st_size - sizes.total()
    return ", ".join(f"{room} {num:,}" for room, num in sizes.most_common())


def make_environment(folder: Path, wheel: Path) -> Path:
    """Return the Python of an environment that has the wheel and what comes with it."""
    _run([sys.executable, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)])
    names = _run([str(python), "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"]).split()
    found = {name.partition("==")[0] for name in names} - {"pip", "setuptools"}
    _require(found == {"batchwright", "numpy"}, f"the wheel brings {', '.join(sorted(found))}, not NumPy only")
    return python


def check_imports(python: Path) -> str:
    """Return how long the import takes beside NumPy's, the medians of several; refuse one that takes too long."""
    # The processor's time, since other programs on the machine slow the clock of the two differently.
    code = "import time; start = time.process_time(); {}; print(time.process_time() - start)"
    lines = ("import numpy", "import batchwright", "import batchwright; batchwright.plan_batches")
    seconds: dict[str, list[float]] = {line: [] for line in lines}
    for _ in range(NUM_IMPORTS + 1):
        for line, times in seconds.items():
            times.append(float(_run([str(python), "-c", code.format(line)])))
    numpy, ours, used = (statistics.median(times[1:]) for times in seconds.values())  # the first read from the disk
    _require(ours <= MAX_IMPORT_RATIO * numpy, f"the import takes {ours / numpy:.2f} times as long as NumPy's")
    _require(used <= MAX_USE_RATIO * numpy, f"the first name takes {used / numpy:.2f} times as long as NumPy's import")
    return (
        f"{1000 * ours:.0f} ms, {ours / numpy:.2f} times NumPy's; "
        f"with the first name {1000 * used:.0f} ms, {used / numpy:.2f} times"
    )


def check_advise(python: Path, folder: Path) -> str:
    """Return the first line of an answer about a text file."""
    data = folder / "lines.txt"
    data.write_text("\n".join("word " * (1 + number % 40) for number in range(500)), encoding="utf-8")
    answer = _run([str(python.parent / "batchwright"), "advise", str(data)])
    _require("bw.BatchSampler(" in answer, f"advise gave no lines to copy:\n{answer}")
    return next(line for line in answer.splitlines() if line.startswith(("Yes", "No", "It")))


def check_extras(python: Path) -> str:
    """Return how many parts said what to install; refuse one that did not."""
    for module, package, extra in MODULES:
        _expect([str(python), "-c", f"import {module}"], package, extra)
    for words, extra in COMMANDS:
        _expect([str(python.parent / "batchwright"), *words.split()], None, extra)
    return f"{len(MODULES)} modules and {len(COMMANDS)} commands say what to install"


def check_each_extra(wheel: Path, folder: Path) -> str:
    """Return how many extras bring what their part needs; refuse one that does not."""
    for extra, code in EXTRAS.items():
        print(f"  with [{extra}] …", flush=True)
        environment = folder / extra
        _run([sys.executable, "-m", "venv", str(environment)])
        python = environment / "bin" / "python"
        _install(python, f"{wheel}[{extra}]")
        if extra == "keras":  # what Keras runs on is for the user to choose, and no extra brings it
            done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
            _require("run: pip install torch" in done.stderr, f"Keras without a backend says {done.stderr!r}")
            _install(python, "torch")
        _run([str(python), "-c", code])
        shutil.rmtree(environment)  # each may have a gigabyte
    return f"{len(EXTRAS)} bring what their part needs"


def _install(python: Path, what: str) -> None:
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*install, "--constraint", str(ROOT / "constraints.txt"), what])


def _expect(command: Sequence[str], package: str | None, extra: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
    wanted = f"{package or ''} is not installed; run: pip install 'batchwright[{extra}]'"
    _require(done.returncode != 0, f"{' '.join(command)} works without {extra}")
    _require(wanted in said, f"{' '.join(command)} says {said!r}, not {wanted!r}")


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise SystemExit(f"check_wheel.py: {words}")


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
    _require(done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, install and check; the first thing that is wrong ends it with status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the files go (default: dist)")
    parser.add_argument("--extras", action="store_true", help="install and try each extra by itself too (10 minutes)")
    options = parser.parse_args(arguments)
    sdist, wheel = build(options.output.resolve())
    print(f"{sdist.name}: {sdist.stat().st_size:,} bytes")
    print(f"{wheel.name}: {check_contents(wheel)}")
    with tempfile.TemporaryDirectory() as folder:
        python = make_environment(Path(folder) / "env", wheel)
        print(f"import batchwright: {check_imports(python)}")
        print(f"batchwright advise: {check_advise(python, Path(folder))}")
        print(f"missing extras: {check_extras(python)}")
        if options.extras:
            print(f"extras: {check_each_extra(wheel, Path(folder))}")


if __name__ == "__main__":
    main()
