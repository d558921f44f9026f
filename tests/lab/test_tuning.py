"""Learning rates: the same number of runs for every strategy, by the final loss, on seeds that are not compared."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import StoreError
from batchwright.lab._records import read_records
from batchwright.lab.datasets import load
from batchwright.lab.observations import observe
from batchwright.lab.runner import Cell, Lab, LabPlan
from batchwright.lab.runner._choice import Choice, best_rate, lowest_point, next_rates
from batchwright.lab.runner._tuning import num_tuning_runs
from batchwright.lab.strategies import Setup, Strategy, catalogue
from batchwright.size import constant

WINE = Cell(dataset="wine", model="logistic", num_epochs=1)


def plan(*cells, strategies=("constant", "linear"), seeds=(0, 1), **options):
    return LabPlan(name="tiny", cells=cells or (WINE,), strategies=strategies, seeds=seeds, **options)


def run(folder, given=None, **options):
    return Lab(folder).run(given, **{"num_workers": 0, "progress": False, **options})


def tuning_runs(folder):
    return list(read_records(folder / "tuning.jsonl"))


# Which rate is best


def test_the_lowest_loss_wins_and_a_tie_goes_to_the_smaller_rate():
    assert best_rate({0.1: 0.5, 0.01: 0.4, 0.001: 0.4}) == 0.001


def test_a_rate_that_diverged_or_failed_never_wins():
    assert best_rate({0.1: None, 1.0: float("nan"), 10.0: float("-inf"), 0.001: 9.9}) == 0.001
    assert best_rate({0.1: None, 1.0: None}) is None


def test_the_rate_is_the_lowest_point_of_a_parabola_whatever_grid_it_is_read_from():
    def loss(rate):
        return math.exp(0.1 * math.log(rate / 0.02) ** 2)  # lowest at 0.02

    for shift in (0.3, 0.5, 1.0, 1.7, 3.0):
        grid = [shift * rate for rate in (0.002, 0.006, 0.02, 0.06, 0.2)]
        assert lowest_point({rate: loss(rate) for rate in grid}) == pytest.approx(0.02, rel=0.005)


@pytest.mark.parametrize(
    "losses",
    [
        {0.1: 1.0},
        {0.1: 1.0, 1.0: 2.0},
        {0.01: 2.0, 0.1: 1.0, 1.0: None},
        {0.01: 2.0, 0.1: 1.0, 1.0: math.inf},
        {0.01: 1.1, 0.1: 1.0, 1.0: 1e9},
        {0.01: 1.0, 0.1: 0.0, 1.0: 1.0},
        {0.01: 1.0, 0.1: 1.0 - 1e-16, 1.0: 1.0},
    ],
)
def test_without_a_parabola_the_best_rate_tried_is_used(losses):
    assert lowest_point(losses) == 0.1
    assert lowest_point(dict.fromkeys(losses)) is None


@given(st.dictionaries(st.floats(1e-5, 10.0), st.floats(0, 1e6) | st.none(), min_size=1, max_size=7))
def test_the_rate_lies_between_the_neighbours_of_the_best(losses):
    rates, best, found = sorted(losses), best_rate(losses), lowest_point(losses)
    if best is None:
        assert found is None
        return
    place = rates.index(best)
    assert 0.99 * rates[max(0, place - 1)] <= found <= 1.01 * rates[min(len(rates) - 1, place + 1)]


# Which rates are tried next


def test_inside_the_grid_both_sides_of_the_best_rate_are_tried():
    # sqrt(0.001 · 0.01) and sqrt(0.01 · 0.1), then half of that.
    losses = {0.001: 3.0, 0.01: 1.0, 0.1: 2.0}
    assert next_rates(losses) == (0.00316, 0.0316)
    assert next_rates({**losses, 0.00316: 1.5, 0.0316: 1.5}) == (0.00562, 0.0178)


def test_at_an_end_of_the_grid_the_next_rate_lies_beyond_it():
    assert next_rates({0.001: 3.0, 0.01: 2.0, 0.1: 1.0}) == (0.0316, 1.0)
    assert next_rates({0.001: 1.0, 0.01: 2.0, 0.1: 3.0}) == (0.0001, 0.00316)
    # Beyond by at most a factor of 10, and for a single rate by its root.
    assert next_rates({1e-6: 2.0, 0.01: 1.0}) == (0.0001, 0.1)
    assert next_rates({0.01: 1.0}) == (0.00316, 0.0316)


def test_where_every_rate_diverged_smaller_ones_are_tried():
    assert next_rates({0.1: None, 0.01: None}) == (0.0001, 0.001)


@given(
    st.dictionaries(
        st.floats(1e-6, 10.0), st.one_of(st.none(), st.floats(0, 10), st.just(math.nan)), min_size=1, max_size=6
    ),
    st.integers(1, 4),
)
def test_every_search_tries_as_many_rates(losses, num_rounds):
    tried = dict(losses)
    for _ in range(num_rounds):
        tried.update(dict.fromkeys(next_rates(tried), 1.0))
    assert len(tried) == len(losses) + 2 * num_rounds
    assert all(rate > 0 and math.isfinite(rate) for rate in tried)


# What a choice says


def test_a_choice_at_an_end_says_so():
    losses = {0.01: 0.5, 0.1: 0.4, 1.0: None}
    # 1.0 was tried, so 0.1 is no end, though nothing beyond it has a loss.
    assert not Choice(lr=0.1, losses=losses, seeds=(7,)).is_at_edge
    assert Choice(lr=0.1, losses={0.01: 0.5, 0.1: 0.4}, seeds=(7,)).is_at_edge
    assert not Choice(lr=0.1, losses={}).is_at_edge


def test_a_choice_says_how_coarse_its_search_was():
    losses = {0.01: 0.5, 0.1: 0.4, 0.2: 0.6}
    assert Choice.of(losses).spacing == pytest.approx(10.0)
    assert Choice.of({0.01: 0.5, 0.1: 0.4, 0.2: 0.3}).spacing == pytest.approx(2.0)
    assert Choice(lr=0.1, losses={}).spacing is None


def test_a_choice_as_records_have_it():
    choice = Choice(lr=0.1, losses={0.1: 0.4, 0.01: 0.5, 1.0: None}, num_diverged=2, seeds=(7, 8))
    assert choice.to_dict() == {
        "grid": [0.01, 0.1, 1.0],
        "losses": {"0.01": 0.5, "0.1": 0.4, "1.0": None},
        "chosen": 0.1,
        "best_tried": 0.1,
        "is_at_edge": False,
        "is_at_wall": True,
        "spacing": pytest.approx(10.0),
        "num_runs": 6,
        "num_diverged": 2,
        "num_failed": 0,
        "seeds": [7, 8],
    }
    given = Choice(lr=0.1, losses={}).to_dict()
    assert (given["grid"], given["chosen"], given["num_runs"]) == ([0.1], 0.1, 0)


# In a lab


def test_every_strategy_has_as_many_runs_for_its_rate_on_other_seeds(tmp_path):
    names = ("constant", "linear", "noise", "replay_noise", "curriculum")
    records = run(tmp_path, plan(strategies=names, tuning_seeds=(70, 71), tuning_rounds=1))
    found = tuning_runs(tmp_path)
    # 4 rates of the grid and 2 more, on 2 seeds.
    assert Counter(one["strategy"] for one in found) == dict.fromkeys(names, 12)
    assert {one["seed"] for one in found} == {70, 71}
    assert num_tuning_runs(plan(strategies=names, tuning_rounds=1), [load("wine")]) == len(found)
    for record in records:
        mine = [one for one in found if one["strategy"] == record["strategy"]]
        losses = {}
        for one in mine:
            losses.setdefault(one["settings"]["lr"], []).append(one["final"]["validation_loss"])
        means = {rate: sum(some) / 2 for rate, some in losses.items()}
        # By the measure that is compared: the final loss, averaged over the seeds.
        assert record["tuning"]["best_tried"] == min(means, key=means.get)
        assert record["settings"]["lr"] == record["tuning"]["chosen"] == lowest_point(means)
        assert record["tuning"]["losses"] == {str(rate): pytest.approx(means[rate]) for rate in sorted(means)}
        assert record["tuning"]["num_runs"] == 12
        assert record["tuning"]["seeds"] == [70, 71]


def test_a_replay_is_tuned_on_the_sizes_of_another_seed_at_the_best_rate_of_its_source(tmp_path):
    run(tmp_path, plan(strategies=("constant", "linear", "replay_linear"), tuning_rounds=0))
    found = tuning_runs(tmp_path)
    by_id = {one["id"]: one for one in found}
    best = next(note["best_tried"] for note in notes(tmp_path) if note["strategy"] == "linear")
    replays = [one for one in found if one["strategy"] == "replay_linear"]
    sources = [by_id[one["settings"]["replays"]["id"]] for one in replays]
    assert {(one["seed"], source["seed"]) for one, source in zip(replays, sources, strict=True)} == {
        (1000, 1001),
        (1001, 1000),
    }
    assert {source["settings"]["lr"] for source in sources} == {best}


def notes(folder):
    return json.loads((folder / "lab.json").read_text())["tuning"]


def test_how_rates_were_chosen_is_written_down(tmp_path):
    run(tmp_path, plan(grids={"sgd": (1e-6, 1e-5)}, tuning_rounds=0, tuning_seeds=(70,)))
    first, second = notes(tmp_path)
    assert (first["strategy"], second["strategy"]) == ("constant", "linear")
    assert (first["dataset"], first["model"], first["optimizer"]) == ("wine", "logistic", "sgd")
    assert first["lr"] == 1e-5
    assert first["is_at_edge"]  # a better one lies beyond
    assert first["seeds"] == [70]
    assert [score["lr"] for score in first["scores"]] == [1e-6, 1e-5]
    assert first["problem"] is None


def test_tuning_goes_on_where_it_stopped(tmp_path):
    first = run(tmp_path, plan())
    path = tmp_path / "tuning.jsonl"
    whole, lines = path.read_bytes(), path.read_bytes().splitlines(keepends=True)
    assert run(tmp_path) == first
    assert path.read_bytes() == whole
    path.write_bytes(b"".join(lines[:9]) + lines[9][:40])  # killed while the tenth was written
    again = run(tmp_path)
    assert path.read_bytes()[: len(b"".join(lines[:9]))] == b"".join(lines[:9])
    assert [one["id"] for one in tuning_runs(tmp_path)] == [json.loads(line)["id"] for line in lines]
    assert again == first  # the same rates, so nothing that was compared is repeated


def test_processes_choose_the_same_rates_and_give_the_same_results_as_one(tmp_path):
    names = ("constant", "loss_difference_exponential", "replay_loss_difference_exponential")
    given = plan(Cell(dataset="wine", model="logistic", num_epochs=4), strategies=names, tuning_rounds=1)
    alone, shared = run(tmp_path / "a", given), run(tmp_path / "b", given, num_workers=2)
    assert len(alone) == 6
    assert any(one["decisions"] for one in alone)
    for field in ("id", "tuning", "decisions"):
        assert [one[field] for one in alone] == [one[field] for one in shared]
    losses = [[one["final"]["validation_loss"] for one in records] for records in (alone, shared)]
    assert losses[0] == losses[1]


def test_progress_is_shown_while_tuning(tmp_path, capsys):
    run(tmp_path, plan(), progress=True)
    # 2 strategies, 8 rates, 2 seeds.
    assert "tuning: 32 in" in capsys.readouterr().err
    run(tmp_path, progress=True)
    assert capsys.readouterr().err == ""


def test_a_rate_that_is_given_is_not_tuned(tmp_path):
    [record, _] = run(tmp_path, plan(Cell(dataset="wine", model="logistic", num_epochs=1, lr=0.02), seeds=(0,)))
    assert not (tmp_path / "tuning.jsonl").exists()
    assert record["settings"]["lr"] == 0.02
    assert record["tuning"]["num_runs"] == 0


def test_a_strategy_whose_every_rate_diverges_fails_by_name_and_the_others_go_on(tmp_path, monkeypatch):
    add(monkeypatch, "wild", lambda examples: 1e30)
    names = ("constant", "wild", "replay_wild")
    records = run(tmp_path, plan(DIABETES, strategies=names, tuning_rounds=1, tuning_seeds=(7,)))
    by_name = {one["strategy"]: one for one in records}
    assert by_name["constant"]["status"] == "ok"
    assert by_name["wild"]["status"] == "failed"
    words = "none of the learning rates from 1e-05 to 1 worked: of 6 runs 6 diverged and 0 failed"
    assert words in by_name["wild"]["error"]
    assert (by_name["wild"]["tuning"]["chosen"], by_name["wild"]["tuning"]["num_diverged"]) == (None, 6)
    assert "it repeats another strategy, which has no learning rate" in by_name["replay_wild"]["error"]
    assert [note["problem"] is None for note in notes(tmp_path)] == [True, False, False]


def test_a_damaged_tuning_run_is_refused_by_name(tmp_path):
    run(tmp_path, plan())
    path = tmp_path / "tuning.jsonl"
    lines = path.read_text().splitlines()
    broken = json.loads(lines[3])
    lines[3] = json.dumps({**broken, "final": {}})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(StoreError, match=f"the run {broken['id']} in tuning.jsonl .* is damaged; remove that line"):
        run(tmp_path)


def test_failed_tuning_runs_are_repeated_when_asked(tmp_path):
    first = run(tmp_path, plan(seeds=(0,)))
    path = tmp_path / "tuning.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    best = first[0]["tuning"]["best_tried"]
    for line in lines:  # as if a process had been killed
        if line["strategy"] == "constant" and line["settings"]["lr"] == best:
            line.update(status="failed", final=None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(tmp_path)[0]["tuning"]["best_tried"] != best
    assert run(tmp_path, retry_failed=True) == first


# No strategy wins or loses by its tuning

DIABETES = Cell(dataset="diabetes", model="linear", num_epochs=2)


def add(monkeypatch, name, lr_factor):
    """Add a strategy: the baseline at a multiple of the learning rate."""
    made = Strategy(
        name=name,
        group="constant",
        make=lambda conditions: Setup(policy=constant(conditions.settings.base_size), lr_factor=lr_factor),
    )
    monkeypatch.setitem(catalogue._READY, name, made)


@pytest.fixture
def quadratic(tmp_path):
    """Least squares on 250 rows, long enough that the loss has one valley: it is quadratic in the weights."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((250, 4))
    targets = rows @ [1.0, -2.0, 0.5, 1.5] + 0.3 * rng.standard_normal(250)
    lines = [",".join(f"{number:.4f}" for number in (*row, target)) for row, target in zip(rows, targets, strict=True)]
    path = tmp_path / "quadratic.csv"
    path.write_text("\n".join(["a,b,c,d,y", *lines]) + "\n")
    return Cell(dataset="quadratic", model="linear", num_epochs=8, data={"path": str(path), "target": "y"})


