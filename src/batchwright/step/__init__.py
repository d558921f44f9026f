"""What happens to a batch on its way to the device: exact updates in micro-batches that fit. Needs torch."""

from .._optional import require

require("torch", extra="torch")

# After the check, so that its message is read.
from ._checks import whole_batch as whole_batch  # noqa: E402
from .collate import PadCollator as PadCollator  # noqa: E402
from .losses import entropy_sum as entropy_sum  # noqa: E402
from .losses import supervised_loss as supervised_loss  # noqa: E402
from .oom import is_out_of_memory as is_out_of_memory  # noqa: E402
from .report import NoiseReport as NoiseReport  # noqa: E402
from .report import StepReport as StepReport  # noqa: E402
from .stepper import Stepper as Stepper  # noqa: E402

__all__ = [
    "NoiseReport",
    "PadCollator",
    "StepReport",
    "Stepper",
    "entropy_sum",
    "is_out_of_memory",
    "supervised_loss",
    "whole_batch",
]
