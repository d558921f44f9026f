"""sentence-transformers' trainer: lengths of texts, and losses that compare the examples of a batch or do not."""

import datasets
import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError, LengthsError
from batchwright.integrations.huggingface import adaptive
from batchwright.step.losses import whole_batch

from ..dynabatch.models import NUM_TOKENS
from ..dynabatch.trainer.training import Gradients, flat_gradient, make_args
from .preferences import make_tokenizer, text
from .trainers import flat, flat_parameters, relative_error

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="sentence-transformers is not installed; it is in the group dev"
)
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments  # noqa: E402
from sentence_transformers.sentence_transformer import losses  # noqa: E402

NUM = 20
BUDGET = bw.MaxTokens(64)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Return a folder with a tiny encoder and its tokenizer."""
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def save_encoder(folder):
    """Write a tiny encoder and its tokenizer into a folder, and return its name."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=NUM_TOKENS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def make_model(folder):
    module = sentence_transformers.sentence_transformer.modules
    transformer = module.Transformer(folder)
    transformer.max_seq_length = 16
    pooling = module.Pooling(8, pooling_mode="mean")
    return sentence_transformers.SentenceTransformer(modules=[transformer, pooling], device="cpu").double()


def make_texts(*, labels=False, seed=0):
    rows = [
        {
            "anchor": text(1 + n % 7, seed + n),
            "positive": text(1 + (5 * n) % 18, seed + 100 + n),
            **({"label": (n % 5) / 4} if labels else {}),
        }
        for n in range(NUM)
    ]
    return datasets.Dataset.from_list(rows)


def make_trainer(folder, tmp_path, loss, *, labels=False, wrap=adaptive, **options):
    model, gradients = make_model(folder), Gradients()
    kind = SentenceTransformerTrainingArguments
    args = {name: options.pop(name) for name in list(options) if name in kind.__dataclass_fields__}
    given = {"train_dataset": make_texts(labels=labels), **options}
    trainer = wrap(SentenceTransformerTrainer)(
        model=model, args=make_args(tmp_path, kind, **args), loss=loss(model), callbacks=[gradients], **given
    )
    seen = record(trainer)
    return trainer, gradients, seen


def record(trainer):
    """Note the examples of every batch that is collated."""
    seen, kind = [], type(trainer.data_collator)

    class Recording(kind):
        def __call__(self, examples):
            seen.append(examples)
            return super().__call__(examples)

    trainer.data_collator.__class__ = Recording
    return seen


def names(examples):
    return [(example["anchor"], example["positive"]) for example in examples]


def in_one_piece(trainer, examples):
    """Return the gradient of the trainer's own loss over some examples at once."""
    trainer.model.train()
    trainer.model.zero_grad()
    inputs = trainer._prepare_inputs(trainer.data_collator(list(examples)))
    trainer.compute_loss(trainer.model, inputs).backward()
    return flat_gradient(trainer.model)


def trained(trainer, seen):
    """Train, and return the batches that were trained on; texts are collated before to be measured."""
    trainer.get_train_dataloader()
    num = len(seen)
    trainer.train()
    return seen[num:]


def check(folder, tmp_path, loss, gradients, updates, **options):
    reference, *_ = make_trainer(folder, tmp_path, loss, wrap=lambda cls: cls, **options)
    assert len(gradients.seen) == len(updates) > 1
    for found, examples in zip(gradients.seen, updates, strict=True):
        assert relative_error(found, in_one_piece(reference, examples)) < 1e-6


def test_a_planned_batch_of_negatives_is_run_whole(encoder, tmp_path):
    loss = losses.MultipleNegativesRankingLoss
    trainer, gradients, seen = make_trainer(encoder, tmp_path, loss, budget=BUDGET)
    batches = trained(trainer, seen)
    check(encoder, tmp_path, loss, gradients, batches)
    assert sorted(names(flat(batches))) == sorted(names(make_texts()))
    sizes = [sum(ids.numel() for name, ids in trainer.data_collator(list(batch)).items() if name.endswith("input_ids"))
             for batch in list(batches)]  # fmt: skip
    assert 32 < max(sizes) <= 64
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["batch_size"] for entry in logs] == [len(batch) for batch in batches]


@pytest.mark.parametrize(
    ("loss", "labels"),
    [(losses.MultipleNegativesRankingLoss, False), (losses.CoSENTLoss, True)],
    ids=["negatives", "cosent"],
)
def test_losses_that_compare_examples_are_refused_over_micro_batches(loss, labels, encoder, tmp_path):
    options = {"labels": labels, "budget": BUDGET, "gradient_accumulation_steps": 2}
    trainer, *_ = make_trainer(encoder, tmp_path, loss, **options)
    with pytest.raises(ArgumentError, match="needs to know what each of them counts"):
        trainer.train()
    trainer, *_ = make_trainer(encoder, tmp_path, loss, weighting="examples", **options)
    with pytest.raises(ArgumentError, match="is not a mean over its examples"):
        trainer.train()


