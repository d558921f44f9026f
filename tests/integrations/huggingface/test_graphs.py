"""An adaptive trainer with graphs trains as one without: same gradients, losses and weights; or it says why not."""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
)

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations.huggingface import AdaptiveTrainerMixin
from batchwright.integrations.huggingface._graphs import TrainerGraphs
from batchwright.step import FitToMemory, PadCollator
from batchwright.testing import EagerGraphs

from ...step.graphs.tape import TapeGraphs
from ...thorough import crossed
from ..dynabatch.failing import raise_error
from ..dynabatch.tokenizers import make_fast
from .trainers import (
    MODELS,
    collate,
    flat_parameters,
    make_args,
    make_controller,
    make_examples,
    make_model,
    make_trainer,
    relative_error,
)

# Plans of these have few shapes, and most of them come several times.
TRAINING = {
    "num_train_epochs": 3,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "grouping": bw.Buckets(4),
    "budget": bw.MaxTokens(60),
}


def pads(name):
    return PadCollator(axis_fields=("input_ids",) if MODELS[name][3] else ("input_ids", "labels"))


def make_graphed(name, folder, graphs, **options):
    """Return a trainer on 40 examples, and the callback that keeps its gradients."""
    settings = {"data_collator": pads(name), **TRAINING, **options}
    examples = settings.pop("examples", make_examples(40, causal=MODELS[name][3]))
    trainer, _, gradients = make_trainer(name, folder, examples=examples, graphs=graphs, **settings)
    return trainer, gradients


def train(name, folder, graphs, **options):
    """Return the weights, gradients and logs of a training, and its trainer."""
    trainer, gradients = make_graphed(name, folder, graphs, **options)
    trainer.train()
    return flat_parameters(trainer.model), torch.stack(gradients.seen), trainer


def check_same(name, folder, *, least_replayed=1, **options):
    """Train with and without graphs and compare; return the trainer with graphs."""
    weights, gradients, eager = train(name, folder, False, **options)
    found, seen, graphed = train(name, folder, EagerGraphs(), **options)
    assert relative_error(seen, gradients) < 1e-10
    assert relative_error(found, weights) < 1e-10
    assert losses(graphed) == pytest.approx(losses(eager), rel=1e-6)
    assert graphed.graph_summary().num_replayed >= least_replayed
    return graphed


def losses(trainer):
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]


# The same training


@pytest.mark.parametrize(("name", "accumulation"), crossed(["llama", "t5"], [1, 3]))
def test_training_with_graphs_is_training_without(name, accumulation, tmp_path):
    graphed = check_same(name, tmp_path, gradient_accumulation_steps=accumulation, least_replayed=10)
    summary = graphed.graph_summary()
    assert summary.num_updates_replayed == 0  # clipping and the update are the trainer's
    logs = [entry for entry in graphed.state.log_history if "num_micro_batches" in entry]
    assert summary.num_replayed + summary.num_eager == sum(entry["num_micro_batches"] for entry in logs)


def test_label_smoothing_is_captured(tmp_path):
    check_same("llama", tmp_path, label_smoothing_factor=0.1, least_replayed=10)


def test_a_loss_of_the_user_is_captured(tmp_path):
    def loss_func(outputs, labels, num_items_in_batch=None):
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch

    check_same("llama", tmp_path, compute_loss_func=loss_func, least_replayed=10)


