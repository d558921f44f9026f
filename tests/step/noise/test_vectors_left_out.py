"""Noise from vectors: what is checked, left out of it, or refused."""

import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import whole_batch

from .models import (
    WIDTH,
    OwnRms,
    Transformer,
    class_loss,
    exact_noise,
    images_of,
    make_stepper,
    measured,
    mlp,
    rows_of,
    spread_out,
    token_loss,
    tokens_of,
)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Twice(nn.Module):
    """Runs one norm twice, and perhaps another one once."""

    def __init__(self, *, has_other):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5)
        self.other = nn.LayerNorm(6) if has_other else nn.Identity()

    def forward(self, x):
        return self.last(self.other(self.norm(self.first(self.norm(x)))))


def test_a_norm_that_runs_twice_is_left_out():
    model, batch = spread_out(Twice(has_other=True)), rows_of(8)
    found, names, _ = measured(make_stepper(model, class_loss), batch)
    assert names == ["other.bias"]
    assert found == pytest.approx(exact_noise(model, class_loss, batch, names), rel=1e-4)


def test_a_model_whose_only_norm_runs_twice_is_refused():
    stepper = make_stepper(Twice(has_other=False), class_loss)
    with pytest.raises(ArgumentError, match=r"norm.bias: it is used more than once, and the rows of one call may be"):
        stepper.step(rows_of(8))


def test_a_weight_that_two_norms_share_is_left_out():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = OwnRms(6), nn.RMSNorm(6, eps=1e-5), nn.RMSNorm(6)
            self.b.weight = self.a.weight
            self.last = nn.Linear(6, 5)

        def forward(self, x):
            return self.last(self.c(self.b(self.a(x).tanh())))

    model, batch = spread_out(Tied()), rows_of(8)
    found, names, _ = measured(make_stepper(model, class_loss), batch)
    assert names == ["c.weight"]
    assert found == pytest.approx(exact_noise(model, class_loss, batch, names), rel=1e-4)


