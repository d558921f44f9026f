"""The gradient of a loss over the whole batch is that of plain autograd without a split, for any micro-batches."""

import copy
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from batchwright import BatchSizeController, MaxTokens, size
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.step import Stepper, WholeBatchLoss, measure_size

from .models import LOSSES, TwoTowers, clip_loss, cut, distance, encode, gradients_by_hand, make_batch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def make(*, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return TwoTowers(**options).to(dtype)


def stepper_of(model, loss=None, lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return Stepper(model, optimizer, loss or WholeBatchLoss(encode, clip_loss(model)), **options)


def reduced(stepper, batch, seed=1):
    """Return the gradients of a batch, from a random state."""
    torch.manual_seed(seed)
    stepper.accumulate(batch)
    stepper.reduce()
    return [parameter.grad.clone() for parameter in stepper._trained.parameters]


def parts_of(num, most):
    """Return the micro-batches of at most so many neighbours, as Stepper cuts them."""
    count = -(-num // most)
    sizes = [num // count + (place < num % count) for place in range(count)]
    starts = [sum(sizes[:place]) for place in range(count)]
    return [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(2, 13),
    most=st.integers(1, 13),
    loss=st.sampled_from(sorted(LOSSES)),
    dtype=st.sampled_from(sorted(TOLERANCE, key=str)),
)
def test_any_split_gives_the_gradient_of_the_unsplit_batch(num, most, loss, dtype):
    model, batch = make(dtype=dtype), make_batch(num, seed=num, dtype=dtype)
    expected, _, mean = gradients_by_hand(model, LOSSES[loss], batch, [list(range(num))])
    stepper = stepper_of(model, WholeBatchLoss(encode, LOSSES[loss](model)), micro_batch=most)
    found = reduced(stepper, batch)
    assert distance(found, expected) < TOLERANCE[dtype]
    report = stepper.update()
    assert report.loss == pytest.approx(mean, rel=1e-5)
    assert (report.batch_size, report.num_micro_batches) == (num, -(-num // most))


@settings(max_examples=25, deadline=None)
@given(num=st.integers(4, 13), most=st.integers(2, 13), seed=st.integers(0, 99))
def test_both_passes_draw_the_same_masks_and_buffers_change_once(num, most, seed):
    model, batch = make(dropout=0.4, norm=True), make_batch(num, seed=seed)
    parts = parts_of(num, most)
    if min(map(len, parts)) < 2:
        return  # BatchNorm needs two examples
    torch.manual_seed(1)
    expected, twin, _ = gradients_by_hand(model, clip_loss, batch, parts)
    draw = torch.rand(())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of BatchNorm and splits
        found = reduced(stepper_of(model, micro_batch=most), batch)
    assert torch.equal(torch.rand(()), draw), "the random state afterwards is that of one pass"
    assert distance(found, expected) < 1e-12
    for (name, mine), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-12), name
    assert model.seen == 2 * num


def test_a_backward_pass_that_draws_does_not_move_the_masks():
    model, batch = make(dropout=0.4), make_batch(9)

    def drawing(model, batch):
        found = encode(model, batch)
        found["pair"][0].register_hook(lambda gradient: gradient + 0 * torch.rand(()))
        return found

    torch.manual_seed(1)
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, parts_of(9, 3))
    found = reduced(stepper_of(model, WholeBatchLoss(drawing, clip_loss(model)), micro_batch=3), batch)
    assert distance(found, expected) < 1e-12


def test_a_list_of_examples_comes_back_in_the_order_of_the_batch():
    model, batch = make(), make_batch(9)
    lengths = [3, 9, 1, 4, 4, 8, 2, 9, 5]
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, [list(range(9))])
    examples = [{**cut(batch, place), "length": length} for place, length in enumerate(lengths)]
    sizes = []

    def collate(rows):
        sizes.append(len(rows))
        return {name: torch.stack([row[name] for row in rows]) for name in batch}

    budget = MaxTokens(20)
    stepper = stepper_of(model, micro_batch=budget, lengths=lambda row: row["length"], collate=collate)
    assert distance(reduced(stepper, examples), expected) < 1e-12
    assert len(sizes) > 2 * 2, "every micro-batch is encoded twice"
    stepper.abandon()
    whole = stepper_of(model, lengths=lambda row: row["length"], collate=collate)
    assert distance(reduced(whole, examples), expected) < 1e-12


def test_buffers_that_encode_reads_and_that_the_loss_changes_are_those_of_one_pass():
    model, batch = make(), make_batch(8)

    def moving(model, batch):
        found = encode(model, batch)
        return found | {"pair": (found["pair"][0] * model.seen.clone(), found["pair"][1])}

    def counting(model):
        def loss(encodings):
            model.seen.mul_(3)
            return clip_loss(model)(encodings)

        return loss

    expected, twin, _ = gradients_by_hand(model, counting, batch, parts_of(8, 3), encode=moving)
    found = reduced(stepper_of(model, WholeBatchLoss(moving, counting(model)), micro_batch=3), batch)
    assert distance(found, expected) < 1e-12
    assert model.seen == twin.seen == 3 * 16


def test_what_a_collator_draws_is_drawn_again():
    model, batch = make(), make_batch(8)
    seen = []

    def collate(rows):
        noise = torch.rand(len(rows), 5, dtype=torch.float64)
        seen.append(noise)
        made = {name: torch.stack([row[name] for row in rows]) for name in batch}
        return made | {"text": made["text"] + noise}

    reduced(stepper_of(model, micro_batch=3, collate=collate), [cut(batch, place) for place in range(8)])
    first, second = seen[:3], seen[3:]
    assert [a.tolist() for a in first] == [b.tolist() for b in second]


@pytest.mark.parametrize("option", ["auto", "controller", "split"])
def test_every_way_to_say_how_much_runs_at_once(option):
    model, batch = make(), make_batch(10)
    controller = BatchSizeController(size.constant(4), min_size=1, max_size=8)
    split = lambda whole, indices: 10 if indices is None else cut(whole, indices)  # noqa: E731
    options = {
        "auto": {},
        "controller": {"micro_batch": controller},
        "split": {"micro_batch": 4, "split": split},
    }[option]
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, [list(range(10))])
    assert distance(reduced(stepper_of(model, **options), batch), expected) < 1e-12


def test_a_batch_that_is_one_micro_batch_is_encoded_once():
    calls = []

    def counted(model, batch):
        calls.append(len(batch["text"]))
        return encode(model, batch)

    model = make()
    stepper = stepper_of(model, WholeBatchLoss(counted, clip_loss(model)))
    stepper.step(make_batch(6))
    assert calls == [6]


# Out of memory


class Failing:
    """Runs out of memory at the calls of a place that are told, above so many examples."""

    def __init__(self, place, calls, above=2):
        self.place, self.calls, self.above, self.count = place, calls, above, 0

    def check(self, num):
        if num > self.above:
            self.count += 1
            if self.count in self.calls:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def encode(self, model, batch):
        found = encode(model, batch)
        if self.place == "forward":
            self.check(len(batch["text"]))
        else:
            found["pair"][0].register_hook(lambda gradient: self.check(len(gradient)))
        return found


# With two micro-batches of 4, forward runs twice in the first pass and twice in the second one.
FAILURES = [("forward", {call}) for call in (1, 2, 3, 4)] + [("backward", {call}) for call in (1, 2)]


@pytest.mark.parametrize(("place", "calls"), FAILURES, ids=str)
def test_out_of_memory_in_either_pass_ends_as_a_run_that_began_with_smaller_micro_batches(place, calls):
    runs = []
    for failing, micro_batch in [(Failing(place, calls), 4), (Failing(place, set()), 2)]:
        model = make(dropout=0.3)
        stepper = stepper_of(model, WholeBatchLoss(failing.encode, clip_loss(model)), micro_batch=micro_batch)
        gradients = reduced(stepper, make_batch(8))
        runs.append((gradients, torch.rand(()), model.seen.clone(), stepper.update()))
    (first, *others), (second, *wanted) = runs
    assert all(map(torch.equal, first, second))
    assert others[:2] == wanted[:2]
    assert (others[2].ooms, others[2].num_micro_batches) == (1, 4)


def test_a_whole_batch_that_does_not_fit_is_cut():
    model, batch = make(), make_batch(8)
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, [list(range(8))])
    failing = Failing("backward", {1})
    stepper = stepper_of(model, WholeBatchLoss(failing.encode, clip_loss(model)))
    assert distance(reduced(stepper, batch), expected) < 1e-12
    assert stepper.update().num_micro_batches == 2


def test_a_loss_that_does_not_fit_by_itself_says_so_and_leaves_nothing():
    def too_large(encodings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = make()
    stepper = stepper_of(model, WholeBatchLoss(encode, too_large))
    with pytest.raises(DoesNotFitError, match="the loss of 8 examples does not fit"):
        stepper.step(make_batch(8))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.seen == 0


def test_on_oom_raise_raises():
    model = make()
    failing = Failing("forward", {3})
    stepper = stepper_of(model, WholeBatchLoss(failing.encode, clip_loss(model)), micro_batch=4, on_oom="raise")
    with pytest.raises(torch.OutOfMemoryError):
        stepper.step(make_batch(8))
    assert model.seen == 0


def test_what_was_learned_about_memory_resumes():
    model = make()
    stepper = stepper_of(model, WholeBatchLoss(Failing("forward", {1}, above=4).encode, clip_loss(model)))
    assert stepper.step(make_batch(8)).ooms == 1
    other = stepper_of(copy.deepcopy(model))
    other.load_state_dict(stepper.state_dict())
    assert other.step(make_batch(8)).num_micro_batches == stepper.step(make_batch(8)).num_micro_batches == 2


# Precision


def test_half_precision_under_autocast_is_that_of_the_unsplit_batch():
    model, batch = make(dtype=torch.float32), make_batch(8, dtype=torch.float32)
    kinds = set()

    def seen(model, batch):
        found = encode(model, batch)
        kinds.add(found["pair"][0].dtype)
        return found

    gradients = []
    for most in (8, 3):
        stepper = stepper_of(
            model, WholeBatchLoss(seen, clip_loss(model)), micro_batch=most, autocast=torch.bfloat16, lr=0.0
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):  # whose copies of the weights must not outlive a pass
            gradients.append(reduced(stepper, batch))
        stepper.update()
    assert kinds == {torch.bfloat16}
    assert distance(gradients[1], gradients[0]) < 0.05
    assert all(gradient.abs().max() > 0 for gradient in gradients[1])


def test_a_scaler_gives_the_same_update():
    updated = []
    for most in (8, 3):
        model = make(dtype=torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        stepper = stepper_of(model, micro_batch=most, scaler=scaler, weight_of=lambda batch: batch["weight"].sum())
        stepper.step(make_batch(8, dtype=torch.float32))
        updated.append(list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*updated, strict=True))


# What the gradient reaches


def test_a_frozen_encoder_trains_the_parameters_of_the_loss_only():
    model, batch = make(), make_batch(8)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "scale")
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, [list(range(8))])
    calls = []

    def counted(model, batch):
        calls.append(None)
        return encode(model, batch)

    (found,) = reduced(stepper_of(model, WholeBatchLoss(counted, clip_loss(model)), micro_batch=3), batch)
    assert distance([found], [grad for grad in expected if grad is not None]) < 1e-12
    assert len(calls) == 3, "nothing runs back through encodings without parameters"


