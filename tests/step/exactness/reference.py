"""The truth, by hand: plain autograd in double precision, one example at a time, and the clip written out."""

from __future__ import annotations

import torch

from .models import Setup


def weight_of_each(case, fields, counts):
    """Return the weight of every example, ``(B,)``."""
    if case.weights in ("tokens", "count"):
        return counts
    return fields.w.to(counts) if case.model != "tied" else counts


def loss_and_weight(case, setup, model, fields):
    """Return the two sums of some examples, as the user's loss gives them."""
    losses, counts = setup.losses(model, fields)
    each = weight_of_each(case, fields, counts)
    scaled = losses if case.model == "tied" or case.weights == "count" else losses * each
    loss, weight = scaled.sum(), each.sum()
    if case.weights == "mean":
        loss = loss / weight * weight.detach()  # 0 / 0 where everything is masked
    elif case.weights == "skip" and float(weight) == 0:
        loss = torch.zeros((), dtype=loss.dtype)
    return loss, weight


def gradients_by_example(case, setup: Setup, fields, existing):
    """Return the gradient of the mean over all examples of an update, its loss and its weight.

    Args:
        case: says how examples are weighted.
        setup: parameters as they are before the update; not changed.
        fields: the examples of the whole update.
        existing: gradients to be added, one per parameter, or None.
    """
    twin = setup.double()
    loss_sum, weight_sum = 0.0, 0.0
    double = fields.to(torch.float64)
    for row in range(len(fields)):
        one = double.rows(row, row + 1)
        losses, counts = twin.losses(twin.model, one)
        weight = weight_of_each(case, one, counts)[0]
        loss = losses[0] if case.model == "tied" or case.weights == "count" else losses[0] * weight
        loss.backward()
        loss_sum, weight_sum = loss_sum + float(loss), weight_sum + float(weight)
    gradients = [None if p.grad is None else p.grad / weight_sum for p in twin.parameters()]
    return _with(gradients, existing), loss_sum / weight_sum, weight_sum


def gradients_by_piece(case, setup: Setup, pieces, existing):
    """Run the pieces by hand from this state on; return the gradient, and leave buffers and random numbers as they end.

    What forward draws at random depends on the pieces, so examples cannot be taken one by one.
    """
    weight_sum, loss_sum = 0.0, 0.0
    for fields in pieces:
        loss, weight = loss_and_weight(case, setup, setup.model, fields)
        weight_sum += float(weight)
        if float(weight) > 0:
            loss.backward()
            loss_sum += float(loss)
    gradients = [None if p.grad is None else p.grad / weight_sum for p in setup.parameters()]
    return _with(gradients, existing), loss_sum / weight_sum, weight_sum


def _with(gradients, existing):
    if existing is None:
        return gradients
    # A sparse gradient becomes dense where a dense one is there, as in autograd.
    both = zip(gradients, existing, strict=True)
    return [b if a is None else a if b is None else b + a for a, b in both]


def norm_of(gradients):
    """Return the norm of all gradients together."""
    squares = [float(dense(g).abs().double().square().sum()) for g in gradients if g is not None]
    return sum(squares) ** 0.5


def clipped(gradients, limit):
    """Return the gradients scaled to a norm of at most ``limit``, as ``torch.nn.utils.clip_grad_norm_`` defines it."""
    factor = min(1.0, limit / (norm_of(gradients) + 1e-6))
    return [None if g is None else g * factor for g in gradients]


def dense(tensor):
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def distance(found, expected):
    """Return the largest relative error of a list of tensors; infinite where one is missing or is one too many.

    A tensor far smaller than the rest is measured against a thousandth of the rest: cancellation left it few digits.
    """
    whole = norm_of(expected)
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is None or b is None:
            continue
        wide = torch.complex128 if b.is_complex() else torch.float64
        error = float((dense(a).to(wide) - dense(b).to(wide)).norm())
        size = max(float(dense(b).to(wide).norm()), 1e-3 * whole)
        if not error <= 1e300:
            return float("inf")
        worst = max(worst, error / size if size else error)
    return worst
