"""How many examples the next update uses, and what follows for the learning rate. NumPy only."""

from . import learning_rate as learning_rate
from . import noise as noise

__all__ = ["learning_rate", "noise"]
