"""One run: equal examples, equal points, the same by the same seed, bounds kept, and what goes wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from batchwright.errors import ArgumentError
from batchwright.lab.datasets import load
from batchwright.lab.models import collate_for, loss_fn_for, make_model
from batchwright.lab.runner._training import Loop, evaluation_points, run_one
from batchwright.lab.strategies import Conditions, RunSettings, Setup, Strategy, get, names
from batchwright.lab.update_time import UpdateTime
from batchwright.size import constant, track

WINE = load("wine")
# 142 examples: sizes 4 to 32, 4 epochs.
SETTINGS = RunSettings.fit(142, num_epochs=4, num_evaluations=4, lr=0.01)


def run(strategy="constant", seed=0, settings=SETTINGS, dataset=WINE, model="logistic", **options):
    return run_one(dataset, model, strategy, seed, settings, **options)


def own(setup, group="constant"):
    return Strategy(name="own", group=group, make=lambda conditions: setup)


def conditions_of():
    return Conditions(settings=SETTINGS, num_train=142, num_classes=3)


def comparable(record):
    """A record without its seconds."""
    points = [{**point, "seconds": 0} for point in record["curve"]]
    return {**record, "curve": points, "final": {**record["final"], "seconds": 0}}


def test_a_record_has_the_fields_of_the_schema_and_is_json():
    record = run("noise")
    assert list(record) == [
        *("version", "id", "dataset", "model", "strategy", "group", "seed", "status", "error", "settings"),
        *(
            "properties",
            "num_parameters",
            "metric_name",
            "tuning",
            "time_model",
            "curve",
            "decisions",
            "final",
            "versions",
        ),
        "hardware",
    ]
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["version"], record["status"], record["error"], record["group"]) == (2, "ok", None, "noise")
    assert record["properties"]["kind"] == "tabular"
    assert (record["metric_name"], record["num_parameters"]) == ("accuracy", 13 * 3 + 3)
    assert set(record["curve"][0]) == {
        *("examples", "updates", "seconds", "epoch", "train_loss", "validation_loss", "metric", "batch_size", "lr"),
        *("noise_scale", "simulated_seconds"),
    }
    assert set(record["final"]) == {
        *("train_loss", "validation_loss", "metric", "updates", "seconds", "simulated_seconds", "examples")
    }
    assert record["settings"]["num_examples"] == 4 * 142


@pytest.mark.parametrize("name", names())
def test_every_strategy_sees_as_many_examples_and_keeps_the_bounds(name):
    source, long = get(name).replays, replace(SETTINGS, num_examples=6 * 142)  # cycles need 6 epochs
    record = run(name, settings=long, replay_of=None if source is None else run(source, seed=1, settings=long))
    sizes = [point["batch_size"] for point in record["curve"]] + [change["new"] for change in record["decisions"]]
    assert record["status"] == "ok"
    assert record["final"]["examples"] == record["curve"][-1]["examples"] == long.num_examples
    assert min(sizes) >= SETTINGS.min_size
    assert max(sizes) <= SETTINGS.max_size


@pytest.mark.parametrize("name", ["constant", "linear", "constant_large", "noise", "memory_batch"])
def test_strategies_are_validated_after_the_same_examples(name):
    record = run(name)
    assert [point["examples"] for point in record["curve"]] == [0, 142, 284, 426, 568]
    assert [point["epoch"] for point in record["curve"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["noise", "curriculum", "memory_micro"])
def test_the_same_seed_gives_the_same_record_and_another_one_another(name):
    first, again, other = run(name), run(name), run(name, seed=1)
    assert comparable(first) == comparable(again)
    assert first["final"]["validation_loss"] != other["final"]["validation_loss"]


def test_the_seed_fixes_the_weights_and_the_order_of_examples():
    loops = [Loop(WINE, "logistic", Setup(), seed, SETTINGS) for seed in (0, 0, 1)]
    orders = [[place for batch in loop._sampler for place in batch] for loop in loops]
    weights = [next(loop.model.parameters()).tolist() for loop in loops]
    assert orders[0] == orders[1] != orders[2]
    assert weights[0] == weights[1] != weights[2]


def test_a_run_leaves_random_state_and_threads_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    threads = torch.get_num_threads()
    run()
    assert torch.rand(1) == expected
    assert torch.get_num_threads() == threads


def test_the_baseline_counts_updates_by_hand():
    # An epoch of 142 at 8: 17 whole batches and one of 6.
    record = run()
    assert record["final"]["updates"] == 4 * 18
    assert record["decisions"] == []
    assert {point["lr"] for point in record["curve"]} == {0.01}


def test_simulated_seconds_are_those_of_the_stated_model():
    time = UpdateTime(fixed_ms=100, per_example_ms=1)
    record = run(update_time=time)
    # Each epoch has 18 updates of 142 examples: 1.8 s and 0.142 s.
    assert [point["simulated_seconds"] for point in record["curve"]] == pytest.approx([0, 1.942, 3.884, 5.826, 7.768])
    assert record["final"]["simulated_seconds"] == record["curve"][-1]["simulated_seconds"]
    assert record["time_model"] == {"fixed_ms": 100, "per_example_ms": 1, "about": "given by the user"}
    large = run(own(Setup(policy=constant(32))), update_time=time)
    # 5 updates per epoch at 32.
    assert large["final"]["simulated_seconds"] == pytest.approx(4 * (0.5 + 0.142))


def test_an_update_that_a_strategy_cuts_pays_for_every_part():
    time = UpdateTime(fixed_ms=100, per_example_ms=0)
    record = run(own(Setup(noise_parts=4)), update_time=time)
    # Each of the 18 updates of an epoch has 4 parts, the last one too, of 6 examples.
    assert record["final"]["updates"] == 4 * 18
    assert record["final"]["simulated_seconds"] == pytest.approx(4 * 18 * 4 * 0.1)


def test_the_baseline_is_plain_sgd():
    # The same weights, the same batches, torch's own loop.
    settings = replace(SETTINGS, num_examples=142)
    loop = Loop(WINE, "logistic", Setup(), 3, settings)
    batches = [batch for batch in loop._sampler]
    model = make_model("logistic", WINE, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for batch in batches:
        loss_sum, weight = loss_fn_for(WINE)(model, collate_for(WINE)(batch))[:2]
        optimizer.zero_grad()
        (loss_sum / weight).backward()
        optimizer.step()
    loop = Loop(WINE, "logistic", Setup(), 3, settings)
    loop.run()
    for mine, plain in zip(loop.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, plain)


def test_the_rate_decays_by_examples_whatever_the_batch():
    rates = [point["lr"] for point in run("lr_decay")["curve"]]
    # Divided by 4 at 284 and 426 examples; a point has the rate of the update before it, the first of that after it.
    assert rates == pytest.approx([0.01, 0.01, 0.01, 0.0025, 0.000625])
    ramp = run("batch_ramp")
    assert [(change["examples"], change["old"], change["new"]) for change in ramp["decisions"]] == [(284, 8, 32)]
    # The batch may grow 4-fold, so the second milestone falls to the rate.
    assert [point["lr"] for point in ramp["curve"]] == pytest.approx([0.01, 0.01, 0.01, 0.01, 0.0025])


def test_a_rate_coupled_to_the_batch_is_on_the_curve():
    settings = replace(SETTINGS, num_examples=142)
    record = run(own(Setup(policy=constant(32), stepper={"lr_rule": "linear", "base_size": 8})), settings=settings)
    # 32 is four times 8; the last batch of 142 has 14.
    assert record["curve"][0]["lr"] == pytest.approx(0.04)
    assert record["curve"][-1]["lr"] == pytest.approx(0.01 * 14 / 8)


def test_micro_batches_that_fit_memory_leave_the_result_as_it_was():
    base, split = run("constant", model="mlp"), run("memory_micro", model="mlp")
    assert split["final"]["updates"] == base["final"]["updates"]
    assert split["final"]["validation_loss"] == pytest.approx(base["final"]["validation_loss"], rel=1e-4)


def test_micro_batches_grow_until_memory_is_half_full():
    # Room for the base size of 8: 2 fill a quarter, so 4 are tried, which fill half and stay.
    loop = Loop(WINE, "mlp", get("memory_micro").make(conditions_of()), 0, SETTINGS)
    assert loop._fit.size == 2
    loop.run()
    assert loop._fit.size == 4


def test_memory_grows_the_batch_while_it_is_less_than_half_full():
    # The base size of 8 fills an eighth of a room of 64, and 8/9 of one of 9.
    policy = get("memory_batch").make(conditions_of()).policy
    roomy = run(own(Setup(policy=policy, room=64)), model="mlp")
    assert roomy["decisions"][0]["reason"].startswith("memory 12.5 % full")
    assert roomy["decisions"][0]["new"] == 16
    full = run(own(Setup(policy=policy, room=9)), model="mlp")
    assert full["decisions"][0]["reason"].startswith("memory 88.9 % full")
    assert full["decisions"][0]["new"] == 4


def test_a_curriculum_covers_the_easy_examples_first():
    record = run("curriculum_constant")
    # A quarter of 142 is 36 (35.5 rounded up) in epoch 0, all from epoch 2 on: 36 + ceil(0.625 × 142) = 36 + 89.
    assert [point["epoch"] for point in record["curve"]] == [0, 2, 3, 4, 5]
    assert record["final"]["examples"] == 568


def test_a_replay_has_the_sizes_of_the_other_run():
    source = run("entropy", seed=1)
    record = run("replay_entropy", replay_of=source)
    assert source["decisions"]
    assert [(change["examples"], change["new"]) for change in record["decisions"]] == [
        (change["examples"], change["new"]) for change in source["decisions"]
    ]
    assert record["final"]["updates"] == source["final"]["updates"]
    assert record["final"]["validation_loss"] != source["final"]["validation_loss"]


def test_a_replay_of_the_same_seed_is_the_same_run():
    source = run("loss_difference_exponential")
    record = run("replay_loss_difference_exponential", replay_of=source)
    assert record["final"]["validation_loss"] == source["final"]["validation_loss"]


def test_seconds_count_training_without_validation(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("batchwright.lab.runner._training.time.process_time", lambda: float(next(clock)))
    loop = Loop(WINE, "logistic", Setup(), 0, SETTINGS)
    loop.run()
    # The clock is read before and after each validation: one second of training lies between two of them.
    assert [point["seconds"] for point in loop.curve] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert loop.final()["seconds"] == 5.0


def test_a_replay_of_another_strategy_is_refused():
    with pytest.raises(ArgumentError, match="replay_noise repeats runs of noise"):
        run("replay_noise", replay_of=run("linear"))


def test_noise_is_measured_from_four_parts_and_put_on_the_curve():
    seen = []
    policy = track(lambda observation: seen.append((observation.noise_parts, observation.batch_size)) or 8.0)
    record = run(own(Setup(policy=policy, noise_parts=4)), model="mlp")
    # 6, the rest of an epoch, makes 4 parts too: 2, 2, 1 and 1.
    assert set(seen) == {(4, 8), (4, 6)}
    assert record["curve"][-1]["noise_scale"] > 0
    assert run()["curve"][-1]["noise_scale"] is None


def test_a_loss_that_is_no_number_ends_the_run():
    record = run(settings=replace(SETTINGS, lr=1e30), dataset=load("diabetes", limit=200), model="linear")
    assert record["status"] == "ok"
    assert record["final"]["metric"] is record["final"]["validation_loss"] is record["final"]["train_loss"] is None
    assert 0 < record["final"]["examples"] < SETTINGS.num_examples
    json.dumps(record, allow_nan=False)


def test_the_loss_on_all_training_examples_is_that_of_the_last_model():
    fixed = run(own(Setup(lr_factor=lambda examples: 0.0)))
    first, last = fixed["curve"][0], fixed["curve"][-1]
    assert first["validation_loss"] == last["validation_loss"]
    # Without learning the mean over all updates of an epoch is the loss on all training examples.
    assert fixed["final"]["train_loss"] == pytest.approx(last["train_loss"], rel=1e-5)
    assert first["train_loss"] is None


@pytest.mark.parametrize(
    ("name", "options", "model", "metric", "kind"),
    [
        ("diabetes", {}, "linear", "r2", "tabular"),
        ("digits", {"limit": 200}, "cnn", "accuracy", "image"),
        ("python_functions", {"limit": 80, "max_length": 16}, "transformer", "accuracy", "text"),
        ("python_chars", {"limit": 60}, "char_lm", "loss", "language"),
    ],
)
def test_every_kind_of_data_is_trained(name, options, model, metric, kind):
    dataset = load(name, **options)
    settings = RunSettings.fit(len(dataset.train), num_epochs=1, base_size=8, optimizer="adam", lr=0.003)
    record = run_one(dataset, model, "linear", 0, settings)
    assert (record["metric_name"], record["properties"]["kind"]) == (metric, kind)
    if metric == "loss":
        assert record["final"]["metric"] == -record["final"]["validation_loss"]
    assert record["final"]["validation_loss"] < record["curve"][0]["validation_loss"]


def test_points_lie_on_epochs_where_there_are_enough():
    settings = RunSettings.fit(100, num_epochs=12, num_evaluations=5)
    # 12 / 5 = 2.4 epochs: 2, 5 (4.8), 7 (7.2), 10 (9.6), 12.
    assert evaluation_points(settings, 100) == [200, 500, 700, 1000, 1200]
    assert evaluation_points(settings, 400) == [240, 480, 720, 960, 1200]


def test_a_largest_size_above_a_quarter_of_the_data_is_refused():
    with pytest.raises(ArgumentError, match="a quarter of the 142 training examples, 35, got 36"):
        run(settings=replace(SETTINGS, max_size=36))


def test_notes_are_kept_and_belong_to_the_id():
    plain, noted = run(), run(notes={"lr_grid": [0.1]})
    assert noted["settings"]["lr_grid"] == [0.1]
    assert plain["id"] != noted["id"]
    assert np.isclose(plain["final"]["metric"], noted["final"]["metric"])
