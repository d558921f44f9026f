"""How commands and options are added, and how the values of options are read."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, final

from .._types import MAX_INT32
from ..errors import ArgumentError

# In quotes, because argparse's classes are generic only for type checkers.
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Options: TypeAlias = "argparse._ActionsContainer"
# An argument as Python spells it, with its value if there is one, and the texts in the value.
_ARGUMENT = re.compile(r"\b(columns|task|target|limit)=(\[[^\]]*\]|'[^']*'|\"[^\"]*\"|)")
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
# What argparse says of a value that is none of several.
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


@final
class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake in one line: what is wrong, and where the options are explained."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read the arguments; what a command does not know is its own mistake, not one of ``batchwright``."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is not None and words[:1] and self._is_unknown(words[0]):
            self._refuse(words[:1], words)  # argparse would ask for a command instead
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown, words)
        return found, unknown

    def _is_unknown(self, word: str) -> bool:
        return word.startswith("-") and not any(known.startswith(word) for known in self._option_string_actions)

    def _refuse(self, unknown: list[str], words: list[str]) -> NoReturn:
        options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        close = _did_you_mean(options[0], self._option_string_actions) if options else ""
        before = dict(zip(words[1:], words, strict=False)).get(unknown[0], "")
        if before in self._option_string_actions and not options:
            close = f"; {before} takes no value"
        self.error(f"unrecognized arguments: {' '.join(unknown)}{close}")

    def error(self, message: str) -> NoReturn:
        """Print the mistake and end with exit code 2."""
        choice = _CHOICE.search(message)
        known = re.findall(r"[\w-]+", choice[2]) if choice else []
        close = _did_you_mean(choice[1], known) if choice else ""
        if choice and not close and "plan" in known and Path(choice[1]).exists():
            close = f"; to look at a file: {self.prog} plan {shlex.quote(choice[1])}"
        self.exit(2, f"{self.prog}: error: {message}{close}; see {self.prog} --help\n")


def add_command(
    commands: Commands,
    name: str,
    description: str,
    examples: str = "",
    *,
    run: Callable[[argparse.Namespace], None] | None = None,
) -> Parser:
    """Add a command.

    Args:
        commands: the commands so far.
        name: what the user types.
        description: what its help says before the options; the first line is also its line in the list of commands.
        examples: what its help says after the options.
        run: the function that runs it; None for a command that only holds other commands.
    """
    summary = description.partition("\n")[0].removesuffix(".")
    command = commands.add_parser(
        name,
        help=summary[0].lower() + summary[1:],
        description=description,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def add_option(options: Options, usage: str, about: str, **settings: Any) -> None:
    """Add an option, written as its help shows it: ``--max-items N``, or ``--quiet`` for a switch.

    Args:
        options: a command or a group of its options.
        usage: the option and the name of its value.
        about: its help, to which the default is added if there is one.
        settings: the other arguments of ``add_argument``: type, default, …
    """
    name, _, metavar = usage.partition(" ")
    if not metavar:
        options.add_argument(name, action="store_true", help=about)
        return
    shown = " (default: %(default)s)" if "default" in settings else ""
    options.add_argument(name, metavar=metavar, help=about + shown, **settings)


# 1,5 may be meant as a fraction, or as two numbers.
_GROUPED = re.compile(r"\d{1,3}(,\d{3})+")
_MAX_PORT = 65_535


def positive(text: str) -> int:
    """Read a whole number of 1 or more."""
    return count(text, least=1)


def port(text: str) -> int:
    """Read the number of a port; 0 stands for any free one."""
    number = count(text)
    if number > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"needs a number from 0 to {_MAX_PORT}, got {text!r}")
    return number


def count(text: str, *, least: int = 0) -> int:
    """Read a whole number of at most 31 bits; underscores, or commas before every three digits, may group them.

    >>> count("16,384")
    16384
    """
    try:
        number = int(text.replace(",", "") if _GROUPED.fullmatch(text.strip()) else text)
    except ValueError:
        number = -1
    if number < least:
        raise argparse.ArgumentTypeError(f"needs a whole number of {least} or more, got {text!r}")
    if number > MAX_INT32:
        raise argparse.ArgumentTypeError(f"needs a whole number of at most {MAX_INT32:,}, got {text!r}")
    return number


def names(text: str) -> list[str]:
    """Read names separated by commas.

    >>> names("linear, loss")
    ['linear', 'loss']
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise argparse.ArgumentTypeError(f"needs names separated by commas, got {text!r}")
    return found


def load_object(name: str) -> Any:
    """Return the object that ``module:name`` stands for; dots in the name look inside an object.

    >>> load_object("os.path:basename")("a/b")
    'b'
    """
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        example = f"{name[:-3]}:embed" if name.endswith(".py") and name[:-3].isidentifier() else "my_model:embed"
        raise ArgumentError(f"{name!r} is not module:function; write for example {example}")
    found = _import(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"{module_name} has no {path!r}{_suggestion(part, found) or _functions_of(found)}")
        found = getattr(found, part)
    return found


def load_function(name: str) -> Any:
    """Return the function of one argument that ``module:function`` stands for, or say what stands there instead."""
    found = load_object(name)
    if not callable(found):
        raise ArgumentError(f"{name} is of type {type(found).__name__} and cannot be called; name a function")
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # some functions do not tell
        return found
    try:
        signature.bind(None)
    except TypeError as error:
        raise ArgumentError(f"{name} must take one argument, and is called as {signature}: {error}") from None
    return found


def _functions_of(holder: Any) -> str:
    """List what may be meant: the public functions and objects that are defined in a module or an object."""
    known = [name for name, value in getattr(holder, "__dict__", {}).items() if _is_own(name, value, holder)]
    return f"; it has {', '.join(known[:8])}" if known else ""


def _is_own(name: str, value: Any, holder: Any) -> bool:
    is_function = callable(value) and not inspect.isclass(value) and not name.startswith("_")
    return is_function and getattr(value, "__module__", None) == getattr(holder, "__name__", None)


def _import(name: str) -> Any:
    # Unlike `python -m`, a console script does not search for modules in the folder where it was started.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            stem = name.removesuffix(".py")
            hint = f"; name the module without .py: {stem}" if stem != name and Path(name).exists() else ""
            raise ArgumentError(
                f"there is no module {error.name!r} in this folder or among the installed packages{hint}"
            ) from None
        raise ArgumentError(f"importing {name} failed: {error}") from error
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported, or end the process
        raise ArgumentError(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _suggestion(name: str, holder: Any) -> str:
    return _did_you_mean(name, [known for known in getattr(holder, "__dict__", ()) if not known.startswith("_")])


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@contextmanager
def spelt_as_options() -> Iterator[None]:
    """Spell arguments in errors of Python functions as the options of the command line.

    >>> with spelt_as_options():
    ...     raise ArgumentError("choose columns=['a', 'b'] or task='regression'")
    Traceback (most recent call last):
    batchwright.errors.ArgumentError: choose --columns a,b or --task regression
    """
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(_ARGUMENT.sub(_as_option, str(error))) from error


def _as_option(found: re.Match[str]) -> str:
    values = ",".join(one or other for one, other in _QUOTED.findall(found[2]))
    # The shell would take a name with blanks for several.
    return f"--{found[1]}" + (f" {shlex.quote(values)}" if values else "")
