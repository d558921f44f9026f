"""encode: the vector that each text has on its own, in batches that fit; Encoder: the same for live requests."""

import asyncio

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError, DeadlineExceeded, DoesNotFitError
from batchwright.serve import Batcher
from batchwright.step import Encoder, MemoryMonitor, encode
from batchwright.testing import EagerGraphs, FakeMemory
from tests.thorough import num_cases

from ..graphs.tape import TapeGraphs
from . import shapes

NUM_TOKENS = 50
# Requests of a random mix.
NUM_MIXED = num_cases(300, thorough=10_000)
_SIDES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MODELS = {
    "BertModel": ("BertConfig", {**_SIDES, "max_position_embeddings": 64}),
    "RobertaModel": ("RobertaConfig", {**_SIDES, "max_position_embeddings": 66, "pad_token_id": 1}),
    "LlamaModel": ("LlamaConfig", {**_SIDES, "num_key_value_heads": 1, "max_position_embeddings": 64}),
    "T5Model": (
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "pad_token_id": 0},
    ),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(name="BertModel"):
    config, options = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(vocab_size=NUM_TOKENS, **options)).eval()


def make_ids(num, longest=40, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, NUM_TOKENS, length).tolist() for length in rng.integers(1, longest + 1, num)]


def letters(text):
    return [2 + ord(letter) % 40 for letter in text]


def by_hand(model, ids, pool="mean"):
    """The definition: one text alone, without padding or a mask."""
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pool]


# encode


@pytest.mark.parametrize("graphs", [False, TapeGraphs])
@pytest.mark.parametrize("pool", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", MODELS)
def test_every_vector_is_that_of_its_text_alone(name, pool, graphs):
    model, ids = make_model(name), make_ids(25)
    found = encode(model, None, ids, pool=pool, graphs=graphs and graphs())
    wanted = torch.stack([by_hand(model, one, pool) for one in ids])
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)
    assert found.dtype is torch.float32


@pytest.mark.parametrize("budget", ["auto", bw.MaxTokens(60), bw.MaxItems(3), bw.MaxItems(1)])
def test_the_budget_changes_no_vector(budget):
    model, ids = make_model(), make_ids(20)
    for graphs in (False, TapeGraphs()):
        torch.testing.assert_close(encode(model, None, ids, budget=budget, graphs=graphs), encode(model, None, ids))


def test_texts_are_tokenized_cut_and_normalized():
    model, texts = make_model(), ["one", "another text", "x" * 30]
    found = encode(model, letters, texts, normalize=True, max_length=10)
    wanted = torch.stack([by_hand(model, letters(text)[:10]) for text in texts])
    torch.testing.assert_close(found, nn.functional.normalize(wanted, dim=-1), atol=2e-6, rtol=1e-5)


def test_a_model_in_training_mode_encodes_without_dropout_and_stays_in_it():
    model, ids = make_model(), make_ids(5)
    wanted = encode(model, None, ids)
    model.train()
    torch.testing.assert_close(encode(model, None, ids), wanted)
    assert all(part.training for part in model.modules())


def test_results_can_be_trained_on():
    vectors = encode(make_model(), None, make_ids(4))
    (vectors * torch.ones(16, requires_grad=True)).sum().backward()


def test_no_texts_give_no_vectors():
    assert encode(make_model(), None, []).shape == (0, 16)


