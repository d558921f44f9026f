import os
import subprocess
import sys

import pytest

from batchwright.cli.screen import Bin, Screen, percent, render_bars, render_table, times


def test_a_screen_without_unicode_gets_ascii(capsys):
    Screen(ascii_only=True).show(["8 ██▌▏ 3", "a · b", "──", "größe"])
    assert capsys.readouterr().out.splitlines() == ["8 ###. 3", "a - b", "--", "gr??e"]


def test_a_unicode_screen_gets_the_lines_as_they_are(capsys):
    Screen().show(["██▌ ·"])
    assert capsys.readouterr().out == "██▌ ·\n"


def test_a_screen_with_some_block_characters_gets_ascii(tmp_path):
    # Code page 437 has the full block, but no eighths of it.
    out = run_plan(tmp_path / "a.txt", "cp437")
    assert "####" in out
    assert "median 2 - p90 3" in out


def test_a_file_name_that_is_not_utf8_is_shown_with_question_marks(tmp_path):
    assert run_plan(os.fsencode(tmp_path) + b"/x\xff.txt", "utf-8:strict").startswith("x?.txt: 3 examples")


def run_plan(path, encoding):
    with open(path, "w") as file:
        file.write("a\na b\na b c\n")
    command = [sys.executable, "-m", "batchwright", "plan", os.fsdecode(path)]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode(encoding.partition(":")[0])


def test_sentences_are_broken_at_the_width():
    assert all(len(line) <= 50 for line in Screen(width=50).wrap("word " * 60, indent="  "))


def test_the_columns_of_a_table_line_up():
    lines = render_table(["", "padding", "n"], [["a long name", "1.0 %", "5"], ["b", "10.0 %", "1,000"]])
    assert lines == [
        "             padding      n",
        "───────────────────────────",
        "a long name    1.0 %      5",
        "b             10.0 %  1,000",
    ]


def test_bars_are_drawn_in_eighths_of_a_cell():
    # 12 wide leaves 8 cells: 16 fills them, 7 is 3.5 cells, 1 is half a cell.
    lines = render_bars([Bin(1, 1, 16), Bin(2, 2, 7), Bin(3, 3, 1)], width=13)
    assert lines == ["1 ████████ 16", "2 ███▌      7", "3 ▌         1"]


def test_a_bin_with_one_of_many_examples_is_still_seen():
    # 1 of 10,000 would be less than an eighth of a cell.
    lines = render_bars([Bin(1, 1, 10_000), Bin(2, 2, 1), Bin(3, 3, 0)], width=20)
    assert "▏" in lines[1]
    assert not any(block in lines[2] for block in "▏▎▍▌▋▊▉█")


@pytest.mark.parametrize("width", [40, 60, 100])
def test_every_line_fills_the_width(width):
    lines = render_bars([Bin(1, 4, 900), Bin(5, 8, 1234), Bin(9, 12, 3)], width=width)
    assert {len(line) for line in lines} == {width}


def test_numbers_keep_two_or_three_digits():
    assert [times(x) for x in (0.94, 1.0, 1.94, 1.96, 9.94, 9.96, 123.4)] == [
        "0.94x",
        "1.00x",
        "1.94x",
        "2.0x",
        "9.9x",
        "10x",
        "123x",
    ]
    assert percent(0.0) == "0.0 %"
