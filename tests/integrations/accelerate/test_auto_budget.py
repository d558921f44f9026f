"""prepare(budget="auto"): the sampler gets the budget that is found, and checkpoints keep it."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.integrations import _planned_budget
from batchwright.integrations.accelerate import prepare
from batchwright.step import FoundBudget, MemoryMonitor, PadCollator
from batchwright.testing import FakeMemory

from .test_preparation import forget

LENGTHS = np.random.default_rng(0).integers(1, 30, size=60)
DATA = [{"x": torch.full((int(length), 4), 1.0 + place), "index": place} for place, length in enumerate(LENGTHS)]


ONE = bw.MaxItems(1)


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    forget()
    yield
    forget()


def collate(examples):
    rows = nn.utils.rnn.pad_sequence([example["x"] for example in examples], batch_first=True)
    return {"x": rows, "index": torch.tensor([example["index"] for example in examples])}


def make(
    budget="auto",
    *,
    sampler_budget=ONE,
    total_bytes=20_000,
    sampler=None,
    collate_fn=collate,
    kind=torch.optim.AdamW,
    data=DATA,
    **options,
):
    """Prepare a small model whose batches take 10 bytes per padded token of made-up memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    memory = FakeMemory(total_bytes, used_bytes=100)
    optimizer = kind(model.parameters(), lr=0.01)
    sampler = bw.BatchSampler(LENGTHS, sampler_budget) if sampler is None else sampler

    def loss_fn(model, batch):
        memory.run_batch(len(batch["x"]), batch["x"].shape[1], 10)
        return model(batch["x"]).square().sum(), len(batch["x"])

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate_fn)
    options = {"loss_fn": loss_fn, "memory": MemoryMonitor(source=memory), "budget": budget, **options}
    return accelerator, prepare(accelerator, model, optimizer, loader, **options), memory


def train(prepared, num_epochs=1, *, stop_at=None):
    seen = []
    for _ in range(prepared.loader.epoch, num_epochs):
        for batch in prepared.loader:
            prepared.stepper.step(batch)
            seen.append(batch["index"].tolist())
            if len(seen) == stop_at:
                return seen
    return seen


def weights(prepared):
    return torch.cat([value.detach().flatten() for value in prepared.model.parameters()])


def test_training_is_that_with_the_found_budget_given_to_the_sampler():
    _, auto, memory = make()
    found = auto.stepper.found_budget
    memory.reset_peak()
    seen = train(auto, 2)
    assert memory.peak_bytes <= 0.9 * 20_000
    forget()
    _, given, _ = make(None, sampler_budget=found)
    assert given.stepper.found_budget is None
    assert train(given, 2) == seen
    assert torch.equal(weights(given), weights(auto))
    assert len(seen) < 60


@pytest.mark.parametrize("place", ["loader", "stepper"])
def test_what_is_measured_are_examples_and_no_filler(place):
    """A batch of 4 that a collator fills up to 16 would seem to take as long as one of 16."""
    sampler = bw.BatchSampler(LENGTHS, bw.MaxItems(16), grouping=bw.Buckets(2))
    filled = PadCollator(pad_to=sampler.pad_to, axis_fields=("x",), mask_field=None, fill_rows=True)
    rows, sizes = [], []

    def note(examples):
        sizes.append(len(examples))
        return filled(examples)

    def loss_fn(model, batch):
        rows.append(len(batch["x"]))
        return (model(batch["x"]).sum(dim=(1, 2)) * batch["row_weight"]).sum(), batch["row_weight"].sum()

    options = {"collate_fn": note} if place == "loader" else {"collate_fn": list, "collate": note}
    make(sampler=sampler, loss_fn=loss_fn, memory=None, **options)
    assert set(rows) == set(sizes)
    assert min(rows) < 16


class Drawing:
    """A collator with random numbers of its own, and a count."""

    def __init__(self):
        self.random, self.num_calls, self.drawn = np.random.default_rng(0), 0, []

    def __call__(self, examples):
        self.num_calls += 1
        self.drawn.append(self.random.random())
        return collate(examples)


def test_a_collator_with_random_numbers_of_its_own_draws_none_for_the_look():
    drawing = Drawing()
    _, prepared, _ = make(collate_fn=drawing)
    assert (drawing.num_calls, drawing.drawn) == (0, [])
    train(prepared)
    assert drawing.drawn[0] == np.random.default_rng(0).random()


