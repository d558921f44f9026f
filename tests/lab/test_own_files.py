"""A user's own file: what becomes of its columns, and every way in which a file can be wrong."""

import gzip
import json

import numpy as np
import pytest

from batchwright.errors import ArgumentError
from batchwright.lab.datasets import load


def write_csv(path, rows):
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


def numeric_rows(count=20):
    """A header and rows of two numbers and a label that the first decides."""
    return [["a", "b", "label"], *([i, i % 3, "high" if i >= count / 2 else "low"] for i in range(count))]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_numeric_columns_of_a_csv_become_a_standardised_table(tmp_path):
    dataset = load("mine", path=write_csv(tmp_path / "data.csv", numeric_rows()), target="label")
    assert (dataset.name, dataset.kind, dataset.task, dataset.num_classes) == ("mine", "table", "classification", 2)
    assert dataset.train.features.shape == (16, 2)
    # Classes are numbered in sorted order: "high" 0, "low" 1; high ones have the larger first column.
    first = dataset.train.features[:, 0]
    assert first[dataset.train.labels == 0].min() > first[dataset.train.labels == 1].max()


def test_a_column_of_texts_becomes_texts_of_ids(tmp_path):
    records = [{"id": i, "text": f"film{i} " * (i + 1), "label": i % 2} for i in range(20)]
    dataset = load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="label", max_length=7)
    assert (dataset.kind, dataset.task, dataset.num_classes) == ("text", "classification", 2)
    lengths = np.concatenate([dataset.train.lengths, dataset.validation.lengths])
    assert sorted(lengths) == [1, 2, 3, 4, 5, 6, *[7] * 14]


def test_chosen_columns_leave_the_others_out(tmp_path):
    path = write_csv(tmp_path / "data.csv", numeric_rows())
    assert load("mine", path=path, target="label", columns=["a"]).train.features.shape == (16, 1)


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
    np.savez(
        path,
        a=np.arange(20.0),
        b=np.arange(20),
        words=np.array([f"one two{i}" for i in range(20)]),
        y=np.arange(20) % 2,
    )
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
        (numeric_rows(), {"columns": ["a", "a"]}, r"columns must not name a column twice, got 'a'"),
        (numeric_rows(), {"target": "lable"}, r"no column 'lable'; columns here: a, b, label"),
        (numeric_rows(), {"columns": ["c"]}, r"no column 'c'; columns here: a, b, label"),
        (numeric_rows(), {"columns": "a"}, r"columns must be a list of names, got 'a'"),
        (numeric_rows(), {"columns": ["a", "label"]}, r"columns must not name the target 'label'"),
        (numeric_rows(), {"task": "regression"}, r"data\.csv:2: column 'label' holds 'low', not a number"),
        (numeric_rows(), {"task": "language"}, r"task must be one of None, 'classification', 'regression'"),
        (numeric_rows(), {"target": "a", "task": "classification"}, r"'a' has 20 different values in 20 rows"),
        (numeric_rows(8), {}, r"data\.csv has 8 rows; a data set needs at least 10, and a lab about 40"),
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
    records = [{"text": "2024" if i == 0 else f"two words{i}", "y": i % 2} for i in range(20)]
    dataset = load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y")
    assert sorted([*dataset.train.lengths, *dataset.validation.lengths]) == [1, *[2] * 19]


def test_texts_beside_other_columns_ask_for_a_choice(tmp_path):
    records = [{"city": f"Rome{i}", "n": i, "y": i % 2} for i in range(20)]
    path = write_jsonl(tmp_path / "data.jsonl", records)
    with pytest.raises(ArgumentError, match=r"text in city, among 2 columns; .* columns=\['city'\]"):
        load("mine", path=path, target="y")
    assert load("mine", path=path, target="y", columns=["city"]).kind == "text"


