from batchwright.cli.screen import Screen, percent, render_table, times


def test_a_screen_without_unicode_gets_ascii(capsys):
    Screen(ascii_only=True).show(["8 ██▌▏ 3", "a · b", "──", "größe"])
    assert capsys.readouterr().out.splitlines() == ["8 ###. 3", "a - b", "--", "gr??e"]


def test_a_unicode_screen_gets_the_lines_as_they_are(capsys):
    Screen().show(["██▌ ·"])
    assert capsys.readouterr().out == "██▌ ·\n"


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
