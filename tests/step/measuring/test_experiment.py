"""measure_size: branches are honest training, and training goes on as if they had not been."""

import copy
import json
import math
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.step import FitToMemory, MemoryMonitor, Stepper, measure_size, whole_batch
from batchwright.step.measuring import experiment
from batchwright.testing import EagerGraphs, FakeClock, FakeMemory

from ...processes import run_ranks
from ...thorough import crossed
from ..graphs.tape import TapeGraphs

torch.set_num_threads(1)


class Model(nn.Module):
    """Draws, batch statistics, a moving average, and a count that is no buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(8, 1)
        self.register_buffer("average", torch.zeros(8))
        self.num_calls = 0
        self.seen = {"rows": []}
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x):
        hidden = self.dropout(torch.tanh(self.norm(self.first(x))))
        if self.training:
            self.average = self.average.lerp(hidden.detach().float().mean(0), 0.1)
            self.num_calls += 1
            self.seen["rows"].append(len(x))
            self.last_draw = torch.rand(1, generator=self.generator)
            hidden = hidden + random.random() * np.random.random() * 1e-3
        return self.last(hidden + self.average)


def make_model():
    torch.manual_seed(0)
    return Model()


def batch_of(number, size=8):
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(size, 4, generator=generator), "y": torch.randn(size, 1, generator=generator)}


def batches_of(num=12, first=1000, size=8):
    return [batch_of(first + number, size) for number in range(num)]


def loss_fn(model, batch):
    return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adam fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adam with tensors": lambda parameters: torch.optim.Adam(
        parameters, lr=torch.tensor(0.01), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01),
}


def make(optimizer="adamw", model=None, loss=loss_fn, **options):
    model = make_model() if model is None else model
    return Stepper(model, OPTIMIZERS[optimizer](model.parameters()), loss, **options)


def seed_all():
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)


def everything(stepper):
    """Return all that training depends on, as plain values."""
    model, optimizer = stepper._ranks.module, stepper._optimizer
    return {
        "model": {name: value.tolist() for name, value in model.state_dict().items()},
        "optimizer": plain(optimizer.state_dict()),
        "stepper": stepper.state_dict(),
        "usual": stepper._gatherer.runner.usual_weight,
        "scaler": None if stepper._settings.scaler is None else stepper._settings.scaler.state_dict(),
        "modes": [part.training for part in model.modules()],
        "gradients": [None if one.grad is None else one.grad.tolist() for one in model.parameters()],
        "attributes": [getattr(model, name, None) for name in ("num_calls", "seen")],
        "generator": model.generator.get_state().tolist() if hasattr(model, "generator") else None,
        "random": [random.getstate(), plain(np.random.get_state()), torch.get_rng_state().tolist()],
    }


def plain(value):
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def trained(make_stepper, *, with_experiment, at=3, **options):
    seed_all()
    stepper = make_stepper()
    losses = [stepper.step(batch_of(number)).loss for number in range(at)]
    if with_experiment:
        before = copy.deepcopy(everything(stepper))
        found = measure_size(stepper, batches_of(), **options)
        assert everything(stepper) == before
        assert all(branch.num_updates for branch in found.branches)
    losses += [stepper.step(batch_of(number)).loss for number in range(at, at + 3)]
    return losses, everything(stepper)


def scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return make(scaler=scaler, weight_of=lambda batch: len(batch["x"]))


def frozen_below():
    stepper = make()
    stepper._ranks.module.first.weight.requires_grad_(False)
    stepper._ranks.module.norm.eval()
    return stepper


def fits_to_memory():
    memory = FakeMemory(1000, used_bytes=100)

    def loss(model, batch):
        memory.run_batch(len(batch["x"]), 40)
        return loss_fn(model, batch)

    monitor = MemoryMonitor(source=memory)
    return make(loss=loss, micro_batch=FitToMemory(64, initial=4), memory=monitor)


def noise_from_vectors():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 1))
    return make(model=model, measure_noise=2, noise_from="vectors")


STEPPERS = {
    "noise from vectors": noise_from_vectors,
    **{name: (lambda name=name: make(name)) for name in OPTIMIZERS},
    "rules": lambda: make(lr_rule="linear", beta2_rule="half_life", base_size=8),
    "noise": lambda: make(measure_noise=2, lr_rule="adascale", base_size=8),
    "micro-batches": lambda: make(micro_batch=3, clip_norm=0.1),
    "scaler": scaled,
    "frozen parts": frozen_below,
    "memory": fits_to_memory,
    "bfloat16": lambda: make(autocast=torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:BatchNorm in training mode")
@pytest.mark.parametrize(("name", "at"), crossed(STEPPERS, [0, 3]))
def test_training_goes_on_to_the_bit_as_if_there_had_been_no_experiment(name, at):
    expected = trained(STEPPERS[name], with_experiment=False, at=at)
    assert trained(STEPPERS[name], with_experiment=True, at=at) == expected


def plain_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("backend", [EagerGraphs, TapeGraphs])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_graphed_training_goes_on_as_if_there_had_been_no_experiment(backend, at):
    def graphed():
        return make("adam fused", model=plain_model(), graphs=backend(), shapes=[(8, 4)], beta2_rule="half_life",
                    base_size=8)  # fmt: skip

    losses, state = trained(graphed, with_experiment=False, at=at)
    assert trained(graphed, with_experiment=True, at=at) == (losses, state)


def test_gradients_modes_and_a_scheduler_are_as_before():
    stepper = make(existing_gradients="add")
    optimizer = stepper._optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model = stepper._ranks.module
    model.eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    gradients = [parameter.grad for parameter in model.parameters()]
    state = copy.deepcopy(scheduler.state_dict())
    names = set(vars(optimizer))
    measure_size(stepper, batches_of())
    assert all(one.grad is held for one, held in zip(model.parameters(), gradients, strict=True))
    assert all(bool((held == 0.25).all()) for held in gradients)
    assert not model.training
    assert scheduler.state_dict() == state
    assert set(vars(optimizer)) == names


# What branches do


def by_hand(model, batches, held_out, factor):
    """Train a copy with the rate of the size, and return its losses in eval mode."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * factor**0.5, weight_decay=0.1)
    for start in range(0, len(batches), factor):
        joined = {name: torch.cat([one[name] for one in batches[start : start + factor]]) for name in ("x", "y")}
        optimizer.zero_grad()
        loss, weight = loss_fn(model, joined)
        (loss / weight).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return [float(loss_fn(model, batch)[0]) / len(batch["x"]) for batch in held_out]


