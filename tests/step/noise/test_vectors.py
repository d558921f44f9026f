"""Noise from the gradients of single examples in vectors, against one backward pass per example."""

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.step import Stepper, whole_batch

from .models import (
    WIDTH,
    OwnRms,
    Transformer,
    class_loss,
    conv_net,
    exact_noise,
    make_stepper,
    measured,
    mlp,
    spread_out,
    token_loss,
    tokens_of,
)

NORMS_OF_A_TRANSFORMER = 5


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=12, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def images(num):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num, 3, 6, 6, generator=generator), torch.randint(0, 5, (num,), generator=generator)


def rows(num):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num, 6, generator=generator), torch.randint(0, 5, (num,), generator=generator)


CASES = {
    "LayerNorm transformer": (Transformer, token_loss, tokens_of, 5),
    "RMSNorm transformer": (lambda: Transformer(lambda: nn.RMSNorm(WIDTH)), token_loss, tokens_of, 5),
    "RMSNorm of an unknown class": (lambda: Transformer(OwnRms), token_loss, tokens_of, 5),
    "Llama": (llama, token_loss, tokens_of, 5),
    "GroupNorm convolutions": (conv_net, class_loss, images, 2),
    "MLP with biases": (mlp, class_loss, rows, 3),
    "convolutions with biases": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 4), nn.Flatten()),
        class_loss,
        images,
        2,
    ),
}


def make(case):
    make_model, loss_fn, batch_of, num_vectors = CASES[case]
    torch.manual_seed(0)
    model = make_model()
    batch = batch_of(9)
    loss_fn(model, batch)  # lazy layers learn their shapes
    return spread_out(model), loss_fn, batch, num_vectors


@pytest.mark.parametrize("micro_batch", ["auto", 4])
@pytest.mark.parametrize("case", CASES)
def test_noise_is_that_of_one_backward_pass_per_example(case, micro_batch):
    model, loss_fn, batch, num_vectors = make(case)
    found, names, reports = measured(make_stepper(model, loss_fn, micro_batch=micro_batch), batch)
    assert len(names) == num_vectors
    assert found == pytest.approx(exact_noise(model, loss_fn, batch, names), rel=2e-4, abs=1e-6)
    assert reports[2].num_micro_batches == (1 if micro_batch == "auto" else 3)
    assert reports[2].noise.num_parts == 9


def test_noise_of_biases_is_that_of_vectorized_gradients():
    model, loss_fn, (x, y), _ = make("MLP with biases")
    (s, g2), names, _ = measured(make_stepper(model, loss_fn), (x, y))
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def one(weights, x, y):
        return nn.functional.cross_entropy(functional_call(model, weights, (x[None],))[0], y)

    gradients = vmap(grad(one), in_dims=(None, 0, 0))(weights, x, y)
    flat = torch.cat([gradients[name] for name in names], dim=1)
    assert s == pytest.approx(float(flat.var(dim=0).sum()), rel=1e-4)
    assert g2 == pytest.approx(float(flat.mean(0).square().sum() - flat.var(dim=0).sum() / 9), rel=1e-3)


def test_the_noise_of_the_whole_is_that_of_the_vectors_times_what_both_were_measured_to_be():
    # The same batch in every update and a rate of 0: every measurement of the whole is of the same gradient, cut
    # otherwise. 64 updates measure it 7 times, so the report is near the mean of these.
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    batch = tuple(torch.cat([field] * 4) for field in batch)
    stepper, exact = make_stepper(model, loss_fn), make_stepper(model, loss_fn, noise_from="all")
    reports = [stepper.step(batch).noise for _ in range(64)]
    whole = [exact.step(batch).noise for _ in range(64)]
    mean = sum(one.s for one in whole) / len(whole)
    assert reports[-1].s == pytest.approx(mean, rel=0.15)
    assert reports[0].source == "vectors"
    assert {one.source for one in whole} == {"all"}


