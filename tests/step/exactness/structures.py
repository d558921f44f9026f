"""Batches: the same examples packed in every structure a user may hand over, and unpacked in the loss."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from .models import VOCABULARY

WIDTH = 6  # the longest example
STRUCTURES = (
    "tuple", "tensor", "dict", "nested", "namedtuple", "dataclass", "examples", "strings", "lists", "arrays", "values",
    "list", "pairs", "rows", "packed", "patches", "hook",
)  # fmt: skip


@dataclass
class Fields:
    """What a loss needs, examples first."""

    x: Tensor
    y: Tensor
    w: Tensor
    tokens: Tensor
    keep: Tensor  # 1 where a token counts

    def __len__(self):
        return len(self.y)

    def rows(self, start, stop):
        return Fields(*(value[start:stop] for value in self.values()))

    def values(self):
        return self.x, self.y, self.w, self.tokens, self.keep

    def lengths(self):
        return (self.tokens > 0).sum(1)

    def numbers(self):
        """Return the number of each example, which its target tells."""
        return [round((float(y) + 1) * 16) for y in self.y]

    def to(self, dtype):
        return Fields(self.x.to(dtype), self.y.to(dtype), self.w.to(dtype), self.tokens, self.keep)


Named = namedtuple("Named", ["x", "y", "w", "tokens", "keep"])


def make_fields(num, *, seed, first=0, zeros=False, dtype=torch.float64):
    """Return ``num`` examples; with ``zeros`` some weigh nothing, but never all of them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (num,), generator=generator)
    tokens = torch.randint(1, VOCABULARY, (num, WIDTH), generator=generator)
    tokens *= torch.arange(WIDTH) < lengths[:, None]
    keep = (torch.rand(num, WIDTH, generator=generator) < 0.6) & (tokens > 0)
    w = torch.randint(1, 9, (num,), generator=generator) / 4
    if zeros:
        none = torch.rand(num, generator=generator) < 0.5
        w[none] = 0.0
        keep[none] = False
    w[-1], keep[-1, 0] = 0.75, True
    y = (torch.arange(first, first + num) / 16 - 1).to(dtype)
    x = torch.randn(num, 3, generator=generator, dtype=torch.float64)
    return Fields(x.to(dtype), y, w.to(dtype), tokens, keep.long())


def pack(structure, fields):
    """Return the examples as the batch that a user hands to the stepper."""
    x, y, w, tokens, keep = fields.values()
    if structure == "tensor":
        return torch.cat([y[:, None], w[:, None], x, tokens.to(x), keep.to(x)], dim=1)
    if structure in ("tuple", "list"):
        return fields.values() if structure == "tuple" else list(fields.values())
    if structure == "nested":
        return {"inputs": {"x": x, "tokens": tokens}, "targets": ({"y": y, "w": w}, keep)}
    if structure == "namedtuple":
        return Named(*fields.values())
    if structure == "dataclass":
        return fields
    if structure in ("examples", "rows", "pairs"):
        return _pack_examples(structure, fields)
    batch = dict(zip(("x", "y", "w", "tokens", "keep"), fields.values(), strict=True))
    if structure == "strings":
        batch["y"] = [repr(float(value)) for value in y]
    elif structure == "lists":
        batch["more"] = {"y": y.tolist(), "w": tuple(w.tolist())}
        batch["tokens"] = [row[row > 0].tolist() for row in tokens]
        del batch["y"], batch["w"]
    elif structure == "arrays":
        batch["y"] = y.double().numpy()
        batch["more"] = {"w": w.double().numpy(), "keep": [row.numpy() for row in keep]}
        del batch["w"], batch["keep"]
    elif structure == "values":
        batch |= {"scale": 1.0, "name": "a" * len(y), "none": None, "flag": True}
    elif structure == "packed":
        batch["tokens"] = pack_sequence([row[row > 0] for row in tokens], enforce_sorted=False)
    elif structure in ("patches", "hook"):
        counts = torch.arange(len(y)) % 3 + 1
        patches = torch.zeros(int(counts.sum()), 3, dtype=x.dtype)
        patches[counts.cumsum(0) - counts] = x
        batch |= {"patches": patches, "counts": counts}
        del batch["x"]
    return batch


