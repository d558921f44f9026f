"""What earlier calls have shown of a model: that replays agree with eager steps, and what decoding takes."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..graphs._reach import MODULE_OWN, PLAIN
from ._choosing import Rules
from ._sizing import Sizes

Key: TypeAlias = Hashable

# Models with their settings; what was compared longest ago is forgotten first.
_KNOWN: WeakKeyDictionary[nn.Module, dict[Key, Sizes]] = WeakKeyDictionary()
_MOST_KEYS = 16
# How many tokens there will be changes nothing about a step.
_LIMITS = ("max_new_tokens", "max_length")


def sizes_of(model: nn.Module, key: Key) -> Sizes | None:
    """Return what decoding takes, if this model was compared as it is now; else None."""
    return _KNOWN.get(model, {}).get(key)


def remember(model: nn.Module, key: Key, sizes: Sizes) -> None:
    """Remember that replays of a model agreed with eager steps; with the model this is forgotten."""
    known = _KNOWN.setdefault(model, {})
    known[key] = sizes
    while len(known) > _MOST_KEYS:
        del known[next(iter(known))]


def key_of(model: nn.Module, rules: Rules, settings: Any, *others: Hashable) -> Key:
    """Return all that a comparison depends on, so that nothing is taken over to what may behave in another way.

    These are the code, the single values and the hooks of every part, types and shapes of parameters and buffers, the
    configuration, the settings of the call, and how torch computes. The values of weights are left out: they change the
    logits of replays and of eager steps alike.

    Args:
        model: a transformers model.
        rules: how tokens are chosen.
        settings: a generation configuration.
        *others: what else matters.
    """
    named = {name: value for name, value in settings.to_dict().items() if name not in _LIMITS}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return (
        tuple(_parts_of(model)),
        tuple((name, one.dtype, one.shape, one.device) for name, one in tensors),
        json.dumps(_config_of(model), sort_keys=True, default=repr),
        json.dumps(named, sort_keys=True, default=repr),
        tuple((type(warper), _values_of(warper)) for warper in rules.warpers or ()),
        (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
        others,
    )


def _config_of(model: Any) -> Any:
    return model.config.to_dict() | {"attention": model.config._attn_implementation}


def _parts_of(model: nn.Module) -> Iterator[Hashable]:
    for name, part in model.named_modules():
        yield name, type(part), type(part).forward, _values_of(part)


def _values_of(part: Any) -> Hashable:
    """Return the single values of an object, and what kind the others are."""
    held = [(name, value) for name, value in vars(part).items() if name not in MODULE_OWN or name == "training"]
    return tuple((name, value if type(value) in PLAIN else _described(value)) for name, value in held)


def _described(value: Any) -> Hashable:
    """Return a value in few words: short containers of single values as they are, others by their type."""
    if isinstance(value, list | tuple | set | frozenset) and len(value) <= _MOST_KEYS:
        return type(value), tuple(one if type(one) in PLAIN else type(one) for one in value)
    if isinstance(value, dict) and len(value) <= _MOST_KEYS:
        return type(value), tuple((str(name), one if type(one) in PLAIN else type(one)) for name, one in value.items())
    return type(value), getattr(value, "__qualname__", None)
