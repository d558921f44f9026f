"""What only a GPU can show: dropout inside graphs, long runs, memory, streams, and a host that never waits."""

import copy
import gc
import math

import pytest
import torch
from torch import nn

from batchwright.step import Stepper

from . import models
from .twins import Twins, adamw, distance, sgd

pytestmark = pytest.mark.needs_cuda
SHAPE = (4, 6)


def on_device(batch):
    return models.to(batch, "cuda")


def graphed_stepper(model, loss_fn, shapes, *, make_optimizer=adamw, **options):
    return Stepper(model, make_optimizer(model.parameters()), loss_fn, graphs=True, shapes=shapes, **options)


# Dropout


def make_dropping():
    return models.seeded(lambda: nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 3))).cuda()


def losses_of(stepper, batch, num):
    reports = [stepper.step(batch) for _ in range(num)]
    return torch.tensor([report.loss for report in reports]), [report.graphed for report in reports]


def test_dropout_is_drawn_anew_at_every_replay_and_from_the_same_distribution():
    """The rate is 0, so all losses of a batch differ by their masks alone."""
    batch, samples = on_device(models.tables(SHAPE)), []
    torch.manual_seed(1)
    for options in ({}, {"graphs": True, "shapes": [SHAPE]}):
        model = make_dropping()
        stepper = Stepper(model, sgd(model.parameters(), lr=0.0), models.table_loss, **options)
        losses_of(stepper, batch, 5)
        losses, graphed = losses_of(stepper, batch, 600)
        assert all(graphed) is bool(options)
        samples.append(losses)
    eager, replayed = samples
    assert len(set(replayed.tolist())) > 550
    error = math.sqrt(float(eager.var() + replayed.var()) / 600)
    assert abs(float(eager.mean() - replayed.mean())) < 5 * error
    assert 0.8 < float(replayed.std() / eager.std()) < 1.25


def test_the_seed_decides_the_masks_of_replays():
    batch, runs = on_device(models.tables(SHAPE)), []
    for _ in range(2):
        stepper = graphed_stepper(make_dropping(), models.table_loss, [SHAPE])
        torch.manual_seed(5)
        losses, graphed = losses_of(stepper, batch, 8)
        assert graphed[-1]
        runs.append(losses)
    assert torch.equal(*runs)


def test_five_hundred_steps_give_the_curve_of_eager_training():
    """Runs differ by their dropout masks; graphed runs lie as near to eager ones as these lie to each other."""
    one = models.BY_NAME["llama"]
    batches = [on_device(one.make_batch(one.shapes[place % 2], seed=place)) for place in range(16)]

    def curve(seed, **options):
        model = models.make_llama(dropout=0.2).cuda()
        stepper = Stepper(model, adamw(model.parameters(), lr=0.003), one.loss_fn, clip_norm=1.0, **options)
        torch.manual_seed(seed)
        reports = [stepper.step(batches[number % 16]) for number in range(500)]
        assert reports[-1].graphed is bool(options)
        return torch.tensor([report.loss for report in reports]).reshape(10, 50).mean(dim=1)

    eager = torch.stack([curve(seed) for seed in (1, 2, 3)])
    graphed = torch.stack([curve(seed, graphs=True, shapes=one.shapes) for seed in (4, 5, 6)])
    noise = (eager.max(dim=0).values - eager.min(dim=0).values).max()
    assert (graphed.mean(dim=0) - eager.mean(dim=0)).abs().max() < 1.5 * noise + 0.02
    assert eager[:, -1].mean() < 0.7 * eager[:, 0].mean()


# Memory