def test_batches_are_made_of_similar_lengths():
    sizes, model = [], make_model()
    model.register_forward_pre_hook(
        lambda part, args, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    encode(model, None, [[3] * length for length in (1, 30, 2, 31, 1, 32)], budget=bw.MaxItems(3))
    assert sorted(size for size in sizes if size[0] > 1) == [(3, 2), (3, 32)]  # one text is tried with padding first


def make_convolving():
    """A BERT with convolutions, which see padding."""
    torch.manual_seed(0)
    config = transformers.ConvBertConfig(vocab_size=NUM_TOKENS, **_SIDES, embedding_size=16)
    return transformers.ConvBertModel(config).eval()


def make_mixing():
    """A model that mixes tokens by Fourier transforms, padding included."""
    torch.manual_seed(0)
    sides = {name: value for name, value in _SIDES.items() if name != "num_attention_heads"}
    return transformers.FNetModel(transformers.FNetConfig(vocab_size=NUM_TOKENS, **sides)).eval()


@pytest.mark.parametrize("graphs", [False, TapeGraphs])
@pytest.mark.parametrize("make", [make_convolving, make_mixing])
def test_models_that_see_padding_get_none(make, graphs):
    model, ids = make(), make_ids(25)
    found = encode(model, None, ids, graphs=graphs and graphs())
    wanted = torch.stack([by_hand(model, one) for one in ids])
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)
    with pytest.raises(ArgumentError, match="padding changes the vectors"):
        Encoder(model, None, max_length=32)
    with pytest.raises(ArgumentError, match="graphs=True cannot be followed: padding changes the vectors"):
        encode(model, None, ids, graphs=True)


def make_sparse():
    """A BigBird, which attends to some blocks of texts of more than 28 tokens, until it has read a shorter one."""
    torch.manual_seed(0)
    options = {**_SIDES, "max_position_embeddings": 64, "block_size": 4, "num_random_blocks": 1}
    model = transformers.BigBirdModel(transformers.BigBirdConfig(vocab_size=NUM_TOKENS, **options)).eval()
    assert model.attention_type == "block_sparse"
    return model


def test_attention_that_a_shorter_text_switches_off_is_refused_beyond_its_reach():
    ids = make_ids(20, longest=60)
    with pytest.raises(ArgumentError, match=r"beyond 28 the sparse attention of BigBirdModel .*set_attention_type"):
        encode(make_sparse(), None, ids)
    with pytest.raises(ArgumentError, match=r"or give max_length=28"):
        Encoder(make_sparse(), None)
    for model, chosen in ((make_sparse(), make_ids(20, longest=28)), (make_sparse(), ids)):
        if chosen is ids:
            model.set_attention_type("original_full")
        wanted = torch.stack([by_hand(model, one) for one in chosen])
        torch.testing.assert_close(encode(model, None, chosen), wanted, atol=2e-6, rtol=0)
    assert Encoder(make_sparse(), None, max_length=28).shapes[-1][1] == 28


class Rough(nn.Module):
    """Rounds in another way where rows have another width, and may see what the padding is."""

    def __init__(self, dtype, rounding=0.0, mixing=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(NUM_TOKENS, 8, dtype=dtype)
        self.rounding, self.mixing, self.widths = rounding, mixing, []

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, attention_mask):
        self.widths.append(input_ids.shape[1])
        hidden = self.table(input_ids) * (1 + self.rounding * (input_ids.shape[1] % 2))
        return (hidden + self.mixing * hidden.mean(1, keepdim=True),)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_what_kernels_round_is_not_taken_for_what_padding_changes(dtype):
    """A text of 8 tokens differs by 0.05 from the same with 5 of padding; 32 layers in bfloat16 did by up to 0.08."""
    model = Rough(dtype, rounding=0.05).eval()
    Encoder(model, None, max_length=32)
    model.widths.clear()
    encode(model, None, [[3] * 8, [4] * 9, [5] * 10])
    assert model.widths == [8, 13, 13, 10]  # alone, padded, with other padding, and all in one batch


@pytest.mark.parametrize(
    ("dtype", "effects"),
    [
        (torch.float32, {"rounding": 0.05}),
        (torch.bfloat16, {"rounding": 0.5}),
        (torch.bfloat16, {"mixing": 0.3}),
        (torch.float16, {"mixing": 2.0}),
    ],
    ids=str,
)
def test_what_rounding_does_not_explain_is_what_padding_changes(dtype, effects):
    model = Rough(dtype, **effects).eval()
    with pytest.raises(ArgumentError, match="padding changes the vectors"):
        Encoder(model, None, max_length=32)
    model.widths.clear()
    encode(model, None, [[3] * 8, [4] * 9, [5] * 10])
    assert model.widths[-3:] == [10, 9, 8]