def test_each_branch_is_the_training_that_a_loop_by_hand_does():
    model, batches = plain_model(), batches_of(12)
    found = measure_size(make(model=model), batches)
    assert found.before == pytest.approx(by_hand(model, [], batches[8:], 1), rel=1e-6)
    for branch in found.branches:
        assert branch.losses == pytest.approx(by_hand(model, batches[:8], batches[8:], branch.factor), rel=1e-5)
        assert (branch.batch_size, branch.num_updates) == (8 * branch.factor, 8 // branch.factor)
        assert branch.is_joined
    assert (found.examples, found.pairs) == (64, "batch")


def test_a_branch_is_evaluated_after_the_updates_of_every_larger_branch():
    model, batches = plain_model(), batches_of(12)
    found = measure_size(make(model=model), batches)
    for branch, marks in zip(found.branches, ([2, 4, 8], [2, 4], [2]), strict=True):
        assert [round(moment / branch.seconds * branch.num_updates, 6) for moment, _ in branch.curve] == marks
        for mark, (_, losses) in zip(marks, branch.curve, strict=True):
            trained_on = batches[: mark * branch.factor]
            assert losses == pytest.approx(by_hand(model, trained_on, batches[8:], branch.factor), rel=1e-5)
        assert branch.curve[-1] == (branch.seconds, branch.losses)
    (first, after_two), (second, after_four), _ = found.branches[0].curve
    middle = (sum(after_two) + sum(after_four)) / 8
    assert found.branches[0].by((first + second) / 2) == pytest.approx(middle)
    assert found.branches[0].by(first / 2) == pytest.approx(sum(after_two) / 4)


def test_a_curve_over_repeats_pairs_the_means_of_each():
    model, batches = plain_model(), batches_of(14)
    found = measure_size(make(model=model), batches, factors=(1, 2), repeats=3)
    (_, on_the_way), (_, in_the_end) = found.branches[0].curve
    parts = [by_hand(model, batches[at : at + 2], batches[12:], 1) for at in (0, 4, 8)]
    assert on_the_way == pytest.approx([sum(part) / 2 for part in parts], rel=1e-5)
    assert in_the_end == found.branches[0].losses


class Wandering(nn.Module):
    """Draws and counts in eval mode too."""

    def __init__(self):
        super().__init__()
        self.inner, self.num_calls = nn.Linear(4, 1), 0
        self.register_buffer("seen", torch.zeros(1))
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x):
        self.num_calls += 1
        self.seen.add_(1)
        draw = torch.rand(1) + torch.rand(1, generator=self.generator) + random.random()
        return self.inner(x) * (1 + 0.1 * draw + 0.01 * self.seen)


