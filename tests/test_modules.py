"""Parts of modules: found once and read anew."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from batchwright._modules import Parts, parameters_of, parts_of, recomputes_activations


def are_same(found, wanted):
    found, wanted = list(found), list(wanted)
    return len(found) == len(wanted) and all(one is other for one, other in zip(found, wanted, strict=True))


def make():
    tied = nn.Linear(3, 3)
    model = nn.Sequential(tied, nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), tied))
    model[2][0].weight = tied.weight
    return model


def replace_a_part(model):
    model[2][0] = nn.Linear(3, 3)


def add_a_part_to_a_leaf(model):
    model[0].more = nn.Linear(1, 1)


def take_a_part_away(model):
    del model[2][1]


def swap_two_parts(model):
    first, second = model[0], model[1]
    model._modules["0"], model._modules["1"] = second, first


def parametrize_a_weight(model):
    parametrizations.weight_norm(model[2][0])


def replace_a_parameter(model):
    model[0].bias = nn.Parameter(torch.zeros(3))


def add_a_parameter(model):
    model.scale = nn.Parameter(torch.ones(1))


def add_a_buffer(model):
    model.register_buffer("count", torch.zeros(1))


CHANGES = (
    replace_a_part, add_a_part_to_a_leaf, take_a_part_away, swap_two_parts, parametrize_a_weight, replace_a_parameter,
    add_a_parameter, add_a_buffer,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_what_is_found_is_what_torch_finds_before_and_after_a_change(change):
    model = make()
    for _ in range(2):
        assert are_same(parameters_of(model), model.parameters())
        assert are_same(parts_of(model).buffers(), model.buffers())
    change(model)
    assert are_same(parameters_of(model), model.parameters())
    assert are_same(parts_of(model).buffers(), model.buffers())


def test_the_walk_is_made_once_while_the_parts_stay():
    model = make()
    assert parts_of(model) is parts_of(model)
    first = parts_of(model)
    replace_a_part(model)
    assert parts_of(model) is not first


def test_a_model_is_not_kept_alive_even_by_parts_that_know_it():
    model = make()
    model[0].owner = [model]
    parts_of(model)
    place = weakref.ref(model)
    del model
    gc.collect()
    assert place() is None


def test_a_part_that_is_gone_makes_the_walk_outdated():
    model = make()
    parts = Parts(model)
    del model
    gc.collect()
    assert parts.is_outdated


class Chosen(nn.Linear):
    def named_parameters(self, *args, **kwargs):
        return [("weight", self.weight)]


def test_a_module_that_names_its_own_parameters_is_asked():
    model = Chosen(2, 2)
    assert are_same(parameters_of(model), [model.weight])


@pytest.mark.parametrize("is_on", [True, False])
def test_a_model_of_transformers_is_asked_whether_it_computes_activations_again_without_a_warning(is_on):
    transformers = pytest.importorskip("transformers")
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 8,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    model.model.gradient_checkpointing = is_on  # what enabling sets, by a name that each release has
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recomputes_activations(model) is is_on


def test_a_model_of_an_older_transformers_is_asked_by_the_old_name():
    model = nn.Linear(1, 1)
    assert recomputes_activations(model) is False
    model.is_gradient_checkpointing = True
    assert recomputes_activations(model) is True
