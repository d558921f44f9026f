"""What ``controller="auto"`` stands for: a policy, its bounds, and how rate and beta2 follow the size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from .._checks import as_state, read_whole
from ..errors import ArgumentError
from ..plan.sampler.resizable import ResizableBatchSampler
from ..size.controller import BatchSizeController
from ..size.learning_rate import innermost
from ..size.schedules import constant
from ..size.signals import goodput
from ._ranked import check_no_stream, loader_options

logger = logging.getLogger(__name__)

# The largest batch: this many times the base, and so many updates per epoch that there is something to learn from.
_MOST_TIMES = 64
_LEAST_UPDATES = 20
# Every how many updates noise is measured where the batch has to be cut for it, which may take twice as long.
NOISE_EVERY = 8
# Of so many first updates every second one is measured, so that the first decision does not wait.
NOISE_FIRST = 32
# The same from vectors. The 1st, 32nd and every 64th measurement cut the batch in two, to compare with the whole
# gradient. At every fourth update that and the vectors add 2 to 3 % to the operators of the first 64 updates, and less
# later (tests/step/noise/test_cost.py).
_VECTORS_EVERY = 4
_NOISE_OPTIONS = {"noise_parts", "noise_groups", "noise_from", "measure_noise"}
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Coupling(NamedTuple):
    """How the learning rate and Adam's beta2 follow the size, by name."""

    lr_rule: str
    beta2_rule: str | None


def is_auto(controller: Any) -> bool:
    """Say whether a controller is to be made here."""
    return isinstance(controller, str) and controller == "auto"


