"""The verdict in plain words: the same findings as the headline, without a word of statistics."""

import math

import pytest

from batchwright.lab.observations import observe
from batchwright.lab.report._verdict import in_words, verdict_of

from .fabricated import DATASETS, fabricate

WINE = {"wine": DATASETS["wine"]}
TWO = ("constant", "linear", "exponential")


def verdict(records):
    return verdict_of(records, observe(records))


def test_a_winner_is_named_with_how_sure_and_at_what_cost():
    found = verdict(fabricate(effects={"exponential": -0.2}, seeds=4))
    answers = dict(found.answers)
    assert found.lead == (
        "After the same examples, better than a constant batch of 32: exponential, whose loss ended 20 % lower."
    )
    assert answers["What was compared"].startswith("8 strategies for the batch size, each against a constant batch")
    assert "3 data sets, 1 model and 4 seeds. 108 of 108 runs ended well" in answers["What was compared"]
    assert "fewer than 1 of 1,000 labs like this one" in answers["How sure"]
    assert "With 95 % confidence its loss is between 19 % and " in answers["How sure"]
    assert "of 3 pairs of data set and model it was lower on all of them" in answers["How sure"]
    # 12,000 examples: 375 updates of 32, and 102 of the growing batch.
    assert answers["What it costs"].startswith("exponential needed 73 % fewer updates, ")
    assert found.exact[0].startswith("One strategy ended with a lower validation loss")
    assert found.sentences()[:2] == (found.lead, f"What was compared: {answers['What was compared']}")


def test_no_winner_is_no_proof_of_equality():
    found = verdict(fabricate(strategies=TWO, datasets=WINE, seeds=4))
    words = "After the same examples, no strategy is shown to be better than a constant batch of 32; the nearest is "
    assert found.lead.startswith(words)
    assert found.lead.endswith(", which could be chance.")
    assert "Chance alone can explain what" in dict(found.answers)["How sure"]
    assert "would have been seen in four of five labs" in dict(found.answers)["How sure"]


def test_where_all_are_worse_none_is_called_chance():
    found = verdict(fabricate(strategies=TWO, effects={"linear": 0.5, "exponential": 4.0}, datasets=WINE, seeds=4))
    words = (
        "After the same examples, no strategy is better than a constant batch of 32; the nearest is linear, whose loss"
    )
    assert found.lead.startswith(words)
    assert "chance" not in found.lead
    assert found.lead.endswith("Worse: exponential, whose loss ended 5 times as high.")
    assert "would show it as worse by chance" in dict(found.answers)["How sure"]


def test_a_fixed_size_that_wins_is_not_praised_for_adapting():
    found = verdict(fabricate(strategies=("constant", "constant_large"), effects={"constant_large": -0.3}, seeds=4))
    assert "The batch size of constant_large never changes, so this does not come from adapting it." in found.lead


def test_one_seed_concludes_nothing():
    found = verdict(fabricate(strategies=TWO, datasets=WINE, seeds=1))
    assert "Nothing can be concluded" in found.lead
    assert [question for question, _ in found.answers] == ["What was compared"]


@pytest.mark.parametrize("seed", range(3))
def test_no_word_of_statistics_is_left(seed):
    found = verdict(fabricate(effects={"linear": -0.1, "cyclical": 0.2}, seeds=3, lab=seed))
    text = " ".join([found.lead, *(answer for _, answer in found.answers)])
    assert not any(word in text for word in ("p <", "p =", "n =", "interval", "paired t"))


def test_changes_in_words_round_as_the_tables_do():
    assert in_words(math.log(0.995)) == "0.5 % lower"
    assert in_words(math.log(2.99)) == "199 % higher"
    assert in_words(math.log(3.01)) == "3 times as high"
