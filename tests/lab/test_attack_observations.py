"""What the sentences say where runs diverge, end at zero, or are read between two validations."""

import copy
import math

import numpy as np
import pytest

from batchwright.lab.observations import observe
from tests.lab.fabricated import DATASETS, STRATEGIES, fabricate

WINE = {"wine": DATASETS["wine"]}
FEW = {name: STRATEGIES[name] for name in ("constant", "constant_large", "linear", "exponential")}


def headlines(records):
    return [one for one in observe(records) if one.topic == "headline"]


def ending_at(record, loss):
    record = copy.deepcopy(record)
    record["final"]["validation_loss"] = record["curve"][-1]["validation_loss"] = loss
    return record


def test_a_loss_of_exactly_zero_is_the_best_loss_and_not_left_out_in_silence():
    records = [
        ending_at(run, 0.0) if run["strategy"] == "linear" else run
        for run in fabricate(seeds=6, datasets=WINE, strategies=FEW)
    ]
    text = " ".join(one.sentence for one in observe(records))
    # Expected: linear, which ends at a loss of 0 with every seed, is better, or a sentence says that losses of 0 cannot
    # be compared as quotients. Found: "No strategy ended with a lower validation loss than a constant batch of 32".
    assert "loss of 0" in text or "losses above 0" in text or "linear" in headlines(records)[0].strategies


def test_the_reason_for_leaving_out_a_loss_of_zero_is_true():
    records = [
        ending_at(run, 0.0) if run["strategy"] == "linear" else run
        for run in fabricate(seeds=6, datasets=WINE, strategies=FEW)
    ]
    text = " ".join(one.sentence for one in headlines(records))
    # Found: "Left out: 6 pairs of linear (the shorter run ends before the first validation of the longer one)", though
    # the baseline has validations before that place; the reason is the loss of 0.
    assert "6 pairs of linear (the shorter run ends before the first validation" not in text


@pytest.mark.parametrize("loss", ["overfits", "drops_late"])
def test_equal_curves_over_updates_show_no_winner_after_equal_updates(loss):
    """All arms have the same loss after the same updates; only their batch sizes, and so their ends, differ."""
    shapes = {
        "overfits": lambda updates: 0.3 + 2 * math.exp(-updates / 40) + 0.0006 * updates,
        "drops_late": lambda updates: 0.3 + 2 / (1 + math.exp((updates - 150) / 12)),
    }
    sizes = {"constant": 32, "constant_large": 96, "linear": 64, "exponential": 48}
    num_wrong = 0
    for lab in range(12):
        rng = np.random.default_rng(lab)
        records = []
        for run in fabricate(seeds=6, datasets=WINE, strategies=FEW, sizes=sizes):
            noise, size = math.exp(0.01 * rng.standard_normal()), sizes[run["strategy"]]
            run["curve"] = [
                point
                | {
                    "examples": 1500 * place,
                    "updates": math.ceil(1500 * place / size),
                    "validation_loss": noise * shapes[loss](math.ceil(1500 * place / size)),
                }
                for place, point in enumerate(run["curve"][:9])  # 8 validations, as in the preset quick
            ]
            run["final"] |= {key: run["curve"][-1][key] for key in ("updates", "validation_loss")}
            records.append(run)
        [found] = [one for one in headlines(records) if "after the same number of updates" in one.sentence]
        num_wrong += any(one.compared.is_shown for one in found.evidence)
    # Expected: at most about 5 of 100 labs. Found: 12 of 12 for a loss that drops late (+13 % for constant_large) and
    # about half for one that overfits (−2 %): the error of reading between two validations is the same for every seed,
    # so it counts as certain, and no sentence says how large it may be.
    assert num_wrong <= 3
