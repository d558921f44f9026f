"""The command line: ``batchwright plan | advise | doctor | lab | serve | demo``."""

from .app import main as main

__all__ = ["main"]
