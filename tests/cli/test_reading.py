import gzip
import json

import pytest

from batchwright._files import read_records
from batchwright.cli.reading import Source, read_examples
from batchwright.errors import ArgumentError


def rows(path, **options):
    return read_examples(Source(path=path, **options))[0]


def write_jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_jsonl_takes_the_field_text_when_there_are_others(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"label": "x", "text": "one"}, {"label": "y", "text": "two"})
    assert rows(path) == ["one", "two"]


def test_jsonl_takes_the_only_text_field(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"id": 1, "body": "one"}, {"id": 2, "body": "two"})
    assert rows(path) == ["one", "two"]


def test_jsonl_asks_for_a_field_when_several_hold_text(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"title": "t", "body": "b"})
    with pytest.raises(ArgumentError, match=r"a\.jsonl:1: name the field .* fields here: title, body"):
        rows(path)


@pytest.mark.parametrize(
    ("pairs", "example"), [(False, "--field answer;"), (True, "--field 'a question,answer';")], ids=["texts", "pairs"]
)
def test_the_longest_texts_are_named_as_an_example_that_a_shell_takes(tmp_path, pairs, example):
    record = {"id": "7", "a question": "how much?", "answer": "four apples", "n": 4}
    with pytest.raises(ArgumentError, match=example):
        rows(write_jsonl(tmp_path / "a.jsonl", record), pairs=pairs)


def test_of_two_texts_per_row_a_pair_is_the_other_reading(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"en": "one", "a de": "eins"})
    with pytest.raises(ArgumentError, match=r"if every row is a pair of texts, --pairs --field 'en,a de'$"):
        rows(path)


def test_a_field_that_is_absent_lists_those_found(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"title": "t", "body": "b"})
    with pytest.raises(ArgumentError, match=r"no field 'txet'; fields here: title, body"):
        rows(path, field="txet")


def test_a_later_line_without_the_field_is_named(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"text": "t"}, {"body": "b"})
    with pytest.raises(ArgumentError, match=r"a\.jsonl:2: no field 'text'; fields here: body"):
        rows(path)


def test_a_json_string_with_a_line_separator_stays_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\u2028line"}\n', encoding="utf-8")
    assert rows(path) == ["one\u2028line"]


def test_blank_lines_are_skipped_and_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\none\n   \ntwo\n", encoding="utf-8")
    assert read_examples(Source(path=path)) == (["one", "two"], 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"a\.jsonl:2: not JSON"),
        ('["text"]', r"a\.jsonl:2: each line must be a JSON object"),
        ('{"text": 5}', r"a\.jsonl:2: field 'text' holds a number, not text"),
        ('{"text": null}', r"a\.jsonl:2: field 'text' holds null, not text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ArgumentError, match=message):
        rows(path)


def test_csv_reads_quoted_line_ends_and_commas(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,body\n1,"one, and\nmore"\n\n2,two\n', encoding="utf-8")
    assert read_examples(Source(path=path, field="body")) == (["one, and\nmore", "two"], 1)


def test_csv_with_a_wrong_number_of_cells_names_the_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,one\n2,two,three\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"a\.csv:3: 3 columns, where the first line has 2"):
        rows(path)


@pytest.mark.parametrize(("name", "between"), [("a.csv", ","), ("a.tsv", "\t")])
def test_two_columns_of_one_name_are_refused(tmp_path, name, between):
    path = tmp_path / name
    path.write_text(between.join(["text", "id", "text"]) + "\n" + between.join("abc") + "\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"a\..sv:1: two columns are called 'text'; give every column a name"):
        list(read_records(path, tsv_header=True))


def test_csv_with_an_open_quote_names_the_line(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text\n"never closed\n', encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"a\.csv:2: not CSV"):
        rows(path)


def test_csv_takes_a_text_longer_than_the_usual_limit(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\n" + "x" * 200_000 + "\n", encoding="utf-8")
    assert [len(text) for text in rows(path)] == [200_000]


def test_tsv_columns_are_numbered_from_one(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('one "quoted\teins\ntwo\tzwei\n', encoding="utf-8")
    assert rows(path) == ['one "quoted', "two"]
    assert rows(path, field="2") == ["eins", "zwei"]
    assert rows(path, pairs=True) == [('one "quoted', "eins"), ("two", "zwei")]
    assert rows(path, pairs=True, field="2,1")[1] == ("zwei", "two")


def test_tsv_with_a_named_column_takes_the_first_line_as_header(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("en\tde\none\teins\n", encoding="utf-8")
    assert rows(path, field="de") == ["eins"]
    with pytest.raises(ArgumentError, match="no field 'fr'; fields here: en, de"):
        rows(path, field="fr")


def test_tsv_with_one_column_has_no_pairs(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("one\n", encoding="utf-8")
    with pytest.raises(ArgumentError, match="no field '2'; fields here: 1"):
        rows(path, pairs=True)


def test_pairs_from_named_fields(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"en": "one", "de": "eins", "note": "n"})
    assert rows(path, pairs=True, field="de, en") == [("eins", "one")]
    with pytest.raises(ArgumentError, match="--pairs needs two fields"):
        rows(path, pairs=True, field="de")


def test_the_limit_stops_before_a_malformed_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\nnot json\n', encoding="utf-8")
    assert rows(path, limit=2) == ["one", "two"]


def test_lengths_may_stand_in_the_data(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"ids": [4, 8, 15], "n": 7}, {"ids": [], "n": "9"})
    assert rows(path, field="ids", holds_lengths=True) == [3, 0]
    assert rows(path, field="n", holds_lengths=True) == [7, 9]


@pytest.mark.parametrize("value", ["many", 2.5, -1, True, None, 2**31, 10**30])
def test_a_length_that_is_no_count_is_refused(tmp_path, value):
    path = write_jsonl(tmp_path / "a.jsonl", {"n": value})
    with pytest.raises(ArgumentError, match=r"a\.jsonl:1: --tokenizer lengths needs a whole number"):
        rows(path, field="n", holds_lengths=True)


@pytest.mark.parametrize(
    ("value", "held"), [([[1, 2, 3, 4]], "a list: '[1, 2, 3, 4]'"), ([1, None], "null"), ([{"id": 1}], "an object")]
)
def test_only_the_items_of_a_flat_list_are_counted(tmp_path, value, held):
    # A batch of one, [[1, 2, 3, 4]], would count as one token.
    path = write_jsonl(tmp_path / "a.jsonl", {"input_ids": value})
    with pytest.raises(ArgumentError) as refused:
        rows(path, field="input_ids", holds_lengths=True)
    assert "a.jsonl:1: --tokenizer lengths counts the items of a flat list" in str(refused.value)
    assert f"the list in field 'input_ids' holds {held}" in str(refused.value)


def test_the_name_tells_the_format(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("text")
    with pytest.raises(ArgumentError, match=r"cannot tell the format of a\.md; .*\.jsonl, \.csv, \.tsv or \.txt"):
        rows(path)


def test_a_plain_text_file_has_no_fields(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\n"))
    assert rows(path) == ["one"]
    with pytest.raises(ArgumentError, match="no fields"):
        rows(path, field="text")


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_examples_is_refused(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ArgumentError, match=r"a\.jsonl holds no examples"):
        rows(path)
