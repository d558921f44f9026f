"""The rules of the house: how the package is cut into files, and which way its imports point.

``tools/house.py`` says what the rules mean. Each stands here twice: kept by the package, and broken by a small one.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import batchwright as bw

TOOL = Path(__file__).parents[1] / "tools" / "house.py"
# Rooms from the ground up. A room imports only from rooms below it, so neighbours do not import each other.
# The front is what ``import batchwright`` runs; rooms above it may use it as a user does.
LEVELS = {
    "ground floor": 0,
    "plan": 1,
    "size": 1,
    "serve": 1,
    "front": 2,
    "step": 2,
    "testing": 3,
    "integrations": 3,
    "lab": 4,
    "cli": 5,
    "__main__": 6,
}
MAX_SERVING_SHARE = 0.125
MAX_MODULES_PER_FOLDER = 20
MAX_FILES_PER_ITERATION = 25


def load_tool():
    spec = importlib.util.spec_from_file_location("house", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


house = load_tool()
rules = house.rules


@pytest.fixture(scope="module")
def tree():
    return house.read_tree(Path(bw.__file__).parent)


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a package of the given files and reads it; every folder gets a front."""

    def make(files):
        package = tmp_path / "tiny"
        for name, text in files.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
            (folder / "__init__.py").touch()
        return house.read_tree(package)

    return make


def lines(problems):
    return "\n".join(map(str, problems))


# The package


