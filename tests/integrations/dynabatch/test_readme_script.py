"""A script on every documented feature gives the same kinds of results here as with dynabatch."""

import importlib

import pytest

from . import readme_script
from .packages import PACKAGES

STEPS = {"steps": True, "finite": True, "failed": False, "scaled": False}
EXPECTED = {
    "quick_start": {
        "class": "DynaBatchSampler",
        "covers": True,
        "len": True,
        "first": 4,
        "first_is_longest": True,
        "grows": True,
        "within_range": True,
        "attributes": [4, 0.9, False, True],
    },
    "built_in_loader": {
        "class": True,
        "keys": ["attention_mask", "input_ids", "texts"],
        "texts": True,
        "types": ["Tensor", "list"],
    },
    "first_blocks": {"all": True, "one_first": True, "built": True, "modes": [7, 7]},
    "generation_loop": {"rows": True, "flags": True, "types": True},
    "training_loader": {"all": True, "orders": True, "hardest_first": True},
    "other_modality": {"finite": True},
    "tuning": dict.fromkeys(["static", "fewer", "wide", "friendly", "even", "rough", "shuffled", "kept"], True),
    "precomputed": dict.fromkeys(["tokens", "words", "chars", "texts", "covers", "features", "refused"], True),
    "generation": {
        "fits": [False, True],
        "fallback": [True, True],
        "pieces": [4, 4, 1],
        "inputs": [(4, 2.0), (4, 2.0), (1, 2.0)],
        "merged": [[1, 1, 1], [1, 1, 1], [1, 1, 0]],
        "empty": None,
    },
    "training": {
        "name": "DynabatchSeq2SeqTrainer",
        "cached": True,
        "plain": STEPS,
        "accumulated": STEPS,
        "scaled": {**STEPS, "scaled": True},
        "split": {**STEPS, "failed": True},
        "skip": {**STEPS, "failed": True},
        "factor": 2.0,
        "baseline": 1.0,
    },
}


@pytest.mark.filterwarnings("default")  # dynabatch's own are not ours to answer for
@pytest.mark.parametrize("feature", readme_script.FEATURES, ids=lambda feature: feature.__name__)
@pytest.mark.parametrize("name", PACKAGES)
def test_every_documented_feature_gives_the_documented_kind_of_result(name, feature):
    assert feature(importlib.import_module(name)) == EXPECTED[feature.__name__]
