"""The optimizer's step and its state: every class of torch.optim and of schedulefree."""

import copy
import inspect
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from batchwright.errors import ArgumentError, UpdateMemoryError
from batchwright.step import Stepper
from batchwright.step._optimizers import (
    allocate_state,
    apply_update,
    check_optimizer,
    check_parameters,
    clip,
    optimizer_parameters,
    step_of_zeros,
)

schedulefree = pytest.importorskip("schedulefree")
torch.set_num_threads(1)

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
# Options to try where a class has them, several at once where they need each other.
OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.5, "centered": True},
    {"amsgrad": True},
    {"maximize": True},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"momentum": 0.9, "fused": True},
    {"differentiable": True},
    {"initial_accumulator_value": 0.5},
    {"t0": 1.0},
]
NEEDS_CLOSURE = {"LBFGS"}
KEEPS_STATE = {"Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "Muon", "RAdam", "RMSprop", "SGD", "SparseAdam"}
KEEPS_STATE -= {"Muon"} - KINDS.keys()  # came with torch 2.9


def variants():
    for name, kind in KINDS.items():
        names = inspect.signature(kind).parameters
        for options in OPTIONS:
            if name not in NEEDS_CLOSURE and options.keys() <= names.keys() and not is_refused(kind, options):
                words = ", ".join(f"{key}={value}" for key, value in options.items())
                yield pytest.param(kind, options, id=f"{name}({words})")


def is_refused(kind, options):
    """Say whether the class itself refuses the options, on the CPU."""
    try:
        kind([nn.Parameter(torch.ones(2, 2))], **options)
    except (RuntimeError, ValueError):
        return True
    return False


def make_parameters(differentiable=False):
    """Three matrices, so that Muon takes them; one has a zero and a negative zero."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((3, 2), (2, 4), (5, 1))]
    values[0][0] = torch.tensor([0.0, -0.0])
    parameters = [nn.Parameter(value) for value in values]
    if differentiable:  # such an optimizer cannot write to leaves
        parameters = [parameter.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.retain_grad()
    return parameters


def make_groups(parameters, lr=0.05):
    return [{"params": parameters[:2], "lr": lr}, {"params": parameters[2:], "lr": lr / 4}]


def real_step(optimizer, parameters, number, is_sparse=False):
    generator = torch.Generator().manual_seed(number)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
    optimizer.step()


def histories(make, num_steps=3, *, is_sparse=False, differentiable=False, schedule=None):
    """Parameters and rates after each real step: without the warm-up, with it, and the optimizer that had it."""
    found = []
    for is_warm in (False, True):
        parameters = make_parameters(differentiable)
        optimizer = make(make_groups(parameters))
        scheduler = None if schedule is None else schedule(optimizer)
        if is_warm:
            before = [parameter.detach().clone() for parameter in parameters]
            allocate_state(optimizer)
            for parameter, value in zip(parameters, before, strict=True):
                assert torch.equal(parameter.view(torch.int32), value.view(torch.int32))  # negative zeros count
        rows = []
        for number in range(num_steps):
            real_step(optimizer, parameters, number, is_sparse)
            if scheduler is not None:
                scheduler.step()
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            rows.append(([parameter.detach().clone() for parameter in parameters], rates))
        found.append(rows)
    return *found, optimizer


def assert_equal_to_the_bit(plain, warm):
    for (expected, rates), (got, rates_got) in zip(plain, warm, strict=True):
        assert rates == rates_got
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize(("kind", "options"), list(variants()))
def test_training_after_a_warm_up_is_the_same_to_the_bit(kind, options):
    # Before, relative errors of the parameters after three steps at a rate of 0.05: ASGD 5.3e-2, NAdam 2.9e-2,
    # Rprop 1.5e-1, SGD with a dampening of 0.5 7.9e-2; SparseAdam raised.
    flags = {"is_sparse": kind is torch.optim.SparseAdam, "differentiable": options.get("differentiable", False)}
    plain, warm, _ = histories(lambda groups: kind(groups, **options), **flags)
    assert_equal_to_the_bit(plain, warm)
    assert not torch.equal(plain[0][0][0], plain[1][0][0])  # the steps do something


FREE = {
    "AdamWScheduleFree": lambda groups: schedulefree.AdamWScheduleFree(groups, warmup_steps=2, weight_decay=0.1),
    "AdamWScheduleFree foreach=False": lambda groups: schedulefree.AdamWScheduleFree(groups, foreach=False),
    "AdamWScheduleFreePaper": schedulefree.AdamWScheduleFreePaper,
    "AdamWScheduleFreeReference": schedulefree.AdamWScheduleFreeReference,
    "RAdamScheduleFree": schedulefree.RAdamScheduleFree,
    "SGDScheduleFree": lambda groups: schedulefree.SGDScheduleFree(groups, warmup_steps=2),
    "SGDScheduleFreeReference": schedulefree.SGDScheduleFreeReference,
    "ScheduleFreeWrapper": lambda groups: schedulefree.ScheduleFreeWrapper(
        torch.optim.SGD(groups, weight_decay=0.1), weight_decay_at_y=0.1
    ),
    "ScheduleFreeWrapperReference": lambda groups: schedulefree.ScheduleFreeWrapperReference(torch.optim.SGD(groups)),
}


def test_every_class_of_schedulefree_is_tried_or_refused():
    kinds = {name for name, kind in vars(schedulefree).items() if inspect.isclass(kind)}
    assert kinds == {name.partition(" ")[0] for name in FREE} | {
        "AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure",
    }  # fmt: skip


@pytest.mark.parametrize("make", FREE.values(), ids=FREE)
def test_training_without_a_schedule_after_a_warm_up_is_the_same_to_the_bit(make):
    # Before: 1.08 for AdamWScheduleFree and 1.06 for SGDScheduleFree, because z started at zero instead of at the
    # parameters; the wrappers raised ZeroDivisionError.
    def in_training(groups):
        optimizer = make(groups)
        optimizer.train()
        return optimizer

    plain, warm, optimizer = histories(in_training, num_steps=4)
    assert_equal_to_the_bit(plain, warm)
    assert {group["k"] for group in optimizer.param_groups} == {4}


def test_training_with_a_rate_of_none_after_a_warm_up_is_the_same_to_the_bit():
    transformers = pytest.importorskip("transformers")

    def adafactor(groups):
        return transformers.Adafactor([{"params": group["params"]} for group in groups])

    results = []
    for is_warm in (False, True):
        parameters = make_parameters()
        optimizer = adafactor(make_groups(parameters))
        if is_warm:
            allocate_state(optimizer)
        for number in range(3):
            real_step(optimizer, parameters, number)
        results.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


SCHEDULES = {
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=8),  # cycles momentum too
    "in sequence": lambda optimizer: SequentialLR(
        optimizer, [StepLR(optimizer, 1), CosineAnnealingLR(optimizer, 4)], milestones=[2]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # torch 2.6 warns of its own SequentialLR
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD])
def test_a_scheduler_does_not_count_the_warm_up(kind, schedule):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    if kind is torch.optim.NAdam and schedule is SCHEDULES["one cycle"]:
        options["betas"] = (0.9, 0.99)
    plain, warm, _ = histories(lambda groups: kind(groups, **options), 4, schedule=schedule)
    assert_equal_to_the_bit(plain, warm)
    parameters = make_parameters()
    optimizer = kind(parameters, lr=0.1)
    scheduler = ExponentialLR(optimizer, 0.5)
    allocate_state(optimizer)
    with pytest.warns(UserWarning, match="before `optimizer.step"):  # as without the warm-up
        scheduler.step()


def test_hooks_and_counters_do_not_see_the_warm_up():
    calls = []

    class Counting(torch.optim.SGD):
        num_steps = 0

        def step(self, closure=None):
            self.num_steps += 1
            self.log.append(self.num_steps)
            return super().step(closure)

    parameters = make_parameters()
    torch.optim.SGD(parameters)  # the step of the base class runs hooks as well from now on
    optimizer = Counting(parameters, lr=0.1, momentum=0.9)
    optimizer.log = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    allocate_state(optimizer)
    assert optimizer.num_steps == 0
    assert optimizer.log == []
    assert calls == []


def test_hooks_of_all_optimizers_do_not_see_the_warm_up():
    calls = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    try:
        allocate_state(torch.optim.Adam(make_parameters()))
    finally:
        for hook in hooks:
            hook.remove()
    assert calls == []


class Noisy(torch.optim.Optimizer):
    """Moves parameters whatever the gradient, draws random numbers, and counts in a group and in a tensor."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "seen": []})
        self.count = torch.zeros(())
        self.lock = __import__("threading").Lock()  # cannot be copied

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["seen"].append(int(self.count))
            for parameter in group["params"]:
                start = self.state[parameter].setdefault("start", parameter.clone())
                parameter += 0.1 * torch.randn_like(parameter) + 0.01 * start + self.count


def test_an_unknown_optimizer_that_moves_parameters_and_draws_numbers_is_put_back():
    results = []
    for is_warm in (False, True):
        torch.manual_seed(0)
        parameters = make_parameters()
        optimizer = Noisy(parameters)
        if is_warm:
            allocate_state(optimizer)
        for number in range(3):
            real_step(optimizer, parameters, number)
        assert optimizer.param_groups[0]["seen"] == [1, 2, 3]
        results.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", sorted(KEEPS_STATE))
def test_state_that_starts_at_zero_is_kept(name):
    parameters = make_parameters()
    optimizer = KINDS[name](parameters, **({"momentum": 0.9} if name == "SGD" else {}))
    allocate_state(optimizer)
    sizes = [sum(torch.as_tensor(value).numel() for value in optimizer.state[p].values()) for p in parameters]
    assert min(sizes) > 0
    values = [value for state in optimizer.state.values() for value in state.values()]
    assert all(not torch.as_tensor(value).any() for value in values)


def test_classes_that_torch_adds_are_looked_at():
    assert KINDS.keys() == KEEPS_STATE | NEEDS_CLOSURE | {"ASGD", "Adagrad", "NAdam", "Rprop"}


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.NAdam,
        torch.optim.Rprop,
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9, dampening=0.1),
    ],
)
def test_other_state_is_dropped_again(make):
    optimizer = make(make_parameters())
    allocate_state(optimizer)
    assert not optimizer.state


