"""compute_lengths: tokens, words, characters and texts as a truncating tokenizer sees them."""

import re

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, LengthsError
from batchwright.integrations.dynabatch import (
    build_dynabatch_dataloader,
    compute_lengths,
    dynabatch_sampler,
    lengths,
)

from .tokenizers import ListTokenizer, OffsetTokenizer, SlowTokenizer, make_fast, padded

TEXTS = ["the quick brown fox", "a warm field of grass in the green", "dogs"]


def test_a_fast_tokenizer_cuts_by_its_offsets():
    tokens, words, chars, texts = compute_lengths(TEXTS, make_fast(), 5, progress=False)
    # Words and the special token at the end, at most 5: the second text keeps 4 of its 8 words.
    assert tokens == [5, 5, 2]
    assert texts == ["the quick brown fox", "a warm field of", "dogs"]
    assert words == [4, 4, 1]
    assert chars == [19, 15, 4]


def test_a_slow_tokenizer_cuts_by_decoding():
    tokens, words, chars, texts = compute_lengths(["abc def", "ab"], SlowTokenizer(), 5, progress=False)
    assert (tokens, words, chars, texts) == ([5, 2], [2, 1], [5, 2], ["abc d", "ab"])


def test_lists_of_plain_numbers_come_back():
    tokens, words, chars, texts = compute_lengths((text for text in TEXTS), make_fast(), 64, progress=False)
    assert all(type(number) is int for number in [*tokens, *words, *chars])
    assert texts == TEXTS


def test_a_slow_tokenizer_is_run_in_processes_and_says_the_same(monkeypatch):
    texts = ["abc def ghi"[: 1 + number % 11] for number in range(300)]
    here = compute_lengths(texts, SlowTokenizer(), 6, progress=False)
    monkeypatch.setattr(lengths, "MIN_TEXTS_FOR_WORKERS", 1)
    assert lengths._num_processes(SlowTokenizer(), 300, 2) == 2
    assert lengths._num_processes(make_fast(), 300, 2) == 0  # it has threads of its own
    assert compute_lengths(texts, SlowTokenizer(), 6, 2, progress=False) == here


def test_a_tokenizer_without_offsets_is_decoded():
    class NoOffsets:
        """Claims to be fast, and is asked for offsets in vain."""

        def __init__(self):
            self.inner = SlowTokenizer()
            self.is_fast = True

        def __call__(self, texts, return_offsets_mapping=False, **options):
            if return_offsets_mapping:
                raise NotImplementedError
            return self.inner(texts, **options)

        def __getattr__(self, name):
            return getattr(self.inner, name)

    assert compute_lengths(["abc def"], NoOffsets(), 5, progress=False)[3] == ["abc d"]


@pytest.mark.parametrize(("text", "cut"), [("  abcdefgh", "  abc"), ("abcd   efg", "abcd ")])
def test_spaces_around_the_cut_stay_with_the_text(text, cut):
    assert compute_lengths([text], SlowTokenizer(), 5, progress=False)[3] == [cut]


@pytest.mark.parametrize("kind", [ListTokenizer, OffsetTokenizer])
def test_a_tokenizer_needs_no_more_than_a_call_on_lists(kind):
    tokens, words, chars, texts = compute_lengths(["one two three four", "five"], kind(), 3, progress=False)
    assert (tokens, words) == ([3, 1], [3, 1])
    # Decoding cannot tell whether the space at the cut belongs to the text, so it stays.
    assert (chars[1], [text.rstrip() for text in texts]) == (4, ["one two three", "five"])


@pytest.mark.parametrize("make", [ListTokenizer, OffsetTokenizer, SlowTokenizer, make_fast])
def test_an_empty_text_counts_as_one_token(make):
    tokens, words, chars, texts = compute_lengths(["", "the fox"], make(), 16, progress=False)
    assert (tokens[0], words[0], chars[0], texts[0]) == (1, 0, 0, "")


