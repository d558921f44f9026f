import pytest

from batchwright.cli.measure import load_tokenizer, unit_of
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "no such file or folder; allowed are words, chars"),
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
