"""dynabatch_sampler and build_dynabatch_dataloader from texts."""

import os

import pytest
import torch
from torch.utils.data import DataLoader

from batchwright.integrations.dynabatch import build_dynabatch_dataloader, dynabatch_sampler

from .tokenizers import WORDS, make_fast

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
