"""The bar is alive on a terminal, leaves one line in a log, and never draws more than ten times a second."""

import io

import pytest

from batchwright._progress import ProgressBar, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def drawn(stream):
    """The states a terminal showed, oldest first, without the blanks that wipe the one before."""
    return [line.rstrip() for line in stream.getvalue().split("\r")[1:]]


def test_a_stream_that_is_no_terminal_gets_one_closing_line():
    stream, clock = io.StringIO(), FakeClock()
    for _ in progress(range(1000), label="counting", stream=stream, clock=clock):
        clock.now += 0.5
    # 1,000 items of half a second are 500 seconds, two a second
    assert stream.getvalue() == "counting: 1,000 in 8:20, 2.00/s\n"


def test_the_items_come_through_in_order():
    assert list(progress(iter("abc"), label="reading", enabled=False)) == ["a", "b", "c"]


def test_a_terminal_sees_share_count_rate_and_time_left():
    stream, clock = Terminal(), FakeClock()
    with ProgressBar(label="counting", total=1000, stream=stream, clock=clock) as bar:
        clock.now += 2
        bar.update(250)
        # 250 in 2 s are 125 a second, so the other 750 take 6 s; a quarter of 24 marks is 6
        assert drawn(stream)[-1] == "counting  25% " + "━" * 6 + "─" * 18 + "  250/1,000  125/s  6.0 s left"


def test_a_terminal_ends_with_the_closing_line_and_a_newline():
    stream, clock = Terminal(), FakeClock()
    with ProgressBar(label="counting", total=4, stream=stream, clock=clock) as bar:
        clock.now += 2
        bar.update(4)
    assert drawn(stream)[-1] == "counting: 4 in 2.0 s, 2.00/s"
    assert stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\n") == 1


def test_a_shorter_line_wipes_the_longer_one_before_it():
    stream, clock = Terminal(), FakeClock()
    with ProgressBar(label="counting", total=4, stream=stream, clock=clock) as bar:
        clock.now += 2
        bar.update(4)
    before, last = stream.getvalue().rstrip("\n").split("\r")[-2:]
    assert len(last) >= len(before.rstrip())


def test_the_bar_is_drawn_at_most_ten_times_a_second():
    stream, clock = Terminal(), FakeClock()
    with ProgressBar(label="counting", total=1000, stream=stream, clock=clock) as bar:
        for _ in range(1000):
            clock.now += 1 / 1024  # exact in binary, so that the sum is too
            bar.update()
    # one at the start, one every 103 steps of 1/1024 s (the first at or over 0.1 s), one closing line
    assert len(drawn(stream)) == 1 + 1000 // 103 + 1


def test_an_unknown_total_shows_what_is_done():
    stream, clock = Terminal(), FakeClock()
    for _ in progress(iter(range(3)), label="reading", stream=stream, clock=clock):
        clock.now += 1
    assert drawn(stream) == [
        "reading  0  0.0 s",
        "reading  1  1.00/s  1.0 s",
        "reading  2  1.00/s  2.0 s",
        "reading  3  1.00/s  3.0 s",
        "reading: 3 in 3.0 s, 1.00/s",
    ]


def test_a_loop_that_is_left_early_says_where():
    stream, clock = io.StringIO(), FakeClock()
    loop = progress(range(10), label="reading", stream=stream, clock=clock)
    next(loop), next(loop)
    clock.now += 4
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


def test_more_than_the_total_is_shown_as_all():
    stream, clock = Terminal(), FakeClock()
    with ProgressBar(label="counting", total=2, stream=stream, clock=clock) as bar:
        clock.now += 1
        bar.update(3)
        assert drawn(stream)[-1] == "counting 100% " + "━" * 24 + "  3/2  3.00/s  0.0 s left"


def test_a_long_label_leaves_out_the_bar_and_stays_on_one_line():
    stream, clock = Terminal(), FakeClock()
    with ProgressBar(label="x" * 66, total=9, stream=stream, clock=clock):
        # of the 80 columns of an unknown width the numbers leave 2 for the bar, too few for one
        assert drawn(stream)[-1] == "x" * 66 + "   0%  0/9"


def test_a_line_is_cut_before_the_terminal_wraps_it():
    stream = Terminal()
    with ProgressBar(label="x" * 200, stream=stream, clock=FakeClock()):
        assert len(drawn(stream)[-1]) == 79


def test_a_terminal_without_box_characters_gets_plain_ones():
    class AsciiTerminal(Terminal):
        encoding = "ascii"

    stream, clock = AsciiTerminal(), FakeClock()
    with ProgressBar(label="counting", total=2, stream=stream, clock=clock) as bar:
        clock.now += 1
        bar.update(1)
        assert "#" * 12 + "-" * 12 in drawn(stream)[-1]


def test_the_default_stream_is_stderr(capsys):
    list(progress([1], label="counting", clock=FakeClock()))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "counting: 1 in 0.0 s\n")
