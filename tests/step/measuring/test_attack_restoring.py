"""measure_size puts everything back to the bit, or refuses: what models and optimizers hold in other forms."""

import collections
import threading

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import Stepper, measure_size
from batchwright.step.measuring import experiment

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


def goes_on_or_is_refused(make_stepper):
    """Check that training goes on to the bit, unless the experiment is refused."""
    try:
        found = trained(make_stepper, with_experiment=True)
    except ArgumentError:
        return
    assert found == trained(make_stepper, with_experiment=False)


Count = collections.namedtuple("Count", "num")


class Settings:
    temperature = 1.0


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


STATES = {
    "a generator of NumPy": next_draw,
    "a deque of numbers": next_of_deque,
    "an array": next_of_array,
    "a number of NumPy": next_of_number,
    "a number in a dict beside an array": next_beside_array,
    "a named tuple of a number": next_of_tuple,
    "a set of numbers": next_of_set,
    "a number of an object": next_of_object,
}


class WithState(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.factor = factor
        self.draws, self.recent = np.random.default_rng(0), collections.deque([0.0], maxlen=3)
        self.array, self.number, self.mixed = np.zeros(1), np.float32(1), {"num": 0, "array": np.zeros(1)}
        self.count, self.seen, self.settings = Count(0), set(), Settings()

    def forward(self, x):
        hidden = self.last(torch.tanh(self.first(x)))
        return hidden * self.factor(self) if self.training else hidden


@pytest.mark.parametrize("name", STATES)
def test_what_a_module_holds_is_put_back_or_refused(name):
    # Expected (docs/stepping.md): "Afterwards the next update is the one that it would have been, to the bit"; the
    # table of what is not put back lists nothing of a module. Found: left as the last branch made it, silently.
    def make():
        model = WithState(STATES[name])
        return Stepper(model, torch.optim.Adam(model.parameters(), lr=0.01), loss_fn)

    goes_on_or_is_refused(make)


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


def test_a_tensor_with_a_graph_that_a_module_holds_is_put_back_or_refused():
    # Expected: "numbers and tensors that modules hold as attributes" are put back. Found: a tensor that is no leaf is
    # not, and training goes on from the hidden state of the last branch.
    def make():
        model = Recurrent()
        return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn)

    goes_on_or_is_refused(make)


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


def test_modules_that_training_replaces_are_put_back_or_refused():
    # Expected: to the bit, or refused. Found: the modules of the last branch stay in place.
    def make():
        model = Rotating()
        return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn)

    goes_on_or_is_refused(make)


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
    # Expected: to the bit, and every branch begins with the same state. Found: the copy itself is put into the state
    # before the first branch, which changes it; all further branches and training go on with that.
    def make():
        model = net()
        optimizer = OwnState(model.parameters(), lr=0.05)
        optimizer.kind = kind
        return Stepper(model, optimizer, loss_fn)

    goes_on_or_is_refused(make)


class Several(torch.optim.Optimizer):
    """Matrices and vectors with an optimizer each, as those who use Muon have it."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        groups = [group for part in optimizers for group in part.param_groups]
        super().__init__([one for group in groups for one in group["params"]], {"lr": 1})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


def test_optimizers_that_one_holds_in_a_list_are_put_back_or_refused():
    # Expected: to the bit, or refused. Found: only optimizers that are attributes themselves are held; the averages of
    # those in a list are those of the last branch.
    def make():
        model = net()
        matrices = torch.optim.Adam([one for one in model.parameters() if one.dim() > 1], lr=0.01)
        vectors = torch.optim.SGD([one for one in model.parameters() if one.dim() < 2], lr=0.01, momentum=0.9)
        return Stepper(model, Several([matrices, vectors]), loss_fn)

    goes_on_or_is_refused(make)


class Plain:
    """All that Stepper asks of an optimizer: param_groups and step()."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


