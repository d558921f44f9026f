"""Updates between the parts of a Stepper, after failures and in unusual models: exact, or refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import warnings
import weakref
from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from batchwright.errors import ArgumentError, UpdateMemoryError
from batchwright.step import Stepper

WIDE = torch.float64


def _model(dtype=WIDE):
    torch.manual_seed(0)
    return nn.Linear(2, 1, dtype=dtype)


def _batch(num, dtype=WIDE, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 2, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randn(num, 1, generator=generator, dtype=torch.float64).to(dtype)


def _loss(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def _joined(*batches):
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def _truth(model, batch, loss_fn=_loss):
    """Return the gradient of the mean by plain autograd on a copy, whole."""
    twin = copy.deepcopy(model)
    loss, weight = loss_fn(twin, batch)[:2]
    return torch.autograd.grad(loss / float(weight), list(twin.parameters()))


class _Seen(torch.optim.SGD):
    """Keeps the gradients that its step sees."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)
        self.seen = []

    def step(self, closure=None):
        self.seen += [[parameter.grad for group in self.param_groups for parameter in group["params"]]]
        self.seen[-1] = [None if gradient is None else gradient.clone() for gradient in self.seen[-1]]
        return super().step(closure)


def _check(found, expected, tolerance=1e-12):
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class _OutOfMemoryAt(TorchDispatchMode):
    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("out of memory")
        return function(*args, **(kwargs or {}))


# Orders of calls


@pytest.mark.parametrize("disturb", ["another backward", "zero_grad"])
def test_gradients_changed_between_accumulate_and_step_are_refused(disturb):
    model = _model()
    optimizer = _Seen(model.parameters())
    stepper = Stepper(model, optimizer, _loss)
    first, second = _batch(4), _batch(4, seed=2)
    stepper.accumulate(first)
    if disturb == "zero_grad":
        optimizer.zero_grad()
    else:
        model(first[0]).sum().backward()
    with pytest.raises(ArgumentError, match="was changed"):
        stepper.step(second)
    assert not optimizer.seen


def test_other_parameters_in_the_middle_of_an_update_are_refused_every_time():
    model = _model()
    model.bias.requires_grad_(False)
    optimizer = _Seen(model.parameters())
    stepper = Stepper(model, optimizer, _loss)
    stepper.accumulate(_batch(4))
    model.bias.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="other parameters"):
            stepper.step(_batch(6, seed=2))
    assert not optimizer.seen


def test_an_update_goes_on_when_the_parameters_are_again_those_it_began_with():
    model = _model()
    model.bias.requires_grad_(False)
    optimizer = _Seen(model.parameters())
    stepper = Stepper(model, optimizer, _loss)
    first, second = _batch(4), _batch(6, seed=2)
    stepper.accumulate(first)
    model.bias.requires_grad_(True)
    expected = _truth(model, _joined(first, second))[:1]
    with pytest.raises(ArgumentError, match="other parameters"):
        stepper.accumulate(second)
    model.bias.requires_grad_(False)
    stepper.accumulate(second)
    stepper.update()
    _check(optimizer.seen[0][:1], expected)


def test_a_refused_change_of_parameters_does_not_keep_gradients_from_being_clipped():
    model = _model()
    optimizer = _Seen(model.parameters())
    stepper = Stepper(model, optimizer, _loss, clip_norm=0.01)
    stepper.accumulate(_batch(4))
    model.bias.requires_grad_(False)
    with pytest.raises(ArgumentError, match="other parameters"):
        stepper.accumulate(_batch(4))
    with contextlib.suppress(ArgumentError):
        stepper.update()
    for seen in optimizer.seen:
        assert torch.cat([gradient.flatten() for gradient in seen]).norm() <= 0.01 + 1e-9


