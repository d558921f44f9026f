"""Lines of a file, and every way in which reading one can fail."""

import gzip

import pytest

from batchwright._files import read_lines
from batchwright.errors import ArgumentError


def test_lines_end_at_a_newline_only(tmp_path):
    path = tmp_path / "data.txt"
    # U+2028 and the form feed end a line for str.splitlines, not here; \r\n ends one as \n does.
    path.write_bytes("a\u2028b\x0cc\r\nd\n".encode())
    assert list(read_lines(path)) == [(1, "a\u2028b\x0cc"), (2, "d")]


def test_a_byte_order_mark_is_not_part_of_the_first_line(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n")
    assert list(read_lines(path)) == [(1, "a"), (2, "\ufeffb")]


def test_gzip_reads_like_the_plain_file(tmp_path):
    path = tmp_path / "data.txt.gz"
    path.write_bytes(gzip.compress(b"a\nb"))
    assert list(read_lines(path)) == [(1, "a"), (2, "b")]


def test_bytes_that_are_not_utf8_are_named_by_line_and_position(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"fine\nab\xff\n")
    with pytest.raises(ArgumentError, match=r"data\.txt:2: not UTF-8 \(byte 3 of the line\)"):
        list(read_lines(path))


@pytest.mark.parametrize(
    "damage",
    [lambda raw: b"plain text", lambda raw: raw[:-6], lambda raw: raw[:20] + b"\x00\xff\x13" + raw[23:]],
    ids=["no gzip at all", "cut off", "bytes changed"],
)
def test_a_damaged_gzip_file_says_so(tmp_path, damage):
    path = tmp_path / "data.txt.gz"
    path.write_bytes(damage(gzip.compress(bytes(range(32, 127)) * 30)))
    with pytest.raises(ArgumentError, match="is not a readable gzip file"):
        list(read_lines(path))


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path):
    with pytest.raises(ArgumentError, match="no such file"):
        list(read_lines(tmp_path / "absent.txt"))
    with pytest.raises(ArgumentError, match="is a folder"):
        list(read_lines(tmp_path))
