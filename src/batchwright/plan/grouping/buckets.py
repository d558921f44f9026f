"""Buckets: a few static shapes that cost the least padding, for any number of axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ..._checks import as_whole
from ..._types import IntArray
from ...errors import ArgumentError
from ._catalogue import find_shelves
from ._pairs import group_grid, make_grid
from .base import Grouping, Groups, Problem


@final
@dataclass(frozen=True)
class Buckets(Grouping):
    """At most ``count`` static shapes in all, rows included, chosen so that they cost the least padding.

    A shape is ``(num_items, padded length per axis)``. Inside a shape examples are drawn at random; what fills no batch
    moves up to the cheapest shape that holds it, and only what is left in the end makes short batches, whose shapes
    count too. The shapes are the same in every epoch. They cost the least padded tokens, or the least of ``cost`` where
    the plan has one (a ``TimeModel`` gives seconds). Few shapes are what ``torch.compile``, CUDA graphs and attention
    kernels with a plan per shape want.

    Where ``count`` leaves no room for a short batch, as ``Buckets(1)`` does, all batches are as large as the largest
    allowed number that divides the examples; ``drop_last=True`` leaves the short ones out instead. Examples that run
    alone because they are over the budget, and the pieces of a last step on several ranks, have further shapes.

    A pair ``(a, b)`` counts lengths per axis and not shapes: ``a`` lengths of the first axis, each divided into at most
    ``b`` of the second.
    """

    count: int | tuple[int, int] = 64

    def __post_init__(self) -> None:
        if isinstance(self.count, tuple) and len(self.count) != 2:
            raise ArgumentError(f"Buckets: count must be one number, or a pair with one per axis, got {self.count!r}")
        pair = self.count if isinstance(self.count, tuple) else (self.count, self.count)
        first, second = (as_whole("Buckets: count", count, least=1) for count in pair)
        object.__setattr__(self, "count", (first, second) if isinstance(self.count, tuple) else first)

    def group(self, problem: Problem) -> Groups:
        """Find the shapes and fill them."""
        if isinstance(self.count, tuple) and problem.num_axes == 2:
            return group_grid(problem, make_grid(problem, self.count))
        return find_shelves(problem, self._num_shapes).group()

    def check_axes(self, num_axes: int) -> None:
        """Refuse a pair of counts for more than two axes."""
        if isinstance(self.count, tuple) and num_axes > 2:
            raise ArgumentError(
                f"Buckets(count={self.count}) bounds two axes, got lengths with {num_axes}; give one number, which "
                "counts shapes on any number of axes"
            )

    @property
    def is_static(self) -> bool:
        """Return True: batches are padded to one of the static shapes."""
        return True

    @property
    def rules(self) -> range:
        """Return the rules of today: those before made other batches."""
        return range(3, 4)

    def static_shapes(self, problem: Problem) -> IntArray | None:
        """Return the lengths of the shapes, ``(K, axes)``."""
        if isinstance(self.count, tuple) and problem.num_axes == 2:
            return make_grid(problem, self.count).cells() * problem.pad_multiple_of
        return find_shelves(problem, self._num_shapes).catalogue.lengths

    @property
    def _num_shapes(self) -> int:
        return self.count[0] if isinstance(self.count, tuple) else self.count
