"""The arguments of a Stepper, checked once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .._checks import as_number, as_whole, check_choice, has_size, is_number, read_size
from .._containers import fields_of
from .._tree import CannotCutError
from ..errors import ArgumentError
from ..plan import Budget, MaxItems
from ..size.learning_rate import Beta2Rule, Rule, get_beta2_rule, get_rule
from ._gradients import Existing
from .losses import LossFunction
from .packing.rows import BOUNDS, FlatBatch, is_flat
from .splitting import CustomBatch, ExampleBatch, LogicalBatch, SplitFunction, TensorBatch, WholeBatch
from .whole_batches.loss import WholeBatchLoss

_ITEMS = MaxItems(1)
# "likely": the loss itself is a mean. "perhaps": a part of it is one, or it is divided by the weight.
Doubt: TypeAlias = Literal["likely", "perhaps"]

# Nodes of autograd that leave a number as it is, and those that join two numbers.
_SAME: tuple[str, ...] = ("ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "CloneBackward0", "NegBackward0")
_SAME += ("SqueezeBackward0", "SqueezeBackward1")
_JOINS = ("AddBackward0", "SubBackward0")
_TIMES, _OVER = ("MulBackward0", "MulBackward1"), ("DivBackward0", "DivBackward1")
_MEANS, _SUMS = ("MeanBackward0", "MeanBackward1"), ("SumBackward0", "SumBackward1")
_COMPILED = "CompiledFunction"  # examples of other shapes would be compiled first
# A mean over what these have made may be one over heads or features, whose examples are summed already.
_MAY_HOLD_SUMS = frozenset(
    [*_SUMS, "StackBackward0", "CatBackward0", "ExpandBackward0", "MvBackward0", "BmmBackward0", "IndexAddBackward0"]
)
_MEAN = 1  # what losses of torch note of reduction="mean"
_MOST_NODES = 24  # that are looked at


@final
@dataclass(frozen=True)
class Settings:
    """The arguments of a Stepper, checked once and kept as plain values; ``measure_noise`` becomes 0 for never."""

    loss_fn: LossFunction
    micro_batch: Any
    lengths: Callable[[Any], Any] | None
    collate: Callable[[list[Any]], Any] | None
    trim: Callable[[Any], Any] | None
    weight_of: Callable[[Any], float | Tensor] | None
    clip_norm: float | None
    autocast: torch.dtype | None
    scaler: torch.amp.GradScaler | None
    on_oom: Literal["split", "raise"]
    measure_noise: int
    lr_rule: str | Rule | None
    base_size: int | None
    existing_gradients: Existing
    split: Callable[[Any, Any], Any] | None
    noise_parts: int | None = None
    noise_from: str = "all"
    beta2_rule: str | Beta2Rule | None = None
    tokens_of: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise ArgumentError(f"loss_fn must be a function of (model, micro_batch), got {self.loss_fn!r}")
        if getattr(self.loss_fn, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
            raise ArgumentError(
                f"loss_fn is called with (model, micro_batch), and {self.loss_fn!r} with (output, target); wrap a loss "
                "that sums: supervised_loss(nn.CrossEntropyLoss(reduction='sum'))"
            )
        _check_arguments(self.loss_fn)
        self._keep("micro_batch", _as_micro_batch(self.micro_batch, self.lengths))
        if self.clip_norm is not None:
            self._keep("clip_norm", as_number("clip_norm", self.clip_norm, above=0, infinite=True))
        if self.scaler is not None and self.scaler.is_enabled() and self.weight_of is None:
            raise ArgumentError(
                "a GradScaler needs the weight of a batch before it runs: weight_of=lambda batch: number of tokens; "
                "its skips depend on the size of gradients"
            )
        check_choice("on_oom", self.on_oom, ("split", "raise"))
        check_choice("existing_gradients", self.existing_gradients, ("clear", "add"))
        if self.tokens_of is not None and not callable(self.tokens_of):
            raise ArgumentError(f"tokens_of must be a function of a batch, got {self.tokens_of!r}")
        self._keep("measure_noise", _as_interval(self.measure_noise))
        if self.noise_parts is not None:
            self._keep("noise_parts", as_whole("noise_parts", self.noise_parts, least=2))
            if not self.measure_noise:
                raise ArgumentError("noise_parts needs measure_noise=True")
        if self.measure_noise and isinstance(self.loss_fn, WholeBatchLoss):
            raise ArgumentError(
                "measure_noise compares the gradients of parts of a batch, and a WholeBatchLoss has none for a part; "
                "leave it out"
            )
        check_choice("noise_from", self.noise_from, ("all", "vectors"))
        if self.noise_from == "vectors":
            self._check_vectors()
        self._check_rate()

    def _check_vectors(self) -> None:
        if not self.measure_noise:
            raise ArgumentError("noise_from='vectors' needs measure_noise=True, or a number of updates")
        if self.noise_parts is not None:
            raise ArgumentError(
                "noise_parts counts micro-batches, but noise_from='vectors' measures single examples; leave it out, or "
                "use noise_from='all'"
            )

    def _check_rate(self) -> None:
        if self.base_size is not None:
            self._keep("base_size", as_whole("base_size", self.base_size, least=1))
        rule = get_rule(self.lr_rule)
        if rule is not None and self.base_size is None:
            raise ArgumentError(
                "lr_rule needs base_size, the batch size that the optimizer's learning rate is meant for"
            )
        if get_beta2_rule(self.beta2_rule) is not None and self.base_size is None:
            raise ArgumentError("beta2_rule needs base_size, the batch size that the optimizer's betas are meant for")
        if rule == "adascale" and not self.measure_noise:
            raise ArgumentError("lr_rule='adascale' needs measure_noise=True")

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def wrap(self, batch: Any) -> LogicalBatch:
        """Return the batch as something that can be split."""
        return wrap_batch(batch, collate=self.collate, lengths=self.lengths, trim=self.trim, split=self.split)

    def count_tokens(self, batch: Any, logical: LogicalBatch) -> int | None:
        """Return the tokens of a batch: as ``tokens_of`` counts them, else the sum of lengths, else None."""
        if self.tokens_of is not None:
            found = self.tokens_of(batch)
            found = found.item() if isinstance(found, Tensor) and found.numel() == 1 else found
            return as_whole("tokens_of(batch)", found, least=0)
        return logical.num_tokens

    @property
    def cost_budget(self) -> Budget | None:
        """Return what counts the cost of a micro-batch: the budget given, a number of items, or None for tokens."""
        if isinstance(self.micro_batch, Budget):
            return self.micro_batch
        return None if isinstance(self.micro_batch, str) else _ITEMS

    @property
    def asked(self) -> float:
        """Return the most that a micro-batch may cost by the setting, whatever memory says."""
        given = self.micro_batch
        if isinstance(given, Budget):
            return 1.0
        if isinstance(given, str):
            return math.inf
        return given if isinstance(given, int) else read_size(given, "micro_batch")

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


def _check_arguments(loss_fn: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # some functions do not tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        makes = str(getattr(loss_fn, "__module__", "")).startswith(__package__)
        advice = f"; it makes one: {name}(…)" if makes else ""
        raise ArgumentError(
            f"loss_fn is called with (model, micro_batch), and {name}{signature} does not take two: {error}{advice}"
        ) from None


def _as_micro_batch(value: Any, lengths: Any) -> Any:
    if isinstance(value, Budget):
        if lengths is None:
            raise ArgumentError(f"micro_batch={value} needs lengths=, the lengths of the examples of a batch")
        return value
    if (isinstance(value, str) and value == "auto") or has_size(value):
        return value
    if is_number(value):
        return as_whole("micro_batch", value, least=1)
    raise ArgumentError(f"micro_batch must be 'auto', a number of 1 or more, a budget or a controller, got {value!r}")


def _as_interval(value: Any) -> int:
    """Return the number of updates from one measurement of noise to the next, 0 for never."""
    if isinstance(value, bool | np.bool_):
        return int(value)
    return as_whole("measure_noise, if not True or False,", value, least=0)


def wrap_batch(
    batch: Any,
    *,
    collate: Callable[[list[Any]], Any] | None,
    lengths: Callable[[Any], Any] | None,
    trim: Callable[[Any], Any] | None,
    split: SplitFunction | None,
) -> LogicalBatch:
    """Return a batch as something that can be cut, or that runs whole.

    Args:
        batch: nested fields with one row per example, or a list of examples with ``collate``; anything with ``split``.
        collate: makes a micro-batch from a list of examples.
        lengths: of the examples of a batch, or of one example of a list.
        trim: cuts padding off a micro-batch.
        split: ``split(batch, None)`` returns the number of examples, ``split(batch, indices)`` some of them.

    >>> import torch
    >>> batch = wrap_batch((torch.zeros(3), ["a", "b", "c"]), collate=None, lengths=None, trim=None, split=None)
    >>> batch.take([1])
    (tensor([0.]), ['b'])
    """
    if split is not None:
        if collate is not None:
            raise ArgumentError("give collate= for lists of examples or split= for other batches, not both")
        return CustomBatch(batch, split, lengths=lengths, trim=trim)
    # The name is looked at first, as few batches are flat.
    if isinstance(batch, Mapping) and BOUNDS[0] in batch and is_flat(batch):
        return FlatBatch(batch, lengths=lengths)
    if collate is not None and isinstance(batch, list):
        return ExampleBatch(batch, collate, lengths)
    if collate is not None and not isinstance(batch, Tensor) and fields_of(batch) is None:
        raise ArgumentError(f"with collate= a batch is a list of examples, got {type(batch).__name__}; use list(batch)")
    try:
        return TensorBatch(batch, lengths=lengths, trim=trim)
    except CannotCutError as error:
        return WholeBatch(batch, error, lengths=lengths, trim=trim)


def required(micro_batch: Any) -> Any:
    """Return a micro-batch, and refuse None in its place: its examples would be left out without a word."""
    if micro_batch is None:
        raise ArgumentError(
            "a micro-batch is None; let collate or trim return one, and leave examples that are broken out of the batch"
        )
    return micro_batch


def doubt_of(loss: Tensor, weight: float | None) -> Doubt | None:
    """Say what the graph of a loss lets one suspect; None if nothing in it looks like a mean over examples.

    Args:
        loss: a single number.
        weight: what it is said to sum over; None if that lies on a device.

    >>> from torch.nn import functional as F
    >>> logits, labels = torch.zeros(4, 2, requires_grad=True), torch.ones(4).long()
    >>> doubt_of(F.cross_entropy(logits, labels), 4), doubt_of(logits.sum() / 4, 4)
    ('likely', 'perhaps')
    >>> doubt_of(logits.sum() / 2, 4), doubt_of(logits.mean() * 4, 4)  # a mean times its number is a sum
    (None, None)
    """
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, True)]
    for _ in range(_MOST_NODES):
        if not waiting:
            return None
        node, is_whole = waiting.pop()
        if node is None:
            continue
        name, children = node.name(), [child for child, _ in node.next_functions]
        if name in _SAME:
            waiting.append((children[0], is_whole))
        elif name in _JOINS:
            waiting += [(child, False) for child in children]
        elif name in (*_TIMES, *_OVER):
            factor = _factor_of(node, is_product=name in _TIMES)
            if factor is None or _are_equal(1 / factor if factor else 0.0, weight):
                return "perhaps"
            if not _are_equal(factor, weight):
                waiting += [(child, False) for child in children]
        elif _is_mean(node, name):
            may_hold_sums = name in _MEANS and children[0] is not None and children[0].name() in _MAY_HOLD_SUMS
            return "likely" if is_whole and not may_hold_sums else "perhaps"
        elif (name in _SUMS and _is_over_rows(children[0])) or _is_opaque(node, name):
            return "perhaps"
    return None


def _are_equal(number: float, weight: float | None) -> bool:
    """Say whether a number other than 1 is the weight."""
    return weight is not None and weight != 1 and math.isclose(number, weight, rel_tol=1e-6)


def _is_opaque(node: Any, name: str) -> bool:
    """Say whether a node is a function of Python, whose graph shows nothing."""
    return isinstance(node, BackwardCFunction) and not name.startswith(_COMPILED)


def _factor_of(node: Any, *, is_product: bool) -> float | None:
    """Return what a number is multiplied by, 1 for another part of the graph; None if it lies on a device."""
    if sum(child is not None for child, _ in node.next_functions) != 1:
        return 1.0
    found = getattr(node, "_saved_other", None)
    found = getattr(node, "_saved_self", None) if found is None else found
    if isinstance(found, Tensor) and (found.numel() != 1 or found.is_meta):
        return 1.0
    if isinstance(found, Tensor) and not found.is_cpu:
        return 1.0 if is_product else None
    try:
        value = 1.0 if found is None else float(found)
    except (TypeError, ValueError):  # complex, or a symbol
        return 1.0
    return value if is_product else math.inf if value == 0 else 1 / value


def _is_mean(node: Any, name: str) -> bool:
    """Say whether a node takes the mean of more numbers than one."""
    if name in _MEANS:
        return bool(node._saved_self_sym_numel > 1)
    return getattr(node, "_saved_reduction", None) == _MEAN


def _is_over_rows(node: Any) -> bool:
    """Say whether a node takes the mean over the first axis, and leaves others."""
    if node is None or node.name() != "MeanBackward1":
        return False
    num_axes = len(node._saved_self_sym_sizes)
    # Negative axes are noted as unsigned numbers of 64 bits.
    axes = {(axis - 2**64 if axis >= 2**63 else axis) % max(1, num_axes) for axis in node._saved_dim or ()}
    return 0 in axes
