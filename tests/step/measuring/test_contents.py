"""What models and optimizers hold in other forms than tensors and numbers is put back to the bit, or refused."""

import collections
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import Stepper, measure_size

torch.set_num_threads(1)


def batch_of(number, size=8):
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(size, 4, generator=generator), "y": torch.randn(size, 1, generator=generator)}


def batches_of(num=12):
    return [batch_of(1000 + number) for number in range(num)]


def loss_fn(model, batch):
    return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def trained(make_stepper, *, with_experiment):
    torch.manual_seed(0)
    stepper = make_stepper()
    for number in range(3):
        stepper.step(batch_of(number))
    if with_experiment:
        measure_size(stepper, batches_of())
    return [stepper.step(batch_of(number)).loss for number in range(3, 7)]


def goes_on(make_stepper):
    """Say whether training goes on to the bit as if there had been no experiment."""
    return trained(make_stepper, with_experiment=True) == trained(make_stepper, with_experiment=False)


Count = collections.namedtuple("Count", "num")


class Settings:
    temperature = 1.0


class Slots:
    __slots__ = ("later", "value")

    def __init__(self):
        self.value = 1.0


def next_draw(model):
    return 1 + 0.1 * model.draws.random()


def next_of_deque(model):
    model.recent.append(model.recent[-1] + 1)
    return 1 + 0.01 * model.recent[-1]


def next_of_array(model):
    model.array += 1
    return 1 + 0.01 * float(model.array[0])


def next_of_number(model):
    model.number = np.float32(model.number * 0.99)
    return float(model.number)


def next_beside_array(model):
    model.mixed["num"] += 1
    return 1 + 0.01 * model.mixed["num"]


def next_of_tuple(model):
    model.count = Count(model.count.num + 1)
    return 1 + 0.01 * model.count.num


def next_of_set(model):
    model.seen.add(len(model.seen))
    return 1 + 0.01 * len(model.seen)


def next_of_object(model):
    model.settings.temperature *= 0.99
    return model.settings.temperature


def next_of_slots(model):
    model.slots.value *= 0.99
    model.slots.later = 1
    return model.slots.value


def next_of_python(model):
    return 1 + 0.1 * model.random.random()


def next_of_method(model):
    return 1 + 0.1 * model.draw()


def next_of_counter(model):
    return 1 + 0.01 * next(model.counter)


def next_of_ring(model):
    model.ring["num"] += 1
    return 1 + 0.01 * model.ring["ring"]["num"]


def next_of_objects(model):
    model.objects[0] = model.objects[0] + 1
    return 1 + 0.01 * model.objects[0]


def next_of_bytes(model):
    model.bytes[0] += 1
    return 1 + 0.01 * model.bytes[0]


def next_of_hidden_module(model):
    with torch.no_grad():
        model.hidden[0].weight.mul_(0.99)
    return model.hidden[0].weight.item()


def next_of_swapped_memory(model):
    model.swapped.data = model.swapped.data * 0.99
    return float(model.swapped)


STATES = {
    "a generator of NumPy": next_draw,
    "a deque of numbers": next_of_deque,
    "an array": next_of_array,
    "a number of NumPy": next_of_number,
    "a number in a dict beside an array": next_beside_array,
    "a named tuple of a number": next_of_tuple,
    "a set of numbers": next_of_set,
    "a number of an object": next_of_object,
    "a number in slots": next_of_slots,
    "a generator of Python": next_of_python,
    "a method of a generator": next_of_method,
    "a counter that can only be copied": next_of_counter,
    "a dict that holds itself": next_of_ring,
    "an array of objects": next_of_objects,
    "bytes": next_of_bytes,
    "a module in a list": next_of_hidden_module,
    "a tensor with other memory": next_of_swapped_memory,
}


class WithState(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.factor = factor
        self.draws, self.recent = np.random.default_rng(0), collections.deque([0.0], maxlen=3)
        self.array, self.number, self.mixed = np.zeros(1), np.float32(1), {"num": 0, "array": np.zeros(1)}
        self.count, self.seen, self.settings, self.slots = Count(0), set(), Settings(), Slots()
        self.random, self.draw, self.counter = random.Random(0), np.random.default_rng(1).random, itertools.count()
        self.ring, self.objects = {"num": 0}, np.array([0, None], dtype=object)
        self.ring["ring"] = self.ring
        self.bytes, self.swapped, one = bytearray(1), torch.ones(1), nn.Linear(1, 1, bias=False)
        nn.init.ones_(one.weight)
        self.hidden = [one]

    def forward(self, x):
        hidden = self.last(torch.tanh(self.first(x)))
        return hidden * self.factor(self) if self.training else hidden


@pytest.mark.parametrize("name", STATES)
def test_what_a_module_holds_is_put_back(name):
    def make():
        model = WithState(STATES[name])
        return Stepper(model, torch.optim.Adam(model.parameters(), lr=0.01), loss_fn)

    assert goes_on(make)


class Recurrent(nn.Module):
    """Carries its hidden state from batch to batch, detached when it is used."""

    def __init__(self):
        super().__init__()
        self.cell, self.last, self.hidden = nn.GRUCell(4, 8), nn.Linear(8, 1), None

    def forward(self, x):
        is_usable = self.hidden is not None and len(self.hidden) == len(x)
        hidden = self.cell(x, self.hidden.detach() if is_usable else None)
        if self.training:
            self.hidden = hidden
        return self.last(hidden)


def test_a_tensor_with_a_graph_that_a_module_holds_is_put_back():
    def make():
        model = Recurrent()
        return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn)

    assert goes_on(make)


