"""The noise scale against exact per-example gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from batchwright.errors import ArgumentError
from batchwright.size.noise import NoiseAverage, estimate_noise, noise_ratio
from batchwright.step import Stepper
from batchwright.step.noise import GradientNorms

from ..thorough import crossed

NUM = 400


def make_problem(by_length):
    """Return a model and a population of examples; with ``by_length`` the gradient depends on the length."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + 0.5 * torch.randn(
        NUM, generator=generator, dtype=torch.float64
    )
    length = torch.randint(1, 9, (NUM,), generator=generator).double()
    scale = length / length.mean() if by_length else torch.ones(NUM, dtype=torch.float64)
    torch.manual_seed(0)
    return nn.Linear(3, 1).double(), x, y, scale


def loss_fn(model, batch):
    x, y, scale = batch
    return ((model(x)[:, 0] - y).square() * scale).sum(), len(x)


def exact(model, x, y, scale):
    """Return tr(Σ) and |G|² of the population, from exact per-example gradients."""
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def one(parameters, x, y, scale):
        return (functional_call(model, parameters, (x[None],))[0, 0] - y).square() * scale

    gradients = vmap(grad(one), in_dims=(None, 0, 0, 0))(parameters, x, y, scale)
    flat = torch.cat([value.flatten(1) for value in gradients.values()], dim=1)
    mean = flat.mean(dim=0)
    return float((flat - mean).square().sum(dim=1).mean()), float(mean.square().sum())


@pytest.mark.parametrize(("micro_batch", "by_length"), crossed([2, 5], [False, True]))
def test_the_estimates_average_to_the_exact_noise_for_uneven_splits(by_length, micro_batch):
    model, x, y, scale = make_problem(by_length)
    true_s, true_g2 = exact(model, x, y, scale)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, micro_batch=micro_batch, measure_noise=True
    )
    generator = torch.Generator().manual_seed(1)
    draws = []
    for _ in range(2000):
        chosen = torch.randint(0, NUM, (12,), generator=generator)  # with replacement: independent examples
        noise = stepper.step((x[chosen], y[chosen], scale[chosen])).noise
        draws.append((noise.s, noise.g2))
    found = torch.tensor(draws, dtype=torch.float64)
    error = found.std(dim=0) / len(found) ** 0.5
    assert abs(float(found[:, 0].mean()) - true_s) < 2 * float(error[0])
    assert abs(float(found[:, 1].mean()) - true_g2) < 2 * float(error[1])


def test_the_textbook_ratio_follows_its_formula():
    # S = 100, |G|² = 1, B = 128, k = 4: E|g_m|² = 1 + 100/128; (k-1)·(S/B)/E|g_m|² = 3·100/228
    assert noise_ratio(100.0, 1.0, num_examples=128, num_parts=4) == pytest.approx(300 / 228)


def test_the_estimate_by_hand():
    # Two parts of 1 and 3 examples in one dimension, mean gradients 5 and 1: B = 4, the mean is (5 + 3) / 4 = 2,
    # Q = 1·25 + 3·1 = 28, GB = 4, S = (28 − 16) / 1 = 12, G2 = 4 − 12/4 = 1.
    assert estimate_noise(28.0, 4.0, num_examples=4, num_parts=2) == (12.0, 1.0)


def test_one_example_has_no_noise():
    model, x, y, scale = make_problem(False)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, measure_noise=True)
    assert stepper.step((x[:1], y[:1], scale[:1])).noise is None
    assert stepper.step((x[:2], y[:2], scale[:2])).noise is not None


def test_measuring_noise_leaves_the_update_as_it_was():
    model, x, y, scale = make_problem(True)
    twin = copy.deepcopy(model)
    for net, measure in ((model, True), (twin, False)):
        Stepper(net, torch.optim.SGD(net.parameters(), lr=0.1), loss_fn, micro_batch=7, measure_noise=measure).step(
            (x, y, scale)
        )
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


