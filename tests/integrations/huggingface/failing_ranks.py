"""Run by test_memory in two processes: what fails on one rank is raised on both, and idle ranks spoil nothing."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.step.losses import whole_batch

from ...processes import act_as_torchrun, leave_group
from ..dynabatch.failing import fail_above
from .test_refusals import Contrastive, Scaled, masked_mean, without_labels
from .trainers import (
    collate,
    exact,
    flat,
    flat_gradient,
    make_model,
    make_trainer,
    numbered,
    quick,
    relative_error,
    windows,
)


def main(rank, world_size, folder):
    act_as_torchrun(rank, world_size, folder / "store")
    with quick():
        for check in (check_an_example_that_does_not_fit, check_a_loss, check_a_collator, check_a_first_look):
            check(rank, folder)
        check_refusal(folder)
        for on_oom in ("split", "raise"):
            check_a_parameter_of_the_loss(rank, folder, on_oom)
            check_an_idle_rank(rank, folder, on_oom)
            check_whole_batches(folder, on_oom)
    leave_group()


def make(folder, name="llama", **options):
    return make_trainer(name, folder, ddp_backend="gloo", gradient_accumulation_steps=2, **options)


def everyone(mine):
    found = [None, None]
    dist.all_gather_object(found, mine)
    return found


def check_both_raise(trainer, kind, text, rank):
    """Both ranks raise the same kind of error, and nobody waits; then they can still talk to each other."""
    with pytest.raises(kind, match=text) as caught:
        trainer.train()
    said = str(caught.value)
    assert said.startswith("rank 1: ") == (rank == 0), said
    assert everyone(rank) == [0, 1]
    print(f"rank {rank}: {kind.__name__} {said[:60]}")


def check_an_example_that_does_not_fit(rank, folder):
    model = make_model("llama")
    if rank == 1:
        fail_above(model, 0, "backward")
    trainer, *_ = make(folder, model=model)
    check_both_raise(trainer, DoesNotFitError, "does not fit on its own", rank)


def check_a_loss(rank, folder):
    """The loss fails in the first micro-batch of two; the other rank runs both of its own."""
    model = make_model("llama")

    def before(*args):
        if rank == 1 and torch.is_grad_enabled():
            raise ZeroDivisionError("no luck")

    model.register_forward_pre_hook(before)
    trainer, *_ = make(folder, model=model)
    check_both_raise(trainer, ZeroDivisionError, "no luck", rank)


def check_a_collator(rank, folder):
    calls = []

    def failing(examples):
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            raise LookupError("no such example")
        return collate(examples)

    trainer, *_ = make(folder, data_collator=failing)
    check_both_raise(trainer, LookupError, "no such example", rank)


def check_a_first_look(rank, folder):
    model = make_model("llama")

    def before(*args):
        if rank == 1 and not torch.is_grad_enabled():
            raise ValueError("not in evaluation mode")

    model.register_forward_pre_hook(before)
    trainer, *_ = make(folder, model=model)
    check_both_raise(trainer, ValueError, "not in evaluation mode", rank)


def check_refusal(folder):
    trainer, *_ = make(folder, "t5", model=Contrastive(), data_collator=without_labels)
    with pytest.raises(ArgumentError, match="an update of 4 micro-batches needs to know"):
        trainer.train()


def check_a_parameter_of_the_loss(rank, folder, on_oom):
    """A parameter that the model does not hold is averaged over ranks, though DDP does not know it."""
    loss, model, found = Scaled(), make_model("llama"), []
    if rank == 1 and on_oom == "split":
        fail_above(model, 2, "backward")
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.0)
    optimizer.register_step_pre_hook(lambda *args: found.append(float(loss.log_scale.grad)))
    options = {"optimizers": (optimizer, None), "compute_loss_func": loss, "on_oom": on_oom}
    trainer, seen, _ = make(folder, model=model, **options)
    trainer.train()
    shares, examples, plain = everyone(seen), numbered(causal=True), make_model("llama")
    for update, gradient in enumerate(found):
        numbers = flat(flat(share[2 * update : 2 * update + 2]) for share in shares)
        loss.log_scale.grad = None
        total = 0.0
        for number in numbers:
            batch = collate([examples[number]])
            total = total + loss(plain(**batch), batch["labels"]) * (batch["labels"].shape[1] - 1)
        (total / sum(len(examples[number]["labels"]) - 1 for number in numbers)).backward()
        assert abs(gradient / float(loss.log_scale.grad) - 1) < 1e-5, (update, gradient, loss.log_scale.grad)


def check_an_idle_rank(rank, folder, on_oom):
    """The last micro-batch of a rank holds no label that counts, and a user's mean over it is NaN."""
    examples = numbered(8, causal=True)
    for example in examples[4:]:
        example["labels"] = [-100] * len(example["labels"])
    options = {"lengths": [9] * 4 + [2] * 4, "grouping": bw.Sorted(), "train_sampling_strategy": "sequential"}
    options |= {"budget": bw.MaxItems(2), "compute_loss_func": masked_mean, "on_oom": on_oom}
    trainer, seen, gradients = make(folder, examples=examples, **options)
    trainer.train()
    updates = [flat(parts) for parts in zip(*(windows(share, 2) for share in everyone(seen)), strict=True)]
    for numbers, found in zip(updates, gradients.seen, strict=True):
        expected = exact("llama", [number for number in numbers if number < 4])[0]
        assert relative_error(found, expected) < 1e-6, relative_error(found, expected)


def check_whole_batches(folder, on_oom):
    """Every rank has a batch of its own, and gradients are averaged, as the plain trainer does it."""
    model = whole_batch(Contrastive())
    trainer, _, gradients = make_trainer(
        "t5", folder, model=model, budget=bw.MaxItems(6), ddp_backend="gloo", on_oom=on_oom
    )
    seen = []
    trainer.data_collator = lambda examples: seen.append(examples) or without_labels(examples)
    trainer.train()
    plain = Contrastive()
    for found, batches in zip(gradients.seen, zip(*everyone(seen), strict=True), strict=True):
        plain.zero_grad()
        sum(plain(**without_labels(batch))["loss"] / 2 for batch in batches).backward()
        assert relative_error(found, flat_gradient(plain)) < 1e-12


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
