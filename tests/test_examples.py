"""The worked examples run as they stand, and what they say about themselves holds."""

import importlib.util
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

FOLDER = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_example_is_run_here():
    elsewhere = {"keras_memory"}  # tests/integrations/keras
    assert {path.stem for path in FOLDER.glob("*.py")} - elsewhere == {"memory_and_progress", "transfer_learning"}


def test_memory_decides_the_pieces_and_progress_the_batch(capsys):
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
    example = load("transfer_learning")
    (frozen, whole, pieces), scratch, refusal = example.main()
    assert frozen.difference < 1e-6
    assert whole.difference < 1e-6
    assert pieces.difference > 1e-3
    assert (frozen.warnings, whole.warnings) == ((), ())
    assert len(pieces.warnings) == 1
    assert "depend on the split" in pieces.warnings[0]
    assert "micro-batches would change it; use a smaller logical batch" in refusal
    assert all(result.accuracy > scratch + 0.05 for result in (frozen, whole, pieces))
    assert "without the first training" in capsys.readouterr().out


def test_frozen_statistics_stay_as_the_first_training_left_them():
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
