"""Attention over flat batches: models give what they give on padded batches, or are refused with the reason."""

import copy
import inspect

import pytest
import torch
import transformers
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step import PackCollator, PadCollator, use_varlen, why_not_varlen
from batchwright.step.packing import _kernels, attention

from .models import ENCODERS, GROUPED, LENGTHS, MODELS, SMALL, by_softmax, gradient, make_examples, make_model

torch.set_num_threads(1)
needs_varlen = pytest.mark.skipif(_kernels.torch_varlen() is None, reason="this torch has no attention of flat batches")


def without_labels(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def both_layouts(name):
    """Return a flat and a padded batch of the same examples."""
    examples = make_examples(name)
    flat = PackCollator(layout="flat", causal=name not in ENCODERS)([examples[:2], examples[2:]])
    return flat, PadCollator()(examples)


def mean_loss(model, batch, *, shifts):
    """Return the mean over labels, taken from the logits by hand."""
    logits, labels = model(**without_labels(batch)).logits.double(), batch["labels"]
    if shifts:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("name", MODELS)
def test_a_flat_batch_gives_the_outputs_and_gradients_of_a_padded_one(name):
    model, padded = make_model(name), make_model(name)
    use_varlen(model, attend=by_softmax)
    flat, batch = both_layouts(name)
    found, expected = model(**without_labels(flat)).logits[0], padded(**without_labels(batch)).logits
    real = torch.cat([row[:length] for row, length in zip(expected, LENGTHS, strict=True)])
    torch.testing.assert_close(found, real, rtol=1e-6, atol=1e-6)
    shifts = name not in ENCODERS
    losses = [mean_loss(model, flat, shifts=shifts), mean_loss(padded, batch, shifts=shifts)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert gradient(padded).norm() > 0.1
    torch.testing.assert_close(gradient(model), gradient(padded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ("Llama", "BERT", "ModernBERT") if name in MODELS])
def test_our_own_attention_per_sequence_is_that_of_the_reference(name):
    flat, _ = both_layouts(name)
    found = []
    for attend in (by_softmax, _kernels.attend_plainly):
        model = make_model(name)
        use_varlen(model, attend=attend)
        found.append(model(**without_labels(flat)).logits)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_gradient_checkpointing_runs_the_layers_again_on_the_same_bounds():
    model, plain = make_model("Llama"), make_model("Llama")
    # transformers 5.23 renamed it
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    flat, _ = both_layouts("Llama")
    for each in (model, plain):
        use_varlen(each, attend=by_softmax)
        loss = mean_loss(each, flat, shifts=True)
        each(input_ids=torch.tensor([[5, 6]]), attention_mask=torch.tensor([[1, 0]]))  # a padded batch in between
        loss.backward()
    torch.testing.assert_close(gradient(model), gradient(plain))


def test_no_mask_of_all_pairs_is_made(monkeypatch):
    model = make_model("Llama")
    use_varlen(model, attend=by_softmax)
    masks = transformers.AttentionMaskInterface._global_mapping

    def refuse(*args, **kwargs):
        raise AssertionError("a mask was made")

    monkeypatch.setitem(masks, model.config._attn_implementation, refuse)
    flat, batch = both_layouts("Llama")
    model(**flat)
    with pytest.raises(AssertionError, match="a mask was made"):
        model(**batch)


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_padded_batches_rows_of_positions_and_generation_run_as_before(name):
    model, plain = make_model(name).eval(), make_model(name).eval()
    use_varlen(model, attend=by_softmax)
    _, batch = both_layouts(name)
    batches = [without_labels(batch)]
    if name == "Llama":
        batches.append(without_labels(PackCollator()([make_examples(name)])))
        prompt = {"input_ids": batch["input_ids"][:1, :4], "max_new_tokens": 4, "do_sample": False}
        assert model.generate(**prompt).tolist() == plain.generate(**prompt).tolist()
    for inputs in batches:
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)


def test_the_handle_gives_the_model_its_own_attention_back():
    model = make_model("Llama")
    handle = use_varlen(model, attend=by_softmax)
    assert model.config._attn_implementation.startswith(attention.NAME)
    handle.remove()
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
    assert not model.model._forward_pre_hooks


def test_trying_a_model_out_leaves_no_trace():
    model = make_model("BERT", hidden_dropout_prob=0.5)
    model.bert.encoder.layer[0].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    use_varlen(model, attend=by_softmax).remove()
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert gradient(model).abs().sum() == 0


# PEFT 0.21 asks models by a name that transformers 5.23 warns of.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_looked_through():
    peft = pytest.importorskip("peft", reason="peft is not installed; it is in the group dev")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
    flat, batch = both_layouts("Llama")
    losses = []
    for layout in (flat, batch):
        model = peft.get_peft_model(make_model("Llama"), config)
        if layout is flat:
            use_varlen(model, attend=by_softmax)
        losses.append(mean_loss(model, layout, shifts=True).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# What is refused


class DropsBounds(transformers.BertForMaskedLM):
    """Keeps the bounds of a batch to itself, as older models do."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)


class MixesTokens(transformers.LlamaForCausalLM):
    """Lets every token see the one before it, whatever sequence that belongs to."""

    def forward(self, input_ids=None, **kwargs):
        outputs = super().forward(input_ids=input_ids, **kwargs)
        outputs.logits = outputs.logits + outputs.logits.roll(1, dims=1)
        return outputs


class HidesDropout(transformers.LlamaForCausalLM):
    """Has a dropout of attention that no configuration tells of."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.attention_dropout = 0.25


def of(model, config, **options):
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**options))


