"""The built-in data sets: sizes, splits, scales, where they come from, and what is said of bad input."""

import gzip
import json
import struct
import sys
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, MissingDependencyError
from batchwright.lab.datasets import load, names
from batchwright.lab.datasets._assemble import SPLIT_SEED, VOCABULARY_SIZE, hash_ids, split_rows, standardise
from batchwright.lab.datasets.built_in.fashion import DEBIAN_FOLDER
from batchwright.lab.datasets.built_in.formulas import friedman, waveform
from batchwright.lab.datasets.built_in.language import load_windows, word_ids
from batchwright.lab.datasets.built_in.texts import GROUPS, docstrings_in, load_texts, paragraphs_in

TEXTS = ("python_docstrings", "python_functions", "python_paragraphs")
WINDOWS = ("python_chars", "python_words")
FORMULAS = ("friedman", "friedman_wide", "waveform", "waveform_wide")
FASHION = ("fashion_mnist", "fashion_mnist_7x7")
# Those that need no package of the system.
EVERYWHERE = ("breast_cancer", "diabetes", "digits", "wine", *FORMULAS, *TEXTS, *WINDOWS)
LIMITS = dict.fromkeys((*TEXTS, *WINDOWS), 100)

needs_fashion = pytest.mark.skipif(
    not DEBIAN_FOLDER.is_dir(), reason=f"needs Fashion-MNIST in {DEBIAN_FOLDER}: apt install dataset-fashion-mnist"
)


# Nobody changes a data set, so one for all tests of this file will do where it is only looked at.
loaded = cache(load)


# --- the split and the scale


@given(st.lists(st.integers(0, 3), min_size=10, max_size=60), st.sampled_from([None, 10, 25]))
def test_every_row_is_in_one_part_at_most_and_every_class_is_trained_on(labels, limit):
    labels = np.array([0, 0, 0, *labels])
    train, validation = split_rows(labels, task="classification", limit=limit)
    rows = [*train, *validation]
    assert len(set(rows)) == len(rows) == min(len(labels), limit or len(labels))
    assert set(labels[validation]) <= set(labels[train])


def test_each_class_gives_one_row_in_five_to_validation():
    labels = np.repeat([0, 1, 2], [50, 20, 10])
    _, validation = split_rows(labels, task="classification")
    assert np.bincount(labels[validation]).tolist() == [10, 4, 2]


def test_targets_of_a_regression_are_spread_over_both_parts():
    _, validation = split_rows(np.arange(50.0), task="regression")
    # Counted along the sorted target: the third of every five, 2, 7, 12, …
    assert sorted(validation) == list(range(2, 50, 5))


def test_classes_of_one_row_each_leave_nothing_to_validate_on():
    with pytest.raises(ArgumentError, match="10 examples leave none for validation"):
        split_rows(np.arange(10), task="classification")


def test_validation_is_scaled_by_the_figures_of_the_training_part():
    # Mean 4 and spread 2 of the training part; 10 is 3 spreads above.
    train, validation = standardise(np.array([[2.0], [6.0]]), np.array([[10.0]]))
    assert train.tolist() == [[-1.0], [1.0]]
    assert validation.tolist() == [[3.0]]
    assert train.dtype == np.float32


def test_a_constant_column_becomes_zero_whatever_its_value():
    # The mean of ten times 0.1 is not 0.1, and the spread about it not 0.
    train, _ = standardise(np.full((10, 1), 0.1), np.full((1, 1), 0.1))
    assert np.abs(train).max() < 1e-6


def test_images_share_one_scale_over_all_pixels():
    images = np.array([[[[0.0, 0.0]]], [[[0.0, 4.0]]]])
    train, _ = standardise(images, images)
    # Mean 1 and spread sqrt(3) over the four pixels; the first pixel, always 0, is not divided by its own spread of 0.
    np.testing.assert_allclose(train.ravel(), np.array([-1, -1, -1, 3]) / np.sqrt(3), rtol=1e-6)


