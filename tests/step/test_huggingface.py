"""huggingface_loss: the gradient of the mean over labels, for every kind of model and every split."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import Stepper
from batchwright.step.huggingface import huggingface_loss
from batchwright.step.losses import entropy_sum

NUM_TOKENS = 23
SMALL = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
SEQ2SEQ = {
    "vocab_size": NUM_TOKENS,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
T5 = {"vocab_size": NUM_TOKENS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2}
NO_DROPOUT = ("dropout", "dropout_rate", "hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop")

# Name: configuration, its options, whether labels are shifted, whether num_items_in_batch is honoured.
MODELS = {
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}, False, False),
    "MarianMTModel": ("MarianConfig", SEQ2SEQ, False, False),
    # It looks for the last label that is no padding, and finds none in a row of padding.
    "MBartForConditionalGeneration": ("MBartConfig", SEQ2SEQ, False, False),
    "LlamaForCausalLM": ("LlamaConfig", {**SMALL, "num_key_value_heads": 2}, True, True),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": NUM_TOKENS, "n_embd": 8, "n_layer": 1, "n_head": 2, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        True,
        True,
    ),
    "BartForCausalLM": ("BartConfig", SEQ2SEQ, False, False),
    "BertForMaskedLM": ("BertConfig", SMALL, False, False),
    "BertForTokenClassification": ("BertConfig", {**SMALL, "num_labels": 5}, False, False),
}


def make_model(name, dropout=0.0, **more):
    config, options, *_ = MODELS.get(name, ("BertConfig", SMALL))
    torch.manual_seed(0)
    rates = dict.fromkeys(NO_DROPOUT, dropout)
    return getattr(transformers, name)(getattr(transformers, config)(**{**options, **rates, **more})).train()


def make_batch(name, num=7):
    """Return rows with 1 to 9 labels that count, so that a mean of means is far from the mean."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, NUM_TOKENS, (num, 10), generator=generator)
    classes = 5 if "Classification" in name else NUM_TOKENS
    labels = torch.randint(2, classes, (num, 10), generator=generator)
    for row in range(num):
        labels[row, 2 + row :] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def reference(model, batch, shifts):
    """Return the loss summed over labels and their number, straight from the logits."""
    logits, labels = model(**batch).logits, batch["labels"]
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), int((labels != -100).sum())


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", MODELS)
def test_every_split_gives_the_gradient_of_the_mean_over_labels(name):
    *_, shifts, _ = MODELS[name]
    model, batch = make_model(name).double(), make_batch(name)
    loss_sum, num_labels = reference(copied := copy.deepcopy(model), batch, shifts)
    (loss_sum / num_labels).backward()
    expected = flat_gradient(copied)
    # The norms of T5 and Llama and the loss of causal models round to float32 whatever runs.
    tolerance = 1e-6 if shifts or name.startswith("T5") else 1e-12
    for micro_batch in (1, 3, "auto"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        stepper = Stepper(model, optimizer, huggingface_loss(), micro_batch=micro_batch)
        stepper.accumulate(batch)
        stepper.reduce()
        assert (flat_gradient(model) - expected).norm() < tolerance * expected.norm()
        report = stepper.update()
        assert report.weight == num_labels
        assert report.loss == pytest.approx(loss_sum.item() / num_labels, rel=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_the_sum_is_asked_for_where_the_model_honours_it(name):
    *_, shifts, honours = MODELS[name]
    model, batch, calls = make_model(name), make_batch(name), []
    loss_fn = huggingface_loss()
    model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    loss_sum, weight = loss_fn(model, batch)
    assert ("num_items_in_batch" in calls[-1]) == honours
    expected, num_labels = reference(model, batch, shifts)
    torch.testing.assert_close(loss_sum, expected)
    assert weight == num_labels


def test_the_first_batch_is_checked_on_two_examples_and_later_ones_are_not():
    model, batch, sizes = make_model("LlamaForCausalLM"), make_batch("LlamaForCausalLM"), []
    loss_fn = huggingface_loss()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    loss_fn(model, batch)
    loss_fn(model, batch)
    # Of two examples two sums, a mean, the sum of each and that of one alone, the mean of each, then both modes;
    # the batches of 7.
    assert sizes == [2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 7, 7]


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LlamaForCausalLM"])
def test_the_check_leaves_dropout_gradients_and_modes_alone(name):
    model, batch = make_model(name, dropout=0.5, attention_dropout=0.5), make_batch(name)
    frozen = next(module for module in model.modules() if isinstance(module, nn.Linear)).eval()
    torch.manual_seed(3)
    expected = model(**batch).loss
    torch.manual_seed(3)
    loss_sum, weight = huggingface_loss()(model, batch)
    torch.testing.assert_close(loss_sum / weight, expected)
    assert model.training
    assert not frozen.training
    assert all(parameter.grad is None for parameter in model.parameters())


class Smoothed(nn.Module):
    """Adds to the mean over labels something that belongs to the batch as a whole."""

    def __init__(self, extra):
        super().__init__()
        self.head, self.calls, self.extra = nn.Linear(4, 3), 0, extra
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, labels):
        self.seen += len(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, -2), labels.flatten()) + self.extra(logits), "logits": logits}


