"""TRL's SFTTrainer, padded, packed and without padding; TRL's trainers that cannot be planned; groups of rows."""

import datasets
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations.huggingface import adaptive

from ..dynabatch.models import MODELS, make_examples
from ..dynabatch.trainer.training import Gradients, flat_gradient, make_args
from .preferences import make_pairs, make_policy, make_tokenizer
from .trainers import flat, flat_parameters, make_controller, relative_error

trl = pytest.importorskip("trl", reason="trl is not installed; it is in the group dev")

NUM = 24
BUDGET = bw.MaxTokens(64)
MODES = {
    "padded": {"max_length": None},
    "packed": {"packing": True, "max_length": 16},
    "padding free": {"padding_free": True, "max_length": None},
}


def make_model():
    """Return a model whose attention keeps packed sequences apart by their positions."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**MODELS["llama"][2], attn_implementation="sdpa")).double()


def make_data(seed=0):
    """Return examples in which labels count after the first tokens only."""
    rows = []
    for number, example in enumerate(make_examples(NUM, causal=True, seed=seed)):
        ids = example["input_ids"]
        hidden = len(ids) - 2 if number % 3 else 1
        rows.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    return datasets.Dataset.from_list(rows)


def make_sft(folder, *, wrap=adaptive, model=None, callbacks=(), **options):
    kind = trl.SFTConfig
    args = {name: options.pop(name) for name in list(options) if name in kind.__dataclass_fields__}
    gradients = Gradients()
    given = {"train_dataset": make_data(), **options}
    trainer = wrap(trl.SFTTrainer)(
        model=make_model() if model is None else model,
        args=make_args(folder, kind, **{"bf16": False, "gradient_checkpointing": False, **args}),
        processing_class=make_tokenizer(),
        callbacks=[gradients, *callbacks],
        **given,
    )
    seen, collator = [], type(trainer.data_collator)

    class Recording(collator):
        def torch_call(self, examples):
            seen.append(examples)
            return super().torch_call(examples)

    trainer.data_collator.__class__ = Recording
    return trainer, gradients, seen


def names(examples):
    return [tuple(example["input_ids"]) for example in examples]


def sequences(example):
    """Return the tokens and labels of every sequence in a row."""
    lengths = example.get("seq_lengths") or [len(example["input_ids"])]
    parts = (torch.tensor(example[name]).split(lengths) for name in ("input_ids", "labels"))
    return list(zip(*parts, strict=True))


def by_hand(model, examples):
    """Return gradient, loss and token accuracy of the mean over all labels, from one sequence at a time."""
    model.train()
    model.zero_grad()
    total, num, correct = 0.0, 0, 0
    for ids, labels in (pair for example in examples for pair in sequences(example)):
        logits, labels = model(input_ids=ids[None]).logits[0, :-1], labels[1:]
        total = total + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        num += int((labels != -100).sum())
        correct += int((logits.argmax(dim=-1) == labels).sum())
    (total / num).backward()
    return flat_gradient(model), float(total.detach()) / num, correct / num


@pytest.mark.parametrize("mode", MODES)
def test_an_update_has_the_gradient_of_its_sequences_one_by_one(mode, tmp_path):
    trainer, gradients, seen = make_sft(tmp_path, budget=BUDGET, gradient_accumulation_steps=2, **MODES[mode])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    updates = [seen[start : start + 2] for start in range(0, len(seen), 2)]
    assert len(gradients.seen) == len(updates) == len(logs) > 1
    model, num_tokens = make_model(), 0
    for found, entry, batches in zip(gradients.seen, logs, updates, strict=True):
        gradient, loss, accuracy = by_hand(model, flat(batches))
        assert relative_error(found, gradient) < 1e-6
        assert entry["loss"] == pytest.approx(loss, rel=1e-5)
        assert entry["mean_token_accuracy"] == pytest.approx(accuracy, abs=1e-6)
        lengths = [[len(ids) for ids in names(batch)] for batch in batches]
        padded = sum(len(rows) * max(rows) for rows in lengths)
        num_tokens += sum(flat(lengths))
        assert max(len(rows) * max(rows) for rows in lengths) <= 64
        assert entry["num_tokens"] == num_tokens
        assert entry["padding"] == pytest.approx(1 - sum(flat(lengths)) / padded if mode == "padded" else 0.0)
    assert sorted(names(flat(seen))) == sorted(names(trainer.train_dataset))


def test_packed_rows_continue_exactly_within_an_epoch(tmp_path):
    options = {**MODES["packed"], "budget": bw.MaxTokens(32), "learning_rate": 0.1, "num_train_epochs": 2}
    whole, _, expected = make_sft(tmp_path, save_strategy="steps", save_steps=2, **options)
    whole.train()
    second, _, seen = make_sft(tmp_path, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(expected) > 6
    assert list(map(names, seen)) == list(map(names, expected[2:]))
    assert torch.equal(flat_parameters(second.model), flat_parameters(whole.model))


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_evaluation_is_the_mean_over_all_labels(mode, tmp_path):
    trainer, *_ = make_sft(tmp_path, budget=BUDGET, eval_dataset=make_data(seed=9), **MODES[mode])
    _, loss, accuracy = by_hand(make_model(), list(trainer.eval_dataset))
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(loss, rel=1e-6)
    assert found["eval_mean_token_accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_what_is_noted_of_the_loss_stays_with_the_update_when_a_change_of_the_size_is_logged(tmp_path):
    trainer, *_ = make_sft(tmp_path, budget=BUDGET, controller=make_controller(4, 8, 12), history=str, max_length=None)
    trainer.train()
    changes = [entry for entry in trainer.state.log_history if "batch_size_reason" in entry]
    updates = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(changes) == 2
    assert all("mean_token_accuracy" in entry for entry in updates)
    assert not any("mean_token_accuracy" in entry for entry in changes)


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_trainers_that_generate_their_examples_are_refused(name, tmp_path):
    trainer_cls = adaptive(getattr(trl, name))
    with pytest.raises(ArgumentError, match=f"{name} generates completions during training"):
        trainer_cls(model=make_policy("preferences"), reward_funcs=len, train_dataset=make_pairs(), budget=BUDGET)


def test_a_divergence_over_the_batch_is_not_cut(tmp_path):
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": bool(n % 2)}
            for n, row in enumerate(make_pairs(8))]  # fmt: skip
    trainer = adaptive(trl.KTOTrainer)(
        model=make_policy("preferences"),
        ref_model=make_policy("preferences"),
        args=make_args(
            tmp_path, trl.KTOConfig, bf16=False, gradient_checkpointing=False, gradient_accumulation_steps=2
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=make_tokenizer(),
        budget=bw.MaxItems(2),
        weighting="examples",
        lengths=[8] * 8,
    )
    with pytest.raises(ArgumentError, match="its loss was declared to need the whole batch"):
        trainer.train()


def test_pairs_in_rows_of_their_own_stay_together(tmp_path):
    """Chosen and rejected as two rows of the data, as a loss over neighbours wants them."""
    ids = [number // 2 for number in range(NUM)]
    trainer, _, seen = make_sft(
        tmp_path, budget=BUDGET, plan_options={"groups": ids}, num_train_epochs=2, max_length=None
    )
    trainer.train()
    place = {name: number for number, name in enumerate(names(trainer.train_dataset))}
    assert len(place) == NUM
    batches = [[ids[place[name]] for name in names(batch)] for batch in seen]
    assert len(batches) > 4
    assert all(batch.count(label) == 2 for batch in batches for label in batch)
    assert sorted(flat(batches)) == sorted(2 * ids)
