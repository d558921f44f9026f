"""Lengths that come out wrong without a word, and mistakes that end in a traceback."""

import io
import json
import operator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import ArgumentError, BatchwrightError

TEXTS = ["a,b,c d", "e f", "g,h i j"]


def _measured_after(first, second, directory):
    """Measure with one tokenizer, then with another over the same cache; return the second and what is right."""
    bw.measure_lengths(TEXTS, first, cache=directory, progress=False)
    cached = bw.measure_lengths(TEXTS, second, cache=directory, progress=False).tolist()
    return cached, bw.measure_lengths(TEXTS, second, progress=False).tolist()


@dataclass(frozen=True, slots=True)
class Splitter:
    separator: str

    def __call__(self, text):
        return text.split(self.separator)


class Words(NamedTuple):
    separator: str

    def __call__(self, text):
        return text.split(self.separator)


class Letters(NamedTuple):
    separator: str

    def __call__(self, text):
        return list(text)


def test_the_cache_tells_tokenizers_with_slots_apart(tmp_path):
    # Expected: Splitter(" ") is measured anew, [2, 2, 3]. Found: the lengths of Splitter(","), [3, 1, 2]: only
    # __dict__ is described, and slots are not among the hidden state that the docstring lists.
    cached, right = _measured_after(Splitter(","), Splitter(" "), tmp_path)
    assert cached == right


def test_the_cache_tells_method_callers_apart(tmp_path):
    # Expected: split() and split(",") differ. Found: the lengths of the first for both.
    cached, right = _measured_after(operator.methodcaller("split", ","), operator.methodcaller("split"), tmp_path)
    assert cached == right


def test_the_cache_tells_tuples_with_a_call_apart(tmp_path):
    # Expected: another class is another function. Found: a tuple is described by its items, without its class.
    cached, right = _measured_after(Words(","), Letters(","), tmp_path)
    assert cached == right


def test_the_cache_tells_sentencepiece_models_apart(tmp_path):
    # Expected: another model is another tokenizer. Found: the lengths of the first model, [4, 4] for [4, 3].
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"the cat sat on the mat number {i} again and again" for i in range(500)))
    encoders = []
    for size in (40, 90):
        prefix = str(tmp_path / f"model{size}")
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus), model_prefix=prefix, vocab_size=size, minloglevel=2, hard_vocab_limit=False
        )
        encoders.append(sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model").encode)
    texts = ["the cat sat again", "number 7 mat"]
    bw.measure_lengths(texts, encoders[0], cache=tmp_path / "cache", progress=False)
    cached = bw.measure_lengths(texts, encoders[1], cache=tmp_path / "cache", progress=False)
    assert cached.tolist() == bw.measure_lengths(texts, encoders[1], progress=False).tolist()


class Reader:
    """Rows of an open file, as many hand-written readers give them."""

    def __init__(self, text):
        self.file = io.StringIO(text)

    def __iter__(self):
        for line in self.file:
            yield json.loads(line)


@pytest.mark.parametrize("column", ["text", ("text", "text")])
def test_no_row_of_a_reader_over_an_open_file_is_lost(column):
    # Expected: five lengths, 1 to 5. Found: four, the first row is read to look at it and then thrown away.
    text = "".join(json.dumps({"text": "w " * count}) + "\n" for count in range(1, 6))
    lengths = bw.measure_lengths(Reader(text), str.split, column=column, progress=False)
    assert len(lengths) == 5


def test_a_data_set_of_rows_with_an_attribute_columns_is_measured_or_refused():
    # Expected: rows by name are read, or a sentence. Found: TypeError "list indices must be integers or slices".
    class Data:
        columns = ("text", "label")

        def __getitem__(self, index):
            return [{"text": "a b", "label": 1}, {"text": "c", "label": 0}][index]

        def __len__(self):
            return 2

    try:
        lengths = bw.measure_lengths(Data(), str.split, column="text", progress=False)
    except BatchwrightError:
        return
    assert lengths.tolist() == [2, 1]


def test_a_length_beyond_32_bits_is_refused_with_a_sentence():
    # Expected: a LengthsError. Found: NumPy's OverflowError "Python integer 1099511627776 out of bounds for int32".
    with pytest.raises(BatchwrightError):
        bw.measure_lengths(["a"], lambda text: 2**40, progress=False)


def test_the_name_of_a_model_is_refused_with_advice_that_helps():
    # Expected: load the tokenizer first. Found: "pass its method, e.g. tokenizer.encode", for a str has encode.
    with pytest.raises(ArgumentError) as caught:
        bw.measure_lengths(["a"], "bert-base-uncased", progress=False)
    assert "pass its method" not in str(caught.value)


def test_whole_numbers_of_mixed_kinds_are_lengths():
    # Expected: [3, 5], all are whole numbers. Found: "lengths must be integers, got float64", which nobody passed.
    plan = bw.plan_batches([np.int64(3), np.uint64(5)], bw.MaxTokens(10))
    assert plan.shapes.tolist() == [[2, 5]]