def test_a_compute_loss_of_the_user_is_captured(tmp_path):
    class Doubled(Trainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    check_same("llama", tmp_path, trainer_cls=Doubled, least_replayed=10)


def test_evaluation_between_updates_leaves_graphs_as_they_are(tmp_path):
    options = {"eval_dataset": make_examples(9, causal=True, seed=1), "eval_strategy": "steps", "eval_steps": 2}
    graphed = check_same("llama", tmp_path, **options)
    assert graphed.graph_summary().num_captures == len(graphed.graph_summary().shapes)


def test_dropout_is_drawn_anew_at_every_replay(tmp_path):
    model = make_model("t5", dropout=0.5)
    _, gradients, trainer = train("t5", tmp_path, EagerGraphs(), model=model, learning_rate=0.0, num_train_epochs=4)
    assert trainer.graph_summary().num_replayed > 40
    assert len({tuple(row.tolist()) for row in gradients}) == len(gradients)


def test_a_parameter_frozen_during_training_is_noticed(tmp_path):
    class Freezing(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            next(model.parameters()).requires_grad_(state.global_step < 12)

    graphed = check_same("llama", tmp_path, callbacks=[Freezing()])
    summary = graphed.graph_summary()
    assert summary.num_captures > len(summary.shapes)


def test_micro_batches_that_run_out_of_memory_beside_the_graphs_run_eagerly(tmp_path):
    class Full(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 12:
                most = 3
                model.register_forward_pre_hook(
                    lambda module, args, kwargs: (
                        raise_error(torch.OutOfMemoryError("out of memory"))
                        if len(kwargs["input_ids"]) > most
                        else None
                    ),
                    with_kwargs=True,
                )

    weights, gradients, _ = train("llama", tmp_path, False)
    with pytest.warns(UserWarning, match="has hooks, which do not run at a replay"):
        found, seen, graphed = train("llama", tmp_path, EagerGraphs(), callbacks=[Full()])
    assert relative_error(found, weights) < 1e-10
    assert relative_error(seen, gradients) < 1e-10
    assert graphed.state.log_history[-2]["ooms"] > 0


def test_a_resumed_training_captures_anew(tmp_path):
    weights, _, _ = train("llama", tmp_path / "whole", EagerGraphs(), save_strategy="steps", save_steps=10)
    trainer, _ = make_graphed("llama", tmp_path / "whole", EagerGraphs(), save_strategy="no")
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-10"))
    assert relative_error(flat_parameters(trainer.model), weights) < 1e-10
    assert trainer.graph_summary().num_replayed > 3


# Batches of planned shapes


def collated_shapes(trainer):
    """Return the shapes of the batches of an epoch, and those that the sampler's ``pad_to`` says."""
    loader = trainer.get_train_dataloader()
    sampler = loader.batches.sampler
    plan = sampler.plan
    planned = [(len(batch), *sampler.pad_to(plan.lengths[batch])) for batch in plan]
    return [(*batch["input_ids"].shape, batch["labels"].shape[1]) for batch in loader], planned


def test_a_collator_of_transformers_pads_to_the_plan(tmp_path):
    tokenizer = make_fast()
    options = {"data_collator": DataCollatorForTokenClassification(tokenizer)}
    trainer, _ = make_graphed("llama", tmp_path, EagerGraphs(), **options)
    found, planned = collated_shapes(trainer)
    assert [shape[:2] for shape in found] == planned
    assert all(shape[1] == shape[2] for shape in found)
    graphed = check_same("llama", tmp_path, **options)
    assert graphed.graph_summary().hit_rate > 0.5


def test_source_and_target_of_a_seq2seq_collator_are_padded_each_to_its_length(tmp_path):
    collator = DataCollatorForSeq2Seq(make_fast(), make_model("t5"))
    trainer, _ = make_graphed("t5", tmp_path, EagerGraphs(), data_collator=collator)
    found, planned = collated_shapes(trainer)
    assert found == planned
    assert any(shape[1] != shape[2] for shape in found)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["decoder_input_ids"].shape == batch["labels"].shape
    assert batch["attention_mask"].shape == batch["input_ids"].shape
    check_same("t5", tmp_path, data_collator=collator)


class Masking(DataCollatorForSeq2Seq):
    """Masks the first source token of half of the rows; their first label does not count."""

    def __call__(self, features, return_tensors=None):
        batch = super().__call__(features, return_tensors)
        chosen = torch.rand(len(features)) < 0.5
        batch["input_ids"][chosen, 0] = 0
        batch["labels"][chosen, 0] = -100
        return batch


def test_a_collator_that_draws_gives_source_and_target_of_the_same_draw(tmp_path):
    trainer, _ = make_graphed("t5", tmp_path, EagerGraphs(), data_collator=Masking(make_fast(), make_model("t5")))
    for batch in trainer.get_train_dataloader():
        assert (batch["input_ids"][:, 0] == 0).tolist() == (batch["labels"][:, 0] == -100).tolist()
    found, planned = collated_shapes(trainer)
    assert found == planned


class SquareMask(DataCollatorForSeq2Seq):
    """Gives a mask over pairs of tokens."""

    def __call__(self, features, return_tensors=None):
        batch = super().__call__(features, return_tensors)
        mask = batch["attention_mask"]
        return {**batch, "attention_mask": mask[:, None, :] * mask[:, :, None]}


def test_a_field_that_cannot_be_cut_to_its_own_length_is_refused(tmp_path):
    collator = SquareMask(make_fast(), make_model("t5"))
    trainer, _ = make_graphed("t5", tmp_path, EagerGraphs(), data_collator=collator)
    with pytest.raises(ArgumentError, match=r"the collator gives attention_mask of shape \(\d+, \d+, \d+\), which can"):
        list(trainer.get_train_dataloader())


def test_two_lengths_that_are_padded_on_the_left_are_refused(tmp_path):
    tokenizer = make_fast()
    tokenizer.padding_side = "left"
    collator = DataCollatorForSeq2Seq(tokenizer, make_model("t5"))
    trainer, _ = make_graphed("t5", tmp_path, EagerGraphs(), data_collator=collator)
    with pytest.raises(
        ArgumentError, match=r"DataCollatorForSeq2Seq cannot be told the planned lengths; .*on the right"
    ):
        trainer.get_train_dataloader()


@dataclass
class SpeechCollator:
    """As in the examples of transformers: pads its inputs to a multiple."""

    tokenizer: Any
    name: str
    padding: Any = True
    pad_to_multiple_of: Any = None

    def __call__(self, features):
        rows = [{"input_ids": feature[self.name]} for feature in features]
        batch = self.tokenizer.pad(
            rows, padding=self.padding, pad_to_multiple_of=self.pad_to_multiple_of, return_tensors="pt"
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {**batch, "labels": labels}


def with_other_inputs(name):
    """Return options of a training whose examples have no ``input_ids``."""
    rows = [example["input_ids"] for example in make_examples(40, causal=True)]
    collator = SpeechCollator(make_fast(), name)
    return {"examples": [{name: row} for row in rows], "lengths": [*map(len, rows)], "data_collator": collator}


def test_a_collator_of_input_values_is_told_their_lengths(tmp_path):
    check_same("llama", tmp_path, least_replayed=10, **with_other_inputs("input_values"))


def test_a_collator_of_inputs_that_are_not_known_is_refused(tmp_path):
    trainer, _ = make_graphed("llama", tmp_path, EagerGraphs(), **with_other_inputs("pixels"))
    message = (
        r"SpeechCollator can be told the lengths of input_ids or input_values, .*the examples have pixels; use batch"
    )
    with pytest.raises(ArgumentError, match=message):
        trainer.train()


def test_columns_that_the_model_does_not_take_are_removed_as_before(tmp_path):
    examples = [{**example, "text": "left out"} for example in make_examples(40, causal=True)]
    check_same("llama", tmp_path, examples=examples, remove_unused_columns=True)


def test_without_graphs_a_collator_pads_to_the_longest_example(tmp_path):
    trainer, _ = make_graphed("llama", tmp_path, False, grouping=bw.Buckets(1))
    widths = {batch["input_ids"].shape[1] for batch in trainer.get_train_dataloader()}
    assert len(widths) > 1


def test_the_logged_padding_is_that_of_the_planned_shapes(tmp_path):
    _, _, graphed = train("llama", tmp_path, EagerGraphs(), grouping=bw.Buckets(1), num_train_epochs=1)
    longest = max(len(example["input_ids"]) for example in make_examples(40, causal=True))
    logs = [entry for entry in graphed.state.log_history if "padding" in entry]
    examples = sum(entry["batch_size"] for entry in logs)
    padded = sum(entry["batch_size"] * longest for entry in logs)
    real = sum((1 - entry["padding"]) * entry["batch_size"] * longest for entry in logs)
    assert examples == 40
    assert padded == 40 * longest
    assert real == pytest.approx(sum(len(example["input_ids"]) for example in make_examples(40, causal=True)))


def test_examples_of_one_length_need_no_collator_that_pads(tmp_path):
    examples = [{name: value[:3] for name, value in example.items()} for example in make_examples(40, causal=True)]
    check_same("llama", tmp_path, examples=examples, data_collator=collate, least_replayed=4)


# Refusals


def test_graphs_are_off_without_being_asked_for(tmp_path):
    _, _, trainer = train("llama", tmp_path, False, num_train_epochs=1)
    summary = trainer.graph_summary()
    assert summary.num_replayed == summary.num_eager == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"controller": make_controller(8), "grouping": None}, "the shapes of batches are not planned with a controll"),
        ({"on_oom": "raise"}, r"on_oom='raise' leaves the backward pass to the trainer; use 'split' or 'skip'"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing runs the forward pass again inside the backward"),
        ({"torch_compile": True}, "torch_compile captures steps in its own way"),
        ({"micro_batch": FitToMemory(2)}, r"micro_batch=FitToMemory\(…\) cuts micro-batches as memory allows"),
    ],
    ids=["controller", "raise", "checkpointing", "compile", "limit"],
)
def test_what_cannot_be_replayed_is_refused_and_auto_runs_eagerly(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=f"graphs=True cannot be, as {message}.*pass graphs='auto'"):
        make_graphed("llama", tmp_path, EagerGraphs(), **options)


def test_graphs_need_cuda_and_auto_says_so_once(tmp_path):
    with pytest.raises(ArgumentError, match="graphs need a model on a CUDA device"):
        make_graphed("llama", tmp_path, True)
    with pytest.warns(UserWarning, match="steps run eagerly, without graphs: graphs need a model on a CUDA") as caught:
        _, _, trainer = train("llama", tmp_path, "auto", num_train_epochs=1)
    assert len([warning for warning in caught if "without graphs" in str(warning.message)]) == 1
    assert list(trainer.graph_summary().reasons) == ["graphs need a model on a CUDA device"]


def test_other_values_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="graphs must be False, 'auto' or True, got 'yes'"):
        make_graphed("llama", tmp_path, "yes")