def test_fields_that_say_nothing_are_left_out():
    model, ids = make_model(), make_ids(4)
    plain = [{"input_ids": one, "attention_mask": [1] * len(one), "token_type_ids": [0] * len(one)} for one in ids]
    torch.testing.assert_close(encode(model, None, plain), encode(model, None, ids))


class Small(nn.Module):
    """Runs out of memory with more tokens than fit."""

    def __init__(self, limit):
        super().__init__()
        self.table, self.limit, self.sizes = nn.Embedding(NUM_TOKENS, 4), limit, []

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, attention_mask):
        if input_ids.numel() > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.sizes.append(input_ids.numel())
        return (self.table(input_ids),)


def test_a_batch_that_does_not_fit_is_split():
    model, ids = Small(50), make_ids(20, longest=25)
    found = encode(model, None, ids)
    wanted = torch.stack([model.table.weight[one].mean(0) for one in ids]).detach()
    torch.testing.assert_close(found, wanted)
    assert max(model.sizes) <= 50


def test_a_text_that_does_not_fit_alone_is_named():
    with pytest.raises(DoesNotFitError, match="text 1 of 9 tokens"):
        encode(Small(8), None, [[3], [3] * 9, [4]])


def test_batches_grow_as_far_as_memory_allows():
    model, memory = Small(10**6), FakeMemory(100_000)
    encode(model, None, [[3] * 4] * 300, memory=MemoryMonitor(source=memory))
    assert max(model.sizes) > min(model.sizes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"texts": "one text"}, "got one text"),
        ({"texts": ["one"]}, "text 0: a text needs a tokenizer="),
        ({"texts": [[3], []]}, "text 1: an item has no tokens"),
        ({"texts": [[3], [NUM_TOKENS]]}, "text 1: token ids must be from 0 to 49"),
        ({"texts": [[3], [-1]]}, "text 1: token ids must be"),
        ({"texts": [[0.5]]}, "text 0: an item must be"),
        (
            {"texts": [{"input_ids": [3, 4], "attention_mask": [1, 0]}]},
            "text 0: an item has attention_mask other than 1",
        ),
        (
            {"texts": [{"input_ids": [3, 4], "token_type_ids": [0, 1]}]},
            "text 0: an item has token_type_ids other than 0",
        ),
        ({"texts": [{"input_ids": [3, 4], "position_ids": [5, 6]}]}, "text 0: an item has position_ids"),
        ({"texts": {"text": ["one"]}}, "got a dict with 'text'"),
        ({"texts": [{"text": "one"}]}, "text 0: an item has no input_ids, only \\['text'\\]"),
        ({"texts": [[3, 4], [5, 0]]}, "1 of 2 end with the padding token, 0, so they seem to be padded"),
        ({"texts": [[3] * 65]}, "more than max_length=64"),
        ({"max_length": 65}, "more than the 64 positions"),
        ({"max_length": 0}, "max_length"),
        ({"pool": "max"}, "pool"),
        ({"budget": "large"}, "budget"),
        ({"normalize": 1}, "normalize"),
        ({"tokenizer": 3}, "tokenizer must be"),
        ({"model": 3}, "model must be a torch module"),
    ],
)
def test_what_cannot_be_encoded_is_refused(change, text):
    given = {"model": make_model(), "tokenizer": None, "texts": [[3]], **change}
    with pytest.raises(ArgumentError, match=text):
        encode(given.pop("model"), given.pop("tokenizer"), given.pop("texts"), **given)


def test_a_frame_of_pandas_is_refused():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ArgumentError, match="got a DataFrame with 'text'"):
        encode(make_model(), None, pandas.DataFrame({"text": ["one"]}))


