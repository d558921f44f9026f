"""The learning rate follows the number of updates, once."""

from types import SimpleNamespace

import pytest

from batchwright.errors import ArgumentError
from batchwright.integrations.dynabatch import DynaBatchSampler, scale_lr_for_dynabatch

from ..models import make_examples
from .training import exact_gradient, make_sampler, make_task_dependent, make_trainer, relative_error, windows


def make_args(**options):
    return SimpleNamespace(**{"learning_rate": 0.1, "per_device_train_batch_size": 8, **options})


def factor(num_batches, size, *, baseline=None, rule="linear", **options):
    args = make_args(**options)
    scaled = scale_lr_for_dynabatch(args, range(num_batches), size, baseline, rule=rule)
    assert args.learning_rate == 0.1  # a copy was scaled
    return scaled.learning_rate / 0.1


def test_the_rule_is_the_quotient_of_updates():
    assert factor(50, 800) == pytest.approx(2)  # 100 fixed batches of 8
    assert factor(50, 801) == pytest.approx(101 / 50)  # the last one is short
    assert factor(50, 800, baseline=16) == pytest.approx(1)


def test_accumulation_and_ranks_count():
    # 100 and 50 batches on 3 ranks are 34 and 17 steps; 4 of them an update make 9 and 5.
    assert factor(50, 800, world_size=3, gradient_accumulation_steps=4) == pytest.approx(9 / 5)


def test_a_sampler_of_one_rank_counts_for_all():
    examples = make_examples(60, causal=True)
    args = make_args(world_size=2, per_device_train_batch_size=3)
    whole = scale_lr_for_dynabatch(args, make_sampler(examples), 60)
    part = scale_lr_for_dynabatch(args, make_sampler(examples, world_size=2), 60)
    assert whole.learning_rate == part.learning_rate > 0.1


def test_other_rules_can_be_chosen():
    assert factor(50, 800, rule="sqrt") == pytest.approx(2**0.5)
    assert factor(50, 800, rule=lambda larger, smaller: 3.0) == pytest.approx(3)
    with pytest.raises(ArgumentError, match="rule"):
        factor(50, 800, rule="adascale")


@pytest.mark.parametrize(("size", "baseline"), [(0, None), (800, 0), (800, -1)])
def test_sizes_below_one_are_refused(size, baseline):
    with pytest.raises(ArgumentError):
        factor(50, size, baseline=baseline)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_auto_scaling_is_applied_once_to_the_rate_and_never_to_the_gradient(name, tmp_path):
    options = {"learning_rate": 0.05, "gradient_accumulation_steps": 2, "lr_scheduler_type": "constant"}
    examples = make_examples(48, causal=name == "llama")
    trainer, gradients = make_trainer(name, tmp_path, examples=examples, auto_scale_lr=True, max_steps=1, **options)
    sampler = make_sampler(examples)
    # 48 examples in 16 fixed batches of 3 make 8 updates; the sampler's batches make fewer.
    expected = 8 / -(-len(sampler) // 2)
    assert expected > 1
    gradient, _ = exact_gradient(name, trainer.model, windows(sampler, 2)[0], trainer.train_dataset)
    trainer.train()
    assert trainer.args.learning_rate == pytest.approx(0.05 * expected)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * expected)
    assert relative_error(gradients.seen[0], gradient) < 1e-6


def test_auto_scaling_needs_a_data_set(tmp_path):
    sampler = make_sampler(make_examples(causal=False))
    with pytest.raises(ArgumentError, match="train_dataset with a length"):
        make_trainer("t5", tmp_path, auto_scale_lr=True, examples=iter([]), sampler=sampler, max_steps=1)


@pytest.mark.parametrize(("task", "expected"), [(None, "train"), ("train", "train"), ("generate", "generate")])
def test_the_batches_that_are_really_trained_on_count(task, expected, tmp_path):
    examples, lengths = make_task_dependent()
    options = {"threshold": 0.9, "max_batch_range": 4.0}
    num = {kind: len(DynaBatchSampler(lengths, None, None, 4, task=kind, **options)) for kind in ("train", "generate")}
    sampler = DynaBatchSampler(lengths, None, None, 4, task=task, **options)
    assert num["train"] < num["generate"] < 30  # 120 examples in fixed batches of 4
    args = make_args(per_device_train_batch_size=4)
    assert scale_lr_for_dynabatch(args, sampler, 120).learning_rate == pytest.approx(0.1 * 30 / num[expected])
    options = {"learning_rate": 0.1, "per_device_train_batch_size": 4, "max_steps": 1}
    trainer, _ = make_trainer("t5", tmp_path, examples=examples, sampler=sampler, auto_scale_lr=True, **options)
    assert trainer.args.learning_rate == pytest.approx(0.1 * 30 / num[expected])
    assert len(trainer.get_train_dataloader()) == num[expected]
