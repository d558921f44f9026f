"""Labs that are continued, tiny files, damaged lines, and the page of a lab that is complete."""

import json
import math

import numpy as np
import pytest

from batchwright.cli.app import main
from batchwright.lab.runner import Cell, Lab, LabPlan
from batchwright.lab.runner._choice import Choice, next_rates


def write_csv(path, num_rows, seed):
    rng = np.random.default_rng(seed)
    rows = [f"{a:.3f},{b:.3f},{i % 2}\n" for i, (a, b) in enumerate(rng.normal(size=(num_rows, 2)))]
    path.write_text("a,b,label\n" + "".join(rows))
    return path


def tiny_plan(path, **options):
    cell = Cell(dataset="mine", model="mlp", num_epochs=1, lr=0.01, data={"path": str(path), "target": "label"})
    return LabPlan(name="mine", cells=(cell,), strategies=("constant", "linear"), seeds=(0, 1), **options)


def run(folder, plan=None, **options):
    return Lab(folder).run(plan, **{"num_workers": 0, "progress": False, **options})


def change_line(path, place, **fields):
    lines = path.read_text().splitlines()
    lines[place] = json.dumps(json.loads(lines[place]) | fields)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("num_rows", [10, 20, 30, 39])
def test_a_file_of_few_rows_is_trained_on_or_refused_by_its_number_of_rows(tmp_path, capsys, num_rows):
    """The lab needs at least 10 rows, it says of a file with 8."""
    path = write_csv(tmp_path / "mine.csv", num_rows, seed=0)
    options = ["--strategies", "linear", "--seeds", "2", "--epochs", "1", "--workers", "0", "--quiet"]
    code = main(["lab", "run", "--data", str(path), "--target", "label", "--folder", str(tmp_path / "out"), *options])
    out, err = capsys.readouterr()
    # Expected: runs that end well, or one sentence about the rows. Found: exit status 0 after 36 failed runs, "Nothing
    # can be concluded … Run the lab with 5 seeds or more"; without --quiet: "max_size must be at most a quarter of the
    # 24 training examples, 6, got 8", a setting that the user never gave.
    if code == 0:
        assert "0 ended well" not in out
    else:
        assert "rows" in err
        assert "max_size" not in err


def test_a_strategy_does_not_win_or_lose_by_where_the_grid_lies_beside_a_wall():
    """Strategies that are the same but for the rate they need: a larger one by a factor, and a wall just above it."""

    def found(needed):
        def loss(rate):
            return None if rate > 1.05 * needed else 1 + 0.3 * abs(math.log(rate / needed))

        losses = {rate: loss(rate) for rate in (0.001, 0.01, 0.1, 1.0)}
        for _ in range(2):
            losses |= {rate: loss(rate) for rate in next_rates(losses)}
        return loss(Choice.of(losses).lr)

    ends = [found(needed) for needed in np.geomspace(0.0012, 0.99, 121)]
    # Expected, by LabPlan: "so that no strategy wins or loses by where the grid lies". Found: equal strategies end up
    # to 16 % apart, since beside a rate that diverged the best rate tried is taken and rates lie a factor 1.78 apart.
    assert max(ends) / min(ends) < 1.1