def test_a_strategy_with_a_badly_placed_rate_neither_wins_nor_loses(tmp_path, monkeypatch, quadratic):
    # All are the baseline once tuned: the best rate of each is another multiple of the baseline's.
    factors = {"tenth": 0.1, "hundredth": 0.01, "seventh": 1 / 7, "tenfold": 10.0}
    for name, factor in factors.items():
        add(monkeypatch, name, lambda examples, factor=factor: factor)
    names = ("constant", *factors)
    records = run(tmp_path / "lab", plan(quadratic, strategies=names, seeds=range(5)))
    losses = {name: [one["final"]["validation_loss"] for one in records if one["strategy"] == name] for name in names}
    base = np.array(losses.pop("constant"))
    for name, mine in losses.items():
        assert np.log(np.array(mine) / base).mean() == pytest.approx(0, abs=0.01), name
    rates = {one["strategy"]: one["settings"]["lr"] for one in records}
    effective = [rates[name] * factors.get(name, 1.0) for name in names]
    assert max(effective) < 3 * min(effective)
    assert {one["tuning"]["num_runs"] for one in records} == {16}
    sentence = next(one.sentence for one in observe(records) if one.topic == "overall")
    assert "no strategy is shown to be better than constant" in sentence.lower()


def test_at_one_rate_for_all_the_same_strategies_would_lose(tmp_path, monkeypatch, quadratic):
    # What the test above guards against is there: without tuning, a badly placed rate decides.
    add(monkeypatch, "tenth", lambda examples: 0.1)
    fixed = Cell(**{**vars(quadratic), "lr": 0.003})
    records = run(tmp_path / "lab", plan(fixed, strategies=("constant", "tenth"), seeds=(0,)))
    constant_loss, tenth_loss = (one["final"]["validation_loss"] for one in records)
    assert tenth_loss > 2 * constant_loss


def test_a_best_rate_beside_a_wall_is_told_with_how_far_apart_rates_were_tried():
    """Equal strategies end up to 16 % apart by where the grid lies beside a wall, so the record must say so."""

    def found(needed):
        def loss(rate):
            return None if rate > 1.05 * needed else 1 + 0.3 * abs(math.log(rate / needed))

        losses = {rate: loss(rate) for rate in (0.001, 0.01, 0.1, 1.0)}
        for _ in range(2):
            losses |= {rate: loss(rate) for rate in next_rates(losses)}
        choice = Choice.of(losses)
        return loss(choice.lr), choice.to_dict()

    ends = [found(needed) for needed in np.geomspace(0.0012, 0.99, 121)]
    assert all(tuning["is_at_wall"] and 1.7 < tuning["spacing"] < 3.2 for loss, tuning in ends if loss > 1.1)
    assert any(loss > 1.1 for loss, _ in ends)
