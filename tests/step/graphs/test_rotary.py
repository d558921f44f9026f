"""graphed with rotary positions that are others beyond some length: no call is padded to the other side of it."""

import warnings

import numpy as np
import pytest
import torch

from batchwright.step import graphed
from batchwright.step.graphs._rotary import rotary_of, side_of, sides_of
from batchwright.testing import EagerGraphs
from tests.step.inference import shapes

from .tape import TapeGraphs

LENGTHS = [3, 16, 20, 32, 24, 25, 60, 20, 32, 16, 5, 40, 24, 60]
FILLS = {"input_ids": 0, "attention_mask": 0}


def make_function(model, num_times=1):
    def hidden(input_ids, attention_mask):
        fields = {"input_ids": input_ids, "attention_mask": attention_mask}
        fields = {name: torch.cat([tensor] * num_times, dim=1) for name, tensor in fields.items()}
        return model(**fields, use_cache=False).last_hidden_state[:, : input_ids.shape[1]]

    return hidden


def make_calls():
    rng = np.random.default_rng(0)
    ids = [torch.from_numpy(rng.integers(12, shapes.NUM_TOKENS, (2, length))) for length in LENGTHS]
    return [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]


def said_of(make_model, backend, planned, num_times=1):
    """Compare calls with eager ones in the same order, and return what was said and the summary."""
    own, plain = make_function(make_model().model, num_times), make_function(make_model().model, num_times)
    function = graphed(
        own, planned, pad=FILLS, cut=lambda output, shape: output[: shape[0], : shape[1]], graphs=backend()
    )
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for call in make_calls():
            torch.testing.assert_close(function(**call), plain(**call), atol=2e-5, rtol=0)
    return [str(one.message) for one in caught if "eagerly" in str(one.message)], function.summary()


@pytest.mark.parametrize("backend", [EagerGraphs, TapeGraphs])
def test_a_call_is_never_padded_beyond_the_reach_of_its_positions(backend):
    said, summary = said_of(shapes.make_long, backend, [(2, 16), (2, 32), (2, 64)])
    assert len(said) == 1
    assert "plan that length too" in said[0]
    assert summary.num_eager == sum(16 < length <= 24 for length in LENGTHS)


@pytest.mark.parametrize("backend", [EagerGraphs, TapeGraphs])
def test_with_a_shape_up_to_the_reach_every_call_is_replayed(backend):
    said, summary = said_of(shapes.make_long, backend, [(2, 16), (2, 24), (2, 25), (2, 64)])
    assert not said
    assert summary.num_eager == 0


@pytest.mark.parametrize("backend", [EagerGraphs, TapeGraphs])
def test_a_function_that_gives_columns_other_positions_is_noticed(backend):
    """It reads a row twice, so that the reach is half as many columns."""
    said, summary = said_of(shapes.make_long, backend, [(2, 16), (2, 24), (2, 64)], num_times=2)
    assert len(said) == 1
    assert "padding changes what the function returns" in said[0]
    assert summary.num_replayed == 0


@pytest.mark.parametrize("backend", [EagerGraphs, TapeGraphs])
def test_positions_that_depend_on_the_calls_before_are_not_captured(backend):
    said, summary = said_of(shapes.make_dynamic, backend, [(2, 16), (2, 32), (2, 60)])
    assert len(said) == 1
    assert "depend on the longest row so far" in said[0]
    assert summary.num_replayed == 0


@pytest.mark.parametrize("backend", [EagerGraphs, TapeGraphs])
def test_another_model_is_padded_by_its_own_reach(backend):
    """The first one has the same positions for any length."""
    models = [shapes.make("llama").model, shapes.make_long().model]
    held = {"model": models[0]}

    def hidden(input_ids, attention_mask):
        return make_function(held["model"])(input_ids, attention_mask)

    function = graphed(
        hidden,
        [(2, 16), (2, 32)],
        pad=FILLS,
        cut=lambda output, shape: output[: shape[0], : shape[1]],
        graphs=backend(),
    )
    call = make_calls()[2]
    function(**call)
    held["model"] = models[1]
    with torch.no_grad(), pytest.warns(UserWarning, match="plan that length too"):
        torch.testing.assert_close(function(**call), hidden(**call), atol=2e-5, rtol=0)


def test_lengths_share_a_batch_where_their_frequencies_are_the_same():
    (long,), (dynamic,) = (rotary_of(make().modules()) for make in (shapes.make_long, shapes.make_dynamic))
    lengths = [3, 24, 25, 16, 17, 25]
    assert sides_of((), lengths) == [[0, 1, 2, 3, 4, 5]]
    assert sides_of((long,), lengths) == [[2, 5], [0, 1, 3, 4]]
    assert sides_of((dynamic,), lengths) == [[2, 5], [1], [4], [0, 3]]
    assert side_of((long, dynamic), 20) == (0, 20)
