"""What cannot be exact in pieces is refused with the reason, and the model stays as it was."""

import subprocess
import sys

import pytest

keras = pytest.importorskip("keras", reason="needs Keras; make test-keras runs this")

from keras import layers, ops  # noqa: E402

from batchwright.errors import ArgumentError  # noqa: E402
from batchwright.integrations.keras import adaptive  # noqa: E402
from batchwright.integrations.keras._pieces import padded_lengths, take_rows  # noqa: E402

from . import models  # noqa: E402

needs_cutting = pytest.mark.skipif(not models.CAN_CUT, reason=models.NEEDS_CUTTING)
needs_tensorflow = pytest.mark.skipif(models.BACKEND != "tensorflow", reason=models.NEEDS_TENSORFLOW)


def refused(model, words, *batch, **options):
    """Train one batch in pieces of three, and expect a refusal that leaves weights, optimizer and metrics alone."""
    before = [weight.copy() for weight in model.get_weights()]
    adaptive(model, **{"micro_batch": 3, **options})
    batch = batch or (models.numbers(7, 3), models.numbers(7, 2, seed=1))
    with pytest.raises(ArgumentError, match=words):
        models.train(model, *batch)
    assert all((old == new).all() for old, new in zip(before, model.get_weights(), strict=True))
    assert models.steps(model) == 0


def compiled(model, loss="mse", **options):
    models.compile(model, "sgd", loss, **options)
    return model


def test_keras_without_its_backend_says_what_is_missing():
    code = f"import sys; sys.modules[{models.BACKEND!r}] = None; import batchwright.integrations.keras"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    words = (
        f"{models.BACKEND}, the backend of Keras, is not installed; run: pip install {models.BACKEND}, or set KERAS_B"
    )
    assert words in done.stderr.splitlines()[-1]


@pytest.mark.skipif(models.CAN_CUT, reason="the backend can")
def test_a_backend_that_cannot_run_pieces_is_refused():
    with pytest.raises(ArgumentError, match="not on jax: its training step is one compiled function"):
        adaptive(models.dense(), micro_batch=2)


@needs_cutting
def test_only_models_are_taken():
    with pytest.raises(ArgumentError, match=r"adaptive takes a keras\.Model, got Dense"):
        adaptive(layers.Dense(2))


@needs_cutting
@pytest.mark.parametrize("method", ["train_step", "compute_loss", "compute_metrics"])
def test_a_training_step_of_its_own_is_refused(method):
    kind = type("Own", (keras.Sequential,), {method: lambda self, *args, **options: None})
    with pytest.raises(ArgumentError, match=f"Own has its own {method}"):
        adaptive(kind([keras.Input((3,)), layers.Dense(2)]))


@needs_cutting
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch": 0}, "micro_batch, if not .*, must be a whole number of 1 or more, got 0"),
        ({"micro_batch": "all"}, "must be a whole number of 1 or more, got 'all'"),
        ({"on_oom": "skip"}, "on_oom must be one of 'split', 'raise'"),
        ({"added_losses": "max"}, "added_losses must be one of None, 'mean', 'sum'"),
        ({"batch_statistics": "ignore"}, "batch_statistics must be one of"),
    ],
)
def test_settings_are_checked(options, words):
    with pytest.raises(ArgumentError, match=words):
        adaptive(models.dense(), **options)


@needs_tensorflow
def test_several_steps_per_execution_are_refused():
    refused(compiled(models.dense(), steps_per_execution=2), "steps_per_execution is 2")


@needs_tensorflow
def test_a_strategy_of_tf_distribute_is_refused():
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = compiled(models.dense())
    refused(model, r"a tf\.distribute strategy divides each batch over replicas")


@pytest.mark.skipif(models.BACKEND != "torch", reason="a matter of torch")
def test_a_compiled_step_on_torch_is_refused():
    refused(compiled(models.dense(), jit_compile=True), "pass jit_compile=False")


@needs_cutting
def test_nothing_to_train_is_refused():
    model = models.dense()
    model.trainable = False
    refused(compiled(model), "there is nothing to train")