def test_a_column_of_few_words_beside_numbers_becomes_columns_of_0_and_1(tmp_path):
    plans = ("pro", "basic ", "plus")
    records = [{"age": i, "plan": plans[i % 3], "y": i % 2} for i in range(30)]
    dataset = load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y")
    assert "plan as 3 columns of 0 and 1" in dataset.source
    rows = np.concatenate([np.asarray(part.features) for part in (dataset.train, dataset.validation)])
    assert rows.shape == (30, 4)
    assert all(len(np.unique(rows[:, column])) == 2 for column in (1, 2, 3))


def test_words_in_few_rows_each_are_texts(tmp_path):
    records = [{"age": i, "plan": f"plan {i % 7}", "y": i % 2} for i in range(30)]
    with pytest.raises(ArgumentError, match="text in plan, among 2 columns"):
        load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y")


def test_free_texts_beside_few_words_ask_for_a_choice_that_works(tmp_path):
    records = [{"note": f"word{i}", "plan": "ab"[i % 3 == 0], "n": i, "y": i % 2} for i in range(30)]
    path = write_jsonl(tmp_path / "data.jsonl", records)
    with pytest.raises(ArgumentError, match=r"text in note, among 3 columns; .* columns=\['plan', 'n'\]"):
        load("mine", path=path, target="y")
    assert load("mine", path=path, target="y", columns=["plan", "n"]).train.features.shape[1] == 3


def test_dates_beside_numbers_are_no_kinds(tmp_path):
    records = [{"day": f"2024-01-0{1 + i % 3}", "n": i, "y": i % 2} for i in range(30)]
    with pytest.raises(ArgumentError, match=r"column 'day' holds '2024-01-01', a date"):
        load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y")


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


# --- files as other programs write them


def write(path, *lines, encoding="utf-8", end="\n"):
    path.write_bytes((end.join(lines) + end).encode(encoding))
    return path


def rows_of(form, count=20):
    return [form.format(i=i, third=i % 3, even=i % 2, half=i // 10, letter="xy"[i % 2]) for i in range(count)]


def load_lines(folder, *lines, name="data.csv", target="label", **options):
    return load("mine", path=write(folder / name, *lines), target=target, **options)


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("\ufeffa,b,label", "{i},{third},{even}"),  # the mark that Excel writes first
        ("a, b, label", "{i}, {third}, {even}"),
        ('"a","b","label"', '"{i}","{third}","{even}"'),
    ],
    ids=["byte order mark", "blanks", "quotes"],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["unix", "windows"])
def test_names_and_numbers_are_read_whatever_stands_around_them(tmp_path, header, row, end):
    plain = load_lines(tmp_path, "a,b,label", *rows_of("{i},{third},{even}"), name="plain.csv", target="label")
    path = write(tmp_path / "data.csv", header, *rows_of(row), end=end)
    dataset = load("mine", path=path, target="label", columns=["a", "b"])
    np.testing.assert_array_equal(dataset.train.features, plain.train.features)
    np.testing.assert_array_equal(dataset.train.labels, plain.train.labels)


def test_quoted_texts_may_hold_commas_quotes_and_lines(tmp_path):
    dataset = load_lines(tmp_path, "text,label", *rows_of('"a ""b"", {i}\nline",{even}'))
    # a " b " , i and line, and the line end between them.
    assert dataset.lengths.tolist() == [8] * 16


def test_blanks_around_a_class_make_no_other_class(tmp_path):
    dataset = load_lines(tmp_path, "a,label", *rows_of("{i},{letter}", 10), *rows_of("{i}, {letter} ", 10))
    assert dataset.num_classes == 2


def test_whole_numbers_that_a_float_cannot_tell_apart_are_different_classes(tmp_path):
    # 2^53 and 2^53 + 1 are the same float64.
    dataset = load_lines(tmp_path, "a,label", *rows_of("{i},900719925474099{third}"), target="label")
    # The last digits are 0, 1 and 2: 2^53 is …992.
    assert dataset.num_classes == 3
    near = load_lines(tmp_path, "a,label", *[f"{i},{2**53 + i % 2}" for i in range(20)])
    assert near.num_classes == 2


