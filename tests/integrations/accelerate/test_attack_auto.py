"""prepare(controller="auto"), attacked: models and loaders of other kinds, and two ranks."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from batchwright.errors import ArgumentError

from ...processes import run_ranks
from .test_auto import BASE, DATA, NUM, _one_accelerator, make, run  # noqa: F401


class TimeFirst(nn.Module):
    """An encoder layer as torch makes it by default: time comes before the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lift = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layer(self.lift(x.t().unsqueeze(-1))).mean(dim=0))


class GlobalQuery(nn.Module):
    """Norms a query that all examples share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.query = nn.Parameter(torch.ones(1, 8).normal_())

    def forward(self, x):
        return self.head(self.lift(x) * self.norm(self.query))


@pytest.mark.parametrize("kind", [TimeFirst, GlobalQuery])
def test_norms_that_cannot_be_measured_leave_the_noise_to_parts_of_the_batch(kind):
    # docs/trainers.md: noise "from norm layers …, else from two parts of every 8th batch".
    # Expected: training runs, with noise_from="all". Found: the first update is refused, because of an option that the
    # user never gave: "noise_from='vectors' cannot be measured in this model".
    _, prepared = make(model=kind())
    assert len(run(prepared, stop_at=12)) == 12


class Backwards(SequentialSampler):
    """Goes through the data from its end."""

    def __iter__(self):
        return reversed(range(len(self.data_source)))


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Backwards(DATA), list(range(NUM))[::-1]),
        (SequentialSampler(range(40)), list(range(40))),
        (RandomSampler(range(40)), list(range(40))),
    ],
    ids=["a subclass with an order of its own", "the first 40 in order", "the first 40 shuffled"],
)
def test_a_sampler_of_the_user_is_followed_or_refused(sampler, expected):
    # "controller='auto' takes every example once per epoch, in order or shuffled", others are refused.
    # Expected: what the loader would give, or a refusal. Found: the sampler is dropped in silence, and training
    # runs on all 480 examples, in order.
    try:
        _, prepared = make(loader=DataLoader(DATA, batch_size=BASE, sampler=sampler))
    except ArgumentError:
        return
    seen = [number for numbers, _ in run(prepared) for number in numbers]
    assert (seen if isinstance(sampler, SequentialSampler) else sorted(seen)) == expected


@pytest.mark.parametrize("norm", ["norm", "no norm"])
def test_two_ranks_whose_clocks_disagree_choose_the_same_sizes(norm, tmp_path):
    # Held when it was written.
    run_ranks("tests.integrations.accelerate.attack_auto_ranks", 2, tmp_path, norm)
