"""The rule of what a row is: every structure is cut right, or refused by name."""

import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from batchwright._tree import CannotCutError, Rows, num_examples, take
from batchwright.errors import ArgumentError

from .trees import Inputs, Pair, same


@dataclass
class Counted:
    x: torch.Tensor
    num: int = field(init=False)

    def __post_init__(self):
        self.num = len(self.x)


class Data:
    """An object with tensors whose rows nobody knows, such as a graph."""

    def __init__(self, x, num_graphs=None):
        self.x = x
        if num_graphs is not None:
            self.num_graphs = num_graphs


def packed():
    return pack_sequence([torch.ones(3), torch.ones(2)])


def nested():
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged)


def compressed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in beta state
        return torch.eye(2).to_sparse_csr()


ONE_LENGTH = torch.zeros(2, 5)
# A batch, what the error says, and the number of examples if that is known all the same.
REFUSED = [
    ({"x": ONE_LENGTH, "s": torch.tensor(3)}, r"batch\['s'\] has no dimension to split on", 2),
    ({"x": ONE_LENGTH, "s": np.array(3)}, r"batch\['s'\] has no dimension to split on", 2),
    ({"x": torch.zeros(2), "y": torch.zeros(3)}, r"got \[2, 3\]: batch\['x'\] has 2, batch\['y'\] has 3", None),
    ({"x": ONE_LENGTH, "y": np.zeros(3)}, r"batch\['y'\] has 3; keep what belongs to no example out", None),
    ({"pixels": torch.zeros(9, 3), "input_ids": ONE_LENGTH}, r"batch\['pixels'\] has 9, batch\['input_ids'\] has 2", 2),
    ({"x": ONE_LENGTH, "note": ["all"]}, r"batch\['note'\] is a list of 1 entries in a batch of 2 examples", 2),
    ((ONE_LENGTH, {"note": (1, 2, 3)}), r"batch\[1\]\['note'\] is a tuple of 3 entries in a batch of 2", 2),
    ((ONE_LENGTH, [ONE_LENGTH] * 3), r"batch\[1\] is a list of 3 entries .*name fields in a dict", 2),
    (Inputs(ONE_LENGTH, [1]), r"batch\.extra is a list of 1 entries", 2),
    ({"x": ONE_LENGTH, "views": [ONE_LENGTH] * 2}, "may be one entry per example or 2 fields of 2 rows each", 2),
    ([ONE_LENGTH.long(), [ONE_LENGTH, ONE_LENGTH]], r"batch\[1\] may be one entry per example or 2 fields", 2),
    ({"x": ONE_LENGTH, "boxes": (ONE_LENGTH, None)}, r"batch\['boxes'\] may be one entry per example", 2),
    ({"x": ONE_LENGTH, "pair": (ONE_LENGTH, ("a",))}, r"batch\['pair'\]\[1\] is a tuple of 1 entries", 2),
    ({"images": [torch.zeros(3, 4, 4)] * 2}, "may hold 2 or 3 examples", None),
    (((torch.zeros(9), torch.zeros(9)), (torch.zeros(9), torch.zeros(9))), "may hold 2 or 9 examples", None),
    ({"x": ["a"], "y": [1, 2]}, r"batch\['y'\] is a list of 2 entries in a batch of 1", None),
    ([torch.zeros(9, 2)] * 4, r"4 entries that may be fields or examples; give .*tuple\(batch\).*collate=", None),
    ([torch.zeros(3, 8, 9), torch.zeros(3, 7, 9)], "a list of 2 entries that may be fields or examples", None),
    ([(torch.zeros(9, 2), 1)] * 4, "a list of 4 entries that may be fields or examples", None),
    ([{"x": torch.zeros(9, 2)}], "a list of 1 entries that may be fields or examples", None),
    ([torch.zeros(9, 2), torch.zeros(8, 2)], r"got \[8, 9\].*a list of examples needs collate=", None),
    (["a", "b"], "a list of 2 entries that may be fields or examples", None),
    (packed(), "batch is a PackedSequence", 2),
    ((packed(), ONE_LENGTH), r"batch\[0\] is a PackedSequence, whose rows are steps of several examples", 2),
    (pack_sequence([torch.ones(4)]), "batch is a PackedSequence", 1),
    ({"x": nested(), "y": ONE_LENGTH}, r"batch\['x'\] is a nested tensor, which cannot be cut", 2),
    ((compressed(), ONE_LENGTH), r"batch\[0\] is a sparse_csr tensor, which cannot be cut", 2),
    (TensorDataset(ONE_LENGTH), "a TensorDataset, not a batch; give the batches of a DataLoader", None),
    (DataLoader([1, 2]), r"a DataLoader, not a batch; .* for batch in loader: stepper\.step\(batch\)", None),
    (Data(ONE_LENGTH), "batch is a Data, and it is not known what a row of it is", None),
    (Data(ONE_LENGTH, num_graphs=2), "batch is a Data, and it is not known what a row of it is", 2),
    ((ONE_LENGTH, Data([1, 2])), r"batch\[1\] is a Data", 2),
    ((ONE_LENGTH, range(2)), r"batch\[1\] is a range", 2),
    ((ONE_LENGTH, iter([1, 2])), r"batch\[1\] is a list_iterator", 2),
    ((ONE_LENGTH, type("Own", (list,), {})([1, 2])), r"batch\[1\] is a Own", 2),
    (Counted(ONE_LENGTH), "batch cannot be made of fewer rows: a Counted derives 'num'", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "message", "num"),
    REFUSED,
    ids=lambda value: str(value)[:40] if isinstance(value, str | int) else type(value).__name__,
)
def test_what_is_not_made_of_rows_is_refused_by_name(batch, message, num):
    with pytest.raises(CannotCutError, match=message) as caught:
        Rows(batch)
    assert caught.value.num_examples == num


