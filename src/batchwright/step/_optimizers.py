"""The optimizer: what it trains, whether it fits an update made of pieces, its step, and its state beforehand."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._ranks import Ranks, common_error, failure_of, half_to_float, is_sharded
from ..errors import ArgumentError, UpdateMemoryError
from ..size.learning_rate import innermost
from .oom import Snapshot, add_back, drop_gradients, is_out_of_memory, set_aside

State: TypeAlias = "dict[Tensor, dict[str, Any]]"

# Optimizers whose state starts with zeros only, SGD if it does not damp. Whatever is missing here is right too: its
# state is not kept.
_STARTS_AT_ZERO: frozenset[type] = frozenset(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adafactor", "Adam", "AdamW", "Adamax", "Muon", "RAdam", "RMSprop", "SGD", "SparseAdam")
    if hasattr(torch.optim, name)
)
_IN_BACKWARD = "_in_backward_optimizers"
_hooks_of = attrgetter("_post_accumulate_grad_hooks")
_requires_grad = attrgetter("requires_grad")


def check_optimizer(optimizer: Any) -> None:
    """Refuse an optimizer that one call of ``step()`` per update cannot serve, or that trains nothing."""
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        is_class = isinstance(optimizer, type)
        got = f"the class; write {optimizer.__name__}(model.parameters(), …)" if is_class else repr(type(optimizer))
        raise ArgumentError(f"optimizer must have param_groups and step(), as a torch.optim.Optimizer has, got {got}")
    inner = innermost(optimizer)
    name = type(inner).__name__
    if hasattr(inner, "fused_backward"):
        raise ArgumentError(
            f"{name} steps inside backward, once per micro-batch; use an optimizer that updates in step()"
        )
    if hasattr(inner, "first_step") and hasattr(inner, "second_step"):
        raise ArgumentError(
            f"{name} needs the gradient at two points per update, but it is computed once, before step(); "
            "use an optimizer whose step() needs no second gradient"
        )
    if _needs_closure(inner):
        raise ArgumentError(
            f"the step of {name} needs a closure that computes the gradient again, but it is computed once, before "
            "step(); use an optimizer whose step() works without a closure"
        )
    if not any(group["params"] for group in inner.param_groups):
        raise ArgumentError("the optimizer has no parameter; give it those to train")


def check_gradients(parameters: Sequence[Tensor]) -> None:
    """Refuse an update that would change nothing, as when the optimizer was made for another model."""
    if all(parameter.grad is None for parameter in parameters):
        raise ArgumentError(
            "the loss depends on no parameter that the optimizer trains, so the update would change nothing; make the "
            "optimizer from the parameters of this model, after the model was last replaced"
        )


def check_parameters(parameters: Sequence[Tensor]) -> None:
    """Refuse parameters that something updates or changes inside backward, and so once per micro-batch."""
    # Two quick passes, as this runs at every update.
    if not any(map(_hooks_of, parameters)) and not any(_IN_BACKWARD in value.__dict__ for value in parameters):
        return
    for number, parameter in enumerate(parameters):
        if parameter._post_accumulate_grad_hooks:
            found = "a hook of register_post_accumulate_grad_hook"
        elif _IN_BACKWARD in vars(parameter):
            found = "an optimizer of _apply_optimizer_in_backward"
        else:
            continue
        raise ArgumentError(
            f"parameter {number} of shape {tuple(parameter.shape)} has {found}, which runs inside every backward, so "
            "once per micro-batch instead of once per update; remove it and let the optimizer's step() update"
        )


def optimizer_parameters(optimizer: Any) -> list[nn.Parameter]:
    """Return the parameters that an optimizer trains now, each once, in order, over all its groups.

    >>> layer = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    >>> optimizer.add_param_group({"params": [layer.bias]})
    >>> [tuple(parameter.shape) for parameter in optimizer_parameters(optimizer)]
    [(1, 2), (1,)]
    """
    groups = [group["params"] for group in optimizer.param_groups]
    found = list(filter(_requires_grad, chain.from_iterable(groups)))
    # By id: the hash of a tensor takes four times as long as all the rest. Duplicates are rare.
    return found if len(set(map(id, found))) == len(found) else list({id(value): value for value in found}.values())


def clip(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a norm of ``max_norm``; return the norm that they had."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not any(one.is_sparse or is_sharded(one) or half_to_float(one.dtype) is not one.dtype for one in gradients):
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    norms = _norms_of(gradients)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(float(scale) if gradient.is_sparse or is_sharded(gradient) else scale.to(gradient.device))
    return total


def _norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return norms in float32 or wider, in one pass over what is dense, as a kernel per gradient would take long."""
    found = [_norm_of(one) if one.is_sparse or is_sharded(one) else None for one in gradients]
    for dtype in dict.fromkeys(one.dtype for one in gradients):
        places = [place for place, one in enumerate(gradients) if found[place] is None and one.dtype is dtype]
        wide = torch._foreach_norm([gradients[place] for place in places], dtype=half_to_float(dtype)) if places else ()
        for place, norm in zip(places, wide, strict=True):
            found[place] = norm
    return [norm for norm in found if norm is not None]


