"""Observation: what a policy sees of the course of training, and the counts that schedules read from it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, SupportsIndex, TypeAlias, final, get_args

from .._checks import as_whole, check_choice
from ..errors import ArgumentError, MissingSignalError

Counts: TypeAlias = dict[str, int | None]
Unit: TypeAlias = Literal["epoch", "step", "examples", "tokens"]

COUNTS = ("epoch", "step", "examples", "tokens")
# Units of which an update has many.
FINE = ("examples", "tokens")

_NOISE = ("noise_s", "noise_g2", "noise_reliable", "noise_parts")

# Where each figure comes from, for the error that a policy without it raises.
SOURCES = {
    "epoch": "pass the number of completed epochs: controller.observe(epoch=1, …)",
    "step": "pass the number of completed updates: controller.observe(step=100, …)",
    "examples": "pass batch_size or the examples completed: controller.observe(**report.observation()) does",
    "tokens": "pass batch_tokens or the tokens completed: controller.observe(tokens=…, **report.observation())",
    "batch_size": "pass the size of the batch that ran: controller.observe(**report.observation()) does",
    "batch_tokens": "pass it, or the tokens completed with every update: controller.observe(tokens=…, …)",
    "loss": "pass the loss: controller.observe(**report.observation()) does",
    "lr": "pass the learning rate: controller.observe(**report.observation()) does",
    "entropy": "let loss_fn return (loss_sum, weight, {'entropy': entropy_sum(logits)}), from batchwright.step",
    **dict.fromkeys(_NOISE, "build the Stepper with measure_noise=True"),
    "seconds": "pass the seconds of the update: controller.observe(**report.observation()) does",
    "memory_fraction": "build the Stepper with memory=MemoryMonitor(), from batchwright.step",
    "experiment": "pass what measure_size found: controller.observe(**experiment.observation())",
}


@final
@dataclass(frozen=True, kw_only=True)
class Observation:
    """The course of training so far; a figure that was not measured is None.

    Counts say what is *completed*: ``epoch=3`` asks for the size of the epoch with index 3.

    Attributes:
        epoch: epochs completed.
        step: updates completed.
        examples: examples seen.
        tokens: tokens seen.
        batch_size: examples of the update that just ran.
        batch_tokens: its tokens.
        loss: its mean loss.
        lr: its learning rate.
        entropy: mean entropy of the model's output.
        noise_s: trace of the covariance of the per-example gradient.
        noise_g2: squared norm of the true gradient.
        noise_reliable: whether the average of the noise is large beside its own error.
        noise_parts: micro-batches that the noise was estimated from.
        seconds: duration of the update.
        memory_fraction: share of memory in use at the peak.
        experiment: what training at several sizes from one state gave, as ``measured`` reads it.
        size: the batch size in force; the controller fills it in.
        exact_size: the same before it was rounded; the controller fills it in.
        ends_epoch: whether it only says that an epoch is over, after updates that were observed; the controller fills
            it in. Figures of updates are not to be expected then, and their policies hold the size.
        takes_over: whether a policy that has seen nothing takes over with it, in the middle of training; ``switch``
            fills it in. What it holds belongs to an epoch of the policy before.
        begins_tokens: whether its count of tokens is the first, so that nobody can tell the tokens of the update; the
            controller fills it in.
        multiples: what the answer will be rounded to multiples of, first to last; ``chain`` fills it in.

    >>> Observation(epoch=3, loss=0.5).need("loss")
    0.5
    """

    epoch: int | None = None
    step: int | None = None
    examples: int | None = None
    tokens: int | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    loss: float | None = None
    lr: float | None = None
    entropy: float | None = None
    noise_s: float | None = None
    noise_g2: float | None = None
    noise_reliable: bool | None = None
    noise_parts: int | None = None
    seconds: float | None = None
    memory_fraction: float | None = None
    experiment: Mapping[str, Any] | None = None
    size: int | None = None
    exact_size: float | None = None
    ends_epoch: bool = False
    takes_over: bool = False
    begins_tokens: bool = False
    multiples: tuple[int, ...] = ()

    def need(self, name: str, *, by: str = "this policy") -> Any:
        """Return a figure, or raise an error that says where it comes from.

        Args:
            name: the field.
            by: who needs it, for the message.
        """
        if not hasattr(self, name):
            raise ArgumentError(f"an observation has no {name!r}; it may hold {', '.join(SOURCES)}")
        value = getattr(self, name)
        if value is None:
            raise MissingSignalError(f"{by} needs {name}, which was not observed; {SOURCES[name]}")
        return value

    @property
    def current(self) -> int:
        """Return the size in force: the controller's, or the size of the batch that ran."""
        value: int = self.size if self.size is not None else self.need("batch_size")
        return value

    @property
    def exact(self) -> float:
        """Return the size in force before it was rounded: steps too small for a whole example add up in it."""
        return float(self.current) if self.exact_size is None else self.exact_size

    def rounded(self, size: float) -> int:
        """Return the whole size that an answer becomes: the nearest multiples, and last the nearest whole number.

        >>> Observation(multiples=(8,)).rounded(45.0), Observation().rounded(44.6)
        (48, 45)
        """
        for number in self.multiples:
            size = nearest_multiple(size, number)
        return round(size)


