"""NumPy's numbers are numbers in every option of the room, and never stay in what is kept or saved."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.plan.models._terms import Terms
from batchwright.step import (
    BudgetTracker,
    FitToMemory,
    MemoryMonitor,
    MemoryRule,
    PackCollator,
    PadCollator,
    Stepper,
    calibrate,
    default_shapes,
    entropy_sum,
    generate,
    growing_shapes,
    measure_size,
    merge_padded,
    oom_safe,
    split_by_budget,
)
from batchwright.testing import FakeMemory

WHOLE = [np.int8, np.int64, np.uint16]
REAL = [np.float32, np.float64]
MODEL = bw.MemoryModel(Terms(1, (100.0, 0.0, 1.0, 0.0)), margin=0.1)


def make_stepper(**options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)


def loss_fn(model, batch):
    return model(batch).square().sum(), np.float32(len(batch)), {"twice": np.int64(2 * len(batch))}


def is_plain(value):
    """Say whether a value holds only plain numbers, all the way down."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return not isinstance(value, np.generic)


def are_plain(settings):
    return all(is_plain(getattr(settings, item.name)) for item in dataclasses.fields(settings))


# Stepper


@pytest.mark.parametrize("number", WHOLE)
def test_a_number_of_examples_is_not_a_controller(number):
    assert make_stepper(micro_batch=number(4)).step(torch.ones(8, 2)).num_micro_batches == 2


def test_the_size_of_a_controller_may_be_a_number_of_numpy():
    class Controller:
        size = np.int64(4)

    assert make_stepper(micro_batch=Controller()).step(torch.ones(8, 2)).num_micro_batches == 2


@pytest.mark.parametrize("value", [np.arange(3), np.float64(4.5), np.int64(0), np.bool_(True), torch.ones(2)])
def test_an_array_is_no_micro_batch(value):
    with pytest.raises(ArgumentError, match="micro_batch must be"):
        make_stepper(micro_batch=value)


@pytest.mark.parametrize("number", REAL)
def test_other_options_of_a_stepper(number):
    options = {"clip_norm": number(0.5), "lr_rule": "adascale", "measure_noise": np.int64(2), "base_size": np.int64(8)}
    stepper = make_stepper(micro_batch=np.int64(3), **options)
    same = make_stepper(micro_batch=3, clip_norm=0.5, lr_rule="adascale", measure_noise=2, base_size=8)
    batch = torch.randn(9, 2, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        report, expected = stepper.step(batch), same.step(batch)
        assert report.observation() | {"seconds": 0} == expected.observation() | {"seconds": 0}
        assert is_plain(report.observation())
        assert is_plain([report.weight, report.metrics, report.grad_norm])
        assert report.metrics == {"twice": 2.0}
    assert are_plain(stepper._settings)
    assert is_plain(stepper.state_dict())
    assert json.loads(json.dumps(stepper.state_dict())) == same.state_dict()


@pytest.mark.parametrize("number", REAL)
def test_rules_and_counts_may_answer_with_numbers_of_numpy(number):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.9, 0.5))
    options = {"beta2_rule": lambda size, base, beta2: number(0.25), "tokens_of": lambda batch: np.int64(batch.numel())}
    report = Stepper(model, optimizer, loss_fn, base_size=np.int64(4), **options).step(torch.ones(8, 2))
    assert (report.beta2, report.tokens) == (0.25, 16)
    assert is_plain([report.beta2, report.observation()])


def test_factors_and_repeats_of_an_experiment():
    batches = [torch.ones(4, 2) * number for number in range(6)]
    found = measure_size(make_stepper(), batches, factors=np.array([1, 2]), repeats=np.int64(2))
    assert [branch.factor for branch in found.branches] == [1, 2]
    assert is_plain(found.to_dict())
    assert is_plain(found.observation())


def test_a_flag_may_be_one_of_numpy():
    assert make_stepper(measure_noise=np.True_).step(torch.ones(8, 2)).noise is not None
    assert make_stepper(measure_noise=np.False_).step(torch.ones(8, 2)).noise is None


@pytest.mark.parametrize("number", [np.float32, np.int64])
def test_the_weight_of_an_update(number):
    stepper = make_stepper()
    stepper.accumulate(torch.ones(8, 2), total_weight=number(8))
    assert stepper.update().loss == make_stepper(weight_of=lambda batch: number(len(batch))).step(torch.ones(8, 2)).loss


def test_a_limit_that_was_learned_is_saved_as_plain_numbers():
    def fails_above_four(model, batch):
        if len(batch) > 4:
            raise torch.OutOfMemoryError("out of memory")
        return loss_fn(model, batch)

    model = nn.Linear(2, 1)
    options = {"micro_batch": bw.MaxTokens(np.int64(64)), "lengths": lambda batch: np.full(len(batch), 8)}
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), fails_above_four, **options)
    stepper.step(torch.ones(16, 2))
    assert stepper.state_dict()["limit"] == {"ceiling": 0.5, "failed_at": 1.0, "num_clean": 1}
    assert is_plain(stepper.state_dict())


# Memory


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("real", REAL)
def test_the_rule_of_memory(whole, real):
    rule = MemoryRule(whole(64), min_size=whole(2), high=real(0.75), low=real(0.5), factor=real(2))
    assert rule == MemoryRule(64, min_size=2, high=0.75, low=0.5, factor=2.0)
    assert are_plain(rule)
    assert is_plain(rule.next_size(whole(16), real(0.25), num_items=whole(16), baseline=real(0)))


