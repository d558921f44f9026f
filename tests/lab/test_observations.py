import copy
import math
import random
import re
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.lab._records import CellKey
from batchwright.lab.observations import observe
from batchwright.lab.observations._effects import CONVERGENCE, LOSS, effects
from batchwright.lab.observations._equal import loss_at
from batchwright.lab.observations._headline import family_of
from batchwright.lab.observations._ranking import rank
from batchwright.lab.observations._slices import Slice, by_halves, by_kind, overall

from .fabricated import DATASETS, STRATEGIES, fabricate, fail, make_tuning, older

WINE = {"wine": DATASETS["wine"]}
FEW = {name: STRATEGIES[name] for name in ("constant", "constant_large", "linear", "exponential")}
RANKED = ("overall", "convergence", "type", "dimensionality", "size", "label noise", "model")


def about(observations, topic):
    return [one for one in observations if one.topic == topic]


def text(observations, topic):
    return " ".join(one.sentence for one in about(observations, topic))


def run(strategy, seed, loss, **fields):
    """The least that a record needs."""
    place = {"dataset": "wine", "model": "mlp", "strategy": strategy, "seed": seed, "status": "ok"}
    return place | {"final": {"validation_loss": loss}} | fields


def pairs(changes):
    """Runs whose losses are those of the baseline times e to the power of the changes."""
    seeds = range(len(next(iter(changes.values()))))
    runs = [run("constant", seed, 1.0) for seed in seeds]
    return runs + [run(name, seed, math.exp(values[seed])) for name, values in changes.items() for seed in seeds]


def test_a_planted_winner_is_named_everywhere():
    observations = observe(fabricate(effects={"exponential": -0.2}, models=("mlp", "logistic")))
    (overall,) = about(observations, "overall")
    assert overall.sentence.startswith(
        "On all 3 data sets (2 models), exponential has the lowest final validation loss"
    )
    assert "ahead of all 7 others" in overall.sentence
    named = [one.strategies for one in observations if one.topic in RANKED and one.strategies]
    assert len(named) >= 7
    assert set(named) == {("exponential",)}


def ending_at(record, loss):
    record = copy.deepcopy(record)
    record["final"]["validation_loss"] = record["curve"][-1]["validation_loss"] = loss
    return record


def headline(records):
    return about(observe(records), "headline")


def on_examples(records):
    return headline(records)[0]


def test_the_headline_says_in_plain_words_that_no_strategy_won():
    same = dict.fromkeys(STRATEGIES, 32)
    found = on_examples(fabricate(sizes=same))
    assert found.sentence.startswith(
        "No strategy ended with a lower validation loss than a constant batch of 32 after the same examples: "
    )
    assert re.search(r"the best mean, \w+, −[\d.]+ % \(−[\d.]+ to \+[\d.]+ %, n = 15, p = 1\)", found.sentence)  # noqa: RUF001
    assert found.strategies == ()


def test_updates_saved_are_told_apart_from_the_loss():
    records = fabricate(strategies=("constant", "linear", "entropy"), effects={"entropy": 0.3})
    loss, updates = headline(records)[:2]
    assert "entropy, +30 %" in loss.sentence
    # 12,000 examples in batches of 32, or in batches that grow from 48 to 224.
    assert updates.sentence.startswith("Two strategies made at most half of the updates of a constant batch of 32")
    assert "Of these, linear (p < 0.001) is shown to end less than 5 % above its loss." in updates.sentence
    assert updates.strategies == ("linear",)
    assert {one.measure.name for one in updates.evidence} == {"updates"}


def test_headline_and_cost_agree_on_who_keeps_the_loss():
    for noise in (0.02, 0.04, 0.06):
        observations = observe(fabricate(noise=noise, seeds=3))
        (updates,) = [one for one in about(observations, "headline") if "at most half" in one.sentence]
        (cost,) = about(observations, "cost")
        # Every strategy but the baseline makes less than half of its updates here.
        assert set(updates.strategies) == set(cost.strategies)