def test_large_numbers_that_differ_little_keep_their_difference():
    seconds = np.array([[1.7e9], [1.7e9 + 1]])
    train, _ = standardise(seconds, seconds)
    assert train.tolist() == [[-1.0], [1.0]]


# --- what is built in


def test_the_names_are_sorted_and_hold_what_every_machine_has():
    assert list(names()) == sorted(names())
    assert set(names()) == {*EVERYWHERE, *FASHION}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_data_set_is_the_same_at_every_call(name):
    first, second = loaded(name, limit=LIMITS.get(name)), load(name, limit=LIMITS.get(name))
    for part in ("train", "validation"):
        one, other = getattr(first, part), getattr(second, part)
        np.testing.assert_array_equal(one.labels, other.labels)
        assert len(one.features) == len(other.features) == len(one)
        assert all(np.array_equal(a, b) for a, b in zip(one.features, other.features, strict=True))


@pytest.mark.parametrize(
    ("name", "shape", "num_classes", "sizes"),
    [
        ("breast_cancer", (30,), 2, (455, 114)),
        ("diabetes", (10,), None, (354, 88)),
        ("digits", (1, 8, 8), 10, (1438, 359)),
        ("wine", (13,), 3, (142, 36)),
    ],
)
def test_the_built_in_tables_have_their_published_sizes(name, shape, num_classes, sizes):
    dataset = loaded(name)
    assert (len(dataset.train), len(dataset.validation)) == sizes
    assert dataset.train.features.shape[1:] == shape
    assert dataset.train.features.dtype == np.float32
    assert dataset.num_classes == num_classes
    assert dataset.lengths is None
    np.testing.assert_allclose(dataset.train.features.mean(), 0, atol=1e-5)


def test_the_target_of_diabetes_is_standardised():
    labels = load("diabetes").train.labels
    np.testing.assert_allclose([labels.mean(), labels.std()], [0, 1], atol=1e-5)


def test_a_limit_counts_both_parts():
    dataset = load("digits", limit=100)
    assert len(dataset.train) + len(dataset.validation) == 100
    assert len(dataset.validation) == 20


def test_without_scikit_learn_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingDependencyError, match=r"sklearn is not installed; .*batchwright\[lab\]"):
        load("wine")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such", {}, "no data set 'no_such'; there are breast_cancer, .*path= and target="),
        ("data.csv", {"path": "data.csv"}, "needs path= and target="),
        ("digits", {"path": "x.csv", "target": "y"}, "digits is built in and does not take path, target"),
        ("digits", {"limit": 9}, "limit must be a whole number of 10 or more, got 9"),
        ("digits", {"limit": 20.5}, "limit must be a whole number"),
        ("python_functions", {"max_length": 0}, "max_length must be a whole number of 1 or more"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ArgumentError, match=message):
        load(name, **options)


# --- properties


def test_the_properties_of_a_table_are_those_of_its_training_part():
    properties = load("breast_cancer").properties()
    dataset = load("breast_cancer")
    counts = np.bincount(dataset.train.labels)
    assert properties["type"] == "table"
    assert (properties["num_train"], properties["dimension"], properties["num_classes"]) == (455, 30, 2)
    assert properties["imbalance"] == counts.max() / counts.min()
    assert properties["length_median"] is None
    # A 1-nearest-neighbour classifier of these standardised columns errs in about one case of twenty.
    assert 0.01 < properties["label_noise"] < 0.1


