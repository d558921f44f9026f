"""PlannedDataModule and planned_loader with several loaders for validation and tests; two ranks in ranks.py."""

import pytest
from torch.utils.data import DataLoader

from batchwright.errors import ArgumentError
from batchwright.integrations.lightning import AdaptiveBatching, PlannedDataModule, planned_loader

from .training import DATA, Model, indices, make_loader, make_trainer, plans

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Validated(Model):
    """Notes the batches of validation and test per loader."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.found.setdefault(dataloader_idx, []).append(indices(batch))

    test_step = validation_step


def make_val(kind):
    loaders = {"planned": make_loader(), "other": make_loader(), "plain": DataLoader(DATA, batch_size=20)}
    return loaders if kind is dict else kind(loaders.values())


PLAIN = [list(range(start, min(start + 20, 61))) for start in (0, 20, 40, 60)]


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_several_loaders_are_validated_in_every_epoch_each_on_its_own_batches(kind):
    model, trainer = Validated(), make_trainer(AdaptiveBatching(), max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(model, PlannedDataModule(make_loader(), val=make_val(kind)))
    assert model.found == {0: plans(1)[0] * 2, 1: plans(1)[0] * 2, 2: PLAIN * 2}


@pytest.mark.parametrize("kind", [list, dict])
def test_several_loaders_are_tested(kind):
    model, trainer = Validated(), make_trainer(AdaptiveBatching())
    trainer.test(model, PlannedDataModule(make_loader(), test=make_val(kind)), verbose=False)
    assert model.found == {0: plans(1)[0], 1: plans(1)[0], 2: PLAIN}


@pytest.mark.parametrize("kind", [list, dict])
def test_planned_loader_takes_several_loaders_for_validation(kind):
    """Before, it was refused: got list."""
    model, trainer = Validated(), make_trainer(AdaptiveBatching(), max_epochs=1, num_sanity_val_steps=0)
    names = {"first": make_loader(), "second": make_loader()}
    val = planned_loader(names if kind is dict else list(names.values()), trainer, training=False)
    assert isinstance(val, kind)
    trainer.fit(model, planned_loader(make_loader(), trainer), val)
    assert model.found == {0: plans(1)[0], 1: plans(1)[0]}


def test_several_loaders_for_training_are_refused():
    trainer = make_trainer(AdaptiveBatching())
    with pytest.raises(ArgumentError, match="batchwright sampler, or what regroup made, got list"):
        planned_loader([make_loader(), make_loader()], trainer)


def test_one_loader_without_a_plan_among_several_is_refused_by_planned_loader():
    trainer = make_trainer(AdaptiveBatching())
    with pytest.raises(ArgumentError, match=r"got DataLoader; .* Write DataLoader\(data, batch_sampler="):
        planned_loader([make_loader(), DataLoader(DATA)], trainer, training=False)