QUIET = {**SMALL, "attention_probs_dropout_prob": 0.0}
REFUSED = {
    "no model": (lambda: nn.Linear(2, 2), "Linear is no model of transformers"),
    "two sequences": (
        of("T5ForConditionalGeneration", "T5Config", vocab_size=60, d_model=16, d_kv=4, d_ff=16, num_layers=1,
           num_heads=4),
        "attention between two sequences, encoder and decoder",
    ),
    "fixed": (of("BloomForCausalLM", "BloomConfig", vocab_size=60, hidden_size=32, n_layer=1, n_head=4),
              "BloomForCausalLM does not let its attention be replaced"),
    "eager": (of("LlamaForCausalLM", "LlamaConfig", **GROUPED, attn_implementation="eager"),
              "asks for attn_implementation='eager'; leave it at 'sdpa'"),
    "dropout": (of("BertForMaskedLM", "BertConfig", **SMALL), "the model has attention_probs_dropout_prob=0.1; set it"),
    "softcap": (of("LlamaForCausalLM", "LlamaConfig", **GROUPED, attn_logit_softcapping=30.0),
                "the model has attn_logit_softcapping"),
    "ALiBi": (of("LlamaForCausalLM", "LlamaConfig", **GROUPED, alibi=True), "the model has ALiBi"),
    "chunks": (of("LlamaForCausalLM", "LlamaConfig", **GROUPED, layer_types=["full_attention", "chunked_attention"]),
               "layers of the kind 'chunked_attention'"),
    "large heads": (of("LlamaForCausalLM", "LlamaConfig", **GROUPED, head_dim=288),
                    "heads have at most 256 numbers, and those of the model have 288"),
    "meta": (lambda: make_model("Llama").to("meta"), "its weights are not loaded yet"),
    "positions": (of("RobertaForMaskedLM", "RobertaConfig", **QUIET),
                  "off those of the sequences apart; positions may begin at another number than 0"),
    "no token": (of("BertForSequenceClassification", "BertConfig", **QUIET), "its output logits has no row per token"),
    "drops bounds": (lambda: DropsBounds(transformers.BertConfig(**QUIET)), "gets no cu_seq_lens_q"),
    "mixes tokens": (lambda: MixesTokens(transformers.LlamaConfig(**GROUPED)), "change with the tokens of another one"),
    "hides dropout": (lambda: HidesDropout(transformers.LlamaConfig(**GROUPED)), "has dropout 0.25 of attention"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_run_is_refused_with_the_reason_and_left_as_it_was(case):
    make, message = REFUSED[case]
    model = make()
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(ArgumentError, match=rf"cannot train on flat batches: .*{message}.*train on padded batches"):
        use_varlen(model, attend=by_softmax)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before
    assert not model._forward_pre_hooks


@needs_varlen
@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", torch.bfloat16, "it runs on CUDA only, not on cpu"),
        ("cuda", torch.float32, "it computes in float16 or bfloat16, not in float32; train with bf16=True"),
        ("mps", torch.float16, "it runs on CUDA only, not on mps"),
    ],
)
def test_torch_s_own_attention_has_limits_of_its_own(device, dtype, message):
    assert why_not_varlen(make_model("Llama"), device, dtype).startswith(message)