def test_the_average_divides_last_and_knows_when_it_is_reliable():
    average = NoiseAverage(horizon=1000)
    for step in range(200):
        average = average.update(10.0, 1.0 if step % 2 else 3.0, num_examples=10)
    assert average.scale == pytest.approx(5.0, rel=0.02)  # 10 / mean(1, 3), not the mean of 10 and 10/3
    assert average.is_reliable
    assert not NoiseAverage().update(10.0, 2.0, num_examples=10).is_reliable
    assert NoiseAverage(**average.to_state()) == average


def test_an_average_around_zero_is_not_reliable():
    average = NoiseAverage(horizon=1000)
    for step in range(200):
        average = average.update(10.0, 5.0 if step % 2 else -4.9, num_examples=10)
    assert not average.is_reliable


def test_groups_of_parameters_add_up_to_the_whole():
    model, x, y, scale = make_problem(by_length=False)
    whole = noise_of_one_step(model, (x[:12], y[:12], scale[:12]))
    noise = noise_of_one_step(model, (x[:12], y[:12], scale[:12]), noise_groups=lambda name: name)
    assert set(noise.groups) == {"weight", "bias"}
    assert sum(s for s, _ in noise.groups.values()) == pytest.approx(whole.s, rel=1e-12)
    assert sum(g2 for _, g2 in noise.groups.values()) == pytest.approx(whole.g2, rel=1e-12)
    assert whole.groups == {}


def test_a_group_is_what_its_own_parameters_alone_would_give():
    model, x, y, scale = make_problem(by_length=False)
    batch = (x[:12], y[:12], scale[:12])
    noise = noise_of_one_step(model, batch, noise_groups=lambda name: name)
    model.bias.requires_grad_(False)
    alone = noise_of_one_step(model, batch)
    assert noise.groups["weight"] == pytest.approx((alone.s, alone.g2), rel=1e-12)


def noise_of_one_step(model, batch, **options):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Stepper(model, optimizer, loss_fn, micro_batch=4, measure_noise=True, **options).step(batch).noise


def test_noise_may_be_measured_in_every_third_update_alone():
    model, x, y, scale = make_problem(by_length=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    stepper = Stepper(model, optimizer, loss_fn, micro_batch=12, measure_noise=3)
    reports = [stepper.step((x[:12], y[:12], scale[:12])) for _ in range(4)]
    assert [report.noise is not None for report in reports] == [True, False, False, True]
    # Only a measured update needs parts; the others run whole.
    assert [report.num_micro_batches for report in reports] == [2, 1, 1, 2]


@pytest.mark.parametrize("value", [-1, 0.5, "often"])
def test_a_nonsense_interval_of_noise_is_refused(value):
    model, *_ = make_problem(by_length=False)
    with pytest.raises(ArgumentError, match="measure_noise, if not True or False, must be a whole number"):
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, measure_noise=value)


def test_reports_read_late_and_out_of_order_are_those_of_their_updates():
    model, x, y, scale = make_problem(by_length=False)
    steppers = [
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, micro_batch=4, measure_noise=True)
        for _ in range(2)
    ]
    batches = [(x[place : place + 12], y[place : place + 12], scale[place : place + 12]) for place in (0, 12, 24)]
    at_once = [steppers[0].step(batch).noise for batch in batches]
    late = [steppers[1].step(batch) for batch in batches]
    assert [report.noise for report in reversed(late)] == at_once[::-1]
    assert steppers[0].state_dict() == steppers[1].state_dict()


def test_more_groups_than_gradients_may_wait_are_kept_apart():
    # 300 scalars, each a group of its own: more than twice what waits before norms are taken.
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(300)]
    for value, parameter in enumerate(parameters):
        parameter.grad = torch.tensor([float(value)])
    norms = GradientNorms(parameters, range(300))
    assert norms.of_gradients().tolist() == [value**2 for value in range(300)]