@pytest.mark.parametrize("shape", [(6,), (6, 4)])
def test_a_loss_that_is_no_mean_over_labels_is_refused(shape):
    batch = {"x": torch.randn(*shape, 4), "labels": torch.randint(0, 3, shape)}
    model = Smoothed(lambda logits: logits.sum().square())
    with pytest.raises(ArgumentError, match=r"the loss of Smoothed is not a mean over its labels.*write a loss_fn"):
        huggingface_loss()(model, batch)


class ComparingSum(nn.Module):
    """Divides by the number it is given, as a sum would, but compares its examples."""

    accepts_loss_kwargs = True

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x, labels, num_items_in_batch=None):
        rows = self.head(x)
        number = len(rows) if num_items_in_batch is None else num_items_in_batch
        return {"loss": F.cross_entropy(rows @ rows.T, torch.arange(len(rows)), reduction="sum") / number}


def test_a_sum_that_compares_examples_is_refused():
    """Its mean and its sum fit each other, so it was taken for a sum over labels."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(6, 4), "labels": torch.randint(0, 3, (6,))}
    with pytest.raises(ArgumentError, match=r"ComparingSum is not a mean.*all with num_items_in_batch=1"):
        huggingface_loss()(ComparingSum(), batch)


def test_labels_shifted_by_the_collator_are_the_ones_that_count():
    """The loss uses them, but others were counted."""
    name = "LlamaForCausalLM"
    model, batch = make_model(name), make_batch(name)
    shifted = torch.full_like(batch["labels"], -100)
    shifted[:, :-1] = batch["labels"][:, 1:]
    shifted[0] = -100
    loss_sum, weight = huggingface_loss()(model, {**batch, "shift_labels": shifted})
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert weight == int((shifted != -100).sum())
    torch.testing.assert_close(loss_sum, F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum"))


def test_a_head_of_zeros_tells_nothing_and_later_batches_are_asked():
    """All losses are equal, so every way of counting fits; the usual one holds until one fits better."""
    model, batch = make_model("BertForTokenClassification").double(), make_batch("BertForTokenClassification")
    head, loss_fn = copy.deepcopy(model.classifier), huggingface_loss()
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.zero_()
    assert loss_fn(model, batch)[1] == int((batch["labels"] != -100).sum())
    assert not loss_fn._known
    model.classifier.load_state_dict(head.state_dict())
    loss_fn(model, batch)
    assert len(loss_fn._known) == 1


def test_the_check_leaves_no_trace_in_buffers():
    batch = {"x": torch.randn(6, 4, 4), "labels": torch.randint(0, 3, (6, 4))}
    huggingface_loss()(model := Smoothed(lambda logits: 0.0), batch)
    assert model.seen == 6


def test_a_loss_with_a_router_term_is_refused():
    options = {**SMALL, "num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))
    with pytest.raises(ArgumentError, match="MixtralForCausalLM is not a mean over its labels: it holds aux_loss"):
        huggingface_loss()(model, make_batch("LlamaForCausalLM"))


@pytest.mark.parametrize(
    ("num_labels", "labels"),
    [(5, torch.tensor([0, 4, 2, 1])), (1, torch.randn(4)), (5, torch.rand(4, 5).round())],
    ids=["classes", "regression", "several classes at once"],
)
def test_labels_of_examples_count_examples(num_labels, labels):
    model = make_model("BertForSequenceClassification", num_labels=num_labels)
    batch = {**make_batch("", num=4), "labels": labels}
    loss_sum, weight = huggingface_loss()(model, batch)
    assert weight == 4
    torch.testing.assert_close(loss_sum, 4 * model(**batch).loss)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LlamaForCausalLM"])
def test_a_batch_without_a_label_that_counts_adds_nothing(name, device):
    model = make_model(name).to(device)
    batch = {key: value.to(device) for key, value in make_batch(name).items()}
    loss_fn = huggingface_loss()
    loss_fn(model, batch)
    loss_sum, weight = loss_fn(model, {**batch, "labels": torch.full_like(batch["labels"], -100)})
    loss_sum.backward()
    assert loss_sum == 0
    assert weight == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LlamaForCausalLM"])
def test_labels_too_short_to_tell_are_read_as_is_usual(name):
    *_, shifts, _ = MODELS[name]
    model, batch = make_model(name), make_batch(name)
    short = {key: value[:, :2].contiguous() for key, value in batch.items()}
    loss_sum, weight = huggingface_loss()(model, short)
    expected, num_labels = reference(model, short, shifts)
    torch.testing.assert_close(loss_sum, expected)
    assert weight == num_labels


def test_a_count_is_exact_in_half_precision():
    # Rows of 2 to 8 labels 40 times, less the first row, are 1398; bfloat16 knows 1392 and 1400, nothing between.
    model, batch = make_model("T5ForConditionalGeneration").bfloat16(), make_batch("T5ForConditionalGeneration")
    many = {key: value.repeat(40, 1)[1:] for key, value in batch.items()}
    _, weight = huggingface_loss()(model, many)
    assert weight == 1398


def test_labels_that_are_a_trimmed_view_are_taken():
    # T5 calls labels.view(-1), which a slice of columns does not allow.
    name = "T5ForConditionalGeneration"
    model, batch = make_model(name), make_batch(name)
    trimmed = {**batch, "labels": batch["labels"][:, :9]}  # the last column counts nowhere
    _, weight = huggingface_loss()(model, trimmed)
    assert weight == 35  # 2 + 3 + … + 8


class Adapter(nn.Module):
    """A wrapper as adapters have it."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def get_base_model(self):
        return self.base_model

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LlamaForCausalLM"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile, torch 2.11
@pytest.mark.parametrize("wrap", [Adapter, lambda model: torch.compile(model, backend="eager"), nn.DataParallel])
def test_wrapped_models_give_the_same_sums(name, wrap):
    model, batch = make_model(name), make_batch(name)
    expected = huggingface_loss()(model, batch)
    found = huggingface_loss()(wrap(model), batch)
    # DataParallel moves a model to a GPU where there is one.
    torch.testing.assert_close(found, expected, check_device=False, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "LlamaForCausalLM"])
