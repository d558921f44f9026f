"""restored: after any trial run every bit is where it was."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step._optimizers import step_of_zeros
from batchwright.step.measuring._restoring import Held, has_room_for, restored

torch.set_num_threads(1)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "adam with a tensor rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1, weight_decay=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1),
}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def train(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def image(model, optimizer):
    """Everything that may change, as values that can be compared."""
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "gradients": [parameter.grad for parameter in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "modes": [module.training for module in model.modules()],
            "trained": [parameter.requires_grad for parameter in model.parameters()],
            "random": [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()],
        }
    )


def spoil(model, optimizer):
    """Change all there is to change."""
    model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    train(model, optimizer)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 5.0
    model[0].register_buffer("extra", torch.ones(2))
    model[1].running_mean = torch.full((4,), 9.0)
    model[3].weight = nn.Parameter(torch.zeros(1, 4))
    random.random()
    np.random.rand()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_everything_is_as_it_was_to_the_bit(make, num_steps_before):
    model = make_model()
    optimizer = make(model.parameters())
    for _ in range(num_steps_before):
        train(model, optimizer)
    model.eval()
    model[0].bias.requires_grad_(False)
    before = image(model, optimizer)
    with restored([model], [optimizer]):
        step_of_zeros(optimizer)
        spoil(model, optimizer)
    torch.testing.assert_close(image(model, optimizer), before, rtol=0, atol=0, equal_nan=True)


def test_everything_is_put_back_after_an_error_too():
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    before = image(model, optimizer)

    def interrupt():
        spoil(model, optimizer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), restored([model], [optimizer]):
        interrupt()
    torch.testing.assert_close(image(model, optimizer), before, rtol=0, atol=0)


def test_tensors_keep_their_identity():
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer)
    tensors = [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters())]
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    with restored([model], [optimizer]):
        spoil(model, optimizer)
    after = [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in model.parameters())]
    assert list(map(id, after)) == list(map(id, tensors))
    assert [id(state["exp_avg"]) for state in optimizer.state.values()] == list(map(id, moments))


@pytest.mark.parametrize("name", ["sgd", "adamw", "adagrad", "rmsprop", "nadam", "rprop"])
def test_allocating_state_makes_all_of_it_and_moves_no_parameter(name):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = copy.deepcopy(model.state_dict())
    step_of_zeros(optimizer)
    assert all(optimizer.state[parameter] for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]


def test_hooks_and_schedulers_do_not_see_the_step_of_zeros():
    # Before, the scheduler in the hook moved on, and the rate was not put back to where the scheduler stood.
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    with restored([model], [optimizer]):
        step_of_zeros(optimizer)
    assert scheduler.last_epoch == 0
    train(model, optimizer)
    assert [scheduler.last_epoch, optimizer.param_groups[0]["lr"]] == [1, 0.05]


def test_training_goes_on_as_if_nothing_had_happened():
    histories = []
    for is_tried in (False, True):
        model = make_model()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        train(model, optimizer)
        if is_tried:
            with restored([model], [optimizer]):
                step_of_zeros(optimizer)
                spoil(model, optimizer)
        for _ in range(3):
            train(model, optimizer)
        histories.append(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(histories[0], histories[1], rtol=0, atol=0)


def test_parameters_outside_the_model_are_put_back_through_their_optimizer():
    model, outside = nn.Linear(2, 1), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), outside], lr=0.1)
    with restored([model], [optimizer]):
        step_of_zeros(optimizer)
        outside.data.zero_()
    assert outside.tolist() == [1.0, 1.0]
    assert outside.grad is None


def test_tied_and_expanded_tensors_are_handled():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.register_buffer("wide", torch.ones(1).expand(5))
    before = model[0].weight.tolist()
    with restored([model]):
        nn.init.zeros_(model[0].weight)
    assert model[0].weight is model[1].weight
    assert model[1].weight.tolist() == before


def test_a_lazy_module_is_refused():
    with pytest.raises(ArgumentError, match="run one batch through the model first"), restored([nn.LazyLinear(2)]):
        pass


@pytest.mark.needs_cuda
def test_everything_on_the_device_is_as_it_was_and_copies_do_not_lie_there():
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(8, 3, device="cuda")).sum().backward()  # libraries keep a workspace from here on
    before, state = image(model, optimizer), torch.cuda.get_rng_state()
    held = torch.cuda.memory_allocated()
    with restored([model], [optimizer]):
        assert torch.cuda.memory_allocated() == held
        step_of_zeros(optimizer)
        model(torch.randn(8, 3, device="cuda")).sum().backward()
        optimizer.step()
    torch.testing.assert_close(image(model, optimizer), before, rtol=0, atol=0)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.cuda.memory_allocated() == held


@pytest.mark.parametrize("on_device", [False, True])
def test_copies_beside_the_tensors_or_on_the_host_put_back_the_same_bits(on_device):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def update():
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    update()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    held = Held()
    held.add_module(model)
    held.add(optimizer)
    held.keep(on_device=on_device)
    for _ in range(2):
        update()
        held.put_back()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert optimizer.state[model.weight]["step"] == 1


@pytest.mark.parametrize(("num_bytes", "factor", "has_room"), [(600, 4, True), (601, 4, False), (800, 2, True)])
def test_copies_have_room_beside_updates_of_the_largest_factor(num_bytes, factor, has_room):
    memory = SimpleNamespace(total_bytes=1000, peak_bytes=100)
    assert has_room_for(num_bytes, memory, factor=factor) == has_room
    assert not has_room_for(num_bytes, None, factor=factor)
