"""What encode and the loss do besides: kept or put back as in one pass, or refused with the reason."""

import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import Stepper, WholeBatchLoss

from .models import TwoTowers, clip_loss, distance, encode, gradients_by_hand, make_batch


def make():
    torch.manual_seed(0)
    return TwoTowers().double()


def step(model, encode, loss, micro_batch, modules=()):
    parameters = [one for module in (model, *modules) for one in module.parameters() if one.requires_grad]
    stepper = Stepper(model, torch.optim.SGD(parameters, lr=0.1), WholeBatchLoss(encode, loss), micro_batch=micro_batch)
    stepper.accumulate(make_batch(8))
    stepper.reduce()
    gradients = [parameter.grad for parameter in parameters]
    stepper.update()
    return gradients


class Momentum(nn.Module):
    """A tower, and its moving average that every encoding moves on, by a write that leaves no other trace."""

    def __init__(self):
        super().__init__()
        self.online, self.slow = make(), make().requires_grad_(False)
        with torch.no_grad():
            self.slow.shared.weight.mul_(0.5)

    def encode(self, _, batch):
        for mean, now in zip(self.slow.parameters(), self.online.parameters(), strict=True):
            mean.data = 0.9 * mean.data + 0.1 * now.data
        with torch.no_grad():
            keys = self.slow(batch["image"], "image")
        return {"pair": (self.online(batch["text"], "text"), keys), "weight": batch["weight"]}


def test_a_momentum_encoder_that_encode_moves_is_refused_once_the_batch_is_cut():
    model = Momentum()
    before = model.slow.shared.weight.clone()
    step(model, model.encode, clip_loss(model.online), 8)
    assert torch.allclose(model.slow.shared.weight, 0.9 * before + 0.1 * 2 * before), "it moves once in one piece"
    with pytest.raises(ArgumentError, match=r"momentum encoder.*once per update, before step"):
        step(model, model.encode, clip_loss(model.online), 3)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("micro_batch", [3, 8])
def test_what_encode_keeps_in_an_attribute_is_no_part_of_the_loss(micro_batch):
    model = make()

    def keeping(model, batch):
        found = encode(model, batch)
        model.balance = found["pair"][0].square().sum()
        return found

    def loss(encodings):
        total, weight, _ = clip_loss(model)(encodings)
        return total + model.balance, weight

    with pytest.raises(ArgumentError, match="kept elsewhere, such as in an attribute of the model"):
        step(model, keeping, loss, micro_batch)


def test_a_loss_may_run_the_model_itself_under_autocast_whose_casts_are_shared():
    gradients = []
    for micro_batch in (8, 3):
        model = make().float()

        def loss(encodings, model=model):
            return model.text(encodings.repeat(1, 2)).float().square().sum() + encodings.float().sum(), 8

        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = step(model, lambda model, batch: model(batch["text"].float(), "text"), loss, micro_batch)
        gradients.append(found)
    assert distance(gradients[1], gradients[0]) < 0.05


@pytest.mark.parametrize("micro_batch", [3, 8])
def test_a_loss_that_runs_backward_is_refused(micro_batch):
    model = make()

    def loss(encodings):
        encodings["pair"][0].square().sum().backward()
        return clip_loss(model)(encodings)

    with pytest.raises(ArgumentError, match="the loss ran a backward pass of its own"):
        step(model, encode, loss, micro_batch)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("micro_batch", [3, 8])
def test_a_loss_may_change_encodings_in_place(micro_batch):
    model = make()

    def centred(model):
        def loss(encodings):
            for one in encodings["pair"]:
                one -= one.mean(0)
            return clip_loss(model)(encodings)

        return loss

    expected, _, _ = gradients_by_hand(model, centred, make_batch(8), [list(range(8))])
    assert distance(step(model, encode, centred(model), micro_batch), expected) < 1e-12


class Queue(nn.Module):
    """A loss with a temperature and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, encodings):
        self.count += 1
        first, second = encodings["pair"]
        return (first @ second.T * self.scale * self.count).square().sum(), len(first)


def test_buffers_of_a_loss_module_are_put_back_after_out_of_memory_in_the_second_pass():
    found = []
    for fails in (False, True):
        model, loss, failures = make(), Queue(), [None] * fails

        def failing(model, batch, failures=failures):
            encodings = encode(model, batch)
            encodings["pair"][0].register_hook(lambda gradient: run_out(failures))
            return encodings

        gradients = step(model, failing, loss, 4, (loss,))
        assert not failures
        found.append((int(loss.count), gradients))
    assert [count for count, _ in found] == [1, 1]
    assert distance(*[[one for one in gradients if one is not None] for _, gradients in found]) < 1e-12


def run_out(failures):
    if failures:
        failures.pop()
        raise torch.OutOfMemoryError("CUDA out of memory")
