"""Generation that runs out of memory, with real models and errors made on purpose."""

import gc
import importlib
import os
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, GenerationConfig

from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.integrations.dynabatch import (
    clear_gpu_memory,
    generate_with_oom_fallback,
    merge_outputs,
    set_cuda_alloc_conf,
    split_batch,
    split_inputs_dict,
)

from .models import collate, make_examples, make_model
from .packages import PACKAGES

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


# Pieces of a batch, whatever else it holds, and their joined results.


def test_tensors_and_lists_of_examples_are_cut_and_the_rest_is_copied():
    batch = {
        "input_ids": torch.arange(10).reshape(5, 2),
        "names": list("abcde"),
        "sizes": (1, 2, 3, 4, 5),
        "two": [1, 2],
        "scale": 0.5,
        "nested": {"mask": torch.ones(5, 3)},
    }
    pieces = split_inputs_dict(batch, 2)
    assert [len(piece["input_ids"]) for piece in pieces] == [2, 2, 1]
    assert [piece["names"] for piece in pieces] == [["a", "b"], ["c", "d"], ["e"]]
    assert pieces[2]["sizes"] == (5,)
    assert (pieces[0]["two"], pieces[0]["scale"]) == ([1, 2], 0.5)
    assert pieces[1]["nested"]["mask"].shape == (2, 3)


@pytest.mark.parametrize("split", [split_batch, split_inputs_dict])
def test_arrays_are_cut_as_tensors_are(split):
    ids = np.arange(10).reshape(5, 2)
    batch = {"input_ids": ids, "weights": np.arange(5.0), "names": np.array(list("abcde"), dtype=object)}
    pieces = split({**batch, "scale": np.array(2.0)}, 2)
    for name, array in batch.items():
        assert all(isinstance(piece[name], np.ndarray) for piece in pieces)
        assert [len(piece[name]) for piece in pieces] == [2, 2, 1]
        assert np.array_equal(np.concatenate([piece[name] for piece in pieces]), array)
    assert [float(piece["scale"]) for piece in pieces] == [2.0, 2.0, 2.0]
    with pytest.raises(ArgumentError, match=r"\['spare'\] of shape \(3,\) cannot be cut into pieces of 5 examples"):
        split({"input_ids": ids, "spare": np.arange(3)}, 2)


@pytest.mark.parametrize("split", [split_batch, split_inputs_dict])
def test_columns_of_pandas_are_cut_by_their_rows_whatever_their_index(split):
    pandas = pytest.importorskip("pandas")
    column = pandas.Series(list("abc"), index=[2, 1, 0])
    frame = pandas.DataFrame({"left": [1, 2, 3], "right": [4, 5, 6]}, index=[2, 1, 0])
    pieces = split({"input_ids": torch.zeros(3, 2), "names": column, "boxes": frame}, 2)
    assert [piece["names"].tolist() for piece in pieces] == [["a", "b"], ["c"]]
    assert [piece["boxes"].to_numpy().tolist() for piece in pieces] == [[[1, 4], [2, 5]], [[3, 6]]]
    assert [len(piece["input_ids"]) for piece in split({"input_ids": column}, 2)] == [2, 1]
    with pytest.raises(ArgumentError, match=r"\['names'\] is a Series"):
        split({"input_ids": torch.zeros(4, 2), "names": column}, 2)


@pytest.mark.parametrize("split", [split_batch, split_inputs_dict])
def test_columns_of_data_sets_encodings_and_lists_of_tensors_are_cut(split):
    datasets = pytest.importorskip("datasets")
    boxes = [torch.ones(number, 4) for number in (1, 4, 2)]
    column = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})["text"]
    batch = BatchEncoding({"input_ids": torch.zeros(3, 2), "boxes": boxes, "texts": column, "numbers": range(3)})
    first, last = split(batch, 2)
    assert [tuple(box.shape) for box in first["boxes"]] == [(1, 4), (4, 4)]
    assert (first["texts"], last["texts"]) == (["a", "b"], ["c"])
    assert (first["numbers"], last["numbers"]) == ([0, 1], [2])
    assert type(first) is dict


def test_a_set_has_no_rows_and_is_refused():
    with pytest.raises(ArgumentError, match=r"\['tags'\] is a set, of which it is not known what a row is"):
        split_batch({"input_ids": torch.zeros(3, 2), "tags": {"a"}}, 2)


def test_a_tensor_without_an_axis_goes_into_every_piece():
    pieces = split_inputs_dict({"input_ids": torch.zeros(3, 2), "weight": torch.tensor(7.0)}, 2)
    assert [float(piece["weight"]) for piece in pieces] == [7.0, 7.0]


@pytest.mark.parametrize("num", [2, 3, 4])
def test_positions_with_the_examples_on_the_second_axis_are_cut_there(num):
    # Three kinds of position, and in one of the cases as many examples.
    positions = torch.arange(3 * num * 5).reshape(3, num, 5)
    pieces = split_inputs_dict({"input_ids": torch.zeros(num, 5), "position_ids": positions}, 2)
    assert torch.equal(torch.cat([piece["position_ids"] for piece in pieces], dim=1), positions)
    assert [piece["position_ids"].shape[1] for piece in pieces] == [len(piece["input_ids"]) for piece in pieces]


def test_a_tensor_that_belongs_to_no_examples_is_refused():
    with pytest.raises(ArgumentError, match=r"\['pixel_values'\] of shape \(7, 4\)"):
        split_inputs_dict({"input_ids": torch.zeros(3, 2), "pixel_values": torch.zeros(7, 4)}, 2)


def test_another_key_may_say_how_many_examples_there_are():
    pieces = split_inputs_dict({"pixel_values": torch.zeros(3, 2)}, 1, batch_size_key="pixel_values")
    assert len(pieces) == 3
    with pytest.raises(KeyError, match="Batch size key `input_ids` not found"):
        split_inputs_dict({"pixel_values": torch.zeros(3, 2)}, 1)


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_a_piece_has_at_least_one_example(size):
    with pytest.raises(ArgumentError, match="chunk_size"):
        split_batch({"input_ids": torch.zeros(3, 2)}, size)


def test_split_and_merge_give_the_whole_again():
    ids = torch.arange(14).reshape(7, 2)
    pieces = [piece["input_ids"] for piece in split_batch({"input_ids": ids}, 3)]
    assert torch.equal(merge_outputs(pieces, pad_token_id=0), ids)


def test_results_of_unequal_width_are_padded_on_the_right():
    merged = merge_outputs([torch.tensor([[1]]), torch.tensor([[2, 3, 4], [5, 6, 7]])], pad_token_id=9)
    assert merged.tolist() == [[1, 9, 9], [2, 3, 4], [5, 6, 7]]
    assert merge_outputs([], pad_token_id=0) is None


# Numbers of examples


FRIENDLY = sorted({2**n for n in range(10)} | {3 * 2**n for n in range(9)})


@pytest.mark.parametrize("package", PACKAGES)
def test_sizes_are_rounded_down_to_even_and_to_friendly_ones(package):
    utils = importlib.import_module(f"{package}.utils")
    for size in range(1, 513):
        assert utils.get_hardware_friendly_batch_size(size) == max(good for good in FRIENDLY if good <= size)
        assert utils.get_even_batch_size(size) == max(size // 2 * 2, 1)
    for function in (utils.get_hardware_friendly_batch_size, utils.get_even_batch_size):
        for size in (0, -1):
            with pytest.raises(ValueError, match=r"at least 1|of 1 or more"):
                function(size)
