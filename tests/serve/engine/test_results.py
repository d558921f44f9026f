"""What a function may return: one row per item goes to its caller, anything else is refused."""

import asyncio
import collections
import itertools
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ResultError
from batchwright.serve import Batcher
from batchwright.serve._engine.results import as_results

pandas = pytest.importorskip("pandas")
Pair = collections.namedtuple("Pair", ["first", "second"])


class Liar(list):
    """A list that says another length than it has."""

    def __init__(self, values, said):
        super().__init__(values)
        self.said = said

    def __len__(self):
        return self.said


def plain(rows):
    return [row.tolist() if hasattr(row, "tolist") else row for row in rows]


@pytest.mark.parametrize(
    "values",
    [
        [[1, 2], [3, 4]],
        ([1, 2], [3, 4]),
        np.array([[1, 2], [3, 4]]),
        torch.tensor([[1, 2], [3, 4]]),
        (row for row in ([1, 2], [3, 4])),
        map(list, ((1, 2), (3, 4))),
        {"a": [1, 2], "b": [3, 4]}.values(),
        collections.deque([[1, 2], [3, 4]]),
        pandas.Series([[1, 2], [3, 4]], index=[7, 5]),
    ],
    ids=lambda values: type(values).__name__,
)
def test_sequences_arrays_and_generators_give_one_row_per_item(values):
    assert plain(as_results(values, 2)) == [[1, 2], [3, 4]]


@pytest.mark.parametrize("wrap", [dict, collections.UserDict, collections.OrderedDict, MappingProxyType])
def test_a_mapping_of_columns_is_split_by_rows_and_not_answered_with_its_keys(wrap):
    rows = as_results(wrap({"label": ["a", "b"], "score": np.array([0.5, 0.25])}), 2)
    assert rows == [{"label": "a", "score": 0.5}, {"label": "b", "score": 0.25}]
    assert {type(row) for row in rows} == {dict}


def test_columns_may_be_mappings_themselves():
    assert as_results({"x": {"y": (1, 2)}}, 2) == [{"x": {"y": 1}}, {"x": {"y": 2}}]


def test_the_outputs_of_a_tokenizer_and_a_model_are_split_by_rows():
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1], [1]]})
    assert as_results(encoding, 2)[1] == {"input_ids": [3], "attention_mask": [1]}
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.arange(4).reshape(2, 2))
    assert as_results(output, 2)[1]["last_hidden_state"].tolist() == [2, 3]


def test_a_data_frame_gives_each_caller_its_row_and_never_a_column_name():
    frame = pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]}, index=[5, 3])
    assert as_results(frame, 2) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(ResultError, match="returned 2 results for 3 items"):
        as_results(frame, 3)


def test_a_data_frame_with_a_name_that_comes_twice_is_refused():
    frame = pandas.DataFrame([[1, 2], [3, 4]], columns=["a", "a"])
    with pytest.raises(ResultError, match=r"a column name comes twice: \['a', 'a'\]"):
        as_results(frame, 2)


def test_a_table_of_arrow_gives_rows():
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"a": [1, 2], "b": [3, 4]})
    assert as_results(table, 2) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]


def test_a_table_that_does_not_give_rows_is_refused():
    class Table(list):
        columns = ("a", "b")

    with pytest.raises(ResultError, match="got Table"):
        as_results(Table([1, 2]), 2)


@pytest.mark.parametrize(
    "values",
    [
        None,
        7,
        "ab",
        b"ab",
        bytearray(b"ab"),
        memoryview(b"ab"),
        {1, 2},
        frozenset({1, 2}),
        {1: 3, 2: 4}.keys(),
        {1: 3, 2: 4}.items(),
        np.array(5),
        torch.tensor(5),
        Pair([1, 2], [3, 4]),
        torch.ones(2, 2).max(dim=0),
        {"a": [1, 2], "b": 7},
        {"a": [1, 2], "b": "xy"},
        object(),
    ],
    ids=lambda values: type(values).__name__,
)
def test_what_has_no_rows_is_refused(values):
    with pytest.raises(ResultError, match="must return a list with one result per item, got"):
        as_results(values, 2)


def test_an_empty_mapping_and_columns_of_another_length_are_refused():
    with pytest.raises(ResultError, match="an empty dict"):
        as_results({}, 2)
    with pytest.raises(ResultError, match="in column 'b', returned 3 results for 2 items"):
        as_results({"a": [1, 2], "b": [1, 2, 3]}, 2)


@pytest.mark.parametrize(("values", "came"), [([1, 2, 3], "more than 2"), ([1], "1")])
def test_a_length_that_differs_from_the_iteration_is_refused(values, came):
    with pytest.raises(ResultError, match=f"Liar of length 2, but iterating over it gives {came}"):
        as_results(Liar(values, 2), 2)


def test_a_generator_without_end_is_refused_after_one_value_too_many():
    with pytest.raises(ResultError, match="returned more than 2 results for 2 items"):
        as_results(itertools.count(), 2)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9))
def test_there_is_one_result_per_item_or_a_refusal(held, said, num_items):
    try:
        rows = as_results(Liar(range(held), said), num_items)
    except ResultError:
        assert not held == said == num_items
    else:
        assert rows == list(range(num_items))


def taken_out(items):
    return [2 * items.pop(0) for _ in range(len(items))]


def one_too_few(items):
    del items[0]
    return items


async def one_too_few_later(items):
    return one_too_few(items)


def test_a_function_may_take_its_list_apart():
    with Batcher(taken_out, policy="window", max_wait_ms=30, background=[[1, 2, 3]]) as batcher:
        assert list(batcher.map(range(5))) == [0, 2, 4, 6, 8]
        assert [batch.results for batch in batcher.background] == [[2, 4, 6]]


@pytest.mark.parametrize("run", [one_too_few, one_too_few_later])
def test_results_are_counted_against_what_the_function_was_given_and_not_what_it_left(run):
    async def main():
        async with Batcher(run, policy="window", max_wait_ms=30, background=[["offline"]]) as batcher:
            ends = await asyncio.gather(*map(batcher.submit, range(3)), return_exceptions=True)
            return ends, [batch.error async for batch in batcher.background], batcher.stats().failure

    ends, errors, failure = asyncio.run(asyncio.wait_for(main(), 30))
    assert [type(end) for end in [*ends, *errors]] == [ResultError] * 4
    assert failure is None
