"""Run by test_rank_cases in several processes: what differs between ranks, or fails on one of them, in one case each.

Every case ends in one of two ways: the exact gradient, the same on all ranks, or an error on every rank, after which
the ranks are equal and the next step works.
"""

import math
import sys
import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from batchwright.errors import ArgumentError
from batchwright.step import Stepper

from ...processes import leave_group

LIMIT = timedelta(seconds=15)
CASES = {}


class Checks:
    """The group that ranks compare their outcomes over; it works when the other one is out of step."""

    group = None


def case(function):
    CASES[function.__name__] = function
    return function


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def make_shards(dtype=torch.float64):
    model = make_model(dtype)
    fully_shard(model[0])
    fully_shard(model)
    return model


def share(rank, num=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(num or 3 + 2 * rank, 4, generator=generator, dtype=torch.float64).to(dtype)


def loss_fn(model, x):
    return model(x).square().sum(), len(x)


def weighted_loss(model, batch):
    x, w = batch
    return (model(x)[:, 0].square() * w).sum(), w.sum()


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr)


def by_example(loss, rows, parameters, weight=None):
    """Return the gradient of the mean over examples, one at a time."""
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    for row in rows:
        for total, part in zip(totals, torch.autograd.grad(loss(row[None]), parameters), strict=True):
            total += part
    return [total / (weight or len(rows)) for total in totals]


def reference(shares, dtype=torch.float64):
    twin = make_model(dtype).double()
    return by_example(
        lambda row: twin(row).square().sum(), torch.cat(shares).to(dtype).double(), list(twin.parameters())
    )


def far(found, expected):
    """Return the relative error of gradients; none is none."""
    total = 0.0
    for one, other in zip(found, expected, strict=True):
        one = torch.zeros_like(other) if one is None else one
        one = one.full_tensor() if hasattr(one, "full_tensor") else one
        total += float(((one.to_dense() if one.is_sparse else one).to(other.dtype) - other).square().sum())
    return math.sqrt(total / sum(float(other.square().sum()) for other in expected))


def gather(value):
    values = [None] * dist.get_world_size(Checks.group)
    dist.all_gather_object(values, value, group=Checks.group)
    return values


def outcome(run):
    """Run something on all ranks, and return its error: on all of them or on none, and none from the group itself."""
    try:
        error = None
        run()
    except Exception as caught:
        error = caught
    try:
        text = None if error is None else f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    everyone = gather(text)
    assert len({one is None for one in everyone}) == 1, f"some ranks raise, some do not: {everyone}"
    broken = ("gloo", "Timed out", "timeout", "Connection", "Broken pipe")
    assert not any(one and any(word in one for word in broken) for one in everyone), f"a rank was alone: {everyone}"
    return error


def check_equal(tensors):
    mine = [tensor.detach().clone() for tensor in tensors]
    everyone = gather(mine)
    for other in everyone:
        assert [one.dtype for one in other] == [one.dtype for one in everyone[0]]
        assert all(map(torch.equal, other, everyone[0])), "ranks differ"


def gradient_of(stepper, batch, parameters, **options):
    """Return a function that leaves the gradients in the returned list."""
    found = []

    def run():
        stepper.accumulate(batch, **options)
        stepper.reduce()
        found.extend(parameter.grad for parameter in parameters)

    return run, found


def exact_or_refused(run, found, expected, limit=1e-12):
    error = outcome(run)
    assert error is None or isinstance(error, ArgumentError), error
    assert error is not None or far(found, expected) < limit, f"relative error {far(found, expected):.2g}"
    return error


def all_raise(stepper, batch, model, *, repair=lambda: None, run=None, again=None):
    """Check that every rank raises, that the ranks are equal, and that the next step works."""
    error = outcome(run or (lambda: stepper.step(batch)))
    assert error is not None, "nobody raises"
    repair()
    stepper.abandon()
    assert outcome(lambda: stepper.step(batch if again is None else again)) is None
    if not stepper._ranks.is_sharded:
        check_equal(model.parameters())
    return error


