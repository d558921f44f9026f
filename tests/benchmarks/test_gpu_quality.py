"""Loss against seconds: the corpus, the arms, the clock, what results say together, and a trial run on the CPU."""

import json
import math
import sys
import time
import xml.etree.ElementTree as ET
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import batchwright as bw
from batchwright.step import PadCollator

NAN = float("nan")


@pytest.fixture
def corpus(script):
    """Five pairs, the last one held out; sources of 2, 3, 1, 4 and 2 tokens, targets of 3, 1, 2, 2 and 1."""
    parts = script("_quality.corpus")
    first = parts.Texts.of([[5, 6], [7, 8, 9], [10], [11, 12, 13, 14], [15, 16]])
    second = parts.Texts.of([[20, 21, 22], [23], [24, 25], [26, 27], [28]])
    orders = {
        "dynabatch-4/0/0": [(parts.Part(np.array([3, 1])),), (parts.Part(np.array([0])), parts.Part(np.array([2])))]
    }
    return parts.Corpus("translation", (first, second), 40, 1, orders)


def test_a_batch_is_padded_to_its_longest_texts(script, corpus):
    made = corpus.make(script("_quality.corpus").Part(np.array([0, 1])))
    assert made.batch["input_ids"].tolist() == [[5, 6, 1], [7, 8, 9]]
    assert made.batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert made.batch["labels"].tolist() == [[20, 21, 22], [23, -100, -100]]
    assert (made.num_labels, made.num_examples, made.real_tokens, made.padded_tokens) == (4, 2, 9, 12)


def test_rows_that_fill_a_static_shape_up_have_no_labels_and_no_weight(script, corpus):
    made = corpus.make(script("_quality.corpus").Part(np.array([1]), (2, 4, 2)))
    assert made.batch["input_ids"].tolist() == [[7, 8, 9, 1], [7, 8, 9, 1]]
    assert made.batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 0]]
    assert made.batch["labels"].tolist() == [[23, -100], [-100, -100]]
    assert made.batch["row_weight"].tolist() == [1, 0]
    assert (made.num_labels, made.num_examples, made.real_tokens, made.padded_tokens) == (1, 1, 4, 12)


def test_a_filled_batch_is_that_of_the_collator_of_the_library(script, corpus):
    columns = [[texts.ids[start:stop].tolist() for start, stop in pairwise(texts.offsets)] for texts in corpus.columns]
    collate = PadCollator(
        pad_to=bw.PadTo(((4, 3),), (4,)),
        axis_fields=("input_ids", "labels"),
        pad_values={"input_ids": 1},
        fill_rows=True,
    )
    wanted = collate([{"input_ids": columns[0][place], "labels": columns[1][place]} for place in (3, 0)])
    found = corpus.make(script("_quality.corpus").Part(np.array([3, 0]), (4, 4, 3))).batch
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_texts_that_do_not_fit_their_shape_are_refused(script, corpus):
    part = script("_quality.corpus").Part(np.array([0, 3]), (2, 4, 2))
    with pytest.raises(ValueError, match=r"2 texts of \[4, 3\] tokens do not fit \(2, 4, 2\)"):
        corpus.make(part)


def test_a_corpus_comes_back_from_its_file(script, corpus, tmp_path):
    corpus.save(tmp_path / "c.npz")
    again = script("_quality.corpus").Corpus.load(tmp_path / "c.npz")
    assert (again.task, again.vocabulary, again.num_held_out) == ("translation", 40, 1)
    assert again.lengths.tolist() == [[2, 3], [3, 1], [1, 2], [4, 2]]
    order = [[part.indices.tolist() for part in update] for update in again.orders["dynabatch-4/0/0"]]
    assert order == [[[3, 1]], [[0], [2]]]


def test_held_out_texts_are_all_evaluated_once(script, corpus):
    parts = script("_quality.corpus")
    whole = parts.Corpus("translation", corpus.columns, 40, 5)
    batches = whole.held_out(12)
    assert sum(made.num_examples for made in batches) == 5
    assert sum(made.num_labels for made in batches) == 9
    assert all(made.padded_tokens <= 12 for made in batches)