def test_equal_updates_and_seconds_are_read_off_the_curves():
    # Twice the batch and the same loss: after equal updates the baseline is half way, at a point of its curve.
    records = fabricate(strategies=("constant", "linear"), sizes={"linear": 64}, num_examples=12_288, noise=0.0)
    half = records[0]["curve"][6]["validation_loss"]
    tests = {found.evidence[0].measure.name: found.evidence[0].compared for found in headline(records)}
    assert tests["loss"].mean == 0
    assert tests["loss_updates"].mean == pytest.approx(math.log(0.3 / half), abs=1e-5)
    # 192 updates and 12,288 examples take 0.6298 simulated seconds; the baseline takes 1.0138, so it is read at 62 %.
    points = [(point["simulated_seconds"], point["validation_loss"]) for point in records[0]["curve"]]
    (left, above), (right, under) = points[7], points[8]
    share = math.log(0.6298 / left) / math.log(right / left)
    expected = math.log(0.3) - (1 - share) * math.log(above) - share * math.log(under)
    assert left < 0.6298 < right
    assert tests["loss_simulated"].mean == pytest.approx(expected, abs=1e-3)


def test_a_reading_between_two_validations_is_near_the_truth():
    # Curves that are known everywhere: a power of the updates, and an exponential.
    for loss in (lambda n: 3 * n**-0.4, lambda n: 0.3 + 2 * math.exp(-n / 100)):
        curve = [{"updates": n, "validation_loss": loss(n)} for n in range(50, 601, 50)]
        run = {"curve": curve}
        for at in (75, 130, 333, 590):
            assert loss_at(run, "updates", at) == pytest.approx(loss(at), rel=0.05)
        assert loss_at(run, "updates", 20) is None
        assert loss_at(run, "updates", 601) is None


def test_a_run_too_short_to_read_the_other_is_left_out_and_named():
    # 32 times the batch: 12 updates, and the first validation of the baseline is after 31.
    records = fabricate(strategies=("constant", "linear"), sizes={"linear": 1024}, seeds=2)
    (found,) = [one for one in headline(records) if "number of updates" in one.sentence]
    assert found.sentence == (
        "Losses after the same number of updates cannot be compared. Left out: all 6 pairs of runs "
        "(the shorter run ends before the first validation of the longer one)."
    )


def test_measured_seconds_of_different_machines_are_not_compared():
    records = fabricate(strategies=("constant", "linear"), seeds=2)
    moved = [run | {"hardware": {"machine": "other"}} if run["strategy"] == "linear" else run for run in records]
    assert "in the same measured seconds: linear" in headline(records)[-1].sentence
    assert "(they ran on different machines or versions)" in headline(moved)[-1].sentence


def test_older_records_say_what_is_missing():
    observations = observe([older(run) for run in fabricate(seeds=3)])
    assert "their records hold no simulated seconds" in text(observations, "headline")
    assert "do not say how the learning rate of each strategy was chosen" in text(observations, "tuning")
    assert "after the same number of updates: " in text(observations, "headline")


def test_the_headline_is_one_family():
    records = fabricate(strategies=("constant", "linear", "entropy"))
    tests = [one.compared.num_tests for found in headline(records) for one in found.evidence]
    # Two strategies on four bases; the test of updates is a family of its own.
    assert sorted(set(tests)) == [2, 8]


def tuned(records, rates):
    return [run | {"tuning": make_tuning(rates.get(run["strategy"], 0.1))} for run in records]


def test_an_edge_of_the_grid_is_told_next_to_its_strategy():
    records = tuned(fabricate(effects={"linear": -0.2}, datasets={"wine": DATASETS["wine"]}), {"linear": 0.3})
    found = on_examples(records).sentence
    assert re.search(
        r"linear, −20 % \([^()]*\); its best rate lay at the edge of the grid: 0.3 on wine · mlp",  # noqa: RUF001
        found,
    )
    observations = observe(records)
    assert "At the edge of the grid lay 1 of 9 chosen learning rates" in text(observations, "tuning")
    assert "the same budget to choose its learning rate" in text(observations, "tuning")


def test_a_strategy_whose_tuning_failed_is_named():
    records = tuned(fabricate(seeds=3), {"entropy": None})
    records = [fail(run) if run["strategy"] == "entropy" else run for run in records]
    assert "Tuning failed, so there is no result: entropy on digits · mlp" in text(observe(records), "tuning")


