"""Graphed steps: forward, backward and update captured once per planned shape, and replayed."""

from .backend import CudaGraphs as CudaGraphs
from .backend import GraphBackend as GraphBackend
from .graphed import Graphs as Graphs
from .loops import LoopGraphs as LoopGraphs
from .summary import GraphSummary as GraphSummary

__all__ = ["CudaGraphs", "GraphBackend", "GraphSummary", "Graphs", "LoopGraphs"]
