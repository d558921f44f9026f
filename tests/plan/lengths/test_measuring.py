"""Lengths are those the tokenizer gives, in order, whatever the workers, the batches and the cache."""

import functools
import logging
import multiprocessing
import operator
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from batchwright.errors import ArgumentError, BatchwrightError, LengthsError
from batchwright.plan.lengths.measuring import BATCHES_IN_FLIGHT_PER_WORKER, measure_lengths

SENTENCES = ["the cat sat on the mat", "a dog", "", "the long road goes ever on and on and on"]
PAIRS = [("the cat", "le chat dort"), ["a dog", ""], ("on and on", "la route")]


def make_backend():
    """A small BPE tokenizer that puts [CLS] before and [SEP] after each text."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def make_fast():
    return PreTrainedTokenizerFast(
        tokenizer_object=make_backend(), unk_token="[UNK]", pad_token="[PAD]", model_max_length=4
    )


def make_slow():
    """A tokenizer written in Python: one token a byte and one to end the text."""
    return ByT5Tokenizer(model_max_length=4)


measure = functools.partial(measure_lengths, progress=False)

# Python 3.12 and later warn of every fork where there are threads; the test runner may have some.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(params=[make_fast, make_slow], ids=["fast", "slow"])
def tokenizer(request):
    return request.param()


@pytest.fixture
def set_start_method():
    before = multiprocessing.get_start_method(allow_none=True)
    yield functools.partial(multiprocessing.set_start_method, force=True)
    multiprocessing.set_start_method(before, force=True)


class CountingTokenizer:
    """Splits at blanks and keeps the texts it was asked for in a file, which the cache does not read."""

    def __init__(self, path):
        self.path = path

    def __call__(self, text):
        with self.path.open("a") as file:
            file.write(text + "\n")
        return text.split()

    def taken(self):
        """Return the number of texts since the last time."""
        num = len(self.path.read_text().splitlines())
        self.path.write_text("")
        return num


@pytest.fixture
def counting(tmp_path_factory):
    return CountingTokenizer(tmp_path_factory.mktemp("calls") / "calls.txt")


# What is counted


def test_a_byte_tokenizer_counts_bytes_and_the_end_of_the_text():
    # "né" is n and two bytes of é, then the end
    lengths = measure(["abc", "né", ""], make_slow())
    assert lengths.tolist() == [4, 4, 1]
    assert lengths.dtype == np.int32


def test_lengths_are_those_of_the_tokenizer_with_special_tokens(tokenizer):
    expected = [len(tokenizer(text)["input_ids"]) for text in SENTENCES]
    without = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in SENTENCES]
    assert measure(SENTENCES, tokenizer).tolist() == expected
    assert expected != without


@pytest.mark.parametrize("max_length", [1, 2, 3, 5, 100])
def test_truncation_is_the_tokenizers_own(tokenizer, max_length):
    expected = [len(tokenizer(text, truncation=True, max_length=max_length)["input_ids"]) for text in SENTENCES]
    assert measure(SENTENCES, tokenizer, max_length=max_length).tolist() == expected


@pytest.mark.parametrize("max_length", [None, 1, 2, 3, 5, 100])
def test_a_backend_tokenizer_counts_as_the_fast_tokenizer_around_it(max_length):
    expected = measure(SENTENCES, make_fast(), max_length=max_length)
    np.testing.assert_array_equal(measure(SENTENCES, make_backend(), max_length=max_length), expected)


@pytest.mark.parametrize("max_length", [None, 4])
def test_a_backend_tokenizer_keeps_its_settings_and_its_padding_is_not_counted(max_length):
    padded = make_backend()
    padded.enable_padding(length=50)
    padded.enable_truncation(max_length=4)
    before = padded.to_str()
    lengths = measure(SENTENCES, padded, max_length=max_length)
    # [CLS] and [SEP] take two of the four; the empty text has those two alone
    assert lengths.tolist() == [4, 4, 2, 4]
    assert padded.to_str() == before


def test_max_length_wins_over_the_backend_tokenizers_own_truncation():
    truncating = make_backend()
    truncating.enable_truncation(max_length=3)
    assert measure(["the cat sat on the mat"], truncating).tolist() == [3]
    assert measure(["the cat sat on the mat"], truncating, max_length=5).tolist() == [5]


def test_a_backend_tokenizer_that_splits_special_tokens_does_so_in_a_copy_too():
    splitting = make_backend()
    splitting.encode_special_tokens = True
    whole = measure(["[SEP]"], make_backend(), max_length=100)
    split = measure(["[SEP]"], splitting, max_length=100)
    assert split.tolist() == [len(splitting.encode("[SEP]").ids)]
    assert split[0] > whole[0] == 3  # [CLS] [SEP] [SEP]


def test_the_padding_of_a_fast_tokenizer_is_not_counted():
    backend = make_backend()
    backend.enable_padding(length=50)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")
    assert measure(["", "a"], fast).tolist() == [2, 3]


@pytest.fixture
def transformers_log(monkeypatch):
    """What transformers logs; its own handler writes to a stream that pytest does not see."""
    records, logger = [], logging.getLogger("transformers")
    handler = logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(logger, "handlers", [handler])
    # Frameworks of other tests may have set another level, or switched loggers off.
    monkeypatch.setattr(logging.root.manager, "disable", 0)
    for one in (logger, logging.getLogger("transformers.tokenization_utils_base")):
        monkeypatch.setattr(one, "disabled", False)
        monkeypatch.setattr(one, "propagate", one is not logger)
    level = logger.level
    logger.setLevel(logging.WARNING)
    yield records
    logger.setLevel(level)


def test_texts_over_the_models_maximum_are_no_matter_for_a_warning(tokenizer, transformers_log):
    # Both tokenizers are told that their model takes 4 tokens.
    assert measure(["the long road goes ever on"], tokenizer)[0] > 4
    assert transformers_log == []
    tokenizer("the long road goes ever on")
    assert len(transformers_log) == 1  # the user's own calls still warn


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (len, [22, 5]),
        (str.split, [6, 2]),
        (re.compile("o|t").findall, [6, 1]),
        (lambda text: np.int64(len(text)), [22, 5]),
        (lambda text: np.arange(7), [7, 7]),
        (make_backend().encode, [len(make_backend().encode(text).ids) for text in SENTENCES[:2]]),
    ],
)
def test_a_function_gives_a_number_or_a_sequence(function, expected):
    # "the cat sat on the mat" has t five times (the, cat, sat, the, mat) and o once; "a dog" one o
    assert measure(SENTENCES[:2], function).tolist() == expected
    assert measure(SENTENCES[:2], function, max_length=4).tolist() == [min(n, 4) for n in expected]


def test_pairs_give_two_columns_each_counted_on_its_own(tokenizer):
    lengths = measure(PAIRS, tokenizer, batch_size=2)
    expected = [[len(tokenizer(side)["input_ids"]) for side in pair] for pair in PAIRS]
    assert lengths.tolist() == expected
    assert lengths.shape == (3, 2)
    assert lengths.flags.c_contiguous


def test_a_text_without_tokens_has_length_zero():
    assert measure(["", "a"], str.split).tolist() == [0, 1]


# What can be read


class OnlyIndexable:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return ["a", "b c", "d e f"][index]


@pytest.mark.parametrize(
    "texts",
    [("a", "b c", "d e f"), iter(["a", "b c", "d e f"]), np.array(["a", "b c", "d e f"]), OnlyIndexable()],
    ids=["tuple", "iterator", "numpy", "indexable"],
)
def test_any_iterable_of_texts_is_read(texts):
    assert measure(texts, str.split, batch_size=2).tolist() == [1, 2, 3]


def test_a_batch_may_be_larger_than_any_list():
    assert measure(["a", "b c"], str.split, batch_size=2**63).tolist() == [1, 2]


def test_a_stream_is_read_no_further_than_the_batch_at_hand():
    read = []
    stream = (read.append(i) or "a" * i for i in range(1, 10))
    seen = []
    measure(stream, lambda text: seen.append(len(read)) or len(text), batch_size=3)
    assert seen == [3, 3, 3, 6, 6, 6, 9, 9, 9]


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text("aé ", max_size=12), min_size=1, max_size=30), st.integers(1, 40))
def test_the_batch_size_never_changes_the_lengths(texts, batch_size):
    assert measure(texts, len, batch_size=batch_size).tolist() == [len(text) for text in texts]
    doubled = measure([(text, text * 2) for text in texts], len, batch_size=batch_size)
    assert doubled.tolist() == [[len(text), 2 * len(text)] for text in texts]


# Workers


@forks
@pytest.mark.parametrize(
    ("make", "start_method"),
    [(make_fast, "fork"), (make_slow, "fork"), (make_backend, "fork"), (make_fast, "spawn")],
)
def test_workers_give_the_same_lengths_in_the_same_order(make, start_method, set_start_method, capfd):
    if start_method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {start_method} on this system")
    set_start_method(start_method)
    texts = [sentence[:end] for end in range(12) for sentence in SENTENCES]
    tokenizer = make()
    expected = measure(texts, tokenizer, max_length=6)  # uses threads, which a fork does not copy
    lengths = measure(texts, tokenizer, max_length=6, num_workers=2, batch_size=5)
    np.testing.assert_array_equal(lengths, expected)
    assert capfd.readouterr().err == ""


@forks
def test_workers_count_pairs_and_keep_a_setting_that_pickling_loses():
    splitting = make_backend()
    splitting.encode_special_tokens = True
    pairs = [("[SEP]", "a"), ("a", "[SEP] [SEP]")]
    lengths = measure(pairs, splitting, num_workers=1, batch_size=1)
    np.testing.assert_array_equal(lengths, measure(pairs, splitting))


@forks
def test_workers_hold_a_bounded_number_of_batches_of_a_stream(tmp_path):
    ahead = []

    def stream():
        for number in range(60):
            ahead.append(number - len(os.listdir(tmp_path)))
            yield str(tmp_path / str(number))

    # The "tokenizer" makes the file that the text names, so that the reader sees what the worker has done.
    make_file = functools.partial(os.open, flags=os.O_CREAT | os.O_WRONLY)
    assert len(measure(stream(), make_file, num_workers=1, batch_size=2)) == 60
    assert max(ahead) < 2 * (BATCHES_IN_FLIGHT_PER_WORKER + 2)


@forks
def test_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    measure(["a", "b"], len, num_workers=1)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    measure(["a", "b"], len, num_workers=1)
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_a_lambda_cannot_go_to_workers():
    with pytest.raises(ArgumentError, match=r"cannot be sent to worker processes .*; pass num_workers=0, or"):
        measure(["a"], lambda text: 1, num_workers=2)


class LoadsNowhere:
    def __call__(self, text):
        return 1

    def __reduce__(self):
        return int, ("no number",)


@forks
def test_a_tokenizer_that_does_not_load_in_a_worker_is_named():
    with pytest.raises(ArgumentError, match=r"cannot be loaded in a worker process \(invalid literal"):
        measure(["a"], LoadsNowhere(), num_workers=1)


@forks
@pytest.mark.parametrize(
    ("text", "error"), [("1 / 0", ZeroDivisionError), ("__import__('os')._exit(3)", BatchwrightError)]
)
def test_an_error_in_a_worker_reaches_the_caller(text, error):
    with pytest.raises(error, match=r"division by zero|a worker process ended"):
        measure(["1", "2", text], eval, num_workers=1, batch_size=1)


# The bar


def test_the_bar_ends_with_one_line_on_stderr(capsys):
    measure_lengths(["a", "b c", "d"], str.split)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"measuring lengths: 3 in \S+ s, \S+/s\n", captured.err)


def test_without_progress_nothing_is_written(capfd):
    measure_lengths(["a", "b c", "d"], str.split, progress=False)
    assert capfd.readouterr() == ("", "")


# The cache


def test_a_second_measure_reads_the_cache_and_counts_sixteen_examples_again(tmp_path, counting):
    first = measure(iter(PAIRS * 40), counting, cache=tmp_path / "made" / "here")
    assert counting.taken() == 2 * 120
    second = measure(PAIRS * 40, counting, cache=str(tmp_path / "made" / "here"), batch_size=1)
    assert counting.taken() == 2 * 16
    np.testing.assert_array_equal(first, second)
    assert second.dtype == np.int32


@pytest.mark.parametrize("make", [make_fast, make_slow, make_backend])
def test_a_tokenizer_made_anew_finds_its_lengths(make, tmp_path):
    first = measure(SENTENCES, make(), max_length=5, cache=tmp_path)
    used = make()
    measure(SENTENCES, used, max_length=3)  # the last call's truncation must not count as another tokenizer
    np.testing.assert_array_equal(measure(SENTENCES, used, max_length=5, cache=tmp_path), first)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cached_file_is_read_with_one_small_call_of_the_fast_tokenizer(tmp_path, monkeypatch):
    fast, call, sizes = make_fast(), PreTrainedTokenizerFast.__call__, []
    first = measure(SENTENCES * 50, fast, cache=tmp_path)
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "__call__",
        lambda self, texts, **rest: sizes.append(len(texts)) or call(self, texts, **rest),
    )
    np.testing.assert_array_equal(measure(SENTENCES * 50, fast, cache=tmp_path), first)
    assert sizes == [16]


@pytest.mark.parametrize("make", [make_fast, make_slow, make_backend])
def test_another_vocabulary_is_another_tokenizer(make, tmp_path):
    tokenizer = make()
    before = measure(SENTENCES, tokenizer, cache=tmp_path)
    tokenizer.add_tokens(["the cat sat"])
    after = measure(SENTENCES, tokenizer, cache=tmp_path)
    assert after[0] < before[0]  # three words became one token
    assert len(list(tmp_path.iterdir())) == 2


def test_another_maximum_is_measured_again(tmp_path):
    lengths = [measure(SENTENCES, str.split, max_length=m, cache=tmp_path)[0] for m in (None, 4, 2)]
    assert lengths == [6, 4, 2]


@pytest.mark.parametrize(
    "other",
    [["a b", "c d"], ["ab", "cd"], ["a", "bc", "d"], ["c d", "a b"], [("a", "b"), ("c", "d")], ["abcd"]],
)
def test_other_texts_are_measured_again(other, tmp_path, counting):
    measure(["a", "b", "c", "d"], counting, cache=tmp_path)
    counting.taken()
    measure(other, counting, cache=tmp_path)
    assert counting.taken() == np.size(other)


SEPARATOR = "a"


def make_splitter(separator):
    return lambda text: text.split(separator)


@dataclass(frozen=True, slots=True)
class Slotted:
    separator: str

    def __call__(self, text):
        return text.split(self.separator)


class Words(NamedTuple):
    separator: str

    def __call__(self, text):
        return text.split(self.separator)


class Letters(NamedTuple):
    separator: str

    def __call__(self, text):
        return list(text)


def helper_at(separator):
    """A class of one name whose helper method differs."""

    class Helped:
        def __call__(self, text):
            return self.cut(text)

        cut = staticmethod(make_splitter(separator))

    return Helped()


def attribute_of(separator):
    """A class of one name whose attribute differs."""

    class Held:
        by = separator

        def __call__(self, text):
            return text.split(self.by)

    return Held()


def base_of(separator):
    """A class of one name whose base differs."""

    class Base:
        @property
        def by(self):
            return separator

    class Based(Base):
        def __call__(self, text):
            return text.split(self.by)

    return Based()


def mapping_of(separator):
    table = {"by": [separator]}
    return lambda text: text.split(table["by"][0])


def module_of(separator):
    """A function that calls a module of the user's own, which changes under its name."""
    module = ModuleType("users_own")
    module.cut = make_splitter(separator)
    return FunctionType((lambda text: users_own.cut(text)).__code__, {"users_own": module})  # noqa: F821