def test_unequal_budgets_are_told():
    records = fabricate(seeds=2)
    records[0] = records[0] | {"tuning": make_tuning(0.1) | {"num_runs": 99}}
    records = [run | {"tuning": records[0]["tuning"]} if run["strategy"] == "constant" else run for run in records]
    assert "Tuning was not equal on digits · mlp, python_functions · mlp and wine · mlp" in text(
        observe(records), "tuning"
    )


def test_a_replay_needs_no_budget_of_its_own():
    given = {"grid": [0.1], "losses": {}, "chosen": 0.1, "is_at_edge": False, "num_runs": 0}
    replays = [one | {"group": "replay", "tuning": given} for one in fabricate(strategies=("replay_entropy",), seeds=2)]
    observations = observe(fabricate(seeds=2) + replays)
    assert "the same budget to choose its learning rate as all others" in text(observations, "tuning")


def test_rates_that_were_given_are_told():
    given = {"grid": [0.1], "losses": {}, "chosen": 0.1, "is_at_edge": False, "num_runs": 0}
    records = [one | {"tuning": given} for one in fabricate(seeds=2, datasets={"wine": DATASETS["wine"]})]
    assert "On wine · mlp the learning rate was given and not tuned" in text(observe(records), "tuning")


def test_a_small_noisy_lab_says_that_it_cannot_decide():
    found = on_examples(fabricate(noise=0.2, seeds=3, sizes=dict.fromkeys(STRATEGIES, 32))).sentence
    assert "This lab cannot decide it: only a loss lower by" in found
    hopeless = on_examples(fabricate(noise=0.5, seeds=2, sizes=dict.fromkeys(STRATEGIES, 32))).sentence
    assert "hardly any gain would have been seen. Run more seeds." in hopeless


def test_a_lab_that_decides_says_which_gain_it_would_have_seen():
    found = on_examples(fabricate(sizes=dict.fromkeys(STRATEGIES, 32)))
    size = median(one.compared.detectable for one in found.evidence)
    assert f"A loss lower by {100 * -math.expm1(-size):.1f} % or more would have been seen in four of" in found.sentence
    assert size < 0.05


def test_the_gain_that_would_have_been_seen_is_seen():
    # Planted is what a lab without an effect states; four of five labs must find it.
    same = dict.fromkeys(STRATEGIES, 32)
    options = {"strategies": ("constant", "linear", "entropy"), "sizes": same}
    size = median(one.compared.detectable for one in on_examples(fabricate(**options)).evidence)
    labs = [family(fabricate(**options, effects={"linear": math.expm1(-size)}, lab=lab)) for lab in range(1, 101)]
    assert 70 <= sum(found["loss", "linear"].is_shown for found in labs) <= 95


def test_a_planted_gain_is_found_with_its_sign_and_covered_by_its_interval():
    options = {"strategies": ("constant", "linear", "entropy"), "sizes": dict.fromkeys(STRATEGIES, 32)}
    num_found = num_covered = 0
    for lab in range(1, 201):
        records = fabricate(**options, effects={"linear": -0.1}, noise=0.03, lab=lab)
        found = family(records)["loss", "linear"]
        num_found += found.is_shown and found.mean < 0
        num_covered += found.low <= math.log(0.9) <= found.high
    assert num_found >= 195
    # 95 % of 200 is 190, give or take 3 (one standard deviation).
    assert 181 <= num_covered <= 199


def test_without_an_effect_at_most_one_lab_in_twenty_names_a_winner():
    options = {"strategies": ("constant", "linear", "entropy", "cyclical"), "sizes": dict.fromkeys(STRATEGIES, 32)}
    named = [
        {name for (_, name), one in family(fabricate(**options, lab=lab)).items() if one.is_shown and one.mean < 0}
        for lab in range(1, 201)
    ]
    assert sum(map(bool, named)) <= 10


def test_without_an_effect_parts_of_the_data_rarely_name_a_winner():
    options = {"strategies": ("constant", "linear", "entropy", "cyclical"), "sizes": dict.fromkeys(STRATEGIES, 32)}
    parts = ("type", "dimensionality", "size", "label noise", "model")
    named = [
        any(
            one.strategies
            for one in observe(fabricate(**options, models=("mlp", "cnn"), lab=lab))
            if one.topic in parts
        )
        for lab in range(1, 61)
    ]
    assert sum(named) <= 6


def family(records):
    return family_of(records, overall(records)).compared


