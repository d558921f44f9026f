"""What is no saved state is refused in words by every ``load_state_dict``, and leaves the object as it was."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, RandomSampler

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.integrations.accelerate import prepare
from batchwright.integrations.dynabatch import DynaBatchSampler
from batchwright.integrations.huggingface._batches import PlannedBatches, ResizableBatches
from batchwright.integrations.huggingface._updates import TrainingFigures
from batchwright.integrations.lightning import AdaptiveBatching
from batchwright.plan.models._terms import Terms
from batchwright.step import BudgetTracker, FitToMemory, MemoryMonitor, Stepper
from batchwright.testing import FakeMemory

LENGTHS = [3, 5, 2, 9, 4, 4, 7, 1]
MODEL = bw.MemoryModel(Terms(1, (100.0, 0.0, 1.0, 0.0)), margin=0.1)


class Tracked:
    """A ``BudgetTracker`` with the two methods of the others."""

    def __init__(self):
        self.tracker = BudgetTracker(MODEL).observe((10, 90), 1250)

    def state_dict(self):
        return self.tracker.to_state()

    def load_state_dict(self, state):
        self.tracker = self.tracker.with_state(state)


def planned():
    return begun(bw.BatchSampler(LENGTHS, bw.MaxTokens(12)))


def resizable(**options):
    return begun(bw.ResizableBatchSampler(8, 2, **options))


def with_curriculum():
    curriculum = size.Curriculum(LENGTHS, start_fraction=0.5, full_at=3)
    return resizable(curriculum=curriculum, lengths=LENGTHS, budget=bw.MaxTokens(12))


def regrouped():
    sampler = RandomSampler(range(8), generator=torch.Generator().manual_seed(3))
    return begun(bw.regroup(DataLoader(range(8), batch_size=4, sampler=sampler, collate_fn=list), 3))


def streamed():
    return begun(bw.StreamBatcher(LENGTHS, length_of=int, budget=bw.MaxTokens(12), buffer_size=4))


def controlled():
    policy = size.chain(size.loss_driven(), size.cooldown(steps=2), size.clamp(8, 64))
    controller = bw.BatchSizeController(policy, min_size=4, max_size=64)
    for epoch in range(4):
        controller.observe(epoch=epoch, batch_size=8, loss=2.0 / (epoch + 1))
    return controller


def noise_controlled():
    controller = bw.BatchSizeController(size.noise_driven(), min_size=4, max_size=64)
    controller.observe(batch_size=8, noise_s=4.0, noise_g2=2.0)
    return controller


def dynabatch():
    return begun(DynaBatchSampler(LENGTHS, None, None, 2))


def stepper(**options):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = Stepper(model, optimizer, lambda model, batch: (model(batch).sum(), len(batch)), **options)
    made.step(torch.ones(4, 1))
    return made


def stepper_that_fits():
    return stepper(micro_batch=FitToMemory(max_size=8), memory=MemoryMonitor(source=FakeMemory(1000)))


def huggingface_planned():
    return PlannedBatches(bw.BatchSampler(LENGTHS, bw.MaxTokens(12)), LENGTHS, 1)


def huggingface_resizable():
    sampler = bw.ResizableBatchSampler(8, 2, lengths=LENGTHS, budget=bw.MaxTokens(12))
    return ResizableBatches(sampler, LENGTHS, 1, budget=bw.MaxTokens(12), noise_every=0)


def prepared():
    controller = bw.BatchSizeController(size.linear(2, 1, per="step"), min_size=2, max_size=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = bw.ResizableBatchSampler(8, controller)
    loader = DataLoader(torch.ones(8, 1), batch_sampler=sampler)
    loss_fn = lambda model, batch: (model(batch).sum(), len(batch))  # noqa: E731
    made = prepare(Accelerator(cpu=True), model, optimizer, loader, loss_fn=loss_fn)
    made.stepper.step(next(iter(made.loader)))
    return made.stepper


def lightning_callback():
    callback = AdaptiveBatching()
    callback.stepper, callback.controller = stepper(), controlled()
    return callback


def begun(sampler):
    next(iter(sampler))
    return sampler


MAKERS = {
    "BatchSampler": planned,
    "ResizableBatchSampler": resizable,
    "ResizableBatchSampler with a curriculum": with_curriculum,
    "regroup": regrouped,
    "StreamBatcher": streamed,
    "BatchSizeController": controlled,
    "BatchSizeController of noise": noise_controlled,
    "DynaBatchSampler": dynabatch,
    "Stepper": stepper,
    "Stepper that fits": stepper_that_fits,
    "FitToMemory": lambda: FitToMemory(max_size=8),
    "BudgetTracker": Tracked,
    "huggingface: planned": huggingface_planned,
    "huggingface: resizable": huggingface_resizable,
    "huggingface: figures": TrainingFigures,
    "accelerate": prepared,
    "lightning": lightning_callback,
}
WRONG = [None, "3", "x", math.nan, -1, -0.5, 10**30, True, [], {}, [None], {"a": 1}, np.arange(2), b"x"]
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def places(value, way=()):
    """Return the ways to every value inside nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*way, key), *places(item, (*way, key)))]


