"""Everything else in ``fit`` stays as it is: callbacks, validation, weights, schedules, evaluation, saving."""

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="needs Keras; make test-keras runs this")

from keras import layers  # noqa: E402

from batchwright.integrations.keras import adaptive  # noqa: E402

from . import models  # noqa: E402

pytestmark = pytest.mark.skipif(not models.CAN_CUT, reason=models.NEEDS_CUTTING)

X, Y = models.numbers(22, 3), models.numbers(22, 2, seed=1)


def make(**options):
    model = models.dense()
    models.compile(model, keras.optimizers.SGD(0.1), "mse", metrics=["mae"], **options)
    return model


def fit(model, **options):
    settings = {"epochs": 3, "batch_size": 8, "shuffle": False, "verbose": 0, **options}
    return model.fit(options.pop("x", X), Y, **{name: value for name, value in settings.items() if name != "x"})


def assert_alike(**options):
    whole, cut = models.as_reference(make()), adaptive(make(), micro_batch=3)
    histories = [fit(model, **{name: value() if callable(value) else value for name, value in options.items()}).history
                 for model in (whole, cut)]  # fmt: skip
    assert models.difference(whole, cut) < 1e-6
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[0].items():
        assert histories[1][name] == pytest.approx(values, rel=1e-5), name
    return whole, cut


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"validation_data": (X[:5], Y[:5])},
        {"validation_split": 0.25},
        {"sample_weight": models.weights(22)},
        {"steps_per_epoch": 2},
        {"callbacks": lambda: [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]},
        {"callbacks": lambda: [keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=0, min_delta=10.0)]},
        {"callbacks": lambda: [keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)]},
        {"callbacks": lambda: [keras.callbacks.TerminateOnNaN()]},
    ],
)
def test_fit_gives_what_keras_gives(options):
    if "steps_per_epoch" in options:
        options = {**options, "epochs": 1}
    _, cut = assert_alike(**options)
    assert cut.batchwright.report.num_micro_batches > 1


def test_class_weights_count_as_in_keras():
    labels = (np.arange(22) % 3).astype("int32")
    histories = []
    fitted = []
    for micro_batch in (None, 3):
        model = models.dense(outputs=3)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        models.compile(model, keras.optimizers.SGD(0.1), loss, weighted_metrics=["accuracy"])
        models.as_reference(model) if micro_batch is None else adaptive(model, micro_batch=micro_batch)
        weights = {0: 1.0, 1: 5.0, 2: 0.2}
        run = model.fit(X, labels, class_weight=weights, batch_size=8, shuffle=False, verbose=0)
        histories.append(run.history)
        fitted.append(model)
    assert models.difference(*fitted) < 1e-6
    assert histories[0]["loss"] == pytest.approx(histories[1]["loss"], rel=1e-5)
    assert histories[0]["accuracy"] == pytest.approx(histories[1]["accuracy"])


def test_evaluate_and_predict_are_left_alone():
    whole, cut = assert_alike()
    assert cut.evaluate(X, Y, verbose=0) == pytest.approx(whole.evaluate(X, Y, verbose=0), rel=1e-5)
    assert np.allclose(cut.predict(X, verbose=0), whole.predict(X, verbose=0), atol=1e-6)


def test_compiling_again_keeps_pieces_and_takes_the_new_settings():
    whole, cut = assert_alike()
    for model in (whole, cut):
        models.compile(model, keras.optimizers.Adam(0.01), "mae")
        fit(model)
    assert models.difference(whole, cut) < 1e-5
    assert cut.batchwright.report.sizes == (3, 3)


def test_a_saved_model_is_an_ordinary_one(tmp_path):
    _, cut = assert_alike()
    cut.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert not hasattr(loaded, "batchwright")
    assert models.difference(cut, loaded) == 0
    adaptive(loaded, micro_batch=4)
    fit(loaded)
    fit(cut)
    assert models.difference(cut, loaded) < 1e-6


def test_a_clone_and_a_detached_model_train_as_keras_does():
    model = adaptive(make(), micro_batch=3)
    clone = keras.models.clone_model(model)
    assert not hasattr(clone, "batchwright")
    model.batchwright.detach()
    fit(model)
    assert not hasattr(model, "batchwright")
    whole = make()
    fit(whole)
    assert models.difference(model, whole) == 0


def test_calling_adaptive_again_replaces_the_settings():
    model = adaptive(adaptive(make(), micro_batch=3), micro_batch=5)
    fit(model)
    assert model.batchwright.report.sizes == (5, 1)


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """A model that is built by its first batch, without a training argument."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = layers.Dense(4, "tanh"), layers.Dense(2)

    def call(self, inputs):
        x, extra = inputs
        return self.second(self.first(x)) + extra


def test_a_subclassed_model_of_a_tuple_of_inputs():
    fitted = []
    for micro_batch in (None, 3):
        keras.utils.set_random_seed(0)
        model = Subclassed()
        models.compile(model, keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        models.as_reference(model) if micro_batch is None else adaptive(model, micro_batch=micro_batch)
        model.fit((X, Y), Y * 2, batch_size=8, shuffle=False, verbose=0, epochs=2)
        fitted.append(model)
    assert models.difference(*fitted) < 1e-6
    assert fitted[1].batchwright.report.sizes == (3, 3)


def test_a_list_of_outputs_and_of_losses():
    fitted = []
    for micro_batch in (None, 3):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3,))
        hidden = layers.Dense(4, "tanh")(inputs)
        model = keras.Model(inputs, [layers.Dense(2, name="a")(hidden), layers.Dense(2, name="b")(hidden)])
        models.compile(
            model, keras.optimizers.SGD(0.1), ["mse", "mae"], loss_weights=[1.0, 0.3], metrics=[["mae"], ["mse"]]
        )
        if micro_batch is not None:
            adaptive(model, micro_batch=micro_batch)
        # Equal batches: TensorFlow forgets the weight of a batch in the logs of single losses once sizes vary.
        run = model.fit(X[:16], [Y[:16], Y[:16] + 1], batch_size=8, shuffle=False, verbose=0, epochs=2)
        fitted.append((model, run.history))
    assert models.difference(fitted[0][0], fitted[1][0]) < 1e-6
    for name, values in fitted[0][1].items():
        assert fitted[1][1][name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.skipif(models.BACKEND != "tensorflow", reason=models.NEEDS_TENSORFLOW)
@pytest.mark.parametrize("options", [{"jit_compile": True}, {"run_eagerly": True}])
def test_fit_compiled_by_xla_and_run_eagerly(options):
    whole, cut = make(**options), adaptive(make(**options), micro_batch=3)
    for model in (whole, cut):
        fit(model)
    assert models.difference(whole, cut) < 1e-6


@pytest.mark.skipif(models.BACKEND != "tensorflow", reason=models.NEEDS_TENSORFLOW)
def test_a_tf_data_pipeline_as_it_is():
    import tensorflow as tf

    whole, cut = make(), adaptive(make(), micro_batch=3)
    for model in (whole, cut):
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), epochs=2, verbose=0, shuffle=False)
    assert models.difference(whole, cut) < 1e-6
    assert models.steps(whole) == models.steps(cut) == 6
