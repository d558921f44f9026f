"""One batch through ``model.generate``: padded, run, and cut to what each example would get on its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..._checks import as_whole, is_whole
from ..._lengths import as_lengths
from ..._tree import map_leaves
from ...errors import ArgumentError
from ..graphs._rotary import renew, rotary_of, same_reach
from ..huggingface import unwrapped
from ._options import generates_plainly, stops_of
from ._sharing import Filling, Group, as_ids, by_number, check_unpadded, ids_in, is_doubtful, pad, pads_freely

Collate = Callable[[list[Any]], Mapping[str, Any]]
Counts = npt.NDArray[np.int64]

# What transformers does if nothing says how many.
_DEFAULT_NEW_TOKENS = 20
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "decoder_input_ids"}
# With any of these a smaller model, or the prompt, proposes tokens, and transformers runs one example at a time.
_ASSISTED = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
_STOPS = ("stop_strings", "stopping_criteria")
_PER_EXAMPLE = {
    "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "encoder_outputs",
    "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "past_key_values",
    "negative_prompt_ids", "negative_prompt_attention_mask",
}  # fmt: skip


@final
class Decoder:
    """Runs one batch, and cuts its results to what each example would get on its own."""

    def __init__(
        self,
        model: Any,
        kwargs: Mapping[str, Any],
        collate: Collate | None,
        pad_token_id: int | None,
        multiple_of: int,
        *,
        has_limits: bool = False,
    ) -> None:
        self.base: Any = unwrapped(model)
        self.model: Any = _generating(model, self.base)
        if not hasattr(self.model, "generate"):
            raise ArgumentError(
                f"the model must have generate(), as transformers models do, got {type(model).__name__}"
            )
        self.kwargs = dict(kwargs)
        if self.kwargs.get("use_cache", True) is None:  # which transformers takes for neither on nor off
            del self.kwargs["use_cache"]
        self.is_encoder_decoder = bool(getattr(getattr(self.base, "config", None), "is_encoder_decoder", False))
        self._check(has_limits=has_limits)
        self._rotary = rotary_of((self.model if isinstance(self.model, nn.Module) else self.base).modules())
        self.device = next(self.base.parameters()).device
        ends = self._setting("eos_token_id")
        self._ends = torch.as_tensor([] if ends is None else ends, dtype=torch.long).reshape(-1).cpu()
        if pad_token_id is not None:
            pad_token_id = as_whole("pad_token_id", pad_token_id, least=-1)
        known = self._setting("pad_token_id") if pad_token_id is None else pad_token_id
        known = None if known is None or known < 0 else int(known)  # some configurations write -1 for no token
        self._pad = known if known is not None else int(self._ends[0]) if len(self._ends) else 0
        if known is None or pad_token_id is not None:
            self.kwargs["pad_token_id"] = self._pad
        self.multiple_of = multiple_of
        most = self._num_known_ids()
        own_ends = [end for end in self._ends.tolist() if 0 <= end and (most is None or end < most)]
        self._filling = Filling(self._setting, known, own_ends, is_encoder_decoder=self.is_encoder_decoder)
        self._pads = collate is None
        self._collate = collate or partial(
            pad, pad_id=self._filling.token, on_left=not self.is_encoder_decoder, multiple_of=multiple_of
        )
        # These end rows without an end-of-sequence token, and padding follows.
        self._notes_stops = generates_plainly(self.base)
        self._strips_padding = not self._notes_stops and any(self._setting(name) for name in _STOPS)

    def _setting(self, name: str) -> Any:
        """Return a setting from where generate() looks first: the arguments, the configuration given, the model's."""
        if name in self.kwargs:
            return self.kwargs[name]
        configs = (self.kwargs.get("generation_config"), getattr(self.base, "generation_config", None))
        return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)

    def _check(self, *, has_limits: bool) -> None:
        given = sorted(name for name in _PER_EXAMPLE if self.kwargs.get(name) is not None)
        if given:
            raise ArgumentError(f"{given[0]} belongs to each example: give mappings with it, or a collate=")
        if self._setting("return_dict_in_generate") or (self._setting("num_return_sequences") or 1) != 1:
            raise ArgumentError(
                "generate returns the token ids of one sequence per example, not return_dict_in_generate or "
                "num_return_sequences; call model.generate in oom_safe for those"
            )
        if not self.is_encoder_decoder and self._setting("min_length"):
            raise ArgumentError("min_length counts padding too, and so depends on the batch; use min_new_tokens")
        looks_ahead = (self._setting("num_beams") or 1) > 1 or self._setting("forced_eos_token_id") is not None
        if self._max_length is not None and looks_ahead:
            # Cutting the result of a longer search is not what a shorter search would find.
            raise ArgumentError("max_length with beams or a forced end counts padding too; use max_new_tokens")
        if has_limits and looks_ahead:
            raise ArgumentError(
                "max_new_tokens for each example goes with neither beams nor a forced end; give one number"
            )

    @property
    def why_alone(self) -> str | None:
        """Return why examples run one by one, None if they do not: assisted decoding takes no more at a time."""
        name = next((name for name in _ASSISTED if self._setting(name) not in (None, False)), None)
        if name is not None:
            return f"with {name} transformers takes no more at a time"
        stop = next((name for name in _STOPS if self._setting(name)), None)
        if stop is not None and (self._setting("num_beams") or 1) > 1:
            return f"with beams, what {stop} has ended cannot be told from padding"
        return None

    @property
    def reader(self) -> str | None:
        """Return the setting that sees padding, so that only prompts of one length may share a batch; None if none."""
        return self._filling.reader

    @property
    def _max_length(self) -> int | None:
        """Return the most tokens of prompt and result together, None if the result is limited in another way."""
        if self.is_encoder_decoder or self._setting("max_new_tokens") is not None:
            return None
        max_length: int | None = self._setting("max_length")
        return max_length

    def lengths(
        self, examples: Sequence[Any], given: Any, *, limits: Counts | None, with_output: bool
    ) -> npt.NDArray[np.int32]:
        """Return the lengths ``(N, axes)`` that the budget counts."""
        if given is None:
            given = [len(ids_in(example)) for example in examples]
        axes = as_lengths([given(example) for example in examples] if callable(given) else given)
        if len(axes) != len(examples):
            raise ArgumentError(f"lengths must have one row per example, {len(examples)}, got {len(axes)}")
        if not with_output:
            return axes
        if limits is not None:
            return as_lengths(np.hstack([axes, limits[:, None]]))
        most = self._setting("max_new_tokens") or self._setting("max_length") or _DEFAULT_NEW_TOKENS
        new = np.full((len(axes), 1), most) if self._max_length is None else np.maximum(1, most - axes[:, :1])
        return as_lengths(np.hstack([axes, new]))

    def groups(self, examples: Sequence[Any], limits: Counts | None) -> list[Group]:
        """Return the examples that may share batches; a ``collate`` of the user's own may do anything.

        Args:
            examples: all of them.
            limits: the most new tokens of each, None if all have the same.
        """
        places = np.arange(len(examples))
        if self.why_alone is not None:
            if self._pads:
                self._pad_no_further()
            return [Group(place, self.why_alone) for place in places[:, None]]
        if not self._pads:
            return [Group(places)]
        alone: list[Group] = []
        reach = same_reach(self._rotary)
        if reach is not None:
            self._pad_no_further()
            axes = self.lengths(examples, None, limits=limits, with_output=True)
            # Rows that have ended go on counting.
            is_long = axes[:, 0] + axes[:, -1].max() > reach
            obstacle = f"beyond {reach} tokens the positions of {type(self.base).__name__} change with the longest row"
            alone = [Group(place, obstacle) for place in places[is_long][:, None]]
            places = places[~is_long]
        if not len(places):
            return alone
        together = places[:0]
        if self.reader is None and self._may_pad(examples[int(places[0])]):
            is_apart = [self._filling.meets(ids_in(examples[place])) for place in places.tolist()]
            together, places = places[~np.array(is_apart)], places[is_apart]
        if len(places):
            self._pad_no_further()
        same = by_number([len(ids_in(examples[place])) for place in places.tolist()])
        groups = [together] if len(together) else []
        return [*alone, *(Group(places[chosen]) for chosen in same), *map(Group, groups)]

    def _may_pad(self, example: Any) -> bool:
        """Say whether padding leaves results as they are; a model that may not do so is tried with an example."""
        if self.is_encoder_decoder or not is_doubtful(self.model):
            return True
        return pads_freely(self.model, as_ids(ids_in(example)).to(self.device), self._pad)

    def _pad_no_further(self) -> None:
        """Pad to the longest row, not to multiples."""
        collate: Any = self._collate  # our own
        self._collate, self.multiple_of = partial(collate, multiple_of=1), 1

    def run(
        self, examples: list[Any], limits: Counts | None = None, indices: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Return the token ids of each example.

        Args:
            examples: those of one batch.
            limits: the most new tokens of each, None if all have the same.
            indices: their places among all, which ``prefix_allowed_tokens_fn`` is told.
        """
        batch = self.collated(examples)
        most = self.most_new(batch) if limits is None else limits
        kwargs = self.kwargs
        if limits is not None:
            kwargs = {**kwargs, "max_new_tokens": int(limits.max())}
        elif most is not None:
            kwargs = {**kwargs, "max_length": batch["input_ids"].shape[1] + int(most.max())}
        allowed = self._setting("prefix_allowed_tokens_fn")
        if allowed is not None and indices is not None:
            kwargs = {**kwargs, "prefix_allowed_tokens_fn": lambda row, ids: allowed(indices[row], ids)}
        stops = stops_of(self._setting) if self._notes_stops else None
        if stops is not None:
            kwargs = {**kwargs, "stopping_criteria": stops.given}
        renew(self._rotary)
        sequences = self.model.generate(**batch, **kwargs).cpu()
        if len(sequences) != len(examples):
            raise ArgumentError(f"model.generate gave {len(sequences)} rows for {len(examples)} examples")
        prompt = batch.get("decoder_input_ids" if self.is_encoder_decoder else "input_ids")
        start = int(self.is_encoder_decoder) if prompt is None else prompt.shape[1]
        if stops is not None and stops.widths is not None and len(examples) > 1:
            own = stops.widths - start
            most = own if most is None else np.minimum(most, own)
        return self.cut(sequences[:, :start], sequences[:, start:], most)

    def collated(self, examples: list[Any]) -> dict[str, Any]:
        """Return the batch on the model's device; a decoder-only model needs its padding on the left."""
        batch: dict[str, Any] = dict(self._collate(examples))
        if self._pads:
            self._check_fields(batch)
        if self._pads and batch.keys() <= _TEXT:  # an image may be an id of its own, beyond those of the table
            self._check_ids(batch["input_ids"])
        batch = map_leaves(batch, lambda tensor: tensor.to(self.device))
        mask = None if self.is_encoder_decoder or "input_ids" not in batch else batch.get("attention_mask")
        if mask is not None and not mask[:, -1].all():
            raise ArgumentError(
                "a decoder-only model continues the last column of input_ids: collate must pad on the left"
            )
        return batch

    def _check_fields(self, batch: Mapping[str, Any]) -> None:
        """Refuse settings in examples: transformers takes one for the whole batch, and of several makes anything."""
        config: Any = getattr(self.base, "generation_config", None)
        # Of the first token of the decoder transformers takes one for each row.
        settings = set(getattr(config, "__dict__", ())) - {"decoder_start_token_id"}
        name = min(settings & batch.keys(), default=None)
        if name is not None:
            raise ArgumentError(
                f"examples hold {name}, which is a setting of the whole call; call generate once for each of its "
                f"values, with {name}= as an argument"
            )

    def check_unpadded(self, examples: Sequence[Any]) -> None:
        """Refuse ids without a mask that seem to be padded; a ``collate`` of the user's own may do anything."""
        if self._pads and not any(isinstance(example, Mapping) for example in examples):
            pad = self._setting("pad_token_id")
            check_unpadded([ids_in(example) for example in examples], None if pad in self._ends.tolist() else pad)

    def _num_known_ids(self) -> int | None:
        """Return how many token ids the model knows, None if it does not say so."""
        table: Any = None
        with suppress(AttributeError, NotImplementedError):  # a model that has none
            table = self.base.get_input_embeddings()
        num: Any = getattr(table, "num_embeddings", None)
        return int(num) if is_whole(num) else None

    def _check_ids(self, ids: Tensor) -> None:
        """Refuse ids that the model does not know, which on a device would end the process's work there."""
        num = self._num_known_ids()
        if num is None or not ids.numel():
            return
        least, most = (int(one) for one in ids.aminmax())
        if not 0 <= least <= most < num:
            raise ArgumentError(f"token ids must be from 0 to {num - 1}, got {least} to {most}")

    def most_new(self, batch: Mapping[str, Any]) -> Counts | None:
        """Return how many tokens each row may get under max_length, which would otherwise count padding."""
        if self._max_length is None or "input_ids" not in batch:
            return None
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        most: Counts = self._max_length - mask.sum(dim=1).cpu().numpy()
        if most.min() < 1:
            raise ArgumentError(
                f"an example has {self._max_length - int(most.min())} tokens and max_length={self._max_length} leaves "
                "no room for new ones; use max_new_tokens"
            )
        return most

    def cut(self, read: Tensor, new: Tensor, most: Counts | None) -> list[Tensor]:
        """Return what each example gets: new tokens up to its limit, or to its first end.

        Args:
            read: what the decoder has read, which results of an encoder-decoder begin with.
            new: new tokens, ``(rows, tokens)``.
            most: the most of each row, None for all.
        """
        if new.shape[1] == 0:
            return list((read if self.is_encoder_decoder else new).unbind())
        tokens, places = new.numpy(), np.arange(new.shape[1])
        counts = np.ones_like(tokens, dtype=bool) if most is None else places < most[:, None]
        is_end = np.isin(tokens, self._ends.numpy()) & counts
        widths = np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, counts.sum(axis=1))
        if self._strips_padding:
            others = (tokens != self._pad) & counts
            last = np.where(others.any(axis=1), new.shape[1] - others[:, ::-1].argmax(axis=1), 0)
            widths = np.where(is_end.any(axis=1), widths, last)
        rows = torch.cat([read, new], dim=1) if self.is_encoder_decoder else new
        first = read.shape[1] if self.is_encoder_decoder else 0
        return [row[: first + width] for row, width in zip(rows.unbind(), widths.tolist(), strict=True)]


def _generating(model: Any, base: Any) -> Any:
    """Return the outermost module with a ``generate``: an adapter's own one does more than that of its base."""
    if not hasattr(model, "generate") or "generate" not in dir(type(model)):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if isinstance(inner, nn.Module) and "get_base_model" not in dir(type(model)):
            return _generating(inner, base)
    return model if hasattr(model, "generate") else base
