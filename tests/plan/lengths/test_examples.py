"""A column of a table is named, token ids are counted, and what is neither is refused."""

import array
import functools
import io
import json
import operator

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from transformers import BatchEncoding, ByT5Tokenizer

import batchwright as bw
from batchwright.errors import ArgumentError, LengthsError

IDS, SOURCE, TARGET = [7, 8, 9], ["a b", "a b c", "a"], ["x", "x y", "x y z w"]
ROWS = [dict(zip(("id", "source", "target"), row, strict=True)) for row in zip(IDS, SOURCE, TARGET, strict=True)]
COLUMNS = {"id": IDS, "source": SOURCE, "target": TARGET}

measure = functools.partial(bw.measure_lengths, progress=False)


def streamed():
    return datasets.Dataset.from_list(ROWS).to_iterable_dataset()


TABLES = {
    "dict": lambda: COLUMNS,
    "pandas": lambda: pd.DataFrame(COLUMNS),
    "pyarrow": lambda: pa.table(COLUMNS),
    "datasets": lambda: datasets.Dataset.from_list(ROWS),
    "datasets, streamed": streamed,
    "structured array": lambda: np.array([tuple(row.values()) for row in ROWS], dtype="i8,U9,U9"),
    "rows": lambda: ROWS,
    "rows, once": lambda: iter(ROWS),
}


def name(kind, column):
    return {"source": "f1", "target": "f2"}[column] if kind == "structured array" else column


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"batch_size": 2}, {"cache": True}], ids=repr)
def test_one_name_gives_one_length_per_example_and_two_give_two(kind, options, tmp_path):
    options = {**options, "cache": tmp_path if options.get("cache") else None}
    one = measure(TABLES[kind](), str.split, column=name(kind, "source"), **options)
    two = measure(TABLES[kind](), str.split, column=(name(kind, "target"), name(kind, "source")), **options)
    assert one.tolist() == [2, 3, 1]
    assert two.tolist() == [[1, 2], [2, 3], [4, 1]]


@pytest.mark.parametrize("kind", ["dict", "pandas", "pyarrow", "datasets", "structured array", "datasets, streamed"])
def test_without_a_name_a_table_of_several_columns_is_refused_with_their_names(kind):
    names = "'f0', 'f1', 'f2'" if kind == "structured array" else "'id', 'source', 'target'"
    with pytest.raises(LengthsError, match=f"has the columns {names}; name the one to measure, e.g. column='text'"):
        measure(TABLES[kind](), str.split)


@pytest.mark.parametrize(
    "table",
    [
        {"text": SOURCE},
        pd.DataFrame({"text": SOURCE}),
        pd.DataFrame({0: SOURCE}),
        pa.table({"text": SOURCE}),
        datasets.Dataset.from_dict({"text": SOURCE}),
    ],
    ids=["dict", "pandas", "pandas by number", "pyarrow", "datasets"],
)
def test_a_single_column_needs_no_name(table):
    assert measure(table, str.split).tolist() == [2, 3, 1]


@pytest.mark.parametrize(
    "texts",
    [
        pd.Series(SOURCE),
        pd.Series(SOURCE, dtype="string"),
        np.array(SOURCE),
        np.array(SOURCE, dtype=object),
        pa.array(SOURCE),
        pa.chunked_array([SOURCE[:1], SOURCE[1:]]),
        datasets.Dataset.from_list(ROWS)["source"],
        tuple(SOURCE),
    ],
    ids=["Series", "Series of strings", "array", "array of objects", "pyarrow", "chunks", "datasets", "tuple"],
)
@pytest.mark.parametrize("tokenizer", [str.split, ByT5Tokenizer()], ids=["function", "transformers"])
def test_a_column_of_any_library_is_a_list_of_texts(texts, tokenizer):
    assert measure(texts, tokenizer).tolist() == measure(SOURCE, tokenizer).tolist()


def test_a_column_in_an_array_of_two_columns_is_a_side_of_pairs():
    pairs = np.array([SOURCE, TARGET]).T
    assert measure(pairs, str.split).tolist() == [[2, 1], [3, 2], [1, 4]]


class OpenFile:
    """Rows of an open file, as many hand-written readers give them: every loop reads on."""

    def __init__(self, num_rows):
        rows = [{"text": "w " * count} for count in range(1, num_rows + 1)]
        self.file = io.StringIO("".join(json.dumps(row) + "\n" for row in rows))

    def __iter__(self):
        for line in self.file:
            yield json.loads(line)


