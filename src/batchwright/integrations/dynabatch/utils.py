"""Generation that continues in smaller pieces if memory runs out, and the helpers that cut, join and round batches.

The names are those of ``dynabatch.utils``. ``MemoryCleanupCallback`` loads on first use: it needs transformers.
"""

from __future__ import annotations

import importlib
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..._checks import as_whole
from ..._tree import leaves, map_leaves
from ...errors import ArgumentError, DoesNotFitError
from ...plan.grouping.base import SizeRounding
from ...step.huggingface import unwrapped
from ...step.inference.pieces import run_in_pieces
from ...step.oom import free_memory
from .._devices import accelerators
from .._inputs import num_rows, take_rows
from ._signatures import arguments_of

if TYPE_CHECKING:
    from .callback import MemoryCleanupCallback as MemoryCleanupCallback

_ALWAYS = ("input_ids", "attention_mask")
# A collator for training makes the decoder's input from the labels: as a prompt it would give the answer away.
_TRAINING = ("labels", "decoder_input_ids", "decoder_attention_mask")


def generate_with_oom_fallback(
    model: Any,
    batch: Mapping[str, Any],
    min_batch_size: int,
    device: torch.device | str,
    pad_token_id: int | None = None,
    **generate_kwargs: Any,
) -> tuple[Any, bool]:
    """Run ``model.generate`` on a batch; if memory runs out, run it in pieces, halved until they fit.

    Every tensor that the model takes is passed on, except labels and the decoder inputs made from them. The random
    state is restored after a failed attempt. Any other error is raised unchanged. In pieces, tensors among the
    arguments of ``generate`` are cut with the rows, and ``prefix_allowed_tokens_fn`` is called with the row of the
    whole batch; other functions and processors see the rows of their piece.

    Args:
        model: has ``generate``, as models of transformers do.
        batch: tensors by name, ``input_ids`` among them; other values are not passed on.
        min_batch_size: the largest number of examples in a piece after the whole batch has failed.
        device: where the tensors are moved to, and where the result is.
        pad_token_id: fills up shorter results of pieces, and is passed to ``generate`` if that takes it. None takes the
            model's own, or else its end-of-sequence token.
        **generate_kwargs: arguments of ``model.generate``.

    Returns:
        ``(output, did_fallback)``. With ``return_dict_in_generate`` the output of pieces holds only the sequences and
        their scores: pieces differ in their number of steps, so figures of single steps are left out.

    Raises:
        DoesNotFitError: a single example runs out of memory.
        ArgumentError: memory runs out, and an argument of ``generate`` cannot be cut into rows.
    """
    size = as_whole("min_batch_size", min_batch_size, least=1)
    inputs = _model_inputs(model, batch)
    _warn_about_padding(model, inputs)
    if pad_token_id is not None and arguments_of(model.generate).take("pad_token_id"):
        generate_kwargs = {"pad_token_id": pad_token_id, **generate_kwargs}
    num = num_rows(inputs, "input_ids")

    def run(rows: range) -> Any:
        part, options = inputs, generate_kwargs
        if len(rows) < num:
            part, options = take_rows(inputs, rows, num), _options_of(rows, num, model, generate_kwargs)
        return model.generate(**map_leaves(dict(part), lambda tensor: tensor.to(device)), **options)

    with suppress(DoesNotFitError):
        pieces = run_in_pieces(run, lambda start, stop: range(num), 1, describe=lambda _: "the batch")
        return _plain(pieces.results[0]), False
    outputs = [output for first in range(0, num, size) for output in _run_part(run, range(num)[first : first + size])]
    fill = _pad_token(model, pad_token_id, generate_kwargs)
    return _merged([_plain(output) for output in outputs], fill, device), True


def _run_part(run: Callable[[range], Any], rows: range) -> list[Any]:
    pieces = run_in_pieces(
        lambda part: map_leaves(run(part), lambda tensor: tensor.cpu()),
        lambda start, stop: rows[start:stop],
        len(rows),
        describe=lambda place: f"example {rows[place]} of the batch",
    )
    return pieces.results


