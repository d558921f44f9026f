"""generate: what each example alone would give, in batches that fit."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError, LengthsError
from batchwright.step import MemoryMonitor
from batchwright.step.inference.generation import generate
from batchwright.testing import FakeMemory

NUM_TOKENS = 29
ENDS = list(range(4, 12))  # so many that results end at many lengths
SEQ2SEQ = {
    "vocab_size": NUM_TOKENS,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
LLAMA = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
}
T5 = {"vocab_size": NUM_TOKENS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
MODELS = {
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}),
    "MarianMTModel": ("MarianConfig", SEQ2SEQ),
    # Its results begin with a token that ends others.
    "BartForConditionalGeneration": ("BartConfig", {**SEQ2SEQ, "decoder_start_token_id": ENDS[0]}),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": NUM_TOKENS, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2},
    ),
}


def make_model(name, dtype=torch.float64):
    config, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**options))
    # Small weights and an output tied to the input repeat one token for ever; these wander.
    model.lm_head = nn.Linear(8, NUM_TOKENS, bias=False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=2.0)
    model.generation_config.eos_token_id = ENDS
    return model.to(dtype)


def make_examples(num=9, longest=12):
    rng = np.random.default_rng(1)
    return [rng.integers(12, NUM_TOKENS, size=length).tolist() for length in rng.integers(1, longest, size=num)]


def alone(model, ids, **options):
    """Return the result of one example without any padding."""
    ids = torch.as_tensor(ids)[None]
    model.eval()
    row = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)[0]
    return row.tolist() if model.config.is_encoder_decoder else row[ids.shape[1] :].tolist()


class Recorded(nn.Module):
    """A model that remembers its batches and cannot take more than ``most`` padded tokens, or than a memory has."""

    def __init__(self, model, most=10**9, memory=None):
        super().__init__()
        self.module, self.most, self.memory, self.shapes = model, most, memory, []

    def generate(self, **batch):
        self.shapes.append(tuple(batch["input_ids"].shape))
        if self.memory is not None:
            self.memory.run_batch(*batch["input_ids"].shape)
        if batch["input_ids"].numel() > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.module.generate(**batch)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_result_is_what_the_example_alone_gives(name, dtype):
    model, examples = make_model(name, dtype), make_examples()
    found = generate(model, examples, budget=bw.MaxItems(4), max_new_tokens=8)
    expected = [alone(model, example, max_new_tokens=8) for example in examples]
    assert [row.tolist() for row in found] == expected
    assert len({len(row) for row in expected}) > 1  # else nothing was cut


@pytest.mark.parametrize("name", ["MarianMTModel", "LlamaForCausalLM"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 6, "num_beams": 3},
        {"max_length": 14},
        {"max_new_tokens": 6, "min_new_tokens": 3},
        {"generation_config": transformers.GenerationConfig(max_length=13, eos_token_id=[5, 6], pad_token_id=0)},
    ],
    ids=["beams", "max_length", "min_new_tokens", "configuration"],
)
@pytest.mark.parametrize("shape", [{}, {"budget": bw.MaxTokens(40), "count_output": True, "pad_multiple_of": 8}])
def test_options_of_generate_mean_the_same_in_a_batch(name, options, shape):
    model, examples = make_model(name), make_examples()
    found = generate(model, examples, **options, **shape)
    model.generation_config.pad_token_id = 0
    assert [row.tolist() for row in found] == [alone(model, example, **options) for example in examples]


def test_a_penalty_on_repetition_does_not_count_padding():
    # GPT-2 has no padding token; its end-of-sequence token in front of short rows would be penalised in those alone.
    model, examples = make_model("GPT2LMHeadModel"), make_examples()
    options = {"max_new_tokens": 8, "repetition_penalty": 3.0}
    found = generate(model, examples, **options)
    assert [row.tolist() for row in found] == [alone(model, example, **options) for example in examples]


def test_lengths_without_any_option_are_those_of_transformers():
    model, examples = make_model("LlamaForCausalLM"), make_examples(4)
    model.generation_config.eos_token_id = None
    with pytest.warns(UserWarning, match="max_length"):
        found = generate(model, examples)
    assert [len(row) for row in found] == [20] * 4


def test_examples_may_be_tensors_arrays_or_mappings():
    model, ids = make_model("MarianMTModel"), make_examples(4)
    expected = [row.tolist() for row in generate(model, ids, max_new_tokens=6)]
    forms = [
        [torch.tensor(row) for row in ids],
        [np.array(row) for row in ids],
        [{"input_ids": row} for row in ids],
        [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids],
    ]
    for form in forms:
        assert [row.tolist() for row in generate(model, form, max_new_tokens=6)] == expected


def test_a_mask_and_a_decoder_prompt_of_an_example_reach_the_model():
    model = make_model("MarianMTModel")
    examples = [
        {"input_ids": [11, 12, 13, 14], "attention_mask": [1, 0, 1, 1], "decoder_input_ids": [0, 20]},
        {"input_ids": [15], "attention_mask": [1], "decoder_input_ids": [0, 21]},
    ]
    found = generate(model, examples, max_new_tokens=5)
    model.eval()
    for example, row in zip(examples, found, strict=True):
        batch = {name: torch.tensor([value]) for name, value in example.items()}
        assert row.tolist() == model.generate(**batch, max_new_tokens=5, pad_token_id=0)[0].tolist()


def test_a_collate_of_ones_own_and_lengths_take_any_example():
    model, ids = make_model("MarianMTModel"), make_examples(6)
    texts = [" ".join(map(str, row)) for row in ids]

    def collate(chosen):
        rows = [torch.tensor([int(word) for word in text.split()]) for text in chosen]
        padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"input_ids": padded, "attention_mask": (padded != 0).long()}

    expected = [row.tolist() for row in generate(model, ids, max_new_tokens=5)]
    for lengths in (lambda text: len(text.split()), [len(row) for row in ids]):
        found = generate(model, texts, collate=collate, lengths=lengths, max_new_tokens=5)
        assert [row.tolist() for row in found] == expected


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LlamaForCausalLM"])
def test_batches_that_run_out_of_memory_are_split_and_stay_small(name):
    model, examples = make_model(name), make_examples(12)
    recorded = Recorded(model, most=20)
    found = generate(recorded, examples, budget=bw.MaxItems(8), max_new_tokens=4)
    assert [row.tolist() for row in found] == [alone(model, example, max_new_tokens=4) for example in examples]
    failed = [rows * width for rows, width in recorded.shapes if rows * width > 20]
    # The first batch fails whole and once more in part; what was learned keeps the second one from failing.
    assert 1 <= len(failed) <= 3
    assert sum(rows for rows, width in recorded.shapes if rows * width <= 20) == 12


def test_without_a_budget_batches_double_while_they_fit():
    recorded = Recorded(make_model("LlamaForCausalLM"))
    generate(recorded, [[11, 12, 13]] * 100, max_new_tokens=2)
    # 8 of the longest, then twice the tokens, at most 32 examples on a CPU; what is left is 100 - 88.
    assert [rows for rows, _ in recorded.shapes] == [8, 16, 32, 32, 12]


def test_without_a_budget_the_peak_of_a_batch_says_how_large_the_next_can_be():
    # A token takes 10 bytes, 2 new ones per example. Of 4,000 bytes 1,000 are taken: 0.8 x 4,000 - 1,000 is 220 tokens.
    memory = FakeMemory(4000, used_bytes=1000, bytes_of=lambda num, length: 10 * num * (length + 2))
    recorded = Recorded(make_model("LlamaForCausalLM"), memory=memory)
    generate(recorded, [[11] * 3] * 100, max_new_tokens=2, memory=MemoryMonitor(source=memory))
    # 8 examples first, of 5 tokens each; 220 tokens are 44 of them.
    assert recorded.shapes == [(8, 3), (44, 3), (44, 3), (4, 3)]


def test_a_small_batch_is_followed_by_one_at_most_32_times_as_large():
    memory = FakeMemory(10**9)
    recorded = Recorded(make_model("LlamaForCausalLM"), memory=memory)
    generate(recorded, [[11] * 3] * 2000, max_new_tokens=2, memory=MemoryMonitor(source=memory))
    assert recorded.shapes == [(8, 3), (256, 3), (1024, 3), (712, 3)]


def test_with_a_budget_the_peaks_of_others_are_left_alone():
    memory = FakeMemory(10**6)
    memory.run_batch(700, 100)
    options = {"max_new_tokens": 1, "memory": MemoryMonitor(source=memory)}
    generate(make_model("LlamaForCausalLM"), [[11]], budget=bw.MaxItems(4), **options)
    assert memory.peak_bytes == 70_000
    generate(make_model("LlamaForCausalLM"), [[11]], **options)
    assert memory.peak_bytes == 0


def test_a_peak_that_promised_too_much_is_survived():
    # The first batch takes little, others ten times as much per token.
    memory = FakeMemory(4000, bytes_of=lambda num, length: (1 if num == 8 else 10) * num * (length + 2))
    recorded = Recorded(make_model("LlamaForCausalLM"), memory=memory)
    found = generate(recorded, [[11] * 3] * 300, max_new_tokens=2, memory=MemoryMonitor(source=memory))
    assert len(found) == 300
    assert recorded.shapes[:3] == [(8, 3), (256, 3), (128, 3)]  # 256 take 12,800 bytes and are split
    assert max(num for num, _ in recorded.shapes[-3:]) <= 64


def test_without_a_budget_what_fitted_is_kept_after_running_out_of_memory():
    recorded = Recorded(make_model("LlamaForCausalLM"), most=20 * 3)
    found = generate(recorded, [[11, 12, 13]] * 100, max_new_tokens=2)
    assert len(found) == 100
    # 32 do not fit and run as 16 and 16; from there on 16.
    assert [rows for rows, _ in recorded.shapes] == [8, 16, 32, 16, 16, 16, 16, 12]


def test_the_longest_run_first_and_shapes_are_few():
    recorded = Recorded(make_model("LlamaForCausalLM"))
    generate(recorded, make_examples(30, longest=30), budget=bw.MaxItems(5), max_new_tokens=1, pad_multiple_of=16)
    widths = [width for _, width in recorded.shapes]
    assert widths == sorted(widths, reverse=True)
    assert set(widths) == {16, 32}


def test_a_budget_can_count_the_output():
    recorded = Recorded(make_model("LlamaForCausalLM"))
    generate(recorded, [[11] * 4] * 6, budget=bw.MaxTokens(30), count_output=True, max_new_tokens=11)
    # 4 tokens in and 11 out are 15 per example: two fit, while seven would by the input only.
    assert [rows for rows, _ in recorded.shapes] == [2, 2, 2]


def test_an_example_that_does_not_fit_alone_is_named_by_its_place():
    examples = [[11], [12] * 9, [13, 14]]
    with pytest.raises(DoesNotFitError, match=r"example 1 of length \[9, 3\] does not fit on its own.*2\.00 GiB"):
        generate(Recorded(make_model("LlamaForCausalLM"), most=5), examples, max_new_tokens=3)


def test_an_example_over_the_budget_runs_alone():
    recorded = Recorded(make_model("LlamaForCausalLM"))
    generate(recorded, [[11] * 9, [12], [13]], budget=bw.MaxTokens(4), max_new_tokens=1)
    assert recorded.shapes == [(1, 9), (2, 1)]


def test_results_can_be_trained_on_and_the_model_stays_in_its_mode():
    model = make_model("LlamaForCausalLM", torch.float32).train()
    frozen = model.lm_head.eval()
    (row,) = generate(model, [[11, 12]], max_new_tokens=3)
    assert not row.is_inference()
    assert row.device.type == "cpu"
    assert model.training
    assert not frozen.training


def test_dropout_is_off_while_generating():
    model = make_model("T5ForConditionalGeneration").train()  # with a dropout of 0.1
    examples = make_examples(6)
    found = generate(model, examples, max_new_tokens=8)
    assert [row.tolist() for row in found] == [alone(model, example, max_new_tokens=8) for example in examples]


def test_padding_behind_a_stopping_criterion_is_cut():
    class AfterTwo(transformers.StoppingCriteria):
        """Ends rows whose prompt began with 11 after two tokens."""

        def __call__(self, input_ids, scores, **options):
            starts_with_eleven = (input_ids == 11).any(dim=1)
            return starts_with_eleven & (input_ids.shape[1] >= 3 + 2)

    model = make_model("LlamaForCausalLM")
    criteria = transformers.StoppingCriteriaList([AfterTwo()])
    examples = [[11, 12, 13], [14, 15, 16]]
    options = {"max_new_tokens": 7, "eos_token_id": 28, "stopping_criteria": criteria}
    found = generate(model, examples, pad_token_id=1, **options)
    assert [len(row) for row in found] == [2, 7]


def test_no_examples_give_no_results():
    assert generate(make_model("LlamaForCausalLM"), []) == []


def test_progress_is_shown_where_it_is_asked_for(capsys):
    model = make_model("LlamaForCausalLM")
    generate(model, make_examples(3), max_new_tokens=1)
    assert capsys.readouterr().err == ""
    generate(model, make_examples(3), max_new_tokens=1, progress=True)
    assert "generating: 3 in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("examples", "options", "match"),
    [
        (["text"], {}, "token ids or a mapping with input_ids, got str"),
        ([torch.zeros(1, 3)], {}, "token ids or a mapping"),
        ({"input_ids": [[1]]}, {}, "must be a list with one entry per example, got dict"),
        ([[11]], {"input_ids": torch.zeros(1, 1)}, "input_ids belongs to each example"),
        ([[11]], {"num_return_sequences": 2, "do_sample": True}, "one sequence per example"),
        ([[11]], {"return_dict_in_generate": True}, "one sequence per example"),
        ([[11]], {"min_length": 3}, "use min_new_tokens"),
        ([[11]], {"max_length": 8, "num_beams": 2}, "use max_new_tokens"),
        ([[11] * 8, [11]], {"max_length": 8}, "8 tokens and max_length=8 leaves no room"),
        ([[11]], {"lengths": [1, 1]}, "one row per example, 1, got 2"),
        ([{"input_ids": [11]}, {"input_ids": [11], "more": [1]}], {}, "same fields"),
        ([{"input_ids": [11], "x": [1]}, {"input_ids": [11], "x": [1, 2]}], {}, "'x' has unequal lengths"),
        ([[11]], {"budget": 64}, r"write MaxItems\(64\)"),
        ([{"input_ids": [11], "text": "a text"}], {}, "field 'text' of an example is no numbers but str"),
        ([{"input_ids": [11], "forced_bos_token_id": 12}], {}, "forced_bos_token_id, which is a setting of the whole"),
        ([{"input_ids": [11], "max_new_tokens": 3}], {}, "max_new_tokens, which is a setting"),
        ([[11, 12], [13, 0]], {"pad_token_id": 0}, "1 of 2 end with the padding token, 0, so they seem to be padded"),
        (torch.tensor([[0, 13], [0, 14], [11, 12]]), {"pad_token_id": 0}, "2 of 3 begin with the padding token"),
        ([[11], [12]], {"max_new_tokens": [0, 3]}, "the least of which is 0"),
    ],
)
def test_what_cannot_be_generated_from_is_refused(examples, options, match):
    with pytest.raises(ArgumentError, match=match):
        generate(make_model("LlamaForCausalLM"), examples, **options)


@pytest.mark.parametrize(
    ("examples", "options"),
    [
        ([[11, 12], [13, 0], [14]], {"pad_token_id": 0}),
        ([[11, 12], [13, 0]], {"pad_token_id": 0, "eos_token_id": 0}),
        ([[11, 0], [13, 0]], {"pad_token_id": 0}),
        ([{"input_ids": [11, 12]}, {"input_ids": [13, 0], "attention_mask": [1, 1]}], {"pad_token_id": 0}),
    ],
    ids=["unequal", "an end", "all", "masks"],
)
def test_a_padding_token_that_says_something_is_a_token_as_others(examples, options):
    model = make_model("LlamaForCausalLM")
    found = generate(model, examples, max_new_tokens=4, **options)
    ids = [example["input_ids"] if isinstance(example, dict) else example for example in examples]
    for row, one in zip(found, ids, strict=True):
        [expected] = generate(model, [one], max_new_tokens=4, **options)
        assert row.tolist() == expected.tolist()


def test_a_start_token_may_differ_from_example_to_example():
    model, ids = make_model("MarianMTModel"), make_examples(4)
    examples = [{"input_ids": one, "decoder_start_token_id": 20 + place} for place, one in enumerate(ids)]
    found = generate(model, examples, max_new_tokens=5)
    expected = [alone(model, one, max_new_tokens=5, decoder_start_token_id=20 + n) for n, one in enumerate(ids)]
    assert [row.tolist() for row in found] == expected


def test_a_series_of_pandas_is_read_in_its_order():
    pandas = pytest.importorskip("pandas")
    model, ids = make_model("LlamaForCausalLM"), make_examples(5)
    found = generate(model, pandas.Series(ids, index=[4, 2, 0, 1, 3]), max_new_tokens=3)
    assert [row.tolist() for row in found] == [row.tolist() for row in generate(model, ids, max_new_tokens=3)]


def test_an_example_without_a_token_is_refused():
    with pytest.raises(LengthsError, match="example 1"):
        generate(make_model("LlamaForCausalLM"), [[11], []])


def test_a_decoder_padded_on_the_right_is_refused():
    def collate(chosen):
        return {"input_ids": torch.tensor([[11, 12], [13, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}

    with pytest.raises(ArgumentError, match="pad on the left"):
        generate(make_model("LlamaForCausalLM"), [[11, 12], [13]], collate=collate, max_new_tokens=1)


def test_a_model_that_cannot_generate_is_refused():
    with pytest.raises(ArgumentError, match=r"must have generate\(\).*got Linear"):
        generate(nn.Linear(2, 2), [[1]])


@pytest.mark.needs_cuda
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LlamaForCausalLM"])
def test_a_device_that_is_really_full_changes_no_result(name):
    model, examples = make_model(name).to("cuda"), make_examples(200, longest=400)
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 64 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        found = generate(model, examples, max_new_tokens=8)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    on_device = [torch.tensor(example, device="cuda") for example in examples[:20]]
    assert [row.tolist() for row in found[:20]] == [alone(model, ids, max_new_tokens=8) for ids in on_device]