def test_noise_is_measured_on_all_parameters_after_a_refused_change_of_them():
    model = _model()
    model.bias.requires_grad_(False)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss, measure_noise=True)
    stepper.accumulate(_batch(4))
    model.bias.requires_grad_(True)
    with pytest.raises(ArgumentError, match="other parameters"):
        stepper.accumulate(_batch(4))
    stepper.abandon()
    twin = copy.deepcopy(model)
    other = Stepper(twin, torch.optim.SGD(twin.parameters(), lr=0.1), _loss, measure_noise=True)
    assert stepper.step(_batch(8)).noise.s == pytest.approx(other.step(_batch(8)).noise.s)


def test_a_parameter_that_joins_the_optimizer_after_accumulate_is_not_moved_by_gradients_of_others():
    model = _model()
    late = nn.Parameter(torch.ones(2, dtype=WIDE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, _loss)
    stepper.accumulate(_batch(4))
    late.sum().backward()
    optimizer.add_param_group({"params": [late]})
    with contextlib.suppress(ArgumentError):
        stepper.update()
    assert late.tolist() == [1.0, 1.0]


def test_the_gradient_is_complete_without_reduce_in_half_precision_too():
    model = _model(torch.bfloat16)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss, micro_batch=2)
    batch = _batch(4, torch.bfloat16)
    expected = _truth(model, batch)
    stepper.accumulate(batch, total_weight=4)
    _check([parameter.grad for parameter in model.parameters()], expected, 0.05)


@pytest.mark.parametrize("last", ["update", "step"])
def test_a_batch_that_fails_anywhere_leaves_the_earlier_ones_of_its_update_as_they_were(last):
    first, second = _batch(5), _batch(3, seed=2)
    expected = _truth(_model(), _joined(first, second))
    for number in range(1, 60):
        model = _model()
        optimizer = _Seen(model.parameters())
        stepper = Stepper(model, optimizer, _loss, on_oom="raise")
        stepper.accumulate(first)
        has_failed = False
        try:
            with _OutOfMemoryAt(number):
                stepper.accumulate(second)
        except MemoryError:
            has_failed = True
        if has_failed and last == "step":
            stepper.step(second)
        else:
            if has_failed:
                stepper.accumulate(second)
            stepper.update()
        _check(optimizer.seen[0], expected)
        if not has_failed:
            return


# Failures in the update


class _FailsOnce(torch.optim.SGD):
    place = "step"
    error: type[BaseException] = MemoryError
    has_failed = False

    def _fail(self, place):
        if self.place == place and not self.has_failed:
            self.has_failed = True
            raise self.error("out of memory")

    def step(self, closure=None):
        super().step(closure)
        self._fail("step")

    def zero_grad(self, set_to_none=True):
        self._fail("zero_grad")
        super().zero_grad(set_to_none)


@pytest.mark.parametrize(("place", "error"), [("zero_grad", MemoryError), ("step", KeyboardInterrupt)])
def test_an_update_that_was_applied_before_an_error_is_not_applied_again(place, error):
    model = _model()
    before, gradient = model.weight.detach().clone(), _truth(model, _batch(4))[0]
    optimizer = _FailsOnce(model.parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, _loss)
    stepper.accumulate(_batch(4))
    optimizer.place, optimizer.error = place, error
    with pytest.raises(error):
        stepper.update()
    with contextlib.suppress(ArgumentError):
        stepper.update()
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * gradient)


class _ThroughData(torch.optim.Optimizer):
    """Writes through ``.data``, which counts no versions; runs out of memory at its second parameter, once."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.has_failed = False

    def step(self, closure=None):
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            if place == 1 and not self.has_failed:
                self.has_failed = True
                raise MemoryError("out of memory")
            parameter.data.add_(parameter.grad, alpha=-0.1)


class _KeepsFirstGradient(torch.optim.Optimizer):
    """Momentum that starts with the first gradient; runs out of memory after it has made its state, once."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.has_failed = False

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "buffer" in state:
                state["buffer"].mul_(0.9).add_(parameter.grad)
            else:
                state["buffer"] = parameter.grad.clone()
            if not self.has_failed:
                self.has_failed = True
                raise MemoryError("out of memory")
            parameter.add_(state["buffer"], alpha=-0.1)