def test_random_labels_are_reported_as_noise(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "data.npz"
    np.savez(path, x=rng.normal(size=(600, 4)), y=rng.integers(0, 2, 600))
    # Two classes by chance: the nearest row has the other label half of the time.
    noise = load("mine", path=path, target="y").properties()["label_noise"]
    assert 0.4 < noise < 0.6


def test_properties_of_texts_and_of_regressions_are_json():
    text, table = load("python_functions", limit=100).properties(), load("diabetes").properties()
    assert text["label_noise"] is None
    assert text["length_p99"] > text["length_median"] > 0
    assert table["imbalance"] is table["num_classes"] is None
    assert json.loads(json.dumps([text, table])) == [text, table]


# --- Python's own source


def test_functions_are_ids_with_a_heavy_tail_and_every_group():
    dataset = load("python_functions", limit=300, max_length=200)
    lengths = dataset.lengths
    assert lengths.max() == 200
    assert np.percentile(lengths, 99) > 2 * np.median(lengths)
    assert set(dataset.train.labels) == set(range(len(GROUPS))) == set(range(dataset.num_classes))
    assert min(ids.min() for ids in dataset.train.features) >= 1
    assert max(ids.max() for ids in dataset.train.features) < dataset.vocabulary_size


def write_modules(root, sources):
    """Write one module a group; those not named hold a function of their own."""
    for group, modules in GROUPS.items():
        text = sources.get(group, "".join(f"def {group}{i}(): return {i}\n\n" for i in range(4)))
        (root / f"{modules[0]}.py").write_text(text, encoding="utf-8")
    return root


def test_a_function_found_again_counts_once_and_for_the_group_that_had_it_first(tmp_path):
    same, other = "def f(): return 1\n\n", "def g(): return 1\n\n"
    root = write_modules(tmp_path, {"concurrency": same, "files": same + other + same})
    dataset = load_texts("python_functions", limit=1000, max_length=50, root=root)
    labels = np.concatenate([dataset.train.labels, dataset.validation.labels])
    assert np.bincount(labels).tolist() == [1, 1, 4, 4, 4, 4, 4, 4]


def test_modules_without_source_are_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"no source of the modules asyncio, .* need a Python installed"):
        load_windows("python_chars", root=tmp_path)


def test_a_file_that_is_no_python_is_passed_over(tmp_path):
    root = write_modules(tmp_path, {})
    (root / "urllib.py").write_text("def broken(:\n", encoding="utf-8")
    (root / "http.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\ndef f(): return 1\n")
    dataset = load_texts("python_functions", limit=1000, max_length=50, root=root)
    assert len(dataset.train) + len(dataset.validation) == 4 * len(GROUPS)


def test_windows_hold_the_characters_and_those_that_follow():
    dataset = load("python_chars", limit=100)
    features, labels = dataset.train.features, dataset.train.labels
    assert features.shape == labels.shape == (80, 64)
    np.testing.assert_array_equal(features[:, 1:], labels[:, :-1])
    assert dataset.lengths.tolist() == [64] * 80
    assert 0 <= labels.min() < labels.max() < dataset.num_classes == 97


def test_the_windows_of_the_two_parts_come_from_different_files(tmp_path):
    # Each file repeats one letter of its own, so that its windows can be told.
    letters = iter("abcdefgh")
    root = write_modules(tmp_path, {group: next(letters) * 1000 for group in GROUPS})
    dataset = load_windows("python_chars", limit=1000, root=root)
    train, validation = set(dataset.train.features.ravel()), set(dataset.validation.features.ravel())
    # 8 files, of which the first and the sixth in a random order are kept.
    assert (len(train), len(validation)) == (6, 2)
    assert not train & validation


@given(st.text(max_size=30))
def test_every_text_that_is_not_blank_has_ids_within_the_vocabulary(text):
    ids = hash_ids(text, max_length=8)
    assert len(ids) <= 8
    assert len(ids) >= bool(text.strip())
    assert all(1 <= token < VOCABULARY_SIZE for token in ids)


def test_ids_are_the_same_in_every_process():
    # 0xCBF43926 is the check value of CRC-32: what it gives for the digits 1 to 9.
    assert hash_ids("123456789", max_length=1).tolist() == [1 + 0xCBF43926 % 4095]