def test_state_that_exists_is_left_alone():
    parameters = make_parameters()
    optimizer = torch.optim.Adam(parameters)
    real_step(optimizer, parameters, 0)
    before = copy.deepcopy(optimizer.state_dict())
    allocate_state(optimizer)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_gradients_that_were_there_stay_and_frozen_parameters_get_none():
    parameters = make_parameters()
    parameters[1].requires_grad_(False)
    parameters[0].grad = gradient = torch.ones(3, 2)
    optimizer = torch.optim.AdamW(parameters)
    allocate_state(optimizer)
    assert parameters[0].grad is gradient
    assert gradient.tolist() == [[1.0, 1.0]] * 3
    assert parameters[1].grad is None
    assert parameters[2].grad is None
    assert parameters[1] not in optimizer.state


class Hungry(torch.optim.SGD):
    """Runs out of memory after it has moved its first parameter."""

    def step(self, closure=None):
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_warm_up_that_runs_out_of_memory_changes_nothing():
    parameters = make_parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(UpdateMemoryError, match=r"does not fit in memory.*nothing has changed") as caught:
        allocate_state(Hungry(parameters))
    assert caught.value.can_retry
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    assert all(parameter.grad is None for parameter in parameters)


def test_calibration_makes_the_state_of_a_first_step_and_moves_no_parameter():
    parameters = make_parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.NAdam(parameters, weight_decay=0.1)
    step_of_zeros(optimizer)
    assert all(optimizer.state[parameter]["exp_avg"].shape == parameter.shape for parameter in parameters)
    assert all(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
    assert all(not parameter.grad.any() for parameter in parameters)


# ---- refusals ----------------------------------------------------------------------------------------------------


class SAM(torch.optim.SGD):
    def first_step(self): ...

    def second_step(self): ...


class Lomo(torch.optim.SGD):
    def fused_backward(self, loss, lr): ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda parameters: torch.optim.SGD, r"got the class; write SGD\(model\.parameters\(\), …\)"),
        (lambda parameters: parameters, "must have param_groups and step.*got <class 'list'>"),
        (torch.optim.LBFGS, "the step of LBFGS needs a closure"),
        (schedulefree.SGDScheduleFreeClosure, "the step of SGDScheduleFreeClosure needs a closure"),
        (SAM, "SAM needs the gradient at two points per update"),
        (Lomo, "Lomo steps inside backward, once per micro-batch"),
        (lambda parameters: torch.optim.SGD([{"params": []}]), "the optimizer has no parameter"),
    ],
)
def test_an_optimizer_that_one_step_cannot_serve_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        check_optimizer(make(make_parameters()))


