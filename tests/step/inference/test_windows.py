"""Lengths on the device, and caches that stay where they are."""

import pytest
import torch

from batchwright.step.graphs._micro import NotGraphableError
from batchwright.step.inference._sizing import Layout
from batchwright.step.inference._windows import Layers, Length


def length(value=5, least=1, most=31):
    return Length.of(torch.tensor(value), least, most)


def test_a_length_is_compared_by_its_bounds():
    assert (length() > 31) is False
    assert (length() >= 1) is True
    assert (2 + length() > 33) is False
    assert (length() + 1 < 33) is True


@pytest.mark.parametrize("compare", [lambda one: one > 7, lambda one: one == 0, lambda one: one + 3 > 20])
def test_what_bounds_cannot_tell_is_refused(compare):
    with pytest.raises(NotGraphableError, match="compares the length of its cache"):
        compare(length())


def test_anything_else_is_computed_with_plain_tensors():
    found = torch.arange(3)[:, None] + length().clone()
    assert type(found) is torch.Tensor
    assert found.flatten().tolist() == [5, 6, 7]
    assert type(torch.tensor([4, 6]) <= length()) is torch.Tensor


def test_rows_are_filled_then_written_and_moved():
    layers = Layers(Layout(3, 8, None))
    cache = layers.filling(0, 3)
    keys = torch.arange(2 * 2 * 3 * 4.0).reshape(2, 2, 3, 4)
    cache.update(keys, -keys, 0)
    assert cache.get_seq_length() == 3
    assert layers.keep(cache) == 3
    window = layers.window(2, 4, torch.tensor([3]))
    new = torch.full((2, 2, 1, 4), 9.0)
    found, values = window.update(new, new, 0)
    assert torch.equal(found, torch.cat([keys, new], dim=2))
    assert torch.equal(values, torch.cat([-keys, new], dim=2))
    layers.move(torch.tensor([1]), torch.tensor([0]), 4)
    assert torch.equal(window.layers[0].keys[0], found[1])
    assert layers.num_bytes == 2 * 3 * 2 * 8 * 4 * 4


def test_a_prompt_in_pieces_and_a_cache_that_is_not_filled_are_refused():
    layers = Layers(Layout(2, 8, None))
    cache = layers.filling(0, 3)
    with pytest.raises(NotGraphableError, match="does not fill"):
        layers.keep(cache)
    keys = torch.zeros(2, 1, 3, 4)
    cache.update(keys, keys, 0)
    with pytest.raises(NotGraphableError, match="several pieces"):
        cache.update(keys, keys, 0)


def test_rows_of_several_pieces_end_with_the_same_token():
    layers = Layers(Layout(3, 8, None))
    long, short = torch.ones(1, 2, 5, 4), torch.full((2, 2, 3, 4), 2.0)
    for first, keys in ((0, long), (1, short)):
        cache = layers.filling(first, 5)
        cache.update(keys, keys, 0)
        assert layers.keep(cache) == keys.shape[2]
    found = layers.window(3, 6, torch.tensor([5])).layers[0].keys[:, 0, :, 0]
    assert found.tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 2, 2, 2, 0], [0, 0, 2, 2, 2, 0]]
    cache = layers.filling(0, 5)
    with pytest.raises(NotGraphableError, match="as a whole"):
        cache.update(torch.ones(1, 2, 6, 4), torch.ones(1, 2, 6, 4), 0)


def test_memory_serves_a_batch_of_the_same_widths_with_no_more_rows():
    layout = Layout(16, 32, 64)
    assert layout.holds(Layout(9, 32, 64))
    assert not layout.holds(Layout(17, 32, 64))
    assert not layout.holds(Layout(9, 40, 64))
    assert not layout.holds(Layout(9, 32, 48))


def test_where_attention_is_over_ranges_memory_serves_smaller_widths_too():
    layout = Layout(16, 32, 64)
    assert layout.holds(Layout(9, 24, 48), uses_ranges=True)
    assert not layout.holds(Layout(9, 40, 48), uses_ranges=True)
    assert not layout.holds(Layout(9, 24, 72), uses_ranges=True)
    assert Layout(16, 32, None).holds(Layout(16, 8, None), uses_ranges=True)
