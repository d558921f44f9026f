"""Real data sets by name and a user's own files: sizes, splits, scales, and what is said of bad input."""

import gzip
import json
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, MissingDependencyError
from batchwright.lab.datasets import load, names
from batchwright.lab.datasets._assemble import VOCABULARY_SIZE, hash_ids, split_rows, standardise
from batchwright.lab.datasets.loading import DEBIAN_FOLDER, GROUPS, load_python_chars, load_python_functions

SMALL = ("breast_cancer", "diabetes", "digits", "python_chars", "python_functions", "wine")
LIMITS = {"python_chars": 100, "python_functions": 100}

needs_fashion = pytest.mark.skipif(
    not DEBIAN_FOLDER.is_dir(), reason=f"needs Fashion-MNIST in {DEBIAN_FOLDER}: apt install dataset-fashion-mnist"
)


def write_csv(path, rows):
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


def numeric_rows(count=20):
    """A header and rows of two numbers and a label that the first decides."""
    return [["a", "b", "label"], *([i, i % 3, "high" if i >= count / 2 else "low"] for i in range(count))]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


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
    assert set(names()) == {*SMALL, "fashion_mnist"}


@pytest.mark.parametrize("name", SMALL)
def test_a_data_set_is_the_same_at_every_call(name):
    first, second = load(name, limit=LIMITS.get(name)), load(name, limit=LIMITS.get(name))
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
    dataset = load(name)
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
    dataset = load_python_functions(limit=1000, max_length=50, root=root)
    labels = np.concatenate([dataset.train.labels, dataset.validation.labels])
    assert np.bincount(labels).tolist() == [1, 1, 4, 4, 4, 4, 4, 4]


def test_modules_without_source_are_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"no source of the modules asyncio, .* need a Python installed"):
        load_python_chars(root=tmp_path)


def test_a_file_that_is_no_python_is_passed_over(tmp_path):
    root = write_modules(tmp_path, {})
    (root / "urllib.py").write_text("def broken(:\n", encoding="utf-8")
    (root / "http.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\ndef f(): return 1\n")
    dataset = load_python_functions(limit=1000, max_length=50, root=root)
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
    dataset = load_python_chars(limit=1000, root=root)
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
    dataset = load("fashion_mnist")
    assert (len(dataset.train), len(dataset.validation)) == (60_000, 10_000)
    assert np.bincount(dataset.train.labels).tolist() == [6000] * 10
    np.testing.assert_allclose([dataset.train.features.mean(), dataset.train.features.std()], [0, 1], atol=1e-3)


# --- a user's own file


def test_numeric_columns_of_a_csv_become_a_standardised_table(tmp_path):
    dataset = load("mine", path=write_csv(tmp_path / "data.csv", numeric_rows()), target="label")
    assert (dataset.name, dataset.kind, dataset.task, dataset.num_classes) == ("mine", "table", "classification", 2)
    assert dataset.train.features.shape == (16, 2)
    # Classes are numbered in sorted order: "high" 0, "low" 1; high ones have the larger first column.
    first = dataset.train.features[:, 0]
    assert first[dataset.train.labels == 0].min() > first[dataset.train.labels == 1].max()


def test_a_column_of_texts_becomes_texts_of_ids(tmp_path):
    records = [{"id": i, "text": "good " * (i + 1), "label": i % 2} for i in range(20)]
    dataset = load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="label", max_length=7)
    assert (dataset.kind, dataset.task, dataset.num_classes) == ("text", "classification", 2)
    lengths = np.concatenate([dataset.train.lengths, dataset.validation.lengths])
    assert sorted(lengths) == [1, 2, 3, 4, 5, 6, *[7] * 14]


def test_chosen_columns_leave_the_others_out(tmp_path):
    path = write_csv(tmp_path / "data.csv", numeric_rows())
    assert load("mine", path=path, target="label", columns=["b"]).train.features.shape == (16, 1)


def test_a_tab_separated_gzip_file_is_read_too(tmp_path):
    lines = "".join("\t".join(map(str, row)) + "\n" for row in numeric_rows())
    path = tmp_path / "data.tsv.gz"
    path.write_bytes(gzip.compress(lines.encode()))
    assert load("mine", path=path, target="label").train.features.shape == (16, 2)