class Splitter:
    def __init__(self, separator):
        self.separator = separator

    def __call__(self, text):
        return text.split(self.separator)


class Forgets(Splitter):
    """Keeps no setting where it pickles, as sentencepiece's processor keeps only its model."""

    def __getstate__(self):
        return b"model"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (lambda text: text.split("a"), lambda text: text.split("t")),
        (lambda text, by="a": text.split(by), lambda text, by="t": text.split(by)),
        (lambda text, *, by="a": text.split(by), lambda text, *, by="t": text.split(by)),
        (make_splitter("a"), make_splitter("t")),
        (functools.partial(re.split, "a"), functools.partial(re.split, "t")),
        (re.compile("a").split, re.compile("t").split),
        (Splitter("a"), Splitter("t")),
        (Splitter("a").__call__, Splitter("t").__call__),
        (functools.lru_cache(make_splitter("a")), functools.lru_cache(make_splitter("t"))),
        (make_slow().encode, make_fast().encode),
        (Slotted("a"), Slotted("t")),
        (operator.methodcaller("split", "a"), operator.methodcaller("split", "t")),
        (Words("a"), Letters("a")),
        (helper_at("a"), helper_at("t")),
        (attribute_of("a"), attribute_of("t")),
        (base_of("a"), base_of("t")),
        (mapping_of("a"), mapping_of("t")),
        (module_of("a"), module_of("t")),
        (Forgets("a"), Forgets("t")),
    ],
    ids=[
        "code",
        "default",
        "keyword",
        "closure",
        "partial",
        "builtin",
        "object",
        "method",
        "wrapper",
        "bound",
        "slots",
        "method caller",
        "named tuples",
        "helper",
        "class attribute",
        "base class",
        "content",
        "module",
        "own state",
    ],
)
def test_functions_that_differ_are_told_apart(one, two, tmp_path):
    text = ["the cat sat on the mat at that"]
    first, second = measure(text, one, cache=tmp_path), measure(text, two, cache=tmp_path)
    assert first[0] != second[0]
    assert measure(text, one, cache=tmp_path)[0] == first[0]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_global_that_a_function_names_is_part_of_it(tmp_path, monkeypatch):
    def split(text):
        return [part for part in text.split(SEPARATOR)]

    # at a: c, tt; at t: ca and two empty parts
    assert measure(["catt"], split, cache=tmp_path).tolist() == [2]
    monkeypatch.setitem(globals(), "SEPARATOR", "t")
    assert measure(["catt"], split, cache=tmp_path).tolist() == [3]


