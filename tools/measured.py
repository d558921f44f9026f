"""Write what is made of result files: the page of measurements, picture and caption of the README, the demo's numbers.

    python tools/measured.py            # after a benchmark has written a file to benchmarks/results
    python tools/measured.py --check    # only say what is stale; status 1 if something is

A result file that lacks what the page shows ends it with a message that names the file and the missing entry. Nothing
is written then.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the parts, when this file is loaded by its path

from _measured import inference, picture, planning, serving, sizes, training
from _measured.reading import ROOT, StaleResult
from _measured.tables import filled, number, short

PAGE = "docs/measured.md"
PICTURE = "docs/images/loss_against_seconds.svg"
README = "README.md"
DEMO = "src/batchwright/cli/demo/gpu.json"

_OPENING = """\
# Measured

Every figure comes from a command in [`benchmarks/`](../benchmarks/README.md) whose raw results are in the repository.
This page is written from them by `python tools/measured.py`, and a test fails when a number is stale. Ratios within
one run
are what counts: seconds belong to the machine.

"""


def render() -> dict[str, str]:
    """Return the text of every file that is made of results, by its path in the repository."""
    sections = [training.render(), inference.render(), planning.render(), sizes.render(), serving.render()]
    return {
        PAGE: filled(_OPENING + "\n".join(sections)) + "\n",
        PICTURE: picture.render(),
        DEMO: json.dumps(training.for_the_demo(), indent=1, ensure_ascii=False) + "\n",
        README: _between((ROOT / README).read_text(encoding="utf-8"), "picture", _caption()),
    }


def _caption() -> str:
    ours, peer = training.best_of_peers()
    if ours["to_peer"] is None:
        raise StaleResult(f"{picture.FILE}: {ours['arm']} does not pass {peer['arm']}; write another caption")
    return filled(
        f"A translation model of 48 million parameters, trained from scratch for {number(ours['curve'][-1][0])} s on "
        "one H200 in five ways. Planned batches whose few shapes are replayed as CUDA graphs reach the final loss of "
        f"the best other tool after {short(ours['to_peer'])} s, {ours['times_peer']:.1f} times as fast; the time to "
        "capture the graphs counts. Where arithmetic takes the time, or all lengths are equal, there is less to gain: "
        "[all measurements, and where we do not win](docs/measured.md)."
    )


def _between(text: str, name: str, content: str) -> str:
    """Return a text whose part between two marks is new.

    >>> _between("a <!-- measured: x --> old <!-- end --> b", "x", "new")
    'a <!-- measured: x -->\\nnew\\n<!-- end --> b'
    """
    marks = re.compile(rf"(<!-- measured: {name} -->).*?(<!-- end -->)", flags=re.DOTALL)
    if len(marks.findall(text)) != 1:
        raise StaleResult(f"{README} has not one part between <!-- measured: {name} --> and <!-- end -->; put it back")
    return marks.sub(lambda found: f"{found[1]}\n{content}\n{found[2]}", text)


def stale(rendered: dict[str, str]) -> list[str]:
    """Return the files that differ from what the results say."""

    def text(path: Path) -> str | None:
        return path.read_text(encoding="utf-8") if path.exists() else None

    return [name for name, content in rendered.items() if text(ROOT / name) != content]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file is stale")
    options = parser.parse_args(arguments)
    try:
        rendered = render()
    except StaleResult as error:
        print(f"measured.py: {error}", file=sys.stderr)
        return 2
    found = stale(rendered)
    for name in found:
        print(f"{name} is stale: run python tools/measured.py" if options.check else f"wrote {name}")
        if not options.check:
            (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / name).write_text(rendered[name], encoding="utf-8")
    return 1 if options.check and found else 0


if __name__ == "__main__":
    raise SystemExit(main())