@pytest.mark.parametrize("kind", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_ranks_that_hold_parts_of_the_model_are_refused(kind, tmp_path):
    trainer, _ = make_graphed("llama", tmp_path, False)
    setattr(trainer, kind, True)
    with pytest.raises(ArgumentError, match="ranks hold parts of the model or of an example, with FSDP, DeepSpeed"):
        TrainerGraphs(EagerGraphs()).check(trainer, has_controller=False, on_oom="split")
    with pytest.warns(UserWarning, match="steps run eagerly, without graphs: .*CUDA"):
        TrainerGraphs("auto").check(trainer, has_controller=False, on_oom="split")


def test_a_training_step_of_the_user_is_refused(tmp_path):
    class Stepping(Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    with pytest.raises(ArgumentError, match=r"Stepping\.training_step is not the Trainer's own"):
        make_graphed("llama", tmp_path, EagerGraphs(), trainer_cls=Stepping)


def test_a_compute_loss_above_the_adaptive_one_is_refused(tmp_path):
    class Above(AdaptiveTrainerMixin, Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    args = make_args(tmp_path)
    with pytest.raises(ArgumentError, match="compute_loss lies above the adaptive one; write it into a trainer class"):
        Above(make_model("llama"), args, train_dataset=make_examples(4, causal=True), budget=bw.MaxTokens(60),
              graphs=EagerGraphs())  # fmt: skip


def test_a_plan_of_many_shapes_is_refused_with_what_to_do(tmp_path):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 120, (400,), generator=generator).tolist()
    examples = [{"input_ids": [3] * length, "labels": [3] * length} for length in lengths]
    trainer, _ = make_graphed("llama", tmp_path, EagerGraphs(), examples=examples, grouping=None,
                              budget=bw.MaxTokens(200))  # fmt: skip
    with pytest.raises(ArgumentError, match=r"the plan has \d+ shapes, and each would be a graph; group by Buckets"):
        trainer.train()


def test_a_collator_that_cannot_be_told_the_lengths_is_refused(tmp_path):
    trainer, _ = make_graphed("llama", tmp_path, EagerGraphs(), data_collator=collate)
    with pytest.raises(ArgumentError, match=r"collate cannot be told the planned lengths; use .*PadCollator"):
        trainer.train()
    trainer, _ = make_graphed("llama", tmp_path, EagerGraphs(), data_collator=DataCollatorWithFlattening())
    with pytest.raises(ArgumentError, match="DataCollatorWithFlattening cannot be told the planned lengths"):
        trainer.train()
    padded = DataCollatorForTokenClassification(make_fast(), padding="max_length", max_length=64)
    trainer, _ = make_graphed("llama", tmp_path, EagerGraphs(), data_collator=padded)
    with pytest.raises(ArgumentError, match="cannot be told the planned lengths"):
        trainer.train()


class Annealed(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * (1 + self.state.global_step)


class Logging(Trainer):
    def compute_loss(self, *args, **kwargs):
        if self.model.training:
            self.log({"seen": 1.0})
        return super().compute_loss(*args, **kwargs)


class Counting(Trainer):
    num_calls = 0

    def compute_loss(self, *args, **kwargs):
        self.num_calls += 1
        return super().compute_loss(*args, **kwargs)


class Listing(Trainer):
    calls = ()

    def compute_loss(self, *args, **kwargs):
        self.__dict__.setdefault("calls", []).append(1)
        return super().compute_loss(*args, **kwargs)


class Writing(Trainer):
    """Leaves the newest loss where a callback finds it."""

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.state.newest = loss.detach()
        return loss


class Figures(Trainer):
    """Counts its calls in a container, in one of the ways that trainers do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.num = {"calls": 0}
        self.lists = {"train": []}
        self.figures = defaultdict(list)
        self.meter = SimpleNamespace(calls=0, trainer=self)


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


class InObject(Figures):
    def compute_loss(self, *args, **kwargs):
        self.meter.calls += 1
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("trainer_cls", "message"),
    [
        (Annealed, "compute_loss reads trainer.state.global_step, which a replay would not see change"),
        (Logging, "compute_loss calls trainer.log, which a replay would not"),
        (Counting, "compute_loss changes trainer.num_calls, and a replay would not"),
        (Listing, "compute_loss changes trainer.calls, and a replay would not"),
        (Writing, "compute_loss writes trainer.state.newest, which a replay would not"),
        (InDict, "compute_loss changes trainer.num, and a replay would not"),
        (InNestedList, "compute_loss changes trainer.lists, and a replay would not"),
        (InDefaultDict, "compute_loss changes trainer.figures, and a replay would not"),
        (InObject, "compute_loss changes trainer.meter, and a replay would not"),
    ],
    ids=["state", "log", "count", "list", "writing", "dict", "nested", "default", "object"],
)
def test_a_loss_that_does_more_than_a_replay_runs_eagerly_with_one_message(trainer_cls, message, tmp_path):
    weights, gradients, _ = train("llama", tmp_path, False, trainer_cls=trainer_cls)
    with pytest.warns(UserWarning, match=f"steps run eagerly, without graphs: .*{message}") as caught:
        found, seen, graphed = train("llama", tmp_path, EagerGraphs(), trainer_cls=trainer_cls)
    assert len([warning for warning in caught if "without graphs" in str(warning.message)]) == 1
    assert graphed.graph_summary().num_replayed == 0
    assert relative_error(seen, gradients) < 1e-12
    assert relative_error(found, weights) < 1e-12


def test_containers_that_a_loss_leaves_alone_are_no_reason(tmp_path):
    check_same("llama", tmp_path, trainer_cls=Figures, least_replayed=10)


class Newest(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(float(state.newest))


@pytest.mark.filterwarnings("ignore:steps run eagerly")
def test_what_a_loss_writes_to_the_state_is_seen_by_callbacks(tmp_path):
    eager, graphed = Newest(), Newest()
    train("llama", tmp_path, False, trainer_cls=Writing, callbacks=[eager])
    train("llama", tmp_path, TapeGraphs(), trainer_cls=Writing, callbacks=[graphed])
    assert graphed.seen == pytest.approx(eager.seen, rel=1e-5)


def test_a_log_method_given_to_the_trainer_itself_is_still_there_after_training(tmp_path):
    trainer, _ = make_graphed("llama", tmp_path, EagerGraphs(), logging_strategy="steps", logging_steps=1)
    seen = []
    trainer.log = lambda logs, *args, **kwargs: seen.append(logs)
    trainer.train()
    assert "log" in vars(trainer)
    assert len(seen) >= trainer.state.global_step


def test_parameters_that_nobody_updates_are_noticed(tmp_path):
    model = make_model("llama")
    part = torch.optim.SGD(list(model.parameters())[1:], lr=0.01)
    with pytest.warns(UserWarning, match="parameters that the optimizer does not update get gradients; freeze them"):
        _, _, graphed = train("llama", tmp_path, EagerGraphs(), model=model, optimizers=(part, None))
    assert graphed.graph_summary().num_replayed == 0


def test_hooks_of_parameters_are_noticed(tmp_path):
    model = make_model("llama")
    next(model.parameters()).register_hook(lambda gradient: 2 * gradient)
    with pytest.warns(UserWarning, match="a parameter has a hook, which does not run at a replay"):
        _, _, graphed = train("llama", tmp_path, EagerGraphs(), model=model)
    assert graphed.graph_summary().num_replayed == 0


class Tied(nn.Module):
    """Its loss is a mean over pairs of rows, so no part of a batch has a weight."""

    main_input_name = "input_ids"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(23, 4, dtype=torch.float64)

    def forward(self, input_ids, attention_mask=None, labels=None):
        rows = (self.table(input_ids) * attention_mask[..., None]).sum(dim=1)
        return {"loss": (rows @ rows.T).square().mean()}


def test_a_loss_whose_mean_nobody_knows_runs_in_the_trainers_own_step(tmp_path):
    with pytest.warns(UserWarning, match="it is not known what the loss is a mean over, so the trainer's own step"):
        _, _, graphed = train("llama", tmp_path, EagerGraphs(), model=Tied(), num_train_epochs=1)
    assert graphed.graph_summary().num_replayed == 0


# On a device


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_trainer_on_cuda_replays_what_it_would_run_eagerly(name, bf16, tmp_path):
    options = {"use_cpu": False, "bf16": bf16, "gradient_accumulation_steps": 2}
    _, gradients, eager = train(name, tmp_path, False, model=make_model(name).float(), **options)
    _, seen, graphed = train(name, tmp_path, True, model=make_model(name).float(), **options)
    assert graphed.graph_summary().num_replayed > 5
    assert relative_error(seen[0], gradients[0]) < (5e-2 if bf16 else 1e-4)
    assert losses(graphed) == pytest.approx(losses(eager), rel=5e-2 if bf16 else 1e-3)