def test_the_whole_gradient_is_measured_at_first_and_then_rarely():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    stepper = make_stepper(model, loss_fn)
    cut = [place for place in range(200) if stepper.step(batch).num_micro_batches > 1]
    assert cut == [0, 1, 3, 7, 15, 31, 63, 127, 191]


def test_every_third_update_is_measured_and_the_others_run_whole():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    stepper = make_stepper(model, loss_fn, measure_noise=3)
    reports = [stepper.step(batch) for _ in range(10)]
    assert [report.noise is not None for report in reports] == [place % 3 == 0 for place in range(10)]
    assert [report.num_micro_batches > 1 for report in reports] == [place in (0, 3, 9) for place in range(10)]


def test_measuring_leaves_the_update_and_the_model_as_they_were():
    trained = []
    for options in ({}, {"measure_noise": False, "noise_from": "all"}):
        model, loss_fn, batch, _ = make("GroupNorm convolutions")
        stepper = make_stepper(model, loss_fn, lr=0.1, micro_batch=3, **options)
        for _ in range(3):
            stepper.step(batch)
        trained.append(model)
    for a, b in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert not any(module._forward_hooks for module in trained[0].modules())
    assert not any(parameter._backward_hooks for parameter in trained[0].parameters())


def test_updates_that_are_not_measured_carry_no_hook():
    model, _, batch, _ = make("LayerNorm transformer")
    hooked = []

    def loss_fn(model, batch):
        hooked.append(
            any(module._forward_hooks for module in model.modules())
            or any(parameter._backward_hooks for parameter in model.parameters())
        )
        return token_loss(model, batch)

    stepper = make_stepper(model, loss_fn, measure_noise=4)
    for _ in range(5):
        stepper.step(batch)
    assert hooked == [True, True, False, False, False, True, True]


def test_a_norm_that_runs_twice_counts_once_with_both_gradients():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5)

        def forward(self, x):
            return self.last(self.norm(self.first(self.norm(x))))

    model, batch = spread_out(Twice()), rows(8)
    found, names, _ = measured(make_stepper(model, class_loss), batch)
    assert names == ["norm.bias"]
    assert found == pytest.approx(exact_noise(model, class_loss, batch, names), rel=1e-4)


def test_a_weight_that_two_norms_share_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last = OwnRms(6), nn.RMSNorm(6, eps=1e-5), nn.Linear(6, 5)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.last(self.b(self.a(x).tanh()))

    model, batch = spread_out(Tied()), rows(8)
    found, names, _ = measured(make_stepper(model, class_loss), batch)
    assert names == ["a.weight"]
    assert found == pytest.approx(exact_noise(model, class_loss, batch, names), rel=1e-4)


def test_a_weight_that_is_used_outside_of_its_module_is_left_out():
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last = nn.LayerNorm(6), nn.LayerNorm(6), nn.Linear(6, 5)

        def forward(self, x):
            return self.last(self.b(self.a(x).tanh()) * self.a.bias)

    model, batch = spread_out(Elsewhere()), rows(8)
    found, names, _ = measured(make_stepper(model, class_loss), batch)
    assert names == ["b.bias"]
    assert found == pytest.approx(exact_noise(model, class_loss, batch, names), rel=1e-4)


def test_a_frozen_norm_is_left_out():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    for block in model.blocks:
        block.requires_grad_(False)
    found, names, _ = measured(make_stepper(model, loss_fn), batch)
    assert names == ["norm.bias"]
    assert found == pytest.approx(exact_noise(model, loss_fn, batch, names), rel=1e-4)


