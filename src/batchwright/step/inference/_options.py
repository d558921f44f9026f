"""What ``generate`` was asked for: settings that graphs honour, the first one that they do not, and where rows end."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..graphs._watch import hooks_of
from ._choosing import Rules, Warper

# Read here, or without meaning for one sequence per example that is chosen token by token.
_HONOURED = {
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "use_cache",
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "suppress_tokens", "begin_suppress_tokens",
    "length_penalty", "early_stopping", "diversity_penalty", "num_beam_groups",  # of beams
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",  # of an assistant
    "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    "max_matching_ngram_size",
    "disable_compile", "compile_config", "transformers_version",
}  # fmt: skip
# Where these are switched on they do more than choose a token; equal to one of the values they do nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_return_sequences": (1,), "typical_p": (1.0,), "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,), "encoder_repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "guidance_scale": (1, 1.0), "cache_implementation": ("dynamic",),
}  # fmt: skip
_FIELDS = {"input_ids", "attention_mask"}
_ATTENTIONS = ("sdpa", "eager")


@final
@dataclass(frozen=True)
class Options:
    """What graphs generate with.

    Attributes:
        rules: how tokens are chosen.
        max_new_tokens: the most new tokens, None if ``max_length`` limits them.
        max_length: the most tokens, the decoder's prompt included; without meaning if there is ``max_new_tokens``.
        settings: the generation configuration that transformers makes of all that is given.
    """

    rules: Rules
    max_new_tokens: int | None
    max_length: int
    settings: Any


def read_options(base: Any, model: Any, kwargs: Mapping[str, Any]) -> Options | str:
    """Return the settings of a call as transformers reads them, or why graphs cannot follow them.

    Args:
        base: the model under its wrappers.
        model: what ``generate`` is called on.
        kwargs: the arguments of ``model.generate``.
    """
    reason = _why_not_model(base, model)
    if reason is not None:
        return reason
    given = dict(kwargs)
    config = given.pop("generation_config", None)
    for name in [name for name in given if name in _parameters_of_generate()]:
        value = given.pop(name)
        if value is not None and value is not False and not (isinstance(value, list) and not value):
            return f"{name} is given"
    settings, rest = base._prepare_generation_config(config, **given)
    unknown = [name for name, value in rest.items() if value is not None]
    if unknown:
        return f"{unknown[0]} is given"
    odd = next(_odd_settings(settings), None)
    if odd is not None:
        return odd
    return _options_of(settings, has_length=_has_length(base, config, kwargs), is_decoder_only=_is_decoder_only(base))


def cleared(base: Any, settings: Any) -> dict[str, None]:
    """Return what was switched off with None although the model's own configuration has a value.

    Transformers would take that value once more where it is given the settings as a configuration.

    Args:
        base: a transformers model.
        settings: what transformers has made of a call.
    """
    own = {name for name, value in vars(base.generation_config).items() if value is not None}
    return {name: None for name, value in vars(settings).items() if value is None and name in own}


def why_not_fields(fields: Mapping[str, Any], *, is_encoder_decoder: bool) -> str | None:
    """Return why graphs cannot run a batch with these fields, or None."""
    known = _FIELDS | {"decoder_input_ids"} if is_encoder_decoder else _FIELDS
    others = sorted(fields.keys() - known)
    if others:
        return f"batches hold {others[0]}"
    return None if "input_ids" in fields else "batches hold no input_ids"


@cache
def _parameters_of_generate() -> frozenset[str]:
    from transformers import GenerationMixin

    names = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs", "generation_config"}
    return frozenset(names | {"tokenizer", "assistant_tokenizer", "use_model_defaults"})


def _is_decoder_only(base: Any) -> bool:
    return not getattr(base.config, "is_encoder_decoder", False)


def _why_not_model(base: Any, model: Any) -> str | None:
    """Return what about a model no graph can follow, or None."""
    try:
        from transformers import GenerationMixin as Mixin
        from transformers.cache_utils import DynamicCache, DynamicLayer
    except ImportError:
        return "transformers is not installed"
    generates: Any = Mixin  # its types know nothing of the model that it is mixed into
    if not isinstance(base, generates) or not hasattr(base, "_prepare_generation_config"):
        return f"{type(base).__name__} is not a model of transformers"
    owner = model if "generate" in dir(type(model)) else base
    if type(owner).generate is not Mixin.generate or "generate" in vars(base):
        return f"{type(owner).__name__} has a generate of its own"
    if getattr(base, "_is_stateful", False) or not base._supports_default_dynamic_cache():
        return f"{type(base).__name__} keeps a state that is no cache of keys and values"
    attention = getattr(base.config, "_attn_implementation", None)
    if attention not in _ATTENTIONS:
        return f"the attention is {attention!r}, not {' or '.join(map(repr, _ATTENTIONS))}"
    layers = DynamicCache(config=base.config.get_text_config(decoder=True)).layers
    if any(type(layer) is not DynamicLayer for layer in layers):
        return f"{type(base).__name__} has layers with a sliding window or with another kind of cache"
    devices = {one.device for one in (*base.parameters(), *base.buffers())}
    if len(devices) > 1:
        return f"the model lies on several devices, {' and '.join(sorted(map(str, devices)))}"
    if torch.is_autocast_enabled(next(iter(devices)).type):
        return "autocast is on; convert the model instead, as with model.half()"
    return hooks_of(base)


def _odd_settings(settings: Any) -> Iterator[str]:
    """Yield settings that graphs do not honour."""
    for name, value in vars(settings).items():
        if name.startswith("_") or name in _HONOURED or value is None or value is False:
            continue
        if value in _NEUTRAL.get(name, ()) or (isinstance(value, list | dict) and not value):
            continue
        yield f"{name}={value!r}"
    if settings.use_cache is False:
        yield "use_cache=False"


def _has_length(base: Any, config: Any, kwargs: Mapping[str, Any]) -> bool:
    places = (kwargs.get("max_length"), getattr(config, "max_length", None), base.generation_config.max_length)
    return any(place is not None for place in places)


def _options_of(settings: Any, *, has_length: bool, is_decoder_only: bool) -> Options | str:
    most, length = settings.max_new_tokens, settings.max_length if has_length else None
    if most is None and length is None:
        return "neither max_new_tokens nor max_length is given"
    if is_decoder_only and settings.forced_bos_token_id is not None:
        return "forced_bos_token_id is given to a model without an encoder"
    rules = _rules_of(settings, is_decoder_only=is_decoder_only)
    return rules if isinstance(rules, str) else Options(rules, most, length or 0, settings)


def _rules_of(settings: Any, *, is_decoder_only: bool) -> Rules | str:
    ends = _tokens(settings.eos_token_id)
    pad = settings.pad_token_id
    penalty = settings.repetition_penalty
    for name in ("eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        if any(token < 0 for token in _tokens(getattr(settings, name))):
            return f"{name} holds a number below 0"
    return Rules(
        ends=ends,
        pad=int(pad) if pad is not None and int(pad) >= 0 else ends[0] if ends else 0,
        min_new_tokens=int(settings.min_new_tokens or 0),
        # min_new_tokens takes precedence, even as 0.
        min_length=0 if is_decoder_only or settings.min_new_tokens is not None else int(settings.min_length or 0),
        repetition_penalty=None if penalty in (None, 1.0) else float(penalty),
        forced_first=settings.forced_bos_token_id,
        suppressed=_tokens(settings.suppress_tokens),
        suppressed_first=_tokens(settings.begin_suppress_tokens),
        warpers=tuple(_warpers(settings)) if settings.do_sample else None,
    )


def _tokens(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(token) for token in torch.as_tensor(value).reshape(-1).tolist())


def _warpers(settings: Any) -> Iterator[Warper]:
    """Yield transformers' own functions, in its order; none of these reads a value of the device."""
    from transformers.generation import logits_process as process

    if settings.temperature is not None and settings.temperature != 1.0:
        yield process.TemperatureLogitsWarper(settings.temperature)
    if settings.top_k:
        yield process.TopKLogitsWarper(top_k=settings.top_k, min_tokens_to_keep=1)
    if settings.top_p is not None and settings.top_p < 1.0 and not math.isnan(settings.top_p):
        yield process.TopPLogitsWarper(top_p=settings.top_p, min_tokens_to_keep=1)
    if settings.min_p is not None:
        yield process.MinPLogitsWarper(min_p=settings.min_p, min_tokens_to_keep=1)


