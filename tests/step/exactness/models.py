"""What is trained: small models of every kind, the parameters outside them, and the loss of each example."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 7
MODELS = (
    "mlp", "shared", "tied", "frozen", "frozen_in_optimizer", "temperature", "loss_module", "unfrozen", "added_group",
    "frozen_later", "buffers", "dropout", "checkpoint", "penalty", "sparse", "sparse_only", "complex", "unused", "part",
)  # fmt: skip


class Plain(nn.Module):
    def __init__(self, *, bias=True, dropout=0.0, unused=False, twice=False):
        super().__init__()
        self.first = nn.Linear(3, 3 if twice else 4, bias=bias)
        self.second = nn.Linear(self.first.out_features, 1, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.twice = twice
        if unused:
            self.never = nn.Parameter(torch.ones(2))

    def forward(self, x, tokens):
        hidden = torch.tanh(self.first(x))
        if self.twice:
            hidden = torch.tanh(self.first(hidden))
        return self.second(self.dropout(hidden))[:, 0]


class Checkpointed(Plain):
    """Runs its first layer and dropout again in backward, with the same random numbers."""

    def forward(self, x, tokens):
        hidden = checkpoint(lambda value: self.dropout(torch.tanh(self.first(value))), x, use_reentrant=False)
        return self.second(hidden)[:, 0]


class Counting(Plain):
    """Buffers that forward changes in place, and one that it replaces; none enters the loss."""

    def __init__(self, *, bias=True):
        super().__init__(bias=bias, dropout=0.3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x, tokens):
        self.seen += len(x)
        self.calls = self.calls + 1
        self.average.lerp_(x.detach().mean(0).to(self.average), 0.1)
        return super().forward(x, tokens)


class Tied(nn.Module):
    """One table reads and writes tokens."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 4)
        self.body = nn.Linear(4, 4, bias=False)

    def forward(self, x, tokens):
        return torch.tanh(self.body(self.table(tokens))) @ self.table.weight.T


class Sparse(nn.Module):
    def __init__(self, *, head=True):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 4, sparse=True)
        self.head = nn.Linear(4, 1) if head else None

    def forward(self, x, tokens):
        rows = (torch.tanh(self.table(tokens)) * (tokens > 0)[..., None]).sum(1)
        return rows.sum(1) if self.head is None else self.head(rows)[:, 0]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(2, dtype=torch.float64))

    def forward(self, x, tokens):
        return ((x.to(self.weight.dtype) @ self.weight).abs().square() * self.scale).sum(1)


class Setup:
    """A model, the parameters outside it, and what the optimizer is given; a deep copy is a twin of all of it."""

    def __init__(self, kind, *, dtype=torch.float64, seed=0, bias=True):
        torch.manual_seed(seed)
        self.kind = kind
        self.model = self._make_model(bias)
        self.outside = nn.Module()
        if kind == "temperature":
            self.outside.temperature = nn.Parameter(torch.tensor([0.3]))
        elif kind == "loss_module":
            self.outside.head = nn.Linear(1, 1)
        if kind != "complex":
            self.model, self.outside = self.model.to(dtype), self.outside.to(dtype)
        if kind in ("frozen", "frozen_in_optimizer", "unfrozen", "added_group"):
            self.model.first.requires_grad_(False)

    def _make_model(self, bias):
        kind = self.kind
        if kind == "tied":
            return Tied()
        if kind in ("sparse", "sparse_only"):
            return Sparse(head=kind == "sparse")
        if kind == "complex":
            return Complex()
        if kind == "buffers":
            return Counting(bias=bias)
        if kind == "checkpoint":
            return Checkpointed(bias=bias, dropout=0.4)
        dropout = 0.4 if kind == "dropout" else 0.0
        return Plain(bias=bias, dropout=dropout, unused=kind == "unused", twice=kind == "shared")

    def parameters(self):
        """Return every parameter there is, in a fixed order."""
        return [*self.model.parameters(), *self.outside.parameters()]

    def for_optimizer(self):
        """Return what the optimizer is given when it is made."""
        if self.kind in ("frozen", "added_group", "part"):
            return list(self.model.second.parameters())
        return self.parameters()

    def before_update(self, number, optimizer):
        """Do what a user does between updates: freeze or unfreeze a layer, hand the optimizer one more."""
        if number == 1 and self.kind == "frozen_later":
            self.model.first.requires_grad_(False)
        if number == 1 and self.kind in ("unfrozen", "added_group"):
            self.model.first.requires_grad_(True)
            if self.kind == "added_group":
                optimizer.add_param_group({"params": list(self.model.first.parameters())})

    @property
    def is_random(self):
        """Return whether the gradient depends on the split through the random numbers that forward draws."""
        return self.kind in ("dropout", "buffers", "checkpoint")

    def losses(self, model, fields):
        """Return the loss of every example and its number of tokens, ``(B,)`` each."""
        if self.kind == "penalty" and not fields.x.requires_grad:
            fields.x = fields.x.detach().clone().requires_grad_()
        predicted = model(fields.x, fields.tokens)
        if self.kind == "tied":
            each = F.cross_entropy(predicted.transpose(1, 2), fields.tokens, reduction="none")
            keep = fields.keep.to(each)
            return (each * keep).sum(1), keep.sum(1)
        if self.kind == "temperature":
            predicted = predicted * self.outside.temperature.exp()
        elif self.kind == "loss_module":
            predicted = self.outside.head(predicted[:, None])[:, 0]
        elif self.kind == "penalty":  # the slope enters the loss, so backward goes through a backward
            (slope,) = torch.autograd.grad(predicted.sum(), fields.x, create_graph=True)
            return (predicted - fields.y).square() + slope.square().sum(1), torch.ones_like(fields.y)
        return (predicted - fields.y).square(), torch.ones_like(fields.y)

    def copy(self):
        """Return a twin without gradients."""
        twin = copy.deepcopy(self)
        for parameter in twin.parameters():
            parameter.grad = None
        return twin

    def double(self):
        """Return a twin in double precision."""
        twin = self.copy()
        if self.kind != "complex":
            twin.model, twin.outside = twin.model.double(), twin.outside.double()
        return twin
