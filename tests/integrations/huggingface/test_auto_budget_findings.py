"""budget="auto": what a look at batches must not change, what its cache must not trust, and groups that stay whole."""

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.integrations._describing import describe_callable
from batchwright.integrations.huggingface import _probing
from batchwright.step import FoundBudget, MemoryMonitor

from .test_auto_budget import TRAINED, auto_trainer, cache, count_forwards, with_memory
from .trainers import ARGUMENTS, collate, flat_parameters, make_model, make_trainer, numbered, relative_error

__all__ = ["cache"]  # a fixture

KNOWN = FoundBudget(None, bw.TimeModel.fit([(1, 8), (2, 8), (4, 8)], [0.1, 0.2, 0.3]))


class Scaled(Trainer):
    """Trains a factor of its logits that no module holds, counts calls in a list of others, and logs in its loss."""

    def __init__(self, *args, **kwargs):
        self.scale = nn.Parameter(torch.ones(()))
        self.calls = {"all": []}
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD([*self.model.parameters(), self.scale], lr=0.1)
        return self.optimizer

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logits = outputs.logits * self.scale
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), ignore_index=-100)
        self.calls["all"].append(1)
        self.log({"aux": 1.0})
        return (loss, outputs) if return_outputs else loss


class Logs(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(logs)


def test_what_a_trainer_keeps_stays_the_same_objects_and_probes_log_nothing(tmp_path):
    """A parameter that was replaced by a copy was never trained: its optimizer held the first one."""
    trainer, *_ = auto_trainer(tmp_path, trainer_cls=Scaled)
    logs = Logs()
    trainer.add_callback(logs)
    scale, calls, inner = trainer.scale, trainer.calls, trainer.calls["all"]
    trainer.get_train_dataloader()
    assert trainer.scale is scale
    assert scale.grad is None
    assert (trainer.calls is calls, calls["all"] is inner, inner, logs.seen) == (True, True, [], [])
    trainer.train()
    plain, *_ = make_trainer(
        "t5", tmp_path, trainer_cls=Scaled, model=make_model("t5", dropout=0.1), budget=trainer.found_budget
    )
    plain.train()
    assert float(scale.detach()) == float(plain.scale.detach()) != 1.0
    # Two runs of the first look at the loss count and log nothing either: as many logs as the loss was called to train.
    assert sum("aux" in one for one in logs.seen) == trainer.state.global_step


def test_counts_and_lists_of_a_model_are_put_back(tmp_path):
    model = make_model("t5", dropout=0.1)
    losses, inner = [], model.encoder
    inner.num_calls, inner.losses = 0, losses

    def note(module, *_):
        module.num_calls += 1
        module.losses.append(module.num_calls)
        module.newest = torch.ones(2, requires_grad=True) * 2

    inner.register_forward_pre_hook(note)
    trainer, *_ = auto_trainer(tmp_path, model=model)
    trainer.get_train_dataloader()
    assert (inner.num_calls, losses, inner.losses is losses, hasattr(inner, "newest")) == (0, [], True, False)


class Noisy(Dataset):
    """Changes a token by a transform with a generator of its own."""

    def __init__(self, examples):
        self.examples, self.transforms = examples, [Noise()]

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        example = dict(self.examples[index])
        for transform in self.transforms:
            example = transform(example)
        return example


class Noise:
    def __init__(self):
        self.random = np.random.default_rng(0)

    def __call__(self, example):
        return {**example, "input_ids": [int(self.random.integers(3, 9)), *example["input_ids"][1:]]}


def test_a_transform_in_a_list_draws_none_of_its_numbers_for_the_look(tmp_path):
    """A budget that is found and one that is read from the cache train on the same augmented examples."""
    found, known = (auto_trainer(tmp_path, dropout=0.0, examples=Noisy(numbered()))[0] for _ in range(2))
    for trainer in (found, known):
        trainer.train()
    assert found.found_budget == known.found_budget
    assert torch.equal(flat_parameters(found.model), flat_parameters(known.model))


# The cache


def damage(entry, change):
    """Return an entry of the cache with a part that nobody could plan with, or with numbers that anybody could."""
    budget = entry["budget"]
    if change == "coefficient":
        budget["time"]["coefficients"]["b*L0"] = 1e300  # every batch would have one example
    elif change == "digit":
        budget["least_tokens"] = 8
    elif change == "limit":
        entry["limit_bytes"], budget["memory"] = 10, None
    elif change == "axes":
        budget |= {"version": 2, "bounds": [[5, 2, 3, 4]]}
    else:
        budget["least_tokens"] = 10**400 if change == "huge" else 2**40
    return json.dumps(entry)


@pytest.mark.parametrize("change", ["axes", "huge", "large", "coefficient", "digit", "limit"])
def test_numbers_that_nobody_found_are_found_anew(change, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(_probing, "find_budget", lambda *args, **kwargs: KNOWN)
    auto_trainer(tmp_path)[0].get_train_dataloader()
    (path,) = cache.iterdir()
    path.write_text(damage(json.loads(path.read_text()), change))
    trainer, *_ = auto_trainer(tmp_path)
    trainer.get_train_dataloader()
    assert trainer.found_budget == KNOWN
    assert json.loads(path.read_text())["budget"] == json.loads(KNOWN.to_json())


def test_a_user_without_a_home_has_no_cache_and_trains(tmp_path, monkeypatch, caplog):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(_probing, "find_budget", lambda *args, **kwargs: KNOWN)
    trainer, *_ = auto_trainer(tmp_path)
    with caplog.at_level(logging.INFO, logger="batchwright"):
        trainer.get_train_dataloader()
    assert trainer.found_budget == KNOWN
    assert "The budget is not kept: Could not determine home directory." in caplog.text


class Padding:
    """Collate, and pad to a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, examples):
        return collate(examples)


def other_loss(scale):
    class Mine(Trainer):
        if scale:

            def compute_loss(self, *args, **kwargs):
                return super().compute_loss(*args, **kwargs)
        else:

            def compute_loss(self, model, *args, **kwargs):
                return super().compute_loss(model, *args, **kwargs)

    return Mine


def with_momentum(momentum):
    model = make_model("t5")
    return {"model": model, "optimizers": (torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), None)}


@dataclasses.dataclass
class Arguments(TrainingArguments):
    """Those of a trainer with a loss of its own."""

    keeps_reference: bool = False


class WithReference(Trainer):
    """A trainer with arguments of its own."""


ARGUMENTS[WithReference] = Arguments


def with_reference(keeps_reference):
    return {"trainer_cls": WithReference, "keeps_reference": keeps_reference}


class WithNegatives(Trainer):
    """Runs the model once for the batch and once per negative."""

    num_negatives = 0

    def compute_loss(self, model, inputs, *args, **kwargs):
        for _ in range(self.num_negatives):
            model(**inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


def with_negatives(num):
    class Mine(WithNegatives):
        def __init__(self, *args, **kwargs):
            self.num_negatives = num
            super().__init__(*args, **kwargs)

    return {"trainer_cls": Mine}


class Wrapped:
    """Collate as another collator does."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, examples):
        return self.inner(examples)


class WithTeacher(Trainer):
    """Learns from a model beside its own."""

    def __init__(self, *args, **kwargs):
        self.teacher = Learned.teacher()
        self.options = {"layers": [Learned.layer]}
        super().__init__(*args, **kwargs)
        self.args.num_samples = Learned.num_samples

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs, *args, **kwargs) + 0 * self.term()

    def term(self):
        return self.teacher.weight.sum() * self.options["layers"][0] * self.args.num_samples


class Learned:
    """What the next trainer with a teacher gets."""


def with_teacher(width=2, layer=1, num_samples=1):
    Learned.teacher, Learned.layer, Learned.num_samples = staticmethod(lambda: nn.Linear(2, width)), layer, num_samples
    return {"trainer_cls": WithTeacher}


class HoldsReference(Trainer):
    """Holds a model that only a library would read."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ref_model = Learned.teacher()


def beside(width):
    with_teacher(width)
    return {"trainer_cls": HoldsReference}


def with_config(**settings):
    model = make_model("t5")
    for name, value in settings.items():
        setattr(model.config, name, value)
    return {"model": model}


CHANGES = {
    "teacher": [with_teacher, lambda: with_teacher(width=3)],
    "settings in a dict": [with_teacher, lambda: with_teacher(layer=2)],
    "argument that was set by hand": [with_teacher, lambda: with_teacher(num_samples=2)],
    "model beside the trained one": [lambda: beside(2), lambda: beside(3)],
    "object in the config": [
        lambda: with_config(inner=SimpleNamespace(layers={"a": 1})),
        lambda: with_config(inner=SimpleNamespace(layers={"a": 2})),
    ],
    "attribute that a loss reads": [lambda: with_negatives(1), lambda: with_negatives(8)],
    "collator in a collator": [
        lambda: {"data_collator": Wrapped(Padding(0))},
        lambda: {"data_collator": Wrapped(Padding(512))},
    ],
    "argument of its own": [lambda: with_reference(False), lambda: with_reference(True)],
    "collator": [lambda: {"data_collator": Padding(0)}, lambda: {"data_collator": Padding(512)}],
    "function": [
        lambda: {"data_collator": lambda examples: collate(examples)},
        lambda: {"data_collator": lambda examples: collate(examples[:])},
    ],
    "momentum": [lambda: with_momentum(0.0), lambda: with_momentum(0.9)],
    "loss": [lambda: {"trainer_cls": other_loss(True)}, lambda: {"trainer_cls": other_loss(False)}],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_runs_in_a_step_is_part_of_the_key(change, cache, tmp_path, monkeypatch):
    """A collator that pads more, a state of the optimizer or a loss of the same name take more memory."""
    searches = []
    monkeypatch.setattr(_probing, "find_budget", lambda *args, **kwargs: searches.append(args) or KNOWN)
    first, second = CHANGES[change]
    for make in (first, first, second):
        auto_trainer(tmp_path, **make())[0].get_train_dataloader()
    assert len(searches) == len(list(cache.iterdir())) == 2


def test_a_job_that_cannot_be_told_from_another_one_is_measured_at_every_start(cache, tmp_path, monkeypatch, caplog):
    searches = []
    monkeypatch.setattr(_probing, "find_budget", lambda *args, **kwargs: searches.append(args) or KNOWN)
    trainer, *_ = auto_trainer(tmp_path, data_collator=Padding(number for number in [1]))
    with caplog.at_level(logging.INFO, logger="batchwright"):
        trainer.get_train_dataloader()
    trainer.get_train_dataloader()
    assert len(searches) == 2
    assert not cache.exists()
    assert "measured again at every start" in caplog.text
    assert trainer.found_budget == KNOWN


def test_what_a_function_holds_is_described():
    def make(length, seen):
        def pad(examples, fill=0):
            seen.append((length, fill))

        return pad

    assert describe_callable(make(3, [])) == describe_callable(make(3, []))
    assert describe_callable(make(3, [])) != describe_callable(make(4, []))
    assert describe_callable(make(3, [1])) != describe_callable(make(3, [2]))
    assert describe_callable(Padding(3)) == describe_callable(Padding(3)) != describe_callable(Padding(4))
    assert describe_callable(None) is None


def test_evaluation_of_another_model_of_the_class_is_measured_again(tmp_path):
    trainer, *_ = auto_trainer(tmp_path, eval_dataset=numbered(20))
    trainer.evaluate()
    larger = make_model("t5")
    larger.lm_head = nn.Linear(larger.lm_head.in_features, 2 * larger.lm_head.out_features, bias=False).double()
    trainer.model = trainer.model_wrapped = larger
    forwards = count_forwards(larger)
    trainer.get_eval_dataloader()
    assert len(forwards) > 1
    assert len(trainer._finder.evaluation) == 2


# Streams


class AroundAnIterator(IterableDataset):
    """Examples of one length that begin alike; every loop goes on where the last one stood."""

    def __init__(self):
        row = {"input_ids": [7] * 9, "attention_mask": [1] * 9}
        self.examples = iter([{**row, "labels": [3] * 8 + [place % 20], "number": place} for place in range(400)])

    def __iter__(self):
        yield from self.examples


def test_a_stream_that_would_lose_what_was_looked_at_is_refused(tmp_path):
    trainer, *_ = auto_trainer(tmp_path, examples=AroundAnIterator(), max_steps=3, plan_options={"buffer_size": 50})
    with pytest.raises(ArgumentError, match="does not begin anew with them; give a budget"):
        trainer.train()


# The learning rate


def test_a_found_budget_that_is_given_scales_the_rate_as_the_one_that_was_found(tmp_path):
    def train(budget):
        model, memory = with_memory(6_000)
        monitor = MemoryMonitor(source=memory)
        options = {**TRAINED, "lr_rule": "sqrt", "base_size": 3, "logging_steps": 1}
        trainer, *_ = make_trainer("t5", tmp_path, model=model, memory=monitor, budget=budget, **options)
        trainer.train()
        return trainer, [log["lr_factor"] for log in trainer.state.log_history if "lr_factor" in log]

    found, factors = train("auto")
    given, again = train(found.found_budget)
    assert len(set(factors)) == 1
    assert again == factors
    assert torch.equal(flat_parameters(found.model), flat_parameters(given.model))


# Groups


class Compared(Trainer):
    """A sum over labels, and how much the examples of a group differ: groups add up, the examples of one do not."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        groups = inputs["group"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "group"})
        losses = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), inputs["labels"], reduction="none")
        sums = losses.sum(dim=1)
        means = torch.stack([sums[groups == group].mean() for group in groups])
        loss = (sums.sum() + ((sums - means) ** 2).sum()) / (inputs["labels"] != -100).sum()
        return (loss, outputs) if return_outputs else loss


