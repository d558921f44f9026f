"""Filler: a loss that counts filler rows in any way is found out, and trains without them."""

import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import Stepper, without_filler

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


def test_rows_that_are_no_filler_are_found_wherever_they_stand():
    batch = {"x": torch.tensor([1, 2, 3, 4]), "row_weight": torch.tensor([0.0, 1.0, 0.0, 1.0])}
    assert without_filler(batch)["x"].tolist() == [2, 4]
    full = {"x": torch.tensor([1]), "row_weight": torch.tensor([1.0])}
    assert without_filler(full) is full
    plain = {"x": torch.tensor([1])}
    assert without_filler(plain) is plain


def test_a_piece_that_is_all_filler_is_refused():
    # A filled batch that is cut into pieces may leave one of filler alone.
    with pytest.raises(
        ArgumentError, match=r"all 3 rows of the batch are filler, .*; leave it out, or take the filler"
    ):
        without_filler({"x": torch.arange(3), "row_weight": torch.zeros(3)})


@pytest.mark.parametrize(
    ("weights", "found"), [([1.0, 0.0], "list"), (1.0, "float"), (torch.ones(2, 1), "2 axes")], ids=str
)
def test_weights_that_are_no_tensor_of_rows_are_refused(weights, found):
    words = rf"batch\['row_weight'\] must be a tensor with one weight per row, got {found}"
    with pytest.raises(ArgumentError, match=words):
        without_filler({"x": torch.arange(2), "row_weight": weights})


def test_a_piece_of_nothing_but_filler_is_left_out_of_an_update():
    """Cut into pieces of two, one row and three of filler leave a piece without an example."""
    torch.manual_seed(0)
    model, twin = nn.Linear(2, 1), nn.Linear(2, 1)
    twin.load_state_dict(model.state_dict())

    def rows(model, batch):
        return (model(batch["x"]) - 1).square().sum(), len(batch["x"])

    real = torch.randn(1, 2)
    batch = {"x": real.expand(4, 2).contiguous(), "row_weight": torch.tensor([1.0, 0.0, 0.0, 0.0])}
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), rows, micro_batch=2)
    with pytest.warns(UserWarning, match="filler rows are cut off"):
        report = stepper.step(batch)
    Stepper(twin, torch.optim.SGD(twin.parameters(), lr=0.1), rows).step({"x": real})
    assert report.batch_size == 1
    assert report.weight == 1
    assert torch.allclose(model.weight, twin.weight, rtol=1e-6)


def test_pieces_of_filler_do_not_count_in_gradient_noise():
    torch.manual_seed(0)
    x = torch.randn(6, 2)
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    measured = []
    for batch in ({"x": x, "row_weight": weights}, {"x": x[:4], "row_weight": weights[:4]}):
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.fill_(0.0)

        def loss(model, batch):
            rows = (model(batch["x"]) - 1).square().sum(1) * batch["row_weight"]
            return rows.sum(), batch["row_weight"].sum()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # One row per micro-batch: those of filler are left out, so both updates measure the same four gradients.
        stepper = Stepper(model, optimizer, loss, micro_batch=1, measure_noise=True)
        measured.append(stepper.step(batch).noise)
    assert measured[0].num_parts == measured[1].num_parts == 4
    assert measured[0].s == pytest.approx(measured[1].s, rel=1e-5)
    assert measured[0].g2 == pytest.approx(measured[1].g2, rel=1e-5)