def nearest_multiple(size: float, number: int) -> float:
    """Return ``number × max(1, round(size / number))``."""
    return float(number * max(1, round(size / number)))


_LEAST = {**dict.fromkeys(COUNTS, 0), "batch_size": 1, "batch_tokens": 0, "noise_parts": 1}
# What the controller itself fills in.
FILLED_IN = ("size", "exact_size", "ends_epoch", "takes_over", "begins_tokens", "multiples")
_KNOWN = tuple(item.name for item in fields(Observation) if item.name not in FILLED_IN)


def read_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was observed as plain numbers, without the figures that are None.

    >>> read_fields({"epoch": 3, "loss": 1, "entropy": None})
    {'epoch': 3, 'loss': 1.0}
    """
    unknown = [name for name in given if name not in _KNOWN]
    if unknown:
        raise ArgumentError(f"observe knows {', '.join(_KNOWN)}; got {', '.join(unknown)}")
    return {name: _read(name, value) for name, value in given.items() if value is not None}


def _read(name: str, value: Any) -> Any:
    if name in _LEAST:
        return as_whole(name, value, least=_LEAST[name])
    if name == "noise_reliable":
        return bool(value)
    if name == "experiment":
        return value  # its policy checks it
    # A tensor or an array of one number counts as that number: the state of a policy must stay plain JSON.
    if not isinstance(value, (bool, str, bytes)):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise ArgumentError(f"{name} must be a number, got {value!r}")


def count_on(counts: Counts, observed: Mapping[str, Any]) -> Counts:
    """Return the counts after an observation.

    A count that is given wins. With ``batch_size``, one update and its examples are added to the counts that are not
    given, and with ``batch_tokens`` its tokens. A count that was never started stays None, so that a policy that needs
    it says so.

    >>> count_on({"epoch": 2, "step": 9, "examples": None, "tokens": None}, {"batch_size": 64})
    {'epoch': 2, 'step': 10, 'examples': 64, 'tokens': None}
    """
    after = dict(counts)
    if "batch_size" in observed:
        after["step"] = (counts["step"] or 0) + 1
        after["examples"] = (counts["examples"] or 0) + observed["batch_size"]
    if "batch_tokens" in observed:
        after["tokens"] = (counts["tokens"] or 0) + observed["batch_tokens"]
    return {name: observed.get(name, count) for name, count in after.items()}


def tokens_of_update(before: Counts, after: Counts, observed: Mapping[str, Any]) -> int | None:
    """Return the tokens of the update that just ran: as given, or by how much the count of one update rose.

    >>> count = {"epoch": None, "step": 3, "examples": 9, "tokens": 70}
    >>> tokens_of_update(count, {**count, "step": 4, "tokens": 95}, {"batch_size": 3})
    25
    """
    if "batch_tokens" in observed:
        given: int = observed["batch_tokens"]
        return given
    steps, tokens = ((before[name], after[name]) for name in ("step", "tokens"))
    if "batch_size" not in observed or tokens[0] is None or tokens[1] is None or tokens[1] < tokens[0]:
        return None
    if tokens[1] == tokens[0] and "tokens" not in observed:  # a count that stays until the next one comes
        return None
    # A count that was given after several updates does not tell the tokens of one.
    return tokens[1] - tokens[0] if steps[1] == (steps[0] or 0) + 1 else None


def check_counting(per: str, every: SupportsIndex | None, *, by: str, needs_every: bool = False) -> int:
    """Check a unit and return the size of a block, 1 if none is given.

    Args:
        per: the unit.
        every: units in one block.
        by: the policy, for the message.
        needs_every: whether counting single examples or tokens is surely a mistake.
    """
    check_choice("per", per, get_args(Unit))
    if every is None and per in FINE and needs_every:
        raise ArgumentError(f"{by} per {per} needs every, the {per} of one block, e.g. every=50_000")
    return 1 if every is None else as_whole("every", every, least=1)


def blocks_of_one(per: Unit, every: int) -> tuple[str, ...]:
    """Return the argument of a call that counts single ones, where ``check_counting`` wants it to be given."""
    return ("every=1",) if per in FINE and every == 1 else ()


def index_of(observation: Observation, per: Unit, every: int, *, by: str) -> int:
    """Return the index of the block that comes next, ``count // every``, or say that the count is missing.

    >>> index_of(Observation(examples=120_000), "examples", 50_000, by="linear")
    2
    """
    count: int = observation.need(per, by=by)
    return count // every


def when(observation: Observation, per: Unit) -> str:
    """Say how far training is.

    >>> when(Observation(epoch=3), "epoch"), when(Observation(examples=500), "examples")
    ('at epoch 3', 'after 500 examples')
    """
    count = getattr(observation, per)
    return f"after {count} {per}" if per in FINE else f"at {per} {count}"
