"""An adaptive trainer with graphs: what a loss writes, how a collator is called, and the limits that still hold."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback

from batchwright.step import FitToMemory
from batchwright.testing import EagerGraphs

from ...step.graphs.tape import TapeGraphs
from ..dynabatch.tokenizers import make_fast
from .test_graphs import make_graphed, train
from .trainers import make_examples, make_model


class Remembering(Trainer):
    """Leaves the newest loss where a callback finds it."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.state.newest = loss.detach()
        return loss


class Newest(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(float(state.newest))


@pytest.mark.filterwarnings("ignore:steps run eagerly")
def test_what_a_loss_writes_to_the_state_is_not_lost_in_silence(tmp_path):
    # Expected: as documented for "what it writes is lost", a loss that changes what belongs to the trainer runs eagerly
    # with one warning. Found: the stand-in for trainer.state takes any attribute, so the steps are replayed without a
    # word, and a callback reads the loss of an earlier update at every replay.
    eager, graphed = Newest(), Newest()
    train("llama", tmp_path, False, trainer_cls=Remembering, callbacks=[eager])
    train("llama", tmp_path, TapeGraphs(), trainer_cls=Remembering, callbacks=[graphed])
    assert graphed.seen == pytest.approx(eager.seen, rel=1e-5)


class Figures(Trainer):
    """Counts its calls in a container, in one of the ways that trainers do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num = {"calls": 0}
        self.lists = {"train": []}
        self.figures = defaultdict(list)


class InDict(Figures):
    def compute_loss(self, *args, **kwargs):
        self.num["calls"] += 1
        return super().compute_loss(*args, **kwargs)


class InNestedList(Figures):
    def compute_loss(self, *args, **kwargs):
        self.lists["train"].append(1)
        return super().compute_loss(*args, **kwargs)


class InDefaultDict(Figures):
    def compute_loss(self, *args, **kwargs):
        self.figures["train"].append(1)
        return super().compute_loss(*args, **kwargs)


@pytest.mark.filterwarnings("ignore:steps run eagerly")
@pytest.mark.parametrize("trainer_cls", [InDict, InNestedList, InDefaultDict])
def test_a_loss_that_counts_in_a_container_of_the_trainer_runs_eagerly(trainer_cls, tmp_path):
    # Expected: docs/trainers.md: "If it ... changes an attribute of the trainer, steps run eagerly". Found: only a new
    # object, or another length of a plain list, dict or set at the top, is noticed; 18 of 24 calls are lost in silence
    # where a value of a dict, a list inside a dict or a defaultdict (as TRL keeps its figures) is changed.
    _, _, graphed = train("llama", tmp_path, TapeGraphs(), trainer_cls=trainer_cls)
    assert graphed.graph_summary().num_replayed == 0


def test_a_log_method_given_to_the_trainer_itself_is_still_there_after_training(tmp_path):
    # Expected: trainer.log is put back as it was. Found: `del trainer.log` after a capture removes the user's own,
    # so from the first capture on nothing reaches it; no message.
    trainer, _ = make_graphed("llama", tmp_path, EagerGraphs(), logging_strategy="steps", logging_steps=1)
    seen = []
    trainer.log = lambda logs, *args, **kwargs: seen.append(logs)
    trainer.train()
    assert "log" in vars(trainer)
    assert len(seen) >= trainer.state.global_step


@pytest.mark.filterwarnings("ignore:.*without graphs")
def test_fit_to_memory_limits_what_runs_at_once_with_graphs_too(tmp_path):
    # Expected: "micro_batch: a FitToMemory, which lets at most .size examples of a micro-batch run at once", or a
    # refusal of the two together. Found: the whole micro-batch is captured and replayed, 8 examples with a size of 2.
    trainer, _ = make_graphed("llama", tmp_path, EagerGraphs(), micro_batch=FitToMemory(2))
    trainer.train()
    rows = [int(label.split("x")[0]) for label, num in trainer.graph_summary().shapes.items() if num]
    assert max(rows, default=0) <= 2


@dataclass
class SpeechCollator:
    """As in the examples of transformers: pads ``input_values`` to a multiple."""

    tokenizer: Any
    padding: Any = True
    pad_to_multiple_of: Any = None

    def __call__(self, features):
        rows = [{"input_ids": feature["input_values"]} for feature in features]
        batch = self.tokenizer.pad(
            rows, padding=self.padding, pad_to_multiple_of=self.pad_to_multiple_of, return_tensors="pt"
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {**batch, "labels": labels}


def test_a_collator_of_other_inputs_is_told_the_lengths_or_refused(tmp_path):
    # Expected: training, as without graphs, or a refusal that names the collator. Found: KeyError: 'input_ids' out of
    # PlannedCollator, which reads that column whatever the data hold; lengths were given by lengths=.
    lengths = [len(example["input_ids"]) for example in make_examples(40, causal=True)]
    examples = [{"input_values": example["input_ids"]} for example in make_examples(40, causal=True)]
    options = {"examples": examples, "lengths": lengths, "data_collator": SpeechCollator(make_fast())}
    train("llama", tmp_path, False, **options)
    train("llama", tmp_path, EagerGraphs(), **options)


class Masking(DataCollatorForSeq2Seq):
    """Masks the first source token of half of the rows; their first label does not count."""

    def __call__(self, features, return_tensors=None):
        batch = super().__call__(features, return_tensors)
        chosen = torch.rand(len(features)) < 0.5
        batch["input_ids"][chosen, 0] = 0
        batch["labels"][chosen, 0] = -100
        return batch


def test_a_collator_that_draws_gives_source_and_target_of_the_same_draw(tmp_path):
    # Expected: the batch that the collator makes, padded further, or a refusal. Found: it runs twice, and source and
    # target come from two draws: rows are masked whose labels count, and the other way round.
    trainer, _ = make_graphed("t5", tmp_path, EagerGraphs(), data_collator=Masking(make_fast(), make_model("t5")))
    for batch in trainer.get_train_dataloader():
        assert (batch["input_ids"][:, 0] == 0).tolist() == (batch["labels"][:, 0] == -100).tolist()