@needs_cutting
def test_batch_normalization_is_refused_unless_frozen_or_accepted():
    def make():
        return models.dense(before=[layers.BatchNormalization()])

    refused(compiled(make()), "normalises by the statistics of what runs at once")
    accepted = adaptive(compiled(make()), micro_batch=3, batch_statistics="per_piece")
    models.train(accepted, models.numbers(7, 3), models.numbers(7, 2, seed=1))
    frozen, whole = make(), make()
    for model in (frozen, whole):
        model.layers[0].trainable = False
        compiled(model)
    adaptive(frozen, micro_batch=3)
    for model in (frozen, whole):
        models.train(model, models.numbers(7, 3), models.numbers(7, 2, seed=1))
    assert models.difference(frozen, whole) < 1e-6
    assert models.difference(accepted, whole) > 1e-3


@needs_cutting
def test_batch_normalization_is_no_matter_while_batches_run_whole():
    whole, mine = (compiled(models.dense(before=[layers.BatchNormalization()])) for _ in range(2))
    adaptive(mine)
    for model in (whole, mine):
        models.train(model, models.numbers(7, 3), models.numbers(7, 2, seed=1))
    assert models.difference(mine, whole) < 1e-6


@keras.saving.register_keras_serializable("tests")
class Counting(layers.Layer):
    """Keeps a count of its calls in a weight."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1.0)
        return x


@needs_cutting
def test_a_layer_that_keeps_state_is_found_by_its_state():
    refused(compiled(models.dense(before=[Counting()])), "the forward pass changes .*, so pieces of a batch")


@needs_cutting
def test_a_stateful_recurrent_layer_is_refused():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3, 2), batch_size=7), layers.SimpleRNN(2, stateful=True)])
    refused(compiled(model), "is stateful", models.numbers(7, 3, 2), models.numbers(7, 2))


@keras.saving.register_keras_serializable("tests")
class Centred(layers.Layer):
    """Makes an example depend on the others of its batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


@needs_cutting
def test_outputs_that_depend_on_other_examples_are_refused():
    refused(compiled(models.dense(before=[Centred()])), "depend on the other examples of its batch")


@keras.saving.register_keras_serializable("tests")
class CentredInTraining(Centred):
    """Makes an example depend on the others of its batch only in training."""

    def call(self, x, training=False):
        return super().call(x) if training else x


@needs_cutting
def test_outputs_that_depend_on_other_examples_only_in_training_are_refused():
    refused(compiled(models.dense(before=[CentredInTraining()])), "depend on the other examples of its batch")


@keras.saving.register_keras_serializable("tests")
class Noisy(layers.Layer):
    """Draws at random outside of training too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator(0)

    def call(self, x):
        return x + keras.random.normal(ops.shape(x), seed=self.seed)


@needs_cutting
def test_a_model_that_draws_at_random_outside_of_training_is_refused():
    refused(compiled(models.dense(before=[Noisy()])), "the model draws at random outside of training too")


def ranked(y_true, y_pred):
    return ops.mean(ops.square(y_pred - ops.mean(y_true, axis=0, keepdims=True)), axis=-1)


def one_number(y_true, y_pred):
    return ops.mean(ops.square(ops.subtract(y_pred, y_true)))


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.losses.MeanSquaredError):
    """Does more than weighting and reducing."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return 2 * super().__call__(y_true, y_pred, sample_weight)


@needs_cutting
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (ranked, "the loss ranked of an example depends on the other examples"),
        (one_number, "the loss one_number returns one number per batch"),
        (Doubled(), "the loss mean_squared_error has its own __call__"),
        (keras.losses.Dice(), "the loss dice returns one number per batch|depends on the other"),
    ],
)
def test_losses_that_do_not_add_up_are_refused(loss, words):
    refused(compiled(models.dense(), loss), words)


@needs_cutting
def test_a_loss_of_one_number_per_batch_is_no_matter_while_batches_run_whole():
    whole, mine = (compiled(models.dense(), one_number) for _ in range(2))
    adaptive(mine)
    for model in (whole, mine):
        models.train(model, models.numbers(7, 3), models.numbers(7, 2, seed=1))
    assert models.difference(mine, whole) < 1e-6


