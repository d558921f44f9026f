"""``adaptive(Trainer)`` with a FitToMemory: how many examples run at once follows the memory in use."""

import pytest
import torch

from batchwright.errors import ArgumentError
from batchwright.step import FitToMemory, MemoryMonitor
from batchwright.testing import FakeMemory

from .trainers import check, make_trainer

torch.set_num_threads(1)


class Filling:
    """A model whose forward fills a memory: 100 bytes, and 100 more per row."""

    def __init__(self, model, memory):
        self.rows = []
        forward = model.forward

        def filled(*args, **inputs):
            num = len(inputs["input_ids"])
            if torch.is_grad_enabled():
                self.rows.append(num)
                memory.used_bytes += 100 * num
                memory.used_bytes -= 100 * num
            return forward(*args, **inputs)

        model.forward = filled


def test_rows_that_run_at_once_follow_memory_and_the_update_stays_exact(tmp_path):
    fit, memory = FitToMemory(8, initial=1), FakeMemory(1000, used_bytes=100)
    trainer, seen, gradients = make_trainer(
        "llama", tmp_path, micro_batch=fit, memory=MemoryMonitor(source=memory), eval_budget=None
    )
    filling = Filling(trainer.model, memory)
    trainer.train()
    check("llama", trainer, gradients, seen)
    assert max(filling.rows) <= 7  # 8 rows would take 0.9 of the memory
    assert fit.size > 1
    assert filling.rows[0] == 1
    assert trainer._batching.updates.memory_state()["memory"]["size"] == fit.size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 8}, "micro_batch must be a FitToMemory or None, got 8"),
        ({"micro_batch": FitToMemory(8), "on_oom": "raise"}, "which on_oom='raise' does not allow"),
    ],
)
def test_other_sizes_are_refused(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        make_trainer("llama", tmp_path, **options)
