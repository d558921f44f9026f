"""``encode`` of sentence-transformers: what ``model.encode`` gives, in planned batches."""

import copy
import logging

import numpy as np
import pandas as pd
import pytest
import torch

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.step import MemoryMonitor
from batchwright.testing import FakeMemory

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed; it is in the group dev")
from sentence_transformers.sentence_transformer import modules

from batchwright.integrations.sentence_transformers import encode

from .models import (
    WIDTH,
    SideBySide,
    make_clip,
    make_model,
    make_router,
    make_static,
    make_texts,
    make_words,
    save_bert,
    save_llama,
    wrap,
)

TEXTS = make_texts(500)
FEW = TEXTS[:40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("left"))


@pytest.fixture(scope="module")
def model(folder):
    return make_model(folder)


def assert_same(own, other, *, near=5e-5):
    """Compare values, types and shapes, all the way down."""
    assert type(own) is type(other)
    if isinstance(own, list):
        assert len(own) == len(other)
        for one, another in zip(own, other, strict=True):
            assert_same(one, another, near=near)
        return
    assert own.dtype == other.dtype
    assert own.shape == other.shape
    own, other = (torch.as_tensor(value).double() for value in (own, other))
    assert torch.allclose(own, other, rtol=near, atol=near)


def note_batches(model):
    """Note the shape of every batch that runs."""
    shapes = []
    handle = model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0]["input_ids"].shape)))
    return shapes, handle


@pytest.mark.parametrize("pool", ["mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"])
@pytest.mark.parametrize("side", ["folder", "left"])
def test_vectors_are_those_of_the_model(request, pool, side):
    model = make_model(request.getfixturevalue(side), pool=pool)
    assert_same(encode(model, TEXTS), model.encode(TEXTS))


@pytest.mark.parametrize(
    "options",
    [
        {"normalize_embeddings": True},
        {"truncate_dim": 5},
        {"truncate_dim": 5, "normalize_embeddings": True, "convert_to_tensor": True},
        {"convert_to_tensor": True},
        {"convert_to_numpy": False},
        {"output_value": "token_embeddings"},
        {"output_value": "token_embeddings", "convert_to_tensor": True, "prompt_name": "query"},
        {"prompt_name": "query"},
        {"prompt": "w9 w10 "},
        {"prompt": "w9 ", "precision": None},
        {"processing_kwargs": {"text": {"max_length": 7, "truncation": True}}},
        {"device": "cpu"},
        {"precision": "binary"},
        {"precision": "ubinary", "convert_to_tensor": True},
        {"precision": "ubinary", "convert_to_numpy": False},
    ],
    ids=str,
)
def test_options_are_those_of_the_model(model, options):
    assert_same(encode(model, FEW, **options), model.encode(FEW, **options))


@pytest.mark.parametrize("options", [{}, {"convert_to_tensor": True}, {"output_value": "token_embeddings"}], ids=str)
@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_ranges_of_whole_numbers_are_those_of_all_texts(model, precision, options):
    options = {**options, "precision": precision}
    own, other = encode(model, FEW, **options), model.encode(FEW, **options)
    # A value on the edge between two numbers may be rounded to either.
    assert_same(own, other, near=1)
    own, other = (np.concatenate([np.asarray(row).ravel() for row in rows]).astype(int) for rows in (own, other))
    assert (own != other).mean() < 0.01


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("side", ["folder", "left"])
def test_prompts_are_pooled_as_the_model_says(request, side, include_prompt):
    model = make_model(request.getfixturevalue(side), include_prompt=include_prompt, default_prompt_name="query")
    plain = encode(model, FEW, prompt="")
    assert_same(encode(model, FEW), model.encode(FEW))
    assert abs(encode(model, FEW) - plain).max() > 0.01


def test_later_modules_run_too(folder):
    dense = modules.Dense(WIDTH, 6)
    model = make_model(folder, more=[dense, modules.LayerNorm(6), modules.Normalize()], truncate_dim=4)
    assert_same(encode(model, FEW), model.encode(FEW))


@pytest.mark.parametrize(
    "texts",
    [
        "w4 w5",
        [],
        ("w4", "w5 w6"),
        np.array(["w4", "w5 w6"]),
        np.array(["w4", "w5 w6"], dtype=object),
        {"text": "w4 w5"},
        [{"text": "w4 w5"}, {"text": "w6"}],
        [("w4", "w5 w6"), ("w7", "w8")],
        [["w4", "w5 w6"], ["w7", "w8"]],
        ["", "w4"],
        [""],
    ],
    ids=repr,
)
@pytest.mark.parametrize("options", [{}, {"convert_to_tensor": True}, {"convert_to_numpy": False}], ids=str)
def test_whatever_the_model_takes_is_taken(model, texts, options):
    assert_same(encode(model, texts, **options), model.encode(texts, **options))


