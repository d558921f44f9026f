"""Time to a loss on the CPU: clocks, strategies, which runs are made, and what they say together."""

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def part(script):
    """A function that imports a part of the benchmark."""
    return lambda name: script(f"_cpu_quality.{name}")


@pytest.fixture
def quality(script):
    return script("quality")


# Tasks


def test_rates_and_base_sizes_are_those_of_the_earlier_benchmark(part):
    """One rate and base size per task, fixed before the sweep: what policies.py stored for such models."""
    results = json.loads((Path(__file__).parents[2] / "benchmarks/results/policies.json").read_text())
    stored = {task["title"]: task["settings"] for task in results["tasks"]}
    titles = {
        "images": "Fashion-MNIST (1,600 images), CNN with GroupNorm, SGD",
        "characters": "Python source, character LM, Adam",
        "teacher": "digits, MLP, Adam",
    }
    for name, task in part("tasks").TASKS.items():
        settings = stored[titles[name]]
        assert (task.lr, task.base_size) == (settings["lr"], settings["base_size"])


def test_a_fifth_of_the_teachers_labels_are_drawn_anew(part):
    data = part("tasks").TASKS["teacher"].load()
    assert [len(column) for column in (*data.train, *data.held_out)] == [48_000, 48_000, 4_000, 4_000]
    shares = torch.bincount(data.train[1], minlength=10) / 48_000
    assert 0.02 <= float(shares.min()) <= float(shares.max()) < 0.3  # a fifth of a tenth at least


def test_a_seed_gives_the_same_weights(part):
    task = part("tasks").TASKS["teacher"]
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        made.append(torch.cat([value.flatten() for value in task.make().state_dict().values()]))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


# Clocks


def test_a_stated_clock_counts_only_the_work_it_is_told(part):
    clock = part("clocks").make_clock("10,0.5")
    clock.start()
    clock.passed(passes=3, examples=40)
    clock.pause()
    assert clock.seconds == pytest.approx(0.05)  # 3 × 10 ms + 40 × 0.5 ms


def test_the_processors_clock_stands_still_in_a_pause(part):
    clock = part("clocks").make_clock("cpu")
    clock.start()
    while clock.seconds < 0.01:
        math.factorial(2000)
    clock.pause()
    gone = clock.seconds
    math.factorial(20_000)
    assert clock.seconds == gone >= 0.01


def test_the_processors_clock_counts_at_the_stated_speed_whatever_else_runs_there(part):
    clocks = part("clocks")
    now, took = [0.0], [clocks.NOMINAL_SECONDS]
    clock = clocks.CpuClock(lambda: took[0], lambda: now[0])
    clock.start()
    now[0] += 1.0
    clock.passed(passes=1, examples=1)
    assert clock.seconds == clock.stopwatch == pytest.approx(1.0)
    took[0] *= 2  # the machine is half as fast from here on; the median of nine follows after five looks
    for _ in range(5):
        now[0] += 0.2
        clock.passed(passes=1, examples=1)
    before = clock.seconds
    now[0] += 1.0
    assert clock.seconds - before == pytest.approx(0.5)
    assert clock.stopwatch == pytest.approx(3.0)


def test_the_time_of_looking_how_fast_the_processor_is_does_not_count(part):
    clocks, now = part("clocks"), [0.0]

    def reference():
        now[0] += 7.0
        return clocks.NOMINAL_SECONDS

    clock = clocks.CpuClock(reference, lambda: now[0])
    clock.start()
    now[0] += 1.0
    clock.passed(passes=1, examples=1)
    now[0] += 1.0
    clock.pause()
    assert clock.seconds == clock.stopwatch == pytest.approx(2.0)


# Strategies


def make(part, name, task="teacher"):
    return part("strategies").Strategy(name, part("tasks").TASKS[task])


@pytest.mark.parametrize(("task", "rate"), [("teacher", 2.0), ("images", 4.0)], ids=["adam", "sgd"])
def test_the_rate_of_a_constant_follows_the_size_by_the_rule_of_its_optimizer(part, task, rate):
    constant = make(part, "constant-64x3", task)
    assert constant.size == 64
    assert constant.rate(0.05) == pytest.approx(3 * rate)  # 64 is 4 times the base; the root for Adam
    assert constant.rate(1.0) == 0


