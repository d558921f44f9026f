"""Measure how a package is cut into files, and list what breaks the rules of the house.

    python tools/house.py                       # the table of src/batchwright
    python tools/house.py path/to/a/package     # of any package, for comparison
    python tools/house.py --json                # the same as JSON
    python tools/house.py --walk                # which files one training iteration passes (needs torch)

Files are Python files; tests beside the code (``*_test.py``, ``test_*.py``) are left out. A *module* is a file that is
not an ``__init__``; an ``__init__`` is a *front*. The *room* of a module is its first folder or file below the package;
top-level files with an underscore, ``errors`` and ``_charts`` are the ground floor, which belongs to no room.

A module **serves one other file** when exactly one file imports it and that file is not a front. Imports inside
functions and under ``TYPE_CHECKING`` count. A module that a front exports serves the users of that front.

The rules:

1. A file with a public name has no underscore, a file without one has it; folders likewise. Public is a name that a
   front lists in ``__all__`` (without ``__all__``: ``import x as x``), or a file without underscore in its own. What is
   below a private folder is private by that folder. In ``cli`` no file has an underscore.
2. A prefix shared by three files of a folder is a folder.
3. A file that serves one other file joins it, unless the result is longer than about 350 lines.

No module has the name of a public function, and no module imports a private module or name of another room, imports
from a front above it, or is part of an import cycle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the parts, when this file is loaded by its path

from _house import rules
from _house.files import GROUND, FunctionLines, Tree, read_tree

PACKAGE = Path(__file__).parents[1] / "src" / "batchwright"
NUM_LONGEST = 8


@dataclass(frozen=True)
class House:
    """Everything the table says about a package; names are dotted names below it."""

    num_modules: int
    median_lines: float
    serving_share: float
    serving_by_room: dict[str, float]
    folders: dict[str, int]
    lines_of_code: int
    comment_share: float
    longest_modules: dict[str, int]
    longest_functions: tuple[FunctionLines, ...]
    too_long: list[str]
    misnamed: list[str]
    named_like_functions: list[str]
    shared_prefixes: list[str]
    serving_one: list[rules.Served]
    private_imports: list[str]
    imports_of_own_front: list[str]
    without_annotations: list[str]
    cycles: list[list[str]]
    cycles_with_types: list[list[str]]
    room_cycles: list[list[str]]


def measure(tree: Tree) -> House:
    """Return the figures of a package and what breaks its rules."""
    modules = rules.modules_of(tree)
    functions = sorted((f for m in tree.values() for f in m.functions), key=lambda f: -f.code)
    longest = sorted(modules, key=lambda module: -module.lines)[:NUM_LONGEST]
    return House(
        num_modules=len(modules),
        median_lines=statistics.median(module.lines for module in modules),
        serving_share=rules.serving_share(tree),
        serving_by_room=serving_by_room(tree),
        folders=dict(Counter(module.folder or "." for module in modules).most_common()),
        lines_of_code=sum(module.code for module in tree.values()),
        comment_share=sum(m.comments for m in tree.values()) / max(1, sum(m.lines for m in tree.values())),
        longest_modules={module.name: module.lines for module in longest},
        longest_functions=tuple(functions[:NUM_LONGEST]),
        too_long=texts(rules.too_long(tree)),
        misnamed=texts(rules.misnamed(tree)),
        named_like_functions=texts(rules.named_like_functions(tree)),
        shared_prefixes=texts(rules.shared_prefixes(tree)),
        serving_one=rules.serving_one(tree),
        private_imports=texts(rules.private_imports(tree)),
        imports_of_own_front=texts(rules.imports_of_own_front(tree)),
        without_annotations=texts(rules.without_annotations(tree)),
        cycles=rules.cycles(tree, for_types=False),
        cycles_with_types=rules.cycles(tree, for_types=True),
        room_cycles=rules.room_cycles(tree, for_types=True),
    )


def serving_by_room(tree: Tree) -> dict[str, float]:
    """Return the share of modules that serve one other file, for every room of two modules or more."""
    sizes = Counter(module.room for module in rules.modules_of(tree))
    rooms = [room for room, size in sizes.items() if size > 1 and room != GROUND]
    return {room: rules.serving_share(tree, room) for room in rooms}


def texts(problems: Iterable[rules.Problem]) -> list[str]:
    """Return problems as lines of text."""
    return [str(problem) for problem in problems]


def table(house: House) -> Iterator[str]:
    """Yield the lines of the table, and below it what breaks a rule."""
    rooms = ", ".join(f"{room} {share:.0%}" for room, share in house.serving_by_room.items())
    folders = ", ".join(f"{count} ({folder})" for folder, count in list(house.folders.items())[:4])
    yield row("modules", house.num_modules)
    yield row("median lines of a module", house.median_lines)
    yield row("modules that serve one other file", f"{house.serving_share:.0%} ({rooms})")
    yield row("most modules in one folder", folders)
    yield row("private imports across rooms", len(house.private_imports))
    yield row("cycles between modules", f"{len(house.cycles)}, with imports for types {len(house.cycles_with_types)}")
    yield row("cycles between rooms", len(house.room_cycles))
    yield row("lines of code", house.lines_of_code)
    yield row("lines with a comment", f"{house.comment_share:.1%}")
    yield from section("longest modules", (f"{lines:5} {name}" for name, lines in house.longest_modules.items()))
    yield from section("longest functions, lines of code", (f"{f.code:5} {f.name}" for f in house.longest_functions))
    yield from section(f"modules over {rules.MAX_LINES} lines", house.too_long)
    yield from section("rule 1: underscores against the fronts", house.misnamed)
    yield from section("rule 2: a shared prefix is a folder", house.shared_prefixes)
    yield from section("rule 3: serves one other file, joint lines", served_lines(house.serving_one))
    yield from section("named like a public function", house.named_like_functions)
    yield from section("private imports across rooms", house.private_imports)
    yield from section("imports from the front of an own folder", house.imports_of_own_front)
    yield from section("functions without annotations", house.without_annotations)
    yield from section("cycles between modules", map(" <-> ".join, house.cycles))
    yield from section("cycles between modules, with imports for types", map(" <-> ".join, house.cycles_with_types))
    yield from section("cycles between rooms", map(" <-> ".join, house.room_cycles))


def row(title: str, value: object) -> str:
    """Return one line of the table."""
    return f"{title:36} {value}"


def section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield a title with the number of lines below it, and the lines; nothing where there is no line."""
    lines = list(lines)
    if lines:
        yield f"\n{title} ({len(lines)})"
        yield from (f"  {line}" for line in lines)


def served_lines(served: Iterable[rules.Served]) -> Iterator[str]:
    """Yield the modules that serve one other file, the shortest results first; ``*``: could join."""
    for item in sorted(served, key=lambda item: item.joint_lines):
        yield f"{item.joint_lines:5} {'*' if item.could_join else ' '} {item.name} -> {item.by or 'the front'}"


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path, default=PACKAGE, help="a folder with an __init__.py")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--walk", action="store_true", help="follow one training iteration of the batchwright that Python imports"
    )
    options = parser.parse_args()
    if options.walk:
        from _house.walk import walk_lines, walk_one_iteration

        walk = walk_one_iteration()
        print(json.dumps(asdict(walk)) if options.json else "\n".join(walk_lines(walk)))
        return
    if not (options.package / "__init__.py").is_file():
        parser.error(f"{options.package} is not a package: it has no __init__.py")
    house = measure(read_tree(options.package.resolve()))
    print(json.dumps(asdict(house), indent=1) if options.json else "\n".join(table(house)))


if __name__ == "__main__":
    main()