def test_reasons_follow_from_the_records():
    # linear: fewer updates, and a batch that grows from 32 to 224 at one rate, while the baseline still learns.
    found = on_examples(fabricate(effects={"linear": 0.2, "exponential": -0.2}))
    assert "exponential: likely because the noise of its updates" in found.why
    assert "linear: likely because it made fewer updates (−71 %) while the loss of constant still fell" in found.why  # noqa: RUF001
    # The same sizes: nothing in the records differs.
    same = on_examples(fabricate(effects={"linear": -0.2}, sizes=dict.fromkeys(STRATEGIES, 32)))
    assert same.why == "linear: the records do not show why."
    assert on_examples(fabricate(sizes=dict.fromkeys(STRATEGIES, 32))).why == ""


def test_the_reason_for_equal_seconds_is_the_time_model():
    records = fabricate(strategies=("constant", "linear"), sizes={"linear": 64}, num_examples=12_288)
    (found,) = [one for one in headline(records) if "simulated seconds" in one.sentence]
    assert "The time model: 2 ms per update and 0.02 ms per example (a made-up accelerator)." in found.sentence
    # 0.6298 against 1.0138 seconds.
    assert found.why == (
        "linear: likely because the same examples cost it less simulated time at 2 ms per update and 0.02 ms per "
        "example (−38 %)."  # noqa: RUF001
    )


def test_every_sentence_about_a_strategy_rests_on_an_interval():
    observations = observe(fabricate(effects={"linear": 0.2, "exponential": -0.2}, models=("mlp", "logistic")))
    free = ("scope", "limits", "tuning")
    without = [one.sentence for one in observations if one.topic not in free and not one.evidence]
    assert all(sentence.endswith("see there.") for sentence in without)


def test_properties_that_vary_together_are_named():
    assert "these vary together: dimensionality and size;" in text(observe(fabricate()), "limits")
    sizes = {"a": (10, 100), "b": (10, 900), "c": (90, 100), "d": (90, 900)}
    crossed = {
        name: {"kind": "tabular", "dimension": dimension, "num_train": num_train}
        for name, (dimension, num_train) in sizes.items()
    }
    assert "No two of dimensionality, size and noise split" in text(observe(fabricate(datasets=crossed)), "limits")


def test_the_name_follows_the_data():
    for winner in ("linear", "noise_scale"):
        assert about(observe(fabricate(effects={winner: -0.2})), "overall")[0].strategies == (winner,)


def test_without_an_effect_no_strategy_is_called_better():
    observations = observe(fabricate())
    ranked = [one for one in observations if one.topic in RANKED and "see there" not in one.sentence]
    assert len(ranked) > 5
    assert all(one.strategies == () for one in ranked)
    assert "no strategy is shown to be better than constant" in text(observations, "overall")
    assert "could be chance" in text(observations, "overall")
    assert "0 came out better, 0 worse and 21 undecided" in text(observations, "no better")


def test_with_one_seed_nothing_is_concluded():
    observations = observe(fabricate(effects={"linear": -0.5}, seeds=1))
    assert {one.topic for one in observations} == {"scope", "overall", "tuning"}
    assert observations[1].sentence.startswith("Nothing can be concluded: every comparison has only one seed")
    assert not any(one.evidence or one.strategies for one in observations)
    assert not any("linear" in one.sentence for one in observations)


def test_two_equal_winners_are_a_tie():
    observations = observe(fabricate(effects={"exponential": -0.2, "linear": -0.2}))
    (overall,) = about(observations, "overall")
    assert set(overall.strategies) == {"exponential", "linear"}
    assert "It is a tie: " in overall.sentence
    assert "ahead of" not in overall.sentence


def test_the_test_behind_a_sentence_is_that_of_the_pairs():
    # Changes -0.1, -0.2, -0.3: mean -0.2, s = 0.1, t(0.975; 2) = 4.3027, half width 4.3027 * 0.1 / sqrt(3) = 0.24841,
    # and t = -3.4641 has p = 0.07418 with 2 degrees of freedom.
    (overall,) = about(observe(pairs({"linear": [-0.1, -0.2, -0.3]})), "overall")
    found = overall.evidence[0].compared
    assert (found.num_pairs, found.num_tests) == (3, 1)
    assert (found.mean, found.low, found.high) == pytest.approx((-0.2, -0.44841, 0.04841), abs=1e-5)
    assert found.p_corrected == pytest.approx(0.07418, abs=1e-5)
    # exp(-0.2) - 1 = -18 %, exp(-0.448) - 1 = -36 %, exp(0.0484) - 1 = 5.0 %.
    assert "−18 % (−36 to +5 %, n = 3, p = 0.074) for linear, could be chance" in overall.sentence  # noqa: RUF001