def test_the_entropy_is_that_of_the_outputs_whose_labels_count(name):
    *_, shifts, _ = MODELS[name]
    model, batch = make_model(name), make_batch(name)
    _, _, metrics = huggingface_loss(with_entropy=True)(model, batch)
    logits, labels = model(**batch).logits, batch["labels"]
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    torch.testing.assert_close(metrics["entropy"], entropy_sum(logits[labels != -100]))


def test_entropy_of_a_regression_is_refused():
    model = make_model("BertForSequenceClassification", num_labels=1)
    with pytest.raises(ArgumentError, match="labels that are classes"):
        huggingface_loss(with_entropy=True)(model, {**make_batch("", num=4), "labels": torch.randn(4)})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda batch: {"input_ids": batch["input_ids"]}, r"no labels, only \['input_ids'\]; add a tensor 'labels'"),
        (lambda batch: {**batch, "labels": batch["labels"][..., None]}, r"got \(7, 10, 1\)"),
        (lambda batch: (batch["input_ids"], batch["labels"]), "mappings, got tuple"),
    ],
)
def test_batches_without_usable_labels_are_refused(change, match):
    name = "LlamaForCausalLM"
    with pytest.raises(ArgumentError, match=match):
        huggingface_loss()(make_model(name), change(make_batch(name)))


def test_a_model_that_returns_no_loss_is_refused():
    class Silent(nn.Module):
        def forward(self, input_ids, labels):
            return {"logits": input_ids}

    with pytest.raises(ArgumentError, match="returned no loss"):
        huggingface_loss()(Silent(), {"input_ids": torch.zeros(2, 4), "labels": torch.zeros(2, 4, dtype=torch.long)})