# --- Fashion-MNIST


def write_idx(path, array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_fashion(folder, num_train=50, num_test=20):
    rng = np.random.default_rng(0)
    for name, count in (("train", num_train), ("t10k", num_test)):
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", rng.integers(0, 256, (count, 28, 28)))
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    return folder


def test_fashion_mnist_is_read_from_a_folder_and_keeps_its_published_parts(tmp_path):
    dataset = load("fashion_mnist", path=write_fashion(tmp_path))
    assert dataset.train.features.shape == (50, 1, 28, 28)
    assert dataset.validation.features.shape == (20, 1, 28, 28)
    assert np.bincount(dataset.train.labels).tolist() == [5] * 10


def test_a_limit_of_fashion_mnist_gives_one_image_in_five_to_validation(tmp_path):
    dataset = load("fashion_mnist", path=write_fashion(tmp_path), limit=25)
    assert (len(dataset.train), len(dataset.validation)) == (20, 5)


def test_an_image_keeps_its_label_and_its_pixels(tmp_path):
    write_fashion(tmp_path)
    # Image i is i everywhere and has the label i mod 10.
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.repeat(np.arange(50), 28 * 28).reshape(50, 28, 28))
    dataset = load("fashion_mnist", path=tmp_path)
    # Standardised by the mean 24.5 and spread of 0 to 49.
    numbers = dataset.train.features[:, 0, 3, 7] * np.arange(50).std() + 24.5
    assert np.rint(numbers).astype(int).tolist() != list(range(50))
    np.testing.assert_array_equal(np.rint(numbers).astype(int) % 10, dataset.train.labels)


def test_missing_files_of_fashion_mnist_come_with_the_way_to_get_them(tmp_path):
    with pytest.raises(ArgumentError, match=r"train-images-idx3-ubyte\.gz is missing; .*apt install dataset-fashion"):
        load("fashion_mnist", path=tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"\0\0\x08\x03"), gzip.compress(b"\0\0\x0d\x00abcd")],
    ids=["empty", "no gzip", "cut short", "another type"],  # gzip writes the time, and two processes must agree on ids
)
def test_a_damaged_file_of_fashion_mnist_is_named(tmp_path, content):
    write_fashion(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"t10k-labels-idx1-ubyte\.gz is not a readable idx file"):
        load("fashion_mnist", path=tmp_path)


def test_images_and_labels_must_be_as_many(tmp_path):
    write_fashion(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.zeros(49))
    with pytest.raises(ArgumentError, match=r"the train files hold images \(50, 28, 28\) and labels \(49,\)"):
        load("fashion_mnist", path=tmp_path)


@needs_fashion
def test_the_installed_fashion_mnist_has_its_published_size():
    dataset = load("fashion_mnist", limit=70_000)
    assert (len(dataset.train), len(dataset.validation)) == (60_000, 10_000)
    assert np.bincount(dataset.train.labels).tolist() == [6000] * 10
    np.testing.assert_allclose([dataset.train.features.mean(), dataset.train.features.std()], [0, 1], atol=1e-3)


# --- data of one kind in several sizes and dimensions


def rows_of(part):
    """Each example as bytes."""
    return [np.ascontiguousarray(example).tobytes() for example in part.features]


@pytest.mark.parametrize("name", EVERYWHERE)
def test_no_example_is_in_both_parts(name):
    dataset = loaded(name, limit=1000)
    train, validation = rows_of(dataset.train), rows_of(dataset.validation)
    assert len(train) >= 3 * len(validation) > 0
    assert not set(train) & set(validation)
    if dataset.vocabulary_size is not None:
        assert len(set(train)) == len(train), "a text that occurs twice counts once"