@pytest.mark.parametrize("task", ["translation", "decoder"])
def test_filler_rows_change_neither_loss_nor_weight(script, corpus, task):
    parts, tasks = script("_quality.corpus"), script("_quality.tasks")
    columns = corpus.columns if task == "translation" else corpus.columns[:1]
    texts = parts.Corpus(task, columns, 40, 1)
    model = tasks.make_model(task, 40, "cpu", seed=0, small=True).eval()
    plain = texts.make(parts.Part(np.array([0, 1])))
    shape = (4, 5, 6) if task == "translation" else (4, 5)
    filled = texts.make(parts.Part(np.array([0, 1]), shape))
    loss, weight = tasks.sums(model, plain.batch)
    filled_loss, filled_weight = tasks.sums(model, filled.batch)
    assert int(weight) == int(filled_weight) == plain.num_labels == filled.num_labels
    torch.testing.assert_close(filled_loss, loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("task", ["translation", "decoder"])
def test_the_loss_is_that_of_the_model_itself(script, corpus, task):
    parts, tasks = script("_quality.corpus"), script("_quality.tasks")
    columns = corpus.columns if task == "translation" else corpus.columns[:1]
    made = parts.Corpus(task, columns, 40, 1).make(parts.Part(np.array([0, 1, 3])))
    model = tasks.make_model(task, 40, "cpu", seed=0, small=True).eval()
    assert model.config._attn_implementation == "sdpa"
    mean = model(**made.batch).loss
    torch.testing.assert_close(tasks.loss_sum(model, made.batch) / made.num_labels, mean, rtol=1e-5, atol=0)


def test_a_seed_gives_the_same_weights(script):
    make = script("_quality.tasks").make_model
    first, same, other = (make("decoder", 40, "cpu", seed=seed, small=True).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def many(script, num=203):
    parts = script("_quality.corpus")
    rng = np.random.default_rng(0)
    columns = tuple(parts.Texts.of([[9] * int(n) for n in rng.integers(1, 30, num)]) for _ in range(2))
    return parts.Corpus("translation", columns, 40, 3)


@pytest.mark.parametrize("name", ["fixed-8", "grouped-8", "max_tokens-128", "buckets-4-128", "graphs-4-128"])
def test_an_epoch_holds_every_text_once(script, name):
    arms, corpus = script("_quality.arms"), many(script)
    found = arms.updates_of(arms.Arm.parse(name), corpus, seed=0, limit=400)
    seen = np.concatenate([part.indices for update in found for part in update])
    assert sorted(seen[:200].tolist()) == sorted(seen[200:400].tolist()) == list(range(200))
    assert seen[:200].tolist() != seen[200:400].tolist()


def test_grouped_texts_have_about_the_same_length(script):
    arms, corpus = script("_quality.arms"), many(script)
    spread = {}
    for name in ("fixed-8", "grouped-8"):
        found = arms.updates_of(arms.Arm.parse(name), corpus, seed=0, limit=25)
        spread[name] = np.mean([np.ptp(corpus.lengths[part.indices, 0]) for (part,) in found])
    assert spread["grouped-8"] < 3 < 15 < spread["fixed-8"]


def test_only_planned_static_shapes_are_padded_to(script):
    arms, corpus = script("_quality.arms"), many(script)
    plain = arms.updates_of(arms.Arm.parse("max_tokens-128"), corpus, seed=0, limit=20)
    static = arms.updates_of(arms.Arm.parse("buckets-4-128"), corpus, seed=0, limit=20)
    assert all(part.shape is None for (part,) in plain)
    assert all(part.shape[0] * sum(part.shape[1:]) <= 128 for (part,) in static)


def test_orders_of_others_go_on_in_another_order(script, corpus):
    arms = script("_quality.arms")
    found = arms.updates_of(arms.Arm.parse("dynabatch-4"), corpus, seed=0, limit=6)
    assert [len(update) for update in found[:2]] == [1, 2]
    assert sorted(len(update) for update in found[2:]) == [1, 1, 2, 2]


def test_an_order_that_was_not_prepared_is_named(script, corpus):
    arms = script("_quality.arms")
    with pytest.raises(LookupError, match="no order of dynabatch-16 for seed 0"):
        arms.updates_of(arms.Arm.parse("dynabatch-16"), corpus, seed=0, limit=1)


@pytest.mark.parametrize("name", ["graphs", "graphs-16", "fixed-x", "nothing-1", "fixed-1-2"])
def test_a_wrong_name_of_an_arm_is_refused_with_all_right_ones(script, name):
    with pytest.raises(SystemExit, match=rf"'{name}' is no arm; arms are fixed-N, .*graphs-N-N"):
        script("_quality.arms").Arm.parse(name)


def test_real_peers_give_their_orders(script):
    preparing = script("_quality.preparing")
    lengths = np.random.default_rng(0).integers(2, 40, 120)
    grouped = preparing.grouped_by_transformers(lengths, 8)
    balanced = preparing.rebalanced_by_transformers(lengths, 8, 2)
    planned = preparing.planned_by_dynabatch(lengths, lengths, 5 * lengths, 4)
    for orders in (grouped, balanced, planned):
        assert len(orders) == 6  # three seeds, two epochs
        for updates in orders.values():
            assert sorted(i for update in updates for part in update for i in part.indices) == list(range(120))
    assert {len(update) for update in balanced["batch_rebalance-8-2/0/0"]} == {2}
    first, second = ([sorted(part.indices) for (part,) in planned[f"dynabatch-4/0/{epoch}"]] for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)  # it keeps its batches and shuffles them


# The clock and a run


@pytest.fixture
def device(script):
    return script("_gpu").Device(10**9, smoke=True)


def test_the_clock_stands_still_in_a_pause(script, device):
    clock = script("_quality.training").Clock(device)
    clock.start()
    time.sleep(0.02)
    clock.pause()
    gone = clock.seconds
    assert 0.02 <= gone < 0.5
    time.sleep(0.02)
    assert clock.seconds == gone
    clock.start()
    assert clock.seconds >= gone


@pytest.fixture
def make_run(script, device):
    def make(name, task="translation", seconds=0.2):
        training, arms = script("_quality.training"), script("_quality.arms")
        arm = arms.Arm.parse(name)
        corpus = script("gpu_quality").drawn_corpus(task, with_peers=arm.is_of_others)
        settings = training.Settings(seconds, (seconds / 2, seconds), True)
        return training.Run(arm, corpus, device, settings, lr=0.1, seed=0)

    return make


def test_the_rate_rises_over_a_twentieth_of_the_time_and_falls_to_zero(make_run):
    run = make_run("fixed-4", seconds=20.0)
    found = [run.rate(seconds) for seconds in (0, 0.5, 1, 10.5, 20, 25)]
    np.testing.assert_allclose(found, [0, 0.05, 0.1, 0.05, 0, 0], atol=1e-12)


def test_a_run_says_what_it_trained(make_run):
    run = make_run("batch_rebalance-8-2")
    row = run.run()
    trained = [part for number in range(row["updates"]) for part in run.updates[number % len(run.updates)]]
    assert row["updates"] > 0
    assert row["examples"] == 8 * row["updates"]
    assert row["tokens_per_second"] == pytest.approx(sum(part.real_tokens for part in trained) / row["seconds"])
    assert len(row["curve"]) in (2, 3)  # the first mark is passed over if one update takes that long
    assert row["curve"][0][0] == 0
    assert row["loss"] == row["curve"][-1][1]
    assert row["seconds"] >= 0.2


def test_validation_leaves_the_trained_model_alone(make_run):
    run = make_run("fixed-4")
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    first, second = run._validate(), run._validate()
    assert first == second
    assert run.model.training
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    with torch.no_grad():
        run.model.lm_head.weight.normal_()
    assert run._validate() != first


def test_an_update_of_several_parts_has_the_gradient_of_the_whole(script, make_run, corpus):
    """Parts of 3 and 2 labels weigh 3 to 2; the rate is 0 in the step, so that only gradients are compared."""
    training, parts = script("_quality.training"), script("_quality.corpus")
    run = make_run("fixed-4")
    run.model.eval()
    halves = [corpus.make(parts.Part(np.array(places))) for places in ([0], [2])]
    whole = corpus.make(parts.Part(np.array([0, 2])))
    assert [part.num_labels for part in (*halves, whole)] == [3, 2, 5]
    loop = training.Loop(run.model, run.optimizer, run.device)
    gradients = []
    for pieces in (halves, [whole]):
        for piece in pieces:
            loop.backward(piece.batch, 5)
        gradients.append(torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]))
        run.optimizer.zero_grad(set_to_none=True)
    torch.testing.assert_close(*gradients, rtol=0.02, atol=1e-4)  # bf16


