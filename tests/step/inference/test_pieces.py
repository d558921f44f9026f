"""oom_safe: pieces that fit, results in input order."""

from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_outputs import SequenceClassifierOutput

from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.step.inference.pieces import merge_padded, oom_safe

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Scores:
    values: torch.Tensor


class Limited:
    """Runs a function on at most ``most`` examples and remembers the sizes it was asked for."""

    def __init__(self, most, fn=lambda batch: batch):
        self.most, self.fn, self.sizes = most, fn, []

    def __call__(self, batch):
        self.sizes.append(len(batch))
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore text.")
        return self.fn(batch)


def test_a_batch_that_fits_runs_once_and_its_result_is_returned_as_it_is():
    result = object()
    fn = Limited(8, lambda batch: result)
    assert oom_safe(fn, torch.arange(8)) is result
    assert fn.sizes == [8]


def test_what_ran_out_of_memory_is_halved_and_later_pieces_stay_small():
    fn = Limited(3, lambda x: 2 * x)
    assert oom_safe(fn, torch.arange(10)).tolist() == list(range(0, 20, 2))
    # 10 and 5 fail; the next ceiling is 3, and 10 examples in pieces of at most 3 are 3, 3, 2, 2.
    assert fn.sizes == [10, 5, 3, 3, 2, 2]


@settings(max_examples=12)  # every failure collects garbage, which takes a while where many objects live
@given(st.integers(1, 20), st.integers(1, 20))
def test_every_example_comes_back_once_and_in_order(num, most):
    fn = Limited(most)
    assert oom_safe(fn, torch.arange(num)).tolist() == list(range(num))
    assert oom_safe(Limited(most), list(range(num))) == list(range(num))
    assert sum(size for size in fn.sizes if size <= most) == num


@pytest.mark.parametrize(
    "result_of",
    [
        lambda x: {"a": x, "deep": (x, [*x.tolist()]), "none": None},
        lambda x: Pair(x, -x),
        lambda x: Scores(x),
        lambda x: SequenceClassifierOutput(logits=x[:, None], hidden_states=(x, x)),
        lambda x: x.numpy(),
    ],
)
def test_nested_results_are_joined_as_the_whole_would_be(result_of):
    whole, joined = result_of(torch.arange(7)), oom_safe(Limited(2, result_of), torch.arange(7))
    assert type(joined) is type(whole)
    np.testing.assert_equal(_plain(joined), _plain(whole))


def _plain(value):
    if isinstance(value, Scores):
        return value.values.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def test_a_function_that_wrote_to_its_batch_before_memory_ran_out_is_refused():
    def doubled(batch):
        batch["x"].mul_(2)
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch["x"].clone()

    with pytest.raises(ArgumentError, match="fn wrote to tensors of its batch"):
        oom_safe(doubled, {"x": torch.arange(4)})
    assert oom_safe(doubled, {"x": torch.arange(2)}).tolist() == [0, 2]


def test_nested_tensors_are_split_together():
    def fn(batch):
        if len(batch["x"]) > 1:
            raise torch.OutOfMemoryError
        return batch["x"] + batch["more"][0]

    batch = {"x": torch.arange(3), "more": (torch.tensor([10, 20, 30]),)}
    assert oom_safe(fn, batch).tolist() == [10, 21, 32]


def test_rows_of_unequal_width_are_padded_where_that_is_asked_for():
    def fn(lengths):
        if len(lengths) > 1:
            raise torch.OutOfMemoryError
        return {"ids": torch.ones(1, int(lengths[0]), 2, dtype=torch.long), "n": lengths}

    with pytest.raises(ArgumentError, match=r"\(1, 1, 2\), \(1, 3, 2\).*merge_padded"):
        oom_safe(fn, torch.tensor([1, 3]))
    merged = oom_safe(fn, torch.tensor([1, 3]), merge=partial(merge_padded, pad_value=9))
    assert merged["ids"][..., 0].tolist() == [[1, 9, 9], [1, 1, 1]]
    assert merged["n"].tolist() == [1, 3]


def test_a_merge_of_ones_own_receives_the_results_in_order():
    assert oom_safe(Limited(2, lambda x: float(x.sum())), torch.arange(5), merge=tuple) == (1.0, 5.0, 4.0)


@pytest.mark.parametrize("result", [1.5, torch.tensor(1.5), "text"])
def test_a_result_that_is_not_one_an_example_cannot_be_joined(result):
    with pytest.raises(ArgumentError, match=r"cannot be joined.*merge="):
        oom_safe(Limited(1, lambda x: result), torch.arange(2))


def test_results_of_unlike_form_cannot_be_joined():
    forms = iter([{"a": torch.ones(1)}, {"b": torch.ones(1)}])
    with pytest.raises(ArgumentError, match=r"\[\['a'\], \['b'\]\]"):
        oom_safe(Limited(1, lambda x: next(forms)), torch.arange(2))


