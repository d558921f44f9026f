"""Read the files of a package: names, imports, lines."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

GROUND = "ground floor"
FRONT = "front"
GROUND_NAMES = ("errors", "_charts")
PRAGMAS = ("noqa", "type:", "fmt:", "pragma", "ruff:", "mypy:")
SKIPPED_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip

When: TypeAlias = Literal["at import", "in a function", "for types"]
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One name that a file imports from a file of the same package; ``name`` is None for a whole module.

    ``handed_on``: spelled ``import x as x``, which says that others may import the name from here.
    """

    target: str
    name: str | None
    bound_as: str
    handed_on: bool
    when: When
    line: int


@dataclass(frozen=True)
class FunctionLines:
    """How many lines of code a function has."""

    name: str
    code: int


@dataclass(frozen=True)
class Module:
    """One file: its dotted name below the package (a front has the name of its folder), its imports and its lines."""

    name: str
    is_front: bool
    listed: tuple[str, ...] | None
    defined: frozenset[str]
    own_functions: frozenset[str]
    imports: tuple[Import, ...]
    lines: int
    code: int
    comments: int
    functions: tuple[FunctionLines, ...]
    unannotated: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Return the dotted name of the folder the file is in."""
        return self.name if self.is_front else self.name.rpartition(".")[0]

    @property
    def stem(self) -> str:
        """Return the last part of its name."""
        return self.name.rpartition(".")[2]

    @property
    def is_private(self) -> bool:
        """Return whether it, or a folder above it, begins with an underscore."""
        return any(is_private(part) for part in self.name.split("."))

    @property
    def room(self) -> str:
        """Return its room: the first folder or file below the package, the ground floor, or the package's front."""
        return room_of(self.name, is_folder=self.is_front)


Tree: TypeAlias = Mapping[str, Module]


def room_of(name: str, *, is_folder: bool = False) -> str:
    """Return the room of a module by its dotted name below the package; ``is_folder``: the name is that of a front."""
    if not name:
        return FRONT
    first, _, below = name.partition(".")
    is_file = not below and not is_folder
    return GROUND if first in GROUND_NAMES or (is_file and is_private(first)) else first


def is_private(name: str) -> bool:
    """Return whether a name begins with an underscore and is not ``__dunder__``."""
    return name.startswith("_") and not name.startswith("__")


def read_tree(package: Path) -> dict[str, Module]:
    """Read every file of a package, by dotted name."""
    paths = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if not parts[-1].startswith("test_") and not parts[-1].endswith("_test"):
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    root = import_name(package)
    return {name: read_module(name, path, paths, root=root) for name, path in paths.items()}


def import_name(package: Path) -> str:
    """Return the dotted name a package is imported by: its folder's, after those of the packages it lies in."""
    inside = (package.parent / "__init__.py").is_file()
    return f"{import_name(package.parent)}.{package.name}" if inside else package.name


def read_module(name: str, path: Path, known: Collection[str], *, root: str) -> Module:
    """Read one file; ``known`` are the names of all files, ``root`` is the name of the package."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    code, comments = lines_of(text, tree)
    functions = list(functions_of(tree))
    is_front = path.name == "__init__.py"
    return Module(
        name=name,
        is_front=is_front,
        listed=listed_names(tree),
        defined=frozenset(defined_names(tree)),
        own_functions=frozenset(node.name for node in tree.body if isinstance(node, Function)),
        imports=tuple(imports_of(tree, name if is_front else name.rpartition(".")[0], known, root=root)),
        lines=len(text.splitlines()),
        code=len(code),
        comments=len(comments),
        functions=tuple(FunctionLines(f"{name}.{title}", lines_within(node, code)) for title, node in functions),
        unannotated=tuple(title for title, node in functions if not is_annotated(node)),
    )


def lines_of(text: str, tree: ast.Module) -> tuple[set[int], set[int]]:
    """Return the numbers of the lines of code and of the lines with a comment; instructions to tools do not count."""
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.lstrip("# ").startswith(PRAGMAS):
            comments.add(token.start[0])
        elif token.type not in SKIPPED_TOKENS:
            code.update(range(token.start[0], token.end[0] + 1))
    blank = {number for number, line in enumerate(text.splitlines(), start=1) if not line.strip()}
    return code - docstring_lines(tree) - blank, comments


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings stand on."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def functions_of(node: ast.AST, above: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function, methods and nested ones too, with its title: ``Class.method``."""
    for child in ast.iter_child_nodes(node):
        title = above
        if isinstance(child, ast.ClassDef | Function):
            title = f"{above}.{child.name}".lstrip(".")
        if isinstance(child, Function):
            yield title, child
        yield from functions_of(child, title)