def test_a_loss_that_is_marked_is_never_cut(encoder, tmp_path):
    def loss(model):
        return whole_batch(losses.MultipleNegativesRankingLoss(model))

    options = {"budget": BUDGET, "weighting": "examples"}
    trainer, *_ = make_trainer(encoder, tmp_path, loss, gradient_accumulation_steps=2, **options)
    with pytest.raises(ArgumentError, match="its loss was declared to need the whole batch"):
        trainer.train()
    trainer, *_ = make_trainer(encoder, tmp_path, loss, **options)

    def fail(module, args):
        raise torch.OutOfMemoryError("out of memory")

    trainer.model.register_forward_pre_hook(fail)
    with pytest.raises(DoesNotFitError, match="cannot be cut: its loss was declared to need the whole batch"):
        trainer.train()


def test_a_loss_that_is_a_mean_over_examples_is_exact_over_micro_batches(encoder, tmp_path):
    options = {"labels": True, "weighting": "examples", "budget": BUDGET, "gradient_accumulation_steps": 2}
    trainer, gradients, seen = make_trainer(encoder, tmp_path, losses.CosineSimilarityLoss, **options)
    batches = trained(trainer, seen)
    updates = [flat(batches[start : start + 2]) for start in range(0, len(batches), 2)]
    check(encoder, tmp_path, losses.CosineSimilarityLoss, gradients, updates, labels=True)


def test_lengths_are_those_of_the_tokens_that_the_collator_makes(encoder, tmp_path):
    trainer, *_ = make_trainer(
        encoder, tmp_path, losses.MultipleNegativesRankingLoss, budget=BUDGET, prompts={"anchor": "w3 w4 "}
    )
    trainer.get_train_dataloader()
    expected = [[len(row["anchor"].split()) + 2, min(16, len(row["positive"].split()))] for row in make_texts()]
    assert trainer._batching.data.batches.lengths.tolist() == expected


def test_texts_without_a_mask_need_lengths(encoder, tmp_path):
    trainer, *_ = make_trainer(encoder, tmp_path, losses.MultipleNegativesRankingLoss, budget=BUDGET)
    preprocess = trainer.data_collator.preprocess_fn
    trainer.data_collator.preprocess_fn = lambda texts, **options: {
        "input_ids": preprocess(texts, **options)["input_ids"]
    }
    with pytest.raises(LengthsError, match=r"no attention_mask with a row per example.*pass lengths="):
        trainer.get_train_dataloader()


@pytest.mark.parametrize("sampler", ["no_duplicates", "group_by_label"])
def test_a_sampler_that_decides_about_batches_is_refused(sampler, encoder, tmp_path):
    with pytest.raises(ArgumentError, match=f"batch_sampler='{sampler}' decides which examples share a batch"):
        make_trainer(encoder, tmp_path, losses.MultipleNegativesRankingLoss, budget=BUDGET, batch_sampler=sampler)


def test_several_data_sets_are_refused(encoder, tmp_path):
    data = {"first": make_texts(), "second": make_texts(seed=50)}
    with pytest.raises(ArgumentError, match="the training data are 2 data sets"):
        make_trainer(encoder, tmp_path, losses.MultipleNegativesRankingLoss, budget=BUDGET, train_dataset=data)


def test_evaluation_keeps_the_batches_of_the_trainer(encoder, tmp_path):
    loss, data = losses.MultipleNegativesRankingLoss, make_texts(seed=500)
    options = {"eval_dataset": data, "per_device_eval_batch_size": 6}
    trainer, *_ = make_trainer(encoder, tmp_path, loss, budget=BUDGET, **options)
    plain, *_ = make_trainer(encoder, tmp_path, loss, wrap=lambda cls: cls, **options)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)


def test_a_run_that_stops_within_an_epoch_continues_exactly(encoder, tmp_path):
    loss, options = losses.MultipleNegativesRankingLoss, {"budget": BUDGET, "learning_rate": 0.1}
    whole, _, seen = make_trainer(
        encoder, tmp_path, loss, save_strategy="steps", save_steps=2, num_train_epochs=2, **options
    )
    expected = trained(whole, seen)
    second, _, seen = make_trainer(encoder, tmp_path, loss, num_train_epochs=2, **options)
    second.get_train_dataloader()
    num = len(seen)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [names(batch) for batch in seen[num:]] == [names(batch) for batch in expected[2:]]
    assert torch.equal(flat_parameters(second.model), flat_parameters(whole.model))
    assert np.isfinite(whole.state.log_history[0]["loss"])