class Sorted(nn.Module):
    """Sorts its rows inside, as ``pack_padded_sequence(enforce_sorted=False)`` does, and shares one norm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 12), nn.LayerNorm(12)
        self.second, self.last = nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        hidden = self.norm(self.first(x))
        order = torch.argsort(x[:, 0])
        again = self.norm(self.second(hidden[order]))[torch.argsort(order)]
        return self.last(torch.tanh(again) + hidden)


def test_a_shared_norm_whose_second_call_has_the_rows_in_another_order_is_refused():
    with pytest.raises(ArgumentError, match=r"norm.bias: it is used more than once"):
        make_stepper(spread_out(Sorted()), class_loss).step(rows_of(16))


class LayerNorm2d(nn.LayerNorm):
    """A norm over the channels of images, as torchvision, ConvNeXt and SAM have it."""

    def forward(self, x):
        x = nn.functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class OwnLayerNorm2d(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = 1e-6

    def forward(self, x):
        gap = x - x.mean(1, keepdim=True)
        x = gap / torch.sqrt(gap.square().mean(1, keepdim=True) + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@pytest.mark.parametrize("norm", [LayerNorm2d, OwnLayerNorm2d])
@pytest.mark.parametrize("width", [6, 8])
def test_a_norm_of_channels_that_looks_like_one_of_the_last_axis_is_left_out(norm, width):
    # At width 8 the last axis of its output is as long as there are channels: the sums over examples tell.
    model = spread_out(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.GELU(), nn.Flatten(), nn.LayerNorm(8 * width**2),
            nn.Linear(8 * width**2, 5),
        )
    )  # fmt: skip
    batch = images_of(16, width)
    found, names, _ = measured(make_stepper(model, class_loss), batch)
    assert names == ["4.bias"]
    assert found == pytest.approx(exact_noise(model, class_loss, batch, names), rel=1e-4)


def test_a_model_with_norms_of_channels_alone_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), LayerNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(128, 5))
    with pytest.raises(ArgumentError, match=r"1.bias: its output of shape .* has no 8 features at axis -1; use noise_"):
        make_stepper(model, class_loss).step(images_of(16))


def test_a_convnext_is_measured_in_its_last_norm_or_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.ConvNextConfig(num_channels=3, hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, num_labels=5)
    model, batch = spread_out(transformers.ConvNextForImageClassification(config)), images_of(8, 16)

    def loss_fn(model, batch):
        return class_loss(lambda x: model(x).logits, batch)

    found, names, _ = measured(make_stepper(model, loss_fn), batch)
    assert "convnext.layernorm.bias" in names
    assert found == pytest.approx(exact_noise(model, loss_fn, batch, names), rel=1e-3)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 5)
        self.is_reused = False

    def forward(self, x):
        hidden = self.norm(self.first(x))
        if self.is_reused:
            hidden = hidden + torch.tanh(self.first(x)) * self.norm.bias
        return self.last(torch.tanh(hidden))


def test_a_vector_that_is_used_elsewhere_after_the_check_is_refused():
    model, batch = spread_out(Reused()), rows_of(16)
    stepper = make_stepper(model, class_loss)
    for _ in range(4):
        stepper.step(batch)
    model.is_reused = True
    with pytest.raises(ArgumentError, match=r"examples in norm.bias added up .* but no longer do: a vector is used"):
        stepper.step(batch)
    with pytest.raises(ArgumentError, match=r"cannot be measured in this model: norm.bias: the gradients of its"):
        stepper.step(batch)
    model.is_reused = False
    assert stepper.step(batch).noise is not None


def test_a_vector_that_is_used_elsewhere_in_one_of_several_micro_batches_is_refused():
    model, batch = spread_out(Reused()), rows_of(16)
    stepper = make_stepper(model, class_loss)
    for _ in range(4):
        stepper.step(batch)
    stepper.accumulate(rows_of(5))
    model.is_reused = True
    stepper.accumulate(rows_of(6))
    model.is_reused = False
    stepper.accumulate(rows_of(7))
    with pytest.raises(ArgumentError, match="but no longer do"):
        stepper.update()


class InChunks(nn.Module):
    """Runs more than 8 rows in chunks, to save memory."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x):
        return torch.cat([self.last(torch.tanh(self.norm(self.first(part)))) for part in x.split(8)])


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_after_a_batch_that_was_refused_the_next_step_works(num_before):
    stepper = make_stepper(InChunks(), class_loss)
    for _ in range(num_before):
        stepper.step(rows_of(8))
    with pytest.raises(ArgumentError, match="does not have a row per example"):
        stepper.step(rows_of(32))
    assert stepper.step(rows_of(8)).noise is not None


def test_a_weight_that_is_used_outside_of_its_module_is_left_out():
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last = nn.LayerNorm(6), nn.LayerNorm(6), nn.Linear(6, 5)

        def forward(self, x):
            return self.last(self.b(self.a(x).tanh()) * self.a.bias)

    model, batch = spread_out(Elsewhere()), rows_of(8)
    found, names, _ = measured(make_stepper(model, class_loss), batch)
    assert names == ["b.bias"]
    assert found == pytest.approx(exact_noise(model, class_loss, batch, names), rel=1e-4)


def test_a_frozen_norm_is_left_out():
    model, loss_fn, batch = spread_out(Transformer()), token_loss, tokens_of(9)
    for block in model.blocks:
        block.requires_grad_(False)
    found, names, _ = measured(make_stepper(model, loss_fn), batch)
    assert names == ["norm.bias"]
    assert found == pytest.approx(exact_noise(model, loss_fn, batch, names), rel=1e-4)


def test_a_norm_that_is_frozen_later_is_left_out_from_then_on():
    model, loss_fn, batch = spread_out(Transformer()), token_loss, tokens_of(9)
    stepper = make_stepper(model, loss_fn)
    before = [stepper.step(batch).noise for _ in range(3)][-1]
    for block in model.blocks:
        block.requires_grad_(False)
    after = stepper.step(batch)
    assert stepper.state_dict()["vectors"]["names"] == ["norm.bias"]
    assert after.num_micro_batches > 1
    assert after.noise.s < before.s  # fewer parameters train