@pytest.mark.parametrize("kind", [_ThroughData, _KeepsFirstGradient])
def test_an_optimizer_that_can_be_retried_after_out_of_memory_gives_the_exact_update(kind):
    model = _model()
    before, gradient = model.weight.detach().clone(), _truth(model, _batch(4))[0]
    stepper = Stepper(model, kind(model.parameters()), _loss)
    stepper.accumulate(_batch(4))
    with pytest.raises(UpdateMemoryError) as caught:
        stepper.update()
    if caught.value.can_retry:
        stepper.update()
        torch.testing.assert_close(model.weight.detach(), before - 0.1 * gradient)


def test_schedule_free_that_can_be_retried_after_out_of_memory_gives_the_exact_update():
    schedulefree = pytest.importorskip("schedulefree")

    def made():
        model = _model()
        optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
        optimizer.train()
        stepper = Stepper(model, optimizer, _loss)
        return model, stepper

    def third_weight(model, stepper):
        stepper.step(_batch(4, seed=2))
        stepper.step(_batch(4, seed=3))
        return model.weight.detach()

    model, stepper = made()
    stepper.step(_batch(4))
    expected = third_weight(model, stepper)
    for number in range(1, 40):
        model, stepper = made()
        stepper.accumulate(_batch(4))
        stepper.reduce()
        try:
            with _OutOfMemoryAt(number):
                stepper.update()
        except UpdateMemoryError as error:
            if not error.can_retry:
                continue
            stepper.update()
            torch.testing.assert_close(third_weight(model, stepper), expected)
        except MemoryError:
            continue


def test_an_error_while_gradients_are_clipped_does_not_clip_some_of_them_twice():
    def loss_fn(model, batch):
        return (model["last"](model["first"](batch[0])) - batch[1]).square().sum(), len(batch[0])

    def made():
        torch.manual_seed(0)
        first = nn.Embedding(7, 4, sparse=True, dtype=WIDE)
        model = nn.ModuleDict({"first": first, "last": nn.Linear(4, 1, dtype=WIDE)})
        stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn, clip_norm=0.1)
        stepper.accumulate((torch.tensor([0, 3, 3, 5]), torch.ones(4, 1, dtype=WIDE)))
        stepper.reduce()
        return model, stepper

    model, stepper = made()
    before = copy.deepcopy(model.state_dict())
    stepper.update()
    expected = model.state_dict()
    for number in range(1, 30):
        model, stepper = made()
        with contextlib.suppress(ArgumentError, UpdateMemoryError):
            try:
                with _OutOfMemoryAt(number):
                    stepper.update()
                break
            except UpdateMemoryError:
                continue  # the optimizer says itself how far it came
            except MemoryError:
                stepper.update()
        for name, value in model.state_dict().items():
            is_either = torch.allclose(value, expected[name]) or torch.equal(value, before[name])
            assert is_either, f"operation {number}: {name}"


class _FailsAfterUnscaling(torch.amp.GradScaler):
    has_failed = False

    def _unscale_grads_(self, *args, **kwargs):
        found = super()._unscale_grads_(*args, **kwargs)
        if not self.has_failed:
            self.has_failed = True
            raise MemoryError("out of memory")
        return found


