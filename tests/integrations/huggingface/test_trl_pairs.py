"""TRL's trainers of pairs, DPO and rewards: a pair is an example, and never cut apart."""

import numpy as np
import pytest
import torch

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError

from .trainers import flat, flat_parameters, make_controller, relative_error

pytest.importorskip("trl", reason="trl is not installed; it is in the group dev")

from .preferences import (
    NUM_PAIRS,
    loss_in_one_piece,
    make_pairs,
    make_policy,
    make_preferences,
    names,
    plain,
    record,
)

# TRL 1.16 asks models by a name that transformers 5.23 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

KINDS = ["preferences", "rewards"]
BUDGET = bw.MaxTokens(90)
TOLERANCE = 1e-6  # norms round to float32


def fail_above(model, most):
    """Let a model run out of memory on more than so many rows."""

    def hook(module, args, kwargs):
        if len(kwargs["input_ids"]) > most:
            raise torch.OutOfMemoryError("out of memory")

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def check_updates(kind, folder, trainer, gradients, updates, **options):
    """Compare gradients and logged losses with the trainer's own loss over each update in one piece."""
    reference = plain(kind, folder, **options)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(gradients.seen) == len(updates) == len(logged) > 1
    for found, loss, batches in zip(gradients.seen, logged, updates, strict=True):
        gradient, expected = loss_in_one_piece(reference, batches)
        assert relative_error(found, gradient) < TOLERANCE
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "steps"), [("preferences", 1), ("preferences", 3), ("rewards", 2)])
def test_an_update_has_the_gradient_of_its_pairs_in_one_piece(kind, steps, tmp_path):
    trainer, gradients = make_preferences(kind, tmp_path, budget=BUDGET, gradient_accumulation_steps=steps)
    seen = record(trainer)
    trainer.train()
    updates = [seen[start : start + steps] for start in range(0, len(seen), steps)]
    check_updates(kind, tmp_path, trainer, gradients, updates)
    assert len(set(names(flat(seen)))) == len(flat(seen)) == NUM_PAIRS


def test_losses_that_are_means_over_pairs_are_exact_over_micro_batches(tmp_path):
    kinds = ["sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero",
             "apo_down", "discopop", "sigmoid_norm"]  # fmt: skip
    options = {"loss_type": kinds, "loss_weights": [1.0] * len(kinds), "label_smoothing": 0.1}
    trainer, gradients = make_preferences(
        "preferences", tmp_path, budget=BUDGET, gradient_accumulation_steps=2, max_steps=2, **options
    )
    seen = record(trainer)
    trainer.train()
    check_updates("preferences", tmp_path, trainer, gradients, [seen[:2], seen[2:4]], **options)


