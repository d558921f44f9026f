from dataclasses import replace

import numpy as np
import pytest

import batchwright as bw
from batchwright.cli.advice import Gain, Outputs, Question, advise
from batchwright.cli.advising import advice_lines, answer, caveats, snippet
from batchwright.cli.compare import Settings
from batchwright.cli.screen import Screen

RANDOM = "fixed-size batches of 16 examples in random order (the largest size that always fits)"
BY_LENGTH = "fixed-size batches of 16 examples sorted by length (the largest size that always fits)"


def heavy_tailed(num=5000):
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, num).astype(int), 1, 500)
    lengths[-1] = 500
    return lengths


def heavy(**question):
    return advise(heavy_tailed(), Settings(max_tokens=8000), Question(**question))


def test_constant_lengths_get_a_plain_no():
    advice = advise(np.full(1000, 50), Settings(max_tokens=1000))
    assert advice.verdict == "no"
    assert (advice.against_shuffled.compute_bound, advice.against_shuffled.launch_bound) == (1, 1)
    assert answer(advice).startswith("No, not against fixed-size batches of 20 examples in random order")
    assert "The lengths hardly vary: keep DataLoader(batch_size=20)." in answer(advice)
    assert snippet(advice) == "loader = DataLoader(dataset, batch_size=20, shuffle=True)"


def test_examples_that_fill_one_batch_are_nothing_to_plan():
    advice = advise(np.array([1, 2]), Settings(max_tokens=64))
    assert answer(advice).startswith("No. All examples fit in one batch of 64 padded tokens")
    assert "hardly vary" not in answer(advice)


def test_a_yes_names_what_it_is_against():
    advice = heavy()
    assert min(advice.against_shuffled.compute_bound, advice.against_shuffled.launch_bound) > 2
    assert answer(advice).startswith(f"Yes, against {RANDOM}: an epoch should be ")
    # Against the sorted size the range reaches below 1, and nobody may take the first range for it.
    assert "Against the same size sorted by length it is 0." in answer(advice)
    assert answer(advice).endswith("there it depends on what a step costs.")


def test_a_range_that_is_partly_no_gain_says_what_it_depends_on():
    text = answer(heavy(against="sorted"))
    assert text.startswith(f"It depends on what a step costs. Against {BY_LENGTH}, an epoch should be ")
    assert "as fast if your steps are launch-bound, but only 0." in text
    assert "which is no gain, if they are compute-bound." in text


def test_a_range_has_its_lower_end_first():
    gain = Gain(compute_bound=3.0, launch_bound=2.0)
    assert "an epoch should be 2.0x to 3.0x as fast" in answer(replace(heavy(), against_shuffled=gain))


def test_one_long_example_among_equal_ones_gains_steps_only():
    # At a fixed size of 2 hardly a batch sees the long one; planned batches hold 20 of the others.
    advice = advise(np.array([50] * 2000 + [500]), Settings(max_tokens=1000))
    assert advice.verdict == "depends"
    assert advice.against_shuffled.launch_bound > 9
    assert answer(advice).startswith("It depends on what a step costs.")


def test_a_decoder_only_model_hears_of_rows_and_padding():
    advice = heavy(model_kind="decoder")
    # The rows hold all tokens, and hardly any padding.
    num_rows = advice.packed.padded_tokens // 500
    assert num_rows >= heavy_tailed().sum() / 500
    assert answer(advice).startswith("Pack instead.")
    assert f"Packed(capacity=500) fills {num_rows:,} rows of 500 with " in answer(advice)
    assert f"Against {RANDOM}, an epoch of packed rows" in answer(advice)
    assert "grouping=bw.Packed(capacity=500)" in snippet(advice)
    assert "bw.Rows(dataset)" in snippet(advice)


def test_an_unknown_model_is_asked_for():
    assert any("--model-kind decoder" in note and "Packed(capacity=500) has" in note for note in caveats(heavy()))
    pairs = advise(np.stack([heavy_tailed()] * 2, axis=1), Settings(max_tokens=8000))
    assert any("--model-kind decoder" in note for note in caveats(pairs))
    for kind in ("encoder", "seq2seq", "decoder"):
        assert not any("--model-kind decoder" in note for note in caveats(heavy(model_kind=kind)))


def test_a_decoder_that_gains_nothing_by_packing_is_told_so():
    advice = heavy(model_kind="decoder")
    advice = replace(advice, verdict="yes", packed=replace(advice.packed, padding=0.5))
    assert any(note.startswith("Packing would not pad less here: ") for note in caveats(advice))


def test_targets_are_asked_for_with_a_seq2seq_model():
    assert any("--pairs" in note for note in caveats(heavy(model_kind="seq2seq")))


