"""Running out of memory at any point leaves the update, the random state and the buffers as a smaller start would."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.errors import DoesNotFitError, UpdateMemoryError
from batchwright.step import Stepper, is_out_of_memory


class Counting(nn.Module):
    """A model with a buffer that every forward changes, dropout, and three layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.detach().sum()
        for layer in self.layers:
            x = torch.tanh(layer(self.dropout(x)))
        return x


def loss_fn(model, x):
    random.random()
    np.random.random()
    return model(x).square().sum(), len(x)


def run(fail=None, micro_batch="auto", seed=0):
    """Run one step on 8 examples; return gradients before the update, the model, random draws and the report."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = Counting().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro_batch=micro_batch)
    if fail is not None:
        fail(model)
    stepper.accumulate(x)
    stepper.reduce()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    report = stepper.update()
    draws = (random.random(), np.random.random(), float(torch.rand(())))
    return gradients, model, draws, report


def raise_once(place, *, above=4):
    """Return a function that makes a model run out of memory once: in a forward, or in a backward hook of a layer."""

    def install(model):
        armed = [True]

        def check(size):
            if armed[0] and size > above:
                armed[0] = False
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        layer = model.layers[place[1]]
        if place[0] == "forward":
            layer.register_forward_pre_hook(lambda module, inputs: check(len(inputs[0])))
        else:
            layer.register_forward_hook(lambda module, x, out: out.register_hook(lambda g: check(len(g))) and None)

    return install


PLACES = [(kind, layer) for kind in ("forward", "backward") for layer in range(3)]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_failure_anywhere_ends_as_a_run_that_began_with_smaller_micro_batches(place):
    gradients, model, draws, report = run(raise_once(place))
    expected, twin, twin_draws, _ = run(micro_batch=4)
    assert report.ooms == 1
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert draws == twin_draws
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))


@pytest.mark.parametrize("failing", range(4))
def test_a_failure_in_any_micro_batch_discards_the_ones_before_it(failing):
    calls = [0]

    def install(model):
        def check(module, inputs):
            calls[0] += 1
            if calls[0] == failing + 1:
                raise torch.OutOfMemoryError("out of memory")

        model.layers[1].register_forward_pre_hook(check)

    gradients, model, draws, report = run(install, micro_batch=2)
    expected, twin, twin_draws, _ = run(micro_batch=1)
    assert (report.ooms, report.num_micro_batches) == (1, 8)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert draws == twin_draws
    assert torch.equal(model.seen, twin.seen)


def test_exactly_one_update_follows_a_failure():
    steps = []
    torch.manual_seed(0)
    model = Counting().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    stepper = Stepper(model, optimizer, loss_fn)
    raise_once(("backward", 0))(model)
    stepper.step(torch.randn(8, 4, dtype=torch.float64))
    assert steps == [1]


def test_earlier_accumulations_and_foreign_gradients_survive_a_failure():
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    first, second = torch.randn(3, 4).double(), torch.randn(8, 4).double()
    model.weight.grad = torch.ones_like(model.weight)
    armed = [False]

    def plain(net, x):
        if armed[0] and len(x) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return net(x).sum(), len(x)

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), plain, existing_gradients="add")
    stepper.accumulate(first)
    armed[0] = True
    stepper.accumulate(second)
    stepper.reduce()
    expected = torch.cat([first, second]).mean(dim=0, keepdim=True) + 1
    assert torch.allclose(model.weight.grad, expected, rtol=1e-12)


def test_one_example_that_does_not_fit_is_named_with_shape_and_bytes():
    model = nn.Linear(4, 1)

    def never(net, x):
        raise torch.OutOfMemoryError("out of memory")

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), never)
    with pytest.raises(
        DoesNotFitError, match=r"example 0 of the batch does not fit on its own: tensors \[\(1, 4\)\], 16 bytes"
    ):
        stepper.step(torch.randn(5, 4))
    assert model.weight.grad is None


def test_on_oom_raise_hands_the_error_on_and_leaves_no_gradient():
    model = nn.Linear(4, 1)
    calls = [0]

    def second_fails(net, x):
        calls[0] += 1
        if calls[0] == 2:
            raise torch.OutOfMemoryError("out of memory")
        return net(x).sum(), len(x)

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), second_fails, micro_batch=2, on_oom="raise")
    with pytest.raises(torch.OutOfMemoryError):
        stepper.step(torch.randn(5, 4))
    assert model.weight.grad is None


class FailingSGD(torch.optim.SGD):
    """Runs out of memory after it has updated some of its parameters."""

    def __init__(self, parameters, num_updated):
        super().__init__(parameters, lr=0.1)
        self.num_updated = num_updated

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"][: self.num_updated]:
            parameter.data.add_(1.0)
            torch.autograd.graph.increment_version(parameter)
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize(
    ("num_updated", "message"), [(0, "no parameter has changed"), (1, "1 of 2 parameters have changed")]
)
def test_running_out_in_the_optimizer_is_reported_with_what_changed(num_updated, message):
    model = nn.Linear(4, 1)
    stepper = Stepper(model, FailingSGD(list(model.parameters()), num_updated), lambda net, x: (net(x).sum(), len(x)))
    with pytest.raises(UpdateMemoryError, match=message):
        stepper.step(torch.randn(5, 4))


WRAPPED = RuntimeError("compiled graph failed")
WRAPPED.__cause__ = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("anything"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("HIP out of memory. Tried to allocate 1 GiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (MemoryError(), True),
        (WRAPPED, True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("CUDA out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_running_out_of_memory_is_recognised_by_type_text_and_cause(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_chain_of_errors_that_bites_its_tail_is_walked_once():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_gradients_equal_the_unsplit_batch_without_dropout():
    torch.manual_seed(3)
    model = Counting().double().eval()
    twin = copy.deepcopy(model)
    x = torch.randn(8, 4, dtype=torch.float64)
    raise_once(("backward", 1))(model)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    stepper.accumulate(x)
    stepper.reduce()
    loss, weight = loss_fn(twin, x)
    (loss / weight).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-12)


def test_the_limit_of_a_constant_batch_grows_back_once_memory_is_free_again():
    """Before, 64 examples ran in 4 micro-batches for ever after there was once room for 16 only."""
    room = [16]

    def scarce(net, x):
        if len(x) > room[0]:
            raise torch.OutOfMemoryError("out of memory")
        return net(x).sum(), len(x)

    model = nn.Linear(4, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), scarce)
    x = torch.zeros(64, 4)
    assert stepper.step(x).num_micro_batches == 4
    room[0] = 64
    reports = [stepper.step(x) for _ in range(740)]
    assert reports[-1].num_micro_batches == 1
    assert sum(report.ooms for report in reports) == 0


def pop_rows(batch):
    return batch.pop("x")


def halve_rows(batch):
    batch["x"] = batch["x"] / 2
    return batch["x"]


def split_rows(batch, places):
    return len(batch["x"]) if places is None else {"x": batch["x"][places]}


@pytest.mark.parametrize("read", [pop_rows, halve_rows])
@pytest.mark.parametrize("kind", ["examples", "split"])
def test_a_second_attempt_sees_the_entries_that_the_first_has_popped_or_set(read, kind):
    def step(limit):
        def read_loss(model, batch):
            x = batch if kind == "examples" else read(batch)
            if len(x) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return model(x).square().sum(), len(x)

        model = nn.Linear(2, 1).double()
        nn.init.ones_(model.weight)
        rows = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
        if kind == "examples":
            batch = [{"x": row.clone()} for row in rows]
            options = {"collate": lambda examples: torch.stack(list(map(read, examples)))}
        else:
            batch, options = {"x": rows}, {"split": split_rows}
        stepper = Stepper(model, torch.optim.SGD([model.weight], lr=0.1), read_loss, **options)
        nn.init.zeros_(model.bias)
        assert stepper.step(batch).ooms == (limit < 4)
        return model.weight.detach()

    assert torch.allclose(step(limit=2), step(limit=4), rtol=0, atol=1e-12)