def test_gradients_are_not_unscaled_twice_after_an_error():
    model = _model(torch.float32)
    batch = _batch(4, torch.float32)
    before, gradient = model.weight.detach().clone(), _truth(model, batch)[0]
    scaler = _FailsAfterUnscaling("cpu", init_scale=256.0)
    options = {"scaler": scaler, "weight_of": lambda batch: len(batch[0])}
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss, **options)
    stepper.accumulate(batch)
    with pytest.raises(MemoryError):
        stepper.update()
    try:
        stepper.update()
    except ArgumentError:
        return
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * gradient)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0])
def test_a_rule_that_gives_no_usable_factor_is_refused_before_anything_moves(factor):
    model = _model()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, _loss, lr_rule=lambda size, base: factor, base_size=4)
    with pytest.raises(ArgumentError):
        stepper.step(_batch(4))
    assert torch.equal(model.weight.detach(), before)


# Weights and losses


def test_float16_does_not_overflow_where_the_first_piece_weighs_little():
    model = nn.Linear(2, 1, bias=False).half()
    batch = (torch.full((2, 2), 8.0).half(), torch.tensor([1.0, 30000.0]))

    def loss_fn(model, batch):
        x, weights = batch
        return (model(x).float().squeeze(1) * weights).sum(), float(weights.sum())

    expected = _truth(model, batch, loss_fn)
    optimizer = _Seen(model.parameters())
    with contextlib.suppress(ArgumentError):
        Stepper(model, optimizer, loss_fn, micro_batch=1).step(batch)
    for seen in optimizer.seen:
        _check(seen, expected, 1e-2)


def test_float16_does_not_vanish_where_the_first_piece_weighs_most():
    model = nn.Linear(2, 1, bias=False).half()
    inputs, weights = torch.full((64, 2), 1 / 64).half(), torch.ones(64)
    inputs[0], weights[0] = 0.0, 60000.0

    def loss_fn(model, batch):
        return (model(batch[0]).float().squeeze(1) * batch[1]).sum(), float(batch[1].sum())

    expected = _truth(model, (inputs, weights), loss_fn)
    optimizer = _Seen(model.parameters())
    with contextlib.suppress(ArgumentError):
        Stepper(model, optimizer, loss_fn, micro_batch=1).step((inputs, weights))
    for (seen,) in optimizer.seen:
        torch.testing.assert_close(seen, expected[0], rtol=0.05, atol=0.0)


def test_float32_does_not_overflow_where_the_first_piece_weighs_little():
    model = _model(torch.float32)
    batch = (torch.ones(2, 2), torch.tensor([1e-30, 1e30]))

    def loss_fn(model, batch):
        return (model(batch[0]).squeeze(1) * batch[1]).sum(), float(batch[1].sum())

    expected = _truth(model, batch, loss_fn)
    optimizer = _Seen(model.parameters())
    with contextlib.suppress(ArgumentError):
        Stepper(model, optimizer, loss_fn, micro_batch=1).step(batch)
    for seen in optimizer.seen:
        _check(seen, expected, 1e-5)


def test_a_piece_of_weight_and_loss_zero_may_have_a_gradient():
    model = _model()

    def loss_fn(model, batch):
        outputs = model(batch[0]).squeeze(1)
        # A surrogate whose value is 0 and whose gradient is not, as policy gradients have.
        return (outputs * batch[1]).sum() + (outputs - outputs.detach()).sum(), float(batch[1].sum())

    batch = (_batch(4)[0], torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=WIDE))
    expected = _truth(model, batch, loss_fn)
    optimizer = _Seen(model.parameters())
    with contextlib.suppress(ArgumentError):
        Stepper(model, optimizer, loss_fn, micro_batch=2).step(batch)
    for seen in optimizer.seen:
        _check(seen, expected)


def test_a_loss_function_that_runs_backward_itself_is_exact_or_refused():
    model = _model()
    expected = _truth(model, _batch(4))
    optimizer = _Seen(model.parameters())

    def loss_fn(model, batch):
        model(batch[0]).sum().backward()
        return _loss(model, batch)

    with contextlib.suppress(ArgumentError):
        Stepper(model, optimizer, loss_fn, micro_batch=2).step(_batch(4))
    for seen in optimizer.seen:
        _check(seen, expected)


# Batches


