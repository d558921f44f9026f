"""The names of dynabatch: ``from dynabatch import …`` becomes ``from batchwright.integrations.dynabatch import …``.

Names load when they are first used; those for the Hugging Face Trainer need transformers. Importing this module does
not change any environment variable. The modules ``main``, ``sampler``, ``trainer`` and ``utils`` hold what dynabatch's
do; its ``regressor`` has no counterpart, because batches are planned by a formula. ``__version__`` is batchwright's.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..._optional import require
from ..._version import __version__ as __version__

require("torch", extra="torch")

if TYPE_CHECKING:
    from .callback import MemoryCleanupCallback as MemoryCleanupCallback
    from .lengths import compute_lengths as compute_lengths
    from .main import build_dynabatch_dataloader as build_dynabatch_dataloader
    from .main import dynabatch_sampler as dynabatch_sampler
    from .sampler import DynaBatchSampler as DynaBatchSampler
    from .trainer import DynabatchTrainerMixin as DynabatchTrainerMixin
    from .trainer import OOMFallbackStrategy as OOMFallbackStrategy
    from .trainer import make_dynabatch_trainer as make_dynabatch_trainer
    from .trainer import scale_lr_for_dynabatch as scale_lr_for_dynabatch
    from .utils import clear_gpu_memory as clear_gpu_memory
    from .utils import generate_with_oom_fallback as generate_with_oom_fallback
    from .utils import merge_outputs as merge_outputs
    from .utils import set_cuda_alloc_conf as set_cuda_alloc_conf
    from .utils import split_batch as split_batch
    from .utils import split_inputs_dict as split_inputs_dict

_HOMES = {
    "DynaBatchSampler": "sampler",
    "DynabatchTrainerMixin": "trainer",
    "MemoryCleanupCallback": "callback",
    "OOMFallbackStrategy": "trainer",
    "build_dynabatch_dataloader": "main",
    "clear_gpu_memory": "utils",
    "compute_lengths": "lengths",
    "dynabatch_sampler": "main",
    "generate_with_oom_fallback": "utils",
    "make_dynabatch_trainer": "trainer",
    "merge_outputs": "utils",
    "scale_lr_for_dynabatch": "trainer",
    "set_cuda_alloc_conf": "utils",
    "split_batch": "utils",
    "split_inputs_dict": "utils",
}
_MODULES = ("main", "sampler", "trainer", "utils")
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", *_MODULES]
