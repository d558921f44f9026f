"""Count the batches that dynabatch makes and those of the drop-in, on several corpora and settings.

    .venv-bench/bin/python benchmarks/dynabatch_batches.py [--data FOLDER] [--minutes 5]
    python benchmarks/dynabatch_batches.py --measure-memory --max-shapes 24            # on a CUDA device

All get the same lengths and the same arguments; ``train`` is what a trainer makes of them, ``generate`` what a loop
does. dynabatch takes some 10 ms per batch, so its batches are kept in the JSON and a run goes on where the last one
stopped. Without ``--data`` only lengths that are drawn are planned. The largest predicted memory is relative to the
first batch, ``batch_size`` of the longest, by the prior for training. Marks: ``memory``, dynabatch makes fewer batches
and one of them is predicted over the first batch; ``more``, it makes fewer within it.

``--measure-memory`` needs no dynabatch: it reads the shapes of all plans from the JSON, and measures the peak of each
relative to the first batch. It goes on where the last command stopped, and measures dynabatch's training batches of the
first corpus in every command, as the control.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _corpora import Corpus, load_corpora
from _pairs import digest
from _report import environment

RESULT = Path(__file__).parent / "results" / "dynabatch_batches.json"
PEAKS = Path(__file__).parent / "results" / "dynabatch_peaks.json"
# Small batches are many, and dynabatch takes the same time for each.
MAX_EXAMPLES = {1: 1_000, 2: 1_500, 3: 1_500, 4: 1_500}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults, 16": {"batch_size": 16},
    "range 3": {"batch_size": 16, "max_batch_range": 3.0},
    "range 5": {"batch_size": 16, "max_batch_range": 5.0},
    "range 8, 32": {"batch_size": 32, "max_batch_range": 8.0},
    "friendly": {"batch_size": 16, "friendly_batch_size": True},
    "friendly, range 5, 32": {"batch_size": 32, "friendly_batch_size": True, "max_batch_range": 5.0},
    "friendly, range 3, 12": {"batch_size": 12, "friendly_batch_size": True, "max_batch_range": 3.0},
    "size 1": {"batch_size": 1},
    "size 2": {"batch_size": 2},
    "size 3": {"batch_size": 3},
    "size 4": {"batch_size": 4},
    "size 4, range 5": {"batch_size": 4, "max_batch_range": 5.0},
    "size 7": {"batch_size": 7},
    "size 8": {"batch_size": 8},
    "size 32": {"batch_size": 32},
    "size 64": {"batch_size": 64},
    "threshold 0.5, 32": {"batch_size": 32, "threshold": 0.5},
    "threshold 0.7": {"batch_size": 16, "threshold": 0.7},
    "threshold 1, 32": {"batch_size": 32, "threshold": 1.0},
    "not smoothed": {"batch_size": 16, "smooth_batches": False},
    "not even": {"batch_size": 16, "keep_batch_size_even": False},
}
MEASURED = ("instruct-mix", "europarl10k")
MEASURED_SETTINGS = ("range 5", "defaults, 16")  # the others keep only the shapes of dynabatch
Row = dict[str, Any]
Shapes = list[list[int]]


def main() -> int:
    """Plan, or measure what was planned; print a table, write the JSON."""
    options = _options()
    if options.measure_memory:
        return _measure(options)
    report: Row = {**environment({}), "corpora": {}, "rows": []}
    known = _read(options.output)
    deadline, is_cut = time.monotonic() + 60 * options.minutes, False
    for corpus in load_corpora(options.data):
        report["corpora"][corpus.name] = corpus.describe()
        for name, arguments in SETTINGS.items():
            row = make_row(corpus, name, arguments, known, deadline)
            is_cut = is_cut or row is None
            report["rows"] += [] if row is None else [row]
    # Corpora whose files are not here stay as they were.
    have = set(report["corpora"])
    report["rows"] += [row for (corpus, _), row in known.items() if corpus not in have]
    options.output.write_text(json.dumps(report).replace('{"corpus"', '\n{"corpus"') + "\n")  # one line per row
    print(table(report["rows"]))
    if is_cut:
        print("out of time: run it again for the rest")
    return 0


def make_row(
    corpus: Corpus, setting: str, arguments: Row, known: dict[tuple[str, str], Row], deadline: float
) -> Row | None:
    """Plan one corpus under one setting; None where dynabatch's plan is not known and time is over."""
    corpus = _thinned(corpus, MAX_EXAMPLES.get(arguments["batch_size"], len(corpus.tokens)))
    old = known.get((corpus.name, setting), {})
    shapes = old.get("shapes", {}).get("dynabatch")
    if shapes is None or (old["digest"], old["arguments"]) != (digest(corpus.tokens), arguments):
        if time.monotonic() > deadline:
            return None
        shapes = counted(theirs(corpus, arguments))
    plans = {"dynabatch": shapes, **{arm: counted(ours(corpus, arguments, **more)) for arm, more in _arms(corpus)}}
    row = {"corpus": corpus.name, "setting": setting, "arguments": arguments, "digest": digest(corpus.tokens)}
    kept = plans if setting in MEASURED_SETTINGS else {"dynabatch": shapes}
    return {**row, **judge(plans, len(corpus.tokens), arguments["batch_size"], corpus.longest), "shapes": kept}


