"""Training loops in small: a controller that follows a list, the loop that tells it its steps, loaders and wrappers."""

from itertools import islice

import pytest

# With prefetch_factor=8 two workers are sent 16 batches at once: more than a short epoch has.
KINDS = {
    "no workers": {"num_workers": 0},
    "two workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "all prefetched": {"num_workers": 2, "prefetch_factor": 8},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


class Sizes:
    """A controller that follows a list: `sizes[i]` for batch number i of the run, as the loop counts them."""

    def __init__(self, *sizes, step=0):
        self.sizes = sizes
        self.step = step

    @property
    def size(self):
        return self.sizes[self.step % len(self.sizes)]


def run(batches, num=None):
    """The batches of an epoch, telling the controller after each that a step is done, as a training loop does."""
    found = []
    for batch in islice(batches, num):
        found.append(batch)
        batches.controller.step += 1
    return found


def first_four(loader):
    yield from islice(loader, 4)


def halves(loader):
    for batch in loader:
        yield batch[::2]
        yield batch[1::2]