def lines_within(node: Function, code: Collection[int]) -> int:
    """Return how many lines of code stand within a function."""
    return sum(node.lineno <= line <= (node.end_lineno or 0) for line in code)


def is_annotated(node: Function) -> bool:
    """Return whether a function says what it takes and returns; ``self`` and ``cls`` need no annotation."""
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    asked = [arg for arg in every if arg is not None and arg.arg not in ("self", "cls")]
    return node.returns is not None and all(arg.annotation is not None for arg in asked)


def listed_names(tree: ast.Module) -> tuple[str, ...] | None:
    """Return the strings of ``__all__``, None without one; of ``sorted(NAMES)`` those of the constant ``NAMES``."""
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    if "__all__" not in values:
        return None
    return tuple(strings_of(values["__all__"], values))


def strings_of(node: ast.expr | None, values: Mapping[str, ast.expr | None]) -> Iterator[str]:
    """Yield the strings of a list, of the keys of a dict, and of constants that an expression names."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.Name(id=name) if name in values:
            yield from strings_of(values[name], values)
        case (
            ast.Dict(keys=parts)
            | ast.List(elts=parts)
            | ast.Set(elts=parts)
            | ast.Tuple(elts=parts)
            | ast.Call(args=parts)
        ):
            for part in parts:
                yield from strings_of(part, values)
        case ast.Starred(value=value):
            yield from strings_of(value, values)
        case ast.BinOp(left=left, right=right):
            yield from strings_of(left, values)
            yield from strings_of(right, values)


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the top level of a file defines, imports left out."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def imports_of(
    node: ast.AST, folder: str, known: Collection[str], *, root: str, when: When = "at import"
) -> Iterator[Import]:
    """Yield what a file in ``folder`` imports from its own package."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom | ast.Import | ast.Call):
            for path, name, alias in asked_for(child, folder, root):
                found = resolve(path, name, known)
                if found is not None:
                    yield Import(*found, alias or name or root, alias is not None and alias == name, when, child.lineno)
        inside = when_of(child, when)
        yield from imports_of(child, folder, known, root=root, when=inside)


def when_of(node: ast.AST, when: When) -> When:
    """Return when the imports inside a node happen, ``when`` being that of the node itself."""
    if isinstance(node, Function | ast.Lambda):
        return "in a function"
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return "for types"
    return when


def asked_for(
    node: ast.ImportFrom | ast.Import | ast.Call, folder: str, root: str
) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield (path below the package, name, alias) of what is imported from the own package."""
    match node:
        case ast.ImportFrom(module=module, level=level, names=names):
            path = absolute("." * level + (module or ""), folder, root)
            if path is not None:
                yield from ((path, alias.name, alias.asname) for alias in names)
        case ast.Import(names=names):
            for alias in names:
                path = absolute(alias.name, folder, root)
                if path is not None:
                    yield path, None, alias.asname
        case ast.Call(func=function, args=[ast.Constant(value=str(text)), *_]):
            path = absolute(text, folder, root) if ast.unparse(function).endswith("import_module") else None
            if path is not None:
                yield path, None, None


def absolute(path: str, folder: str, root: str) -> str | None:
    """Return the path of a module below the package, None for one of another package.

    >>> absolute("..errors", "plan", "batchwright"), absolute("batchwright.size", "lab", "batchwright")
    ('errors', 'size')
    """
    if not path.startswith("."):
        return path[len(root) + 1 :] if f"{path}.".startswith(f"{root}.") else None
    name = path.lstrip(".")
    above = folder.split(".") if folder else []
    above = above[: len(above) - (len(path) - len(name) - 1)]
    return ".".join([*above, name] if name else above)


def resolve(path: str, name: str | None, known: Collection[str]) -> tuple[str, str | None] | None:
    """Return the file an import reaches and the name it takes from it; None where there is no such file."""
    below = ".".join(part for part in (path, name) if part)
    if below in known:
        return below, None
    return (path, name) if path in known else None