def _pack_examples(structure, fields):
    examples = []
    for x, y, w, tokens, keep in zip(*fields.values(), strict=True):
        if structure == "rows":
            examples.append(torch.cat([y[None], w[None], x, tokens.to(x), keep.to(x)]))
        elif structure == "pairs":
            examples.append((x[:, None].expand(3, 2).clone(), {"y": y, "w": w, "tokens": tokens, "keep": keep}))
        else:
            length = int((tokens > 0).sum())
            examples.append({"x": x, "y": y, "w": w, "tokens": tokens[:length], "keep": keep[:length]})
    return tuple(map(list, zip(*examples, strict=True))) if structure == "pairs" else examples


def collate(examples):
    """Pad the tokens of some examples to the longest of them."""
    width = max(len(example["tokens"]) for example in examples)
    batch = {name: torch.stack([example[name] for example in examples]) for name in ("x", "y", "w")}
    for name in ("tokens", "keep"):
        rows = [torch.nn.functional.pad(example[name], (0, width - len(example[name]))) for example in examples]
        batch[name] = torch.stack(rows)
    return batch


def trim(batch):
    """Cut the padding off a micro-batch of the structure ``dict``."""
    width = int((batch["tokens"] > 0).sum(1).max())
    return batch | {name: batch[name][:, :width] for name in ("tokens", "keep")}


def split_patches(batch, indices):
    """Return the examples at some places of the structure ``hook``, whose examples have one to three patches each."""
    counts = batch["counts"]
    if indices is None:
        return len(counts)
    places = list(indices)
    part = {name: value[places] for name, value in batch.items() if name != "patches"}
    part["patches"] = torch.cat([batch["patches"].split(counts.tolist())[place] for place in places])
    return part


def unpack(structure, batch, dtype=torch.float64):
    """Return the fields of a batch or micro-batch, as a user's loss would read them."""
    if structure == "examples":
        batch = collate(batch) if isinstance(batch, list) else batch
        return Fields(**batch)
    if structure in ("tensor", "rows"):
        table = batch if structure == "tensor" else torch.stack(list(batch))
        y, w, x = table[:, 0], table[:, 1], table[:, 2:5]
        return Fields(x, y, w, table[:, 5 : 5 + WIDTH].long(), table[:, 5 + WIDTH :].long())
    if structure in ("tuple", "list", "namedtuple"):
        return Fields(*batch)
    if structure == "dataclass":
        return batch
    if structure == "nested":
        values, keep = batch["targets"]
        return Fields(**batch["inputs"], **values, keep=keep)
    if structure == "pairs":
        images, targets = batch
        both = list(zip(images, targets, strict=False))  # as most loops over two lists are written
        rest = {name: torch.stack([target[name] for _, target in both]) for name in ("y", "w", "tokens", "keep")}
        return Fields(x=torch.stack([image[:, 0] for image, _ in both]), **rest)
    return _unpack_dict(structure, dict(batch), dtype)


def _unpack_dict(structure, batch, dtype):
    num = len(batch["x"]) if "x" in batch else len(batch["y"])
    if structure == "strings":
        batch["y"] = torch.tensor([float(text) for text, _ in zip(batch["y"], batch["x"], strict=False)], dtype=dtype)
    elif structure == "lists":
        more = batch.pop("more")
        batch |= {name: torch.tensor(list(more[name][:num]), dtype=dtype) for name in ("y", "w")}
        batch["tokens"] = torch.tensor([row + [0] * (WIDTH - len(row)) for row in batch["tokens"][:num]])
    elif structure == "arrays":
        more = batch.pop("more")
        batch["y"] = torch.as_tensor(np.asarray(batch["y"])[:num]).to(dtype)
        batch["w"] = torch.as_tensor(np.asarray(more["w"])[:num]).to(dtype)
        batch["keep"] = torch.as_tensor(np.stack(more["keep"][:num]))
    elif structure == "values":
        for name in ("scale", "name", "none", "flag"):
            batch.pop(name)
    elif structure == "packed":
        batch["tokens"], _ = pad_packed_sequence(batch["tokens"], batch_first=True, total_length=WIDTH)
    elif structure in ("patches", "hook"):
        counts = batch.pop("counts")
        owners = torch.arange(len(counts)).repeat_interleave(counts)
        patches = batch.pop("patches")
        batch["x"] = torch.zeros(len(counts), 3, dtype=patches.dtype).index_add(0, owners, patches)
    return Fields(**batch)
