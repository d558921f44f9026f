"""A loss_fn that returns a mean is refused, however the mean is written, and no sum is."""

import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from batchwright.errors import ArgumentError
from batchwright.step import Stepper, WholeBatchLoss, whole_batch

NUM, WIDTH, CLASSES = 8, 5, 4


class Model(nn.Module):
    """Gives scores of classes from 5 features, and notes its calls."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.hidden, self.num_calls = None, 0

    def forward(self, x):
        self.calls += 1
        self.num_calls += 1
        self.hidden = self.first(x)
        return self.second(torch.tanh(self.hidden))


class Fickle(Model):
    """Has parts that depend on the mode and on chance."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(6), nn.Dropout(0.5)


class HandMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses):
        ctx.num = len(losses)
        return losses.mean()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.num) / ctx.num


class HandSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, losses):
        ctx.num = len(losses)
        return losses.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(ctx.num)


def make_batch(num=NUM):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, WIDTH, generator=generator).double()
    return x, torch.randint(CLASSES, (num,), generator=generator)


def targets(y):
    return F.one_hot(y, CLASSES).double() * 0.7 + 0.3 / CLASSES


def steps(loss):
    """Return a loss function and its ``loss(scores, labels)``, whose weight is the number of labels."""
    return lambda model, batch: (loss(model(batch[0]), batch[1]), len(batch[1]))


def each(scores, labels):
    return F.cross_entropy(scores, labels, reduction="none")


def squares(scores, labels):
    return (scores - targets(labels)).square()


MEANS = {
    "of torch": lambda s, y: F.cross_entropy(s, y),
    "of a module": lambda s, y: nn.NLLLoss()(s.log_softmax(1), y),
    "of squares": lambda s, y: F.mse_loss(s, targets(y)),
    "of smooth differences": lambda s, y: F.smooth_l1_loss(s, targets(y)),
    "of binary losses": lambda s, y: F.binary_cross_entropy_with_logits(s, targets(y)),
    "of divergences, over all numbers": lambda s, y: F.kl_div(s.log_softmax(1), targets(y), reduction="mean"),
    "of divergences, over the batch": lambda s, y: F.kl_div(s.log_softmax(1), targets(y), reduction="batchmean"),
    "with smoothed labels": lambda s, y: F.cross_entropy(s, y, label_smoothing=0.1),
    "of probabilities": lambda s, y: F.cross_entropy(s, targets(y)),
    "with weights of classes": lambda s, y: F.cross_entropy(s, y, weight=torch.arange(1.0, 5).double()),
    "by mean": lambda s, y: each(s, y).mean(),
    "by mean over an axis": lambda s, y: each(s, y).mean(0),
    "by mean over both axes": lambda s, y: squares(s, y).mean((0, 1)),
    "of every class, summed": lambda s, y: squares(s, y).mean(0).sum(),
    "of every class, with a negative axis": lambda s, y: squares(s, y).mean(-2).sum(),
    "times one": lambda s, y: each(s, y).mean() * 1.0,
    "times a coefficient": lambda s, y: 0.5 * F.cross_entropy(s, y),
    "negative": lambda s, y: -s.log_softmax(1).gather(1, y[:, None]).mean(),
    "in another type": lambda s, y: F.cross_entropy(s, y).float(),
    "a sum over the number": lambda s, y: each(s, y).sum() / len(y),
    "a sum over a tensor of the number": lambda s, y: each(s, y).sum() / torch.tensor(len(y)),
    "a sum times one over the number": lambda s, y: each(s, y).sum() * (1 / len(y)),
    "by Einstein's sum": lambda s, y: torch.einsum("b->", each(s, y)) / len(y),
    "a function of one's own over the number": lambda s, y: HandSum.apply(each(s, y)) / len(y),
    "of a stack": lambda s, y: torch.mean(torch.stack(list(each(s, y)))),
    "of sums over classes": lambda s, y: squares(s, y).sum(1).mean(),
    "of sums over classes in a list": lambda s, y: torch.stack([row.sum() for row in squares(s, y)]).mean(),
    "of two tasks": lambda s, y: F.cross_entropy(s, y) + 0.5 * F.mse_loss(s, targets(y)),
    "and a penalty": lambda s, y: F.cross_entropy(s, y) + 0.1 * s.square().sum() / s.shape[0],
    "of a function of one's own": lambda s, y: HandMean.apply(each(s, y)),
    "without NaN": lambda s, y: each(s, y).nanmean(),
}