def test_p_values_are_corrected_for_all_strategies_of_a_question():
    changes = {f"s{place}": [-0.2 + 0.01 * place, -0.21, -0.19] for place in range(4)}
    evidence = about(observe(pairs(changes)), "overall")[0].evidence
    assert {one.compared.num_tests for one in evidence if "constant" in one.what} == {4}


def test_a_best_mean_that_could_be_chance_does_not_win():
    observations = observe(
        pairs({"wild": [-0.4, 0.2, -0.3, 0.1, -0.2], "steady": [-0.05, -0.051, -0.052, -0.05, -0.049]})
    )
    (overall,) = about(observations, "overall")
    assert overall.strategies[0] == "steady"
    assert "steady is shown to be better than constant" in overall.sentence
    assert "The mean of wild is lower still, but could be chance" in overall.sentence


def test_strategies_that_are_all_worse_are_called_worse():
    observations = observe(fabricate(effects=dict.fromkeys([name for name in STRATEGIES if name != "constant"], 0.3)))
    assert "all 8 strategies are worse than constant" in text(observations, "overall")
    assert "Every adaptive strategy is shown to be worse on digits · mlp" in text(observations, "no better")


def test_a_best_mean_on_the_wrong_side_is_called_no_gain():
    observations = observe(pairs({"linear": [0.1, 0.2, 0.3], "wild": [0.4, -0.2, 0.7]}))
    assert "even the best mean, +22 % (" in text(observations, "overall")
    assert "for linear, is not a gain." in text(observations, "overall")


def test_an_effect_that_depends_on_dimensions_is_found():
    def planted(_, properties):
        return -0.3 if properties["dimension"] > 1000 else 0.1

    observations = observe(fabricate(effects={"entropy": planted}))
    found = text(observations, "dimensionality")
    assert "The effect of entropy on the validation loss depends on the dimensionality of the data" in found
    assert "Not everywhere: its mean is worse than that of constant on digits · mlp" in text(observations, "overall")
    images, tables, texts = about(observations, "type")
    assert (images.strategies, tables.strategies, texts.strategies) == ((), (), ("entropy",))
    assert "Shown to be worse: entropy" in images.sentence


def test_an_effect_that_is_the_same_everywhere_depends_on_nothing():
    observations = observe(fabricate(effects={"entropy": -0.3}))
    for topic in ("dimensionality", "size", "label noise"):
        assert f"No strategy's effect is shown to depend on the {topic}" in text(observations, topic)


def test_the_same_runs_are_judged_once():
    # Of three data sets the one with most dimensions is the text: the two slices are the same.
    observations = observe(fabricate())
    assert about(observations, "dimensionality")[1].sentence == (
        "Data of more dimensions (4,096: python_functions): the same runs as texts; see there."
    )


def test_places_without_a_gain_are_named():
    observations = observe(fabricate(effects={"linear": lambda dataset, _: -0.3 if dataset == "wine" else 0.0}))
    assert "on 2 of 3 pairs of data set and model: digits · mlp and python_functions · mlp" in text(
        observations, "no better"
    )


def test_a_fixed_batch_size_that_wins_is_no_gain_from_adapting():
    observations = observe(fabricate(effects={"constant_large": -0.3}))
    assert "The batch size of constant_large never changes" in text(observations, "overall")
    assert "The batch size of linear" not in text(observe(fabricate(effects={"linear": -0.3})), "overall")


def test_fewer_updates_count_only_at_a_loss_that_is_shown_to_be_as_good():
    strategies = ("constant", "linear", "exponential")
    observations = observe(fabricate(effects={"exponential": 0.2}, strategies=strategies))
    (cost,) = about(observations, "cost")
    # exponential makes fewer updates than linear, but ends 20 % higher.
    assert cost.strategies == ("linear",)
    assert "linear is shown to end less than 5 % above the validation loss of constant" in cost.sentence
    assert "Its updates change by −" in cost.sentence  # noqa: RUF001
    noisy = observe(fabricate(strategies=strategies, noise=0.5))
    assert about(noisy, "cost")[0].strategies == ()
    assert "none is shown to need fewer updates" in text(noisy, "cost")