@final
class Stops:
    """One stopping criterion in place of several, which notes where each row ends.

    What follows in a row is padding, or more tokens where there is no end-of-sequence token. Neither can be told from
    what the row has by itself.

    Args:
        criteria: functions of the ids and scores of all rows, as ``model.generate`` takes them.

    >>> import torch
    >>> stops = Stops([lambda ids, scores: ids[:, -1] == 7])
    >>> for tokens in ([[5, 6], [5, 7]], [[5, 6, 7], [5, 7, 0]]):
    ...     _ = stops(torch.tensor(tokens), None)
    >>> stops.widths.tolist()
    [3, 2]
    """

    def __init__(self, criteria: list[Callable[..., Any]]) -> None:
        self._criteria = criteria
        self.widths: npt.NDArray[np.int64] | None = None

    @property
    def given(self) -> list[Callable[..., Any]]:
        """Return what ``model.generate`` is given: criteria of its own types take the place of those that it makes."""
        return [*(one for one in self._criteria if type(one).__module__.startswith("transformers.generation")), self]

    def __call__(self, ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Say of each row whether it has ended."""
        done = ids.new_zeros(len(ids)).bool()
        for criterion in self._criteria:
            done = done | criterion(ids, scores, **options)
        if self.widths is None:
            self.widths = np.full(len(ids), np.iinfo(np.int64).max)
        self.widths = np.where(done.cpu().numpy(), np.minimum(self.widths, ids.shape[1]), self.widths)
        return done


def generates_plainly(base: Any) -> bool:
    """Say whether a model generates as transformers does, and not in several rounds of its own (Whisper)."""
    return getattr(getattr(type(base), "generate", None), "__module__", None) == "transformers.generation.utils"


def stops_of(setting: Callable[[str], Any]) -> Stops | None:
    """Return what notes where rows end, None if only tokens end them.

    Args:
        setting: returns a setting of generation by its name.
    """
    given, strings, tokenizer = (setting(name) for name in ("stopping_criteria", "stop_strings", "tokenizer"))
    criteria = list(given) if isinstance(given, list) else [given] if given else []
    if strings and tokenizer is not None:  # without one, transformers says what is missing
        from transformers import StopStringCriteria

        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return Stops(criteria) if criteria else None
