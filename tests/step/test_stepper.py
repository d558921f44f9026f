import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import Stepper


class Tied(nn.Module):
    """A language model in miniature: tied embedding and output, nested inputs, token weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, ids):
        return self.body(self.embed(ids)) @ self.embed.weight.T


def token_loss(model, batch):
    logits = model(batch["inputs"]["ids"])
    labels = batch["labels"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    return loss, (labels != -100).sum()


def token_batch(num=60, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 11, (num, 7), generator=generator)
    labels = torch.randint(0, 11, (num, 7), generator=generator)
    labels[torch.rand(num, 7, generator=generator) < 0.4] = -100
    return {"inputs": {"ids": ids}, "labels": labels}


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    return Tied().to(dtype)


def whole_gradient(model, batch):
    """Return the gradient of the mean over tokens of the unsplit batch."""
    model = copy.deepcopy(model)
    loss, weight = token_loss(model, batch)
    (loss / weight).backward()
    return [parameter.grad for parameter in model.parameters()]


def relative_error(found, expected):
    return max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(found, expected, strict=True))


def accumulated(model, batch, **options):
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss, **options)
    stepper.accumulate(batch)
    stepper.reduce()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("micro_batch", ["auto", 1, 17, 25, 59])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_any_split_gives_the_gradient_of_the_unsplit_batch(micro_batch, dtype, tolerance):
    model, batch = make_model(dtype), token_batch()
    expected = whole_gradient(model, batch)
    assert relative_error(accumulated(model, batch, micro_batch=micro_batch), expected) < tolerance


def test_micro_batches_of_17_3_25_and_15_give_the_same_gradient():
    model, batch = make_model(), token_batch()
    expected = whole_gradient(model, batch)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss)
    places = [0, 17, 20, 45, 60]
    for start, stop in pairwise(places):
        stepper.accumulate(
            {"inputs": {"ids": batch["inputs"]["ids"][start:stop]}, "labels": batch["labels"][start:stop]}
        )
    stepper.reduce()
    assert relative_error([parameter.grad for parameter in model.parameters()], expected) < 1e-12


@pytest.mark.parametrize("weight", [24, 24.0, torch.tensor(24), torch.tensor(24.0)])
def test_a_batch_in_one_piece_gives_the_bits_of_the_mean_loss(weight):
    model, x = nn.Linear(5, 3), torch.randn(7, 5)
    (model(x).square().sum() / 24).backward()
    expected = model.weight.grad
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: (m(b).square().sum(), weight))
    model.zero_grad()
    stepper.accumulate(x)
    stepper.reduce()
    assert torch.equal(model.weight.grad, expected)


def test_gradients_that_were_there_are_added_as_backward_would():
    model, batch = make_model(), token_batch()
    expected = whole_gradient(model, batch)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    found = accumulated(model, batch, micro_batch=8, existing_gradients="add")
    assert relative_error(found, [gradient + 1 for gradient in expected]) < 1e-12


def test_clipping_works_on_the_whole_gradient():
    model, batch = make_model(), token_batch()
    norm = torch.cat([gradient.flatten() for gradient in whole_gradient(model, batch)]).norm()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0), token_loss, micro_batch=7, clip_norm=0.01)
    report = stepper.step(batch)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, model.parameters(), strict=True)]).norm()
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-9)
    assert float(moved.detach()) == pytest.approx(0.01, rel=1e-4)


def test_the_report_gives_the_mean_loss_over_tokens_and_gradients_are_gone():
    model, batch = make_model(), token_batch()
    loss, weight = token_loss(model, batch)
    report = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss, micro_batch=9).step(batch)
    assert report.loss == pytest.approx(float(loss.detach() / weight), rel=1e-12)
    assert (report.weight, report.batch_size, report.num_micro_batches) == (float(weight), 60, 7)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_metric_that_every_forward_pass_changes_is_read_when_it_is_returned():
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.zeros(()))

    def loss_fn(model, x):
        model.seen += len(x)
        return model(x).sum(), len(x), {"seen": model.seen}

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro_batch=2)
    assert stepper.step(torch.ones(8, 2)).metrics["seen"] == (2 + 4 + 6 + 8) / 8


def test_a_printed_report_shows_the_loss():
    model, batch = make_model(), token_batch()
    report = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss, micro_batch=30).step(batch)
    assert repr(report).startswith(
        f"StepReport(batch_size=60, num_micro_batches=2, ooms=0, loss={report.loss:.4g}, lr=0.1"
    )


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


def square_loss(model, pair):
    return (model(pair.x) - pair.y).square().sum(), len(pair.x)


def test_data_classes_of_tensors_are_split():
    model = nn.Linear(3, 1)
    sizes = []

    def loss_fn(model, pair):
        sizes.append(len(pair.x))
        return square_loss(model, pair)

    Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, micro_batch=4).step(
        Pair(torch.randn(10, 3), torch.randn(10, 1))
    )
    assert sizes == [4, 3, 3]


def list_collate(examples):
    width = max(len(ids) for ids in examples)
    return torch.tensor([ids + [0] * (width - len(ids)) for ids in examples])


def test_a_list_of_examples_is_sorted_into_micro_batches_that_keep_the_budget():
    seen = []

    def loss_fn(model, ids):
        seen.append(tuple(ids.shape))
        return model(ids.float().sum(dim=1, keepdim=True)).sum(), len(ids)

    model = nn.Linear(1, 1)
    examples = [[1] * length for length in (3, 9, 1, 8, 2, 10)]
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn,
        micro_batch=bw.MaxTokens(20), lengths=len, collate=list_collate,
    )  # fmt: skip
    assert stepper.step(examples).batch_size == 6
    assert seen == [(2, 10), (2, 8), (2, 2)]  # 10+9, 8+3 (24 tokens with one more would not fit), 2+1


def test_bf16_autocast_and_schedulers_work_together():
    model, batch = make_model(torch.float32), token_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    stepper = Stepper(model, optimizer, token_loss, autocast=torch.bfloat16, lr_rule="linear", base_size=30)
    rates = []
    for _ in range(3):
        rates.append(stepper.step(batch).lr)
        scheduler.step()
    assert rates == [2.0, 1.0, 0.5]  # twice the scheduler's own 1, 1/2, 1/4: 60 examples for a base of 30
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_a_compiled_model_gives_the_same_gradient():
    model, batch = make_model(torch.float32), token_batch(num=12)
    expected = whole_gradient(model, batch)
    compiled = torch.compile(model, backend="eager")
    stepper = Stepper(compiled, torch.optim.SGD(model.parameters(), lr=0.1), token_loss, micro_batch=5)
    stepper.accumulate(batch)
    stepper.reduce()
    assert relative_error([parameter.grad for parameter in model.parameters()], expected) < 1e-5


def test_a_trainer_that_knows_the_total_weight_gets_the_exact_gradient_without_reduce():
    model, batch = make_model(), token_batch()
    expected = whole_gradient(model, batch)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), token_loss, micro_batch=11)
    stepper.accumulate(batch, total_weight=float((batch["labels"] != -100).sum()))
    assert relative_error([parameter.grad for parameter in model.parameters()], expected) < 1e-12


def test_warm_up_allocates_the_optimizer_state_and_changes_nothing():
    model, batch = make_model(), token_batch()
    twin = copy.deepcopy(model)
    results = []
    for net, warm in ((model, True), (twin, False)):
        stepper = Stepper(net, torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1), token_loss)
        if warm:
            stepper.warm_up()
        stepper.step(batch)
        stepper.step(batch)
        results.append([parameter.detach() for parameter in net.parameters()])
    assert relative_error(*results) == 0


def test_the_state_is_json_and_carries_the_learned_limit():
    import json

    model, batch = nn.Linear(3, 1).double(), Pair(torch.randn(64, 3).double(), torch.randn(64, 1).double())

    def loss_fn(net, pair):
        if len(pair.x) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return square_loss(net, pair)

    make = partial(Stepper, model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn)
    first = make()
    assert first.step(batch).ooms == 2  # 64, 32, then 16 fits
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.step(batch).ooms == 0


def test_the_limit_grows_back_slowly_but_not_to_where_it_failed():
    model, batch = nn.Linear(3, 1).double(), Pair(torch.randn(64, 3).double(), torch.randn(64, 1).double())

    def loss_fn(net, pair):
        if len(pair.x) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return square_loss(net, pair)

    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn)
    reports = [stepper.step(batch) for _ in range(200)]
    assert reports[0].ooms == 2
    assert sum(report.ooms for report in reports[1:]) <= 2
    assert reports[0].num_micro_batches == 4


BAD = {
    "a mean alone": (lambda model, pair: square_loss(model, pair)[0], "looks like a mean"),
    "a mean with a weight": (lambda model, pair: (F.mse_loss(model(pair.x), pair.y), len(pair.x)), "is a mean"),
    "a mean of losses": (lambda model, pair: (model(pair.x).square().mean().double(), 4), "is a mean"),
    "a NaN weight": (lambda model, pair: (square_loss(model, pair)[0], float("nan")), "weight of the batch is nan"),
    "a weight of zero": (lambda model, pair: (square_loss(model, pair)[0], 0), "no mean loss"),
    "a vector": (lambda model, pair: (model(pair.x), 1), "one element"),
    "a detached loss": (lambda model, pair: (square_loss(model, pair)[0].detach(), 1), "trainable parameter"),
}


@pytest.mark.parametrize(("loss_fn", "message"), BAD.values(), ids=BAD)
def test_a_loss_function_that_returns_nonsense_is_refused_and_nothing_changes(loss_fn, message):
    model = nn.Linear(3, 1)
    before = copy.deepcopy(model.state_dict())
    model.weight.grad = torch.ones_like(model.weight)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, existing_gradients="add")
    with pytest.raises(ArgumentError, match=message):
        stepper.step(Pair(torch.randn(4, 3), torch.randn(4, 1)))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model.weight.grad, torch.ones_like(model.weight))
    assert model.bias.grad is None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(3, 2), "y": torch.zeros(4)}, r"share their first dimension, got \[3, 4\]"),
        ({"x": torch.zeros(0, 2)}, "empty"),
        ({"x": torch.zeros(())}, "no dimension to split"),
        ({"x": 3}, "no tensor"),
        ([], "no tensor"),
    ],
)
def test_a_batch_that_cannot_be_split_is_refused(batch, message):
    model = nn.Linear(2, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), square_loss)
    with pytest.raises(ArgumentError, match=message):
        stepper.step(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 0}, "micro_batch must be"),
        ({"micro_batch": bw.MaxTokens(8)}, "needs lengths="),
        ({"on_oom": "ignore"}, "on_oom must be"),
        ({"clip_norm": 0}, "clip_norm must be a number above 0"),
        ({"lr_rule": "linear"}, "needs base_size"),
        ({"lr_rule": "cubic", "base_size": 8}, "lr_rule must be"),
        ({"lr_rule": "adascale", "base_size": 8}, "needs measure_noise"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "weight_of"),
    ],
)
def test_nonsense_settings_are_refused_at_construction(options, message):
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match=message):
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), square_loss, **options)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="sum"), F.cross_entropy, nn.MSELoss()])
def test_a_loss_of_torch_itself_is_refused_with_how_to_wrap_it(loss):
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match=r"with \(output, target\); wrap a loss that sums: supervised_loss"):
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


def test_what_is_no_model_is_refused_such_as_an_optimizer_in_its_place():
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match=r"model must be a torch.nn.Module, got <class 'torch.optim.sgd.SGD'>"):
        Stepper(torch.optim.SGD(model.parameters(), lr=0.1), model, square_loss)


def test_a_model_without_trainable_parameters_is_refused():
    model = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(ArgumentError, match="no trainable parameter"):
        Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), square_loss)


def test_batch_norm_in_training_mode_is_warned_of_once_when_the_batch_is_split():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), square_loss, micro_batch=5)
    with pytest.warns(UserWarning, match=r"BatchNorm in training mode \(1\)"):
        stepper.step(Pair(torch.randn(10, 3), torch.randn(10, 1)))
    stepper.step(Pair(torch.randn(10, 3), torch.randn(10, 1)))


def test_a_loss_declared_to_need_the_whole_batch_is_not_split():
    from batchwright.step import whole_batch

    model = nn.Linear(3, 1)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), whole_batch(partial(square_loss)), micro_batch=5
    )
    with pytest.raises(ArgumentError, match="compares the examples"):
        stepper.step(Pair(torch.randn(10, 3), torch.randn(10, 1)))


def test_the_parts_must_be_called_in_order():
    model = nn.Linear(3, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), square_loss)
    with pytest.raises(ArgumentError, match="nothing was accumulated"):
        stepper.update()


def half_loss(model, batch):
    x, y = batch
    return (model(x).float() - y).square().sum(), len(x)


def test_a_scaler_skips_the_same_steps_as_the_unsplit_mean():
    """Every third batch overflows float16; the hand-written loop on the whole batch is the reference."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    batches = [(torch.randn(12, 4) * (1e5 if step % 3 == 2 else 1), torch.randn(12, 1)) for step in range(9)]
    by_hand, split = copy.deepcopy(start), copy.deepcopy(start)
    optimizer, scaler = torch.optim.SGD(by_hand.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=256.0)
    other = torch.amp.GradScaler("cpu", init_scale=256.0)
    stepper = Stepper(
        split, torch.optim.SGD(split.parameters(), lr=1e-3), half_loss,
        micro_batch=5, autocast=torch.float16, scaler=other, weight_of=lambda batch: len(batch[0]),
    )  # fmt: skip
    scales = []
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = half_loss(by_hand, batch)[0] / len(batch[0])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stepper.step(batch)
        scales.append((scaler.get_scale(), other.get_scale()))
    assert all(a == b for a, b in scales)
    assert scales[-1][0] == 256.0 / 2**3  # three of nine steps were skipped
    assert relative_error(list(split.parameters()), list(by_hand.parameters())) < 1e-3


