"""Which prompts share a batch: results are those of an example on its own, whatever the model does with padding."""

import warnings

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


def make_prompt_tuned():
    """Learned tokens stand in front of the padding, and so at another distance from each prompt."""
    torch.manual_seed(0)
    return with_learned_prompt(shapes.make("llama"), "PromptTuningConfig")


def with_learned_prompt(base, kind):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()


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
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_learned_prompts_count_for_the_reach_of_positions(base, kind):
    def make():
        torch.manual_seed(0)
        return with_learned_prompt(base(), kind)

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
    "encoder_no_repeat_ngram_size": 1,
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


def make_repeating(pad=1, favours=12):
    """It likes the tokens that it has read, and one of them most of all."""
    model = shapes.make("llama")
    with torch.no_grad():
        model.lm_head.weight.copy_(3 * model.get_input_embeddings().weight)
        model.lm_head.weight[favours] = 1.5 * model.lm_head.weight[12:20].mean(0)
    model.generation_config.pad_token_id = pad
    return model


def make_bigrams(pad, following):
    """Each token is followed by the one that is given, and where that may not come by 20."""
    model = shapes.make("llama", hidden_size=64, num_key_value_heads=4)
    model.lm_head = nn.Linear(64, shapes.NUM_TOKENS, bias=False)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(64)[: shapes.NUM_TOKENS])
        model.lm_head.weight.zero_()
        model.lm_head.weight[20] = 1.0
        for token, follower in following.items():
            model.lm_head.weight[follower, token] = 2.0
    model.generation_config.pad_token_id = pad
    return model


@pytest.mark.parametrize("name", ["no_repeat_ngram_size", "encoder_no_repeat_ngram_size"])
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize(
    ("pad", "following", "result"),
    [(1, {13: 1, 1: 12}, [1, 12]), (None, {13: 12, 12: 12}, [12, 12])],
    ids=["padding comes and then the first token", "no padding token, the first token comes twice"],
)
def test_ngrams_that_begin_with_padding_keep_no_token_from_coming(name, num_beams, pad, following, result):
    """Filled up with 1, [12, 13] would hold (1, 12), and with its first token (12, 12)."""
    model, examples = make_bigrams(pad, following), [[12, 13], [12, 14, 15, 16, 13]]
    options = {"max_new_tokens": 2, name: 2, "num_beams": num_beams}
    assert alone(lambda: model, examples, **options) == [result] * 2
    found = generate(model, examples, graphs=False, budget=bw.MaxItems(2), **options)
    assert shapes.as_lists(found) == [result] * 2


def test_prompts_that_end_with_the_token_that_fills_up_share_batches_only_with_those_of_their_length():
    model, examples = make_repeating(pad=4), [[*ids, 4] for ids in shapes.prompts(20, longest=6)]
    options = {"max_new_tokens": 8, "no_repeat_ngram_size": 3, "eos_token_id": 4}
    decoder = _decoding.Decoder(model, options, None, None, 8)
    assert len(decoder.groups([[12, 13], [4], [12, 4], [13, 4], [4, 13, 14]], None)) == 3
    found = generate(model, examples, graphs=False, budget=bw.MaxItems(20), pad_multiple_of=8, **options)
    assert shapes.as_lists(found) == alone(lambda: model, examples, **options)


@pytest.mark.parametrize(
    "option", [{"repetition_penalty": 1.3}, {"eos_token_id": None}], ids=lambda option: next(iter(option))
)
@pytest.mark.filterwarnings("ignore:generate puts only")
def test_ngrams_without_a_token_to_fill_up_with_get_no_padding(option):
    """A penalty counts the token that ends a row, and without such a token any other may come."""
    model, examples = make_bigrams(1, {13: 1, 1: 12}), [[12, 13], [12, 14, 15, 16, 13]]
    model.generation_config.eos_token_id = option.get("eos_token_id", shapes.ENDS)
    found = generate(
        model, examples, graphs=False, budget=bw.MaxItems(2), max_new_tokens=2, no_repeat_ngram_size=2, **option
    )
    assert shapes.as_lists(found) == [[1, 12]] * 2


@pytest.mark.parametrize("name", ["m2m100", "t5"])
@pytest.mark.filterwarnings("ignore:generate puts only")
def test_ngrams_of_a_source_are_those_without_padding(name):
    model, examples = shapes.make(name), shapes.prompts(40, longest=6)
    with torch.no_grad():
        model.lm_head.weight[1] = 9 * model.lm_head.weight[12:].mean(0)
    options = {"max_new_tokens": 12, "encoder_no_repeat_ngram_size": 1, "eos_token_id": [59]}
    found = generate(model, examples, graphs=False, budget=bw.MaxItems(40), **options)
    assert shapes.as_lists(found) == alone_in(model, examples, **options)
    assert any(1 in row[1:] for row in shapes.as_lists(found))


@pytest.mark.parametrize("option", ["bad_words_ids", "sequence_bias"])
def test_a_word_that_begins_with_padding_is_not_found_in_front_of_a_prompt(option):
    """Without a padding token the first one of [13] would fill it up to [13, 13, 13]."""
    model, examples = make_repeating(pad=None), [[13], [14], [15], [12, 16, 17, 18]]
    (first,) = alone(lambda: model, examples[:1], max_new_tokens=1)
    words = [[ids[0], ids[0], first[0]] for ids in examples[:3]]
    value = words if option == "bad_words_ids" else {tuple(word): -100.0 for word in words}
    options = {"max_new_tokens": 4, option: value}
    found = generate(model, examples, graphs=False, budget=bw.MaxItems(4), **options)
    assert shapes.as_lists(found) == alone(lambda: model, examples, **options)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
def test_double_precision_without_sdpa_gives_what_each_prompt_gives_alone(name, graphs):
    """Softmax in single precision makes no numbers of a row whose scores are all the lowest of double precision."""
    model, examples = shapes.make(name, torch.float64), shapes.prompts(12)
    model.set_attn_implementation("eager")
    found = generate(
        model, examples, graphs=TapeGraphs() if graphs else False, budget=bw.MaxItems(12), max_new_tokens=8
    )
    assert shapes.as_lists(found) == alone(lambda: model, examples, max_new_tokens=8)


@pytest.mark.parametrize("name", ["negative_prompt_ids", "past_key_values", "position_ids"])
def test_what_belongs_to_each_example_is_refused_as_an_argument(name):
    """One for all would be joined to every batch; a cache would go on from batch to batch."""
    with pytest.raises(ArgumentError, match=f"{name} belongs to each example"):
        generate(shapes.make("llama"), shapes.prompts(3), graphs=False, max_new_tokens=2, **{name: torch.ones(1, 2)})


def test_a_second_prompt_of_an_example_is_not_padded_as_the_first_one_is():
    """It would need a mask of its own, even if it is as long by chance."""
    examples = [{"input_ids": ids, "negative_prompt_ids": ids} for ids in ([12, 13, 14], [12, 13])]
    with pytest.raises(ArgumentError, match="'negative_prompt_ids' has unequal lengths"):
        generate(shapes.make("llama"), examples, graphs=False, max_new_tokens=2, guidance_scale=1.5)


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