@pytest.mark.parametrize("name", sorted(KINDS.keys() - NEEDS_CLOSURE))
def test_every_other_class_is_allowed(name):
    check_optimizer(KINDS[name](make_parameters()))
    for make in FREE.values():
        check_optimizer(make(make_parameters()))


def test_wrappers_do_not_hide_what_they_wrap():
    optimizers = pytest.importorskip("lightning.pytorch.core.optimizer")
    with pytest.raises(ArgumentError, match="the step of LBFGS needs a closure"):
        check_optimizer(optimizers.LightningOptimizer(torch.optim.LBFGS(make_parameters())))


def test_an_optimizer_in_backward_is_refused():
    # Before: three micro-batches stepped three times, each on a part of the gradient.
    parameters = make_parameters()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in parameters}
    handle = parameters[1].register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(ArgumentError, match=r"parameter 1 of shape \(2, 4\) has a hook of register_post_accumulate"):
        check_parameters(parameters)
    handle.remove()
    check_parameters(parameters)


def test_the_optimizer_in_backward_of_torch_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the module uses torch.jit
        from torch.distributed.optim import _apply_optimizer_in_backward

    parameters = make_parameters()
    _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.1})
    with pytest.raises(ArgumentError, match=r"parameter 0 of shape \(3, 2\) has an optimizer of _apply_optimizer"):
        check_parameters(parameters)


