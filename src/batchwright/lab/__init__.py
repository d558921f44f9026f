"""Compare batch-size strategies over several data sets and models. Needs torch, scikit-learn and SciPy.

``Lab`` runs a plan; the modules hold what it is made of. Each loads when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import callbacks as callbacks
    from . import datasets as datasets
    from . import models as models
    from . import observations as observations
    from . import presets as presets
    from . import report as report
    from . import runner as runner
    from . import statistics as statistics
    from . import strategies as strategies
    from . import update_time as update_time
    from .runner import Cell as Cell
    from .runner import Lab as Lab
    from .runner import LabPlan as LabPlan

__all__ = ["Cell", "Lab", "LabPlan"]

_MODULES = (
    *("callbacks", "datasets", "models", "observations", "presets"),
    *("report", "runner", "statistics", "strategies", "update_time"),
)


def __getattr__(name: str) -> Any:
    """Load a module, or the runner, and with it torch, when it is first asked for."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in __all__:
        return getattr(import_module(".runner", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