# What results say together


def row(arm, lr, seed, curve, task="translation", **more):
    found = {"task": task, "arm": arm, "lr": lr, "seed": seed, "curve": curve, "loss": curve[-1][1], "command": "c"}
    return {
        **found,
        "tokens_per_second": 10.0,
        "updates": 3,
        "padding": 0.1,
        "shapes": 2,
        "seconds": curve[-1][0],
        **more,
    }


ROWS = [
    row("dynabatch-16", 1e-3, 0, [(0, 9.0), (10, 6.0), (20, 5.0)]),
    row("dynabatch-16", 5e-4, 0, [(0, 9.0), (10, 8.0), (20, 7.0)]),
    row("fixed-16", 1e-3, 0, [(0, 9.0), (10, 8.0), (20, 6.0)]),
    row("max_tokens-8192", 1e-3, 0, [(0, 9.0), (10, 5.0), (20, 4.0)]),
    row("graphs-16-8192", 1e-3, 0, [(0, 9.0), (10, 3.0), (20, 2.0)], pool_bytes=2**30, capture_seconds=2.0),
    row("graphs-16-8192", 1e-3, 1, [(0, 9.0), (10, 3.0), (20, 3.0)], pool_bytes=2**30, capture_seconds=4.0),
    row("graphs-16-8192", 5e-4, 0, [(0, 9.0), (10, 3.0), (20, 2.5)]),
]


