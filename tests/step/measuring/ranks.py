"""Run by tests in several processes: DDP on gloo, one share per rank."""

import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchwright.errors import ArgumentError
from batchwright.step import Stepper, measure_size
from batchwright.testing import FakeClock

from ...processes import leave_group


def make_batch(number, rank, size=4):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(size + rank, 3, generator=generator), torch.randn(size + rank, 1, generator=generator)


def loss_fn(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def make(loss_fn=loss_fn, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01, betas=(0.9, 0.99))
    return model, Stepper(ddp, optimizer, loss_fn, **options)


def check_report(rank):
    clock = FakeClock()

    def takes_time(model, batch):
        clock.advance(1.0 + 2 * rank)
        return loss_fn(model, batch)

    _, stepper = make(takes_time, tokens_of=lambda batch: 2 * len(batch[0]), beta2_rule="half_life", base_size=4)
    stepper._gatherer.clock = clock
    torch.manual_seed(rank)
    shares = [(torch.randn(num, 3), torch.randn(num, 1)) for num in (5, 3)]
    report = stepper.step((torch.ones(5 - rank, 3), torch.ones(5 - rank, 1)))
    assert report.batch_size == 9
    beta2 = stepper.step(shares[rank]).beta2
    print(f"seconds {report.seconds}, tokens {report.tokens}, beta2 {beta2:.4f}")


def train(stepper, rank, numbers):
    for number in numbers:
        stepper.step(make_batch(number, rank))


def check_experiment(rank):
    batches = [make_batch(1000 + number, rank) for number in range(12)]
    (model, stepper), (twin, other) = make(), make()
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    train(other, rank, range(5))
    torch.set_rng_state(state)
    train(stepper, rank, range(3))
    found = measure_size(stepper, batches)
    train(stepper, rank, range(3, 5))
    for mine, same in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, same)
    gathered = [None, None]
    dist.all_gather_object(gathered, found.to_dict() | {"total_seconds": 0})
    assert gathered[0] == gathered[1]
    assert found.examples == 8 * (4 + 5)
    assert [branch.batch_size for branch in found.branches] == [9, 18, 36]
    assert all(math.isfinite(branch.loss) for branch in found.branches)


def check_failures(rank):
    model, stepper = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [make_batch(number, rank) for number in range(12)]
    for given in (batches[: 12 - 4 * rank], batches[: 12 - rank]):  # fits on both ranks, and on one only
        try:
            measure_size(stepper, given)
        except ArgumentError as error:
            print(f"refused: {error}")
        else:
            raise AssertionError("it must be refused on all ranks")
    # One rank has batches of other widths, and can only run them one after the other: then all do.
    uneven = [(x, y.expand(-1, 1 + number % 2)) for number, (x, y) in enumerate(batches)] if rank else batches
    found = measure_size(stepper, uneven)
    assert [branch.is_joined for branch in found.branches] == [True, False, False]

    def fails(module, batch):
        if rank and len(batch[0]) > 10:
            raise RuntimeError("only here")
        return loss_fn(module, batch)

    object.__setattr__(stepper._settings, "loss_fn", fails)
    try:
        measure_size(stepper, batches)
    except RuntimeError as error:
        print(f"failed: {error}")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def main(rank, world_size, path, what):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    for check in [check_report] if what == "report" else [check_experiment, check_failures]:
        check(rank)
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