def test_an_optimizer_without_a_state_of_its_own_is_measured_or_refused_with_a_sentence():
    # Found: AttributeError: 'Plain' object has no attribute 'state'.
    def make():
        model = net()
        return Stepper(model, Plain(torch.optim.Adam(model.parameters(), lr=0.01)), loss_fn)

    goes_on_or_is_refused(make)


def test_a_group_with_an_object_that_cannot_be_copied_is_measured_or_refused_with_a_sentence():
    # Found: TypeError: cannot pickle '_thread.lock' object.
    def make():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.param_groups[0]["lock"] = threading.Lock()
        return Stepper(model, optimizer, loss_fn)

    goes_on_or_is_refused(make)


def test_a_loss_that_changes_its_batch_in_place_is_refused_or_gets_copies():
    # Expected: every branch trains on the same examples and is evaluated on the same batches, or a refusal as after
    # out of memory. Found: factor 1 gets the batches themselves; each evaluation and branch sees other values, and
    # the batches of the caller are changed.
    def doubling(model, batch):
        batch["x"].mul_(1.5)
        return loss_fn(model, batch)

    def copying(model, batch):
        return loss_fn(model, {**batch, "x": batch["x"] * 1.5})

    def experiment_of(loss):
        model = net()
        return measure_size(Stepper(model, torch.optim.SGD(model.parameters(), lr=0.01), loss), batches_of())

    try:
        found = experiment_of(doubling)
    except ArgumentError:
        return
    assert [one.losses for one in found.branches] == [one.losses for one in experiment_of(copying).branches]


class InChunks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x):
        return torch.cat([self.last(torch.tanh(self.norm(self.first(part)))) for part in x.split(8)])


def test_after_a_branch_whose_noise_was_refused_training_goes_on():
    # Expected: "That holds also if a branch fails; the error is raised afterwards." Found: the reason stays with the
    # vector, and every measured update after the experiment raises it.
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
    # Expected: "what the stepper knows about memory and noise" is put back. Found: a vector that a branch found wrong
    # is left out afterwards, and the noise of further updates is another one.
    def noise_of(*, with_experiment):
        torch.manual_seed(0)
        model = OtherPath()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        stepper = Stepper(model, optimizer, loss_fn, measure_noise=True, noise_from="vectors")
        for number in range(3):
            stepper.step(batch_of(number))
        if with_experiment:
            measure_size(stepper, batches_of())
        return [(noise.s, noise.g2) for noise in (stepper.step(batch_of(number)).noise for number in range(3, 8))]

    assert noise_of(with_experiment=True) == noise_of(with_experiment=False)


def test_copies_of_what_restore_names_count_as_host_memory(monkeypatch):
    # Expected: "Copies lie in host memory (`found.copy_bytes`; refused if there is too little)". Found: 4 MB of copies
    # with 100 kB free: only the model and the optimizer are counted, no gradients and nothing in restore=.
    monkeypatch.setattr(experiment, "_free_bytes", lambda: 100_000)
    model = net()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn)
    with pytest.raises(ArgumentError, match="host memory"):
        measure_size(stepper, batches_of(), restore=[nn.Linear(1000, 1000)])


def test_an_experiment_inside_of_the_loss_is_refused():
    # Expected: refused, as a loss that calls step is. Found: RecursionError, as the evaluation calls the loss again.
    model, steppers = net(), []

    def measuring(model, batch):
        measure_size(steppers[0], batches_of())
        return loss_fn(model, batch)

    steppers.append(Stepper(model, torch.optim.SGD(model.parameters(), lr=0.01), measuring))
    with pytest.raises(ArgumentError):
        steppers[0].step(batch_of(0))


def test_a_count_of_tokens_per_row_is_refused_with_a_sentence():
    # Expected: "tokens_of(batch) must be a whole number of 0 or more, got …". Found: RuntimeError of torch, "a Tensor
    # with 8 elements cannot be converted to Scalar".
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = Stepper(model, optimizer, loss_fn, tokens_of=lambda batch: torch.ones(len(batch["x"])))
    with pytest.raises(ArgumentError, match="tokens_of"):
        stepper.step(batch_of(0))
