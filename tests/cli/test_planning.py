from dataclasses import replace

import numpy as np

import batchwright as bw
from batchwright.cli.compare import Gain, Settings, advise
from batchwright.cli.planning import advice_lines, answer, caveats, snippet
from batchwright.cli.screen import Screen


def heavy_tailed(num=5000):
    return np.clip(np.random.default_rng(0).lognormal(3, 1, num).astype(int), 1, 500)


def test_constant_lengths_get_a_plain_no():
    advice = advise(np.full(1000, 50), Settings(max_tokens=1000))
    assert advice.verdict == "no"
    assert (advice.against_shuffled.compute_bound, advice.against_shuffled.launch_bound) == (1, 1)
    assert answer(advice).startswith("No. The lengths hardly vary: keep DataLoader(batch_size=20).")
    assert snippet(advice) == "loader = DataLoader(dataset, batch_size=20, shuffle=True)"


def test_heavy_tailed_lengths_get_a_yes():
    advice = advise(heavy_tailed(), Settings(max_tokens=8000))
    assert advice.verdict == "yes"
    assert min(advice.against_shuffled.compute_bound, advice.against_shuffled.launch_bound) > 2
    assert answer(advice).startswith("Yes.")


def test_a_range_has_its_lower_end_first():
    gain = Gain(compute_bound=3.0, launch_bound=2.0)
    advice = replace(advise(heavy_tailed(), Settings(max_tokens=8000)), against_shuffled=gain)
    assert "An epoch should be 2.0x to 3.0x as fast" in answer(advice)


def test_one_long_example_among_equal_ones_gains_steps_only():
    # At a fixed size of 2 hardly a batch sees the long one; planned batches hold 20 of the others.
    advice = advise(np.array([50] * 2000 + [500]), Settings(max_tokens=1000))
    assert advice.verdict == "fewer steps only"
    assert advice.against_shuffled.launch_bound > 9
    assert answer(advice).startswith("Only if your steps are launch-bound.")


def test_the_snippet_runs():
    advice = advise(heavy_tailed(), Settings(max_tokens=8000, max_items=64, pad_multiple_of=8))
    line = next(line for line in snippet(advice).split("\n") if line.startswith("sampler"))
    space = {"bw": bw, "lengths": heavy_tailed()}
    exec(line, space)
    shapes = space["sampler"].plan.shapes
    assert (shapes[:, 0] * shapes[:, 1]).max() <= 8000
    assert shapes[:, 0].max() <= 64
    assert (shapes[:, 1] % 8 == 0).all()


def test_ranks_are_part_of_the_snippet():
    advice = advise(heavy_tailed(), Settings(max_tokens=8000, world_size=4))
    assert "rank=rank, world_size=4" in snippet(advice)


def test_few_batches_are_a_caveat():
    few = caveats(advise(heavy_tailed(300), Settings(max_tokens=8000)))
    assert any(note.startswith("Only ") and "batches per epoch" in note for note in few)
    many = caveats(advise(heavy_tailed(), Settings(max_tokens=2000)))
    assert not any("batches per epoch" in note for note in many)


def test_fewer_updates_are_a_caveat():
    notes = caveats(advise(heavy_tailed(), Settings(max_tokens=8000)))
    assert any("tune the learning rate again" in note for note in notes)


def test_words_are_not_tokens_and_the_answer_says_so():
    advice = advise(heavy_tailed(), Settings(max_tokens=8000))
    assert "Counted in words" in "\n".join(advice_lines(advice, Screen(), unit="words", quiet=False))
    assert "Counted in" not in "\n".join(advice_lines(advice, Screen(), unit="tokens", quiet=False))
