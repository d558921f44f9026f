"""Noise from the gradients of single examples in vectors, against one backward pass per example."""

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from batchwright.errors import StateMismatchError
from batchwright.step import Stepper

from .models import (
    WIDTH,
    OwnRms,
    Transformer,
    class_loss,
    conv_net,
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


CASES = {
    "LayerNorm transformer": (Transformer, token_loss, tokens_of, 5),
    "RMSNorm transformer": (lambda: Transformer(lambda: nn.RMSNorm(WIDTH)), token_loss, tokens_of, 5),
    "RMSNorm of an unknown class": (lambda: Transformer(OwnRms), token_loss, tokens_of, 5),
    "Llama": (llama, token_loss, tokens_of, 5),
    "GroupNorm convolutions": (conv_net, class_loss, images_of, 2),
    "MLP with biases": (mlp, class_loss, rows_of, 3),
    "convolutions with biases": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 5, 4), nn.Flatten()),
        class_loss,
        images_of,
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
    assert cut == [0, 31, 63, 127, 191]


@pytest.mark.parametrize(("micro_batch", "parts"), [("auto", 2), (6, 2), (5, 3), (4, 3), (3, 3)])
def test_vectors_are_checked_in_parts_of_two_sizes_none_above_the_limit(micro_batch, parts):
    # 8 examples: 2 and 6 if six may run at once, else 4, 1 and 3; a limit of three cuts unequal parts anyway.
    sizes = []
    watched = lambda model, part: (sizes.append(len(part[0])), token_loss(model, part))[1]  # noqa: E731
    report = make_stepper(Transformer(), watched, micro_batch=micro_batch).step(tokens_of(8))
    assert report.num_micro_batches == parts
    assert len(set(sizes)) >= 2
    assert sum(sizes) == 8
    assert micro_batch == "auto" or max(sizes) <= micro_batch


def test_every_third_update_is_measured_and_the_others_run_whole():
    model, loss_fn, batch, _ = make("LayerNorm transformer")
    stepper = make_stepper(model, loss_fn, measure_noise=3)
    reports = [stepper.step(batch) for _ in range(95)]
    assert [report.noise is not None for report in reports] == [place % 3 == 0 for place in range(95)]
    assert [place for place, report in enumerate(reports) if report.num_micro_batches > 1] == [0, 31 * 3]


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
    assert hooked == [True, True, False, False, False, True]


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
    assert theirs.s == pytest.approx(ours.s, rel=0.3)  # the vectors are checked again, which compares a second time
    assert theirs.reliable == ours.reliable
    kept = other.state_dict()["vectors"]
    assert kept["average"] == pytest.approx(stepper.state_dict()["vectors"]["average"], rel=1e-4)


def test_what_was_held_is_put_back():
    model, batch = spread_out(Transformer()), tokens_of(8)
    stepper = make_stepper(model, token_loss)
    put_back, state = stepper._meter.hold(), stepper.state_dict()
    reports = [stepper.step(batch) for _ in range(2)]
    put_back()
    stepper.load_state_dict(state)
    assert stepper.state_dict() == state
    again = [stepper.step(batch) for _ in range(2)]  # vectors are checked anew, in the same micro-batches
    assert [report.noise for report in again] == [report.noise for report in reports]
    assert [report.num_micro_batches for report in again] == [2, 1]


def test_reports_are_read_after_another_state_was_loaded():
    for noise_from in ("vectors", "all"):
        stepper = make_stepper(spread_out(Transformer()), token_loss, noise_from=noise_from)
        state = stepper.state_dict()
        unread = stepper.step(tokens_of(8))
        stepper.load_state_dict(state)
        assert unread.noise.s > 0
        assert stepper.state_dict() == state


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
    assert stepper.step(rows_of(6)).noise.source == "all"