@needs_tensorflow
def test_a_loss_without_reduction_beside_others_is_refused():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [layers.Dense(2)(inputs), layers.Dense(2)(inputs)])
    losses = [keras.losses.MeanSquaredError(reduction=None), "mse"]
    y = models.numbers(7, 2, seed=1)
    words = "a loss without reduction cannot be added to other losses"
    refused(compiled(model, losses), words, models.numbers(7, 3), [y, y])


@needs_cutting
def test_a_metric_that_averages_batches_is_refused():
    refused(compiled(models.dense(), metrics=[one_number]), r"one_number returns values of shape \(\) for 4 examples")


@keras.saving.register_keras_serializable("tests")
class MeanOfBatches(keras.metrics.Mean):
    """Averages the shares of right answers per batch, which are all 0 before a model has learned anything."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        hits = ops.equal(ops.argmax(y_pred, -1), ops.cast(ops.reshape(y_true, (-1,)), "int64"))
        super().update_state(ops.mean(ops.cast(hits, "float32")))


@needs_cutting
def test_a_metric_that_averages_batches_is_found_where_all_of_them_score_the_same():
    model = compiled(
        models.dense(outputs=5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[MeanOfBatches(name="own")],
    )
    x = models.numbers(7, 3)
    wrong = (ops.convert_to_numpy(model(x)).argmax(-1) + 1) % 5
    refused(model, r"the metric own is 0\.5 after a batch and 0\.33", x, wrong.astype("int32")[:, None])


@keras.saving.register_keras_serializable("tests")
class Tracking(layers.Layer):
    """Updates a metric of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.size = keras.metrics.Mean(name="size")

    def call(self, x):
        self.size.update_state(ops.mean(x))
        return x


@needs_cutting
def test_a_metric_that_a_layer_updates_is_refused():
    refused(compiled(models.dense(before=[Tracking()])), "the metric size is updated by a layer")


@keras.saving.register_keras_serializable("tests")
class Odd(layers.Layer):
    """Adds a loss that is neither a mean nor a sum over examples."""

    def call(self, x):
        self.add_loss(ops.max(ops.square(x)))
        return x


@needs_cutting
def test_an_added_loss_that_is_neither_mean_nor_sum_is_refused_unless_told():
    refused(compiled(models.dense(before=[Odd()])), "could not tell whether it is a mean or a sum")
    told = adaptive(compiled(models.dense(before=[Odd()])), micro_batch=3, added_losses="mean")
    models.train(told, models.numbers(7, 3), models.numbers(7, 2, seed=1))
    assert models.steps(told) == 1


@keras.saving.register_keras_serializable("tests")
class AddingInTraining(layers.Layer):
    """Adds a loss only in training."""

    def call(self, x, training=False):
        if training:
            self.add_loss(ops.sum(ops.square(x)))
        return x


@needs_cutting
def test_a_loss_added_only_in_training_is_refused_where_dropout_hides_its_kind_unless_told():
    def make():
        return compiled(models.dense(before=[layers.Dropout(0.5), AddingInTraining()]))

    refused(make(), "layers add 1 losses in training and 0 outside of it")
    told = adaptive(make(), micro_batch=3, added_losses="sum")
    models.train(told, models.numbers(7, 3), models.numbers(7, 2, seed=1))
    assert models.steps(told) == 1


@needs_tensorflow
def test_ragged_and_sparse_inputs_run_whole_and_are_not_cut():
    import tensorflow as tf

    x = tf.sparse.from_dense(models.numbers(7, 3))
    model = adaptive(compiled(keras.Sequential([keras.Input((3,), sparse=True), layers.Dense(2)])))
    models.train(model, x, models.numbers(7, 2))
    assert model.batchwright.report.sizes == (7,)
    other = compiled(keras.Sequential([keras.Input((3,), sparse=True), layers.Dense(2)]))
    refused(other, "a SparseTensor cannot be cut into micro-batches", x, models.numbers(7, 2))
    ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 3])
    assert padded_lengths(ragged, None) == (3,)
    with pytest.raises(ArgumentError, match="a RaggedTensor cannot be cut"):
        take_rows(ragged, 0, 2)


@needs_tensorflow  # on torch Keras refuses it first
def test_parts_of_different_numbers_of_rows_are_refused():
    refused(compiled(models.dense()), "the same number of rows", models.numbers(7, 3), models.numbers(6, 2))
