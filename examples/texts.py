"""What the examples train on: the docstrings of Python's standard library, which every machine has."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from zlib import crc32

VOCABULARY = 500  # 0 is padding, 1 the end of a text


def read_texts(num: int) -> list[str]:
    """Return docstrings of at least two lines, in the order of the files."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [text for file in files for text in re.findall(r'"""(.+?)"""', file.read_text(encoding="utf-8"), re.S)]
    return [text for text in texts if len(text.strip().split("\n")) > 1][:num]


def to_ids(text: str, *, longest: int = 128) -> list[int]:
    """Return a number from 2 to 499 for each word, up to the longest length; different words may share one."""
    return [2 + crc32(word.encode()) % (VOCABULARY - 2) for word in text.split()][:longest]


def read_examples(num: int, *, longest: int = 128) -> list[dict[str, list[int]]]:
    """Return texts as examples for a decoder, whose labels are the words themselves."""
    ids = [to_ids(text, longest=longest) for text in read_texts(num)]
    return [{"input_ids": row, "labels": row} for row in ids]


def read_pairs(num: int, *, longest: int = 128) -> list[dict[str, list[int]]]:
    """Return pairs for an encoder and a decoder: the lines after the first, and the first, which sums them up."""
    parts = [text.strip().split("\n", 1) for text in read_texts(num)]
    return [{"input_ids": to_ids(rest, longest=longest) or [1], "labels": [*to_ids(head), 1]} for head, rest in parts]


def make_tokenizer(texts: list[str]) -> Any:
    """Return a tokenizer of transformers that knows the words of some texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", *sorted({word for text in texts for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")
