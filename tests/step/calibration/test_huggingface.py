"""calibrate_huggingface: tiny models of several architectures, measured for real and put back to the bit."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step.calibration.huggingface import calibrate_huggingface
from batchwright.step.memory.monitor import MemoryMonitor
from batchwright.testing import FakeMemory

transformers = pytest.importorskip("transformers")

TEXTS = [(1, 4), (2, 4), (2, 8), (4, 8), (4, 16)]
PAIRS = [(1, 4, 2), (2, 4, 6), (2, 8, 4), (4, 8, 8), (4, 16, 8)]


def bert_config(**options):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertConfig(vocab_size=50, max_position_embeddings=32, **sizes, **options)


def llama():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def bart_classifier():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    more = {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32}
    return transformers.BartForSequenceClassification(transformers.BartConfig(vocab_size=50, **sizes, **more))


MODELS = {
    "seq2seq": (t5, PAIRS),
    "causal": (llama, TEXTS),
    "masked": (lambda: transformers.BertForMaskedLM(bert_config()), TEXTS),
    "sequence": (lambda: transformers.BertForSequenceClassification(bert_config(num_labels=3)), TEXTS),
    "regression": (lambda: transformers.BertForSequenceClassification(bert_config(num_labels=1)), TEXTS),
    "multi-label": (
        lambda: transformers.BertForSequenceClassification(
            bert_config(num_labels=3, problem_type="multi_label_classification")
        ),
        TEXTS,
    ),
    "token": (lambda: transformers.BertForTokenClassification(bert_config(num_labels=5)), TEXTS),
    "question": (lambda: transformers.BertForQuestionAnswering(bert_config()), TEXTS),
    "bare": (lambda: transformers.BertModel(bert_config()), TEXTS),
    "bart classifier": (bart_classifier, TEXTS),
}


def image(model, optimizer):
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "buffers": dict(model.named_buffers()),
            "gradients": [parameter.grad for parameter in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "modes": [module.training for module in model.modules()],
            "random": [torch.get_rng_state(), np.random.get_state()[1].tolist()],
        }
    )


@pytest.mark.parametrize(("make", "shapes"), MODELS.values(), ids=MODELS)
def test_every_architecture_is_measured_and_left_as_it_was(make, shapes):
    torch.manual_seed(0)
    model = make().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    model.register_forward_hook(lambda module, inputs, output: losses.append((module.training, output)))
    before = image(model, optimizer)
    found = calibrate_huggingface(model, shapes, optimizer=optimizer, repeats=1, progress=False)
    assert found.shapes == tuple(shapes)
    assert found.memory is None
    assert min(found.seconds) > 0
    torch.testing.assert_close(image(model, optimizer), before, rtol=0, atol=0)
    # A look at the logits aside, every forward pass was one of training.
    assert [is_training for is_training, _ in losses[-10:]] == [True] * 10


@pytest.mark.parametrize("name", ["seq2seq", "causal", "masked", "sequence", "token", "question", "bart classifier"])
def test_inputs_have_the_shape_asked_for_are_padded_and_avoid_special_tokens(name):
    make, shapes = MODELS[name]
    model, seen = make(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    calibrate_huggingface(model, shapes, repeats=1, progress=False)
    for shape, kwargs in zip(shapes, seen[-10::2], strict=True):  # each shape ran twice
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
        assert tuple(ids.shape) == tuple(mask.shape) == shape[:2]
        assert mask.sum(dim=1).tolist() == [shape[1]] + [shape[1] - 1] * (shape[0] - 1)
        special = {getattr(model.config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")}
        assert not set(ids[:, :-1].flatten().tolist()) & special
        assert ids.max() < 50
        if name == "seq2seq":
            assert tuple(kwargs["labels"].shape) == (shape[0], shape[2])


def test_the_loss_is_that_of_the_head():
    make, shapes = MODELS["sequence"]
    model, losses = make(), []
    model.register_forward_hook(lambda module, inputs, output: losses.append(output.loss))
    calibrate_huggingface(model, shapes, repeats=1, progress=False)
    # Untrained, three classes: about log 3 = 1.1 each.
    assert float(torch.stack(losses[-10:]).detach().mean()) == pytest.approx(1.1, abs=0.3)


def test_without_shapes_they_come_from_the_lengths():
    found = calibrate_huggingface(MODELS["token"][0](), lengths=[3, 9, 9, 20], repeats=1, progress=False)
    assert max(length for _, length in found.shapes) == 20
    assert max(num for num, _ in found.shapes) == 4
    assert len(found.shapes) >= 8


def test_without_shapes_and_lengths_they_stay_within_the_positions_of_the_model():
    found = calibrate_huggingface(MODELS["masked"][0](), repeats=1, progress=False)
    assert max(length for _, length in found.shapes) == 32


def test_where_memory_is_measured_shapes_go_on_to_its_limit():
    model = llama()
    memory = FakeMemory(50_000, used_bytes=10_000, bytes_of=lambda num, length: 100 * num * length)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: memory.run_batch(*kwargs["input_ids"].shape), with_kwargs=True
    )
    monitor = MemoryMonitor(source=memory)
    found = calibrate_huggingface(model, lengths=[4, 8, 16], repeats=1, progress=False, monitor=monitor)
    # Of 50,000 bytes 45,000 are used, 10,000 of them before: 350 tokens, 87 rows of 4.
    assert max(num * length for num, length in found.shapes) == 348
    assert found.memory.predict([[10, 10]]) == pytest.approx([20_000], rel=1e-6)


def test_autocast_reaches_the_forward_pass():
    model, seen = llama(), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    calibrate_huggingface(model, TEXTS, autocast=torch.bfloat16, repeats=1, progress=False)
    assert set(seen[-10:]) == {torch.bfloat16}


def test_shapes_of_the_wrong_number_of_lengths_are_refused():
    with pytest.raises(ArgumentError, match=r"shapes of T5\w+ are \(num_items, source, target\), got \(1, 4\)"):
        calibrate_huggingface(t5(), TEXTS)
    with pytest.raises(ArgumentError, match=r"shapes of Llama\w+ are \(num_items, length\), got \(1, 4, 2\)"):
        calibrate_huggingface(llama(), PAIRS)


def test_what_is_no_text_model_is_refused():
    with pytest.raises(ArgumentError, match="needs a transformers model of text, got Linear"):
        calibrate_huggingface(nn.Linear(1, 1), TEXTS)
    with pytest.raises(ArgumentError, match="BertForPreTraining has logits of an unknown form"):
        calibrate_huggingface(transformers.BertForPreTraining(bert_config()), TEXTS)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("name", ["seq2seq", "causal", "sequence"])
def test_on_the_device_memory_is_measured_up_to_its_limit_and_all_is_put_back(name):
    model = MODELS[name][0]().cuda().eval()
    calibrate_huggingface(model, MODELS[name][1])  # libraries keep a workspace from the first run on
    optimizer = torch.optim.AdamW(model.parameters())
    before = image(model, optimizer)
    held, random = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    most = held + 2**28
    lengths = [(4, 8), (8, 4), (16, 16), (30, 30)] if name == "seq2seq" else [4, 8, 16, 30]
    found = calibrate_huggingface(model, optimizer=optimizer, lengths=lengths, max_bytes=most)
    assert most / 3 < max(found.peak_bytes) < 1.1 * most
    assert max(map(abs, found.errors.memory)) < 0.15
    torch.testing.assert_close(image(model, optimizer), before, rtol=0, atol=0)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert torch.cuda.memory_allocated() == held