def textbook(model, batch, num_parts):
    """Return 1/k · sum |g_i − g_m|² / |g_m|² of k equal parts, from flat vectors, as it is written in textbooks."""
    flat = []
    for part in zip(*(field.chunk(num_parts) for field in batch), strict=True):
        model.zero_grad()
        loss, num = loss_fn(model, part)
        (loss / num).backward()
        flat.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    model.zero_grad()
    mean = sum(flat) / num_parts
    variance = sum((gradient - mean).square() for gradient in flat) / num_parts
    return float(variance.sum() / mean.square().sum())


def in_order(monkeypatch):
    """Let the parts be cut in the order of the batch, so that a test knows them."""
    monkeypatch.setattr("batchwright.step._runner.np.random.default_rng", lambda seed: InOrder())


class InOrder:
    def permutation(self, num):
        return torch.arange(num).numpy()


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_noise_of_exactly_k_parts_is_the_formula_of_the_textbook(num_parts, monkeypatch):
    model, *batch = make_problem(by_length=False)
    batch = [field[:48] for field in batch]
    expected = textbook(model, batch, num_parts)
    in_order(monkeypatch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    noise = Stepper(model, optimizer, loss_fn, measure_noise=True, noise_parts=num_parts).step(tuple(batch)).noise
    assert noise.num_parts == num_parts
    assert noise_ratio(noise.s, noise.g2, num_examples=48, num_parts=num_parts) == pytest.approx(expected, rel=1e-9)


def test_the_formula_of_the_textbook_by_hand(monkeypatch):
    # One weight 0 and the loss (w·x − y)²: the gradient is −2·x·y. Parts (1, 3), (5, 7), with x = 1: means −4 and −12,
    # g_m = −8, var = (16 + 16) / 2 = 16, gns = 16 / 64 = 0.25.
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    batch = (torch.ones(4, 1).double(), torch.tensor([1.0, 3.0, 5.0, 7.0]).double(), torch.ones(4).double())
    assert textbook(model, batch, 2) == 0.25
    in_order(monkeypatch)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, measure_noise=True, noise_parts=2)
    noise = stepper.step(batch).noise
    assert noise_ratio(noise.s, noise.g2, num_examples=4, num_parts=2) == pytest.approx(0.25)


@pytest.mark.parametrize(("num", "found"), [(2, 2), (3, 3), (4, 4), (5, 4), (9, 4), (10, 4), (64, 4)])
def test_there_are_exactly_as_many_parts_as_asked_for_unless_examples_are_fewer(num, found):
    model, *batch = make_problem(by_length=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, loss_fn, measure_noise=True, noise_parts=4)
    assert stepper.step(tuple(field[:num] for field in batch)).noise.num_parts == found


def test_parts_that_do_not_fit_are_cut_and_the_report_says_so():
    model, *batch = make_problem(by_length=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, loss_fn, micro_batch=8, measure_noise=True, noise_parts=4)
    assert stepper.step(tuple(field[:32] for field in batch)).noise.num_parts == 4
    assert stepper.step(tuple(field[:64] for field in batch)).noise.num_parts == 8


def test_updates_that_are_not_measured_run_whole():
    model, *batch = make_problem(by_length=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, loss_fn, measure_noise=2, noise_parts=4)
    assert [stepper.step(tuple(batch)).num_micro_batches for _ in range(4)] == [4, 1, 4, 1]


def test_the_update_is_the_same_however_noise_is_measured():
    weights = []
    for options in ({}, {"measure_noise": True, "noise_parts": 5}):
        model, *batch = make_problem(by_length=True)
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options).step(tuple(batch))
        weights.append(model.weight.detach().clone())
    assert torch.allclose(*weights, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_parts": 4}, "noise_parts needs measure_noise=True"),
        ({"noise_parts": 1, "measure_noise": True}, "noise_parts must be a whole number of 2 or more, got 1"),
        ({"noise_parts": 2.0, "measure_noise": True}, "noise_parts must be a whole number of 2 or more, got 2.0"),
    ],
)
def test_parts_of_nonsense_are_refused(options, message):
    model = nn.Linear(3, 1)
    with pytest.raises(ArgumentError, match=message):
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)


