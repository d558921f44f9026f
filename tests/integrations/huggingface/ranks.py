"""Run by test_data in two processes: DDP on gloo, where one rank runs out of memory on its own."""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import batchwright as bw
from batchwright import size
from batchwright.size.noise import estimate_noise
from batchwright.step import PadCollator
from batchwright.testing import EagerGraphs

from ...processes import act_as_torchrun, leave_group
from ..dynabatch.failing import fail_above
from .trainers import (
    MODELS,
    by_update,
    exact,
    flat,
    flat_parameters,
    make_model,
    make_trainer,
    mean_entropy,
    numbered,
    quick,
    relative_error,
    watching,
)

NUM = 25


def main(rank, world_size, folder):
    act_as_torchrun(rank, world_size, folder / "store")
    with quick():
        for name, options in (
            ("t5", {}),
            ("llama", {"weighting": "examples"}),
            ("llama", {"on_oom": "raise"}),
            ("t5", {"on_oom": "raise", "weighting": "examples"}),
        ):
            check_planned(name, rank, folder, **options)
        check_controlled("t5", rank, folder, (3, 7, 10, 5))
        check_controlled("llama", rank, folder, (3, 7, 10, 5), weighting="examples")
        check_controlled("llama", rank, folder, (12, 12, 1), on_oom="raise")
        check_noise(rank, folder)
        check_entropy(rank, folder)
        for is_controlled in (False, True):
            check_resume(folder / f"resume{is_controlled}", is_controlled)
        check_evaluation(rank, folder)
        check_graphed(folder)
    leave_group()


def make(name, folder, rank=0, **options):
    model = make_model(name)
    if rank == 1 and options.get("on_oom") != "raise":  # the other rank fits everything, and waits
        fail_above(model, 2, "backward")
    examples = numbered(NUM, causal=MODELS[name][3])
    return make_trainer(name, folder, model=model, examples=examples, ddp_backend="gloo", **options)


def check_graphed(folder):
    """Gradients of replays are averaged over the ranks after the last micro-batch of an update."""
    results = []
    for graphs in (False, EagerGraphs()):
        trainer, _, gradients = make(
            "llama",
            folder,
            graphs=graphs,
            grouping=bw.Buckets(3),
            data_collator=PadCollator(),
            remove_unused_columns=True,
            num_train_epochs=4,
            gradient_accumulation_steps=2,
            learning_rate=0.1,
        )
        trainer.train()
        results.append((torch.stack(gradients.seen), flat_parameters(trainer.model), trainer.graph_summary()))
    (expected, weights, _), (found, moved, summary) = results
    assert summary.num_replayed > 0, summary
    assert relative_error(found, expected) < 1e-10
    assert relative_error(moved, weights) < 1e-10
    assert relative_error(*everyone(moved)) == 0


