"""Seven architectures by shape: encoders, decoders, both, images and speech; random weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import transformers as t
from _pairs import FIRST_TOKEN, IntArray
from torch import Tensor

Shape = tuple[int, ...]
Inputs = dict[str, Any]

PATCH, SAMPLES_PER_SECOND, NUM_LETTERS = 16, 16_000, 20


@final
@dataclass(frozen=True)
class Architecture:
    """A model, and the inputs of a batch of a given shape.

    Args:
        name: for the table.
        kind: what a shape counts.
        make: the model; small for a trial on the CPU.
        inputs: of a shape, on a device, with labels.
        lengths: spread over what the data would have, ``(N, axes)``; small for a trial.
        snap: the nearest length that exists.
    """

    name: str
    kind: str
    make: Callable[[bool], Any]
    inputs: Callable[[Shape, str], Inputs]
    lengths: Callable[[bool], IntArray]
    snap: Callable[[int], int] = lambda length: length

    @property
    def is_text(self) -> bool:
        return "tokens" in self.kind


def make_text(shape: Shape, device: str) -> Inputs:
    """Return token ids, a mask of rows that end one token earlier, and labels."""
    ids = _random(FIRST_TOKEN, 200, shape[:2], device)
    mask = torch.ones_like(ids)
    mask[1:, -1] = 0  # without padding some attention kernels take less memory
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": _random(FIRST_TOKEN, 200, (shape[0], shape[-1]), device),
    }


def make_images(shape: Shape, device: str) -> Inputs:
    """Return square images with this many patches, and a class for each."""
    num, patches = shape
    side = PATCH * math.isqrt(patches)
    pixels = torch.rand((num, 3, side, side), device=device)
    return {"pixel_values": pixels, "labels": _random(0, 2, (num,), device), "interpolate_pos_encoding": True}


def make_speech(shape: Shape, device: str) -> Inputs:
    """Return this many samples of sound, a mask of rows that end a little earlier, and a text for each."""
    num, samples = shape
    mask = torch.ones((num, samples), dtype=torch.long, device=device)
    mask[1:, -400:] = 0
    letters = _random(1, 30, (num, NUM_LETTERS), device)
    return {"input_values": torch.rand((num, samples), device=device), "attention_mask": mask, "labels": letters}


def nearest_square(patches: int) -> int:
    return max(1, round(math.sqrt(patches))) ** 2


def _random(low: int, high: int, size: tuple[int, ...], device: str) -> Tensor:
    return torch.randint(low, high, size, device=device)


def _text_lengths(small: bool, *, num_axes: int = 1) -> IntArray:
    spread = np.geomspace(4, 48, 9) if small else np.geomspace(24, 512, 9)
    return np.tile(spread.astype(np.int64)[:, None], num_axes)


def _pair_lengths(small: bool) -> IntArray:
    return _text_lengths(small, num_axes=2)


def _image_lengths(small: bool) -> IntArray:
    sides = np.arange(2, 7) if small else np.arange(7, 33)
    return (sides**2)[:, None]


def _speech_lengths(small: bool) -> IntArray:
    seconds = np.linspace(0.6, 2, 8) if small else np.geomspace(1, 30, 12)
    return (SAMPLES_PER_SECOND * seconds).astype(np.int64)[:, None]


def _bert(small: bool) -> Any:
    width, layers = (32, 1) if small else (1024, 24)
    return t.BertForMaskedLM(
        t.BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 16 if small else 16,
            intermediate_size=4 * width, vocab_size=500 if small else 30_522, attn_implementation="eager",
        )
    )  # fmt: skip


def _llama(small: bool) -> Any:
    width, layers, heads = (32, 1, 4) if small else (2048, 16, 32)
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads // 4,
            intermediate_size=4 * width, vocab_size=500 if small else 32_000,
        )
    )  # fmt: skip


def _gpt2(small: bool) -> Any:
    width, layers, heads = (32, 1, 2) if small else (1024, 24, 16)
    vocabulary = 500 if small else 50_257
    ends = {"bos_token_id": 1, "eos_token_id": 1} if small else {}
    return t.GPT2LMHeadModel(
        t.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocabulary, **ends)
    )  # fmt: skip


def _t5(small: bool) -> Any:
    width, layers, heads = (32, 1, 2) if small else (768, 12, 12)
    return t.T5ForConditionalGeneration(
        t.T5Config(
            d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=layers, num_heads=heads,
            vocab_size=500 if small else 32_128, decoder_start_token_id=0,
        )
    )  # fmt: skip


def _nllb(small: bool) -> Any:
    width, layers, heads = (32, 1, 2) if small else (1024, 12, 16)
    return t.M2M100ForConditionalGeneration(
        t.M2M100Config(
            d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width, encoder_attention_heads=heads, decoder_attention_heads=heads,
            vocab_size=2_000 if small else 256_206,
            # Layers that are dropped at random would make memory a matter of chance; NLLB has none.
            encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        )
    )  # fmt: skip


def _vit(small: bool) -> Any:
    width, layers, heads = (32, 1, 2) if small else (1024, 24, 16)
    return t.ViTForImageClassification(
        t.ViTConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
            image_size=64 if small else 224, patch_size=PATCH,
        )
    )  # fmt: skip


def _wav2vec2(small: bool) -> Any:
    width, layers, heads, channels = (32, 1, 2, 16) if small else (768, 12, 12, 512)
    return t.Wav2Vec2ForCTC(
        t.Wav2Vec2Config(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
            conv_dim=(channels,) * 7, num_conv_pos_embedding_groups=16, vocab_size=32, layerdrop=0.0,
            ctc_zero_infinity=True,
        )
    )  # fmt: skip


ARCHITECTURES = (
    Architecture("BERT-large, eager attention", "tokens", _bert, make_text, _text_lengths),
    Architecture("Llama 1B", "tokens", _llama, make_text, _text_lengths),
    Architecture("GPT-2 medium", "tokens", _gpt2, make_text, _text_lengths),
    Architecture("T5-base", "source and target tokens", _t5, make_text, _pair_lengths),
    Architecture("NLLB-600M shape", "source and target tokens", _nllb, make_text, _pair_lengths),
    Architecture("ViT-large", "patches of an image", _vit, make_images, _image_lengths, nearest_square),
    Architecture("Wav2Vec2-base", "samples of sound", _wav2vec2, make_speech, _speech_lengths),
)
