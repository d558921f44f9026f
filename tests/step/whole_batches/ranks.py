"""Run by test_several_ranks in several processes: losses over the examples of all ranks, or of each rank."""

import random
import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from batchwright.errors import ArgumentError, BatchwrightError, DoesNotFitError
from batchwright.step import Stepper, WholeBatchLoss
from batchwright.step.whole_batches import _passes

from ...processes import leave_group
from .models import TwoTowers, clip_loss, cut, distance, encode, gradients_by_hand, make_batch


def share(step, rank):
    """Return the share of one rank: uneven numbers of examples."""
    return make_batch(2 + (7 * step + 5 * rank) % 6, seed=100 * step + rank)


def joined(step, world_size):
    shares = [share(step, rank) for rank in range(world_size)]
    return {name: torch.cat([one[name] for one in shares]) for name in shares[0]}


def make(**options):
    torch.manual_seed(0)
    model = TwoTowers(**options).double()
    return model, DistributedDataParallel(model)


def stepper_of(ddp, loss, **options):
    return Stepper(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), loss, **options)


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def check_random_failures(rank, world_size):
    """Ranks run out of memory on their own, in either pass, and the gradient is that of one process."""
    chance, ooms, worst = random.Random(rank), 0, 0.0

    def failing(model, batch):
        found = encode(model, batch)
        if len(batch["text"]) > 1 and chance.random() < 0.15:
            if chance.random() < 0.5:
                raise torch.OutOfMemoryError("out of memory in forward")
            found["pair"][0].register_hook(lambda gradient: raise_oom())
        return found

    model, ddp = make()
    stepper = stepper_of(ddp, WholeBatchLoss(failing, clip_loss(model), over_ranks=True))
    for step in range(15):
        batch = joined(step, world_size)
        num = len(batch["text"])
        expected, _, mean = gradients_by_hand(model, clip_loss, batch, [list(range(num))])
        stepper.accumulate(share(step, rank))
        stepper.reduce()
        worst = max(worst, distance(gradients_of(model), expected))
        report = stepper.update()
        assert report.batch_size == num
        assert abs(report.loss - mean) < 1e-12
        assert report.weight == float(batch["weight"].sum())
        assert set(report.metrics) == {"right"}
        ooms += report.ooms
    print(f"rank {rank}: {ooms} ooms, worst {worst:.1e}")
    assert ooms > 0
    assert worst < 1e-11


def check_memory_of_joining(rank, world_size):
    """A rank whose encodings do not fit together at first leaves no other one waiting for them."""
    fails, pack = [rank == world_size - 1], _passes.pack

    def packed(tensors):
        if fails and fails.pop():
            raise torch.OutOfMemoryError("out of memory between the passes")
        return pack(tensors)

    model, ddp = make()
    batch = joined(2, world_size)
    expected, *_ = gradients_by_hand(model, clip_loss, batch, [list(range(len(batch["text"])))])
    stepper = stepper_of(ddp, WholeBatchLoss(encode, clip_loss(model), over_ranks=True))
    with mock.patch.object(_passes, "pack", packed):
        stepper.accumulate(share(2, rank))
    stepper.reduce()
    assert distance(gradients_of(model), expected) < 1e-12
    assert stepper.update().ooms == 1


def raise_oom():
    raise torch.OutOfMemoryError("out of memory in backward")


def check_apart(rank, world_size):
    """Without over_ranks every rank has a loss of its own; the update is that of their sum."""
    model, ddp = make()
    losses = [clip_loss(model)(encode(model, share(3, other)))[:2] for other in range(world_size)]
    mean = sum(loss for loss, _ in losses) / sum(weight for _, weight in losses)
    expected = torch.autograd.grad(mean, list(model.parameters()))
    stepper = stepper_of(ddp, WholeBatchLoss(encode, clip_loss(model)), micro_batch=2)
    stepper.accumulate(share(3, rank))
    stepper.reduce()
    assert distance(gradients_of(model), expected) < 1e-12
    assert stepper.update().batch_size == sum(len(share(3, other)["text"]) for other in range(world_size))