def test_an_evaluation_on_the_way_changes_nothing_of_the_branch():
    def last_losses(factors):
        torch.manual_seed(0)
        stepper = make("sgd", model=Wandering())
        seed_all()
        found = measure_size(stepper, batches_of(8), factors=factors, evaluate=batches_of(4, first=50))
        return found.branches[0].losses

    # With factors 1 and 8 the first branch is evaluated once on the way, with 1, 2, 4 and 8 three times.
    assert last_losses((1, 8)) == last_losses((1, 2, 4, 8))


class Swapping(torch.optim.SGD):
    """Evaluates at another point, as schedule-free optimizers do, and comes back only nearly."""

    def eval(self):
        self._scale(1.1)

    def train(self):
        raise AssertionError("the parameters are put back, not computed back")

    @torch.no_grad()
    def _scale(self, factor):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(factor)


def test_an_optimizer_that_evaluates_at_another_point_trains_on_from_its_own():
    def last_losses(factors):
        model = plain_model()
        stepper = Stepper(model, Swapping(model.parameters(), lr=0.05), loss_fn)
        found = measure_size(stepper, batches_of(8), factors=factors, evaluate=batches_of(4, first=50))
        return found.branches[0].losses

    assert last_losses((1, 8)) == last_losses((1, 2, 4, 8))


def test_held_out_batches_of_ones_own_leave_all_others_for_training():
    model, batches = plain_model(), batches_of(8)
    held_out = batches_of(3, first=50)
    found = measure_size(make(model=model), batches, factors=[1, 4], evaluate=held_out)
    assert found.branches[1].losses == pytest.approx(by_hand(model, batches, held_out, 4), rel=1e-5)
    assert found.examples == 64


def test_repeats_begin_with_the_same_state_on_other_batches_and_pair_their_means():
    model, batches = plain_model(), batches_of(14)
    found = measure_size(make(model=model), batches, factors=(1, 2), repeats=3)
    assert (found.pairs, found.examples) == ("repeat", 4 * 8)
    assert found.before == pytest.approx([sum(by_hand(model, [], batches[12:], 1)) / 2] * 3)
    for branch in found.branches:
        parts = [by_hand(model, batches[at : at + 4], batches[12:], branch.factor) for at in (0, 4, 8)]
        assert branch.losses == pytest.approx([sum(part) / 2 for part in parts], rel=1e-5)
        assert branch.num_updates == 12 // branch.factor


@pytest.mark.parametrize(("optimizer", "rule"), [("adamw", "sqrt"), ("adafactor", "linear"), ("sgd", "linear")])
def test_a_stepper_without_a_rule_says_which_one_its_branches_used(optimizer, rule):
    stepper = make(optimizer, model=plain_model())
    found = measure_size(stepper, batches_of())
    assert found.lr_rule == f"{rule}, base_size 8"
    assert found.notes == (
        f"The stepper has no lr_rule, so branches scaled the rate by {rule}; before the size grows, give it "
        f"lr_rule='{rule}' and base_size=8.",
    )
    assert found.notes[0] in str(found)
    assert stepper.step(batch_of(0, 32)).lr == float(stepper._optimizer.param_groups[0]["lr"])


