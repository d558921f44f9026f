"""Gradient noise: from the gradients of micro-batches, or of single examples in a few vectors."""

from .meter import GradientNorms as GradientNorms
from .meter import Meter as Meter
from .meter import NoiseMeter as NoiseMeter
from .meter import Norms as Norms
from .parts import GradientNoise as GradientNoise
from .report import NoiseReport as NoiseReport
from .vector_meter import VectorMeter as VectorMeter
from .vector_meter import refuses_vectors as refuses_vectors

__all__ = [
    "GradientNoise",
    "GradientNorms",
    "Meter",
    "NoiseMeter",
    "NoiseReport",
    "Norms",
    "VectorMeter",
    "refuses_vectors",
]
