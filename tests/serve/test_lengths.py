"""How long an item is where nobody says: by its type, or by a tokenizer."""

import concurrent.futures
import logging
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError
from batchwright.serve import Batcher, LatencyModel, TooLarge, batched
from batchwright.serve.lengths import Guess, TokenCount, guess_length

from .tools import Recorder


@pytest.mark.parametrize(
    ("item", "length"),
    [
        ("a text", 6),
        ("", 0),
        (("a query", "a text"), 13),
        ([101, 2, 3, 102], 4),
        ((0.5, 0.25), 2),
        ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], 3),
        ([], 0),
        ({"input_ids": [101, 7, 102], "attention_mask": [1, 1, 1]}, 3),
        ({"input_ids": [[101, 7, 9, 102]]}, 4),
        ({"input_ids": np.zeros((1, 5), int)}, 5),
        (np.zeros((7, 80)), 7),
        (np.float32(1.5), None),
        (np.array(3), None),
        ({"text": "a text"}, None),
        ([{"role": "user"}], None),
        (["a", 1], None),
        (b"\x89PNG", None),
        (7, None),
        (None, None),
        pytest.param(object(), None, id="an object"),
    ],
    ids=repr,
)
def test_a_length_follows_from_the_type(item, length):
    assert guess_length(item) == length


def test_tensors_and_encodings_of_transformers_are_measured():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    assert guess_length(torch.zeros(9, 2)) == 9
    assert guess_length(torch.tensor(1.0)) is None
    assert guess_length(transformers.BatchEncoding({"input_ids": torch.zeros(1, 6)})) == 6


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text() | st.binary(), st.lists, max_leaves=4))
def test_an_estimate_never_fails(item):
    assert Guess("f")(item) >= 0


class Broken(dict):
    def __contains__(self, key):
        raise RuntimeError("no")


def test_an_unknown_type_is_said_once_and_a_number_is_not(caplog):
    with caplog.at_level(logging.WARNING, "batchwright.serve"), Batcher(list) as batcher:
        for item in (1, None, 2.5, b"one", b"two", Broken(), {"id": 1}):
            assert batcher.submit_sync(item) == item
    (record,) = caplog.records
    assert "the length of a bytes is not known" in record.getMessage()
    assert "length_of=None if all items are alike" in record.getMessage()
    assert batcher.stats().num_tokens == 7


def run_together(batcher, recorder, first, rest, *, before=lambda: None):
    """Return calls and answers of items that arrive while the first one runs; ``before`` is called before they run."""
    with concurrent.futures.ThreadPoolExecutor(1 + len(rest)) as pool:
        asked = [pool.submit(batcher.submit_sync, first)]
        assert recorder.started.wait(30)
        for number, item in enumerate(rest, start=1):
            asked.append(pool.submit(batcher.submit_sync, item))
            while batcher.stats().num_waiting < number:
                time.sleep(0.001)
        before()
        recorder.gate.set()
        return recorder.calls, [answer.result(30) for answer in asked]


def test_texts_of_like_length_share_a_batch_without_being_told():
    # A call takes 4 ms and 1 ms per item and character: two short batches of four beat one padded to 100.
    recorder = Recorder(held=True)
    with Batcher(recorder, time_model=LatencyModel.fixed(0.004, 0.001)) as batcher:
        calls, _ = run_together(batcher, recorder, "first", ["a", "x" * 100, "b", "y" * 100])
    assert sorted(map(sorted, calls[1:])) == [["a", "b"], ["x" * 100, "y" * 100]]


def test_none_says_that_all_items_are_alike():
    recorder = Recorder(held=True)
    with Batcher(recorder, time_model=LatencyModel.fixed(0.004, 0.001), length_of=None) as batcher:
        calls, _ = run_together(batcher, recorder, "first", ["a", "x" * 100, "b", "y" * 100])
    assert calls[1:] == [["a", "x" * 100, "b", "y" * 100]]


def test_an_estimate_refuses_nothing_where_a_length_does():
    with Batcher(list, max_tokens=10) as estimated, Batcher(list, max_tokens=10, length_of=len) as exact:
        assert estimated.submit_sync("x" * 50) == "x" * 50
        with pytest.raises(TooLarge):
            exact.submit_sync("x" * 50)