class Noisy:
    """The data, with a generator that is drawn from."""

    def __init__(self):
        self.random = np.random.default_rng(0)

    def __len__(self):
        return len(DATA)

    def __getitem__(self, place):
        return {**DATA[place], "x": DATA[place]["x"] + self.random.random()}


def test_a_data_set_with_a_generator_of_its_own_draws_none_for_the_look():
    data = Noisy()
    make(data=data)
    assert data.random.random() == np.random.default_rng(0).random()


def test_another_collator_or_optimizer_is_another_key(tmp_path, monkeypatch):
    found = FoundBudget(None, bw.TimeModel.fit([(1, 8), (2, 8), (4, 8)], [0.1, 0.2, 0.3]))
    searches = []
    monkeypatch.setattr(_planned_budget, "find_budget", lambda *args, **kwargs: searches.append(args) or found)
    for options in ({}, {}, {"collate_fn": Drawing()}, {"kind": torch.optim.Adam}):
        make(**options)
        forget()
    assert len(searches) == len(list((tmp_path / "cache" / "batchwright" / "budgets").iterdir())) == 3


def test_options_of_the_stepper_that_change_what_runs_are_part_of_the_key(tmp_path, monkeypatch):
    """A collate that pads further takes more memory; its name alone stood in the key."""
    found = FoundBudget(None, bw.TimeModel.fit([(1, 8), (2, 8), (4, 8)], [0.1, 0.2, 0.3]))
    monkeypatch.setattr(_planned_budget, "find_budget", lambda *args, **kwargs: found)

    def padding(least):
        return lambda examples: collate([*examples, {"x": torch.zeros(least, 4), "index": -1}])

    longest = max(LENGTHS)
    for least in (longest, longest, 2 * longest):
        make(collate_fn=list, collate=padding(int(least)), lengths=lambda example: len(example["x"]))
        forget()
    assert len(list((tmp_path / "cache" / "batchwright" / "budgets").iterdir())) == 2


def test_a_known_budget_is_not_looked_for_again(monkeypatch):
    _, first, _ = make()
    forget()
    monkeypatch.setattr(_planned_budget, "find_budget", None)
    _, second, _ = make()
    assert second.stepper.found_budget == first.stepper.found_budget
    assert isinstance(second.stepper.found_budget, FoundBudget)


def test_a_resumed_run_plans_the_same_batches_whatever_it_finds(tmp_path):
    _, whole, _ = make(total_bytes=3_000)
    seen = train(whole)
    forget()
    accelerator, first, _ = make(total_bytes=3_000)
    begun = train(first, stop_at=2)
    accelerator.save_state(str(tmp_path / "state"))
    forget()
    accelerator, second, _ = make(total_bytes=40_000)
    assert second.stepper.found_budget != first.stepper.found_budget
    accelerator.load_state(str(tmp_path / "state"))
    assert second.stepper.found_budget == first.stepper.found_budget
    assert begun + train(second) == seen


def test_a_refused_state_leaves_the_plan_as_it_was():
    _, prepared, _ = make()
    part = prepared.stepper._parts()["sampler"]
    before, plan = part.state_dict(), list(prepared.loader.sampler.plan)
    other = {**before, "sampler": {**before["sampler"], "num_examples": 7}}
    with pytest.raises(StateMismatchError):
        part.load_state_dict(other)
    assert part.state_dict() == before
    assert list(prepared.loader.sampler.plan) == plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": bw.MaxTokens(64)}, r"takes 'auto' here, got MaxTokens\(64\); give any other budget to the Batch"),
        ({"budget": "automatic"}, "or 'auto', got 'automatic'"),
        ({"sampler": bw.BatchSampler(LENGTHS, bw.MaxItems(2), grouping=bw.Packed(32))}, "packed rows"),
    ],
    ids=["given", "word", "packed"],
)
def test_what_cannot_be_found_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        make(**options)


def test_batches_that_a_controller_sizes_are_left_to_the_stepper():
    controller = bw.BatchSizeController(bw.size.constant(4), min_size=4, max_size=4)
    sampler = bw.ResizableBatchSampler(len(DATA), controller)
    with pytest.raises(ArgumentError, match="leave budget out: where a controller decides the size, Stepper"):
        make(sampler=sampler)


def test_a_loss_that_fails_raises_its_own_error():
    def broken(model, batch):
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        make(loss_fn=broken)