class _Scaled(UserDict):
    def __init__(self, data=None, scale=1.0):
        super().__init__(data or {})
        self.scale = scale


class _ScaledDict(dict):
    def __init__(self, data=(), scale=1.0):
        super().__init__(data)
        self.scale = scale


class _ScaledTuple(namedtuple("_Pair", ["x", "y"])):  # without slots, so it takes attributes
    scale = 1.0


class _WithSlot:
    __slots__ = ("scale",)


@dataclasses.dataclass
class _ScaledData(_WithSlot):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("kind", ["UserDict", "dict", "named tuple", "dataclass"])
def test_what_a_container_holds_besides_its_fields_reaches_every_piece_or_is_refused(kind):
    x, y = _batch(4)
    if kind in ("UserDict", "dict"):
        batch = (_Scaled if kind == "UserDict" else _ScaledDict)({"x": x, "y": y}, scale=3.0)
    else:
        batch = _ScaledTuple(x, y) if kind == "named tuple" else _ScaledData(x, y)
        batch.scale = 3.0

    def loss_fn(model, batch):
        x, y = (batch["x"], batch["y"]) if isinstance(batch, UserDict | dict) else (batch.x, batch.y)
        return getattr(batch, "scale", 1.0) * _loss(model, (x, y))[0], len(x)

    model = _model()
    expected = _truth(model, batch, loss_fn)
    optimizer = _Seen(model.parameters())
    with contextlib.suppress(ArgumentError):
        Stepper(model, optimizer, loss_fn, micro_batch=2).step(batch)
    for seen in optimizer.seen:
        _check(seen, expected)


def test_a_batch_that_the_loss_function_changed_is_not_used_again_after_out_of_memory():
    model = _model()
    x, y = _batch(4)
    expected = _truth(model, (x * 2, y))
    calls = []

    def loss_fn(model, batch):
        x, y = batch
        calls.append(x.mul_(2.0))
        if len(calls) == 1:
            raise MemoryError("out of memory")
        return _loss(model, (x, y))

    optimizer = _Seen(model.parameters())
    with contextlib.suppress(ArgumentError):
        Stepper(model, optimizer, loss_fn).step((x, y))
    for seen in optimizer.seen:
        _check(seen, expected)


def test_a_batch_with_a_field_of_no_rows_is_refused_in_our_words_or_runs_whole():
    model = _model()
    x, y = _batch(4)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: _loss(model, (batch["x"], batch["y"]))
    )
    with contextlib.suppress(ArgumentError):
        stepper.step({"none": torch.zeros(0, 3), "x": x, "y": y})


# Hooks and modules


def test_a_hook_that_loss_fn_removes_is_gone():
    model = _model()
    expected = _truth(model, _batch(8))
    handle = model.weight.register_hook(torch.zeros_like)

    def loss_fn(model, batch):
        handle.remove()
        return _loss(model, batch)

    optimizer = _Seen(model.parameters())
    Stepper(model, optimizer, loss_fn, micro_batch=2).step(_batch(8))
    _check(optimizer.seen[0], expected)


def test_a_hook_that_loss_fn_registers_sees_the_gradient_of_the_update_once():
    model = _model()
    expected = _truth(model, _batch(8))[0]
    handles = []

    def loss_fn(model, batch):
        if not handles:
            handles.append(model.weight.register_hook(lambda gradient: gradient.abs() * gradient))
        return _loss(model, batch)

    optimizer = _Seen(model.parameters())
    with contextlib.suppress(ArgumentError):
        Stepper(model, optimizer, loss_fn, micro_batch=2).step(_batch(8))
    for seen in optimizer.seen:
        _check(seen[:1], [expected.abs() * expected])


def test_a_hook_over_several_parameters_runs_or_is_refused_in_our_words():
    model = _model()
    seen = []
    torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), seen.append)
    with contextlib.suppress(ArgumentError):
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss, micro_batch=2).step(_batch(8))


