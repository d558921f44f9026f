"""Step: run an update exactly, in micro-batches that fit the device. Needs torch."""

from .._optional import require

require("torch", extra="torch")

# After the check, so that its message is read.
from .calibration.finding import auto_batch as auto_batch  # noqa: E402
from .calibration.found import FoundBudget as FoundBudget  # noqa: E402
from .calibration.huggingface import calibrate_huggingface as calibrate_huggingface  # noqa: E402
from .calibration.result import Calibration as Calibration  # noqa: E402
from .calibration.result import HeldOutErrors as HeldOutErrors  # noqa: E402
from .calibration.running import calibrate as calibrate  # noqa: E402
from .calibration.shapes import default_shapes as default_shapes  # noqa: E402
from .calibration.shapes import growing_shapes as growing_shapes  # noqa: E402
from .collators import PadCollator as PadCollator  # noqa: E402
from .compiling import CompileCounter as CompileCounter  # noqa: E402
from .compiling import MarkShapes as MarkShapes  # noqa: E402
from .filler import without_filler as without_filler  # noqa: E402
from .graphs.functions import graphed as graphed  # noqa: E402
from .graphs.summary import GraphSummary as GraphSummary  # noqa: E402
from .huggingface import huggingface_loss as huggingface_loss  # noqa: E402
from .inference.encoding import Encoder as Encoder  # noqa: E402
from .inference.encoding import encode as encode  # noqa: E402
from .inference.generation import generate as generate  # noqa: E402
from .inference.generator import Generator as Generator  # noqa: E402
from .inference.pieces import merge_padded as merge_padded  # noqa: E402
from .inference.pieces import oom_safe as oom_safe  # noqa: E402
from .losses import entropy_sum as entropy_sum  # noqa: E402
from .losses import supervised_loss as supervised_loss  # noqa: E402
from .losses import whole_batch as whole_batch  # noqa: E402
from .measuring.experiment import measure_size as measure_size  # noqa: E402
from .measuring.result import SizeBranch as SizeBranch  # noqa: E402
from .measuring.result import SizeExperiment as SizeExperiment  # noqa: E402
from .memory.budget_tracker import BudgetTracker as BudgetTracker  # noqa: E402
from .memory.fit_to_memory import FitToMemory as FitToMemory  # noqa: E402
from .memory.fit_to_memory import MemoryRule as MemoryRule  # noqa: E402
from .memory.monitor import MemoryMonitor as MemoryMonitor  # noqa: E402
from .memory.sources import MemorySource as MemorySource  # noqa: E402
from .memory.sources import NvmlMemory as NvmlMemory  # noqa: E402
from .noise import NoiseReport as NoiseReport  # noqa: E402
from .oom import is_out_of_memory as is_out_of_memory  # noqa: E402
from .packing.attention import use_varlen as use_varlen  # noqa: E402
from .packing.attention import why_not_varlen as why_not_varlen  # noqa: E402
from .packing.collator import PackCollator as PackCollator  # noqa: E402
from .packing.probing import why_not_packed as why_not_packed  # noqa: E402
from .report import StepReport as StepReport  # noqa: E402
from .shape_splitting import split_by_shapes as split_by_shapes  # noqa: E402
from .splitting import split_by_budget as split_by_budget  # noqa: E402
from .stepper import Stepper as Stepper  # noqa: E402
from .whole_batches.loss import WholeBatchLoss as WholeBatchLoss  # noqa: E402

__all__ = [
    "BudgetTracker",
    "Calibration",
    "CompileCounter",
    "Encoder",
    "FitToMemory",
    "FoundBudget",
    "Generator",
    "GraphSummary",
    "HeldOutErrors",
    "MarkShapes",
    "MemoryMonitor",
    "MemoryRule",
    "MemorySource",
    "NoiseReport",
    "NvmlMemory",
    "PackCollator",
    "PadCollator",
    "SizeBranch",
    "SizeExperiment",
    "StepReport",
    "Stepper",
    "WholeBatchLoss",
    "auto_batch",
    "calibrate",
    "calibrate_huggingface",
    "default_shapes",
    "encode",
    "entropy_sum",
    "generate",
    "graphed",
    "growing_shapes",
    "huggingface_loss",
    "is_out_of_memory",
    "measure_size",
    "merge_padded",
    "oom_safe",
    "split_by_budget",
    "split_by_shapes",
    "supervised_loss",
    "use_varlen",
    "whole_batch",
    "why_not_packed",
    "why_not_varlen",
    "without_filler",
]
