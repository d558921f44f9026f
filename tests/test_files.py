"""Files are written whole or not at all, and read record by record; the lines themselves are tested with the CLI."""

import gzip
import os
from pathlib import Path

import pytest

from batchwright._files import file_format, make_folder, read_records, write_atomic
from batchwright.errors import ArgumentError, StoreError


def records_of(tmp_path, name, text, *, tsv_header=True):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return [(where.removeprefix(f"{path}:"), record) for where, record in read_records(path, tsv_header=tsv_header)]


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "lab.json"
    write_atomic(path, "old")
    write_atomic(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    write_atomic(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["lab.json"]


def test_the_old_file_stays_where_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "lab.json"
    path.write_text("old")

    def refuse(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreError, match=r"cannot write .*lab\.json: No space left on device; what was there is kept"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["lab.json"]


def test_a_text_that_cannot_be_encoded_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "a", "\ud800")
    assert os.listdir(tmp_path) == []


def test_a_folder_is_made_with_those_above_it(tmp_path):
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot make the folder .*; choose another"):
        make_folder(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "kind"), [("a.jsonl", ".jsonl"), ("a.b.CSV", ".csv"), ("a.tsv.gz", ".tsv"), ("a.txt", ".txt")]
)
def test_the_name_tells_the_format(name, kind):
    assert file_format(Path(name)) == kind


@pytest.mark.parametrize("name", ["a", "a.gz", "a.json", "a.parquet", ".csv", "a.csv.zip"])
def test_other_names_are_refused(name):
    with pytest.raises(ArgumentError, match=r"cannot tell the format of .*; the name must end in \.jsonl, \.csv"):
        file_format(Path(name))


@pytest.mark.parametrize("name", ["data.txt", "data.txt.gz"])
def test_a_line_of_text_is_a_record(tmp_path, name):
    assert records_of(tmp_path, name, "a b\n\n c") == [("1", {"text": "a b"}), ("2", None), ("3", {"text": " c"})]


def test_json_lines_hold_objects(tmp_path):
    assert records_of(tmp_path, "a.jsonl", '{"n": 1}\n \n{"n": [2]}\n') == [
        ("1", {"n": 1}),
        ("2", None),
        ("3", {"n": [2]}),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "a.jsonl:1: not JSON"), ("[1]", r"a.jsonl:1: each line must be a JSON object .*, got \[1\]"),
     ("[" * 100_000, "a.jsonl:1: not JSON"),
     ('[\n{"a": 1}\n]', r"got \[; if the file is one list .*, write one a line: jq -c '\.\[\]' \S*a.jsonl > lines"),
     ('[{"a": 1}]', "if the file is one list of objects"), ('{"a": 1}\n[2]', r"a.jsonl:2: .*, got \[2\]$")],
)  # fmt: skip
def test_lines_that_are_no_objects_are_named(tmp_path, line, words):
    with pytest.raises(ArgumentError, match=words):
        records_of(tmp_path, "a.jsonl", line)


def test_csv_fields_may_hold_commas_quotes_and_lines(tmp_path):
    text = 'text,label\n"a, ""b""\nc",1\n\nd,2\n'
    found = records_of(tmp_path, "a.csv", text)
    assert found == [("2", {"text": 'a, "b"\nc', "label": "1"}), ("4", None), ("5", {"text": "d", "label": "2"})]


def test_a_csv_field_may_be_longer_than_the_default_of_python(tmp_path):
    assert records_of(tmp_path, "a.csv", "text\n" + "x" * 200_000) == [("2", {"text": "x" * 200_000})]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1\n", "a.csv:2: 1 columns, where the first line has 2"),
        ("a,b,a\n", "a.csv:1: two columns are called 'a'; give every column a name of its own"),
        ('a\n"b', "a.csv:2: not CSV"),
        ('a\nb\n"c\nd\n', "a.csv:3: not CSV: a text that begins here with a quote is never closed; write quotes"),
        ('a;b\n"c\nd";1\n', "a.csv:2: not CSV: .*seem to be separated by ';', write the file again with commas"),
        ('a\tb\n"c"\t1\n', r"a.csv:2: not CSV: .*seem to be separated by '\\t'"),
        ('a\n"b"c\n', "a.csv:2: not CSV: ',' expected after '\"'$"),
    ],
)
def test_csv_that_does_not_fit_its_header_is_refused(tmp_path, text, words):
    with pytest.raises(ArgumentError, match=words):
        records_of(tmp_path, "a.csv", text)


def test_tsv_columns_have_the_names_of_the_first_line_or_numbers(tmp_path):
    text = 'text\tlabel\n\n"a\tb\n'
    assert records_of(tmp_path, "a.tsv", text) == [("2", None), ("3", {"text": '"a', "label": "b"})]
    assert records_of(tmp_path, "a.tsv", text, tsv_header=False) == [
        ("1", {"1": "text", "2": "label"}),
        ("2", None),
        ("3", {"1": '"a', "2": "b"}),
    ]


def test_a_tsv_line_with_other_columns_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"a\.tsv:2: 3 columns, where the first line has 2"):
        records_of(tmp_path, "a.tsv", "a\tb\n1\t2\t3\n")


@pytest.mark.parametrize("kind", ["utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_told_by_its_mark(tmp_path, kind):
    path = tmp_path / "a.csv"
    path.write_bytes("\ufefftext\nhello\n".encode(kind))
    with pytest.raises(ArgumentError, match=r"not UTF-8 .* for example iconv -f utf-16 -t utf-8"):
        list(read_records(path, tsv_header=True))
