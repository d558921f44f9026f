"""An update uses the gradient of the mean over its labels, whatever the sizes of the micro-batches."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import Seq2SeqTrainer, Trainer

from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.integrations._devices import parallel_size
from batchwright.integrations.dynabatch import make_dynabatch_trainer
from batchwright.step.losses import whole_batch

from ..models import MODELS, NUM_TOKENS, collate, make_examples
from .training import exact_gradient, flat_gradient, make_sampler, make_trainer, relative_error, windows

TOLERANCE = 1e-6  # norms of T5 and Llama, and the loss of causal models, round to float32 whatever runs


def check(name, trainer, gradients, window):
    examples, sampler = trainer.train_dataset, make_sampler(trainer.train_dataset)
    expected = [exact_gradient(name, trainer.model, part, examples) for part in windows(sampler, window)]
    trainer.train()
    assert len(gradients.seen) == len(expected)
    for found, (gradient, _) in zip(gradients.seen, expected, strict=True):
        assert relative_error(found, gradient) < TOLERANCE
    return [loss for _, loss in expected]


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_uneven_micro_batches_give_the_gradient_of_the_mean_over_labels(name, window, tmp_path):
    trainer, gradients = make_trainer(name, tmp_path, gradient_accumulation_steps=window)
    sizes = [len(batch) for batch in make_sampler(trainer.train_dataset).batches]
    assert len(set(sizes)) > 2  # or the test would show nothing
    check(name, trainer, gradients, window)


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_trainer_is_wrong_where_the_loss_ignores_the_number_of_labels(name, tmp_path):
    # So that the test above is known to be able to fail: the same batches, without our weights.
    class Unweighted(make_dynabatch_trainer(Trainer)):
        def _can_weigh(self):
            return False

    examples = make_examples(causal=MODELS[name][3])
    trainer, gradients = make_trainer(name, tmp_path, trainer_cls=Trainer, gradient_accumulation_steps=2)
    trainer.__class__ = Unweighted
    trainer.train()
    first = windows(make_sampler(examples), 2)[0]
    error = relative_error(gradients.seen[0], exact_gradient(name, trainer.model, first, examples)[0])
    assert error < TOLERANCE if name == "llama" else error > 0.5


@pytest.mark.parametrize("name", MODELS)
def test_the_logged_loss_is_the_mean_over_labels(name, tmp_path):
    trainer, gradients = make_trainer(name, tmp_path, gradient_accumulation_steps=2)
    losses = check(name, trainer, gradients, 2)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_clipping_sees_the_norm_of_the_exact_gradient(name, tmp_path):
    trainer, _ = make_trainer(name, tmp_path, gradient_accumulation_steps=2, max_grad_norm=1e-3)
    expected = exact_gradient(
        name, trainer.model, windows(make_sampler(trainer.train_dataset), 2)[0], trainer.train_dataset
    )
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert norms[0] == pytest.approx(float(expected[0].norm()), rel=1e-5)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_label_smoothing_is_weighted_by_labels_too(name, tmp_path):
    examples = make_examples(causal=MODELS[name][3])
    found = []
    for sampler, window in ((make_sampler(examples, 24), 1), (make_sampler(examples), 9)):
        options = {"gradient_accumulation_steps": window, "label_smoothing_factor": 0.1}
        trainer, gradients = make_trainer(name, tmp_path, sampler=sampler, **options)
        if name == "t5":  # the trainer takes the labels away, so the collator must feed the decoder
            trainer.data_collator = partial(collate_for_decoder, trainer.model)
        trainer.train()
        found += gradients.seen
    together, apart = found
    assert relative_error(apart, together) < TOLERANCE


def collate_for_decoder(model, examples):
    batch = collate(examples)
    return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])}


def test_a_loss_function_of_the_user_that_ignores_the_number_is_weighted(tmp_path):
    def mean_loss(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"][:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    trainer, gradients = make_trainer("llama", tmp_path, gradient_accumulation_steps=2, compute_loss_func=mean_loss)
    check("llama", trainer, gradients, 2)


def test_a_trainer_with_a_loss_of_its_own_is_weighted(tmp_path):
    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    trainer, gradients = make_trainer("llama", tmp_path, gradient_accumulation_steps=2, trainer_cls=OwnLoss)
    check("llama", trainer, gradients, 2)


def test_seq2seq_trainers_work_and_evaluation_is_left_alone(tmp_path):
    trainer, gradients = make_trainer("t5", tmp_path, trainer_cls=Seq2SeqTrainer, gradient_accumulation_steps=2)
    plain = Seq2SeqTrainer(model=trainer.model, args=trainer.args, data_collator=trainer.data_collator)
    expected = plain.evaluate(trainer.train_dataset)["eval_loss"]
    check("t5", trainer, gradients, 2)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(expected, rel=1e-9)


class Regressor(torch.nn.Module):
    """A model of images whose loss is not a mean over labels."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, pixel_values, targets):
        return {"loss": (self.layer(pixel_values)[:, 0] - targets).square().mean()}


