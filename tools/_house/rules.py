"""The rules of the house, each a function from the files of a package to what breaks it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .files import FRONT, GROUND, Import, Module, Tree, is_private

MAX_LINES = 400
JOINT_LINES = 350
SHARED_BY = 3
NO_PUBLIC_NAMES = ("cli",)  # rooms whose files have no underscore although only their front has a public name


@dataclass(frozen=True)
class Served:
    """A module that serves one other file, and how long the two would be as one."""

    name: str
    by: str
    joint_lines: int

    @property
    def could_join(self) -> bool:
        """Return whether the two make one file of a good length."""
        return self.joint_lines <= JOINT_LINES


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file or a folder."""

    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.name or 'the front'}: {self.text}"


def modules_of(tree: Tree) -> list[Module]:
    """Return the files that are not fronts."""
    return [module for module in tree.values() if not module.is_front]


def importers_of(tree: Tree) -> dict[str, set[str]]:
    """Return the files that import each file, itself left out."""
    found: dict[str, set[str]] = {name: set() for name in tree}
    for module in tree.values():
        for target in {imported.target for imported in module.imports} - {module.name}:
            found[target].add(module.name)
    return found


def serving_one(tree: Tree) -> list[Served]:
    """Return the modules that exactly one file imports, where that file is not a front (rule 3)."""
    found = []
    for name, importers in importers_of(tree).items():
        if len(importers) == 1 and not tree[name].is_front:
            (by,) = importers
            if not tree[by].is_front:
                found.append(Served(name, by, tree[name].lines + tree[by].lines))
    return found


def serving_share(tree: Tree, room: str | None = None) -> float:
    """Return the share of modules that serve one other file, in one room or in all."""
    modules = {module.name for module in modules_of(tree) if room in (None, module.room)}
    return sum(served.name in modules for served in serving_one(tree)) / max(1, len(modules))


def public_names(tree: Tree) -> dict[str, set[str]]:
    """Return the public names that each file holds or hands on; a module that is listed itself counts as one."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in tree.values():
        if not module.is_private and module.room not in NO_PUBLIC_NAMES:
            for name in names_listed_by(module):
                for holder, held in homes_of(tree, module, name):
                    found[holder].add(held)
    return found


def names_listed_by(module: Module) -> tuple[str, ...]:
    """Return the names of ``__all__``; of a front without one those imported as themselves."""
    if module.listed is not None:
        return module.listed
    if not module.is_front:
        return ()
    return tuple(item.bound_as for item in module.imports if item.handed_on)


def homes_of(tree: Tree, module: Module, name: str) -> Iterator[tuple[str, str]]:
    """Yield (file, name) for every file between a listed name and its definition, the definition last."""
    yield module.name, name
    if name in module.defined:
        return
    imports = [item for item in module.imports if item.bound_as == name and item.target != module.name]
    for item in imports:
        if item.name is None:
            yield item.target, name
        else:
            yield from homes_of(tree, tree[item.target], item.name)
    below = f"{module.name}.{name}".lstrip(".")
    if not imports and below in tree:  # a module that loads when it is first asked for
        yield below, name


def misnamed(tree: Tree) -> list[Problem]:
    """Return the files and folders whose underscore does not agree with what the fronts list (rule 1)."""
    public = public_names(tree)
    return [*_misnamed_files(tree, public), *_misnamed_folders(tree, public)]


def _misnamed_files(tree: Tree, public: Mapping[str, set[str]]) -> Iterator[Problem]:
    for module in modules_of(tree):
        if module.stem == "__main__" or (module.room == GROUND and is_private(module.name)):
            continue
        names = public.get(module.name)
        if module.room in NO_PUBLIC_NAMES:
            if is_private(module.stem):
                yield Problem(module.name, f"files of {module.room} have no underscore")
        elif names and is_private(module.stem):
            yield Problem(module.name, f"has an underscore but holds {_some(names)}")
        elif not names and not module.is_private:
            yield Problem(module.name, "has no underscore but no front lists a name of it")


def _misnamed_folders(tree: Tree, public: Mapping[str, set[str]]) -> Iterator[Problem]:
    for front in tree.values():
        if not front.is_front or "." not in front.name or front.room in NO_PUBLIC_NAMES:
            continue
        inside = [names for name, names in public.items() if f"{name}.".startswith(f"{front.name}.")]
        if inside and is_private(front.stem):
            yield Problem(front.name, f"has an underscore but holds {_some(set().union(*inside))}")
        elif not inside and not front.is_private:
            yield Problem(front.name, "has no underscore but no front lists a name of it")


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")


def named_like_functions(tree: Tree) -> list[Problem]:
    """Return the files and folders that have the name of a public function."""
    functions = {
        name: holder for holder, names in public_names(tree).items() for name in names & tree[holder].own_functions
    }
    return [
        Problem(module.name, f"has the name of the function in {functions[module.stem]}")
        for module in tree.values()
        if module.stem in functions
    ]


def shared_prefixes(tree: Tree) -> list[Problem]:
    """Return the first words that three or more files of a folder share (rule 2)."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules_of(tree):
        found[module.folder, module.stem.lstrip("_").partition("_")[0]].append(module.stem)
    return [
        Problem(f"{folder}/{prefix}".lstrip("/"), ", ".join(stems))
        for (folder, prefix), stems in found.items()
        if len(stems) >= SHARED_BY
    ]


