"""The passes of a WholeBatchLoss: encode every micro-batch, compute the loss once, encode again for the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..._ranks import Ranks, mark_of
from ...errors import ArgumentError, DoesNotFitError
from .._settings import Settings
from ..filler import weights_of, without_filler
from ..noise import Norms
from ..oom import Snapshot, does_not_fit, is_out_of_memory
from ..report import MicroSums, Pending, Totals
from ..splitting import LogicalBatch, Part
from ._encodings import Kind, Piece, Rows, are_far, check_alike, fill, flatten, gather, join, pack, rows_of, skeleton_of
from ._guards import Nodes, have_changed, next_node, reaches, sample
from .loss import WholeBatchLoss, num_processes

_FINE, _AGAIN, _FAILED = 0, 1, 2  # how an attempt went on a rank
_OTHER_ROWS = (
    "encode returned other kinds of encodings on other ranks: their shapes but for the rows, their types, and whether "
    "they depend on parameters must be the same everywhere"
)
_OTHER_LOSS = (
    "the loss over all ranks differs between ranks, so it depends on more than the encodings; let encode return what "
    "belongs to the examples, such as labels, and let the loss use the same numbers on every rank"
)

_MOVES = (
    "encode changes parameters that the optimizer does not train, such as those of a momentum encoder, and it runs "
    "twice per micro-batch; change them once per update, before step(batch)"
)
_KEPT = (
    "the loss uses what encode has computed and kept elsewhere, such as in an attribute of the model, which is that of "
    "one micro-batch; let encode return it, with one row per example"
)


class Turn(NamedTuple):
    """A micro-batch, or a whole batch, and what it belongs to."""

    part: Part
    logical: LogicalBatch
    pending: Pending
    totals: Totals
    norms: Norms | None


class AgainError(Exception):
    """Another rank has to run its batch again, and so have all whose loss they share."""


class _Encoded(NamedTuple):
    """A batch after the first pass."""

    pieces: list[Piece]
    kinds: list[Kind]
    have_graph: list[bool]  # which tensors depend on parameters, in any piece
    skeleton: Any
    before: Snapshot | None  # the state that the first pass began with, None where there is no second pass
    nodes: Nodes  # that the first pass has made


class _Joined(NamedTuple):
    """The encodings of this rank in the order of the batch, where the rows of every piece stand, and what is sent."""

    tensors: list[Tensor]
    rows: list[Rows]
    packed: Tensor | None


@final
class Passes:
    """Runs a batch with a ``WholeBatchLoss``.

    The first pass builds a graph and drops it at once, so that both passes run the same kernels, draw the same random
    numbers and compile the same code. The peak is that of the second pass, which needs the graph.

    Where ranks share a loss, they meet twice per attempt: before they exchange encodings, and when the gradients are
    there. If one runs out of memory, all begin again; if one fails otherwise, all raise.

    Args:
        settings: of the Stepper; its loss is a ``WholeBatchLoss``.
        ranks: share the loss if it is one over ranks.
        device: that collectives run on.
        snapshot: returns the random state and the buffers now.
        random: returns the random state only.

    Attributes:
        is_together: several ranks share the loss.
        part: the places of the micro-batch that runs.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        device: torch.device,
        snapshot: Callable[[], Snapshot],
        random: Callable[[], Snapshot],
    ) -> None:
        loss = settings.loss_fn
        assert isinstance(loss, WholeBatchLoss)
        if ranks.is_sharded:
            raise ArgumentError(
                "WholeBatchLoss does not run under fully_shard (FSDP2), whose ranks meet in every forward pass; use DDP"
            )
        if loss.over_ranks and ranks.world_size == 1 and num_processes() > 1:
            raise ArgumentError(
                f"WholeBatchLoss(over_ranks=True) takes the ranks from the model, which is not in "
                f"DistributedDataParallel, while there are {num_processes()} processes; wrap it"
            )
        self._loss, self._settings, self._ranks, self._device = loss, settings, ranks, device
        self._snapshot, self._random = snapshot, random
        self._is_awaited = self._is_other = False
        self._figures = (0.0, 0.0)
        self.is_together = loss.over_ranks and ranks.world_size > 1
        self.part: Part = ()

    def check(self, num_parts: int) -> None:
        """Refuse micro-batches in which ranks would meet; the number is the largest of all ranks then."""
        if self._ranks.meet_in_forward and (num_parts > 1 or self.is_together):
            raise ArgumentError(
                "SyncBatchNorm meets other ranks inside the forward pass, which a WholeBatchLoss in micro-batches or "
                "over ranks runs twice; use GroupNorm or LayerNorm, or BatchNorm in eval mode"
            )

    def run(
        self,
        turn: Turn,
        parts: Sequence[Part],
        finish: Callable[[MicroSums], None],
        is_spoiled: Callable[[], bool],
    ) -> None:
        """Add the gradient of a batch, and its sums.

        Args:
            turn: the whole batch.
            parts: its micro-batches.
            finish: runs the backward pass of the loss.
            is_spoiled: says whether the batch must run again although it fitted.
        """
        logical, self.part = turn.logical, ()
        with self._meeting(logical, _OTHER_ROWS):
            samples = [] if len(parts) == 1 else sample(turn.pending.gradients.others)
            encoded = self._encode_all(logical, parts)
            if have_changed(samples):
                raise ArgumentError(_MOVES)
            # Before ranks meet, as one that ran out of memory here would leave the others waiting for its encodings.
            own = self._join(encoded) if encoded.pieces else None
            self._figures = (float(mark_of((encoded.kinds, encoded.have_graph))), 0.0)
        if own is None:
            return
        with self._meeting(logical, _OTHER_LOSS, tolerance=0.02):
            leaves, rows = self._gather(encoded, own)
            del own
            self._lose(encoded, leaves, turn, finish)
            self._run_back(logical, encoded, [leaf.grad for leaf in leaves], rows)
            if self.is_together and is_spoiled():
                raise AgainError

    # The first pass

    def _encode_all(self, logical: LogicalBatch, parts: Sequence[Part]) -> _Encoded:
        is_whole = len(parts) == 1
        # In the order of the batch, which a list of examples was sorted out of.
        parts = [part if isinstance(part, range) else sorted(part) for part in parts]
        before, first_node = None if is_whole else self._snapshot(), next_node()
        taken = iter(logical.take_all(parts))
        pieces: list[Piece] = []
        skeleton = None
        for self.part in parts:
            random = None if is_whole else self._random()
            found = self._encode(next(taken), self.part, random)
            if found is None:
                continue
            piece, encodings = found
            skeleton = skeleton_of(encodings) if skeleton is None else skeleton
            # A copy, as a row may be a part of a far larger tensor, and memory that a compiled model writes to again.
            tensors = piece.tensors if is_whole else [tensor.detach().clone() for tensor in piece.tensors]
            pieces.append(piece._replace(tensors=tensors))
            del found, piece, encodings
        if not pieces and self.is_together:
            raise ArgumentError("all rows of this rank are filler, and a loss over ranks needs an example of each")
        check_alike(pieces)
        have_graph = [any(column) for column in zip(*[piece.have_graph for piece in pieces], strict=True)]
        nodes = Nodes(first_node, next_node())
        return _Encoded(pieces, pieces[0].kinds if pieces else [], have_graph, skeleton, before, nodes)

    def _encode(self, micro_batch: Any, part: Part, random: Snapshot | None) -> tuple[Piece, Any] | None:
        """Return the encodings of a micro-batch, None if it is nothing but filler."""
        kept, real = _without_filler(micro_batch, part)
        if kept is None:
            return None
        del micro_batch
        with self._settings.precision(self._device):
            encodings = self._loss.encode(self._ranks.module, kept)
        kinds, tensors = flatten(encodings, len(real))
        have_graph = [tensor.requires_grad for tensor in tensors]
        return Piece(part, real, kinds, tensors, have_graph, random), encodings

    # The loss

    def _join(self, encoded: _Encoded) -> _Joined:
        """Return the encodings of this rank in the order of the batch."""
        pieces = encoded.pieces
        if encoded.before is None:
            tensors: list[Tensor] = [tensor.detach() for tensor in pieces[0].tensors]
            rows: list[Rows] = [slice(0, len(tensors[0]))]
        else:
            tensors, rows = join(pieces)
        return _Joined(tensors, rows, pack(tensors) if self.is_together else None)

    def _gather(self, encoded: _Encoded, own: _Joined) -> tuple[list[Tensor], list[Rows]]:
        """Return the encodings of all examples as leaves, and where the rows of every piece of this rank stand."""
        tensors, rows = own.tensors, own.rows
        if own.packed is not None:
            tensors, start, rank = gather(tensors, own.packed, self._ranks)
            rows = [_moved(one, start) for one in rows]
            self._is_other = rank > 0
        pairs = zip(tensors, encoded.have_graph, strict=True)
        return [tensor.requires_grad_(is_needed) for tensor, is_needed in pairs], rows

    def _lose(self, encoded: _Encoded, leaves: list[Tensor], turn: Turn, finish: Callable[[MicroSums], None]) -> None:
        """Compute the loss, its gradient in the leaves, and its sums, which count on one of the ranks that share it."""
        random = self._random() if self.is_together else None
        try:
            with self._settings.precision(self._device):
                # Copies, which the loss may change in place.
                own = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
                sums = MicroSums(self._loss.loss(fill(encoded.skeleton, own)))
                del own
            if any(leaf.grad is not None for leaf in leaves):
                raise ArgumentError("the loss ran a backward pass of its own; return the loss, and Stepper does")
            if reaches(sums.loss, encoded.nodes):
                raise ArgumentError(_KEPT)
            if random is not None:
                self._check_draws(random)
                self._figures = (float(sums.loss.detach()), float(sums.weight))
            if not (self.is_together and sums.is_doubtful):
                finish(sums)
        except Exception as error:
            if encoded.before is None or self._settings.on_oom == "raise" or not is_out_of_memory(error):
                raise
            raise DoesNotFitError(
                f"the loss of {len(leaves[0])} examples does not fit, although no micro-batch is in memory beside "
                f"their encodings, so smaller ones do not help; use a smaller logical batch"
            ) from None
        if self._is_other:  # what the loss gave its own parameters counts on one rank, and so do its sums
            turn.pending.gradients.drop()
            sums = _nothing_of(sums)
        num = sum(len(piece.real) for piece in encoded.pieces)
        turn.totals.add(sums, num, num)
        for _ in encoded.pieces[1:]:
            turn.totals.add(_nothing_of(None), 0, 0)

    def _check_draws(self, before: Snapshot) -> None:
        if not self._random().is_random_as(before):
            raise ArgumentError(
                "a loss over ranks is computed on every rank, so it must not draw random numbers, which differ there; "
                "draw them in encode, with one row per example"
            )

    # The second pass

    def _run_back(
        self, logical: LogicalBatch, encoded: _Encoded, gradients: list[Tensor | None], rows: list[Rows]
    ) -> None:
        """Run the gradients of the encodings back through every micro-batch."""
        if encoded.before is None:
            _backward(encoded.pieces[0].tensors, gradients, rows[0])
            return
        if all(gradient is None for gradient in gradients):
            return
        after = self._snapshot()
        encoded.before.restore()  # buffers then change as in the first pass
        far = []
        for piece, own in zip(encoded.pieces, rows, strict=True):
            self.part = piece.part
            assert piece.random is not None
            piece.random.restore()
            found = self._encode(logical.take(piece.part), piece.part, None)
            if found is None or found[0].kinds != piece.kinds:
                raise ArgumentError(_AGAIN_DIFFERS)
            far += [
                are_far(*pair) for pair in zip(found[0].tensors, piece.tensors, strict=True) if pair[0].requires_grad
            ]
            _backward(found[0].tensors, gradients, own)
            del found
        after.restore()
        if far and bool(torch.stack([one.to(far[0].device) for one in far]).any()):
            raise ArgumentError(_AGAIN_DIFFERS)

    # Several ranks

    @contextmanager
    def in_company(self) -> Iterator[None]:
        """Run a batch inside this context; if it fails between two attempts, the ranks that wait hear of it."""
        self._is_awaited = self.is_together
        try:
            yield
        except Exception as error:
            if self._is_awaited:
                self._meet(error, _FAILED)
            raise

    @contextmanager
    def _meeting(self, logical: LogicalBatch, differs: str, *, tolerance: float = 0.0) -> Iterator[None]:
        """End a block on all ranks alike: fine, with another attempt, or with an error."""
        if not self.is_together:
            yield
            return
        error: Exception | None = None
        self._figures = (0.0, 0.0)
        try:
            yield
        except Exception as caught:
            error = caught
        try:
            kind = self._kind_of(error)
            if kind == _AGAIN and len(self.part) == 1 and not isinstance(error, AgainError):
                error, kind = DoesNotFitError(does_not_fit(logical, self.part[0], self._device)), _FAILED
            self._meet(error, kind, differs, tolerance)
        finally:
            del error  # its traceback holds this frame

    def _kind_of(self, error: Exception | None) -> int:
        if error is None:
            return _FINE
        is_retried = self._settings.on_oom == "split" and is_out_of_memory(error)
        return _AGAIN if is_retried or isinstance(error, AgainError) else _FAILED

    def _meet(self, error: Exception | None, kind: int, differs: str = "", tolerance: float = 0.0) -> None:
        figures = [one if kind == _FINE and math.isfinite(one) else 0.0 for one in self._figures]
        worst, *found = self._ranks.largest([kind, *figures, *(-one for one in figures)], self._device)
        self._is_awaited = worst == _AGAIN
        if worst == _FAILED:
            self._ranks.agree(error if kind == _FAILED else None, self._device)
        if worst == _AGAIN:
            raise AgainError if error is None else error
        for high, low in zip(found[:2], found[2:], strict=True):
            if high + low > tolerance * max(abs(high), abs(low)):
                raise ArgumentError(differs)