# Silently wrong


@case
def parameters_in_another_order(rank, world_size):
    model = make_model()
    parameters = list(model.parameters())
    stepper = Stepper(DistributedDataParallel(model), sgd(parameters if rank == 0 else parameters[::-1]), loss_fn)
    run, found = gradient_of(stepper, share(rank), parameters)
    exact_or_refused(run, found, reference([share(0), share(1)]))


@case
def other_parameters_frozen(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    ddp = DistributedDataParallel(model)
    model[2 * rank].requires_grad_(False)
    stepper = Stepper(ddp, sgd(model.parameters()), loss_fn)
    assert isinstance(outcome(lambda: stepper.step(share(rank))), ArgumentError)
    check_equal(model.parameters())


@case
def shards_in_half_precision_with_uneven_parts(rank, world_size):
    """A rank that keeps the others company receives their gradients too; those were dropped."""
    model = make_shards(torch.float16)
    stepper = Stepper(model, sgd(model.parameters()), loss_fn, micro_batch=2)
    shares = [share(0, 2, torch.float16), share(1, 8, torch.float16)]
    run, found = gradient_of(stepper, shares[rank], list(model.parameters()))
    exact_or_refused(run, found, reference(shares, torch.float16), limit=5e-3)


@case
def a_refused_batch_handed_over_again(rank, world_size):
    """What was refused the first time was trained the second time, with a gradient of one rank and one batch."""
    for is_wrapped in (False, True):
        model = make_model()
        outer = DistributedDataParallel(model) if is_wrapped else model
        model[0].weight.requires_grad_(False)
        stepper = Stepper(outer, sgd(model.parameters()), loss_fn)
        stepper.accumulate(share(rank))
        model[0].weight.requires_grad_(True)
        for _ in range(2):
            assert isinstance(outcome(partial(stepper.step, share(rank))), ArgumentError), f"wrapped: {is_wrapped}"
        stepper.abandon()
        assert outcome(partial(stepper.step, share(rank))) is None
        if is_wrapped:
            check_equal(model.parameters())


@case
def total_weights_that_differ(rank, world_size):
    for make in (lambda: DistributedDataParallel(make_model()), make_shards):
        for weights in ((8.0, 16.0), (16.0, None)):
            model = make()
            stepper = Stepper(model, sgd(model.parameters()), loss_fn)
            run, found = gradient_of(stepper, share(rank), list(model.parameters()), total_weight=weights[rank])
            exact_or_refused(run, found, reference([share(0), share(1)]))


@case
def hooks_that_change_gradients_differently(rank, world_size):
    """DDP reduces after such hooks, so ranks stay equal there."""
    model = make_model()
    torch.manual_seed(rank)
    model[0].weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    stepper = Stepper(DistributedDataParallel(model), sgd(model.parameters()), loss_fn)
    outcome(lambda: stepper.step(share(rank)))
    check_equal(model.parameters())


@case
def parameters_added_after_wrapping(rank, world_size):
    model = make_model()
    ddp = DistributedDataParallel(model)
    torch.manual_seed(rank)
    model.add_module("head", nn.Linear(1, 1).double())
    stepper = Stepper(ddp, sgd(model.parameters()), loss_fn)
    assert isinstance(outcome(lambda: stepper.step(share(rank))), ArgumentError)


@case
def ignored_parameters_of_compiled_ddp(rank, world_size):
    model = make_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    compiled = torch.compile(DistributedDataParallel(model), backend="eager")
    assert isinstance(
        outcome(lambda: Stepper(compiled, sgd(model.parameters()), loss_fn).step(share(rank))), ArgumentError
    )


@case
def gradients_of_shards_from_before(rank, world_size):
    """FSDP2 has averaged them already."""
    model = make_shards()
    model(share(rank)).square().mean().backward()
    before = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
    stepper = Stepper(model, sgd(model.parameters()), loss_fn, existing_gradients="add")
    run, found = gradient_of(stepper, share(rank), list(model.parameters()))
    expected = [one + other for one, other in zip(reference([share(0), share(1)]), before, strict=True)]
    exact_or_refused(run, found, expected)


@case
def shards_that_do_not_reduce(rank, world_size):
    model = make_shards()
    model.set_requires_gradient_sync(False)
    stepper = Stepper(model, sgd(model.parameters()), loss_fn)
    run, found = gradient_of(stepper, share(rank), list(model.parameters()))
    exact_or_refused(run, found, reference([share(0), share(1)]))


class Master(torch.optim.Optimizer):
    """Keeps parameters in float32 beside those in half precision."""

    fails = False

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure=None):
        if self.fails:
            raise LookupError("broken")
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.detach().float()
            state["master"] -= 1e-3 * parameter.grad.float()
            parameter.copy_(state["master"])


