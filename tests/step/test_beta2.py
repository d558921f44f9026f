"""Stepper(beta2_rule=…): the second of betas inside the step, and the user's betas everywhere else."""

import copy
import math

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.size.momentum import ChangedBeta2, beta2s_of, changed_beta2
from batchwright.size.noise import NoiseAverage
from batchwright.step import Stepper

torch.set_num_threads(1)
RULES = {"lr_rule": "sqrt", "beta2_rule": "half_life", "base_size": 8}


def batch_of(num, seed=0, width=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, width, generator=generator), torch.randn(num, 1, generator=generator)


def loss_fn(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023): beta2 is of the average of gradients, not of squares."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                parameter.sub_(torch.sign(average.lerp(parameter.grad, 1 - beta1)), alpha=group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, betas=(0.9, 0.99)),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.99), foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.99), fused=True),
    "adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, betas=(0.9, 0.99), amsgrad=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01, betas=(0.9, 0.99)),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=0.01, betas=(0.9, 0.99)),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.01, betas=(0.9, 0.99)),
    "lion": Lion,
}


def keep_corrected(optimizer, before, after):
    """Count Adam's steps so far as steps of the new size; others keep v / (1 - beta2 ** t) what it was."""
    for state in optimizer.state.values():
        if isinstance(optimizer, torch.optim.Adam):
            t = float(state["step"])
            u = t * math.log(before) / math.log(after)
            state["exp_avg"] *= (1 - 0.9**u) / (1 - 0.9**t)
            state["step"] *= u / t
            continue
        for name in {"exp_avg_sq", "max_exp_avg_sq"} & state.keys():
            t = int(state["step"])
            state[name] *= (1 - after**t) / (1 - before**t)


def by_hand(model, optimizer, sizes):
    """Train with the rate and beta2 written into the groups before every step."""
    before = 0.99
    for seed, num in enumerate(sizes):
        x, y = batch_of(num, seed)
        optimizer.zero_grad()
        ((model(x) - y).square().sum() / num).backward()
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = 0.01 * (num / 8) ** 0.5, (0.9, 0.99 ** (num / 8))
        keep_corrected(optimizer, before, 0.99 ** (num / 8))
        before = 0.99 ** (num / 8)
        optimizer.step()


def assert_same(mine, other):
    for one, twin in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, twin, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_step_uses_the_beta2_of_its_batch_size_and_nobody_else_sees_it(name):
    model = make_model()
    twin = copy.deepcopy(model)
    by_hand(twin, OPTIMIZERS[name](twin.parameters()), (8, 16, 4, 32))
    optimizer = OPTIMIZERS[name](model.parameters())
    betas = optimizer.param_groups[0]["betas"]
    stepper = Stepper(model, optimizer, loss_fn, **RULES)
    reports = [stepper.step(batch_of(num, seed)) for seed, num in enumerate((8, 16, 4, 32))]
    assert_same(model, twin)
    assert [report.beta2 for report in reports] == pytest.approx([0.99, 0.9801, 0.99**0.5, 0.99**4])
    assert optimizer.param_groups[0]["betas"] is betas
    assert optimizer.state_dict()["param_groups"][0]["betas"] == (0.9, 0.99)


def test_sparse_gradients_train_with_the_beta2_of_the_size():
    def made():
        torch.manual_seed(0)
        model = nn.Embedding(5, 2, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters(), lr=0.1, betas=(0.9, 0.99))

    (model, optimizer), (twin, other) = made(), made()
    stepper = Stepper(model, optimizer, lambda model, x: (model(x).square().sum(), len(x)), beta2_rule="half_life",
                      base_size=2)  # fmt: skip
    for x in (torch.tensor([0, 1]), torch.tensor([1, 2, 3, 1])):
        stepper.step((x,)[0])
        other.zero_grad()
        other.param_groups[0]["betas"] = (0.9, 0.99 ** (len(x) / 2))
        keep_corrected(other, 0.99, 0.99 ** (len(x) / 2))
        (twin(x).square().sum() / len(x)).backward()
        other.step()
    assert_same(model, twin)


def test_hooks_of_the_step_and_checkpoints_made_in_them_hold_the_betas_of_the_user():
    model = make_model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["betas"]))
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["betas"]))
    Stepper(model, optimizer, loss_fn, **RULES).step(batch_of(32))
    assert seen == [(0.9, 0.99), (0.9, 0.99)]


