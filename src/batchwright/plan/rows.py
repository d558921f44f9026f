"""A data set of packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, final

from ..errors import LengthsError

Example = TypeVar("Example")
_Example = TypeVar("_Example", covariant=True)


class _Indexable(Protocol[_Example]):
    def __getitem__(self, index: int, /) -> _Example: ...

    def __len__(self) -> int: ...


@final
class Rows(Generic[Example]):
    """Wrap a data set so that ``collate_fn`` receives a list of rows, each a list of examples.

    ``Packed`` plans lists of rows; a row is a list of indices. This is the data set to give to the ``DataLoader``.

    >>> Rows("abcd")[[0, 3]]
    ['a', 'd']
    """

    def __init__(self, dataset: _Indexable[Example]) -> None:
        self.dataset = dataset

    def __getitem__(self, row: Sequence[int]) -> list[Example]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[Sequence[int]]) -> list[list[Example]]:
        """Return several rows, in one call of the data set where it offers ``__getitems__``."""
        fetch: Any = getattr(self.dataset, "__getitems__", None)
        if fetch is None:
            return [[self.dataset[index] for index in row] for row in rows]
        indices = [index for row in rows for index in row]
        found = list(fetch(indices))
        if len(found) != len(indices):
            raise LengthsError(f"__getitems__ of the data set was asked for {len(indices)} examples, gave {len(found)}")
        examples = iter(found)
        return [list(islice(examples, len(row))) for row in rows]

    def __len__(self) -> int:
        return len(self.dataset)
