"""What a loss is a mean over: found by running it on parts of a batch, apart and together."""

from __future__ import annotations

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ArgumentError
from ._full_precision import HALF, InHalf, settled
from ._loss_samples import Samples, Views, counts_tokens, num_labels
from .oom import Snapshot

OWN_LOSS = "write a loss_fn(model, micro_batch) that returns (loss_sum, weight) instead of huggingface_loss()"
# Rounding of a loss, by the type it is computed in.
TOLERANCE = 1e-4
HALF_TOLERANCE = 2e-2
# Two ways of counting that fit equally well, in parts of the tolerance: all labels have the same loss, as from a head
# of zeros. In half precision rounding alone decides between ways that are both within the tolerance.
_TIE = 1e-3
# Models of transformers whose own loss is a mean over labels, or over examples if they have one label each.
_USUAL = ("CausalLM", "LMHead", "ConditionalGeneration", "MaskedLM", "TokenClassification", "SequenceClassification")


class LossReading(NamedTuple):
    """How to read a loss."""

    sums: bool  # num_items_in_batch=1 makes it a sum
    shifts: bool  # the first label of a row belongs to no output


class ProbedLoss(ABC):
    """A loss that can be tried out.

    Attributes:
        module: what it runs; put into evaluation mode for the trial.
        takes_number: it may honour ``num_items_in_batch``.
        trusts_number: whoever uses the loss divides sums by the usual number of labels, whatever its mean is over.
        tolerance: least rounding to allow.
    """

    module: nn.Module
    takes_number: bool
    trusts_number: bool = False
    tolerance: float = TOLERANCE

    @abstractmethod
    def __call__(self, inputs: Mapping[str, Any], **options: Any) -> Tensor:
        """Return the loss of inputs."""

    @abstractmethod
    def complaint(self, why: str) -> ArgumentError:
        """Return the error of a loss that is not a mean over its labels."""


@final
class ModelLoss(ProbedLoss):
    """The loss that a model returns."""

    def __init__(self, model: nn.Module) -> None:
        self.module = getattr(model, "_orig_mod", model)  # the shapes of two examples are not worth compiling
        self.takes_number = _takes_number(unwrapped(model))

    def __call__(self, inputs: Mapping[str, Any], **options: Any) -> Tensor:
        """Return the loss, unless the model says that part of it belongs to the batch as a whole."""
        outputs = self.module(**inputs, **options)
        extra = shared_term(self.module, outputs)
        if extra:
            raise self.complaint(extra)
        return loss_of(outputs)

    def complaint(self, why: str) -> ArgumentError:
        """Return the error, which advises to write a loss function."""
        name = type(unwrapped(self.module)).__name__
        return ArgumentError(f"the loss of {name} is not a mean over its labels: {why}; {OWN_LOSS}")


def shared_term(model: nn.Module, outputs: Any) -> str:
    """Say which term of a loss belongs to a batch as a whole, as that of a router does; an empty text if none."""
    found = outputs if isinstance(outputs, Mapping) else {}
    extra = [name for name in found if name.endswith(("aux_loss", "z_loss")) and found[name] is not None]
    if not extra or not _has_coefficient(getattr(unwrapped(model), "config", None)):
        return ""
    return f"it holds {extra[0]}, which belongs to a batch as a whole; turn that off if you can"


def _has_coefficient(config: Any) -> bool:
    """Say whether the coefficient of a router's term is above zero, or not known."""
    configs = [config, getattr(config, "text_config", None)]
    names = ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_coef", "z_loss_coef")
    found = [getattr(part, name, None) for part in configs for name in names]
    known = [value for value in found if isinstance(value, int | float)]
    return not known or any(known)


