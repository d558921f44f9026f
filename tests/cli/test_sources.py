import gzip
import io
import json
import os
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


def test_two_columns_of_one_name_are_refused_in_parquet_too(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table([arrow.array(["a b"]), arrow.array(["c"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ArgumentError, match=r"a\.parquet: two columns are called 'text'; give every column a name"):
        rows(tmp_path / "a.parquet")


def test_text_that_is_not_utf8_is_named_by_its_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    raw = arrow.array([b"ab"] * 8 + [b"\xff\xfe"], arrow.binary())
    text = arrow.Array.from_buffers(arrow.string(), 9, raw.buffers())
    path = write_parquet(tmp_path / "a.parquet", {"text": text}, row_group_size=4)
    assert rows(path, limit=8) == ["ab"] * 8
    with pytest.raises(ArgumentError, match=r"a\.parquet:row 9: column 'text' is not UTF-8; convert the file first"):
        rows(path)


@pytest.mark.parametrize("holds_lengths", [False, True])
def test_bytes_in_parquet_are_neither_texts_nor_lengths(tmp_path, holds_lengths):
    path = write_parquet(tmp_path / "a.parquet", {"text": [b"12"]})
    with pytest.raises(ArgumentError, match=r"a\.parquet:row 1: .*(holds|got) bytes"):
        rows(path, holds_lengths=holds_lengths)


def test_a_map_in_parquet_is_no_list_of_ids(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    column = arrow.array([[("a", 1), ("b", 2)]], arrow.map_(arrow.string(), arrow.int64()))
    path = write_parquet(tmp_path / "a.parquet", {"ids": column})
    with pytest.raises(ArgumentError, match=r"a flat list, and the list in field 'ids' holds a pair"):
        rows(path, field="ids", holds_lengths=True)


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


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(ArgumentError, match=r"cannot read a+\.txt: File name too long"):
        rows(Path("a" * 300 + ".txt"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give up its rights")
@pytest.mark.parametrize("name", ["locked", "locked/a.txt"])
def test_a_folder_that_may_not_be_read_is_refused_in_one_line(tmp_path, name):
    folder = tmp_path / "locked"
    folder.mkdir()
    (folder / "a.txt").write_text("w w\n")
    folder.chmod(0)
    # As root one may read everything; the modules must be there before the rights are gone.
    code = (
        "import os, sys; from batchwright.cli.app import main; os.chdir(sys.argv[1]); os.seteuid(65534); "
        "sys.exit(main(['plan', sys.argv[2], '--quiet']))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    folder.chmod(0o755)
    assert (done.returncode, done.stderr) == (2, f"batchwright: error: cannot read {name}: Permission denied\n")


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "x.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "y.txt").write_text("one\n")
    with pytest.raises(ArgumentError, match=r"x\.txt is a link to a file that is not there; remove the link"):
        rows(tmp_path)


def test_a_closed_standard_input_is_refused_in_one_line():
    command = [sys.executable, "-m", "batchwright", "plan", "-", "--format", "txt"]
    done = subprocess.run(command, preexec_fn=lambda: os.close(0), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("batchwright: error: standard input is closed; send data to it, for example < data.jsonl\n")


def test_numbers_in_a_table_hint_at_lengths(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time_ms,input_length,output_length\n7,120,30\n")
    with pytest.raises(ArgumentError, match="if they hold lengths, for example --field input_length --tokenizer"):
        rows(path)
    with pytest.raises(ArgumentError, match="for example --field input_length,output_length --tokenizer lengths"):
        rows(path, pairs=True)
