"""Hugging Face: a ``Trainer`` on planned or resizable batches, with exact updates.

::

    AdaptiveTrainer = adaptive(Trainer)
    trainer = AdaptiveTrainer(model=model, args=args, train_dataset=data, budget=bw.MaxTokens(8192))
"""

from ..._optional import require

require("torch", extra="hf")
require("transformers", extra="hf")
require("accelerate", extra="hf")  # without it transformers has no Trainer

# After the check, so that its message is the one to be read.
from .callbacks import BatchSizeCallback as BatchSizeCallback  # noqa: E402
from .trainer import AdaptiveTrainerMixin as AdaptiveTrainerMixin  # noqa: E402
from .trainer import adaptive as adaptive  # noqa: E402

__all__ = ["AdaptiveTrainerMixin", "BatchSizeCallback", "adaptive"]
