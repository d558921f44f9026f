"""compute_lengths: tokens, words, characters and texts as a truncating tokenizer sees them."""

import pytest

from batchwright.errors import ArgumentError, LengthsError
from batchwright.integrations.dynabatch import compute_lengths, lengths

from .tokenizers import ListTokenizer, OffsetTokenizer, SlowTokenizer, make_fast

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


@pytest.mark.parametrize(("text", "cut"), [("  abcdefgh", "  abc"), ("abcd   efg", "abcd   ")])
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


def test_texts_that_nothing_can_cut_are_refused():
    class Blind(OffsetTokenizer):
        """Has neither offsets nor a way back from ids."""

        def __call__(self, text, return_offsets_mapping=False, return_attention_mask=True, **options):
            if return_offsets_mapping:
                raise NotImplementedError
            return super().__call__(text, **options)

    assert compute_lengths(["a b"], Blind(), 3, progress=False)[0] == [2]
    with pytest.raises(ArgumentError, match="Blind has neither; cut the texts yourself"):
        compute_lengths(["a b c d"], Blind(), 3, progress=False)


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(LengthsError, match="nothing to measure"):
        compute_lengths([], make_fast(), 8)
    with pytest.raises(ArgumentError, match="max_input_token_length"):
        compute_lengths(["a"], make_fast(), 0)
