"""Losses and batches that two examples of the first micro-batch do not give away: exact updates, or a refusal."""

import copy

import datasets
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.integrations.dynabatch import DynaBatchSampler, make_dynabatch_trainer
from batchwright.integrations.huggingface import adaptive
from batchwright.step import Stepper
from batchwright.step.huggingface import huggingface_loss

from ..dynabatch.trainer.training import Gradients, flat_gradient, make_args, relative_error

REFUSALS = (ArgumentError, DoesNotFitError)
NUM_TOKENS = 30
LENGTHS = [6, 6, 5, 2, 6, 3, 6, 2]
TINY = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
BERT = {**TINY, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA = {**TINY, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
# From long to short: the examples of a batch are alike, as in any planned batch.
BY_LENGTH = {"grouping": bw.Sorted(), "train_sampling_strategy": "sequential"}


class Classifier(nn.Module):
    """One output per example, from the mean of its embeddings."""

    def __init__(self, loss, num=3, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(NUM_TOKENS, 8, dtype=dtype), nn.Linear(8, num, dtype=dtype)
        self.loss = loss

    def outputs(self, input_ids, attention_mask):
        hidden, mask = self.embedding(input_ids), attention_mask[..., None].to(self.head.weight.dtype)
        return self.head((hidden * mask).sum(1) / mask.sum(1))

    def forward(self, input_ids, attention_mask, labels=None, **kwargs):
        logits = self.outputs(input_ids, attention_mask)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}


class Tagger(nn.Module):
    """One output per token."""

    def __init__(self, loss, num=NUM_TOKENS):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(NUM_TOKENS, 8).double(), nn.Linear(8, num).double()
        self.loss = loss

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        logits = self.head(self.embedding(input_ids))
        return {"loss": self.loss(logits, labels, attention_mask), "logits": logits}


def ids_of(length, seed):
    return torch.randint(3, NUM_TOKENS, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def examples_with(labels, lengths=(3, 7, 5, 4, 8, 6, 3, 5)):
    return [{"input_ids": ids_of(length, place), "labels": labels[place]} for place, length in enumerate(lengths)]


def tagged(label_of):
    return [{"input_ids": ids_of(length, place), "labels": label_of(length)} for place, length in enumerate(LENGTHS)]


def pad(examples, label=-100):
    width = max(len(example["input_ids"]) for example in examples)
    batch = {}
    for name, first in examples[0].items():
        rows, fill = [example[name] for example in examples], label if name == "labels" else 0
        if isinstance(first, list) and name in ("input_ids", "labels"):
            most = max(map(len, rows))
            rows = [row + [fill] * (most - len(row)) for row in rows]
        batch[name] = torch.tensor(rows)
    used = [[1] * len(e["input_ids"]) + [0] * (width - len(e["input_ids"])) for e in examples]
    return {**batch, "attention_mask": torch.tensor(used)}


def fail_above(model, most):
    """Let a training forward pass of more rows run out of memory."""

    def before(module, args, kwargs):
        if torch.is_grad_enabled() and len(kwargs["input_ids"]) > most:
            raise torch.OutOfMemoryError("out of memory")

    if most is not None:
        model.register_forward_pre_hook(before, with_kwargs=True)


def loss_of(model, batch):
    return model(**batch)["loss"]


def gradient_of(model, loss):
    model.zero_grad()
    loss.backward()
    return flat_gradient(model)


def errors_of(folder, model, examples, *, most=None, accumulate=1, plain=None, data_collator=pad, **options):
    """Train; return the error of each update against the loss of all its examples at once, or None if refused."""
    plain, gradients, seen = (copy.deepcopy(model) if plain is None else plain).train(), Gradients(), []
    args = {name: options.pop(name) for name in list(options) if name in TrainingArguments.__dataclass_fields__}

    def noting(rows):
        seen.append([row["number"] for row in rows])
        return data_collator([{name: value for name, value in row.items() if name != "number"} for row in rows])

    fail_above(model, most)
    try:
        trainer = adaptive(Trainer)(
            model=model,
            args=make_args(folder, remove_unused_columns=False, gradient_accumulation_steps=accumulate, **args),
            train_dataset=[{**example, "number": place} for place, example in enumerate(examples)],
            data_collator=noting,
            callbacks=[gradients],
            **{"budget": bw.MaxItems(4 if accumulate == 1 else 2), **options},
        )
        trainer.train()
    except REFUSALS:
        return None
    assert sorted(number for batch in seen for number in batch) == list(range(len(examples)))
    errors = []
    for place, found in enumerate(gradients.seen):
        numbers = [n for batch in seen[place * accumulate : (place + 1) * accumulate] for n in batch]
        expected = gradient_of(plain, loss_of(plain, data_collator([examples[n] for n in numbers])))
        errors.append(relative_error(found, expected))
    return errors


def check_exact_or_refused(errors, tolerance=1e-6):
    assert errors is None or max(errors) < tolerance, errors


CUT_OR_ACCUMULATED = pytest.mark.parametrize("how", [{"most": 2}, {"accumulate": 2}], ids=["cut", "accumulated"])
CLASSES = [0, 1, 2, 0, 1, 2, 0, 1]
NUMBERS = [0.1, 0.9, 0.4, 0.3, 0.7, 0.2, 0.5, 0.8]


def summed(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")


def summed_squares(logits, labels):
    return ((logits[:, 0] - labels) ** 2).sum()


@CUT_OR_ACCUMULATED
@pytest.mark.parametrize("weighting", ["tokens", "examples"])
@pytest.mark.parametrize("loss", [summed, summed_squares])
def test_a_sum_over_examples_is_not_taken_for_their_mean(loss, weighting, how, tmp_path):
    examples = examples_with(CLASSES if loss is summed else NUMBERS)
    check_exact_or_refused(errors_of(tmp_path, Classifier(loss), examples, weighting=weighting, **how))


def test_a_mean_over_tokens_times_the_rows_is_not_taken_for_a_mean(tmp_path):
    model = Tagger(lambda logits, labels, mask: F.cross_entropy(logits.transpose(1, 2), labels) * len(labels))
    check_exact_or_refused(errors_of(tmp_path, model, tagged(lambda length: ids_of(length, 99)), most=2))


def uncorrelated(logits, labels):
    """One minus the correlation over the batch; of two equal examples it is NaN."""
    ours, theirs = logits[:, 0] - logits[:, 0].mean(), labels - labels.mean()
    return 1 - (ours * theirs).sum() / (ours.norm() * theirs.norm())


def supervised_contrast(logits, labels):
    """Pulls examples of a class together; NaN if no two are of one class."""
    rows, same = F.normalize(logits, dim=1), torch.eye(len(logits), dtype=torch.bool)
    likeness = (rows @ rows.T / 0.1).masked_fill(same, -1e9)
    friends = (labels[:, None] == labels[None]) & ~same
    chances, has = likeness.log_softmax(dim=1), friends.any(dim=1)
    return -((chances * friends).sum(1)[has] / friends.sum(1)[has]).mean()


def triplets(logits, labels):
    """Compares the farthest friend with the nearest stranger; 0 if an example has only one of these."""
    distances = torch.cdist(F.normalize(logits, dim=1), F.normalize(logits, dim=1))
    friends = (labels[:, None] == labels[None]) & ~torch.eye(len(logits), dtype=torch.bool)
    strangers = labels[:, None] != labels[None]
    has = friends.any(dim=1) & strangers.any(dim=1)
    apart = (distances * friends).amax(1) - distances.masked_fill(~strangers, 1e9).amin(1)
    return (F.relu(apart + 1) * has).sum() / has.sum().clamp(min=1)


@CUT_OR_ACCUMULATED
@pytest.mark.parametrize(
    ("loss", "labels"), [(uncorrelated, NUMBERS), (supervised_contrast, CLASSES), (triplets, [0, 1] * 4)]
)
def test_a_loss_of_which_two_examples_show_nothing_is_not_taken_for_a_mean(loss, labels, how, tmp_path):
    """It is NaN or zero on the two examples that are tried, which does not say that it adds up."""
    options = {"budget": bw.MaxItems(4), **how}
    check_exact_or_refused(errors_of(tmp_path, Classifier(loss), examples_with(labels), **options))


class Contrastive(Classifier):
    def forward(self, input_ids, attention_mask, **kwargs):
        rows = F.normalize(self.outputs(input_ids, attention_mask), dim=1)
        return {"loss": F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))}


class Answers(Tagger):
    """Question answering; positions beyond the row do not count, as in the models of transformers."""

    def forward(self, input_ids, start_positions, end_positions, **kwargs):
        width, parts = input_ids.shape[1], self.head(self.embedding(input_ids)).unbind(-1)
        losses = [
            F.cross_entropy(logits, places.clamp(0, width), ignore_index=width)
            for logits, places in zip(parts, (start_positions, end_positions), strict=True)
        ]
        return {"loss": sum(losses) / 2}


@CUT_OR_ACCUMULATED
@pytest.mark.parametrize("kind", ["contrastive", "answers"])
def test_without_labels_a_mean_over_examples_is_verified(kind, how, tmp_path):
    examples = [{"input_ids": example["input_ids"]} for example in examples_with(CLASSES)]
    if kind == "answers":
        places = [99 if number % 3 == 0 else 0 for number in range(len(examples))]
        examples = [
            {**e, "start_positions": place, "end_positions": place} for e, place in zip(examples, places, strict=True)
        ]
    model = Contrastive(None) if kind == "contrastive" else Answers(None, num=2)
    options = {"weighting": "examples", "budget": bw.MaxItems(4), **how}
    check_exact_or_refused(errors_of(tmp_path, model, examples, **options))


@pytest.mark.parametrize("kind", ["preferences", "rewards"])
def test_pairs_of_chosen_and_rejected_rows_are_not_cut_apart(kind, tmp_path):
    """The first half of the rows is chosen, the second rejected: a cut leaves pairs that are none."""
    trl = pytest.importorskip("trl", reason="trl is not installed; it is in the group dev")
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(NUM_TOKENS)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", bos_token="w2")

    def text(length, seed):
        return " ".join(f"w{n}" for n in ids_of(length, seed))

    pairs = [
        {"prompt": text(3, n), "chosen": " " + text(2 + n % 5, 50 + n), "rejected": " " + text(2 + n % 3, 90 + n)}
        for n in range(8)
    ]
    names = {"preferences": (trl.DPOTrainer, trl.DPOConfig), "rewards": (trl.RewardTrainer, trl.RewardConfig)}
    trainer_cls, config = names[kind]
    gradients, seen = Gradients(), []

    def make(cls, most=None, **options):
        torch.manual_seed(0)
        if kind == "preferences":
            model = LlamaForCausalLM(LlamaConfig(**LLAMA)).double()
            torch.manual_seed(1)
            options["ref_model"] = LlamaForCausalLM(LlamaConfig(**LLAMA)).double()
        else:
            model = LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1)).double()
        fail_above(model, most)
        return cls(
            model=model,
            args=make_args(tmp_path, config, per_device_train_batch_size=4, bf16=False, gradient_checkpointing=False),
            train_dataset=datasets.Dataset.from_list(pairs),
            processing_class=tokenizer,
            **options,
        )

    settings = {"budget": bw.MaxItems(4), "weighting": "examples", "lengths": [5] * 8}
    trainer = make(adaptive(trainer_cls), most=4, callbacks=[gradients], **settings)
    collator = trainer.data_collator
    trainer.data_collator = lambda rows: seen.append(rows) or collator(rows)
    try:
        trainer.train()
    except REFUSALS:
        return
    plain = make(trainer_cls)
    plain.model.train()
    loss = plain.compute_loss(plain.model, plain._prepare_inputs(collator(seen[0])))
    assert relative_error(gradients.seen[0], gradient_of(plain.model, loss)) < 1e-6