@pytest.mark.parametrize("name", [*TEXTS, *WINDOWS])
def test_no_text_changes_its_part_with_the_limit(name):
    few, many = (loaded(name, limit=size) for size in (60, 1000))
    assert not set(rows_of(few.train)) & set(rows_of(many.validation))
    assert not set(rows_of(few.validation)) & set(rows_of(many.train))


@given(
    st.lists(st.integers(0, 3), min_size=20, max_size=80),
    st.integers(10, 40),
    st.integers(10, 90),
    st.sampled_from(["classification", "regression"]),
)
def test_no_row_changes_its_part_with_the_limit(labels, few, many, task):
    labels = np.array([0, 0, 0, 0, 0, *labels])
    one, other = (split_rows(labels, task=task, limit=limit) for limit in (few, many))
    assert not set(one[0]) & set(other[1])
    assert not set(one[1]) & set(other[0])


def test_a_text_stays_in_its_part_when_it_is_cut_elsewhere():
    short, long = (load("python_functions", limit=400, max_length=length) for length in (300, 400))
    # Functions of fewer than 300 tokens have the same ids in both.
    assert set(rows_of(short.train)) & set(rows_of(long.train))
    assert not set(rows_of(short.train)) & set(rows_of(long.validation))


@pytest.mark.parametrize(
    ("name", "kind", "task", "sizes", "dimension"),
    [
        ("friedman", "table", "regression", (8000, 2000), 10),
        ("friedman_wide", "table", "regression", (8000, 2000), 500),
        ("waveform", "table", "classification", (8000, 2000), 21),
        ("waveform_wide", "table", "classification", (8000, 2000), 500),
        ("python_docstrings", "text", "classification", (2400, 600), 4096),
        ("python_functions", "text", "classification", (1600, 400), 4096),
        ("python_paragraphs", "text", "classification", (8000, 2000), 98),
        ("python_chars", "language", "language", (8000, 2000), 97),
        ("python_words", "language", "language", (8000, 2000), 1024),
    ],
)
def test_a_data_set_states_kind_size_dimension_and_source(name, kind, task, sizes, dimension):
    dataset = loaded(name)
    assert (dataset.kind, dataset.task, dataset.dimension) == (kind, task, dimension)
    assert (len(dataset.train), len(dataset.validation)) == sizes
    assert dataset.num_examples == sum(sizes)
    properties = dataset.properties()
    assert (properties["type"], properties["num_train"], properties["dimension"]) == (kind, sizes[0], dimension)
    assert dataset.source
    text = dataset.describe()
    assert text.startswith(f"{name}: {kind}, {task}, {sizes[0]:,} + {sizes[1]:,} examples, dimension {dimension:,}")
    assert text.endswith(f"; from {dataset.source}")


def test_size_and_dimension_are_crossed_within_a_kind():
    # Small or large, low or high: a kind with all four can tell size, dimension and kind apart.
    tables = {
        (len(data.train) > 1000, data.dimension > 100)
        for data in (
            loaded("diabetes"),
            loaded("friedman"),
            loaded("friedman_wide", limit=500),
            loaded("friedman_wide"),
        )
    }
    texts = {
        (len(data.train) > 1000, data.dimension > 1000)
        for name in ("python_paragraphs", "python_docstrings")
        for data in (loaded(name), loaded(name, limit=500))
    }
    windows = {
        (len(data.train) > 1000, data.dimension > 100)
        for name in WINDOWS
        for data in (loaded(name, limit=5000), loaded(name, limit=500))
    }
    assert len(tables) == len(texts) == len(windows) == 4


# --- tables of a formula


def test_friedman_follows_its_formula():
    features, targets = friedman(20_000, 10)
    x = features.T
    noise = targets - (10 * np.sin(np.pi * x[0] * x[1]) + 20 * (x[2] - 0.5) ** 2 + 10 * x[3] + 5 * x[4])
    # Standard errors of a mean and a variance over 20,000 draws: 0.007 and 0.01.
    np.testing.assert_allclose([noise.mean(), noise.var()], [0, 1], atol=0.04)
    assert 0 <= features.min() < 0.001 < 0.999 < features.max() < 1
    # A uniform column has mean 1/2 and variance 1/12.
    np.testing.assert_allclose([features.mean(), features.var()], [1 / 2, 1 / 12], atol=0.005)
    np.testing.assert_allclose((targets - noise).var(), 23.8, atol=0.7)