def test_the_rules_of_the_stepper_count():
    rates = []

    def rule(batch_size, base_size):
        rates.append((batch_size, base_size))
        return 1.0

    stepper = make(model=plain_model(), lr_rule=rule, beta2_rule="half_life", base_size=4)
    found = measure_size(stepper, batches_of(4), factors=(1, 2))
    assert rates == [(8, 4), (8, 4), (16, 4)]
    assert (found.lr_rule, found.beta2_rule, found.notes) == ("rule", "half_life", ())


def test_seconds_are_those_of_the_device_without_the_first_update_of_a_branch():
    clock, slow_first = FakeClock(), [True]

    def takes_time(model, batch):
        if model.training:
            clock.advance(0.5 + len(batch["x"]) / 100 + 7 * (len(slow_first) > 0))
        slow_first.clear()
        return loss_fn(model, batch)

    stepper = make(model=plain_model(), loss=takes_time)
    stepper._gatherer.clock = clock
    found = measure_size(stepper, batches_of(24), factors=(1, 2, 4))
    # Twenty batches of 8 examples: 20 × 0.58, 10 × 0.66, 5 × 0.82.
    assert [branch.seconds for branch in found.branches] == pytest.approx([11.6, 6.6, 4.1])
    # Evaluations do not count: after 5, 10 and 20 updates.
    assert [moment for moment, _ in found.branches[0].curve] == pytest.approx([2.9, 5.8, 11.6])


def test_memory_of_branches_and_copies_is_charged():
    memory = FakeMemory(10_000, used_bytes=100)

    def loss(model, batch):
        memory.run_batch(len(batch["x"]), 10)
        return loss_fn(model, batch)

    model = plain_model()
    stepper = make(model=model, loss=loss, memory=MemoryMonitor(source=memory))
    stepper.step(batch_of(0))
    found = measure_size(stepper, batches_of())
    assert [branch.peak_bytes for branch in found.branches] == [180, 260, 420]
    assert found.peak_bytes == 420
    num = sum(parameter.numel() for parameter in model.parameters())
    counts = 4 * len(list(model.parameters()))
    assert found.copy_bytes == 3 * 4 * num + counts  # values, both averages of AdamW, and its counts of steps
    assert found.total_seconds > 0


def test_a_branch_that_diverges_is_infinitely_bad_and_no_error():
    def rule(batch_size, base_size):
        return 1e30 if batch_size > 16 else 1.0

    stepper = make("sgd", model=plain_model(), lr_rule=rule, base_size=8)
    found = measure_size(stepper, batches_of())
    assert [branch.has_diverged for branch in found.branches] == [False, False, True]
    assert found.branches[2].losses == (math.inf,) * 4
    assert "diverged" in str(found)
    assert found.observation()["experiment"]["losses"]["4"] == [math.inf] * 4


def test_the_observation_is_plain_json_and_names_no_update():
    found = measure_size(make(model=plain_model()), batches_of())
    observed = found.observation()
    assert list(observed) == ["experiment"]
    assert json.loads(json.dumps(observed)) == observed
    assert observed["experiment"]["factors"] == [1, 2, 4]
    assert observed["experiment"]["examples"] == 64
    assert [len(points) for points in observed["experiment"]["curve"].values()] == [3, 2, 1]
    assert json.loads(json.dumps(found.to_dict()))["branches"][1]["factor"] == 2


