"""What a prompt must not share a batch with: models whose results depend on padding, or on the longest row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from ..._types import IntArray
from ...errors import ArgumentError
from .._loss_probe import unwrapped
from ..graphs._comparing import NEAR, NEAR_ROUGHLY
from ..graphs._rotary import num_learned

_HALF = (torch.float16, torch.bfloat16)
# These are called with all that a row holds, the padding in front of its prompt included.
_READERS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
# Of the prompt that is tried with padding and without.
_NUM_TRIED, _NUM_PADS = 8, 5


@final
class Group(NamedTuple):
    """Examples that may share batches.

    Attributes:
        places: of the examples.
        obstacle: why no graph decodes them, None if nothing is known.
    """

    places: IntArray
    obstacle: str | None = None


def has_positions(base: Any) -> bool:
    """Say whether a model is told the positions of tokens, as transformers finds out."""
    return "position_ids" in inspect.signature(base.forward).parameters


def is_doubtful(model: Any) -> bool:
    """Say whether padding on the left may change what a model without an encoder computes.

    It does not where transformers tells positions and masks keys: neither holds for a state that runs over all tokens,
    for positions that are counted from the first column, and for learned tokens in front of the padding.
    """
    if num_learned(model):
        return True
    inner: Any = unwrapped(model)
    if not hasattr(inner, "_supports_default_dynamic_cache"):
        return False  # not of transformers
    is_stateful = getattr(inner, "_is_stateful", False) or not inner._supports_default_dynamic_cache()
    return is_stateful or not has_positions(inner)


def pads_freely(model: Any, ids: Tensor, pad: int) -> bool:
    """Say whether a prompt gives the same logits with padding on its left; where it cannot be tried, it does not.

    Args:
        model: what ``generate`` is called on.
        ids: of the prompt, on the model's device.
        pad: the padding token.
    """
    ids = ids[:_NUM_TRIED]
    try:
        plain, padded = (_first_logits(model, ids, num, pad) for num in (0, _NUM_PADS))
    except Exception:  # whatever it is, batches without padding do not need an answer
        return False
    return bool(are_near(padded, plain, NEAR_ROUGHLY if plain.dtype in _HALF else NEAR).all())


def _first_logits(model: Any, ids: Tensor, num_pads: int, pad: int) -> Tensor:
    row = torch.cat([ids.new_full((num_pads,), pad), ids])[None]
    mask = (torch.arange(row.shape[1], device=ids.device) >= num_pads).long()[None]
    found = model.generate(
        input_ids=row, attention_mask=mask, max_new_tokens=1, do_sample=False, num_beams=1, pad_token_id=pad,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    logits: Tensor = found.logits[0]
    return logits


def are_near(own: Tensor, eager: Tensor, near: float) -> Tensor:
    """Say of each row whether logits differ by rounding only.

    >>> are_near(torch.tensor([[1.0, 2.0], [1.0, 2.5]]), torch.tensor([[1.0, 2.0], [1.0, 2.0]]), 0.1)
    tensor([ True, False])
    """
    own, eager = own.double(), eager.double()
    distance = torch.where(own == eager, 0.0, (own - eager).abs()).nan_to_num(nan=torch.inf)
    return distance.amax(dim=1) <= near * scale(eager)


def scale(scores: Tensor) -> Tensor:
    """Return the largest size of a finite score of each row."""
    return torch.where(scores.isfinite(), scores, 0.0).abs().amax(dim=1).clamp(min=1e-6)


def reader_of(setting: Callable[[str], Any], *, is_encoder_decoder: bool) -> str | None:
    """Return the setting of generation that sees padding, None if none does.

    Args:
        setting: returns a setting by its name.
        is_encoder_decoder: prompts are sources, which processors do not see.
    """
    if (setting("encoder_repetition_penalty") or 1.0) != 1.0:
        return "encoder_repetition_penalty"
    if is_encoder_decoder:
        return None
    # An n-gram with padding comes again only after padding, and a single token at once.
    if setting("no_repeat_ngram_size") == 1:
        return "no_repeat_ngram_size"
    # The first token is forced where there is one token so far.
    if setting("forced_bos_token_id") is not None:
        return "forced_bos_token_id"
    return next((name for name in _READERS if setting(name)), None)


def check_unpadded(rows: Sequence[Any], pad: int | None) -> None:
    """Refuse token ids that seem to be padded: as many in each row, and padding at an edge of some rows only.

    Args:
        rows: token ids.
        pad: the padding token, None if it is not known or may be a token as others.

    >>> check_unpadded([[5, 6], [7, 0], [0]], 0)
    """
    if pad is None or len(rows) < 2 or len({len(row) for row in rows}) > 1 or not len(rows[0]):
        return
    for edge, place in (("begin", 0), ("end", -1)):
        num = sum(bool(row[place] == pad) for row in rows)
        if 0 < num < len(rows):
            raise ArgumentError(
                f"all examples have {len(rows[0])} token ids, and {num} of {len(rows)} {edge} with the padding token, "
                f"{pad}, so they seem to be padded; tokenize without padding, or, if these are real tokens, give "
                "mappings with input_ids and attention_mask"
            )


def by_number(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places of equal numbers, the largest first.

    >>> list(by_number([3, 5, 3]))
    [[1], [0, 2]]
    """
    places: dict[int, list[int]] = {}
    for place, number in enumerate(numbers):
        places.setdefault(number, []).append(place)
    return (places[number] for number in sorted(places, reverse=True))
