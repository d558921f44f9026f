"""Which parameters an update trains, and what happens to gradients that are there, in half precision, or hooked."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError, UpdateMemoryError
from batchwright.step import Stepper

torch.set_num_threads(1)


def squares(model, x):
    return model(x).square().sum(), len(x)


def make_linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 1).double()


def mean_gradient(parameters, losses, weight):
    """Return the gradient of ``sum(losses) / weight``, one example at a time."""
    found = [torch.zeros_like(parameter) for parameter in parameters]
    for loss in losses:
        for total, part in zip(found, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            total += 0 if part is None else part
    return [total / weight for total in found]


def error_of(found, expected):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


class Recording(torch.optim.SGD):
    """Keeps a copy of the gradients that each step sees."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)
        self.seen = []

    def step(self, closure=None):
        self.seen = [None if p.grad is None else p.grad.clone() for g in self.param_groups for p in g["params"]]
        return super().step(closure)


# Parameters that the model does not own


def test_a_temperature_that_only_the_optimizer_knows_is_trained_exactly():
    """It was neither scaled nor dropped after out of memory: 93 % off."""
    model, temperature = make_linear(), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    x = torch.randn(13, 4, generator=torch.Generator().manual_seed(1)).double()

    def loss_fn(net, part):
        outputs = net(part)
        if len(part) > 5:  # after the temperature has its gradient
            outputs.register_hook(lambda gradient: raise_oom())
        return (outputs * temperature).square().sum(), len(part)

    optimizer = Recording([*model.parameters(), temperature])
    expected = mean_gradient(
        [*model.parameters(), temperature], [(model(row[None]) * temperature).square().sum() for row in x], 13
    )
    report = Stepper(model, optimizer, loss_fn).step(x)
    assert report.ooms == 1
    assert error_of(optimizer.seen, expected) < 1e-12


def raise_oom():
    raise torch.OutOfMemoryError("out of memory in backward")


def test_gradients_of_foreign_parameters_are_part_of_the_norm_that_is_clipped():
    model, extra = make_linear(), nn.Parameter(torch.ones(4, dtype=torch.float64))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).double()
    parameters = [*model.parameters(), extra]
    expected = mean_gradient(parameters, [(model(row[None]) + row @ extra).square().sum() for row in x], 6)
    norm = torch.cat([part.flatten() for part in expected]).norm()
    optimizer = Recording(parameters)
    stepper = Stepper(
        model, optimizer, lambda net, part: ((net(part)[:, 0] + part @ extra).square().sum(), len(part)),
        micro_batch=2, clip_norm=0.5,
    )  # fmt: skip
    report = stepper.step(x)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-12)
    assert error_of(optimizer.seen, [part * 0.5 / (norm + 1e-6) for part in expected]) < 1e-12