FOURS = [place // 4 for place in range(24)]


def train_groups(folder, most_rows, groups=FOURS, **options):
    """Train on groups, on a device that has room for some rows, and return rows of pieces and gradients."""
    examples = [{**example, "group": group} for example, group in zip(numbered(), groups, strict=True)]
    pieces, model = [], make_model("t5")

    def take(module, args, kwargs):
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > most_rows:
            raise torch.OutOfMemoryError("too many rows")
        pieces.append(len(kwargs["input_ids"]))

    def collated(chosen):
        return {**collate(chosen), "group": torch.tensor([example["group"] for example in chosen])}

    model.register_forward_pre_hook(take, with_kwargs=True)
    trainer, _, gradients = make_trainer(
        "t5",
        folder,
        model=model,
        examples=examples,
        data_collator=collated,
        plan_options={"groups": groups},
        learning_rate=0.0,
        **{"budget": bw.MaxItems(12), **options},
    )
    trainer.train()
    return pieces, gradients.seen, trainer


def test_a_batch_of_groups_that_runs_out_of_memory_is_cut_between_them(tmp_path):
    pieces, gradients, trainer = train_groups(tmp_path, 6)
    whole, expected, _ = train_groups(tmp_path, 12)
    assert set(whole) >= {12}
    # At most six rows fit: whole groups, one by one.
    assert set(pieces) - {1, 2} == {4}
    assert trainer._batching.updates.figures.num_ooms > 0
    assert [relative_error(*pair) for pair in zip(gradients, expected, strict=True)] == pytest.approx([0, 0], abs=1e-6)


def test_a_group_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(DoesNotFitError, match="group 0 of 3 of a micro-batch does not fit on its own"):
        train_groups(tmp_path, 3)


def test_a_loss_that_compares_the_examples_of_a_group_is_cut_between_groups(tmp_path):
    """The first look is at the first two rows; if they are of two groups, it cannot see that those of one are compared.

    Here the longer ones stand for themselves, and come before the others in a batch.
    """
    lengths = [len(example["input_ids"]) + len(example["labels"]) for example in numbered()]
    ranks = np.argsort(np.argsort(lengths, kind="stable")).tolist()
    groups = [rank if rank >= 8 else 100 + rank // 4 for rank in ranks]
    options = {"groups": groups, "trainer_cls": Compared, "budget": bw.MaxItems(24)}
    _, expected, _ = train_groups(tmp_path, 24, **options)
    pieces, gradients, trainer = train_groups(tmp_path, 13, **options)
    assert trainer._batching.updates.figures.num_ooms > 0
    assert max(pieces) <= 13
    assert relative_error(gradients[0], expected[0]) < 1e-6


class Augmented(Dataset):
    """Replaces a token by one from a generator of its own."""

    def __init__(self):
        self.examples, self.random = numbered(20), np.random.default_rng(0)

    def __len__(self):
        return 20

    def __getitem__(self, place):
        example = self.examples[place]
        return {**example, "input_ids": [int(self.random.integers(3, 20)), *example["input_ids"][1:]]}


def test_a_data_set_with_a_generator_of_its_own_draws_none_for_the_look(cache, tmp_path):
    """The first run, which measures, trained on other tokens than the next one, which found its budget."""
    trained = []
    for _ in range(2):
        trainer, *_ = auto_trainer(tmp_path, examples=Augmented())
        trainer.train()
        trained.append(flat_parameters(trainer.model))
    assert len(list(cache.iterdir())) == 1
    assert torch.equal(*trained)
