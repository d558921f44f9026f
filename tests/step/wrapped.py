"""Run by test_several_ranks in several processes: wrappers, parameters and gradients that ranks must agree on."""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from batchwright.errors import ArgumentError, RankError
from batchwright.step import Stepper

from ..processes import leave_group


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True)
        self.linear = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("wide", torch.zeros(1).expand(3))

    def forward(self, ids):
        self.seen += len(ids)
        return self.linear(self.embed(ids))


def make_model(*, sparse=True):
    torch.manual_seed(0)
    model = Model().double()
    model.embed.sparse = sparse
    return model


def make_ids(rank):
    return torch.randint(0, 9, (3 + 2 * rank,), generator=torch.Generator().manual_seed(rank))


def loss_fn(model, ids):
    return model(ids).square().sum(), len(ids)


def expected_gradients(loss, shares, parameters):
    """Return the gradient of the mean over the examples of some ranks, one example at a time."""
    rows = [row[None] for share in shares for row in share]
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    for row in rows:
        for total, part in zip(totals, torch.autograd.grad(loss(row), parameters), strict=True):
            total += part
    return [total / len(rows) for total in totals]


def gradients_of(stepper, batch, parameters):
    stepper.accumulate(batch)
    stepper.reduce()
    return [parameter.grad for parameter in parameters]


def check_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        one = one.full_tensor() if hasattr(one, "full_tensor") else one
        one = one.to_dense() if one.is_sparse else one
        assert float((one - other).norm()) < 1e-12 * float(other.norm()), (one, other)


def refused(make, message):
    error = error_of(make)
    assert isinstance(error, ArgumentError), error
    assert message in str(error), error


def error_of(run):
    try:
        run()
    except Exception as error:
        return error
    return None


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def compiled_ddp(rank, world_size):
    """It was taken for one process, and every rank went its own way."""
    model = make_model(sparse=False)
    twin = make_model(sparse=False)
    outer = torch.compile(DistributedDataParallel(model), backend="eager")
    stepper = Stepper(outer, sgd(outer.parameters()), loss_fn, micro_batch=2)
    shares = [make_ids(rank) for rank in range(world_size)]
    parameters = list(twin.parameters())
    expected = expected_gradients(lambda row: loss_fn(twin, row)[0], shares, parameters)
    check_close(gradients_of(stepper, shares[rank], list(model.parameters())), expected)


def hidden_wrappers(rank, world_size):
    inside = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 1))
    refused(
        lambda: Stepper(inside, sgd(inside.parameters()), loss_fn), "DistributedDataParallel lies inside the model (0)"
    )
    old = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    refused(lambda: Stepper(old, sgd(old.parameters()), loss_fn), "FullyShardedDataParallel lies inside the model")


def sparse_and_foreign_parameters(rank, world_size):
    """A temperature of the loss was not reduced; sparse gradients ended in an error."""
    model, twin = make_model(), make_model(sparse=False)
    temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    ddp = DistributedDataParallel(model)
    parameters = [*model.parameters(), temperature]
    stepper = Stepper(
        ddp, sgd(parameters), lambda net, ids: ((net(ids) * temperature).square().sum(), len(ids)),
        micro_batch=2, clip_norm=1e9,
    )  # fmt: skip
    shares = [make_ids(rank) for rank in range(world_size)]
    expected = expected_gradients(
        lambda row: (twin(row) * temperature).square().sum(), shares, [*twin.parameters(), temperature]
    )
    found = gradients_of(stepper, shares[rank], parameters)
    assert found[0].is_sparse
    check_close(found, expected)
    stepper.update()


def foreign_parameters_that_differ(rank, world_size):
    ddp = DistributedDataParallel(make_model())
    own = nn.Parameter(torch.tensor(float(rank)))
    stepper = Stepper(ddp, sgd([*ddp.parameters(), own]), loss_fn)
    refused(lambda: stepper.step(make_ids(rank)), "their values differ between ranks")


