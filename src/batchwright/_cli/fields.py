"""Which fields of a record hold the text, and what stands in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._types import MAX_INT32
from ..errors import ArgumentError


def choose_fields(record: Mapping[str, Any], field: str | None, *, pairs: bool, where: str) -> list[str]:
    """Return the names of the one or two fields to read, from the first record of a file.

    Args:
        record: the first record.
        field: what the user named: ``name``, or ``source,target`` with ``pairs``; None to choose.
        pairs: whether two fields are wanted.
        where: ``file:line`` for messages.

    >>> choose_fields({"text": "a", "label": "b"}, None, pairs=False, where="data.jsonl:1")
    ['text']
    >>> choose_fields({"en": "a", "de": "b"}, None, pairs=True, where="data.jsonl:1")
    ['en', 'de']
    """
    if field is not None:
        names = split_names(field, pairs=pairs)
        for name in names:
            check_has(record, name, where)
        return names
    if not pairs and "text" in record:
        return ["text"]
    strings = [name for name, value in record.items() if isinstance(value, str)]
    if len(strings) != (2 if pairs else 1):
        wanted = "two fields, e.g. --field source,target" if pairs else "the field with the text, --field NAME"
        raise ArgumentError(f"{where}: name {wanted}; fields here: {_listed(record)}")
    return strings


def split_names(field: str, *, pairs: bool) -> list[str]:
    """Split ``source,target`` for pairs; a single name stays as it is, commas included.

    >>> split_names("en,de", pairs=True), split_names("a,b", pairs=False)
    (['en', 'de'], ['a,b'])
    """
    names = [name.strip() for name in field.split(",")] if pairs else [field]
    if pairs and (len(names) != 2 or not all(names)):
        raise ArgumentError(f"--pairs needs two fields, --field source,target; got --field {field}")
    return names


def check_has(record: Mapping[str, Any], name: str, where: str) -> None:
    """Refuse a record without the field, listing those it has."""
    if name not in record:
        raise ArgumentError(f"{where}: no field {name!r}; fields here: {_listed(record)}")


def as_text(value: Any, name: str, where: str) -> str:
    """Return the value if it is text, or say what it is.

    >>> as_text("hello", "text", "data.jsonl:1")
    'hello'
    """
    if isinstance(value, str):
        return value
    raise ArgumentError(
        f"{where}: field {name!r} holds {_kind(value)}, not text; "
        "name a text field, or use --tokenizer lengths where it holds lengths or token ids"
    )


def as_length(value: Any, name: str, where: str) -> int:
    """Return a length that stands in the data: a whole number, or a list whose items are counted.

    >>> as_length("12", "n", "data.csv:2"), as_length([5, 7], "input_ids", "data.jsonl:1")
    (12, 2)
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return len(value)
    try:
        if isinstance(value, bool) or value is None or int(value) != float(value) or not 0 <= int(value) <= MAX_INT32:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"{where}: --tokenizer lengths needs a whole number or a list in field {name!r}, "
            f"got {_kind(value)}: {str(value)[:40]!r}"
        ) from None
    return int(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", type(None): "null", bool: "true or false", str: "text"}
    return names.get(type(value), "a number")


def _listed(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record)) or "none"
