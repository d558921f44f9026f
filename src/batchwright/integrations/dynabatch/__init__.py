"""The names of dynabatch: ``from dynabatch import …`` becomes ``from batchwright.integrations.dynabatch import …``.

Names load when they are first used; those for the Hugging Face Trainer need transformers. Importing this module changes
no environment variable.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..._optional import require

require("torch", extra="torch")

if TYPE_CHECKING:
    from ._callback import MemoryCleanupCallback as MemoryCleanupCallback
    from ._inference import clear_gpu_memory as clear_gpu_memory
    from ._inference import generate_with_oom_fallback as generate_with_oom_fallback
    from ._inference import set_cuda_alloc_conf as set_cuda_alloc_conf
    from ._inputs import merge_outputs as merge_outputs
    from ._inputs import split_batch as split_batch
    from ._inputs import split_inputs_dict as split_inputs_dict
    from ._learning_rate import scale_lr_for_dynabatch as scale_lr_for_dynabatch
    from ._lengths import compute_lengths as compute_lengths
    from ._loader import build_dynabatch_dataloader as build_dynabatch_dataloader
    from ._loader import dynabatch_sampler as dynabatch_sampler
    from ._sampler import DynaBatchSampler as DynaBatchSampler
    from ._trainer import DynabatchTrainerMixin as DynabatchTrainerMixin
    from ._trainer import OOMFallbackStrategy as OOMFallbackStrategy
    from ._trainer import make_dynabatch_trainer as make_dynabatch_trainer

_HOMES = {
    "DynaBatchSampler": "_sampler",
    "DynabatchTrainerMixin": "_trainer",
    "MemoryCleanupCallback": "_callback",
    "OOMFallbackStrategy": "_trainer",
    "build_dynabatch_dataloader": "_loader",
    "clear_gpu_memory": "_inference",
    "compute_lengths": "_lengths",
    "dynabatch_sampler": "_loader",
    "generate_with_oom_fallback": "_inference",
    "make_dynabatch_trainer": "_trainer",
    "merge_outputs": "_inputs",
    "scale_lr_for_dynabatch": "_learning_rate",
    "set_cuda_alloc_conf": "_inference",
    "split_batch": "_inputs",
    "split_inputs_dict": "_inputs",
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