def test_nothing_can_be_added_to_a_gradient_that_was_reduced():
    model = nn.Linear(3, 1)
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), square_loss)
    pair = Pair(torch.randn(4, 3), torch.randn(4, 1))
    stepper.accumulate(pair)
    stepper.reduce()
    with pytest.raises(ArgumentError, match="reduced already"):
        stepper.accumulate(pair)
    assert stepper.update().batch_size == 4


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_whose_weight_is_known_on_the_host_never_waits_for_the_device():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = Stepper(
        model, optimizer, lambda model, x: (model(x).square().sum(), len(x)), micro_batch=4, measure_noise=True
    )
    batch = torch.randn(16, 8, device="cuda")
    stepper.step(batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        report = stepper.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert report.loss > 0
    assert report.noise is not None


def test_an_optimizer_that_clears_gradients_in_its_own_way_does_so():
    class Counting(torch.optim.SGD):
        cleared = 0

        def zero_grad(self, set_to_none=True):
            self.cleared += 1
            super().zero_grad(set_to_none)

    model = nn.Linear(2, 1)
    optimizer = Counting(model.parameters(), lr=0.1)
    Stepper(model, optimizer, lambda m, x: (m(x).sum(), len(x))).step(torch.ones(3, 2))
    assert optimizer.cleared == 1


def test_gradients_of_parameters_that_only_the_optimizer_knows_are_cleared_too():
    model, other = nn.Linear(2, 1), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)
    other.grad = torch.ones(2)
    with pytest.warns(UserWarning, match="1 of 3 parameters had a gradient when the update began"):
        Stepper(model, optimizer, lambda m, x: (m(x).sum(), len(x))).step(torch.ones(3, 2))
    assert other.grad is None
    assert other.tolist() == [1.0, 1.0]


def test_spectral_norm_in_training_mode_is_warned_of_when_the_batch_is_split():
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), square_loss, micro_batch=5)
    with pytest.warns(UserWarning, match="spectral norm in training mode"):
        stepper.step(Pair(torch.randn(10, 3), torch.randn(10, 1)))
