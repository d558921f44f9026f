"""Small tokenizers, made on the spot: a fast and a slow one of transformers, and two that are not of transformers."""

import re

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

WORDS = "the quick brown fox jumps over lazy dogs and sleeps in a warm green field of tall grass".split()


def make_fast():
    """Return a word-level fast tokenizer that ends every text with a special token."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def make_bytes():
    """Return a byte-level fast tokenizer with a few merges, whose tokens of a text cut inside a word may be others."""
    merges = [("l", "o"), ("lo", "w"), ("e", "r"), ("low", "er"), ("Ġ", "low"), ("Ġ", "Ġ"), ("s", "low")]
    tokens = ["<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", model_max_length=512)


class SlowTokenizer(PreTrainedTokenizer):
    """Characters as tokens, without offsets."""

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - as the base class has it

    def __init__(self, **options):
        super().__init__(pad_token="<pad>", unk_token="<unk>", **options)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {chr(number): number for number in range(256)}

    def _tokenize(self, text, **options):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token) % 256

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


class ListTokenizer:
    """Words as tokens: only what dynabatch asks for, and nothing else of a tokenizer of transformers."""

    def __init__(self):
        self.words = ["<pad>"]

    def __call__(
        self,
        text,
        truncation=False,
        max_length=None,
        padding=False,
        return_tensors=None,
        return_attention_mask=True,
    ):
        rows = [sentence.split()[: max_length if truncation else None] for sentence in text]
        for word in sorted({word for row in rows for word in row} - set(self.words)):
            self.words.append(word)
        ids = [[self.words.index(word) for word in row] for row in rows]
        return padded(ids, return_attention_mask) if padding else {"input_ids": ids}

    def batch_decode(self, sequences, skip_special_tokens=False, clean_up_tokenization_spaces=True):
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return [" ".join(self.words[number] for number in row) for row in sequences]


class OffsetTokenizer:
    """Words as tokens with their offsets; it cannot decode."""

    is_fast = True

    def __call__(
        self, text, truncation=False, max_length=None, padding=False, return_tensors=None, return_offsets_mapping=False
    ):
        rows = [text] if isinstance(text, str) else text
        spans = [[match.span() for match in re.finditer(r"\S+", row)] for row in rows]
        spans = [row[: max_length if truncation else None] for row in spans]
        ids = [[1 + start for start, _ in row] for row in spans]
        if padding:
            return padded(ids, True)
        return {"input_ids": ids, "offset_mapping": spans} if return_offsets_mapping else {"input_ids": ids}


def padded(ids, has_mask):
    """Return rows of ids as tensors, filled up with 0 on the right."""
    width = max(map(len, ids))
    batch = {"input_ids": torch.tensor([row + [0] * (width - len(row)) for row in ids])}
    return {**batch, "attention_mask": (batch["input_ids"] > 0).long()} if has_mask else batch
