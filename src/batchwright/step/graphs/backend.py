"""What captures device work and replays it: CUDA graphs, or a stand-in for tests."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..memory.sources import CudaMemory

Replay = Callable[[], None]
Choice: TypeAlias = "bool | Literal['auto'] | GraphBackend"


@runtime_checkable
class GraphBackend(Protocol):
    """Captures functions without arguments, which read and write tensors that stay where they are.

    All captures share one pool of memory, so their replays follow each other, and what one has computed is read before
    the next runs.
    """

    def prepare(self) -> None:
        """Make room before captures: unused memory goes back to the device."""

    def capture(self, function: Callable[[], None], *, writes: Sequence[Tensor] = ()) -> Replay:
        """Return what replays a function; capturing changes no tensor.

        Args:
            function: launches work on the device and never waits for it.
            writes: the tensors outside of the pool that it writes to.
        """

    def can_capture_update(self, group: dict[str, Any]) -> bool:
        """Return whether the step of an optimizer with these options of a group can be captured."""

    def pool_bytes(self) -> int:
        """Return the memory that captures hold."""

    def used_bytes(self) -> int:
        """Return the memory in use on the device, besides the pool."""

    def free_bytes(self) -> int | None:
        """Return the memory that is left beside the pool, None if that is not known."""

    def measure(self, function: Callable[[], None]) -> int:
        """Run a function, and return the memory that it took at its peak beyond what was in use before."""

    @property
    def lost_peak_bytes(self) -> int:
        """Return the highest peak of memory before a measurement began anew."""

    def release(self) -> None:
        """Drop all captures and their memory; none of them is replayed again."""

    def seconds(self) -> float:
        """Return the time at which the work launched so far is done."""


# cuBLAS keeps a workspace for every stream for good, so streams are used again, by one owner at a time.
_FREE: dict[torch.device, list[torch.cuda.Stream]] = {}
_BROKEN: set[int] = set()


def _take_stream(device: torch.device) -> torch.cuda.Stream:
    free = _FREE.setdefault(device, [])
    return free.pop() if free else torch.cuda.Stream(device)


def _give_stream(stream: torch.cuda.Stream) -> None:
    if stream.stream_id not in _BROKEN:
        _FREE.setdefault(stream.device, []).append(stream)


@final
class CudaGraphs:
    """Capture with CUDA graphs on one device, in one pool and on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._lost_peak = 0

    def prepare(self) -> None:
        """Collect garbage and empty the cache, so that the pool can have the memory of earlier steps."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def capture(self, function: Callable[[], None], *, writes: Sequence[Tensor] = ()) -> Replay:
        """Capture a function; an error leaves no capture behind."""
        if self._stream is None:
            self._stream = _take_stream(self._device)
            weakref.finalize(self, _give_stream, self._stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        self._make_way()
        generator = torch.cuda.default_generators[self._device.index or 0]
        state = generator.clone_state()
        was_enabled = gc.isenabled()
        gc.disable()  # what a collection frees could call what no capture allows
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                # Other threads, which pin batches, may go on: only this one must not wait for the device.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    function()
                    graph.capture_end()
                except BaseException as error:
                    if not self._ended(graph):
                        # The generator believes that a capture goes on, and so does the pool.
                        generator.graphsafe_set_state(state)
                        if self._graphs:  # which draw from the generator as it was
                            raise RuntimeError(f"a capture could not be ended in order: {error}") from None
                    if not self._graphs:
                        self._pool = None  # it went with the graph that failed
                    raise
        finally:
            if was_enabled:
                gc.enable()
        self._graphs.append(graph)
        return graph.replay

    def _make_way(self) -> None:
        """Give unused blocks back if little else is left: while a capture runs, the allocator cannot do so."""
        reserved = torch.cuda.memory_reserved(self._device)
        unused = reserved - torch.cuda.memory_allocated(self._device)
        if CudaMemory(self._device).total_bytes - reserved < unused:
            torch.cuda.empty_cache()

    def _ended(self, graph: torch.cuda.CUDAGraph) -> bool:
        """End a capture that failed, and return whether that was in order."""
        is_ended = True
        if torch.cuda.is_current_stream_capturing():
            try:
                graph.capture_end()
            except RuntimeError:
                is_ended = False
        else:
            is_ended = False
        if not is_ended:
            with suppress(RuntimeError, AttributeError, TypeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
            self._pool = None
            if self._stream is not None:  # a stream whose capture went wrong may never be used again
                _BROKEN.add(self._stream.stream_id)
            self._stream = None
        return is_ended

    def can_capture_update(self, group: dict[str, Any]) -> bool:
        """Return whether the step keeps its counts on the device."""
        return bool(group.get("fused") or group.get("capturable"))

    def pool_bytes(self) -> int:
        """Return the bytes of the pool's segments."""
        if self._pool is None:
            return 0
        pool = tuple(self._pool)
        segments: Iterable[Any] = torch.cuda.memory_snapshot()
        return sum(
            int(segment["total_size"])
            for segment in segments
            if tuple(segment.get("segment_pool_id", ())) == pool and segment.get("device") == (self._device.index or 0)
        )

    def used_bytes(self) -> int:
        """Return the bytes of tensors; those in the pool are free outside of a replay."""
        return torch.cuda.memory_allocated(self._device)

    def free_bytes(self) -> int:
        """Return what the driver and the process's own cap leave."""
        return CudaMemory(self._device).total_bytes - self.pool_bytes() - self.used_bytes()

    def measure(self, function: Callable[[], None]) -> int:
        """Run a function, and return its peak; the allocator's own peak begins anew."""
        self._lost_peak = max(self._lost_peak, torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        before = self.used_bytes()
        function()
        return torch.cuda.max_memory_allocated(self._device) - before

    @property
    def lost_peak_bytes(self) -> int:
        """Return the highest peak of memory before a measurement began anew."""
        return self._lost_peak

    def release(self) -> None:
        """Drop the graphs; their memory goes back to the device."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs, self._pool = [], None
        self.prepare()

    def seconds(self) -> float:
        """Wait for the device and return the time."""
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


def make_backend(choice: Choice, device: torch.device) -> GraphBackend | None:
    """Return what captures on a device, None where ``"auto"`` finds nothing."""
    if choice is True or (isinstance(choice, str) and choice == "auto"):
        if device.type == "cuda":
            return CudaGraphs(device)
        if choice is True:
            raise ArgumentError(
                f"graphs=True needs a model on a CUDA device, but it lies on {device}; move the model there "
                "first, or pass graphs='auto', which runs eagerly elsewhere"
            )
        return None
    if isinstance(choice, GraphBackend) and not isinstance(choice, type):
        return choice
    raise ArgumentError(f"graphs must be False, 'auto' or True, got {choice!r}")
