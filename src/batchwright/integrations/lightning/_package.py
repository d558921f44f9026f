"""The classes of Lightning to derive from, under whichever of its two package names is installed.

Where both are, Trainers of ``pytorch_lightning`` accept everything here except ``PlannedDataModule``.
"""

from typing import TYPE_CHECKING

from ..._optional import is_installed, require

require("torch", extra="lightning")
if TYPE_CHECKING or is_installed("lightning") or not is_installed("pytorch_lightning"):
    require("lightning", extra="lightning")
    from lightning.pytorch import Callback, LightningDataModule
else:
    from pytorch_lightning import Callback, LightningDataModule

__all__ = ["Callback", "LightningDataModule"]
