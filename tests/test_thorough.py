"""The part of a grid that `make test` runs misses no value, and of three axes no pair."""

from itertools import combinations, product

import pytest

from .thorough import crossed

GRIDS = [
    ("ab", "cd"),
    ("abc", "de"),
    ("ab", "cde"),
    ("abc", "defg"),
    ("abc", "de", "fgh"),
    ("ab", "cd", "ef"),
    ("a", "bc"),
]


@pytest.mark.parametrize("axes", GRIDS)
def test_all_combinations_run_where_it_is_thorough(axes):
    assert crossed(*axes, is_thorough=True) == list(product(*axes))


@pytest.mark.parametrize("axes", GRIDS)
def test_a_part_has_every_combination_of_all_axes_but_one(axes):
    part = crossed(*axes, is_thorough=False)
    assert len(part) == len(set(part)) == len(list(product(*axes))) // min(map(len, axes))
    for places in combinations(range(len(axes)), len(axes) - 1):
        assert {tuple(case[place] for place in places) for case in part} == set(
            product(*(axes[place] for place in places))
        )