def test_one_frozen_tower_gets_no_gradient():
    model, batch = make(), make_batch(8)

    def locked(model, batch):
        found = encode(model, batch)
        return found | {"pair": (found["pair"][0].detach(), found["pair"][1])}

    expected, _, _ = gradients_by_hand(model, clip_loss, batch, [list(range(8))], encode=locked)
    stepper = stepper_of(model, WholeBatchLoss(locked, clip_loss(model)), micro_batch=3)
    torch.manual_seed(1)
    stepper.accumulate(batch)
    stepper.reduce()
    assert distance([parameter.grad for parameter in model.parameters()], expected) < 1e-12
    assert model.text.weight.grad is None


def test_a_loss_without_any_parameter_is_refused():
    model = make()
    frozen = lambda model, batch: encode(model, batch)["pair"][0].detach()  # noqa: E731
    stepper = stepper_of(model, WholeBatchLoss(frozen, lambda z: (z.square().sum(), len(z))), micro_batch=3)
    with pytest.raises(ArgumentError, match="does not depend on any trainable parameter"):
        stepper.step(make_batch(8))


def test_hooks_on_parameters_see_the_gradient_of_the_update_once():
    model, batch = make(), make_batch(8)
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, [list(range(8))])
    seen = []
    model.scale.register_hook(lambda gradient: seen.append(gradient.clone()))
    reduced(stepper_of(model, micro_batch=3), batch)
    assert len(seen) == 1
    assert torch.allclose(seen[0], expected[0], rtol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_in_the_encoder(reentrant):
    model, batch = make(dropout=0.3), make_batch(8)

    def checkpointed(model, batch):
        run = lambda x, tower: checkpoint(model, x, tower, use_reentrant=reentrant)  # noqa: E731
        text, image = batch["text"].requires_grad_(), batch["image"].requires_grad_()
        return {"pair": (run(text, "text"), run(image, "image")), "weight": batch["weight"]}

    torch.manual_seed(1)
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, parts_of(8, 3))
    loss = WholeBatchLoss(lambda m, b: checkpointed(m, {k: v.clone() for k, v in b.items()}), clip_loss(model))
    assert distance(reduced(stepper_of(model, loss, micro_batch=3), batch), expected) < 1e-12