def largest_size(base_size: int, num_examples: int | None) -> int:
    """Return ``64 × base_size``, at most a twentieth of an epoch, and at least ``base_size``.

    >>> largest_size(8, None), largest_size(8, 2_000), largest_size(8, 50)
    (512, 100, 8)
    """
    most = _MOST_TIMES * base_size
    return most if num_examples is None else max(base_size, min(most, num_examples // _LEAST_UPDATES))


def make_controller(base_size: int, num_examples: int | None) -> BatchSizeController:
    """Return a controller that looks for the size which makes the most progress per second, from a base upwards.

    Args:
        base_size: examples per update over all ranks, which the learning rate was chosen for.
        num_examples: of an epoch, None if nobody knows.
    """
    largest = largest_size(base_size, num_examples)
    if largest < 2 * base_size:
        logger.warning(
            "controller='auto' keeps the size near %d: a larger one may be at most a twentieth of the data, which is "
            "%g of %d examples.",
            base_size,
            (num_examples or 0) / _LEAST_UPDATES,
            num_examples,
        )
    if largest == base_size:
        return BatchSizeController(constant(base_size), min_size=base_size, max_size=base_size)
    policy = goodput(base_size=base_size, smallest=base_size, largest=largest)
    return BatchSizeController(policy, min_size=base_size, max_size=largest)


def coupling_of(optimizer: Any) -> Coupling:
    """Return how rate and beta2 follow the size: linear for SGD, else the square root; beta2's half-life for Adam.

    >>> from types import SimpleNamespace
    >>> class AdamW(SimpleNamespace): ...
    >>> coupling_of(AdamW(param_groups=[{"lr": 0.1, "betas": (0.9, 0.99)}]))
    Coupling(lr_rule='sqrt', beta2_rule='half_life')
    """
    inner = innermost(optimizer)
    groups, names = inner.param_groups, [kind.__name__.lower() for kind in type(inner).__mro__]
    if any(group.get("lr") is None for group in groups):
        raise ArgumentError(
            f"controller='auto' scales the learning rate with the size, but a group of {type(inner).__name__} has "
            "none; give the optimizer a rate (for Adafactor also relative_step=False), or pass a controller of your own"
        )
    if any("sgd" in name for name in names):
        return Coupling("linear", None)
    is_adam = any("adam" in name for name in names) and any("betas" in group for group in groups)
    return Coupling("sqrt", "half_life" if is_adam else None)


def resizable_loader(loader: Any, world_size: int, *, base_size: int | None = None) -> tuple[Any, BatchSizeController]:
    """Return a loader of the same data whose batches follow a controller, and the controller.

    Args:
        loader: a ``DataLoader`` with a ``batch_size``, which a rank would run per update.
        world_size: ranks that share an update.
        base_size: the first size over all ranks; None is ``batch_size × world_size``.
    """
    dataset: Any = getattr(loader, "dataset", None)
    size = getattr(loader, "batch_size", None)
    if not isinstance(loader, DataLoader) or size is None or type(loader).__iter__ is not DataLoader.__iter__:
        raise ArgumentError(
            "controller='auto' makes the batches itself, from a DataLoader with a batch_size, but this one has batches "
            "of its own; give DataLoader(dataset, batch_size=…, shuffle=True), or the controller of your sampler"
        )
    check_no_stream("controller='auto'", dataset)
    _check_order(loader)
    controller = make_controller(size * world_size if base_size is None else base_size, len(dataset))
    is_shuffled = isinstance(loader.sampler, RandomSampler)
    seed = _seed_of(loader, world_size) if is_shuffled else 0
    sampler = ResizableBatchSampler(len(dataset), controller, shuffle=is_shuffled, seed=seed)
    return DataLoader(dataset, batch_sampler=sampler, **loader_options(loader)), controller


def _check_order(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose order is neither that of its data nor a shuffled one: a subclass may draw anything."""
    drawn: Any = loader.sampler
    dataset: Any = loader.dataset
    name = None
    if loader.drop_last:
        name = "drop_last=True"
    elif type(drawn) not in (RandomSampler, SequentialSampler) or getattr(drawn, "replacement", False):
        name = f"a {type(drawn).__name__}" + (" with replacement" if type(drawn) is RandomSampler else "")
    elif not len(drawn) == len(drawn.data_source) == len(dataset):
        name = f"a {type(drawn).__name__} that draws {len(drawn)} examples, of {len(dataset)}"
    if name is not None:
        raise ArgumentError(
            f"controller='auto' takes every example once per epoch, in order or shuffled, but the loader has {name}; "
            "leave it out"
        )


def _seed_of(loader: DataLoader[Any], world_size: int) -> int:
    """Return the seed of the order, the same on all ranks: that of the generator that was given, or 0.

    A seed from torch's own random state would differ in the process that resumes a run, unless that is seeded alike.
    """
    drawn: Any = loader.sampler
    generator = loader.generator if drawn.generator is None else drawn.generator
    seed = 0 if generator is None else int(generator.initial_seed())
    if world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return seed
    seeds = [seed]
    dist.broadcast_object_list(seeds, src=0)
    return seeds[0]


def stepper_options(given: Mapping[str, Any], model: nn.Module, optimizer: Any, base_size: int) -> dict[str, Any]:
    """Return the options of a ``Stepper`` that ``"auto"`` stands for; what was given stays.

    Noise comes from the vectors of norm layers where there are some and nothing mixes examples, else from the parts of
    every 8th batch. Whether vectors can be measured shows only when they are; ``VectorFallback`` sees to that.
    """
    usual: dict[str, Any] = {**coupling_of(optimizer)._asdict(), "base_size": base_size, "measure_noise": NOISE_EVERY}
    has_norms = any(isinstance(part, _NORMS) or type(part).__name__.endswith("RMSNorm") for part in model.modules())
    mixes = any(isinstance(part, _BatchNorm) for part in model.modules())
    if has_norms and not mixes and not given.keys() & _NOISE_OPTIONS:
        usual |= {"measure_noise": _VECTORS_EVERY, "noise_from": "vectors"}
    return {**usual, **given}


def chose_vectors(options: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Say whether ``stepper_options`` chose to measure noise in vectors, and not the user."""
    return options.get("noise_from") == "vectors" and "noise_from" not in given


@final
class Ticks:
    """Says how often a schedule in updates of a fixed size advances, by the examples of updates of any size.

    Args:
        size: examples per tick.

    >>> ticks = Ticks(8)
    >>> [list(ticks.take(num)) for num in (8, 12, 12, 4)]
    [[1], [2], [3, 4], []]
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_examples = 0

    def take(self, num_examples: int) -> range:
        """Count the examples of an update, and return the numbers of its ticks, from 1."""
        before = self._num_examples // self._size
        self._num_examples += num_examples
        return range(before + 1, self._num_examples // self._size + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the examples counted so far."""
        return {"examples": self._num_examples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting."""
        self._num_examples = read_whole(as_state(state, of="a schedule"), "examples")
