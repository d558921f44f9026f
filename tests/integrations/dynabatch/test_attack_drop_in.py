"""Where the drop-in gives another result than it says, or than dynabatch gives for the same code."""

import contextlib
import io
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch

from batchwright.errors import BatchwrightError
from batchwright.integrations.dynabatch import (
    DynaBatchSampler,
    build_dynabatch_dataloader,
    compute_lengths,
    dynabatch_sampler,
    generate_with_oom_fallback,
    split_batch,
)

from .models import make_model
from .tokenizers import ListTokenizer, make_fast

TEXTS = ["the quick brown fox", "lazy dogs", "the fox"]
LENGTHS = [40, 30, 20, *[5] * 30]


# Expected: the texts of the only column, or a refusal. Found: list(texts) reads the names of the columns (or the
# letters of a text) as texts, so the sampler has 2 examples and the data set is lost in silence.
@pytest.mark.parametrize(
    "texts",
    [pd.DataFrame({"text": TEXTS, "label": [0, 1, 0]}), {"text": TEXTS, "label": [0, 1, 0]}, "the quick brown fox"],
    ids=["frame", "dict", "one text"],
)
@pytest.mark.parametrize("make", [dynabatch_sampler, build_dynabatch_dataloader, compute_lengths])
def test_a_table_or_a_single_text_is_not_read_as_a_list_of_texts(make, texts):
    with pytest.raises(BatchwrightError):
        make(texts, make_fast(), 2, progress=False)


# Expected: "texts that are not cut stay as they are" (docs), and 3 tokens, as planned. Found: a text of exactly
# max_length tokens is decoded and cut to the length of what was decoded: 'a    ', a single token is trained on.
def test_a_text_of_exactly_the_limit_stays_as_it_is():
    text = "a    b    c"
    tokens, words, characters, texts = compute_lengths([text], ListTokenizer(), 3, progress=False)
    assert (tokens, words, characters, texts) == ([3], [3], [len(text)], [text])


# Expected: 3 tokens. Found: 1.
def test_a_loader_gives_all_tokens_of_a_text_of_exactly_the_limit():
    loader = build_dynabatch_dataloader(["a    b    c"], ListTokenizer(), 2, 3, num_workers=0, progress=False)
    assert next(iter(loader))["input_ids"].shape == (1, 3)


# Expected: "A text that is not cut counts whole, including spaces at its end." Found: the spaces are gone.
def test_spaces_at_the_end_of_a_text_of_exactly_the_limit_stay():
    assert compute_lengths(["the quick   "], make_fast(), 3, progress=False)[3] == ["the quick   "]


