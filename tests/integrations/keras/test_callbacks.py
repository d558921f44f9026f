"""BatchSizeCallback: a controller sees what an update was, and decides the next batch."""

import pytest

keras = pytest.importorskip("keras", reason="needs Keras; make test-keras runs this")

import batchwright as bw  # noqa: E402
from batchwright import size  # noqa: E402
from batchwright.errors import ArgumentError, MissingSignalError  # noqa: E402
from batchwright.integrations.keras import BatchSizeCallback, PlannedDataset, TensorFlowMemory, to_tf_data  # noqa: E402
from batchwright.testing import FakeMemory  # noqa: E402

from . import models  # noqa: E402

needs_tensorflow = pytest.mark.skipif(models.BACKEND != "tensorflow", reason=models.NEEDS_TENSORFLOW)

X, Y = models.numbers(20, 3), models.numbers(20, seed=1)
EXAMPLES = list(zip(X, Y, strict=True))


class Notebook:
    """A controller that notes what it observes."""

    size = 6

    def __init__(self):
        self.seen = []

    def observe(self, **figures):
        self.seen.append(figures)
        return self.size


def make():
    model = models.dense(outputs=1)
    models.compile(model, keras.optimizers.SGD(0.1), "mse")
    return model


def test_a_controller_observes_the_loss_of_the_batch_and_not_the_mean_of_the_epoch():
    data = PlannedDataset(bw.BatchSampler([3] * 20, bw.MaxItems(6), grouping=bw.InOrder()), EXAMPLES)
    notebook, ticks = Notebook(), iter(range(100))
    model, other = make(), make()
    callback = BatchSizeCallback(
        data, controller=notebook, memory=FakeMemory(100, used_bytes=30), clock=lambda: next(ticks)
    )
    model.fit(data, callbacks=[callback], epochs=2, verbose=0, shuffle=False)
    losses = [other.train_on_batch(X[i : i + 6], Y[i : i + 6]) for i in (0, 6, 12, 18)]
    steps = [figures for figures in notebook.seen if len(figures) > 1]
    assert [figures["batch_size"] for figures in steps] == [6, 6, 6, 2] * 2
    assert [figures["loss"] for figures in steps[:4]] == pytest.approx([float(loss) for loss in losses], rel=1e-4)
    assert {figures["memory_fraction"] for figures in steps} == {0.3}
    assert {figures["seconds"] for figures in steps} == {1}
    assert [figures["lr"] for figures in steps] == pytest.approx([0.1] * 8)
    assert [figures["epoch"] for figures in steps] == [0] * 4 + [1] * 4
    assert [figures for figures in notebook.seen if len(figures) == 1] == [{"epoch": 1}, {"epoch": 2}]


@needs_tensorflow
def test_a_new_size_applies_to_the_very_next_batch_within_an_epoch():
    lines = []
    policy = size.milestones({0: 2, 6: 5}, per="examples")
    controller = bw.BatchSizeController(policy, min_size=1, max_size=8)
    sampler = bw.ResizableBatchSampler(20, controller, shuffle=False)
    data = to_tf_data(sampler, EXAMPLES)
    notebook = []

    class Sizes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            notebook.append(int(self.model._loss_tracker.count.numpy()))

    callback = BatchSizeCallback(sampler, history=lines.append)
    make().fit(data, callbacks=[callback, Sizes()], steps_per_epoch=6, verbose=0, shuffle=False)
    assert notebook == [2, 4, 6, 11, 16, 20]
    assert len(lines) == 1
    assert "2 -> 5" in lines[0]


@needs_tensorflow
def test_the_loop_of_the_document_halves_above_80_percent_and_doubles_below_48():
    controller = bw.BatchSizeController(size.memory_driven(high=0.8, low=0.48), min_size=1, max_size=16, initial=2)
    sampler = bw.ResizableBatchSampler(20, controller, shuffle=False)
    sizes = []

    def info(device):
        sizes.append(controller.size)
        return {"current": 0, "peak": 110 * controller.size}  # 8 take 0.88 of the memory

    memory = TensorFlowMemory("GPU:0", total_bytes=1000, get_info=info, reset=lambda device: None)
    data = to_tf_data(sampler, EXAMPLES)
    callback = BatchSizeCallback(sampler, memory=memory)
    make().fit(data, callbacks=[callback], steps_per_epoch=6, verbose=0, shuffle=False)
    assert sizes == [2, 4, 8, 4, 4, 4]


@needs_tensorflow
def test_another_controller_than_that_of_the_sampler_is_refused():
    sampler = bw.ResizableBatchSampler(20, bw.BatchSizeController(size.constant(4), min_size=1, max_size=8))
    to_tf_data(sampler, EXAMPLES)
    with pytest.raises(ArgumentError, match="the sampler asks another controller"):
        BatchSizeCallback(sampler, controller=Notebook())


def test_a_policy_that_needs_memory_says_where_it_comes_from():
    controller = bw.BatchSizeController(size.memory_driven(), min_size=1, max_size=8)
    data = PlannedDataset(bw.BatchSampler([3] * 20, bw.MaxItems(6), grouping=bw.InOrder()), EXAMPLES)
    with pytest.raises(MissingSignalError, match="pass memory= to BatchSizeCallback"):
        make().fit(data, callbacks=[BatchSizeCallback(data, controller=controller)], verbose=0, shuffle=False)


def test_the_state_holds_the_controller():
    def parts():
        controller = bw.BatchSizeController(size.linear(4, 2), min_size=1, max_size=64)
        data = PlannedDataset(bw.BatchSampler([3] * 20, bw.MaxItems(6), grouping=bw.InOrder()), EXAMPLES)
        return controller, data, BatchSizeCallback(data, controller=controller)

    controller, data, callback = parts()
    make().fit(data, callbacks=[callback], epochs=2, verbose=0, shuffle=False)
    assert controller.size == 8
    other, _, resumed = parts()
    resumed.load_state_dict(callback.state_dict())
    assert other.size == 8
    assert resumed.epoch == 2


@needs_tensorflow
def test_tensorflow_without_a_limit_asks_for_the_memory():
    with pytest.raises(ArgumentError, match=r"TensorFlow does not say how much memory GPU:0 has; pass total_bytes="):
        TensorFlowMemory("GPU:0", get_info=lambda device: {}, reset=lambda device: None)