def test_waveform_follows_its_formula():
    features, classes = waveform(30_000, 23)
    assert np.bincount(classes).tolist() == [10_000] * 3
    # The mean of a class is the mean of its two waves. At column 11 (place 10) the waves about 11, 15 and 7 are
    # 6, 2 and 2; at column 15 they are 2, 6 and 0.
    means = [features[classes == place].mean(axis=0) for place in range(3)]
    np.testing.assert_allclose([mean[10] for mean in means], [4, 4, 2], atol=0.1)
    np.testing.assert_allclose([mean[14] for mean in means], [4, 1, 3], atol=0.1)
    # Outside all triangles, and in further columns, there is only noise of variance 1.
    np.testing.assert_allclose(features[:, [0, 20, 21, 22]].var(axis=0), 1, atol=0.04)
    np.testing.assert_allclose(features[:, [0, 20, 21, 22]].mean(axis=0), 0, atol=0.04)


@pytest.mark.parametrize("formula", [friedman, waveform])
def test_the_wide_table_is_the_narrow_one_with_noise_beside_it(formula):
    (narrow, labels), (wide, same) = formula(1000, 21), formula(1000, 500)
    np.testing.assert_array_equal(labels, same)
    np.testing.assert_array_equal(narrow, wide[:, :21])
    # Columns of noise say nothing of the target: correlations of 1,000 rows are within 0.16 with 479 columns.
    correlations = np.corrcoef(wide[:, 21:], labels.astype(float), rowvar=False)[-1, :-1]
    assert np.abs(correlations).max() < 0.16


def test_columns_of_noise_make_no_labels_noisy():
    narrow, wide = load("waveform").properties(), load("waveform_wide").properties()
    # The best classifier errs on 14 %; the nearest row on more, and on at most about twice as many.
    assert narrow["label_noise"] == wide["label_noise"]
    assert 0.14 < wide["label_noise"] < 0.28


def test_drawn_numbers_come_from_the_raw_stream():
    # The first word of PCG64 with this seed, which NumPy promises never to change; 53 bits of it are the first number.
    assert friedman(1, 10)[0][0, 0] == (9_797_805_865_487_213_662 >> 11) / 2**53


# --- further texts


def test_docstrings_are_those_of_modules_classes_and_functions(tmp_path):
    file = tmp_path / "one.py"
    inner = '    def f(self):\n        """Deep."""\n        x = """Not one."""\n'
    file.write_text(f'"""Top."""\nclass A:\n    """Class."""\n{inner}def g(): pass\n', encoding="utf-8")
    assert docstrings_in(file) == ["Top.", "Class.", "Deep."]


def test_paragraphs_lie_between_blank_lines_and_lose_what_all_lines_are_indented_by(tmp_path):
    file = tmp_path / "one.py"
    file.write_text("\n\na = 1\nb = 2\n  \n    def f():\n        pass\n\n", encoding="utf-8")
    assert list(paragraphs_in(file)) == ["a = 1\nb = 2", "def f():\n    pass"]


def test_paragraphs_are_characters_and_none_is_the_padding():
    dataset = load("python_paragraphs", limit=200, max_length=100)
    assert dataset.lengths.max() == 100
    assert dataset.lengths.min() >= 16
    assert min(ids.min() for ids in dataset.train.features) >= 1
    assert max(ids.max() for ids in dataset.train.features) < dataset.vocabulary_size == 98