def test_a_tokenizer_that_cannot_be_sent_to_a_process_is_run_here(monkeypatch):
    class Local(ListTokenizer):
        """Lives in a function, so that it does not pickle."""

    monkeypatch.setattr(lengths, "MIN_TEXTS_FOR_WORKERS", 1)
    assert lengths._num_processes(ListTokenizer(), 10, 2) == 2
    assert compute_lengths(["a b", "c"], Local(), 8, 2, progress=False)[0] == [2, 1]


def test_lengths_of_any_tokenizer_are_kept(tmp_path):
    texts = ["one two three", "four"]
    before = compute_lengths(texts, ListTokenizer(), 8, progress=False, cache=tmp_path)
    (kept,) = tmp_path.rglob("*.np*")
    written = kept.stat().st_mtime_ns
    assert compute_lengths(texts, ListTokenizer(), 8, progress=False, cache=tmp_path) == before
    assert kept.stat().st_mtime_ns == written
    assert compute_lengths(texts, ListTokenizer(), 2, progress=False, cache=tmp_path)[0] == [2, 1]


def test_texts_are_cut_by_trying_if_a_tokenizer_has_neither_offsets_nor_a_way_back():
    class Blind(OffsetTokenizer):
        """Has neither offsets nor a way back from ids."""

        def __call__(self, text, return_offsets_mapping=False, return_attention_mask=True, **options):
            if return_offsets_mapping:
                raise NotImplementedError
            return super().__call__(text, **options)

    assert compute_lengths(["a b", "a b c d"], Blind(), 3, progress=False)[3] == ["a b", "a b c "]
    assert compute_lengths(["one two three"], str.split, 2, progress=False)[3] == ["one two "]


class Converter:
    """Decodes without batch_decode, which dynabatch does not need where there are these two methods."""

    all_special_ids = (0,)

    def __init__(self):
        self.words = ["<s>"]

    def __call__(self, text, truncation=False, max_length=None, padding=False, return_attention_mask=True):
        rows = [["<s>", *one.split()][:max_length] for one in text]
        # Numbered anew in every call.
        self.words = ["<s>", *sorted({*self.words, *(word for row in rows for word in row)} - {"<s>"})]
        return {"input_ids": [[self.words.index(word) for word in row] for row in rows]}

    def convert_ids_to_tokens(self, ids, skip_special_tokens=False):
        return [self.words[number] for number in ids]

    def convert_tokens_to_string(self, tokens):
        return " ".join(tokens)


def test_a_tokenizer_that_decodes_without_batch_decode_is_taken():
    tokens, _, _, texts = compute_lengths(TEXTS, Converter(), 4, progress=False)
    assert (tokens, texts) == ([4, 4, 2], ["the quick brown ", "a warm field ", "dogs"])


@pytest.mark.parametrize(
    ("make", "text", "limit"),
    [(ListTokenizer, "a    b    c", 3), (OffsetTokenizer, "a  b  ", 2), (SlowTokenizer, "ab   ", 5)],
    ids=["list", "offsets", "slow"],
)
def test_a_text_of_exactly_the_limit_stays_as_it_is(make, text, limit):
    tokens, words, chars, texts = compute_lengths([text], make(), limit, progress=False)
    assert (tokens, words, chars, texts) == ([limit], [len(text.split())], [len(text)], [text])


def test_spaces_at_the_end_of_a_text_of_exactly_the_limit_stay():
    assert compute_lengths(["the quick   "], make_fast(), 3, progress=False)[3] == ["the quick   "]


def test_a_text_with_wide_spaces_loses_no_token_when_it_is_cut():
    tokens, words, _, texts = compute_lengths(["a    b    c    d"], ListTokenizer(), 3, progress=False)
    assert (tokens, words, texts) == ([3], [3], ["a    b    c    "])


def test_a_tokenizer_that_keeps_the_end_of_a_text_cuts_its_beginning():
    for make in (make_fast, SlowTokenizer):
        tokenizer = make()
        tokenizer.truncation_side = "left"
        (tokens,), _, _, (text,) = compute_lengths(["the quick brown fox"], tokenizer, 3, progress=False)
        assert (tokens, text) == (3, "brown fox" if make is make_fast else "fox")