@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("real", REAL)
def test_a_size_that_follows_memory(whole, real):
    fit = FitToMemory(whole(64), min_size=whole(2), initial=whole(16), high=real(0.75), low=real(0.5), factor=real(2))
    sizes = [fit.observe(real(share), num_items=whole(16), baseline=real(0.125)) for share in (0.25, 0.9, 0.25)]
    assert sizes == [32, 8, 8]
    assert is_plain([sizes, fit.size, fit.num_micro_batches(whole(100))])
    assert is_plain(fit.state_dict())
    assert "np." not in repr(fit)
    assert is_plain(FitToMemory(whole(64), min_size=whole(2)).state_dict())


@pytest.mark.parametrize("real", [*REAL, np.int64])
def test_a_tracker_of_a_budget(real):
    tracker = BudgetTracker(MODEL, release=real(1), ratio=real(1), num_observed=np.int64(3))
    tracker = tracker.observe(np.array([10, 90]), real(1250)).observe([(np.int64(10), 90)], real(1000))
    assert (tracker.ratio, tracker.num_observed) == (1.0, 5)
    assert is_plain(tracker.to_state())
    assert is_plain([tracker.release, tracker.factor])
    assert tracker.budget(real(2000)) == MODEL.budget(2000.0 * tracker.factor)


# Calibration


def test_calibrate_and_what_it_returns():
    memory = FakeMemory(10_000, used_bytes=100, bytes_of=lambda num_items, length: 3 * num_items * length)
    found = calibrate(
        lambda shape: memory.run_batch(*shape),
        np.array([(1, 8), (4, 8), (4, 32), (16, 32)]),
        restore=nn.Linear(1, 1),
        max_bytes=np.float64(5000),
        repeats=np.int64(1),
        monitor=MemoryMonitor(source=memory),
        progress=False,
    )
    assert found.max_bytes == 5000
    assert is_plain([found.shapes, found.seconds, found.peak_bytes, found.max_bytes])
    assert found.budget(np.int64(4000)) == found.budget(4000)
    assert type(found).from_json(found.to_json()) == found


@pytest.mark.parametrize("number", [np.int64, np.int16])
def test_shapes_to_measure(number):
    lengths = np.array([8, 16, 16, 32, 64])
    assert default_shapes(lengths, number(8), num=number(6)) == default_shapes(lengths.tolist(), 8, num=6)
    assert is_plain(default_shapes(lengths, number(8), num=number(6)))
    shape = next(growing_shapes(lengths, max_tokens=number(4096))(None))
    assert shape == (1, 8)
    assert is_plain(shape)


@pytest.mark.parametrize("options", [{"budget": 2.5}, {"budget": True}, {"budget": 8, "num": 4.5}])
def test_what_is_not_a_whole_number_of_items_is_refused(options):
    with pytest.raises(ArgumentError):
        default_shapes([8, 16, 32], **options)


def test_cutting_by_a_budget():
    parts = split_by_budget(np.array([3, 9, 4, 8]), bw.MaxTokens(np.int64(20)), least_parts=np.int64(3))
    assert parts == [[1], [3], [2], [0]]
    assert is_plain(parts)
    assert split_by_budget([5, 5], bw.MaxItems(1), order=np.array([1, 0])) == [[1], [0]]
    with pytest.raises(ArgumentError, match="permutation of the 2 examples"):
        split_by_budget([5, 5], bw.MaxItems(1), order=[1, 1])


# Collators and losses


@pytest.mark.parametrize("number", [np.int64, np.int8, np.float32])
def test_padding_of_a_collator(number):
    collate = PadCollator(
        pad_to=bw.PadTo(multiple_of=np.int64(4)),
        axis_fields=("input_ids", "labels"),
        same_axis={"marks": np.int64(1)},
        pad_values={"input_ids": number(7), "labels": number(-1)},
    )
    batch = collate([{"input_ids": [5, 6], "labels": [1], "marks": [2]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 7]]
    assert batch["labels"].tolist() == [[1, -1, -1, -1]]
    assert batch["marks"].tolist() == [[2, 0, 0, 0]]


@pytest.mark.parametrize("number", WHOLE)
def test_packing_of_a_collator(number):
    collate = PackCollator(width=number(4), pad_id=number(9))
    assert collate == PackCollator(width=4, pad_id=9)
    assert are_plain(collate)
    assert collate([[{"input_ids": [5, 6]}]])["input_ids"].tolist() == [[5, 6, 9, 9]]


@pytest.mark.parametrize("number", [np.int64, np.int8])
def test_the_label_that_is_ignored(number):
    logits, targets = torch.zeros(3, 4), torch.tensor([0, 1, -100])
    assert entropy_sum(logits, targets, ignore_index=number(-100)) == entropy_sum(logits, targets)


# Inference


@pytest.mark.parametrize("number", [np.int64, np.float32, np.float64])
def test_joining_of_results(number):
    joined = merge_padded([torch.tensor([[1, 2, 3]]), torch.tensor([[4]])], pad_value=number(8))
    assert joined.tolist() == [[1, 2, 3], [4, 8, 8]]
    assert oom_safe(lambda numbers: [2 * number for number in numbers], [number(1), number(2)]) == [2, 4]


@pytest.mark.parametrize("number", WHOLE)
def test_options_of_generate(number):
    class Echo(nn.Linear):
        def generate(self, input_ids, attention_mask, **options):
            assert is_plain(options["pad_token_id"])
            return torch.cat([input_ids] + [input_ids[:, -1:]] * int(options["max_new_tokens"]), dim=1)

    options = {"pad_token_id": number(3), "pad_multiple_of": number(4), "max_new_tokens": number(2)}
    found = generate(Echo(1, 1), [np.array([3, 4]), [number(5)]], budget=bw.MaxItems(number(2)), **options)
    assert [ids.tolist() for ids in found] == [[4, 4], [5, 5]]
