"""Small models with vectors, their batches, and the gradients of single examples one by one."""

import torch
from torch import nn

from batchwright.step import Stepper

VOCABULARY, WIDTH = 17, 12


class Attention(nn.Module):
    """A pre-norm block with causal attention, written out."""

    def __init__(self, make_norm):
        super().__init__()
        self.first, self.second = make_norm(), make_norm()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    def __init__(self, make_norm=lambda: nn.LayerNorm(WIDTH), wrap=lambda block, x: block(x)):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Attention(make_norm) for _ in range(2))
        self.norm, self.head = make_norm(), nn.Linear(WIDTH, VOCABULARY)
        self.wrap = wrap

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.wrap(block, x)
        return self.head(self.norm(x))


class OwnRms(nn.Module):
    """A norm as transformers write it, of a class that nobody knows."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def conv_net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3),
        nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5),
    )  # fmt: skip


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))


def spread_out(model):
    """Give norms other weights than 1 and 0, so that a mistake in either is seen."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens_of(num, length=7, seed=1):
    """Return rows of tokens whose padding, -100 in the labels, differs from row to row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (num, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row, keep in enumerate(torch.randint(1, length + 1, (num,), generator=generator).tolist()):
        labels[row, keep:] = -100
    return tokens[:, :-1].contiguous(), labels


def rows_of(num, width=6):
    """Return rows of numbers and their classes."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num, width, generator=generator), torch.randint(0, 5, (num,), generator=generator)


def images_of(num, width=6):
    """Return square images and their classes."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num, 3, width, width, generator=generator), torch.randint(0, 5, (num,), generator=generator)


def token_loss(model, batch):
    tokens, labels = batch
    output = model(tokens)
    logits = getattr(output, "logits", output)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return loss, (labels >= 0).sum()


def class_loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y, reduction="sum"), len(x)


def make_stepper(model, loss_fn, lr=0.0, **options):
    options = {"measure_noise": True, "noise_from": "vectors", **options}
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=lr), loss_fn, **options)


def exact_noise(model, loss_fn, batch, names):
    """Return S and G2 of some parameters from the gradients of single examples, each from a pass of its own.

    The gradient of an update is that of loss / W; that of an example is B times its share of it.
    """
    parameters = [dict(model.named_parameters())[name] for name in names]
    num = len(batch[0])
    _, weight = loss_fn(model, batch)
    rows = []
    for row in range(num):
        loss, _ = loss_fn(model, tuple(field[row : row + 1] for field in batch))
        found = torch.autograd.grad(loss * num / float(weight), parameters, allow_unused=True)
        rows.append(torch.cat([one.flatten().double() for one in found if one is not None]))
    rows = torch.stack(rows)
    mean = rows.mean(0)
    s = float((rows - mean).square().sum() / (num - 1))
    return s, float(mean.square().sum()) - s / num


def measured(stepper, batch, num_steps=3):
    """Return S and G2 of the vectors alone and their names; the third update has measured nothing but vectors."""
    reports = [stepper.step(batch) for _ in range(num_steps)]
    assert all(report.noise is not None for report in reports)
    vectors = stepper.state_dict()["vectors"]
    return (vectors["average"]["s"], vectors["average"]["g2"]), vectors["names"], reports
