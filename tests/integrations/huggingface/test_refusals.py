"""An adaptive trainer makes the exact update, or says why it cannot: losses that no weights of micro-batches fit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer

import batchwright as bw
from batchwright._ranks import Ranks
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.integrations._safe_steps import check_retries
from batchwright.integrations.huggingface import AdaptiveTrainerMixin
from batchwright.step.losses import whole_batch

from ..dynabatch.failing import raise_error
from .trainers import (
    TOLERANCE,
    check,
    collate,
    exact,
    flat,
    flat_gradient,
    make_args,
    make_controller,
    make_model,
    make_trainer,
    numbered,
    relative_error,
    windows,
)


class Contrastive(nn.Module):
    """Every row is to be found among all rows of its batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(23, 4, dtype=torch.float64)

    def forward(self, input_ids, attention_mask=None, labels=None):
        rows = (self.table(input_ids) * attention_mask[..., None]).sum(dim=1)
        return {"loss": F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))}


def without_labels(examples):
    return {name: value for name, value in collate(examples).items() if name != "labels"}


def make_contrastive(folder, *, most=None, **options):
    model = Contrastive()
    if most is not None:
        model.register_forward_pre_hook(
            lambda module, args, kwargs: (
                raise_error(torch.OutOfMemoryError("out of memory")) if len(kwargs["input_ids"]) > most else None
            ),
            with_kwargs=True,
        )
    options = {"budget": bw.MaxItems(6), "data_collator": without_labels, **options}
    return make_trainer("t5", folder, model=model, **options)


def gradients_of_contrastive(batches):
    model, found, examples = Contrastive(), [], numbered()
    for batch in batches:
        model.zero_grad()
        model(**without_labels([examples[number] for number in batch]))["loss"].backward()
        found.append(flat_gradient(model))
    return found


def recorded(trainer):
    """Return the batches that a trainer collates, and note them."""
    seen, collator = [], trainer.data_collator
    trainer.data_collator = lambda examples: seen.append([e["number"] for e in examples]) or collator(examples)
    return seen


def test_a_loss_without_labels_is_exact_in_updates_of_one_micro_batch(tmp_path):
    trainer, _, gradients = make_contrastive(tmp_path)
    seen = recorded(trainer)
    trainer.train()
    for found, expected in zip(gradients.seen, gradients_of_contrastive(seen), strict=True):
        assert relative_error(found, expected) < 1e-12


def test_a_loss_without_labels_is_not_split(tmp_path):
    """Split after out of memory, its gradient was wrong by 0.81."""
    trainer, *_ = make_contrastive(tmp_path, most=3)
    with pytest.raises(DoesNotFitError, match="cannot be cut: the batch has no tensor 'labels'"):
        trainer.train()


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"controller": make_controller(12)}])
def test_several_micro_batches_without_labels_are_refused(options, tmp_path):
    trainer, *_ = make_contrastive(tmp_path, **options)
    with pytest.raises(ArgumentError, match=r"update of 2 micro-batches needs to know.*no tensor 'labels'.*'examples'"):
        trainer.train()


def test_with_labels_a_loss_that_compares_examples_is_found_out(tmp_path):
    trainer, *_ = make_contrastive(tmp_path, data_collator=collate, gradient_accumulation_steps=2)
    with pytest.raises(ArgumentError, match=r"2 micro-batches.*the loss of Contrastive is not a mean over its labels"):
        trainer.train()
    trainer, *_ = make_contrastive(tmp_path, data_collator=collate, most=3)
    with pytest.raises(DoesNotFitError, match="cannot be cut: the loss of Contrastive is not a mean"):
        trainer.train()


def test_it_is_found_out_by_the_first_batch_with_two_rows(tmp_path):
    options = {"data_collator": collate, "lengths": [30] + [5] * 23, "budget": bw.MaxTokens(30)}
    options |= {"train_sampling_strategy": "sequential", "grouping": bw.Sorted()}
    trainer, *_ = make_contrastive(tmp_path, **options)
    trainer.train()  # one micro-batch per update: nothing is weighed
    assert "not a mean" in trainer._batching.weights.refusal


def mark(kind):
    """Return a trainer class and arguments whose loss is declared to need the whole batch."""

    class Declared(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs)

    if kind == "compute_loss":
        Declared.compute_loss = whole_batch(Declared.compute_loss)
        return {"trainer_cls": Declared}
    return {"compute_loss_func": whole_batch(lambda outputs, labels, num_items_in_batch=None: outputs["loss"])}


