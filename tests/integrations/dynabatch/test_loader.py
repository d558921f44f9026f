"""dynabatch_sampler and build_dynabatch_dataloader from texts."""

import os

import pytest
import torch
from torch.utils.data import DataLoader

from batchwright.errors import LengthsError
from batchwright.integrations.dynabatch import build_dynabatch_dataloader, dynabatch_sampler

from .tokenizers import WORDS, ListTokenizer, make_bytes, make_fast

TEXTS = [" ".join(WORDS[: 1 + (7 * number) % 17]) for number in range(60)]
QUIET = {"progress": False}


def test_a_sampler_of_texts_is_that_of_their_lengths():
    lengths = [len(text.split()) + 1 for text in TEXTS]
    measured = dynabatch_sampler(TEXTS, make_fast(), 4, **QUIET)
    assert list(measured) == list(dynabatch_sampler(TEXTS, None, 4, token_lengths=lengths))


def test_texts_count_as_cut_to_the_limit():
    sampler = dynabatch_sampler(TEXTS, make_fast(), 4, max_input_token_length=6, **QUIET)
    assert sampler.plan.shapes[:, 1].max() == 6


def test_a_loader_gives_padded_ids_and_the_texts_beside_them():
    loader = build_dynabatch_dataloader(TEXTS, make_fast(), 4, num_workers=0, **QUIET)
    assert isinstance(loader, DataLoader)
    batches = list(loader)
    assert sorted(text for batch in batches for text in batch["texts"]) == sorted(TEXTS)
    for batch in batches:
        assert batch["input_ids"].shape == (len(batch["texts"]), max(len(text.split()) for text in batch["texts"]) + 1)
        assert batch["attention_mask"].sum(dim=1).tolist() == [len(text.split()) + 1 for text in batch["texts"]]


def test_a_loader_cuts_the_texts_to_the_limit():
    loader = build_dynabatch_dataloader(TEXTS, make_fast(), 4, 6, num_workers=0, **QUIET)
    batches = list(loader)
    assert max(batch["input_ids"].shape[1] for batch in batches) == 6
    assert max(len(text.split()) for batch in batches for text in batch["texts"]) == 5


def test_given_lengths_leave_the_texts_as_they_are():
    with pytest.warns(UserWarning, match="are over max_input_token_length=3"):
        loader = build_dynabatch_dataloader(["a warm green field"], make_fast(), 1, 3, num_workers=0, token_lengths=[5])
    (batch,) = loader
    assert batch["texts"] == ["a warm green field"]
    assert batch["input_ids"].shape == (1, 5)


def test_arguments_of_the_tokenizer_go_through_padding_too():
    options = {"padding": "max_length", "max_length": 20, "padding_side": "left", "num_workers": 0}
    batch = next(iter(build_dynabatch_dataloader(TEXTS, make_fast(), 4, **options, **QUIET)))
    assert batch["input_ids"].shape[1] == 20
    assert batch["attention_mask"][:, -1].all()


def test_worker_processes_give_the_same_and_leave_the_environment_alone():
    before = dict(os.environ)
    here = build_dynabatch_dataloader(TEXTS, make_fast(), 4, num_workers=0, **QUIET)
    there = build_dynabatch_dataloader(TEXTS, make_fast(), 4, num_workers=1, **QUIET)
    for mine, other in zip(here, there, strict=True):
        assert torch.equal(mine["input_ids"], other["input_ids"])
    assert dict(os.environ) == before


def test_debug_uses_no_worker_and_prints(capsys):
    loader = build_dynabatch_dataloader(TEXTS, make_fast(), 4, debug=True, **QUIET)
    assert loader.num_workers == 0
    assert capsys.readouterr().out.startswith("batch 1: 4 items, longest 18")


def test_progress_can_be_turned_off(capsys):
    dynabatch_sampler(TEXTS, make_fast(), 4)
    assert "measuring lengths" in capsys.readouterr().err
    dynabatch_sampler(TEXTS, make_fast(), 4, progress=False)
    assert capsys.readouterr() == ("", "")


class CountingTokenizer:
    """A function from text to tokens that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, text):
        self.calls += 1
        return text.split()


def test_a_length_cache_spares_the_second_start_the_tokenizer(tmp_path):
    tokenizer = CountingTokenizer()
    sampler = dynabatch_sampler(TEXTS, tokenizer, 4, cache=tmp_path, **QUIET)
    assert tokenizer.calls == 60
    tokenizer.calls = 0  # it is known by what it holds
    again = dynabatch_sampler(TEXTS, tokenizer, 4, cache=tmp_path, **QUIET)
    assert tokenizer.calls == 16  # a sample, to see that the cached lengths are still right
    assert list(sampler) == list(again)


def test_texts_may_come_from_a_generator():
    sampler = dynabatch_sampler((text for text in TEXTS), make_fast(), 4, **QUIET)
    assert sampler.num_examples == 60


def test_a_loader_gives_all_tokens_of_a_text_of_exactly_the_limit():
    loader = build_dynabatch_dataloader(["a    b    c"], ListTokenizer(), 2, 3, num_workers=0, **QUIET)
    assert next(iter(loader))["input_ids"].shape == (1, 3)


@pytest.mark.parametrize("limit", range(2, 9))
def test_a_loader_gives_the_ids_that_the_tokenizer_gives_when_it_cuts(limit):
    texts = ["low lower lowest", "slow   slower", "lowlowlow er low er  ", "w", "owl  "]
    tokenizer = make_bytes()
    expected = [tokenizer(text, truncation=True, max_length=limit)["input_ids"] for text in texts]
    loader = build_dynabatch_dataloader(texts, tokenizer, 1, limit, max_batch_range=1.0, num_workers=0, **QUIET)
    for (row,), batch in zip(loader.batch_sampler, loader, strict=True):
        assert batch["input_ids"].tolist() == [expected[row]]
        assert texts[row].startswith(batch["texts"][0])


def test_a_loader_that_is_told_not_to_truncate_gives_no_more_tokens_than_planned():
    texts, options = ["lowlowlow er low er  ", "slower slow"], {"truncation": False, "num_workers": 0}
    loader = build_dynabatch_dataloader(texts, make_bytes(), 1, 3, **options, **QUIET)
    assert max(batch["input_ids"].shape[1] for batch in loader) <= 3


class Processor:
    """A processor of transformers for images and texts: the texts are its second argument."""

    def __call__(self, images=None, text=None, padding=False, return_tensors=None):
        if images is not None:
            return {"pixel_values": torch.zeros(len(images), 1)}
        return {"input_ids": torch.zeros(len(text), max(len(row.split()) for row in text))}


class Named:
    """Calls its texts by another name."""

    def __call__(self, sentences, **options):
        return {"input_ids": torch.zeros(len(sentences), 1)}


@pytest.mark.parametrize("kind", [Processor, Named])
def test_a_loader_gives_the_texts_to_the_argument_for_texts(kind):
    loader = build_dynabatch_dataloader(["a b", "a", "b"], kind(), 2, num_workers=0, token_lengths=[2, 1, 1])
    assert set(next(iter(loader))) == {"input_ids", "texts"}


def test_a_loader_of_given_lengths_refuses_a_table_too():
    table = {"text": ["a", "b"], "label": ["c", "d"]}
    with pytest.raises(LengthsError, match="must be a list or a column of texts, got dict"):
        build_dynabatch_dataloader(table, make_fast(), 1, token_lengths=[1, 1])
