"""Gradient noise: from the gradients of micro-batches, or of single examples in a few vectors."""

from ._norms import GradientNorms as GradientNorms
from ._norms import Norms as Norms
from ._vector_meter import VectorMeter as VectorMeter
from .meter import GradientNoise as GradientNoise
from .meter import Meter as Meter
from .meter import NoiseMeter as NoiseMeter
from .meter import NoiseReport as NoiseReport

__all__ = ["GradientNoise", "GradientNorms", "Meter", "NoiseMeter", "NoiseReport", "Norms", "VectorMeter"]