@pytest.mark.parametrize("cached", [False, True])
def test_no_row_of_a_reader_over_an_open_file_is_lost(cached, tmp_path):
    cache = tmp_path if cached else None
    assert measure(OpenFile(5), str.split, column="text", cache=cache).tolist() == [1, 2, 3, 4, 5]
    assert measure(OpenFile(2), str.split, column=("text", "text"), cache=cache).tolist() == [[1, 1], [2, 2]]


class ByNumber:
    """A data set that names its columns, gives rows by number and refuses no number."""

    columns = ("source", "target")

    def __getitem__(self, index):
        return {"source": SOURCE[operator.index(index) % 3], "target": TARGET[index % 3]}

    def __len__(self):
        return 3


@pytest.mark.parametrize("column", ["source", ("source", "target")])
def test_a_data_set_read_by_number_is_measured_as_far_as_its_length(column):
    assert measure(ByNumber(), str.split, column=column).tolist() == measure(ROWS, str.split, column=column).tolist()


@pytest.mark.parametrize(
    ("texts", "column", "words"),
    [
        (COLUMNS, "text", "dict has no column 'text'; it has 'id', 'source', 'target'"),
        (COLUMNS, ("source", "text"), "dict has no column 'text'"),
        (pd.DataFrame(COLUMNS), "text", "DataFrame has no column 'text'; it has 'id'"),
        (COLUMNS, "id", "must be all str.*, got int at example 0"),
        ({"train": COLUMNS}, "train", r"dict\['train'\] is a table itself; measure it and name a column of it"),
        ({"a": SOURCE, "b": TARGET[:2]}, ("a", "b"), "columns 'a' and 'b' have 3 and 2 rows"),
        (SOURCE, "source", "column names a column of a table or of rows by name, got list of str; leave column out"),
        (ROWS, "text", "a row has no column 'text'; it has 'id', 'source', 'target'"),
        (ROWS, None, "got dict at example 0; name or pass the column of texts, e.g. column='text'"),
        ([*ROWS, "text"], "source", "a row has no column 'source'; it has str"),
        (pd.DataFrame({"a": ["x", None]}), None, "at example 1; that text is missing: fill it in"),
        (pa.array(["x", None]), None, "got NoneType at example 1; that text is missing: fill it in, e.g. with ''"),
        ([b"x"], None, r"got bytes at example 0; decode it, e\.g\. with \.decode\('utf-8'\)"),
        ([3, 5], None, "got int at example 0; .* numbers that are lengths already need no measuring"),
        ({}, None, "dict has no column; name the one"),
        ([], "text", "texts is empty"),
        (list, None, "iterable of str or of pairs of str, got type"),
        (np.array("x"), None, "iterable of str or of pairs of str, got ndarray"),
    ],
    ids=range(18),
)
def test_a_column_that_cannot_be_measured_is_refused(texts, column, words):
    with pytest.raises(LengthsError, match=words):
        measure(texts, str.split, column=column)


@pytest.mark.parametrize("column", [3, ("a",), ("a", "b", "c"), ("a", 3), b"a", True, {}])
def test_a_column_is_a_name_or_a_pair_of_names(column):
    with pytest.raises(ArgumentError, match="column must be the name of a column or a pair of names, got"):
        measure(COLUMNS, str.split, column=column)


# Token ids.


@pytest.mark.parametrize(
    "ids",
    [
        [[5, 6, 7], [], [5, 6]],
        [(5, 6, 7), (), (5, 6)],
        [np.array([5, 6, 7]), np.array([], dtype=np.uint16), np.array([5, 6])],
        [torch.tensor([5, 6, 7]), torch.tensor([], dtype=torch.int64), torch.tensor([5, 6])],
        [array.array("H", [5, 6, 7]), array.array("H"), array.array("H", [5, 6])],
        iter([[5, 6, 7], [], [5, 6]]),
        pa.array([[5, 6, 7], [], [5, 6]]),
        pd.Series([[5, 6, 7], [], [5, 6]]),
        {"input_ids": [[5, 6, 7], [], [5, 6]]},
    ],
    ids=["lists", "tuples", "arrays", "tensors", "stdlib arrays", "iterator", "pyarrow", "Series", "dict"],
)
def test_token_ids_are_counted(ids):
    lengths = measure(ids)
    assert lengths.tolist() == [3, 0, 2]
    assert lengths.dtype == np.int32