def loss_of(outputs: Any) -> Tensor:
    """Return the loss from the outputs of a model."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ArgumentError(f"the model returned no loss for the labels, got {type(loss).__name__}; {OWN_LOSS}")
    return loss.reshape(())


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model under ``torch.compile``, data-parallel and adapter wrappers."""
    while True:
        base = getattr(model, "get_base_model", None)
        inner = base() if callable(base) else getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def _takes_number(base: nn.Module) -> bool:
    parameters = inspect.signature(base.forward).parameters
    takes = "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes and getattr(base, "accepts_loss_kwargs", True) is not False


def usual_reading(model: nn.Module, labels: Tensor) -> LossReading:
    """Return the reading that is right for most models of this kind; every model can give a mean."""
    base = unwrapped(model)
    is_encoder_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    predicts_next = any(part in type(base).__name__ for part in ("CausalLM", "LMHead")) and not is_encoder_decoder
    return LossReading(sums=False, shifts=predicts_next and counts_tokens(labels))


def has_usual_loss(model: nn.Module) -> bool:
    """Say whether a model is one of transformers with its own loss, and of a kind whose ``usual_reading`` holds."""
    base = unwrapped(model)
    is_theirs = type(base).__module__.startswith("transformers.") and not hasattr(base, "_loss_function")
    return is_theirs and any(part in type(base).__name__ for part in _USUAL)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation mode; afterwards every module is in the mode that it had."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def read_views(loss: ProbedLoss, views: Views) -> LossReading | None:
    """Find out how to read a loss; None if these inputs cannot tell.

    The loss runs in evaluation mode without gradients, and if it is another one in training mode, then there too;
    random state and buffers are put back. A loss that half precision may have rounded apart is read in float32.
    """

    def read(tolerance: float, is_half: bool) -> LossReading | ArgumentError | InHalf | None:
        reader = _Reader(loss, views, tolerance, is_half=is_half)
        try:
            found: LossReading | ArgumentError | None = _read(loss, reader, views)
        except ArgumentError as error:
            found = error
        return InHalf(reader.dtype) if reader.dtype in HALF and not is_half else found

    found = settled(loss.module, read, lambda verdict: isinstance(verdict, Exception), tolerance=loss.tolerance)
    if isinstance(found, Exception):
        raise found
    return found


def _read(loss: ProbedLoss, reader: _Reader, views: Views) -> LossReading | None:
    snapshot = Snapshot.of(loss.module)
    try:
        with torch.no_grad():
            with evaluating(loss.module):
                found = reader.read()
            if found is not None and _differs_in_training(loss, views.both, found):
                with _evaluating_norms(loss.module):
                    found = reader.read()
            return found
    finally:
        snapshot.restore()


def _differs_in_training(loss: ProbedLoss, inputs: Mapping[str, Any], reading: LossReading) -> bool:
    """Say whether a loss has another value in training mode, by itself and not by dropout."""
    if not loss.module.training:
        return False
    options = {"num_items_in_batch": 1} if reading.sums else {}

    def value() -> float:
        return float(loss(inputs, **options))

    with evaluating(loss.module):
        usual = value()
    with _evaluating_norms(loss.module), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # checkpointing warns that no input needs a gradient
        is_same = math.isclose(usual, first := value(), rel_tol=loss.tolerance)
        return not is_same and first == value()


