"""The lengths of examples: where they are read from, and how often."""

import numpy as np
import pytest
import torch
from datasets import IterableDataset
from transformers import Trainer

import batchwright as bw
from batchwright.errors import LengthsError
from batchwright.integrations.huggingface import adaptive
from batchwright.integrations.huggingface._lengths import measure_examples
from batchwright.step import PadCollator
from batchwright.testing import EagerGraphs

from .trainers import BUDGET, flat, make_args, make_model, make_trainer, numbered


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


# Labels that have lengths of their own


def pairs(num=60):
    """Return examples whose labels are a quarter as long as the inputs."""
    lengths = np.random.default_rng(0).integers(8, 40, num)
    return [{"input_ids": [5] * int(n), "labels": [6] * (int(n) // 4)} for n in lengths]


def train_on_pairs(folder, examples, **options):
    """Return a trainer with a plain PadCollator, and the padded tokens of every forward pass."""
    shapes, model = [], make_model("t5")

    def note(part, given, named):
        shapes.append((*named["input_ids"].shape, *(named["labels"].shape[1:] if "labels" in named else ())))

    model.register_forward_pre_hook(note, with_kwargs=True)
    args = make_args(folder, max_steps=4, per_device_eval_batch_size=4)
    options = {"budget": bw.MaxTokens(256), "data_collator": PadCollator(), **options}
    trainer = adaptive(Trainer)(model=model, args=args, train_dataset=examples, eval_dataset=examples, **options)
    return trainer, shapes


@pytest.mark.filterwarnings("ignore:steps run eagerly, without graphs. .* has hooks")  # those that note shapes
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_plain_pad_collator_keeps_the_budget_of_inputs_and_labels(tmp_path, graphs):
    options = {"graphs": EagerGraphs(), "grouping": bw.Buckets(4)} if graphs else {}
    trainer, shapes = train_on_pairs(tmp_path, pairs(), **options)
    trainer.train()
    assert shapes
    assert all(num * (source + target) <= 256 and target < source for num, source, target in shapes)


def test_a_plain_pad_collator_pads_the_labels_of_a_stream_and_of_evaluation_apart(tmp_path):
    trainer, shapes = train_on_pairs(tmp_path, pairs())
    trainer.evaluate()
    assert shapes
    assert all(target < source for _, source, target in shapes)
    stream, shapes = train_on_pairs(tmp_path, IterableDataset.from_generator(pairs))
    stream.train()
    assert all(num * (source + target) <= 256 and target < source for num, source, target in shapes)


def test_a_plain_pad_collator_still_predicts_examples_without_labels(tmp_path):
    trainer, _ = train_on_pairs(tmp_path, pairs())
    trainer.train()
    found = trainer.predict([{"input_ids": example["input_ids"], "decoder_input_ids": [0]} for example in pairs(6)])
    assert found.label_ids is None