class Rotating(nn.Module):
    """Replaces its list of blocks while it trains."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        if self.training:
            self.blocks = nn.ModuleList([*self.blocks[1:], self.blocks[0]])
        return self.last(hidden)


def test_modules_that_training_replaces_are_put_back():
    def make():
        model = Rotating()
        return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn)

    assert goes_on(make)


class Average:
    """An average of gradients in an object of its own, as preconditioners of Shampoo are."""

    def __init__(self, parameter):
        self.value = torch.zeros_like(parameter)

    def step(self, gradient):
        return self.value.mul_(0.9).add_(gradient)


class OwnState(torch.optim.SGD):
    kind = "object"

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (one for group in self.param_groups for one in group["params"]):
            state = self.state[parameter]
            if self.kind == "object":
                value = state.setdefault("average", Average(parameter)).step(parameter.grad)
            elif self.kind == "array":
                state.setdefault("num", np.zeros(1))
                state["num"] += 1
                value = parameter.grad / (1 + 0.1 * float(state["num"][0]))
            else:
                recent = state.setdefault("recent", collections.deque([0.0], maxlen=4))
                recent.append(recent[-1] + 1)
                value = parameter.grad / (1 + 0.1 * recent[-1])
            parameter.sub_(0.05 * value)


@pytest.mark.parametrize("kind", ["object", "array", "deque"])
def test_objects_in_the_state_of_an_optimizer_are_put_back_each_time(kind):
    def make():
        model = net()
        optimizer = OwnState(model.parameters(), lr=0.05)
        optimizer.kind = kind
        return Stepper(model, optimizer, loss_fn)

    assert goes_on(make)


class Several(torch.optim.Optimizer):
    """Matrices and vectors with an optimizer each, as those who use Muon have it."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        groups = [group for part in optimizers for group in part.param_groups]
        super().__init__([one for group in groups for one in group["params"]], {"lr": 1})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


def test_optimizers_that_one_holds_in_a_list_are_put_back():
    def make():
        model = net()
        matrices = torch.optim.Adam([one for one in model.parameters() if one.dim() > 1], lr=0.01)
        vectors = torch.optim.SGD([one for one in model.parameters() if one.dim() < 2], lr=0.01, momentum=0.9)
        return Stepper(model, Several([matrices, vectors]), loss_fn)

    assert goes_on(make)


class Plain:
    """All that Stepper asks of an optimizer: param_groups and step()."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


def test_an_optimizer_without_a_state_of_its_own_is_measured():
    def make():
        model = net()
        return Stepper(model, Plain(torch.optim.Adam(model.parameters(), lr=0.01)), loss_fn)

    assert goes_on(make)


def test_a_lock_in_a_group_of_the_optimizer_is_left_alone():
    def make():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.param_groups[0]["lock"] = threading.Lock()
        return Stepper(model, optimizer, loss_fn)

    assert goes_on(make)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (lambda: (number for number in range(9)), "Sequential.stream is a generator"),
        (lambda: {"parts": [(one for one in ())]}, "Sequential.stream.parts.0 is a generator"),
        (lambda: (itertools.count(),), "Sequential.stream.0 is a count"),
    ],
    ids=["a generator", "a generator in a list of a dict", "what can only be copied, in a tuple"],
)
def test_what_cannot_be_put_back_is_refused_by_name_before_anything_runs(value, name):
    model, calls = net(), []
    model.stream = value()

    def counted(model, batch):
        calls.append(1)
        return loss_fn(model, batch)

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), counted)
    with pytest.raises(ArgumentError, match=f"{name}, which training may change and which cannot be put back"):
        measure_size(stepper, batches_of())
    assert not calls


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_scripted_module_is_refused_as_its_attributes_are_out_of_reach():
    model = torch.jit.script(nn.Linear(4, 1))
    with pytest.raises(ArgumentError, match="RecursiveScriptModule, which training may change"):
        measure_size(Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn), batches_of())


def test_hooks_of_an_optimizer_in_a_list_are_refused():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    inner.register_step_post_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match="hooks of SGD's step would see the branches"):
        measure_size(Stepper(model, Several([inner]), loss_fn), batches_of())


def test_objects_stay_the_same_objects():
    model = WithState(next_of_object)
    before = [model.settings, model.recent, model.array, model.draws, model.hidden[0]]
    measure_size(Stepper(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn), batches_of())
    after = [model.settings, model.recent, model.array, model.draws, model.hidden[0]]
    assert list(map(id, after)) == list(map(id, before))


class InChunks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x):
        return torch.cat([self.last(torch.tanh(self.norm(self.first(part)))) for part in x.split(8)])


def test_after_a_branch_whose_noise_was_refused_training_goes_on():
    model = InChunks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = Stepper(model, optimizer, loss_fn, measure_noise=True, noise_from="vectors")
    for number in range(4):
        stepper.step(batch_of(number))
    with pytest.raises(ArgumentError):
        measure_size(stepper, batches_of())
    stepper.step(batch_of(4))


class OtherPath(nn.Module):
    """Uses a vector once more in large batches."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.norm, self.second = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x):
        hidden = self.second(torch.tanh(self.norm(self.first(x))))
        return self.last(hidden + self.second.bias if len(x) > 12 else hidden)


def test_what_a_branch_finds_about_vectors_does_not_stay():
    def noise_of(*, with_experiment):
        torch.manual_seed(0)
        model = OtherPath()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        stepper = Stepper(model, optimizer, loss_fn, measure_noise=True, noise_from="vectors")
        for number in range(3):
            stepper.step(batch_of(number))
        if with_experiment:
            with pytest.raises(ArgumentError, match=r"added up to those of the vectors before, but no longer do"):
                measure_size(stepper, batches_of())
        return [(noise.s, noise.g2) for noise in (stepper.step(batch_of(number)).noise for number in range(3, 8))]

    assert noise_of(with_experiment=True) == noise_of(with_experiment=False)