@contextmanager
def _evaluating_norms(model: nn.Module) -> Iterator[None]:
    """Switch only BatchNorm to evaluation mode: that it depends on the split is known, and warned of."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    for norm in norms:
        norm.training = False
    try:
        yield
    finally:
        for norm in norms:
            norm.training = True


def try_out(loss: ProbedLoss, *inputs: Mapping[str, Any], **options: Any) -> list[float]:
    """Return losses in evaluation mode without gradients; random state and buffers are put back."""
    return [float(value) for value in _tried_out(loss, *inputs, **options)]


def _tried_out(loss: ProbedLoss, *inputs: Mapping[str, Any], **options: Any) -> list[Tensor]:
    snapshot = Snapshot.of(loss.module)
    try:
        with evaluating(loss.module), torch.no_grad():
            return [loss(given, **options) for given in inputs]
    finally:
        snapshot.restore()


def is_same_alone(loss: ProbedLoss, pair: float, alone: float) -> bool:
    """Say whether the mean over an example and its copy is that of the example alone; a sum is twice as large."""
    # Other shapes round differently, but a sum is far off.
    return math.isclose(pair, alone, rel_tol=max(loss.tolerance, HALF_TOLERANCE), abs_tol=1e-12)


def adds_up(
    loss: ProbedLoss, samples: Samples, count: Callable[[Mapping[str, Any]], int], *, sums: bool
) -> bool | None:
    """Say whether the loss of rows is the mean of their losses apart, weighed by a count; None if they cannot tell.

    Args:
        loss: to be tried out.
        samples: the rows.
        count: what the loss is said to be a mean over.
        sums: ask for sums, with ``num_items_in_batch=1``.
    """
    options = {"num_items_in_batch": 1} if sums else {}
    inputs = [samples.both, samples.single, *samples.apart]
    counts = [1 if sums else count(given) for given in inputs]

    def judge(tolerance: float, is_half: bool) -> bool | InHalf | None:
        values = _tried_out(loss, *inputs, **options)
        if values[0].dtype in HALF and not is_half:
            return InHalf(values[0].dtype)
        both, single, *apart = map(float, values)
        if not all(map(math.isfinite, (both, single, *apart))) or both == single == 0:
            return None
        num = len(apart)
        if not is_same_alone(loss, apart[-1], num * single if sums else single):
            return False
        together = sum(number * value for number, value in zip(counts[2:], apart, strict=True))
        return math.isclose(num * counts[0] * both, together, rel_tol=tolerance, abs_tol=1e-12)

    return settled(loss.module, judge, lambda verdict: verdict is False, tolerance=loss.tolerance)


@final
class _Reader:
    """Runs a loss on views, and compares sums."""

    def __init__(self, loss: ProbedLoss, views: Views, tolerance: float, *, is_half: bool) -> None:
        self._loss, self._views, self._tolerance, self._is_half = loss, views, tolerance, is_half
        self.dtype = torch.float32  # of the loss, when it has been read
        usual = usual_reading(loss.module, views.both["labels"]).shifts
        has_ways = counts_tokens(views.both["labels"]) and not isinstance(views.both.get("shift_labels"), Tensor)
        self._ways = (usual, not usual) if has_ways else (usual,)

    def read(self) -> LossReading | None:
        """Return the reading under which sums add up; None if the loss is not finite, or does not depend on labels."""
        total, is_sum = self._total()
        mean = self._mean(needs_number=is_sum)
        if not all(math.isfinite(value) for value in (total, mean)):
            return None
        if is_sum:
            apart = self._check_sums(total)
            if apart is None:
                return None
            shifts = self._best_way(self._error_of_means([mean, *self._means_apart(mean)], [total, *apart]))
            if shifts is None and not self._loss.trusts_number:
                raise self._complaint(mean, f"{total:.6g} with num_items_in_batch=1")
            return LossReading(True, self._ways[0] if shifts is None else shifts)
        first, second = (float(self._loss(view)) for view in self._views[1:3])
        alone = second if self._views.single is None else float(self._loss(self._views.single))
        if not all(map(math.isfinite, (first, second, alone))) or mean == first == second == alone == 0:
            return None
        if not is_same_alone(self._loss, second, alone):
            raise self._complaint(mean, f"that of the second one is {alone:.6g} alone and {second:.6g} twice")
        whole = self._views.copies * mean

        def error(counts: list[int]) -> float:
            apart = counts[1] * first + counts[2] * second
            return abs(whole * counts[0] - apart) / max(abs(apart), 1e-12)

        found = self._best_way(error)
        if found is None:
            raise self._complaint(mean, f"{first:.6g} and {second:.6g} apart")
        if first == second == mean and self._views.copies == 1:
            raise self._loss.complaint(f"it is {mean:.6g} whichever of its labels count")
        # Examples that count alike would fit as well: nothing but rounding tells them from labels that do.
        alike = self._is_half and abs(2 * mean - first - second) <= self._tolerance * abs(first + second)
        return None if alike or self._is_tie(error) else LossReading(False, found)

    def _means_apart(self, mean: float) -> list[float]:
        """Return the means of both parts, unless the loss has none."""
        return [float(self._loss(view)) for view in self._views[1:3]] if mean else []

    @staticmethod
    def _error_of_means(means: list[float], sums: list[float]) -> Callable[[list[int]], float]:
        """Return how far means times counts are off their sums; one label too many may fit one view, not all three."""

        def error(counts: list[int]) -> float:
            pairs = zip(means, counts, sums, strict=False)
            errors = [abs(mean * num - total) / max(abs(total), 1e-12) for mean, num, total in pairs]
            return max(errors) if all(map(math.isfinite, errors)) else math.inf

        return error

    def _is_tie(self, error: Callable[[list[int]], float]) -> bool:
        """Say whether every way of counting that counts anything fits."""
        counts = [self._counts(way) for way in self._ways]
        if len(counts) == 1 or any(0 in found for found in counts):
            return False
        return max(map(error, counts)) < self._tolerance * (1.0 if self._is_half else _TIE)

    def _total(self) -> tuple[float, bool]:
        """Return the loss for the number 1, and whether the loss divides by that number."""
        if not self._loss.takes_number:
            return 0.0, False
        found = [self._loss(self._views.both, num_items_in_batch=number) for number in (1, 2)]
        self.dtype, (one, two) = found[0].dtype, map(float, found)
        # Where rounding is in the way, the mean is read instead, which every model can give.
        return one, one != 0 and math.isclose(one, 2 * two, rel_tol=self._tolerance)

    def _mean(self, *, needs_number: bool) -> float:
        try:
            mean = self._loss(self._views.both)
        except TypeError:
            if not (needs_number and self._loss.trusts_number):
                raise
            return 0.0  # a loss that only ever divides by the number it is given
        self.dtype = mean.dtype
        return float(mean)

    def _check_sums(self, total: float) -> tuple[float, float] | None:
        """Refuse a sum that compares examples, which the number of labels alone does not show.

        Returns the sums of both parts, None if they are not finite.
        """
        first, second = (float(self._loss(view, num_items_in_batch=1)) for view in self._views[1:3])
        single = self._views.single
        alone = second if single is None else 2 * float(self._loss(single, num_items_in_batch=1))
        if not all(map(math.isfinite, (first, second, alone))):
            return None
        if not is_same_alone(self._loss, second, alone):
            raise self._complaint(
                total, f"{alone / 2:.6g} and {second:.6g} of an example once and twice, all with num_items_in_batch=1"
            )
        if not math.isclose(self._views.copies * total, first + second, rel_tol=self._tolerance):
            apart = f"{first / self._views.copies:.6g} and {second / self._views.copies:.6g} apart"
            raise self._complaint(total, f"{apart}, all with num_items_in_batch=1")
        return first, second

    def _best_way(self, error: Callable[[list[int]], float]) -> bool | None:
        counts = [self._counts(way) for way in self._ways]
        # Nothing is also a sum of nothing: a way that counts no label fits everything.
        errors = [math.inf if 0 in found else error(found) for found in counts]
        best = min(range(len(errors)), key=errors.__getitem__)
        return self._ways[best] if errors[best] <= self._tolerance else None

    def _counts(self, shifts: bool) -> list[int]:
        return [int(num_labels(view, shifts)) for view in self._views[:3]]

    def _complaint(self, loss: float, apart: str) -> ArgumentError:
        _, first, second = (count // self._views.copies for count in self._counts(self._ways[-1]))
        return self._loss.complaint(f"that of two examples with {first} and {second} labels is {loss:.6g}, {apart}")