def too_long(tree: Tree) -> list[Problem]:
    """Return the files that are too long to read in one go."""
    return [Problem(name, f"{module.lines} lines") for name, module in tree.items() if module.lines > MAX_LINES]


def without_annotations(tree: Tree) -> list[Problem]:
    """Return the files with functions that do not say what they take and return."""
    return [Problem(name, ", ".join(module.unannotated)) for name, module in tree.items() if module.unannotated]


def private_imports(tree: Tree) -> list[Problem]:
    """Return the imports of private modules of another room, and of private names; the ground floor is open to all."""
    found: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for module, item in _imports_between_rooms(tree):
        target = tree[item.target]
        if (target.is_private and target.room != GROUND) or is_private(item.name or ""):
            found[module.name, item.target, item.line].append(item.name or "")
    return [
        Problem(name, f"line {line} imports {target}: {', '.join(names)}".rstrip(": "))
        for (name, target, line), names in found.items()
    ]


def imports_of_own_front(tree: Tree) -> list[Problem]:
    """Return the imports of a module from the front of a folder that it is in."""
    return [
        Problem(module.name, f"line {item.line} imports {_spelled(item)}")
        for module in tree.values()
        for item in module.imports
        if item.target and module.name.startswith(f"{item.target}.")
    ]


def upward_imports(tree: Tree, levels: Mapping[str, int]) -> list[Problem]:
    """Return the imports of a room that is not below the own one, and the rooms without a level."""
    rooms = {module.room for module in tree.values()}
    unknown = [Problem(room, "has no level") for room in sorted(rooms - levels.keys())]
    upward = [
        Problem(module.name, f"line {item.line} imports {_spelled(item)}, which is not below {module.room}")
        for module, item in _imports_between_rooms(tree)
        if levels.get(tree[item.target].room, 0) >= levels.get(module.room, 0)
    ]
    return unknown + upward


def _imports_between_rooms(tree: Tree) -> Iterator[tuple[Module, Import]]:
    for module in tree.values():
        for item in module.imports:
            if tree[item.target].room != module.room:
                yield module, item


def _spelled(item: Import) -> str:
    return ".".join(part for part in (item.target, item.name) if part) or "the front"


def cycles(tree: Tree, *, for_types: bool) -> list[list[str]]:
    """Return the groups of files that import each other in a circle, imports inside functions counted.

    Args:
        tree: the files.
        for_types: count imports under ``TYPE_CHECKING`` too.
    """
    return _circles((module.name, item.target) for module, item in _imports(tree, for_types))


def room_cycles(tree: Tree, *, for_types: bool) -> list[list[str]]:
    """Return the groups of rooms that import each other in a circle; the front imports and is imported freely."""
    pairs = ((module.room, tree[item.target].room) for module, item in _imports(tree, for_types))
    return _circles(pair for pair in pairs if FRONT not in pair)


def _imports(tree: Tree, for_types: bool) -> Iterator[tuple[Module, Import]]:
    for module in tree.values():
        yield from ((module, item) for item in module.imports if for_types or item.when != "for types")


def _circles(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    edges: dict[str, set[str]] = defaultdict(set)
    for name, target in pairs:
        edges[name].add(target)
    return sorted(sorted(group) for group in _components(edges) if len(group) > 1)


def _components(edges: Mapping[str, Collection[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components, after Tarjan (1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    closed: set[str] = set()

    def visit(name: str) -> Iterator[list[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(edges.get(name, ())):
            if other not in index:
                yield from visit(other)
            if other not in closed:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[-len(group) :]
            closed.update(group)
            yield group

    for name in sorted(edges):
        if name not in index:
            yield from visit(name)