def _norm_of(gradient: Tensor) -> Tensor:
    """Return the norm in float32 or wider: in float16 it would overflow."""
    if is_sharded(gradient):
        dtype = half_to_float(gradient.dtype)
        norm: Tensor = torch.linalg.vector_norm(gradient, dtype=dtype).full_tensor()
        return norm
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return torch.linalg.vector_norm(values.to(half_to_float(values.dtype)))


def apply_update(
    optimizer: Any, parameters: Sequence[nn.Parameter], scaler: torch.amp.GradScaler | None = None
) -> None:
    """Run the optimizer's step; if memory runs out, say whether parameters have changed.

    Raises:
        UpdateMemoryError: the step ran out of memory; ``num_changed`` and ``can_retry`` say what is left of it.
    """
    versions = _versions(parameters)
    try:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        num_changed = sum(new != old for new, old in zip(_versions(parameters), versions, strict=True))
        raise _ran_out(innermost(optimizer), num_changed, len(versions)) from error


def _ran_out(optimizer: Any, num_changed: int, num_all: int) -> UpdateMemoryError:
    can_retry = not num_changed and _is_untouched(optimizer)
    if num_changed:
        done = f"{num_changed} of {num_all} parameters have changed"
    else:
        done = "no parameter has changed" + ("" if can_retry else ", but the optimizer's state may have")
    return UpdateMemoryError(
        f"out of memory in optimizer.step; {done}. Call stepper.warm_up() before training so that the optimizer's "
        "state is allocated first, or leave it more room with a smaller budget",
        num_changed=num_changed,
        can_retry=can_retry,
    )


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    try:
        return [parameter._version for parameter in parameters]
    except RuntimeError:  # inference tensors count no versions; nothing outside inference mode may write to them
        return [0 if parameter.is_inference() else parameter._version for parameter in parameters]


def _is_untouched(optimizer: Any) -> bool:
    """Say whether a step that failed has surely left no trace: an optimizer of torch's own that has no state.

    Others may count steps in their groups, write past the versions of tensors, or begin a state with a gradient. Fused
    kernels count no versions either.
    """
    is_known = type(optimizer) is getattr(torch.optim, type(optimizer).__name__, None)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    return is_known and not is_fused and not any(optimizer.state.values())


def take_over(
    ranks: Ranks,
    optimizer: Any,
    parameters: Sequence[nn.Parameter],
    scaler: torch.amp.GradScaler | None,
    error: Exception | None,
    device: torch.device,
) -> None:
    """Let ranks on which the optimizer's step failed take over the result of one on which it did not.

    Every rank calls it after the step. If one failed, all raise in the end: the failed ones their own error.
    """
    if ranks.is_sharded:  # no other rank holds the same part
        ranks.agree(error, device)
        return
    (has_failed,) = ranks.largest([float(error is not None)], device)
    if not has_failed:
        return
    failures = ranks.gather(failure_of(error))
    source = next((rank for rank, failure in enumerate(failures) if failure is None), 0)
    state = ranks.broadcast(lambda: _state_of(optimizer, parameters, scaler), rank=source)
    second: Exception | None = None
    try:
        if error is not None:
            _load(state, optimizer, parameters, scaler)
    except Exception as caught:
        second = caught
    ranks.agree(second, device)
    raised = common_error(error, failures)
    if isinstance(raised, UpdateMemoryError):
        raised.can_retry = False  # the update is done
    raise raised


def _state_of(optimizer: Any, parameters: Sequence[nn.Parameter], scaler: Any) -> dict[str, Any]:
    state = optimizer.state_dict()
    # Functions cannot be sent, and every rank has its own.
    groups = [{name: value for name, value in group.items() if not callable(value)} for group in state["param_groups"]]
    return {
        "parameters": [parameter.detach().cpu() for parameter in parameters],
        "optimizer": {**state, "param_groups": groups},
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def _load(state: dict[str, Any], optimizer: Any, parameters: Sequence[nn.Parameter], scaler: Any) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, state["parameters"], strict=True):
            parameter.copy_(value)
    own, sent = optimizer.state_dict()["param_groups"], state["optimizer"]["param_groups"]
    groups = [{**mine, **theirs} for mine, theirs in zip(own, sent, strict=True)]
    optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
    # load_state_dict casts a state to the type of its parameter, which need not be the type that it has.
    places = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, values in state["optimizer"]["state"].items():
        held = optimizer.state[places[place]] if isinstance(place, int) else {}
        for name, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, Tensor) and held[name].dtype is not value.dtype:
                held[name] = value.to(held[name].device)
    if scaler is not None:
        forget_unscaling(scaler, optimizer)
        scaler.load_state_dict(state["scaler"])