def test_messages_and_conversations(tmp_path):
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    model = make_model(save_bert(tmp_path, chat_template=template))
    messages = [{"role": "user", "content": text} for text in FEW]
    for inputs in (messages, tuple(messages), [[message] for message in messages], [messages[:2], messages[2:5]]):
        assert_same(encode(model, inputs), model.encode(inputs))
    assert encode(model, messages).shape == (WIDTH,)
    assert encode(model, tuple(messages)).shape == (40, WIDTH)


def test_a_series_is_a_list(model):
    assert_same(encode(model, pd.Series(FEW, index=range(100, 140))), model.encode(FEW))
    assert encode(model, pd.Series([], dtype=str)).shape == (0,)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_one_text_has_no_ranges(model, precision):
    with pytest.raises(ValueError, match="single embedding"):
        encode(model, "w4", precision=precision)


def test_static_embeddings_and_bags_of_words_are_encoded():
    bag = wrap(modules.BoW([f"w{n}" for n in range(4, 20)]))
    for model in (make_static(), bag):
        assert_same(encode(model, TEXTS, prompt_name="query"), model.encode(TEXTS, prompt_name="query"))


def test_word_embeddings_and_lstm_are_encoded():
    torch.manual_seed(0)
    model = wrap(make_words(), modules.LSTM(WIDTH, 5), modules.Pooling(10))
    assert_same(encode(model, FEW), model.encode(FEW))


@pytest.mark.parametrize("kind", ["convolutions", "absolute positions behind padding"])
def test_a_model_that_padding_changes_gives_the_vectors_of_texts_alone(kind, tmp_path):
    torch.manual_seed(0)
    if kind == "convolutions":
        model = wrap(make_words(), modules.CNN(WIDTH, 4), modules.Pooling(12, pooling_mode="max"))
    else:
        model = make_model(save_bert(tmp_path, padding_side="left"))
    alone = model.encode(FEW, batch_size=1)
    assert abs(model.encode(FEW) - alone).max() > 0.01
    shapes, _ = note_batches(model)
    assert_same(encode(model, FEW), alone)
    assert len(shapes) < len(FEW)


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_a_text_without_words_hides_nothing(pool):
    torch.manual_seed(0)
    model = wrap(make_words(), modules.CNN(WIDTH, 4), modules.Pooling(12, pooling_mode=pool))
    texts = [text for text in FEW if len(text.split()) > 2]
    assert_same(encode(model, [*texts, "none of these"])[:-1], model.encode(texts, batch_size=1))


@pytest.mark.parametrize("num", [2, 3, 12])
def test_padding_is_tried_whatever_the_lengths(num):
    torch.manual_seed(0)
    model = wrap(make_words(), modules.CNN(WIDTH, 4), modules.Pooling(12))
    texts = [make_texts(1, most=1)[0], *[" ".join(["w9"] * num)] * 4]
    for order in (texts, texts[::-1]):
        assert_same(encode(model, order), model.encode(order, batch_size=1))


@pytest.mark.parametrize("reach", [8, 12])
def test_long_positions_are_those_of_each_text(tmp_path, reach):
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    folder = save_llama(tmp_path, rope_parameters=scaling, max_position_embeddings=reach)
    model = make_model(folder)
    alone = [copy.deepcopy(model).encode(text) for text in FEW]
    assert abs(np.stack(alone) - model.encode(FEW)).max() > 0.01
    for _ in range(2):
        assert_same(encode(model, FEW), np.stack(alone))


def test_routes_of_queries_and_documents(folder, tmp_path):
    model = make_router(folder, save_bert(tmp_path, seed=1))
    assert_same(encode(model, FEW, task="query", prompt_name="query"), model.encode_query(FEW))
    assert_same(encode(model, FEW, task="document", prompt_name="document"), model.encode_document(FEW))
    assert_same(encode(model, [{"query": text} for text in FEW]), model.encode([{"query": text} for text in FEW]))


def test_images_and_texts(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    model, rng = make_clip(tmp_path), np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, size=(9, 7 + n, 3), dtype=np.uint8)) for n in range(12)]
    for inputs in (images, FEW, images[0]):
        assert_same(encode(model, inputs), model.encode(inputs))
    assert_same(encode(model, images, budget=bw.MaxItems(5)), model.encode(images))
    with pytest.raises(ArgumentError, match=r"no tokens that could be counted, so MaxTokens\(.*give MaxItems\(n\)"):
        encode(model, images, budget=bw.MaxTokens(100))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"convert_to_tensor": True}], ids=str)
def test_half_precision_keeps_its_type(folder, dtype, options):
    model = make_model(folder).to(dtype)
    shapes, handle = note_batches(model)
    found = encode(model, FEW, **options)
    handle.remove()
    assert len(shapes) < 10  # texts of several lengths share a batch
    assert_same(found, model.encode(FEW, **options), near=0.1)


