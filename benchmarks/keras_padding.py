"""`model.fit` on text of variable length: planned batches beside `bucket_by_sequence_length` of tf.data.

    KERAS_BACKEND=tensorflow python benchmarks/keras_padding.py [--examples 6000] [--rounds 5] [--smoke] [--output FILE]

The text is the functions of Python's standard library, cut into tokens; the model is a small convolutional classifier,
whose time follows padded tokens. All arms have the same budget of padded tokens per batch. tf.data gets its boundaries
twice: at quantiles of the lengths, as many as we have buckets, and at powers of two; a bucket holds budget // boundary
examples, and is padded to its longest example, or, "static", to its boundary. It shuffles with a buffer of all
examples, and both sides prefetch. Buckets of ours are static too, in rows as well: `Buckets(12)` has 12 shapes, and 12
buckets of tf.data have about twice as many, since each of them ends with a batch that is not full. So there are two
arms, one with 12 shapes and one with as many as static tf.data. `adaptive` is the model with `adaptive(model)`; every
batch fits and runs whole.

One epoch per arm warms up and traces. Then the arms take turns, an epoch each, in random order: medians of seconds, and
of the ratio to tf.data at quantiles in the same round, on the clock and of the processor. An epoch is measured inside
fit: when fit ends, TensorFlow waits for the thread that tunes its pipelines, for up to a minute, in all arms.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import batchwright as bw
from batchwright._stdlib_source import functions_in, python_files, stdlib_folder, tokenize
from batchwright.integrations.keras import BatchSizeCallback, PlannedDataset, adaptive

RESULT = Path(__file__).parent / "results" / "keras_padding.json"
VOCABULARY = 4096
MAX_LENGTH = 512
NUM_BUCKETS = 12
AGAINST = "tf.data, quantiles"
STATIC = "tf.data, quantiles, static"
ADAPTIVE = "PlannedDataset, Buckets, adaptive"
SMOKE = (AGAINST, ADAPTIVE)  # the arms of --smoke


def read_examples(num: int) -> list[tuple[np.ndarray, np.float32]]:
    """Return token ids of functions, and whether the body returns a value; 0 is padding."""
    names: dict[str, int] = {}
    found = []
    for function in (text for file in python_files(stdlib_folder()) for text in functions_in(file)):
        tokens = tokenize(function)[:MAX_LENGTH]
        ids = [names.setdefault(token, len(names) % (VOCABULARY - 1) + 1) for token in tokens if token != "return"]
        found.append((np.array(ids, dtype=np.int32), np.float32("return" in tokens)))
    order = np.random.default_rng(0).permutation(len(found))[:num]
    return [found[index] for index in order]


def make_model(*, is_adaptive: bool = False) -> Any:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(VOCABULARY, 32),
            layers.Conv1D(64, 5, padding="same", activation="relu"),
            layers.Conv1D(64, 5, padding="same", activation="relu"),
            layers.GlobalMaxPooling1D(),
            layers.Dense(1),
        ]
    )
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=False)
    return adaptive(model) if is_adaptive else model


def bucketed(examples: list[Any], boundaries: list[int], budget: int, *, is_static: bool) -> tf.data.Dataset:
    """Return tf.data's own buckets within a budget of padded tokens; static ones are padded to their boundary."""
    ids = tf.ragged.constant([x for x, _ in examples], dtype=tf.int32)
    labels = tf.constant([y for _, y in examples])
    bounds = [*boundaries, max(len(x) for x, _ in examples)]
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).shuffle(len(examples), seed=0)
    data = data.map(lambda x, y: (tf.identity(x), y), num_parallel_calls=tf.data.AUTOTUNE)  # rows of ids, not ragged
    batched = data.bucket_by_sequence_length(
        lambda x, y: tf.shape(x)[0],
        # A bucket holds lengths below its boundary; nothing is in the last one.
        bucket_boundaries=[bound + 1 for bound in bounds],
        bucket_batch_sizes=[*(max(1, budget // bound) for bound in bounds), 1],
        pad_to_bucket_boundary=is_static,
    )
    return batched.prefetch(tf.data.AUTOTUNE)


def boundaries_of(lengths: np.ndarray, kind: str) -> list[int]:
    if kind == "powers":
        return [bound for bound in (8, 16, 32, 64, 128, 256) if bound < lengths.max()]
    shares = np.linspace(0, 1, NUM_BUCKETS + 1)[1:-1]
    return sorted({int(bound) for bound in np.quantile(lengths, shares)} - {int(lengths.max())})


Epoch = Callable[[Any, int, Any], None]


class Stopwatch(keras.callbacks.Callback):
    """Measures an epoch from its beginning to its end, on the clock and of the processor."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def tf_arm(examples: list[Any], lengths: np.ndarray, budget: int, kind: str) -> tuple[Epoch, Iterator[Any]]:
    boundaries, is_static = boundaries_of(lengths, kind.split(",")[0]), kind.endswith("static")
    data = bucketed(examples, boundaries, budget, is_static=is_static)
    # Counted once: otherwise Keras would learn the number of batches from the first epoch of every call.
    counted = data.apply(tf.data.experimental.assert_cardinality(sum(1 for _ in data)))
    return lambda model, epoch, watch: model.fit(counted, verbose=0, callbacks=[watch], shuffle=False), (
        x.shape for x, _ in data
    )


def our_arm(examples: list[Any], lengths: np.ndarray, budget: int, grouping: Any) -> tuple[Epoch, Iterator[Any]]:
    data = PlannedDataset(bw.BatchSampler(lengths, bw.MaxTokens(budget), grouping=grouping), examples)
    callback = BatchSizeCallback(data)

    def run(model: Any, epoch: int, watch: Any) -> None:
        model.fit(data, callbacks=[watch, callback], initial_epoch=epoch, epochs=epoch + 1, verbose=0, shuffle=False)

    return run, (x.shape for x, _ in data)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    examples = read_examples(args.examples)
    lengths = np.array([len(x) for x, _ in examples])
    kinds = ("quantiles", "powers", "quantiles, static")
    tf_arms = {f"tf.data, {kind}": tf_arm(examples, lengths, args.budget, kind) for kind in kinds}
    rows = {name: padding_of(shapes, lengths, args.budget) for name, (_, shapes) in tf_arms.items()}
    ours = {
        "PlannedDataset, Buckets, same shapes": our_arm(
            examples, lengths, args.budget, bw.Buckets(rows[STATIC]["shapes"])
        ),
        "PlannedDataset, Buckets": our_arm(examples, lengths, args.budget, bw.Buckets(NUM_BUCKETS)),
        "PlannedDataset, WindowSort": our_arm(examples, lengths, args.budget, bw.WindowSort()),
        ADAPTIVE: our_arm(examples, lengths, args.budget, bw.Buckets(NUM_BUCKETS)),
    }
    arms = {name: arm for name, arm in (tf_arms | ours).items() if not args.smoke or name in SMOKE}
    models = {name: make_model(is_adaptive=name == ADAPTIVE) for name in arms}
    rows |= {name: padding_of(shapes, lengths, args.budget) for name, (_, shapes) in ours.items()}
    rows = {name: rows[name] for name in arms}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in arms}
    rng = random.Random(0)
    for turn in range(args.rounds + 1):
        for name in rng.sample(list(arms), len(arms)):
            watch = Stopwatch()
            arms[name][0](models[name], turn, watch)
            if turn:
                seconds[name].append(watch.seconds)
                cpu_seconds[name].append(watch.cpu_seconds)
    for name, row in rows.items():
        ratios = [mine / other for mine, other in zip(seconds[name], seconds[AGAINST], strict=True)]
        row |= {"seconds": statistics.median(seconds[name]), "ratio": statistics.median(ratios)}
        row |= {"ratio_least": min(ratios), "ratio_most": max(ratios)}
        cpu_ratios = [mine / other for mine, other in zip(cpu_seconds[name], cpu_seconds[AGAINST], strict=True)]
        row |= {"cpu_seconds": statistics.median(cpu_seconds[name]), "cpu_ratio": statistics.median(cpu_ratios)}
        row |= {"all_seconds": seconds[name], "all_cpu_seconds": cpu_seconds[name]}
    rows[ADAPTIVE]["traces"] = models[ADAPTIVE].batchwright.num_traces
    return {"machine": machine(), "settings": vars(args) | {"output": None}, "load": os.getloadavg(), "rows": rows}


def padding_of(shapes: Iterator[Any], lengths: np.ndarray, budget: int) -> dict[str, Any]:
    found = [tuple(shape) for shape in shapes]
    padded = sum(num * length for num, length in found)
    assert sum(num for num, _ in found) == len(lengths)
    return {
        "steps": len(found),
        "padding": 1 - int(lengths.sum()) / padded,
        "shapes": len(set(found)),
        "largest": max(num * length for num, length in found) / budget,
    }


def machine() -> dict[str, Any]:
    versions = {"keras": keras.__version__, "tensorflow": tf.__version__, "numpy": np.__version__}
    return {**versions, "python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}


def print_table(result: dict[str, Any]) -> None:
    names = f"{'steps':>6}{'padding':>9}{'shapes':>8}{'largest':>9}{'s/epoch':>9}"
    print(f"{'':<38}{names}  against {AGAINST}, clock and processor")
    for name, row in result["rows"].items():
        spread = f"{row['ratio']:.2f} ({row['ratio_least']:.2f} to {row['ratio_most']:.2f})"
        figures = f"{row['steps']:>6}{row['padding']:>9.1%}{row['shapes']:>8}{row['largest']:>9.2f}"
        print(f"{name:<38}{figures}{row['seconds']:>9.2f}  {spread}, {row['cpu_ratio']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=6000)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="few examples, one round, two arms")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.smoke:
        args.examples, args.rounds = 60, 1
    result = measure(args)
    args.output.write_text(json.dumps(result, indent=1, default=str) + "\n")
    print_table(result)


if __name__ == "__main__":
    main()
