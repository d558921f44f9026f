"""scaled_lr: the step sees the scaled rate, everybody else the rate itself."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from batchwright.errors import ArgumentError
from batchwright.size.learning_rate import current_lr, innermost, scaled_lr

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.optim.lr_scheduler import (  # noqa: E402
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    OneCycleLR,
    StepLR,
)

torch.set_num_threads(1)
SCHEDULES = {
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "steps": lambda optimizer: StepLR(optimizer, 2),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplicative": lambda optimizer: MultiplicativeLR(optimizer, lambda step: 0.9),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 7),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=[0.3, 0.1], total_steps=8),
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer, 0.1), ExponentialLR(optimizer, 0.9)]),
}


def make_optimizer(kind=torch.optim.SGD, **options):
    parameters = [nn.Parameter(torch.full((size,), 8.0, dtype=torch.float64)) for size in (2, 3)]
    options = {"momentum": 0.0, **options} if kind is torch.optim.SGD else options
    optimizer = kind([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "lr": 0.25}], **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return optimizer, parameters


def rates_of(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def steps_taken(optimizer, parameters, factor, num_steps):
    """The rates between updates, and how far every update moved the parameters, whose gradients are 1."""
    rates, moves = [], []
    for _ in range(num_steps):
        before = [parameter[0].item() for parameter in parameters]
        with scaled_lr(optimizer, factor):
            optimizer.step()
        moves.append([old - parameter[0].item() for old, parameter in zip(before, parameters, strict=True)])
        rates.append(rates_of(optimizer))
    return rates, moves


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_scheduler_in_a_step_hook_keeps_its_sequence(schedule, place):
    # Before, the rate was put back over the scheduler's: constant for ever, and with a factor of 1 too.
    found = []
    for factor in (1.0, 4.0):
        optimizer, parameters = make_optimizer()
        scheduler = schedule(optimizer)
        register = optimizer.register_step_pre_hook if place == "before" else optimizer.register_step_post_hook
        if place == "before":
            optimizer._opt_called = True  # the scheduler warns otherwise
        register(lambda *_, scheduler=scheduler: scheduler.step())
        found.append(steps_taken(optimizer, parameters, factor, 6))
    (rates, moves), (rates_scaled, moves_scaled) = found
    assert rates == rates_scaled
    assert len(set(map(tuple, rates))) > 1
    for plain, scaled in zip(moves, moves_scaled, strict=True):
        assert scaled == pytest.approx([4 * move for move in plain], rel=1e-12)


def test_a_hook_never_sees_the_scaled_rate():
    optimizer, parameters = make_optimizer()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(rates_of(optimizer)))
    optimizer.register_step_post_hook(lambda *_: seen.append(rates_of(optimizer)))
    _, moves = steps_taken(optimizer, parameters, 2.0, 1)
    assert seen == [[0.5, 0.25]] * 2
    assert moves == [[1.0, 0.5]]
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1


def test_a_factor_of_one_touches_nothing():
    class Untouchable(dict):
        def __setitem__(self, key, value):
            raise AssertionError(key)

    optimizer = SimpleNamespace(param_groups=[Untouchable(lr=0.5), Untouchable(lr=None), Untouchable()])
    with scaled_lr(optimizer, 1.0):
        optimizer.param_groups[0].update(lr=0.25)  # what a scheduler in the step would do
    assert optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("group", [{"lr": None}, {}])
def test_a_group_without_a_rate_cannot_be_scaled(group):
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}, group])
    with (
        pytest.raises(ArgumentError, match=r"group 1 of SimpleNamespace has none; give the optimizer a rate"),
        scaled_lr(optimizer, 2.0),
    ):
        pass
    assert optimizer.param_groups[0] == {"lr": 0.5}


def test_the_rate_of_adafactor_is_none_while_it_computes_its_own():
    transformers = pytest.importorskip("transformers")
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = transformers.Adafactor([parameter])
    assert current_lr(optimizer) is None
    with scaled_lr(optimizer, 1.0):
        optimizer.step()
    with pytest.raises(ArgumentError, match="relative_step=False"), scaled_lr(optimizer, 2.0):
        optimizer.step()


def test_a_tensor_stays_the_same_object_and_is_scaled_once_for_all_groups():
    rate = torch.tensor(0.5)
    parameters = [nn.Parameter(torch.full((2,), 8.0)), nn.Parameter(torch.full((3,), 8.0))]
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=rate)
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    _, moves = steps_taken(optimizer, parameters, 4.0, 1)
    assert moves == [[2.0, 2.0]]
    assert all(group["lr"] is rate for group in optimizer.param_groups)
    assert rate.item() == 0.5
    scheduler = ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    steps_taken(optimizer, parameters, 4.0, 1)
    assert optimizer.param_groups[0]["lr"] is rate
    assert current_lr(optimizer) == 0.25


def test_rates_are_back_after_an_error_in_the_step():
    optimizer, parameters = make_optimizer()
    parameters[1].grad = torch.ones(3, dtype=torch.float64).to_sparse()
    optimizer.param_groups[1]["weight_decay"] = 0.1  # torch refuses it with sparse gradients
    with pytest.raises(RuntimeError), scaled_lr(optimizer, 4.0):
        optimizer.step()
    assert rates_of(optimizer) == [0.5, 0.25]
    with ExitStack() as stack:
        stack.enter_context(scaled_lr(optimizer, 4.0))
        with pytest.raises(RuntimeError):
            optimizer.step()
        stack.close()
        assert rates_of(optimizer) == [0.5, 0.25]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_step_that_calls_the_step_of_its_base_class_is_scaled_once():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # from now on hooks run in both steps
    optimizer, parameters = make_optimizer(Twice)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    rates, moves = steps_taken(optimizer, parameters, 2.0, 1)
    assert len(calls) == 2
    assert moves == [[1.0, 0.5]]
    assert rates == [[0.5, 0.25]]


def test_a_step_that_changes_its_own_rate_cannot_be_scaled():
    class Decaying(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] *= 0.5

    optimizer, parameters = make_optimizer(Decaying)
    steps_taken(optimizer, parameters, 1.0, 1)
    assert rates_of(optimizer) == [0.25, 0.25]
    with pytest.raises(ArgumentError, match=r"changed to 0.5 inside the step of Decaying while it was scaled"):
        steps_taken(optimizer, parameters, 4.0, 1)
    assert rates_of(optimizer) == [0.25, 0.25]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Dynamo's own
def test_a_compiled_step_is_scaled_too():
    optimizer, parameters = make_optimizer()
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    rates, moves = steps_taken(optimizer, parameters, 2.0, 3)
    assert rates == [[0.5, 0.25]] * 3
    assert moves == [[1.0, 0.5]] * 3


def test_a_step_that_the_user_replaced_is_scaled_too():
    optimizer, parameters = make_optimizer()
    step = optimizer.step
    optimizer.step = lambda: step()
    rates, moves = steps_taken(optimizer, parameters, 2.0, 1)
    assert (rates, moves) == ([[0.5, 0.25]], [[1.0, 0.5]])


def test_a_scaler_that_skips_the_step_leaves_the_rates():
    optimizer, parameters = make_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    parameters[0].grad.fill_(float("inf"))
    scaler.scale(torch.ones(1))
    with scaled_lr(optimizer, 4.0):
        scaler.step(optimizer)
        scaler.update()
    assert parameters[1].tolist() == [8.0] * 3
    assert rates_of(optimizer) == [0.5, 0.25]


def accelerated(optimizer):
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)


def lightning(optimizer):
    pl = pytest.importorskip("lightning.pytorch")
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False)
    trainer.strategy._lightning_module = pl.LightningModule()
    trainer.strategy._lightning_module.trainer = trainer
    wrapped = pl.core.optimizer.LightningOptimizer(optimizer)
    wrapped._strategy = trainer.strategy
    return wrapped


@pytest.mark.parametrize("wrap", [accelerated, lightning])
def test_a_scheduler_in_a_hook_of_a_wrapped_optimizer_keeps_its_sequence(wrap):
    optimizer, parameters = make_optimizer()
    scheduler = ExponentialLR(optimizer, 0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    wrapped = wrap(optimizer)
    assert innermost(wrapped) is optimizer
    rates, moves = steps_taken(wrapped, parameters, 2.0, 2)
    assert rates == [[0.25, 0.125], [0.125, 0.0625]]
    assert moves == [[1.0, 0.5], [0.5, 0.25]]


def test_the_current_rate_is_that_of_the_first_group():
    assert current_lr(make_optimizer()[0]) == 0.5
    assert current_lr(SimpleNamespace(param_groups=[{}])) is None
