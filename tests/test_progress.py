"""A terminal sees tqdm's bar, or a count where tqdm is not installed; every other stream gets one closing line only."""

import io
import sys
import threading

import pytest

from batchwright._progress import ProgressBar, progress
from batchwright.testing import FakeClock


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def without_tqdm(monkeypatch):
    # None in sys.modules makes the import fail as if the package were absent.
    monkeypatch.setitem(sys.modules, "tqdm", None)


def test_a_stream_that_is_no_terminal_gets_one_closing_line():
    stream, clock = io.StringIO(), FakeClock()
    for _ in progress(range(1000), label="counting", stream=stream, clock=clock):
        clock.advance(0.5)
    # 1,000 items of half a second are 500 seconds, two per second
    assert stream.getvalue() == "counting: 1,000 in 8:20, 2.00/s\n"


def test_the_items_come_through_in_order():
    assert list(progress(iter("abc"), label="reading", enabled=False)) == ["a", "b", "c"]


def test_a_terminal_sees_label_share_and_count():
    pytest.importorskip("tqdm")
    stream = Terminal()
    with ProgressBar(label="counting", total=1000, stream=stream) as bar:
        bar._bar.mininterval = 0
        bar.update(250)
        shown = stream.getvalue().split("\r")[-1]
    assert shown.startswith("counting:  25%|")
    assert "250/1000" in shown


def test_a_terminal_sees_which_part_is_under_way():
    pytest.importorskip("tqdm")
    stream = Terminal()
    with ProgressBar(label="planning", total=2, stream=stream) as bar:
        bar.doing("WindowSort()")
        shown = stream.getvalue().split("\r")[-1]
    assert "WindowSort()" in shown
    with ProgressBar(label="planning", enabled=False) as bar:
        bar.doing("nothing is shown")


def test_the_bar_of_a_terminal_gives_way_to_the_closing_line():
    pytest.importorskip("tqdm")
    stream, clock = Terminal(), FakeClock()
    with ProgressBar(label="counting", total=4, stream=stream, clock=clock) as bar:
        clock.advance(2)
        bar.update(4)
    *drawn, wiped, last = stream.getvalue().split("\r")
    assert any("counting:   0%" in line for line in drawn)
    assert wiped.strip() == ""
    assert last == "counting: 4 in 2.0 s, 2.00/s\n"
    assert stream.getvalue().count("\n") == 1


def test_an_unknown_total_shows_what_is_done():
    pytest.importorskip("tqdm")
    stream, clock = Terminal(), FakeClock()
    for _ in progress(iter(range(3)), label="reading", stream=stream, clock=clock):
        clock.advance(1)
    assert "reading: 0it" in stream.getvalue()
    assert stream.getvalue().endswith("\rreading: 3 in 3.0 s, 1.00/s\n")


def test_the_bar_starts_no_thread():
    pytest.importorskip("tqdm")
    before = threading.active_count()
    with ProgressBar(label="counting", total=4, stream=Terminal()):
        assert threading.active_count() == before


@pytest.mark.usefixtures("without_tqdm")
def test_a_terminal_without_tqdm_sees_a_count_that_gives_way_to_the_closing_line():
    stream, clock = Terminal(), FakeClock()
    with ProgressBar(label="counting", total=1000, stream=stream, clock=clock) as bar:
        clock.advance(0.1)
        bar.update(100)  # too soon after the first line
        clock.advance(0.15)
        bar.update(150)
        bar.doing("the rest")
        clock.advance(0.25)
        bar.update(750)
    lines = ["counting: 0 of 1,000", "counting: 250 of 1,000", "counting: 250 of 1,000 the rest"]
    *shown, wiped, last = stream.getvalue().split("\r")
    assert [line.rstrip() for line in shown] == ["", *lines, "counting: 1,000 of 1,000 the rest"]
    assert wiped == " " * len(shown[-1])
    assert last == "counting: 1,000 in 0.5 s, 2.0k/s\n"


@pytest.mark.usefixtures("without_tqdm")
def test_a_shorter_line_wipes_the_longer_one_before_it():
    stream = Terminal()
    with ProgressBar(label="planning", stream=stream, clock=FakeClock()) as bar:
        bar.doing("WindowSort()")
        bar.doing("x" * 200)
        bar.doing("Sorted()")
    lengths = [len(line) for line in stream.getvalue().split("\r")]
    # "planning: 0", then with 12 letters more, cut at 79, and as wide again until the closing line
    assert lengths[:6] == [0, 11, 24, 79, 79, 20]


def test_a_loop_that_is_left_early_says_where():
    stream, clock = io.StringIO(), FakeClock()
    loop = progress(range(10), label="reading", stream=stream, clock=clock)
    next(loop), next(loop)
    clock.advance(4)
    loop.close()
    assert stream.getvalue() == "reading: stopped at 1 of 10 after 4.0 s, 0.25/s\n"


def stop_after_three(bar):
    with bar:
        bar.update(3)
        raise KeyError("stop")


def test_an_error_passes_through_and_is_told():
    stream, clock = io.StringIO(), FakeClock()
    with pytest.raises(KeyError):
        stop_after_three(ProgressBar(label="reading", stream=stream, clock=clock))
    assert stream.getvalue() == "reading: stopped at 3 after 0.0 s\n"


def test_a_disabled_bar_counts_silently():
    stream = Terminal()
    with ProgressBar(label="counting", total=5, enabled=False, stream=stream) as bar:
        bar.update(5)
    assert (bar.done, stream.getvalue()) == (5, "")


def test_closing_twice_writes_once():
    stream = io.StringIO()
    bar = ProgressBar(label="counting", stream=stream, clock=FakeClock())
    bar.close()
    bar.close()
    assert stream.getvalue() == "counting: 0 in 0.0 s\n"


def test_nothing_to_do_is_done():
    stream = io.StringIO()
    assert list(progress([], label="reading", stream=stream, clock=FakeClock())) == []
    assert stream.getvalue() == "reading: 0 in 0.0 s\n"


def test_more_than_the_total_is_no_error():
    stream, clock = Terminal(), FakeClock()
    with ProgressBar(label="counting", total=2, stream=stream, clock=clock) as bar:
        clock.advance(1)
        bar.update(3)
    assert stream.getvalue().endswith("counting: 3 in 1.0 s, 3.00/s\n")


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_stream_without_unicode_gets_plain_characters(kind):
    class Ascii(kind):
        encoding = "ascii"

        def write(self, text):
            return super().write(text.encode("ascii").decode())

    stream, clock = Ascii(), FakeClock()
    with ProgressBar(label="größe", total=2, stream=stream, clock=clock) as bar:
        bar.update(1)
    assert stream.getvalue().isascii()
    assert stream.getvalue().endswith("gr??e: stopped at 1 of 2 after 0.0 s\n")


def test_a_program_without_a_console_counts_silently(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with ProgressBar(label="counting", total=2) as bar:
        bar.update(2)
    assert bar.done == 2


def test_the_default_stream_is_stderr(capsys):
    list(progress([1], label="counting", clock=FakeClock()))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "counting: 1 in 0.0 s\n")
