"""A device whose memory is counted."""

import torch

from tests.step.graphs.tape import TapeGraphs


class Ledger:
    """A device whose memory is counted: caches as they are made, prompts and steps while they run."""

    def __init__(self, total_bytes):
        self.total_bytes, self.used_bytes, self.peak_bytes, self.num_ooms = total_bytes, 0, 0, 0

    def reset_peak(self):
        self.peak_bytes = self.used_bytes

    def take(self, num_bytes):
        if self.used_bytes + num_bytes > self.total_bytes:
            self.num_ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def give(self, num_bytes):
        self.used_bytes -= num_bytes


class CountedGraphs(TapeGraphs):
    def __init__(self, ledger):
        super().__init__()
        self._ledger = ledger

    def measure(self, function):
        before, self._ledger.peak_bytes = self._ledger.used_bytes, self._ledger.used_bytes
        function()
        return self._ledger.peak_bytes - before
