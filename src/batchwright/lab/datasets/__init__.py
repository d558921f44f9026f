"""Real data sets by name, and a user's own files, each as one ``Dataset`` with a split that never changes."""

from .dataset import Dataset as Dataset
from .dataset import Split as Split
from .loading import load as load
from .loading import names as names

__all__ = ["Dataset", "Split", "load", "names"]
