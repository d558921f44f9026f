"""Tiny models of transformers, examples for them, and an attention over sequences by a softmax per sequence."""

import torch
import torch.nn.functional as F
import transformers

SMALL = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
# name: (model, configuration, its options); what is causal predicts the next token
MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "GPT-2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0},
    ),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "BERT": ("BertForMaskedLM", "BertConfig", {**SMALL, "attention_probs_dropout_prob": 0.0}),
    "BERT of tokens": ("BertForTokenClassification", "BertConfig", {**SMALL, "attention_probs_dropout_prob": 0.0}),
    "ModernBERT": (
        "ModernBertForMaskedLM", "ModernBertConfig",
        {**SMALL, "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    ),
}  # fmt: skip
if not transformers.ModernBertForMaskedLM._can_set_attn_implementation():
    del MODELS["ModernBERT"]  # as in transformers 5.3: its attention cannot be replaced, and it is refused
ENCODERS = ("BERT", "BERT of tokens", "ModernBERT")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LENGTHS = [5, 13, 1, 3, 9]


def make_model(name, **options):
    """Return a tiny model without dropout, in training mode."""
    model, config, given = MODELS[name]
    torch.manual_seed(0)
    known = getattr(transformers, config)(**given)
    quiet = {key: value for key, value in NO_DROPOUT.items() if hasattr(known, key)}
    special = {key: 1 for key in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")}
    settings = getattr(transformers, config)(**{**special, **quiet, **given, **options})
    return getattr(transformers, model)(settings)


def make_examples(name, lengths=LENGTHS):
    """Return examples whose labels are the next tokens of a decoder, or classes of some tokens of an encoder."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length in lengths:
        ids = torch.randint(3, 60, (length,), generator=generator)
        labels = torch.randint(0, 2, (length,), generator=generator)  # of the first token too
        labels[torch.rand(length, generator=generator) < 0.3] = -100
        examples.append({"input_ids": ids.tolist(), "labels": (labels if name in ENCODERS else ids).tolist()})
    return examples


def by_softmax(query, key, value, bounds, longest, *, scale, is_causal, window):
    """Attend within each sequence, token by token: the reference, as it stands in textbooks."""
    assert longest == max(bounds.diff().tolist())
    assert len(query) == bounds[-1]
    before, after = window or (longest, longest)
    outputs = torch.zeros_like(query)
    for start, end in zip(bounds.tolist(), bounds[1:].tolist(), strict=False):
        for place in range(start, end):
            first, last = max(start, place - before), place if is_causal else min(end - 1, place + after)
            for head in range(query.shape[1]):
                of = head * key.shape[1] // query.shape[1]
                scores = key[first : last + 1, of] @ query[place, head] * scale
                outputs = outputs.index_put(
                    (torch.tensor(place), torch.tensor(head)), F.softmax(scores, dim=0) @ value[first : last + 1, of]
                )
    return outputs


def gradient(model):
    """Return all gradients in one vector."""
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([values.flatten() for values in found])
