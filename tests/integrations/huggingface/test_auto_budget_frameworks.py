"""budget="auto" under TRL, PEFT and sentence-transformers: training and figures of the budget given by hand."""

import math

import pytest
import torch

from batchwright.integrations.huggingface import adaptive
from batchwright.step import FoundBudget

from . import preferences, test_peft, test_sentence_transformers, test_trl_sft
from .test_auto_budget import cache
from .trainers import flat_parameters, make_trainer

__all__ = ["cache"]  # a fixture
trl = pytest.importorskip("trl", reason="trl is not installed; it is in the group dev")

USUAL = {"learning_rate": 1e-2, "optim": "adamw_torch", "num_train_epochs": 2, "logging_steps": 1}
_OF_TIME = ("runtime", "per_second")


def of_pairs(kind):
    return lambda folder, **options: preferences.make_preferences(kind, folder, **options)[0]


def of_sentences(folder, **options):
    loss = test_sentence_transformers.losses.MultipleNegativesRankingLoss
    encoder = test_sentence_transformers.save_encoder(folder / "encoder")
    return test_sentence_transformers.make_trainer(encoder, folder, loss, **options)[0]


CASES = {
    "preferences": of_pairs("preferences"),
    "rewards": of_pairs("rewards"),
    "sft": lambda folder, **options: test_trl_sft.make_sft(folder, **options)[0],
    "padding_free": lambda folder, **options: test_trl_sft.make_sft(
        folder, padding_free=True, max_length=None, **options
    )[0],
    "packing": lambda folder, **options: test_trl_sft.make_sft(folder, packing=True, max_length=24, **options)[0],
    "lora": lambda folder, **options: make_trainer("llama", folder, model=test_peft.with_lora("llama"), **options)[0],
    "sentences": of_sentences,
}


def logs(trainer):
    """Return all that was logged, without what depends on the clock."""
    return [
        {name: value for name, value in log.items() if not any(part in name for part in _OF_TIME)}
        for log in trainer.state.log_history
    ]


@pytest.mark.parametrize("case", CASES)
def test_training_and_figures_are_those_of_the_found_budget_given_by_hand(case, tmp_path):
    def train(budget):
        trainer = CASES[case](tmp_path, budget=budget, **USUAL)
        assert isinstance(trainer, adaptive(type(trainer)))
        trainer.train()
        return trainer

    found = train("auto")
    given = train(found.found_budget)
    assert isinstance(found.found_budget, FoundBudget)
    assert found.state.global_step == given.state.global_step >= 2
    assert torch.equal(flat_parameters(found.model), flat_parameters(given.model))
    for one, other in zip(logs(found), logs(given), strict=True):
        assert one.keys() == other.keys()
        assert all(one[name] == other[name] or math.isnan(one[name]) for name in one), (one, other)
