"""What stays from batch to batch, and from call to call: memory for caches, slots over it, and their graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from ..graphs._reach import Reach
from ..graphs._watch import Watch
from ..graphs.backend import Choice, GraphBackend
from ..memory.monitor import MemoryMonitor
from ._decoding import Collate
from ._ranges import Attend, Noted
from ._sizing import READING, Layout, Sizes

if TYPE_CHECKING:  # at run time they need transformers, which models of other kinds do without
    from ._rounds import Rounds
    from ._windows import Layers

Room: TypeAlias = Callable[[int], float | None]
# Tensors begin at multiples of this; widths are multiples of 8, so that there are no gaps.
_ALIGNED = 16
# Layouts that share the memory; beyond, all graphs go.
_MOST_SPACES = 16
# How far the memory that is left may differ from that of an earlier call for batches as large as there.
_LESS, _MORE = 0.97, 1.1
# How many times as many pieces prompts may be read in for memory that is there already.
_MORE_PIECES = 4


class WouldNotFitError(torch.OutOfMemoryError):
    """A batch is larger than the memory that is left; nothing was taken."""


@final
class Settings(NamedTuple):
    """Arguments of ``generate`` that are the same for all calls of a ``Generator``."""

    collate: Collate | None
    count_output: bool
    pad_token_id: int | None
    pad_multiple_of: int
    memory: MemoryMonitor | None
    progress: bool
    graphs: Choice


@final
class Block:
    """Memory in which the caches of several layouts lie over each other: only one of them is in use at a time.

    >>> block = Block(64, torch.device("cpu"))
    >>> cut = block.cutter()
    >>> cut((2, 3), torch.float32).tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.num_bytes = num_bytes

    def cutter(self) -> Callable[[tuple[int, ...], torch.dtype], Tensor | None]:
        """Return what gives tensors of zeros one after the other, from the beginning; None where no room is left."""
        start = 0

        def cut(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
            nonlocal start
            stop = start + torch.Size(shape).numel() * dtype.itemsize
            if stop > len(self._memory):
                return None
            found = self._memory[start:stop].view(dtype).view(shape).zero_()
            start = -(-stop // _ALIGNED) * _ALIGNED
            return found

        return cut


@final
class Space(NamedTuple):
    """Room for the batches of a layout.

    Attributes:
        layers: its cache.
        rounds: slots over it and their graphs, for each kind of prompt and of attention.
    """

    layers: Layers
    rounds: list[Rounds]

    @property
    def layout(self) -> Layout:
        """Return how much room there is."""
        return self.layers.layout


@final
class Wanted(NamedTuple):
    """What a batch asks for.

    Attributes:
        layout: the room.
        width: tokens of its longest prompt.
        sizes: what decoding takes, None if that is not known.
        uses_ranges: attention is over the keys that there are, whatever room is left beside them.
        is_alone: it is one example, which is tried whatever it takes.
    """

    layout: Layout
    width: int
    sizes: Sizes | None
    uses_ranges: bool
    is_alone: bool


@final
class Kept:
    """Spaces over one block of memory, whose graphs hold for one model as it was and for one kind of settings.

    Args:
        stays: another call may follow, so that changes of the model are looked for.
        releases: what captures was given, and does not go with its last graph.

    Attributes:
        attend: attends over ranges of keys.
        backend: captures into one pool for all spaces.
    """

    def __init__(self, *, stays: bool = False, releases: bool = False) -> None:
        self._stays, self._releases = stays, releases
        self.attend: Noted | None = None
        self._key: Hashable = None
        self._room: float | None = None
        self._is_of_before = self._has_given_way = False
        self._clear()

    def _clear(self) -> None:
        self.backend: GraphBackend | None = None
        self._spaces: list[Space] = []
        self._block: Block | None = None
        self._watch: Watch | None = None
        self._is_void = False  # a model changed within a call

    def count_call(self) -> None:
        """Note what an earlier call has left, which goes first where memory runs out."""
        self._is_of_before, self._has_given_way = bool(self._spaces), False

    @property
    def num_bytes(self) -> int:
        """Return the memory of the caches."""
        if self._block is not None:
            return self._block.num_bytes
        return sum(space.layers.num_bytes for space in self._spaces)

    def begin(self, key: Callable[[], Hashable], attend: Attend | None) -> None:
        """Begin a call, and drop what was kept of another kind.

        Args:
            key: returns all that captures depend on, besides where tensors of the model lie.
            attend: attends over ranges of keys, None to leave attention to the model; of one model always the same.
        """
        found = key() if self._stays else None
        if self._is_void or found != self._key or (self._watch is not None and self._watch.has_changed):
            self.drop()
            self.attend = None
        self._key = found
        if self.attend is None and attend is not None:
            self.attend = Noted(attend)

    def drop(self) -> None:
        """Let graphs and memory go."""
        if self.backend is not None and self._releases:
            self.backend.release()
        self._is_of_before = False
        self._clear()

    def run_out(self) -> None:
        """Let everything go, as memory ran out."""
        self._has_given_way |= self._is_of_before and bool(self._spaces)
        self._room = None
        self.drop()

    def give_way(self) -> bool:
        """Let everything go where memory ran out, and say whether some of it was of an earlier call."""
        self.run_out()
        has_given_way, self._has_given_way = self._has_given_way, False
        return has_given_way

    def steady(self, room: float | None) -> float | None:
        """Return the bytes for batches: those of an earlier call if hardly more or less is left, for equal batches."""
        before = self._room
        if room is None or before is None or not _LESS * before <= room <= _MORE * before:
            self._room = room
        return self._room

    def look(self, model: nn.Module, key: Callable[[], Hashable]) -> None:
        """Remember a model as captures saw it; its first call may have made something."""
        if self._stays and self._watch is None and any(one.has_graphs for one in self._all_rounds):
            self._watch, self._key = Watch(Reach(model), list(model.parameters())), key()

    def check(self) -> None:
        """Drop graphs of a model that has changed; what a batch has filled stays until the next call."""
        if self._watch is not None and self._watch.has_changed:
            self._watch, self._is_void = None, True
            for one in self._all_rounds:
                one.forget()

    @property
    def _all_rounds(self) -> list[Rounds]:
        return [one for space in self._spaces for one in space.rounds]

    def space_for(
        self,
        wanted: Wanted,
        room: Room,
        expected: int,
        device: torch.device,
        make_backend: Callable[[], GraphBackend],
    ) -> tuple[Space, float | None]:
        """Return room for a batch, and the bytes of which a share reads its prompts; drop everything for it if need be.

        Args:
            wanted: what the batch asks for.
            room: returns the bytes that are left; it is told what will be given back.
            expected: bytes of the largest cache that the batches of this call will ask for.
            device: of the model.
            make_backend: returns what captures.
        """
        space = self._found(wanted)
        if space is not None:
            left, whole = self._left_beside(space, wanted, room), room(self.num_bytes)
            if left is None or whole is None or left >= least_reading(wanted, whole):
                if not any(one is space for one in self._spaces):
                    self._spaces.append(space)
                space.layers.clear()
                return space, whole if left is None or whole is None else min(whole, left / READING)
        space = None  # which would keep the memory
        self.drop()
        free = None if wanted.is_alone else room(0)
        sizes, layout = wanted.sizes, wanted.layout
        needed = 0.0 if free is None or sizes is None else sizes.of_batch(layout, wanted.width, free)
        if free is not None and needed > free:
            raise WouldNotFitError(f"out of memory: a batch would take {needed:,.0f} bytes, {free:,.0f} are left")
        if sizes is not None:
            own = sizes.of_cache(layout)
            more = 0 if wanted.is_alone else max(0, expected - own)
            self._block = Block(own + (more if free is None else min(more, int(free - needed))), device)
        self.backend = make_backend()
        self._spaces.append(self._new_space(layout))
        return self._spaces[0], room(self.num_bytes)

    def _new_space(self, layout: Layout) -> Space:
        from ._windows import Layers

        return Space(Layers(layout, None if self._block is None else self._block.cutter()), [])

    def _found(self, wanted: Wanted) -> Space | None:
        """Return a space for a batch, or a new one over the memory that is there; None without room."""
        for one in self._spaces:  # the oldest, so that a batch finds the same one in every call
            if one.layout.holds(wanted.layout, uses_ranges=wanted.uses_ranges):
                return one
        if self._block is None or wanted.sizes is None or len(self._spaces) >= _MOST_SPACES:
            return None
        fits = wanted.sizes.of_cache(wanted.layout) <= self._block.num_bytes
        return self._new_space(wanted.layout) if fits else None

    def _left_beside(self, space: Space, wanted: Wanted, room: Room) -> float | None:
        """Return the bytes that are left to read prompts with, beside all spaces and what their graphs compute with."""
        free, sizes = room(0), wanted.sizes
        if free is None or sizes is None:
            return None
        is_new = not any(one is space for one in self._spaces)
        spaces = [*self._spaces, space] if is_new else self._spaces
        return free - sum(sizes.of_steps(one.layout) for one in spaces) - is_new * sizes.of_slots(space.layout)


def least_reading(wanted: Wanted, room: float) -> float:
    """Return the fewest bytes that a batch reads its prompts with, where its memory lies beside that of others."""
    assert wanted.sizes is not None
    one = float(wanted.sizes.of_reading(wanted.width))
    return min(one * wanted.layout.num_rows, max(one, READING * room / _MORE_PIECES))