RULES = [
    rules.misnamed,
    rules.named_like_functions,
    rules.shared_prefixes,
    rules.too_long,
    rules.private_imports,
    rules.imports_of_own_front,
    rules.without_annotations,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_a_rule(tree, rule):
    assert not rule(tree), lines(rule(tree))


def test_rooms_import_downward_only(tree):
    assert not rules.upward_imports(tree, LEVELS), lines(rules.upward_imports(tree, LEVELS))


def test_no_imports_go_in_a_circle(tree):
    assert rules.cycles(tree, for_types=True) == []
    assert rules.room_cycles(tree, for_types=True) == []


def test_few_files_serve_one_other_file(tree):
    served = sorted(rules.serving_one(tree), key=lambda item: item.joint_lines)
    assert rules.serving_share(tree) <= MAX_SERVING_SHARE, lines(served)


def test_no_folder_is_crowded(tree):
    crowded = {name: num for name, num in house.measure(tree).folders.items() if num > MAX_MODULES_PER_FOLDER}
    assert crowded == {}


def test_one_training_iteration_passes_few_files():
    pytest.importorskip("torch")
    from _house.walk import walk_lines, walk_one_iteration

    walk = walk_one_iteration()
    assert walk.changes_of_file >= len(walk.calls) - 1
    assert len(walk.calls) <= MAX_FILES_PER_ITERATION, "\n".join(walk_lines(walk))


# Every rule can be broken


@pytest.mark.parametrize(
    ("imports", "broken"),
    [
        ("from ..plan import budget", False),
        ("from .. import _checks", False),
        ("from ..lab import runner", True),
        ("from tiny.lab import runner", True),
        ("import tiny.lab.runner", True),
        ("def late():\n    from ..lab.runner import run", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..lab.runner import run", True),
        ("from importlib import import_module\nimport_module('..lab', __name__)", True),
        ("from .. import errors, step", False),  # its own room, reached through the package
        ("from .. import lab", True),
        ("from .. import BatchSampler", True),  # the front is not below step
    ],
)
def test_an_upward_import_is_found(make, imports, broken):
    tree = make(
        {"step/one.py": imports, "plan/budget.py": "", "lab/runner.py": "run = 1", "_checks.py": "", "errors.py": ""}
    )
    assert bool(rules.upward_imports(tree, LEVELS)) is broken


def test_the_front_stands_between_the_lower_and_the_upper_rooms(make):
    tree = make(
        {"__init__.py": "from .plan import a", "plan/a.py": "", "cli/b.py": "from .. import a", "__main__.py": ""}
    )
    assert rules.upward_imports(tree, LEVELS) == []
    tree = make({"__init__.py": "from .cli import b"})
    assert lines(rules.upward_imports(tree, LEVELS)) == "the front: line 1 imports cli.b, which is not below front"


def test_neighbours_may_not_import_each_other(make):
    tree = make({"plan/budget.py": "from ..size import policy", "size/policy.py": ""})
    assert "plan.budget: line 1 imports size.policy" in lines(rules.upward_imports(tree, LEVELS))


def test_a_room_without_a_level_is_found(make):
    assert lines(rules.upward_imports(make({"attic/box.py": ""}), LEVELS)) == "attic: has no level"


@pytest.mark.parametrize(
    ("back", "without_types"),
    [
        ("from .a import x", True),
        ("def late():\n    from . import a", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x", False),
    ],
)
def test_a_circle_of_imports_is_found(make, back, without_types):
    tree = make({"plan/a.py": "from .b import y", "plan/b.py": "from . import c", "plan/c.py": back})
    circle = [["plan.a", "plan.b", "plan.c"]]
    assert rules.cycles(tree, for_types=True) == circle
    assert rules.cycles(tree, for_types=False) == (circle if without_types else [])


def test_two_circles_are_told_apart_and_a_line_is_not_one(make):
    tree = make({
        "a.py": "from . import b", "b.py": "from . import a, c",
        "c.py": "from . import d", "d.py": "from . import c, e", "e.py": "",
    })  # fmt: skip
    assert rules.cycles(tree, for_types=True) == [["a", "b"], ["c", "d"]]


def test_rooms_that_import_each_other_are_found_without_a_circle_of_modules(make):
    tree = make({
        "lab/a.py": "from ..cli import b", "cli/b.py": "", "cli/c.py": "from ..lab import d", "lab/d.py": "",
    })  # fmt: skip
    assert rules.cycles(tree, for_types=True) == []
    assert rules.room_cycles(tree, for_types=True) == [["cli", "lab"]]


@pytest.mark.parametrize(
    ("imports", "broken"),
    [
        ("from ..plan._arrays import x", True),
        ("from ..plan import _arrays", True),
        ("def late():\n    from ..plan._arrays import x", True),
        ("from ..plan._models.terms import x", True),
        ("from ..plan.budget import _x", True),
        ("from .._checks import _x", True),
        ("from ..plan.budget import x", False),
        ("from .._checks import x", False),
        ("from .._charts.bars import x", False),
        ("from ._own import x", False),
        ("from .. import __version__", False),
    ],
)
def test_a_private_import_across_rooms_is_found(make, imports, broken):
    tree = make({
        "step/one.py": imports, "step/_own.py": "", "plan/_arrays.py": "", "plan/budget.py": "",
        "plan/_models/terms.py": "", "_checks.py": "", "_charts/bars.py": "",
    })  # fmt: skip
    assert bool(rules.private_imports(tree)) is broken


@pytest.mark.parametrize(
    ("imports", "broken"),
    [
        ("from . import Budget", True),
        ("from .. import Stepper", True),
        ("from ..memory import Budget", True),
        ("from . import other", False),
        ("from ...plan import Plan", False),
    ],
)
def test_an_import_from_the_own_front_is_found(make, imports, broken):
    tree = make({"step/memory/one.py": imports, "step/memory/other.py": "", "plan/plan.py": ""})
    assert bool(rules.imports_of_own_front(tree)) is broken


FRONT = "from .{file} import Budget as Budget\n__all__ = ['Budget']"
LATE_FRONT = """
NAMES = {'Budget': '_b'}
__all__ = sorted(NAMES)
if TYPE_CHECKING:
    from ._b import Budget
"""


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        ({"plan/__init__.py": FRONT.format(file="budget"), "plan/budget.py": "class Budget: ..."}, []),
        ({"plan/__init__.py": FRONT.format(file="_budget"), "plan/_budget.py": "class Budget: ..."}, ["plan._budget"]),
        ({"plan/__init__.py": FRONT.format(file="b"), "plan/b.py": "Budget = 1", "plan/c.py": ""}, ["plan.c"]),
        ({"plan/__init__.py": "from ._b import Budget as Budget", "plan/_b.py": "Budget = 1"}, ["plan._b"]),
        ({"plan/__init__.py": "from ._b import Budget", "plan/_b.py": "Budget = 1"}, []),
        # The name is followed to where it is defined.
        ({"plan/__init__.py": FRONT.format(file="b"), "plan/b.py": "from ._c import Budget",
          "plan/_c.py": "Budget = 1"}, ["plan._c"]),
        # Folders: public with a public file below, private by their own underscore otherwise.
        ({"plan/__init__.py": FRONT.format(file="_in.b"), "plan/_in/b.py": "Budget = 1"}, ["plan._in"]),
        ({"plan/__init__.py": FRONT.format(file="inner.b"), "plan/inner/b.py": "Budget = 1"}, []),
        ({"plan/_in/b.py": "Budget = 1"}, []),
        ({"plan/inner/_b.py": "Budget = 1"}, ["plan.inner"]),
        # A front that loads late, and a file that lists its own names.
        ({"plan/__init__.py": LATE_FRONT, "plan/_b.py": "Budget = 1"}, ["plan._b"]),
        ({"integrations/ray.py": "__all__ = ['ray_data']\ndef ray_data(): ..."}, []),
        ({"integrations/ray.py": "def ray_data(): ..."}, ["integrations.ray"]),
        # A module that is listed itself; the ground floor; cli.
        ({"size/__init__.py": "from . import noise\n__all__ = ['noise']", "size/noise.py": ""}, []),
        ({"step/__init__.py": "from .._oom import x\n__all__ = ['x']", "_oom.py": "x = 1"}, []),
        ({"errors.py": "__all__ = ['Error']\nclass Error: ...", "_oom.py": ""}, []),
        ({"cli/app.py": "", "cli/_doctor/run.py": "", "cli/_screen.py": ""}, ["cli._screen"]),
    ],
)  # fmt: skip
def test_underscores_agree_with_the_fronts(make, files, wrong):
    assert [problem.name for problem in rules.misnamed(make(files))] == wrong


@pytest.mark.parametrize(
    ("name", "broken"), [("generate.py", True), ("generate/one.py", True), ("_generate.py", False), ("one.py", False)]
)
def test_a_module_named_like_a_public_function_is_found(make, name, broken):
    files = {"step/__init__.py": "from .two import generate, Stepper\n__all__ = ['generate', 'Stepper']"}
    tree = make({**files, "step/two.py": "def generate(): ...\nclass Stepper: ...", f"step/{name}": ""})
    assert bool(rules.named_like_functions(tree)) is broken


def test_a_class_may_have_a_module_of_its_name(make):
    tree = make(
        {"step/__init__.py": "from .report import report\n__all__ = ['report']", "step/report.py": "class report: ..."}
    )
    assert rules.named_like_functions(tree) == []


def test_a_prefix_of_three_files_is_found(make):
    tree = make({"lab/_run_a.py": "", "lab/_run_b.py": "", "lab/run.py": "", "lab/_runner.py": "", "size/run_c.py": ""})
    assert lines(rules.shared_prefixes(tree)) == "lab/run: _run_a, _run_b, run"


def test_a_file_that_serves_one_other_file_is_found(make):
    tree = make({
        "plan/__init__.py": "from .exported import x",
        "plan/exported.py": "", "plan/one.py": "from . import _helper, _shared\nfrom .exported import x",
        "plan/two.py": "from . import _shared", "plan/_helper.py": "\n\n", "plan/_shared.py": "",
    })  # fmt: skip
    assert rules.serving_one(tree) == [rules.Served("plan._helper", "plan.one", 4)]
    assert rules.serving_share(tree) == rules.serving_share(tree, "plan") == 1 / 5
    assert rules.serving_share(tree, "size") == 0


@pytest.mark.parametrize(("num_lines", "broken"), [(400, False), (401, True)])
def test_a_file_that_is_too_long_is_found(make, num_lines, broken):
    assert bool(rules.too_long(make({"plan/long.py": "x = 1\n" * num_lines}))) is broken


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("def f(a: int, *args: int, b: int = 1, **more: int) -> int: ...", False),
        ("class A:\n    def f(self) -> int: ...\n    @classmethod\n    def g(cls) -> int: ...", False),
        ("def f(a): ...", True),
        ("def f(a: int): ...", True),
        ("def f(*args) -> int: ...", True),
        ("def f(**more) -> int: ...", True),
        ("def f(*, a) -> int: ...", True),
        ("def f() -> int:\n    async def g(a) -> int: ...", True),
    ],
)
def test_a_function_without_annotations_is_found(make, text, broken):
    assert bool(rules.without_annotations(make({"plan/a.py": text}))) is broken