# ---- parameters --------------------------------------------------------------------------------------------------


def test_parameters_of_later_groups_and_unfrozen_ones_are_found_once_and_in_order():
    first, second, third = make_parameters()
    second.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns about duplicates
        optimizer = torch.optim.SGD([first, second, first], lr=0.1)
    assert list(map(id, optimizer_parameters(optimizer))) == [id(first)]
    optimizer.add_param_group({"params": [third]})
    second.requires_grad_(True)
    assert list(map(id, optimizer_parameters(optimizer))) == [id(first), id(second), id(third)]


def accelerated(optimizer):
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)


def lightning(optimizer):
    return pytest.importorskip("lightning.pytorch.core.optimizer").LightningOptimizer(optimizer)


@pytest.mark.parametrize("wrap", [accelerated, lightning])
def test_wrapped_optimizers_show_their_parameters_and_are_warmed_up(wrap):
    parameters = make_parameters()
    inner = torch.optim.AdamW(parameters, lr=0.1)
    wrapped = wrap(inner)
    assert list(map(id, optimizer_parameters(wrapped))) == list(map(id, parameters))
    check_optimizer(wrapped)
    allocate_state(wrapped)
    assert {float(state["step"]) for state in inner.state.values()} == {0.0}
    assert len(inner.state) == 3


# ---- the step ----------------------------------------------------------------------------------------------------


class RunsOut(torch.optim.Adam):
    """Runs out of memory at a place in its step."""

    def __init__(self, parameters, place):
        super().__init__(parameters)
        self.place = place

    def step(self, closure=None):
        if self.place == "parameters":
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
        elif self.place == "state":
            self.state[self.param_groups[0]["params"][0]] = {"step": torch.zeros(()), "average": torch.zeros(3, 2)}
        elif self.place == "counts":
            self.state[self.param_groups[0]["params"][0]] = {"step": torch.zeros(()).add_(1)}
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("place", "num_changed", "can_retry", "message"),
    [
        ("start", 0, False, "no parameter has changed, but the optimizer's state may have"),
        ("state", 0, False, "no parameter has changed, but the optimizer's state may have"),
        ("counts", 0, False, "no parameter has changed, but the optimizer's state may have"),
        ("parameters", 1, False, "1 of 3 parameters have changed"),
    ],
)
def test_running_out_in_the_step_says_what_is_left_of_it(place, num_changed, can_retry, message):
    parameters = make_parameters()
    with pytest.raises(UpdateMemoryError, match=message) as caught:
        apply_update(RunsOut(parameters, place), parameters)
    assert (caught.value.num_changed, caught.value.can_retry) == (num_changed, can_retry)