def test_every_group_keeps_its_own_beta2_and_groups_without_betas_are_left_alone():
    used = []

    class Watched(torch.optim.Optimizer):
        def step(self, closure=None):
            used.extend(group.get("betas") for group in self.param_groups)

    model = make_model()
    groups = [{"params": [value]} for value in model.parameters()]
    options = [(0.9, 0.99), [0.9, 0.5, 0.7], None, (0.9, 0.0)]
    optimizer = Watched(groups, {"lr": 0.1})
    for group, betas in zip(optimizer.param_groups, options, strict=True):
        group.update({} if betas is None else {"betas": betas})
    with pytest.warns(UserWarning, match="does not know the bias correction of Watched"):
        stepper = Stepper(model, optimizer, loss_fn, **RULES)
    stepper.step(batch_of(16))
    # One that is below 0.95 already does not fall further.
    assert used == [(0.9, 0.99**2), [0.9, 0.5, 0.7], None, (0.9, 0.0)]
    assert [group.get("betas") for group in optimizer.param_groups] == options


def test_a_beta2_in_a_tensor_stays_the_same_tensor_and_gets_its_value_back():
    model = make_model()
    beta2 = torch.tensor(0.99)
    options = {"lr": 0.01, "betas": (torch.tensor(0.9), beta2), "foreach": False, "capturable": False}
    optimizer = torch.optim.Adam(model.parameters(), **options)
    with ChangedBeta2(optimizer, [0.5]):
        assert optimizer.param_groups[0]["betas"][1] is beta2
        assert float(beta2) == 0.5
    assert float(beta2) == torch.tensor(0.99).item()
    stepper = Stepper(model, optimizer, loss_fn, **RULES)
    assert stepper.step(batch_of(16)).beta2 == pytest.approx(0.9801)
    assert float(beta2) == torch.tensor(0.99).item()


def test_groups_that_share_a_tensor_get_one_value_back():
    beta2 = torch.tensor(0.9)
    groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)]
    optimizer = Lion(groups, betas=(0.9, beta2))
    with ChangedBeta2(optimizer, [0.5, 0.5]):
        pass
    assert float(beta2) == torch.tensor(0.9).item()


def test_a_wrapped_optimizer_is_changed_inside():
    model = make_model()
    twin = copy.deepcopy(model)
    by_hand(twin, OPTIMIZERS["adam"](twin.parameters()), (16, 4))
    inner = OPTIMIZERS["adam"](model.parameters())
    stepper = Stepper(model, Accelerator(cpu=True).prepare(inner), loss_fn, **RULES)
    for seed, num in enumerate((16, 4)):
        stepper.step(batch_of(num, seed))
    assert_same(model, twin)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_uses_the_beta2_of_its_size():
    model = make_model()
    twin = copy.deepcopy(model)
    by_hand(twin, OPTIMIZERS["adam"](twin.parameters()), (8, 16, 16))
    optimizer = OPTIMIZERS["adam"](model.parameters())
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    stepper = Stepper(model, optimizer, loss_fn, **RULES)
    for seed, num in enumerate((8, 16, 16)):
        stepper.step(batch_of(num, seed))
    assert_same(model, twin)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_a_step_that_fails_leaves_the_betas_of_the_user():
    class Fails(Lion):
        def step(self, closure=None):
            raise RuntimeError("no")

    model = make_model()
    optimizer = Fails(model.parameters())
    stepper = Stepper(model, optimizer, loss_fn, **RULES)
    with pytest.raises(RuntimeError, match="no"):
        stepper.step(batch_of(16))
    assert beta2s_of(optimizer) == (0.99,)


def test_a_step_that_changes_its_betas_is_refused_and_the_betas_are_put_back():
    class Changes(Lion):
        def step(self, closure=None):
            self.param_groups[0]["betas"] = (0.5, 0.5)

    model = make_model()
    optimizer = Changes(model.parameters())
    with pytest.raises(ArgumentError, match=r"betas were changed to \(0.5, 0.5\) inside the step of Changes"):
        Stepper(model, optimizer, loss_fn, **RULES).step(batch_of(16))
    assert beta2s_of(optimizer) == (0.99,)


