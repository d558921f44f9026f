"""``grouping=Packed`` in adaptive trainers: flat where attention runs on it, padded else, always the same updates."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
from transformers import (
    DataCollatorForTokenClassification,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

import batchwright as bw
from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.integrations.huggingface import _packing, adaptive
from batchwright.step import PackCollator, PadCollator, use_varlen
from batchwright.step.packing import attention
from batchwright.step.packing._kernels import attend_plainly, torch_varlen

from ...step.packing.models import ENCODERS, MODELS, gradient, make_examples, make_model
from ..dynabatch.trainer.training import make_args
from .trainers import counts_after_shift

torch.set_num_threads(1)

# Where it is missing, that is the reason that is said.
needs_varlen = pytest.mark.skipif(torch_varlen() is None, reason="this torch has no torch.nn.attention.varlen")
BUDGET = bw.MaxTokens(48)
LENGTHS = np.random.default_rng(0).integers(1, 17, size=23).tolist()
TRAINING = {"learning_rate": 0.1, "num_train_epochs": 2, "lr_scheduler_type": "constant", "bf16": False}


class Numbered(list):
    """Examples that note when they are read."""

    def __init__(self, examples):
        super().__init__(examples)
        self.read = []

    def __getitem__(self, place):
        self.read.append(place)
        return super().__getitem__(place)


class Seen(TrainerCallback):
    """Keeps the gradients of all updates."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(gradient(model))


def make(folder, name="Llama", *, collator=None, is_ready=True, trainer_cls=Trainer, lengths=LENGTHS, **options):
    """Return a trainer of a model that can run on flat batches, by a reference in place of torch's attention."""
    model = options.pop("model", None) or make_model(name)
    if is_ready:
        use_varlen(model, attend=attend_plainly)
    examples = Numbered(make_examples(name, lengths))
    args = {key: options.pop(key) for key in list(options) if key in trainer_args()}
    seen = Seen()
    trainer = adaptive(trainer_cls)(
        model=model,
        args=make_args(folder, **{**TRAINING, **args}),
        train_dataset=examples,
        eval_dataset=make_examples(name, lengths[:7]),
        data_collator=collator or PadCollator(),
        callbacks=[seen],
        **{"budget": BUDGET, "grouping": bw.Packed(capacity=16), **options},
    )
    trainer.seen, trainer.examples = seen, examples
    return trainer


def trainer_args():
    from transformers import TrainingArguments

    return TrainingArguments.__dataclass_fields__


def planned(trainer):
    """Return the examples of every micro-batch, epoch by epoch."""
    source, epochs = trainer.get_train_dataloader().batches, []
    for epoch in range(int(trainer.args.num_train_epochs)):
        source.set_epoch(epoch)
        rows = [batch for batch in source.sampler]
        packs = source.sampler.plan.row_offsets is not None
        epochs.append([[index for row in batch for index in row] if packs else batch for batch in rows])
    return epochs


