"""Trainers of TRL: which of them cannot be planned, their pairs of rows, and the figures that their losses note.

``DPOTrainer`` and ``RewardTrainer`` put the pairs of a batch into one tensor, all chosen rows before all rejected ones.
An example is a pair, so a batch is cut between pairs only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._inputs import num_rows
from .._pairs import PairLoss

# Losses of DPOTrainer by what they are: a mean over pairs, or not.
_MEANS_OVER_PAIRS = {
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm",
}  # fmt: skip
_OTHERS = {"aot": "sorts the pairs of a batch", "aot_unpaired": "sorts the rows of a batch", "sft": "is over tokens"}
_OWN_LOSSES = {
    "trl.trainer.dpo_trainer": "DPOTrainer.compute_loss",
    "trl.trainer.reward_trainer": "RewardTrainer.compute_loss",
}
_IGNORED = -100


def is_of(package: str, kind: type) -> bool:
    """Say whether a class is one of a package, or made from one."""
    return any(base.__module__.split(".")[0] == package for base in kind.__mro__)


def check_can_be_planned(kind: type) -> None:
    """Refuse trainers that write the examples of their batches during training."""
    for base in kind.__mro__:
        if base.__module__.split(".")[0] == "trl" and "get_train_dataloader" in vars(base):
            raise ArgumentError(
                f"{base.__name__} generates completions during training, so nobody knows their lengths before, and it "
                "repeats prompts in an order of its own, which planned batches would replace; use it as it is"
            )


def needs_whole(trainer: Any) -> bool:
    """Say whether the loss of a TRL trainer estimates something from all examples of a batch, as KTO's divergence."""
    return is_of("trl", type(trainer)) and bool(getattr(trainer, "calculate_KL", False))


def pair_loss(trainer: Any, compute_loss: Any) -> PairLoss | None:
    """Return what is known of a loss of pairs; None if the trainer's examples are no pairs.

    Args:
        trainer: with its options.
        compute_loss: its own, before it was made adaptive.
    """
    if not any(base.__module__ in _OWN_LOSSES for base in type(trainer).__mro__):
        return None
    inner, place = getattr(trainer, "_compute_loss", compute_loss), compute_loss.__module__
    if _OWN_LOSSES.get(place) != compute_loss.__qualname__ or inner.__module__ != place:
        return PairLoss(is_known=False)
    chosen = list(getattr(trainer, "loss_types", ()))
    for name in chosen:
        if name in _OTHERS:
            return PairLoss(is_known=False, refusal=f"loss_type={name!r} is no mean over pairs: it {_OTHERS[name]}")
    if getattr(trainer, "aux_loss_enabled", False):
        return PairLoss(is_known=False, refusal="the loss holds aux_loss, which belongs to a batch as a whole")
    return PairLoss(is_known=set(chosen) <= _MEANS_OVER_PAIRS)


@final
class CallFigures:
    """Averages what TRL notes at every call of a loss by the size of the call: planned batches differ in size.

    TRL keeps a list per name and logs the mean of its entries. Here a list holds one entry, the mean so far, over the
    labels of the calls, or over their rows if they have no labels.
    """

    def __init__(self) -> None:
        self._weights: dict[tuple[str, str], float] = {}

    @contextmanager
    def noted(self, trainer: Any, inputs: Mapping[str, Any], key: str) -> Iterator[None]:
        """Average what a call inside the context notes.

        Args:
            trainer: may be one of TRL.
            inputs: of the call.
            key: the input whose length is the number of rows.
        """
        if not _has_figures(trainer):
            yield
            return
        mode, weight = "train" if trainer.model.training else "eval", _weight(inputs, key)
        before = {name: list(values) for name, values in trainer._metrics[mode].items()}
        with gathering_unequally(trainer.accelerator):
            weight = float(trainer.accelerator.gather(torch.tensor([weight], device=trainer.args.device)).sum())
            yield
        for name, values in trainer._metrics[mode].items():
            known = before.get(name, [])
            if len(values) == len(known) + 1:
                self._average(mode, name, values, weight)

    def _average(self, mode: str, name: str, values: list[float], weight: float) -> None:
        """Fold the newest entry into the one before; an empty list was logged since."""
        so_far = self._weights.get((mode, name), 0.0) if len(values) > 1 else 0.0
        total = so_far + weight
        newest = values.pop()
        mean = newest if not values or total == 0 else (values[0] * so_far + newest * weight) / total
        values[:] = [mean]
        self._weights[mode, name] = total


@contextmanager
def gathering_unequally(accelerator: Any) -> Iterator[None]:
    """Let ranks gather tensors of different lengths inside the context: TRL gathers a number per pair.

    Planned batches differ in size, and a plain gather of unequal tensors mixes their numbers up or breaks off.
    """
    if accelerator.num_processes == 1:
        yield
        return
    plain = accelerator.gather

    def gather(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.ndim == 0:
            return plain(tensor)
        sizes = plain(torch.tensor([len(tensor)], device=tensor.device)).tolist()
        gathered = plain(accelerator.pad_across_processes(tensor, dim=0))
        parts = gathered.split(max(sizes)) if max(sizes) else []
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]) if parts else gathered

    names = ("gather", "gather_for_metrics")
    for name in names:  # over the methods of its class
        setattr(accelerator, name, gather)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)


@contextmanager
def without_figures(trainer: Any) -> Iterator[None]:
    """Log something else than an update: what TRL has noted since the last one waits for the next."""
    kept = getattr(trainer, "_metrics", None) if _has_figures(trainer) else None
    if kept is not None:
        trainer._metrics = {mode: defaultdict(list) for mode in kept}
    try:
        yield
    finally:
        if kept is not None:
            trainer._metrics = kept


def _has_figures(trainer: Any) -> bool:
    return is_of("trl", type(trainer)) and isinstance(getattr(trainer, "_metrics", None), dict)


def _weight(inputs: Mapping[str, Any], key: str) -> float:
    labels = inputs.get("labels")
    return float((labels != _IGNORED).sum()) if isinstance(labels, Tensor) else float(num_rows(inputs, key))
