"""Record saved states and what follows from them, with the version of batchwright that can be imported.

::

    PYTHONPATH=src python tests/saved_states/make.py [plan size step frameworks lab]

The files hold the promise that a later version continues what an earlier one saved. Record them again only where a
change of the format is meant, and raise the version of that state with it.
"""

import importlib
import json
import shutil
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.saved_states.cases import DATA, plain

ROOMS = ("plan", "size", "step")
FOLDERS = ("frameworks", "lab")


def write_room(name):
    """Write one line for each case of a room."""
    lines = []
    for case in importlib.import_module(f"tests.saved_states.{name}").CASES:
        state = plain(case.save())
        record = {"state": state, "after": plain(case.go_on(state))}
        lines.append(f"{json.dumps(case.name)}:{json.dumps(record, separators=(',', ':'), ensure_ascii=False)}")
    (DATA / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def write_folders(name):
    """Write the folder of each case, and beside it what follows."""
    for case in importlib.import_module(f"tests.saved_states.{name}").CASES:
        folder = DATA / case.name
        shutil.rmtree(folder, ignore_errors=True)
        case.save(folder)
        after = plain(case.go_on(folder))
        (DATA / f"{case.name}.json").write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")


def main(names):
    DATA.mkdir(parents=True, exist_ok=True)
    for name in names or (*ROOMS, *FOLDERS):
        (write_room if name in ROOMS else write_folders)(name)


if __name__ == "__main__":
    main(sys.argv[1:])