def test_a_compiled_module_draws_the_same_in_both_passes():
    model, batch = make(dropout=0.3), make_batch(8)
    torch.manual_seed(1)
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, parts_of(8, 4))
    compiled = torch.compile(model, backend="aot_eager")
    stepper = Stepper(
        compiled, torch.optim.SGD(model.parameters(), lr=0.1), WholeBatchLoss(encode, clip_loss(model)), micro_batch=4
    )
    assert distance(reduced(stepper, batch), expected) < 1e-12


# Updates


def test_accumulated_batches_are_whole_batches_of_their_own():
    model, batches = make(), [make_batch(7, seed=1), make_batch(4, seed=2)]
    loss_sum = weight_sum = 0.0
    for batch in batches:
        loss, weight, _ = clip_loss(model)(encode(model, batch))
        loss_sum, weight_sum = loss_sum + loss, weight_sum + weight
    expected = torch.autograd.grad(loss_sum / weight_sum, list(model.parameters()))
    for total in (None, float(weight_sum)):
        stepper = stepper_of(model, micro_batch=3, lr=0.0)
        for batch in batches:
            stepper.accumulate(batch, total_weight=total)
        stepper.reduce()
        assert distance([parameter.grad for parameter in model.parameters()], expected) < 1e-12
        assert stepper.update().num_micro_batches == 3 + 2