def test_an_optimizer_of_torch_that_has_no_state_yet_can_try_again():
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    optimizer = torch.optim.SGD(make_parameters(), lr=0.1)
    optimizer.register_step_pre_hook(fail)
    with pytest.raises(UpdateMemoryError, match=r"no parameter has changed\. Call") as caught:
        apply_update(optimizer, optimizer.param_groups[0]["params"])
    assert caught.value.can_retry


def test_fused_steps_count_no_versions_so_nothing_is_claimed():
    class Fused(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise torch.OutOfMemoryError("CUDA out of memory")

    parameters = make_parameters()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(UpdateMemoryError, match="but the optimizer's state may have") as caught:
        apply_update(Fused(parameters, lr=0.1, fused=True), parameters)
    assert not caught.value.can_retry


def test_parameters_without_a_version_are_no_problem():
    with torch.inference_mode():
        strange = nn.Parameter(torch.ones(2))
    parameters = [strange, *make_parameters()]
    with pytest.raises(UpdateMemoryError) as caught:
        apply_update(RunsOut(parameters[1:], "parameters"), parameters)
    assert caught.value.num_changed == 1


def test_the_figures_of_the_error_survive_a_process():
    import pickle

    error = pickle.loads(pickle.dumps(UpdateMemoryError("no room", num_changed=3, can_retry=False)))
    assert (str(error), error.num_changed, error.can_retry) == ("no room", 3, False)


def test_the_stepper_warms_up_an_optimizer_whose_state_does_not_start_at_zero():
    results = []
    for is_warm in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        stepper = Stepper(model, torch.optim.NAdam(model.parameters()), lambda net, x: (net(x).square().sum(), len(x)))
        if is_warm:
            stepper.warm_up()
        for _ in range(3):
            stepper.step(torch.randn(4, 3))
        results.append(model.weight)
    assert torch.equal(*results)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
@pytest.mark.parametrize("options", [{"capturable": True}, {"foreach": True}, {"fused": True}])
def test_on_the_device_training_is_the_same_and_kept_state_is_allocated(kind, options):
    if not options.keys() <= inspect.signature(kind).parameters.keys():
        pytest.skip("the class has no such option")
    results = []
    for is_warm in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(256, 256, device="cuda"))
        optimizer = kind([parameter], **options)
        if is_warm:
            before = torch.cuda.memory_allocated()
            allocate_state(optimizer)
            is_kept = torch.cuda.memory_allocated() - before >= 2 * parameter.nbytes
            assert is_kept is (kind is not torch.optim.NAdam)
        for _ in range(3):
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        results.append(parameter)
    assert torch.equal(*results)


def test_hooks_are_still_there_after_the_warm_up():
    optimizer = torch.optim.Adam(make_parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    hooks = optimizer._optimizer_step_post_hooks
    allocate_state(optimizer)
    assert isinstance(hooks, OrderedDict)
    assert optimizer._optimizer_step_post_hooks is hooks
    optimizer.step()
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_half_precision_are_clipped_by_their_norm_in_float32(dtype):
    """The squares of the first are beyond float16; a sparse one and one in float32 stand beside them."""
    parameters = [nn.Parameter(torch.zeros(2, 2, dtype=kind)) for kind in (dtype, dtype, dtype, torch.float32)]
    parameters[0].grad = torch.full((2, 2), 300.0, dtype=dtype)
    parameters[1].grad = torch.full((2, 2), 400.0, dtype=dtype).to_sparse()
    parameters[3].grad = torch.full((2, 2), 1200.0)
    assert float(clip(parameters, 26.0)) == 2600.0  # twice the root of 300² + 400² + 1200²
    found = [one.grad.to_dense()[0, 0].item() for one in parameters if one.grad is not None]
    assert found == pytest.approx([3.0, 4.0, 12.0], rel=1e-2)