def refused(loss_fn, batch, **options):
    torch.manual_seed(0)
    model = Model().double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)
    with pytest.raises(ArgumentError, match=r"loss_sum is a mean, .* reduction='sum'"):
        stepper.step(batch)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_a_mean_is_refused_however_it_is_written(loss):
    refused(steps(loss), make_batch())


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("loss", [MEANS[name] for name in MEANS if name != "with weights of classes"])
def test_a_mean_times_what_it_is_over_is_a_sum(loss):
    check_sum(steps(lambda s, y: loss(s, y) * len(y)))


SUMS = {
    "of torch": lambda s, y: F.cross_entropy(s, y, reduction="sum"),
    "with smoothed labels": lambda s, y: F.cross_entropy(s, y, reduction="sum", label_smoothing=0.1),
    "of means over classes": lambda s, y: squares(s, y).mean(1).sum(),
    "of means over the last axis": lambda s, y: squares(s, y).mean(-1).sum(),
    "averaged over classes": lambda s, y: squares(s, y).sum(0).mean(),
    "averaged over classes by Einstein": lambda s, y: torch.einsum("bc->c", squares(s, y)).mean(),
    "averaged over classes by a product": lambda s, y: (torch.ones(len(y)).double() @ squares(s, y)).mean(),
    "of two tasks, averaged": lambda s, y: torch.stack([each(s, y).sum(), squares(s, y).sum()]).mean(),
    "over a number": lambda s, y: squares(s, y).sum() / CLASSES,
    "times a number": lambda s, y: squares(s, y).sum() * 0.25,
    "over a number of one": lambda s, y: squares(s, y).sum() / 1,
    "of single means": lambda s, y: sum(F.cross_entropy(s[i : i + 1], y[i : i + 1]) for i in range(len(y))),
    "of means of single rows": lambda s, y: sum(row.mean() for row in squares(s, y)),
    "of a function of one's own": lambda s, y: HandSum.apply(each(s, y)),
    "of a mean of one's own, times the number": lambda s, y: HandMean.apply(each(s, y)) * len(y),
    "of a mean of one number": lambda s, y: each(s, y).sum().mean(),
    "of expanded numbers": lambda s, y: each(s, y).sum().expand(3).mean(),
    "with weights": lambda s, y: (each(s, y) * torch.linspace(1, 2, 4).double()[y]).sum(),
    "times a tensor of the number": lambda s, y: each(s, y).mean() * torch.tensor(len(y)),
    "over one over the number": lambda s, y: each(s, y).mean() / (1 / len(y)),
    "of both signs": lambda s, y: (each(s, y) * (y - 1.5)).sum(),
    "checkpointed": lambda s, y: checkpoint(lambda one: squares(one, y).sum(0).mean(), s, use_reentrant=False),
}


def check_sum(loss_fn, batch=None, **options):
    """Check two updates, in one piece and in pieces, with a loop by hand."""
    batch = make_batch() if batch is None else batch
    torch.manual_seed(0)
    reference = Model().double()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        loss, weight = loss_fn(reference, batch)
        (loss / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    for micro_batch in ("auto", CLASSES, 3, 1):
        torch.manual_seed(0)
        model = Model().double()
        stepper = Stepper(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro_batch=micro_batch, **options
        )
        for _ in range(2):
            stepper.step(batch)
        for mine, right in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
def test_a_sum_is_taken_however_it_is_written(loss):
    check_sum(steps(loss))


@pytest.mark.parametrize("num", [CLASSES, 2 * CLASSES])
@pytest.mark.parametrize("loss", ["over a number", "averaged over classes", "of two tasks, averaged"])
def test_a_number_that_happens_to_be_that_of_the_examples_makes_no_mean(loss, num):
    check_sum(steps(SUMS[loss]), make_batch(num))


def test_a_mean_over_tokens_is_refused_and_a_sum_over_them_is_not():
    x, _ = make_batch(6)
    batch = {"x": x, "labels": torch.tensor([[0, 1, -100], [2, 3, 1], [0, -100, -100]] * 2)}

    def loss_fn(reduction):
        def compute(model, batch):
            scores = model(batch["x"])[:, None].expand(-1, 3, -1).reshape(-1, CLASSES)
            labels = batch["labels"].flatten()
            num = (labels != -100).sum()
            total = F.cross_entropy(scores, labels, reduction="sum" if reduction == "by hand" else reduction)
            return total / num if reduction == "by hand" else total, num

        return compute

    refused(loss_fn("mean"), batch)
    refused(loss_fn("by hand"), batch)
    check_sum(loss_fn("sum"), batch)


def test_the_loss_of_a_model_with_labels_is_a_mean():
    class Labelled(Model):
        def forward(self, x, labels):
            scores = super().forward(x)
            return SimpleNamespace(loss=F.cross_entropy(scores.float(), labels).to(scores.device))

    model = Labelled()
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda net, batch: (net(*batch).loss, len(batch[1]))
    )
    x, y = make_batch()
    with pytest.raises(ArgumentError, match="is a mean"):
        stepper.step((x.float(), y))


