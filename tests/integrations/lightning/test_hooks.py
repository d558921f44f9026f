"""The hooks of a module and of callbacks in an exact update: when they run, and what they see."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from batchwright.errors import ArgumentError
from batchwright.integrations.lightning import AdaptiveBatching
from batchwright.step import WholeBatchLoss
from batchwright.step.losses import whole_batch

from .training import DATA, INPUTS, Model, make_trainer, parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

NAMES = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


class Watched(Model):
    """Notes its own hooks, and its gradient and weight in them; one layer in double precision."""

    def __init__(self, notes, lr=0.1):
        super().__init__()
        self.net = nn.Linear(4, 1).double()
        self.notes, self.lr = notes, lr
        self.seen = []

    def loss_sums(self, batch):
        return self.net(batch["x"].double()).square().sum(), len(batch["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def note(self, name, *arguments):
        gradient = self.net.weight.grad
        self.notes.append(("module", name))
        self.seen.append((name, None if gradient is None else gradient.clone(), self.net.weight.detach().clone()))

    def on_before_backward(self, loss):
        self.note("on_before_backward")

    def on_after_backward(self):
        self.note("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        assert isinstance(optimizer, torch.optim.SGD)
        self.note("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer):
        assert isinstance(optimizer, torch.optim.SGD)
        self.note("on_before_zero_grad")


class Watching(Callback):
    """Notes the same hooks of a callback."""

    def __init__(self, notes):
        self.notes = notes

    def on_before_backward(self, trainer, pl_module, loss):
        self.notes.append(("callback", "on_before_backward"))

    def on_after_backward(self, trainer, pl_module):
        self.notes.append(("callback", "on_after_backward"))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.notes.append(("callback", "on_before_optimizer_step"))

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.notes.append(("callback", "on_before_zero_grad"))


def fit_one_batch(model, *callbacks, batching=None, **options):
    """Run one update on the first ten examples."""
    batching = batching or AdaptiveBatching(micro_batch=4)
    trainer = make_trainer(batching, *callbacks, max_steps=1, max_epochs=1, **options)
    trainer.fit(model, DataLoader(DATA[:10], batch_size=10))
    return trainer


def gradient_of_ten(weight, bias):
    """Return the gradient of the mean of ten squares, one example at a time: 2 (w·x + b) x / 10."""
    total = torch.zeros_like(weight)
    for x in INPUTS[:10].double():
        total += 2 * (weight @ x + bias) * x / 10
    return total


def test_hooks_run_in_order_callbacks_before_the_module():
    """Before, only on_before_optimizer_step ran."""
    notes = []
    fit_one_batch(Watched(notes), Watching(notes))
    order = ["on_before_backward"] * 3 + list(NAMES[1:])  # ten examples by at most four
    assert notes == [(place, name) for name in order for place in ("callback", "module")]


def test_hooks_see_the_gradient_of_the_whole_batch_and_then_the_new_weights():
    model = Watched([])
    before, bias = model.net.weight.detach().clone(), model.net.bias.detach().clone()
    fit_one_batch(model)
    expected = gradient_of_ten(before, bias)
    seen = {name: (gradient, weight) for name, gradient, weight in model.seen}
    for name in NAMES[1:]:
        torch.testing.assert_close(seen[name][0], expected, rtol=1e-12, atol=0)
    for name in NAMES[:3]:
        assert torch.equal(seen[name][1], before)
    torch.testing.assert_close(seen["on_before_zero_grad"][1], before - 0.1 * expected, rtol=1e-12, atol=0)


def test_a_gradient_that_a_hook_changes_is_the_one_applied():
    class Halved(Watched):
        def on_after_backward(self):
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)

    model = Halved([])
    before, bias = model.net.weight.detach().clone(), model.net.bias.detach().clone()
    fit_one_batch(model)
    expected = before - 0.1 * gradient_of_ten(before, bias) / 2
    torch.testing.assert_close(model.net.weight.detach(), expected, rtol=1e-12, atol=0)


def test_with_a_scaler_every_hook_runs_once_too():
    notes = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    batching = AdaptiveBatching(micro_batch=4, weight_of=lambda batch: len(batch["x"]))
    fit_one_batch(Watched(notes), batching=batching, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    assert [name for _, name in notes] == ["on_before_backward"] * 3 + list(NAMES[1:])


def test_an_error_in_a_hook_leaves_no_gradient():
    class Failing(Watched):
        def on_after_backward(self):
            raise RuntimeError("a hook failed")

    model = Failing([])
    before = parameters(model)
    with pytest.raises(RuntimeError, match="a hook failed"):
        fit_one_batch(model)
    assert torch.equal(parameters(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def with_method(name):
    return type("Own", (Model,), {name: lambda self, *arguments, **options: None})()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("optimizer_step", "use on_before_optimizer_step for what comes before the step, a scheduler for a warm-up"),
        ("backward", "use on_before_backward and on_after_backward"),
        ("configure_gradient_clipping", r"use AdaptiveBatching\(clip_norm=…\), or on_before_optimizer_step"),
    ],
)
def test_a_method_that_an_exact_update_would_leave_out_is_refused(name, instead):
    with pytest.raises(
        ArgumentError, match=f"Own.{name} belongs to automatic optimisation and would not run; {instead}"
    ):
        fit_one_batch(with_method(name))


def test_a_loss_that_needs_the_whole_batch_is_not_split():
    """Before, the mark was lost and the batch was split."""

    class Contrastive(Model):
        @whole_batch
        def loss_sums(self, batch):
            return super().loss_sums(batch)

    with pytest.raises(ArgumentError, match="compares the examples of a batch, so 3 micro-batches would change it"):
        fit_one_batch(Contrastive())
    fit_one_batch(Contrastive(), batching=AdaptiveBatching())


def test_a_whole_batch_loss_inside_loss_sums_is_not_given_pieces():
    whole = WholeBatchLoss(
        lambda model, batch: model.net(batch["x"]), lambda z: ((z - z.mean()).square().sum(), len(z))
    )

    class Contrastive(Model):
        def loss_sums(self, batch):
            return whole(self, batch)

    with pytest.raises(ArgumentError, match="one of 3 micro-batches for the whole batch"):
        fit_one_batch(Contrastive())
    fit_one_batch(Contrastive(), batching=AdaptiveBatching())


def test_sums_that_loss_sums_returns_count_once_though_it_ran_twice():
    class Scarce(Model):
        num_runs = 0

        def loss_sums(self, batch):
            self.num_runs += 1
            if len(batch["x"]) > 5:
                raise torch.OutOfMemoryError("out of memory")
            loss, weight = super().loss_sums(batch)
            return loss, weight, {"firsts": batch["x"][:, 0].sum()}

    model, batching = Scarce(), AdaptiveBatching()
    fit_one_batch(model, batching=batching)
    assert model.num_runs == 3
    assert float(batching.report.metrics["firsts"]) == pytest.approx(float(INPUTS[:10, 0].mean()))
