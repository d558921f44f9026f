"""Tiny models of the kinds that graphs decode, with weights that wander instead of repeating one token."""

import numpy as np
import torch
import transformers
from torch import nn

NUM_TOKENS = 61
ENDS = list(range(4, 10))
SIZES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
M2M100 = {
    "vocab_size": NUM_TOKENS, "d_model": 16, **SIZES, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "max_position_embeddings": 256, "pad_token_id": 1, "decoder_start_token_id": 2,
}  # fmt: skip
LLAMA = {
    "vocab_size": NUM_TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 512,
}  # fmt: skip
T5 = {"vocab_size": NUM_TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
GPT2 = {"vocab_size": NUM_TOKENS, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 2, "eos_token_id": 2}
KINDS = {
    "m2m100": (transformers.M2M100ForConditionalGeneration, transformers.M2M100Config, M2M100),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config, {**T5, "decoder_start_token_id": 0}),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, LLAMA),
}
NAMES = tuple(KINDS)


def make(name, dtype=torch.float32, seed=0, **options):
    """Return a model of a kind; ``options`` are for its configuration."""
    kind, config, sizes = KINDS[name]
    torch.manual_seed(seed)
    model = kind(config(**{**sizes, "tie_word_embeddings": False, **options}))
    model.lm_head = nn.Linear(16, NUM_TOKENS, bias=False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.0)
    model.generation_config.eos_token_id = ENDS
    model.generation_config.pad_token_id = 1
    return model.to(dtype).eval()


def make_random(kind, config):
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.7)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ENDS, 1
    model.generation_config.forced_eos_token_id = None
    return model.eval()


def make_dynamic():
    """Its frequencies change where the longest row goes beyond 16 tokens, and stay so."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    return make("llama", max_position_embeddings=16, rope_parameters=scaling)


def make_long():
    """Its frequencies are others for rows beyond 24 tokens, and its cache is made anew there."""
    scaling = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0, 1.2], "long_factor": [4.0, 9.0],
    }  # fmt: skip
    sizes = {**LLAMA, "max_position_embeddings": 256, "original_max_position_embeddings": 24}
    config = transformers.Phi3Config(**sizes, pad_token_id=1, rope_parameters=scaling)
    return make_random(transformers.Phi3ForCausalLM, config)


def prompts(num=12, longest=30, seed=1):
    rng = np.random.default_rng(seed)
    return [rng.integers(12, NUM_TOKENS, size=size).tolist() for size in rng.integers(1, longest + 1, size=num)]


def as_lists(rows):
    return [row.tolist() for row in rows]