def test_an_arm_counts_at_its_best_rate_averaged_over_seeds(script):
    best, *rest = script("_quality.results").summarize(ROWS, "translation")
    assert (best["arm"], best["loss"], best["lr"], best["seeds"]) == ("graphs-16-8192", 2.5, 1e-3, 2)
    assert best["spread"] == "2.000 to 3.000"
    assert best["by_lr"] == "0.0005: 2.50, 0.001: 2.00"
    assert (best["capture_seconds"], best["pool_gib"]) == (3.0, 1.0)
    assert [found["arm"] for found in rest] == ["max_tokens-8192", "dynabatch-16", "fixed-16"]


def test_the_time_to_the_best_peers_loss_lies_on_a_straight_line(script):
    found = {one["arm"]: one for one in script("_quality.results").summarize(ROWS, "translation")}
    # From 9 to 3 in 10 seconds: 5 after 6 2/3, which is a third of the peer's 20; 4 after 8 1/3.
    graphs = found["graphs-16-8192"]
    assert (graphs["to_peer"], graphs["times_peer"]) == (pytest.approx(20 / 3), pytest.approx(3))
    assert graphs["to_eager"] == pytest.approx(25 / 3)
    assert found["max_tokens-8192"]["to_peer"] == 10
    assert (found["fixed-16"]["to_peer"], found["fixed-16"]["times_peer"]) == (None, None)


def test_a_table_names_controls_and_failures(script):
    rows = [*ROWS, row("fixed-16", 1e-3, 0, [(0, 9.0), (20, 6.0)], is_control=True)]
    rows.append({"task": "translation", "arm": "graphs-4-64", "lr": 0.001, "seed": 0, "error": "ValueError: no"})
    table = script("_quality.results").render(rows, "translation")
    assert "| graphs-16-8192 | 10 | 3 | 10.0% | 2 | 3.0 | 1.00 |" in table
    assert "command c: fixed-16 lr 0.001 seed 0: 10 tokens/s, 3 updates, loss 6.000" in table
    assert "failed: graphs-4-64 lr 0.001 seed 0: ValueError: no" in table


def test_a_learning_rate_at_which_an_arm_diverged_is_not_its_best(script):
    results = script("_quality.results")
    rows = [row("fixed-16", 1e-3, 0, [(0.0, 9.0), (28.0, NAN)]), row("fixed-16", 5e-4, 0, [(0.0, 9.0), (28.0, 3.0)])]
    assert results.best_rate(rows, "translation", "fixed-16") == 5e-4
    (found,) = results.summarize(rows, "translation")
    assert (found["loss"], found["by_lr"]) == (3.0, "0.0005: 3.00, 0.001: diverged")


@pytest.mark.parametrize("loss", [NAN, math.inf])
def test_a_diverged_arm_is_last_and_the_plot_names_it_without_a_line(script, tmp_path, loss):
    rows = [row("fixed-16", 1e-3, 0, [(0.0, 9.0), (28.0, loss)]), row("grouped-8", 1e-3, 0, [(0.0, 9.0), (28.0, 3.0)])]
    found = script("_quality.results").summarize(rows, "translation")
    assert [one["arm"] for one in found] == ["grouped-8", "fixed-16"]
    assert [one["to_peer"] for one in found] == [28.0, None]
    script("gpu_quality").report(rows, ["translation"], tmp_path / "q.svg")
    text = (tmp_path / "q.svg").read_text()
    assert text.count("<polyline") == 1
    assert "not drawn, as diverged: fixed-16<" in text


def test_a_seed_that_diverged_lets_its_arm_be_last(script):
    rows = [
        row("fixed-16", 1e-3, 0, [(0, 9.0), (20, 2.0)]),
        row("fixed-16", 1e-3, 1, [(0, 9.0), (20, NAN)]),
        row("grouped-8", 1e-3, 0, [(0, 9.0), (20, 3.0)]),
    ]
    assert [one["arm"] for one in script("_quality.results").summarize(rows, "translation")] == [
        "grouped-8",
        "fixed-16",
    ]