def _options_of(rows: range, num: int, model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``generate`` for some of the rows of a batch, or say which of them has no rows."""
    taken = dict(options)
    for name, value in options.items():
        if name == "past_key_values" and value is not None:
            raise ArgumentError(
                "the batch ran out of memory, and cannot run in pieces with past_key_values, whose rows cannot be "
                "told apart; leave them out, or use smaller batches"
            )
        if name == "prefix_allowed_tokens_fn" and value is not None:
            taken[name] = _of_later_rows(value, rows.start * _rows_per_example(model, options))
        elif _holds_rows(name, value):
            try:
                taken[name] = take_rows({name: value}, rows, num)[name]
            except ArgumentError as error:
                raise ArgumentError(f"the batch ran out of memory, and cannot run in pieces: {error}") from error
    return taken


def _holds_rows(name: str, value: Any) -> bool:
    """Say whether an argument of ``generate`` holds tensors, other than lists of tokens that all rows share."""
    is_list_of_tokens = name.endswith(("token_id", "token_ids", "tokens"))
    return not is_list_of_tokens and (isinstance(value, np.ndarray) or any(True for _ in leaves(value)))


def _of_later_rows(allowed: Callable[[int, Tensor], Any], first: int) -> Callable[[int, Tensor], Any]:
    return lambda row, ids: allowed(first + row, ids)


def _rows_per_example(model: Any, options: Mapping[str, Any]) -> int:
    """Return how many rows ``generate`` counts for an example: beams are one row, sampled sequences several."""
    beams, sequences = (_option(model, options, name) or 1 for name in ("num_beams", "num_return_sequences"))
    return max(beams, sequences) // beams


def split_batch(batch: Mapping[str, Any], chunk_size: int) -> list[dict[str, Any]]:
    """Split a batch into pieces of at most ``chunk_size`` examples: ``split_inputs_dict`` by ``input_ids``.

    >>> [piece["input_ids"].tolist() for piece in split_batch({"input_ids": torch.arange(5)}, 2)]
    [[0, 1], [2, 3], [4]]
    """
    return split_inputs_dict(batch, chunk_size)


def split_inputs_dict(
    batch: Mapping[str, Any], chunk_size: int, batch_size_key: str = "input_ids"
) -> list[dict[str, Any]]:
    """Split the inputs of a model into pieces of at most ``chunk_size`` examples.

    - Tensors and arrays are cut along their first axis, ``position_ids`` of several kinds along their second.
    - Lists, tuples, Series and frames of pandas, and other sequences with one entry per example are cut too.
    - Single values, such as numbers, texts and tensors without an axis, go whole into every piece, and so does a list
      of single values of another length.
    - Everything else is refused: tensors and arrays without a row per example, sets, lists of tensors that could be
      examples as well as fields.

    Args:
        batch: the inputs of a model, by name.
        chunk_size: the largest number of examples in a piece.
        batch_size_key: the name of the value whose length is the number of examples.

    >>> pieces = split_inputs_dict({"input_ids": torch.zeros(3, 2), "scale": torch.tensor(2.0)}, 2)
    >>> [(len(piece["input_ids"]), float(piece["scale"])) for piece in pieces]
    [(2, 2.0), (1, 2.0)]
    """
    size = as_whole("chunk_size", chunk_size, least=1)
    num = num_rows(batch, batch_size_key)
    return [take_rows(batch, list(range(start, min(start + size, num))), num) for start in range(0, num, size)]


def get_hardware_friendly_batch_size(target_size: int) -> int:
    """Return the largest 2^n or 3·2^n up to a size.

    >>> [get_hardware_friendly_batch_size(size) for size in (1, 5, 7, 100)]
    [1, 4, 6, 96]
    """
    return SizeRounding(ladder="pow2x3").round_one(as_whole("target_size", target_size, least=1))


def get_even_batch_size(target_size: int) -> int:
    """Return the largest even number up to a size, and 1 for 1.

    >>> [get_even_batch_size(size) for size in (1, 2, 7)]
    [1, 2, 6]
    """
    return SizeRounding(multiple_of=2).round_one(as_whole("target_size", target_size, least=1))


def merge_outputs(outputs: list[Tensor], pad_token_id: int) -> Tensor | None:
    """Join the token ids of several pieces, shorter ones padded on the right; None for no pieces.

    >>> merge_outputs([torch.tensor([[1, 2]]), torch.tensor([[3]])], pad_token_id=0).tolist()
    [[1, 2], [3, 0]]
    """
    if not outputs:
        return None
    width = max(output.shape[1] for output in outputs)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=pad_token_id) for part in outputs]
    return torch.cat(padded)


def clear_gpu_memory(oom_error: BaseException, **tensors: Any) -> None:
    """Free the memory of a failed attempt: the frames of its traceback, and the allocator's unused blocks.

    Args:
        oom_error: the error that was caught.
        **tensors: objects of the caller, who must delete its own names for them too.
    """
    pending: list[BaseException | None] = [oom_error]
    seen: set[int] = set()  # an error may be its own cause, and have the same cause and context
    while pending:
        error = pending.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            traceback.clear_frames(error.__traceback__)
            pending += [error.__cause__, error.__context__]
    tensors.clear()
    free_memory(accelerators())


def set_cuda_alloc_conf() -> None:
    """Let the CUDA allocator grow its segments, against fragmentation; an existing setting is kept.

    It sets ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`` in the environment of this process, and must be called
    before CUDA is first used. Importing this package sets nothing.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def __getattr__(name: str) -> Any:
    if name == "MemoryCleanupCallback":
        return importlib.import_module(".callback", __package__).MemoryCleanupCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _model_inputs(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a batch that the model takes."""
    if not isinstance(batch.get("input_ids"), Tensor):
        raise ArgumentError(
            f"the batch needs a tensor 'input_ids', got {sorted(batch)}; tokenize with return_tensors='pt'"
        )
    known = _parameters(model)
    left_out = _TRAINING if "labels" in batch else ()
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and name not in left_out}
    return {name: value for name, value in tensors.items() if known is None or name in _ALWAYS or name in known}


def _parameters(model: Any) -> set[str] | None:
    """Return the names that ``generate`` takes, or the ``forward`` of a model and of its encoder; None if any."""
    arguments = arguments_of(model.generate)
    if not arguments.takes_others:
        return set(arguments.names)
    if not isinstance(model, torch.nn.Module):
        return None
    base: Any = unwrapped(model)
    encoder = base.get_encoder() if callable(getattr(base, "get_encoder", None)) else None
    modules = [module for module in (base, encoder) if isinstance(module, torch.nn.Module)]
    return {name for module in modules for name in inspect.signature(module.forward).parameters}


def _setting(model: Any, name: str) -> Any:
    base: Any = unwrapped(model) if isinstance(model, torch.nn.Module) else model
    configs = (getattr(base, "generation_config", None), getattr(base, "config", None))
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def _option(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """Return an argument of ``generate``: given by name, in a configuration, or as the model has it."""
    choices = (options.get(name), getattr(options.get("generation_config"), name, None), _setting(model, name))
    return next((choice for choice in choices if choice is not None), None)


def _warn_about_padding(model: Any, inputs: Mapping[str, Any]) -> None:
    mask = inputs.get("attention_mask")
    if _setting(model, "is_encoder_decoder") or mask is None or mask.ndim != 2 or bool(mask[:, -1].all()):
        return
    if hasattr(model, "config"):  # nothing is known of other objects
        warnings.warn(
            "a decoder-only model continues the last column of input_ids, which is padding in some rows; "
            "tokenize with padding_side='left'",
            stacklevel=3,
        )


def _pad_token(model: Any, pad_token_id: int | None, generate_kwargs: Mapping[str, Any]) -> int:
    """Return what fills up rows: the padding token, else the end of a sequence, else 0, which then no row needs."""
    ends = _option(model, generate_kwargs, "eos_token_id")
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    choices = (pad_token_id, _option(model, generate_kwargs, "pad_token_id"), end, 0)
    return next(int(choice) for choice in choices if choice is not None)


def _plain(output: Any) -> Any:
    """Return tensors that can be trained on and changed in place, unless the caller is in inference mode too."""
    if torch.is_inference_mode_enabled():
        return output
    return map_leaves(output, lambda tensor: tensor.clone() if tensor.is_inference() else tensor)


def _merged(outputs: list[Any], fill: int, device: torch.device | str) -> Any:
    if isinstance(outputs[0], Tensor):
        merged = merge_outputs(outputs, fill)
        assert merged is not None
        return merged.to(device)
    values = {"sequences": _merged([output["sequences"] for output in outputs], fill, device)}
    if all(output.get("sequences_scores") is not None for output in outputs):
        values["sequences_scores"] = torch.cat([output["sequences_scores"] for output in outputs]).to(device)
    return type(outputs[0])(**values)
