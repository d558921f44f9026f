"""Every optimizer of PyTorch that steps without a closure, with options that matter, and a schedule-free one."""

from __future__ import annotations

import importlib.util
import inspect

import torch
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """Schedule-free SGD (Defazio et al., 2024, equations 3 to 5): ``z`` starts as the parameter, not as zero."""

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(z=parameter.clone(), x=parameter.clone(), num=0)
                state["num"] += 1
                state["z"].sub_(parameter.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / state["num"])
                parameter.copy_(state["z"].lerp(state["x"], group["beta"]))


def _steps_without_closure(value):
    if not (inspect.isclass(value) and issubclass(value, Optimizer)) or value is Optimizer:
        return False
    return inspect.signature(value.step).parameters["closure"].default is not inspect.Parameter.empty


_OPTIONS = {
    "SGD": [{}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}, {"foreach": False}],
    "AdamW": [{}, {"fused": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.5}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.3, "lr_decay": 0.1}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "ASGD": [{}, {"t0": 0.0}],
}
CLASSES = {name: value for name, value in vars(torch.optim).items() if _steps_without_closure(value)}
CLASSES["ScheduleFree"] = ScheduleFree
if importlib.util.find_spec("schedulefree") is not None:
    import schedulefree

    CLASSES["AdamWScheduleFree"] = schedulefree.AdamWScheduleFree
OPTIMIZERS = {name: _OPTIONS.get(name, [{}]) for name in CLASSES}


def make_optimizer(name, options, parameters):
    """Return a new optimizer, ready to train."""
    optimizer = CLASSES[name](parameters, lr=0.05, **OPTIMIZERS[name][options])
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer
