"""What user code raises ends only its item; what a signal raises ends the program."""

import asyncio
import signal
import subprocess
import sys
import textwrap

import pytest

from batchwright.errors import BatchwrightError
from batchwright.serve import Batcher, RunInterrupted

KINDS = [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def raising(kind, *, is_async):
    def double(items):
        if 3 in items:
            raise kind("of the function")
        return [2 * item for item in items]

    async def double_later(items):
        await asyncio.sleep(0)
        return double(items)

    return double_later if is_async else double


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_item_that_makes_the_function_exit_fails_alone_and_the_server_lives(kind, is_async):
    async def main():
        async with Batcher(raising(kind, is_async=is_async)) as batcher:
            ends = await asyncio.gather(*map(batcher.submit, range(6)), return_exceptions=True)
            assert [*ends[:3], *ends[4:]] == [0, 2, 4, 8, 10]
            assert isinstance(ends[3], RunInterrupted)
            assert isinstance(ends[3], BatchwrightError)
            assert type(ends[3].__cause__) is kind
            assert await batcher.submit(9) == 18

    run(main())


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_waits_gets_an_error_that_it_can_handle(kind, is_async):
    with Batcher(raising(kind, is_async=is_async)) as batcher:
        with pytest.raises(RunInterrupted, match=f"raised {kind.__name__}: of the function"):
            batcher.submit_sync(3)
        assert batcher.submit_sync(4) == 8


def test_with_on_error_raise_the_whole_batch_has_the_error():
    async def main():
        async with Batcher(raising(SystemExit, is_async=False), on_error="raise", policy="window") as batcher:
            ends = await asyncio.gather(*map(batcher.submit, range(2, 5)), return_exceptions=True)
            assert [type(end) for end in ends] == [RunInterrupted] * 3
            assert batcher.stats().num_calls == 1

    run(main())


def test_a_loop_that_ends_still_cancels_its_batch():
    async def wait(items):
        entered.append(items)
        await asyncio.sleep(3600)

    async def main():
        task = asyncio.create_task(batcher.submit(1))
        while not entered:
            await asyncio.sleep(0.001)
        task.cancel()

    entered = []
    batcher = Batcher(wait, on_error="raise")
    run(main())
    batcher.close_sync(timeout_seconds=30)
    assert batcher.stats().num_running == 0


def interrupt(text, number):
    """Run a program that prints a line when it is ready, send it a signal, and return how it ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, errors


BUSY = """
    import asyncio, signal, sys, time
    from batchwright.serve import Batcher

    async def busy(items):
        print("ready", flush=True)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            {wait}
        return items

    batcher = Batcher(busy)
    {handler}
    loop = asyncio.new_event_loop()
    {start}
    print("not reached")
"""
ENDS = [
    ("asyncio.run(batcher.submit(1))", "await asyncio.sleep(0.01)"),
    ("loop.run_until_complete(batcher.submit(1))", "await asyncio.sleep(0.01)"),
    ("loop.run_until_complete(batcher.submit(1))", "sum(range(100))"),
]


@pytest.mark.parametrize(("start", "wait"), ENDS)
def test_ctrl_c_in_the_main_thread_ends_the_program(start, wait):
    code, errors = interrupt(BUSY.format(start=start, wait=wait, handler=""), signal.SIGINT)
    assert code in (-signal.SIGINT, 1), errors
    assert "KeyboardInterrupt" in errors


def test_a_signal_handler_that_exits_ends_the_program():
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    code, errors = interrupt(BUSY.format(start=ENDS[2][0], wait=ENDS[2][1], handler=handler), signal.SIGTERM)
    assert code == 5, errors