def ratios(num_examples, num_parts, seed=0):
    """Return the ratio of an update, and the formulas of noise_ratio and of textbooks from the same parts."""
    torch.manual_seed(seed)
    model, parts = nn.Linear(3, 2, dtype=torch.float64), []
    batch = torch.randn(num_examples, 3, dtype=torch.float64), torch.randn(num_examples, 2, dtype=torch.float64)

    def loss_of(part):
        return (model(part[0]) - part[1]).square().sum()

    def loss_fn(_, part):
        parts.append(part)
        return loss_of(part), len(part[0])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    noise = Stepper(model, optimizer, loss_fn, measure_noise=True, noise_parts=num_parts).step(batch).noise
    rows = [torch.autograd.grad(loss_of(part) / len(part[0]), list(model.parameters())) for part in parts]
    gradients = torch.stack([torch.cat([value.flatten() for value in row]) for row in rows])
    by_examples = torch.tensor([len(part[0]) / num_examples for part in parts], dtype=torch.float64)
    alike = torch.full_like(by_examples, 1 / len(parts))
    found = noise_ratio(noise.s, noise.g2, num_examples=num_examples, num_parts=noise.num_parts)
    return found, ratio_of(gradients, by_examples), ratio_of(gradients, alike)


def ratio_of(gradients, shares):
    mean = shares @ gradients
    return float(shares @ (gradients - mean).square().sum(dim=1) / mean.square().sum())


@pytest.mark.parametrize(("num_examples", "num_parts"), [(8, 4), (9, 3), (7, 2), (10, 4), (11, 3)])
def test_unequal_parts_count_by_their_examples_and_equal_ones_as_in_textbooks(num_examples, num_parts):
    found, by_examples, textbook = ratios(num_examples, num_parts)
    assert found == pytest.approx(by_examples, rel=1e-9)
    assert (found == pytest.approx(textbook, rel=1e-9)) == (num_examples % num_parts == 0)


def test_the_ratio_of_a_single_update_may_exceed_the_number_of_parts_less_one():
    found, _, textbook = max(ratios(8, 4, seed) for seed in range(20))
    assert found == pytest.approx(textbook)
    assert found > 7


class Tied(nn.Module):
    """The same layer twice, each time in a checkpoint of its own."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.inner, self.outer, self.use_reentrant = nn.Linear(3, 3), nn.Linear(3, 1), use_reentrant

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(checkpoint(self.inner, x, use_reentrant=self.use_reentrant))
        return self.outer(x)


def tied_loss(model, batch):
    return model(batch.clone().requires_grad_()).square().sum(), len(batch)


def test_a_gradient_that_comes_in_parts_is_refused_and_in_one_piece_it_is_measured():
    """A reentrant checkpoint adds to the gradient of a shared layer once per call; squares of parts do not add up."""
    batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    stepper = make_tied(use_reentrant=True)
    with pytest.raises(ArgumentError, match=r"shape \(3, 3\) came in several; .* use_reentrant=False"):
        stepper.step(batch)
    noise = make_tied(use_reentrant=False).step(batch).noise
    assert noise.s > 0


def make_tied(**options):
    torch.manual_seed(0)
    model = Tied(**options)
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), tied_loss, measure_noise=True, noise_parts=4)


def test_gradients_that_a_loss_takes_for_itself_are_refused_where_they_would_count_as_noise():
    def penalized(model, batch):
        loss = model(batch).square().sum()
        (slope,) = torch.autograd.grad(loss, [model.weight], create_graph=True)
        return loss + slope.square().sum(), len(batch)

    model = nn.Linear(3, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), penalized, measure_noise=True)
    with pytest.raises(ArgumentError, match="noise needs the gradient of a micro-batch in one piece"):
        stepper.step(torch.ones(4, 3))
