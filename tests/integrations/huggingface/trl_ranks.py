"""Run by test_trl_ranks in two processes: trainers of TRL, and packed rows, with gradients computed by hand."""

import sys
from pathlib import Path

import datasets
import pytest
import torch
import torch.nn.functional as F

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import PackCollator

from ...processes import act_as_torchrun, leave_group
from ..dynabatch.trainer.training import flat_gradient
from . import test_packing as packing
from .preferences import make_pairs, make_policy, make_preferences, make_tokenizer, record
from .ranks import everyone
from .trainers import quick, relative_error

# pytest looks for doctests here too, also where these are not installed.
pytest.importorskip("trl", reason="trl is not installed; it is in the group dev")
pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed; it is in the group dev")

from . import test_sentence_transformers as sentences
from .test_trl_sft import MODES, by_hand, make_data, make_sft, names
from .test_trl_sft import make_model as make_llama

NUM_PAIRS = 17  # the ranks have batches of different sizes, the last step most of all
BUDGET = bw.MaxTokens(48)
ON_RANKS = {"ddp_backend": "gloo", "on_oom": "raise"}


def main(rank, world_size, folder):
    act_as_torchrun(rank, world_size, folder / "store")
    torch.set_num_threads(1)
    encoder = sentences.save_encoder(folder / f"encoder {rank}")  # in a group only the first rank would save
    with quick():
        for mode in MODES:
            for steps in (1, 2):
                check_sft(folder, mode, steps)
        check_sft(folder, "padded", 3, data=with_silent_rows(), budget=bw.MaxItems(1))
        for kind in ("preferences", "rewards"):
            for steps in (1, 2):
                check_pairs(folder, kind, steps)
        check_refusal(folder)
        check_sentences(encoder, folder)
        for kind in packing.COLLATORS:
            check_packed(rank, folder, kind)
        check_packed_resume(folder)
    leave_group()


def updates_of(seen, steps, key):
    """Return the examples of both ranks in every update; one that a rank only repeats is given once."""
    shares = everyone(seen)
    assert len(shares[0]) == len(shares[1])
    found = []
    for start in range(0, len(seen), steps):
        examples = [example for share in shares for batch in share[start : start + steps] for example in batch]
        found.append(list({key(example): example for example in examples}.values()))
    return found


def with_silent_rows():
    """Return examples of which two in three have no label that counts: ranks run out of them within an update."""
    rows = [
        {**row, "labels": row["labels"] if n % 3 == 0 else [-100] * len(row["labels"])}
        for n, row in enumerate(make_data())
    ]
    return datasets.Dataset.from_list(rows)


def check_sft(folder, mode, steps, *, data=None, budget=BUDGET):
    options = {"gradient_accumulation_steps": steps, "budget": budget, **ON_RANKS, **MODES[mode]}
    trainer, gradients, seen = make_sft(folder, train_dataset=make_data() if data is None else data, **options)
    trainer.train()
    updates = updates_of(seen, steps, lambda example: tuple(example["input_ids"]))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(updates) == len(gradients.seen) == len(logs) > 1
    model, taken = make_llama(), []
    for found, entry, examples in zip(gradients.seen, logs, updates, strict=True):
        taken += names(examples)
        gradient, loss, _ = by_hand(model, examples)
        assert relative_error(found, gradient) < 1e-6, (mode, steps)
        assert entry["loss"] == pytest.approx(loss, rel=1e-5)
    assert sorted(taken) == sorted(names(trainer.train_dataset))
    print(f"sft {mode}, {steps}: {len(updates)} updates exact")


def log_probability(model, prompt, completion):
    """Return the log probability of a completion, token by token."""
    ids = torch.tensor(prompt + completion)
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
    return F.log_softmax(logits, dim=-1).gather(1, ids[len(prompt) :, None]).sum()


def margin(kind, model, reference, example):
    """Return by how much a pair is told apart, as it stands in the papers: DPO with beta 0.1, or Bradley and Terry.

    The loss of the pair is its negative log sigmoid.
    """
    sides = ("chosen_ids", "rejected_ids")
    if kind == "rewards":
        scores = [model(input_ids=torch.tensor([example[side]])).logits[0, 0] for side in sides]
        return scores[0] - scores[1]
    chosen, rejected = (log_probability(model, example["prompt_ids"], example[side]) for side in sides)
    with torch.no_grad():
        before = [log_probability(reference, example["prompt_ids"], example[side]) for side in sides]
    return 0.1 * ((chosen - before[0]) - (rejected - before[1]))