def stack(examples):
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


@pytest.mark.parametrize("fallback", [None, "split_retry"])
def test_other_modalities_are_weighted_by_their_examples(fallback, tmp_path):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    examples = [{"pixel_values": draw(2), "targets": draw(())} for _ in range(7)]
    sampler = make_sampler([{"input_ids": [0] * (9 - number)} for number in range(7)], 2, smooth_batches=False)
    model = Regressor()
    trainer, gradients = make_trainer(
        "t5",
        tmp_path,
        model=model,
        examples=examples,
        sampler=sampler,
        gradient_accumulation_steps=4,
        batch_size_key="pixel_values",
        oom_fallback=fallback,
    )
    trainer.data_collator = stack
    trainer.train()
    model.zero_grad()
    model(**stack(examples))["loss"].backward()
    assert relative_error(gradients.seen[0], torch.cat([p.grad.flatten() for p in model.parameters()])) < 1e-12


class Contrastive(torch.nn.Module):
    """A loss that belongs to a batch as a whole: no sum of it over examples exists."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(NUM_TOKENS, 4, dtype=torch.float64)

    def forward(self, input_ids, attention_mask, labels):
        rows = self.table(input_ids).mean(dim=1)
        return {"loss": F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))}


def test_a_loss_that_is_no_mean_over_labels_is_weighted_by_examples_with_a_warning(tmp_path):
    trainer, gradients = make_trainer("t5", tmp_path, model=Contrastive(), gradient_accumulation_steps=9)
    (batches,) = windows(make_sampler(trainer.train_dataset), 9)
    model = copy.deepcopy(trainer.model)
    for batch in batches:
        part = collate([trainer.train_dataset[index] for index in batch])
        (model(**part)["loss"] * len(batch) / 24).backward()
    with pytest.warns(UserWarning, match="weighted by their examples: the loss of Contrastive is not a mean"):
        trainer.train()
    assert relative_error(gradients.seen[0], flat_gradient(model)) < 1e-12


def test_a_loss_that_is_no_mean_over_labels_is_never_split(tmp_path):
    """Split after out of memory, its gradient was wrong, and nothing said so."""
    model = Contrastive()

    def before(module, args, kwargs):
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("out of memory")

    model.register_forward_pre_hook(before, with_kwargs=True)
    trainer, _ = make_trainer("t5", tmp_path, model=model, oom_fallback="split_retry")
    with pytest.raises(DoesNotFitError, match="cannot be cut: the loss of Contrastive is not a mean"):
        trainer.train()


def test_a_declared_loss_needs_updates_of_one_micro_batch(tmp_path):
    trainer, gradients = make_trainer("t5", tmp_path, model=whole_batch(Contrastive()))
    trainer.train()
    model, examples = Contrastive(), trainer.train_dataset
    model.load_state_dict(trainer.model.state_dict())
    model(**collate([examples[index] for index in make_sampler(examples).batches[0]]))["loss"].backward()
    assert relative_error(gradients.seen[0], flat_gradient(model)) < 1e-12
    trainer, _ = make_trainer("t5", tmp_path, model=whole_batch(Contrastive()), gradient_accumulation_steps=2)
    with pytest.raises(ArgumentError, match="2 micro-batches is not one whole batch"):
        trainer.train()


def test_tensor_parallel_and_data_parallel_keep_the_rule_of_the_trainer(tmp_path):
    trainer, _ = make_trainer("t5", tmp_path)
    assert trainer._can_weigh()
    trainer.get_tp_size = lambda: 2
    assert parallel_size(trainer) == 2
    assert not trainer._can_weigh()


def test_a_fallback_is_refused_where_a_rank_cannot_try_again_alone(tmp_path):
    class Sharded(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.is_fsdp_enabled = True

    with pytest.raises(ArgumentError, match="with FSDP, DeepSpeed"):
        make_trainer("t5", tmp_path, trainer_cls=Sharded, oom_fallback="split_retry")