def check_entropy(rank, folder):
    """Entropy is the mean over both ranks; the last example, which both of them run, counts once."""
    observed = []
    trainer, seen, _ = make("llama", folder, rank, controller=watching(observed, [12]), budget=bw.MaxItems(3))
    trainer.train()
    shares, taken, expected = everyone(seen), [0, 0], []
    for total in (12, 12, 1):
        numbers = set()
        for place, share in enumerate(shares):
            mine = flat(share)[taken[place] : taken[place] + max(1, total // 2)]
            taken[place] += len(mine)
            numbers |= set(mine)
        assert len(numbers) == total
        expected.append(mean_entropy("llama", sorted(numbers)))
    found = [o.entropy for o in by_update(observed)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert everyone(found) == [found, found]


def everyone(mine):
    """Return what every rank has."""
    all_of_them = [None, None]
    dist.all_gather_object(all_of_them, mine)
    return all_of_them


def check_gradients(name, trainer, gradients, updates, weighting="tokens"):
    losses = []
    for found, numbers in zip(gradients.seen, updates, strict=True):
        expected, loss = exact(name, numbers, weighting)
        error = relative_error(found, expected)
        assert error < 1e-6, error
        losses.append(loss)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    np.testing.assert_allclose(logged, losses, rtol=1e-5)


def check_planned(name, rank, folder, **options):
    """Every example once over both ranks, in equally many steps; every update as one process would make it."""
    trainer, seen, gradients = make(name, folder, rank, gradient_accumulation_steps=2, **options)
    trainer.train()
    shares = everyone(seen)
    assert len(shares[0]) == len(shares[1])
    is_repeated = shares[0][-1] == shares[1][-1]
    assert is_repeated == (name == "t5")
    if is_repeated:  # one example is left for the last step: both ranks run it, and it counts once
        shares[1][-1] = []
    assert sorted(flat(shares[0] + shares[1])) == list(range(NUM))
    updates = [flat(flat(share[2 * n : 2 * n + 2]) for share in shares) for n in range(len(gradients.seen))]
    check_gradients(name, trainer, gradients, updates, options.get("weighting", "tokens"))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["batch_size"] for entry in logs] == [len(update) for update in updates]
    if "on_oom" not in options:
        assert (trainer._batching.updates.figures.num_ooms > 0) == (rank == 1)
    print(f"planned {name} {options}: {len(updates)} updates exact")


def check_controlled(name, rank, folder, sizes, **options):
    """The size counts over both ranks, which agree on it; ranks may run unequal numbers of micro-batches."""
    policy = size.milestones(dict(enumerate(sizes[:-1])), per="step")
    controller = bw.BatchSizeController(policy, min_size=1, max_size=24)
    trainer, seen, gradients = make(name, folder, rank, controller=controller, budget=bw.MaxTokens(60), **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["batch_size"] for entry in logs] == list(sizes)
    assert (logs[-1]["ooms"] > 0) == (options.get("on_oom") != "raise")  # known on both ranks
    shares = [flat(share) for share in everyone(seen)]
    if sizes[-1] == 1:  # both ranks run the last example, and it counts once
        assert shares[1].pop() == shares[0][-1]
    assert sorted(shares[0] + shares[1]) == list(range(NUM))
    updates, places = [], [0, 0]
    for total in sizes:
        takes = [-(-total // 2), total // 2]  # the first rank has the odd one
        updates.append(shares[0][places[0] : places[0] + takes[0]] + shares[1][places[1] : places[1] + takes[1]])
        places = [place + take for place, take in zip(places, takes, strict=True)]
    check_gradients(name, trainer, gradients, updates, options.get("weighting", "tokens"))
    assert len({str(state) for state in everyone(controller.state_dict())}) == 1
    print(f"controlled {name} {options}: exact")


def check_noise(rank, folder):
    """The noise is estimated from the parts of both ranks."""
    observed = []
    controller = bw.BatchSizeController(size.track(lambda o: observed.append(o) or 12), min_size=12, max_size=12)
    options = {"controller": controller, "measure_noise": True, "budget": bw.MaxItems(3), "max_steps": 1}
    trainer, seen, _ = make("llama", folder, on_oom="raise", **options)
    trainer.train()
    parts = flat(share[:2] for share in everyone(seen))  # 6 examples per rank, 3 at once
    labels = [sum(len(trainer.train_dataset[n]["labels"]) - 1 for n in part) for part in parts]
    gradients = [exact("llama", part)[0] for part in parts]
    means = [num / sum(labels) * 4 * gradient for num, gradient in zip(labels, gradients, strict=True)]
    q, whole = sum(3 * float(mean.square().sum()) for mean in means), sum(means) / 4
    expected = estimate_noise(q, float(whole.square().sum()), num_examples=12, num_parts=4)
    np.testing.assert_allclose((observed[0].noise_s, observed[0].noise_g2), expected, rtol=1e-5)
    assert observed[0].noise_parts == 4


def check_resume(folder, is_controlled):
    """Two ranks that stop in the middle of an epoch continue with the batches that they would have had."""

    def train(place, checkpoint=None, **options):
        if is_controlled:
            policy = size.linear(4, 2, per="step")
            options["controller"] = bw.BatchSizeController(policy, min_size=4, max_size=12)
        trainer, seen, _ = make(
            "t5", folder / place, learning_rate=0.05, lr_scheduler_type="constant", num_train_epochs=2,
            budget=bw.MaxTokens(60), **options,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=checkpoint and str(folder / place / checkpoint))
        return trainer, seen

    straight, whole = train("whole")
    _, before = train("part", max_steps=3, save_strategy="steps", save_steps=3)
    dist.barrier()
    resumed, after = train("part", "checkpoint-3")
    assert before + after == whole
    assert torch.equal(flat_parameters(resumed.model), flat_parameters(straight.model))


def check_evaluation(rank, folder):
    """Results of both ranks come in the order of the data, none twice, and the loss is the mean over all labels."""
    examples = numbered(21)
    trainer, *_ = make("t5", folder, eval_dataset=examples, eval_budget=bw.MaxTokens(60))
    found = trainer.predict(examples)
    labels = [row[row != -100].tolist() for row in found.label_ids]
    assert labels == [example["labels"] for example in examples]
    for number, example in enumerate(examples):
        batch = trainer.data_collator([example])
        expected = trainer.model(**batch).logits[0].detach().numpy()
        np.testing.assert_allclose(found.predictions[0][number][: len(example["labels"])], expected, atol=1e-6)
    loss = exact("t5", range(21))[1]
    assert abs(found.metrics["test_loss"] / loss - 1) < 1e-6
    assert abs(trainer.evaluate()["eval_loss"] / loss - 1) < 1e-6


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
