"""Arms through the Trainer, and packed rows beside padded batches: names, counts, tables, and a trial run of each."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch


@pytest.fixture
def corpus(script):
    parts = script("_quality.corpus")
    rows = [[7] * length for length in (3, 5, 2, 4, 6)]
    orders = {
        f"dynabatch-10/0/{epoch}": [(parts.Part(np.array([2, 0])),), (parts.Part(np.array([1])),)] for epoch in (0, 1)
    }
    return parts.Corpus("translation", (parts.Texts.of(rows), parts.Texts.of(rows[::-1])), 64, 2, orders)


def test_a_wrong_name_of_an_arm_is_refused_with_all_of_them(script):
    name = script("_trainer_arms").Name
    assert name.parse("batch_rebalance-10-4") == ("batch_rebalance", (10, 4))
    with pytest.raises(SystemExit, match="'fixed' is no arm; arms are fixed-N, group_by_length-N, batch_rebalance-N-N"):
        name.parse("fixed")


def test_examples_are_the_pairs_that_are_trained_on(script, corpus):
    examples = script("_trainer_arms").Examples(corpus)
    assert len(examples) == 3
    assert examples[1]["input_ids"].tolist() == [7] * 5
    assert examples[1]["labels"].tolist() == [7] * 4


def test_stored_batches_follow_the_epochs_and_are_reshuffled_after_them(script, corpus):
    batches = script("_trainer_arms").StoredBatches(corpus, "dynabatch-10", 10)
    assert len(batches) == 2
    assert [list(batches), list(batches)] == [[[2, 0], [1]]] * 2
    assert sorted(batches) == [[1], [2, 0]]
    with pytest.raises(LookupError, match="no batches of dynabatch-20; --prepare"):
        script("_trainer_arms").StoredBatches(corpus, "dynabatch-20", 20)


def test_dynabatchs_own_trainer_is_found_without_what_only_its_planner_needs(script, monkeypatch):
    pytest.importorskip("dynabatch")
    arms = script("_trainer_arms")
    for name in [name for name in sys.modules if name.split(".")[0] == "dynabatch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(arms.importlib.util, "find_spec", lambda name: None)
    for name in ("xgboost", "pandas", "datasets"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    trainer = arms.load_dynabatch_trainer()
    assert trainer.version == "0.2.23"
    from transformers import Trainer

    assert trainer.make(Trainer).__name__ == "DynabatchTrainer"
    assert "xgboost" not in sys.modules


def test_counts_leave_padding_and_rows_without_labels_out(script):
    # With a controller an item is a list of micro-batches.
    labels = torch.tensor([[4, 5, -100], [-100, -100, -100]])
    mask = torch.tensor([[1, 0], [1, 1]])
    batch = {"labels": labels, "attention_mask": mask, "input_ids": torch.zeros(2, 2)}
    trainer = SimpleNamespace(get_batch_samples=lambda num: ([batch, [batch]][:num], num))
    counter = script("_trainer_run").Counter(trainer)
    assert trainer.get_batch_samples(2)[1] == 2
    trainer.get_batch_samples(0)  # the end of an epoch
    # Per batch 1 example with 2 labels and 1 token, of 10 places.
    found = counter.result(seconds=2.0)
    assert (found["updates"], found["examples"], found["examples_per_second"]) == (1, 2, 1.0)
    assert (found["tokens_per_second"], found["padding"]) == (3.0, pytest.approx(0.7))


def row(arm, lr, loss, rate, curve, **more):
    return {
        "arm": arm, "lr": lr, "loss": loss, "examples_per_second": rate, "curve": curve, "seconds": 20.0,
        "startup_seconds": 1.0,
    } | more  # fmt: skip


def test_an_arm_counts_at_its_best_rate_and_is_compared_with_fixed_and_dynabatch(script):
    rows = [
        row("fixed-10", 1e-3, 6.0, 100.0, [(0, 9.0), (20, 6.0)]),
        row("dynabatch-10", 1e-3, 5.0, 200.0, [(0, 9.0), (20, 5.0)]),
        row("auto", 1e-3, math.nan, 900.0, [(0, 9.0), (20, math.nan)]),
        # The budget was known to the second start: the first one counts.
        row(
            "auto",
            1e-4,
            3.0,
            1600.0,
            [(0, 9.0), (2, 7.0), (6, 3.0), (20, 3.0)],
            startup_seconds=0.5,
            calibration_seconds=2.0,
        ),
        {"arm": "calibrated-90", "lr": 1e-3, "error": "no"},
    ]
    table = {one["arm"]: one for one in script("gpu_trainer").summarize(rows)}
    assert table.keys() == {"fixed-10", "dynabatch-10", "auto"}
    auto = table["auto"]
    assert (auto["lr"], auto["to_fixed"], auto["to_peer"]) == (1e-4, 16.0, 8.0)
    # 7.0 at 2 s and 3.0 at 6 s: 5.0 at 4 s, which took dynabatch 20 s. With startup 21 s against 4 + 1 + 2.
    assert (auto["seconds_to_peer"], auto["times_peer"], auto["times_peer_with_startup"]) == (4.0, 5.0, 3.0)
    assert "seconds_to_peer" not in table["fixed-10"]
    assert "calibrated-90 lr 0.001: failed: no" in script("gpu_trainer").render(rows)


def test_results_of_other_data_are_refused(script):
    resuming = script("_resuming")
    report = {"commands": [{"data": "a", "seconds": 25}], "rows": []}
    resuming.check_alike(report, {"data": "a", "seconds": 25}, ("data", "seconds"))
    with pytest.raises(SystemExit, match=r"results differ in seconds \(25, 9\).*another --output"):
        resuming.check_alike(report, {"data": "a", "seconds": 9}, ("data", "seconds"))


def test_a_file_that_is_no_report_is_refused(script, tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[1]")
    with pytest.raises(SystemExit, match="holds no commands and rows"):
        script("_resuming").read_report(path)
    path.write_text("{")
    with pytest.raises(SystemExit, match="cannot be read"):
        script("_resuming").read_report(path)
    assert script("_resuming").read_report(tmp_path / "none.json") == {"commands": [], "rows": []}


def test_data_that_is_not_there_is_named(script, tmp_path):
    with pytest.raises(SystemExit, match="--data must name a file"):
        script("_resuming").check_data(None, smoke=False)
    with pytest.raises(SystemExit, match=r"none\.npz does not exist"):
        script("_resuming").check_data(tmp_path / "none.npz", smoke=True)


def test_arms_run_through_the_trainer_on_the_cpu_and_are_not_run_twice(smoke_test, capsys):
    pytest.importorskip("dynabatch")
    arms = "fixed-10,group_by_length-10,batch_rebalance-10-4,dynabatch-10,max_tokens-256,auto,auto_sqrt-10"
    arms += ",auto_controller-10"
    rows = {one["arm"]: one for one in smoke_test("gpu_trainer", "--arms", arms)["rows"]}
    assert list(rows) == arms.split(",")
    assert [one.get("error") for one in rows.values()] == [None] * 8
    # The same weights for every arm, and losses that fall.
    assert len({one["curve"][0][1] for one in rows.values()}) == 1
    assert all(one["loss"] < one["curve"][0][1] and one["updates"] >= 2 for one in rows.values())
    assert rows["fixed-10"]["examples_per_update"] == 10
    assert rows["dynabatch-10"]["ran"].startswith("dynabatch 0.2.23: its own trainer")
    assert rows["max_tokens-256"]["padding"] < rows["fixed-10"]["padding"]
    assert all(rows[arm]["found_budget"] for arm in ("auto", "auto_sqrt-10", "auto_controller-10"))
    assert rows["auto_controller-10"]["examples_per_update"] >= 10
    capsys.readouterr()
    assert len(smoke_test("gpu_trainer", "--arms", "fixed-10,max_tokens-256")["rows"]) == 8
    assert "examples/s," not in capsys.readouterr().out  # nothing ran


def test_an_arm_that_fails_does_not_end_the_others(script, monkeypatch, tmp_path):
    trainer = script("gpu_trainer")

    def fail(*args, **kwargs):
        raise RuntimeError("no memory")

    monkeypatch.setattr(trainer, "run_arm", fail)
    device = SimpleNamespace(free=lambda: None)
    found = trainer.run_one("auto", None, device, None, 1e-3, tmp_path)
    assert found == {"arm": "auto", "lr": 1e-3, "error": "RuntimeError: no memory"}


def test_packed_rows_give_the_loss_of_padded_batches_on_the_cpu(smoke_test):
    rows = {one["arm"]: one for one in smoke_test("gpu_packing")["rows"]}
    assert [one.get("error") for one in rows.values()] == [None] * 4
    assert all(rows[arm]["difference"] < 1e-5 and rows[arm]["is_equal"] for arm in ("padded", "positions", "flat"))
    assert rows["flat"]["padding"] == 0 < rows["positions"]["padding"]


def test_packed_arms_are_compared_within_their_model(script):
    rates = {("a", "padded"): 100.0, ("a", "positions"): 50.0, ("a", "flat"): 110.0, ("b", "flat"): 9.0}
    rows = [
        {"model": model, "arm": arm, "tokens_per_second": rate, "updates_per_second": 1.0, "padding": 0.0}
        for (model, arm), rate in rates.items()
    ]
    table = script("gpu_packing").render([*rows, {"model": "b", "arm": "graphs", "error": "no"}]).splitlines()
    assert table[4].startswith("| a | flat | 110 | 1.10 | 2.20 |")
    assert table[5].startswith("| b | flat | 9 |  |  |")
    assert table[-1] == "b graphs: failed: no"


def test_unknown_models_and_arms_are_named(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_packing", "--models", "7B"])
    with pytest.raises(SystemExit, match="--models takes 350M, 1B, tiny; got 7B"):
        script("gpu_packing").parse()


def test_the_loop_by_hand_makes_the_update_of_the_stepper(script):
    packing, gpu = script("gpu_packing"), script("_gpu")
    device, corpus = gpu.Device(gpu.GIB, smoke=True), packing.drawn_corpus()
    batches, _ = packing.made_batches("plain", corpus, device, SimpleNamespace(tokens=256, capacity=64))
    weights = []
    for arm in ("plain", "padded"):
        model = packing.make_model("tiny", corpus.vocabulary, "cpu")
        step = packing.step_of(arm, model, torch.optim.SGD(model.parameters(), lr=0.1), None, device)
        step(batches[0].batch)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)


def test_a_profile_tells_the_kernels_of_arms(smoke_test):
    rows = smoke_test("gpu_packing", "--profile", "flat,plain")["rows"]
    assert [row["arm"] for row in rows] == ["flat", "plain"]
    for row in rows:
        assert row["busy_ms"] > 0
        assert row["ms"] > 0
        assert {kernel["name"] for kernel in row["kernels"]} > {"aten::mul", "aten::copy_"}
        assert len(row["kernels"]) <= 25


def test_busy_and_idle_time_are_those_of_a_device_that_overlaps_kernels(script):
    profiling = script("_profiling")
    spans = [("sm90_gemm", 0, 4000), ("flash_fwd", 3000, 5000), ("x", 3500, 4500), ("sm90_gemm", 9000, 10000)]
    found = profiling.summary_of([profiling.Kernel(*span) for span in spans], 2)
    assert found["busy_ms"] == 3.0  # 0 to 5 ms and 9 to 10 ms, in two steps
    assert found["idle_ms"] == 2.0
    assert found["kinds"] == {"matrices": 2.5, "attention": 1.0, "others": 0.5}
    assert found["gaps"] == [{"ms": 4.0, "after": "flash_fwd", "before": "sm90_gemm"}]
    assert found["kernels"][0] == {"name": "sm90_gemm", "kind": "matrices", "ms": 2.5, "count": 1.0}