def test_ids_of_which_a_mask_says_that_all_count_may_end_with_a_padding_token():
    rows = [{"input_ids": ids, "attention_mask": [1, 1]} for ids in ([3, 4], [5, 0])]
    found = encode(make_model(), None, rows)
    expected = torch.stack([by_hand(make_model(), row["input_ids"]) for row in rows])
    torch.testing.assert_close(found, expected)


def test_a_model_that_takes_something_else_is_refused():
    """As a SentenceTransformer, whose forward takes a dict."""

    class Sentences(nn.Module):
        def forward(self, input, **kwargs):
            return input

    with pytest.raises(ArgumentError, match=r"needs input; a SentenceTransformer is .*sentence_transformers.encode"):
        encode(Sentences(), letters, ["one"])


def test_a_tokenizer_whose_tokens_are_of_several_kinds_is_refused():
    """That of XLNet puts the last token into a segment of its own, which changes the vector."""

    class Tokenizer(transformers.PreTrainedTokenizerBase):
        def __init__(self):
            pass

        def __deepcopy__(self, memo):
            return self

        def __call__(self, text, **options):
            ids = letters(text)
            return transformers.BatchEncoding({"input_ids": ids, "token_type_ids": [0] * (len(ids) - 1) + [2]})

    with pytest.raises(ArgumentError, match="token_type_ids other than 0"):
        encode(make_model(), Tokenizer(), ["one"], max_length=9)


def test_a_model_that_does_not_say_what_ids_it_knows_is_encoded():
    """As CANINE, which hashes code points."""

    class Hashing(type(make_model())):
        def get_input_embeddings(self):
            raise NotImplementedError

    model, rows = make_model(), make_ids(5)
    model.__class__ = Hashing
    torch.testing.assert_close(encode(model, None, rows), torch.stack([by_hand(model, row) for row in rows]))


def test_a_model_with_a_head_is_refused():
    head = transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=NUM_TOKENS, **MODELS["BertModel"][1])
    )
    with pytest.raises(ArgumentError, match="without a head"):
        encode(head, None, [[3, 4]])


# Encoder


def test_the_shapes_are_powers_of_two_up_to_the_limits():
    encoder = Encoder(make_model(), None, max_items=6, max_tokens=128)
    assert encoder.shapes == ((1, 16), (2, 16), (1, 32), (4, 16), (2, 32), (1, 64), (6, 16), (4, 32), (2, 64))


