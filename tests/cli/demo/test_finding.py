import re
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from batchwright.cli.demo.finding import train_without_size  # noqa: E402
from batchwright.cli.demo.training import TOKENS_AT_BASE_RATE, lengths_of  # noqa: E402

from .test_training import SMALL, make_corpus  # noqa: E402


def test_every_function_is_read_once_and_sizes_are_explained():
    torch.set_num_threads(1)
    corpus = make_corpus(1200)
    result = train_without_size(corpus, replace(SMALL, num_checks=3))
    num_tokens = int(lengths_of(corpus.train).sum())
    assert result.num_tokens == num_tokens
    assert sum(items for items, _ in result.shapes) == 1200
    assert len(result.checks) == 3
    assert result.checks[-1].num_examples == 1200
    # At first about a thousand tokens per update, and later what the lines say.
    assert result.num_steps <= num_tokens / TOKENS_AT_BASE_RATE * 4 + 20
    assert re.search("timing|noise scale|next look", result.reasons[0]), result.reasons
    assert max(items * length for items, length in result.shapes) <= TOKENS_AT_BASE_RATE