@pytest.mark.parametrize(
    ("values", "task", "num_classes"),
    [
        ([i % 4 for i in range(40)], "classification", 4),
        ([i % 4 == 0 for i in range(40)], "classification", 2),
        (["yes", "none"] * 20, "classification", 2),
        ([i % 4 + 0.5 for i in range(40)], "regression", None),
        (list(range(40)), "regression", None),  # 40 different whole numbers are more than 20
    ],
)
def test_the_task_follows_from_the_target(tmp_path, values, task, num_classes):
    records = [{"x": i, "y": value} for i, value in enumerate(values)]
    dataset = load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y")
    assert (dataset.task, dataset.num_classes) == (task, num_classes)


def test_a_given_task_overrules_the_guess(tmp_path):
    records = [{"x": i, "y": i % 4} for i in range(40)]
    path = write_jsonl(tmp_path / "data.jsonl", records)
    assert load("mine", path=path, target="y", task="regression").num_classes is None
    half = write_jsonl(tmp_path / "half.jsonl", [{"x": i, "y": i % 4 + 0.5} for i in range(40)])
    assert load("mine", path=half, target="y", task="classification").num_classes == 4


@pytest.mark.parametrize(
    ("shape", "kind", "kept"), [((4,), "table", (4,)), ((5, 6), "images", (1, 5, 6)), ((3, 5, 6), "images", (3, 5, 6))]
)
def test_an_array_of_an_npz_file_is_a_table_or_images(tmp_path, shape, kind, kept):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.random.default_rng(0).normal(size=(30, *shape)), y=np.arange(30) % 3)
    dataset = load("mine", path=path, target="y")
    assert dataset.kind == kind
    assert dataset.train.features.shape == (24, *kept)


def test_single_columns_of_an_npz_file_form_a_table_or_a_text(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, a=np.arange(20.0), b=np.arange(20), words=np.array(["one two"] * 20), y=np.arange(20) % 2)
    assert load("mine", path=path, target="y", columns=["a", "b"]).train.features.shape == (16, 2)
    assert load("mine", path=path, target="y", columns=["words"]).lengths.tolist() == [2] * 16


def changed(line, cell, value):
    rows = numeric_rows()
    rows[line][cell] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (changed(3, 0, ""), {}, r"data\.csv:4: column 'a' has no value, got ''; fill it in or drop the row"),
        (changed(3, 1, "nan"), {}, r"data\.csv:4: column 'b' holds nan, which is not a 32-bit number"),
        (changed(1, 1, "NA"), {}, r"data\.csv:2: column 'b' holds 'NA', not a number"),
        (changed(5, 1, "1e99"), {}, r"data\.csv:6: column 'b' holds 1e99, which is not a 32-bit number"),
        (changed(7, 0, "many"), {}, r"data\.csv:8: column 'a' holds 'many', not a number; .* columns="),
        (changed(2, 2, " "), {}, r"data\.csv:3: column 'label' has no value"),
        (numeric_rows(), {"target": "lable"}, r"no column 'lable'; columns here: a, b, label"),
        (numeric_rows(), {"columns": ["c"]}, r"no column 'c'; columns here: a, b, label"),
        (numeric_rows(), {"columns": "a"}, r"columns must be a list of names, got 'a'"),
        (numeric_rows(), {"columns": ["a", "label"]}, r"columns must not name the target 'label'"),
        (numeric_rows(), {"task": "regression"}, r"data\.csv:2: column 'label' holds 'low', not a number"),
        (numeric_rows(), {"task": "language"}, r"task must be one of None, 'classification', 'regression'"),
        (numeric_rows(), {"target": "a", "task": "classification"}, r"'a' has 20 different values in 20 rows"),
        (numeric_rows(8), {}, r"data\.csv has 8 rows; the lab needs at least 10"),
        (numeric_rows()[:1], {}, r"data\.csv holds no rows"),
        ([["label"], *([i % 2] for i in range(20))], {}, r"has only the target column 'label'"),
        ([["a", "label"], *([i, "same"] for i in range(20))], {}, r"'label' is 'same' in all 20 rows; .* nothing"),
        ([["a", "label"], *([i, 0.5] for i in range(20))], {}, r"'label' is '0.5' in all 20 rows; .* nothing"),
    ],
)
def test_what_a_csv_file_lacks_is_said_with_its_place(tmp_path, rows, options, message):
    with pytest.raises(ArgumentError, match=message):
        load("mine", path=write_csv(tmp_path / "data.csv", rows), **{"target": "label", **options})


