"""The module in which dynabatch keeps its sampler class."""

from ._sampler import DynaBatchSampler as DynaBatchSampler

__all__ = ["DynaBatchSampler"]