def changed(state, way, value=None, *, leave_out=False):
    state = copy.deepcopy(state)
    inside = state
    for key in way[:-1]:
        inside = inside[key]
    if leave_out:
        del inside[way[-1]]
    else:
        inside[way[-1]] = value
    return state


def check_refused_or_sound(made, state):
    """Load a state that may be wrong: it is refused in our words and nothing changes, or a sound state follows."""
    before = made.state_dict()
    try:
        made.load_state_dict(state)
    except (StateMismatchError, ArgumentError):
        assert made.state_dict() == before
    else:
        json.dumps(made.state_dict(), allow_nan=False)
        made.load_state_dict(before)


@every_maker
@pytest.mark.parametrize("state", [None, [], "state", 7, [("version", 1)], b"{}"], ids=repr)
def test_what_is_no_dict_is_refused(make, state):
    made = make()
    before = made.state_dict()
    with pytest.raises(StateMismatchError, match=r"needs the dict that its state_dict\(\) returned, got (None|\w+ )"):
        made.load_state_dict(state)
    assert made.state_dict() == before


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"lightning"}))  # its state may be empty: no part existed yet
def test_an_empty_dict_is_refused(name):
    made = MAKERS[name]()
    before = made.state_dict()
    with pytest.raises((StateMismatchError, ArgumentError), match="state"):
        made.load_state_dict({})
    assert made.state_dict() == before


@every_maker
def test_a_wrong_value_anywhere_is_refused_or_harmless(make):
    made = make()
    state = made.state_dict()
    assert places(state)
    for way in places(state):
        check_refused_or_sound(made, changed(state, way, leave_out=True))
        for value in WRONG:
            check_refused_or_sound(made, changed(state, way, value))


@every_maker
def test_its_own_state_is_taken(make):
    made = make()
    state = json.loads(json.dumps(made.state_dict()))
    made.load_state_dict(state)
    assert made.state_dict() == state


@pytest.mark.parametrize("generator", ["", "AAAA", "not base64!", "é"])
def test_a_broken_generator_is_refused_when_the_state_is_loaded(generator):
    made = regrouped()
    state = made.state_dict()
    with pytest.raises(StateMismatchError, match="the state holds no valid generator of the sampler: "):
        made.load_state_dict({**state, "generator": generator})
    assert made.state_dict() == state


@pytest.mark.parametrize(
    ("way", "value", "words"),
    [
        (("policy_state", "policy", "period", "weight"), "3", "weight.*must be a whole number of 0 or more, got '3'"),
        (("policy_state", "policy", "period", "mean"), math.nan, "mean.*must be a number, got nan"),
        (("policy_state", "transforms"), [], "transforms.*must be a list of 2, got"),
        (("policy_state", "policy"), {}, "must be a dict with 'period', 'past', got"),
        (("size",), "8", "size must be a whole number"),
        (("counts", "epoch"), -1, "epoch must be a whole number of 0 or more, got -1"),
        (("history", 0, "new"), "8", "new must be a whole number of 1 or more, got '8'"),
        (("history", 0, "reason"), None, "reason must be a text, got None"),
    ],
)
def test_a_controller_says_which_part_of_its_state_is_wrong(way, value, words):
    made = controlled()
    state = made.state_dict()
    with pytest.raises(StateMismatchError, match=words):
        made.load_state_dict(changed(state, way, value))
    assert made.state_dict() == state


@pytest.mark.parametrize("make", [prepared, lightning_callback])
def test_when_one_part_refuses_the_others_are_as_they_were(make):
    made = make()
    before = made.state_dict()
    later = copy.deepcopy(before)
    later["stepper"]["num_updates"] = 99
    later["controller"]["size"] = "none"
    with pytest.raises(StateMismatchError, match="size must be a whole number of 1 or more, got 'none'"):
        made.load_state_dict(later)
    assert made.state_dict() == before