@pytest.mark.parametrize("kind", ["compute_loss", "compute_loss_func"])
def test_a_declared_loss_runs_whole_and_is_never_split(kind, tmp_path):
    trainer, _, gradients = make_contrastive(tmp_path, **mark(kind))
    seen = recorded(trainer)
    trainer.train()
    for found, expected in zip(gradients.seen, gradients_of_contrastive(seen), strict=True):
        assert relative_error(found, expected) < 1e-12
    trainer, *_ = make_contrastive(tmp_path, most=3, weighting="examples", **mark(kind))
    with pytest.raises(DoesNotFitError, match="cannot be cut: its loss was declared to need the whole batch"):
        trainer.train()
    trainer, *_ = make_contrastive(tmp_path, gradient_accumulation_steps=2, **mark(kind))
    with pytest.raises(ArgumentError, match="declared to need the whole batch; use one micro-batch per update"):
        trainer.train()


def test_a_declared_model_is_never_split(tmp_path):
    trainer, *_ = make_contrastive(tmp_path, gradient_accumulation_steps=2)
    whole_batch(trainer.model)
    with pytest.raises(ArgumentError, match="declared to need the whole batch"):
        trainer.train()


def mean_of_means(outputs, labels, num_items_in_batch=None):
    """Every row counts the same: with labels of tokens, no mean over labels."""
    logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    counts = (labels != -100).sum(dim=1)
    return (losses.sum(dim=1) / counts).mean()


def test_a_mean_over_examples_has_to_be_said(tmp_path):
    options = {"compute_loss_func": mean_of_means, "gradient_accumulation_steps": 2}
    trainer, *_ = make_trainer("llama", tmp_path, **options)
    with pytest.raises(ArgumentError, match=r"not a mean over its labels: that of two examples with 1 and \d labels"):
        trainer.train()
    trainer, seen, gradients = make_trainer("llama", tmp_path, weighting="examples", **options)
    trainer.train()
    check("llama", trainer, gradients, windows(seen, 2), "examples")


def sum_over_number(outputs, labels, num_items_in_batch):
    """A loss that cannot do without the number."""
    logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


def test_a_loss_that_only_divides_by_the_number_it_gets_is_exact(tmp_path):
    options = {"compute_loss_func": sum_over_number, "gradient_accumulation_steps": 2}
    trainer, seen, gradients = make_trainer("llama", tmp_path, eval_dataset=numbered(21, causal=True), **options)
    trainer.train()
    check("llama", trainer, gradients, windows(seen, 2))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(exact("llama", range(21))[1], rel=1e-6)


def test_a_sum_that_compares_examples_is_found_out(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        rows = outputs["logits"].mean(dim=1)
        number = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)), reduction="sum") / number

    trainer, *_ = make_trainer("llama", tmp_path, compute_loss_func=loss, gradient_accumulation_steps=2)
    with pytest.raises(ArgumentError, match="all with num_items_in_batch=1"):
        trainer.train()


