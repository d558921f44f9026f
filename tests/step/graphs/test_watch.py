"""Watch: every change of a model is noticed and none is invented; Untouched puts everything back."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from batchwright.step import Stepper
from batchwright.step.graphs._functions import is_rough
from batchwright.step.graphs._reach import Reach
from batchwright.step.graphs._watch import Untouched, Watch, hooks_of, unfit

from .plain import batch_of, squares
from .tape import TapeGraphs
from .twins import Twins, sgd


class Model(nn.Module):
    """Every kind of attribute that a module may have."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.scale, self.name, self.size = 1.0, "a", torch.Size([1])
        self.numbers, self.table = [1.0, 2.0], {"a": [1.0]}
        self.config = SimpleNamespace(scale=1.0)
        self.plain, self.nothing = torch.ones(2), None
        self.chance = random.Random(3)

    def forward(self, x):
        assert (self.name, self.size, self.nothing) is not getattr(self, "another", None)
        hidden = self.norm(self.drop(self.first(x))) * self.scale * self.config.scale
        return self.second(hidden) * self.table["a"][0] * self.plain.sum()


def loss_fn(model, batch):
    return model(batch).sum(), len(batch)


def watched(model):
    return Watch(Reach(model, loss_fn), list(model.parameters()))


def replace_data(model):
    model.first.weight.data = model.first.weight.data.clone()


def put_nan(model):
    model.scale = float("nan")


_CHANGES = {
    "float": lambda model: setattr(model, "scale", 2.0),
    "no-number": put_nan,
    "text": lambda model: setattr(model, "name", "b"),
    "none": lambda model: setattr(model, "nothing", 0),
    "size": lambda model: setattr(model, "size", torch.Size([2])),
    "new": lambda model: setattr(model, "another", 1),
    "gone": lambda model: delattr(model, "name"),
    "eval": lambda model: model.eval(),
    "eval-of-one": lambda model: model.drop.eval(),
    "share": lambda model: setattr(model.drop, "p", 0.1),
    "list": lambda model: model.numbers.append(3.0),
    "entry": lambda model: model.numbers.__setitem__(0, 3.0),
    "nested": lambda model: model.table["a"].__setitem__(0, 3.0),
    "config": lambda model: setattr(model.config, "scale", 2.0),
    "forward": lambda model: setattr(model, "forward", lambda x: x),
    "part": lambda model: setattr(model, "drop", nn.Dropout(0.5)),
    "new-part": lambda model: model.add_module("third", nn.ReLU()),
    "parameter": lambda model: setattr(model.first, "bias", nn.Parameter(torch.zeros(4))),
    "no-parameter": lambda model: setattr(model.first, "bias", None),
    "data": replace_data,
    "turned": lambda model: setattr(model.second.weight, "data", model.second.weight.data.t()),
    "shape-of-buffer": lambda model: setattr(model.norm.running_var, "data", model.norm.running_var.data.view(2, 2)),
    "renamed": lambda model: (delattr(model, "name"), setattr(model, "another", 1)),
    "hook-of-several": lambda model: torch.autograd.graph.register_multi_grad_hook([*model.parameters()], print),
    "hook-of-any": lambda model: torch.autograd.graph.register_multi_grad_hook([model.first.bias], print, mode="any"),
    "frozen": lambda model: model.first.requires_grad_(False),
    "buffer": lambda model: setattr(model.norm, "running_mean", torch.zeros(4)),
    "data-of-buffer": lambda model: setattr(model.norm.running_mean, "data", torch.zeros(4)),
    "new-buffer": lambda model: model.register_buffer("mean", torch.zeros(1)),
    "tensor": lambda model: setattr(model, "plain", torch.ones(2)),
    "data-of-tensor": lambda model: setattr(model.plain, "data", torch.ones(2)),
    "gradient-of-tensor": lambda model: model.plain.requires_grad_(),
    "view-of-tensor": lambda model: model.plain.resize_(1),
    "forward-hook": lambda model: model.first.register_forward_hook(lambda *given: None),
    "pre-hook": lambda model: model.first.register_forward_pre_hook(lambda *given: None),
    "backward-hook": lambda model: model.first.register_full_backward_hook(lambda *given: None),
    "backward-pre-hook": lambda model: model.first.register_full_backward_pre_hook(lambda *given: None),
    "half": lambda model: model.double(),
    "converted": lambda model: nn.utils.parametrize.register_parametrization(model.first, "weight", nn.Identity()),
}


@pytest.mark.parametrize("case", _CHANGES)
def test_every_change_of_a_model_is_noticed(case):
    model = Model()
    watch = watched(model)
    assert watch.change is None
    _CHANGES[case](model)
    assert watch.has_changed


_HARMLESS = {
    "values": lambda model: nn.init.zeros_(model.first.weight),
    "statistics": lambda model: model.norm.running_mean.add_(1),
    "plain-tensor": lambda model: model.plain.add_(1),
    "gradients": lambda model: [setattr(one, "grad", torch.ones_like(one)) for one in model.parameters()],
    "forward": lambda model: model(torch.ones(2, 3)),
    "state": lambda model: model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}),
    "same-value": lambda model: setattr(model, "scale", 1.0),
    "there-and-back": lambda model: model.eval() and model.train(),
    "copied": copy.deepcopy,
    "unread": lambda model: setattr(model.config, "unread", 1),
    "unread-attribute": lambda model: setattr(model, "num_updates", getattr(model, "num_updates", 0) + 1),
}