@pytest.mark.parametrize(
    ("batch", "message"),
    [({"x": "text"}, "holds no tensor, got dict"), ("text", "holds no tensor, got str"), (3, "no tensor"),
     ([], "no tensor"), ({"x": torch.zeros(0, 2)}, "is empty"), ((torch.zeros(0), []), "is empty")],
)  # fmt: skip
def test_a_batch_without_an_example_is_refused(batch, message):
    with pytest.raises(ArgumentError, match=message):
        num_examples(batch)


@pytest.mark.parametrize("batch", [
    (torch.arange(1), [torch.arange(1)]), {"x": torch.arange(1), "y": [torch.arange(1)]}, ([torch.arange(1)], ["a"]),
])  # fmt: skip
def test_one_example_is_the_batch_itself_however_it_is_read(batch):
    assert same(take(batch, [0]), batch)


# Any structure: right, or refused


def tensors(num, mark):
    return lambda rows: torch.tensor([[mark * 100 + row] * 2 for row in rows])


def numbers(num, mark):
    return lambda rows: np.array([mark * 100 + row for row in rows])


def texts(num, mark):
    return lambda rows: [f"{mark} {row}" for row in rows]


def text_tuple(num, mark):
    return lambda rows: tuple(f"{mark} {row}" for row in rows)


def ragged(num, mark):
    return lambda rows: [torch.full((row + 1, 2), mark * 100 + row) for row in rows]


def square(num, mark):
    return lambda rows: [np.full((num, 2), mark * 100 + row) for row in rows]


def targets(num, mark):
    return lambda rows: [{"boxes": torch.full((row % 3, 4), row), "id": mark} for row in rows]


def token_lists(num, mark):
    return lambda rows: [[mark, row] for row in rows]


def objects(num, mark):
    held = [SimpleNamespace(value=(mark, row)) for row in range(num)]
    return lambda rows: [held[row] for row in rows]


def views(num, mark):
    """Three fields in a list, as ``default_collate`` makes of examples with a tuple."""
    return lambda rows: {"views": [torch.tensor([view * 1000 + mark * 100 + row for row in rows]) for view in range(3)]}


def setting(num, mark):
    return lambda rows: f"setting {mark}"


LEAVES = [tensors, numbers, texts, text_tuple, ragged, square, targets, token_lists, objects, views, setting]


def as_dict(parts):
    return lambda rows: {f"field {place}": part(rows) for place, part in enumerate(parts)}


def as_tuple(parts):
    return lambda rows: tuple(part(rows) for part in parts)


def as_pair(parts):
    return lambda rows: Pair(parts[0](rows), parts[-1](rows))


def as_inputs(parts):
    return lambda rows: Inputs(parts[0](rows), parts[-1](rows))


@st.composite
def batches(draw, num):
    """Draw a function of rows that makes the batch of these rows, without any cutting."""
    marks = iter(range(1, 1000))

    def part(depth):
        if depth == 0 or draw(st.booleans()):
            return draw(st.sampled_from(LEAVES))(num, next(marks))
        # A tuple of nothing but settings would be a tuple of a wrong length.
        parts = [part(depth - 1) for _ in range(draw(st.integers(0, 2)))] + [tensors(num, next(marks))]
        return draw(st.sampled_from([as_dict, as_tuple, as_pair, as_inputs]))(parts)

    parts = [part(2) for _ in range(draw(st.integers(1, 3)))]
    return draw(st.sampled_from([as_dict, as_tuple, as_pair, as_inputs]))([*parts, tensors(num, next(marks))])


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 5))
def test_every_row_is_in_its_place_once_or_the_batch_is_refused(data, num):
    make = data.draw(batches(num))
    order = data.draw(st.permutations(range(num)))
    stops = sorted(data.draw(st.sets(st.integers(1, num), max_size=3)) | {num})
    parts = [order[start:stop] for start, stop in zip([0, *stops], stops, strict=False) if start < stop]
    try:
        rows = Rows(make(range(num)))
    except CannotCutError:
        event("refused")
        return
    event("cut")
    assert rows.num == num
    for part in parts:
        assert same(rows.take(part), make(part))
    assert same(rows.take(range(num)), make(range(num)))