def test_a_norm_that_is_frozen_later_is_left_out_from_then_on():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    stepper = make_stepper(model, loss_fn)
    before = [stepper.step(batch).noise for _ in range(3)][-1]
    for block in model.blocks:
        block.requires_grad_(False)
    after = stepper.step(batch)
    assert stepper.state_dict()["vectors"]["names"] == ["norm.bias"]
    assert after.num_micro_batches > 1
    assert after.noise.s < before.s  # fewer parameters train


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_blocks_are_measured_as_others(use_reentrant):
    def wrap(block, x):
        return checkpoint(block, x, use_reentrant=use_reentrant)

    model = spread_out(Transformer(wrap=wrap))
    batch = tokens_of(9)
    found, names, _ = measured(make_stepper(model, token_loss), batch)
    assert len(names) == NORMS_OF_A_TRANSFORMER
    model.wrap = lambda block, x: block(x)  # a reentrant checkpoint hides its parameters from autograd.grad
    assert found == pytest.approx(exact_noise(model, token_loss, batch, names), rel=1e-4)


def test_more_norms_than_needed_are_thinned_out_evenly():
    model = nn.Sequential(*(nn.LayerNorm(6) for _ in range(22)), nn.Linear(6, 5))
    _, names, _ = measured(make_stepper(spread_out(model), class_loss), rows(8))
    assert sorted({int(name.split(".")[0]) for name in names}) == [0, 3, 6, 9, 12, 15, 18, 21]


def test_autocast_to_bfloat16_is_as_good_as_its_rounding():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    found, names, _ = measured(make_stepper(model, loss_fn, autocast=torch.bfloat16), batch)
    assert len(names) == NORMS_OF_A_TRANSFORMER
    assert found == pytest.approx(exact_noise(model, loss_fn, batch, names), rel=0.02)


def test_a_model_in_bfloat16_is_as_good_as_its_rounding():
    model, loss_fn, batch, _ = make("MLP with biases")
    expected = exact_noise(model, loss_fn, batch, ["0.bias", "2.bias", "4.bias"])
    model = model.bfloat16()
    found, names, _ = measured(make_stepper(model, loss_fn, micro_batch=4), (batch[0].bfloat16(), batch[1]))
    assert names == ["0.bias", "2.bias", "4.bias"]
    assert found == pytest.approx(expected, rel=0.05)


def test_the_scale_of_a_scaler_drops_out():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    stepper = make_stepper(model, loss_fn, scaler=scaler, weight_of=lambda batch: (batch[1] >= 0).sum())
    found, names, _ = measured(stepper, batch)
    assert found == pytest.approx(exact_noise(model, loss_fn, batch, names), rel=1e-4)


def test_an_overflow_of_a_scaler_is_not_learned_from():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    factor = [1e38]

    def large(model, batch):
        loss, weight = loss_fn(model, batch)
        return loss * factor[0], weight

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    stepper = make_stepper(model, large, scaler=scaler, weight_of=lambda batch: (batch[1] >= 0).sum())
    assert not math.isfinite(stepper.step(batch).noise.s)
    assert scaler.get_scale() == 2.0**15
    factor[0] = 1.0
    for _ in range(5):
        stepper.step(batch)
    scaled = stepper.state_dict()
    assert json.loads(json.dumps(scaled)) == scaled
    names = scaled["vectors"]["names"]
    assert len(names) == NORMS_OF_A_TRANSFORMER
    assert scaled["vectors"]["average"]["s"] == pytest.approx(exact_noise(model, loss_fn, batch, names)[0], rel=1e-4)


def test_several_batches_of_one_update_count_as_one():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    stepper = make_stepper(model, loss_fn)
    for _ in range(3):
        stepper.accumulate(tuple(field[:5] for field in batch))
        stepper.accumulate(tuple(field[5:] for field in batch))
        assert stepper.update().noise.num_parts == 9
    found = stepper.state_dict()["vectors"]
    expected = exact_noise(model, loss_fn, batch, found["names"])
    assert (found["average"]["s"], found["average"]["g2"]) == pytest.approx(expected, rel=1e-4)


