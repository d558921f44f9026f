"""Ask dynabatch's own regressor about the measured pairs; run it where dynabatch is installed (`make setup` does).

    python benchmarks/memory_prior/evaluate_dynabatch.py predictions.json
    python benchmarks/memory_prior/fit.py --dynabatch predictions.json

Every item of a measured batch has the padded length, so maxima and means are the length. It also wants words and
characters, which a batch of token ids does not have: three words to four tokens and five characters to a word.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from rows import load_pairs

WORDS_A_TOKEN = 0.75


def features(reference: np.ndarray, batch: np.ndarray) -> dict[str, np.ndarray]:
    """Return its ten features: of the reference (x), of the batch (y), and quotients (diff)."""
    items, lengths = batch[:, 0] / reference[:, 0], batch[:, 1] / reference[:, 1]
    words = np.maximum(1, np.floor(batch[:, 1] * WORDS_A_TOKEN)) / np.maximum(
        1, np.floor(reference[:, 1] * WORDS_A_TOKEN)
    )
    return {
        "batch_size_x": reference[:, 0],
        "batch_size_y": batch[:, 0],
        "batch_size_diff": items,
        "token_max_diff": lengths,
        "token_mean_diff": lengths,
        "token_sum_diff": items * lengths,
        "word_max_diff": words,
        "word_mean_diff": words,
        "word_sum_diff": items * words,
        "char_sum_diff": items * words,
    }


def main() -> None:
    import pandas

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file of predictions, for fit.py --dynabatch")
    output = parser.parse_args().output

    from dynabatch import regressor

    model = load_model(regressor)
    predictions = {}
    for task in ("train", "generate"):
        pairs = load_pairs(task)
        table = pandas.DataFrame(features(pairs.reference, pairs.batch))
        predictions[task] = np.asarray(model.predict(table[list(model.feature_names_in_)])).tolist()
    output.write_text(json.dumps(predictions))


def load_model(regressor: object) -> object:
    """Return its XGBoost model from the package's file."""
    from xgboost import XGBRegressor

    (path,) = Path(regressor.__file__).parent.rglob("regressor.ubj")  # type: ignore[attr-defined]
    model = XGBRegressor()
    model.load_model(path)
    return model


if __name__ == "__main__":
    main()
