"""What a chain remembers from before a rounding."""

from batchwright.size import (
    BatchSizeController,
    chain,
    clamp,
    linear,
    loss_driven,
    minimum,
    multiple_of,
    step_time,
)


# Expected: sizes within the bounds. Found: ZeroDivisionError in step_time: at epoch 4 linear asks for 0, multiple_of(8)
# makes it 8, and the chain then tells its policies that the unrounded size in force is 0.
def test_a_wish_of_nothing_behind_a_multiple_is_survived():
    policy = chain(minimum(linear(64, -16), step_time(100, every=3)), multiple_of(8))
    controller = BatchSizeController(policy, min_size=8, max_size=256)
    for epoch in range(7):
        for _ in range(8):
            controller.observe(epoch=epoch, batch_size=controller.size, seconds=0.001 * controller.size)
    assert controller.size == 8


def sizes_of(transform, losses):
    policy = chain(loss_driven(), transform)
    controller = BatchSizeController(policy, min_size=1, max_size=4096, initial=64)
    return [controller.observe(epoch=epoch, loss=loss) for epoch, loss in enumerate(losses, start=1)]


# Expected: multiple_of(64) is "at least 64", a bound, and a bound is not passed in secret (as with clamp(64, 4096) and
# the controller's min_size): a loss that falls again doubles 64 to 128 at once. Found: while the loss rose, the policy
# went down to 1 in secret, and the size stays at 64 for six more epochs in which the loss falls.
def test_the_smallest_multiple_is_not_passed_in_secret():
    losses = [1, 2, 3, 4, 5, 6, 7, 8, 7, 6, 5]
    assert sizes_of(multiple_of(64), losses) == sizes_of(clamp(64, 4096), losses)
