"""supervised_loss and entropy_sum: sums over what counts."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import Stepper, losses
from batchwright.step.losses import entropy_sum, supervised_loss

SAME = nn.Identity()


def test_class_indices_count_where_they_are_not_ignored():
    logits, targets = torch.randn(4, 3), torch.tensor([0, -100, 2, 1])
    loss_sum, weight = supervised_loss(nn.CrossEntropyLoss(reduction="sum"))(SAME, (logits, targets))
    assert weight == 3
    torch.testing.assert_close(loss_sum / weight, F.cross_entropy(logits, targets))


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(reduction="sum", ignore_index=0), partial(F.cross_entropy, reduction="sum", ignore_index=0)],
)
def test_the_ignore_index_is_that_of_the_loss(loss):
    logits, targets = torch.randn(4, 3), torch.tensor([0, 0, 2, 1])
    loss_sum, weight = supervised_loss(loss)(SAME, (logits, targets))
    assert weight == 2
    torch.testing.assert_close(loss_sum / weight, F.cross_entropy(logits, targets, ignore_index=0))


def test_numbers_all_count():
    outputs, targets = torch.randn(4, 3), torch.randn(4, 3)
    loss_sum, weight = supervised_loss(nn.MSELoss(reduction="sum"))(SAME, (outputs, targets))
    assert weight == 12
    torch.testing.assert_close(loss_sum / weight, F.mse_loss(outputs, targets))


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5)])
def test_a_row_of_class_probabilities_is_one_target(shape):
    outputs, targets = torch.randn(shape), torch.rand(shape)
    loss_sum, weight = supervised_loss(nn.CrossEntropyLoss(reduction="sum"))(SAME, (outputs, targets))
    torch.testing.assert_close(loss_sum / weight, F.cross_entropy(outputs, targets))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), partial(F.mse_loss), lambda outputs, targets: outputs.sum()])
def test_a_loss_that_is_no_sum_is_refused(loss):
    with pytest.raises(ArgumentError, match=r"write nn\.CrossEntropyLoss\(reduction='sum'\) or functools\.partial"):
        supervised_loss(loss)


@pytest.mark.parametrize(("batch", "got"), [({"x": 1}, "dict"), ((1, 2, 3), "3 parts")])
def test_a_batch_that_is_no_pair_is_refused(batch, got):
    with pytest.raises(ArgumentError, match=f"got {got}"):
        supervised_loss(nn.MSELoss(reduction="sum"))(SAME, batch)


def test_targets_that_are_no_tensor_are_refused():
    with pytest.raises(ArgumentError, match="targets as a tensor, got list; convert inputs and targets"):
        supervised_loss(nn.CrossEntropyLoss(reduction="sum"))(SAME, (torch.zeros(2, 3), [0, 1]))


def test_one_example_that_is_no_batch_is_refused():
    data = torch.utils.data.TensorDataset(torch.zeros(2, 3), torch.tensor([0, 1]))
    model = nn.Linear(3, 3)
    stepper = Stepper(
        model, torch.optim.SGD(model.parameters(), lr=0.1), supervised_loss(nn.CrossEntropyLoss(reduction="sum"))
    )
    with pytest.raises(ArgumentError, match=r"give a batch of one as data\[:1\], not data\[0\]"):
        stepper.step(data[0])
    assert stepper.step(data[:1]).batch_size == 1


@given(st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=1, max_size=12), st.data())
def test_the_sums_of_two_parts_are_the_sum_of_the_whole(targets, data):
    cut = data.draw(st.integers(0, len(targets)))
    logits = torch.randn(len(targets), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss_fn = supervised_loss(nn.CrossEntropyLoss(reduction="sum"), with_entropy=True)
    batch = logits, torch.tensor(targets)
    whole, first, second = (
        loss_fn(SAME, tuple(part[where] for part in batch)) for where in (slice(None), slice(cut), slice(cut, None))
    )
    for place in (0, 1):
        torch.testing.assert_close(whole[place], first[place] + second[place])
    torch.testing.assert_close(whole[2]["entropy"], first[2]["entropy"] + second[2]["entropy"])


def test_the_entropy_of_certainty_is_zero_and_of_none_log_c():
    assert entropy_sum(torch.tensor([[1000.0, 0.0, 0.0]])) == 0
    assert entropy_sum(torch.zeros(2, 8)).item() == pytest.approx(2 * math.log(8))


def test_the_entropy_is_that_of_torch():
    logits = torch.randn(5, 7, 11)
    expected = torch.distributions.Categorical(logits=logits).entropy().sum()
    torch.testing.assert_close(entropy_sum(logits), expected)


def test_a_class_that_cannot_be_adds_no_entropy():
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    assert entropy_sum(logits).item() == pytest.approx(math.log(2))


def test_ignored_items_add_no_entropy_even_where_they_are_not_a_number():
    logits = torch.zeros(2, 3, 4)
    logits[0, 1] = math.nan
    targets = torch.tensor([[0, -100, 1], [2, -100, 3]])
    assert entropy_sum(logits, targets).item() == pytest.approx(4 * math.log(4))


def test_entropy_in_chunks_is_the_entropy(monkeypatch):
    logits, targets = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, -100, 1, 2, -100, 4])
    whole = entropy_sum(logits, targets)
    monkeypatch.setattr(losses, "_LOGITS_AT_ONCE", 10)  # two rows of five
    torch.testing.assert_close(entropy_sum(logits, targets), whole)


def test_entropy_of_half_precision_is_counted_in_float32():
    # 1000 × log 4 is 1386.29; bfloat16 would round it to 1384.
    total = entropy_sum(torch.zeros(1000, 4, dtype=torch.bfloat16))
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(1000 * math.log(4), rel=1e-5)


def test_targets_of_another_shape_are_refused():
    with pytest.raises(ArgumentError, match=r"one target per item, \(2, 3\)"):
        entropy_sum(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.long))


def test_cross_entropy_has_its_classes_on_the_second_axis():
    # (N, C, L): 2 classes, 5 places; the softmax over places would give log 5.
    loss_fn = supervised_loss(nn.CrossEntropyLoss(reduction="sum"), with_entropy=True)
    _, weight, metrics = loss_fn(SAME, (torch.zeros(3, 2, 5), torch.zeros(3, 5, dtype=torch.long)))
    assert metrics["entropy"].item() == pytest.approx(15 * math.log(2))
    assert weight == 15
