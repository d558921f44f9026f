"""The lengths of examples: where they are read from, and how often."""

import pytest
import torch

from batchwright.errors import LengthsError
from batchwright.integrations.huggingface._lengths import measure_examples

from .trainers import BUDGET, flat, make_trainer, numbered


class Table:
    """A data set of columns, as far as lengths need it; it notes which columns are read."""

    def __init__(self, columns, read):
        self.columns, self.read, self.format = columns, read, {"type": "torch"}
        self.column_names = list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}

    def select_columns(self, names):
        return Table({name: self.columns[name] for name in names}, self.read)

    def with_format(self, kind):
        assert kind is None
        return self

    def iter(self, batch_size):
        self.read += self.column_names
        for start in range(0, len(self), batch_size):
            yield {name: values[start : start + batch_size] for name, values in self.columns.items()}


IDS = [[1], [1, 2], [1, 2, 3]]


@pytest.mark.parametrize(
    ("columns", "has_decoder", "expected", "needed"),
    [
        ({"input_ids": IDS}, False, [1, 2, 3], ["input_ids"]),
        ({"input_ids": IDS, "labels": IDS}, False, [1, 2, 3], ["input_ids", "labels"]),
        ({"input_ids": IDS, "labels": IDS}, True, [[1, 1], [2, 2], [3, 3]], ["input_ids", "labels"]),
        ({"input_ids": IDS, "labels": IDS[::-1]}, False, [[1, 3], [2, 2], [3, 1]], ["input_ids", "labels"]),
        ({"input_ids": IDS, "labels": [0, 1, 0]}, False, [1, 2, 3], ["input_ids"]),
        ({"input_ids": IDS, "labels": [[7], [], [7]]}, False, [[1, 1], [2, 1], [3, 1]], ["input_ids", "labels"]),
        ({"input_ids": IDS, "length": [5, 6, 7]}, False, [5, 6, 7], ["length"]),
    ],
)
def test_lengths_are_read_from_the_columns_that_tell_alone(columns, has_decoder, expected, needed):
    read = []
    table = Table({**columns, "text": ["x", "y", "z"]}, read)
    lengths = measure_examples(table, has_decoder=has_decoder, show_progress=False)
    assert lengths.tolist() == expected
    assert read == needed
    rows = [table[index] for index in range(3)]
    assert measure_examples(rows, has_decoder=has_decoder, show_progress=False).tolist() == expected


def test_what_a_transform_makes_is_measured_and_not_what_it_is_made_from():
    class Doubled(Table):
        def __getitem__(self, index):
            return {"input_ids": 2 * self.columns["input_ids"][index]}

    table = Doubled({"input_ids": IDS}, read=[])
    table.format = {"type": "custom"}
    assert measure_examples(table, show_progress=False).tolist() == [2, 4, 6]


def test_tensors_are_measured_too():
    rows = [{"input_ids": torch.ones(4), "labels": torch.tensor(1)}, {"input_ids": torch.ones(2), "labels": 0}]
    assert measure_examples(rows, show_progress=False).tolist() == [4, 2]


@pytest.mark.parametrize(
    ("rows", "message"), [([], "empty"), ([(1, 2)], "mappings"), ([{"text": "x"}], "pass lengths=")]
)
def test_data_that_tell_no_length_are_refused(rows, message):
    with pytest.raises(LengthsError, match=message):
        measure_examples(rows, show_progress=False)


def test_a_bar_shows_how_far_measuring_has_come(capsys):
    measure_examples([{"input_ids": [1]}] * 3)
    assert "measuring lengths: 3 in" in capsys.readouterr().err


def test_lengths_are_measured_once(tmp_path):
    class Counting(list):
        num_read = 0

        def __getitem__(self, index):
            self.num_read += 1
            return super().__getitem__(index)

    examples = Counting(numbered())
    trainer, *_ = make_trainer("t5", tmp_path, examples=examples)
    trainer.train()
    after_one = examples.num_read
    trainer.train()
    assert examples.num_read - after_one == 24


def test_examples_that_were_replaced_in_a_list_are_measured_again(tmp_path):
    """The budget holds for what is trained on now, not for what had the same number of examples before."""
    examples = numbered(causal=True)
    trainer, seen, _ = make_trainer("llama", tmp_path, examples=examples)
    trainer.train()
    longest = max(len(example["input_ids"]) for example in examples)
    for place in range(0, len(examples), 2):
        examples[place] = {**examples[place], **{name: [5] * longest for name in ("input_ids", "labels")}}
    seen.clear()
    trainer.train()
    lengths = [len(example["input_ids"]) for example in examples]
    assert sorted(flat(seen)) == list(range(len(examples)))
    assert all(len(batch) * max(lengths[place] for place in batch) <= BUDGET.limit for batch in seen)
