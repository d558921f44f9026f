"""Attention over the sequences of a flat batch, on ``torch.nn.attention.varlen``, for models of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from ..._optional import require
from ...errors import ArgumentError
from .._loss_probe import evaluating, unwrapped
from ..oom import Snapshot
from ._kernels import INSTEAD, Attend, attend_on_cuda, attend_plainly, attention, has_windows, is_mark, torch_varlen
from .collator import PackCollator
from .probing import HALF, compare, packing, training, usual_sequences, windows_of
from .probing import is_flash as is_flash

NAME = "batchwright_varlen"  # of the attention, in transformers
_MOST_HEAD_SIZE = 256
_LEAST_CAPABILITY = (8, 0)
# What transformers' configurations call the dropout of attention.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout", "attn_dropout_prob")
_FLAT = packing(PackCollator(layout="flat", causal=False))
_LAYERS = ("full_attention", "sliding_attention")


def why_not_varlen(model: Any, device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Return why a model cannot train on flat batches with ``torch.nn.attention.varlen``, None if it can.

    Nothing is run or changed. ``use_varlen`` also tries the model out, which shows what its configuration does not say.

    Args:
        model: of transformers, wrapped or not.
        device: that it trains on.
        dtype: of its forward pass: that of autocast, else that of its weights.

    >>> why_not_varlen(nn.Linear(2, 2), "cuda", torch.bfloat16)
    'Linear is no model of transformers'
    """
    device = torch.device(device)
    if torch_varlen() is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen that takes a scale; 2.11 has"
    base: Any = unwrapped(model)
    reason = _reason_of(base)
    if reason is not None:
        return reason
    if windows_of(base.config.get_text_config()) and not has_windows():
        return f"torch {torch.__version__} has no windows in varlen_attn, and the model has sliding_window"
    if device.type != "cuda":
        return f"it runs on CUDA only, not on {device.type}"
    if dtype not in HALF:
        name = str(dtype).removeprefix("torch.")
        return f"it computes in float16 or bfloat16, not in {name}; train with bf16=True or under autocast"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "it needs a GPU of compute capability 8.0 or newer"
    return None