@needs_varlen
def test_a_model_on_a_cpu_is_refused_where_torch_s_attention_is_asked_for():
    with pytest.raises(ArgumentError, match="it runs on CUDA only, not on cpu"):
        use_varlen(make_model("Llama"), dtype=torch.bfloat16)


@needs_varlen
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_nothing_speaks_against_these_models_in_half_precision(name, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_not_varlen(make_model(name), "cuda", dtype) is None


def test_a_mask_beside_the_bounds_is_refused():
    model = make_model("Llama")
    use_varlen(model, attend=by_softmax)
    flat, _ = both_layouts("Llama")
    with pytest.raises(ArgumentError, match="cu_seq_lens_q and an attention_mask, which say different things"):
        model(**flat, attention_mask=torch.ones_like(flat["input_ids"]))


def call(**changes):
    """Call the attention function as a layer of a model does, on two heads of two sequences."""
    given = {"query": torch.ones(1, 2, 5, 4), "key": torch.ones(1, 2, 5, 4), "value": torch.ones(1, 2, 5, 4)}
    bounds = torch.tensor([0, 2, 5])
    given |= {"attention_mask": None, "cu_seq_lens_q": bounds, "max_length_q": 3, **changes}
    return _kernels.attention(by_softmax, nn.Linear(1, 1), **given)[0]


def test_the_longest_sequence_and_the_scale_need_not_be_given():
    assert call(max_length_q=None, scaling=None).shape == (1, 5, 2, 4)
    torch.testing.assert_close(call(scaling=0.5), torch.ones(1, 5, 2, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 0.1}, "has dropout 0.1 of attention"),
        ({"softcap": 30.0}, "asks for softcap"),
        ({"s_aux": torch.zeros(2)}, "asks for s_aux"),
        ({"position_bias": torch.zeros(1)}, "asks for position_bias"),
        ({"attention_mask": torch.zeros(1, 2, 1, 5)}, r"adds a mask or bias of shape \(1, 2, 1, 5\)"),
        ({"query": torch.ones(2, 2, 5, 4)}, "gets 2 rows, but a flat batch is a single one"),
        ({"query": torch.ones(1, 2, 3, 4)}, "lets 3 tokens look at 5"),
        ({"value": torch.ones(1, 2, 5, 3)}, "has values of size 3 and queries of 4"),
    ],
    ids=["dropout", "softcap", "sinks", "bias", "alibi", "rows", "cross", "sizes"],
)
def test_what_attention_over_sequences_does_not_compute_is_refused(changes, message):
    with pytest.raises(ArgumentError, match=f"Linear {message}.*; train on padded batches"):
        call(**changes)


# torch's function, by its signatures


def recorded(monkeypatch, *names):
    """Put a function with these options in place of torch's, and return what it is called with."""
    calls = []

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
        calls.append({**options, "bounds": (cu_seq_q.tolist(), cu_seq_k.tolist()), "longest": (max_q, max_k)})
        return query

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    varlen_attn.__signature__ = inspect.Signature(kinds)
    monkeypatch.setattr(_kernels, "torch_varlen", lambda: varlen_attn)
    _kernels._names.cache_clear()
    return calls


