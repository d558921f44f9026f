"""What a look at batches leaves behind in the generators of a data set: nothing."""

import random
from functools import partial

import numpy as np
import pytest
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


class Compose:
    """Transforms one after the other, as packages of images have it."""

    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return value


class Noise:
    def __init__(self):
        self.random = np.random.default_rng(0)

    def add(self, value):
        return value + float(self.random.random())


def noise_of_a_closure():
    drawn = random.Random(0)
    return lambda value: value + drawn.random()


@pytest.mark.parametrize(
    "transform",
    [
        Compose(abs, Noise().add),
        Compose(Compose(Compose(Noise().add))),
        {"train": Noise().add}["train"],
        noise_of_a_closure(),
        partial(lambda noise, value: noise.add(value), Noise()),
        Compose(partial(lambda random, value: value + random(), random.Random(0).random)),
    ],
    ids=["list", "nested", "method", "closure", "partial", "method of a generator"],
)
def test_generators_in_transforms_are_put_back(transform):
    class Transformed(Dataset):
        def __init__(self):
            self.options = {"transform": transform, "columns": None}

        def __getitem__(self, index):
            return self.options["transform"](index)

    data = Transformed()
    put_back = kept_draws(Subset(data, [2, 0]))
    drawn = [data[0], data[1]]
    assert data[0] != drawn[0]
    put_back()
    assert [data[0], data[1]] == drawn


def test_examples_of_a_long_list_are_not_looked_into():
    data = [Noise() for _ in range(101)]
    put_back = kept_draws(data)
    drawn = data[0].add(0)
    put_back()
    assert data[0].add(0) != drawn