class Halves(OffsetTokenizer):
    """Two tokens per word, whatever its length, so that a word that is cut has other tokens."""

    def __call__(self, text, truncation=False, max_length=None, padding=False, return_offsets_mapping=False, **options):
        words = [[match.span() for match in re.finditer(r"\S\S+", row)] for row in text]
        spans = [[(a, (a + b) // 2) if half else ((a + b) // 2, b) for a, b in row for half in (1, 0)] for row in words]
        spans = [row[: max_length if truncation else None] for row in spans]
        ids = [[1000 * (1 + a) + b for a, b in row] for row in spans]
        if padding:
            return padded(ids, True)
        return {"input_ids": ids, "offset_mapping": spans} if return_offsets_mapping else {"input_ids": ids}


def test_a_text_that_is_cut_inside_a_word_has_no_more_tokens_than_planned():
    (tokens,), _, _, (text,) = compute_lengths(["abcdef ghijkl mnopqr"], Halves(), 3, progress=False)
    # Three halves end at "abcdef ghi", which has four; the longest part within three has two.
    assert (tokens, text) == (3, "abcdef g")


@pytest.mark.parametrize("make", [ListTokenizer, OffsetTokenizer, SlowTokenizer, make_fast])
@settings(deadline=None, max_examples=60)
@given(text=st.text("ab \n", min_size=0, max_size=30), limit=st.integers(2, 8))
def test_a_cut_text_has_as_many_tokens_as_planned_and_others_stay(make, text, limit):
    tokenizer = make()
    (planned,), _, _, (cut,) = compute_lengths([text], tokenizer, limit, progress=False)
    (whole,), (ids,) = tokenizer([text])["input_ids"], tokenizer([cut])["input_ids"]
    assert planned == max(1, min(len(whole), limit))
    assert (max(1, len(ids)), text[: len(cut)]) == (planned, cut)
    if len(whole) <= limit:
        assert cut == text


class Silent(ListTokenizer):
    """Gives no ids for an empty text."""

    def __call__(self, text, **options):
        return {"input_ids": [row or None for row in super().__call__(text, **options)["input_ids"]]}


class Nothing(ListTokenizer):
    """Gives nothing at all."""

    def __call__(self, text, **options):
        return None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Silent, "got NoneType for the text ''"), (Nothing, "got NoneType with 0 for 1, the first is 'a b'")],
)
def test_a_tokenizer_that_returns_nothing_is_refused_with_the_text(kind, reason):
    with pytest.raises(LengthsError, match=f"must return {{'input_ids': one list of ids per text}}, {reason}"):
        compute_lengths(["a b", ""], kind(), 3, progress=False)


TABLES = {
    "frame": (pd.DataFrame({"text": TEXTS, "label": [0, 1, 0]}), "got DataFrame; pass one column, e.g. data"),
    "column": (pd.DataFrame({"text": TEXTS}), "got DataFrame; pass one column"),
    "dict": ({"text": TEXTS, "label": [0, 1, 0]}, "got dict; pass one column"),
    "text": ("the quick brown fox", "got str; wrap one text in a list"),
    "number": (3, "got int"),
    "rows": ([{"text": text} for text in TEXTS], "texts must be str, got dict at example 0"),
    "pairs": ([("a", "b"), ("c", "d")], "texts must be str, got tuple at example 0; .* for pairs measure_lengths"),
}


@pytest.mark.parametrize("make", [dynabatch_sampler, build_dynabatch_dataloader, compute_lengths])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_or_a_single_text_is_not_read_as_a_list_of_texts(make, name):
    texts, reason = TABLES[name]
    with pytest.raises(LengthsError, match=reason):
        make(texts, make_fast(), 2, progress=False)


def test_columns_of_tables_are_taken():
    pyarrow = pytest.importorskip("pyarrow")
    for column in (pd.Series(TEXTS), pyarrow.array(TEXTS), tuple(TEXTS), iter(TEXTS)):
        assert compute_lengths(column, make_fast(), 64, progress=False)[3] == TEXTS


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(LengthsError, match="nothing to measure"):
        compute_lengths([], make_fast(), 8)
    with pytest.raises(ArgumentError, match="max_input_token_length"):
        compute_lengths(["a"], make_fast(), 0)
