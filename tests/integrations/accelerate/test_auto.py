"""prepare(controller="auto"): the size is found, the data is made resizable, and rate, beta2 and schedule follow."""

from itertools import chain

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations.accelerate import prepare
from batchwright.step import StepReport

from ...processes import run_ranks
from .test_preparation import forget

NUM, BASE = 480, 4
DRAW = torch.Generator().manual_seed(0)
DATA = [
    {"x": torch.randn(6, generator=DRAW), "y": torch.randint(5, (), generator=DRAW), "index": i} for i in range(NUM)
]


@pytest.fixture(autouse=True)
def _one_accelerator():
    torch.set_num_threads(1)
    forget()
    yield
    forget()


@pytest.fixture
def launch_bound(monkeypatch):
    """Plant a clock on which an update takes 50 ms, whatever it holds."""
    monkeypatch.setattr(StepReport, "seconds", property(lambda self: 0.05))


def make_model(*, norm=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *([nn.LayerNorm(8)] if norm else []), nn.Tanh(), nn.Linear(8, 5))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["x"])


def make(*, model=None, kind=torch.optim.AdamW, loader=None, schedule=None, **options):
    model = make_model() if model is None else model
    optimizer = kind(model.parameters(), lr=1e-3)
    loader = DataLoader(DATA, batch_size=BASE, shuffle=True) if loader is None else loader
    scheduler = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    accelerator = Accelerator(cpu=True)
    options = {"loss_fn": loss_fn, "controller": "auto", "scheduler": scheduler, **options}
    return accelerator, prepare(accelerator, model, optimizer, loader, **options)


def run(prepared, num_epochs=1, *, stop_at=None):
    """Train and return the examples and the report of every update."""
    updates = []
    for _ in range(prepared.loader.epoch, num_epochs):
        for batch in prepared.loader:
            updates.append((batch["index"].tolist(), prepared.stepper.step(batch)))
            if len(updates) == stop_at:
                return updates
    return updates


