"""What of an Accelerator can be used, and what is refused with a reason."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ArgumentError

_REFUSED = {
    "DEEPSPEED": "DeepSpeed runs its own update",
    "MEGATRON_LM": "Megatron-LM runs its own update",
    "FSDP": "its gradients are averaged before Stepper can weigh them",
    "XLA": "its gradients are reduced inside the optimizer",
}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FROM_ACCELERATOR = ("autocast", "scaler")


def check_accelerator(accelerator: Any) -> None:
    """Refuse an Accelerator whose settings would make an update something else than Stepper's."""
    kind = accelerator.distributed_type.name
    if kind in _REFUSED:
        raise ArgumentError(f"prepare cannot work with {kind}: {_REFUSED[kind]}; use DDP or a single device")
    parallel = accelerator.parallelism_config
    if parallel is not None and (parallel.tp_enabled or parallel.cp_enabled):
        raise ArgumentError(
            "prepare cannot work with tensor or context parallelism: several ranks share an example; use DDP"
        )
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise ArgumentError(
            f"the Accelerator has gradient_accumulation_steps={steps}, but Stepper accumulates: a batch of the loader "
            "is one update and runs in pieces that fit; leave it at 1 and let the sampler make larger batches"
        )
    if accelerator.mixed_precision not in ("no", *_DTYPES):
        raise ArgumentError(
            f"prepare knows mixed_precision 'no', 'bf16' and 'fp16', the Accelerator has "
            f"{accelerator.mixed_precision!r}"
        )


def check_data_settings(accelerator: Any) -> None:
    """Refuse ways of loading in which Accelerate, and not the sampler, divides the data."""
    if accelerator.split_batches or accelerator.dispatch_batches:
        name = "split_batches" if accelerator.split_batches else "dispatch_batches"
        raise ArgumentError(
            f"the Accelerator has {name}=True, but a batchwright sampler divides the data over ranks itself; leave it "
            "out, and for a batch size counted over all ranks use ResizableBatchSampler"
        )


def check_options(options: dict[str, Any]) -> None:
    """Refuse options of Stepper that the Accelerator decides."""
    given = [name for name in _FROM_ACCELERATOR if name in options]
    if given:
        raise ArgumentError(f"{given[0]} comes from Accelerator(mixed_precision=…); leave it out")


def check_model(model: nn.Module, world_size: int) -> None:
    """Refuse a prepared model whose ranks Stepper would not see."""
    if world_size > 1 and not isinstance(model, DistributedDataParallel):
        raise ArgumentError(
            f"Accelerate made a {type(model).__name__} of the model, on several ranks Stepper needs "
            "DistributedDataParallel; to compile, call torch.compile on the model before prepare"
        )


def autocast_of(accelerator: Any) -> torch.dtype | None:
    """Return the type of the forward pass, None where the Accelerator leaves precision alone."""
    handler = accelerator.autocast_handler
    if not accelerator.native_amp or (handler is not None and not handler.enabled):
        return None
    return _DTYPES[accelerator.mixed_precision]
