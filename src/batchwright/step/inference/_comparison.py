"""The first steps of a few rows beside eager ones: replays must give the same, which is remembered of a model."""

from __future__ import annotations

import copy
import json
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple, TypeAlias, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..graphs._comparing import NEAR, NEAR_ROUGHLY
from ..graphs._reach import MODULE_OWN, PLAIN
from ..graphs._watch import matmul_precision
from ._choosing import Rules
from ._decoding import Counts
from ._options import Options, cleared
from ._reading import Batch
from ._rounds import Rounds
from ._sharing import are_near, scale
from ._sizing import Sizes
from ._slots import NUM_COMPARED, Slots

Key: TypeAlias = Hashable


@final
class Compared(NamedTuple):
    """What a comparison has shown.

    Attributes:
        sizes: what decoding takes.
        width: the widest cache that a step looked at. A layer whose reach ends somewhere, such as local attention,
            differs only in wider ones.
    """

    sizes: Sizes
    width: int


@final
class Kind(NamedTuple):
    """What a comparison holds for.

    Attributes:
        uses_ranges: attention is over ranges of keys.
        is_even: no row had any padding.
    """

    uses_ranges: bool
    is_even: bool


# Models with their settings; what was compared longest ago is forgotten first.
_KNOWN: WeakKeyDictionary[nn.Module, dict[Key, Compared]] = WeakKeyDictionary()
_MOST_KEYS = 16
# How many tokens there will be changes nothing about a step.
_LIMITS = ("max_new_tokens", "max_length")
# New tokens to compare.
_NUM_TOKENS = 4


@final
class Comparison:
    """Gathers the logits of the first steps of a few rows.

    Args:
        logits: of the prompt.
        is_half: compare roughly.

    Attributes:
        num_compared: new tokens that were compared, of the row that had the most.
    """

    def __init__(self, logits: Tensor, *, is_half: bool) -> None:
        self._num_rows = min(NUM_COMPARED, len(logits))
        self._logits = [logits[: self._num_rows].clone()]
        self._near = NEAR_ROUGHLY if is_half else NEAR
        self.num_compared = 0

    def gather(self, slots: Slots) -> bool:
        """Keep the logits of a step, and say whether more are wanted."""
        assert slots.logits is not None
        self._logits.append(slots.logits[: self._num_rows].clone())
        return len(self._logits) < _NUM_TOKENS

    @property
    def has_steps(self) -> bool:
        """Say whether there is anything to compare."""
        return len(self._logits) > 1

    def difference(
        self, model: Any, options: Options, batch: Batch, rounds: Rounds, limits: Counts, num_read: int
    ) -> str | None:
        """Run the same rows eagerly with the tokens that were chosen, and say what differs, or None.

        Args:
            model: a transformers model.
            options: what to generate.
            batch: what the prompt was read from.
            rounds: which have chosen tokens.
            limits: the most new tokens of each row.
            num_read: tokens of the decoder's prompt.
        """
        num = len(self._logits)
        tokens = rounds.slots.results[: self._num_rows, :num]
        forced = _Forced(tokens)
        settings = copy.deepcopy(options.settings)
        settings.do_sample, settings.max_new_tokens, settings.max_length = False, num, None
        least = max(options.rules.min_new_tokens, options.rules.min_length - num_read, 0)
        settings.min_new_tokens, settings.min_length = min(least, num), None
        settings.return_dict_in_generate = settings.output_logits = True
        rows = {name: value[: self._num_rows] for name, value in batch.fields.items()}
        off = cleared(model, options.settings)
        found = model.generate(**rows, **off, generation_config=settings, logits_processor=[forced])
        ends = tokens.new_tensor(options.rules.ends)
        most = torch.from_numpy(limits[: self._num_rows]).to(tokens.device)
        goes_on = most > 0
        for number, (own, eager) in enumerate(zip(self._logits, found.logits, strict=False)):
            if not bool(are_near(own, eager, self._near)[goes_on].all()):
                return f"the logits of new token {number + 1} differ from those of an eager step"
            is_best = _is_best(forced.scores[number], tokens[:, number, None], self._near)
            if not options.rules.draws and not bool(is_best[goes_on].all()):
                return f"new token {number + 1} is not the one that an eager step takes"
            self.num_compared += bool(goes_on.any())
            goes_on &= ~torch.isin(tokens[:, number], ends) & (most > number + 1)
        return None


def _is_best(scores: Tensor, tokens: Tensor, near: float) -> Tensor:
    """Say of each row whether a token has the highest score, or one as high but for rounding."""
    scores = scores.double()
    best, own = scores.amax(dim=1), scores.gather(1, tokens)[:, 0]
    return (own == best) | (own >= best - near * scale(scores))


@final
class _Forced:
    """A logits processor that takes tokens which are given.

    Attributes:
        scores: what the processors of transformers have made of the logits.
    """

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of which one token is the best."""
        forced = torch.full_like(scores, -torch.inf)
        forced.scatter_(1, self._tokens[:, len(self.scores), None], 0.0)
        self.scores.append(scores.clone())
        return forced


def compared(model: nn.Module, key: Key) -> Compared | None:
    """Return what a comparison has shown, if this model was compared as it is now; else None."""
    return _KNOWN.get(model, {}).get(key)


def remember(model: nn.Module, key: Key, shown: Compared) -> None:
    """Remember that replays of a model agreed with eager steps; with the model this is forgotten."""
    known = _KNOWN.setdefault(model, {})
    known[key] = shown
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
        (matmul_precision(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
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