def test_a_replay_tells_reacting_from_growing():
    records = fabricate(effects={"entropy": -0.2}, strategies=("constant", "entropy", "noise_scale"))
    replays = fabricate(strategies=("replay_entropy", "replay_noise_scale"))
    observations = observe(records + [one | {"group": "replay"} for one in replays])
    (reacting,) = about(observations, "reacting")
    assert "entropy (−" in reacting.sentence  # noqa: RUF001
    assert "ends lower than a replay of the same sizes" in reacting.sentence
    assert "noise_scale cannot be told apart from a replay" in reacting.sentence


def test_failed_and_diverged_runs_are_counted_and_left_out():
    records = fabricate(
        strategies=("constant", "linear"), datasets={"wine": DATASETS["wine"]}, effects={"linear": -0.2}
    )
    records[5] = fail(records[5])
    records[6] = records[6] | {"final": records[6]["final"] | {"validation_loss": None}}
    observations = observe(records)
    assert "10 runs, of which 8 ended well" in text(observations, "scope")
    assert "2 runs failed or diverged: linear (2)" in text(observations, "limits")
    assert "no strategy has two pairs of runs left" in text(observations, "overall")
    assert "linear on wine · mlp (2 of 5 runs failed or diverged)" in text(observations, "overall")


def test_a_strategy_that_is_missing_somewhere_has_no_place():
    records = [one for one in fabricate() if (one["dataset"], one["strategy"]) != ("wine", "entropy")]
    assert "Not compared on all of it, so not ranked: entropy." in text(observe(records), "overall")


def test_strategies_without_a_common_seed_are_a_tie():
    records = [
        one
        for one in fabricate(effects={"linear": -0.3}, seeds=6, strategies=("constant", "linear", "exponential"))
        if one["strategy"] == "constant" or (one["strategy"] == "linear") == (one["seed"] < 3)
    ]
    assert "It is a tie: exponential cannot be told apart from it" in text(observe(records), "overall")


def test_a_winner_over_one_other_strategy_is_ahead_of_it():
    records = fabricate(effects={"linear": -0.3}, strategies=("constant", "linear", "exponential"))
    assert "and it is ahead of the other strategy." in text(observe(records), "overall")


@pytest.mark.parametrize(
    ("strategies", "reason"),
    [(("linear", "entropy"), "no run of the baseline constant"), (("constant",), "only constant has runs")],
)
def test_without_two_sides_nothing_is_concluded(strategies, reason):
    assert reason in text(observe(fabricate(strategies=strategies)), "overall")


def test_runs_over_different_numbers_of_examples_make_no_pair():
    records = fabricate(strategies=("constant",)) + fabricate(strategies=("linear",), num_examples=6000)
    assert effects(records, LOSS) == {}
    assert "no run makes a pair with one of constant" in text(observe(records), "overall")


def test_a_run_that_was_repeated_counts_once():
    runs = pairs({"linear": [-0.2, -0.21, -0.19]})
    repeated = [run("linear", 0, 99.0), *runs]
    assert [one.to_dict() for one in observe(repeated)] == [one.to_dict() for one in observe(runs)]


def test_updates_in_other_pieces_are_no_difference():
    # The last bits of a float32: the same sign in every seed, but nothing.
    (overall,) = about(observe(pairs({"memory_micro": [1e-8, 1.1e-8, 0.9e-8]})), "overall")
    assert overall.strategies == ()
    assert "no strategy is shown to be better" in overall.sentence


def test_an_early_fall_shows_in_the_mean_on_the_way():
    points = [{"examples": 0, "validation_loss": 2.0}, {"examples": 10, "validation_loss": 1.0}]
    early = [points[0], {"examples": 5, "validation_loss": 1.0}, points[1]]
    runs = [run("constant", 0, 1.0, curve=points), run("early", 0, 1.0, curve=early)]
    # (2 + 1) / 2 = 1.5 against (1.5 * 5 + 1 * 5) / 10 = 1.25.
    assert effects(runs, CONVERGENCE)[CellKey("wine", "mlp"), "early"][0] == pytest.approx(math.log(1.25 / 1.5))


