"""Ranks: exact sums over a process group however each rank splits its share, and one outcome for all of them."""

from __future__ import annotations

import builtins
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import errors
from ._modules import groups_of_shards, sharded_parts, unwrap
from .errors import ArgumentError, MissingDependencyError, RankError

_BUCKET_BYTES = 32 * 2**20
_HALF = (torch.float16, torch.bfloat16)
_PLAIN = (Tensor, nn.Parameter)


@final
class Ranks:
    """The process group of a model: that of DDP, that of ``fully_shard`` (FSDP2), or none.

    Under DDP, micro-batches run on the unwrapped module without synchronisation, and one reduction follows. Forward and
    backward hold no collective, so a rank that runs out of memory tries again while the others wait for it. Under FSDP2
    and with SyncBatchNorm ranks meet inside the forward pass (``meet_in_forward``), so all must run the same number of
    micro-batches, and none can try again on its own.

    Attributes:
        module: what ``loss_fn`` receives: the model without DDP, compiled if it was.
        world_size: how many ranks share an update.
        is_sharded: FSDP2 reduces gradients, during the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._ddp, self.module = unwrap(model)
        sharded = sharded_parts(model)
        self.is_sharded = bool(sharded)
        for part in sharded:
            if not hasattr(part, "set_gradient_divide_factor"):
                raise MissingDependencyError(
                    f"models of fully_shard (FSDP2) need torch 2.11 or newer, got {torch.__version__}, which divides "
                    "gradients itself; run: pip install -U 'torch>=2.11', or use DDP"
                )
            part.set_gradient_divide_factor(1.0)  # sums; Stepper divides them itself
            if hasattr(part, "set_force_sum_reduction_for_comms"):
                part.set_force_sum_reduction_for_comms(True)  # not every back end multiplies while it sums
        self._sharded = sharded
        # What a wrapper has made equal on all ranks; later additions are not.
        known = getattr(self._ddp, "_module_parameters", None)
        self._equal = {id(parameter) for parameter in (model.parameters() if known is None else known)}
        self._groups = groups_of_shards(sharded) if self._ddp is None else [self._ddp.process_group]
        self.world_size = 1
        for group in self._groups:
            self.world_size *= dist.get_world_size(group)
        self._sync_norms = [part for part in self.module.modules() if isinstance(part, nn.SyncBatchNorm)]
        self._has_shards = self.is_sharded or any(map(is_sharded, self.module.parameters()))
        self._shapes: tuple[Any, ...] = ()
        self._mark = 0

    @property
    def has_ddp(self) -> bool:
        """Return whether DDP wraps the model."""
        return self._ddp is not None

    @property
    def shares_buffers(self) -> bool:
        """Return whether every rank gets the buffers of the first rank after an update."""
        return self.world_size > 1 and (self._ddp is None or self._ddp.broadcast_buffers)

    @property
    def meet_in_forward(self) -> bool:
        """Return whether a forward pass waits for the other ranks."""
        return self.world_size > 1 and (self.is_sharded or self.has_sync_batch_norm)

    @property
    def has_sync_batch_norm(self) -> bool:
        """Return whether batch statistics are taken over all ranks."""
        return any(part.training for part in self._sync_norms)

    @property
    def can_retry(self) -> bool:
        """Return whether a rank can run a batch again while the others wait; with shards they wait in their forward."""
        return not self._has_shards and not self.meet_in_forward

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context in which DDP does not reduce gradients."""
        return nullcontext() if self._ddp is None else self._ddp.no_sync()

    def check_reached(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse parameters that no reduction over these ranks could reach."""
        if self._ddp is None or not self._ddp.parameters_to_ignore:
            return
        known = set(map(id, parameters))
        for name, value in self._ddp.module.named_parameters():
            if id(value) in known and name in self._ddp.parameters_to_ignore:
                raise ArgumentError(
                    f"DDP was told to ignore {name!r}, but the optimizer trains it: every rank would go its own way; "
                    "leave it out of the optimizer, or do not ignore it"
                )

    def check_shards(self) -> None:
        """Refuse shards whose gradients are not reduced in the backward pass."""
        for part in self._sharded:
            groups = getattr(part._get_fsdp_state(), "_fsdp_param_groups", ())
            if not all(getattr(group, "reduce_grads", True) for group in groups):
                raise ArgumentError(
                    "set_requires_gradient_sync(False) keeps FSDP2 from reducing gradients; Stepper needs it at True"
                )

    def is_equal(self, parameter: nn.Parameter) -> bool:
        """Return whether a wrapper has made a parameter equal on all ranks."""
        return is_sharded(parameter) if self.is_sharded else id(parameter) in self._equal

    # Numbers

    def sum(self, values: Sequence[Tensor | float], device: torch.device) -> list[float]:
        """Return the sums over all ranks, in one collective and one copy from the device."""
        if self.world_size == 1:
            return [float(value) for value in values]
        dtype = _widest(device)
        packed = torch.stack([torch.as_tensor(value, dtype=dtype, device=device) for value in values])
        self._reduce(packed)
        return packed.tolist()

    def largest(self, values: Sequence[float], device: torch.device) -> list[float]:
        """Return the largest of each value over all ranks."""
        if self.world_size == 1:
            return list(values)
        packed = torch.tensor(values, dtype=_widest(device), device=device)
        self._reduce(packed, dist.ReduceOp.MAX)
        return packed.tolist()

    def agree(self, error: Exception | None, device: torch.device, *, marks: Sequence[int] = ()) -> list[bool]:
        """Raise on all ranks if one of them failed; every rank calls this at the same place.

        The rank that failed raises its own error, the others one of the same class that names that rank. So no rank is
        left waiting for another one.

        Args:
            error: what happened on this rank, None if nothing did.
            device: that collectives run on.
            marks: numbers to compare over the ranks, of at most 32 bits.

        Returns:
            For every mark whether it is the same on all ranks.
        """
        if self.world_size == 1:
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame
            return [True] * len(marks)
        both = [sign * mark for mark in marks for sign in (1, -1)]
        packed = torch.tensor([int(error is not None), *both], dtype=torch.int64, device=device)
        self._reduce(packed, dist.ReduceOp.MAX)
        failed, *found = packed.tolist()
        if failed:
            raise common_error(error, self.gather(failure_of(error)))
        return [high == -low for high, low in zip(found[::2], found[1::2], strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; for rare cases, as it is slow."""
        gathered = [value]
        for group in reversed(self._groups):
            lists: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(lists, gathered, group=group)
            gathered = [item for items in lists for item in items]
        return gathered

    def broadcast(self, make: Callable[[], Any], *, rank: int) -> Any:
        """Return on all ranks what one of them makes; for rare cases, as it is slow."""
        (group,) = self._groups
        values: list[Any] = [None]
        if dist.get_rank(group) == rank:
            try:
                values = [pickle.dumps(make())]
            except Exception as error:  # all ranks must hear of it
                values = [failure_of(error)]
        dist.broadcast_object_list(values, src=dist.get_global_rank(group, rank), group=group)
        if isinstance(values[0], Failure):
            raise common_error(None, [values[0]])
        return pickle.loads(values[0])

    def gather_rows(self, rows: Tensor) -> tuple[list[Tensor], int]:
        """Return the rows of all ranks, of which each may have another number, and which rank this one is."""
        (group,) = self._groups
        return _gather_rows(rows, group), dist.get_rank(group)

    def _reduce(self, packed: Tensor, op: Any = None) -> None:
        for group in self._groups:  # a mesh of two axes: sums of sums
            dist.all_reduce(packed, op=dist.ReduceOp.SUM if op is None else op, group=group)

    # Gradients

    def sum_gradients(self, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Add up ``.grad`` over all ranks; a parameter unused on every rank keeps None."""
        summed = self.add_up([parameter.grad for parameter in parameters], parameters, factor)
        for parameter, gradient in zip(parameters, summed, strict=True):
            if gradient is not None:
                parameter.grad = gradient.to(parameter.dtype)

    def add_up(
        self, gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], factor: float = 1.0
    ) -> list[Tensor | None]:
        """Return ``factor × gradient`` summed over all ranks, None for one that is None on every rank.

        Gradients in half precision are summed in float32. What FSDP2 has summed already is only multiplied.

        Args:
            gradients: may be changed in place.
            parameters: that they belong to, in the same order on all ranks.
            factor: of this rank.
        """
        if factor != 1:
            _multiply([gradient for gradient in gradients if gradient is not None], factor)
        if self.world_size == 1:
            return list(gradients)
        summed = list(gradients)
        places = [place for place, parameter in enumerate(parameters) if not is_sharded(parameter)]
        if not places:
            return summed
        # Which kinds of gradient the ranks have: dense, and how many sparse dimensions.
        kinds = [(0, 0) if one is None else (0, one.sparse_dim()) if one.is_sparse else (1, 0) for one in gradients]
        packed = torch.tensor([kinds[place] for place in places], dtype=torch.int32)
        packed = packed.to(parameters[places[0]].device)
        self._reduce(packed, dist.ReduceOp.MAX)
        dense: list[tuple[int, Tensor]] = []
        for place, (has_dense, num_sparse) in zip(places, packed.tolist(), strict=True):
            gradient, parameter = summed[place], parameters[place]
            if has_dense:
                dense.append((place, _as_dense(gradient, parameter)))
            elif num_sparse:
                summed[place] = self._add_sparse(gradient, parameter, num_sparse)
        for bucket in _buckets(dense):
            flat = torch.cat([gradient.reshape(-1) for _, gradient in bucket])
            self._reduce(flat)
            for (place, gradient), part in zip(
                bucket, flat.split([gradient.numel() for _, gradient in bucket]), strict=True
            ):
                summed[place] = gradient.copy_(part.view_as(gradient))
        return summed

    def _add_sparse(self, gradient: Tensor | None, parameter: nn.Parameter, num_sparse: int) -> Tensor:
        """Sum sparse gradients: gather the rows of all ranks, in the same order on every rank."""
        dtype = half_to_float(parameter.dtype)
        if gradient is None:
            index = torch.zeros((num_sparse, 0), dtype=torch.int64, device=parameter.device)
            values = torch.zeros((0, *parameter.shape[num_sparse:]), dtype=dtype, device=parameter.device)
        else:
            gradient = gradient.to(dtype).coalesce()
            index, values = gradient.indices(), gradient.values()
        for group in self._groups:
            index = torch.cat(_gather_rows(index.T.contiguous(), group)).T
            values = torch.cat(_gather_rows(values.contiguous(), group))
        # Indices of gradients are valid; saying so keeps torch from warning that it does not look.
        return torch.sparse_coo_tensor(index, values, parameter.shape, check_invariants=False).coalesce()

    # Buffers

    def mark_of_buffers(self) -> int:
        """Return a number that is the same on two ranks only if their shared buffers have the same shapes."""
        if not self.shares_buffers:
            return 0
        shapes = tuple((tuple(buffer.shape), buffer.dtype) for buffer in self._shared_buffers())
        if shapes != self._shapes:
            self._shapes, self._mark = shapes, mark_of(shapes)
        return self._mark

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the tensors of the first rank."""
        for tensor in tensors if self.world_size > 1 else ():
            for group in self._groups:
                dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)

    def share_buffers(self) -> None:
        """Give every rank the buffers of the first rank, as DDP does before a forward."""
        if not self.shares_buffers:
            return
        for buffer in self._shared_buffers():
            whole = buffer.detach().contiguous()
            self.share([whole])
            if whole.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(whole)

    def _shared_buffers(self) -> Iterator[Tensor]:
        ignored = set() if self._ddp is None else self._ddp.parameters_to_ignore
        for name, buffer in self.module.named_buffers():
            # Elements of an expanded buffer share their memory; nothing writes to them.
            if name not in ignored and not is_sharded(buffer) and not is_expanded(buffer):
                yield buffer


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``, whose gradients are reduced by what made it."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "device_mesh")


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements of a tensor lie at the same place in memory."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def mark_of(value: Any) -> int:
    """Return 32 bits that tell values apart by their ``repr``, the same in every process."""
    return zlib.crc32(repr(value).encode())


def half_to_float(dtype: torch.dtype) -> torch.dtype:
    """Return the type to sum in: float32 for half precision, else the type itself."""
    return torch.float32 if dtype in _HALF else dtype


class Failure(NamedTuple):
    """What other ranks need to know of an error."""

    module: str
    name: str
    text: str


def failure_of(error: Exception | None) -> Failure | None:
    """Return what other ranks need to know of an error, None if there is none."""
    if error is None:
        return None
    try:
        text = str(error)
    except Exception:  # an error of the user may fail at that too
        text = "an error without a text"
    return Failure(type(error).__module__, type(error).__name__, text)


def common_error(error: Exception | None, failures: Sequence[Failure | None]) -> Exception:
    """Return the error to raise on this rank, from those of all ranks."""
    if error is not None:
        return error
    rank, failure = next((rank, found) for rank, found in enumerate(failures) if found is not None)
    text = f"rank {rank}: {failure.text}"
    known = {"builtins": builtins, errors.__name__: errors, "torch": torch}.get(failure.module)
    kind = getattr(known, failure.name, None)
    try:
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(text)
    except TypeError:
        pass  # a class that is not made from a text
    return RankError(f"rank {rank} failed: {failure.name}: {failure.text}")


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64


def _multiply(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients in place, in one call for plain ones and one for shards."""
    for kind in (False, True):
        alike = [gradient for gradient in gradients if is_sharded(gradient) is kind]
        if alike:
            torch._foreach_mul_(alike, factor)


def _as_dense(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    dtype = half_to_float(parameter.dtype)
    if gradient is None:
        return torch.zeros_like(parameter, dtype=dtype)
    return (gradient.to_dense() if gradient.is_sparse else gradient).to(dtype)


def _gather_rows(rows: Tensor, group: Any) -> list[Tensor]:
    """Return the rows of all ranks, of which each has another number."""
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device), group=group)
    sizes = [int(count) for count in counts]
    padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [part[:size] for part, size in zip(gathered, sizes, strict=True)]


def _buckets(gradients: Sequence[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Gather gradients of one type and device into buckets, so that one call reduces each bucket."""
    bucket: list[tuple[int, Tensor]] = []
    size = 0
    for place, gradient in gradients:
        kind = (gradient.dtype, gradient.device)
        if bucket and (size > _BUCKET_BYTES or kind != (bucket[0][1].dtype, bucket[0][1].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append((place, gradient))
        size += gradient.numel() * gradient.element_size()
    if bucket:
        yield bucket
