"""Whether the examples of packed rows give what they give alone: a model is run on two short sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._full_precision import HALF as HALF
from .._full_precision import noting_half, settled
from .._loss_probe import evaluating, unwrapped
from ..oom import Snapshot, is_out_of_memory
from .collator import PackCollator

Pack: TypeAlias = Callable[[Sequence[Sequence[Tensor]]], dict[str, Any]]  # rows of sequences to the inputs of a model

_SHORT_WINDOW = 128
# How far outputs of a packed row may be off, by rounding; on a GPU float32 may be computed in TF32.
_ERROR, _ERROR_ON_GPU, _HALF_ERROR = 1e-4, 5e-3, 5e-2
# And those of a sequence whose neighbour changes: the same kernels on the same shapes, which add zeros.
_SAME = 1e-6


def why_not_packed(model: Any, collator: PackCollator, options: Mapping[str, Any] | None = None) -> str | None:
    """Return why examples in rows of a collator do not give what they give alone, None if they do.

    Two short sequences are run through the model, apart and in rows, without gradients. A model that is not one of
    transformers, or that takes something else than tokens, is not tried out.

    Args:
        model: of transformers, wrapped or not, on its device.
        collator: that makes the rows.
        options: of a batch, instead of the ``use_cache=False`` of the collator.

    >>> why_not_packed(nn.Linear(2, 2), PackCollator()) is None
    True
    """
    base: Any = unwrapped(model)
    config: Any = getattr(base, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    if getattr(text, "vocab_size", None) is None or getattr(config, "is_encoder_decoder", False):
        return None
    reason = _reason_of_layers(text, collator)
    if reason is not None or any(parameter.is_meta for parameter in base.parameters()):
        return reason
    snapshot = Snapshot.of(base)
    try:
        # Flash attention takes half precision only; all others show more without.
        half = torch.autocast(base.device.type, torch.bfloat16, enabled=is_flash(base))
        with torch.no_grad(), evaluating(base), half:
            try:
                return compare(base, packing(collator, options))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
            return compare(base, packing(collator, options, with_labels=True))  # some models need them
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"it could not be tried out on a packed row: {type(error).__name__}: {error}"
    finally:
        snapshot.restore()


def complaint_about_rows(model: Any, collator: PackCollator, reason: str) -> str:
    """Return the text of an error about rows that a model cannot train on, with what to do instead."""
    instead = {
        "positions": "pass use_cache=False if the batch does not, or use layout='block'",
        "flat": "call use_varlen(model) first, or pass use_cache=False if the batch does not",
        "block": "use layout='positions', or mask_dtype=torch.float32 for an attention that adds its mask",
    }
    rows = f"rows of PackCollator(layout={collator.layout!r})"
    return (
        f"{type(unwrapped(model)).__name__} cannot train on {rows}: {reason}; {instead[collator.layout]}, or train on "
        "padded batches"
    )


def doubt_about_rows(collator: PackCollator) -> str:
    """Return the text of a warning about rows whose attention computes all pairs of their tokens and masks most."""
    return (
        f"rows of PackCollator(layout={collator.layout!r}) attend under a mask of all pairs of their tokens, which is "
        "slower than padded batches of WindowSort; use layout='flat' with use_varlen(model), or WindowSort"
    )


def _reason_of_layers(text: Any, collator: PackCollator) -> str | None:
    """Return what short sequences would not show."""
    if "chunked_attention" in (getattr(text, "layer_types", None) or []):
        return "it has layers of the kind 'chunked_attention', whose chunks are counted from the start of a row"
    if collator.layout == "block" and windows_of(text):
        return "it has layers that see a window of tokens, which the mask of layout='block' would replace"
    return None


def is_flash(model: Any) -> bool:
    """Return whether a model runs a flash attention of its own, which reads the bounds of flat batches by itself."""
    attention = getattr(getattr(unwrapped(model), "config", None), "_attn_implementation", None) or ""
    return "flash" in attention


def windows_of(text: Any) -> bool:
    """Return whether layers of a model see only a window of tokens."""
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return "sliding_attention" in kinds
    return getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True) is not False


def packing(collator: PackCollator, options: Mapping[str, Any] | None = None, *, with_labels: bool = False) -> Pack:
    """Return a function that makes the inputs of a model from rows of sequences of tokens, as wide as these are."""
    collator = replace(collator, width=None)

    def pack(rows: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
        examples = [[{"input_ids": tokens.cpu(), "labels": tokens.cpu()} for tokens in row] for row in rows]
        batch = {name: value for name, value in collator(examples).items() if with_labels or name != "labels"}
        if options is not None:
            batch = {**{name: value for name, value in batch.items() if name != "use_cache"}, **options}
        device = rows[0][0].device
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}

    return pack


def compare(model: Any, pack: Pack) -> str | None:
    """Return why rows of two short sequences give other outputs than these apart, None if they do not.

    There are two rows, as some kinds of attention look for bounds in a single one only. What half precision may have
    rounded apart is compared in float32.
    """
    return settled(model, lambda *_: _compare(model, pack), lambda reason: reason is not None, tolerance=_SAME)


def _compare(model: Any, pack: Pack) -> str | None:
    first, second = usual_sequences(model)
    rows = [[first, second], [second, first]]
    with noting_half(model) as halves:
        together, changed = model(**pack(rows)), model(**pack([[first.flip(0), second], rows[1]]))
        apart = [model(**_alone(model, pack, tokens)) for tokens in (first, second)]
    names = [name for name, value in together.items() if isinstance(value, Tensor) and name != "loss"]
    for name in names:
        if together[name].ndim < 2 or together[name].shape[:2].numel() != 2 * (len(first) + len(second)):
            return f"its output {name} has no row per token"
    if not names:
        return "it has no output"
    found, other = (outputs[names[0]].flatten(0, 1).float() for outputs in (together, changed))
    if not _error(other[len(first) :], found[len(first) :]) <= _SAME:
        return f"its {names[0]} of a sequence change with the tokens of another one in the same row, which it sees"
    expected = torch.cat([apart[place][names[0]][0] for place in (0, 1, 1, 0)]).float()
    usual = _ERROR if expected.device.type == "cpu" else _ERROR_ON_GPU
    error = _error(found, expected)
    if not error <= (_HALF_ERROR if halves else usual):  # nor is NaN
        return (
            f"its {names[0]} of packed rows are {error:.2g} off those of the sequences apart; positions may begin at "
            "another number than 0, or layers may mix sequences"
        )
    return None


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def _alone(model: Any, pack: Pack, tokens: Tensor) -> dict[str, Any]:
    """Return the inputs of a sequence in a batch of its own, which leaves positions and masks to the model."""
    labels = {"labels": tokens[None]} if "labels" in pack([[tokens]]) else {}
    cache = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return {"input_ids": tokens[None], **labels, **cache}


def usual_sequences(model: Any) -> list[Tensor]:
    """Return two sequences of usual tokens; they are longer than a window, if that is short."""
    text = model.config.get_text_config()
    special = [value for name, value in text.to_dict().items() if name.endswith("_token_id")]
    usual = [token for token in range(min(text.vocab_size, 997)) if token not in special]
    window = getattr(text, "sliding_window", None) or 0
    more = window if windows_of(text) and window <= _SHORT_WINDOW else 0
    lengths = [7 + more, 4 + more]
    tokens = torch.tensor([usual[place * 7 % len(usual)] for place in range(sum(lengths))], device=model.device)
    return list(tokens.split(lengths))


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Switch a model to training mode; afterwards every module is in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = True
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
