"""Compare batch-size strategies over several data sets and models. Needs torch, scikit-learn and SciPy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runner import Cell as Cell
    from .runner import Lab as Lab
    from .runner import LabPlan as LabPlan

__all__ = ["Cell", "Lab", "LabPlan"]


def __getattr__(name: str) -> Any:
    """Load the runner, and with it torch, when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import runner

    return getattr(runner, name)
