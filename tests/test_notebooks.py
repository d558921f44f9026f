"""The notebooks run from top to bottom, every cell as Jupyter runs it, and what they tell holds."""

import ast
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read_cells(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def run_cell(source, names):
    """Run the code of a cell, and return what its last line is if that is an expression, as Jupyter shows it."""
    *body, last = ast.parse(source).body
    is_shown = isinstance(last, ast.Expr)
    exec(compile(ast.Module([*body, *([] if is_shown else [last])], type_ignores=[]), "<cell>", "exec"), names)
    shown = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if is_shown else None
    for kind in ("_repr_svg_", "_repr_html_"):
        if hasattr(shown, kind):
            return getattr(shown, kind)()
    return shown


@pytest.fixture
def run_notebook(monkeypatch, tmp_path):
    """Return a function that runs a notebook in its folder; it gives the names and what the cells show."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(name):
        names = {"__name__": "__main__"}
        cells = [cell for cell in read_cells(name) if cell["cell_type"] == "code"]
        return names, [run_cell("".join(cell["source"]), names) for cell in cells]

    return run


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_without_outputs(name):
    cells = read_cells(name)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
    assert cells[0]["source"][0].startswith("# ")
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_every_notebook_is_run_here():
    assert NOTEBOOKS == ["choosing_a_batch_size", "dynabatch_comparison"]


@pytest.mark.filterwarnings("ignore")  # dynabatch's own
def test_the_comparison_with_dynabatch(run_notebook, capsys):
    pytest.importorskip("dynabatch", reason="dynabatch is not installed")
    names, shown = run_notebook("dynabatch_comparison")
    found = names["figures"]
    # The same limit, never passed; fewer batches and less padding than as they come.
    assert found["MaxTokens"]["largest"] <= 1
    assert found["MaxTokens"]["batches"] < found["drop-in"]["batches"] <= found["dynabatch"]["batches"]
    assert found["drop-in, range 5"]["batches"] <= found["dynabatch, range 5"]["batches"]
    assert found["MaxTokens"]["padding"] < found["16 texts as they come"]["padding"] / 2
    assert names["same"]["dynabatch"] == 1
    assert names["same"]["BatchSampler"] < 0.2
    (drawing,) = (text for text in shown if text is not None)
    assert len(ElementTree.fromstring(drawing)) > 5
    assert "every" not in capsys.readouterr().err


def test_choosing_a_batch_size(run_notebook, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    names, shown = run_notebook("choosing_a_batch_size")
    losses = names["losses"]
    # The best size lies inside of the sweep, and goodput ends nearer to it than the ends do.
    assert names["best"] not in (min(losses), max(losses))
    assert names["found"] < min(losses[min(losses)], losses[max(losses)])
    assert names["controller"].history
    assert len(names["records"]) == 12
    drawing, page = (text for text in shown if text is not None)
    assert len(ElementTree.fromstring(drawing)) > 5
    assert "What was compared" in page
    assert "goodput: " in capsys.readouterr().out