@pytest.mark.parametrize("norm", [True, False], ids=["norms", "no norms"])
def test_a_launch_bound_training_grows_and_says_why(norm, launch_bound):
    lines = []
    _, prepared = make(model=make_model(norm=norm), history=lines.append)
    updates = run(prepared, 2)
    sizes = [report.batch_size for _, report in updates]
    assert (sizes[0], max(sizes)) == (BASE, NUM // 20)
    for epoch in range(2):
        seen = list(chain.from_iterable(numbers for numbers, _ in updates))[epoch * NUM : (epoch + 1) * NUM]
        assert sorted(seen) == list(range(NUM))
    assert "timing 8" in lines[0]
    assert "times the examples per second of" in lines[-1]


@pytest.mark.parametrize(
    ("kind", "power", "beta2"), [(torch.optim.AdamW, 0.5, 0.999), (torch.optim.SGD, 1.0, None)], ids=["AdamW", "SGD"]
)
def test_rate_and_beta2_follow_the_size(kind, power, beta2, launch_bound):
    _, prepared = make(kind=kind)
    reports = [report for _, report in run(prepared)]
    assert len({report.batch_size for report in reports}) > 3
    for report in reports:
        factor = report.batch_size / BASE
        assert report.lr == pytest.approx(1e-3 * factor**power)
        assert report.beta2 == (None if beta2 is None else pytest.approx(beta2**factor))


def test_noise_comes_from_norm_layers_where_there_are_some():
    noises = {}
    for norm in (True, False):
        forget()
        _, prepared = make(model=make_model(norm=norm))
        reports = [report for _, report in run(prepared, stop_at=24)]
        noises[norm] = [report.noise is not None for report in reports].count(True)
    assert noises == {True: 6, False: 3}


def test_a_model_with_batch_norm_is_measured_in_parts():
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    _, prepared = make(model=model)
    with pytest.warns(UserWarning, match="BatchNorm"):
        reports = [report for _, report in run(prepared, stop_at=9)]
    assert [report.num_micro_batches for report in reports] == [2, 1, 1, 1, 1, 1, 1, 1, 2]


class TimeFirst(nn.Module):
    """An encoder layer as torch makes it by default: time comes before the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lift = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.layer(self.lift(x.t().unsqueeze(-1))).mean(dim=0))


class GlobalQuery(nn.Module):
    """Norms a query that all examples share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.query = nn.Parameter(torch.ones(1, 8).normal_())

    def forward(self, x):
        return self.head(self.lift(x) * self.norm(self.query))


@pytest.mark.parametrize(
    ("kind", "why"), [(TimeFirst, "does not have a row per example"), (GlobalQuery, r"shape \(1, 8\)")]
)
def test_norms_that_cannot_be_measured_leave_the_noise_to_parts_of_the_batch(kind, why):
    _, prepared = make(model=kind())
    with pytest.warns(UserWarning, match=f"in parts of every 8th batch: .*{why}") as caught:
        reports = [report for _, report in run(prepared, stop_at=18)]
    assert len(caught) == 1
    assert [place for place, report in enumerate(reports) if report.noise is not None] == [0, 8, 16]
    assert {report.noise.source for report in reports if report.noise is not None} == {"all"}


class Dropping(GlobalQuery):
    """Draws random numbers and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(nn.functional.dropout(x))


def test_an_update_that_is_refused_for_its_vectors_runs_again_as_it_was():
    found = []
    for options in ({}, {"measure_noise": 8}):
        forget()
        _, prepared = make(model=Dropping(), **options)
        torch.manual_seed(1)
        if options:
            run(prepared, stop_at=3)
        else:
            with pytest.warns(UserWarning, match="in parts of every 8th batch"):
                run(prepared, stop_at=3)
        found.append(torch.cat([value.detach().flatten() for value in prepared.model.state_dict().values()]))
    assert torch.equal(*found)


def test_frozen_norms_leave_the_noise_to_parts_of_the_batch():
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 5, bias=False))
    model[1].requires_grad_(False)
    with pytest.warns(UserWarning, match="in parts of every 8th batch: .* the model has none"):
        _, prepared = make(model=model)
    assert [report.noise is not None for _, report in run(prepared, stop_at=9)] == [True, *[False] * 7, True]


def test_noise_from_vectors_that_is_asked_for_is_still_refused():
    _, prepared = make(model=GlobalQuery(), noise_from="vectors", measure_noise=True)
    with pytest.raises(ArgumentError, match="noise_from='vectors' cannot be measured in this model"):
        run(prepared, stop_at=1)


def test_a_resumed_training_goes_on_to_measure_parts(tmp_path):
    accelerator, prepared = make(model=GlobalQuery())
    with pytest.warns(UserWarning, match="in parts of every 8th batch"):
        before = run(prepared, stop_at=9)
    accelerator.save_state(str(tmp_path / "state"))
    after = run(prepared, stop_at=9)
    forget()
    accelerator, resumed = make(model=GlobalQuery())
    accelerator.load_state(str(tmp_path / "state"))
    again = run(resumed, stop_at=9)  # a second warning would be an error
    measured = [[report.noise is not None for _, report in updates] for updates in (before, again)]
    assert measured == [[True, *[False] * 7, True], [*[False] * 7, True, False]]
    assert len(after) == len(again)


def test_a_schedule_advances_with_the_examples(launch_bound):
    steps = NUM // BASE
    _, prepared = make(schedule=lambda step: 1 - step / (2 * steps))
    done, scheduler = 0, prepared.stepper.scheduler
    for _ in range(2):
        for batch in prepared.loader:
            done += prepared.stepper.step(batch).batch_size
            assert scheduler.scheduler.last_epoch == done // BASE
    assert (done, scheduler.get_last_lr()) == (2 * NUM, pytest.approx([0.0], abs=1e-12))


@pytest.mark.parametrize("stop_at", [7, 33])
@pytest.mark.parametrize("norm", [True, False], ids=["norms", "no norms"])
def test_a_resumed_training_is_the_one_without_a_break(norm, stop_at, tmp_path, launch_bound):
    options = {"schedule": lambda step: 1 / (1 + step / 100)}
    _, straight = make(model=make_model(norm=norm), **options)
    whole = run(straight, 2)
    forget()
    accelerator, broken = make(model=make_model(norm=norm), **options)
    before = run(broken, 2, stop_at=stop_at)
    accelerator.save_state(str(tmp_path / "state"))
    forget()
    accelerator, resumed = make(model=make_model(norm=norm), **options)
    accelerator.load_state(str(tmp_path / "state"))
    after = run(resumed, 2)
    assert [numbers for numbers, _ in before + after] == [numbers for numbers, _ in whole]
    assert [report.lr for _, report in before + after] == [report.lr for _, report in whole]
    for mine, theirs in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        assert norm or torch.equal(mine, theirs)


def test_the_order_is_that_of_the_loader():
    _, prepared = make(loader=DataLoader(DATA, batch_size=BASE))
    assert list(chain.from_iterable(numbers for numbers, _ in run(prepared))) == list(range(NUM))


def test_options_that_are_given_stay(launch_bound):
    _, prepared = make(lr_rule="none", beta2_rule=None, base_size=8, measure_noise=3)
    reports = [report for _, report in run(prepared, stop_at=40)]
    assert {report.lr for report in reports} == {1e-3}
    assert {report.beta2 for report in reports} <= {None, 0.999}
    assert reports[0].batch_size == 8
    assert [report.noise is not None for report in reports[:6]] == [True, False, False] * 2


def test_the_order_is_that_of_the_generator_of_the_loader_or_its_sampler():
    def order(**options):
        forget()
        _, prepared = make(loader=DataLoader(DATA, batch_size=BASE, **options))
        return list(chain.from_iterable(numbers for numbers, _ in run(prepared, stop_at=9)))

    given = order(shuffle=True, generator=torch.Generator().manual_seed(5))
    assert order(sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(5))) == given
    assert order(shuffle=True) != given


class Backwards(SequentialSampler):
    """Goes through the data from its end."""

    def __iter__(self):
        return reversed(range(len(self.data_source)))


class Twice(DataLoader):
    """Gives every batch out twice."""

    def __iter__(self):
        for batch in super().__iter__():
            yield from (batch, batch)


class Stream(IterableDataset):
    def __iter__(self):
        yield from DATA


REFUSED = {
    "own batches": (
        lambda: DataLoader(DATA, batch_sampler=bw.BatchSampler([1] * NUM, bw.MaxItems(4))),
        "makes the batches itself, from a DataLoader with a batch_size",
    ),
    "a stream": (lambda: DataLoader(Stream(), batch_size=4), "draws examples by their number"),
    "drop_last": (lambda: DataLoader(DATA, batch_size=4, drop_last=True), "the loader has drop_last=True"),
    "weights": (
        lambda: DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * NUM, NUM)),
        "the loader has a WeightedRandomSampler",
    ),
    "an order of its own": (
        lambda: DataLoader(DATA, batch_size=4, sampler=Backwards(DATA)),
        "the loader has a Backwards; leave it out",
    ),
    "the first 40 in order": (
        lambda: DataLoader(DATA, batch_size=4, sampler=SequentialSampler(range(40))),
        "a SequentialSampler that draws 40 examples, of 480",
    ),
    "the first 40 shuffled": (
        lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(range(40))),
        "a RandomSampler that draws 40 examples, of 480",
    ),
    "40 shuffled": (
        lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, num_samples=40)),
        "a RandomSampler that draws 40 examples, of 480",
    ),
    "replacement": (
        lambda: DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA, replacement=True)),
        "a RandomSampler with replacement",
    ),
    "a loader's own loop": (
        lambda: Twice(DATA, batch_size=4),
        "this one has batches of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_data_whose_batches_cannot_follow_is_refused(name):
    make_loader, said = REFUSED[name]
    with pytest.raises(ArgumentError, match=said):
        make(loader=make_loader())


def test_an_optimizer_without_a_rate_is_refused():
    def kind(parameters, lr):
        optimizer = torch.optim.SGD(parameters, lr=lr)
        optimizer.param_groups[0]["lr"] = None
        return optimizer

    with pytest.raises(ArgumentError, match="scales the learning rate with the size, but a group of SGD has none"):
        make(kind=kind)


@pytest.mark.parametrize("model", ["norm", "no norm", "shared norm"])
def test_two_ranks_whose_clocks_disagree_choose_the_same_sizes(model, tmp_path):
    run_ranks("tests.integrations.accelerate.auto_ranks", 2, tmp_path, model)
