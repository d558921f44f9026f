"""What a found budget depends on, as JSON values: the model, the code that runs, the data, the device, the packages."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import nn

from .._modules import recomputes_activations
from .._types import IntArray
from ._contents import PACKAGES, contents_of, read_by

_QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return what the cost of a model depends on, as JSON values: parts, settings, tensors, hooks and code."""
    config: Any = getattr(model, "config", None)
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "attention": str(getattr(config, "_attn_implementation", None)),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "gradient_checkpointing": recomputes_activations(model),
        "contents": contents_of(model),
    }


def describe_callable(value: Any) -> Any:
    """Return the name and a digest of a function, or of an object that is called; see ``contents_of``."""
    if value is None:
        return None
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return [str(name), contents_of(value)]


def describe_read(holder: Any, functions: Iterable[Any], *, but: Collection[str] = ()) -> dict[str, str]:
    """Return the attributes of an object that functions of its class read by name, as digests.

    Args:
        holder: an object.
        functions: of its class.
        but: names of attributes that are left out.

    >>> class Trainer:
    ...     def __init__(self):
    ...         self.num_calls, self.num_negatives = 0, 8
    ...     def compute_loss(self):
    ...         return self.num_negatives
    >>> list(describe_read(Trainer(), [Trainer.compute_loss]))
    ['num_negatives']
    """
    found = read_by(holder, list(functions))
    return {name: contents_of(value) for name, value in found.items() if name not in but}


def describe_optimizer(optimizer: Any) -> list[Any]:
    """Return the kind of an optimizer and the settings that its state may depend on, as JSON values.

    >>> describe_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))[1]["momentum"]
    '0.9'
    """
    chosen = {name: value for name, value in optimizer.defaults.items() if name not in ("lr", "weight_decay", "eps")}
    plain = {name: str(one) for name, one in chosen.items() if isinstance(one, str | int | float | None)}
    groups = [[len(group["params"]), sum(one.numel() for one in group["params"])] for group in optimizer.param_groups]
    return [contents_of(type(optimizer)), plain, contents_of(chosen), groups]


def describe_lengths(lengths: IntArray) -> dict[str, Any]:
    """Return the quantiles of lengths, and the order of their number.

    >>> describe_lengths(np.array([[3], [5], [9]]))
    {'quantiles': [[3, 3, 3, 5, 9, 9, 9]], 'number': '2 bits'}
    """
    found = np.quantile(lengths, _QUANTILES, axis=0, method="inverted_cdf").astype(int)
    return {"quantiles": found.T.tolist(), "number": f"{len(lengths).bit_length()} bits"}


def describe_device(device: torch.device) -> list[Any]:
    """Return the name of a device, and its memory or its threads."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return [found.name, found.total_memory]
    return [device.type, f"{platform.machine()} {platform.processor()}", torch.get_num_threads(), os.cpu_count()]


def describe_packages() -> dict[str, str | None]:
    """Return the versions of what runs a step."""
    return {name: _version_of(name) for name in PACKAGES}


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
