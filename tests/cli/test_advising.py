import json
from dataclasses import replace

import numpy as np
import pytest

import batchwright as bw
from batchwright.cli import main
from batchwright.cli.advice import Gain, Outputs, Question, advise
from batchwright.cli.advising import advice_lines, answer, caveats, snippet
from batchwright.cli.compare import Settings
from batchwright.cli.lengths import Measured
from batchwright.cli.screen import Screen

RANDOM = "fixed-size batches of 16 examples in random order (the largest size that always fits)"
BY_LENGTH = "fixed-size batches of 16 examples sorted by length (the largest size that always fits)"


def heavy_tailed(num=5000):
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, num).astype(int), 1, 500)
    lengths[-1] = 500
    return lengths


def heavy(**question):
    return advise(heavy_tailed(), Settings(max_tokens=8000), Question(**question))


def measured(unit):
    return Measured(lengths=heavy_tailed(), unit=unit, num_blank=0, num_empty=0, num_cut=0)


def texts_of(lengths):
    return [" ".join(["w"] * int(length)) for length in lengths]


def ask(tmp_path, capsys, records, *options):
    """Return what ``advise`` says of records, as plain data."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["advise", str(path), *map(str, options), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def run_snippet(code, texts):
    """Run printed lines with the names that the user has, and return the loader."""
    pytest.importorskip("torch").set_num_threads(1)
    dataset = [{"input_ids": [1] * len(str(text).split())} for text in texts]
    names = {"texts": texts, "pairs": texts, "tokenizer": str.split, "dataset": dataset, "collate": list, "rank": 0}
    exec(code, names)
    return names["loader"]


def test_constant_lengths_get_a_plain_no():
    advice = advise(np.full(1000, 50), Settings(max_tokens=1000))
    assert advice.verdict == "no"
    assert (advice.against_shuffled.compute_bound, advice.against_shuffled.launch_bound) == (1, 1)
    assert answer(advice).startswith("No, not against fixed-size batches of 20 examples in random order")
    assert "The lengths hardly vary: keep DataLoader(batch_size=20)." in answer(advice)
    assert "loader = DataLoader(dataset, batch_size=20, shuffle=True, collate_fn=collate)" in snippet(advice)


def test_no_against_sorted_batches_prints_sorted_batches():
    lengths = heavy_tailed(1500)
    advice = advise(lengths, Settings(max_tokens=20_000, max_items=5), Question(against="sorted"))
    assert advice.verdict == "no"
    assert "keep your batches of 5 examples sorted by length" in answer(advice)
    # Shuffled, they would pad far more than the plan that is turned down.
    assert advice.shuffled.padding > advice.planned.padding + 0.2
    sampler = run_snippet(snippet(advice), texts_of(lengths)).batch_sampler
    assert (sampler.plan.report().padding, len(sampler)) == (advice.sorted.padding, advice.sorted.num_batches)


@pytest.mark.parametrize(("against", "max_items"), [("sorted", 5), ("shuffled", 1)])
def test_lengths_that_vary_much_are_not_said_to_hardly_vary(against, max_items):
    advice = advise(heavy_tailed(1500), Settings(max_tokens=20_000, max_items=max_items), Question(against=against))
    assert advice.verdict == "no"
    assert "Planned batches gain less than 10.0 %: keep" in answer(advice)


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


def test_a_gain_of_a_few_percent_is_not_called_no_gain():
    gains = {1.05: "only 1.05x, which is less than 10.0 % faster, if", 1.0: "only 1.00x, which is no gain, if"}
    for low, words in gains.items():
        gain = Gain(compute_bound=low, launch_bound=2.0)
        assert words in answer(replace(heavy(), verdict="depends", against_shuffled=gain))


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
    assert any(note.startswith("Packing is not clearly better than planned batches here: ") for note in caveats(advice))


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


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_printed_lines_cut_as_the_command_did(tmp_path, capsys, kind):
    texts = texts_of(heavy_tailed(1500))
    options = ["--max-length", 20, "--max-tokens", 100, "--model-kind", kind]
    advice = ask(tmp_path, capsys, [{"text": text} for text in texts], *options)
    used = advice["packed"] if advice["verdict"] == "pack" else advice["planned"]
    assert len(run_snippet(advice["snippet"], texts).batch_sampler) == used["num_batches"]
    assert "Your data set must cut texts to 20 words, as --max-length counts them." in advice["caveats"]


def test_the_printed_lines_leave_out_the_empty_texts_that_the_command_skipped(tmp_path, capsys):
    texts = ["", *texts_of(heavy_tailed(1500))]
    advice = ask(tmp_path, capsys, [{"text": text} for text in texts], "--max-tokens", 8000)
    assert advice["data"]["num_empty"] == 1
    loader = run_snippet(advice["snippet"], texts)
    assert len(loader.batch_sampler) == advice["planned"]["num_batches"]
    assert sum(len(example["input_ids"]) for batch in loader for example in batch) == heavy_tailed(1500).sum()


@pytest.mark.parametrize(("kind", "joined"), [("decoder", True), ("seq2seq", False)])
def test_the_printed_lines_plan_pairs_as_the_model_reads_them(tmp_path, capsys, kind, joined):
    sides = texts_of(heavy_tailed(1500)), texts_of(np.random.default_rng(1).permutation(heavy_tailed(1500)))
    pairs = [("", "w"), *zip(*sides, strict=True)]
    records = [{"a": a, "b": b} for a, b in pairs]
    options = ["--pairs", "--field", "a,b", "--model-kind", kind, "--max-tokens", 8000, "--seed", 3]
    advice = ask(tmp_path, capsys, records, *options)
    used = advice["packed"] if joined else advice["planned"]
    assert ("lengths.sum(axis=1)" in advice["snippet"]) is joined
    assert len(run_snippet(advice["snippet"], pairs).batch_sampler) == used["num_batches"]


def test_the_printed_lines_run_where_the_answer_is_no(tmp_path, capsys):
    texts = texts_of([20] * 100)
    for options in ([], ["--world-size", 2]):
        advice = ask(tmp_path, capsys, [{"text": text} for text in texts], "--max-tokens", 200, *options)
        assert advice["verdict"] == "no"
        num_ranks = advice["settings"]["world_size"]
        assert num_ranks * len(run_snippet(advice["snippet"], texts)) == advice["shuffled"]["num_batches"]


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


def test_where_nothing_is_trained_few_batches_are_only_rough():
    advice = advise(heavy_tailed(100), Settings(max_tokens=100_000), Question(task="generate"))
    assert "Only 1 batch per epoch: the figures are rough. Lower --max-tokens." in caveats(advice)


def test_only_fewer_steps_are_called_so():
    few = advise(heavy_tailed(1500), Settings(max_tokens=20_000, max_items=5))
    assert few.planned.num_batches == few.sorted.num_batches
    assert any(note.endswith("compared with that, they gain less than 10.0 %.") for note in caveats(few))
    assert any(note.endswith("only the smaller number of steps is a gain.") for note in caveats(heavy()))


def test_sorting_single_examples_reduces_nothing():
    lengths = heavy_tailed(1500)
    advice = advise(lengths, Settings(max_tokens=900))
    assert (advice.fixed_size, advice.verdict) == (1, "depends")
    assert not any("already reduces padding" in note for note in caveats(advice))


def test_rows_are_what_max_items_counts_where_examples_are_packed():
    advice = advise(heavy_tailed(), Settings(max_tokens=8000, max_items=16), Question(model_kind="decoder"))
    assert advice.verdict == "pack"
    assert "--max-items counts packed rows, not examples." in caveats(advice)


def test_fewer_updates_are_a_caveat():
    assert any("tune the learning rate again" in note for note in caveats(heavy()))


def test_multiples_of_eight_are_offered_with_their_padding():
    notes = caveats(advise(heavy_tailed() + 300, Settings(max_tokens=8000)))
    assert any("--pad-multiple-of 8 has " in note for note in notes)
    chosen = caveats(advise(heavy_tailed(), Settings(max_tokens=8000, pad_multiple_of=16)))
    assert "Your collate function must pad to a multiple of 16, as the plan does." in chosen


def test_words_are_not_tokens_and_the_answer_says_so():
    advice = heavy()
    assert "Counted in words" in "\n".join(advice_lines(advice, Screen(), measured("words"), quiet=False))
    assert "Counted in" not in "\n".join(advice_lines(advice, Screen(), measured("tokens"), quiet=False))


def test_the_json_has_every_caveat_of_the_text(tmp_path, capsys):
    advice = ask(tmp_path, capsys, [{"text": text} for text in texts_of(heavy_tailed(1500))])
    assert advice["caveats"][0].startswith("Counted in words: pass your own --tokenizer")


@pytest.mark.parametrize(
    "question", [{}, {"against": "sorted"}, {"model_kind": "decoder"}, {"task": "generate"}], ids=str
)
def test_every_answer_names_its_baseline_and_fits_the_screen(question):
    advice = heavy(**question)
    assert "fixed-size batches of 16 examples" in answer(advice)
    text = "\n".join(advice_lines(advice, Screen(), quiet=False)).partition("What to set")[0]
    assert all(len(line) <= 80 for line in text.split("\n"))
