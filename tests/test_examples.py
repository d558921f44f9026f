"""The worked examples run as they stand, and what they say about themselves holds."""

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parent.parent / "examples"
ELSEWHERE = {"keras_memory"}  # tests/integrations/keras
SHARED = {"texts"}  # what the examples read
LONG = {"memory_and_progress", "transfer_learning"}
MAX_LINES = 60
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def _beside_their_texts(monkeypatch):
    """Let examples import what lies beside them, as they do when they are run as scripts."""
    monkeypatch.syspath_prepend(str(FOLDER))


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_quick(name, capsys):
    """Run an example in this process; return its figures and what it printed."""
    figures = load(name).main(quick=True)
    return figures, capsys.readouterr().out


def run_script(name, *launcher):
    """Run an example as a user does, in processes of its own, and return what it printed."""
    command = [sys.executable, *launcher, str(FOLDER / f"{name}.py"), "--quick"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_ranks(name):
    """Run an example on two ranks."""
    return run_script(name, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def difference_in(text, phrase):
    """Return the number after a phrase of the output."""
    return float(text.split(phrase)[1].split()[0])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_example_is_run_here():
    calls = re.findall(r'\b(?:load|run_quick|run_ranks|run_script)\("(\w+)"', Path(__file__).read_text())
    assert {path.stem for path in FOLDER.glob("*.py")} - SHARED - ELSEWHERE == set(calls)


def test_examples_are_short_and_say_how_they_are_run():
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem not in SHARED:
            text = path.read_text(encoding="utf-8")
            assert f" examples/{path.name}" in text.split('"""')[1], path.name
            assert path.stem in LONG or len(text.splitlines()) <= MAX_LINES, path.name


def test_the_list_of_examples_is_complete():
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w/]+\.(?:py|ipynb))\)", text))
    there = {str(path.relative_to(FOLDER)) for path in [*FOLDER.glob("*.py"), *FOLDER.glob("notebooks/*.ipynb")]}
    assert listed == there - {f"{name}.py" for name in SHARED}


# One process


def test_plain_loop(capsys):
    found, _ = run_quick("plain_loop", capsys)
    assert found["planned"] < found["fixed"] / 2
    assert found["pieces"] > 20
    assert 0 < found["apart"] < 1e-5


def test_seq2seq_plans_by_both_lengths_keep_the_limit(capsys):
    pytest.importorskip("transformers")
    found, _ = run_quick("seq2seq_two_axes", capsys)
    assert found["by both"]["padding"] < found["in order"]["padding"] / 2
    assert found["by both"]["largest"] <= 2048 < found["by source"]["largest"]
    assert found["loss"]["last"] < found["loss"]["first"]


def test_packed_rows_have_the_loss_of_padded_ones(capsys):
    pytest.importorskip("transformers")
    found, _ = run_quick("packed_decoder", capsys)
    assert found["packed"] < found["planned"] < found["fixed"]
    assert found["apart"] < 1e-4
    assert found["last"] < found["first"]


def test_a_trainer_continues_with_the_very_next_batch(capsys):
    pytest.importorskip("transformers")
    found, _ = run_quick("hf_trainer", capsys)
    assert found["updates"] > 2  # the checkpoint is inside of the epoch
    assert found["apart"] == 0
    assert found["planned"] < found["fixed"] / 2


def test_sft_sees_every_token_once(capsys):
    pytest.importorskip("trl", reason="trl is not installed; it is in the group dev")
    found, _ = run_quick("trl_sft", capsys)
    (_, fixed, tokens), (_, planned, in_plan), (_, packed, in_rows) = found.values()
    assert packed < planned < fixed / 2
    assert tokens == in_plan == in_rows