def test_each_micro_batch_may_count_as_one():
    check_mean = steps(MEANS["of torch"])
    model = Model().double()
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda net, batch: (check_mean(net, batch)[0], 1.0)
    )
    assert stepper.step(make_batch()).weight == 1


def test_a_mean_of_one_example_is_refused_only_where_its_weight_is_another():
    x, y = make_batch(1)
    refused(lambda model, batch: (squares(model(batch[0]), batch[1]).mean(), 4), (x, y))
    model = Model().double()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), steps(MEANS["of squares"]))
    assert stepper.step((x, y)).weight == 1


def test_a_loss_that_draws_numbers_or_compares_examples_is_judged_by_its_graph():
    noisy = steps(lambda s, y: (each(s, y) * torch.rand(len(y)).double()).mean())
    refused(noisy, make_batch())
    compared = steps(lambda s, y: F.cross_entropy(s @ s.T, torch.arange(len(y))))
    refused(whole_batch(compared), make_batch())
    encode = WholeBatchLoss(
        lambda model, batch: model(batch[0]), lambda s: (F.cross_entropy(s @ s.T, torch.arange(8)), 8)
    )
    refused(encode, make_batch())


@pytest.mark.parametrize("loss", ["averaged over classes", "averaged over classes by Einstein", "of expanded numbers"])
@pytest.mark.parametrize("noise_from", ["all", "vectors"])
def test_where_noise_is_measured_no_sum_is_refused(loss, noise_from):
    model = Model().double()
    options = {"measure_noise": True, "noise_from": noise_from}
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), steps(SUMS[loss]), **options)
    assert stepper.step(make_batch()).weight == NUM
    refused(steps(MEANS["of torch"]), make_batch(), **options)


def test_a_doubt_disturbs_nothing():
    """Random state, buffers, modes and attributes are those of a loop by hand, and so is the batch."""

    def loss_fn(model, batch):
        x, y = batch
        x.mul_(1.5)
        scores = model.second(model.dropout(torch.tanh(model.norm(model.first(x)))))
        model.hidden, model.num_calls = scores.detach(), model.num_calls + 1
        model.calls += 1
        chances = [random.random(), torch.rand(()).item()]
        seen.append((len(x), chances))
        return squares(scores, y).sum(0).mean(), len(y)

    found = []
    for by_hand in (True, False):
        seen = []
        torch.manual_seed(1)
        random.seed(1)
        model = Fickle().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = make_batch()
        if by_hand:
            loss, weight = loss_fn(model, (x, y))
            (loss / weight).backward()
            optimizer.step()
        else:
            stepper = Stepper(model, optimizer, loss_fn)
            stepper.step((x, y))
        assert model.training
        assert model.num_calls == model.calls == 1
        found.append([*model.state_dict().values(), model.hidden, x, torch.rand(3), torch.tensor(random.random())])
    assert [num for num, _ in seen] == [8, 2, 2, 4]  # the whole batch, then examples of it
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_sum_is_tried_out_once_and_a_loss_without_a_doubt_never():
    for loss, expected in ((SUMS["averaged over classes"], [8, 2, 2, 4, 8, 8]), (SUMS["of torch"], [8, 8, 8])):
        sizes = []

        def loss_fn(model, batch, loss=loss, sizes=sizes):
            sizes.append(len(batch[1]))
            return loss(model(batch[0]), batch[1]), len(batch[1])

        model = Model().double()
        stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
        for _ in range(3):
            stepper.step(make_batch())
        assert sizes == expected


def test_a_loss_that_cannot_run_on_few_examples_is_not_refused_for_a_doubt():
    def loss_fn(model, batch):
        assert len(batch[1]) == NUM
        return squares(model(batch[0]), batch[1]).sum(0).mean(), len(batch[1])

    model = Model().double()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    for _ in range(5):
        assert stepper.step(make_batch()).weight == NUM
