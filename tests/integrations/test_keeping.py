"""What a look at batches leaves behind in the generators of a data set: nothing."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from batchwright.integrations._keeping import kept_draws


class Augmented(Dataset):
    """Draws from four generators of its own, and refers to itself."""

    def __init__(self):
        self.python, self.numpy, self.torch = random.Random(0), np.random.default_rng(0), torch.Generator()
        self.older, self.itself = np.random.RandomState(0), self

    def __len__(self):
        return 3

    def __getitem__(self, index):
        first, second = self.python.random(), float(self.numpy.random())
        return first, second, float(self.older.rand()), float(torch.rand((), generator=self.torch))


def test_all_generators_of_a_data_set_are_put_back_also_under_a_subset():
    data = Subset(Augmented(), [2, 0])
    put_back = kept_draws(data)
    drawn = data[0]
    assert all(one != other for one, other in zip(data[0], drawn, strict=True))
    put_back()
    assert data[0] == drawn
    put_back()
    assert data[0] == drawn


def test_what_holds_no_generator_stays_as_it_is():
    data = [1, 2]
    kept_draws(data)()
    kept_draws(None)()
    assert data == [1, 2]