def check_pairs(folder, kind, steps):
    pairs = make_pairs(NUM_PAIRS)
    options = {"gradient_accumulation_steps": steps, "budget": bw.MaxTokens(100), "pairs": pairs, **ON_RANKS}
    trainer, gradients = make_preferences(kind, folder, **options)
    seen = record(trainer)
    trainer.train()
    updates = updates_of(seen, steps, lambda pair: (tuple(pair[0]), tuple(pair[1])))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(updates) == len(gradients.seen) == len(logs) > 1
    model, reference, num = make_policy(kind), make_policy(kind, 1), 0
    model.config.pad_token_id = make_tokenizer().pad_token_id
    for found, entry, pairs in zip(gradients.seen, logs, updates, strict=True):
        examples = [example for *_, example in pairs]
        num += len(examples)
        model.zero_grad()
        margins = torch.stack([margin(kind, model, reference, example) for example in examples])
        losses = -F.logsigmoid(margins)
        losses.mean().backward()
        error = relative_error(found, flat_gradient(model))
        assert error < 1e-6, (kind, steps, error)
        assert entry["loss"] == pytest.approx(float(losses.detach().mean()), rel=1e-5)
        if kind == "preferences":  # the trainer gathers a number per pair
            assert entry["rewards/margins"] == pytest.approx(float(margins.detach().mean()), rel=1e-5)
    assert num == NUM_PAIRS
    print(f"{kind}, {steps}: {len(updates)} updates exact")


def check_refusal(folder):
    for options in ({}, {"on_oom": "skip"}):
        with pytest.raises(ArgumentError, match="gathers figures from all ranks whenever it is called"):
            make_sft(folder, budget=bw.MaxTokens(48), ddp_backend="gloo", max_length=None, **options)[0].train()
    print("refused")


def check_sentences(encoder, folder):
    """A mean over examples is exact over both ranks; a loss that compares the examples of a batch is refused."""
    cosine, ranking = sentences.losses.CosineSimilarityLoss, sentences.losses.MultipleNegativesRankingLoss
    options = {"budget": bw.MaxTokens(40), "ddp_backend": "gloo"}
    trainer, gradients, seen = sentences.make_trainer(
        encoder, folder / "out", cosine, labels=True, weighting="examples", **options
    )
    trainer.args.dataloader_drop_last = False  # their arguments set it on several ranks
    updates = updates_of(sentences.trained(trainer, seen), 1, lambda example: (example["anchor"], example["positive"]))
    assert sum(map(len, updates)) == sentences.NUM
    sentences.check(encoder, folder / "plain", cosine, gradients, updates, labels=True)
    trainer, *_ = sentences.make_trainer(encoder, folder / "out", ranking, **options)
    with pytest.raises(ArgumentError, match="an update of 2 micro-batches needs to know what each of them counts"):
        trainer.train()
    print(f"sentences: {len(updates)} updates exact")


def check_packed(rank, folder, kind):
    """Packed rows on two ranks: every example once, equal steps, the updates of padded training."""
    options = {"collator": packing.COLLATORS[kind], "ddp_backend": "gloo", "num_train_epochs": 2}
    trainer = packing.make(folder, **options)
    trainer.train()
    shares = everyone(packing.planned(packing.make(folder, **options)))
    updates = []
    for mine, other in zip(*shares, strict=True):
        assert len(mine) == len(other)
        steps = [sorted(set(one + two)) for one, two in zip(mine, other, strict=True)]
        assert sorted(packing.joined(steps)) == list(range(len(packing.LENGTHS)))
        updates += steps
    losses, gradients, weights = packing.padded_training("Llama", updates)
    assert packing.logged(trainer) == pytest.approx(losses, rel=1e-5)
    assert max(map(packing.relative, trainer.seen.gradients, gradients)) < 1e-5
    assert packing.relative(packing.parameters(trainer.model), weights) < 1e-6
    print(f"packed, {kind}: {len(updates)} updates exact")


def check_packed_resume(folder):
    options = {
        "ddp_backend": "gloo",
        "save_strategy": "steps",
        "save_steps": 2,
        "collator": PackCollator(layout="flat"),
    }
    whole = packing.make(folder / "whole", **options)
    whole.train()
    resumed = packing.make(folder / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    assert torch.equal(packing.parameters(resumed.model), packing.parameters(whole.model))
    print("packed, resumed: equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