_AGAIN_DIFFERS = (
    "encode returned other encodings when it ran again for the gradients, so they would be wrong: it draws from a "
    "generator of its own, keeps state where it is not put back, or changes its micro-batch in place; draw from the "
    "global generators of torch, NumPy or Python, keep state in buffers of the model, and work on a copy"
)


def _without_filler(micro_batch: Any, part: Part) -> tuple[Any, Part]:
    """Return a micro-batch without filler rows, None if nothing is left, and the places of its examples."""
    weights = weights_of(micro_batch)
    if weights is None:
        return micro_batch, part
    are_real = (weights != 0).tolist()
    if len(are_real) == len(part):
        part = [place for place, is_real in zip(part, are_real, strict=True) if is_real]
    return (without_filler(micro_batch) if any(are_real) else None), part


def _backward(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], rows: Rows) -> None:
    pairs = [
        (tensor, rows_of(gradient, rows))
        for tensor, gradient in zip(tensors, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def _moved(rows: Rows, start: int) -> Rows:
    return slice(rows.start + start, rows.stop + start) if isinstance(rows, slice) else rows + start


def _nothing_of(sums: MicroSums | None) -> MicroSums:
    """Return sums of nothing, with the names of the metrics that another rank has."""
    return MicroSums.of_replay(torch.zeros(()), 0.0, {} if sums is None else dict.fromkeys(sums.metrics, 0.0))
