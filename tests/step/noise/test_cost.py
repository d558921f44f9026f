"""What a measured update costs: calls of operators, each of which a GPU has to launch, and waits for the device."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from batchwright.step import Stepper

from .models import Transformer, class_loss, make_stepper, rows_of, token_loss, tokens_of

# They launch nothing: they make a view, or memory that is written later.
FREE = {"view", "detach", "select", "slice", "unsqueeze", "unbind", "t", "transpose", "alias", "_unsafe_view", "expand"}
FREE |= {"new_empty_strided", "empty", "empty_like", "split"}
WAITS = "_local_scalar_dense"


class Calls(TorchDispatchMode):
    """Counts the calls of operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def added(make_model, loss_fn, batch, **options):
    """Return the calls that an update from vectors makes and one without noise does not; noise is read outside."""
    counts = []
    for noise in ({"measure_noise": False, "noise_from": "all"}, {}):
        torch.manual_seed(0)
        stepper = make_stepper(make_model(), loss_fn, **noise, **options)
        for _ in range(4):
            stepper.step(batch)
        with Calls() as calls:
            report = stepper.step(batch)
        counts.append(calls.counts)
    assert report.noise.num_parts == len(batch[0])
    return counts[1] - counts[0]


def launches(counts):
    return sum(number for name, number in counts.items() if name not in FREE and name != WAITS)


def deep(num):
    return nn.Sequential(*(nn.LayerNorm(6) for _ in range(num)), nn.Linear(6, 5))


def test_an_update_adds_a_sum_per_norm_and_eleven_calls_for_all_of_them():
    found = added(Transformer, token_loss, tokens_of(8))
    assert launches(found) == 5 + 11
    assert found["sum"] == 5 + 1
    assert found["copy_"] == 0  # autograd copies a gradient that somebody holds


def test_more_norms_than_are_measured_add_nothing():
    assert launches(added(lambda: deep(40), class_loss, rows_of(8))) == launches(
        added(lambda: deep(8), class_loss, rows_of(8))
    )


def test_an_update_waits_for_the_device_no_more_often_than_one_without_noise():
    assert added(Transformer, token_loss, tokens_of(8))[WAITS] == 0


def test_several_micro_batches_add_their_sums_and_one_norm_of_the_gradient():
    one, four = (launches(added(Transformer, token_loss, tokens_of(8), micro_batch=size)) for size in (8, 2))
    assert four <= 4 * one + 8


class Deep(nn.Module):
    """Twelve blocks of a decoder, at a size at which only the number of calls counts."""

    def __init__(self):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True) for _ in range(12)]
        self.embed, self.layers, self.output = nn.Embedding(11, 12), nn.Sequential(*layers), nn.Linear(12, 11)

    def forward(self, tokens):
        return self.output(self.layers(self.embed(tokens)))


def test_noise_at_every_fourth_update_adds_less_than_three_percent_to_the_first_64():
    batch = torch.randint(0, 11, (8, 5)), torch.randint(0, 11, (8, 5))
    loss_fn = lambda model, batch: (  # noqa: E731
        nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), reduction="sum"),
        8,
    )
    totals = []
    for noise in ({}, {"measure_noise": 4, "noise_from": "vectors"}):
        torch.manual_seed(0)
        model = Deep()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        stepper = Stepper(model, optimizer, loss_fn, **noise)
        with Calls() as calls:
            parts = [stepper.step(batch).num_micro_batches for _ in range(64)]
        totals.append(launches(calls.counts))
    assert parts[:5] == [2, 1, 1, 1, 1]
    assert sum(parts) == 65  # the whole gradient once: the second time comes with the 125th update
    assert 1 < totals[1] / totals[0] < 1.03