def test_a_controller_grows_to_the_largest_size_that_was_not_worse_and_writes_down_why():
    controller = bw.BatchSizeController(bw.size.measured(), min_size=8, max_size=1024)

    def rule(batch_size, base_size):
        return {8: 1.0, 16: 2.0, 32: 1e30}[batch_size]

    torch.manual_seed(0)
    model = nn.Linear(4, 1)

    def of_one_truth(batch):
        return {**batch, "y": batch["x"].sum(1, keepdim=True)}

    clock = FakeClock()

    def takes_time(model, batch):
        clock.advance(1.0)
        return loss_fn(model, batch)

    stepper = make("plain sgd", model=model, loss=takes_time, lr_rule=rule, base_size=8)
    stepper._gatherer.clock = clock
    found = measure_size(stepper, list(map(of_one_truth, batches_of(64))))
    controller.observe(**stepper.step(of_one_truth(batch_of(0))).observation())
    assert controller.observe(**found.observation()) == 16
    assert controller.history[-1].new == 16
    assert "2" in controller.history[-1].reason
    assert controller.state_dict()["counts"]["step"] == 1  # an experiment is no update


def test_the_table_has_a_row_per_factor():
    lines = str(measure_size(make(model=plain_model()), batches_of())).splitlines()
    assert lines[0].split() == [
        "factor",
        "batch",
        "size",
        "updates",
        "seconds",
        "loss",
        "at",
        "1",
        "by",
        "then",
        "peak",
    ]
    assert [line.split()[:3] for line in lines[1:4]] == [["1", "8", "8"], ["2", "16", "4"], ["4", "32", "2"]]
    assert lines[1].split()[4] == lines[1].split()[5]  # by its own end
    assert lines[4].startswith("4 pairs by batch, loss ")


# Joining


def test_lists_of_examples_are_joined_before_they_are_collated():
    sizes = []

    def collate(examples):
        sizes.append(len(examples))
        return {name: torch.stack([one[name] for one in examples]) for name in ("x", "y")}

    batches = [[{name: value[row] for name, value in batch.items()} for row in range(8)] for batch in batches_of()]
    found = measure_size(make(model=plain_model(), collate=collate), batches)
    assert all(branch.is_joined for branch in found.branches)
    held_out = [8] * 4
    first = [8] * 2 + held_out + [8] * 2 + held_out + [8] * 4 + held_out
    assert sizes == held_out + first + ([16] * 2 + held_out + [16] * 2 + held_out) + ([32] * 2 + held_out)


def of_widths(batch, width):
    return {"x": torch.nn.functional.pad(batch["x"], (0, 0, 0, 0)), "y": batch["y"].expand(-1, width)}


def test_batches_of_other_widths_run_one_after_the_other_and_the_result_says_so():
    batches = [of_widths(batch, 1 + number % 2) for number, batch in enumerate(batches_of())]

    def loss(model, batch):
        return (model(batch["x"]) - batch["y"]).square().mean(1).sum(), len(batch["x"])

    model = plain_model()
    found = measure_size(make(model=model, loss=loss), batches)
    assert [branch.is_joined for branch in found.branches] == [True, False, False]
    assert [branch.batch_size for branch in found.branches] == [8, 16, 32]
    note = "Batches could not be joined and ran one after the other: a joined batch may take fewer seconds."
    assert found.notes.count(note) == 1
    plain = measure_size(make(model=model), batches_of())  # the same numbers in other shapes
    for one, other in zip(found.branches, plain.branches, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-5)


def test_a_loss_of_whole_batches_is_not_run_in_pieces():
    batches = [of_widths(batch, 1 + number % 2) for number, batch in enumerate(batches_of())]
    with pytest.raises(ArgumentError, match="loss_fn needs the whole batch, and these batches cannot be joined"):
        measure_size(make(model=plain_model(), loss=whole_batch(loss_fn)), batches)


# Failures


class Stop(Exception):
    """Of a user."""