@pytest.mark.parametrize(("task", "power"), [("teacher", 2), ("images", 1)], ids=["adam", "sgd"])
def test_smiths_ramp_replaces_the_decay_of_the_rate_until_the_largest_size(part, task, power):
    smith = make(part, "smith", task)
    rates, sizes = [], []
    for gone in (0.05, 0.525, 0.999):
        smith.controller.observe(epoch=int(1000 * gone))
        rates.append(smith.rate(gone))
        sizes.append(smith.size)
    # Half of the decay is over: the batch has grown by 2, or 4 for Adam, and the rate is as it was.
    assert sizes == [16, 16 * 2**power, 64 * 16]
    assert rates[:2] == pytest.approx([1.0, 1.0])
    # 1/950 of the rate is left; the batch takes 64 of it, for Adam the root of 64.
    assert rates[2] == pytest.approx(64 ** (1 / power) / 950)


def test_seesaw_shares_the_decay_between_size_and_rate(part):
    seesaw = make(part, "seesaw")
    seesaw.controller.observe(epoch=525)
    assert (seesaw.size, seesaw.rate(0.525)) == (32, pytest.approx(0.5**0.5))


def test_a_warm_up_doubles_the_batch_three_times(part):
    warmup = make(part, "warmup")
    sizes = []
    for gone in (0.1, 0.2, 0.3, 0.6):
        warmup.controller.observe(epoch=int(1000 * gone))
        sizes.append(warmup.size)
    assert sizes == [16, 32, 64, 128]
    assert warmup.stepper_options == {"lr_rule": "sqrt", "base_size": 16, "beta2_rule": "half_life"}
    assert make(part, "warmup", "images").stepper_options == {"lr_rule": "linear", "base_size": 16}


def test_an_unknown_strategy_is_refused_with_all_that_there_are(part):
    with pytest.raises(
        SystemExit, match="'best' is no strategy; strategies are constant-SIZExFACTOR, goodput, measured"
    ):
        make(part, "best")


# Runs


def test_all_strategies_see_the_same_examples_in_the_same_order(part):
    stream = part("training").Stream
    whole, pieces = stream(10, 0).take(25), stream(10, 0)
    assert np.concatenate([pieces.take(size) for size in (3, 9, 13)]).tolist() == whole.tolist()
    assert sorted(whole[:10].tolist()) == sorted(whole[10:20].tolist()) == list(range(10))


@pytest.mark.parametrize("strategy", ["constant-32x1", "goodput", "measured", "measured_early", "mixed", "seesaw"])
def test_a_run_on_a_stated_clock_repeats_to_the_digit(part, strategy):
    training = part("training")
    unit = training.Unit("5.8,0.1", "teacher", strategy, 1.0, 0)
    first, second = (training.run(unit, 0.05) for _ in range(2))
    assert first == second
    assert math.isfinite(first["loss"])
    # No more time than what was under way at its end, an update or an experiment.
    assert 0.27 <= first["seconds"] < 0.27 + (1.3 if strategy == "measured_early" else 0.1)


def test_a_constant_run_takes_the_time_of_its_updates(part):
    training = part("training")
    row = training.run(training.Unit("10,0.5", "teacher", "constant-16x1", 1.0, 0), 0.049)
    assert row["updates"] == 15  # 18 ms each in 5.4 s × 0.049
    assert row["seconds"] == pytest.approx(15 * 0.018)
    assert (row["examples"], row["mean_size"], row["sizes"]) == (240, pytest.approx(16), [(0.0, 16)])


def test_experiments_are_charged(part):
    """32 batches of 16, in 32 + 16 + 8 updates, and 7 evaluations of 8 batches of 64 at a third of a pass."""
    training = part("training")
    row = training.run(training.Unit("10,0.5", "teacher", "measured_early", 1.0, 0))
    passes, examples = 56 + 56 / 3, (96 + 4 * 56 / 3) * 16
    once = (10 * round(passes) + 0.5 * round(examples)) / 1000
    assert row["experiment_seconds"] == pytest.approx(once)
    assert row["seconds"] == pytest.approx(once + (10 * row["updates"] + 0.5 * row["examples"]) / 1000)


def test_where_the_length_of_a_run_is_known_a_short_experiment_is_charged(part):
    """8 batches of 16, in 8 + 2 updates, and 4 evaluations of 4 batches of 64 at a third of a pass."""
    row = part("training").run(part("training").Unit("5.8,0.1", "teacher", "measured_plan", 1.0, 0))
    once = (5.8 * 15 + 0.1 * round(2 * 8 * 16 + 64 * 16 / 3)) / 1000
    assert row["experiment_seconds"] == pytest.approx(once)
    assert once < 0.05 * 5.4 < 2 * once


@pytest.mark.parametrize(("strategy", "most"), [("measured", 0.05), ("measured_early", 0.5)])
def test_experiments_take_at_most_their_share_of_the_time(part, strategy, most):
    training = part("training")
    row = training.run(training.Unit("100,5", "teacher", strategy, 1.0, 0), scale=16.0)
    assert row["experiment_seconds"] <= most * row["seconds"]
    assert (row["experiment_seconds"] > 0) == (
        strategy == "measured_early"
    )  # 96 updates of 0.18 s are too many for 86 s


