"""The models, the loss that every arm computes in the same way, and the validation loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corpus import END, IGNORED, PAD, START, Batch, Made


def make_model(task: str, vocabulary: int, device: str, *, seed: int, small: bool) -> Any:
    """Return a model from its configuration, with the weights of a seed."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = _translator(vocabulary, small) if task == "translation" else _decoder(vocabulary, small)
    return model.train()


def _translator(vocabulary: int, small: bool) -> Any:
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    layers, width, heads = (1, 16, 2) if small else (6, 512, 8)
    config = M2M100Config(
        vocab_size=vocabulary, d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, encoder_attention_heads=heads,
        decoder_attention_heads=heads, dropout=0.1, attention_dropout=0.1, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0, use_cache=False,
    )  # fmt: skip
    return M2M100ForConditionalGeneration(config)


def _decoder(vocabulary: int, small: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, width, heads = (1, 16, 2) if small else (12, 768, 12)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=1024, pad_token_id=PAD,
        bos_token_id=START, eos_token_id=END, use_cache=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    """Return the summed cross-entropy of the labels that count."""
    labels = batch["labels"]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if _is_translator(model):
        before = F.pad(labels[:, :-1], (1, 0), value=END)
        inputs["decoder_input_ids"] = before.masked_fill(before == IGNORED, PAD)
    else:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    logits = model(**inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def sums(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return what ``Stepper`` asks for: the summed loss and how many labels it sums over. Filler rows have none."""
    device = next(model.parameters()).device
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    labels = batch["labels"] if _is_translator(model) else batch["labels"][:, 1:]
    return loss_sum(model, batch), (labels != IGNORED).sum().float()


def _is_translator(model: nn.Module) -> bool:
    return bool(model.config.is_encoder_decoder)  # type: ignore[union-attr]


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Sequence[Made], device: str) -> float:
    """Return the loss per label of held-out texts."""
    model.eval()
    total = torch.zeros((), device=device, dtype=torch.float64)
    for made in batches:
        with torch.autocast(device, dtype=torch.bfloat16):
            total += loss_sum(model, made.batch).double()
    return float(total) / sum(made.num_labels for made in batches)