def test_numbers_near_the_largest_of_32_bits_are_standardised(tmp_path):
    dataset = load_lines(tmp_path, "a,label", *rows_of("{i}e37,{even}"))
    assert np.abs(dataset.train.features).max() < 3
    target = load_lines(tmp_path, "a,label", *rows_of("{i},{i}.5e36"), task="regression")
    assert np.abs(target.train.labels).max() < 3


def test_a_class_of_one_row_is_trained_on_and_not_validated(tmp_path):
    dataset = load_lines(tmp_path, "a,label", *[f"{i},c{max(i, 10)}" for i in range(20)])
    # 11 rows of c10, and c11 to c19 once each.
    assert dataset.num_classes == 10
    assert (len(dataset.train), np.unique(dataset.validation.labels).tolist()) == (18, [0])


@pytest.mark.parametrize(
    ("name", "mark", "found", "wanted"),
    [
        ("data.csv", ";", "semicolons", "commas"),
        ("data.csv", "\t", "tabs", "commas"),
        ("data.csv", "|", "bars", "commas"),
        ("data.tsv", ",", "commas", "tabs"),
    ],
)
def test_other_separators_are_named(tmp_path, name, mark, found, wanted):
    with pytest.raises(ArgumentError, match=rf"{name}: its columns are separated by {found}; .* again with {wanted}"):
        load_lines(tmp_path, mark.join(["a", "label"]), *rows_of("{i},5" + mark + "{even}"), name=name)


@pytest.mark.parametrize("first", ["", "Unnamed: 0"])
def test_row_numbers_of_pandas_are_not_learnt_from(tmp_path, first):
    lines = [f"{first},a,label", *rows_of("{i},{i}.5,{half}")]
    with pytest.raises(ArgumentError, match=r"column 1 has no name; .* index=False, .* choose columns=\['a'\]"):
        load_lines(tmp_path, *lines)
    assert load_lines(tmp_path, *lines, columns=["a"]).train.features.shape == (16, 1)


@pytest.mark.parametrize("word", ["NA", "n/a", "nan", "?", "-", " null "])
def test_a_word_for_a_missing_number_is_no_class_among_numbers(tmp_path, word):
    lines = rows_of("{i},{even}")
    lines[3] = f"3,{word}"
    with pytest.raises(ArgumentError, match=r"data\.csv:5: the target 'label' holds .* stands for a missing value"):
        load_lines(tmp_path, "a,label", *lines)


def test_nan_is_no_class_among_words_and_other_such_words_may_be_one(tmp_path):
    lines = rows_of("{i},{letter}")
    with pytest.raises(ArgumentError, match=r"data\.csv:2: the target 'label' holds 'NaN', which stands for"):
        load_lines(tmp_path, "a,label", "1,NaN", *lines)
    # North America, say.
    assert load_lines(tmp_path, "a,label", "1,NA", "2,NA", *lines).num_classes == 3


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("2024-01-{i}", "'2024-01-0', a date or time and no text; turn it into numbers"),
        ("{i}/12/24 10:30", "'0/12/24 10:30', a date or time"),
        ("10:{i}0", "'10:00', a date or time"),
        ('"1,{i}00"', "'1,000', a number spelt with more than digits and a point"),
        ("{i}%", "'0%', a number spelt with more"),
        ("${i}", "'\\$0', a number spelt with more"),
        ("- {i} €", "'- 0 €', a number spelt with more"),
    ],
)
def test_dates_and_decorated_numbers_are_not_taken_for_texts(tmp_path, cell, words):
    lines = rows_of(cell + ",{even}", 10) + rows_of(cell + ",{even}", 10)
    with pytest.raises(ArgumentError, match=f"column 'when' holds {words}"):
        load_lines(tmp_path, "when,label", *lines)
    with pytest.raises(ArgumentError, match=r"or choose only columns of numbers, columns=\['n'\]"):
        load_lines(tmp_path, "n,when,label", *[f"{i},{line}" for i, line in enumerate(lines)])