@pytest.mark.filterwarnings("ignore:BatchNorm in training mode")
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Stop("no"), Stop),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (torch.OutOfMemoryError("no"), DoesNotFitError),
    ],
    ids=["user", "interrupt", "memory"],
)
@pytest.mark.parametrize("while_training", [True, False], ids=["training", "evaluating"])
def test_whatever_a_branch_raises_comes_out_after_everything_was_put_back(error, raised, while_training):
    is_on, num_calls = [False], [0]

    def fails(model, batch):
        num_calls[0] += is_on[0]
        # In the second branch, after 4 evaluations and the first branch: 2 updates, 4 evaluations, 2 updates, 4 more.
        if num_calls[0] > 4 + (8 + 3 * 4) + (7 if while_training else 3) and model.training is while_training:
            raise error
        return loss_fn(model, batch)

    seed_all()
    stepper = make(loss=fails)
    stepper.step(batch_of(0))
    before = copy.deepcopy(everything(stepper))
    is_on[0] = True
    with pytest.raises(raised if while_training else type(error)):
        measure_size(stepper, batches_of())
    assert everything(stepper) == before
    num_calls[0], is_on[0] = 0, False
    twin = copy.deepcopy(stepper._ranks.module)
    stepper.step(batch_of(1))
    assert not torch.equal(twin.last.weight, stepper._ranks.module.last.weight)


def test_a_branch_that_runs_out_of_memory_runs_in_pieces_and_teaches_nothing():
    def loss(model, batch):
        if len(batch["x"]) > 16:
            raise torch.OutOfMemoryError("no")
        return loss_fn(model, batch)

    stepper = make(model=plain_model(), loss=loss)
    state = stepper.state_dict()
    found = measure_size(stepper, batches_of())
    plain = measure_size(make(model=plain_model()), batches_of())
    assert found.branches[2].losses == pytest.approx(plain.branches[2].losses, rel=1e-5)
    assert stepper.state_dict() == state


# Refusals


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"factors": (1,)}, r"factors must be two or more different whole numbers that rise, got \(1,\)"),
        ({"factors": (2, 1)}, "factors must be two or more different whole numbers that rise"),
        ({"factors": (1, 2.5)}, "a factor must be a whole number of 1 or more, got 2.5"),
        ({"factors": (1, 0)}, "a factor must be a whole number of 1 or more, got 0"),
        ({"repeats": 0}, "repeats must be a whole number of 1 or more, got 0"),
        ({"repeats": 3}, "need a multiple of 12 batches to train on, and 4 more to hold out; got 12 batches"),
        ({"factors": (1, 5)}, "need a multiple of 5 batches to train on, and 5 more to hold out; got 12 batches"),
        ({"evaluate": []}, "evaluate must hold at least one batch"),
        ({"evaluate": 3}, r"evaluate must be a list of batches, got int; use list\(…\)"),
        ({"restore": [3]}, "restore must hold modules and optimizers only"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ArgumentError, match=match):
        measure_size(make(model=plain_model()), batches_of(), **options)


def test_a_generator_of_batches_is_refused():
    with pytest.raises(ArgumentError, match=r"batches must be a list of batches, got generator; use list\(…\)"):
        measure_size(make(model=plain_model()), (batch for batch in batches_of()))


def test_a_stepper_is_needed():
    with pytest.raises(ArgumentError, match="measure_size needs a Stepper, got Linear"):
        measure_size(nn.Linear(1, 1), batches_of())


def test_an_update_that_was_begun_is_refused_and_stays():
    stepper = make(model=plain_model())
    stepper.accumulate(batch_of(0))
    with pytest.raises(ArgumentError, match=r"an update was begun; call update\(\) or abandon\(\) before"):
        measure_size(stepper, batches_of())
    assert stepper.update().batch_size == 8


def test_hooks_of_the_step_are_refused_unless_what_they_change_is_named():
    stepper = make(model=plain_model())
    average = torch.optim.swa_utils.AveragedModel(stepper._ranks.module)
    stepper._optimizer.register_step_post_hook(lambda *_: average.update_parameters(stepper._ranks.module))
    with pytest.raises(ArgumentError, match="hooks of AdamW's step would see the branches, and what they change"):
        measure_size(stepper, batches_of())
    stepper.step(batch_of(0))
    before = copy.deepcopy(average.state_dict())
    measure_size(stepper, batches_of(), restore=[average])
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())


