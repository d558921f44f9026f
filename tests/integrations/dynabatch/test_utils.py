"""Generation that runs out of memory, with real models and errors made on purpose."""

import gc
import os
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from transformers import BatchEncoding, DynamicCache, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.integrations.dynabatch import (
    clear_gpu_memory,
    generate_with_oom_fallback,
    set_cuda_alloc_conf,
)

from .models import collate, make_examples, make_model

CPU = torch.device("cpu")


def make_batch(num=7):
    batch = collate(make_examples(num, causal=False))
    del batch["labels"]
    return batch


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory.")


def limited(model, most, error=OUT_OF_MEMORY):
    """Let a model generate for at most this many rows at once; remember what it was asked for."""
    generate, calls = model.generate, []

    def run(**kwargs):
        calls.append(kwargs)
        if len(kwargs["input_ids"]) > most:
            raise error
        return generate(**kwargs)

    model.generate = run
    return calls


def sizes(calls):
    return [len(call["input_ids"]) for call in calls]


@pytest.mark.parametrize("most", [7, 3, 2, 1])
def test_the_result_is_that_of_the_whole_batch(most):
    model, batch = make_model("t5"), make_batch()
    expected = model.generate(**batch, max_new_tokens=6)
    limited(model, most)
    output, did_fallback = generate_with_oom_fallback(model, batch, 4, CPU, max_new_tokens=6)
    assert torch.equal(output, expected)
    assert did_fallback == (most < 7)


def test_pieces_begin_at_min_batch_size_and_are_halved_until_they_fit():
    model = make_model("t5")
    calls = limited(model, 2)
    generate_with_oom_fallback(model, make_batch(7), 4, CPU, max_new_tokens=2)
    # 7 fails; of the pieces of 4 and 3 the first is run as 2 and 2, the second as 2 and 1.
    assert sizes(calls) == [7, 4, 2, 2, 3, 2, 1]


def test_one_example_that_does_not_fit_alone_is_named():
    model = make_model("t5")
    limited(model, 0)
    with pytest.raises(DoesNotFitError, match="example 0 of the batch"):
        generate_with_oom_fallback(model, make_batch(3), 2, CPU)


def test_other_errors_are_raised_unchanged():
    model = make_model("t5")
    calls = limited(model, 0, ZeroDivisionError("no luck"))
    with pytest.raises(ZeroDivisionError, match="no luck"):
        generate_with_oom_fallback(model, make_batch(3), 2, CPU)
    assert sizes(calls) == [3]


@pytest.mark.parametrize("text", ["CUDNN_STATUS_ALLOC_FAILED", "MPS backend out of memory (…)"])
def test_out_of_memory_of_other_libraries_is_recognised(text):
    model = make_model("t5")
    limited(model, 3, RuntimeError(text))
    assert generate_with_oom_fallback(model, make_batch(5), 3, CPU, max_new_tokens=2)[1] is True


def test_every_tensor_that_the_model_takes_is_passed_on():
    model = make_model("t5")
    calls = limited(model, 2)
    batch = {**make_batch(4), "decoder_input_ids": torch.tensor([[0, 3], [0, 4], [0, 5], [0, 6]])}
    output, _ = generate_with_oom_fallback(model, batch, 2, CPU, max_new_tokens=2)
    assert output[:, 1].tolist() == [3, 4, 5, 6]
    assert all("decoder_input_ids" in call for call in calls)


def test_what_the_model_does_not_take_is_left_out():
    model = make_model("t5")
    calls = limited(model, 9)
    batch = BatchEncoding({**collate(make_examples(4, causal=False)), "row": torch.arange(4), "texts": list("abcd")})
    batch["decoder_input_ids"] = batch["labels"]  # as a collator for training does; it must not become a prompt
    generate_with_oom_fallback(model, batch, 2, CPU, max_new_tokens=2)
    assert set(calls[0]) == {"input_ids", "attention_mask", "max_new_tokens"}


