"""Models, losses and the truth for losses that need the whole batch."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class TwoTowers(nn.Module):
    """Two towers that share a layer, dropout, BatchNorm, a buffer that counts examples, and a temperature."""

    def __init__(self, *, dropout=0.0, norm=False):
        super().__init__()
        self.shared = nn.Linear(5, 8)
        self.text, self.image = nn.Linear(8, 4), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x, tower):
        self.seen += len(x)
        return getattr(self, tower)(self.dropout(torch.tanh(self.norm(self.shared(x)))))


def encode(model, batch):
    return {"pair": (model(batch["text"], "text"), model(batch["image"], "image")), "weight": batch["weight"]}


def clip_loss(model):
    """Return the loss of CLIP, with weights of the examples, and a metric."""

    def loss(encodings):
        (texts, images), weight = encodings["pair"], encodings["weight"]
        scores = F.normalize(texts.float() if texts.dtype == torch.bfloat16 else texts, dim=-1) @ images.T.to(
            torch.promote_types(images.dtype, torch.float32)
        )
        scores = scores * model.scale.exp()
        places = torch.arange(len(scores))
        each = F.cross_entropy(scores, places, reduction="none") + F.cross_entropy(scores.T, places, reduction="none")
        # The place in the batch counts, so that a loss in another order is another one.
        return (each * weight * (1 + places)).sum(), weight.sum(), {"right": (scores.argmax(1) == places).sum()}

    return loss


def barlow_loss(model):
    """Return a loss of statistics over the batch: the cross-correlation of two views."""

    def loss(encodings):
        first, second = ((z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-2).sqrt() for z in encodings["pair"])
        num = len(first)
        correlation = first.T @ second / num
        eye = torch.eye(correlation.shape[0], dtype=correlation.dtype)
        return num * (correlation - eye).square().sum() * model.scale, num

    return loss


LOSSES = {"clip": clip_loss, "barlow": barlow_loss}


def make_batch(num, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    text, image = (torch.randn(num, 5, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    weight = torch.randint(1, 4, (num,), generator=generator).to(dtype)
    return {"text": text, "image": image, "weight": weight}


def cut(batch, part):
    return {name: value[part] for name, value in batch.items()}


def joined(pieces, parts):
    """Return the encodings of all pieces, with a graph, in the order of the batch."""
    order = torch.tensor([place for part in parts for place in part]).argsort()
    columns = zip(*[(*piece["pair"], piece["weight"]) for piece in pieces], strict=True)
    texts, images, weight = (torch.cat(column)[order] for column in columns)
    return {"pair": (texts, images), "weight": weight}


def gradients_by_hand(model, loss_of, batch, parts, *, encode=encode):
    """Return gradients by one backward pass through everything, and a copy of the model as the forward pass left it.

    The parts are encoded one after the other, with a graph, from the random state of now on.
    """
    twin = copy.deepcopy(model)
    pieces = [encode(twin, cut(batch, part)) for part in parts]
    loss, weight, *_ = loss_of(twin)(joined(pieces, parts))
    (loss / weight).backward()
    return [parameter.grad for parameter in twin.parameters()], twin, float(loss.detach() / weight)


def distance(found, expected):
    """Return the largest difference of two lists of gradients, as a share of the largest one."""
    assert [one is None for one in found] == [one is None for one in expected]
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True) if b is not None]
    size = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / size