@case
def state_in_other_precision_than_parameters(rank, world_size):
    """The state that a failed rank took over was rounded to the type of its parameters."""
    model = make_model(torch.bfloat16)
    optimizer = Master(model.parameters())
    stepper = Stepper(DistributedDataParallel(model), optimizer, loss_fn)
    batch = share(rank, dtype=torch.bfloat16)
    stepper.step(batch)
    optimizer.fails = rank == 1
    assert isinstance(outcome(lambda: stepper.step(batch)), LookupError)
    optimizer.fails = False
    check_equal([state["master"] for state in optimizer.state.values()])


# Aborts, hangs, and errors of one rank alone


class Words(nn.Module):
    def __init__(self, dtype, *, sparse=True):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 4, sparse=sparse, dtype=dtype)
        self.linear = nn.Linear(4, 1, dtype=dtype)

    def forward(self, ids):
        return self.linear(self.embed(ids))


@case
def sparse_half_precision_in_pieces_on_one_rank(rank, world_size):
    """Pieces are summed in float32, a single one was not: ranks sent rows of different types."""
    model, twin = Words(torch.bfloat16), Words(torch.float64, sparse=False)
    twin.load_state_dict(model.state_dict())
    shares = [torch.randint(0, 9, (num,), generator=torch.Generator().manual_seed(num)) for num in (3, 9)]
    stepper = Stepper(DistributedDataParallel(model), sgd(model.parameters()), loss_fn, micro_batch=4)
    run, found = gradient_of(stepper, shares[rank], list(model.parameters()))
    expected = by_example(lambda row: twin(row).square().sum(), torch.cat(shares), list(twin.parameters()))
    exact_or_refused(run, found, expected, limit=1e-2)
    check_equal([gradient.to_dense() for gradient in found])


class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(5, 4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, ids):
        return torch.gather(self.table, 1, ids, sparse_grad=True)


@case
def sparse_in_two_dimensions_and_unused_elsewhere(rank, world_size):
    model, ids = Gathered(), torch.tensor([[0, 1, 1, 3]] * 5)

    def loss(net, x):
        return (net.scale * x).sum() + (net(ids).square().sum() if rank else 0.0), len(x)

    stepper = Stepper(DistributedDataParallel(model), sgd(model.parameters()), loss)
    table = model.table.detach().clone().requires_grad_()
    expected = torch.autograd.grad(torch.gather(table, 1, ids).square().sum() / 6, table)
    run, found = gradient_of(stepper, torch.ones(3, dtype=torch.float64), [model.table])
    exact_or_refused(run, found, list(expected))


def failing_stepper(**options):
    model = make_model()
    optimizer = sgd(model.parameters())
    return model, optimizer, Stepper(DistributedDataParallel(model), optimizer, loss_fn, **options)


@case
def a_hook_of_a_parameter_fails(rank, world_size):
    model, _, stepper = failing_stepper()

    def fail(gradient):
        raise ZeroDivisionError("in a hook")

    handle = model[0].weight.register_hook(fail if rank == 1 else lambda gradient: None)
    all_raise(stepper, share(rank), model, repair=handle.remove)