@settings(max_examples=30, deadline=None)
@example(2, 64, 32)  # the longest text alone has more tokens than a batch may
@given(st.integers(1, 70), st.integers(1, 600), st.integers(1, 5000))
def test_a_planned_shape_holds_every_batch_that_the_limits_allow(max_items, max_length, max_tokens):
    encoder = Encoder(Small(1).eval(), None, max_length=max_length, max_items=max_items, max_tokens=max_tokens)
    options = encoder.batcher_options
    for length in {1, max_length // 2 or 1, max_length}:
        padded = encoder.length_of([3] * length)
        most = max(1, min(options["max_items"], options["max_tokens"] // padded))
        assert any(rows >= most and width >= padded for rows, width in encoder.shapes)


def test_a_warm_up_captures_every_shape_and_serving_none():
    encoder = Encoder(make_model(), None, max_items=4, graphs=TapeGraphs())
    assert encoder.warm_up().num_captures == len(encoder.shapes) == 9
    ids = make_ids(40)
    with encoder.batcher() as batcher:
        found = np.stack(list(batcher.map(ids)))
    np.testing.assert_allclose(found, encode(make_model(), None, ids).numpy(), atol=2e-6)
    assert (encoder.summary().num_captures, encoder.summary().num_eager) == (9, 0)


def test_the_batcher_has_the_limits_of_the_shapes_and_knows_their_times():
    encoder = Encoder(make_model(), letters, max_items=4, max_tokens=64)
    with encoder.batcher(deadline_ms=5000, max_items=2) as batcher:
        assert (batcher.settings.max_items, batcher.settings.max_tokens) == (2, 64)
        assert batcher.time_model.is_ready
        assert batcher.submit_sync("a text").shape == (16,)


def test_texts_beyond_the_longest_shape_are_cut_and_ids_are_refused():
    encoder = Encoder(make_model(), letters, max_length=16, max_items=2)
    found = encoder(["x" * 40])[0]
    np.testing.assert_allclose(found, by_hand(make_model(), letters("x" * 16)), atol=2e-6)
    with pytest.raises(ArgumentError, match="more than max_length=16"):
        encoder.length_of([3] * 17)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": make_model().train()}, "training mode"),
        ({"shapes": [(1, 2, 3)]}, "pairs"),
        ({"shapes": []}, "pairs"),
        ({"max_items": 0}, "max_items"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": Small(9).eval()}, "give max_length="),
    ],
)
def test_wrong_options_of_an_encoder_are_refused(change, text):
    given = {"model": make_model(), **change}
    with pytest.raises(ArgumentError, match=text):
        Encoder(given.pop("model"), None, **given)


def test_what_comes_from_the_encoder_cannot_be_given_to_its_batcher():
    with pytest.raises(ArgumentError, match="length_of comes from the encoder"):
        Encoder(make_model(), None, max_items=1).batcher(length_of=len)


def test_a_shape_that_fits_no_memory_is_still_served():
    encoder = Encoder(make_model(), None, max_items=2, graphs=EagerGraphs(max_captures=3))
    ids = make_ids(12, longest=60)
    np.testing.assert_allclose(np.stack(encoder(ids[:2])), encode(make_model(), None, ids[:2]).numpy(), atol=2e-6)
    assert encoder.warm_up().num_captures == 3


# Positions that are others beyond some length


LONG = [3, 23, 24, 25, 30, 8, 31, 32, 40, 24, 60, 16, 20, 48]  # up to 24 tokens, and beyond


def make_long_ids():
    rng = np.random.default_rng(0)
    return [rng.integers(12, NUM_TOKENS, length).tolist() for length in LONG]


BACKENDS = [lambda: False, EagerGraphs, TapeGraphs]


@pytest.mark.parametrize("graphs", BACKENDS, ids=["eager", "plain", "replayed"])
def test_texts_on_both_sides_of_the_reach_of_long_positions_keep_their_vectors(graphs):
    model, ids = shapes.make_long().model, make_long_ids()
    found = encode(model, None, ids, graphs=graphs(), max_length=64)
    torch.testing.assert_close(found, torch.stack([by_hand(model, one) for one in ids]), atol=2e-6, rtol=0)


def test_learned_prefixes_count_for_the_reach_of_long_positions():
    torch.manual_seed(0)
    peft = pytest.importorskip("peft")
    config = peft.PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=3)
    model, ids = peft.get_peft_model(shapes.make_long().model, config).eval(), make_long_ids()
    found = encode(model, None, ids, graphs=False, max_length=60)
    torch.testing.assert_close(found, torch.stack([by_prefix(model, one) for one in ids]), atol=2e-6, rtol=0)


def by_prefix(model, ids):
    row = torch.tensor([ids])
    with torch.no_grad():
        return model(input_ids=row, attention_mask=torch.ones_like(row)).last_hidden_state[0].mean(0)


@pytest.mark.parametrize("graphs", BACKENDS, ids=["eager", "plain", "replayed"])
def test_requests_on_both_sides_of_the_reach_of_long_positions_keep_their_vectors(graphs):
    model, ids = shapes.make_long().model, make_long_ids()
    encoder = Encoder(model, None, graphs=graphs(), max_length=64, max_items=4)
    found = np.stack([vector for start in range(0, len(ids), 4) for vector in encoder(ids[start : start + 4])])
    wanted = torch.stack([by_hand(model, one) for one in ids]).numpy()
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    assert {length for _, length in encoder.shapes} == {16, 24, 32, 64}
    assert encoder.summary().num_eager == 0 or graphs() is False


@pytest.mark.parametrize("num", [16, 7])
@pytest.mark.filterwarnings("ignore:calls run eagerly, without graphs. rotary positions")
@pytest.mark.parametrize("graphs", BACKENDS, ids=["eager", "plain", "replayed"])
def test_a_text_that_another_one_had_changed_positions_for_keeps_its_vector(num, graphs):
    """Dynamic frequencies of a long text stay for the next one, of as many tokens as the model was trained for too."""
    model, ids = shapes.make_dynamic().model, [12 + place for place in range(num)]
    with torch.no_grad():
        model(input_ids=torch.tensor([[3] * 60]))
    (found,) = encode(model, None, [ids], graphs=graphs())
    torch.testing.assert_close(found, by_hand(shapes.make_dynamic().model, ids), atol=2e-6, rtol=0)


# Whatever happens to other requests, every answer is its own


class Fragile:
    """An encoder that refuses whole batches with a bad item, as a function that parses its items would."""

    def __init__(self, encoder):
        self._encoder = encoder

    def __call__(self, items):
        if any(item["kind"] == "poisoned" for item in items):
            raise ValueError("a poisoned item")
        return self._encoder(items)


async def ask(batcher, item, rng):
    """Return what became of a request: a vector, or the name of its end."""
    await asyncio.sleep(rng.uniform(0, 0.05))
    deadline = 0.001 if item["kind"] == "late" else None
    task = asyncio.ensure_future(batcher.submit(item, deadline_ms=deadline, priority=rng.integers(-3, 4)))
    if item["kind"] == "cancelled":
        await asyncio.sleep(rng.uniform(0, 0.01))
        task.cancel()
    try:
        return await task
    except (ValueError, DeadlineExceeded, asyncio.CancelledError) as error:
        return type(error).__name__


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def test_random_mixes_of_lengths_and_lost_items_get_their_own_answers(device):
    rng = np.random.default_rng(NUM_MIXED)
    model, ids = make_model(), make_ids(200, longest=64)
    wanted = torch.stack([by_hand(model, one) for one in ids]).numpy()
    encoder = Encoder(model.to(device), None, max_items=8, graphs=TapeGraphs() if device == "cpu" else True)
    encoder.warm_up()
    kinds = rng.choice(["good", "poisoned", "late", "cancelled"], NUM_MIXED, p=[0.8, 0.05, 0.05, 0.1])
    chosen = rng.integers(0, len(ids), NUM_MIXED)
    items = [{"input_ids": ids[place], "kind": str(kind)} for place, kind in zip(chosen, kinds, strict=True)]

    async def serve():
        run = Fragile(encoder)
        async with Batcher(run, length_of=encoder.length_of, max_queue=10**6, **encoder.batcher_options) as batcher:
            found = []
            for start in range(0, NUM_MIXED, 500):
                part = items[start : start + 500]
                found += await asyncio.gather(*(ask(batcher, item, rng) for item in part))
            return found

    found = asyncio.run(serve())
    allowed = {"good": set(), "poisoned": {"ValueError"}, "late": {"DeadlineExceeded"}, "cancelled": {"CancelledError"}}
    num_answered = 0
    for item, place, result in zip(items, chosen, found, strict=True):
        if isinstance(result, str):
            assert result in allowed[item["kind"]]
        else:
            assert item["kind"] != "poisoned"
            np.testing.assert_allclose(result, wanted[place], atol=2e-6 if device == "cpu" else 1e-5)
            num_answered += 1
    assert num_answered >= (kinds == "good").sum()
    assert encoder.summary().num_eager == 0


def test_an_encoder_whose_model_is_trained_meanwhile_refuses_requests():
    model = make_model()
    encoder = Encoder(model, None, max_length=32, max_items=4)
    [before] = encoder([[3, 4, 5]])
    model.train()
    with pytest.raises(ArgumentError, match="training mode"):
        encoder([[3, 4, 5]])
    model.eval()
    [after] = encoder([[3, 4, 5]])
    assert (before == after).all()
