"""What would make the gradient wrong although the encodings are right: changed parameters, and graphs kept aside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

# Parameters that no update changes, each with one of its numbers.
Samples: TypeAlias = "list[tuple[nn.Parameter, Tensor]]"
# Nodes of autograd that hold nothing; under autocast those of weights are made once and used again.
_CASTS = "ToCopyBackward0"


class Nodes(NamedTuple):
    """The numbers of the nodes of autograd that a pass has made: from the first to before the last."""

    first: int
    last: int


def next_node() -> int:
    """Return the number of the next node of autograd in this thread."""
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view(0).grad_fn
    return 0 if node is None else node._sequence_nr()


def reaches(loss: Tensor, nodes: Nodes) -> bool:
    """Say whether the graph of a loss leads to some nodes."""
    waiting: list[Any] = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if nodes.first <= node._sequence_nr() < nodes.last and node.name() != _CASTS:
            return True
        seen.add(node)
        waiting += [one for one, _ in node.next_functions]
    return False


def sample(parameters: Iterable[nn.Parameter]) -> Samples:
    """Return a number of each parameter, for ``have_changed``; writes through ``.data`` leave no other trace."""
    own = [one for one in parameters if type(one) is nn.Parameter and not one.is_meta and one.numel()]
    return [(one, _first_of(one).clone()) for one in own]


def have_changed(samples: Samples) -> bool:
    """Say whether a parameter has another number now."""
    found = [_first_of(parameter) != before for parameter, before in samples]
    return bool(found) and bool(torch.stack([one.to(found[0].device) for one in found]).any())


def _first_of(parameter: nn.Parameter) -> Tensor:
    return parameter.detach()[(0,) * parameter.ndim]
