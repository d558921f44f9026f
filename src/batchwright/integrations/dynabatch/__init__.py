"""The names of dynabatch: ``from dynabatch import …`` becomes ``from batchwright.integrations.dynabatch import …``.

Names load when they are first used; those for the Hugging Face Trainer need transformers. Importing this module does
not change any environment variable.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..._optional import require

require("torch", extra="torch")

if TYPE_CHECKING:
    from .callback import MemoryCleanupCallback as MemoryCleanupCallback
    from .inference import clear_gpu_memory as clear_gpu_memory
    from .inference import generate_with_oom_fallback as generate_with_oom_fallback
    from .inference import merge_outputs as merge_outputs
    from .inference import set_cuda_alloc_conf as set_cuda_alloc_conf
    from .inference import split_batch as split_batch
    from .inference import split_inputs_dict as split_inputs_dict
    from .lengths import compute_lengths as compute_lengths
    from .loader import build_dynabatch_dataloader as build_dynabatch_dataloader
    from .loader import dynabatch_sampler as dynabatch_sampler
    from .sampler import DynaBatchSampler as DynaBatchSampler
    from .trainer import DynabatchTrainerMixin as DynabatchTrainerMixin
    from .trainer import OOMFallbackStrategy as OOMFallbackStrategy
    from .trainer import make_dynabatch_trainer as make_dynabatch_trainer
    from .trainer import scale_lr_for_dynabatch as scale_lr_for_dynabatch

_HOMES = {
    "DynaBatchSampler": "sampler",
    "DynabatchTrainerMixin": "trainer",
    "MemoryCleanupCallback": "callback",
    "OOMFallbackStrategy": "trainer",
    "build_dynabatch_dataloader": "loader",
    "clear_gpu_memory": "inference",
    "compute_lengths": "lengths",
    "dynabatch_sampler": "loader",
    "generate_with_oom_fallback": "inference",
    "make_dynabatch_trainer": "trainer",
    "merge_outputs": "inference",
    "scale_lr_for_dynabatch": "trainer",
    "set_cuda_alloc_conf": "inference",
    "split_batch": "inference",
    "split_inputs_dict": "inference",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "sampler"]
