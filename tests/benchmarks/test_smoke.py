"""The GPU benchmarks on the CPU: tiny models, live tensors in place of a device's memory."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch

import batchwright as bw
from batchwright.step import Generator
from batchwright.testing import EagerGraphs


def test_live_bytes_follow_tensors_and_views(script):
    live = script("_live_bytes").LiveBytes(10_000)
    with live:
        first = torch.zeros(1000)  # 4,000 bytes
        view = first.view(10, 100)
        del first
        assert live.used_bytes == 4000
        view += 1
        assert live.used_bytes == 4000
        del view
    assert (live.used_bytes, live.peak_bytes) == (0, 4000)


def test_live_bytes_leave_out_what_is_older(script):
    older = torch.zeros(1000)
    live = script("_live_bytes").LiveBytes(10_000)
    with live:
        part = older[:10]
        part.add_(1)
        assert live.used_bytes == 0


def test_live_bytes_run_out_of_memory(script):
    with script("_live_bytes").LiveBytes(7000), pytest.raises(torch.OutOfMemoryError, match="0 \\+ 8000 of 7000"):
        torch.zeros(2000)


class Loop:
    """Stands for a loop in which batches of more than ``most`` examples do not fit."""

    def __init__(self, device, most):
        self.device, self.most = device, most
        self.num_updates = 0

    def backward(self, batch, share=1.0):
        if len(batch["labels"]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def update(self):
        self.num_updates += 1

    def step(self, batch):
        self.backward(batch)
        self.update()

    def send(self, batch):
        return batch

    def free(self):
        pass


@pytest.fixture
def device(script):
    with script("_gpu").Device(10**9, smoke=True) as device:
        yield device


def batch_of(num):
    return {"labels": torch.zeros(num, 3)}


def test_a_batch_that_does_not_fit_is_not_counted_as_trained(script, device):
    training = script("_training")
    assert training.whole(Loop(device, 4), batch_of(4)) == (4, 0)
    assert training.whole(Loop(device, 4), batch_of(5)) == (0, 1)


def test_pieces_that_fit_are_counted_and_those_that_do_not_are_lost(script, device):
    training = script("_training")
    loop = Loop(device, 2)
    # 7 do not fit; pieces of 3, 3 and 1: two more failures, one example trained.
    assert training.split_retry(loop, 3, batch_of(7)) == (1, 3)
    assert loop.num_updates == 1
    # Pieces of 2, 2, 2 and 1 all fit after the first failure.
    assert training.split_retry(loop, 2, batch_of(7)) == (7, 1)
    assert training.split_retry(Loop(device, 0), 2, batch_of(4)) == (0, 3)


def test_counted_tensors_have_a_size_but_no_data(script):
    with script("_gpu").Device(2**31, smoke=False, counted=True) as device:
        device.monitor.reset_peak()
        weights = [torch.empty(2**28), torch.empty(2**28)]  # 2**30 bytes each
        assert device.monitor.peak_bytes == 2**31
        assert not device.fits(lambda: weights[0] + 1)
        weights.pop()
        assert device.fits(lambda: weights[0] + 1)


def test_an_arm_reports_what_was_lost_in_both_epochs(script, device):
    training = script("_training")
    pairs = script("_pairs").Pairs(np.array([[3, 4]] * 10), 100)
    loop = Loop(device, 4)
    batches = [np.arange(0, 4), np.arange(4, 10)]
    arm = training.Arm("some", pairs, batches, lambda batch: training.whole(loop, batch), 60)
    row = training.run_arm(loop, arm)
    # The batch of 6 is lost twice; the padding of equal lengths is 0; 4 of 7 tokens each are trained.
    assert (row["ooms"], row["lost"], row["share_run"], row["padding"], row["shapes"]) == (2, 12, 1.0, 0.0, 2)
    assert row["tokens_per_second"] == pytest.approx(7 * row["steady_per_second"])


def test_an_epoch_cut_short_repeats_the_same_batches(script, device):
    training = script("_training")
    pairs = script("_pairs").Pairs(np.array([[3, 4]] * 10), 100)
    seen = []

    def train(batch):
        seen.append(len(batch["labels"]))
        return training.Outcome(len(batch["labels"]))

    arm = training.Arm("some", pairs, np.split(np.arange(10), [1, 3, 6]), train, 0)
    row = training.run_arm(Loop(device, 9), arm)
    assert seen == [seen[0]] * 2
    assert row["share_run"] == 0.25


def test_pairs_are_padded_and_masked(script):
    batch = script("_pairs").Pairs(np.array([[2, 3], [4, 1]]), 100).collate(np.array([0, 1]))
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert (batch["labels"] == -100).tolist() == [[False, False, False], [False, True, True]]


def test_pairs_fill_a_static_shape_up_with_rows_without_labels(script):
    batch = script("_pairs").Pairs(np.array([[2, 3], [4, 1]]), 100).collate(np.array([0]), (2, 3, 4))
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 0]]
    assert batch["input_ids"][0].tolist() == batch["input_ids"][1].tolist()
    assert (batch["labels"] == -100).tolist() == [[False, False, False, True], [True] * 4]


def test_rows_that_fill_a_shape_up_are_not_counted_as_trained(script, device):
    training = script("_training")
    pairs = script("_pairs").Pairs(np.array([[3, 4]] * 3), 100)
    batches, shapes = [np.arange(2), np.arange(2, 3)], np.array([[2, 4, 4], [2, 4, 4]])
    arm = training.Arm("some", pairs, batches, lambda batch: training.whole(loop, batch), 60, shapes)
    loop = Loop(device, 2)
    row = training.run_arm(loop, arm)
    # 21 real tokens of 32; three pairs of 7 tokens each are trained, not four.
    assert (row["padding"], row["shapes"], row["lost"]) == (pytest.approx(11 / 32), 1, 0)
    assert row["tokens_per_second"] == pytest.approx(7 * row["steady_per_second"])


def test_a_pool_is_compared_with_the_largest_shape_of_the_memory_model(script):
    training, pairs = script("gpu_training"), script("_pairs").Pairs(np.array([[3, 4]]), 100)
    shapes = [[b, s, t] for b in (1, 2, 8) for s in (4, 16, 32) for t in (4, 16, 32)]
    model = bw.MemoryModel.fit(shapes, [1000 + 10 * b * (s + t) for b, s, t in shapes])
    arm = script("_training").Arm("some", pairs, [np.arange(1)], None, 60, np.array([[1, 5, 5], [2, 10, 10]]))
    row = {"pool_bytes": 600}
    training.add_pool(row, arm, model.budget(10_000), 900)
    assert row["model_pool_bytes"] == pytest.approx(1400 - 900, rel=1e-3)  # 1000 + 10 × 2 × 20 is the larger
    assert row["pool_to_predicted"] == pytest.approx(1.2, rel=1e-3)


def test_a_graphed_arm_is_compared_with_the_same_plan_run_eagerly(script):
    names = ("Buckets(32) of 6,144 tokens, eager", "Buckets(32) of 6,144 tokens, graphed", "calibrated, WindowSort()")
    speeds = zip(names, (100.0, 160.0, 140.0), strict=True)
    rows = [{"arm": name, "steady_per_second": speed, "tokens_per_second": speed} for name, speed in speeds]
    script("gpu_training").add_ratios(rows)
    assert (rows[1]["to_eager"], rows[1]["to_calibrated"]) == (pytest.approx(1.6), pytest.approx(160 / 140))
    assert "to_eager" not in rows[2]
    assert "to_limit" not in rows[1]


def test_a_peer_plan_for_other_lengths_is_not_used(script, tmp_path, capsys):
    plans, pairs = script("_peer_plan"), script("_pairs")
    path = tmp_path / "plan.json"
    lengths = np.array([5, 3, 9])
    path.write_text(json.dumps({"lengths": pairs.digest(lengths), "batches": [[2], [0, 1]]}))
    assert [batch.tolist() for batch in plans.read_peer_plan(path, lengths)] == [[2], [0, 1]]
    assert plans.read_peer_plan(path, lengths + 1) is None
    assert "--write-peer-plan" in capsys.readouterr().out


def test_rows_end_after_as_many_tokens_as_their_input(script):
    benchmark = script("gpu_generate")
    model = benchmark.make_model(benchmark.Device(1e9, smoke=True))
    results = benchmark.generate(model, [[5, 6, 7], [8], [9, 10]], max_new_tokens=8, do_sample=False)
    # The start token comes first; the row of 1 ends with the first token that is made.
    assert [len(row) - 1 for row in results] == [3, 1, 2]


def test_a_generator_of_the_model_that_ends_its_rows_keeps_its_graphs(script):
    benchmark, graphs = script("gpu_generate"), EagerGraphs()
    model = benchmark.make_model(benchmark.Device(1e9, smoke=True))
    generator = Generator(model, budget=bw.MaxItems(32), graphs=graphs, max_new_tokens=8, do_sample=False)
    examples = benchmark.make_examples(np.arange(1, 20))
    assert [len(row) - 1 for row in generator(examples)] == [min(8, length) for length in range(1, 20)]
    num_captured, benchmark.Translator.num_prompts = graphs.num_captured, 0
    generator(examples)
    assert graphs.num_captured == num_captured
    assert benchmark.Translator.num_prompts == 1


def test_training_runs_on_the_cpu(smoke_test):
    report = smoke_test("gpu_training")
    arms = [(row["arm"], row.get("pairs")) for row in report["rows"]]
    assert arms[0] == ("fixed 10, shuffled", 100)
    assert ("calibrated, Sorted()", 100) in arms
    assert ("calibrated, Sorted()", 300) in arms
    assert arms[-1][0].startswith("limit")
    # The calibrated budget fills memory, and what it planned fits.
    calibrated = [row for row in report["rows"] if row["arm"].startswith("calibrated")]
    static = {row["arm"].split(", ")[-1]: row for row in report["rows"] if row["arm"].startswith("Buckets(2)")}
    assert static["eager"]["lost"] == static["graphed"]["lost"] == 0
    assert static["graphed"]["reasons"] == {}
    assert all(0.6 < row["peak_of_cap"] <= 0.95 and row["lost"] == 0 for row in calibrated)


def test_arms_are_chosen_by_words_in_their_names(script):
    is_wanted = script("gpu_training").is_wanted
    names = ("fixed 10, shuffled", "fixed 10, sorted", "the same batches in halves", "limit")
    assert [is_wanted(name, Namespace(arms="halves;fixed 10, sorted")) for name in names] == [False, True, True, False]
    assert all(is_wanted(name, Namespace(arms=None)) for name in names)


def test_generating_runs_on_the_cpu(smoke_test):
    rows = {row["arm"]: row for row in smoke_test("gpu_generate")["rows"]}
    assert rows["fixed 64, sorted"]["prompts"] == 2  # 96 examples
    assert rows["graphs, calibrated budget"]["ooms"] == rows["eager, calibrated budget"]["ooms"] == 0
    assert rows["graphs that stay, calibrated budget"]["to_eager"] > 0
    assert rows["fixed 64, shuffled"]["to_fixed"] == 1


def test_a_decoder_runs_on_the_cpu_and_an_engine_that_cannot_says_so(smoke_test):
    eager, graphs, engine = smoke_test("gpu_decoder_generate")["rows"]
    assert eager["same_tokens"] == graphs["same_tokens"] == 1
    assert eager["to_eager"] == 1
    assert engine["error"] == "RuntimeError: needs a CUDA device"


def test_arms_of_a_decoder_are_kept_from_command_to_command(smoke_test):
    (first,) = smoke_test("gpu_decoder_generate", "--arms", "generate, graphs")["rows"]
    assert "same_tokens" not in first  # there was nothing to compare with
    kept, eager = smoke_test("gpu_decoder_generate", "--arms", "generate, eager", "generate, graphs")["rows"]
    assert kept["steady_per_second"] == first["steady_per_second"]
    assert kept["to_eager"] == kept["steady_per_second"] / eager["steady_per_second"]


def test_noise_is_measured_turn_by_turn_and_a_command_ends_with_its_time(smoke_test, capsys):
    report = smoke_test("gpu_noise", "--turns", "6")
    assert len(report["turns"]) == 6
    assert [row["arm"] for row in report["rows"]] == list(report["turns"][0])
    assert "do not fit" not in capsys.readouterr().out
    assert smoke_test("gpu_noise", "--budget-seconds", "0")["turns"] == report["turns"]
    assert "6 turns do not fit into --budget-seconds" in capsys.readouterr().out


def test_memory_of_images_is_predicted_on_the_cpu(smoke_test):
    rows = smoke_test("gpu_memory", "--models", "vit")["models"]
    assert [row["mode"] for row in rows] == ["train", "infer"]
    assert all(row["over_upper"] == row["ran_out"] == 0 and row["mean_error"] < 0.1 for row in rows)


def test_every_architecture_takes_its_inputs(script):
    architectures = script("_architectures").ARCHITECTURES
    kinds = [architecture.kind for architecture in architectures]
    assert {"patches of an image", "samples of sound"} <= set(kinds)
    for architecture in architectures:
        shape = (2, *map(architecture.snap, architecture.lengths(True)[0].tolist()))
        loss = architecture.make(True)(**architecture.inputs(shape, "cpu")).loss
        assert loss.isfinite(), architecture.name


def test_a_table_leaves_what_is_missing_empty(script):
    table = script("_gpu").markdown(
        [{"arm": "a", "speed": 2.5}, {"arm": "b"}], (("arm", "arm", ""), ("/s", "speed", ".0f"))
    )
    assert table.splitlines()[2:] == ["| a | 2 |", "| b |  |"]


def test_without_a_gpu_the_trial_run_is_named(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--smoke"):
        script("_gpu").Device(1, smoke=False)


def test_an_encoder_is_measured_in_all_phases_and_a_second_command_measures_nothing(smoke_test):
    report = smoke_test("gpu_encoder")
    found = [(row["phase"], row["arm"]) for row in report["rows"]]
    arms = [(phase, arm) for arm in ("eager", "graphed") for phase in ("visits", "load", "closed")]
    assert sorted(found) == sorted([*arms, ("warm_up", "graphed"), ("difference", "both")])
    assert max(report["rows"][-1][name] for name in ("eager_batch", "graphed_batch", "graphed_alone")) < 1e-5
    assert smoke_test("gpu_encoder")["rows"] == report["rows"]