def test_a_number_with_underscores_is_a_name(tmp_path):
    # Python would read 1_0 as 10.
    dataset = load_lines(tmp_path, "a,label", *[f"{i},{['1_0', '10'][i % 2]}" for i in range(20)])
    assert dataset.num_classes == 2


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("{i}.5", "or pass task='regression' to predict a number"),
        ("2024-01-{i}", r"or write numbers to predict a number: .*data\.csv:2 holds '2024-01-0'"),
        ("id{i}", r"or write numbers to predict a number: .*data\.csv:2 holds 'id0'"),
    ],
)
def test_too_many_classes_come_with_advice_that_helps(tmp_path, cell, words):
    with pytest.raises(ArgumentError, match=f"20 different values in 20 rows, too many to be classes; .*{words}"):
        load_lines(tmp_path, "a,label", *rows_of("{i}," + cell), task="classification")


def test_a_column_that_only_later_rows_have_is_refused(tmp_path):
    records = [{"a": i, "y": i % 2, **({"b": 1} if i == 4 else {})} for i in range(20)]
    with pytest.raises(ArgumentError, match=r"data\.jsonl:5: column 'b' is not in the first row"):
        load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y")


def test_two_names_that_differ_by_blanks_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"two columns are called 'a', apart from blanks"):
        load_lines(tmp_path, "a, a,label", *rows_of("{i},{i},{even}"))


def test_a_long_number_is_cut_in_the_message(tmp_path):
    with pytest.raises(ArgumentError, match=r"holds 9{40}, which is not a 32-bit number$"):
        load_lines(tmp_path, "a,label", "9" * 400 + ",1", *rows_of("{i},{even}"))


def test_the_same_text_is_never_in_both_parts(tmp_path):
    # 30 texts, each four times, with other words beyond the cut.
    records = [{"text": f"word{i % 30} same {i}", "y": i % 2} for i in range(120)]
    dataset = load("mine", path=write_jsonl(tmp_path / "data.jsonl", records), target="y", max_length=2)
    train, validation = ({ids.tobytes() for ids in part.features} for part in (dataset.train, dataset.validation))
    assert (len(train), len(validation), len(train & validation)) == (24, 6, 0)
    assert (len(dataset.train), len(dataset.validation)) == (96, 24)


def test_a_handful_of_different_texts_is_too_few(tmp_path):
    with pytest.raises(ArgumentError, match=r"different texts in 20 rows: 2; validation needs texts that training"):
        load_lines(tmp_path, "text,label", *rows_of("city {letter},{third}"))


def test_a_file_says_where_it_comes_from(tmp_path):
    dataset = load_lines(tmp_path, "a,label", *rows_of("{i},{even}"))
    assert dataset.describe() == (
        "mine: table, classification, 16 + 4 examples, dimension 1, 2 classes; from your file data.csv"
    )


def test_rows_of_a_table_that_are_equal_are_in_the_same_part(tmp_path):
    """Texts that are equal are: a text learnt by heart proves nothing."""
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{i % 2}\n" for i, (a, b) in enumerate(rng.normal(size=(100, 2))) for _ in range(2)]
    path = tmp_path / "mine.csv"
    path.write_text("a,b,label\n" + "".join(rows))
    data = load("mine", path=str(path), target="label")
    known = {row.tobytes() for row in data.train.features}
    assert (len(data.train), len(data.validation)) == (160, 40)
    assert not any(row.tobytes() in known for row in data.validation.features)


def test_a_table_of_few_different_rows_is_refused_with_their_number(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("a,b,label\n" + "".join(f"{i % 2},{i % 4 // 2},{i % 2}\n" for i in range(100)))
    with pytest.raises(ArgumentError, match="different rows in 100 rows: 4; validation needs rows that training"):
        load("mine", path=str(path), target="label")