def test_the_frequent_words_of_the_training_files_have_ids_of_their_own():
    dataset = loaded("python_words", limit=1000)
    labels = dataset.train.labels
    # Ids are ranks: 1 is the most frequent word. One word in seven or so is rare, and shares the id 0.
    counts = np.bincount(labels.ravel(), minlength=1024)
    assert counts[1:6].min() > counts[200:].max()
    assert 0.05 < (labels == 0).mean() < 0.25
    np.testing.assert_array_equal(dataset.train.features[:, 1:], labels[:, :-1])


def test_words_that_only_validation_has_are_unknown():
    train, validation = word_ids(["b b a"], ["a zebra b"])
    assert [ids.tolist() for ids in train + validation] == [[1, 1, 2], [2, 0, 1]]


def test_a_window_found_again_counts_once(tmp_path):
    # The files of both parts begin with the same 640 characters and go on with their own.
    start = "".join(chr(32 + i * 7 % 95) for i in range(640))
    root = write_modules(tmp_path, {group: start + group[0] * 300 for group in GROUPS})
    dataset = load_windows("python_chars", limit=1000, root=root)
    both = rows_of(dataset.train) + rows_of(dataset.validation)
    assert len(set(both)) == len(both)
    # What is left for validation are windows of its own two letters.
    assert len(dataset.validation) == 2


@pytest.mark.parametrize("name", [*TEXTS, *WINDOWS])
def test_too_little_source_is_refused(tmp_path, name):
    root = write_modules(tmp_path, dict.fromkeys(GROUPS, "x\n"))
    load_from = load_windows if name in WINDOWS else partial(load_texts, max_length=50)
    with pytest.raises(ArgumentError, match=rf"{name}: .* 0 \+ 0 .* needs a Python installed with its standard"):
        load_from(name, root=root)


# --- Fashion-MNIST with fewer pixels


def test_seven_by_seven_pixels_are_means_of_squares_of_the_same_images(tmp_path):
    write_fashion(tmp_path)
    images = np.zeros((50, 28, 28))
    images[:, :4, 24:] = 16 * np.arange(50)[:, None, None] % 256
    images[:, 0, 0] = 160  # one of 16 pixels: a mean of 10
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", images)
    small, large = (load(name, path=tmp_path) for name in ("fashion_mnist_7x7", "fashion_mnist"))
    assert (small.dimension, large.dimension) == (49, 784)
    np.testing.assert_array_equal(small.train.labels, large.train.labels)
    # Of the same scale up to a factor and a shift: compare differences with the pixel that is always 0.
    pixels = small.train.features[:, 0] - small.train.features[:, :1, 3, 3][:, :, None]
    np.testing.assert_allclose(pixels[:, 0, 6] / pixels[:, 0, 0], images[:, 0, 24][order_of(50)] / 10, rtol=1e-5)


def order_of(count):
    return np.random.default_rng(SPLIT_SEED).permutation(count)


def test_images_that_cannot_be_cut_into_squares_are_refused(tmp_path):
    write_fashion(tmp_path)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.zeros((50, 28, 30)))
    with pytest.raises(ArgumentError, match="images of 28 by 30 pixels cannot be averaged over squares of 4 by 4"):
        load("fashion_mnist_7x7", path=tmp_path)


def test_a_label_beyond_the_ten_classes_is_refused(tmp_path):
    write_fashion(tmp_path)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.full(20, 10))
    with pytest.raises(ArgumentError, match="the t10k labels go up to 10; Fashion-MNIST has classes 0 to 9"):
        load("fashion_mnist", path=tmp_path)


@needs_fashion
def test_fashion_mnist_gives_10_000_images_unless_asked_for_more():
    dataset = load("fashion_mnist")
    assert (len(dataset.train), len(dataset.validation)) == (10_000, 2500)
    assert (dataset.kind, dataset.dimension, dataset.num_classes) == ("images", 784, 10)
    assert not set(rows_of(dataset.train)) & set(rows_of(dataset.validation))
