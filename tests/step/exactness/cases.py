"""Cases: one setting of everything that may change an update, drawn from a seed, printed as short as it can be."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache

import torch

from .models import MODELS, Setup
from .optimizers import OPTIMIZERS, make_optimizer
from .structures import STRUCTURES, make_fields

# Structures that no general rule can cut are drawn less often.
_SHARES = dict.fromkeys(STRUCTURES, 6) | {"pairs": 3, "list": 3, "rows": 1, "packed": 1, "patches": 1, "hook": 3}


@dataclass(frozen=True)
class Case:
    """Two updates of one setting; the defaults are the plainest."""

    seed: int = 0
    model: str = "mlp"
    dtype: str = "float64"
    structure: str = "tuple"
    sizes: tuple[int, ...] = (5,)  # one logical batch per accumulate
    # "weighted" and "tokens" may be zero. Where all is masked, "mean" is NaN and "skip" a zero without a graph.
    weights: str = "count"
    form: str = "float"  # of the weight that the loss returns
    weight_of: bool = False
    total_weight: bool = False
    micro_batch: str = "auto"
    trim: bool = False
    existing: str = "none"  # gradients there before: "none", "zeros", "clear", "add"
    clip: bool = False
    wrapper: str = "none"
    options: int = 0
    optimizer: str = "SGD"
    warm_up: bool = False
    oom: str = "none"  # "forward", "backward"
    oom_call: int = 0  # the accumulate it happens in
    oom_piece: int = 0  # the pieces before it pass
    room: int = 1  # pieces of that many examples fit
    step: bool = False  # step(batch) in place of its parts

    def __repr__(self):
        """Return the call that makes this case, without what is plain."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def torch_dtype(self):
        return getattr(torch, self.dtype)


def draw_case(rng):
    """Draw a case from a ``random.Random``."""
    dtype = rng.choices(["float64", "float32", "bfloat16"], [17, 2, 1])[0]
    model = rng.choice(
        [kind for kind in MODELS if dtype == "float64" or kind not in ("complex", "sparse", "sparse_only")]
    )
    structure = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
    # A list of one tensor is a batch of one field, as a DataLoader makes it, so a list of rows has at least two.
    sizes = tuple(
        rng.choice([2 if structure == "rows" else 1, 2, 3, 4, 5, 7, 9]) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))
    )
    case = Case(seed=rng.randrange(1000), model=model, dtype=dtype, structure=structure, sizes=sizes)
    case = _draw_weights(rng, case)
    case = _draw_split(rng, case)
    case = _draw_optimizer(rng, case)
    oom = rng.choice(["none", "none", "forward", "backward"])
    if oom != "none":
        call = rng.randrange(len(sizes))
        case = replace(
            case, oom=oom, oom_call=call, oom_piece=rng.choice([0, 0, 1, 2]), room=rng.randint(1, sizes[call])
        )
    return replace(
        case,
        existing="none" if model == "sparse_only" else rng.choice(["none", "none", "none", "zeros", "clear", "add"]),
        clip=rng.random() < 0.3,
        wrapper=_draw_wrapper(rng, case),
        warm_up=rng.random() < 0.25,
        step=len(sizes) == 1 and not case.total_weight and rng.random() < 0.5,
    )


def _draw_weights(rng, case):
    kinds = ["tokens", "mean", "skip"] if case.model == "tied" else ["count", "weighted", "weighted", "mean", "skip"]
    if case.model.startswith("sparse"):  # a lazy optimizer sees which rows were touched, even by a weight of zero
        kinds = ["count"]
    weights = rng.choice(kinds)
    form = rng.choice(["int", "float", "long", "tensor"] if weights == "count" else ["float", "numpy", "tensor"])
    return replace(case, weights=weights, form=form, weight_of=rng.random() < 0.3, total_weight=rng.random() < 0.15)


def _draw_split(rng, case):
    choices = ["auto", "auto", "1", "2", "3", "4", "20", "MaxTokens(8)", "MaxTokens(15)", "MaxItems(2)"]
    trim = case.structure == "dict" and rng.random() < 0.5
    return replace(case, micro_batch=rng.choice(choices), trim=trim)


def _draw_wrapper(rng, case):
    if case.model == "checkpoint":  # compiled, a checkpoint draws other random numbers by itself
        return rng.choice(["none", "ddp"])
    if case.model in ("complex", "penalty"):
        return rng.choice(["none", "none", "compile"])
    return rng.choices(["none", "compile", "ddp", "compile(ddp)", "ddp(compile)"], [10, 2, 5, 1, 1])[0]


def _draw_optimizer(rng, case):
    while True:
        name = rng.choice(sorted(OPTIMIZERS))
        options = rng.randrange(len(OPTIMIZERS[name]))
        if can_train(case.model, case.dtype, name, options):
            return replace(case, optimizer=name, options=options)


@cache
def can_train(model, dtype, name, options):
    """Return whether PyTorch itself can run this optimizer on these parameters."""
    setup = Setup(model, dtype=getattr(torch, dtype), bias=name != "Muon")
    try:
        optimizer = make_optimizer(name, options, setup.for_optimizer())
        for number in range(2):
            setup.before_update(number, optimizer)
            losses, _ = setup.losses(setup.model, make_fields(3, seed=0, dtype=getattr(torch, dtype)))
            losses.sum().backward()
            optimizer.step()
    except (RuntimeError, ValueError):
        return False
    return True


def simplest(case, fails):
    """Return the plainest case near this one that still fails: every setting goes back to its default if it can."""
    for field in fields(case):
        plainer = [field.default]
        if field.name == "sizes":
            plainer += [(3,) * num for num in range(1, len(case.sizes) + 1)]
        for value in plainer:
            other = replace(case, **{field.name: value})
            if other != case and _is_possible(other) and fails(other):
                case = other
                break
    return case


def _is_possible(case):
    return (
        case.options < len(OPTIMIZERS[case.optimizer])
        and can_train(case.model, case.dtype, case.optimizer, case.options)
        and case.oom_call < len(case.sizes)
        and not (case.trim and case.structure != "dict")
        and not (case.step and len(case.sizes) > 1)
        and (case.weights == "tokens") <= (case.model == "tied")
        and not (case.form in ("int", "long") and case.weights != "count")
        and not (case.model == "tied" and case.weights in ("count", "weighted"))
    )