@case
def a_learning_rate_rule_fails(rank, world_size):
    fails = [rank == 1]

    def rule(batch_size, base_size):
        if fails.pop() if fails else False:
            raise ZeroDivisionError("in a rule")
        return 1.0

    model, _, stepper = failing_stepper(lr_rule=rule, base_size=4)
    all_raise(stepper, share(rank), model)


@case
def unscaling_fails(rank, world_size):
    model = make_model(torch.float32)
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0)
    stepper = Stepper(DistributedDataParallel(model), optimizer, loss_fn, scaler=scaler, weight_of=len)
    batch = share(rank, dtype=torch.float32)
    stepper.accumulate(batch)
    stepper.reduce()
    if rank == 1:
        scaler.unscale_(optimizer)
    all_raise(stepper, batch, model, run=stepper.update)


@case
def a_warning_that_is_an_error(rank, world_size):
    model, _, stepper = failing_stepper()
    if rank == 1:
        model[0].weight.grad = torch.ones_like(model[0].weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_raise(stepper, share(rank), model, repair=model.zero_grad)


@case
def gradients_touched_before_reduce(rank, world_size):
    model, _, stepper = failing_stepper()
    stepper.accumulate(share(rank))
    if rank == 1:
        model[0].weight.grad.mul_(2)
    assert isinstance(all_raise(stepper, share(rank), model, run=stepper.reduce), ArgumentError)


@case
def gradients_touched_before_accumulate(rank, world_size):
    model, _, stepper = failing_stepper()
    stepper.accumulate(share(rank))
    if rank == 1:
        model[0].weight.grad.mul_(2)
    error = all_raise(stepper, share(rank), model, run=lambda: stepper.accumulate(share(rank)))
    assert isinstance(error, ArgumentError)


@case
def names_of_metrics_that_cannot_be_sorted(rank, world_size):
    model = make_model()
    metrics = [{"a": 1.0}, {1: 1.0, "a": 1.0}]
    stepper = Stepper(
        DistributedDataParallel(model), sgd(model.parameters()), lambda net, x: (*loss_fn(net, x), metrics[rank])
    )
    outcome(lambda: stepper.step(share(rank)))
    metrics[1] = metrics[0]
    assert outcome(lambda: stepper.step(share(rank))) is None
    check_equal(model.parameters())


def _infinite(what, rank, model):
    calls = [0]

    def loss(net, x):
        calls[0] += 1
        infinite = math.inf * (-1) ** calls[0] if rank and calls[0] <= 3 else 0.0
        loss_sum, weight = loss_fn(net, x)
        if what == "weight" and infinite:
            return loss_sum, 1e308, {"m": 0.0}
        return loss_sum + (infinite if what == "loss" else 0.0), weight, {"m": infinite if what == "metric" else 0.0}

    return Stepper(model, sgd(model.parameters(), lr=0.0), loss, micro_batch=2)


@case
def sums_of_opposite_infinities(rank, world_size):
    for make in (lambda: DistributedDataParallel(make_model()), make_shards):
        for what in ("metric", "loss", "weight"):
            model = make()
            stepper = _infinite(what, rank, model)
            outcome(partial(stepper.step, share(rank)))
            assert outcome(partial(stepper.step, share(rank))) is None


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@case
def an_error_without_a_text(rank, world_size):
    fails = [rank == 1]

    def weight_of(batch):
        if fails[0]:
            raise Silent
        return len(batch)

    model, _, stepper = failing_stepper(weight_of=weight_of)
    all_raise(stepper, share(rank), model, repair=lambda: fails.__setitem__(0, False))


class Failing(torch.optim.SGD):
    error = None

    def step(self, closure=None):
        if self.error is not None:
            raise self.error
        super().step()


@case
def an_optimizer_that_cannot_be_sent(rank, world_size):
    model = make_model()
    optimizer = Failing([{"params": list(model.parameters()), "rule": lambda step: 1.0}], lr=0.1)
    stepper = Stepper(DistributedDataParallel(model), optimizer, loss_fn)
    optimizer.error = LookupError("broken") if rank == 1 else None
    all_raise(stepper, share(rank), model, repair=lambda: setattr(optimizer, "error", None))


@case
def can_retry_is_the_same_everywhere(rank, world_size):
    """The update is over on all ranks, so no rank is told to try it again."""
    model = make_model()
    optimizer = Failing(model.parameters(), lr=0.1)
    stepper = Stepper(DistributedDataParallel(model), optimizer, loss_fn)
    optimizer.error = torch.OutOfMemoryError("out of memory") if rank == 1 else None
    error = outcome(lambda: stepper.step(share(rank)))
    assert not error.can_retry


@case
def zero_grad_fails(rank, world_size):
    model, optimizer, stepper = failing_stepper()
    plain = optimizer.zero_grad

    def fail(*_, **__):
        raise ZeroDivisionError("in zero_grad")

    optimizer.zero_grad = fail if rank == 1 else plain
    all_raise(stepper, share(rank), model, repair=lambda: setattr(optimizer, "zero_grad", plain))


@case
def existing_gradients_that_cannot_be_written(rank, world_size):
    model, _, stepper = failing_stepper(existing_gradients="add")
    if rank == 1:
        model[0].weight.grad = torch.ones(1, dtype=torch.float64).expand(4, 4)
    expected = reference([share(0), share(1)])
    expected[0] += 0.5
    run, found = gradient_of(stepper, share(rank), list(model.parameters()))
    exact_or_refused(run, found, expected)


class Memory:
    peak_fraction = 0.5

    def __init__(self, fails):
        self.fails = fails

    def reset_peak(self):
        pass

    @property
    def peak_bytes(self):
        if self.fails:
            raise OSError("the device cannot be asked")
        return 1


@case
def buffers_resized_in_forward(rank, world_size):
    """Nothing of the failed step remains, not even a gradient on the rank that did not fail."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 1).double()
            self.register_buffer("cache", torch.zeros(2))

        def forward(self, x):
            self.cache.data = torch.zeros(2 + len(x))
            if fails[0]:
                raise ZeroDivisionError("in forward")
            return self.linear(x)

    fails = [rank == 1]
    model = Cached()
    stepper = Stepper(DistributedDataParallel(model, broadcast_buffers=False), sgd(model.parameters()), loss_fn)
    assert isinstance(outcome(lambda: stepper.step(share(rank))), ZeroDivisionError)
    assert model.linear.weight.grad is None
    assert model.cache.shape == (2,)


# Shards


@case
def shards_with_masked_micro_batches(rank, world_size):
    """A micro-batch without weight has no gradient, but the others wait for its backward pass."""
    for second in ([1.0, 1.0, 0.0, 0.0], [0.0] * 4):
        model = make_shards()
        stepper = Stepper(model, sgd(model.parameters()), weighted_loss, micro_batch=2)
        weights = torch.tensor([[1.0] * 4, second][rank], dtype=torch.float64)
        run, found = gradient_of(stepper, (share(rank, 4), weights), list(model.parameters()))
        expected = reference([share(0, 4), share(1, 4)[: int(sum(second))]])
        exact_or_refused(run, found, expected)


@case
def shards_in_float32_on_gloo(rank, world_size):
    """They train without Stepper; its way of asking for sums is one that gloo does not know."""
    model = make_shards(torch.float32)
    model(share(rank, dtype=torch.float32)).square().mean().backward()
    model.zero_grad()
    stepper = Stepper(model, sgd(model.parameters()), loss_fn, micro_batch=2)
    run, found = gradient_of(stepper, share(rank, dtype=torch.float32), list(model.parameters()))
    exact_or_refused(run, found, reference([share(0), share(1)]), limit=1e-5)


def main(rank, world_size, path, *names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size, timeout=LIMIT)
    Checks.group = dist.new_group(timeout=2 * LIMIT)
    for name in names:
        print(name, flush=True)
        CASES[name](rank, world_size)
        gather(None)
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
