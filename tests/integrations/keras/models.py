"""Small Keras models, batches for them, and layers that run out of memory where a test says so."""

import keras
import numpy as np
from keras import layers

BACKEND = keras.config.backend()
CAN_CUT = BACKEND in ("tensorflow", "torch")
NEEDS_CUTTING = f"exact updates run on TensorFlow and torch, this is {BACKEND}"
NEEDS_TENSORFLOW = f"a matter of TensorFlow, this is {BACKEND}"


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def weights(*shape, seed=1):
    return np.random.default_rng(seed).random(shape).astype("float32") + 0.1


def token_batch(num=7, length=6, seed=0):
    """Return token ids with 0 as padding, a label per token, and a weight per token."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 20, (num, length)).astype("int32")
    for row in ids:
        row[rng.integers(1, length + 1) :] = 0
    return ids, rng.integers(0, 5, (num, length)).astype("int32"), weights(num, length, seed=seed)


def dense(*, before=(), seed=0, outputs=2, regularizer=None, activity=None):
    """Return a network of two layers for 3 numbers, with more layers before it."""
    keras.utils.set_random_seed(seed)
    hidden = layers.Dense(4, "tanh", kernel_regularizer=regularizer, activity_regularizer=activity)
    return keras.Sequential([keras.Input((3,)), *before, hidden, layers.Dense(outputs)])


def tagger(seed=0):
    """Return a model with masked outputs: 5 logits per token, 0 is padding."""
    keras.utils.set_random_seed(seed)
    ids = keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(20, 8, mask_zero=True)(ids)
    hidden = layers.Dense(8, "tanh")(hidden)
    return keras.Model(ids, layers.Dense(5)(hidden))


def compile(model, *settings, jit_compile=False, **options):
    """Compile a model without XLA, which takes seconds per shape, unless a test asks for it."""
    model.compile(*settings, jit_compile=jit_compile, **options)


def as_reference(model):
    """Return a model that Keras itself trains; eagerly, since TensorFlow takes seconds to trace it."""
    if BACKEND == "tensorflow":
        model.run_eagerly = True
    return model


def out_of_memory():
    """Raise the out-of-memory error of the backend; TensorFlow makes a ResourceExhaustedError of Python's own."""
    if BACKEND == "torch":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory")
    raise MemoryError("OOM when allocating tensor")


@keras.saving.register_keras_serializable("tests")
class Memory(layers.Layer):
    """Runs out of memory in training calls of more than ``most`` rows, or in those whose numbers are in ``fails``.

    Calls that keep nothing for gradients, those of a trial, take no memory unless ``in_trials``.
    """

    def __init__(self, most=10**9, fails=(), in_trials=False, **options):
        super().__init__(**options)
        self.most, self.fails, self.in_trials = most, set(fails), in_trials
        self.num_calls, self.rows = 0, []

    def check(self, x):
        self.num_calls += 1
        self.rows.append(len(x))
        if len(x) > self.most or self.num_calls in self.fails:
            out_of_memory()
        return np.float32(0)

    def call(self, x, training=False):
        if not training:
            return x
        if BACKEND == "torch":
            import torch

            if not x.is_meta and (torch.is_grad_enabled() or self.in_trials):
                self.check(x)
            return x
        import tensorflow as tf

        if tf.executing_eagerly() and not self.in_trials:
            return x
        with tf.control_dependencies([tf.numpy_function(self.check, [x], tf.float32)]):
            return tf.identity(x)

    def compute_output_spec(self, x, training=False):
        return keras.KerasTensor(x.shape, x.dtype)


def difference(first, second):
    """Return the largest difference between the weights of two models."""
    pairs = zip(first.get_weights(), second.get_weights(), strict=True)
    return max(float(np.max(np.abs(np.asarray(a, "float64") - b), initial=0.0)) for a, b in pairs)


def steps(model):
    """Return how many updates the optimizer has made."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return int(optimizer.iterations.numpy())


def train(model, *batch):
    return model.train_on_batch(*batch, return_dict=True)