def padded_training(name, updates):
    """Train on padded batches of these examples with plain torch; return losses, gradients and parameters."""
    model, examples = make_model(name), make_examples(name, LENGTHS)
    optimizer = torch.optim.SGD(model.parameters(), lr=TRAINING["learning_rate"])
    losses, gradients = [], []
    for places in updates:
        batch = PadCollator()([examples[place] for place in places])
        labels = batch.pop("labels")
        logits = model(**batch).logits
        if name not in ENCODERS:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        gradients.append(gradient(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, parameters(model)


def parameters(model):
    return torch.cat([values.detach().flatten() for values in model.parameters()])


def logged(trainer, name="loss"):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def joined(parts):
    return [place for part in parts for place in part]


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


COLLATORS = {
    "the trainer's": PadCollator(),
    "flat": PackCollator(layout="flat"),
    "positions": PackCollator(),
    "wide": PackCollator(width=16),
}


@pytest.mark.parametrize("kind", COLLATORS)
def test_updates_are_those_of_padded_training_on_the_same_examples(kind, tmp_path):
    trainer = make(tmp_path, collator=COLLATORS[kind])
    trainer.train()
    epochs = planned(make(tmp_path, collator=COLLATORS[kind]))
    losses, gradients, found = padded_training("Llama", [places for epoch in epochs for places in epoch])
    assert len(losses) > 8
    assert all(sorted(joined(epoch)) == list(range(len(LENGTHS))) for epoch in epochs)
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    assert max(map(relative, trainer.seen.gradients, gradients)) < 1e-5
    assert relative(parameters(trainer.model), found) < 1e-6
    assert sorted(trainer.examples.read[-2 * len(LENGTHS) :]) == sorted(2 * list(range(len(LENGTHS))))
    padding = logged(trainer, "padding")
    assert (max(padding) == 0) == (kind in ("the trainer's", "flat"))
    if kind == "wide":
        num_rows = bw.BatchSampler(LENGTHS, BUDGET, grouping=bw.Packed(16), seed=42).plan.shapes[0, 0]
        num_tokens = sum(LENGTHS[place] for place in epochs[0][0])
        assert padding[0] == pytest.approx(1 - num_tokens / (16 * num_rows))


@pytest.mark.parametrize("name", [name for name in ("GPT-2", "BERT", "ModernBERT") if name in MODELS])
def test_other_models_are_packed_too(name, tmp_path):
    trainer = make(tmp_path, name, num_train_epochs=1)
    trainer.train()
    losses, _, found = padded_training(name, planned(make(tmp_path, name, num_train_epochs=1))[0])
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    assert relative(parameters(trainer.model), found) < 1e-6
    assert max(logged(trainer, "padding")) == 0


def test_a_collator_of_transformers_is_used_as_it_is(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(60)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
    collator = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)
    trainer = make(tmp_path, "BERT of tokens", collator=collator, num_train_epochs=1)
    trainer.train()
    losses, _, found = padded_training("BERT of tokens", planned(make(tmp_path, "BERT of tokens"))[0])
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    assert relative(parameters(trainer.model), found) < 1e-6


def test_accumulated_packed_batches_make_one_mean_over_all_their_labels(tmp_path):
    options = {"gradient_accumulation_steps": 3, "num_train_epochs": 1}
    trainer = make(tmp_path, **options)
    trainer.train()
    parts = planned(make(tmp_path, **options))[0]
    updates = [joined(parts[start : start + 3]) for start in range(0, len(parts), 3)]
    losses, _, found = padded_training("Llama", updates)
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    assert relative(parameters(trainer.model), found) < 1e-6


def test_a_flat_batch_that_runs_out_of_memory_is_run_in_smaller_ones(tmp_path):
    failed = []

    class Small(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            if inputs["input_ids"].shape[1] > 20:
                failed.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(model, inputs, *args, **kwargs)

    trainer = make(tmp_path, trainer_cls=Small, num_train_epochs=1)
    trainer.train()
    _, _, found = padded_training("Llama", planned(make(tmp_path, num_train_epochs=1))[0])
    assert failed
    assert relative(parameters(trainer.model), found) < 1e-6


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_that_is_resumed_in_mid_epoch_ends_as_one_without_a_break(num_workers, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "dataloader_num_workers": num_workers}
    whole = make(tmp_path / "whole", **options)
    whole.train()
    resumed = make(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert torch.equal(parameters(resumed.model), parameters(whole.model))
    assert logged(resumed)[2:] == logged(whole)[2:]


def test_a_run_that_was_packed_does_not_go_on_padded(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    make(tmp_path, **options).train()
    with pytest.raises(StateMismatchError):
        make(tmp_path, is_ready=False, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("kind", COLLATORS)
@pytest.mark.parametrize("eval_budget", ["same", pytest.param(None, marks=counts_after_shift)])
def test_evaluation_stays_padded(kind, eval_budget, tmp_path):
    trainer = make(tmp_path, collator=COLLATORS[kind], eval_budget=eval_budget, per_device_eval_batch_size=7)
    shapes = []

    def note(module, args, kwargs):
        shapes.append((tuple(kwargs["input_ids"].shape), kwargs.get("attention_mask") is not None))

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    found = trainer.evaluate()["eval_loss"]
    assert shapes
    assert all(has_mask for _, has_mask in shapes)
    assert sum(shape[0] for shape, _ in shapes[-2:]) >= 4
    batch = PadCollator()(make_examples("Llama", LENGTHS[:7]))
    assert found == pytest.approx(float(make_model("Llama")(**batch).loss.detach()), rel=1e-5)
    assert trainer.predict(make_examples("Llama", [3, 9])).predictions.shape == (2, 9, 60)


# What the trainer chooses


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)


def with_dropout():
    return make_model("BERT", attention_probs_dropout_prob=0.1)


PADDED = {
    "on a CPU": ({"is_ready": False}, "it runs on CUDA only, not on cpu"),
    "dropout": ({"is_ready": False, "name": "BERT", "model": with_dropout}, "attention_probs_dropout_prob=0.1; set it"),
    "own loss": ({"trainer_cls": OwnLoss}, "the trainer computes a loss of its own, which may look at rows"),
    "no mask": ({"collator": PadCollator(pad_values={"labels": 5})}, "labels count at padding"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=needs_varlen if case in ("on a CPU", "dropout") else ()) for case in PADDED]
)
def test_batches_that_cannot_be_flat_are_padded_and_the_reason_is_said_once(case, tmp_path, caplog):
    options, reason = PADDED[case]
    options = {**options, "model": options["model"]()} if "model" in options else options
    with caplog.at_level(logging.WARNING, logger=_packing.__name__):
        trainer = make(tmp_path, **options, num_train_epochs=1)
        trainer.train()
        trainer.train()
    said = [record.getMessage() for record in caplog.records if record.name == _packing.__name__]
    assert len(said) == 1
    assert said[0].startswith("Batches of Packed(capacity=16) are padded, by WindowSort, ")
    assert reason in said[0]
    plan = bw.BatchSampler(LENGTHS, BUDGET, grouping=bw.WindowSort(), seed=42).plan
    assert planned(trainer)[0] == [list(batch) for batch in plan]


@pytest.fixture
def on_any_device(monkeypatch):
    """Let torch's attention be replaced by the reference, and let it run on a CPU in float32."""
    monkeypatch.setattr(attention, "attend_on_cuda", attend_plainly)
    for place in (attention, _packing):
        monkeypatch.setattr(place, "why_not_varlen", lambda model, device, dtype: None)


@pytest.mark.usefixtures("on_any_device")
def test_flat_batches_are_chosen_by_themselves_and_the_model_gets_its_attention_back(tmp_path, caplog):
    trainer = make(tmp_path, is_ready=False, num_train_epochs=1)
    names, step = [], trainer.training_step

    def noting(model, inputs, *args, **kwargs):
        names.append((model.config._attn_implementation, inputs["input_ids"].shape[0], "cu_seq_lens_q" in inputs))
        return step(model, inputs, *args, **kwargs)

    trainer.training_step = noting
    with caplog.at_level(logging.WARNING, logger=_packing.__name__):
        trainer.train()
    assert {name[:18] for name, _, _ in names} == {attention.NAME}
    assert all(num_rows == 1 and has_bounds for _, num_rows, has_bounds in names)
    assert trainer.model.config._attn_implementation == "sdpa"
    assert not trainer.model._forward_pre_hooks
    assert not [record for record in caplog.records if record.name == _packing.__name__]


@pytest.mark.usefixtures("on_any_device")
def test_a_collator_that_draws_random_numbers_draws_as_many_as_without_a_look_at_it(tmp_path):
    def collate(examples):
        torch.rand(1)
        return PadCollator()(examples)

    trainer = make(tmp_path, is_ready=False, collator=collate)
    state = torch.get_rng_state()
    trainer.get_train_dataloader()
    assert torch.equal(torch.get_rng_state(), state)


@needs_varlen
def test_flat_batches_of_a_decoder_run_anywhere_if_the_user_asks_for_them(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger=_packing.__name__):
        trainer = make(tmp_path, is_ready=False, collator=PackCollator(layout="flat"), num_train_epochs=1)
        trainer.train()
    assert "a mask of all pairs of tokens, which is slow: it runs on CUDA only" in caplog.text
    _, _, found = padded_training("Llama", planned(make(tmp_path, collator=PackCollator(layout="flat")))[0])
    assert relative(parameters(trainer.model), found) < 1e-6


def test_rows_that_the_user_asks_for_are_slower_than_padded_ones_and_that_is_said_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger=_packing.__name__):
        trainer = make(tmp_path, is_ready=False, collator=PackCollator(), num_train_epochs=1)
        trainer.train()
        trainer.train()
    said = [record.getMessage() for record in caplog.records if record.name == _packing.__name__]
    assert len(said) == 1
    assert (
        "slower than padded batches of WindowSort; use layout='flat' with use_varlen(model), or WindowSort" in said[0]
    )


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weighting": "examples"}, "weighting='examples' needs a row per example, which Packed does not give"),
        ({"graphs": True}, "graphs replay batches of planned shapes, and those of Packed have as many tokens as came"),
        ({"collator": PackCollator(), "grouping": None}, r"takes rows of several examples; pass grouping=Packed"),
        (
            {"collator": PackCollator(layout="flat", causal=False)},
            r"LlamaForCausalLM predicts the next token, but the data_collator says causal=False",
        ),
        (
            {"name": "BERT", "collator": PackCollator(layout="flat")},
            r"BertForMaskedLM does not predict the next token, .*pass PackCollator\(causal=False",
        ),
        pytest.param(
            {"name": "BERT", "collator": PackCollator(layout="flat", causal=False), "is_ready": False},
            r"PackCollator\(layout='flat'\) cannot run: it runs on CUDA only, not on cpu; use layout='block'",
            marks=needs_varlen,
        ),
    ],
    ids=["weighting", "graphs", "no rows planned", "decoder", "encoder", "encoder on a CPU"],
)
def test_what_cannot_be_packed_is_refused(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        make(tmp_path, **options).get_train_dataloader()


@pytest.mark.parametrize("is_ready", [False, True], ids=["sdpa", "varlen"])
def test_a_model_that_does_not_look_for_borders_in_positions_is_refused(is_ready, tmp_path):
    config = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    model = OPTForCausalLM(OPTConfig(vocab_size=60, **config, attention_dropout=0.0))
    with pytest.raises(ArgumentError, match=r"OPTForCausalLM cannot train on rows of .*'positions'.* which it sees"):
        make(tmp_path, model=model, collator=PackCollator(), is_ready=is_ready).train()


def test_examples_over_the_capacity_follow_oversize(tmp_path):
    with pytest.raises(bw.errors.BudgetError):
        make(tmp_path, lengths=[3, 20, 4]).get_train_dataloader()
    trainer = make(tmp_path, lengths=[3, 20, 4], plan_options={"oversize": "drop"})
    assert sorted(joined(planned(trainer)[0])) == [0, 2]


def test_a_collator_without_a_mask_is_flattened_where_all_examples_are_equally_long(tmp_path):
    collate = partial(default_data_collator, return_tensors="pt")  # equal lengths only, without a mask
    trainer = make(tmp_path, collator=collate, lengths=[4, 4, 4, 4], num_train_epochs=1)
    trainer.train()
    _, _, found = padded_training_of([4, 4, 4, 4], planned(trainer)[0])
    assert relative(parameters(trainer.model), found) < 1e-6


def padded_training_of(lengths, updates):
    examples = make_examples("Llama", lengths)
    assert len(updates) == 1
    assert sorted(updates[0]) == list(range(len(examples)))
    model = make_model("Llama")
    batch = PadCollator()([examples[place] for place in updates[0]])
    model(**batch).loss.backward()
    torch.optim.SGD(model.parameters(), lr=TRAINING["learning_rate"]).step()
    return None, None, parameters(model)
