"""Graphs for the CPU that are as blind as those of CUDA: kernels are recorded once, and a replay runs no Python.

A module that was changed, a counter, a hook, a draw from NumPy: whatever a CUDA graph would freeze, this freezes too.
"""

from __future__ import annotations

import threading
import time
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# One recording at a time: patches that overlap would put back those of others.
_PATCHING = threading.RLock()
_READS = torch.ops.aten._local_scalar_dense.default
# These decide the shape of their result by the values of their input.
_SIZED_BY_VALUES = (
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
)
# Arguments of batch normalisation that it writes to, though its schema does not say so.
_WRITTEN_SILENTLY = ("running_mean", "running_var")


class Tape:
    """The kernels of a function, in order, with the tensors that they read and write.

    >>> x, tape = torch.ones(2), Tape()
    >>> y = tape.record(lambda: x * 3)
    >>> x.fill_(2); tape.replay(); y
    tensor([2., 2.])
    tensor([6., 6.])
    """

    def __init__(self):
        self._calls = []
        self._written = {}  # tensors from before the recording that it wrote to, and what they held

    def record(self, function):
        """Run a function once; every kernel of it is kept.

        Models ask whether a stream is being captured before they read values; they are told so here too. Other threads
        have streams of their own.
        """
        own = threading.get_ident()

        def is_capturing():
            return threading.get_ident() == own

        with _PATCHING, mock.patch("torch.cuda.is_current_stream_capturing", is_capturing):
            with _Recorder(self._calls, self._written):
                return function()

    def undo(self):
        """Give tensors from before the recording the values that they had: a capture on CUDA launches nothing."""
        for tensor, value in reversed(self._written.values()):  # views of a tensor before the tensor
            tensor.data.copy_(value)  # autograd does not count this as a change

    def spoil(self, value):
        """Give the results a value of no use: on CUDA what a capture has made holds none before the first replay."""
        for _, _, _, results in self._calls:
            for tensor, _ in results:
                if tensor.is_floating_point():
                    tensor.data.fill_(value)

    def replay(self):
        """Run the kernels again; results land in the tensors of the recording."""
        with torch._C._AutoDispatchBelowAutograd():
            for kernel, args, kwargs, results in self._calls:
                found = tree_leaves(kernel(*args, **kwargs))
                for place, value in results:
                    place.copy_(found[value])


class _Recorder(TorchDispatchMode):
    def __init__(self, calls, written):
        super().__init__()
        self._calls, self._written = calls, written
        self._made = set()  # memory that the recording itself has made
        self._on_host = {}  # tensors made from nothing, such as a draw that a forward pass makes for itself

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_host = all(id(tensor) in self._on_host for tensor in read)
        if kernel is _READS and not is_host:
            raise RuntimeError("a value of the device was read while kernels were recorded")
        if kernel in _SIZED_BY_VALUES or _is_boolean_index(kernel, args):
            raise RuntimeError("the shape of a result depends on values, which kernels that are recorded cannot do")
        self._keep(kernel, args, kwargs)
        result = kernel(*args, **kwargs)
        if kernel is _READS:
            return result
        leaves = tree_leaves(result)
        if is_host:
            self._on_host.update((id(leaf), leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        fresh = _fresh(kernel, leaves)
        self._made.update(_memory_of(leaf) for leaf, _ in fresh)
        self._calls.append((kernel, args, kwargs, fresh))
        return result

    def _keep(self, kernel, args, kwargs):
        """Copy what the kernel writes to, before it does so for the first time."""
        for place, argument in enumerate(kernel._schema.arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not is_written and argument.name not in _WRITTEN_SILENTLY:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in tree_leaves(value):
                is_new = not isinstance(tensor, torch.Tensor) or _memory_of(tensor) in self._made
                if not is_new and id(tensor) not in self._written:
                    self._written[id(tensor)] = (tensor, tensor.detach().clone())


def _fresh(kernel, leaves):
    """Return the results that are neither views of an input nor an input that was written."""
    returns = kernel._schema.returns
    if len(returns) == 1 and returns[0].alias_info is not None:
        return []
    is_alias = [one.alias_info is not None for one in returns] if len(returns) == len(leaves) else [False] * len(leaves)
    return [
        (leaf, place)
        for place, (leaf, alias) in enumerate(zip(leaves, is_alias, strict=True))
        if isinstance(leaf, torch.Tensor) and not alias
    ]


def _memory_of(tensor):
    return tensor.untyped_storage()._cdata


def _is_boolean_index(kernel, args):
    if kernel is not torch.ops.aten.index.Tensor:
        return False
    return any(isinstance(one, torch.Tensor) and one.dtype is torch.bool for one in args[1])


class TapeGraphs:
    """A graph backend of tapes.

    Attributes:
        num_captures: how often something was captured, failures included.
        num_replays: how often a tape ran.
        spoiled: what results hold before the first replay; None leaves them their values.
    """

    lost_peak_bytes = 0
    spoiled = None

    def __init__(self):
        self.num_captures = self.num_replays = 0

    def prepare(self):
        pass

    def capture(self, function, *, writes=()):
        self.num_captures += 1
        tape = Tape()
        try:
            tape.record(function)
        finally:
            tape.undo()
        if self.spoiled is not None:
            tape.spoil(self.spoiled)

        def replay():
            self.num_replays += 1
            tape.replay()

        return replay

    def can_capture_update(self, group):
        return bool(group.get("fused"))

    def pool_bytes(self):
        return 1000 * self.num_captures

    def used_bytes(self):
        return 0

    def free_bytes(self):
        return None

    def measure(self, function):
        function()
        return 1000

    def release(self):
        pass

    def seconds(self):
        return time.perf_counter()
