"""Updates in pieces equal those of Keras itself on the whole batch: gradients, metrics, after out of memory too.

With SGD and a rate of 1, the change of a weight is its gradient.
"""

import numpy as np
import pytest

keras = pytest.importorskip("keras", reason="needs Keras; make test-keras runs this")

from keras import layers, ops  # noqa: E402

import batchwright as bw  # noqa: E402
from batchwright import size  # noqa: E402
from batchwright.errors import DoesNotFitError, UpdateMemoryError  # noqa: E402
from batchwright.integrations.keras import TensorFlowMemory, adaptive  # noqa: E402
from batchwright.integrations.keras._parts import state_variables  # noqa: E402
from batchwright.testing import FakeMemory  # noqa: E402

from . import models  # noqa: E402

pytestmark = pytest.mark.skipif(not models.CAN_CUT, reason=models.NEEDS_CUTTING)

REDUCTIONS = ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight"]
if models.BACKEND == "tensorflow":  # without a reduction Keras itself cannot train on torch
    REDUCTIONS.append(None)


def sgd(**options):
    return keras.optimizers.SGD(1.0, **options)


def both(make, micro_batch, *batch, **options):
    """Return a model after Keras's own update of a batch, one after ours, and the logs of both."""
    whole, cut = models.as_reference(make()), make()
    adaptive(cut, micro_batch=micro_batch, **options)
    logs = models.train(whole, *batch), models.train(cut, *batch)
    return whole, cut, *logs


def assert_same(whole, cut, logs, own_logs, *, tolerance=1e-6):
    assert models.difference(whole, cut) < tolerance
    assert models.steps(whole) == models.steps(cut)
    assert logs == pytest.approx(own_logs, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 6, 7, 8])
