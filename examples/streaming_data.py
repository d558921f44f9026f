"""A stream: planned batches of data that is never in memory as a whole, and a place in it to continue from.

    python examples/streaming_data.py

You see the padding of 16 examples as they come and of batches planned in buffers of three sizes: a larger buffer has
more texts of similar length to choose from. Then a stream is left in the middle and another one goes on from its state:
nothing is lost, nothing comes twice. Change ``read`` to your source: files, a database, a stream of ``datasets``.
"""

import json
import sys
from collections.abc import Iterator
from itertools import islice

from texts import read_texts, to_ids

import batchwright as bw


def read(num: int) -> Iterator[list[int]]:
    """Yield one text after the other."""
    for text in read_texts(num):
        yield to_ids(text)


def make_stream(num: int, buffer_size: int = 500) -> bw.StreamBatcher[list[int]]:
    """Return batches of at most 2,048 words with padding; each pass reads the texts anew."""
    return bw.StreamBatcher(lambda: read(num), length_of=len, budget=bw.MaxTokens(2048), buffer_size=buffer_size)


def padding(batches: list[list[list[int]]]) -> float:
    """Return the share of padding when texts are padded to the longest of their batch."""
    real = sum(len(text) for batch in batches for text in batch)
    return 1 - real / sum(len(batch) * max(map(len, batch)) for batch in batches)


def main(quick: bool = False) -> dict[str, object]:
    """Read, stop, continue, print and return the figures."""
    num, figures = 1000 if quick else 3000, {}
    texts = list(read(num))
    figures["as they come"] = padding([texts[start : start + 16] for start in range(0, len(texts), 16)])
    for buffer_size in (50, 200, 1000):
        figures[f"buffer of {buffer_size}"] = padding(list(make_stream(num, buffer_size)))
    for name, share in figures.items():
        print(f"{name:>14}: {share:5.1%} padding")

    first = make_stream(num)
    done = list(islice(first, 10))
    state = json.dumps(first.state_dict())  # what a checkpoint would hold
    second = make_stream(num)
    second.load_state_dict(json.loads(state))
    rest = list(second)
    is_whole = sorted(text for batch in [*done, *rest] for text in batch) == sorted(texts)
    print(f"10 batches, then {len(rest)} more from {len(state)} bytes of state; every text once: {is_whole}")
    return {**figures, "is_whole": is_whole, "num_rest": len(rest)}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