def test_a_rule_of_ones_own_gets_the_sizes_and_the_beta2_of_the_group():
    model = make_model()
    asked = []

    def rule(batch_size, base_size, beta2):
        asked.append((batch_size, base_size, beta2))
        return 0.5

    stepper = Stepper(model, OPTIMIZERS["adam"](model.parameters()), loss_fn, beta2_rule=rule, base_size=4)
    assert stepper.step(batch_of(12)).beta2 == 0.5
    assert asked == [(12, 4, 0.99)]


@pytest.mark.parametrize("answer", [1.0, -0.1, float("nan"), "0.9"])
def test_a_beta2_outside_its_range_is_refused_before_the_step(answer):
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    stepper = Stepper(model, optimizer, loss_fn, beta2_rule=lambda *_: answer, base_size=4)
    with pytest.raises(ArgumentError, match=r"beta2_rule\(8, 4, 0.99\), the new beta2, must be a number of 0 or more"):
        stepper.step(batch_of(8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_an_optimizer_without_betas_is_refused(kind):
    model = make_model()
    match = f"no group of {kind.__name__} has betas; leave beta2_rule out"
    with pytest.raises(ArgumentError, match=match):
        Stepper(model, kind(model.parameters(), lr=0.1), loss_fn, beta2_rule="half_life", base_size=8)


def test_a_second_beta_of_none_is_no_beta():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["betas"] = (0.9, None)
    with pytest.raises(ArgumentError, match="no group of SGD has betas; leave beta2_rule out"):
        Stepper(model, optimizer, loss_fn, beta2_rule="half_life", base_size=8)


def test_a_rule_without_a_base_size_or_with_an_unknown_name_is_refused():
    model = make_model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with pytest.raises(ArgumentError, match="beta2_rule needs base_size, the batch size that the optimizer's betas"):
        Stepper(model, optimizer, loss_fn, beta2_rule="half_life")
    with pytest.raises(ArgumentError, match="beta2_rule must be 'half_life', a function of"):
        Stepper(model, optimizer, loss_fn, beta2_rule="sqrt", base_size=8)


def test_equal_values_touch_nothing():
    optimizer = Lion([nn.Parameter(torch.ones(1))])
    betas = optimizer.param_groups[0]["betas"]
    with changed_beta2(optimizer, [0.99]):
        assert optimizer.param_groups[0]["betas"] is betas


def far_loss(model, batch):
    return (model(batch[0]) - 9.0).square().sum(), len(batch[0])


def test_a_stepper_that_measures_noise_makes_the_squares_follow_the_size():
    model = make_model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    stepper = Stepper(model, optimizer, far_loss, measure_noise=True, **RULES)
    for seed in range(40):
        stepper.step(batch_of(8, seed))
    before, seen = [held["exp_avg_sq"].clone() for held in optimizer.state.values()], []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(one["exp_avg_sq"].clone() for one in optimizer.state.values())
    )
    stepper.step(batch_of(64, 99))
    noise = NoiseAverage.from_state(stepper.state_dict()["noise"])
    assert noise.is_reliable
    factor = (1 + noise.scale / 64) / (1 + noise.scale / 8)
    assert 0.3 < factor < 0.99
    for average, was in zip(seen, before, strict=True):
        torch.testing.assert_close(average, factor * was, rtol=1e-5, atol=0)


def test_squares_that_followed_no_size_for_a_while_are_not_scaled_from_an_old_one():
    model = make_model()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with_rule = Stepper(model, optimizer, far_loss, measure_noise=True, **RULES)
    for seed in range(40):
        with_rule.step(batch_of(8, seed))
    without = Stepper(model, optimizer, far_loss)
    for seed in range(40):
        without.step(batch_of(64, seed))
    again = Stepper(model, optimizer, far_loss, measure_noise=True, **RULES)
    again.load_state_dict(with_rule.state_dict())  # which knows the noise scale
    before, seen = [held["exp_avg_sq"].clone() for held in optimizer.state.values()], []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(one["exp_avg_sq"].clone() for one in optimizer.state.values())
    )
    again.step(batch_of(64, 99))  # the averages are those of 64 examples
    for average, was in zip(seen, before, strict=True):
        torch.testing.assert_close(average, was, rtol=0, atol=0)