def test_a_batch_of_seven_in_pieces_of_any_size(micro_batch):
    def make():
        model = models.dense()
        models.compile(model, sgd(), "mse", metrics=["mae"])
        return model

    x, y = models.numbers(7, 3), models.numbers(7, 2, seed=1)
    whole, cut, *logs = both(make, micro_batch, x, y)
    assert_same(whole, cut, *logs)
    assert sum(cut.batchwright.report.sizes) == 7
    assert cut.batchwright.report.num_micro_batches == -(-7 // micro_batch)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction_with_and_without_sample_weights(reduction, weighted):
    def make():
        model = models.dense()
        models.compile(model, sgd(), keras.losses.MeanSquaredError(reduction=reduction), weighted_metrics=["mae"])
        return model

    batch = [models.numbers(7, 3), models.numbers(7, 2, seed=1), models.weights(7) if weighted else None]
    assert_same(*both(make, 3, *batch))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masked_tokens_and_token_weights(reduction, weighted):
    def make():
        model = models.tagger()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        models.compile(model, sgd(), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
        return model

    ids, labels, weights = models.token_batch()
    assert_same(*both(make, 3, ids, labels, weights if weighted else None))


@pytest.mark.parametrize("weights", [[0, 0, 0, 1, 2, 0, 0.5], [0] * 7, [-1, 1, -1, 1, 2, 0, 0.5]])
@pytest.mark.parametrize("reduction", ["mean", "mean_with_sample_weight"])
def test_pieces_whose_weights_are_zero_or_cancel_out(reduction, weights):
    def make():
        model = models.dense()
        models.compile(model, sgd(), keras.losses.MeanSquaredError(reduction=reduction), weighted_metrics=["mae"])
        return model

    batch = [models.numbers(7, 3), models.numbers(7, 2, seed=1), np.array(weights, "float32")]
    assert_same(*both(make, 3, *batch))


def test_a_piece_without_any_valid_token_adds_nothing():
    def make():
        model = models.tagger()
        models.compile(model, sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    ids, labels, _ = models.token_batch()
    ids[3:6] = 0
    assert_same(*both(make, 3, ids, labels))


def two_heads(*, loss_weights=None):
    """Return a model of a dict of inputs with a masked output per token and one per example."""
    keras.utils.set_random_seed(0)
    ids, extra = keras.Input((None,), dtype="int32", name="ids"), keras.Input((2,), name="extra")
    hidden = layers.Dense(6, "tanh")(layers.Embedding(20, 4, mask_zero=True)(ids))
    first = layers.Dense(5, name="tags")(hidden)
    second = layers.Dense(1, name="score")(layers.Concatenate()([layers.GlobalAveragePooling1D()(hidden), extra]))
    model = keras.Model({"ids": ids, "extra": extra}, {"tags": first, "score": second})
    losses = {"tags": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "score": "mse"}
    metrics = {"tags": ["accuracy"], "score": ["mae"]}
    models.compile(model, sgd(), losses, loss_weights=loss_weights, metrics=metrics, weighted_metrics=metrics)
    return model


@pytest.mark.parametrize("loss_weights", [None, {"tags": 0.3, "score": 2.0}])
@pytest.mark.parametrize("weighted", [False, True])
def test_nested_inputs_and_outputs_with_different_divisors(loss_weights, weighted):
    ids, labels, tokens = models.token_batch()
    x = {"ids": ids, "extra": models.numbers(7, 2)}
    y = {"tags": labels, "score": models.numbers(7, 1, seed=3)}
    sample_weight = {"tags": tokens, "score": models.weights(7)} if weighted else None
    assert_same(*both(lambda: two_heads(loss_weights=loss_weights), 3, x, y, sample_weight))


@keras.saving.register_keras_serializable("tests")
class Adding(layers.Layer):
    """Adds a loss: the mean or the sum of squares over its rows."""

    def __init__(self, reduce="mean", **options):
        super().__init__(**options)
        self.reduce = reduce

    def call(self, x):
        squares = ops.sum(ops.square(x), axis=-1)
        self.add_loss(0.1 * (ops.mean(squares) if self.reduce == "mean" else ops.sum(squares)))
        return x


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_regularizers_and_added_losses_count_once(reduce):
    def make():
        keras.utils.set_random_seed(0)
        model = models.dense(before=[layers.Dense(3), Adding(reduce)], regularizer="l2", activity="l1")
        models.compile(model, sgd(), "mse")
        return model

    x, y = models.numbers(7, 3), models.numbers(7, 2, seed=1)
    assert_same(*both(make, 3, x, y))


@keras.saving.register_keras_serializable("tests")
class AddingInTraining(Adding):
    """Adds its loss only in training, where a trial outside of training would not see it."""

    def call(self, x, training=False):
        return super().call(x) if training else x


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_losses_added_only_in_training_count_once(reduce):
    def make():
        keras.utils.set_random_seed(0)
        model = models.dense(before=[layers.Dense(3), AddingInTraining(reduce)])
        models.compile(model, sgd(), "mse")
        return model

    assert_same(*both(make, 3, models.numbers(7, 3), models.numbers(7, 2, seed=1)))


@keras.saving.register_keras_serializable("tests")
class Doubled(keras.losses.MeanSquaredError):
    """Does more than weighting and reducing."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return 2 * super().__call__(y_true, y_pred, sample_weight)


def test_a_loss_with_its_own_call_is_taken_as_it_is_while_batches_run_whole():
    def make():
        model = models.dense()
        models.compile(model, sgd(), Doubled())
        return model

    assert_same(*both(make, "auto", models.numbers(7, 3), models.numbers(7, 2, seed=1)))


def test_a_layer_frozen_between_updates_is_left_alone_from_the_next_one():
    def make():
        model = models.dense(before=[layers.Dense(3)])
        models.compile(model, sgd(), "mse")
        return model

    whole, cut = models.as_reference(make()), adaptive(make(), micro_batch=3)
    x, y = models.numbers(7, 3), models.numbers(7, 2, seed=1)
    for model in (whole, cut):
        models.train(model, x, y)
        model.layers[0].trainable = False
        models.train(model, x, y)
        models.train(model, x[:5], y[:5])
    assert models.difference(whole, cut) < 1e-5
    first = cut.layers[0].get_weights()[0]
    models.train(cut, x, y)
    assert (cut.layers[0].get_weights()[0] == first).all()


def test_frozen_weights_are_not_copied_for_every_update():
    model = models.dense(before=[layers.Dense(3), layers.Dropout(0.5)])
    model.layers[0].trainable = False
    models.compile(model, sgd(), "mse", metrics=["mae"])
    adaptive(model, micro_batch=3)
    models.train(model, models.numbers(7, 3), models.numbers(7, 2, seed=1))
    kept = {id(variable) for variable in state_variables(model)}
    assert not kept & {id(variable) for variable in model.layers[0].variables}
    assert kept == {id(variable) for variable in [*model.layers[1].variables, *model.metrics_variables]}


def test_added_losses_beside_a_masked_loss():
    def make():
        keras.utils.set_random_seed(0)
        ids = keras.Input((None,), dtype="int32")
        hidden = layers.Embedding(20, 8, mask_zero=True, embeddings_regularizer="l2")(ids)
        hidden = layers.Dense(8, "tanh", activity_regularizer="l2")(hidden)
        model = keras.Model(ids, layers.Dense(5)(hidden))
        models.compile(model, sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    ids, labels, weights = models.token_batch()
    assert_same(*both(make, 3, ids, labels, weights))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.AdamW(0.01, clipnorm=0.1),
        lambda: sgd(momentum=0.9, global_clipnorm=0.1),
        lambda: sgd(clipvalue=0.01),
        lambda: sgd(use_ema=True, ema_overwrite_frequency=2),
        lambda: sgd(gradient_accumulation_steps=2),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)),
    ],
)
def test_the_optimizer_sees_one_gradient_per_batch(make_optimizer):
    def make():
        model = models.dense()
        models.compile(model, make_optimizer(), "mse")
        return model

    whole, cut = models.as_reference(make()), adaptive(make(), micro_batch=3)
    for seed in range(5):
        batch = models.numbers(7, 3, seed=seed), models.numbers(7, 2, seed=seed + 9)
        models.train(whole, *batch)
        models.train(cut, *batch)
    assert models.difference(whole, cut) < 1e-5
    assert models.steps(whole) == models.steps(cut)


@pytest.mark.parametrize("micro_batch", ["auto", 3])
@pytest.mark.parametrize("options", [{}, {"clipnorm": 1e-3}])
@pytest.mark.parametrize("regularizer", [None, "l2"])
def test_rows_of_an_embedding_reach_the_optimizer_as_in_keras(micro_batch, options, regularizer):
    """On TensorFlow the gradient of an embedding is sparse, and Adam sees a token that comes twice as two rows."""

    def make():
        keras.utils.set_random_seed(0)
        ids = keras.Input((None,), dtype="int32")
        hidden = layers.Embedding(20, 4, mask_zero=True, embeddings_regularizer=regularizer)(ids)
        model = keras.Model(ids, layers.Dense(5)(hidden))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        models.compile(model, keras.optimizers.Adam(0.01, **options), loss)
        return model

    whole, cut = models.as_reference(make()), adaptive(make(), micro_batch=micro_batch)
    for length in (6, 6, 4):
        ids, labels, weights = models.token_batch(length=length)
        models.train(whole, ids, labels, weights)
        models.train(cut, ids, labels, weights)
    assert models.difference(whole, cut) < 1e-5


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_with_and_without_loss_scaling(policy):
    def make():
        keras.config.set_dtype_policy(policy)
        try:
            model = models.dense()
            models.compile(model, sgd(), "mse")
        finally:
            keras.config.set_dtype_policy("float32")
        return model

    x, y = models.numbers(7, 3), models.numbers(7, 2, seed=1)
    whole, cut, *logs = both(make, 3, x, y)
    assert models.difference(whole, cut) < 2e-2
    assert logs[0] == pytest.approx(logs[1], rel=2e-2)
    assert models.steps(cut) == 1
    if policy == "mixed_float16":
        assert type(cut.optimizer).__name__ == "LossScaleOptimizer"


def test_a_gradient_that_overflows_skips_the_update_as_keras_does():
    def make():
        model = models.dense()
        models.compile(model, keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=1e38), "mse")
        return model

    x, y = models.numbers(7, 3) * 1e3, models.numbers(7, 2, seed=1) * 1e6
    whole, cut, *_ = both(make, 3, x, y)
    assert models.difference(make(), cut) == 0
    assert float(cut.optimizer.dynamic_scale.numpy()) == float(whole.optimizer.dynamic_scale.numpy()) < 1e38


# Out of memory


def with_memory(memory, *, dropout=0.0):
    model = models.dense(before=[memory, layers.Dropout(dropout, seed=3)])
    models.compile(model, sgd(), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_out_of_memory_at_any_piece_leaves_the_update_and_counts_once(failing):
    x, y = models.numbers(7, 3), models.numbers(7, 2, seed=1)
    whole = with_memory(models.Memory())
    memory = models.Memory(fails=[failing])
    cut = adaptive(with_memory(memory), micro_batch=2)
    assert_same(whole, cut, models.train(whole, x, y), models.train(cut, x, y))
    # The pieces up to the failure, then the whole batch again, row by row.
    assert memory.rows == [2, 2, 2, 1][:failing] + [1] * 7
    assert cut.batchwright.report.ooms == 1
    assert models.steps(cut) == 1
    # Each example is counted once in the loss that Keras averages over the epoch.
    assert float(cut._loss_tracker.count.numpy()) == 7


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_run_after_a_failure_is_the_run_that_began_with_smaller_pieces(failing):
    x, y = models.numbers(8, 3), models.numbers(8, 2, seed=1)
    began = adaptive(with_memory(models.Memory(), dropout=0.5), micro_batch=2)
    failed = adaptive(with_memory(models.Memory(fails=[failing]), dropout=0.5), micro_batch=4)
    if failing > 2:  # in the second batch
        models.train(began, x, y)
    logs = models.train(began, x, y), models.train(failed, x, y)
    if failing > 2:
        began = adaptive(with_memory(models.Memory(), dropout=0.5), micro_batch=4)
        models.train(began, x, y)
        began.batchwright._sizes.micro_batch = 2
        logs = models.train(began, x, y), models.train(failed, x, y)
    assert logs[0] == logs[1]
    assert models.difference(began, failed) == 0


def test_a_whole_batch_is_halved_until_it_fits_and_the_limit_is_remembered():
    memory = models.Memory(most=2)
    model = adaptive(with_memory(memory))
    x, y = models.numbers(9, 3), models.numbers(9, 2, seed=1)
    models.train(model, x, y)
    assert model.batchwright.report.sizes == (2, 2, 2, 2, 1)
    assert model.batchwright.report.ooms == 2  # 9, 4
    models.train(model, x, y)
    assert model.batchwright.report.ooms == 0
    other = adaptive(with_memory(models.Memory(most=2)))
    other.batchwright.load_state_dict(model.batchwright.state_dict())
    models.train(other, x, y)
    assert other.batchwright.report == model.batchwright.report


def test_after_many_clean_updates_a_failure_is_forgotten():
    memory = models.Memory(fails=[1])
    model = adaptive(with_memory(memory))
    x, y = models.numbers(4, 3), models.numbers(4, 2, seed=1)
    models.train(model, x, y)
    state = model.batchwright.state_dict()
    model.batchwright.load_state_dict({**state, "num_clean": 511})
    models.train(model, x, y)
    models.train(model, x, y)
    assert model.batchwright.report.sizes == (4,)


def test_one_example_that_does_not_fit_leaves_the_model_as_it_was():
    model = adaptive(with_memory(models.Memory(most=0)))
    before = with_memory(models.Memory())
    with pytest.raises(DoesNotFitError, match="one example of padded length \\(3,\\) runs out of memory by itself"):
        models.train(model, models.numbers(4, 3), models.numbers(4, 2))
    assert models.difference(model, before) == 0
    assert models.steps(model) == 0


@pytest.mark.parametrize(("most", "fits"), [(3, True), (2, True), (1, False)])
def test_a_trial_that_runs_out_of_memory_tries_fewer_rows(most, fits):
    model = adaptive(with_memory(models.Memory(most=most, in_trials=True)), micro_batch=1)
    batch = models.numbers(6, 3), models.numbers(6, 2)
    if fits:
        models.train(model, *batch)
        assert model.batchwright.report.sizes == (1,) * 6
    else:
        with pytest.raises(DoesNotFitError, match="two examples run out of memory together even without gradients"):
            models.train(model, *batch)
        assert models.steps(model) == 0


def test_on_oom_raise_hands_the_error_on():
    model = adaptive(with_memory(models.Memory(most=2)), on_oom="raise")
    with pytest.raises(Exception, match=r"(?i)oom|out of memory"):
        models.train(model, models.numbers(4, 3), models.numbers(4, 2))
    assert models.steps(model) == 0


def test_an_error_of_another_kind_is_raised_as_it_is(monkeypatch):
    model = adaptive(with_memory(models.Memory()))
    monkeypatch.setattr(models.Memory, "check", lambda self, x: 1 / 0)
    with pytest.raises(Exception, match="division by zero"):
        models.train(model, models.numbers(4, 3), models.numbers(4, 2))


def test_an_optimizer_that_runs_out_of_memory_is_not_run_again(monkeypatch):
    model = adaptive(with_memory(models.Memory()), micro_batch=2)
    x, y = models.numbers(4, 3), models.numbers(4, 2)
    models.train(model, x, y)
    monkeypatch.setattr(model.batchwright._engine, "finish", lambda *_: models.out_of_memory())
    with pytest.raises(UpdateMemoryError, match="its update may be half done"):
        models.train(model, x, y)


# How large pieces are


@pytest.mark.parametrize(("length", "sizes"), [(2, (6, 1)), (3, (4, 3)), (6, (2, 2, 2, 1)), (12, (1,) * 7)])
def test_a_budget_counts_padded_tokens(length, sizes):
    model = adaptive(models.tagger(), micro_batch=bw.MaxTokens(12))
    models.compile(model, sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids, labels, _ = models.token_batch(length=length)
    models.train(model, ids, labels)
    assert model.batchwright.report.sizes == sizes


def test_a_budget_reads_the_lengths_that_the_user_gives():
    budget = bw.MaxCost(lambda num, lengths: num * lengths[:, 0] * lengths[:, 1], 24)
    model = adaptive(models.tagger(), micro_batch=budget, lengths=lambda x: (x.shape[1], 2))
    models.compile(model, sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids, labels, _ = models.token_batch()
    models.train(model, ids, labels)
    assert model.batchwright.report.sizes == (2, 2, 2, 1)


def test_an_example_over_the_budget_is_refused():
    model = adaptive(models.tagger(), micro_batch=bw.MaxTokens(5))
    models.compile(model, sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids, labels, _ = models.token_batch()
    with pytest.raises(bw.errors.BudgetError, match="one example of padded length \\(6,\\) is over MaxTokens\\(5\\)"):
        models.train(model, ids, labels)


def test_pieces_follow_the_memory_of_tensorflow():
    """The rule of the document: above 0.8 of memory pieces halve, below 0.48 they double."""
    rows = []
    memory = models.Memory()
    shares = {1: 0.12, 2: 0.24, 4: 0.46, 8: 0.92}
    info = lambda device: {"current": 0, "peak": int(1000 * shares[max(memory.rows[-8:])])}  # noqa: E731
    source = TensorFlowMemory("GPU:0", total_bytes=1000, get_info=info, reset=lambda device: memory.rows.clear())
    controller = bw.BatchSizeController(size.memory_driven(high=0.8, low=0.48), min_size=1, max_size=8)
    cut, whole = adaptive(with_memory(memory), micro_batch=controller, memory=source), with_memory(models.Memory())
    for seed in range(6):
        x, y = models.numbers(8, 3, seed=seed), models.numbers(8, 2, seed=seed + 9)
        models.train(cut, x, y)
        models.train(whole, x, y)
        rows.append(max(cut.batchwright.report.sizes))
    # Doubled while there is room; 8 was too large and is not tried again.
    assert rows == [1, 2, 4, 8, 4, 4]
    assert models.difference(cut, whole) < 1e-5


def test_fit_to_memory_of_the_stepper_decides_pieces_too():
    from batchwright.step import FitToMemory

    memory = FakeMemory(100)
    fit = FitToMemory(8, initial=8)
    model = adaptive(with_memory(models.Memory()), micro_batch=fit, memory=memory)
    memory.used_bytes = 90
    models.train(model, models.numbers(8, 3), models.numbers(8, 2))
    assert (model.batchwright.report.memory_fraction, fit.size) == (0.9, 4)


def test_out_of_memory_counts_as_full_memory_for_a_controller():
    controller = bw.BatchSizeController(size.memory_driven(), min_size=1, max_size=8, initial=8)
    model = adaptive(with_memory(models.Memory(most=4)), micro_batch=controller, memory=FakeMemory(100))
    models.train(model, models.numbers(8, 3), models.numbers(8, 2))
    assert model.batchwright.report.sizes == (4, 4)
    assert controller.size == 4


# Traces


@pytest.mark.skipif(models.BACKEND != "tensorflow", reason=models.NEEDS_TENSORFLOW)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_there_are_no_more_traces_than_shapes(jit_compile):
    sampler = bw.BatchSampler(
        np.random.default_rng(0).integers(1, 30, 60), bw.MaxTokens(120), grouping=bw.Buckets(3), seed=1
    )
    model = adaptive(models.tagger(), micro_batch=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    models.compile(model, sgd(), loss, jit_compile=jit_compile)
    shapes = set()
    for num, length in sampler.plan.shapes.tolist() * 2:
        shapes |= {(min(3, num - start), length) for start in range(0, num, 3)}
        ids, labels, _ = models.token_batch(num, length)
        models.train(model, ids, labels)
    assert model.batchwright.num_shapes == len(shapes)
    assert 1 <= model.batchwright.num_traces <= len(shapes) < len(sampler.plan)


@pytest.mark.skipif(models.BACKEND != "tensorflow", reason=models.NEEDS_TENSORFLOW)
def test_traces_after_compiling_again_and_of_other_types_are_bounded_too():
    model = adaptive(models.dense(), micro_batch=3)
    models.compile(model, sgd(), "mse")
    x, y = models.numbers(7, 3), models.numbers(7, 2)
    for kind in ("float32", "float64", "int32"):
        models.train(model, x.astype(kind), y)
    models.compile(model, sgd(), "mse")
    models.train(model, x, y)
    # Pieces of 3 and of 1, of three types, and again after compiling.
    assert model.batchwright.num_shapes == 8
    assert 4 <= model.batchwright.num_traces <= 8


@pytest.mark.skipif(models.BACKEND != "tensorflow", reason=models.NEEDS_TENSORFLOW)
def test_a_model_that_runs_eagerly_has_the_same_update_and_no_traces():
    def make():
        model = models.tagger()
        models.compile(model, sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True)
        return model

    ids, labels, weights = models.token_batch()
    whole, cut, *logs = both(make, 3, ids, labels, weights)
    assert_same(whole, cut, *logs)
    assert cut.batchwright.num_traces == 0
