"""Run by test_loader in two processes: DDP on gloo, where ranks run out of memory on their own."""

import sys
import tempfile

import torch
import torch.distributed as dist

from ....processes import act_as_torchrun, leave_group
from ..failing import fail_above
from ..models import MODELS, collate, make_examples, make_model
from .training import exact_gradient, make_sampler, make_trainer, relative_error


def main(rank, world_size, store):
    torch.set_num_threads(1)
    act_as_torchrun(rank, world_size, store)
    for name in ("t5", "llama"):
        check(name, rank)
        check(name, rank, oom_fallback="split_retry", shuffle=True)
    leave_group()


def check(name, rank, *, shuffle=False, **options):
    """Train an epoch; compare every update with one process on the examples of both ranks."""
    causal = MODELS[name][3]
    examples = [{**example, "number": n} for n, example in enumerate(make_examples(25, causal=causal))]
    seen = []

    def recording(batch):
        seen.append([example["number"] for example in batch])
        return collate(batch)

    model = make_model(name)
    if options and rank == 1:  # the other rank fits everything, and waits
        fail_above(model, 2, "backward")
    with tempfile.TemporaryDirectory() as folder:
        trainer, gradients = make_trainer(
            name,
            folder,
            model=model,
            examples=examples,
            sampler=make_sampler(examples, shuffle=shuffle),
            gradient_accumulation_steps=2,
            remove_unused_columns=False,
            ddp_backend="gloo",
            **options,
        )
        trainer.data_collator = recording
        trainer.train()
    everyone = [None, None]
    dist.all_gather_object(everyone, seen)
    counts = sorted(number for batches in everyone for batch in batches for number in batch)
    assert counts == list(range(25)), f"every example once: {counts}"
    assert len(everyone[0]) == len(everyone[1])
    if options and rank == 1:
        assert trainer._oom_failed_count > 0
    for update, found in enumerate(gradients.seen):
        window = [batch for batches in everyone for batch in batches[2 * update : 2 * update + 2]]
        expected, _ = exact_gradient(name, make_model(name), window, examples)
        error = relative_error(found, expected)
        assert error < 1e-6, f"rank {rank}, update {update}: {error}"
    print(f"rank {rank}: {len(gradients.seen)} updates exact")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