def make_deep():
    def make():
        layers = [layer for _ in range(16) for layer in (nn.Linear(512, 512), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(512, 3))

    return models.seeded(make)


def deep_batches():
    return [models.tables((8192 if seed % 3 else 4096, 512), seed=seed) for seed in range(9)]


def free():
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.filterwarnings("ignore:steps run eagerly")
@pytest.mark.parametrize("room", [1.15, 1.5, 2.0, 4.0])
def test_too_little_memory_for_graphs_loses_nothing(room):
    """The cap leaves ``room`` times what an eager step takes: no pool fits beside it, or one, or all."""
    model, twin = make_deep().cuda(), make_deep().cuda()
    eager = Stepper(model, sgd(model.parameters(), lr=0.01), models.table_loss)
    batches = deep_batches()
    eager.step(on_device(batches[0]))
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for batch in batches[1:]:
        eager.step(on_device(batch))
    taken = torch.cuda.max_memory_allocated() - base
    free()
    stepper = graphed_stepper(
        twin, models.table_loss, [(8192, 512), (4096, 512)], make_optimizer=lambda values: sgd(values, lr=0.01)
    )
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + room * taken) / total))
    try:
        reports = [stepper.step(on_device(batch)) for batch in batches]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        free()
    assert [report.batch_size for report in reports] == [len(batch["x"]) for batch in batches]
    assert distance(list(twin.parameters()), list(model.parameters())) < 1e-5
    if room == 4.0:
        assert reports[-1].graphed


def test_where_no_eager_step_fits_beside_the_pool_all_that_is_planned_is_replayed_without_running_out_of_memory():
    free()
    model, twin = make_deep().cuda(), make_deep().cuda()
    eager = Stepper(model, sgd(model.parameters(), lr=0.01), models.table_loss)
    batches = [models.tables((8192 - 8 * (seed % 3), 512), seed=seed) for seed in range(9)]
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for batch in batches:
        eager.step(on_device(batch))
    taken = torch.cuda.max_memory_allocated() - base
    free()
    stepper = graphed_stepper(
        twin,
        models.table_loss,
        [(8192, 512), (8184, 512), (8176, 512)] * 3,
        make_optimizer=lambda values: sgd(values, lr=0.01),
    )
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1.8 * taken) / total)
    try:
        reports = [stepper.step(on_device(batch)) for batch in batches]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        free()
    assert [report.ooms for report in reports] == [0] * 9
    assert [report.graphed for report in reports] == [False, *[True] * 8]
    assert distance(list(twin.parameters()), list(model.parameters())) < 1e-5


def private_bytes():
    """Return the bytes of all pools but the common one, counted from the allocator's own list."""
    return sum(
        segment["total_size"] for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)
    )


def test_the_bytes_of_the_pool_are_reported_and_given_back():
    free()
    before = private_bytes()
    stepper = graphed_stepper(make_deep().cuda(), models.table_loss, [(8192, 512), (4096, 512)])
    for batch in deep_batches():
        report = stepper.step(on_device(batch))
    assert report.graphed
    pool = stepper.graph_summary().pool_bytes
    assert pool == private_bytes() - before
    # 16 activations of 16 MiB stay for the backward pass; two pools would be half as large again.
    assert 200 * 2**20 < pool < 420 * 2**20
    del stepper
    free()
    assert private_bytes() - before <= 72 * 2**20  # cuBLAS keeps a workspace for the stream of the captures


@pytest.mark.filterwarnings("ignore:steps run eagerly")
def test_an_eager_batch_that_needs_the_pools_memory_gets_it():
    """A batch larger than any planned one fits only after the graphs are dropped."""
    free()
    model = make_deep().cuda()
    stepper = graphed_stepper(model, models.table_loss, [(8192, 512)], make_optimizer=lambda values: sgd(values))
    for seed in range(5):
        report = stepper.step(on_device(models.tables((8192, 512), seed=seed)))
    assert report.graphed
    free()
    large = on_device(models.tables((16384, 512)))
    needed = 2 * stepper.graph_summary().pool_bytes
    held = torch.cuda.memory_reserved() - stepper.graph_summary().pool_bytes
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (held + 1.4 * needed) / total))
    try:
        assert stepper.step(large).batch_size == 16384
        assert stepper.step(on_device(models.tables((8192, 512)))).batch_size == 8192
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        free()