def test_clipping_existing_gradients_and_rates_see_the_gradient_of_the_whole():
    model, batch = make(), make_batch(8)
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, [list(range(8))])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    stepper = stepper_of(model, micro_batch=3, clip_norm=0.5, existing_gradients="add", lr_rule="linear", base_size=4)
    report = stepper.step(batch)
    summed = [gradient + 1 for gradient in expected]
    norm = sum(float(one.square().sum()) for one in summed) ** 0.5
    assert report.grad_norm == pytest.approx(norm)
    factor = 0.1 * 2 * min(1.0, 0.5 / (norm + 1e-6))
    for parameter, old, gradient in zip(model.parameters(), before, summed, strict=True):
        assert torch.allclose(parameter, old - factor * gradient, rtol=1e-10)


def test_metrics_are_those_of_the_whole_batch():
    model, batch = make(), make_batch(9)
    _, weight, metrics = clip_loss(model)(encode(model, batch))
    report = stepper_of(model, micro_batch=2).step(batch)
    assert report.weight == float(weight)
    assert report.metrics == {"right": float(metrics["right"]) / float(weight)}


def test_filler_rows_are_no_negatives():
    model, batch = make(), make_batch(8)
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, [list(range(8))])
    places = [0, 1, 0, 2, 3, 4, 5, 5, 6, 7, 7, 7]
    real = [1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0]
    filled = {**cut(batch, places), "row_weight": torch.tensor(real, dtype=torch.float64)}
    for most in (12, 5, 1):
        stepper = stepper_of(model, micro_batch=most, lr=0.0)
        assert distance(reduced(stepper, filled), expected) < 1e-12
        assert stepper.update().batch_size == 8


# Weights and numbers that are none


def test_a_batch_of_weight_zero_is_left_out_of_an_update():
    model, batch = make(), make_batch(6)
    expected, _, _ = gradients_by_hand(model, clip_loss, batch, [list(range(6))])

    def mean_of_nothing(encodings):
        loss, weight, _ = clip_loss(model)(encodings)
        return loss / weight * weight.detach(), weight

    stepper = stepper_of(model, WholeBatchLoss(encode, mean_of_nothing), micro_batch=2)
    nothing = make_batch(6, seed=3)
    torch.manual_seed(1)
    stepper.accumulate({**nothing, "weight": torch.zeros(6, dtype=torch.float64)})
    stepper.accumulate(batch)
    stepper.reduce()
    assert distance([parameter.grad for parameter in model.parameters()], expected) < 1e-12


def test_encodings_that_are_no_numbers_show_in_the_gradient():
    model, batch = make(), make_batch(6)
    batch["text"][4, 0] = float("nan")
    found = reduced(stepper_of(model, micro_batch=2), batch)
    assert all(bool(gradient.isnan().any()) for gradient in found)


# What is refused


def refuse(match, encode_as, loss=None, micro_batch=2, **options):
    model = make()
    stepper = stepper_of(model, WholeBatchLoss(encode_as, loss or clip_loss(model)), micro_batch=micro_batch, **options)
    with pytest.raises(ArgumentError, match=match):
        stepper.step(make_batch(6))
    assert model.seen == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("micro_batch", [2, 6])