def test_seeds_whose_capture_passed_other_marks_have_the_mean_of_equal_times(script):
    # Capture takes longer than the first marks, in one seed longer than in the other, so one curve lacks a point.
    rows = [
        row("graphs-16-8192", 1e-3, 0, [(0.0, 9.0), (2.1, 8.0), (3.0, 6.0), (28.0, 2.0)]),
        row("graphs-16-8192", 1e-3, 1, [(0.0, 9.0), (3.4, 6.0), (28.0, 2.0)]),
        row("fixed-16", 1e-3, 0, [(0.0, 9.0), (28.0, 5.0)]),
    ]
    best, _ = script("_quality.results").summarize(rows, "translation")
    assert best["curve"][-1] == (28.0, 2.0)
    assert 9.25 <= best["to_peer"] <= 9.55  # one passes 5.0 at 9.25 s, the other at about 9.55 s


def test_the_time_of_the_best_peer_is_that_of_its_whole_run(script):
    rows = [
        row("dynabatch-16", 1e-3, 0, [(0.0, 9.0), (4.0, 8.0), (28.0, 5.0)]),
        row("dynabatch-16", 1e-3, 1, [(0.0, 9.0), (28.0, 5.0)]),
        row("graphs-16-8192", 1e-3, 0, [(0.0, 9.0), (7.0, 5.0), (28.0, 2.0)]),
    ]
    best, _ = script("_quality.results").summarize(rows, "translation")
    assert best["times_peer"] == pytest.approx(28 / 7)


def test_a_mean_curve_ends_with_the_mean_of_the_last_losses(script):
    found = script("_quality.results").mean_curve([[(0, 9.0), (20.1, 4.0)], [(0, 9.0), (20.3, 2.0)]])
    assert found[-1] == (20.3, 3.0)


def test_the_note_of_a_plot_says_which_rates_arms_had(script, tmp_path):
    results, gpu_quality = script("_quality.results"), script("gpu_quality")
    same = [row(arm, lr, 0, [(0, 9.0), (20, 5.0)]) for arm in ("fixed-16", "grouped-8") for lr in (1e-3, 5e-4)]
    for rows, note in ((same, "best learning rate of the same grid"), (same[1:], "learning rates as listed in the ta")):
        gpu_quality.report(rows, ["translation"], tmp_path / "q.svg")
        assert note in (tmp_path / "q.svg").read_text()
    assert "arms have different learning rates" not in results.render(same, "translation")
    assert "arms have different learning rates: see loss by lr" in results.render(same[1:], "translation")


def test_the_peak_of_a_graphed_arm_has_its_pool_or_is_left_out(script):
    summarize = script("_quality.results").summarize
    curve = [(0, 9.0), (20, 5.0)]
    (old,) = summarize([row("graphs-16-8192", 1e-3, 0, curve, peak_gib=1.0)], "translation")
    (new,) = summarize([row("graphs-16-8192", 1e-3, 0, curve, peak_gib=3.0, stepper_peak_gib=3.0)], "translation")
    (eager,) = summarize([row("fixed-16", 1e-3, 0, curve, peak_gib=1.0)], "translation")
    assert (old.get("peak_gib"), new["peak_gib"], eager["peak_gib"]) == (None, 3.0, 1.0)


def test_the_peak_of_a_device_is_that_of_the_stepper_where_it_is_higher(device):
    assert device.peak(2**30)["peak_gib"] == 1.0
    assert device.peak(2**29)["peak_of_cap"] == 2**29 / 10**9


def test_ratios_are_added_where_no_dense_shape_fits(script):
    limit = {"arm": "limit: no padding, best dense shape", "padding": 0.0, "steady_per_second": 0.0}
    arm = {"arm": "fixed 10, shuffled", "steady_per_second": 2.0, "tokens_per_second": 5.0}
    script("gpu_training").add_ratios([arm, limit])
    assert arm["to_fixed"] == 1.0
    assert "tokens_to_limit" not in arm


@pytest.mark.parametrize(
    "curve", [[(0.0, 9.0), (300.0, 3.0), (60_000.0, 2.4)], [(0.0, 9.0), (1.0, 2.0), (2.0, 2.0)]], ids=["long", "even"]
)
def test_a_chart_of_long_runs_or_of_one_loss_is_drawn(script, tmp_path, curve):
    script("_quality.chart").draw(tmp_path / "c.svg", [("fixed-16", curve, "peer")], title="t", note="n")
    assert ET.parse(tmp_path / "c.svg").getroot().tag.endswith("svg")


