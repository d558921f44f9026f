import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.lab._records import CellKey
from batchwright.lab.observations import observe
from batchwright.lab.observations._effects import CONVERGENCE, LOSS, effects
from batchwright.lab.observations._ranking import rank
from batchwright.lab.observations._slices import Slice, by_halves, by_kind

from .fabricated import DATASETS, STRATEGIES, fabricate, fail

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
    assert about(observations, "overall")[0].evidence[0].compared.num_pairs == 3


def test_a_strategy_that_is_missing_somewhere_has_no_place():
    records = [one for one in fabricate() if (one["dataset"], one["strategy"]) != ("wine", "entropy")]
    assert "Not run on all of it, so not ranked: entropy." in text(observe(records), "overall")


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
