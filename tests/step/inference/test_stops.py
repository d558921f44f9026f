"""Results of which a criterion or a string says where they end, and no end-of-sequence token."""

import string

import pytest
import tokenizers
import transformers

import batchwright as bw
from batchwright.step.inference.generation import generate

from . import shapes
from .test_sharing import alone_in


class After(transformers.StoppingCriteria):
    """Ends rows at a token of the upper third."""

    def __call__(self, input_ids, scores, **options):
        return input_ids[:, -1] > 40


LETTERS = (string.ascii_letters + string.digits)[: shapes.NUM_TOKENS]


def make_tokenizer():
    """One letter for each token."""
    words = {letter: number for number, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def alone(model, examples, **options):
    found = alone_in(model, examples, **options)
    if model.config.is_encoder_decoder:
        return found
    return [row[len(ids) :] for ids, row in zip(examples, found, strict=True)]


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize(
    ("ends", "pad"), [(5, 5), ([5, 6], 1), (None, 1)], ids=["padding is the end", "padding of its own", "no end"]
)
@pytest.mark.parametrize("num_beams", [1, 2])
@pytest.mark.filterwarnings("ignore:generate runs examples one by one", "ignore:generate puts only")
def test_what_a_criterion_has_ended_is_what_the_example_alone_gives(name, ends, pad, num_beams):
    model, examples = shapes.make(name), [[12 + place, 13 + 2 * place, 14] for place in range(12)]
    options = {"max_new_tokens": 8, "eos_token_id": ends, "pad_token_id": pad, "num_beams": num_beams}
    options["stopping_criteria"] = transformers.StoppingCriteriaList([After()])
    found = generate(model, examples, graphs=False, budget=bw.MaxItems(12), **options)
    expected = alone(model, examples, **options)
    assert shapes.as_lists(found) == expected
    assert len({len(row) for row in expected}) > 1


@pytest.mark.parametrize("ends", [5, None])
def test_strings_to_stop_at_leave_no_padding(ends):
    model, examples = shapes.make("llama"), [[12 + place, 13 + 2 * place] for place in range(12)]
    options = {"max_new_tokens": 8, "eos_token_id": ends, "pad_token_id": 5, "stop_strings": list(LETTERS[40:])}
    options["tokenizer"] = make_tokenizer()
    limits = [1 + place % 8 for place in range(12)]
    for given in (8, limits):
        found = generate(model, examples, graphs=False, budget=bw.MaxItems(12), **{**options, "max_new_tokens": given})
        for row, ids, limit in zip(found, examples, limits, strict=True):
            [expected] = alone(model, [ids], **{**options, "max_new_tokens": 8 if given == 8 else limit})
            assert row.tolist() == expected


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_criteria_of_transformers_take_the_place_of_its_own():
    model, examples = shapes.make("llama"), [[12, 13, 14], [15, 16, 17]]
    options = {"stopping_criteria": transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(30)])}
    options["eos_token_id"] = None
    found = generate(model, examples, graphs=False, **options)
    assert shapes.as_lists(found) == alone(model, examples, **options)