def check_dropout(rank, world_size):
    """Masks are drawn once, on the rank of the examples."""
    model, ddp = make(dropout=0.4)
    mine = share(1, rank)
    num = len(mine["text"])
    stepper = stepper_of(
        ddp,
        WholeBatchLoss(encode, clip_loss(model), over_ranks=True),
        split=lambda batch, places: num if places is None else cut(batch, places),
        micro_batch=-(-num // 2),
    )
    parts = [list(range(-(-num // 2))), list(range(-(-num // 2), num))]
    torch.manual_seed(5 + rank)
    own = [encode(model, cut(mine, part)) for part in parts]
    own = [torch.cat(column) for column in zip(*[(*one["pair"], one["weight"]) for one in own], strict=True)]
    shares = [None] * world_size
    dist.all_gather_object(shares, [tensor.detach() for tensor in own])
    shares[rank] = own
    texts, images, weight = (torch.cat(column) for column in zip(*shares, strict=True))
    loss, total, _ = clip_loss(model)({"pair": (texts, images), "weight": weight})
    found = torch.autograd.grad(loss / total, list(model.parameters()))
    expected = []
    for (name, _), gradient in zip(model.named_parameters(), found, strict=True):
        if name != "scale":
            dist.all_reduce(gradient)
        expected.append(gradient)
    torch.manual_seed(5 + rank)
    stepper.accumulate(mine)
    stepper.reduce()
    assert distance(gradients_of(model), expected) < 1e-12
    stepper.update()


def check_types(rank, world_size):
    """Encodings of any type and shape reach the loss as they are, also those without a gradient."""
    seen = []

    def typed(model, batch):
        z = model(batch["text"], "text")
        ids = (batch["text"][:, 0] * 1000).long()
        return {"half": z.bfloat16(), "cube": z.reshape(-1, 2, 2), "ids": ids, "flag": ids > 0, "waves": z * 1j}

    def loss(found):
        seen.append({name: (value.dtype, tuple(value.shape[1:])) for name, value in found.items()})
        seen.append(found["ids"].tolist())
        sums = found["half"].double().sum() + found["cube"].square().sum() + found["waves"].imag.pow(3).sum()
        return sums * found["flag"].sum(), len(found["ids"])

    model, ddp = make()
    batch = joined(2, world_size)
    sums, weight = loss(typed(model, batch))
    expected = torch.autograd.grad(sums / weight, list(model.parameters()), allow_unused=True)
    stepper = stepper_of(ddp, WholeBatchLoss(typed, loss, over_ranks=True), micro_batch=2)
    stepper.accumulate(share(2, rank))
    stepper.reduce()
    assert distance(gradients_of(model), expected) < 1e-2
    stepper.abandon()
    assert seen[2:] == seen[:2]


def check_accumulated(rank, world_size):
    """Several batches of all ranks form one update, with a weight that is known before."""
    model, ddp = make()
    sums = [clip_loss(model)(encode(model, joined(step, world_size)))[:2] for step in (4, 5)]
    mean = sum(loss for loss, _ in sums) / sum(weight for _, weight in sums)
    expected = torch.autograd.grad(mean, list(model.parameters()))
    stepper = stepper_of(
        ddp,
        WholeBatchLoss(encode, clip_loss(model), over_ranks=True),
        micro_batch=3,
        weight_of=lambda batch: batch["weight"].sum(),
        clip_norm=1e6,
    )
    for step in (4, 5):
        stepper.accumulate(share(step, rank))
    stepper.reduce()
    assert distance(gradients_of(model), expected) < 1e-12
    stepper.update()


def check_failures(rank, world_size):
    """If one rank fails at any point, all raise, nothing is left, and the next step works."""
    model, ddp = make()
    plan = {"where": None}
    last = world_size - 1

    def failing(module, batch):
        found = encode(module, batch)
        where = plan["where"] if rank == last else None
        if where == "in place":
            batch["text"].add_(1)
            raise_oom()
        if where == "encode":
            raise ValueError("no such word")
        if where == "forward memory":
            raise torch.OutOfMemoryError("never fits")
        if where == "backward memory":
            found["pair"][0].register_hook(lambda gradient: raise_oom())
        if where == "rows":
            found["pair"] = (found["pair"][0][:, :2], found["pair"][1][:, :2])
        return found

    def loss(encodings):
        sums, weight, metrics = clip_loss(model)(encodings)
        if plan["where"] == "draws":
            sums = sums * torch.rand(())
        if plan["where"] == "differs":
            sums = sums * (1 + rank)
        if plan["where"] == "loss" and rank == last:
            raise KeyError("no such label")
        return sums, weight, metrics

    stepper = stepper_of(ddp, WholeBatchLoss(failing, loss, over_ranks=True), micro_batch=2)
    cases = [
        ("in place", ArgumentError, "changed the batch in place"),
        ("encode", ValueError, "no such word"),
        ("forward memory", DoesNotFitError, "does not fit on its own"),
        ("backward memory", DoesNotFitError, "does not fit on its own"),
        ("rows", ArgumentError, "other kinds of encodings on other ranks"),
        ("draws", ArgumentError, "must not draw random numbers"),
        ("differs", ArgumentError, "differs between ranks"),
        ("loss", KeyError, "no such label"),
        ("batch", BatchwrightError, "share their first dimension|other"),
    ]
    for where, kind, text in cases:
        plan["where"] = where
        batch = share(1, rank)
        if where == "batch" and rank == last:
            batch = {**batch, "weight": torch.zeros(1)}
        with pytest.raises(kind, match=text):
            stepper.step(batch)
        assert all(gradient is None for gradient in gradients_of(model)), where
        plan["where"] = None
        whole = joined(1, world_size)
        expected, _, _ = gradients_by_hand(model, clip_loss, whole, [list(range(len(whole["text"])))])
        stepper.accumulate(share(1, rank))
        stepper.reduce()
        assert distance(gradients_of(model), expected) < 1e-12, where
        stepper.update()


def check_refusals(rank, world_size):
    model, _ = make()
    whole = WholeBatchLoss(encode, clip_loss(model), over_ranks=True)
    for call, text in [
        (lambda: stepper_of(model, whole), "not in DistributedDataParallel"),
        (lambda: whole(model, share(0, rank)), "only the examples of this rank"),
    ]:
        with pytest.raises(ArgumentError, match=text):
            call()


def check_ranks_that_meet_in_forward(rank, world_size):
    """FSDP2 and SyncBatchNorm are refused on all ranks, where a second forward pass would be waited for."""
    model, ddp = make()
    ddp.module.norm = torch.nn.SyncBatchNorm(8).double()  # DDP's own constructor takes it only on a GPU
    for over_ranks, micro_batch in [(True, "auto"), (False, 2)]:
        stepper = stepper_of(
            ddp, WholeBatchLoss(encode, clip_loss(model), over_ranks=over_ranks), micro_batch=micro_batch
        )
        warnings.simplefilter("ignore")  # of BatchNorm and splits
        with pytest.raises(ArgumentError, match="SyncBatchNorm meets other ranks"):
            stepper.step(share(1, rank))
    if hasattr(FSDPModule, "set_gradient_divide_factor"):
        layer = torch.nn.Linear(2, 2)
        fully_shard(layer)
        with pytest.raises(ArgumentError, match="does not run under fully_shard"):
            stepper_of(layer, WholeBatchLoss(encode, clip_loss(model)))


def main(rank, world_size, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    checks = [check_random_failures, check_apart, check_dropout, check_types, check_accumulated, check_failures]
    for check in [*checks, check_memory_of_joining, check_refusals, check_ranks_that_meet_in_forward]:
        check(rank, world_size)
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