@pytest.mark.parametrize("case", _HARMLESS)
def test_what_a_replay_follows_or_never_reads_is_no_change(case):
    model = Model()
    watch = watched(model)
    _HARMLESS[case](model)
    assert watch.change is None


@given(st.lists(st.sampled_from(sorted(_HARMLESS)), max_size=4), st.sampled_from(sorted(_CHANGES)))
def test_no_order_of_harmless_acts_is_a_change_and_none_hides_one(acts, case):
    model = Model()
    watch = watched(model)
    for name in acts:
        _HARMLESS[name](model)
        assert watch.change is None
    _CHANGES[case](model)
    assert watch.has_changed
    assert watched(model).change in (None, "hooks")


def test_a_trainer_of_transformers_that_counts_its_steps_is_no_change(tmp_path):
    """Its loss is a method of the trainer, which holds counters, logs and a schedule, and reads none of them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model, seen = transformers.LlamaForCausalLM(config), []

    class Looks(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **given):
            if not seen:
                seen.append(Watch(Reach(model, lambda model, batch: (trainer.compute_loss(model, batch), 1)),
                                  list(model.parameters())))  # fmt: skip

        def on_step_end(self, args, state, control, **given):
            seen.append(seen[0].change)

    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], use_cpu=True, logging_steps=1,
        disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (6, 4))]
    trainer = transformers.Trainer(model, settings, train_dataset=rows, callbacks=[Looks()])
    trainer.train()
    assert seen[1:] == [None, None, None]
    trainer.model_accepts_loss_kwargs = "changed"
    assert seen[0].change is not None


def test_the_reason_names_what_has_changed():
    model = Model()
    watch = watched(model)
    model.config.scale = 2.0
    assert watch.change == "config.scale"


def test_a_hook_on_all_modules_is_noticed():
    watch = watched(Model())
    handle = register_module_forward_hook(lambda *given: None)
    try:
        assert watch.change == "hooks"
    finally:
        handle.remove()
    assert watch.change is None


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch below 2.9 has one name for it")
@pytest.mark.parametrize("value", ["tf32", "bf16"])
def test_a_precision_is_noticed_that_torch_does_not_tell_by_its_old_name(value):
    torch.set_float32_matmul_precision("highest")
    watch = watched(Model())
    try:
        matmul = torch.backends.mkldnn.matmul if value == "bf16" else torch.backends.cuda.matmul
        matmul.fp32_precision = value
        assert watch.change == "a setting of torch"
        assert is_rough(torch.device("cpu"))
        assert not watched(Model()).has_changed
    finally:
        matmul.fp32_precision = "ieee"
    assert not watch.has_changed
    assert not is_rough(torch.device("cpu"))


@pytest.mark.parametrize("context", [lambda: torch.autocast("cpu"), torch.no_grad], ids=["autocast", "no-grad"])
def test_a_setting_of_torch_is_noticed_only_while_it_holds(context):
    watch = watched(Model())
    with context():
        assert watch.change == "a setting of torch"
    assert watch.change is None


def test_the_value_of_a_tensor_on_the_host_counts_for_a_model_on_a_device():
    """Kernels take the number as an argument, so a graph would keep it."""

    class Scaled(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.layer = nn.Linear(2, 1, device=device)
            self.scale = torch.tensor(1.0)

    for device, is_noticed in (("meta", True), ("cpu", False)):
        model = Scaled(device)
        watch = watched(model)
        model.scale.fill_(2.0)
        assert watch.has_changed is is_noticed


def test_the_memory_of_trained_parameters_outside_of_the_model_counts():
    outside = nn.Parameter(torch.ones(2))
    watch = Watch(Reach(nn.Linear(2, 1)), [outside])
    outside.data = torch.ones(2)
    assert watch.has_changed


def test_weights_that_are_tied_and_untied_are_noticed():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    watch = watched(model)
    assert not watch.has_changed
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    assert watch.has_changed


# Untouched


def spoil(model):
    model.scale, model.name = 5.0, "z"
    model.another = 1
    del model.nothing
    model.numbers.append(3.0)
    model.table["a"].append(4.0)
    model.config.scale = 9.0
    model.plain.add_(1)
    model.chance.random()
    model.norm.running_mean = torch.ones(4)
    model.first.register_buffer("late", torch.ones(1))
    model.add_module("third", nn.ReLU())


def test_everything_is_put_back():
    model = Model()
    plain, mean, state = model.plain, model.norm.running_mean, model.chance.getstate()
    untouched = Untouched(Reach(model, loss_fn))
    spoil(model)
    assert untouched.put_back() is not None
    assert (model.scale, model.name, model.nothing) == (1.0, "a", None)
    assert (model.numbers, model.table, model.config.scale) == ([1.0, 2.0], {"a": [1.0]}, 1.0)
    assert model.plain is plain
    assert plain.tolist() == [1, 1]
    assert model.chance.getstate() == state
    assert model.norm.running_mean is mean
    assert not hasattr(model, "another")
    assert not hasattr(model, "third")
    assert [name for name, _ in model.first.named_buffers()] == []
    assert untouched.put_back() is None


def test_only_values_are_put_back_after_a_rehearsal():
    model = Model()
    untouched = Untouched(Reach(model, loss_fn))
    model.plain.add_(1)
    model.numbers.append(3.0)
    untouched.put_values_back()
    assert model.plain.tolist() == [1, 1]
    assert model.numbers == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (lambda model: setattr(model, "scale", 5.0), "scale"),
        (lambda model: setattr(model.drop, "p", 0.1), "drop.p"),
        (lambda model: model.numbers.append(1.0), "numbers"),
        (lambda model: setattr(model.config, "scale", 5.0), "config.scale"),
        (lambda model: setattr(model.norm, "running_mean", torch.ones(4)), "norm.running_mean"),
        (lambda model: model.plain.add_(1), None),
        (lambda model: model.norm.running_mean.add_(1), None),
        (lambda model: None, None),
    ],
    ids=["value", "part", "list", "config", "buffer", "tensor", "statistics", "nothing"],
)
def test_what_python_held_otherwise_is_named(act, name):
    model = Model()
    untouched = Untouched(Reach(model, loss_fn))
    act(model)
    assert untouched.put_back() == name


def test_buffers_of_another_model_and_generators_of_a_closure_are_put_back():
    teacher = nn.BatchNorm1d(2)
    generators = [random.Random(0), np.random.default_rng(0), np.random.RandomState(0), torch.Generator()]

    def distilled(model, batch):
        return (model(batch) - teacher(batch)).sum() * len(generators), len(batch)

    untouched = Untouched(Reach(nn.Linear(2, 2), distilled))
    wanted = draw(copy.deepcopy(generators[:3]), torch.Generator().manual_seed(generators[3].initial_seed()))
    teacher(torch.randn(4, 2))
    draw(generators[:3], generators[3])
    assert untouched.put_back() is None
    assert teacher.running_mean.tolist() == [0, 0]
    assert int(teacher.num_batches_tracked) == 0
    assert draw(generators[:3], generators[3]) == wanted


def draw(generators, of_torch):
    first, second, third = generators
    return [first.random(), second.random(), third.rand(), float(torch.rand((), generator=of_torch))]


# What stands against graphs


def test_hooks_are_named_by_their_part():
    model = Model()
    assert hooks_of(model) is None
    handle = model.first.register_forward_hook(lambda *given: None)
    assert hooks_of(model) == "first has hooks, which do not run at a replay"
    handle.remove()
    assert hooks_of(model) is None


def test_parameters_in_half_precision_and_on_several_devices_are_unfit():
    assert unfit(list(nn.Linear(2, 1).parameters())) is None
    assert unfit(list(nn.Linear(2, 1).double().parameters())) is None
    assert "torch.float16 are summed in float32" in unfit(list(nn.Linear(2, 1).half().parameters()))
    both = [torch.ones(1), torch.ones(1, device="meta")]
    assert unfit(both) == "the model lies on several devices, cpu and meta"


def test_an_attribute_replaced_by_one_of_another_name_is_a_change_and_no_error():
    twins = Twins("tape", nn.Sequential(nn.Linear(6, 3)), squares, [(4, 6)] * 4)
    twins.each(lambda side: setattr(side.model, "note", 1))
    for seed in range(4):
        twins.step(batch_of(seed=seed))

    def rename(side):
        del side.model.note
        side.model.remark = 1

    twins.each(rename)
    twins.step(batch_of(seed=9))
    twins.check()


@pytest.mark.filterwarnings("ignore:forward and backward are replayed, the update runs eagerly")
def test_a_weight_that_is_transposed_in_its_memory_is_a_change():
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 3))
    plain = {"make_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    twins = Twins("tape", model, squares, [(4, 6)] * 4, **plain)
    for seed in range(4):
        twins.step(batch_of(seed=seed))
    twins.each(lambda side: setattr(side.model[0].weight, "data", side.model[0].weight.data.t()))
    for seed in range(4, 7):
        twins.step(batch_of(seed=seed))
    twins.check()


def test_hooks_on_several_parameters_run_at_every_backward_pass():
    model, seen = nn.Linear(6, 3), []
    stepper = Stepper(model, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(4, 6)] * 4)
    for seed in range(4):
        stepper.step(batch_of(seed=seed))
    torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), seen.append)
    with pytest.warns(UserWarning, match="hooks of register_multi_grad_hook do not run at a replay"):  # noqa: PT031
        for seed in range(6):
            stepper.step(batch_of(seed=seed))
    assert len(seen) == 6


def test_the_reason_of_complex_parameters_is_true():
    reason = unfit([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    assert reason == "gradients of complex parameters (torch.complex64) are not gathered in static buffers"