def with_weights(weights):
    weights = torch.tensor(weights, dtype=torch.float64)
    return lambda logits, labels, mask=None: F.cross_entropy(logits.flatten(0, -2), labels.flatten(), weight=weights)


def test_weights_of_classes_are_found_out_if_the_first_examples_weigh_the_same(tmp_path):
    model, labels = Classifier(with_weights([1.0, 1.0, 10.0])), [0, 1, 1, 0, 2, 2, 0, 1]
    lengths = [9, 9, 8, 8, 7, 7, 6, 6]
    check_exact_or_refused(errors_of(tmp_path, model, examples_with(labels, lengths), most=2, **BY_LENGTH))


def test_a_weight_of_the_tag_outside_is_found_out_if_the_labels_that_are_tried_have_it(tmp_path):
    """The first label of a row and the last two are often outside of any entity."""

    model, examples = Tagger(with_weights([0.1, 1.0, 1.0]), num=3), tagged(lambda length: [0] * length)
    for place, example in enumerate(examples):
        for inner in range(1, min(1 + place // 2, len(example["labels"]) - 2)):
            example["labels"][inner] = 1 + inner % 2
    check_exact_or_refused(errors_of(tmp_path, model, examples, most=2, **BY_LENGTH))


def masked_squares(logits, labels, mask):
    kept = labels != -100
    return ((logits[..., 0] - labels)[kept] ** 2).mean()


@CUT_OR_ACCUMULATED
def test_numbers_as_labels_of_tokens_count_one_by_one(how, tmp_path):
    """They were counted by rows, which the first two rows do not contradict if they are of one length."""
    numbers = tagged(lambda length: [0.1 * place for place in range(length)])
    check_exact_or_refused(errors_of(tmp_path, Tagger(masked_squares, num=1), numbers, **how, **BY_LENGTH))


def known_only(logits, labels):
    kept = ~labels.isnan()
    return F.binary_cross_entropy_with_logits(logits[kept], labels[kept])


def test_missing_labels_of_many_classes_do_not_count(tmp_path):
    nan = float("nan")
    labels = [[0.0, 1.0, 1.0]] * 4 + [[1.0, 0.0, nan], [1.0, nan, nan], [0.0, 1.0, 0.0], [1.0, nan, nan]]

    def collator(rows):
        return {**pad(rows), "labels": torch.tensor([row["labels"] for row in rows], dtype=torch.float64)}

    examples = examples_with(labels, [9, 9, 9, 9, 4, 4, 3, 3])
    options = {"accumulate": 2, "data_collator": collator, **BY_LENGTH}
    check_exact_or_refused(errors_of(tmp_path, Classifier(known_only), examples, **options))


def pad_with_zeros(examples):
    return pad(examples, label=0)


def without_padding(logits, labels, mask):
    return F.cross_entropy(logits.flatten(0, 1), labels.masked_fill(labels == -100, 0).flatten(), ignore_index=0)


def under_the_mask(logits, labels, mask):
    kept = mask[:, 1:] != 0
    return F.cross_entropy(logits[:, :-1][kept], labels[:, 1:][kept])


def second_next(logits, labels, mask):
    return F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())


@pytest.mark.parametrize("loss", [without_padding, under_the_mask, second_next])
def test_labels_that_a_loss_leaves_out_do_not_count(loss, tmp_path):
    """The first two rows are of one length, so that leaving out padding makes no difference in them."""
    collator = pad if loss is second_next else pad_with_zeros
    examples = tagged(lambda length: ids_of(length, 99))
    if loss is second_next:
        examples = [{name: [*value, 5] for name, value in example.items()} for example in examples]
    options = {"accumulate": 2, "data_collator": collator, **BY_LENGTH}
    check_exact_or_refused(errors_of(tmp_path, Tagger(loss), examples, **options))


@pytest.mark.parametrize("kind", ["one label", "tokens"])
def test_in_bfloat16_labels_of_a_fresh_head_are_not_taken_for_shifted_ones(kind, tmp_path):
    """All labels have nearly the same loss; rounding decided, and labels of one column then counted nothing."""
    worst = 0.0
    for seed in range(8):
        torch.manual_seed(seed)
        model_cls = BertForSequenceClassification if kind == "one label" else BertForTokenClassification
        model = model_cls(BertConfig(**BERT)).bfloat16()
        examples = tagged(lambda length: [3] if kind == "one label" else [n % 5 for n in range(length)])
        plain = copy.deepcopy(model).double()
        worst = max(worst, *(errors_of(tmp_path, model, examples, accumulate=2, plain=plain) or [0.0]))
    assert worst < 3e-2


def make_mixtral():
    torch.manual_seed(0)
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    # The default router_aux_loss_coef, and as many tokens as a real vocabulary has.
    return MixtralForCausalLM(MixtralConfig(**{**LLAMA, **options, "vocab_size": 32_000}))


@CUT_OR_ACCUMULATED
def test_the_default_auxiliary_term_of_a_router_is_refused(how, tmp_path):
    """It is less than a rounding of the loss, but most of the gradient of the router, which was wrong by 334 %."""
    examples = tagged(lambda length: ids_of(length, 7))
    assert errors_of(tmp_path, make_mixtral(), examples, **how) is None


class OnlyInTraining(Classifier):
    """Compares examples in training mode, but not in evaluation mode."""

    def forward(self, input_ids, attention_mask, labels=None, **kwargs):
        logits = self.outputs(input_ids, attention_mask)
        rows, loss = F.normalize(logits, dim=1), F.cross_entropy(logits, labels)
        if self.training:
            loss = loss + F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))
        return {"loss": loss, "logits": logits}