# Which runs are made


@pytest.fixture
def plan(part):
    return part("protocol").Plan("cpu", "teacher", ("goodput",), (0, 1), (16, 64), (0.8, 1.0, 1.25))


def rows_of(plan, strategy, losses, horizon=1.0):
    """Rows of a strategy: the loss of every seed."""
    return [{**plan.unit(strategy, horizon, seed)._asdict(), "loss": loss} for seed, loss in losses.items()]


@pytest.fixture
def swept(plan, part):
    """A sweep whose best cell is 64 at three times the rate, and the two best with the other seeds: L* is 1.1."""
    rows = []
    for number, cell in enumerate(part("protocol").cells(plan)):
        rows += rows_of(plan, cell, {1000: 2.0 - number / 10, 1001: 2.0 - number / 10})
    rows += rows_of(plan, "constant-64x3", {0: 1.0, 1: 1.2})
    return rows + rows_of(plan, "constant-64x1", {0: 1.4, 1: 1.5})


def names(units):
    return {(unit.strategy, unit.horizon) for unit in units}


def test_first_comes_the_sweep_alone(part, plan):
    found = list(part("protocol").wanted(plan, []))
    assert len(found) == 2 * 3 * 2
    assert {unit.seed for unit in found} == {1000, 1001}


def test_the_best_cells_and_the_strategies_run_with_other_seeds(part, plan, swept):
    found = [unit for unit in part("protocol").wanted(plan, swept) if unit.seed < 1000]
    assert names(found) == {("constant-64x3", 1), ("constant-64x1", 1), ("goodput", 1), ("constant-16x1", 1)}
    assert part("protocol").target(plan, swept) == ("constant-64x3", pytest.approx(1.1))


@pytest.mark.parametrize(
    ("losses", "horizon"),
    [
        ({1.0: 1.2}, 1.25),  # too high: longer
        ({1.0: 1.0}, 0.8),  # low enough: shorter
        ({1.0: 1.0, 0.8: 1.3}, None),  # between the two
        ({1.0: 1.2, 1.25: 1.1}, None),
        ({1.0: 1.2, 1.25: 1.2}, None),  # never: the ladder has ended
        ({1.0: 1.0, 0.8: 1.0}, None),
    ],
)
def test_a_strategy_walks_the_ladder_until_two_rungs_enclose_the_loss(part, plan, swept, losses, horizon):
    rows = [*swept]
    for rung, loss in losses.items():
        rows += rows_of(plan, "goodput", {0: loss, 1: loss}, rung)
    assert part("protocol").next_horizon(plan, rows, "goodput", 1.1) == horizon


def test_a_strategy_walks_on_to_the_loss_of_the_best_size_at_the_tasks_rate(part, plan, swept):
    """L* is 1.1, which 1.25 reaches and 1.0 does not; 64 at the task's rate has 1.45, which 0.8 may reach too."""
    protocol = part("protocol")
    rows = [*swept, *rows_of(plan, "constant-16x1", {0: 1.2, 1: 1.2}), *rows_of(plan, "goodput", {0: 1.2, 1: 1.2})]
    rows += [*rows_of(plan, "goodput", {0: 1.0, 1: 1.0}, 1.25), *rows_of(plan, "constant-16x1", {0: 1.0, 1: 1.0}, 1.25)]
    assert protocol.own_target(plan, rows) == ("constant-64x1", pytest.approx(1.45))
    assert ("goodput", 0.8) in names(protocol.wanted(plan, rows))
    rows += rows_of(plan, "goodput", {0: 1.7, 1: 1.7}, 0.8)
    ratios = [
        part("results").ratio_of(plan, rows, "goodput", goal(plan, rows))["ratio"]
        for goal in (protocol.target, protocol.own_target)
    ]
    assert ratios == pytest.approx([1.25**0.5, 0.8**0.5])


def test_an_oracle_takes_no_time_and_changes_no_weight(part):
    training = part("training")
    row = training.run(training.Unit("10,0.5", "teacher", "goodput_oracle", 1.0, 0), 0.05)
    assert row["seconds"] == pytest.approx((10 * row["updates"] + 0.5 * row["examples"]) / 1000)
    plain = part("tasks").TASKS["teacher"].make()
    before = [value.clone() for value in plain.parameters()]
    data = part("tasks").TASKS["teacher"].load()
    oracle = part("strategies")._Oracle(plain, lambda num: data.batch(np.arange(num)))
    assert oracle()["noise_s"] > 0
    assert oracle() == {}
    assert all(torch.equal(*pair) for pair in zip(before, plain.parameters(), strict=True))