def _warnings_of_second_step(model, before):
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss, micro_batch=4)
    before(stepper)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepper.step(_batch(8))
    return [str(warning.message) for warning in caught]


def test_the_older_spectral_norm_in_training_mode_is_said_to_depend_on_the_split():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 1))).double()
    assert any("spectral norm" in text for text in _warnings_of_second_step(model, lambda stepper: None))


def test_batch_norm_that_is_put_into_training_mode_later_is_said_to_depend_on_the_split():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)).double().eval()

    def before(stepper):
        stepper.step(_batch(8))
        model.train()

    assert any("BatchNorm" in text for text in _warnings_of_second_step(model, before))


def test_a_forward_pass_that_changes_parameters_is_exact_refused_or_said_to_depend_on_the_split():
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, max_norm=0.5, dtype=WIDE)

    def loss_fn(model, batch):
        scores = model(batch[0]).clone() @ model.weight.T  # tied, so other rows count too
        return F.cross_entropy(scores, batch[1], reduction="sum"), len(batch[0])

    batch = (torch.arange(6), torch.arange(6))
    expected = _truth(model, batch, loss_fn)
    optimizer = _Seen(model.parameters())
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(ArgumentError):
        warnings.simplefilter("always")
        Stepper(model, optimizer, loss_fn, micro_batch=2).step(batch)
    for seen in [] if caught else optimizer.seen:
        _check(seen, expected)


class _Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=WIDE))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def test_buffers_of_a_part_that_was_put_in_later_are_restored_after_out_of_memory():
    model = nn.Sequential(nn.Linear(2, 1, dtype=WIDE), nn.Identity())
    calls = []

    def loss_fn(model, batch):
        sums = _loss(model, batch)
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("out of memory")
        return sums

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    model[1] = _Counter()
    report = stepper.step(_batch(4))
    assert model[1].calls == report.num_micro_batches


# Noise


def test_a_hook_that_halves_all_gradients_quarters_their_noise_or_leaves_it():
    found = []
    for has_hook in (False, True):
        model = _model()
        for parameter in model.parameters() if has_hook else ():
            parameter.register_hook(lambda gradient: gradient / 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        noise = Stepper(model, optimizer, _loss, micro_batch=2, measure_noise=True).step(_batch(8)).noise
        found.append((noise.s, noise.g2))
    (s, g2), hooked = found
    assert hooked in (pytest.approx((s, g2)), pytest.approx((s / 4, g2 / 4)))


def test_a_stepper_that_is_gone_leaves_no_hook_on_the_parameters():
    model = _model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss, measure_noise=True)
    stepper.step(_batch(4))
    del stepper
    gc.collect()
    assert not model.weight._backward_hooks


# Memory


def test_gradients_are_freed_after_update():
    model = _model()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), _loss)
    stepper.accumulate(_batch(4))
    gradient = weakref.ref(model.weight.grad)
    stepper.update()
    gc.collect()
    assert gradient() is None


def test_activations_are_freed_as_soon_as_an_error_of_loss_fn_was_handled():
    model = _model()
    activations = []

    def loss_fn(model, batch):
        hidden = model(batch[0])
        activations.append(weakref.ref(hidden))
        raise ValueError("the labels are wrong")

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            stepper.step(_batch(4))
        assert activations[0]() is None
    finally:
        gc.enable()


def test_a_step_inside_a_loss_function_is_refused_and_loses_nothing():
    model = _model()
    optimizer = _Seen(model.parameters(), lr=0.0)
    expected = _truth(model, _batch(4))
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 2:
            with contextlib.suppress(ArgumentError):
                stepper.step(_batch(2, seed=2))
        return _loss(model, batch)

    stepper = Stepper(model, optimizer, loss_fn, micro_batch=2)
    with contextlib.suppress(ArgumentError):
        stepper.step(_batch(4))
    _check(optimizer.seen[-1], expected)
