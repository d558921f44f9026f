"""Filler: a loss that counts filler rows in any way is found out, and trains without them."""

import pytest
import torch
from torch import nn

from .graphs.plain import filled
from .graphs.twins import Twins

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:forward and backward are replayed")


def penalised(model, batch):
    scores = model(batch["x"])
    errors = (scores - batch["y"]).square().sum(1) * batch["row_weight"]
    return errors.sum() + 0.005 * scores.square().sum(), batch["row_weight"].sum()


def test_a_small_penalty_on_filler_rows_is_found_out():
    torch.manual_seed(0)
    twins = Twins("tape", nn.Linear(6, 3), penalised, [(4, 6)] * 4)
    with pytest.warns(UserWarning, match="the loss counts them: two examples of loss"):  # noqa: PT031
        for seed in range(4):
            batch = filled(seed=seed)
            batch["y"] = batch["y"] + 3
            real = {name: value[:3] for name, value in batch.items()}
            twins.step(batch, eager_batch=real)
    twins.check(1e-5)


class BalancedInTraining(nn.Linear):
    def forward(self, x):
        scores = super().forward(x)
        return scores, (scores.square().sum() if self.training else scores.sum() * 0)


def with_auxiliary(model, batch):
    scores, auxiliary = model(batch["x"])
    errors = (scores - batch["y"]).square().sum(1) * batch["row_weight"]
    return errors.sum() + auxiliary, batch["row_weight"].sum()


def test_a_loss_that_counts_filler_only_in_training_mode_is_found_out():
    twins = Twins("tape", BalancedInTraining(6, 3), with_auxiliary, [(4, 6)] * 4)
    with pytest.warns(UserWarning, match="the loss counts them: two examples of loss"):  # noqa: PT031
        for seed in range(4):
            batch = filled(seed=seed)
            twins.step(batch, eager_batch={name: value[:3] for name, value in batch.items()})
    twins.check(1e-5)


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        scores = self.layer(x)
        return scores - scores.mean(0)


def of_rows(model, batch):
    return ((model(batch["x"]) - batch["y"]).square().sum(1) * batch["row_weight"]).sum(), batch["row_weight"].sum()


def test_a_model_that_takes_a_mean_over_all_rows_gets_no_filler():
    twins = Twins("tape", Centred(), of_rows, [(4, 6)] * 4)
    with pytest.warns(UserWarning, match="the loss counts them: two examples of loss"):  # noqa: PT031
        for seed in range(5):
            batch = filled(seed=seed)
            twins.step(batch, eager_batch={name: value[:3] for name, value in batch.items()})
    twins.check(1e-5)
