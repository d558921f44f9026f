"""Contract checks for the samplers and policies that you write, and stand-ins for memory, time and graphs.

Our own samplers and policies pass the same checks. Importing this module does not import torch.
"""

from .fakes import EagerGraphs as EagerGraphs
from .fakes import FakeClock as FakeClock
from .fakes import FakeMemory as FakeMemory
from .policies import check_policy as check_policy
from .samplers import check_batch_sampler as check_batch_sampler

__all__ = ["EagerGraphs", "FakeClock", "FakeMemory", "check_batch_sampler", "check_policy"]