def test_betas_are_left_alone_where_asked_for(part):
    strategies, task = part("strategies"), part("tasks").TASKS["teacher"]
    rules = [strategies.Strategy(name, task).stepper_options.get("beta2_rule") for name in ("goodput", "goodput_betas")]
    assert rules == ["half_life", None]


def test_a_run_that_diverged_never_reaches_the_loss(part, plan, swept):
    rows = [*swept, *rows_of(plan, "goodput", {0: 1.0, 1: math.nan})]
    assert part("protocol").next_horizon(plan, rows, "goodput", 1.1) == 1.25


# What runs say together


def test_the_time_is_interpolated_over_the_logarithm_of_the_horizon(part, plan, swept):
    rows = [*swept, *rows_of(plan, "goodput", {0: 1.2, 1: 1.2}), *rows_of(plan, "goodput", {0: 1.0, 1: 1.0}, 1.25)]
    found = part("results").ratio_of(plan, rows, "goodput", part("protocol").target(plan, rows))
    assert found["ratio"] == pytest.approx(1.25**0.5)
    # Seeds drawn again: L* is 1.0, 1.1 or 1.2.
    assert (found["low"], found["high"]) == (pytest.approx(1.0), pytest.approx(1.25))


@pytest.mark.parametrize(
    ("points", "loss", "wanted"),
    [
        ([(1.0, 3.0), (2.0, 1.0)], 2.0, 2**0.5),
        ([(1.0, 3.0), (2.0, 2.0)], 1.0, 4.0),  # drawn out
        ([(1.0, 3.0), (2.0, 3.0)], 1.0, math.inf),
        ([(0.8, 1.0), (1.0, 0.5)], 1.5, 0.8 * (0.8 / 1.0)),
        ([(1.0, 1.0)], 1.0, 1.0),
        ([(1.0, 1.0)], 0.9, math.inf),
    ],
)
def test_where_a_loss_is_reached(part, points, loss, wanted):
    assert part("results").crossing(points, loss) == pytest.approx(wanted)


def test_a_strategy_that_never_reaches_the_loss_is_beyond_the_ladder(part, plan, swept):
    rows = [*swept, *rows_of(plan, "goodput", {0: 1.6, 1: 1.6}), *rows_of(plan, "goodput", {0: 1.5, 1: 1.5}, 1.25)]
    for row in rows:
        row |= {
            "updates": 1,
            "examples": 1,
            "mean_size": 1,
            "sizes": [(0.0, 16)],
            "experiment_seconds": 0,
            "seconds": 1,
        }
    table = part("results").summarize(plan, rows)
    of_rate = "best constant at the task's rate, constant-64x1"
    assert [row["name"] for row in table] == ["best constant, constant-64x3", of_rate, "goodput"]
    assert [row["loss"] for row in table] == [pytest.approx(1.1), pytest.approx(1.45), pytest.approx(1.6)]
    assert table[2]["ratio"] == "> 1.25"
    assert "| goodput | > 1.25 |" in part("results").render(plan, rows)


# The command


@pytest.fixture
def command(quality, tmp_path, capsys):
    """Return a function that runs the smallest benchmark of all, and returns its file and what it printed."""

    def run(*more):
        options = ["--smoke", "--clock", "graphs", "--tasks", "teacher", "--strategies", "goodput,measured,warmup"]
        quality.main([*options, "--workers", "1", "--output", str(tmp_path / "q.json"), *more])
        return json.loads((tmp_path / "q.json").read_text()), capsys.readouterr().out

    return run


def test_a_command_goes_on_where_another_ended(command, tmp_path):
    first, printed = command()
    assert not [row for row in first["rows"] if "error" in row]
    assert {row["strategy"] for row in first["rows"] if row["seed"] == 0} > {"goodput", "measured", "warmup"}
    assert sum(row["seed"] >= 1000 for row in first["rows"]) == 2 * 3 * 2
    assert "best constant" in printed
    root = ET.fromstring((tmp_path / "q_graphs.svg").read_text())
    assert "goodput" in "".join(root.itertext())
    again, printed = command()
    assert again["rows"] == first["rows"]
    assert "run 1:" not in printed


def test_results_of_other_horizons_are_not_continued(quality, tmp_path):
    path = tmp_path / "q.json"
    path.write_text(json.dumps({"scale": 0.5, "smoke": False, "seconds": {}, "commands": [], "rows": []}))
    with pytest.raises(SystemExit, match=r"was made with scale 0\.5 and not 1\.0, .*; name another --output"):
        quality.main(["--report", "--output", str(path)])


def test_an_unknown_task_is_refused(quality):
    with pytest.raises(SystemExit, match="'chess' is no task; tasks are images, characters, teacher"):
        quality.main(["--tasks", "chess"])