def test_more_norms_than_needed_are_thinned_out_evenly():
    model = nn.Sequential(*(nn.LayerNorm(6) for _ in range(22)), nn.Linear(6, 5))
    _, names, _ = measured(make_stepper(spread_out(model), class_loss), rows_of(8))
    assert sorted({int(name.split(".")[0]) for name in names}) == [0, 3, 6, 9, 12, 15, 18, 21]


def test_examples_along_another_axis_are_refused():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(17, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17)

        def forward(self, tokens):
            return self.head(self.norm(self.embed(tokens).transpose(0, 1))).transpose(0, 1)

    # The length equals the size of the batch, of the first part, or of none.
    for num, length in ((6, 6), (6, 4), (6, 2), (6, 11)):
        stepper = make_stepper(Turned(), token_loss)
        with pytest.raises(ArgumentError, match=r"norm.bias: its output .* does not have a row per example"):
            stepper.step(tokens_of(num, length))


def test_rows_of_tokens_are_refused():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(17, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17)

        def forward(self, tokens):
            return self.head(self.norm(self.embed(tokens).flatten(0, 1))).unflatten(0, tokens.shape)

    with pytest.raises(ArgumentError, match=r"cannot be measured in this model: norm.bias: its output of shape"):
        make_stepper(Flat(), token_loss).step(tokens_of(6))


def test_batch_norm_is_refused_while_it_trains():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 5))
    stepper = make_stepper(model, class_loss)
    with pytest.raises(ArgumentError, match="BatchNorm mixes the examples of a batch, so none has a gradient of its"):
        stepper.step(images_of(6))
    model.eval()
    assert stepper.step(images_of(6)).noise is not None


def test_a_loss_that_compares_examples_is_refused():
    @whole_batch
    def loss_fn(model, batch):
        x = model(batch[0])
        return nn.functional.cross_entropy(x @ x.T, torch.arange(len(x)), reduction="sum"), len(x)

    with pytest.raises(ArgumentError, match="this loss compares the examples of a batch"):
        make_stepper(mlp(), loss_fn).step(rows_of(6))


def test_a_model_that_changes_after_the_check_is_refused():
    model, loss_fn, batch = mlp(), class_loss, rows_of(9)
    stepper = make_stepper(model, loss_fn)
    for _ in range(2):
        stepper.step(batch)
    model[2].forward = lambda x: nn.functional.linear(x, model[2].weight, model[2].bias)
    model[2].__class__ = type("Hidden", (nn.Linear,), {"__call__": lambda self, x: self.forward(x)})
    with pytest.raises(ArgumentError, match=r"2.bias was measured before, but now its gradient does not come"):
        stepper.step(batch)


def test_rows_that_stop_being_examples_are_refused():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head, self.is_flat = nn.LayerNorm(6), nn.Linear(6, 5), False

        def forward(self, x):
            x = x[:, None].expand(-1, 2, -1)
            x = self.norm(x.flatten(0, 1)).unflatten(0, (-1, 2)) if self.is_flat else self.norm(x)
            return self.head(x).mean(1)

    model = Either()
    stepper = make_stepper(model, class_loss)
    for _ in range(2):
        stepper.step(rows_of(6))
    model.is_flat = True
    with pytest.raises(ArgumentError, match=r"norm.bias was measured before, but now its output of shape"):
        stepper.step(rows_of(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure_noise": False}, "noise_from='vectors' needs measure_noise=True, or a number of updates"),
        ({"noise_parts": 4}, "noise_parts counts micro-batches, but noise_from='vectors' measures single examples"),
        ({"noise_groups": lambda name: name}, "noise_groups needs measure_noise=True and noise_from='all'"),
        ({"noise_from": "norms"}, "noise_from must be one of 'all', 'vectors', got 'norms'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        make_stepper(mlp(), class_loss, **options)


def test_a_model_without_vectors_is_refused():
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.LayerNorm(5, elementwise_affine=False))
    with pytest.raises(ArgumentError, match="and the model has none; use noise_from='all'"):
        make_stepper(model, class_loss)
