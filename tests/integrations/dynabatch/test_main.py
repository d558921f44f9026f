"""Texts, batches and loaders behave alike in dynabatch and here, with only the import changed.

Every test runs with both packages, where dynabatch is installed. What differs on purpose is in ``docs/dynabatch.md``.
"""

import importlib
import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from .packages import PACKAGES
from .tokenizers import WORDS, ListTokenizer, OffsetTokenizer, SlowTokenizer, make_fast

TOKENIZERS = [ListTokenizer, OffsetTokenizer, SlowTokenizer, make_fast]

# Lengths of 1 to 60 words, every text another.
TEXTS = [" ".join([WORDS[number % 18], str(number), *WORDS * 4][: 1 + (37 * number) % 60]) for number in range(2, 66)]


@pytest.fixture(params=PACKAGES)
def package(request):
    return request.param


@pytest.fixture
def main(package):
    return importlib.import_module(f"{package}.main")


@pytest.fixture
def sampler_cls(package):
    return importlib.import_module(f"{package}.sampler").DynaBatchSampler


def tokens():
    return [len(text.split()) for text in TEXTS]


def make(sampler_cls, size=2, **options):
    lengths = tokens()
    return sampler_cls(lengths, lengths, [len(text) for text in TEXTS], size, **options)


def flat(batches):
    return [index for batch in batches for index in batch]


# Lengths


@pytest.mark.parametrize("make_tokenizer", TOKENIZERS, ids=lambda make: make.__name__)
def test_lengths_are_those_of_the_texts_cut_to_the_limit(main, make_tokenizer):
    found = main.compute_lengths(TEXTS[:12], make_tokenizer(), max_length=6, max_workers=1)
    tokens, words, chars, texts = map(list, found)
    assert len(tokens) == len(words) == len(chars) == len(texts) == 12
    assert all(0 < length <= 6 for length in tokens)
    assert chars == [len(text) for text in texts]
    assert words == [len(text.split()) for text in texts]
    assert all(whole.startswith(cut) for whole, cut in zip(TEXTS, texts, strict=False))


def test_special_tokens_count_and_other_scripts_are_cut_by_characters(main):
    class Framed(ListTokenizer):
        """Puts a token before and after the words; it must be called on a list and decoded right after."""

        def __call__(self, text, max_length, **options):
            return {"input_ids": [[0, *row, 0] for row in super().__call__(text, True, max_length - 2)["input_ids"]]}

        def batch_decode(self, sequences, **options):
            return super().batch_decode([row[1:-1] for row in sequences], **options)

    texts = ["alpha beta gamma", "你好 世界 再见"]
    tokens, words, chars, cut = map(list, main.compute_lengths(texts, Framed(), 4, max_workers=1))
    assert (tokens, words, chars) == ([4, 4], [2, 2], [11, 6])
    assert cut == ["alpha beta ", "你好 世界 "]


def test_an_error_of_the_tokenizer_comes_through(main):
    class Mute(ListTokenizer):
        def batch_decode(self, sequences, **options):
            raise RuntimeError("no way back")

    with pytest.raises(RuntimeError, match="no way back"):
        main.compute_lengths(["a b c"], Mute(), 2, max_workers=1)


# Batches


@pytest.mark.parametrize("dynamic", [True, False])
def test_every_text_comes_once_and_the_longest_come_first(sampler_cls, dynamic):
    sampler = make(sampler_cls, 4, dynamic_batch_mode=dynamic)
    batches = list(sampler)
    assert sorted(flat(batches)) == list(range(len(TEXTS)))
    assert len(batches) == len(sampler) == len(sampler.batches)
    assert len(batches[0]) == 4
    assert sorted(tokens()[index] for index in batches[0]) == sorted(tokens())[-4:]


def test_shuffling_moves_batches_and_loses_nothing(sampler_cls):
    plain = list(make(sampler_cls))
    shuffled = list(make(sampler_cls, shuffle=True, shuffle_seed=0, shuffle_keep_first_n=0))
    assert shuffled != plain
    assert sorted(flat(shuffled)) == sorted(flat(plain))
    assert sorted(map(len, shuffled)) == sorted(map(len, plain))
    assert shuffled == list(make(sampler_cls, shuffle=True, shuffle_seed=0, shuffle_keep_first_n=0))