FUNCTION = "tokenizer = lambda text: [word for word in text.split() if word in {'a', 'b', 'c', 'd'}]"
OBJECT = """
import functools, logging, re
LOG = logging.getLogger("words")
class Base:
    pattern = re.compile("[ab]")
class Words(Base):
    def __init__(self):
        self.kept = {("a", 1), ("b", 2), ("c", 3)}
    @functools.lru_cache
    def cut(self, text):
        LOG.debug("cut")
        return self.pattern.findall(text)
    def __call__(self, text):
        return self.cut(text)
tokenizer = Words()
"""


@pytest.mark.parametrize("code", [FUNCTION, OBJECT], ids=["function", "object"])
def test_the_key_is_the_same_in_every_process(code, tmp_path):
    script = (
        f"import sys, logging; from batchwright import measure_lengths\n{code}\n"
        "logging.getLogger(sys.argv[2])  # some other logger\n"
        "measure_lengths(['a b'], tokenizer, progress=False, cache=sys.argv[1])"
    )
    for seed in ("1", "2"):  # the order of the set changes with the seed
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", script, str(tmp_path), seed], env=environment, check=True)
    assert len(list(tmp_path.iterdir())) == 1


def sentencepiece_models(directory):
    """Two models from one corpus, with 40 and with 90 pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(f"the cat sat on the mat number {i} again and again" for i in range(500)))
    for size in (40, 90):
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(directory / str(size)),
            vocab_size=size,
            model_type="bpe",  # of unigrams, releases keep other pieces
            minloglevel=2,
        )
    return [
        functools.partial(sentencepiece.SentencePieceProcessor, str(directory / f"{size}.model")) for size in (40, 90)
    ]


def test_models_of_sentencepiece_and_their_settings_are_told_apart_and_found_again(tmp_path):
    small, large = sentencepiece_models(tmp_path)
    texts, cache = ["the cat sat again", "number 7 mat"], tmp_path / "cache"
    made = [small(), large(), large(add_bos=True)]
    expected = [[len(model.encode(text)) for text in texts] for model in made]
    assert len({tuple(lengths) for lengths in expected}) == 3
    assert [measure(texts, model.encode, cache=cache).tolist() for model in made] == expected
    assert measure(texts, large().encode, cache=cache).tolist() == expected[1]
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize(
    "hold",
    [lambda path: path.open(), lambda path: (line for line in ()), lambda path: sys._getframe()],
    ids=["file", "generator", "frame"],
)
def test_a_tokenizer_that_holds_what_cannot_be_described_is_counted_and_not_cached(hold, tmp_path):
    path = tmp_path / "words.txt"
    path.touch()
    held = hold(path)
    tokenizer = functools.partial(lambda text, held: text.split(), held=held)
    assert measure(["a b"], tokenizer).tolist() == [2]
    words = (
        r"holds something that cannot be described \(.*cannot pickle.*\), so its lengths cannot be cached; pass cache="
    )
    with pytest.raises(ArgumentError, match=words):
        measure(["a b"], tokenizer, cache=tmp_path / "cache")
    if hasattr(held, "close"):
        held.close()


def test_a_lock_tells_nothing_and_circles_end(tmp_path):
    tokenizer = Splitter("a")
    tokenizer.lock, tokenizer.me, tokenizer.all = threading.Lock(), tokenizer, {tokenizer}
    again = Splitter("a")
    again.lock, again.me, again.all = threading.Lock(), again, {again}
    for one in (tokenizer, again):
        assert measure(["cat"], one, cache=tmp_path).tolist() == [2]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_merges_of_a_slow_tokenizer_are_part_of_it(tmp_path):
    one, two = make_slow(), make_slow()
    one.merges, two.merges = {("a", "b"): 0}, {("a", "c"): 0}
    for tokenizer in (one, two, one):
        measure(["ab"], tokenizer, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_tokenizer_that_reads_a_changed_file_is_measured_again_with_a_warning(tmp_path):
    separator = tmp_path / "separator.txt"
    separator.write_text("a")

    def split(text):
        return text.split(separator.read_text())

    texts = [f"cat {number}" for number in range(90)] + ["tat a tat"]
    # at a: 2 parts, and 4 of the last; at t: 2 parts, and 5 of the last
    assert measure(texts, split, cache=tmp_path / "cache")[-1] == 4
    separator.write_text("t")
    with pytest.warns(UserWarning, match=r"counts example 90 otherwise than when its lengths were cached") as caught:
        assert measure(texts, split, cache=tmp_path / "cache")[-1] == 5
    assert caught[0].filename == __file__
    assert measure(texts, split, cache=tmp_path / "cache")[-1] == 5  # without a warning


def flip_a_bit(data):
    return data[:-30] + bytes([data[-30] ^ 1]) + data[-29:]


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda data: data[:-1],
        lambda data: data[:60],
        lambda data: b"",
        lambda data: b"PK\x03\x04" * 99,
    ],
    ids=["bit", "cut", "cut-short", "empty", "other"],
)
def test_a_damaged_file_is_measured_again_and_replaced(damage, tmp_path, counting):
    texts = SENTENCES * 10
    expected = measure(texts, counting, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(UserWarning, match=r"are damaged .*; measuring again") as caught:
        np.testing.assert_array_equal(measure(texts, counting, cache=tmp_path), expected)
    assert caught[0].filename == __file__
    counting.taken()
    np.testing.assert_array_equal(measure(texts, counting, cache=tmp_path), expected)
    assert counting.taken() == 16


def test_lengths_that_cannot_be_stored_are_returned_with_a_warning(tmp_path):
    measure(SENTENCES, str.split, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    (path / "in the way").mkdir(parents=True)
    with pytest.warns(UserWarning, match="are damaged|could not be stored") as caught:
        lengths = measure(SENTENCES, str.split, cache=tmp_path)
    assert lengths.tolist() == [6, 2, 0, 10]
    assert len(caught) == 2  # one for what was there, one for what could not replace it
    assert list(tmp_path.iterdir()) == [path]


def test_numpy_reads_a_cached_file(tmp_path):
    measure(SENTENCES, str.split, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    assert np.load(path).tolist() == [6, 2, 0, 10]


# What is refused


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "texts is empty"),
        (iter([]), "texts is empty"),
        (["a", "b", 3], "all str, got int at example 2"),
        (["a", ("b", "c")], r"all str, got tuple of \(str, str\) at example 1"),
        ([("a", "b"), "c"], "all pairs of two str, got str at example 1"),
        ([("a", "b"), ("c", None)], r"all pairs of two str, got tuple of \(str, NoneType\) at example 1"),
        ([["a", "b", "c", "d"]], "all str, or all pairs of two str, got list of 4 items at example 0"),
        ([{"text": "a"}], "all str, or all pairs of two str, got dict at example 0"),
        ([b"a"], "got bytes at example 0"),
        ("a text", "iterable of str or of pairs of str, got str"),
        ({"text": "a"}, "column 'text' must hold one text per example, got str; wrap one text in a list"),
        (7, "got int"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_texts_of_a_wrong_kind_are_refused_by_position(texts, message, cached, tmp_path):
    with pytest.raises(LengthsError, match=message):
        measure(texts, len, batch_size=2, cache=tmp_path if cached else None)


@forks
def test_a_wrong_text_far_into_the_data_is_found_with_workers_too():
    with pytest.raises(LengthsError, match="got float at example 17"):
        measure(["a"] * 17 + [1.5], len, num_workers=1, batch_size=2)


@pytest.mark.parametrize(
    "result",
    [None, -1, 2.0, True, {"input_ids": [1, 2]}, np.zeros((1, 5)), make_slow()("a"), np.int64(-3)],
    ids=str,
)
def test_a_function_that_returns_no_length_is_refused(result):
    with pytest.raises(LengthsError, match=r"tokenizer must return a length of 0 or more .* for the text 'hello'"):
        measure(["hello"], lambda text: result)


class OnlyEncodes:
    def encode(self, text):
        return text.split()


@pytest.mark.parametrize("max_length", [None, 2**35])
def test_a_length_beyond_32_bits_is_refused_with_its_text(max_length):
    with pytest.raises(
        LengthsError, match=r"at most 2147483647, the tokenizer returned \d+ for the text 'b' \(str\); re"
    ):
        measure(["a", "b"], lambda text: 2**40 if text == "b" else 1, max_length=max_length)
    assert measure(["a", "b"], lambda text: 2**40, max_length=7).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length must be a whole number of 1 or more, got 0"),
        ({"max_length": 2.0}, "max_length must be a whole number of 1 or more, got 2.0"),
        ({"max_length": True}, "max_length must be"),
        ({"num_workers": -1}, "num_workers must be a whole number of 0 or more, got -1"),
        ({"batch_size": 0}, "batch_size must be a whole number of 1 or more, got 0"),
        (
            {"tokenizer": "bert"},
            "got 'bert'; load the tokenizer of that name first, e.g. AutoTokenizer.from",
        ),
        ({"tokenizer": OnlyEncodes()}, "tokenizer must be .*; pass its method, e.g. tokenizer.encode"),
        ({"tokenizer": ByT5Tokenizer}, "got the class ByT5Tokenizer; pass a tokenizer made from it"),
        ({"tokenizer": Tokenizer}, "got the class Tokenizer; pass a tokenizer made from it"),
        ({"cache": __file__}, "cache must be a directory"),
        ({"cache": 7}, "cache must be a directory"),
    ],
)
def test_a_bad_setting_is_refused_before_any_work(options, message):
    untouched = iter(["a", "b"])
    with pytest.raises(ArgumentError, match=message):
        measure(untouched, **{"tokenizer": len, **options})
    assert next(untouched) == "a"


class AtBlanks:
    """A pre-tokenizer written in Python, which tokenizers can neither copy nor serialise."""

    def pre_tokenize(self, text):
        text.split(lambda index, part: part.split(" ", "removed"))


def test_a_tokenizer_with_parts_in_python_is_counted_but_neither_truncated_nor_cached(tmp_path):
    custom = make_backend()
    custom.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(AtBlanks())
    assert measure(["a a", "a"], custom).tolist() == [4, 3]
    with pytest.raises(ArgumentError, match=r"cannot be copied .*np.minimum"):
        measure(["a a", "a"], custom, max_length=3)
    with pytest.raises(ArgumentError, match=r"cannot be serialised .*cache=None"):
        measure(["a a", "a"], custom, cache=tmp_path)
