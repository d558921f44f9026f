"""Architectures for graphed steps: tiny, built from configs, with padded batches of any planned shape.

Every loss is a sum with its weight, and counts no filler: sequence models ignore the labels of filler rows, all others
multiply with ``row_weight``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

VOCABULARY = 23
IGNORED = -100
ROW_WEIGHT = "row_weight"
_SIDES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@dataclass(frozen=True)
class Architecture:
    """A model, its loss, and a maker of its batches.

    Attributes:
        make: returns a model in training mode, with the same values every time.
        loss_fn: returns ``(loss_sum, weight)``.
        make_batch: ``make_batch(shape, seed=)`` returns tensors of exactly that shape, whose rows have other lengths.
        shapes: planned shapes, ``(rows, length per axis)``; no batch of one has the tensors of another.
        unplanned: a shape that is not planned, but fits the model.
    """

    name: str
    make: Callable[[], nn.Module]
    loss_fn: Callable
    make_batch: Callable
    shapes: tuple[tuple[int, ...], ...]
    unplanned: tuple[int, ...]

    def __str__(self):
        return self.name


def seeded(make, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().train()


def from_config(model, config, **options):
    """Return a model of transformers that computes the same in float32 and float64: attention written out."""
    transformers = pytest.importorskip("transformers")
    settings = getattr(transformers, config)(**options)
    settings._attn_implementation = "eager"
    return seeded(lambda: getattr(transformers, model)(settings))


def tokens(shape, seed):
    """Return ids and a mask; rows have random lengths, and the first one is full."""
    rows, width = shape
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(1, width // 2), width + 1, (rows, 1), generator=generator)
    lengths[0] = width
    mask = (torch.arange(width) < lengths).long()
    ids = torch.randint(3, VOCABULARY, (rows, width), generator=generator) * mask
    return ids, mask


def token_loss(logits, labels):
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    return loss, (labels != IGNORED).sum()


def row_loss(logits, batch):
    weight = batch[ROW_WEIGHT].to(logits.dtype)
    return (F.cross_entropy(logits, batch["labels"].clamp(min=0), reduction="none") * weight).sum(), weight.sum()


# Sequence to sequence: planned by (rows, source, target)


def make_m2m100(layerdrop=0.0, dropout=0.0):
    return from_config(
        "M2M100ForConditionalGeneration", "M2M100Config",
        vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, dropout=dropout,
        attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=layerdrop, decoder_layerdrop=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, use_cache=False,
    )  # fmt: skip


def make_t5():
    return from_config(
        "T5ForConditionalGeneration", "T5Config",
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip


def pairs(shape, seed=0):
    rows, source, target = shape
    ids, mask = tokens((rows, source), seed)
    answer, real = tokens((rows, target), seed + 1000)
    start = torch.full((rows, 1), 2)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": torch.cat([start, answer[:, :-1]], dim=1),
        "labels": answer.masked_fill(real == 0, IGNORED),
    }


def pair_loss(model, batch):
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return token_loss(model(**{name: batch[name] for name in names}).logits, batch["labels"])


# Decoder and encoder: planned by (rows, length)


def make_llama(dropout=0.0):
    return from_config(
        "LlamaForCausalLM", "LlamaConfig", **_SIDES,
        vocab_size=VOCABULARY, max_position_embeddings=64, attention_dropout=dropout, use_cache=False,
    )  # fmt: skip


def texts(shape, seed=0):
    ids, mask = tokens(shape, seed)
    labels = torch.cat([ids[:, 1:], torch.zeros(len(ids), 1).long()], dim=1)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(labels == 0, IGNORED)}


def text_loss(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return token_loss(logits, batch["labels"])


def make_bert():
    return from_config(
        "BertForSequenceClassification", "BertConfig", **_SIDES,
        vocab_size=VOCABULARY, max_position_embeddings=64, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def sentences(shape, seed=0):
    ids, mask = tokens(shape, seed)
    return {"input_ids": ids, "attention_mask": mask, **classes(len(ids), seed)}


def classes(rows, seed, num=3):
    generator = torch.Generator().manual_seed(seed + 2000)
    return {"labels": torch.randint(0, num, (rows,), generator=generator), ROW_WEIGHT: torch.ones(rows)}


def sentence_loss(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return row_loss(logits, batch)


# Vision: planned by (rows, height, width)


class Pictures(nn.Module):
    """Convolutions with group norm, and a mean over the pixels that are no padding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1, bias=False)  # the norm takes a bias away again
        self.norm = nn.GroupNorm(2, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, pixels, mask):
        mask = mask[:, None].to(pixels.dtype)
        hidden = F.gelu(self.norm(self.first(pixels)))
        hidden = F.gelu(self.second(hidden)) * mask
        return self.head(hidden.sum(dim=(2, 3)) / mask.sum(dim=(2, 3)))