def test_rows_of_a_matrix_of_ids_are_examples():
    assert measure(np.ones((4, 3), dtype=np.int64)).tolist() == [3] * 4
    assert measure(torch.ones((4, 3), dtype=torch.int32), None).tolist() == [3] * 4


def test_lists_of_two_ids_are_examples_and_tuples_of_two_lists_are_pairs():
    assert measure([[5, 6], [7, 8]]).tolist() == [2, 2]
    assert measure([(5, 6), (7, 8)]).tolist() == [2, 2]
    assert measure([([5, 6], [7]), ([], np.array([7, 8, 9]))]).tolist() == [[2, 1], [0, 3]]


def test_ids_of_two_columns_are_pairs():
    table = {"source": [[1, 2], [3]], "target": [[4], [5, 6, 7]], "id": [0, 1]}
    assert measure(table, column=("source", "target")).tolist() == [[2, 1], [1, 3]]


def test_the_output_of_a_tokenizer_is_a_table_of_ids():
    encoding = BatchEncoding(ByT5Tokenizer()(["ab", "abc"]))
    assert measure(encoding, column="input_ids").tolist() == measure(["ab", "abc"], ByT5Tokenizer()).tolist()


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"batch_size": 1}, {"cache": "here"}], ids=repr)
def test_ids_are_cut_at_the_maximum_whatever_the_options(options, tmp_path):
    options = {**options, **({"cache": tmp_path} if "cache" in options else {})}
    assert measure([[5, 6, 7], [], [5]], max_length=2, **options).tolist() == [2, 0, 1]


def test_an_example_without_ids_has_length_zero_which_the_planner_refuses_by_position():
    lengths = measure([[5, 6], [], [7]])
    with pytest.raises(LengthsError, match=r"got 0 at example 1; drop empty .* e.g. np.maximum\(lengths, 1\)"):
        bw.plan_batches(lengths, bw.MaxTokens(9))
    assert len(bw.plan_batches(np.maximum(lengths, 1), bw.MaxTokens(9)).indices) == 3


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (["a text"], "all token ids, or all tuples of two, got str at example 0; texts need a tokenizer"),
        ([("a", "b")], "got tuple of .str, str. at example 0; texts need a tokenizer"),
        ([[5, 6], "a"], "examples must be all token ids, got str at example 1"),
        ([[5, 6], ([5], [6])], "must be all token ids, got a pair of token ids at example 1; give each as a flat list"),
        ([([5], [6]), [5]], "must be all tuples of two sequences of ids, got token ids at example 1"),
        ([[[5], [6]]], r"got list of \(list, list\) at example 0; give each as a flat list of whole numbers"),
        ([[5.0, 6.0]], r"got list of \(float, float\) at example 0"),
        ([[5, None, 6]], r"got list of \(int, NoneType, int\) at example 0"),
        ([[5, 6], [5, 2.5, 6]], r"got list of \(int, float, int\) at example 1"),
        ([[5, "a", 7, 8]], "got list of 4 items at example 0"),
        ([[True, False]], r"got list of \(bool, bool\)"),
        ([5, 6, 7], "got int at example 0; give each as a flat list"),
        ([b"ab"], "got bytes at example 0"),
        (np.ones((2, 3)), "got ndarray at example 0"),
        (np.ones((2, 3, 4), dtype=int), "got ndarray at example 0"),
        (torch.ones(2, 3, dtype=torch.bool), "got Tensor at example 0"),
    ],
    ids=range(16),
)
def test_what_is_no_list_of_ids_is_refused(ids, words):
    with pytest.raises(LengthsError, match=words):
        measure(ids)


@pytest.mark.parametrize("ids", [[[5, 6], [7]], np.ones((2, 3), dtype=int), [torch.tensor([5])]], ids=range(3))
def test_ids_with_a_tokenizer_are_refused_with_the_reason(ids):
    words = r"got token ids at example 0; ids are counted without a tokenizer, measure_lengths\(ids, None\)"
    with pytest.raises(LengthsError, match=words):
        measure(ids, ByT5Tokenizer())
