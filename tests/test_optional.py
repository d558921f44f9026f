import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import batchwright
from batchwright._optional import is_installed, require
from batchwright.errors import MissingDependencyError

ROOT = Path(batchwright.__file__).parent
# Every module that users may import, by its path; commands check what they need before they run.
MODULES = sorted(
    ".".join(("batchwright", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if not any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(ROOT).parts)
    and "cli" not in path.relative_to(ROOT).parts
)
TRY_ALL = """
import importlib, json, sys
for package in sys.argv[1].split(","):
    sys.modules[package] = None  # as if it were not installed
found = {}
for name in sys.argv[2:]:
    try:
        module = importlib.import_module(name)
        found[name] = None
    except BaseException as error:
        found[name] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(MissingDependencyError, match=r"pip install 'batchwright\[ray\]'") as caught:
        require("surely_not_installed", extra="ray")
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "surely_not_installed"


def test_a_package_outside_the_extras_is_installed_by_its_own_name():
    with pytest.raises(MissingDependencyError, match=r"run: pip install no_such_package$"):
        require("no_such_package", extra=None)


def test_a_package_that_lacks_its_own_dependency_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed") as caught:
        require("half_there", extra="ray")
    assert not isinstance(caught.value, MissingDependencyError)


def test_looking_a_package_up_does_not_import_it(tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("never_imported")
    assert "never_imported" not in sys.modules


def import_without(package, *modules):
    """Return, for each module, None or the class and the words of the error, in a process without a package."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRY_ALL, package, *modules], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def without_torch():
    return import_without("torch", *MODULES)


# The extra that each room without torch names; every module inside says the same.
EXTRAS = {
    "batchwright.integrations.accelerate": "accelerate",
    "batchwright.integrations.dynabatch": "torch",
    "batchwright.integrations.huggingface": "hf",
    "batchwright.integrations.lightning": "lightning",
    "batchwright.integrations.sentence_transformers": "sentence-transformers",
    "batchwright.lab.models": "lab",
    "batchwright.lab.runner": "lab",
    "batchwright.step": "torch",
}


@pytest.mark.parametrize("name", MODULES)
def test_without_torch_a_module_works_or_says_what_to_install(without_torch, name):
    extra = next((extra for room, extra in EXTRAS.items() if f"{name}.".startswith(f"{room}.")), None)
    found = without_torch[name]
    if extra is not None:
        assert found == ["MissingDependencyError", f"torch is not installed; run: pip install 'batchwright[{extra}]'"]
    elif name.startswith("batchwright.integrations.keras") and not is_installed("keras"):
        assert found == ["MissingDependencyError", "keras is not installed; run: pip install 'batchwright[keras]'"]
    elif found is not None:
        assert found[0] == "MissingDependencyError"
        assert "torch is not installed; run: pip install 'batchwright[" in found[1]


@pytest.mark.parametrize("name", ["batchwright", "batchwright.plan", "batchwright.size", "batchwright.serve"])
def test_what_needs_no_torch_works_without_it(without_torch, name):
    assert without_torch[name] is None


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("", "write: import batchwright.step"),
        ("import sys; sys.modules['torch'] = None; ", "it needs torch, run: pip install 'batchwright[torch]'"),
    ],
    ids=["with torch", "without torch"],
)
def test_the_room_of_steps_says_how_it_is_reached(before, words):
    code = f"{before}import batchwright as bw; assert not hasattr(bw, 'step'); bw.step"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("AttributeError: module 'batchwright' has no attribute 'step' before it is imported")
    assert line.endswith(words)


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("Stepper", "step"),
        ("supervised_loss", "step"),
        ("PadCollator", "step"),
        ("calibrate", "step"),
        ("generate", "step"),
        ("batched", "serve"),
        ("Batcher", "serve"),
        ("goodput", "size"),
        ("Lab", "lab"),
        ("check_policy", "testing"),
        ("check_batch_sampler", "testing"),
        ("adaptive", "integrations.huggingface"),
        ("prepare", "integrations.accelerate"),
    ],
)
def test_what_lies_in_a_room_above_is_told_where_it_is(name, room):
    if room in ("serve", "size", "testing") or is_installed("torch"):
        assert hasattr(importlib.import_module(f"batchwright.{room}"), name)
    with pytest.raises(AttributeError, match=f"attribute '{name}'; write: from batchwright.{room} import {name}"):
        getattr(batchwright, name)


@pytest.mark.parametrize(
    ("packages", "module", "words"),
    [
        ("transformers", "huggingface", "transformers is not installed; run: pip install 'batchwright[hf]'"),
        ("accelerate", "huggingface", "accelerate is not installed; run: pip install 'batchwright[hf]'"),
        ("accelerate", "accelerate", "accelerate is not installed; run: pip install 'batchwright[accelerate]'"),
        ("keras", "keras", "keras is not installed; run: pip install 'batchwright[keras]'"),
        ("ray", "ray", "ray is not installed; run: pip install 'batchwright[ray]'"),
        (
            "sentence_transformers",
            "sentence_transformers",
            "sentence_transformers is not installed; run: pip install 'batchwright[sentence-transformers]'",
        ),
        (
            "lightning,pytorch_lightning",
            "lightning",
            "lightning is not installed; run: pip install 'batchwright[lightning]'",
        ),
    ],
)
def test_an_integration_without_its_framework_says_what_to_install(packages, module, words):
    name = f"batchwright.integrations.{module}"
    assert import_without(packages, name)[name] == ["MissingDependencyError", words]


def test_without_the_packages_of_http_every_module_of_serving_can_be_imported():
    serving = [name for name in MODULES if name.startswith("batchwright.serve")]
    assert import_without("starlette,prometheus_client", *serving) == dict.fromkeys(serving)


def test_the_demo_of_serving_says_what_to_install():
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "from batchwright.serve.demo import Demo, DemoEncoder\n"
        "print(len(DemoEncoder()(['a text']))); Demo(DemoEncoder())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert done.stderr.endswith("starlette is not installed; run: pip install 'batchwright[serve]'\n")


@pytest.mark.parametrize("name", ["surely_not_installed", "surely.not.installed", "torch"])
def test_a_package_that_was_turned_off_is_not_installed(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    assert not is_installed(name)