def _arms(corpus: Corpus) -> list[tuple[str, Row]]:
    given = {"task": "generate", "max_new_tokens": max(1, corpus.longest // 2)}
    return [("generate", {}), ("generate, output given", given), ("train", {"is_training": True})]


def theirs(corpus: Corpus, arguments: Row) -> list[tuple[int, int]]:
    """Return the shapes of dynabatch's batches."""
    from dynabatch import dynabatch_sampler

    lengths = {"token": corpus.tokens, "word": corpus.words, "char": corpus.chars}
    given = {f"{kind}_lengths": values.tolist() for kind, values in lengths.items()}
    with contextlib.redirect_stderr(io.StringIO()):
        sampler = dynabatch_sampler([""] * len(corpus.tokens), None, num_workers=1, **given, **arguments)
    return [(len(batch), int(corpus.tokens[batch].max())) for batch in sampler.batches]


def ours(corpus: Corpus, arguments: Row, *, is_training: bool = False, **more: Any) -> list[tuple[int, int]]:
    """Return the shapes of the drop-in's batches; in training as a trainer plans them."""
    from batchwright.integrations.dynabatch import dynabatch_sampler

    sampler = dynabatch_sampler([""] * len(corpus.tokens), None, token_lengths=corpus.tokens, **arguments, **more)
    plan = (sampler.for_training() if is_training else sampler).plan
    return [(num_items, width) for num_items, width in plan.shapes.tolist()]


def counted(shapes: Iterable[tuple[int, int]]) -> Shapes:
    """Return distinct shapes as (items, longest, how many), longest first.

    >>> counted([(2, 9), (4, 3), (4, 3)])
    [[2, 9, 1], [4, 3, 2]]
    """
    return [[*shape, num] for shape, num in sorted(Counter(shapes).items(), key=lambda item: (-item[0][1], item[0]))]


def judge(plans: dict[str, Shapes], num_examples: int, batch_size: int, longest: int) -> Row:
    """Return the number of batches of every plan, its largest predicted memory, and a mark."""
    batches = {arm: sum(num for *_, num in shapes) for arm, shapes in plans.items()}
    largest = {arm: largest_memory(shapes, batch_size, longest) for arm, shapes in plans.items()}
    mark = ""
    if batches["train"] > batches["dynabatch"]:
        mark = "memory" if largest["dynabatch"] > 1 else "more"
    static = -(-num_examples // batch_size)
    return {"num_examples": num_examples, "static": static, "batches": batches, "largest": largest, "mark": mark}


def largest_memory(shapes: Shapes, batch_size: int, longest: int) -> float:
    """Return the largest predicted memory of a training step, relative to ``batch_size`` of the longest."""
    from batchwright import MemoryModel

    relative = MemoryModel.pretrained("train").relative(np.array(shapes)[:, :2], reference=(batch_size, longest))
    return float(relative.max())


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    from _gpu import markdown

    arms = {"dynabatch": "dynabatch", "generate": "generate", "train": "train"}
    flat = [
        {**row, **{f"{arm} batches": row["batches"][arm] for arm in arms}, **{arm: row["largest"][arm] for arm in arms}}
        for row in rows
    ]
    columns = [("corpus", "corpus", ""), ("setting", "setting", ""), ("static", "static", ",")]
    columns += [(title, f"{arm} batches", ",") for arm, title in arms.items()]
    columns += [(f"memory, {title}", arm, ".2f") for arm, title in arms.items()]
    return markdown(flat, [*columns, ("mark", "mark", "")])


def _thinned(corpus: Corpus, num: int) -> Corpus:
    step = max(1, len(corpus.tokens) // num)
    return replace(corpus, tokens=corpus.tokens[::step], words=corpus.words[::step], chars=corpus.chars[::step])


def _read(path: Path) -> dict[tuple[str, str], Row]:
    report = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return {(row["corpus"], row["setting"]): row for row in report["rows"]}


def _measure(options: argparse.Namespace) -> int:
    from _gpu import GIB, Device, markdown, write

    plans = _read(options.plans)
    columns = [("corpus", "corpus", ""), ("plan", "plan", ""), ("run", "run", ""), ("shapes", "num_measured", ",")]
    columns += [("over the first", "num_over", ","), ("largest", "largest", ".3f")]
    deadline = time.monotonic() + 60 * options.minutes
    with Device(options.cap_gib * GIB, smoke=options.smoke) as device:
        report: Row = {**device.describe(), "setting": options.setting, "rows": _finished(options)}
        for name in options.corpora.split(","):
            if (name, options.setting) not in plans:
                raise SystemExit(f"no plan of {name!r} under {options.setting!r} in {options.plans}; plan it first")
            known = [_name_of(row) for row in report["rows"][1:]]
            for row in _peaks(plans[name, options.setting], device, options.max_shapes, deadline, known):
                report["rows"] = [old for old in report["rows"] if _name_of(old) != _name_of(row)] + [row]
                write(options.peaks, report)
                print(json.dumps({key: value for key, value in row.items() if key != "ratios"}), flush=True)
    print(markdown(report["rows"], columns))
    return 0


def _finished(options: argparse.Namespace) -> list[Row]:
    """Return the rows that earlier commands measured whole, of the same setting and number of shapes."""
    if not options.peaks.exists():
        return []
    before = json.loads(options.peaks.read_text())
    rows = before["rows"] if before["setting"] == options.setting else []
    return [row for row in rows if row["num_measured"] == row["num_shapes"] <= options.max_shapes]


def _name_of(row: Row) -> tuple[str, str, str]:
    return row["corpus"], row["run"], row["plan"]


def _peaks(row: Row, device: Any, max_shapes: int, deadline: float, known: list[tuple[str, str, str]]) -> Iterable[Row]:
    """Yield the measured peaks of the plans of one row: in training, and in generation with two kinds of output."""
    import _plan_peaks as peaks

    model = peaks.make_model(device)
    longest = max(shape[1] for shape in row["shapes"]["dynabatch"])
    first = (row["arguments"]["batch_size"], longest)
    half = max(1, longest // 2)
    runs = {
        "train": (lambda: peaks.training(model, device), ("dynabatch", "train")),
        "generate, as long as the input": (
            lambda: peaks.generation(model, device, max_new_tokens=None),
            ("dynabatch", "generate"),
        ),
        f"generate, {half} tokens": (
            lambda: peaks.generation(model, device, max_new_tokens=half),
            ("dynabatch", "generate", "generate, output given"),
        ),
    }
    for name, (make_run, arms) in runs.items():
        run = make_run()
        for arm in arms:
            if (row["corpus"], name, arm) in known:
                continue
            shapes = peaks.choose_shapes([(items, width) for items, width, _ in row["shapes"][arm]], first, max_shapes)
            yield {"corpus": row["corpus"], "run": name, "plan": arm, **peaks.measure(run, shapes, device, deadline)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with the corpora; without it only drawn lengths")
    parser.add_argument("--output", type=Path, default=RESULT, help="the plans, written and gone on with")
    parser.add_argument("--minutes", type=float, default=5.0, help="begin nothing new after this time")
    parser.add_argument("--measure-memory", action="store_true", help="measure peaks of the plans; needs CUDA")
    parser.add_argument("--plans", type=Path, default=RESULT, help="the plans to measure")
    parser.add_argument("--peaks", type=Path, default=PEAKS, help="where measured peaks are written")
    parser.add_argument("--corpora", default=",".join(MEASURED), help="those to measure, with commas between")
    parser.add_argument("--setting", default=MEASURED_SETTINGS[0], choices=MEASURED_SETTINGS)
    parser.add_argument("--max-shapes", type=int, default=60, help="of each plan and run; the first batch is one")
    parser.add_argument("--cap-gib", type=float, default=64.0, help="cap of the allocator")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, to see that it runs")
    options = parser.parse_args()
    if options.measure_memory and options.output != RESULT:
        parser.error("--output is for the plans; with --measure-memory use --peaks")
    return options


if __name__ == "__main__":
    sys.exit(main())
