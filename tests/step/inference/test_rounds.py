"""Rounds of decoding: sizes, and what the host knows of rows."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright.step.inference._rounds import _Looks, _Rows, fewer_rows, widths_up_to


@given(st.integers(1, 5000))
def test_rows_become_fewer_in_few_steps_of_eights(num):
    sizes = fewer_rows(num)
    assert sizes[0] == num
    assert all(after < before for before, after in itertools.pairwise(sizes))
    assert all(size % 8 == 0 for size in sizes[1:])
    assert sizes[-1] <= 8
    assert len(sizes) <= 24


@given(st.integers(1, 10_000))
def test_widths_grow_to_the_most(most):
    sizes = widths_up_to(most)
    assert sizes[-1] == most
    assert all(before < after <= 2 * before for before, after in itertools.pairwise(sizes))


@given(st.lists(st.integers(1, 30), min_size=9, max_size=60), st.integers(1, 30))
def test_rows_that_go_on_lie_together_after_a_move(limits, num_new):
    rows = _Rows(np.array(limits))
    rows.num_new = num_new
    alive = [place for place, limit in enumerate(limits) if limit > num_new]
    num_rows = max(8, len(alive))
    slots = list(range(len(limits)))
    source, target = rows.close_up(num_rows)
    for one, other in zip(source, target, strict=True):
        assert slots[other] not in alive  # only rows that have ended are written over
        slots[other] = slots[one]
    assert set(alive) <= set(slots[:num_rows])
    assert rows.num_going_on == len(alive)


def test_looks_are_read_one_behind():
    finished = torch.tensor([False, False])
    looks = _Looks(finished)
    looks.send(has_ends=True)
    assert looks.read() is None
    finished[1] = True
    looks.send(has_ends=True)
    assert looks.read().tolist() == [False, False]
    looks.send(has_ends=True)
    assert looks.read().tolist() == [False, True]


def test_without_end_tokens_nothing_is_brought_over():
    looks = _Looks(torch.tensor([False]))
    for _ in range(3):
        looks.send(has_ends=False)
    assert looks.read() is None


@pytest.mark.parametrize("num", [1, 3])
def test_looks_that_are_forgotten_are_not_read(num):
    looks = _Looks(torch.tensor([True]))
    for _ in range(num):
        looks.send(has_ends=True)
    looks.forget()
    assert looks.read() is None


def test_looks_are_forgotten_without_waiting_for_them():
    """Their memory is written to again by a copy that follows on the stream."""
    looks, busy = _Looks(torch.tensor([True])), SimpleNamespace(synchronize=lambda: pytest.fail("waited"))
    looks.send(has_ends=True)
    looks._waiting = [(host, busy) for host, _ in looks._waiting]
    looks.forget()
    assert looks.read() is None
