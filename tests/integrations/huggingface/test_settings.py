"""Settings that an adaptive trainer refuses, and devices that it cannot serve."""

from types import SimpleNamespace

import numpy as np
import pytest
from transformers import TrainingArguments

import batchwright as bw
from batchwright.errors import ArgumentError, MissingDependencyError
from batchwright.integrations.huggingface._settings import check_trainer, check_trainer_class

from .trainers import make_controller, make_trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": None}, "needs a budget"),
        ({"budget": 8192}, "MaxTokens"),
        ({"controller": 32}, "controller needs observe"),
        ({"weighting": "rows"}, "'tokens', 'examples'"),
        ({"on_oom": "retry"}, "'split', 'skip', 'raise'"),
        ({"lr_rule": "cubic"}, "lr_rule must be"),
        ({"lr_rule": "sqrt"}, "needs base_size"),
        ({"lr_rule": "sqrt", "base_size": 0}, "base_size must be a whole number of 1 or more"),
        ({"lr_rule": "adascale", "base_size": 4}, "needs measure_noise"),
        ({"measure_noise": True}, "needs a controller"),
        ({"measure_noise": True, "controller": make_controller(4), "on_oom": "skip"}, "every example"),
        ({"grouping": bw.Sorted(), "controller": make_controller(4)}, "grouping belongs to planned"),
        ({"plan_options": {"seed": 3}}, "plan_options takes"),
        ({"plan_options": {"oversize": "truncate"}}, "truncate when tokenizing"),
        ({"eval_budget": 3}, "MaxTokens"),
        ({"controller": make_controller(4), "gradient_accumulation_steps": 2}, "leave it at 1"),
        ({"controller": make_controller(4), "dataloader_drop_last": True}, "leave out dataloader_drop_last"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        pytest.param(
            {"dataloader_in_order": False},
            "dataloader_in_order",
            marks=pytest.mark.skipif(
                "dataloader_in_order" not in TrainingArguments.__dataclass_fields__,
                reason="this transformers has no such argument",
            ),
        ),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
    ],
)
def test_what_cannot_be_done_is_refused_when_the_trainer_is_made(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        make_trainer("t5", tmp_path, **options)


def pretend(settings, **options):
    """Check settings against a trainer on devices that are not here."""
    args = {"n_gpu": 1, "world_size": 2, "average_tokens_across_devices": True, **options.pop("args", {})}
    check_trainer(settings, SimpleNamespace(args=SimpleNamespace(**args), **options))


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({}, {"is_fsdp_enabled": True}, "pass on_oom='raise'"),
        ({}, {"is_deepspeed_enabled": True}, "pass on_oom='raise'"),
        ({}, {"get_tp_size": lambda: 2}, "pass on_oom='raise'"),
        ({"on_oom": "raise", "controller": make_controller(4)}, {"is_fsdp_enabled": True}, "a controller needs"),
        ({"on_oom": "raise", "lr_rule": "sqrt", "base_size": 1}, {"is_deepspeed_enabled": True}, "lr_rule needs"),
        ({}, {"args": {"n_gpu": 2}}, "torchrun"),
        (
            {"measure_noise": True, "controller": make_controller(4)},
            {"args": {"average_tokens_across_devices": False}},
            "needs average_tokens_across_devices",
        ),
    ],
)
def test_what_cannot_be_done_on_several_devices_is_refused(options, devices, message, tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, **options)
    with pytest.raises(ArgumentError, match=message):
        pretend(trainer._batching.settings, **devices)


def test_an_older_trainer_is_refused_with_the_version_it_takes():
    with pytest.raises(MissingDependencyError, match=r"need transformers 5\.3 or newer, but 5\.0\.0 has no"):
        check_trainer_class(object, "5.0.0")


def test_numbers_of_numpy_are_kept_as_plain_ones(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, lr_rule="sqrt", base_size=np.int64(8))
    assert type(trainer._batching.settings.base_size) is int


@pytest.mark.parametrize("options", [{}, {"on_oom": "raise", "controller": make_controller(4)}])
def test_a_loss_that_gathers_from_ranks_runs_equally_often_on_all_of_them(options, tmp_path):
    class Gathering(SimpleNamespace):
        pass

    Gathering.__module__ = "trl.trainer.sft_trainer"
    trainer, *_ = make_trainer("t5", tmp_path, **options)
    args = SimpleNamespace(n_gpu=1, world_size=2, average_tokens_across_devices=True)
    with pytest.raises(ArgumentError, match="loss of a TRL trainer gathers figures from all ranks"):
        check_trainer(trainer._batching.settings, Gathering(args=args))