# What the table counts


def test_lines_of_code_leave_out_blank_lines_comments_and_docstrings(make):
    head = '"""One.\n\nTwo.\n"""\n\nx = """a\n\nb"""  # why\n\n\n'
    body = 'def f():\n    """Three."""\n    # noqa: E501\n    return x\n'
    module = make({"plan/a.py": head + body})["plan.a"]
    assert (module.lines, module.code, module.comments) == (14, 4, 1)
    assert [(function.name, function.code) for function in module.functions] == [("plan.a.f", 2)]


def test_the_table_and_its_json_hold_the_same_figures(make, tmp_path, monkeypatch, capsys):
    make({"plan/a.py": "from . import _b", "plan/_b.py": "def f(a): ...", "plan/test_a.py": "", "lab/c.py": ""})
    monkeypatch.setattr(sys, "argv", ["house.py", str(tmp_path / "tiny"), "--json"])
    house.main()
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_modules"] == 3
    assert figures["folders"] == {"plan": 2, "lab": 1}
    assert figures["serving_by_room"] == {"plan": 0.5}
    monkeypatch.setattr(sys, "argv", ["house.py", str(tmp_path / "tiny")])
    house.main()
    text = capsys.readouterr().out
    assert "modules that serve one other file    33% (plan 50%)" in text
    assert "2 * plan._b -> plan.a" in text


def test_a_folder_that_is_not_a_package_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["house.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        house.main()
    assert "is not a package" in capsys.readouterr().err


def test_a_walk_counts_calls_and_changes_of_file_and_room(make, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from _house.walk import follow

    text = "from ..size import b\ndef f():\n    b.g()\n    b.g()\n    h()\ndef h(): ..."
    make({"plan/a.py": text, "size/b.py": "def g(): ..."})
    monkeypatch.syspath_prepend(tmp_path)
    a = importlib.import_module("tiny.plan.a")
    walk = follow(a.f, tmp_path / "tiny")
    assert walk.calls == {"plan/a.py": 2, "size/b.py": 2}
    assert (walk.changes_of_file, walk.changes_of_room) == (2, 2)
