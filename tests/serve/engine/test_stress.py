"""Real threads and loops at once, with everything going wrong: every caller hears back, and hears its own answer."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

from batchwright.serve import Batcher, Closed, DeadlineExceeded

NUM_LOOPS, NUM_THREADS, NUM_EACH = 3, 3, 300


def fragile(items):
    """Fail on multiples of 41, and on more than 12 items at once."""
    if len(items) > 12:
        raise MemoryError("full")
    for item in items:
        if item % 41 == 0:
            raise ValueError(item)
    return [2 * item for item in items]


def is_own(item, end):
    if isinstance(end, ValueError):
        return item % 41 == 0 and end.args == (item,)
    if isinstance(end, DeadlineExceeded | asyncio.CancelledError | Closed):
        return True
    return item % 41 != 0 and end == 2 * item


async def submit_many(batcher, start):
    rng = random.Random(start)
    tasks = {}
    for item in range(start, start + NUM_EACH):
        allowed = rng.choice([5, 1000, float("inf")])
        tasks[item] = asyncio.create_task(batcher.submit(item, deadline_ms=allowed, priority=rng.choice([0, 1])))
        await asyncio.sleep(0.0005 * rng.random())
        if rng.random() < 0.1:
            tasks[rng.choice(list(tasks))].cancel()
        if rng.random() < 0.02:
            batcher.configure(policy=rng.choice(["adaptive", "greedy", "window"]), max_items=rng.choice([8, 64]))
    ends = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 60)
    return list(zip(tasks, ends, strict=True))


def submit_from_a_thread(batcher, start):
    ends = []
    for item in range(start, start + NUM_EACH):
        try:
            ends.append((item, batcher.submit_sync(item)))
        except Exception as error:
            ends.append((item, error))
    return ends


def test_every_caller_hears_its_own_answer_once():
    batcher = Batcher(fragile, max_wait_ms=2, num_workers=2)
    with ThreadPoolExecutor(NUM_LOOPS + NUM_THREADS) as pool:
        starts = [10_000 * (number + 1) for number in range(NUM_LOOPS + NUM_THREADS)]
        loops = [pool.submit(lambda start=start: asyncio.run(submit_many(batcher, start))) for start in starts[:3]]
        threads = [pool.submit(submit_from_a_thread, batcher, start) for start in starts[3:]]
        ends = [end for future in loops + threads for end in future.result(120)]
    assert len(ends) == (NUM_LOOPS + NUM_THREADS) * NUM_EACH
    assert [end for end in ends if not is_own(*end)] == []
    stats = batcher.stats()
    assert stats.num_waiting == stats.num_running == 0
    counts = (stats.num_answered, stats.num_failed, stats.num_shed, stats.num_cancelled, stats.num_closed)
    assert sum(counts) == stats.num_submitted
    batcher.close_sync()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread in [worker.thread for worker in batcher._workers._workers] and _lives(thread)
    ]


def _lives(thread):
    thread.join(30)
    return thread.is_alive()
