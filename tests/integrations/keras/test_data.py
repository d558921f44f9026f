"""Planned data in fit: every example once per epoch, static shapes, and epochs that resume where they stopped."""

import json
import sys

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="needs Keras; make test-keras runs this")

from keras import layers  # noqa: E402

import batchwright as bw  # noqa: E402
from batchwright import size  # noqa: E402
from batchwright.errors import ArgumentError, MissingDependencyError, StateMismatchError  # noqa: E402
from batchwright.integrations.keras import BatchSizeCallback, PlannedDataset, adaptive, pad_collate, to_tf_data  # noqa: E402

from . import models  # noqa: E402

needs_tensorflow = pytest.mark.skipif(models.BACKEND != "tensorflow", reason=models.NEEDS_TENSORFLOW)

NUM = 60
LENGTHS = np.random.default_rng(0).choice([4, 9, 17, 29], NUM)
# Every token of an example is its number + 1, so that what was trained can be read from what the loss saw.
EXAMPLES = [(np.full(length, index + 1), index) for index, length in enumerate(LENGTHS)]
GROUPINGS = [bw.Buckets(3), bw.WindowSort(batches_per_window=2), bw.InOrder()]
if models.BACKEND == "jax":  # compiles every shape for seconds
    GROUPINGS = [bw.Buckets(2), bw.WindowSort(batches_per_window=2)]


