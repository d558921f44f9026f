"""Tiny models of transformers with random weights, and data with uneven lengths for them."""

import torch
import transformers

NUM_TOKENS = 23
_SEQ2SEQ = {
    "vocab_size": NUM_TOKENS,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 0,
}
_T5 = {
    "vocab_size": NUM_TOKENS,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_LLAMA = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Name: class, configuration, its options, whether labels are shifted inside.
MODELS = {
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config, _T5, False),
    "marian": (transformers.MarianMTModel, transformers.MarianConfig, _SEQ2SEQ, False),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, _LLAMA, True),
}
_DROPOUT = ("dropout", "dropout_rate", "attention_dropout")


def make_model(name, *, dropout=0.0):
    """Return a model in double precision, so that only the order of sums is left to differ."""
    kind, config, options, _ = MODELS[name]
    torch.manual_seed(0)
    return kind(config(**{**options, **dict.fromkeys(_DROPOUT, dropout)})).double()


def make_examples(num=24, *, causal, seed=0):
    """Return examples of 3 to 14 tokens, and labels of another length where the model has a decoder of its own."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most):
        length = int(torch.randint(3, most, (1,), generator=generator))
        return torch.randint(3, NUM_TOKENS, (length,), generator=generator).tolist()

    examples = []
    for _ in range(num):
        source = ids(15)
        examples.append({"input_ids": source, "labels": list(source) if causal else ids(10)})
    return examples


def collate(examples):
    """Pad on the right, with a mask; labels with -100."""
    width = max(len(example["input_ids"]) for example in examples)
    target = max(len(example["labels"]) for example in examples)
    return {
        "input_ids": torch.tensor([e["input_ids"] + [0] * (width - len(e["input_ids"])) for e in examples]),
        "attention_mask": torch.tensor(
            [[1] * len(e["input_ids"]) + [0] * (width - len(e["input_ids"])) for e in examples]
        ),
        "labels": torch.tensor([e["labels"] + [-100] * (target - len(e["labels"])) for e in examples]),
    }
