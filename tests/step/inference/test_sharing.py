"""Which prompts share a batch: results are those of an example on its own, whatever the model does with padding."""

import warnings

import peft
import pytest
import torch
import transformers
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step.inference import _decoding, generation
from batchwright.step.inference.generation import generate
from tests.step.graphs.tape import TapeGraphs

from . import shapes

SMALL = {"vocab_size": shapes.NUM_TOKENS, "hidden_size": 16, "num_hidden_layers": 2}
BART = {
    **{name: value for name, value in shapes.M2M100.items() if name != "max_position_embeddings"},
    "max_position_embeddings": 128, "is_decoder": True, "is_encoder_decoder": False, "forced_eos_token_id": None,
}  # fmt: skip
RECURRENT = {**SMALL, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24, "lru_width": 16}


def make_bart():
    """Its positions are counted from the first column, padding or not."""
    return shapes.make_random(transformers.BartForCausalLM, transformers.BartConfig(**BART))


def make_xlnet():
    """It has no mask for padding that stands in front."""
    config = transformers.XLNetConfig(vocab_size=shapes.NUM_TOKENS, d_model=16, n_layer=2, n_head=2, d_inner=24)
    return shapes.make_random(transformers.XLNetLMHeadModel, config)


def make_recurrent():
    """Its state runs over padding as over tokens."""
    config = transformers.RecurrentGemmaConfig(**RECURRENT, attention_window_size=8)
    return shapes.make_random(transformers.RecurrentGemmaForCausalLM, config)


