"""States that an earlier version saved are continued as that version continued them. ``make.py`` recorded them."""

import copy
import json
import shutil
from functools import cache

import pytest
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import StateMismatchError

from . import frameworks, lab, plan, size, step
from .cases import DATA, difference, plain, without_words

EARLIER = DATA.parent / "earlier_states"
ROOMS = {"plan": plan.CASES, "size": size.CASES, "step": step.CASES}
CASES = [pytest.param(room, case, id=f"{room}: {case.name}") for room, cases in ROOMS.items() for case in cases]
FOLDERS = [pytest.param(case, id=case.name) for case in (*frameworks.CASES, *lab.CASES)]

# A policy that takes over in the middle of training now waits for an epoch of its own, so these sizes came about later.
DECIDES_LATER = {("size", "switch"), ("size", "switch per step")}

# What Lightning says about small examples as these.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@cache
def read(room, folder=DATA):
    return json.loads((folder / f"{room}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("room", "case"), CASES)
def test_a_saved_state_continues_as_it_did(room, case):
    record = copy.deepcopy(read(room)[case.name])
    after = without_later(plain(case.go_on(record["state"])))
    assert difference(after, record["after"], case.tolerance) is None


@pytest.mark.parametrize(("room", "case"), CASES)
def test_the_same_state_would_be_saved_today(room, case):
    state = without_later(without_words(plain(case.save())))
    found = difference(state, without_words(read(room)[case.name]["state"]), case.tolerance)
    assert (found is not None) == ((room, case.name) in DECIDES_LATER), found


# What states hold since these were recorded, by what else the record has: the latest calls of a latency model, and the
# newest size in force of which a batch ran, and the sizes of batches that workers had formed ahead.
LATER = {
    "latest": {"gram", "moment"},
    "followed": {"num_parts", "mean", "weight"},
    "ran": {"num_fitting", "too_large"},
    "sizes": {"version", "controller", "sampler", "stepper"},
}


def without_later(value):
    """Return a state without what recorded ones do not have yet."""
    if isinstance(value, dict):
        later = [name for name, others in LATER.items() if others <= value.keys()]
        return {name: without_later(item) for name, item in value.items() if name not in later}
    return [without_later(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", read("plan", EARLIER))
def test_an_epoch_begun_by_the_earlier_version_ends_as_it_would_have_there(name):
    """That version had other rules for the order of batches and for packing; the next epoch follows those of today."""
    record = copy.deepcopy(read("plan", EARLIER)[name])
    case = next(case for case in plan.CASES if case.name == name)
    after, expected = (without_next(value) for value in (plain(case.go_on(record["state"])), record["after"]))
    assert difference(after, expected, case.tolerance) is None


@pytest.mark.parametrize("name", read("buckets", EARLIER))
def test_a_state_of_an_earlier_buckets_is_refused_by_name(name):
    state = copy.deepcopy(read("buckets", EARLIER)[name])
    case = next(case for case in plan.CASES if case.name == name.rsplit(", version", 1)[0])
    words = "the state is of an earlier Buckets, which made other batches.*finish that epoch with the earlier version"
    with pytest.raises(StateMismatchError, match=words):
        case.go_on(state)


def test_a_loader_regrouped_over_an_earlier_buckets_is_refused_by_name():
    sampler = bw.BatchSampler(plan.LENGTHS, bw.MaxTokens(240), grouping=bw.Buckets(4))
    made = bw.regroup(DataLoader(range(plan.NUM), batch_sampler=sampler, collate_fn=list), plan.make_controller())
    saved = made.state_dict()
    without_order = {name: value for name, value in saved.items() if name != "sampler"}
    earlier = [
        {**without_order, "version": 1},
        {**saved, "sampler": read("buckets", EARLIER)["sampler: buckets, 1, version 2"]},
    ]
    for state in earlier:
        with pytest.raises(StateMismatchError, match="the state is of an earlier Buckets"):
            made.load_state_dict(state)
    assert made.state_dict() == saved
    made.load_state_dict(saved)


def test_a_state_of_buckets_is_no_state_of_another_grouping():
    states = read("plan")
    window = next(case for case in plan.CASES if case.name == "sampler: window, 1")
    buckets = next(case for case in plan.CASES if case.name == "sampler: buckets, 1")
    with pytest.raises(StateMismatchError, match=r"saved with grouping = 'Buckets\(count=4\)'"):
        window.go_on(copy.deepcopy(states["sampler: buckets, 1"]["state"]))
    with pytest.raises(StateMismatchError, match="saved with grouping = 'WindowSort"):
        buckets.go_on(copy.deepcopy(states["sampler: window, 1"]["state"]))


def test_a_state_of_a_later_version_is_refused():
    for name in ("sampler: buckets, 1", "sampler: window, 1", "stream: buckets", "stream: window"):
        record, case = read("plan")[name], next(case for case in plan.CASES if case.name == name)
        with pytest.raises(StateMismatchError, match="version"):
            case.go_on({**record["state"], "version": 4})


@pytest.mark.parametrize("name", [name for name in read("size", EARLIER) if name != "NoiseAverage"])
def test_a_controller_saved_without_its_unrounded_size_goes_on_with_the_same_sizes(name):
    record = copy.deepcopy(read("size", EARLIER)[name])
    case = next(case for case in size.CASES if case.name == name)
    assert record["state"]["version"] == 1
    assert case.go_on(record["state"])["sizes"] == record["after"]["sizes"]


@pytest.mark.parametrize("name", read("goodput", EARLIER))
def test_a_goodput_that_did_not_count_its_measured_updates_goes_on_by_the_averages_of_today(name):
    record = copy.deepcopy(read("goodput", EARLIER)[name])
    assert "measured" not in record["state"]["policy_state"]
    case = next(case for case in size.CASES if case.name == name)
    found, before = case.go_on(record["state"])["sizes"], record["after"]["sizes"]
    assert len(found) == len(before)
    assert all(0.5 <= now / then <= 2 for now, then in zip(found, before, strict=True))


def without_next(value):
    """Return what followed from a state without the next epoch, and without what is counted in it."""
    if isinstance(value, dict):
        return {name: without_next(item) for name, item in value.items() if name not in ("next", "size", "kept")}
    return [without_next(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", FOLDERS)
def test_a_saved_folder_continues_as_it_did(case):
    folder = DATA / case.name
    before = contents(folder)
    assert difference(plain(case.go_on(folder)), read(case.name), case.tolerance) is None
    assert contents(folder) == before, "the recorded folder is only read"


@pytest.mark.parametrize("case", FOLDERS)
def test_the_same_folder_would_be_saved_today(case, tmp_path):
    case.save(tmp_path / "new")
    states = (plain(case.state(folder)) for folder in (tmp_path / "new", DATA / case.name))
    new, old = (without_words(without_later(without_exact_size(state))) for state in states)
    assert difference(new, old, case.tolerance) is None


def without_exact_size(value):
    """Return a state without what controllers keep since version 2; the folders were saved with version 1.

    Changes in a history tell the tokens since trainers count them.
    """
    if isinstance(value, list):
        return [without_exact_size(item) for item in value]
    if not isinstance(value, dict):
        return value
    later = ("version", "exact_size", "num_changes") if "policy_state" in value else ()
    later += ("tokens",) if {"old", "new", "wanted"} <= set(value) else ()
    return {name: without_exact_size(item) for name, item in value.items() if name not in later}


@pytest.mark.parametrize("name", sorted(path.name for path in EARLIER.iterdir() if path.is_dir()))
def test_an_epoch_of_a_folder_of_the_earlier_version_ends_as_it_would_have_there(name):
    case = next(case for case in frameworks.CASES if case.name == name)
    trained, expected = case.go_on(EARLIER / name)["trained"], read(name, EARLIER)["trained"]
    place = place_in(case.state(EARLIER / name))
    num_left = place["num_examples"] - place["position"]
    assert flat(trained)[:num_left] == flat(expected)[:num_left]
    assert len(set(flat(trained)[:num_left])) == num_left > 0


def place_in(state):
    """Return the part of a state that is a sampler's."""
    if "position" in state:
        return state
    found = (place_in(value) for value in state.values() if isinstance(value, dict))
    return next((place for place in found if place), None)


def flat(batches):
    return [index for batch in batches for index in batch]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("room", ROOMS)
def test_every_recorded_state_is_tried(room):
    assert read(room).keys() == {case.name for case in ROOMS[room]}


def test_every_recorded_folder_is_tried_and_all_are_small():
    assert {path.name for path in DATA.iterdir() if path.is_dir()} == {case.values[0].name for case in FOLDERS}
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 1_000_000


def test_a_state_is_json_without_surprises():
    for room in ROOMS:
        json.dumps([case.save() for case in ROOMS[room]], allow_nan=False)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ({"a": [1, 2.0], "b": None}, None),
        ({"a": [1, 2.0 + 1e-13], "b": None}, None),
        ({"a": [1, 2.0 + 1e-9], "b": None}, ".a[1]: 2.000000001 and not 2.0"),
        ({"a": [2, 2.0], "b": None}, ".a[0]: 2 and not 1"),
        ({"a": [1.0, 2.0], "b": None}, ".a[0]: 1.0 and not 1"),
        ({"a": [1], "b": None}, ".a: 1 items and not 2"),
        ({"a": [1, 2.0]}, ": ['a'] and not ['a', 'b']"),
    ],
)
def test_a_difference_is_found(found, line):
    assert difference(found, {"a": [1, 2.0], "b": None}, 1e-12) == line


def test_a_sampler_that_continues_elsewhere_is_found():
    case = next(case for case in plan.CASES if case.name == "sampler: window, 1")
    record = read("plan")[case.name]
    moved = {**record["state"], "epoch": record["state"]["epoch"] + 1, "position": 0}
    assert difference(plain(case.go_on(moved)), record["after"], case.tolerance) is not None


def test_a_checkpoint_whose_place_is_lost_is_found(tmp_path):
    case = next(case for case in frameworks.CASES if case.name == "huggingface_controlled")
    folder = shutil.copytree(DATA / case.name, tmp_path / case.name)
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    state["stateful_callbacks"]["batchwright"]["controller"]["size"] -= 1
    (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    assert difference(plain(case.go_on(folder)), read(case.name), case.tolerance) is not None
