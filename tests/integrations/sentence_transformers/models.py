"""Tiny models of sentence-transformers with random weights, and texts for them."""

from itertools import pairwise

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPProcessor,
    LlamaConfig,
    LlamaModel,
)
from transformers import PreTrainedTokenizerFast as Fast

NUM_TOKENS, WIDTH, LONGEST = 60, 16, 24
WORDS = [f"w{n}" for n in range(4, NUM_TOKENS)]
PROMPTS = {"query": "w5 w6 w7", "document": "w8"}


def make_tokenizer(**options):
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words = Tokenizer(WordLevel({**special, **{word: n for n, word in enumerate(WORDS, 4)}}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[
        ("<s>", 1), ("</s>", 2),
    ])  # fmt: skip
    return Fast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", cls_token="<s>",
                sep_token="</s>", unk_token="<unk>", **options)  # fmt: skip


def save_bert(folder, *, seed=0, **options):
    """Write an encoder with dropout and its tokenizer into a folder, and return its name."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=NUM_TOKENS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=64, hidden_dropout_prob=0.5, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    make_tokenizer(**options).save_pretrained(folder)
    return str(folder)


def save_llama(folder, **options):
    """Write a decoder into a folder, with a tokenizer that pads on the left, and return its name."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_TOKENS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.5, **options,
    )  # fmt: skip
    LlamaModel(config).save_pretrained(folder)
    make_tokenizer(padding_side="left").save_pretrained(folder)
    return str(folder)


def make_model(folder, *, pool="mean", include_prompt=True, more=(), **options):
    """Return a transformer, a pool and more modules."""
    transformer = modules.Transformer(folder, max_seq_length=LONGEST)
    pooling = modules.Pooling(WIDTH, pooling_mode=pool, include_prompt=include_prompt)
    return wrap(transformer, pooling, *more, **options)


def wrap(*parts, **options):
    return SentenceTransformer(modules=list(parts), device="cpu", **{"prompts": PROMPTS, **options})


def make_words():
    """Return embeddings of words."""
    weights = np.random.default_rng(0).normal(size=(NUM_TOKENS, WIDTH)).astype(np.float32)
    return modules.WordEmbeddings(modules.tokenizer.WhitespaceTokenizer(["<pad>", *WORDS], stop_words=[]), weights)


class SideBySide(nn.Module):
    """Texts in one row without padding, as with kernels for rows of unlike lengths."""

    def __init__(self):
        super().__init__()
        self.tokenizer, self.table, self.sizes = make_tokenizer(), nn.Embedding(NUM_TOKENS, WIDTH), []

    def preprocess(self, inputs, prompt=None):
        rows = [self.tokenizer((prompt or "") + text)["input_ids"] for text in inputs]
        ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
        return {"input_ids": torch.tensor([[one for row in rows for one in row]]), "cu_seq_lens_q": ends}

    def forward(self, features):
        ends = features["cu_seq_lens_q"].tolist()
        self.sizes.append(ends[-1])
        rows = [self.table(features["input_ids"][0, one:other]).mean(0) for one, other in pairwise(ends)]
        return {**features, "sentence_embedding": torch.stack(rows)}


def make_static():
    torch.manual_seed(0)
    return wrap(modules.StaticEmbedding(make_tokenizer(), embedding_dim=WIDTH))


def make_router(folder, other):
    routes = [[modules.Transformer(name), modules.Pooling(WIDTH)] for name in (folder, other)]
    return wrap(modules.Router.for_query_document(*routes))


def make_clip(folder):
    """Return a model of texts and images."""
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = CLIPConfig(
        text_config={**shape, "vocab_size": NUM_TOKENS, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        vision_config={**shape, "image_size": 8, "patch_size": 4}, projection_dim=6,
    )  # fmt: skip
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    CLIPProcessor(images, make_tokenizer(model_max_length=20)).save_pretrained(folder)
    return wrap(modules.Transformer(str(folder)))


def make_texts(num, *, most=35, seed=0):
    """Return texts of 1 to ``most`` words; the longest are cut."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=length)) for length in rng.integers(1, most + 1, size=num)]