@pytest.fixture(autouse=True)
def _forget_signatures():
    yield
    _kernels._names.cache_clear()


def attend(num_key_heads=2, **options):
    query, key = torch.ones(5, 2, 4), torch.ones(5, num_key_heads, 4)
    given = {"scale": 0.5, "is_causal": True, "window": None, **options}
    _kernels.attend_on_cuda(query, key, key, torch.tensor([0, 2, 5], dtype=torch.int32), 3, **given)


def test_the_newest_signature_gets_windows_and_grouped_heads(monkeypatch):
    calls = recorded(monkeypatch, "scale", "window_size", "enable_gqa")
    attend()
    attend(num_key_heads=1, is_causal=False)
    attend(window=(3, 0))
    assert [(call["window_size"], call["enable_gqa"]) for call in calls] == [
        ((-1, 0), False), ((-1, -1), True), ((3, 0), False),
    ]  # fmt: skip
    assert all(call["bounds"] == ([0, 2, 5], [0, 2, 5]) and call["longest"] == (3, 3) for call in calls)
    assert all(call["scale"] == 0.5 for call in calls)


def test_an_older_signature_gets_a_flag_and_grouped_heads_as_they_are(monkeypatch):
    calls = recorded(monkeypatch, "scale", "is_causal")
    attend(num_key_heads=1)
    attend(is_causal=False)
    assert [call["is_causal"] for call in calls] == [True, False]
    assert not any("enable_gqa" in call or "window_size" in call for call in calls)


def test_windows_are_refused_where_torch_has_none(monkeypatch):
    calls = recorded(monkeypatch, "scale", "is_causal")
    monkeypatch.setattr(attention, "torch_varlen", lambda: calls.append)
    reason = why_not_varlen(make_model("Mistral"), "cuda", torch.bfloat16)
    assert reason.endswith("has no windows in varlen_attn, and the model has sliding_window")
    assert why_not_varlen(make_model("Llama"), "cpu", torch.bfloat16).startswith("it runs on CUDA only")
    use_varlen(make_model("Mistral"), attend=by_softmax)  # which has windows, whatever torch has


def test_a_torch_without_the_function_is_named(monkeypatch):
    monkeypatch.setattr(attention, "torch_varlen", lambda: None)
    reason = why_not_varlen(make_model("Llama"), "cuda", torch.bfloat16)
    assert reason == f"torch {torch.__version__} has no torch.nn.attention.varlen that takes a scale; 2.11 has"


def test_the_installed_function_has_a_signature_that_is_known():
    varlen = _kernels.torch_varlen()
    if varlen is None:
        pytest.skip(f"torch {torch.__version__} has no torch.nn.attention.varlen that takes a scale")
    assert _kernels._names() & {"window_size", "is_causal"}


# On a GPU


@pytest.mark.needs_cuda
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("Qwen2", "Gemma 3", "BERT of tokens")])
@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16 weights", "autocast"])
def test_torch_s_attention_gives_the_losses_of_padded_training(name, autocast):
    """Losses per token, in bfloat16, on heads of 64 numbers and sequences of up to 300 tokens."""
    sizes = {"max_position_embeddings": 512, "hidden_size": 256, "intermediate_size": 512}
    sizes = {"n_embd": 256, "n_positions": 512} if name == "GPT-2" else sizes
    padded = make_model(name, **sizes).cuda()
    padded = padded if autocast else padded.bfloat16()
    model = copy.deepcopy(padded)
    use_varlen(model, dtype=torch.bfloat16)
    examples = make_examples(name, [300, 17, 1, 64, 129, 3])
    flat = PackCollator(layout="flat", causal=name not in ENCODERS)([examples])
    losses = []
    for each, batch in ((model, flat), (padded, PadCollator()(examples))):
        on_gpu = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            losses.append(mean_loss(each, on_gpu, shifts=name not in ENCODERS))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-3)
    difference = (gradient(model) - gradient(padded)).float().norm() / gradient(padded).float().norm()
    assert float(difference) < 0.05