def test_copies_that_do_not_fit_in_host_memory_are_refused_with_numbers(monkeypatch):
    monkeypatch.setattr(experiment, "free_host_bytes", lambda: 100)
    with pytest.raises(ArgumentError, match="keeps copies of 196 bytes in host memory, of which 100 are free"):
        measure_size(make(model=plain_model()), batches_of())


def test_a_loss_that_returns_a_mean_is_refused_in_the_same_words():
    with pytest.raises(ArgumentError, match="loss_fn returned only a tensor, which looks like a mean"):
        measure_size(make(model=plain_model(), loss=lambda model, batch: model(batch["x"]).mean()), batches_of())


def test_a_held_out_batch_without_weight_is_refused():
    def loss(model, batch):
        total, _ = loss_fn(model, batch)
        return total, (batch["y"] < 100).sum()

    empty = [{"x": torch.ones(8, 4), "y": torch.full((8, 1), 200.0)}]
    with pytest.raises(ArgumentError, match="a held-out batch has weight 0, so it has no mean loss; leave it out"):
        measure_size(make(model=plain_model(), loss=loss), batches_of(8), evaluate=empty)


# Several ranks


def test_ranks_agree_and_train_on_as_if_there_had_been_no_experiment_and_fail_together(tmp_path):
    outputs = run_ranks("tests.step.measuring.ranks", 2, tmp_path / "store", "experiment")
    assert "failed: rank 1: only here" in outputs[0]
    assert "failed: only here" in outputs[1]
    assert "refused: ranks have other numbers of batches" in outputs[0]
    assert "refused: rank 1: factors (1, 2, 4)" in outputs[0]


def test_a_loss_that_changes_its_batch_in_place_gets_copies():
    def growing(model, batch):
        batch["x"].mul_(1.5)
        return loss_fn(model, batch)

    def copying(model, batch):
        return loss_fn(model, {**batch, "x": batch["x"] * 1.5})

    batches = batches_of()
    found = measure_size(make(loss=growing), batches)
    expected = measure_size(make(loss=copying), batches_of())
    assert [one.losses for one in found.branches] == [one.losses for one in expected.branches]
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(batches, batches_of(), strict=True))


def test_a_batch_that_cannot_be_copied_is_refused():
    batches = [{**batch, "lock": threading.Lock()} for batch in batches_of()]
    options = {"split": lambda batch, rows: len(batch["x"]) if rows is None else batch}
    with pytest.raises(ArgumentError, match="a batch is copied for every branch, but its lock cannot be copied"):
        measure_size(make(**options), batches)


def test_copies_of_what_restore_names_count_as_host_memory(monkeypatch):
    monkeypatch.setattr(experiment, "free_host_bytes", lambda: 100_000)
    with pytest.raises(ArgumentError, match="host memory"):
        measure_size(make(), batches_of(), restore=[nn.Linear(1000, 1000)])


def test_an_experiment_inside_of_the_loss_is_refused():
    steppers = []

    def measuring(model, batch):
        measure_size(steppers[0], batches_of())
        return loss_fn(model, batch)

    steppers.append(make(loss=measuring))
    for run in (lambda: steppers[0].step(batch_of(0)), lambda: measure_size(steppers[0], batches_of())):
        with pytest.raises(ArgumentError, match="loss_fn and other threads must not call it"):
            run()


def test_copies_of_gradients_and_of_objects_in_states_count_as_host_memory(monkeypatch):
    stepper = make()
    before = measure_size(stepper, batches_of()).copy_bytes
    stepper._ranks.module.extra = {"array": np.zeros(1000), "parts": [torch.zeros(500)]}
    stepper._ranks.module.first.weight.grad = torch.zeros(8, 4)
    assert measure_size(stepper, batches_of()).copy_bytes == before + 8000 + 2000 + 128
    monkeypatch.setattr(experiment, "free_host_bytes", lambda: before + 8000)
    with pytest.raises(ArgumentError, match="host memory"):
        measure_size(stepper, batches_of())