def test_halves_are_split_at_the_lower_median():
    (dimensions, *_) = by_halves(fabricate(seeds=1))
    assert (dimensions.low.datasets, dimensions.high.datasets) == (["digits", "wine"], ["python_functions"])
    assert str(dimensions.low) == "data of fewer dimensions (13 to 64: digits and wine)"


def test_one_type_of_data_is_no_slice():
    assert by_kind(fabricate(datasets={"wine": DATASETS["wine"]})) == []


def test_luck_is_rarely_called_a_winner():
    rng = np.random.default_rng(0)
    cell = CellKey("wine", "mlp")
    part = Slice(topic="overall", label="wine", cells=(cell,))
    num_named = 0
    for _ in range(200):
        found = {(cell, f"s{place}"): dict(enumerate(rng.standard_normal(5))) for place in range(6)}
        num_named += bool(rank(found, part, LOSS).verdicts.better())
    # Either direction counts as shown at 5 % for all six together: about 2.5 % are called better, 5 of 200.
    assert num_named <= 12


def test_the_best_and_its_ties_hold_the_truly_best_one():
    rng = np.random.default_rng(0)
    cell = CellKey("wine", "mlp")
    part = Slice(topic="overall", label="wine", cells=(cell,))
    num_held = 0
    for _ in range(200):
        # s0 is truly best by half a standard deviation.
        found = {(cell, f"s{k}"): dict(enumerate(rng.standard_normal(5) - 0.5 * (k == 0))) for k in range(6)}
        ranking = rank(found, part, LOSS)
        num_held += "s0" in (ranking.verdicts.first.strategy, *ranking.ties)
    assert num_held >= 190