def test_names_in_a_chart_do_not_lie_on_each_other(script):
    spread = script("_quality.chart").spread
    assert spread([10, 12, 40], least=10) == [6.0, 16.0, 40.0]
    found = sorted(spread([5, 5, 5, 30, 31, 90], least=17))
    assert min(np.diff(found)) >= 17 - 1e-9


def test_a_chart_has_a_line_and_a_name_for_every_arm(script, tmp_path):
    results = script("_quality.results")
    script("_quality.chart").draw(
        tmp_path / "c.svg", results.chart_series(ROWS, "translation"), title="Loss <of> arms", note="n"
    )
    tree = ET.parse(tmp_path / "c.svg")
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in tree.iter(f"{space}text")]
    assert len(list(tree.iter(f"{space}polyline"))) == 4
    assert {"Loss <of> arms", "seconds of training", "graphs-16-8192  2.50", "fixed-16  6.00"} <= set(texts)


# The script


def options(**more):
    found = {"arms": "graphs-16-8192,fixed-16,compile-16-8192", "lrs": "1e-3,5e-4", "seeds": "0,1", "leading": None}
    return Namespace(**{**found, "control": "max_tokens-8192", "runs": None, **more})


def test_runs_that_are_named_come_in_their_order_and_no_others(script):
    named = options(runs="fixed-16:2e-3:1,auto_betas-32:5e-4:0", control="none")
    units = list(script("gpu_quality").units(named, "translation", ROWS))
    assert [tuple(unit) for unit, _ in units] == [
        ("translation", "fixed-16", 2e-3, 1),
        ("translation", "auto_betas-32", 5e-4, 0),
    ]
    assert not any(is_control for _, is_control in units)
    with pytest.raises(SystemExit, match=r"--runs must be ARM:RATE:SEED with commas between them, got 'fixed-16:2e-3'"):
        script("gpu_quality").runs_of(options(runs="fixed-16:2e-3"))


def test_runs_come_in_the_order_of_their_importance(script):
    units = script("gpu_quality").units(options(), "translation", ROWS)
    found = [(unit.arm, unit.lr, unit.seed, is_control) for unit, is_control in units]
    assert found == [
        ("max_tokens-8192", 1e-3, 0, True),
        ("graphs-16-8192", 1e-3, 0, False),
        ("fixed-16", 1e-3, 0, False),
        ("graphs-16-8192", 5e-4, 0, False),
        ("fixed-16", 5e-4, 0, False),
        ("graphs-16-8192", 1e-3, 1, False),  # a leading arm, at its best rate
        ("compile-16-8192", 1e-3, 0, False),
        ("compile-16-8192", 5e-4, 0, False),
    ]


