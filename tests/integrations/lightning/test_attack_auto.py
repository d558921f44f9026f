"""AdaptiveBatching(controller="auto"), attacked: used for several fits, and with a base size of its own."""

import pytest
import torch
from torch.utils.data import DataLoader

from batchwright.integrations.lightning import AdaptiveBatching

from .test_auto import DATA, NUM, Guesser, _one_thread, fit, launch_bound  # noqa: F401


class Descending(Guesser):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def make_loader(batch_size):
    return DataLoader(DATA, batch_size=batch_size, shuffle=True)


def fit_twice(first, second, sizes=(4, 4)):
    """Fit two modules with the same callback and return the reports of the second fit."""
    batching = AdaptiveBatching(controller="auto")
    fit(first, make_loader(sizes[0]), batching=batching, max_epochs=1)
    return fit(second, make_loader(sizes[1]), batching=batching, max_epochs=1)[0].reports


def test_a_second_fit_begins_at_the_batch_size_of_its_own_loader():
    # docs/trainers.md: the first and smallest size is "the loader's batch_size × ranks". Expected: 8. Found: 4, of the
    # first fit, in silence: base_size stays among the options of the callback.
    reports = fit_twice(Guesser(), Guesser(), sizes=(4, 8))
    assert reports[0].batch_size == 8


def test_a_second_fit_couples_rate_and_beta2_as_its_own_optimizer_needs():
    # Expected for AdamW: the square root, and beta2's half-life. Found: linear and no beta2, those of SGD in the first
    # fit, in silence.
    reports = fit_twice(Descending(), Guesser())
    assert max(report.batch_size for report in reports) > 4
    for report in reports:
        factor = report.batch_size / 4
        assert report.lr == pytest.approx(0.01 * factor**0.5)
        assert report.beta2 == pytest.approx(0.999**factor)


def test_a_second_fit_with_sgd_is_not_refused_for_a_rule_that_nobody_gave():
    # Expected: linear, no beta2. Found: ArgumentError, "leave beta2_rule out", which was never given.
    reports = fit_twice(Guesser(), Descending())
    for report in reports:
        assert report.lr == pytest.approx(0.001 * report.batch_size / 4)


def test_with_a_base_size_schedulers_still_advance_once_per_batch_size_examples():
    # docs/trainers.md: the schedule "advances once per batch_size examples (Lightning: × ranks)"; Accelerate's does.
    # Expected: a schedule over 320 / 4 = 80 steps ends at 0. Found: at half of the rate: it counts base_size examples.
    def schedulers(optimizer, trainer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (NUM // 4))
        return [{"scheduler": scheduler, "interval": "step"}]

    batching = AdaptiveBatching(controller="auto", base_size=8)
    model, _ = fit(Guesser(schedulers), make_loader(4), batching=batching, max_epochs=1)
    assert model.rates[-1] == pytest.approx(0.0, abs=1e-12)