# Expected: the allowed token of row i is 3 + i, in pieces too, or a refusal. Found: the function is called with the
# number of the row in its piece, so that rows get the tokens of others, without a word.
def test_a_function_of_the_row_sees_the_row_of_the_whole_batch_in_pieces_too():
    batch = {"input_ids": torch.full((8, 4), 5), "attention_mask": torch.ones(8, 4, dtype=torch.long)}
    model = make_model("t5")
    generate = model.generate

    def failing(**options):
        if len(options["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return generate(**options)

    model.generate = failing
    options = {"max_new_tokens": 2, "do_sample": False, "prefix_allowed_tokens_fn": lambda row, ids: [3 + row]}
    try:
        output, _ = generate_with_oom_fallback(model, batch, 2, "cpu", **options)
    except BatchwrightError:
        return
    assert output[:, 1].tolist() == [3 + row for row in range(8)]


# Expected: works or says so, as plan() does of masked arrays (issue 16). Found: np.asarray drops the mask, and what
# lies under it is planned as a length.
def test_masked_lengths_are_not_read_through_their_mask():
    with pytest.raises(BatchwrightError):
        DynaBatchSampler(np.ma.array([9, 500, 7], mask=[0, 1, 0]), None, None, 2)


# Expected: a refusal, as a set has no order (and drops equal lengths). Found: its order is taken as that of the texts.
def test_a_set_of_lengths_is_refused():
    with pytest.raises(BatchwrightError):
        dynabatch_sampler([""] * 3, None, 2, token_lengths={90, 10, 50})


# Expected: returns. Found: never, where an error is its own cause; and 2^n steps for n errors raised from each other.
@pytest.mark.parametrize(
    "make",
    [
        "error = RuntimeError('a'); error.__cause__ = error",
        "error = RuntimeError('a')\nfor _ in range(40):\n"
        "    new = RuntimeError('b'); new.__cause__ = new.__context__ = error; error = new",
    ],
    ids=["its own cause", "forty in a chain"],
)
def test_clearing_memory_ends_for_any_chain_of_errors(make):
    script = f"from batchwright.integrations.dynabatch import clear_gpu_memory\n{make}\nclear_gpu_memory(error)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# Expected: as in dynabatch, or an error: "sampler attributes | the same". Found: the new number is kept, shown, and of
# no effect on the next epoch.
def test_shuffle_keep_first_n_can_be_set():
    lengths = [100 - number for number in range(100)]
    sampler = DynaBatchSampler(lengths, None, None, 2, shuffle=True, shuffle_keep_first_n=0)
    sampler.shuffle_keep_first_n = 10
    first = [max(lengths[index] for index in batch) for batch in list(sampler)[:10]]
    assert first == sorted(first, reverse=True)


# Expected: settable, as in dynabatch, to keep the first batches again. Found: AttributeError, property has no setter.
def test_is_first_shuffle_can_be_set():
    sampler = DynaBatchSampler(LENGTHS, None, None, 2, shuffle=True)
    sampler.is_first_shuffle = True


# Expected: a threshold set afterwards does nothing, as in dynabatch, or everything, or is refused. Found: repr shows it
# beside the old plan, and for_training(), which the trainer calls, plans with it.
def test_a_threshold_that_is_set_later_does_not_change_half_of_the_sampler():
    sampler = DynaBatchSampler(LENGTHS, None, None, 2, task="train", max_batch_range=4.0)
    sampler.threshold = 0.0
    assert len(sampler) == len(sampler.for_training())


# Expected: never more batches than dynabatch in training, unless its own pass the memory of the first batch (docs).
# Found: dynabatch rounds batch_size × max_batch_range (1.5 to 2, 7.5 to 8), the drop-in cuts it: 201 against 101.
@pytest.mark.parametrize(("batch_size", "range_"), [(1, 1.5), (5, 1.5), (3, 1.9)])
def test_a_broken_range_gives_no_more_batches_than_in_dynabatch(batch_size, range_):
    theirs = pytest.importorskip("dynabatch")
    lengths = [512] * batch_size + [2] * 200
    options = {"max_batch_range": range_, "smooth_batches": False, "keep_batch_size_even": False}
    given = {"token_lengths": lengths, "word_lengths": lengths, "char_lengths": lengths}
    texts = [""] * len(lengths)
    with contextlib.redirect_stderr(io.StringIO()):
        expected = theirs.dynabatch_sampler(texts, None, batch_size, num_workers=1, **options, **given)
    assert len(dynabatch_sampler(texts, None, batch_size, **options, **given).for_training()) <= len(expected)


class Processor:
    """A processor of transformers for images and texts: the texts are its second argument."""

    def __call__(self, images=None, text=None, padding=False, return_tensors=None):
        if images is not None:
            return {"pixel_values": torch.zeros(len(images), 1)}
        return {"input_ids": torch.zeros(len(text), max(len(row.split()) for row in text))}


# Expected: input_ids, as dynabatch calls tokenizer(text=...). Found: the texts are given as images.
def test_a_loader_names_the_texts_when_it_calls_the_tokenizer():
    loader = build_dynabatch_dataloader(TEXTS, Processor(), 2, num_workers=0, token_lengths=[4, 2, 2])
    assert set(next(iter(loader))) == {"input_ids", "texts"}


class Converter:
    """Decodes without batch_decode, which dynabatch does not need where there are these two methods."""

    words: list[str] = []  # noqa: RUF012

    def __call__(self, text, truncation=False, max_length=None, padding=False, return_attention_mask=True):
        rows = [one.split()[:max_length] for one in text]
        self.words = sorted({*self.words, *(word for row in rows for word in row)})
        return {"input_ids": [[self.words.index(word) for word in row] for row in rows]}

    def convert_ids_to_tokens(self, ids, skip_special_tokens=False):
        return [self.words[number] for number in ids]

    def convert_tokens_to_string(self, tokens):
        return " ".join(tokens)


# Expected: "any callable that dynabatch takes: a list of texts in, input_ids out". Found: it is called with one text,
# and refused for what it returns of that.
def test_a_tokenizer_that_decodes_without_batch_decode_is_taken():
    assert compute_lengths(TEXTS, Converter(), 3, progress=False)[0] == [3, 2, 2]


class Generator:
    """An object that generates and is no module, such as a model in another runtime."""

    class config:
        pad_token_id = 0

    def generate(self, input_ids, attention_mask, max_new_tokens=1):
        return input_ids.repeat(1, 2)


# Expected: runs, as in dynabatch. Found: TypeError, because every tensor of the batch, and pad_token_id, are passed on
# to a generate that does not take them.
@pytest.mark.parametrize("more", [{"token_type_ids": torch.zeros(3, 2)}, {"index": torch.arange(3)}, {}])
def test_generate_gets_only_what_it_takes(more):
    ids = torch.ones(3, 2, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": ids, **more}
    pad = {} if more else {"pad_token_id": 0}
    output, _ = generate_with_oom_fallback(Generator(), batch, 2, "cpu", **pad)
    assert output.shape == (3, 4)


# Expected: "wrong arguments: refused, with what is allowed" (docs); the setter of shuffle refuses these already.
# Found: any text counts as True, so shuffle="False" shuffles and drop_last="False" drops examples.
@pytest.mark.parametrize(
    "name", ["shuffle", "drop_last", "dynamic_batch_mode", "smooth_batches", "keep_batch_size_even"]
)
def test_switches_must_be_true_or_false(name):
    with pytest.raises(BatchwrightError):
        DynaBatchSampler(LENGTHS, None, None, 2, **{name: "False"})


# Expected: one sentence. Found: TypeError, ValueError or UFuncTypeError of Python and numpy.
@pytest.mark.parametrize(
    "lengths",
    [["1", "2", "3"], {0: 1, 1: 2, 2: 3}, [[1], [2, 3], [4]], 3, "123"],
    ids=["texts", "dict", "ragged", "number", "text"],
)
def test_wrong_lengths_are_refused_in_a_sentence(lengths):
    with pytest.raises(BatchwrightError):
        dynabatch_sampler([""] * 3, None, 2, token_lengths=lengths)


# Expected: one sentence, or a batch of everything. Found: OverflowError of numpy, and a request for 149 GiB.
@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_range": 1e300},
        {"batch_size": 10**30},
        {"max_batch_range": 1e9, "save_input_features": True},
    ],
)
def test_huge_sizes_work_or_are_refused_in_a_sentence(options):
    try:
        sampler = dynabatch_sampler([""] * 7, None, **{"batch_size": 2, **options}, token_lengths=range(1, 8))
    except BatchwrightError:
        return
    assert sorted(index for batch in sampler for index in batch) == list(range(7))


# Expected: refused, as token lengths are. Found: seconds are taken as words; 2**40 becomes 0 in input_features.
@pytest.mark.parametrize("words", [np.array([1, 2, 3], dtype="m8[s]"), [2**40, 1, 1]], ids=["seconds", "too many"])
def test_word_lengths_are_checked_as_token_lengths_are(words):
    with pytest.raises(BatchwrightError):
        DynaBatchSampler([3, 2, 1], words, words, 1, save_input_features=True)


class Silent(ListTokenizer):
    def __call__(self, text, **options):
        return {"input_ids": [row or None for row in super().__call__(text, **options)["input_ids"]]}


class Nothing(ListTokenizer):
    def __call__(self, text, **options):
        return None


# Expected: one sentence that names the text. Found: "object of type 'NoneType' has no len()" and the like.
@pytest.mark.parametrize("kind", [Silent, Nothing])
def test_a_tokenizer_that_returns_nothing_is_named(kind):
    with pytest.raises(BatchwrightError):
        compute_lengths(["a b", ""], kind(), 3, progress=False)


# Expected: one sentence. Found: "len() of a 0-d tensor", "'list' object has no attribute 'get'".
@pytest.mark.parametrize("batch", [{"input_ids": torch.tensor(1)}, [torch.ones(3, 2)]], ids=["no axis", "list"])
def test_a_batch_without_rows_is_refused_in_a_sentence(batch):
    with pytest.raises((BatchwrightError, KeyError)):
        split_batch(batch, 2)