def test_a_model_that_is_its_own_reference_trains_over_micro_batches(tmp_path):
    """All pairs have the same loss at first, which shows nothing about the loss."""
    trainer, gradients = make_preferences(
        "preferences", tmp_path, budget=BUDGET, gradient_accumulation_steps=2, reference=0
    )
    seen = record(trainer)
    trainer.train()
    updates = [seen[start : start + 2] for start in range(0, len(seen), 2)]
    check_updates("preferences", tmp_path, trainer, gradients, updates, reference=0)


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired", "sft"])
def test_losses_that_are_no_means_over_pairs_are_not_cut(loss_type, tmp_path):
    options = {"loss_type": [loss_type], "reference": 0}
    trainer, _ = make_preferences("preferences", tmp_path, budget=BUDGET, gradient_accumulation_steps=2, **options)
    with pytest.raises(ArgumentError, match=f"loss_type='{loss_type}' is no mean over pairs"):
        trainer.train()
    trainer, gradients = make_preferences("preferences", tmp_path, budget=BUDGET, **options)
    seen = record(trainer)
    trainer.train()
    check_updates("preferences", tmp_path, trainer, gradients, [[batch] for batch in seen], **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_does_not_fit_is_cut_between_pairs(kind, tmp_path):
    model = fail_above(make_policy(kind), 4)
    options = {"pairs": make_pairs(margins=True)} if kind == "rewards" else {}
    trainer, gradients = make_preferences(kind, tmp_path, model=model, budget=bw.MaxItems(6), **options)
    seen = record(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["ooms"] > 0
    check_updates(kind, tmp_path, trainer, gradients, [[batch] for batch in seen], **options)


def test_a_loss_that_is_no_mean_over_pairs_says_so_where_it_does_not_fit(tmp_path):
    model = fail_above(make_policy("preferences"), 4)
    trainer, _ = make_preferences(
        "preferences", tmp_path, model=model, budget=bw.MaxItems(6), loss_type=["aot"], on_oom="split"
    )
    with pytest.raises(DoesNotFitError, match="cannot be cut: loss_type='aot' is no mean over pairs"):
        trainer.train()


@pytest.mark.parametrize("kind", KINDS)
def test_a_controller_decides_how_many_pairs_an_update_uses(kind, tmp_path):
    trainer, gradients = make_preferences(
        kind, tmp_path, budget=BUDGET, controller=make_controller(4, 8, 6), measure_noise=True
    )
    seen = record(trainer)
    trainer.train()
    sizes = [entry["batch_size"] for entry in trainer.state.log_history if "batch_size" in entry]
    assert sizes == [4, 8, 6]
    counts, updates = [len(batch) for batch in seen], []
    for size in sizes:
        num = int(np.searchsorted(np.cumsum(counts), size)) + 1
        updates.append(seen[:num])
        seen, counts = seen[num:], counts[num:]
    check_updates(kind, tmp_path, trainer, gradients, updates)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("multiple", "most"), [(None, None), (8, 12)])
def test_the_budget_holds_for_both_rows_of_every_pair(kind, multiple, most, tmp_path):
    trainer, _ = make_preferences(kind, tmp_path, budget=BUDGET, pad_to_multiple_of=multiple, max_length=most)
    seen = record(trainer)
    trainer.train()
    collated = [trainer.data_collator([example for *_, example in batch]) for batch in list(seen)]
    sizes = [batch["input_ids"].numel() for batch in collated]
    assert max(sizes) <= 90
    assert max(sizes) > 45  # the budget is used
    padding = [1 - float(batch["attention_mask"].double().mean()) for batch in collated]
    logged = [entry["padding"] for entry in trainer.state.log_history if "padding" in entry]
    assert logged == pytest.approx(padding[: len(logged)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_stops_within_an_epoch_continues_exactly(kind, tmp_path):
    options = {"budget": BUDGET, "gradient_accumulation_steps": 2, "learning_rate": 0.1, "num_train_epochs": 2}
    whole, _ = make_preferences(kind, tmp_path / "whole", **options)
    expected = record(whole)
    whole.train()
    saving = {**options, "save_strategy": "steps", "save_steps": 1}
    first, _ = make_preferences(kind, tmp_path / "parts", **saving)
    before = record(first)
    first.train()
    second, _ = make_preferences(kind, tmp_path / "parts", **options)
    after = record(second)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-1"))
    assert [names(batch) for batch in before] == [names(batch) for batch in expected]
    assert [names(batch) for batch in after] == [names(batch) for batch in expected[2:]]
    found = names(flat(expected))
    assert [sorted(found[:NUM_PAIRS]), sorted(found[NUM_PAIRS:])] == [sorted(set(found))] * 2
    assert torch.equal(flat_parameters(second.model), flat_parameters(whole.model))
    start = flat_parameters(make_policy(kind))
    assert (flat_parameters(whole.model) - start).norm() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_the_mean_over_all_pairs(kind, tmp_path):
    pairs = make_pairs(seed=1000)
    trainer, _ = make_preferences(kind, tmp_path, budget=BUDGET, eval_dataset=pairs)
    found = trainer.evaluate()
    reference = plain(kind, tmp_path, eval_dataset=pairs, per_device_eval_batch_size=NUM_PAIRS)
    expected = reference.evaluate()
    counted = {
        "preferences": ["rewards/accuracies", "rewards/margins", "logps/chosen"],
        "rewards": ["accuracy", "margin"],
    }
    for name in ["loss", *counted[kind]]:
        assert found[f"eval_{name}"] == pytest.approx(expected[f"eval_{name}"], rel=1e-4), name
    sizes = [len(batch) for batch in trainer.get_eval_dataloader().batch_sampler]
    assert len(set(sizes)) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_trainer_notes_of_its_loss_is_logged_for_all_pairs_of_an_update(kind, tmp_path):
    trainer, _ = make_preferences(kind, tmp_path, budget=BUDGET, gradient_accumulation_steps=3)
    seen = record(trainer)
    trainer.train()
    reference = plain(kind, tmp_path)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    name = {"preferences": "rewards/margins", "rewards": "margin"}[kind]
    tokens = 0
    for entry, batches in zip(logs, [seen[start : start + 3] for start in range(0, len(seen), 3)], strict=True):
        reference._metrics["train"].clear()
        loss_in_one_piece(reference, batches)
        assert entry[name] == pytest.approx(reference._metrics["train"][name][0], rel=1e-4)
        collated = reference.data_collator([example for *_, example in flat(batches)])
        tokens += int(collated["attention_mask"].sum())
        assert entry["num_tokens"] == tokens
        assert entry["batch_size"] == len(flat(batches))
        assert entry["num_micro_batches"] == len(batches)


def test_reference_log_probabilities_made_before_stay_with_their_pairs(tmp_path):
    options = {"precompute_ref_log_probs": True, "gradient_accumulation_steps": 2}
    model = fail_above(make_policy("preferences"), 8)
    trainer, gradients = make_preferences("preferences", tmp_path, model=model, budget=bw.MaxItems(6), **options)
    seen = record(trainer)
    trainer.train()
    updates = [seen[start : start + 2] for start in range(0, len(seen), 2)]
    check_updates("preferences", tmp_path, trainer, gradients, updates, precompute_ref_log_probs=True)
