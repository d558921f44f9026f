"""What policies are told in an adaptive trainer, where that is not what happened."""

import batchwright as bw
from batchwright import size

from ..dynabatch.failing import fail_above
from .trainers import make_model, make_trainer


# Expected: updates whose micro-batches were all left out have no loss (their entropy is NaN and holds the size). Found:
# the policy observes a loss of 0.0, where the model's is about 3.7: out of memory looks like a perfect model,
# loss_below and loss_driven grow the batch, and more does not fit. A micro-batch that is left out lowers the loss too.
def test_updates_that_ran_out_of_memory_do_not_look_like_a_loss_of_zero(tmp_path):
    model = make_model("t5")
    fail_above(model, 2, "backward")
    controller = bw.BatchSizeController(size.loss_below(1.0, per="step"), min_size=3, max_size=24)
    options = {"controller": controller, "on_oom": "skip", "budget": bw.MaxItems(3), "model": model}
    make_trainer("t5", tmp_path, **options)[0].train()
    assert controller.history == ()


# Expected: loss_below takes over after epoch 0 and decides for the first time at the end of epoch 1. Found: it decides
# at once, on the last update of epoch 0 alone, and says "loss 3.869 over the epoch".
def test_a_policy_that_takes_over_in_a_trainer_waits_for_an_epoch_of_its_own(tmp_path):
    policy = size.switch({0: size.constant(4), 1: size.loss_below(99.0)})
    controller = bw.BatchSizeController(policy, min_size=2, max_size=24)
    make_trainer("t5", tmp_path, controller=controller, num_train_epochs=2)[0].train()
    assert [decision.epoch for decision in controller.history] == [2]
