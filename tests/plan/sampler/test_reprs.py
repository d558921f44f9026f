"""One line says what a sampler is: examples, budget, grouping, epoch and rank."""

import pytest
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright import size
from batchwright.integrations._size_log import SizeLog

LENGTHS = [4] * 10_000


def make_controller():
    return bw.BatchSizeController(size.linear(32, 8), min_size=16, max_size=64)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            lambda: bw.BatchSampler(LENGTHS, bw.MaxTokens(8192), rank=0, world_size=2),
            "BatchSampler(10,000 examples, MaxTokens(8192), WindowSort(batches_per_window=256), epoch 0, rank 0 of 2)",
        ),
        (
            lambda: bw.ResizableBatchSampler(10_000, 64, rank=1, world_size=2),
            "ResizableBatchSampler(10,000 examples, size 64, epoch 0, rank 1 of 2)",
        ),
        (
            lambda: bw.ResizableBatchSampler(10_000, make_controller(), lengths=LENGTHS, budget=bw.MaxTokens(99)),
            "ResizableBatchSampler(10,000 examples, size 32, MaxTokens(99), epoch 0, rank 0 of 1)",
        ),
        (
            lambda: bw.StreamBatcher(LENGTHS, length_of=int, budget=bw.MaxItems(9) & bw.MaxTokens(99)),
            "StreamBatcher(list, MaxItems(9) & MaxTokens(99), WindowSort(batches_per_window=256), buffer of 20,000, "
            "epoch 0)",
        ),
        (
            lambda: bw.regroup(DataLoader(LENGTHS, batch_size=32, collate_fn=list), make_controller()),
            "regroup(DataLoader, size 32, epoch 0, rank 0 of 1)",
        ),
        (make_controller, "BatchSizeController(linear(32, 8), min_size=16, max_size=64, size=32)"),
    ],
    ids=["planned", "resizable", "with lengths", "stream", "regroup", "controller"],
)
def test_a_sampler_is_one_line(made, text):
    assert repr(made()) == text


def test_the_line_follows_the_epoch():
    sampler = bw.BatchSampler([3, 4], bw.MaxItems(2), grouping=bw.Sorted())
    list(sampler)
    assert repr(sampler) == "BatchSampler(2 examples, MaxItems(2), Sorted(), epoch 1, rank 0 of 1)"


def test_showing_a_sampler_counts_no_size():
    log = SizeLog(make_controller())
    sampler = bw.ResizableBatchSampler(10, log)
    before = log.after(0)
    assert "size 32" in repr(sampler)
    assert log.after(0) == before