def existing_gradients(rank, world_size):
    """What one rank had was added there alone, and the ranks drifted apart."""
    model, twin = make_model(), make_model(sparse=False)
    stepper = Stepper(
        DistributedDataParallel(model), sgd(model.parameters()), loss_fn, existing_gradients="add", micro_batch=2
    )
    model.linear.weight.grad = torch.full_like(model.linear.weight, float(rank))
    shares = [make_ids(rank) for rank in range(world_size)]
    expected = expected_gradients(lambda row: loss_fn(twin, row)[0], shares, list(twin.parameters()))
    expected[1] += sum(range(world_size)) / world_size
    check_close(gradients_of(stepper, shares[rank], list(model.parameters())), expected)
    stepper.update()


def buffers(rank, world_size):
    kept = make_model()
    stepper = Stepper(DistributedDataParallel(kept, broadcast_buffers=False), sgd(kept.parameters()), loss_fn)
    stepper.step(make_ids(rank))
    assert kept.seen.item() == 3 + 2 * rank, "broadcast_buffers=False leaves every rank its own"
    other = make_model()
    stepper = Stepper(DistributedDataParallel(other), sgd(other.parameters()), loss_fn)
    stepper.step(make_ids(rank))
    assert other.seen.item() == 3, "the first rank's"
    other.seen = torch.zeros(1 + rank)
    refused(lambda: stepper.step(make_ids(rank)), "buffers of the model have other shapes on other ranks")


def metrics(rank, world_size):
    """Sums of different names were added up."""
    model = make_model()
    names = [f"of rank {rank}", "shared"]
    stepper = Stepper(
        DistributedDataParallel(model), sgd(model.parameters()),
        lambda net, ids: (*loss_fn(net, ids), {name: torch.tensor(float(10 * (rank + 1))) for name in names}),
    )  # fmt: skip
    report = stepper.step(make_ids(rank))
    num = sum(3 + 2 * other for other in range(world_size))
    expected = {f"of rank {other}": 10 * (other + 1) / num for other in range(world_size)}
    expected["shared"] = sum(10 * (other + 1) for other in range(world_size)) / num
    assert {name: round(value, 9) for name, value in report.metrics.items()} == {
        name: round(value, 9) for name, value in expected.items()
    }


class Own(Exception):
    """Cannot be made from one text."""

    def __init__(self, first, second):
        super().__init__(first, second)


def errors_on_one_rank(rank, world_size):
    """The others waited in a collective for ever."""
    model = make_model()
    fails = []

    def failing(net, ids):
        if fails and rank == world_size - 1:
            raise fails[0]
        return loss_fn(net, ids)

    stepper = Stepper(DistributedDataParallel(model), sgd(model.parameters()), failing)
    for error, kind in ((ValueError("a bad row"), ValueError), (Own(1, 2), RankError)):
        fails[:] = [error]
        found, is_mine = error_of(lambda: stepper.step(make_ids(rank))), rank == world_size - 1
        assert type(found) is (type(error) if is_mine else kind), found
        assert is_mine or f"rank {world_size - 1}" in str(found), found
        assert model.linear.weight.grad is None
        assert model.seen.item() == 0
    fails.clear()
    stepper.step(make_ids(rank))


def what_differs_between_ranks(rank, world_size):
    def stepper_of(model, order=1, **options):
        ddp = DistributedDataParallel(model)
        return Stepper(ddp, sgd(list(model.parameters())[::order]), loss_fn, **options)

    stepper = stepper_of(make_model())
    refused(lambda: stepper.accumulate(make_ids(rank), total_weight=8.0 + rank), "total_weight differs between ranks")
    stepper.accumulate(make_ids(rank), total_weight=torch.tensor(8.0) if rank else 8)  # no other number
    stepper.abandon()
    stepper = stepper_of(make_model(), order=1 if rank else -1)
    refused(lambda: stepper.step(make_ids(rank)), "the optimizer trains other parameters on other ranks")
    hooked = make_model()
    if rank:
        hooked.linear.weight.register_hook(lambda gradient: gradient)
    stepper = stepper_of(hooked)
    refused(lambda: stepper.step(make_ids(rank)), "parameters have hooks on some ranks only")


