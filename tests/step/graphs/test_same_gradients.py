"""Every architecture: a graphed step has the gradient of the eager one, padded or filled up, whole or in pieces."""

import pytest
import torch

from ...thorough import crossed
from . import models
from .twins import BACKENDS, BLIND, SAME, Twins

torch.set_num_threads(1)
NAMES = tuple(models.BY_NAME)

# With float64 parameters on CUDA the fused step takes no rate of as many digits, so it runs eagerly and says so.
pytestmark = pytest.mark.filterwarnings("ignore:forward and backward are replayed, .*float32, and float64")


def batches_of(name, num, seed=0):
    """Return batches of the planned shapes, in turn."""
    one = models.BY_NAME[name]
    return [one.make_batch(one.shapes[place % len(one.shapes)], seed=seed + place) for place in range(num)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_eager_steps(name, backend):
    twins = Twins.of(backend, name)
    graphed = []
    for batch in batches_of(name, 5):
        assert twins.gather(batch) <= SAME
        graphed.append(twins.update().graphed)
    twins.check()
    assert graphed[-2:] == [True, True]


@pytest.mark.parametrize("backend", BLIND)
@pytest.mark.parametrize("name", NAMES)
def test_whole_updates_are_those_of_eager_steps(name, backend):
    twins = Twins.of(backend, name, clip_norm=1.0)
    for batch in batches_of(name, 5, seed=50):
        twins.step(batch)
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BLIND)
@pytest.mark.parametrize(("name", "dtype"), crossed(NAMES, [torch.float32, torch.float64]), ids=str)
def test_filler_rows_change_no_gradient(name, backend, dtype):
    """The eager side never sees filler: its batches are short."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    twins = Twins.of(backend, name, dtype=dtype)
    graphed = []
    for place, batch in enumerate(batches_of(name, 6)):
        rows = len(batch["labels"])
        num_real = rows if place < 2 else rows - 1 - place % 3
        short = models.rows_of(models.filled(batch, rows), num_real)
        assert twins.gather(models.filled(batch, num_real), eager_batches=[short]) <= tolerance
        graphed.append(twins.update().graphed)
        assert twins.graphed.report.weight == twins.eager.report.weight
        assert twins.graphed.report.loss == pytest.approx(twins.eager.report.loss, rel=10 * tolerance)
    assert graphed[-2:] == [True, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_filler_rows_are_no_examples(backend):
    """Rules of the learning rate and policies go by the batch size."""
    twins = Twins.of(backend, "mlp", shapes=[(8, 6)], lr_rule="linear", base_size=8)
    for num_real in (8, 8, 8, 5, 8, 2):
        batch = models.tables((8, 6), seed=num_real)
        report = twins.step(models.filled(batch, num_real), eager_batch=models.rows_of(batch, num_real))
        assert (report.batch_size, report.weight) == (num_real, num_real)
        assert report.lr == pytest.approx(0.1 * num_real / 8)
    twins.check(1e-5)
    assert report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["m2m100", "llama", "wav2vec2"])
def test_several_micro_batches_add_up_to_one_gradient(name, backend):
    """Pieces have other numbers of tokens, so a mean of their means would be another gradient."""
    one = models.BY_NAME[name]
    rows, *lengths = one.shapes[0]
    twins = Twins.of(backend, name, micro_batch=rows, shapes=[one.shapes[0]])
    for seed in range(4):
        assert twins.gather(one.make_batch((3 * rows, *lengths), seed=seed)) <= SAME
        twins.update()
    twins.check()
    assert twins.graphed.report.num_micro_batches == 3
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_micro_batch_alone_gives_the_gradient_of_all_as_one(backend):
    """The reference is one backward pass over all rows, written here."""
    one = models.BY_NAME["llama"]
    twins = Twins.of(backend, "llama", micro_batch=4, shapes=[(4, 13)], dtype=torch.float64)
    for seed in range(3):
        batch = one.make_batch((12, 13), seed=seed)
        by_hand = twins.eager.model
        loss, weight = models.wide(one.loss_fn)(by_hand, twins.here(batch))
        expected = torch.autograd.grad(loss / weight, list(by_hand.parameters()))
        twins.gather(batch)
        found = twins.graphed.gradients
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
        assert error < 1e-9
        assert twins.update().loss == pytest.approx(float(loss.detach() / weight), rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_several_shapes_form_one_update(backend):
    twins = Twins.of(backend, "m2m100")
    for number in range(3):
        assert twins.gather(*batches_of("m2m100", 4, seed=10 * number)) <= SAME
        report = twins.update()
    twins.check()
    assert (report.num_micro_batches, report.graphed) == (4, True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_with_one_unplanned_batch_is_exact_and_not_graphed(backend):
    one = models.BY_NAME["bert"]
    twins = Twins.of(backend, "bert")
    graphed = []
    for batch in [*batches_of("bert", 4), one.make_batch(one.unplanned, seed=1), *batches_of("bert", 2, seed=70)]:
        assert twins.gather(batch) <= SAME
        graphed.append(twins.update().graphed)
    assert graphed[-4:] == [True, False, True, True]
    first, second = batches_of("bert", 2)
    assert twins.gather(first, one.make_batch(one.unplanned, seed=2), second) <= SAME
    assert not twins.update().graphed
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_of_examples_is_collated_into_planned_shapes(backend):
    def collate(examples):
        return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}

    one = models.BY_NAME["bert"]
    twins = Twins.of(
        backend, "bert", shapes=[(4, 13)], micro_batch=4, collate=collate, lengths=lambda item: len(item["input_ids"])
    )
    for seed in range(4):
        batch = twins.here(one.make_batch((8, 13), seed=seed))
        examples = [{name: value[row] for name, value in batch.items()} for row in range(8)]
        for side in twins.sides:
            side.report = side.stepper.step(examples)
    twins.check()
    assert (twins.graphed.report.num_micro_batches, twins.graphed.report.graphed) == (2, True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_metrics_of_the_loss_are_those_of_eager_steps(backend):
    def loss_fn(model, batch):
        loss, weight = models.text_loss(model, batch)
        return loss, weight, {"squared": loss.detach().square(), "pieces": 1}

    twins = Twins(backend, models.make_llama(), loss_fn, [(4, 13)], micro_batch=4)
    for seed in range(4):
        twins.step(models.texts((8, 13), seed=seed))
        assert twins.graphed.report.metrics == pytest.approx(twins.eager.report.metrics, rel=1e-5)
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_reports_can_be_read_after_later_updates(backend):
    """Replays share their memory, so a loss that was not read yet must not become that of a later batch."""
    one = models.BY_NAME["llama"]
    twins = Twins.of(backend, "llama", clip_norm=0.5)
    reports = []
    for seed in range(6):
        twins.step(one.make_batch(one.shapes[seed % 2], seed=seed))
        reports.append([side.report for side in twins.sides])
    for eager, graphed in reports:
        assert graphed.loss == pytest.approx(eager.loss, rel=1e-5)
        assert graphed.grad_norm == pytest.approx(eager.grad_norm, rel=1e-5)
        assert graphed.weight == eager.weight
    assert len({eager.loss for eager, _ in reports}) == 6