def test_a_loss_above_the_adaptive_one_is_refused(tmp_path):
    """Micro-batches would be added up without weights."""

    class Above(AdaptiveTrainerMixin, Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return model(**inputs).loss

    examples = numbered(causal=True)
    trainer = Above(
        make_model("llama"), make_args(tmp_path, remove_unused_columns=False), collate, examples, budget=bw.MaxItems(4)
    )
    with pytest.raises(ArgumentError, match=r"does not call super\(\); write the loss into a trainer class"):
        trainer.train()


def masked_mean(outputs, labels, num_items_in_batch=None):
    """A mean as users write it: of no label it is 0 / 0."""
    logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
    kept = labels != -100
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (losses * kept).sum() / kept.sum()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("on_oom", ["split", "raise"])
def test_a_micro_batch_without_labels_that_count_adds_nothing(on_oom, fails, tmp_path):
    """Its gradient was NaN, while the log showed a clean loss."""
    examples, model = numbered(6, causal=True), make_model("llama")
    for place in (2, 3):
        examples[place]["labels"] = [-100] * len(examples[place]["labels"])
    if fails and on_oom == "split":
        model.register_forward_pre_hook(fail_above_rows(1), with_kwargs=True)
    options = {"lengths": [9, 9, 5, 5, 2, 2], "grouping": bw.Sorted(), "train_sampling_strategy": "sequential"}
    options |= {"budget": bw.MaxItems(2), "gradient_accumulation_steps": 3, "compute_loss_func": masked_mean}
    trainer, seen, gradients = make_trainer("llama", tmp_path, model=model, examples=examples, on_oom=on_oom, **options)
    trainer.train()
    assert [2, 3] in [sorted(batch) for batch in seen]
    kept = [number for number in flat(seen) if number not in (2, 3)]
    assert relative_error(gradients.seen[0], exact("llama", kept)[0]) < TOLERANCE


def fail_above_rows(most):
    def before(module, args, kwargs):
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > most:
            raise torch.OutOfMemoryError("out of memory")

    return before


def test_weighting_by_examples_with_logits_of_no_gradient_is_refused(tmp_path):
    class Detached(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            return (outputs.loss, {"logits": outputs.logits.detach()}) if return_outputs else outputs.loss

    trainer, *_ = make_trainer("llama", tmp_path, weighting="examples", trainer_cls=Detached)
    with pytest.raises(ArgumentError, match="needs logits with a gradient"):
        trainer.train()


class Scaled(nn.Module):
    """A loss with a weight of its own, which the model does not hold."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def __call__(self, outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"][:, :-1] * self.log_scale.exp()
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def test_parameters_that_only_the_optimizer_holds_are_exact_after_out_of_memory(tmp_path):
    """Left by the failed attempt, their gradient was wrong by 93 %."""
    loss, model, found = Scaled(), make_model("llama"), []
    reference = copy.deepcopy(loss)
    embedding = model.get_input_embeddings()

    def after(module, args, output):
        if torch.is_grad_enabled() and len(args[0]) > 2:
            output.register_hook(lambda gradient: raise_error(torch.OutOfMemoryError("out of memory")))

    embedding.register_forward_hook(after)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.0)
    optimizer.register_step_pre_hook(lambda *args: found.append(loss.log_scale.grad.clone()))
    options = {"gradient_accumulation_steps": 2, "optimizers": (optimizer, None), "compute_loss_func": loss}
    trainer, seen, _ = make_trainer("llama", tmp_path, model=model, **options)
    trainer.train()
    assert trainer._batching.updates.figures.num_ooms > 0
    plain, examples = make_model("llama"), numbered(causal=True)
    for gradient, numbers in zip(found, windows(seen, 2), strict=True):
        reference.log_scale.grad = None
        total = sum(
            reference(plain(**(batch := collate([examples[n]]))), batch["labels"]) * (batch["labels"].shape[1] - 1)
            for n in numbers
        )
        (total / sum(len(examples[n]["labels"]) - 1 for n in numbers)).backward()
        assert float(gradient) == pytest.approx(float(reference.log_scale.grad), rel=1e-5)


def test_a_batch_without_labels_among_others_is_refused(tmp_path):
    """It was counted by its rows, the others by their labels."""
    trainer, *_ = make_trainer("t5", tmp_path)
    weights, examples = trainer._batching.weights, numbered(3)
    weights.learn(trainer._trainer_loss(), [collate(examples)])
    assert weights.count(collate(examples)) == sum(len(example["labels"]) for example in examples)
    with pytest.raises(ArgumentError, match=r"no labels, only .* but others were weighed by theirs"):
        weights.count(without_labels(examples))


def test_a_mean_over_the_sequences_of_a_packed_row_is_refused(tmp_path):
    """Neither its labels nor its rows say how much such a row counts."""

    class BySequence(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels, starts = inputs["labels"], (inputs["position_ids"] == 0).cumsum(dim=1) - 1
            logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
            losses = F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="none")
            kept, group = labels[0, 1:] != -100, starts[0, 1:]
            means = [losses[kept & (group == g)].mean() for g in group.unique() if (kept & (group == g)).any()]
            return torch.stack(means).mean()

    options = {"trainer_cls": BySequence, "budget": bw.MaxItems(4), "data_collator": DataCollatorWithFlattening()}
    trainer, *_ = make_trainer("llama", tmp_path, gradient_accumulation_steps=2, **options)
    with pytest.raises(ArgumentError, match=r"2 micro-batches needs to know.*LlamaForCausalLM is not a mean"):
        trainer.train()


def test_hooks_of_parameters_that_would_see_parts_of_a_gradient_are_refused(tmp_path):
    """A hook that clamps saw every micro-batch by itself, and the sum of clamped gradients is another one."""
    for options, most in (({"gradient_accumulation_steps": 2}, 99), ({}, 2)):
        model = make_model("llama")
        model.lm_head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        model.register_forward_pre_hook(fail_above_rows(most), with_kwargs=True)
        trainer, *_ = make_trainer("llama", tmp_path, model=model, **options)
        with pytest.raises(ArgumentError, match="has a hook, which would see the gradients of"):
            trainer.train()


def test_an_optimizer_that_steps_inside_the_backward_pass_is_refused(tmp_path):
    model = make_model("llama")
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    trainer, *_ = make_trainer("llama", tmp_path, model=model)
    with pytest.raises(ArgumentError, match="may update it inside the backward pass"):
        trainer.train()
    trainer, *_ = make_trainer("llama", tmp_path, model=model, on_oom="raise")
    trainer.train()  # one backward pass per update, as without us


def test_ranks_that_meet_in_the_forward_pass_cannot_try_again():
    # SyncBatchNorm runs on GPUs only; that there are two ranks is all that matters here.
    ranks = Ranks(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
    check_retries(ranks, [])
    ranks.world_size = 2
    with pytest.raises(ArgumentError, match="ranks meet inside the forward pass, in SyncBatchNorm"):
        check_retries(ranks, [])
