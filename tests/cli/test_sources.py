import gzip
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright.cli.reading import Source, read_examples
from batchwright.cli.sources import kind_of
from batchwright.errors import ArgumentError


def rows(path, **options):
    return read_examples(Source(path=path, **options))[0]


def write_parquet(path, columns, **options):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_the_columns_of_a_parquet_file_are_fields(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"id": [1, 2], "body": ["one", "two"]})
    assert rows(path) == ["one", "two"]
    assert rows(path, field="id", holds_lengths=True) == [1, 2]


def test_parquet_holds_pairs_and_lists_of_ids(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"en": ["a", "b"], "de": ["x", "y"], "ids": [[1, 2, 3], []]})
    assert rows(path, pairs=True) == [("a", "x"), ("b", "y")]
    assert rows(path, field="ids", holds_lengths=True) == [3, 0]


def test_parquet_is_read_in_row_groups_up_to_the_limit(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": [str(i) for i in range(100)]}, row_group_size=7)
    assert rows(path) == [str(i) for i in range(100)]
    assert rows(path, limit=9) == [str(i) for i in range(9)]


def test_a_field_that_parquet_lacks_lists_those_found(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"title": ["t"], "body": ["b"]})
    with pytest.raises(ArgumentError, match=r"a\.parquet:row 1: no field 'text'; fields here: title, body"):
        rows(path, field="text")
    with pytest.raises(ArgumentError, match=r"name the field .* fields here: title, body"):
        rows(path)


def test_an_empty_value_in_parquet_is_named_by_its_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", {"text": ["t", None]})
    with pytest.raises(ArgumentError, match=r"a\.parquet:row 2: field 'text' holds null"):
        rows(path)


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ArgumentError, match=r"a\.parquet is not a readable Parquet file"):
        rows(tmp_path / "a.parquet")


def test_without_pyarrow_the_way_to_get_it_is_said(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"any")
    code = (
        "import sys; sys.modules['pyarrow'] = None; from batchwright.cli import main; "
        "sys.exit(main(['plan', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "batchwright: error: pyarrow is not installed; run: pip install pyarrow\n"


def test_a_folder_of_text_files_has_one_text_per_file(tmp_path):
    (tmp_path / "b.txt").write_text("second\nof two lines\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (tmp_path / ".hidden").write_text("no data")
    (tmp_path / "_SUCCESS").write_text("")
    assert rows(tmp_path) == ["first", "second\nof two lines", "third"]


def test_the_parts_of_a_folder_come_by_name(tmp_path):
    for name in ("part-1", "part-0"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / "part-2.jsonl.gz").write_bytes(gzip.compress(b'{"text": "part-2"}\n'))
    assert rows(tmp_path) == ["part-0", "part-1", "part-2"]
    assert rows(tmp_path, limit=2) == ["part-0", "part-1"]


def test_a_folder_of_parquet_parts(tmp_path):
    for name in ("b", "a"):
        write_parquet(tmp_path / f"{name}.parquet", {"text": [name, name * 2]})
    assert rows(tmp_path) == ["a", "aa", "b", "bb"]


def test_a_later_part_without_the_field_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "t"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "t"}\n')
    with pytest.raises(ArgumentError, match=r"b\.jsonl:1: no field 'text'; fields here: body"):
        rows(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"holds no files; give one with \.jsonl"),
        (["a.txt", "b.jsonl"], r"mixes formats \(a\.txt, b\.jsonl\); keep only files of one format in it"),
        (["a.parquet", "README.md"], r"mixes formats \(README\.md, a\.parquet\)"),
        (["a.txt", "inner/b.txt"], r"mixes formats \(a\.txt, inner\)"),
        (["inner/b.txt"], r"holds no files; give a folder inside it, for example .*inner"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_an_empty_or_mixed_folder_gets_the_next_step(tmp_path, names, message):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    with pytest.raises(ArgumentError, match=message):
        rows(tmp_path)


@pytest.mark.parametrize(
    ("kind", "content", "options", "expected"),
    [
        ("jsonl", '{"text": "one"}\n{"text": "two"}\n', {}, ["one", "two"]),
        ("csv", "id,body\n1,one\n2,two\n", {"field": "body"}, ["one", "two"]),
        ("tsv", "one\teins\ntwo\tzwei\n", {"pairs": True}, [("one", "eins"), ("two", "zwei")]),
        ("txt", "one\r\ntwo\r\n", {}, ["one", "two"]),
    ],
    ids=["jsonl", "csv", "tsv", "txt"],
)
def test_standard_input_has_the_format_that_is_named(monkeypatch, kind, content, options, expected):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert rows(Path("-"), stdin_format=kind, **options) == expected


def test_a_mistake_in_standard_input_is_named_by_its_line(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "one"}\noops\n')))
    with pytest.raises(ArgumentError, match="standard input:2: not JSON"):
        rows(Path("-"), stdin_format="jsonl")


def test_standard_input_without_a_format_asks_for_it():
    with pytest.raises(ArgumentError, match="no name to tell its format; add --format, one of jsonl"):
        kind_of(Path("-"))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"no such file: .*absent"):
        kind_of(tmp_path / "absent")


def test_numbers_in_a_table_hint_at_lengths(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time_ms,input_length,output_length\n7,120,30\n")
    with pytest.raises(ArgumentError, match="if they hold lengths, for example --field input_length --tokenizer"):
        rows(path)
    with pytest.raises(ArgumentError, match="for example --field input_length,output_length --tokenizer lengths"):
        rows(path, pairs=True)
