"""The cheapest cut: as good as trying all, and never over a limit."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.serve._split import MAX_CUTS, split


def total(constant, per_item, batches):
    return sum(constant + (stop - start) * per_item[stop - 1] for start, stop in batches)


def all_cuts(count, limits):
    for cuts in itertools.product([False, True], repeat=count - 1):
        places = [0, *(index for index, cut in enumerate(cuts, start=1) if cut), count]
        batches = list(itertools.pairwise(places))
        if all(stop - start <= limits[stop - 1] for start, stop in batches):
            yield batches


lengths = st.lists(st.integers(1, 50), min_size=1, max_size=9).map(sorted)


@given(lengths, st.integers(0, 60), st.integers(1, 100))
def test_no_other_cut_is_cheaper(per_item, constant, tokens):
    limits = [max(1, min(4, tokens // each)) for each in per_item]
    found = split(float(constant), per_item, limits)
    assert all(stop - start <= limits[stop - 1] for start, stop in found)
    best = min(total(constant, per_item, cut) for cut in all_cuts(len(per_item), limits))
    assert total(constant, per_item, found) == pytest.approx(best)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300).map(sorted), st.integers(1, 2000))
def test_many_requests_are_all_in_one_batch_each_within_the_limits(per_item, tokens):
    limits = [max(1, min(64, tokens // each)) for each in per_item]
    found = split(100.0, per_item, limits)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == len(per_item)
    assert all(0 < stop - start <= limits[stop - 1] for start, stop in found)


def test_many_requests_of_which_only_one_fits_a_batch_go_alone():
    found = split(1.0, [5.0] * 100, [1] * 100)
    assert found == [(index, index + 1) for index in range(100)]


def test_a_coarse_cut_of_many_costs_little_more_than_an_exact_one(monkeypatch):
    per_item = [0.1 * 1.02**index for index in range(256)]
    coarse = split(10.0, per_item, [64] * 256)
    monkeypatch.setattr("batchwright.serve._split.MAX_CUTS", 256)
    exact = split(10.0, per_item, [64] * 256)
    assert MAX_CUTS < 256
    assert total(10.0, per_item, coarse) <= 1.03 * total(10.0, per_item, exact)
