"""What only a GPU can show of losses over the whole batch: its random state, real lack of memory, half precision."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batchwright.step import Stepper, WholeBatchLoss

from .models import TwoTowers, distance, encode, make_batch

pytestmark = pytest.mark.needs_cuda


def contrast(encodings):
    """Return the loss of CLIP."""
    wide = (each.float() if each.dtype.itemsize == 2 else each for each in encodings["pair"])
    texts, images = (F.normalize(each, dim=-1) for each in wide)
    scores, places = 4 * texts @ images.T, torch.arange(len(texts), device=texts.device)
    each = F.cross_entropy(scores, places, reduction="none") + F.cross_entropy(scores.T, places, reduction="none")
    return (each * encodings["weight"]).sum(), encodings["weight"].sum()


def make(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return TwoTowers(**options).to("cuda", dtype)


def on_device(num, dtype=torch.float64):
    return {name: value.cuda() for name, value in make_batch(num, seed=num, dtype=dtype).items()}


def reduced(model, batch, **options):
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), WholeBatchLoss(encode, contrast), **options)
    torch.manual_seed(1)
    stepper.accumulate(batch)
    stepper.reduce()
    return [None if one.grad is None else one.grad.clone() for one in stepper._trained.parameters]


@pytest.mark.parametrize("num", [7, 12])
@pytest.mark.parametrize("most", [1, 3, 5])
def test_any_split_gives_the_gradient_of_the_unsplit_batch(num, most):
    model, batch = make(), on_device(num)
    twin = copy.deepcopy(model)
    loss, weight = contrast(encode(twin, batch))
    (loss / weight).backward()
    expected = [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]
    found = reduced(model, batch, micro_batch=most)
    assert distance([one for one in found if one is not None and one.any()], expected) < 1e-10


def test_both_passes_draw_the_same_masks_on_the_device():
    """By hand: encode in parts from one random state, join, run back; a mask that is drawn twice gives another one."""
    model, batch = make(dropout=0.4), on_device(12)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    pieces = [encode(twin, {name: value[start : start + 3] for name, value in batch.items()}) for start in (0, 3, 6, 9)]
    pair = tuple(torch.cat([piece["pair"][side] for piece in pieces]) for side in (0, 1))
    loss, weight = contrast({"pair": pair, "weight": batch["weight"]})
    (loss / weight).backward()
    draw = torch.rand((), device="cuda")
    found = reduced(model, batch, micro_batch=3)
    assert torch.equal(torch.rand((), device="cuda"), draw), "the random state afterwards is that of one pass"
    expected = [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]
    assert distance([one for one in found if one is not None and one.any()], expected) < 1e-10
    assert model.seen == 2 * 12


def test_half_precision_under_autocast_is_that_of_the_unsplit_batch():
    batch = on_device(12, torch.float32)
    whole, cut = (reduced(make(torch.float32), batch, micro_batch=most, autocast=torch.bfloat16) for most in (12, 5))
    used = [(mine, other) for mine, other in zip(cut, whole, strict=True) if other is not None and other.any()]
    assert distance(*map(list, zip(*used, strict=True))) < 0.05


class Wide(nn.Module):
    """64 MiB of activations for every 1,024 examples and layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 16_384), nn.Linear(16_384, 64)])

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


def test_a_batch_that_is_really_too_large_is_cut_and_gives_the_same_update():
    def encode_wide(model, batch):
        return {"pair": (model(batch["text"]), model(batch["image"])), "weight": batch["weight"]}

    torch.manual_seed(0)
    model = Wide().cuda()
    twin = copy.deepcopy(model)
    batch = {name: torch.randn(2048, 64, device="cuda") for name in ("text", "image")}
    batch["weight"] = torch.ones(2048, device="cuda")
    reports = []
    for each, has_room in ((twin, True), (model, False)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        stepper = Stepper(each, optimizer, WholeBatchLoss(encode_wide, contrast))
        gc.collect()
        torch.cuda.empty_cache()
        # Two towers keep 2 x 128 MiB for the whole batch, besides scores of 2,048 x 2,048 and gradients.
        room = torch.cuda.memory_reserved() + 320 * 2**20
        share = 1.0 if has_room else room / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(share)
        try:
            reports.append(stepper.step(batch))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    roomy, full = reports
    assert (roomy.ooms, roomy.num_micro_batches) == (0, 1)
    assert full.ooms >= 1
    assert full.num_micro_batches > 1
    assert full.loss == pytest.approx(roomy.loss, rel=1e-4)
    assert distance([one.detach() for one in model.parameters()], [one.detach() for one in twin.parameters()]) < 1e-4