class Seen(keras.callbacks.Callback):
    """Notes which examples were trained, in which batch: a weight per example says by how much it was moved."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.batches, self.epochs = [], []
        self.before, self.stop_after = None, stop_after

    def on_epoch_begin(self, epoch, logs=None):
        self.before = self.table()
        self.epochs.append([])

    def table(self):
        return np.array(self.model.get_layer("table").get_weights()[0])[1:, 0]

    def on_train_batch_end(self, batch, logs=None):
        now = self.table()
        self.epochs[-1].append(sorted(np.flatnonzero(now != self.before).tolist()))
        self.before = now
        if self.stop_after is not None and len(self.epochs[-1]) == self.stop_after:
            raise KeyboardInterrupt


def joined(batches):
    return [index for batch in batches for index in batch]


def make():
    """Return a model with a number per example that moves whenever the example is trained."""
    keras.utils.set_random_seed(0)
    ids = keras.Input((None,), dtype="int32")
    values = layers.Embedding(NUM + 1, 1, embeddings_initializer="zeros", mask_zero=True, name="table")(ids)
    model = keras.Model(ids, layers.GlobalAveragePooling1D()(values))
    models.compile(model, keras.optimizers.SGD(1e-3), keras.losses.MeanSquaredError(reduction="sum"))
    return model


def collate(examples, lengths):
    x, _ = pad_collate(examples, lengths)
    return x, np.full((len(x), 1), 1e3, "float32")


def planned(grouping, *, seed=0):
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(90), grouping=grouping, seed=seed)
    return PlannedDataset(sampler, EXAMPLES, collate=collate)


def fit(data, *callbacks, model=None, **options):
    model = make() if model is None else model
    model.fit(data, callbacks=list(callbacks), shuffle=False, verbose=0, **options)
    return model


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_every_example_is_trained_once_per_epoch_in_the_order_of_the_plan(grouping, cut):
    if cut and not models.CAN_CUT:
        pytest.skip(models.NEEDS_CUTTING)
    data, seen = planned(grouping), Seen()
    model = adaptive(make(), micro_batch=2) if cut else make()
    fit(data, BatchSizeCallback(data), seen, model=model, epochs=3)
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(90), grouping=grouping)
    for epoch in seen.epochs:
        assert epoch == [sorted(batch) for batch in sampler]
        assert sorted(joined(epoch)) == list(range(NUM))
    assert models.steps(model) == sum(map(len, seen.epochs))
    assert data.sampler.epoch == 3


@pytest.mark.parametrize("grouping", GROUPINGS, ids=str)
@pytest.mark.parametrize("stop_after", [1, 4] if models.BACKEND == "torch" else [4])
def test_fit_resumes_in_mid_epoch_without_loss_or_repetition(grouping, stop_after):
    whole = Seen()
    data = planned(grouping)
    reference = fit(data, BatchSizeCallback(data), whole, epochs=3)

    data, first = planned(grouping), Seen(stop_after=None)
    callback, model = BatchSizeCallback(data), make()
    fit(data, callback, first, model=model, epochs=1)
    first.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):  # in the second epoch
        fit(data, callback, first, model=model, epochs=2, initial_epoch=1)
    state = json.loads(json.dumps(callback.state_dict()))

    data, rest = planned(grouping), Seen()
    callback = BatchSizeCallback(data)
    callback.load_state_dict(state)
    assert callback.epoch == 1
    fit(data, callback, rest, model=model, epochs=3, initial_epoch=callback.epoch)
    assert [*first.epochs[:1], first.epochs[1] + rest.epochs[0], *rest.epochs[1:]] == whole.epochs
    assert models.difference(reference, model) == 0
    assert models.steps(reference) == models.steps(model)


def test_an_epoch_that_was_trained_whole_is_not_run_again():
    data = planned(bw.Buckets(3))
    callback = BatchSizeCallback(data)
    fit(data, callback, epochs=1)
    state = callback.state_dict()
    assert (state["data"]["epoch"], state["data"]["position"]) == (1, 0)


def test_another_sampler_is_not_resumed():
    data = planned(bw.Buckets(3))
    state = BatchSizeCallback(data).state_dict()
    with pytest.raises(StateMismatchError, match="seed"):
        BatchSizeCallback(planned(bw.Buckets(3), seed=1)).load_state_dict(state)


def test_without_a_callback_an_epoch_is_the_current_one_of_the_sampler():
    data, seen = planned(bw.WindowSort()), Seen()
    fit(data, seen, epochs=2)
    assert sorted(joined(seen.epochs[0])) == list(range(NUM))
    assert seen.epochs[0] == seen.epochs[1]


def test_a_shuffling_fit_trains_every_example_but_cannot_be_resumed():
    data, seen = planned(bw.Buckets(3)), Seen()
    callback, model = BatchSizeCallback(data), make()
    model.fit(data, callbacks=[callback, seen], epochs=1, verbose=0, shuffle=True)
    assert sorted(joined(seen.epochs[0])) == list(range(NUM))
    seen.stop_after = len(seen.epochs[0]) - 1
    with pytest.raises(KeyboardInterrupt):
        model.fit(data, callbacks=[callback, seen], initial_epoch=1, epochs=2, verbose=0, shuffle=True)
    with pytest.raises(StateMismatchError, match="pass shuffle=False"):
        callback.state_dict()


def interrupted(grouping=None):
    """Return data, callback and model after two batches of the first epoch."""
    data, seen = planned(grouping or bw.Buckets(3)), Seen(stop_after=2)
    callback, model = BatchSizeCallback(data), make()
    with pytest.raises(KeyboardInterrupt):
        fit(data, callback, seen, model=model, epochs=2)
    return data, callback, model, seen.epochs[0]


def test_the_same_callback_goes_on_only_from_a_state():
    data, callback, model, first = interrupted()
    with pytest.raises(StateMismatchError, match=r"epoch 0 was interrupted after 2 of .* callback.load_state_dict"):
        fit(data, callback, model=model, epochs=1)
    callback.load_state_dict(callback.state_dict())
    rest = Seen()
    fit(data, callback, rest, model=model, epochs=1, initial_epoch=callback.epoch)
    assert sorted(joined(first + rest.epochs[0])) == list(range(NUM))


def test_an_epoch_that_was_begun_is_not_left_out():
    _, callback, model, _ = interrupted()
    data = planned(bw.Buckets(3))
    resumed = BatchSizeCallback(data)
    resumed.load_state_dict(callback.state_dict())
    with pytest.raises(StateMismatchError, match="fit begins with epoch 1, but the data stand within epoch 0"):
        fit(data, resumed, model=model, epochs=2, initial_epoch=1)


def test_an_epoch_of_two_workers_is_finished_by_one():
    def of_rank(rank):
        sampler = bw.BatchSampler(
            LENGTHS, bw.MaxTokens(90), grouping=bw.Buckets(3), world_size=2, rank=rank, remainder="spread"
        )
        data, seen = PlannedDataset(sampler, EXAMPLES, collate=collate), Seen(stop_after=2)
        callback = BatchSizeCallback(data)
        with pytest.raises(KeyboardInterrupt):
            fit(data, callback, seen, epochs=1)
        return seen.epochs[0], callback.state_dict()

    (first, state), (second, same) = of_rank(0), of_rank(1)
    assert state == same
    data, rest = planned(bw.Buckets(3)), Seen()
    callback = BatchSizeCallback(data)
    callback.load_state_dict(state)
    fit(data, callback, rest, epochs=1)
    assert sorted(joined(first + second + rest.epochs[0])) == list(range(NUM))


def test_workers_of_keras_are_refused():
    data = planned(bw.Buckets(3))
    with pytest.raises(ArgumentError, match="reads with 1 worker, got workers=4"):
        data.workers = 4
    with pytest.raises(ArgumentError, match="leave use_multiprocessing out"):
        data.use_multiprocessing = True
    assert (data.workers, data.use_multiprocessing) == (1, False)


def test_steps_per_epoch_would_cut_the_plan():
    data = planned(bw.Buckets(3))
    with pytest.raises(ArgumentError, match="steps_per_epoch=2 would cut planned epochs"):
        fit(data, BatchSizeCallback(data), epochs=1, steps_per_epoch=2)


def test_evaluate_takes_planned_data():
    data, model = planned(bw.Buckets(3)), make()
    models.compile(model, "sgd", "mse")
    model.get_layer("table").set_weights([1e3 + np.arange(NUM + 1)[:, None]])
    # An example gives 1000 + its number, and 1000 is asked for.
    exact = np.mean(np.arange(1, NUM + 1) ** 2.0)
    assert [model.evaluate(data, verbose=0) for _ in range(2)] == pytest.approx([exact] * 2)
    planned_order = [1e3 + index + 1 for batch in data.sampler for index in batch]
    assert model.predict(data, verbose=0)[:, 0].tolist() == planned_order


def test_early_stopping_stops_after_its_epoch():
    data, seen = planned(bw.WindowSort(batches_per_window=2)), Seen()
    stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=1e9)
    fit(data, BatchSizeCallback(data), stop, seen, epochs=5)
    assert len(seen.epochs) == 2
    assert data.sampler.epoch == 2


def test_class_weights_reach_planned_batches():
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(90), grouping=bw.Buckets(2))
    weights = []

    class Loss(keras.losses.MeanSquaredError):
        def __call__(self, y_true, y_pred, sample_weight=None):
            weights.append(sample_weight)
            return super().__call__(y_true, y_pred, sample_weight)

    def labelled(examples, lengths):
        x, y = pad_collate(examples, lengths)
        return x, y % 2

    model = make()
    models.compile(model, "sgd", Loss(), **({} if models.BACKEND == "jax" else {"run_eagerly": True}))
    data = PlannedDataset(sampler, EXAMPLES, collate=labelled)
    model.fit(data, class_weight={0: 1.0, 1: 3.0}, verbose=0, shuffle=False)
    assert all(weight is not None for weight in weights)


@pytest.mark.parametrize(
    ("make_data", "words"),
    [
        (lambda: PlannedDataset(bw.ResizableBatchSampler(4, 2), [1, 2, 3, 4]), "takes a BatchSampler"),
        (lambda: PlannedDataset(bw.BatchSampler([1, 2], bw.MaxTokens(4)), [1]), "1 examples, but the sampler plans 2"),
        (
            lambda: PlannedDataset(bw.BatchSampler([1, 2], bw.MaxTokens(4), grouping=bw.Packed(4)), [1, 2]),
            "joins examples in rows",
        ),
        (lambda: BatchSizeCallback(bw.ResizableBatchSampler(4, 2)), "the sampler feeds no dataset yet"),
    ],
)
def test_what_does_not_fit_together_is_refused(make_data, words):
    with pytest.raises(ArgumentError, match=words):
        make_data()


def test_examples_longer_than_planned_are_refused():
    with pytest.raises(ArgumentError, match="an example of length 3 does not fit the planned length 2"):
        pad_collate([[1, 2, 3]], (2,))


def test_vectors_of_one_size_are_not_padded():
    examples = [({"ids": ids, "age": np.ones(4)}, np.array([label])) for ids, label in EXAMPLES]
    data = PlannedDataset(bw.BatchSampler(LENGTHS, bw.MaxTokens(90), grouping=bw.Buckets(3)), examples)
    for x, y in data:
        assert x["ids"].shape[1] in (9, 17, 29)
        assert x["age"].shape == (len(y), 4)
        assert y.shape == (len(y), 1)
    with pytest.raises(ArgumentError, match=r"part \(1,\) of the examples is of no fixed size"):
        pad_collate([([1], [2, 3]), ([4], [5])], (3,), fixed={(1,)})


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[1, 2], [0.5]], [[1, 2], [0.5, 0]]),
        ([["a", "b"], ["abc"]], [["a", "b"], ["abc", ""]]),
        ([[2**40], [1]], [[2**40, 0], [1, 0]]),
    ],
)
def test_what_the_first_example_is_made_of_does_not_cut_the_others(rows, expected):
    assert pad_collate(rows, (2,)).tolist() == expected


def test_two_axes_and_dicts_are_padded_by_their_own_length():
    examples = [({"ids": [1, 2], "type": 0}, [1, 2, 3], [1.0, 1.0, 0.5]), ({"ids": [3], "type": 1}, [4], [1.0])]
    x, y, weight = pad_collate(examples, (2, 4))
    assert x["ids"].tolist() == [[1, 2], [3, 0]]
    assert x["type"].tolist() == [0, 1]
    assert y.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert weight.tolist() == [[1, 1, 0.5, 0], [1, 0, 0, 0]]


# tf.data


def test_without_tensorflow_it_is_named_by_its_own_name_since_no_extra_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(90), grouping=bw.Buckets(3))
    with pytest.raises(MissingDependencyError, match=r"tensorflow is not installed; run: pip install tensorflow$"):
        to_tf_data(sampler, EXAMPLES)


@needs_tensorflow
def test_buckets_give_static_lengths_and_equal_epochs():
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(90), grouping=bw.Buckets(3))
    data, seen = to_tf_data(sampler, EXAMPLES, collate=collate), Seen()
    lengths = {int(x.shape[1]) for x, _ in data}
    assert len(lengths) <= 3
    assert lengths == {length for (length,) in sampler.pad_to.shapes}
    sampler.set_epoch(0)
    fit(data, seen, epochs=3)
    assert [sorted(joined(epoch)) for epoch in seen.epochs] == [list(range(NUM))] * 3
    assert sampler.epoch == 3
    assert seen.epochs[0] != seen.epochs[1]


@needs_tensorflow
@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_endless_stream_loses_nothing_between_epochs_and_resumes_exactly(prefetch):
    def run(steps, *, state=None, model=None):
        controller = bw.BatchSizeController(size.linear(4, 3), min_size=2, max_size=20)
        sampler = bw.ResizableBatchSampler(NUM, controller)
        data, seen = to_tf_data(sampler, EXAMPLES, collate=collate), Seen()
        callback, model = BatchSizeCallback(sampler), make() if model is None else model
        if state is not None:
            callback.load_state_dict(json.loads(json.dumps(state)))
        fit(data.prefetch(prefetch) if prefetch else data, callback, seen, model=model, steps_per_epoch=steps)
        return joined(seen.epochs), callback.state_dict(), model

    whole, _, reference = run(28)
    first, state, model = run(11)
    rest, _, model = run(17, state=state, model=model)
    for batches in (whole, first + rest):  # every example once per epoch
        seen = joined(batches)
        epochs = [sorted(seen[start : start + NUM]) for start in range(0, len(seen) - NUM + 1, NUM)]
        assert epochs == [list(range(NUM))] * (len(seen) // NUM)
        assert len(epochs) >= 2
    if not prefetch:  # with it, the clock decides which batches were formed before the size changed
        assert first + rest == whole
        assert models.difference(reference, model) == 0
        # Batches grow from epoch to epoch.
        assert [len(batch) for batch in whole][:24] == [4] * 15 + [7] * 8 + [4]


@needs_tensorflow
def test_epochs_of_different_lengths_are_not_offered_as_one_pass():
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(90))
    with pytest.raises(ArgumentError, match="differ in their number of batches"):
        to_tf_data(sampler, EXAMPLES, collate=collate, endless=False)


@needs_tensorflow
def test_an_epoch_of_a_finite_pass_is_not_resumed_in_its_middle():
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(90), grouping=bw.Buckets(3))
    next(iter(sampler))
    with pytest.raises(StateMismatchError, match="fewer batches than Keras was told"):
        to_tf_data(sampler, EXAMPLES, collate=collate)
