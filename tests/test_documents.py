"""Every Python block of the README and of the guides runs as it stands, from top to bottom."""

import re
from pathlib import Path

import pytest

import batchwright as bw

ROOT = Path(__file__).parent.parent
# The guide to Keras runs with its tests, in an environment that has it.
DOCUMENTS = [ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "keras.md"})]


def blocks(path):
    return re.findall(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """What a block writes, budgets that it finds included, stays in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_blocks_of_a_document_run(path):
    names = {"__name__": "document"}
    for block in blocks(path):
        exec(compile(block, f"{path.name}", "exec"), names)


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in text
    assert "make test" in text


def test_the_trainer_example_of_the_readme_is_complete_in_at_most_15_lines():
    (block,) = [block for block in blocks(ROOT / "README.md") if 'budget="auto"' in block]
    assert len(block.splitlines()) <= 15
    names = {"__name__": "document"}
    exec(compile(block, "README.md", "exec"), names)  # nothing of the blocks before it
    trainer, data = names["trainer"], names["data"]
    assert trainer.state.epoch == 1
    # What was found planned the batches of the epoch: every example once.
    plan = bw.plan_batches(
        [len(example["input_ids"]) for example in data], trainer.found_budget, seed=trainer.args.seed
    )
    assert trainer.state.global_step == len(plan)