def test_the_random_numbers_of_others_stay_as_they_are(sampler_cls):
    random.seed(5)
    expected = random.random()
    random.seed(5)
    list(make(sampler_cls, shuffle=True))
    assert random.random() == expected


def test_a_range_of_one_is_the_static_mode(sampler_cls):
    still = make(sampler_cls, max_batch_range=1.0)
    static = make(sampler_cls, dynamic_batch_mode=False)
    assert list(map(len, still)) == list(map(len, static)) == [2] * (len(TEXTS) // 2)


def test_given_lengths_need_no_tokenizer_and_read_no_text(main):
    class Unread:
        def __call__(self, *args, **options):
            raise AssertionError("the tokenizer was called")

    given = {"token_lengths": [3, 3, 1, 2, 2], "word_lengths": [3, 3, 1, 2, 2], "char_lengths": [8, 11, 2, 8, 5]}
    sampler = main.dynabatch_sampler(list("abcde"), Unread(), batch_size=2, dynamic_batch_mode=False, **given)
    assert sorted(flat(sampler)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["token_lengths", "word_lengths", "char_lengths"])
def test_given_lengths_must_be_as_many_as_the_texts(main, name):
    given = {"token_lengths": [1, 1, 1], "word_lengths": [1, 1, 1], "char_lengths": [1, 1, 1], name: [1, 1]}
    with pytest.raises(ValueError, match="ength"):
        main.dynabatch_sampler(["a", "b", "c"], ListTokenizer(), 2, **given)


def test_words_alone_are_refused(main):
    with pytest.raises(ValueError, match="token_lengths"):
        main.dynabatch_sampler(["a"], ListTokenizer(), 1, word_lengths=[1])


# Loaders


def test_the_data_set_of_a_loader_holds_texts_by_name(main):
    dataset = main.TextDataset(TEXTS)
    assert len(dataset) == len(TEXTS)
    assert dataset[3] == {"text": TEXTS[3]}


@pytest.mark.parametrize("make_tokenizer", TOKENIZERS, ids=lambda make: make.__name__)
def test_a_loader_yields_every_text_once_as_tensors(main, make_tokenizer):
    options = {"batch_size": 2, "max_input_token_length": 512, "max_batch_range": 2.5, "num_workers": 0}
    loader = main.build_dynabatch_dataloader(TEXTS, make_tokenizer(), **options)
    batches = list(loader)
    assert isinstance(loader, DataLoader)
    assert len(batches) == len(loader)
    for batch in batches:
        assert set(batch) >= {"input_ids", "attention_mask", "texts"}
        assert batch["input_ids"].dtype == torch.long
        assert len(batch["input_ids"]) == len(batch["attention_mask"]) == len(batch["texts"])
    assert len(batches[0]["input_ids"]) == 2
    assert sorted(text for batch in batches for text in batch["texts"]) == sorted(TEXTS)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_loop_over_a_loader_runs_forward_and_backward(main, package, dynamic):
    utils = importlib.import_module(f"{package}.utils")
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(300, 4), nn.Linear(4, 3))
    options = {"batch_size": 2, "max_input_token_length": 64, "num_workers": 0, "dynamic_batch_mode": dynamic}
    outputs = []
    for batch in main.build_dynabatch_dataloader(TEXTS, ListTokenizer(), **options):
        pieces = utils.split_batch({name: batch[name] for name in ("input_ids", "attention_mask")}, chunk_size=1)
        outputs.append(torch.cat([model(piece["input_ids"]) for piece in pieces]))
        outputs[-1].sum().backward()
    merged = utils.merge_outputs(outputs, pad_token_id=0)
    assert merged.shape == (len(TEXTS), 3)
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_batches_of_short_texts_grow(main):
    texts = [" ".join((WORDS * 30)[: 1 + (11 * number) % 40 + 400 * (number % 40 == 0)]) for number in range(400)]
    options = {"batch_size": 8, "max_input_token_length": 512, "max_batch_range": 2.0, "threshold": 0.9}
    loader = main.build_dynabatch_dataloader(texts, make_fast(), num_workers=0, **options)
    sizes = [len(batch["input_ids"]) for batch in loader]
    assert 8 < max(sizes) <= 16
    assert len(sizes) < 50  # batches of 8