@settings(max_examples=10)
@given(st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(generator: random.Random):
    records = fabricate(effects={"linear": -0.1}, seeds=3)
    expected = [one.sentence for one in observe(records)]
    generator.shuffle(records)
    assert [one.sentence for one in observe(records)] == expected


# Runs that diverge


def test_a_strategy_that_diverges_in_half_of_its_seeds_does_not_win_by_the_others():
    records = [
        ending_at(run, None) if run["strategy"] == "linear" and run["seed"] > 2 else run
        for run in fabricate(effects={"linear": -0.3}, seeds=6, datasets=WINE, strategies=FEW)
    ]
    observations = observe(records)
    assert not any("linear" in one.strategies for one in observations)
    first = about(observations, "headline")[0]
    assert first.sentence.startswith("No strategy ended with a lower validation loss")
    assert "linear on wine · mlp (3 of 6 runs diverged)" in first.sentence


def test_a_seed_with_which_the_baseline_diverged_costs_no_strategy_its_place():
    records = [
        ending_at(run, None) if run["seed"] == 0 and run["strategy"] in ("constant", "linear") else run
        for run in fabricate(effects={"linear": -0.3}, seeds=6, datasets=WINE, strategies=FEW)
    ]
    first = headline(records)[0]
    assert first.strategies == ("linear",)
    assert "Of constant itself, wine · mlp (1 of 6 runs diverged); those seeds are left out." in first.sentence


def test_where_the_baseline_diverges_on_one_data_set_the_others_are_still_compared():
    records = [
        ending_at(run, None) if run["strategy"] == "constant" and run["dataset"] == "wine" else run
        for run in fabricate(effects={"linear": -0.3}, seeds=6, strategies=FEW)
    ]
    observations = observe(records)
    first = about(observations, "headline")[0]
    assert first.strategies == ("linear",)
    assert first.evidence[0].compared.num_cells == 2
    assert "has no two runs that ended well: wine · mlp (6 of 6 runs diverged)." in first.sentence
    assert "On 2 of 3 data sets (1 model), linear has the lowest" in text(observations, "overall")
    assert "cannot be compared" not in text(observations, "headline")


# Losses of zero


def test_a_loss_of_exactly_zero_is_the_best_loss_on_every_basis_and_the_sentence_says_what_it_counts_as():
    records = [
        ending_at(run, 0.0) if run["strategy"] == "linear" else run
        for run in fabricate(seeds=6, datasets=WINE, strategies=FEW)
    ]
    found = headline(records)
    assert found[0].strategies == ("linear",)
    assert "A loss of 0, or below 1e-08, counts as 1e-08 in quotients." in found[0].sentence
    [updates] = [one for one in found if "after the same number of updates" in one.sentence]
    assert "linear" in updates.strategies
    assert "Left out" not in text(found, "headline")


def test_losses_of_zero_on_both_sides_are_equal():
    records = [
        ending_at(run, 0.0) if run["strategy"] in ("constant", "linear") else run
        for run in fabricate(seeds=6, datasets=WINE, strategies=FEW)
    ]
    assert effects(records, LOSS)[CellKey("wine", "mlp"), "linear"] == dict.fromkeys(range(6), 0.0)


# Reading between validations


@pytest.mark.parametrize("loss", ["overfits", "drops_late"])
def test_equal_curves_over_updates_show_no_winner_after_equal_updates(loss):
    """All arms have the same loss after the same updates; only their batch sizes, and so their ends, differ."""
    num_wrong = sum(
        any(one.compared.is_shown for one in after_equal_updates(CURVES[loss], lab).evidence) for lab in range(40)
    )
    # 5 of 100 labs; more than 5 of 40 would come once in seventy times.
    assert num_wrong <= 5


def test_a_lower_curve_over_updates_is_shown_though_it_is_read_between_validations():
    found = after_equal_updates(lambda updates: 0.3 + 2 * math.exp(-updates / 60), 0, factors={"constant_large": 0.9})
    assert "constant_large" in found.strategies
    compared = next(one.compared for one in found.evidence if one.compared.strategy == "constant_large")
    # The interval holds the truth, and is wider than the reading may be wrong.
    assert compared.low < math.log(0.9) < compared.high
    assert 0 < 2 * compared.misreading < compared.high - compared.low


CURVES = {
    "overfits": lambda updates: 0.3 + 2 * math.exp(-updates / 40) + 0.0006 * updates,
    "drops_late": lambda updates: 0.3 + 2 / (1 + math.exp((updates - 150) / 12)),
}


def after_equal_updates(curve, lab, factors=None):
    """Return the finding of a lab whose arms are validated 8 times, as in the preset quick, along one curve."""
    sizes = {"constant": 32, "constant_large": 96, "linear": 64, "exponential": 48}
    rng = np.random.default_rng(lab)
    records = []
    for one in fabricate(seeds=6, datasets=WINE, strategies=FEW, sizes=sizes):
        size, noise = sizes[one["strategy"]], math.exp(0.01 * rng.standard_normal())
        noise *= (factors or {}).get(one["strategy"], 1.0)
        places = [(1500 * place, math.ceil(1500 * place / size)) for place in range(9)]
        one["curve"] = [
            point | {"examples": examples, "updates": updates, "validation_loss": noise * curve(updates)}
            for point, (examples, updates) in zip(one["curve"], places, strict=False)
        ]
        one["final"] |= {key: one["curve"][-1][key] for key in ("updates", "validation_loss")}
        records.append(one)
    [found] = [one for one in headline(records) if "after the same number of updates" in one.sentence]
    return found


def test_a_rate_beside_a_wall_is_told_next_to_its_strategy():
    tuning = make_tuning(0.1) | {"is_at_wall": True, "spacing": 1.78}
    records = [
        one | {"tuning": tuning} if one["strategy"] == "linear" else one
        for one in fabricate(effects={"linear": -0.3}, datasets=WINE, strategies=FEW)
    ]
    assert "its best rate lay beside one that diverged or doubled the loss, known to a factor of 1.8 on wine" in (
        headline(records)[0].sentence
    )


def test_what_could_be_chance_is_said_before_the_note_on_the_rate():
    tuning = make_tuning(0.1) | {"is_at_wall": True, "spacing": 1.78}
    records = [
        one | {"tuning": tuning} if one["strategy"] == "linear" else one
        for one in fabricate(effects={"linear": -0.02}, datasets=WINE, strategies=FEW, noise=0.1)
    ]
    sentence = headline(records)[0].sentence
    assert "No strategy ended with a lower validation loss" in sentence
    assert "), could be chance; its best rate lay beside one that diverged" in sentence
