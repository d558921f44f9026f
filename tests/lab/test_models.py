"""Every model on every data set it fits: one interface, the padding ignored, and figures computed by hand."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.lab.datasets import Dataset, Split, load
from batchwright.lab.models import collate_for, count_parameters, evaluate, loss_fn_for, make_model, models_for
from batchwright.lab.models.networks import BagOfTokens
from batchwright.lab.models.objective import ActivationMemory
from batchwright.step import Stepper


def small_text(num_classes=2, task="classification"):
    """Texts of 1 to 4 ids; the class is whether the first id is odd."""
    texts = [np.array([1 + i % 5, 2, 3, 4][: 1 + i % 4]) for i in range(20)]
    labels = np.array([ids[0] % 2 for ids in texts])
    labels = labels.astype(np.float32) if task == "regression" else labels
    split = Split(features=texts, labels=labels)
    classes = None if task == "regression" else num_classes
    return Dataset(name="small", task=task, train=split, validation=split, num_classes=classes, vocabulary_size=8)


def small_images(shape, task="classification"):
    rng = np.random.default_rng(0)
    labels = np.arange(12) % 3 if task == "classification" else rng.normal(size=12).astype(np.float32)
    split = Split(features=rng.normal(size=(12, *shape)).astype(np.float32), labels=labels)
    classes = 3 if task == "classification" else None
    return Dataset(name="small", task=task, train=split, validation=split, num_classes=classes)


DATASETS = {
    "table": lambda: load("wine"),
    "regression": lambda: load("diabetes"),
    "digits": lambda: load("digits", limit=100),
    "colour": lambda: small_images((3, 9, 7)),
    "image regression": lambda: small_images((1, 4, 4), task="regression"),
    "text": small_text,
    "text regression": lambda: small_text(task="regression"),
    "two by two": lambda: small_images((1, 2, 2)),
    "language": lambda: load("python_chars", limit=20),
    "words": lambda: load("python_words", limit=20),
}
FITTING = {
    "table": ("logistic", "mlp"),
    "regression": ("linear", "mlp"),
    "digits": ("logistic", "mlp", "cnn", "cnn_batchnorm"),
    "colour": ("logistic", "mlp", "cnn", "cnn_batchnorm"),
    "image regression": ("linear", "mlp", "cnn", "cnn_batchnorm"),
    "two by two": ("logistic", "mlp", "cnn"),
    "text": ("logistic", "transformer", "gru"),
    "text regression": ("linear", "transformer", "gru"),
    "language": ("char_lm", "gru_lm"),
    "words": ("char_lm", "gru_lm"),
}
PAIRS = [(data, model) for data, models in FITTING.items() for model in models]
# All but the one that normalises over the batch on purpose.
ALONE = [(data, model) for data, model in PAIRS if model != "cnn_batchnorm"]
TEXT_MODELS = ("logistic", "transformer", "gru")


def flat(model):
    return torch.cat([parameter.detach().ravel() for parameter in model.parameters()])


@pytest.mark.parametrize("data", DATASETS)
def test_each_kind_of_data_has_its_models(data):
    assert models_for(DATASETS[data]()) == FITTING[data]


@pytest.mark.parametrize(("data", "name"), PAIRS)
def test_a_pair_learns_its_own_examples(data, name):
    dataset = DATASETS[data]()
    model = make_model(name, dataset, seed=0)
    loss_fn, batch = loss_fn_for(dataset), collate_for(dataset)(range(min(20, len(dataset.train))))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(30):
        loss_sum, weight = loss_fn(model, batch)[:2]
        optimizer.zero_grad()
        (loss_sum / weight).backward()
        optimizer.step()
        losses.append(float(loss_sum.detach() / weight))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(("data", "name"), PAIRS)
def test_initial_weights_follow_from_the_seed_alone(data, name):
    dataset = DATASETS[data]()
    torch.manual_seed(7)
    first = flat(make_model(name, dataset, seed=1))
    after = torch.rand(1)
    second = flat(make_model(name, dataset, seed=1))
    assert torch.equal(first, second)
    assert not torch.equal(first, flat(make_model(name, dataset, seed=2)))
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1)), "making a model must not move torch's own random state"


@pytest.mark.parametrize(("data", "name"), ALONE)
def test_an_example_has_the_same_output_alone_and_in_a_batch(data, name):
    # Neither padding nor a normalisation over the batch may tie examples together.
    dataset = DATASETS[data]()
    model, collate = make_model(name, dataset, seed=0), collate_for(dataset)
    assert model.training
    inputs, _ = collate(range(8))
    outputs = model(inputs)
    for place in range(8):
        alone, _ = collate([place])
        torch.testing.assert_close(model(alone)[0], outputs[place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_padding_reaches_neither_outputs_nor_gradients(name):
    dataset = small_text()
    model = make_model(name, dataset, seed=0)
    ids = torch.tensor([[3, 1], [2, 5]])
    padded = torch.cat([ids, torch.zeros(2, 2, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(padded), model(ids))
    model(padded).sum().backward()
    table = next(parameter for parameter in model.parameters() if parameter.shape[0] == dataset.vocabulary_size)
    assert torch.count_nonzero(table.grad[0]) == 0


@pytest.mark.parametrize("name", ["transformer", "gru"])
def test_the_order_of_tokens_matters(name):
    model = make_model(name, small_text(), seed=0)
    assert not torch.allclose(model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[3, 2, 1]])), atol=1e-6)


def test_a_bag_of_tokens_adds_the_mean_weight_to_the_bias():
    model = BagOfTokens(4, 1)
    with torch.no_grad():
        model.weights.weight.copy_(torch.tensor([[9.0], [1.0], [2.0], [6.0]]))
        model.bias.fill_(0.5)
    # Tokens 1 and 3 weigh 1 and 6, the padding nothing: 3.5 + 0.5.
    assert model(torch.tensor([[1, 3, 0]])).tolist() == [[4.0]]


def test_a_validated_text_may_be_longer_than_every_trained_one():
    short = Split(features=[np.array([1, 2])] * 4, labels=np.array([0, 1, 0, 1]))
    long = Split(features=[np.array([3, 1, 2, 4, 5])] * 2, labels=np.array([0, 1]))
    dataset = Dataset(
        name="longer", task="classification", train=short, validation=long, num_classes=2, vocabulary_size=8
    )
    # The same text with either label: one of two is right.
    assert evaluate(make_model("transformer", dataset, seed=0), dataset)["accuracy"] == 0.5


@pytest.mark.parametrize("name", ["char_lm", "gru_lm"])
def test_a_language_model_sees_no_later_character(name):
    dataset = load("python_chars", limit=20)
    model = make_model(name, dataset, seed=0)
    ids = torch.from_numpy(dataset.train.features[:1])
    changed = ids.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % dataset.num_classes
    before, after = model(ids), model(changed)
    assert before.shape == (1, 97, 64)
    torch.testing.assert_close(before[..., :40], after[..., :40])
    assert not torch.allclose(before[..., 40:], after[..., 40:], atol=1e-6)


def test_parameters_are_counted():
    # 13 columns to 128 to 128 to 3, each with a bias: 13·128 + 128 + 128·128 + 128 + 128·3 + 3.
    assert count_parameters(make_model("mlp", load("wine"), seed=0)) == 18_691
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    assert count_parameters(frozen) == 6


def test_only_the_model_named_so_normalises_over_the_batch():
    for data, name in PAIRS:
        modules = make_model(name, DATASETS[data](), seed=0).modules()
        has_batchnorm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules)
        assert has_batchnorm is (name == "cnn_batchnorm")


def test_with_batchnorm_an_example_depends_on_its_batch_in_training_and_not_in_validation():
    dataset = load("digits", limit=100)
    model, collate = make_model("cnn_batchnorm", dataset, seed=0), collate_for(dataset)
    inputs, alone = collate(range(8))[0], collate([0])[0]
    assert not torch.allclose(model(inputs)[0], model(alone)[0], atol=1e-3)
    model.eval()
    torch.testing.assert_close(model(inputs)[0], model(alone)[0], rtol=1e-4, atol=1e-5)


def test_the_two_convolutional_networks_have_equally_many_parameters():
    dataset = load("digits", limit=100)
    # 9·16 + 16, 2·16 for the norm, 16·32·9 + 32, 2·32 for the norm, and 32·16·10 + 10.
    counts = [count_parameters(make_model(name, dataset, seed=0)) for name in ("cnn", "cnn_batchnorm")]
    assert counts == [160 + 32 + 4640 + 64 + 5130] * 2


def test_batchnorm_takes_a_batch_of_one_example():
    dataset = load("digits", limit=100)
    model = make_model("cnn_batchnorm", dataset, seed=0)
    loss_sum, _ = loss_fn_for(dataset)(model, collate_for(dataset)([3]))[:2]
    loss_sum.backward()
    assert torch.isfinite(loss_sum)


def test_a_stepper_that_splits_a_batch_warns_of_batchnorm():
    dataset = load("digits", limit=100)
    model = make_model("cnn_batchnorm", dataset, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = Stepper(model, optimizer, loss_fn_for(dataset), micro_batch=4, collate=collate_for(dataset))
    with pytest.warns(UserWarning, match="BatchNorm in training mode .* depend on the split"):
        stepper.step(list(range(8)))


@pytest.mark.parametrize(
    ("name", "seed", "message"),
    [
        ("cnn", 0, r"wine \(table, classification\) takes the models logistic, mlp; got 'cnn'$"),
        (
            "resnet",
            0,
            r"got 'resnet', which is not one of char_lm, cnn, cnn_batchnorm, gru, gru_lm, linear, .*, transformer",
        ),
        ("mlp", -1, "seed must be a whole number of 0 or more, got -1"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(name, seed, message):
    with pytest.raises(ArgumentError, match=message):
        make_model(name, load("wine"), seed=seed)


# --- batches


def test_texts_are_padded_to_the_longest_of_their_batch():
    dataset = small_text()
    inputs, targets = collate_for(dataset)([0, 2, 1])
    assert inputs.tolist() == [[1, 0, 0], [3, 2, 3], [2, 2, 0]]
    assert targets.tolist() == [1, 1, 0]


def test_a_part_gives_its_own_examples():
    dataset = load("wine")
    inputs, targets = collate_for(dataset, part="validation")(np.array([3, 0]))
    np.testing.assert_array_equal(inputs, dataset.validation.features[[3, 0]])
    np.testing.assert_array_equal(targets, dataset.validation.labels[[3, 0]])


def test_an_empty_batch_and_an_unknown_part_are_refused():
    with pytest.raises(ArgumentError, match="at least one example"):
        collate_for(load("wine"))([])
    with pytest.raises(ArgumentError, match="part must be one of 'train', 'validation', got 'test'"):
        collate_for(load("wine"), part="test")


# --- losses and validation


class Fixed(nn.Module):
    """Answers each row of a table with some of its own columns."""

    def __init__(self, num_outputs):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.num_outputs = num_outputs

    def forward(self, inputs):
        return inputs[:, : self.num_outputs] * self.scale


def test_the_sums_of_a_classification_are_those_of_its_examples():
    batch = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]])), torch.tensor([0, 2])
    loss_sum, weight, sums = loss_fn_for(load("wine"))(nn.Identity(), batch)
    # −log 0.5 − log 0.125 = 4 log 2. Entropies: 1.5 log 2, and 0.75 log(4/3) + 0.25 log 8.
    entropy = 1.5 * np.log(2) + 0.75 * np.log(4 / 3) + 0.25 * np.log(8)
    np.testing.assert_allclose([float(loss_sum), float(sums["entropy"])], [4 * np.log(2), entropy], rtol=1e-6)
    assert (float(weight), int(sums["correct"])) == (2, 1)


def test_the_sums_of_a_language_model_count_every_character():
    dataset = load("python_chars", limit=20)
    batch = collate_for(dataset)([0, 1])
    uniform = nn.Module()
    uniform.forward = lambda ids: torch.zeros(len(ids), 97, 64)
    loss_sum, weight, sums = loss_fn_for(dataset)(uniform, batch)
    # 2 windows of 64 characters, each one of 97 by chance.
    assert float(weight) == 128
    np.testing.assert_allclose([float(loss_sum), float(sums["entropy"])], 128 * np.log(97), rtol=1e-5)
    assert int(sums["correct"]) == int((batch[1] == 0).sum())


def test_the_loss_of_a_regression_is_the_squared_error_of_each_example():
    batch = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 2.5])
    result = loss_fn_for(load("diabetes"))(nn.Identity(), batch)
    # (1 − 3)² + (2 − 2.5)²; a row against a column would give four differences.
    assert [float(value) for value in result] == [4.25, 2.0]


def test_accuracy_and_loss_are_means_over_the_part():
    features = np.log(np.array([[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]], dtype=np.float32))
    split = Split(features=features, labels=np.array([1, 1, 0]))
    other = Split(features=features[::-1].copy(), labels=np.array([1, 1, 1]))
    dataset = Dataset(name="three", task="classification", train=other, validation=split, num_classes=2)
    figures = evaluate(Fixed(2), dataset)
    # Of a tie the first class is taken, so that two of three are right.
    expected = -(np.log(0.5) + np.log(0.8) + np.log(0.9)) / 3
    np.testing.assert_allclose([figures["loss"], figures["accuracy"]], [expected, 2 / 3], rtol=1e-6)


@pytest.mark.parametrize(("answers", "r2"), [([1, 2, 3], 1.0), ([2, 2, 2], 0.0), ([3, 2, 1], -3.0)])
def test_r2_is_one_for_the_truth_and_zero_for_the_mean(answers, r2):
    # Targets 1, 2, 3 vary by 2 about their mean; turned round, errors are 4 + 0 + 4.
    split = Split(features=np.array(answers, dtype=np.float32)[:, None], labels=np.array([1, 2, 3], dtype=np.float32))
    dataset = Dataset(name="three", task="regression", train=split, validation=split, num_classes=None)
    assert evaluate(Fixed(1), dataset)["r2"] == pytest.approx(r2)


@pytest.mark.parametrize(("answer", "r2"), [(2.0, 1.0), (2.5, 0.0)])
def test_r2_of_a_constant_target_is_a_number(answer, r2):
    split = Split(features=np.full((3, 1), answer, dtype=np.float32), labels=np.full(3, 2, dtype=np.float32))
    dataset = Dataset(name="three", task="regression", train=split, validation=split, num_classes=None)
    assert evaluate(Fixed(1), dataset)["r2"] == r2


@pytest.mark.parametrize("is_training", [True, False])
def test_validation_leaves_the_mode_and_the_gradients_alone(is_training):
    dataset = load("wine")
    model = make_model("mlp", dataset, seed=0).train(is_training)
    evaluate(model, dataset)
    assert model.training is is_training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_validation_in_batches_equals_validation_at_once():
    # 500 texts of up to 60 tokens need more than one batch of 16,384 padded tokens.
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 8, rng.integers(1, 61)) for _ in range(500)]
    split = Split(features=texts, labels=rng.integers(0, 2, 500))
    dataset = Dataset(
        name="many", task="classification", train=split, validation=split, num_classes=2, vocabulary_size=8
    )
    model = make_model("transformer", dataset, seed=0)
    with torch.no_grad():
        loss_sum, weight, sums = loss_fn_for(dataset)(model, collate_for(dataset)(range(500)))
    figures = evaluate(model, dataset, part="train")
    assert figures["loss"] == pytest.approx(float(loss_sum / weight), rel=1e-5)
    assert figures["accuracy"] == float(sums["correct"]) / 500


# --- with the rest of the house


def test_a_stepper_trains_on_places_in_micro_batches_that_do_not_change_the_update():
    dataset = small_text()
    weights = []
    for micro_batch in (32, bw.MaxTokens(8)):
        model = make_model("gru", dataset, seed=0)
        stepper = Stepper(
            model,
            torch.optim.SGD(model.parameters(), lr=0.5),
            loss_fn_for(dataset),
            micro_batch=micro_batch,
            collate=collate_for(dataset),
            lengths=dataset.lengths.item,
        )
        report = stepper.step(list(range(16)))
        weights.append(flat(model))
        assert report.batch_size == 16
        assert 0 < report.entropy <= np.log(2) + 1e-6
    assert report.num_micro_batches > 1
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


def test_mlp_learns_digits():
    dataset = load("digits")
    model = make_model("mlp", dataset, seed=0)
    collate, loss_fn = collate_for(dataset), loss_fn_for(dataset)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for start in range(0, len(dataset.train) - 31, 32):
        optimizer.zero_grad()
        loss_sum, weight = loss_fn(model, collate(range(start, start + 32)))[:2]
        (loss_sum / weight).backward()
        optimizer.step()
    assert evaluate(model, dataset)["accuracy"] > 0.8


# A quarter of what presets train, one epoch on one thread. Seconds of training alone, measured on one core of a shared
# machine: friedman and waveform under 1, fashion_mnist_7x7 with a network 0.5, docstrings 2, paragraphs 4, words 2.
@pytest.mark.parametrize(
    ("data", "limit", "name", "metric", "least"),
    [
        ("friedman", 2500, "mlp", "r2", 0.7),
        ("waveform_wide", 2500, "mlp", "accuracy", 0.6),
        ("python_docstrings", 750, "transformer", "accuracy", 0.25),
        ("python_paragraphs", 500, "transformer", "accuracy", 0.15),
        ("python_words", 500, "gru_lm", "accuracy", 0.1),
    ],
)
def test_an_epoch_of_larger_data_teaches_something(data, limit, name, metric, least):
    dataset = load(data, limit=limit, max_length=64)
    model = make_model(name, dataset, seed=0)
    before = evaluate(model, dataset)
    collate, loss_fn = collate_for(dataset), loss_fn_for(dataset)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for start in range(0, len(dataset.train) - 15, 16):
        optimizer.zero_grad()
        loss_sum, weight = loss_fn(model, collate(range(start, start + 16)))[:2]
        (loss_sum / weight).backward()
        optimizer.step()
    after = evaluate(model, dataset)
    assert after["loss"] < before["loss"]
    # Chance gives 0, 1/3, 1/8, 1/8 and next to nothing.
    assert after[metric] > least


def test_data_sets_are_read_without_torch():
    code = "import sys; import batchwright.lab.datasets as d; d.load('python_chars', limit=20); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "sklearn"} & set(loaded)


def test_activations_are_counted_by_hand():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1))

    def loss_fn(model, batch):
        return model(batch[0]).sum(), len(batch[0])

    memory = ActivationMemory(room=30)
    watched = memory.watch(loss_fn)
    watched(model, (torch.ones(3, 5), torch.ones(3)))
    # Kept: the input 3 × 5 and the output of ReLU 3 × 7, four bytes each; weights are not counted.
    assert memory.peak_bytes == 4 * (15 + 21)
    assert memory.total_bytes == 10 * memory.peak_bytes
    memory.reset_peak()
    watched(model, (torch.ones(6, 5), torch.ones(6)))
    assert memory.peak_bytes == 8 * (15 + 21)
