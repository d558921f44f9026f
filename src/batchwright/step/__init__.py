"""What happens to a batch on its way to the device. Needs torch."""

from .._optional import require

require("torch", extra="torch")

from .collate import PadCollator as PadCollator  # noqa: E402 - after the check, so that its message is read

__all__ = ["PadCollator"]