def test_a_batch_that_ran_out_of_memory_is_measured_once():
    model, _, batch, _ = make("LayerNorm transformer")
    fails = [False]

    def loss_fn(model, batch):
        found = token_loss(model, batch)
        if fails[0] and len(batch[0]) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. A stand-in.")
        return found

    stepper = make_stepper(model, loss_fn)
    [stepper.step(batch) for _ in range(2)]
    fails[0] = True
    report = stepper.step(batch)
    assert report.ooms > 0
    found = stepper.state_dict()["vectors"]
    assert report.noise.num_parts == 9
    assert found["average"]["s"] == pytest.approx(exact_noise(model, token_loss, batch, found["names"])[0], rel=1e-4)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_saved_state_goes_on_as_if_nothing_had_happened():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    stepper = make_stepper(model, loss_fn)
    for _ in range(20):
        stepper.step(batch)
    state = json.loads(json.dumps(stepper.state_dict()))
    other = make_stepper(copy.deepcopy(model), loss_fn)
    other.load_state_dict(state)
    assert other.state_dict() == state
    ours, theirs = stepper.step(batch).noise, other.step(batch).noise
    assert theirs.s == pytest.approx(ours.s, rel=0.1)  # the vectors are checked again, which measures the whole once
    assert theirs.reliable == ours.reliable
    kept = other.state_dict()["vectors"]
    assert kept["average"] == pytest.approx(stepper.state_dict()["vectors"]["average"], rel=1e-4)


def test_a_state_of_whole_gradients_is_a_start():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    exact = make_stepper(model, loss_fn, noise_from="all")
    for _ in range(9):
        exact.step(batch)
    state = exact.state_dict()
    assert "vectors" not in state
    stepper = make_stepper(model, loss_fn)
    stepper.load_state_dict(state)
    assert stepper.state_dict()["noise"] == state["noise"]
    exact.load_state_dict(stepper.state_dict())
    assert exact.state_dict() == state


def test_a_broken_state_is_refused_and_changes_nothing():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    stepper = make_stepper(model, loss_fn)
    stepper.step(batch)
    state = stepper.state_dict()
    with pytest.raises(StateMismatchError, match="names of vectors as a list of words or None, got 3"):
        stepper.load_state_dict({**state, "vectors": {**state["vectors"], "names": 3}})
    assert stepper.state_dict() == state


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
        stepper.step(images(6))
    model.eval()
    assert stepper.step(images(6)).noise is not None


def test_a_loss_that_compares_examples_is_refused():
    @whole_batch
    def loss_fn(model, batch):
        x = model(batch[0])
        return nn.functional.cross_entropy(x @ x.T, torch.arange(len(x)), reduction="sum"), len(x)

    with pytest.raises(ArgumentError, match="this loss compares the examples of a batch"):
        make_stepper(mlp(), loss_fn).step(rows(6))


def test_a_model_that_changes_after_the_check_is_refused():
    model, loss_fn, batch, _ = make("MLP with biases")
    stepper = make_stepper(model, loss_fn)
    for _ in range(2):
        stepper.step(batch)
    model[2].forward = lambda x: nn.functional.linear(x, model[2].weight, model[2].bias)
    model[2].__class__ = type("Hidden", (nn.Linear,), {"__call__": lambda self, x: self.forward(x)})
    with pytest.raises(ArgumentError, match=r"2.bias was measured before, but now its module no longer shows"):
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
        stepper.step(rows(6))
    model.is_flat = True
    with pytest.raises(ArgumentError, match=r"norm.bias was measured before, but now its output of shape"):
        stepper.step(rows(6))


def test_one_example_has_no_noise_and_two_have_that_of_the_whole():
    model, loss_fn, batch, _ = make("MLP with biases")
    stepper = make_stepper(model, loss_fn)
    assert stepper.step(tuple(field[:1] for field in batch)).noise is None
    # Parts of one example each: no second size was seen, so the vectors are not trusted yet.
    assert stepper.step(tuple(field[:2] for field in batch)).noise.source == "all"
    assert stepper.step(batch).noise.source == "vectors"


def test_a_stepper_without_vectors_is_as_before():
    model = mlp()
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.0), class_loss, measure_noise=True)
    assert stepper.step(rows(6)).noise.source == "all"
