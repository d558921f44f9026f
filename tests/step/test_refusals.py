"""What Stepper refuses while it runs, in one process: each error says why."""

from collections import UserDict

import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import Stepper, huggingface_loss

torch.set_num_threads(1)


def make_stepper(loss_fn, *, model=None, **options):
    model = nn.Linear(2, 1).double() if model is None else model
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)


def mean_squares(model, x):
    return model(x).square().sum(), len(x)


def rows(num=4):
    return torch.ones(num, 2).double()


def test_a_loss_function_that_runs_backward():
    def loss_fn(model, x):
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        return loss, len(x)

    with pytest.raises(ArgumentError, match="loss_fn ran a backward pass of its own"):
        make_stepper(loss_fn).step(rows())


def test_a_loss_function_that_registers_hooks():
    def loss_fn(model, x):
        model.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return mean_squares(model, x)

    with pytest.raises(ArgumentError, match=r"loss_fn registered a hook on a parameter of shape \(1, 2\)"):
        make_stepper(loss_fn).step(rows())


def halve_tensor(batch):
    batch["more"]["x"]["ids"].div_(2)
    return batch["more"]["x"]["ids"]


def halve_array(batch):
    batch["pixels"] /= 2
    return torch.from_numpy(batch["pixels"])


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda: {"more": {"x": {"ids": rows()}}}, halve_tensor),
        (lambda: {"pixels": rows().numpy()}, halve_array),
    ],
)
def test_a_loss_function_that_changed_its_batch_cannot_run_again(make, read):
    def loss_fn(model, batch):
        x = read(batch)
        if len(x) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return mean_squares(model, x)

    with pytest.raises(ArgumentError, match="loss_fn or collate changed the batch in place, so it cannot run again"):
        make_stepper(loss_fn).step(make())


def test_a_collate_that_changed_its_examples_cannot_run_again():
    def collate(examples):
        for example in examples:
            example["ids"].append(9)  # an end token
        return torch.tensor([example["ids"] for example in examples], dtype=torch.float64)

    def loss_fn(model, x):
        if len(x) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return model(x[:, -2:]).square().sum(), len(x)

    with pytest.raises(ArgumentError, match="loss_fn or collate changed the batch in place, so it cannot run again"):
        make_stepper(loss_fn, collate=collate).step([{"ids": [1, 2]} for _ in range(4)])


def test_a_loss_function_that_calls_the_stepper():
    steppers = []

    def loss_fn(model, x):
        steppers[0].step(x)
        return mean_squares(model, x)

    steppers.append(make_stepper(loss_fn))
    with pytest.raises(ArgumentError, match="a Stepper runs one batch at a time"):
        steppers[0].step(rows())


def test_a_weight_that_depends_on_parameters():
    with pytest.raises(ArgumentError, match="the weight depends on trainable parameters"):
        make_stepper(lambda model, x: (model(x).sum(), model.weight.sum())).step(rows())


def test_batches_of_one_update_whose_weights_are_too_far_apart_for_float16():
    model = nn.Linear(2, 1).half()
    stepper = make_stepper(lambda net, x: (net(x).sum(), float(x[:, 0].sum())), model=model, micro_batch=1)
    stepper.accumulate(torch.ones(2, 2).half())
    with pytest.raises(ArgumentError, match="too far apart for one scale of the gradients; give total_weight="):
        stepper.accumulate(1000 * torch.ones(2, 2).half())


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0])
def test_a_rule_whose_factor_is_no_rate_changes_nothing(factor):
    model = nn.Linear(2, 1).double()
    before = model.weight.detach().clone()
    stepper = make_stepper(mean_squares, model=model, lr_rule=lambda size, base: factor, base_size=4)
    with pytest.raises(ArgumentError, match="the factor of the learning rate"):
        stepper.step(rows())
    assert torch.equal(model.weight, before)


def test_a_container_whose_attributes_may_belong_to_examples():
    class Bag(UserDict):
        def __init__(self, data, more=None):
            super().__init__(data)
            self.more = more

    stepper = make_stepper(lambda model, bag: mean_squares(model, bag["x"]), micro_batch=2)
    with pytest.raises(ArgumentError, match="a Bag holds 'more' besides its fields"):
        stepper.step(Bag({"x": rows()}, more=torch.ones(4)))


def test_a_count_of_tokens_per_row():
    with pytest.raises(ArgumentError, match=r"tokens_of\(batch\) must be a whole number of 0 or more, got tensor"):
        make_stepper(mean_squares, tokens_of=lambda batch: torch.ones(len(batch))).step(rows())


def test_an_optimizer_of_another_model():
    other = nn.Linear(2, 1).double()
    stepper = Stepper(nn.Linear(2, 1).double(), torch.optim.SGD(other.parameters(), lr=0.1), mean_squares)
    with pytest.raises(ArgumentError, match="the loss depends on no parameter that the optimizer trains"):
        stepper.step(rows())


def test_a_weight_that_is_no_number():
    with pytest.raises(ArgumentError, match=r"must be single numbers, got NoneType; return \(loss_sum, weight\)"):
        make_stepper(lambda model, x: (model(x).sum(), None)).step(rows())


def test_a_loss_function_that_was_not_made_yet():
    with pytest.raises(
        ArgumentError, match=r"huggingface_loss.* does not take two: .*; it makes one: huggingface_loss\(…\)"
    ):
        make_stepper(huggingface_loss)


def test_a_loss_function_of_one_argument():
    with pytest.raises(
        ArgumentError, match=r"called with \(model, micro_batch\), and <lambda>\(batch\) does not take two"
    ):
        make_stepper(lambda batch: 1)