def pictures(shape, seed=0):
    rows, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, min(height, width) + 1, (rows, 2, 1), generator=generator)
    mask = (torch.arange(height) < sizes[:, 0])[:, :, None] & (torch.arange(width) < sizes[:, 1])[:, None, :]
    pixels = torch.randn(rows, 2, height, width, generator=generator) * mask[:, None]
    return {"pixels": pixels, "mask": mask, **classes(rows, seed)}


def picture_loss(model, batch):
    return row_loss(model(batch["pixels"], batch["mask"]), batch)


def make_vit():
    return from_config(
        "ViTForImageClassification", "ViTConfig", **_SIDES,
        image_size=8, patch_size=4, num_channels=2, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def vit_loss(model, batch):
    return row_loss(model(pixel_values=batch["pixels"]).logits, batch)


# Speech: planned by (rows, samples)


def make_wav2vec2(mask_time_prob=0.0, layerdrop=0.0):
    return from_config(
        "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **_SIDES,
        conv_dim=(8, 8), conv_kernel=(4, 4), conv_stride=(2, 2), num_feat_extract_layers=2, feat_extract_norm="group",
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, activation_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=layerdrop,
        mask_time_prob=mask_time_prob, mask_time_length=2, mask_time_min_masks=1, mask_feature_prob=0.0,
        classifier_proj_size=8, num_labels=3, do_stable_layer_norm=False,
    )  # fmt: skip


def sounds(shape, seed=0):
    rows, samples = shape
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(samples // 2, samples + 1, (rows, 1), generator=generator)
    mask = (torch.arange(samples) < lengths).long()
    waves = torch.randn(rows, samples, generator=generator) * mask
    return {"input_values": waves, "attention_mask": mask, **classes(rows, seed)}


def sound_loss(model, batch):
    logits = model(input_values=batch["input_values"], attention_mask=batch["attention_mask"]).logits
    return row_loss(logits, batch)


# MLP: planned by (rows, features)


def make_mlp():
    return seeded(lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))


def tables(shape, seed=0):
    """Return rows of features; a plan of them has one length, the number of features."""
    rows, features = shape
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, features, generator=generator), **classes(rows, seed)}


def table_loss(model, batch):
    return row_loss(model(batch["x"]), batch)


ARCHITECTURES = (
    Architecture("m2m100", make_m2m100, pair_loss, pairs, ((4, 12, 9), (6, 7, 5)), (3, 8, 6)),
    Architecture("t5", make_t5, pair_loss, pairs, ((4, 12, 9), (6, 7, 5)), (3, 8, 6)),
    Architecture("llama", make_llama, text_loss, texts, ((4, 13), (6, 7)), (3, 9)),
    Architecture("bert", make_bert, sentence_loss, sentences, ((4, 13), (6, 7)), (3, 9)),
    Architecture("pictures", partial(seeded, Pictures), picture_loss, pictures,
                 ((4, 9, 7), (6, 5, 8)), (3, 10, 4)),
    Architecture("vit", make_vit, vit_loss, pictures, ((4, 8, 8), (6, 8, 8)), (3, 8, 8)),
    Architecture("wav2vec2", make_wav2vec2, sound_loss, sounds, ((4, 60), (6, 41)), (3, 50)),
    Architecture("mlp", make_mlp, table_loss, tables, ((4, 6), (8, 6)), (3, 6)),
)  # fmt: skip
BY_NAME = {one.name: one for one in ARCHITECTURES}


class _Wide(TorchFunctionMode):
    """Whoever asks for float32 gets float64: Llama and T5 take norms and softmax in float32, whatever they are in."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {name: torch.float64 if one is torch.float32 else one for name, one in (kwargs or {}).items()}
        return function(*args, **kwargs)


def wide(loss_fn):
    """Return a loss that is computed in float64 from end to end."""

    def wide_loss(model, batch):
        with _Wide():
            return loss_fn(model, batch)

    return wide_loss


def to(batch, device, dtype=None):
    """Return a batch on a device, its floats of a type; ``row_weight`` keeps its own."""
    return {
        name: value.to(device, dtype if value.is_floating_point() and name != ROW_WEIGHT else value.dtype)
        for name, value in batch.items()
    }


def rows_of(batch, num):
    """Return the first rows of a batch, as wide as they were."""
    return {name: value[:num] for name, value in batch.items()}


def filled(batch, num_real):
    """Return a batch whose rows after ``num_real`` are filler: copies of the first row without labels and weight."""
    rows = len(batch["labels"])
    place = torch.arange(rows, device=batch["labels"].device)
    is_filler = place >= num_real
    copied = {name: value[torch.where(is_filler, 0, place)] for name, value in batch.items()}
    copied["labels"] = copied["labels"].clone()
    copied["labels"][is_filler] = IGNORED
    copied[ROW_WEIGHT] = (~is_filler).to(torch.float32)
    return copied