def test_generation_from_inputs_alone_has_a_caveat_with_its_reason():
    advice = heavy(task="generate")
    assert answer(advice).startswith(f"It depends on the outputs. Against {RANDOM}")
    assert "the output's KV cache grows with the number of examples whatever the input length" in answer(advice)
    assert "(--pairs)" in answer(advice)
    assert "generate(model, examples, max_new_tokens=256)" in snippet(advice)


def test_generation_with_outputs_gives_their_correlation():
    advice = replace(heavy(task="generate"), outputs=Outputs(correlation=0.31, cache_ratio=1.9))
    assert "input length is a poor proxy for the output (rank correlation 0.31, under 0.7)" in answer(advice)
    assert "a KV cache 1.90x as large as the largest fixed one" in answer(advice)
    assert caveats(advice)[-1].startswith("Input and output lengths have a rank correlation of 0.31: inputs are a poor")
    fair = replace(advice, verdict="yes", outputs=Outputs(correlation=0.9, cache_ratio=1.0))
    assert answer(fair).startswith(f"Yes, against {RANDOM}")
    assert caveats(fair)[-1].endswith("inputs are a fair proxy for the cost.")


def test_the_snippet_runs():
    advice = advise(heavy_tailed(), Settings(max_tokens=8000, max_items=64, pad_multiple_of=8))
    line = next(line for line in snippet(advice).split("\n") if line.startswith("sampler"))
    space = {"bw": bw, "lengths": heavy_tailed()}
    exec(line, space)
    shapes = space["sampler"].plan.shapes
    assert (shapes[:, 0] * shapes[:, 1]).max() <= 8000
    assert shapes[:, 0].max() <= 64
    assert (shapes[:, 1] % 8 == 0).all()


def test_the_snippet_of_packed_rows_trains_on_rows():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    lengths = heavy_tailed(300)
    advice = advise(lengths, Settings(max_tokens=4000), Question(model_kind="decoder"))
    lines = [line for line in snippet(advice).split("\n") if not line.startswith("lengths")]
    space = {"lengths": lengths, "dataset": [{"input_ids": [1] * int(length)} for length in lengths]}
    exec("\n".join(lines), space)
    assert sum(int((batch["labels"] != -100).sum()) for batch in space["loader"]) == lengths.sum() - len(lengths)


@pytest.mark.parametrize("question", [{}, {"model_kind": "decoder"}, {"task": "generate"}], ids=str)
@pytest.mark.parametrize("world_size", [1, 4])
def test_no_snippet_mentions_how_the_order_is_balanced(question, world_size):
    advice = advise(heavy_tailed(), Settings(max_tokens=8000, world_size=world_size), Question(**question))
    assert "balance_over" not in "\n".join([snippet(advice), *caveats(advice)])


def test_ranks_are_part_of_the_snippet():
    advice = advise(heavy_tailed(), Settings(max_tokens=8000, world_size=4))
    assert "rank=rank, world_size=4" in snippet(advice)


def test_few_batches_are_a_caveat():
    few = caveats(advise(heavy_tailed(300), Settings(max_tokens=8000)))
    assert any(note.startswith("Only ") and "per epoch" in note for note in few)
    many = caveats(advise(heavy_tailed(), Settings(max_tokens=2000)))
    assert not any("per epoch" in note for note in many)


def test_fewer_updates_are_a_caveat():
    assert any("tune the learning rate again" in note for note in caveats(heavy()))


def test_multiples_of_eight_are_offered_with_their_padding():
    notes = caveats(advise(heavy_tailed() + 300, Settings(max_tokens=8000)))
    assert any("--pad-multiple-of 8 has " in note for note in notes)
    chosen = caveats(advise(heavy_tailed(), Settings(max_tokens=8000, pad_multiple_of=16)))
    assert "Your collate function must pad to a multiple of 16, as the plan does." in chosen


def test_words_are_not_tokens_and_the_answer_says_so():
    advice = heavy()
    assert "Counted in words" in "\n".join(advice_lines(advice, Screen(), unit="words", quiet=False))
    assert "Counted in" not in "\n".join(advice_lines(advice, Screen(), unit="tokens", quiet=False))


@pytest.mark.parametrize(
    "question", [{}, {"against": "sorted"}, {"model_kind": "decoder"}, {"task": "generate"}], ids=str
)
def test_every_answer_names_its_baseline_and_fits_the_screen(question):
    advice = heavy(**question)
    assert "fixed-size batches of 16 examples" in answer(advice)
    text = "\n".join(advice_lines(advice, Screen(), unit="tokens", quiet=False)).partition("What to set")[0]
    assert all(len(line) <= 80 for line in text.split("\n"))
