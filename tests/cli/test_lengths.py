import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.cli.lengths import (
    is_heavy_tailed,
    load_tokenizer,
    make_bins,
    measure_file,
    percentile,
    unit_of,
)
from batchwright.cli.reading import Source
from batchwright.cli.screen import Bin
from batchwright.errors import ArgumentError
from batchwright.plan.lengths.measuring import measure_lengths


def count(name, text):
    return measure_lengths([text], load_tokenizer(name), progress=False).tolist()[0]


def test_built_in_counts():
    # Two words; eight characters, of which ü takes two bytes.
    assert [count(name, "für  dich") for name in ("words", "chars", "bytes")] == [2, 9, 10]


def test_bytes_of_a_lone_surrogate_are_counted():
    assert count("bytes", "\ud800") == 3


def test_a_tokenizer_file_is_counted_without_its_own_padding_and_cut(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=9)
    tokenizer.enable_truncation(max_length=2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert count(str(tmp_path / "tokenizer.json"), "a b a b") == 4


def test_a_folder_saved_by_transformers(tmp_path):
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    assert count(str(tmp_path), "a a a") == 3


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ArgumentError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(str(tmp_path))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_function_is_found_where_the_command_was_started(tmp_path, monkeypatch):
    (tmp_path / "my_counting_rule.py").write_text(
        "class Rule:\n    @staticmethod\n    def half(text): return len(text) // 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    assert count("my_counting_rule:Rule.half", "12345678") == 4


@pytest.mark.parametrize("name", ["no-such-model-of-any-hub", "nobody/no-such-model-of-any-hub"])
def test_a_model_of_the_hub_that_is_not_here_gets_the_line_that_saves_it(name):
    message = (
        rf"no model of that name was downloaded before.*from_pretrained\('{name}'\)\.save_pretrained\("
        r"'no-such-model-of-any-hub-tokenizer'\).*pass --tokenizer \./no-such-model-of-any-hub-tokenizer"
    )
    with pytest.raises(ArgumentError, match=message):
        load_tokenizer(name)


def test_a_model_of_the_hub_is_not_looked_for_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ArgumentError, match="save it once: python -c"):
        load_tokenizer("no-such-model-of-any-hub")


RULE = """
def count(text):
    if "bad" in text:
        raise ValueError("cannot\\nread this")
    return len(text)

def nothing(text):
    return None
"""


@pytest.fixture
def rule(tmp_path, monkeypatch):
    (tmp_path / "failing_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("failing_rule", None)


def measure(path, tokenizer, **options):
    return measure_file(Source(path=path, **options), tokenizer=tokenizer, max_length=None, progress=False)


def test_a_function_that_raises_is_one_line_with_the_number_of_the_text(rule):
    (rule / "a.txt").write_text("good\n\nstill good\na bad one\n")
    message = "--tokenizer failing_rule:count failed at text 3: ValueError: cannot read this; mend it"
    with pytest.raises(ArgumentError, match=message) as caught:
        measure(rule / "a.txt", "failing_rule:count")
    assert "\n" not in str(caught.value)


def test_a_function_that_raises_on_one_side_of_a_pair_names_the_pair(rule):
    (rule / "a.tsv").write_text("good\tgood\nalso good\tbad\n")
    with pytest.raises(ArgumentError, match="failed at text 2: ValueError"):
        measure(rule / "a.tsv", "failing_rule:count", pairs=True)


def test_a_function_that_returns_nothing_is_refused_with_the_text(rule):
    (rule / "a.txt").write_text("good\n")
    with pytest.raises(ArgumentError, match=r"tokenizer must return a length of 0 or more .* got None"):
        measure(rule / "a.txt", "failing_rule:nothing")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./gpt2", "no such file or folder; allowed are words, chars"),
        ("word", "no such file or folder; did you mean words?"),
        ("", "no such file or folder; allowed are words, chars"),
        ("no_such_module:count", "there is no module 'no_such_module'"),
        ("math:no_such_function", "--tokenizer math:no_such_function: math has no 'no_such_function'"),
        ("math:pi", "is of type float and cannot be called"),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused(name, message):
    with pytest.raises(ArgumentError, match=message):
        load_tokenizer(name)


def test_the_unit_follows_the_tokenizer():
    assert [unit_of(name) for name in ("words", "chars", "bytes", "lengths", "a.json")] == [
        "words",
        "characters",
        "bytes",
        "tokens",
        "tokens",
    ]


@pytest.mark.parametrize("name", ["a" * 300, "~nosuchuser/tok"])
def test_a_name_that_no_file_can_have_is_no_tokenizer(name):
    with pytest.raises(ArgumentError, match=f"--tokenizer '?{name}'?: no such file or folder"):
        load_tokenizer(name)


def test_the_name_of_a_model_is_not_taken_for_a_misspelt_unit():
    with pytest.raises(ArgumentError, match="no model of that name was downloaded before") as refused:
        load_tokenizer("word2vec")
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize(
    "files",
    [{"tokenizer_config.json": b"[]"}, {"config.json": b'{"model_type": "bert"}', "vocab.txt": b"\xff\xfe"}],
    ids=["list", "vocabulary"],
)
def test_a_broken_tokenizer_folder_is_refused_with_its_reason(tmp_path, files):
    pytest.importorskip("transformers")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match=r"holds no tokenizer that transformers can load: \w+: \S"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit(0)", "importing exiting_0 failed: SystemExit: 0"),
        ("def count(text): sys.exit(0)", "--tokenizer exiting_1:count failed at text 1: SystemExit: 0; mend it"),
    ],
    ids=["import", "call"],
)
def test_a_tokenizer_that_ends_the_process_is_refused(tmp_path, monkeypatch, body, message):
    name = f"exiting_{int('def' in body)}"
    (tmp_path / f"{name}.py").write_text(f"import sys\n{body}\n")
    (tmp_path / "a.txt").write_text("one\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        measure_file(Source(path=tmp_path / "a.txt"), tokenizer=f"{name}:count", max_length=None, progress=False)


def test_a_count_over_31_bits_is_named_by_its_text(tmp_path, monkeypatch):
    (tmp_path / "huge_counts.py").write_text("def count(text):\n    return 2**40 if text == 'b' else 1\n")
    (tmp_path / "a.txt").write_text("a\nb\nc\n")
    monkeypatch.syspath_prepend(tmp_path)
    message = "huge_counts:count failed at text 2: ValueError: it counts 1,099,511,627,776, and at most 2,147,483,647"
    with pytest.raises(ArgumentError, match=message):
        measure_file(Source(path=tmp_path / "a.txt"), tokenizer="huge_counts:count", max_length=None, progress=False)


def test_few_different_lengths_get_a_bin_each():
    assert make_bins(np.array([5, 7, 7])) == [Bin(5, 5, 1), Bin(6, 6, 0), Bin(7, 7, 2)]


def test_equal_bins_have_round_bounds():
    # 10 to 90 needs 81 bins of 1, 41 of 2, 17 of 5: the first step with 16 or fewer is 10.
    bins = make_bins(np.array([10, 55, 55, 90]))
    assert [(b.low, b.high) for b in bins][:2] == [(10, 19), (20, 29)]
    assert [b.count for b in bins] == [1, 0, 0, 0, 2, 0, 0, 0, 1]


def test_bins_widen_under_a_heavy_tail():
    # The longest, 100, is more than eight times the median, 4.
    bins = make_bins(np.array([4, 4, 4, 5, 100]))
    assert [b.label for b in bins] == [
        "4-5",
        "6-7",
        "8-11",
        "12-15",
        "16-23",
        "24-31",
        "32-47",
        "48-63",
        "64-95",
        "96-127",
    ]
    assert [b.count for b in bins] == [4, 0, 0, 0, 0, 0, 0, 0, 0, 1]


def test_the_widest_span_falls_back_to_powers_of_two():
    bins = make_bins(np.array([1, 1, 1, 5000]))
    assert [b.low for b in bins] == [2**i for i in range(13)]


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=50))
def test_every_example_is_in_one_bin_and_bins_are_few(lengths):
    bins = make_bins(np.array(lengths))
    assert len(bins) <= 17
    assert sum(b.count for b in bins) == len(lengths)
    assert bins[0].low <= min(lengths) <= bins[0].high
    assert bins[-1].low <= max(lengths) <= bins[-1].high
    assert all(a.high + 1 == b.low for a, b in itertools.pairwise(bins))


def test_percentiles_are_lengths_that_occur():
    lengths = np.array([1, 1, 1, 1, 1, 1, 1, 1, 2, 50])
    assert [percentile(lengths, p) for p in (50, 80, 90, 99)] == [1, 1, 2, 50]


def test_a_heavy_tail_is_more_than_eight_medians():
    assert is_heavy_tailed(np.array([10, 10, 81]))
    assert not is_heavy_tailed(np.array([10, 10, 80]))