@pytest.mark.parametrize(
    ("place", "record", "message"),
    [
        (4, {"text": "a b", "n": 1}, r"data\.jsonl:5: no column 'y', which the first row has; columns here: text, n"),
        (4, {"text": None, "n": 1, "y": 1}, r"data\.jsonl:5: column 'text' has no value, got None"),
        (4, {"text": 7, "n": 1, "y": 1}, r"data\.jsonl:5: column 'text' holds 7, where most rows hold a text"),
        (4, {"text": "a", "n": 1, "y": [1]}, r"data\.jsonl:5: the target 'y' holds \[1\], not a number or a text"),
        (4, {"text": "a", "n": 1, "y": {}}, r"data\.jsonl:5: the target 'y' holds \{\}, not a number or a text"),
        (4, [1], r"data\.jsonl:5: each line must be a JSON object"),
    ],
)
def test_what_a_jsonl_file_lacks_is_said_with_its_place(tmp_path, place, record, message):
    records = [{"text": "a b", "n": i, "y": i % 2} for i in range(20)]
    records[place] = record
    with pytest.raises(ArgumentError, match=message):
        load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y")


def test_lists_are_no_columns(tmp_path):
    records = [{"x": [0.5, i], "y": i % 2} for i in range(20)]
    with pytest.raises(ArgumentError, match=r"data\.jsonl:1: column 'x' holds '\[0.5, 0\]', not a number"):
        load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y")


def test_a_text_of_digits_among_texts_is_a_text(tmp_path):
    records = [{"text": "2024" if i == 0 else "two words", "y": i % 2} for i in range(20)]
    dataset = load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y")
    assert sorted([*dataset.train.lengths, *dataset.validation.lengths]) == [1, *[2] * 19]


def test_texts_beside_other_columns_ask_for_a_choice(tmp_path):
    records = [{"city": "Rome", "n": i, "y": i % 2} for i in range(20)]
    path = write_jsonl(tmp_path / "data.jsonl", records)
    with pytest.raises(ArgumentError, match=r"text in city, among 2 columns; .* columns=\['city'\]"):
        load("mine", path=path, target="y")
    assert load("mine", path=path, target="y", columns=["city"]).kind == "text"


@pytest.mark.parametrize("name", ["data.csv", "data.jsonl.gz", "data.npz"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(ArgumentError, match=f"no such file: .*{name}"):
        load("mine", path=tmp_path / name, target="y")


@pytest.mark.parametrize("name", ["data.parquet", "data", "data.npz.gz", "data.txt"])
def test_a_file_of_another_format_is_refused(tmp_path, name):
    with pytest.raises(ArgumentError, match=f"cannot tell the format of {name}; the name must end in .csv"):
        load("mine", path=tmp_path / name, target="y")


def test_a_missing_number_in_an_array_is_said_with_row_and_column(tmp_path):
    x = np.zeros((20, 3))
    x[7, 2] = np.nan
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(20) % 2)
    with pytest.raises(ArgumentError, match=r"data\.npz row 7: array 'x' holds nan at column 2"):
        load("mine", path=tmp_path / "data.npz", target="y")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((20, 3)), "y": np.arange(19)}, r"one row per example, got rows \{'x': 20, 'y': 19\}"),
        ({"x": np.zeros((20, 3)), "y": np.array(3)}, r"one row per example, got rows \{'x': 20, 'y': 0\}"),
        ({"x": np.zeros((20, 3)), "z": np.zeros(20), "y": np.arange(20) % 2}, r"has several arrays, x, z, "),
        ({"x": np.zeros((20, 0)), "y": np.arange(20) % 2}, r"array 'x' must hold numbers .* got float64 \(20, 0\)"),
        ({"x": np.zeros((20, 1, 1, 1, 1)), "y": np.arange(20) % 2}, r"array 'x' must hold numbers of shape"),
        ({"x": np.full((20, 2), "a"), "y": np.arange(20) % 2}, r"array 'x' must hold numbers of shape .* got <U1"),
        ({"x": np.full((20, 2), None), "y": np.arange(20) % 2}, r"not a readable \.npz of plain arrays"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ArgumentError, match=message):
        load("mine", path=tmp_path / "data.npz", target="y")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut short"])
def test_a_damaged_npz_file_is_named(tmp_path, content):
    (tmp_path / "data.npz").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"data\.npz is not a readable \.npz"):
        load("mine", path=tmp_path / "data.npz", target="y")