class Normed(Classifier):
    def __init__(self):
        super().__init__(F.cross_entropy)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def outputs(self, *args):
        return self.norm(super().outputs(*args))


@pytest.mark.parametrize("make", [lambda: OnlyInTraining(None), Normed], ids=["only in training", "batch norm"])
def test_what_compares_examples_in_training_mode_only_is_not_cut_in_silence(make, tmp_path):
    examples = examples_with([*CLASSES, *CLASSES], [3, 7, 5, 4, 8, 6, 3, 5] * 2)
    try:
        errors = errors_of(tmp_path, make(), examples, most=4, budget=bw.MaxItems(8))
    except UserWarning:  # as Stepper says of BatchNorm
        return
    check_exact_or_refused(errors)


class Unmasked(Classifier):
    def outputs(self, input_ids, attention_mask):
        return self.head(self.embedding(input_ids).mean(1))


def test_a_model_that_sees_padding_sees_as_much_of_it_when_it_is_cut(tmp_path):
    model = Unmasked(F.cross_entropy)
    check_exact_or_refused(errors_of(tmp_path, model, examples_with(CLASSES), most=2))


def test_a_loss_gets_the_number_of_items_as_the_tensor_that_trainers_pass(tmp_path):
    """Tried out with an int, it raised AttributeError."""

    def loss(outputs, labels, num_items_in_batch=None):
        number = len(labels) if num_items_in_batch is None else num_items_in_batch.to(labels.device)
        return F.cross_entropy(outputs["logits"], labels, reduction="sum") / number

    model = Classifier(F.cross_entropy)
    errors = errors_of(tmp_path, model, examples_with(CLASSES), compute_loss_func=loss)
    assert max(errors) < 1e-12