def test_no_padding_token_is_needed():
    model = make_model("llama")
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    batch = {"input_ids": torch.tensor([[3, 4], [5, 6], [7, 8]])}
    limited(model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers says that it takes the end of a sequence instead
        output, _ = generate_with_oom_fallback(model, batch, 2, CPU, max_new_tokens=3)
    assert output.shape == (3, 5)


def test_a_given_padding_token_reaches_generate_and_fills_the_rows():
    class Echo:
        """Gives as many new tokens as the first id says."""

        def generate(self, input_ids, pad_token_id):
            if len(input_ids) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return torch.full((1, int(input_ids[0, 0])), pad_token_id + 1)

    output, _ = generate_with_oom_fallback(Echo(), {"input_ids": torch.tensor([[1], [3]])}, 1, CPU, pad_token_id=8)
    assert output.tolist() == [[9, 8, 8], [9, 9, 9]]


def test_the_output_is_on_the_device_in_both_ways_and_can_be_trained_on():
    for most in (9, 2):
        model = make_model("t5")
        limited(model, most)
        output, _ = generate_with_oom_fallback(model, make_batch(4), 2, "cpu", max_new_tokens=2)
        assert output.device == CPU
        assert not output.is_inference()
        output += 1


def test_beams_and_returned_outputs_are_joined():
    options = GenerationConfig(
        num_beams=2, num_return_sequences=2, return_dict_in_generate=True, output_scores=True, max_new_tokens=4
    )
    options.update(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    whole = make_model("t5").generate(**make_batch(5), generation_config=options)
    model = make_model("t5")
    limited(model, 2)
    output, _ = generate_with_oom_fallback(model, make_batch(5), 2, CPU, generation_config=options)
    assert type(output) is type(whole)
    assert torch.equal(output.sequences, whole.sequences)
    torch.testing.assert_close(output.sequences_scores, whole.sequences_scores)
    assert output.scores is None


def test_the_random_state_of_a_failed_attempt_is_put_back():
    def sampled(most, size):
        model = make_model("t5")
        limited(model, most)
        torch.manual_seed(3)
        return generate_with_oom_fallback(model, make_batch(4), size, CPU, do_sample=True, max_new_tokens=5)[0]

    torch.manual_seed(3)
    model, batch = make_model("t5"), make_batch(4)
    torch.manual_seed(3)
    pieces = [
        model.generate(**{k: v[a : a + 2] for k, v in batch.items()}, do_sample=True, max_new_tokens=5) for a in (0, 2)
    ]
    assert torch.equal(sampled(2, 2)[:2, : pieces[0].shape[1]], pieces[0])
    assert torch.equal(sampled(2, 2)[2:, : pieces[1].shape[1]], pieces[1])


def test_a_decoder_only_model_padded_on_the_right_is_warned_about():
    model = make_model("llama")
    batch = {"input_ids": torch.tensor([[3, 4], [5, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    with pytest.warns(UserWarning, match="padding_side='left'"):
        generate_with_oom_fallback(model, batch, 2, CPU, max_new_tokens=1)
    left = {name: tensor.flip(1) for name, tensor in batch.items()}
    generate_with_oom_fallback(model, left, 2, CPU, max_new_tokens=1)


# Arguments of generate that depend on the row.


def fallen_back(most, batch, **options):
    """Return what a model gives that can run at most this many rows at once."""
    model = make_model("t5")
    limited(model, most)
    return generate_with_oom_fallback(model, batch, 4, CPU, **options)[0]


@pytest.mark.parametrize("most", [8, 3, 1])
@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"do_sample": False}, range(8)),
        ({"num_beams": 2}, range(8)),
        ({"num_beams": 2, "num_return_sequences": 2}, range(8)),
        ({"do_sample": True, "num_return_sequences": 2}, range(16)),
        ({"generation_config": GenerationConfig(do_sample=True, num_return_sequences=2)}, range(16)),
    ],
    ids=["greedy", "beams", "several beams", "sampled", "configured"],
)
def test_a_function_of_the_row_sees_the_row_of_the_whole_batch_in_pieces_too(most, options, rows):
    config = options.get("generation_config")
    if config is not None:
        config.update(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    allowed = {"max_new_tokens": 1, "prefix_allowed_tokens_fn": lambda row, ids: [3 + row]}
    output = fallen_back(most, make_batch(8), **options, **allowed)
    best = output[:: len(output) // len(rows)]  # with one allowed token, the second beam has nothing to say
    assert best[:, 1].tolist() == [3 + row for row in rows]


def test_tensors_among_the_arguments_are_cut_with_the_rows():
    prompts = torch.tensor([[0, 3], [0, 4], [0, 5], [0, 6], [0, 7]])
    output = fallen_back(2, make_batch(5), max_new_tokens=2, decoder_input_ids=prompts)
    assert output[:, 1].tolist() == [3, 4, 5, 6, 7]
    states = BaseModelOutput(last_hidden_state=torch.randn(5, 14, 8, dtype=torch.double))
    whole = fallen_back(9, make_batch(5), max_new_tokens=3, encoder_outputs=states)
    assert torch.equal(fallen_back(2, make_batch(5), max_new_tokens=3, encoder_outputs=states), whole)


def test_lists_of_tokens_that_all_rows_share_stay_whole():
    # As many as there are rows, by chance.
    shared = {"bad_words_ids": [[5], [6], [7], [8]], "suppress_tokens": [9, 10, 11, 12], "eos_token_id": [1, 2, 3, 4]}
    model = make_model("t5")
    calls = limited(model, 2)
    generate_with_oom_fallback(model, make_batch(4), 2, CPU, max_new_tokens=2, **shared)
    assert all(call[name] == value for call in calls for name, value in shared.items())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decoder_input_ids": torch.zeros(3, 1, dtype=torch.long)}, r"decoder_input_ids'\] of shape \(3, 1\) cannot"),
        ({"past_key_values": DynamicCache()}, "with past_key_values, whose rows cannot be told apart"),
    ],
    ids=["other rows", "cache"],
)
def test_an_argument_without_rows_is_refused_when_memory_runs_out(options, reason):
    with pytest.raises(ArgumentError, match=f"ran out of memory, and cannot run in pieces.*{reason}"):
        fallen_back(2, make_batch(4), **options)


class Runtime:
    """An object that generates and is no module, such as a model in another runtime."""

    def generate(self, input_ids, attention_mask, max_new_tokens=1):
        return input_ids.repeat(1, 2)


@pytest.mark.parametrize(
    ("more", "options"),
    [({"token_type_ids": torch.zeros(3, 2)}, {}), ({"index": torch.arange(3)}, {}), ({}, {"pad_token_id": 0})],
    ids=["types", "index", "padding"],
)
def test_generate_gets_only_what_it_takes(more, options):
    ids = torch.ones(3, 2, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, **more}
    assert generate_with_oom_fallback(Runtime(), batch, 2, "cpu", **options)[0].shape == (3, 4)


@pytest.mark.parametrize(
    "make",
    [
        "error = RuntimeError('a'); error.__cause__ = error",
        "error = RuntimeError('a')\nfor _ in range(40):\n"
        "    new = RuntimeError('b'); new.__cause__ = new.__context__ = error; error = new",
    ],
    ids=["its own cause", "forty in a chain"],
)
def test_clearing_memory_ends_for_any_chain_of_errors(make):
    script = f"from batchwright.integrations.dynabatch import clear_gpu_memory\n{make}\nclear_gpu_memory(error)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_clearing_memory_frees_what_the_frames_of_an_error_hold():
    kept = []

    def fail():
        tensor = torch.zeros(3)
        kept.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    try:
        fail()
    except torch.OutOfMemoryError as error:
        caught = error
    gc.collect()
    assert kept[0]() is not None
    clear_gpu_memory(caught, spare=torch.zeros(2))
    assert kept[0]() is None


def test_the_allocator_setting_is_made_on_request_alone(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    set_cuda_alloc_conf()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    set_cuda_alloc_conf()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"


def test_importing_changes_no_environment_variable_and_loads_no_transformers():
    code = (
        "import os, sys, torch; before = dict(os.environ); import batchwright.integrations.dynabatch as d;"
        "d.dynabatch_sampler, d.generate_with_oom_fallback, d.compute_lengths;"
        "print(before == dict(os.environ), 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
