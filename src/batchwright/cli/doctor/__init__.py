"""The command ``doctor``: measure this machine and say what that means for batches."""

from .command import add_doctor as add_doctor

__all__ = ["add_doctor"]