def options_of_ddp(rank, world_size):
    ignoring = make_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ["linear.weight"])
    ddp = DistributedDataParallel(ignoring)
    refused(lambda: Stepper(ddp, sgd(ignoring.parameters()), loss_fn), "DDP was told to ignore 'linear.weight'")
    hooked = DistributedDataParallel(make_model(sparse=False))
    hooked.register_comm_hook(None, allreduce_hook)
    refused(lambda: Stepper(hooked, sgd(hooked.parameters()), loss_fn), "DDP communication hooks would not see")
    mixed = DistributedDataParallel(make_model(sparse=False))
    mixed.mixed_precision = object()  # DDP itself takes it only on a GPU
    refused(lambda: Stepper(mixed, sgd(mixed.parameters()), loss_fn), "DDP(mixed_precision=…) casts in its own forward")


def sync_batch_norm(rank, world_size):
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2), nn.Linear(2, 1))
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)  # SyncBatchNorm needs a GPU in DDP's own constructor
    nn.Module.__init__(ddp)
    ddp.module, ddp.process_group, ddp.static_graph = model, dist.group.WORLD, False
    ddp.parameters_to_ignore, ddp.broadcast_buffers, ddp.require_backward_grad_sync = set(), True, True
    stepper = Stepper(ddp, sgd(model.parameters()), lambda net, x: (net(x).sum(), len(x)), micro_batch=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BatchNorm in training mode
        refused(lambda: stepper.step(torch.ones(4 if rank else 2, 2)), "SyncBatchNorm takes statistics over")


def shards_of_a_sub_mesh(rank, world_size):
    """Weights were summed over all processes, and the gradient halved."""
    if world_size < 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    twin.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh["shards"])
    pair = [2 * (rank // 2), 2 * (rank // 2) + 1]
    shares = [torch.randn(3 + r, 4, generator=torch.Generator().manual_seed(r)).double() for r in range(world_size)]

    def loss(net, x):
        return net(x).square().sum(), len(x)

    stepper = Stepper(model, sgd(model.parameters()), loss, micro_batch=2)
    expected = expected_gradients(lambda row: loss(twin, row)[0], [shares[r] for r in pair], list(twin.parameters()))
    check_close(gradients_of(stepper, shares[rank], list(model.parameters())), expected)
    # And over both axes: copies of shards.
    both, other = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    both.load_state_dict(twin.state_dict())
    other.load_state_dict(twin.state_dict())
    fully_shard(both, mesh=mesh)
    stepper = Stepper(both, sgd(both.parameters()), loss, micro_batch=2)
    expected = expected_gradients(lambda row: loss(other, row)[0], shares, list(other.parameters()))
    check_close(gradients_of(stepper, shares[rank], list(both.parameters())), expected)


def an_unsharded_root(rank, world_size):
    """Its gradients were not reduced at all."""
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model, twin = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    fully_shard(model[0], mesh=mesh)
    shares = [torch.randn(3 + r, 4, generator=torch.Generator().manual_seed(r)).double() for r in range(world_size)]

    def loss(net, x):
        return net(x).square().sum(), len(x)

    stepper = Stepper(model, sgd(model.parameters()), loss, micro_batch=2, clip_norm=0.01)
    expected = expected_gradients(lambda row: loss(twin, row)[0], shares, list(twin.parameters()))
    check_close(gradients_of(stepper, shares[rank], list(model.parameters())), expected)
    norm = torch.cat([part.flatten() for part in expected]).norm()
    assert abs(stepper.update().grad_norm / float(norm) - 1) < 1e-12


CASES = (
    compiled_ddp, hidden_wrappers, sparse_and_foreign_parameters, foreign_parameters_that_differ, existing_gradients,
    buffers, metrics, errors_on_one_rank, what_differs_between_ranks, options_of_ddp,
    sync_batch_norm, shards_of_a_sub_mesh, an_unsharded_root,
)  # fmt: skip


def main(rank, world_size, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    for case in CASES:
        print(case.__name__, flush=True)
        case(rank, world_size)
        dist.barrier()
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