def test_parameters_that_are_unfrozen_later_are_trained_exactly():
    """Lightning's BaseFinetuning does this; the new ones were summed without a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    model[0].requires_grad_(False)
    optimizer = Recording(model[1].parameters())
    stepper = Stepper(model, optimizer, squares, micro_batch=3, measure_noise=True)
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(3)).double()
    stepper.step(x)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    trained = [*model[1].parameters(), *model[0].parameters()]
    expected = mean_gradient(trained, [model(row[None]).square().sum() for row in x], 10)
    report = stepper.step(x)
    assert error_of(optimizer.seen, expected) < 1e-12
    assert report.noise is not None


def test_the_noise_of_parameters_unfrozen_later_is_measured_too():
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    late = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    optimizer = torch.optim.SGD([*model.parameters(), late], lr=0.0)
    stepper = Stepper(
        model, optimizer, lambda net, x: ((net(x)[:, 0] + x @ late).sum(), len(x)), measure_noise=True, micro_batch=2
    )
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(4)).double()
    before = stepper.step(x).noise
    late.requires_grad_(True)
    after = stepper.step(x).noise
    assert after.g2 != before.g2
    # Both parameters have the same gradient, the mean of x, so squared norms double.
    again = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.0), lambda net, x: (net(x).sum(), len(x)),
        measure_noise=True, micro_batch=2,
    )  # fmt: skip
    again.step(x)
    assert after.s == pytest.approx(2 * again.step(x).noise.s, rel=1e-9)


def test_parameters_of_the_model_that_the_optimizer_lacks_get_no_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    stepper = Stepper(model, torch.optim.SGD(model[1].parameters(), lr=0.1), squares, micro_batch=2)
    stepper.step(torch.ones(4, 4).double())
    assert model[0].weight.grad is None


def test_changing_what_is_trained_within_an_update_is_refused():
    model = make_linear()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
    stepper.accumulate(torch.ones(2, 4).double())
    model.bias.requires_grad_(False)
    with pytest.raises(ArgumentError, match="other parameters than when the update began"):
        stepper.accumulate(torch.ones(2, 4).double())
    stepper.abandon()
    stepper.step(torch.ones(2, 4).double())


# Weights over several batches of one update


@pytest.mark.parametrize("micro_batch", ["auto", 2])
def test_weight_of_counts_every_batch_of_an_update(micro_batch):
    """Only the first weight divided: 2.0 for 1.0."""
    model = nn.Linear(1, 1, bias=False)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda net, x: (net(x).sum(), len(x)),
        weight_of=len, micro_batch=micro_batch,
    )  # fmt: skip
    for num in (4, 4, 8):
        stepper.accumulate(torch.ones(num, 1))
    stepper.reduce()
    assert model.weight.grad.item() == pytest.approx(1.0, rel=1e-6)


def test_a_weight_of_that_counts_something_else_than_the_loss_is_refused():
    model = nn.Linear(1, 1)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda net, x: (net(x).sum(), len(x)),
        weight_of=lambda x: 2 * len(x),
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="weight_of counted 8 for this update, but loss_fn returned weights of 4"):
        stepper.step(torch.ones(4, 1))
    assert model.weight.grad is None


def test_a_second_total_weight_within_an_update_is_refused():
    model = nn.Linear(1, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
    stepper.accumulate(torch.ones(2, 1), total_weight=4.0)
    with pytest.raises(ArgumentError, match=r"total_weight is 8.0, but an earlier accumulate .* had 4.0"):
        stepper.accumulate(torch.ones(2, 1), total_weight=8.0)


def test_a_total_weight_is_the_number_that_came_even_if_its_tensor_changes():
    """A tensor that a trainer counts on in changed the weight of an update that was begun."""
    model, twin = make_linear(), make_linear()
    total = torch.tensor(4.0)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
    stepper.accumulate(torch.ones(2, 4).double(), total_weight=total)
    total.fill_(8.0)
    with pytest.raises(ArgumentError, match=r"total_weight is 8.0, but an earlier accumulate .* had 4.0"):
        stepper.accumulate(torch.ones(2, 4).double(), total_weight=total)
    stepper.accumulate(torch.ones(2, 4).double(), total_weight=4)
    stepper.update()
    right = Stepper(twin, torch.optim.SGD(twin.parameters(), lr=0.1), squares)
    right.step(torch.ones(4, 4).double())
    torch.testing.assert_close(model.weight, twin.weight)


@pytest.mark.parametrize("weight", ["4", [4], None, torch.ones(2), 4j])
def test_weights_that_are_no_numbers_are_refused(weight):
    model = make_linear()
    x, optimizer = torch.ones(2, 4).double(), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match=r"weight_of\(batch\) must be a single number, .* got"):
        Stepper(model, optimizer, squares, weight_of=lambda batch: weight).step(x)
    if weight is not None:
        with pytest.raises(ArgumentError, match=r"total_weight must be a single number, .* got"):
            Stepper(model, optimizer, squares).accumulate(x, total_weight=weight)
    assert model.weight.grad is None


@pytest.mark.parametrize("where", ["collate", "trim"])
def test_no_micro_batch_is_left_out_because_it_is_none(where):
    """Examples whose micro-batch was None were not trained, and nobody said so."""

    def some(x):
        return None if x[0, 0] > 2 else x

    functions = {"collate": lambda rows: some(torch.stack(rows)), "trim": some}
    model = make_linear()
    x = torch.arange(1.0, 5.0).double()[:, None].expand(4, 4)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), squares, micro_batch=2, **{where: functions[where]}
    )
    with pytest.raises(ArgumentError, match="a micro-batch is None; let collate or trim return one"):
        stepper.step(list(x) if where == "collate" else x)
    assert model.weight.grad is None


# Gradients of somebody else


def test_gradients_that_were_there_are_cleared_with_one_warning():
    """Another backward, of a GAN or a second Stepper, was added to the update."""
    model = make_linear()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(5)).double()
    optimizer = Recording(model.parameters())
    stepper = Stepper(model, optimizer, squares, micro_batch=2)
    expected = mean_gradient(list(model.parameters()), [model(row[None]).square().sum() for row in x], 5)
    (1000 * model(x).sum()).backward()
    with pytest.warns(UserWarning, match="2 of 2 parameters had a gradient when the update began"):
        stepper.step(x)
    assert error_of(optimizer.seen, expected) < 1e-12
    model(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        stepper.step(x)


def test_gradients_of_zero_are_no_reason_to_warn():
    model = make_linear()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), squares).step(torch.ones(2, 4).double())


def test_a_backward_of_somebody_else_within_an_update_is_refused():
    model = make_linear()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
    x = torch.ones(2, 4).double()
    stepper.accumulate(x)
    model(x).sum().backward()
    with pytest.raises(ArgumentError, match="changed between accumulate and reduce"):
        stepper.reduce()
    with pytest.raises(ArgumentError, match="changed between accumulate and reduce"):
        stepper.accumulate(x)
    stepper.abandon()
    stepper.step(x)


def test_gradients_may_be_changed_by_hand_after_they_were_reduced():
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0), lambda net, x: (net(x).sum(), len(x)))
    stepper.accumulate(torch.ones(3, 1))
    stepper.reduce()
    model.weight.grad.mul_(0.5)
    stepper.update()
    assert model.weight.item() == pytest.approx(before - 0.5, rel=1e-6)


def test_gradients_to_be_added_survive_a_batch_that_cannot_begin():
    model = make_linear()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), squares, existing_gradients="add",
        weight_of=lambda x: {}["nothing"],
    )  # fmt: skip
    with pytest.raises(KeyError, match="nothing"):
        stepper.step(torch.ones(2, 4).double())
    assert model.weight.grad.tolist() == [[1.0] * 4]


# Half precision


def half_gradient(dtype, num_parts, **options):
    """Return the gradient of 128 numbers in half precision, and the exact one in float64."""
    torch.manual_seed(0)
    model = nn.Linear(16, 8, bias=False).to(dtype)
    x = torch.randn(128, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    twin = copy.deepcopy(model).double()
    (twin(x.double()).square().sum() / 128).backward()
    optimizer = Recording(model.parameters())
    stepper = Stepper(model, optimizer, squares, micro_batch=128 // num_parts, **options)
    stepper.step(x)
    return optimizer.seen[0], twin.weight.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pieces_in_half_precision_are_summed_in_float32(dtype):
    """Summed in their own type, 128 pieces were 3.6 times further from the truth than the unsplit step."""
    whole, exact = half_gradient(dtype, 1)
    pieces, _ = half_gradient(dtype, 128)
    assert pieces.dtype is dtype
    assert error_of([pieces.double()], [exact]) < 1.5 * error_of([whole.double()], [exact])


def test_batches_of_one_update_in_half_precision_are_summed_in_float32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda net, x: (net(x).sum(), 1.0))
    for value in [256.0, *[0.5] * 256]:  # bfloat16 has no number between 256 and 258
        stepper.accumulate(torch.full((1, 1), value, dtype=torch.bfloat16), total_weight=1.0)
    stepper.reduce()
    assert model.weight.grad.item() == 384.0


@pytest.mark.parametrize("weight", [lambda x: len(x), lambda x: torch.tensor(float(len(x)))])
@pytest.mark.parametrize("num", [1, 3])
def test_float16_without_a_scaler_keeps_small_gradients(weight, num):
    """The divisor was near n × 65,536, and the gradient 0.0."""
    model = nn.Linear(1, 1, bias=False).half()
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda net, x: (net(x).sum(), weight(x)),
        collate=torch.stack, micro_batch=num,
    )  # fmt: skip
    for _ in range(2):
        stepper.accumulate([torch.full((1,), 2.0**-12, dtype=torch.float16)] * 3)
        stepper.reduce()
        assert model.weight.grad.item() == 2.0**-12
        stepper.update()


# What is not linear in the gradient of a piece


def test_a_hook_that_clamps_the_gradient_sees_that_of_the_whole_batch():
    model = nn.Linear(1, 1, bias=False).double()
    handle = model.weight.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))
    x = torch.tensor([[4.0], [-3.0], [0.5], [0.5]]).double()  # mean 0.5; clamped per piece it would be 0.25
    for micro_batch in ("auto", 1):
        optimizer = Recording(model.parameters(), lr=0.0)
        Stepper(model, optimizer, lambda net, part: (net(part).sum(), len(part)), micro_batch=micro_batch).step(x)
        assert optimizer.seen[0].item() == pytest.approx(0.5, rel=1e-12)
    handle.remove()
    assert not model.weight._backward_hooks


def test_hooks_are_on_their_parameters_again_after_out_of_memory():
    model = nn.Linear(1, 1, bias=False).double()
    calls = []
    model.weight.register_hook(lambda gradient: calls.append(1))

    def loss_fn(net, x):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(bw.errors.DoesNotFitError):
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn).step(torch.ones(2, 1).double())
    model(torch.ones(1, 1).double()).sum().backward()
    assert calls == [1]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))

    def forward(self, x):
        return x @ self.weight


def test_complex_parameters_are_trained_exactly():
    torch.manual_seed(0)
    model = Complex()
    x = torch.randn(7, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))

    def loss_fn(net, part):
        return (net(part).abs() ** 2).sum(), len(part)

    expected = mean_gradient(list(model.parameters()), [loss_fn(model, row[None])[0] for row in x], 7)
    norm = torch.cat([part.flatten() for part in expected]).norm()
    optimizer = Recording(model.parameters())
    report = Stepper(model, optimizer, loss_fn, micro_batch=2, clip_norm=1e9, measure_noise=True).step(x)
    assert error_of(optimizer.seen, expected) < 1e-12
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-12)
    assert report.noise.s > 0


def test_sparse_gradients_are_summed_and_clipped_exactly():
    torch.manual_seed(0)
    model = nn.Embedding(9, 3, sparse=True).double()
    ids = torch.tensor([1, 4, 4, 7, 1, 0, 4])
    expected = mean_gradient([model.weight], [(model(row[None]).square().sum()) for row in ids], 7)[0].to_dense()
    norm = expected.norm()
    optimizer = Recording(model.parameters())
    stepper = Stepper(model, optimizer, squares, micro_batch=2, clip_norm=0.1, measure_noise=True)
    report = stepper.step(ids)
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-12)
    assert error_of([optimizer.seen[0].to_dense()], [expected * 0.1 / (norm + 1e-6)]) < 1e-12


# Noise, learning rate, and failures


def test_out_of_memory_in_the_second_batch_keeps_the_noise_of_the_first():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(4)).double()

    def noise(fails):
        torch.manual_seed(0)
        model, armed = nn.Linear(3, 1).double(), []

        def loss_fn(net, part):
            if fails and armed and len(part) > 2:
                raise torch.OutOfMemoryError("out of memory")
            return net(part).square().sum(), len(part)

        micro_batch = 4 if fails else 2
        stepper = Stepper(
            model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, measure_noise=True, micro_batch=micro_batch
        )
        stepper.accumulate(x[:4])
        armed.append(True)
        stepper.accumulate(x[4:])
        return stepper.update().noise

    with_failure = noise(fails=True)
    assert with_failure.num_parts == 4
    assert with_failure.s == pytest.approx(noise(fails=False).s, rel=1e-9)


def test_a_scheduler_in_a_step_hook_changes_the_rate():
    """The rate was put back after every step, so such a scheduler was dead."""
    model = make_linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    stepper = Stepper(model, optimizer, squares)
    assert [stepper.step(torch.ones(2, 4).double()).lr for _ in range(3)] == [0.8, 0.4, 0.2]


def test_an_optimizer_without_a_learning_rate_reports_none():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": None})

        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter -= parameter.grad

    model = make_linear()
    report = Stepper(model, Own(model.parameters()), squares).step(torch.ones(2, 4).double())
    assert report.lr is None
    assert report.observation()["lr"] is None


class Failing(torch.optim.SGD):
    """Runs out of memory in the first step, before it has changed anything or after the first parameter."""

    def __init__(self, parameters, after=0):
        super().__init__(parameters, lr=0.1)
        self.after = after
        self.has_failed = False

    def step(self, closure=None):
        if not self.has_failed:
            self.has_failed = True
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"][: self.after]:
                    parameter.sub_(1.0)
            raise torch.OutOfMemoryError("out of memory in the step")
        return super().step(closure)


@pytest.mark.parametrize("has_scaler", [False, True])
def test_an_update_that_changed_nothing_can_be_tried_again(has_scaler):
    model, twin = make_linear(), make_linear()
    x = torch.ones(2, 4).double()
    options = {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "weight_of": len} if has_scaler else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures = [torch.OutOfMemoryError("out of memory in the step")]

    def fail_once(*_):
        if failures:
            raise failures.pop()

    optimizer.register_step_pre_hook(fail_once)
    stepper = Stepper(model, optimizer, squares, clip_norm=0.5, **options)
    stepper.accumulate(x)
    with pytest.raises(UpdateMemoryError, match="no parameter has changed"):
        stepper.update()
    stepper.update()
    Stepper(twin, torch.optim.SGD(twin.parameters(), lr=0.1), squares, clip_norm=0.5).step(x)
    assert torch.allclose(model.weight, twin.weight, rtol=1e-12)
    stepper.step(x)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("has_scaler", [False, True])
def test_a_stepper_works_on_after_an_update_that_failed(after, has_scaler):
    model = make_linear()
    options = {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "weight_of": len} if has_scaler else {}
    stepper = Stepper(model, Failing(model.parameters(), after), squares, **options)
    x = torch.ones(2, 4).double()
    with pytest.raises(UpdateMemoryError):
        stepper.step(x)
    assert model.weight.grad is None
    assert stepper.step(x).batch_size == 2


def test_an_abandoned_update_leaves_no_trace():
    model = make_linear()
    before = copy.deepcopy(model.state_dict())
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), squares)
    stepper.accumulate(torch.ones(2, 4).double())
    stepper.abandon()
    assert model.weight.grad is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(ArgumentError, match="nothing was accumulated"):
        stepper.update()
    stepper.abandon()  # nothing to do


def test_an_error_in_the_loss_keeps_no_gradient_and_puts_buffers_and_random_state_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1  # replaced, not changed in place
            return self.linear(x)

    model, calls = Counting().double(), []

    def loss_fn(net, x):
        calls.append(torch.rand(()))
        if len(calls) == 3:
            raise KeyError("a bad batch")
        return net(x).sum(), len(x)

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro_batch=1)
    torch.manual_seed(1)
    with pytest.raises(KeyError, match="a bad batch"):
        stepper.step(torch.ones(3, 4).double())
    assert model.count.item() == 0
    assert model.linear.weight.grad is None
    gc.collect()
    assert torch.rand(()) == calls[0]


def test_buffers_that_a_forward_replaces_are_put_back_after_out_of_memory():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("wide", torch.zeros(1, 1).expand(3, 3))

        def forward(self, x):
            self.seen = self.seen + len(x)
            self.register_buffer("late", self.seen * 2)
            return self.linear(x)

    def loss_fn(net, x):
        out = net(x)
        if len(x) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return out.square().sum(), len(x)

    model = Replacing().double()
    report = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn).step(torch.ones(6, 4).double())
    assert report.ooms == 2
    assert model.seen.item() == 6
    assert model.late.item() == 12