def test_packed_rows_are_looked_at_again_if_the_first_one_is_too_short_to_tell(tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="sdpa", use_cache=False)).double()

    def before(module, args, kwargs):
        if torch.is_grad_enabled() and kwargs["input_ids"].numel() > 20:
            raise torch.OutOfMemoryError("out of memory")

    plain = copy.deepcopy(model)
    model.register_forward_pre_hook(before, with_kwargs=True)
    lengths = [2, 2, 2, 2, 8, 7, 6, 8]
    examples = [{"input_ids": ids_of(n, place), "labels": ids_of(n, place)} for place, n in enumerate(lengths)]
    for given in (examples, examples[::-1]):
        options = {"data_collator": DataCollatorWithFlattening(), "grouping": bw.InOrder()}
        options["train_sampling_strategy"] = "sequential"
        errors = errors_of(tmp_path, copy.deepcopy(model), given, plain=plain, **options)
        assert errors is not None
        assert max(errors) < 1e-6


class Pictures(Tagger):
    """Rows with several images each, all of them along the first axis."""

    def __init__(self):
        super().__init__(None)
        self.see = nn.Conv2d(3, 8, 2).double()

    def forward(self, input_ids, attention_mask, labels, pixel_values, **kwargs):
        seen = self.see(pixel_values).mean(dim=(0, 2, 3))
        logits = self.head(self.embedding(input_ids) + seen)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_images_of_three_rows_are_not_cut_into_colours(tmp_path):
    """Nothing runs out of memory, and there is one micro-batch per update: nothing needs to be cut."""

    def collator(rows):
        generator = torch.Generator().manual_seed(len(rows))
        return {**pad(rows), "pixel_values": torch.rand(5, 3, 2, 2, generator=generator, dtype=torch.float64)}

    examples = tagged(lambda length: ids_of(length, 99))[:6]
    errors = errors_of(tmp_path, Pictures(), examples, data_collator=collator, budget=bw.MaxItems(3))
    assert errors is not None
    assert max(errors) < 1e-12


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (summed, CLASSES),
        (uncorrelated, NUMBERS),
        (with_weights([1.0, 1.0, 10.0]), [0, 1, 1, 0, 2, 0, 2, 1]),
    ],
    ids=["sum", "correlation", "weights of classes"],
)
def test_the_loss_of_a_model_that_is_no_mean_over_labels_is_refused(loss, labels):
    model, found = Classifier(loss), []
    plain, batch = copy.deepcopy(model), pad(examples_with(labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *args: found.append(flat_gradient(model)))
    try:
        Stepper(model, optimizer, huggingface_loss(), micro_batch=3).step(batch)
    except REFUSALS:
        return
    divisor = len(labels) if loss is summed else 1
    assert relative_error(found[0], gradient_of(plain, loss_of(plain, batch) / divisor)) < 1e-6


@pytest.mark.parametrize(
    ("loss", "labels"),
    [(summed, CLASSES), (uncorrelated, NUMBERS), (with_weights([1.0, 1.0, 10.0]), [2, 1, 0, 0, 0, 1, 0, 1])],
    ids=["sum", "correlation", "weights of classes"],
)
def test_the_dynabatch_trainer_does_not_cut_what_is_no_mean(loss, labels, tmp_path):
    model, gradients, seen = Classifier(loss), Gradients(), []
    plain, examples = copy.deepcopy(model), examples_with(labels)
    fail_above(model, 2)
    lengths = [len(example["input_ids"]) for example in examples]
    trainer = make_dynabatch_trainer(Trainer)(
        model=model,
        args=make_args(tmp_path, remove_unused_columns=False),
        train_dataset=examples,
        data_collator=lambda rows: seen.append(rows) or pad(rows),
        callbacks=[gradients],
        dynabatch_sampler=DynaBatchSampler(lengths, None, None, 4, threshold=0.9, max_batch_range=1.0, task="train"),
        oom_fallback="split_retry",
    )
    try:
        trainer.train()
    except REFUSALS:
        return
    for found, rows in zip(gradients.seen, seen, strict=True):
        assert relative_error(found, gradient_of(plain, loss_of(plain, pad(rows)))) < 1e-6


def test_the_default_sum_of_speech_models_is_not_taken_for_a_mean_over_examples(tmp_path):
    """ctc_loss_reduction is "sum" unless it is changed; two recordings show no difference to a mean."""
    torch.manual_seed(0)
    options = {"conv_dim": (8,), "conv_stride": (4,), "conv_kernel": (4,), "num_feat_extract_layers": 1}
    options |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    dropouts = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    config = Wav2Vec2Config(**{**TINY, **options, **dict.fromkeys((*dropouts, "layerdrop"), 0.0), "vocab_size": 12})
    model = Wav2Vec2ForCTC(config)
    plain = copy.deepcopy(model)

    def before(module, args, kwargs):
        if torch.is_grad_enabled() and len(kwargs["input_values"]) > 2:
            raise torch.OutOfMemoryError("out of memory")

    def collator(rows):
        width = max(len(row["labels"]) for row in rows)
        labels = [row["labels"] + [-100] * (width - len(row["labels"])) for row in rows]
        return {"input_values": torch.stack([row["sound"] for row in rows]), "labels": torch.tensor(labels)}

    model.register_forward_pre_hook(before, with_kwargs=True)
    examples = [{"sound": torch.randn(80), "labels": [1 + n, 3, 5, 7][: 2 + n % 3]} for n in range(8)]
    settings = {"weighting": "examples", "lengths": [80] * 8, "data_collator": collator}
    check_exact_or_refused(errors_of(tmp_path, model, examples, plain=plain, **settings), tolerance=1e-4)


class ByExample(nn.Module):
    """A model whose loss is the mean over examples of the means over their labels, for reference."""

    def __init__(self, model, **options):
        super().__init__()
        self.model, self.options = model, options

    def forward(self, input_ids, attention_mask, labels):
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none", **self.options)
        return {"loss": (losses.sum(1) / (labels[:, 1:] != -100).sum(1)).mean()}


@pytest.mark.parametrize("kind", ["smoothing", "weights"])
def test_a_mean_over_examples_keeps_the_loss_that_was_asked_for(kind, tmp_path):
    """It was replaced by the plain cross entropy where the two are close in the first micro-batch."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).double()
    weights = torch.ones(NUM_TOKENS, dtype=torch.float64)
    weights[20:] = 5.0

    def weighted(outputs, labels, num_items_in_batch=None):
        losses = F.cross_entropy(
            outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:], weight=weights, reduction="none"
        )
        return losses.sum() / (labels[:, 1:] != -100).sum()

    if kind == "smoothing":
        nn.init.zeros_(model.lm_head.weight)  # a fresh head: all losses are the same, but their gradients are not
        settings, reference = {"label_smoothing_factor": 0.2}, {"label_smoothing": 0.2}
    else:
        settings, reference = {"compute_loss_func": weighted}, {"weight": weights}
    # Tokens of weight 1 in the long examples, which come first, and all tokens in the short ones.
    ids = [[4 + (n * place) % 15 for place in range(1, 7)] for n in range(4)]
    ids += [[5 + n, 20 + n, 7 + n, 25 + n][: 3 + n % 2] for n in range(4)]
    examples = [{"input_ids": row, "labels": list(row)} for row in ids]
    plain = ByExample(copy.deepcopy(model), **reference)
    settings |= {"weighting": "examples", **BY_LENGTH}
    check_exact_or_refused(errors_of(tmp_path, model, examples, plain=plain, **settings), tolerance=1e-5)
