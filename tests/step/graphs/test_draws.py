"""Random numbers of the host: who draws is seen, and draws that change nothing are told from those that do."""

import random

import numpy as np
import pytest
import torch

from batchwright.step.graphs._draws import (
    CPU,
    HostRandom,
    draw_again,
    generator_state,
    harmless_draws,
    is_explained_by,
    set_generator_state,
)

CUDA = torch.device("cuda", 0)  # only its type is looked at


@pytest.fixture(autouse=True)
def same_draws():
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@pytest.mark.parametrize(
    ("act", "names"),
    [
        (lambda: None, []),
        (random.random, ["random"]),
        (np.random.rand, ["NumPy"]),
        (lambda: torch.rand(1), [CPU]),
        (lambda: (random.random(), np.random.rand(), torch.rand(1)), ["random", "NumPy", CPU]),
    ],
    ids=["none", "random", "numpy", "torch", "all"],
)
def test_the_generators_that_were_used_are_named(act, names):
    host = HostRandom([], CUDA)
    act()
    assert host.moved() == names


def test_for_a_model_on_the_cpu_torch_draws_on_the_device():
    host = HostRandom([], torch.device("cpu"))
    torch.rand(1)
    assert host.moved() == []


_MAKE = {
    "random": (lambda: random.Random(1), lambda one: one.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda one: one.random()),
    "state": (lambda: np.random.RandomState(1), lambda one: one.rand()),
    "torch": (lambda: torch.Generator().manual_seed(1), lambda one: float(torch.rand((), generator=one))),
}


@pytest.mark.parametrize("kind", _MAKE)
def test_a_generator_of_the_model_is_named_and_put_back(kind):
    make, draw = _MAKE[kind]
    generator = make()
    host, state = HostRandom([("masks.chance", generator)], torch.device("cpu")), generator_state(generator)
    first = draw(generator)
    assert host.moved() == ["masks.chance"]
    set_generator_state(generator, state)
    assert host.moved() == []
    assert draw(generator) == first


# Draws in vain


def trial(forward):
    start = torch.get_rng_state()
    return harmless_draws(forward, lambda: torch.set_rng_state(start))


def test_draws_that_only_a_probability_of_zero_reads_are_harmless():
    """LayerDrop with probability 0 draws a number per layer."""
    found = trial(lambda: 3.0 + sum(float(torch.rand([])) < 0.0 for _ in range(2)))
    assert found == [((), torch.float32), ((), torch.float32)]


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_draws_that_decide_are_not_harmless_however_rarely_they_do(share):
    assert trial(lambda: 0.0 if float(torch.rand([])) < share else 1.0) is None


def test_draws_of_another_kind_are_not_harmless():
    assert trial(lambda: 1.0 + 0 * float(torch.randn([]))) is None


def test_other_numbers_of_draws_are_not_harmless():
    assert trial(lambda: 1.0 + 0 * sum(float(torch.rand([])) for _ in range(1 + (float(torch.rand([])) < 0.5)))) is None


def test_sizes_and_types_of_draws_are_kept():
    assert trial(lambda: 1.0 + 0 * float(torch.rand(2, 3, dtype=torch.float64).sum())) == [((2, 3), torch.float64)]


def test_drawing_again_moves_the_generator_as_the_pass_did():
    draws = [((), torch.float32), ((3,), torch.float64)]
    start = torch.get_rng_state()
    torch.rand(())
    torch.rand(3, dtype=torch.float64)
    expected = torch.get_rng_state()
    torch.set_rng_state(start)
    draw_again(draws)
    assert torch.equal(torch.get_rng_state(), expected)
    assert is_explained_by(draws, start)


def test_more_draws_than_known_are_not_explained():
    start = torch.get_rng_state()
    torch.rand(())
    torch.rand(())
    assert not is_explained_by([((), torch.float32)], start)