def forget_unscaling(scaler: Any, optimizer: Any) -> None:
    """Let a scaler unscale the next gradients, although those of this update were not used."""
    getattr(scaler, "_per_optimizer_states", {}).pop(id(optimizer), None)


def allocate_state(optimizer: Any) -> None:
    """Make sure that the first update has room; training goes on as if this had not happened, to the bit.

    The state of the first step is made by ``first_state`` and, where it starts with zeros only, kept. Elsewhere (ASGD,
    NAdam, Rprop, SGD with dampening, every optimizer outside ``torch.optim``) it is dropped again: there was room for
    it, and the first update makes it anew. Nothing happens if the optimizer has state already.
    """
    inner = innermost(optimizer)
    if _has_state(inner):
        return
    parameters = optimizer_parameters(inner)
    held = set_aside(parameters)
    try:
        state = first_state(inner)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UpdateMemoryError(
            "the first update of the optimizer does not fit in memory: gradients, state and what its step needs; "
            "nothing has changed. Use an optimizer with less state, a smaller model, or more memory",
            can_retry=True,
        ) from error
    finally:
        drop_gradients(parameters)
        add_back(held)
    if type(inner) in _STARTS_AT_ZERO and not any(group.get("dampening") for group in inner.param_groups):
        _set_to_zero(state)
        inner.state.update(state)


def step_of_zeros(optimizer: Any) -> None:
    """Give every parameter a gradient of zero and the optimizer the state of its first step; no parameter moves.

    The gradients remain, and so does the state, which is that after one step: put both back afterwards.
    """
    inner = innermost(optimizer)
    if _has_state(inner):
        _set_zero_gradients(inner)
    else:
        inner.state.update(first_state(inner))


def first_state(optimizer: Any) -> State:
    """Return the state after a step with gradients of zero, which remain; parameters and the optimizer stay.

    The step is that of a twin with the same parameters and copies of everything else, so no hook, no scheduler and no
    counter sees it. Parameters get their values back from copies in host memory.
    """
    twin = _twin(optimizer, {id(tensor): tensor for group in optimizer.param_groups for tensor in group["params"]})
    for options in (twin.defaults if hasattr(twin, "defaults") else {}, *twin.param_groups):
        if options.get("differentiable"):
            options["differentiable"] = False  # it would record the graph of this step
    step = type(twin).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # without the hooks of all optimizers
    with _unchanged(optimizer_parameters(optimizer)):
        _set_zero_gradients(optimizer)
        if _needs_closure(optimizer):
            step(twin, lambda: 0.0)
        else:
            step(twin)
    return dict(twin.state)


def _twin(optimizer: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of an optimizer, without its hooks; ``copies`` are what it shares, each under its id."""
    twin = copies[id(optimizer)] = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            vars(twin)[name] = OrderedDict()
        elif name != "step":  # schedulers put a step of their own there, to count
            vars(twin)[name] = _twin(value, copies) if isinstance(value, Optimizer) else _copied(value, copies)
    return twin


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value, copies)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return value  # process groups, streams and the like cannot be copied


@contextmanager
def _unchanged(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Put the values of parameters and the random state back, after an error too."""
    devices = {parameter.device for parameter in parameters if parameter.device.type not in ("cpu", "meta")}
    random_state = Snapshot(None, sorted(devices, key=str))
    locals_ = [parameter.detach() for parameter in parameters]
    locals_ = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in locals_]
    values = [tensor.to("cpu", copy=True) for tensor in locals_]
    try:
        yield
    finally:
        for tensor, value in zip(locals_, values, strict=True):
            tensor.copy_(value)
        random_state.restore()


def _set_zero_gradients(optimizer: Any) -> None:
    is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for parameter in optimizer_parameters(optimizer):
        if parameter.grad is not None:
            parameter.grad = parameter.grad.zero_()
        elif is_sparse:
            like: dict[str, Any] = {"dtype": parameter.dtype, "device": parameter.device}
            parameter.grad = torch.sparse_coo_tensor(size=parameter.shape, check_invariants=True, **like)
        else:
            parameter.grad = torch.zeros_like(parameter)


def _has_state(optimizer: Any) -> bool:
    # A look at optimizer.state[parameter] leaves an empty dictionary there.
    return any(state for state in optimizer.state.values() if isinstance(state, dict))


def _needs_closure(optimizer: Any) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _set_to_zero(states: State) -> None:
    with torch.no_grad():
        for state in states.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    value.zero_()
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    state[name] = type(value)(0)