def _reason_of(model: Any) -> str | None:
    """Return what the configuration of a model says against flat batches."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if not hasattr(model, "set_attn_implementation") or config is None:
        return f"{name} is no model of transformers"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return f"{name} has attention between two sequences, encoder and decoder"
    if not (type(model)._supports_attention_backend and type(model)._can_set_attn_implementation()):
        return f"{name} does not let its attention be replaced"
    attention = config._attn_implementation or "sdpa"
    if attention != "sdpa" and not attention.startswith(NAME) and not is_flash(model):
        return f"the model asks for attn_implementation={attention!r}; leave it at 'sdpa'"
    text = config.get_text_config()
    dropout = next((option for option in _DROPOUTS if (getattr(text, option, 0) or 0) > 0), None)
    if dropout is not None:
        return f"it has no dropout of attention, and the model has {dropout}={getattr(text, dropout)}; set it to 0"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "it has no bound for scores, and the model has attn_logit_softcapping"
    if getattr(text, "alibi", False):
        return "it adds nothing to scores, and the model has ALiBi"
    return _reason_of_layers(text)


def _reason_of_layers(text: Any) -> str | None:
    kinds = getattr(text, "layer_types", None) or []
    other = next((kind for kind in kinds if kind not in _LAYERS), None)
    if other is not None:
        return f"the model has layers of the kind {other!r}"
    size = getattr(text, "head_dim", None)
    if size is None and getattr(text, "num_attention_heads", None):
        size = text.hidden_size // text.num_attention_heads
    if size is not None and size > _MOST_HEAD_SIZE:
        return f"heads have at most {_MOST_HEAD_SIZE} numbers, and those of the model have {size}"
    return None


def use_varlen(model: Any, *, dtype: torch.dtype | None = None, attend: Attend | None = None) -> VarlenHandle:
    """Let a model of transformers train on the flat batches of ``PackCollator(layout="flat")`` without padding.

    Batches with ``cu_seq_lens_q`` run on ``torch.nn.attention.varlen``, without a mask; all others as before, on
    ``sdpa``. A model that has a flash attention of its own keeps it. Two short sequences of tokens are run through the
    model, apart and in one flat batch: a model whose outputs differ is refused, and so is everything that
    ``why_not_varlen`` names.

    Args:
        model: a decoder or an encoder with an output per token; on the device that it trains on.
        dtype: of the forward pass, if autocast makes it another one than that of the weights.
        attend: computes attention instead of torch's function, on any device and in any type.

    Returns:
        A handle whose ``remove()`` gives the model its own attention back.

    Raises:
        ArgumentError: the model cannot run on flat batches, with the reason.
    """
    found = try_varlen(model, dtype=dtype, attend=attend)
    if isinstance(found, str):
        raise ArgumentError(f"{type(unwrapped(model)).__name__} cannot train on flat batches: {found}; {INSTEAD}")
    return found


def try_varlen(model: Any, *, dtype: torch.dtype | None = None, attend: Attend | None = None) -> VarlenHandle | str:
    """Do what ``use_varlen`` does, or return why that cannot be done."""
    base: Any = unwrapped(model)
    reason = _reason_of(base)
    if reason is None and attend is None and not is_flash(base):
        weights = next((parameter for parameter in base.parameters() if parameter.is_floating_point()), torch.empty(0))
        reason = why_not_varlen(base, weights.device, weights.dtype if dtype is None else dtype)
    if reason is None:
        reason = _try_out(base)
    if reason is not None:
        return reason
    if is_flash(base) and attend is None:
        return VarlenHandle(base, str(getattr(base.config, "_attn_implementation", "")))
    return VarlenHandle(base, NAME, attend or attend_on_cuda)


def is_prepared(model: Any) -> bool:
    """Return whether ``use_varlen`` was called for a model."""
    return (getattr(getattr(unwrapped(model), "config", None), "_attn_implementation", None) or "").startswith(NAME)


@final
class VarlenHandle:
    """What ``use_varlen`` has done to a model, and how to undo it."""

    def __init__(self, model: Any, name: str, attend: Attend | None = None) -> None:
        self._model, self._before = model, model.config._attn_implementation
        self._hooks = []
        if attend is None:
            return
        if attend is not attend_on_cuda:
            name = f"{name}_{getattr(attend, '__name__', type(attend).__name__)}"
        _register(name, attend)
        model.set_attn_implementation(name)
        # An adapter calls forward of the model itself, where only hooks of the part inside run.
        for module in dict.fromkeys((model, model.base_model)):
            self._hooks.append(module.register_forward_pre_hook(_mark_flat_batch, with_kwargs=True))

    def remove(self) -> None:
        """Give the model back the attention that it had."""
        for hook in self._hooks:
            hook.remove()
        if self._hooks:
            self._model.set_attn_implementation(self._before)
        self._hooks = []


def _register(name: str, attend: Attend) -> None:
    require("transformers", extra="hf")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, partial(attention, attend))
    AttentionMaskInterface.register(name, sdpa_mask)


def _mark_flat_batch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put a mask of one entry into a flat batch, so that no mask of all pairs of tokens is made.

    It also shows whether the model hands the bounds on to its attention, which sees the mark either way.
    """
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is None or len(args) > 1:
        return None
    mask = kwargs.get("attention_mask")
    if mask is None:
        return args, {**kwargs, "attention_mask": torch.ones((1, 1, 1, 1), dtype=torch.bool, device=bounds.device)}
    if not is_mark(mask):
        raise ArgumentError(
            "a batch has cu_seq_lens_q and an attention_mask, which say different things about padding; leave the mask "
            "out of flat batches"
        )
    return None


def _try_out(model: Any) -> str | None:
    """Return why a flat batch of two short sequences gives other outputs than these apart, None if it does not."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return "its weights are not loaded yet"
    windows: list[Any] = []

    def attend(*args: Any, **options: Any) -> Tensor:
        windows.append(options["window"])
        return attend_plainly(*args, **options)

    snapshot, handle = Snapshot.of(model), VarlenHandle(model, NAME, attend)
    try:
        with torch.no_grad():
            with evaluating(model):
                reason = compare(model, _FLAT)
            windows.clear()
            with training(model):  # where a dropout of attention that the configuration hides is refused
                model(**_FLAT([usual_sequences(model)]))
        return reason or _reason_of_windows(model.config.get_text_config(), windows)
    except ArgumentError as error:
        return str(error).removesuffix(f"; {INSTEAD}")
    except Exception as error:
        return f"it could not be tried out on a flat batch: {type(error).__name__}: {error}"
    finally:
        handle.remove()
        snapshot.restore()


def _reason_of_windows(text: Any, windows: list[Any]) -> str | None:
    """Return whether layers that should see a window of tokens did not say so to their attention."""
    if not windows_of(text):
        return None
    num = sum(window is not None for window in windows)
    kinds = getattr(text, "layer_types", None)
    expected = kinds.count("sliding_attention") if kinds else max(1, num)
    return None if num == expected else f"{expected} layers see a window of tokens, but {num} ask for it"
