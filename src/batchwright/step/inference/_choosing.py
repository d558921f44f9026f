"""From logits to the next token, on the device: what transformers' processors do, without waiting for the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Warper: TypeAlias = Callable[..., Any]  # of transformers, which types its arguments by dtype


@final
@dataclass(frozen=True)
class Rules:
    """How the next token is chosen; None and empty mean that a rule is off.

    Attributes:
        ends: tokens that end a row.
        pad: the token after the end.
        min_new_tokens: no end before so many new tokens.
        min_length: no end before so many tokens, the decoder's prompt included.
        repetition_penalty: for tokens that a row has had, its prompt included.
        forced_first: the first new token.
        suppressed: tokens that never come.
        suppressed_first: tokens that do not come first, after a forced one.
        warpers: change the scores before a draw; None takes the best token.
    """

    ends: tuple[int, ...]
    pad: int
    min_new_tokens: int = 0
    min_length: int = 0
    repetition_penalty: float | None = None
    forced_first: int | None = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    warpers: tuple[Warper, ...] | None = None

    @property
    def draws(self) -> bool:
        """Say whether tokens are drawn."""
        return self.warpers is not None


@final
class Chooser:
    """The rules, with their tokens as masks over the vocabulary.

    Args:
        rules: what to do.
        num_tokens: size of the vocabulary.
        num_prompt: tokens of the decoder before the first new one.
        device: of the logits.
    """

    def __init__(self, rules: Rules, num_tokens: int, num_prompt: int, device: torch.device) -> None:
        self._rules, self._num_prompt = rules, num_prompt
        self.ends = torch.tensor(rules.ends, dtype=torch.long, device=device)
        self._is_end = _mask_of(rules.ends, num_tokens, device)
        self._is_suppressed = _mask_of(rules.suppressed, num_tokens, device)
        self._is_suppressed_first = _mask_of(rules.suppressed_first, num_tokens, device)
        # The start token and a forced one come before what is the first in the eyes of a reader.
        self._first = int(rules.forced_first is not None and num_prompt == 1)
        self._least = max(rules.min_new_tokens, rules.min_length - num_prompt)
        forced = rules.forced_first is not None and num_prompt == 1
        others = (rules.draws, rules.repetition_penalty, rules.suppressed, rules.suppressed_first, forced)
        self._takes_best = self._least <= 0 and not any(others)

    def choose(self, logits: Tensor, num_new: Tensor, seen: Tensor | None, uniform: Tensor | None) -> Tensor:
        """Return the next token of each row.

        Args:
            logits: ``(rows, vocabulary)``.
            num_new: how many tokens there are, one number.
            seen: ``(rows, vocabulary)``, which tokens a row has had.
            uniform: ``(rows, 1)`` numbers in [0, 1) to draw with.
        """
        if self._takes_best:  # the best is the same in float32, which takes twice the memory
            return logits.argmax(dim=-1)
        scores = self._processed(logits.float(), num_new, seen)
        if self._rules.warpers is None or uniform is None:
            return scores.argmax(dim=-1)
        for warper in self._rules.warpers:
            scores = warper(None, scores)
        return draw(scores, uniform)

    def _processed(self, scores: Tensor, num_new: Tensor, seen: Tensor | None) -> Tensor:
        """Apply the rules in the order of transformers."""
        penalty, rules = self._rules.repetition_penalty, self._rules
        if penalty is not None and seen is not None:
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if self._least > 0 and rules.ends:
            scores = scores.masked_fill(self._is_end & (num_new < self._least), -torch.inf)
        if rules.forced_first is not None and self._num_prompt == 1:
            forced = torch.full_like(scores, -torch.inf)
            forced[:, rules.forced_first] = 0
            scores = torch.where(num_new == 0, forced, scores)
        if rules.suppressed:
            scores = scores.masked_fill(self._is_suppressed, -torch.inf)
        if rules.suppressed_first:
            scores = scores.masked_fill(self._is_suppressed_first & (num_new == self._first), -torch.inf)
        return scores

    def are_ends(self, tokens: Tensor) -> Tensor:
        """Say of each token whether it ends its row."""
        if len(self._rules.ends) == 1:
            return tokens == self._rules.ends[0]
        return (tokens[:, None] == self.ends).any(dim=1)


def _mask_of(tokens: tuple[int, ...], num_tokens: int, device: torch.device) -> Tensor:
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    mask[[token for token in tokens if 0 <= token < num_tokens]] = True
    return mask.to(device)


def draw(scores: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token of each row with ``softmax(scores)``: the first whose cumulative share is above the number.

    Args:
        scores: ``(rows, vocabulary)``.
        uniform: ``(rows, 1)`` in [0, 1).

    >>> draw(torch.tensor([[0.0, 0.0, -torch.inf, 0.0]]), torch.tensor([[0.67]]))
    tensor([3])
    """
    shares = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    return (shares <= uniform * shares[:, -1:]).sum(dim=-1)


def uniforms(seed: int, indices: list[int], num: int) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) for each example: the same whichever examples share its batch.

    Args:
        seed: of the call.
        indices: places of the examples among all.
        num: numbers for each; the first are the same for any ``num``.

    >>> bool((uniforms(1, [5], 3) == uniforms(1, [2, 5], 9)[1:, :3]).all())
    True
    """
    streams = [np.random.Generator(np.random.Philox(key=[seed, index])) for index in indices]
    return np.stack([stream.random(num) for stream in streams])
