"""Evaluation of an adaptive trainer: planned, in the order of the data, with an exact loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Seq2SeqTrainer, Trainer

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations.huggingface._evaluation import EvaluationPlan, EvaluationRun, plan_evaluation

from .trainers import MODELS, collate, exact, flat, make_trainer, numbered

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(20, 200))
def test_every_example_is_evaluated_once_and_ranks_have_equally_many(lengths, world_size, limit):
    plan = plan_evaluation(lengths, bw.MaxTokens(limit), world_size=world_size)
    own = [
        index
        for step, is_own in zip(plan.steps, plan.is_own, strict=True)
        for rows, own in zip(step.tolist(), is_own, strict=True)
        for index in rows * bool(own)
    ]
    assert sorted(own) == list(range(len(lengths)))
    gathered = np.concatenate([step.reshape(-1) for step in plan.steps])
    assert gathered[plan.places].tolist() == list(range(len(lengths)))
    for rank in range(world_size):
        for rows in replace(plan, rank=rank):
            cost = len(rows) * sum(np.array([lengths[row] for row in rows]).max(axis=0))
            assert cost <= limit or len(rows) == 1


def plain(trainer, **options):
    """Return the trainer that a user would have without us."""
    kind = Seq2SeqTrainer if isinstance(trainer, Seq2SeqTrainer) else Trainer
    args = {"compute_metrics": trainer.compute_metrics, **options}
    return kind(trainer.model, trainer.args, collate, eval_dataset=trainer.eval_dataset, **args)


def make(name, folder, **options):
    causal = MODELS[name][3]
    trainer, seen, _ = make_trainer(name, folder, eval_dataset=numbered(21, causal=causal), **options)
    return trainer, seen


def without_padding(predictions, labels):
    """Return logits where labels count, so that widths do not matter."""
    return [row[: (label != -100).sum()] for row, label in zip(predictions, labels, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_predictions_come_in_the_order_of_the_data(name, tmp_path):
    trainer, seen = make(name, tmp_path)
    found, expected = trainer.predict(trainer.eval_dataset), plain(trainer).predict(trainer.eval_dataset)
    assert flat(seen) != list(range(21))  # or the test would show nothing
    assert np.array_equal(found.label_ids, expected.label_ids)
    logits = [result.predictions[0] if isinstance(result.predictions, tuple) else result.predictions
              for result in (found, expected)]  # fmt: skip
    for mine, other in zip(*(without_padding(rows, found.label_ids) for rows in logits), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_generated_tokens_come_in_the_order_of_the_data(tmp_path):
    options = {"predict_with_generate": True, "generation_max_length": 6, "trainer_cls": Seq2SeqTrainer}
    trainer, seen = make("marian", tmp_path, **options)
    trainer.args.generation_num_beams = 1
    found, expected = trainer.predict(trainer.eval_dataset), plain(trainer).predict(trainer.eval_dataset)
    assert flat(seen) != list(range(21))
    width = min(found.predictions.shape[1], expected.predictions.shape[1])
    assert np.array_equal(found.predictions[:, :width], expected.predictions[:, :width])
    assert found.metrics["test_loss"] == pytest.approx(exact_loss("marian"), rel=1e-6)


def exact_loss(name, weighting="tokens"):
    return exact(name, range(21), weighting)[1]


@pytest.mark.parametrize("weighting", ["tokens", "examples"])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_mean_over_all_labels_or_examples(name, weighting, tmp_path):
    trainer, _ = make(name, tmp_path, weighting=weighting)
    expected = exact_loss(name, weighting)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert trainer.evaluate(metric_key_prefix="mine")["mine_loss"] == pytest.approx(expected, rel=1e-6)
    # The plain trainer takes the mean of the means of its batches.
    assert plain(trainer).evaluate()["eval_loss"] != pytest.approx(expected, rel=1e-5)


def test_metrics_are_computed_in_the_order_of_the_data(tmp_path):
    received = []

    def metrics(prediction):
        received.append(prediction)
        return {"rows": len(prediction.label_ids)}

    trainer, seen = make("llama", tmp_path, compute_metrics=metrics, include_for_metrics=["inputs", "loss"])
    assert trainer.evaluate()["eval_rows"] == 21
    (prediction,) = received
    for number, example in enumerate(trainer.eval_dataset):
        ids = example["input_ids"]
        assert prediction.label_ids[number][: len(ids)].tolist() == ids
        assert prediction.inputs[number][: len(ids)].tolist() == ids
    batch = seen[0]
    assert len(prediction.losses) == 21
    expected = exact("llama", batch)[1]
    assert prediction.losses[batch] == pytest.approx([expected] * len(batch), rel=1e-6)
    assert trainer.compute_metrics is metrics


def test_less_is_padded(tmp_path):
    widths = []
    for budget in ("same", None):
        trainer, _ = make("t5", tmp_path, eval_budget=budget, per_device_eval_batch_size=5)
        batches = list(trainer.get_eval_dataloader())
        widths.append(sum(batch["input_ids"].numel() + batch["labels"].numel() for batch in batches))
    assert widths[0] < widths[1]


def test_data_without_labels_can_be_predicted(tmp_path):
    trainer, _ = make("llama", tmp_path, data_collator=lambda examples: without_labels(collate(examples)))
    found = trainer.predict(trainer.eval_dataset)
    assert found.label_ids is None
    assert "test_loss" not in found.metrics
    for number, example in enumerate(trainer.eval_dataset):
        ids = torch.tensor([example["input_ids"]])
        expected = trainer.model(ids).logits[0].detach().numpy()
        np.testing.assert_allclose(found.predictions[number][: ids.shape[1]], expected, atol=1e-6)


def without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def test_several_data_sets_are_evaluated_by_name(tmp_path):
    sets = {"short": numbered(5), "long": numbered(21)}
    trainer, *_ = make_trainer("t5", tmp_path, eval_dataset=sets)
    metrics = trainer.evaluate()
    for name, num in (("short", 5), ("long", 21)):
        expected = exact("t5", range(num))[1]
        assert metrics[f"eval_{name}_loss"] == pytest.approx(expected, rel=1e-6)


def test_evaluation_while_training_leaves_training_alone(tmp_path):
    options = {"num_train_epochs": 1, "learning_rate": 0.1}
    watched, seen = make("t5", tmp_path, eval_strategy="steps", eval_steps=1, **options)
    watched.train()
    alone, expected, _ = make_trainer("t5", tmp_path, **options)
    alone.train()
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (watched, alone)]
    assert losses[0] == losses[1]
    assert sum("eval_loss" in entry for entry in watched.state.log_history) == len(losses[0])
    assert len(seen) > len(expected)


@pytest.mark.parametrize("options", [{"eval_budget": None}, {"eval_do_concat_batches": False}])
def test_evaluation_can_be_left_to_the_trainer(options, tmp_path):
    trainer, seen = make("t5", tmp_path, **options)
    trainer.evaluate()
    assert flat(seen) == list(range(21))


def test_metrics_of_batches_see_the_last_one(tmp_path):
    calls = []

    def metrics(prediction, compute_result):
        calls.append(compute_result)
        return {"batches": len(calls)}

    trainer, _ = make("t5", tmp_path, compute_metrics=metrics, batch_eval_metrics=True)
    trainer.evaluate()
    assert calls[-1] is True


def test_data_that_cannot_be_measured_are_left_to_the_trainer(tmp_path):
    class Opaque(list):
        def __getitem__(self, index):
            return tuple(super().__getitem__(index).items())

    trainer, _ = make("t5", tmp_path, data_collator=lambda rows: collate([dict(row) for row in rows]))
    loader = trainer.get_eval_dataloader(Opaque(numbered(7)))
    assert not isinstance(loader.batch_sampler, EvaluationPlan)
    assert isinstance(trainer.get_eval_dataloader().batch_sampler, EvaluationPlan)


def test_an_example_over_the_budget_is_evaluated_alone(tmp_path):
    trainer, seen = make("t5", tmp_path, eval_budget=bw.MaxTokens(22))
    trainer.evaluate()
    assert sorted(flat(seen)) == list(range(21))
    assert max(map(len, seen)) > 1


def test_persistent_workers_are_kept_from_one_evaluation_to_the_next(tmp_path):
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    trainer, _ = make("t5", tmp_path, **options)
    assert trainer.get_eval_dataloader() is trainer.get_eval_dataloader()


@pytest.mark.parametrize("workers", [{}, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}])
@pytest.mark.parametrize("change", [1, -1])
def test_a_list_that_grew_or_shrank_is_evaluated_as_it_is(change, workers, tmp_path):
    trainer, _ = make("t5", tmp_path, **workers)
    trainer.evaluate()
    extra = numbered(22)[21]
    if change > 0:
        trainer.eval_dataset.append(extra)
    else:
        trainer.eval_dataset.pop()
    numbers = [example["number"] for example in trainer.eval_dataset]
    places = [place for batch in trainer.get_eval_dataloader().batch_sampler for place in batch]
    assert sorted(places) == sorted(numbers)
    if not workers:  # which hold the list as it was
        assert trainer.evaluate()["eval_loss"] == pytest.approx(exact("t5", numbers)[1], rel=1e-6)


def test_a_list_that_grew_is_trained_on_as_it_is(tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, examples=numbered(20))
    trainer.train()
    trainer.train_dataset.append(numbered(21)[20])
    seen.clear()
    trainer.train()
    assert sorted(flat(seen)) == list(range(21))


def test_an_output_without_rows_is_named():
    plan = plan_evaluation([3, 1], bw.MaxTokens(4))
    with pytest.raises(ArgumentError, match="has 3 rows for 2 examples"):
        EvaluationRun(plan).in_order((np.zeros((2, 1)), np.zeros(3)))


def test_a_model_without_labels_weighs_examples(tmp_path):
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, input_ids, target):
            return {"loss": (self.scale * target).mean()}

    def stack(examples):
        return {key: torch.tensor([float(e["number"]) for e in examples]) for key in ("input_ids", "target")}

    trainer, _ = make("t5", tmp_path, model=Mean(), data_collator=stack, label_names=["target"])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(10)  # the mean of 0 to 20