def make_prompt_tuned(kind=peft.PromptTuningConfig):
    """Learned tokens stand in front of the padding, and so at another distance from each prompt."""
    torch.manual_seed(0)
    return peft.get_peft_model(shapes.make("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()


def alone(make, examples, **options):
    """Return what a new model gives for each example."""
    found = []
    for ids in examples:
        row = torch.tensor([ids])
        result = make().generate(input_ids=row, attention_mask=torch.ones_like(row), pad_token_id=1, **options)
        found.append(result[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize(
    "make",
    [make_bart, make_xlnet, make_recurrent, make_prompt_tuned, shapes.make_dynamic, shapes.make_long],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_every_result_is_what_the_example_alone_gives(make, graphs):
    examples, options = shapes.prompts(12), {"max_new_tokens": 8}
    found = generate(
        make(), examples, graphs=TapeGraphs() if graphs else False, budget=bw.MaxItems(12), pad_multiple_of=8, **options
    )
    assert shapes.as_lists(found) == alone(make, examples, **options)


@pytest.mark.parametrize("make", [make_bart, make_prompt_tuned, shapes.make_long], ids=lambda one: one.__name__)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_in_one_batch_results_would_be_others(make, monkeypatch):
    monkeypatch.setattr(_decoding, "is_doubtful", lambda model: False)
    monkeypatch.setattr(_decoding, "same_reach", lambda base: None)
    examples, options = shapes.prompts(12), {"max_new_tokens": 8}
    found = generate(make(), examples, graphs=False, budget=bw.MaxItems(12), **options)
    assert shapes.as_lists(found) != alone(make, examples, **options)


@pytest.mark.parametrize("base", [shapes.make_dynamic, shapes.make_long], ids=lambda one: one.__name__)
@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_learned_prompts_count_for_the_reach_of_positions(base, kind):
    def make():
        torch.manual_seed(0)
        return peft.get_peft_model(base(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()

    examples, options = shapes.prompts(12, longest=18), {"max_new_tokens": 5}
    found = generate(make(), examples, graphs=False, budget=bw.MaxItems(12), **options)
    assert shapes.as_lists(found) == alone(make, examples, **options)


def test_a_long_text_changes_nothing_for_those_after_it():
    model, long, short = shapes.make_dynamic(), [13] * 60, [[12] * 20, [14] * 5]
    generate(model, [long], graphs=False, max_new_tokens=4)
    found = generate(model, short, graphs=False, max_new_tokens=4)
    assert shapes.as_lists(found) == alone(shapes.make_dynamic, short, max_new_tokens=4)


def test_a_row_that_has_ended_does_not_carry_others_beyond_their_reach():
    """Each of them stays below 24 tokens, but the first one would count up to 20 + 15 beside the second."""
    examples, limits = [[12] * 20, [13] * 5], [2, 15]
    found = generate(shapes.make_long(), examples, graphs=False, max_new_tokens=limits, budget=bw.MaxItems(2))
    expected = [
        alone(shapes.make_long, [example], max_new_tokens=limit)[0]
        for example, limit in zip(examples, limits, strict=True)
    ]
    assert shapes.as_lists(found) == expected


def test_rows_up_to_the_reach_of_their_positions_are_replayed_and_others_are_said_to_run_eagerly_once():
    examples = [*([12 + place, 13] for place in range(9)), [14] * 30, [15] * 40]
    graphs = TapeGraphs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        generate(shapes.make_long(), examples, graphs=graphs, max_new_tokens=9)
    said = [str(one.message) for one in caught if "runs eagerly" in str(one.message)]
    assert said == [
        "generate runs eagerly: beyond 24 tokens the positions of Phi3ForCausalLM change with the longest row"
    ]
    assert graphs.num_replays


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("llama", "assistant_model"),
        ("m2m100", "assistant_model"),
        ("llama", "prompt_lookup_num_tokens"),
        ("m2m100", "prompt_lookup_num_tokens"),
        ("llama", "assistant_early_exit"),  # which models with an encoder lack
    ],
)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
def test_assisted_decoding_runs_examples_one_by_one_and_that_is_said_once(name, graphs, option, monkeypatch):
    monkeypatch.setattr(generation, "_SAID", set())
    model, examples, limits = shapes.make(name), shapes.prompts(6), [3, 9, 1, 8, 5, 7]
    values = {"assistant_model": shapes.make(name, seed=1), "prompt_lookup_num_tokens": 2, "assistant_early_exit": 1}
    options = {option: values[option], "budget": bw.MaxItems(4), "pad_multiple_of": 8}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            found = generate(
                model, examples, graphs=TapeGraphs() if graphs else False, max_new_tokens=limits, **options
            )
    said = [str(one.message) for one in caught if "one by one" in str(one.message)]
    assert said == [f"generate runs examples one by one: with {option} transformers takes no more at a time"]
    for ids, limit, row in zip(examples, limits, found, strict=True):
        ones = torch.tensor([ids])
        own = {"attention_mask": torch.ones_like(ones), "max_new_tokens": limit, option: values[option]}
        wanted = model.generate(input_ids=ones, **own)[0].tolist()
        assert row.tolist() == (wanted if model.config.is_encoder_decoder else wanted[len(ids) :])


class AfterLength(transformers.StoppingCriteria):
    """Ends rows of 20 tokens, as MaxLengthCriteria does."""

    def __call__(self, input_ids, scores, **options):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 20)


READERS = {
    "logits_processor": [transformers.RepetitionPenaltyLogitsProcessor(0.1)],
    "stopping_criteria": [AfterLength()],
    "prefix_allowed_tokens_fn": lambda place, ids: [40 + len(ids) % 20, 20],
    "encoder_repetition_penalty": 3.0,
    "no_repeat_ngram_size": 1,
    "forced_bos_token_id": 33,
}


@pytest.mark.parametrize("option", READERS)
@pytest.mark.parametrize("num_beams", [1, 2])
def test_what_sees_padding_gets_none_and_that_is_said_once(option, num_beams, monkeypatch):
    monkeypatch.setattr(generation, "_SAID", set())
    model, examples = shapes.make("llama"), [*shapes.prompts(11, longest=12), [13]]
    options = {"max_new_tokens": 12, "num_beams": num_beams, option: READERS[option]}
    many = {"budget": bw.MaxItems(12), "pad_multiple_of": 8, "pad_token_id": 5}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            found = generate(model, examples, graphs=False, **many, **options)
    said = [str(one.message) for one in caught if "generate " in str(one.message)]
    assert [option in text for text in said] == [True]
    assert shapes.as_lists(found) == alone(lambda: model, examples, **options)


def alone_in(model, examples, **options):
    """Return what an encoder-decoder gives for each example."""
    rows = [torch.tensor([ids]) for ids in examples]
    return [model.generate(input_ids=row, attention_mask=torch.ones_like(row), **options)[0].tolist() for row in rows]


@pytest.mark.filterwarnings("ignore:generate puts only")
def test_sources_share_no_batch_with_shorter_ones_where_a_penalty_counts_their_tokens():
    model, examples = shapes.make("t5"), shapes.prompts(12, longest=8)
    options = {"max_new_tokens": 8, "encoder_repetition_penalty": 3.0, "min_new_tokens": 8}
    found = generate(model, examples, graphs=False, budget=bw.MaxItems(12), **options)
    assert shapes.as_lists(found) == alone_in(model, examples, **options)


@pytest.mark.filterwarnings("ignore:generate puts only")
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_a_function_of_allowed_tokens_is_told_the_place_among_all_examples(name):
    model, examples = shapes.make(name), shapes.prompts(9)
    options = {"prefix_allowed_tokens_fn": lambda place, ids: [20 + place], "num_beams": 2, "max_new_tokens": 3}
    found = generate(model, examples, graphs=False, budget=bw.MaxItems(4), **options)
    assert [row.tolist()[-3:] for row in found] == [[20 + place] * 3 for place in range(9)]


def test_models_that_are_told_positions_share_batches(monkeypatch):
    monkeypatch.setattr(_decoding, "pads_freely", lambda *_: pytest.fail("tried"))
    for name in shapes.NAMES:
        generate(shapes.make(name), shapes.prompts(3), graphs=False, max_new_tokens=2)


def test_a_model_without_positions_that_padding_does_not_change_shares_batches():
    """Bloom tells distances by the mask."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=shapes.NUM_TOKENS, hidden_size=16, n_layer=2, n_head=2)
    decoder = _decoding.Decoder(transformers.BloomForCausalLM(config).eval(), {"max_new_tokens": 3}, None, None, 1)
    assert [len(group.places) for group in decoder.groups(shapes.prompts(7), None)] == [7]


@pytest.mark.parametrize(
    "wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")], ids=["parallel", "compiled"]
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_learned_prompts_count_under_a_wrapper_too(wrap):
    examples = shapes.prompts(5)
    expected = alone(make_prompt_tuned, examples, max_new_tokens=6)
    for graphs in (False, TapeGraphs()):
        found = generate(wrap(make_prompt_tuned()), examples, graphs=graphs, max_new_tokens=6)
        assert shapes.as_lists(found) == expected


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize(
    ("example", "match"),
    [
        ([12.0, 13.0], "whole numbers"),
        ([True, False], "whole numbers"),
        ([[12], [13]], "2 axes"),
        (["a"], "must be token ids"),
        ([None], "must be token ids"),
        ({"input_ids": [1.5]}, "whole numbers"),
        ([12, shapes.NUM_TOKENS], "from 0 to 60, got 12 to 61"),
        ({"input_ids": [-1]}, "from 0 to 60, got -1 to -1"),
    ],
)
def test_what_are_no_ids_of_the_model_is_refused(name, example, match):
    with pytest.raises(ArgumentError, match=match):
        generate(shapes.make(name), [example], graphs=False, max_new_tokens=2)


def test_an_image_may_stand_for_an_id_beyond_those_of_the_table():
    """Idefics has 32,000 ids and another table for an image; PaliGemma puts 0 in place of such an id."""

    class Seeing(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, pixel_values=None, **kwargs):
            return super().forward(input_ids.clamp(max=shapes.NUM_TOKENS - 1), **kwargs)

    model = shapes.make("llama")
    model.__class__ = Seeing
    example = {"input_ids": [12, shapes.NUM_TOKENS, 13], "pixel_values": torch.zeros(2, 2)}
    found = generate(model, [example], graphs=False, max_new_tokens=3)
    plain = generate(shapes.make("llama"), [[12, shapes.NUM_TOKENS - 1, 13]], graphs=False, max_new_tokens=3)
    assert shapes.as_lists(found) == shapes.as_lists(plain)


def test_examples_may_come_from_a_generator():
    model, examples = shapes.make("llama"), shapes.prompts(4)
    found = generate(model, (one for one in examples), max_new_tokens=3)
    assert shapes.as_lists(found) == shapes.as_lists(generate(model, examples, max_new_tokens=3))