@pytest.fixture
def run_script(script, monkeypatch, tmp_path, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu_quality", "--smoke", "--output", str(tmp_path / "q.json"), *arguments])
        script("gpu_quality").main()
        return json.loads((tmp_path / "q.json").read_text()), capsys.readouterr().out

    return run


def test_every_arm_has_the_same_grid_of_rates(script):
    names = "graphs-16-8192,compile_dynamic-16-8192"
    units = [unit for unit, _ in script("gpu_quality").units(options(arms=names, control="none"), "translation", [])]
    rates = {arm: {unit.lr for unit in units if unit.arm == arm} for arm in names.split(",")}
    assert rates["compile_dynamic-16-8192"] == rates["graphs-16-8192"] == {1e-3, 5e-4}


def test_every_arm_runs_on_the_cpu(run_script, tmp_path):
    report, out = run_script("--plot", str(tmp_path / "q.svg"))
    rows = {row["arm"]: row for row in report["rows"]}
    assert [row["arm"] for row in report["rows"] if "error" in row] == []
    assert len(rows) == 8
    assert all(row["updates"] >= 12 for row in rows.values())
    assert rows["graphs-2-128"]["graphed_updates"] > 0
    assert rows["batch_rebalance-8-2"]["examples"] == 8 * rows["batch_rebalance-8-2"]["updates"]
    assert all(f"| {arm} |" in out for arm in rows)
    assert ET.parse(tmp_path / "q.svg").getroot().tag.endswith("svg")


def test_a_decoder_is_trained_by_replay(run_script):
    (found,) = run_script("--task", "decoder", "--arms", "graphs-2-128")[0]["rows"]
    assert found["graphed_updates"] > 0
    assert found["hit_rate"] > 0
    assert "captured shapes" in found["graph_summary"]


def test_finished_runs_are_not_run_again(run_script):
    first, _ = run_script("--arms", "fixed-4")
    second, _ = run_script("--arms", "fixed-4,grouped-8")
    assert second["rows"][0] == first["rows"][0]
    assert [row["arm"] for row in second["rows"]] == ["fixed-4", "grouped-8"]
    assert [command["id"] for command in second["commands"]][:1] == [row["command"] for row in first["rows"]]


def test_runs_of_other_seconds_are_refused(run_script):
    run_script("--arms", "fixed-4", "--seconds", "0.02")
    with pytest.raises(
        SystemExit, match=r"runs of translation differ in seconds \(0.02, 0.1\), .*name another --output"
    ):
        run_script("--arms", "fixed-4,grouped-8", "--seconds", "0.1")


def test_runs_of_other_data_or_of_a_trial_are_refused(script, run_script, tmp_path):
    report, _ = run_script("--arms", "fixed-4")
    check, mine = script("_quality.results").check_alike, {"seconds_a_run": 0.1, "data": "drawn", "smoke": True}
    check(report["commands"], report["rows"], "translation", mine)
    check(report["commands"], report["rows"], "decoder", {**mine, "data": "ab"})  # it has no run of that task
    with pytest.raises(SystemExit, match=r"differ in data \(ab, drawn\)"):
        check(report["commands"], report["rows"], "translation", {**mine, "data": "ab"})
    with pytest.raises(SystemExit, match=r"differ in --smoke \(False, True\)"):
        check(report["commands"], report["rows"], "translation", {**mine, "smoke": False})


def test_older_results_say_less_but_can_be_reported(script):
    commands = [{"id": "c", "seconds_a_run": 28.0}, {"id": "d", "seconds_a_run": 28.0, "data": "ab"}]
    rows = [row("fixed-16", 1e-3, 0, [(0, 9.0), (28, 5.0)], command=name) for name in "cd"]
    check = script("_quality.results").check_alike
    check(commands, rows, "translation")
    with pytest.raises(SystemExit, match=r"differ in data \(ab, unknown\)"):
        check(commands, rows, "translation", {"seconds_a_run": 28.0, "data": "ab", "smoke": None})


def test_a_file_of_data_is_told_from_another(script, tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"two")
    digest = script("gpu_quality").data_digest
    assert len({digest(tmp_path / "a"), digest(tmp_path / "b"), digest(None)}) == 3


def test_a_command_that_is_killed_while_it_writes_loses_no_finished_run(script, monkeypatch, tmp_path):
    gpu, path = script("_gpu"), tmp_path / "q.json"
    gpu.write(path, {"commands": [], "rows": [{"arm": "fixed-4"}]})
    write_text = Path.write_text

    def killed(self, text, *args, **kwargs):
        write_text(self, text[: len(text) // 2], *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        gpu.write(path, {"commands": [], "rows": [{"arm": "fixed-4"}, {"arm": "grouped-8"}]})
    assert json.loads(path.read_text())["rows"] == [{"arm": "fixed-4"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--arms", "fixed-4", "--smoke", "--resume", "typo.json"],
            r"typo\.json cannot be read: .*name a file that --",
        ),
        (["--report", "typo.json"], r"typo\.json cannot be read"),
        (["--report", "cut.json"], r"cut\.json cannot be read"),
        (["--report", "list.json"], r"list\.json holds no commands and rows"),
        (["--report", "empty.json"], r"empty\.json has no run of any task"),
        (["--report", "empty.json", "--task", "decoder"], r"empty\.json has no run of decoder"),
        (["--data", "typo.npz"], r"typo\.npz does not exist; name the file that --prepare wrote"),
        (["--data", "typo.npz", "--lrs", "fast"], "--lrs must be numbers with commas between them, got 'fast'"),
        (["--data", "typo.npz", "--seeds", "0,x"], "--seeds must be numbers with commas between them, got '0,x'"),
        (["--data", "typo.npz", "--seconds", "0"], "--seconds must be above 0, got 0"),
    ],
    ids=["resume", "report", "cut", "list", "empty", "task", "data", "lrs", "seeds", "seconds"],
)
def test_wrong_arguments_end_in_one_sentence(script, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("cut.json").write_text('{"commands": [')
    Path("list.json").write_text("[]")
    Path("empty.json").write_text('{"commands": [], "rows": []}')
    monkeypatch.setattr(sys, "argv", ["gpu_quality", *arguments])
    with pytest.raises(SystemExit, match=message):
        script("gpu_quality").main()


def test_a_wrong_control_is_found_before_the_first_run(script):
    with pytest.raises(SystemExit, match="'nothing' is no arm"):
        script("gpu_quality").arms_of(options(control="nothing"), "translation")


def test_a_plot_without_any_run_is_left_out_in_a_sentence(script, monkeypatch, tmp_path, capsys):
    arguments = ["--smoke", "--arms", "fixed-4", "--budget-seconds", "1", "--plot", str(tmp_path / "q.svg")]
    monkeypatch.setattr(sys, "argv", ["gpu_quality", *arguments])
    script("gpu_quality").main()
    assert "q.svg is not drawn, as no run of translation has ended with a loss" in capsys.readouterr().out


def test_a_command_stops_before_a_run_that_would_not_end(run_script):
    report, out = run_script("--arms", "fixed-4")
    report, out = run_script("--arms", "grouped-8", "--budget-seconds", "1")
    assert [row["arm"] for row in report["rows"]] == ["fixed-4"]
    assert "left for another command: Unit(task='translation', arm='grouped-8'" in out


def test_a_run_that_fails_is_told_and_the_others_go_on(run_script):
    report, out = run_script("--arms", "dynabatch-9,fixed-4")
    assert [row["arm"] for row in report["rows"]] == ["dynabatch-9", "fixed-4"]
    assert "no order of dynabatch-9" in report["rows"][0]["error"]
    assert "failed: dynabatch-9" in out


def test_a_profile_says_where_the_host_is(run_script, tmp_path, capsys, monkeypatch, script):
    monkeypatch.setattr(sys, "argv", ["gpu_quality", "--smoke", "--profile", "max_tokens-128"])
    script("gpu_quality").main()
    out = capsys.readouterr().out
    assert "max_tokens-128: " in out
    assert "ms in the step" in out
    assert "stepper.py" in out


def test_without_data_the_preparation_is_named(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_quality"])
    with pytest.raises(SystemExit, match="--prepare"):
        script("gpu_quality").main()


# Arms whose level changes on the way


@pytest.fixture
def levels(script, make_run):
    """Return a function that makes an arm of levels around 128 tokens, and its run."""

    def make(kind):
        run = make_run(f"{kind}-2-128", seconds=1.0)
        return run, run.train

    return make


def test_a_new_level_is_a_new_stepper_with_its_rate_and_half_life(levels):
    run, arm = levels("warmup")
    found = []
    for gone in (0.05, 0.13, 0.26, 0.51):
        arm.step(gone)
        arm.step(gone)  # the size decided after the first update
        group = run.optimizer.param_groups[0]
        found.append((arm._level, float(group["lr"]) / run.rate(gone), group["betas"][1]))
    assert [level for level, *_ in found] == [128, 256, 512, 1024]
    np.testing.assert_allclose([rate for _, rate, _ in found], [1, 2**0.5, 2, 8**0.5], rtol=1e-5)
    np.testing.assert_allclose([beta for *_, beta in found], [0.98, 0.98**2, 0.98**4, 0.98**8], rtol=1e-12)
    assert [level for _, level in arm.changes] == [128, 256, 512, 1024]
    assert len(arm.trained) == 8


def test_batches_of_a_level_hold_at_most_its_tokens(levels):
    _, arm = levels("warmup")
    for level, made in arm._made.items():
        assert max(batch.padded_tokens for batch in made) <= level
    assert list(arm._made) == [64, 128, 256, 512, 1024]


def test_a_ramp_in_place_of_a_decay_keeps_rate_and_half_life(levels):
    run, arm = levels("smith")
    for gone in (0.05, 0.525, 0.525):
        arm.step(gone)
    # Half of the decay: for Adam the batch grows by 4, and the rate of 0.1 stays.
    assert arm._level == 512
    assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert run.optimizer.param_groups[0]["betas"] == (0.9, 0.98)


def test_seesaw_lowers_the_rate_by_the_root(levels):
    run, arm = levels("seesaw")
    for gone in (0.05, 0.525, 0.525):
        arm.step(gone)
    assert arm._level == 256
    assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 * 0.5**0.5)


def test_goodput_times_every_level_before_it_trains(levels, script):
    _, arm = levels("goodput")
    arm.step(0.05)
    row = arm.describe()
    assert row["probe_updates"] == 5 * script("_quality.levels").NUM_PROBES
    assert row["levels"] == [(0.05, 128)]  # no noise is known yet, so the base is kept
    assert row["num_captures"] >= 5


def test_experiments_of_a_level_are_charged_and_read(levels):
    _, arm = levels("measured")
    for gone in (0.05, 0.11, 0.12):
        arm.step(gone)
    row = arm.describe()
    assert row["experiment_seconds"] > 0
    assert arm._experiments == [0.3]


def test_an_arm_of_levels_runs_like_any_other(make_run):
    row = make_run("warmup-2-128", task="decoder").run()
    assert row["updates"] > 0
    assert row["repeated_updates"] is None
    assert row["examples"] > 0
    assert row["capture_seconds"] > 0