def test_an_encoding_without_a_row_per_example_is_refused(micro_batch):
    def with_temperature(model, batch):
        return {**encode(model, batch), "scale": model.scale.exp()}

    refuse(
        r"encodings\['scale'\] has shape \(\).*is used by the loss itself", with_temperature, micro_batch=micro_batch
    )
    refuse(r"encodings has shape \(4,\)", lambda m, b: m(b["text"], "text").mean(0), micro_batch=micro_batch)
    refuse("several views of an example", lambda m, b: m(b["text"], "text").repeat(2, 1), micro_batch=micro_batch)
    refuse(r"a float at encodings\[1\]", lambda m, b: (m(b["text"], "text"), 1.0), micro_batch=micro_batch)
    refuse("encode returned no tensor", lambda m, b: None, micro_batch=micro_batch)


def test_encodings_as_wide_as_their_micro_batch_are_refused():
    widths = iter([3, 4, 5])
    refuse("pool or pad to one width", lambda m, b: m(b["text"], "text").repeat(1, next(widths)))


def test_a_loss_that_returns_a_mean_is_refused():
    refuse("looks like a mean", encode, lambda encodings: encodings["pair"][0].mean())


def test_a_loss_of_one_number_per_example_is_refused():
    refuse("must be a tensor with one element", encode, lambda encodings: (encodings["pair"][0].sum(1), 6))


def test_random_numbers_that_are_not_put_back_are_refused():
    generator = torch.Generator().manual_seed(0)

    def noisy(model, batch):
        found = encode(model, batch)
        mask = torch.rand(found["pair"][0].shape, generator=generator, dtype=torch.float64) > 0.5
        return found | {"pair": (found["pair"][0] * mask, found["pair"][1])}

    refuse("other encodings when it ran again.*generator of its own", noisy)


def test_a_function_around_it_is_refused_once_the_batch_is_cut():
    model = make()
    whole = WholeBatchLoss(encode, clip_loss(model))
    stepper = stepper_of(model, lambda model, batch: whole(model, batch), micro_batch=3)
    with pytest.raises(ArgumentError, match=r"one of 2 micro-batches.*give Stepper the WholeBatchLoss itself"):
        stepper.step(make_batch(6))
    expected, _, _ = gradients_by_hand(model, clip_loss, make_batch(6), [list(range(6))])
    uncut = stepper_of(model, lambda model, batch: whole(model, batch))
    assert distance(reduced(uncut, make_batch(6)), expected) < 1e-12


def test_gradient_noise_is_refused():
    with pytest.raises(ArgumentError, match="measure_noise compares the gradients of parts"):
        stepper_of(make(), measure_noise=True)


def test_an_encode_that_changes_its_batch_is_refused():
    def changing(model, batch):
        batch["text"].mul_(2)
        return encode(model, batch)

    refuse("changes its micro-batch in place", changing)


def test_an_experiment_is_refused():
    stepper = stepper_of(make())
    with pytest.raises(ArgumentError, match="cannot evaluate a WholeBatchLoss in pieces"):
        measure_size(stepper, [make_batch(4) for _ in range(12)])


def test_graphs_are_refused_or_left_out_with_the_reason():
    with pytest.raises(ArgumentError, match="a WholeBatchLoss encodes every micro-batch again"):
        stepper_of(make(), graphs=True)
    stepper = stepper_of(make(), graphs="auto", micro_batch=3)
    assert not stepper.step(make_batch(6)).graphed
    assert "WholeBatchLoss" in str(stepper.graph_summary())


def test_what_is_no_function_is_refused():
    with pytest.raises(ArgumentError, match="needs loss as a function"):
        WholeBatchLoss(encode, F.normalize(torch.ones(2), dim=0))


def test_called_by_hand_it_returns_the_sums_of_its_batch():
    model, batch = make(), make_batch(6)
    loss, weight, _ = WholeBatchLoss(encode, clip_loss(model))(model, batch)
    expected, others, _ = clip_loss(model)(encode(model, batch))
    assert (loss.item(), weight.item()) == (expected.item(), others.item())


def test_rows_of_a_far_larger_tensor_do_not_keep_it_in_memory():
    large, alive = [], []

    def first_token(model, batch):
        hidden = np.zeros((len(batch["text"]), 1000, 4))
        large.append(weakref.ref(hidden))
        return model(batch["text"], "text"), torch.from_numpy(hidden)[:, 0]

    def loss(encodings):
        alive.append(sum(one() is not None for one in large))
        return (encodings[0] @ encodings[0].T).square().sum(), len(encodings[0])

    stepper_of(make(), WholeBatchLoss(first_token, loss), micro_batch=3).step(make_batch(6))
    assert alive == [0]
