"""What the measurements need, made on a machine without a GPU: data, and packages that a GPU machine may lack."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from .entries import ROOT, Entry

MOST_MIB = 60
# The file that a script makes of the corpora, and how. lengths.npy is for gpu_training.py.
DATA = {
    "pairs.npz": ("gpu_trainer.py",),
    "translation.npz": ("gpu_quality.py", "--task", "translation"),
    "decoder.npz": ("gpu_quality.py", "--task", "decoder"),
}
TEST_PACKAGES = ("pytest", "pytest-timeout", "hypothesis")
# Without what they need: dynabatch's trainer needs nothing, Lightning what pytorch-lightning brings.
ALONE = ("dynabatch==0.2.23", "lightning==2.6.6")
ABOUT = "prepared.json"


def prepare(folder: Path, corpora: Path, *, python_version: str, platform: str) -> None:
    """Make data and packages, and pack them; what is there already is kept.

    Args:
        folder: that is filled.
        corpora: the folder of texts.
        python_version: of the GPU machine, such as ``3.12``.
        platform: of the GPU machine, as pip calls it.
    """
    if not corpora.is_dir():
        raise SystemExit(f"--corpora must name the folder of corpora, got {corpora}")
    folder, corpora = folder.resolve(), corpora.resolve()  # scripts run from the root of the repository
    folder.mkdir(parents=True, exist_ok=True)
    for name, (script, *options) in DATA.items():
        if not (folder / name).exists():
            print(f"{name}: about two minutes", flush=True)
            _run_script(script, "--prepare", str(corpora), *options, "--data", str(folder / name))
    _add_packages(folder / "packages", python_version, platform)
    about = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python_version": python_version,
        "platform": platform,
        "data": {name: _digest(folder / name) for name in DATA},
        "packages": sorted(path.name for path in (folder / "packages").glob("*.dist-info")),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))
    _measure(folder)


def _run_script(script: str, *options: str) -> None:
    # dynabatch asks its regressor for a few candidates at a time, and more threads only wait for each other.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    ended = subprocess.run(command, cwd=ROOT, env=variables)
    if ended.returncode:
        raise SystemExit(f"{script} {' '.join(options)} ended with status {ended.returncode}")


def _add_packages(folder: Path, python_version: str, platform: str) -> None:
    """Unpack wheels, so that nothing has to be installed there: what runs the tests, and dynabatch's trainer alone."""
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    pip = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--target",
        str(unfinished), "--only-binary=:all:", "--implementation", "cp", "--python-version", python_version,
        "--platform", platform,
    ]  # fmt: skip
    # The releases that the tests run with here.
    tests = [f"{name}=={metadata.version(name)}" for name in TEST_PACKAGES]
    for options in (tests, ["--no-deps", *ALONE]):
        subprocess.run([*pip, *options], check=True)
    shutil.rmtree(unfinished / "dynabatch" / "models")  # 27 MB of a regressor that only plans
    unfinished.rename(folder)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]  # as results name their data


def _measure(folder: Path) -> None:
    archive = folder.with_name(folder.name + ".zip")
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in paths:
            file.write(path, path.relative_to(folder))
    packed, plain = archive.stat().st_size / 2**20, sum(path.stat().st_size for path in paths) / 2**20
    print(f"{archive}: {packed:.1f} MiB; unpacked {plain:.1f} MiB in {len(paths):,} files")
    if max(packed, plain) > MOST_MIB:
        raise SystemExit(f"that is more than {MOST_MIB} MiB; leave data of some measurements out")


def check(entries: Sequence[Entry], data: Path) -> None:
    """Refuse to begin without a file or a package that a measurement needs."""
    missing = {name for entry in entries for name in entry.data if not (data / name).exists()}
    if any(entry.is_tests for entry in entries):
        modules = {name.replace("-", "_") for name in TEST_PACKAGES}
        missing |= {name for name in modules if not _is_at_hand(name, data / "packages")}
    if missing:
        raise SystemExit(
            f"{data} lacks {', '.join(sorted(missing))}; make it with --prepare where there is a network, and name it "
            "with --data, or choose other measurements with --only"
        )


def _is_at_hand(module: str, packages: Path) -> bool:
    return any(packages.glob(f"{module}*")) or importlib.util.find_spec(module) is not None