# Host and streams


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_a_replayed_step_never_waits_for_the_device(make_optimizer):
    def loss_fn(model, batch):
        return model(batch["x"]).square().sum(), len(batch["x"])

    stepper = graphed_stepper(models.make_mlp().cuda(), loss_fn, [SHAPE], make_optimizer=make_optimizer, clip_norm=1.0)
    batches = [{"x": torch.randn(SHAPE, device="cuda")} for _ in range(6)]
    for batch in batches:
        stepper.step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = stepper.step(batches[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.graphed
    assert report.loss > 0


@pytest.mark.parametrize("is_pinned", [False, True])
def test_batches_on_the_host_are_copied_by_the_replay(is_pinned):
    def loss_fn(model, batch):
        return models.table_loss(model, models.to(batch, "cuda"))

    twins = Twins("cuda", models.make_mlp(), loss_fn, [SHAPE])
    for seed in range(6):
        batch = models.tables(SHAPE, seed=seed)
        batch = {name: value.pin_memory() if is_pinned else value for name, value in batch.items()}
        for side in twins.sides:
            side.report = side.stepper.step(batch)
    twins.check()
    assert twins.graphed.report.graphed


def test_steps_on_another_stream_are_the_same():
    twins = Twins.of("cuda", "llama")
    one, stream = models.BY_NAME["llama"], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(8):
            twins.step(one.make_batch(one.shapes[seed % 2], seed=seed))
    torch.cuda.current_stream().wait_stream(stream)
    twins.check()
    assert twins.graphed.report.graphed


def test_two_graphed_steppers_take_turns():
    """Each has a pool of its own; what one replays leaves the gradients of the other alone."""
    pairs = [Twins.of("cuda", "llama"), Twins.of("cuda", "mlp", make_optimizer=adamw)]
    for seed in range(10):
        for twins, name in zip(pairs, ("llama", "mlp"), strict=True):
            one = models.BY_NAME[name]
            twins.step(one.make_batch(one.shapes[seed % 2], seed=seed))
    for twins in pairs:
        twins.check()
        assert twins.graphed.report.graphed


def test_a_failed_capture_leaves_the_device_usable():
    """A value that is read during a capture makes it void; other steppers can capture afterwards."""
    model = make_dropping()

    def reads(model, batch):
        loss, weight = models.table_loss(model, batch)
        return loss * (1 + 0 * loss.detach().item()), weight

    stepper = graphed_stepper(model, reads, [SHAPE])
    with pytest.warns(UserWarning, match="eager"):
        losses_of(stepper, on_device(models.tables(SHAPE)), 4)
    assert not stepper.graph_summary().hit_rate
    twins = Twins.of("cuda", "mlp")
    for seed in range(6):
        twins.step(models.tables(models.BY_NAME["mlp"].shapes[seed % 2], seed=seed))
    twins.check()
    assert twins.graphed.report.graphed


def test_auto_captures_where_launches_bind_and_stays_exact():
    """Tiny layers on a large device: a replay is several times faster, so "auto" keeps it."""
    one, start = models.BY_NAME["llama"], models.make_llama().cuda()
    sides = [copy.deepcopy(start), copy.deepcopy(start)]
    steppers = [
        Stepper(sides[0], sgd(sides[0].parameters()), one.loss_fn),
        Stepper(sides[1], sgd(sides[1].parameters()), one.loss_fn, graphs="auto", shapes=one.shapes),
    ]
    for seed in range(40):
        batch = on_device(one.make_batch(one.shapes[seed % 2], seed=seed))
        reports = [stepper.step(batch) for stepper in steppers]
    assert distance(list(sides[1].parameters()), list(sides[0].parameters())) < 1e-5
    assert reports[1].graphed
    assert steppers[1].graph_summary().saved_seconds > 0