def test_batches_keep_the_budget_in_tokens_that_the_model_reads(model):
    shapes, handle = note_batches(model)
    encode(model, TEXTS, budget=bw.MaxTokens(120), prompt_name="query")
    handle.remove()
    tried, shapes = shapes[:2], shapes[2:]
    assert [num for num, _ in tried] == [1, 2]
    assert all(num * width <= 120 for num, width in shapes)
    assert sum(num for num, _ in shapes) == len(TEXTS)
    assert [width for _, width in shapes] == sorted((width for _, width in shapes), reverse=True)


def test_texts_side_by_side_are_counted():
    torch.manual_seed(0)
    first = SideBySide()
    model = wrap(first)
    expected = model.encode(TEXTS)
    first.sizes.clear()
    assert_same(encode(model, TEXTS, budget=bw.MaxTokens(150)), expected)
    assert max(first.sizes) <= 150
    assert len(first.sizes) < 100


def test_batches_grow_as_far_as_memory_allows(model):
    shapes, handle = note_batches(model)
    encode(model, TEXTS, memory=MemoryMonitor(source=FakeMemory(100_000)))
    handle.remove()
    assert shapes[2] == (8, 24)
    assert max(num for num, _ in shapes) > 32


def test_a_batch_that_runs_out_of_memory_is_split(model):
    def refuse(_, inputs):
        num, width = inputs[0]["input_ids"].shape
        if num * width > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    expected = model.encode(TEXTS)
    handle = model.register_forward_pre_hook(refuse)
    found = encode(model, TEXTS)
    handle.remove()
    assert_same(found, expected)


def test_a_text_that_does_not_fit_alone_is_named(model):
    def refuse(_, inputs):
        if inputs[0]["input_ids"].shape[1] > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = model.register_forward_pre_hook(refuse)
    with pytest.raises(DoesNotFitError, match="input 1 of 24 tokens does not fit on its own"):
        encode(model, ["w4", "w5 " * 40, "w6"])
    handle.remove()


def test_every_module_is_in_its_mode_afterwards(folder):
    model = make_model(folder).train()
    model[1].eval()
    own = encode(model, FEW)
    assert [part.training for part in (model, model[0], model[1])] == [True, True, False]
    assert_same(own, model.encode(FEW))


def test_tensors_can_be_trained_on(model):
    for found in (encode(model, FEW, convert_to_tensor=True), *encode(model, FEW[:2], convert_to_numpy=False)):
        assert not found.is_inference()
        weight = torch.ones((), requires_grad=True)
        (found * weight).sum().backward()


def test_the_progress_bar_follows_the_level_of_the_log(model, capsys, caplog):
    encode(model, FEW)
    assert capsys.readouterr().err == ""
    encode(model, FEW, show_progress_bar=True)
    assert "encoding: 40 in" in capsys.readouterr().err
    with caplog.at_level(logging.INFO, logger="sentence_transformers"):
        encode(model, FEW)
        assert "encoding: 40 in" in capsys.readouterr().err
        encode(model, FEW, show_progress_bar=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 8}, r"batch_size cannot be given: the budget decides; give budget=MaxItems\(n\)"),
        ({"pool": {"input": None}}, "pool cannot be given: one process encodes on one device here"),
        ({"chunk_size": 5}, "chunk_size cannot be given"),
        ({"device": ["cpu", "cpu"]}, r"device must be one device, got \['cpu', 'cpu'\]"),
        ({"output_value": None}, "output_value=None returns features as wide as the batches they were in"),
        ({"output_value": "sparse"}, "output_value must be .*token_embeddings.* got 'sparse'"),
        ({"budget": "most"}, "budget must be .*auto"),
    ],
)
def test_what_depends_on_batches_is_refused(model, options, words):
    with pytest.raises(ArgumentError, match=words):
        encode(model, FEW, **options)


@pytest.mark.parametrize("options", [{"prompt_name": "none"}, {"precision": "int4"}, {"normalise": True}], ids=str)
def test_the_model_checks_its_own_options(model, options):
    with pytest.raises(
        ValueError, match=str(next(iter(options.values()))) if "normalise" not in options else "normalise"
    ):
        encode(model, FEW, **options)


def test_rows_of_all_tokens_are_refused_where_padding_stands_on_the_left(left):
    model = make_model(left)
    with pytest.raises(ArgumentError, match="holds the padding where that stands on the left"):
        encode(model, FEW, output_value="token_embeddings")
    same, options = ["w4 w5", "w6 w7"], {"output_value": "token_embeddings"}
    assert_same(encode(model, same, **options), model.encode(same, **options))


def test_only_a_sentence_transformer_is_encoded(model):
    with pytest.raises(ArgumentError, match=r"a SentenceTransformer itself, got BertModel; .* batchwright.step.encode"):
        encode(model[0].model, FEW)
    with pytest.raises(ArgumentError, match="got DataParallel; a wrapped one is compiled with"):
        encode(torch.nn.DataParallel(model), FEW)