def test_one_example_that_does_not_fit_is_named_with_its_shape_and_bytes():
    # 4 × 25 floats of 4 bytes are 400 bytes per example.
    with pytest.raises(DoesNotFitError, match=r"example 0 .*\[\(1, 4, 25\)\], 400 bytes,.* 2.00 GiB"):
        oom_safe(Limited(0), torch.zeros(3, 4, 25))


def test_the_example_that_does_not_fit_is_counted_from_the_start_of_the_batch():
    def fn(batch):
        if "long" in batch:
            raise torch.OutOfMemoryError
        return batch

    with pytest.raises(DoesNotFitError, match="example 4 of the batch does not fit on its own"):
        oom_safe(fn, ["a", "b", "c", "d", "long", "e"])


def test_another_error_is_raised_unchanged():
    error = ValueError("not about memory")

    def fn(batch):
        raise error

    with pytest.raises(ValueError, match="not about memory") as caught:
        oom_safe(fn, torch.arange(4))
    assert caught.value is error


def test_the_random_state_of_a_failed_attempt_is_put_back():
    def draw(batch):
        noise = torch.rand(len(batch)), np.random.rand()
        if len(batch) > 2:
            raise torch.OutOfMemoryError
        return noise[0]

    torch.manual_seed(0)
    drawn = oom_safe(draw, torch.arange(4))
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.cat([torch.rand(2), torch.rand(2)]))


def test_the_function_runs_in_inference_mode_and_outside_of_the_handler():
    def fn(batch):
        assert torch.is_inference_mode_enabled()
        failed = len(batch) > 1
        seen.append(__import__("sys").exc_info()[0])
        if failed:
            raise torch.OutOfMemoryError
        return batch

    seen = []
    oom_safe(fn, torch.arange(2))
    assert seen == [None, None, None]
    assert not torch.is_inference_mode_enabled()


def test_what_a_failed_attempt_held_is_let_go_before_the_next():
    alive = []

    class Activation:
        def __del__(self):
            alive.remove(id(self))

    def fn(batch):
        assert not alive
        held = Activation()
        alive.append(id(held))
        if len(batch) > 1:
            raise torch.OutOfMemoryError
        return batch

    assert oom_safe(fn, torch.arange(4)).tolist() == [0, 1, 2, 3]


def test_a_list_of_boxes_per_image_is_split_with_its_image():
    def fn(batch):
        images, boxes = batch
        if len(images) > 2:
            raise torch.OutOfMemoryError
        return torch.stack([image * box.sum() for image, box in zip(images, boxes, strict=True)])

    images, boxes = torch.arange(5.0), [np.full(place, 2) for place in range(5)]
    assert oom_safe(fn, (images, boxes)).tolist() == [0, 2, 8, 18, 32]


def test_a_batch_that_cannot_be_cut_runs_whole_and_says_why_if_it_does_not_fit():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert float(oom_safe(lambda batch: batch.data.sum(), packed)) == 5
    with pytest.raises(DoesNotFitError, match="the batch, which cannot be cut because batch is a PackedSequence"):
        oom_safe(Limited(0), packed)


@pytest.mark.parametrize("batch", [[], torch.zeros(0), "text", 3, ("a", "b"), {"x": 1}])
def test_a_batch_that_cannot_be_split_is_refused_before_it_runs(batch):
    fn = Limited(8)
    with pytest.raises(ArgumentError, match=r"empty|nested tensors"):
        oom_safe(fn, batch)
    assert fn.sizes == []


@pytest.mark.needs_cuda
def test_a_device_that_is_really_full_is_survived():
    bytes_each = torch.cuda.get_device_properties(0).total_memory // 100

    def fn(batch):
        held = torch.zeros(len(batch), bytes_each, dtype=torch.uint8, device="cuda")
        sizes.append(len(batch))
        return held[:, 0] + batch.to("cuda")

    sizes = []
    # Two and a half examples fit.
    torch.cuda.set_per_process_memory_fraction(0.025)
    try:
        found = oom_safe(fn, torch.arange(9, dtype=torch.uint8))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.tolist() == list(range(9))
    assert sizes == [2, 2, 2, 2, 1]


@pytest.mark.parametrize(
    "fn",
    [
        lambda batch: batch.mean(0, keepdim=True),
        lambda batch: torch.stack([batch, 2 * batch, 3 * batch]),  # layers before examples
        lambda batch: {"hidden": [batch, 2 * batch, 3 * batch]},
        lambda batch: batch.numpy()[:1],
    ],
    ids=["mean", "layers", "list of layers", "array"],
)
def test_results_without_a_row_for_each_example_are_not_joined(fn):
    with pytest.raises(ArgumentError, match=r"cannot be joined: results of .* rows from pieces of \[2, 2\] examples"):
        oom_safe(Limited(2, fn), torch.arange(4.0))


def test_several_rows_for_each_example_are_joined():
    found = oom_safe(Limited(2, lambda batch: batch.repeat_interleave(2)), torch.arange(5))
    assert found.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