def test_a_lightning_fit_in_pieces_is_that_of_whole_batches(capsys):
    pytest.importorskip("lightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and loggers
        found, _ = run_quick("lightning_module", capsys)
    assert found["pieces"] > found["whole"] == 1
    assert 0 < found["apart"] < 1e-5


def test_a_loop_of_accelerate_that_was_stopped_has_the_same_losses(capsys):
    pytest.importorskip("accelerate")
    found, printed = run_quick("accelerate_loop", capsys)
    assert found["stopped"] == found["whole"]
    assert len(found["whole"]) > 3
    assert found["num_texts"] == found["num_data"]
    assert "the same losses: True" in printed


def test_generated_words_do_not_depend_on_batches(capsys):
    pytest.importorskip("transformers")
    found, _ = run_quick("generate_texts", capsys)
    assert found["same"]
    assert found["same_after_split"]
    assert found["num"] > 8  # or nothing would be split


def test_vectors_do_not_depend_on_batches(capsys):
    pytest.importorskip("transformers")
    found, printed = run_quick("embed_texts", capsys)
    assert found["one by one"] <= found["planned"] < found["as they come"]
    assert found["apart"] < 1e-5
    num_planned, num_run = re.search(r"planned: +(\d+) batches, run in +(\d+)", printed).groups()
    assert int(num_planned) < int(num_run)  # some ran out of memory


def test_speech_has_less_padded_audio(capsys):
    found, _ = run_quick("speech_lengths", capsys)
    assert found["seconds"] < found["planned"] < 0.75 * found["8 recordings"]
    assert found["recordings"] == 96


def test_a_stream_pads_less_in_larger_buffers_and_continues(capsys):
    found, _ = run_quick("streaming_data", capsys)
    assert found["buffer of 1000"] < found["buffer of 200"] < found["buffer of 50"] < found["as they come"]
    assert found["is_whole"]
    assert found["num_rest"] > 0


def test_requests_in_batches_have_the_same_answers_and_a_bad_one_fails_alone(capsys):
    found, printed = run_quick("serve_requests", capsys)
    assert found["apart"] < 1e-4
    assert found["num_calls"] < found["num_texts"] / 2
    for answers in found["answers"].values():
        assert [type(answer) for answer in answers[:2]] == [ValueError, list]
        assert sum(isinstance(answer, list) for answer in answers) == len(answers) - 1
    assert printed.count("failed: ['']") == 2


# Several processes


def test_ranks_under_ddp_make_the_update_of_one_process():
    printed = run_ranks("ddp_ranks")
    assert "2 ranks, " in printed
    assert 0 < difference_in(printed, "with all texts by") < 1e-5


@pytest.mark.skipif(TORCH < (2, 11), reason="FSDP2 needs torch 2.11")
def test_ranks_under_fsdp_hold_half_and_make_the_update_of_one_process():
    printed = run_ranks("fsdp_ranks")
    assert "rank 0 holds 50% of the numbers" in printed
    assert 0 < difference_in(printed, "with all texts by") < 1e-5


def test_ray_maps_planned_batches_with_fewer_tokens():
    pytest.importorskip("ray", reason="ray is not installed; it is in the group dev")
    printed = run_script("ray_embedding")
    fixed, planned = (int(number.replace(",", "")) for number in re.findall(r": ([\d,]+) tokens", printed))
    assert planned < 0.6 * fixed
    assert printed.count("every row once: True") == 2


# Longer ones


def test_memory_decides_the_pieces_and_progress_the_batch(capsys):
    pytest.importorskip("sklearn")
    example = load("memory_and_progress")
    busy, free = example.main()
    # Progress: the same batches with and without another program, growing with the falling loss to the largest.
    sizes = [row.batch_size for row in busy.rows]
    assert sizes == [row.batch_size for row in free.rows]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (32, 256)
    assert all("average loss fell" in reason for reason in busy.reasons)
    assert len(busy.reasons) == len(set(sizes)) - 1
    # Memory: one piece while there is room. 70 examples of 1,000 bytes in the 80,000 left fill 97 %: two pieces.
    assert {row.num_steps for row in free.rows} == {1}
    assert [row.num_steps for row in busy.rows[:3]] == [1, 1, 1]
    assert all(row.num_steps > 1 for row in busy.rows if row.is_busy)
    assert all(row.memory_fraction <= 0.9 for row in busy.rows)
    # A size that was too large is not tried again for 512 batches, also when the memory is free again.
    assert busy.rows[-1].micro_batch == busy.rows[4].micro_batch < busy.rows[0].micro_batch
    # And so the updates are the same.
    assert 0 < example.difference(busy, free) < 1e-5
    assert "memory for itself" in capsys.readouterr().out


def test_batch_norm_with_frozen_statistics_is_exact_in_pieces_and_with_whole_ones_only_whole(capsys):
    pytest.importorskip("sklearn")
    example = load("transfer_learning")
    (frozen, whole, pieces), scratch, refusal = example.main()
    assert frozen.difference < 1e-6
    assert whole.difference < 1e-6
    assert pieces.difference > 1e-3
    assert (frozen.warnings, whole.warnings) == ((), ())
    assert len(pieces.warnings) == 1
    assert "depend on the split" in pieces.warnings[0]
    assert "micro-batches would change it; use WholeBatchLoss(encode, loss), a smaller logical batch" in refusal
    assert all(result.accuracy > scratch + 0.05 for result in (frozen, whole, pieces))
    assert "without the first training" in capsys.readouterr().out


def test_frozen_statistics_stay_as_the_first_training_left_them():
    pytest.importorskip("sklearn")
    example = load("transfer_learning")
    known, few, _ = example.load()
    pretrained = example.pretrain(known)
    frozen, _ = example.transfer(pretrained, few, example.frozen, example.loss_fn, 5)
    learned, _ = example.transfer(pretrained, few, example.learning, example.whole_loss_fn, "auto")
    before, kept, moved = (model[0][1].running_mean for model in (pretrained, frozen, learned))
    assert torch.equal(before, kept)
    assert not torch.equal(before, moved)
    # The weights of the features were frozen for half of the updates and have moved in the other half.
    assert not torch.equal(pretrained[0][0].weight, frozen[0][0].weight)