def test_an_item_over_the_limit_by_an_estimate_runs_alone():
    recorder = Recorder(held=True)
    with Batcher(recorder, max_tokens=10) as batcher:
        calls, _ = run_together(batcher, recorder, "first", ["x" * 50, "a", "b"])
        assert sorted(map(sorted, calls[1:])) == [["a", "b"], ["x" * 50]]


def test_a_lower_limit_ends_no_request_whose_length_is_an_estimate():
    recorder, text = Recorder(held=True), "x" * 50
    with Batcher(recorder) as batcher:
        _, answers = run_together(batcher, recorder, text, [text], before=lambda: batcher.configure(max_tokens=5))
    assert answers == [2 * text] * 2


def test_a_long_text_is_not_given_up_by_its_estimate():
    # By the model 50 characters take 50 s; a function that cuts texts takes far less, and 10 s are allowed.
    with Batcher(list, deadline_ms=10_000, time_model=LatencyModel.fixed(0.001, 1.0)) as batcher:
        assert batcher.submit_sync("x" * 50) == "x" * 50


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "to": 3, "be": 4, "or": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


@pytest.fixture(scope="module")
def fast(tokenizer):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]", model_max_length=6
    )


def test_tokenizers_count_with_their_special_tokens(tokenizer, fast):
    for count in (TokenCount(tokenizer), TokenCount(fast)):
        assert count("to be") == 4
        assert count(("to", "be or")) == 6
        assert count({"input_ids": [1, 3, 2]}) == 3
        assert count([1, 3, 4, 5, 2]) == 5
    # 8 tokens, of which the model of the second one takes 6.
    assert TokenCount(tokenizer)("to be or to be or") == 8
    assert TokenCount(fast)("to be or to be or") == 6


def test_functions_count_too():
    assert TokenCount(str.split)("to be or") == 3
    assert TokenCount(len)(("to", "be or")) == 7


def test_a_tokenizer_gives_exact_lengths(fast):
    @batched(tokenizer=fast, max_tokens=5)
    def embed(texts):
        return [len(text) for text in texts]

    assert embed.sync("to be or") == 8
    with pytest.raises(TooLarge, match="length 6 alone is over max_tokens=5"):
        embed.sync("to be or to be or")
    with pytest.raises(ArgumentError, match="counts a text, a pair of texts or token ids, got dict; pass length_of="):
        embed.sync({"text": "to be"})
    assert embed.stats().num_tokens == 5


def test_counting_leaves_the_callers_tokenizer_alone_while_it_is_used(fast):
    """The batched function pads and truncates with the same tokenizer in other threads."""
    count, wrong, stop = TokenCount(fast), [], threading.Event()

    def use():
        while not stop.is_set():
            ids = fast(["to", "to be or to"], padding=True, truncation=True, max_length=4)["input_ids"]
            if [len(row) for row in ids] != [4, 4]:
                wrong.append(ids)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        assert {count("to be or to") for _ in range(2000)} == {6}
    finally:
        stop.set()
        thread.join(30)
    assert wrong == []


def test_slow_tokenizers_count(tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\nto\nbe\n", encoding="utf-8")
    names = [name for name in ("BertTokenizerLegacy", "BertTokenizer") if hasattr(transformers, name)]
    made = getattr(transformers, names[0])(str(tmp_path / "vocab.txt"))
    assert TokenCount(made)("to be") == len(made("to be")["input_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length_of": len, "tokenizer": str.split}, "give length_of or tokenizer, not both"),
        ({"length_of": "characters"}, "length_of must be one of 'auto', got 'characters'"),
        ({"tokenizer": "bert-base"}, "tokenizer must be a transformers tokenizer.*got 'bert-base'"),
        ({"tokenizer": str}, "tokenizer must be a transformers tokenizer"),
    ],
)
def test_what_cannot_measure_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        Batcher(list, **options)


def test_what_has_no_length_inside_a_dict_is_not_known_and_not_consumed():
    ids = iter([1, 2])
    assert guess_length({"input_ids": ids}) is None
    assert list(ids) == [1, 2]
    assert guess_length({"input_ids": 7}) is None


def test_numbers_of_every_width_in_a_list_are_counted():
    assert guess_length([np.float32(0.5), np.float16(1)]) == 2
