"""Packed rows are right or refused: examples of a row give what they give alone, in every layout."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.optim import SGD

from batchwright.errors import ArgumentError
from batchwright.step import PackCollator, PadCollator, Stepper, huggingface_loss, use_varlen, why_not_packed
from batchwright.step.packing._kernels import attend_plainly
from batchwright.step.packing.probing import noting_half

from .models import ENCODERS, GROUPED, SMALL, gradient, make_examples, make_model

torch.set_num_threads(1)

LENGTHS = [5, 13, 3, 4, 9, 7]
LAYOUTS = {
    "positions": {},
    "flat": {"layout": "flat"},
    "block": {"layout": "block"},
    "added mask": {"layout": "block", "mask_dtype": torch.float32},
}
_OLD = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
_QUIET = {name: 0.0 for name in ("attn_pdrop", "resid_pdrop", "embd_pdrop")}
OTHERS = {
    "OPT": (
        "OPTForCausalLM", "OPTConfig",
        {"vocab_size": 60, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "Falcon": (
        "FalconForCausalLM", "FalconConfig",
        {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "GPT-J": ("GPTJForCausalLM", "GPTJConfig", {**_OLD, **_QUIET}),
    "MPT": ("MptForCausalLM", "MptConfig", {"vocab_size": 60, "d_model": 32, "n_heads": 4, "n_layers": 2}),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "Llama 4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {**GROUPED, "intermediate_size_mlp": 48, "num_local_experts": 2, "head_dim": 8, "attention_chunk_size": 8},
    ),
    "RoBERTa": (
        "RobertaForMaskedLM", "RobertaConfig",
        {**SMALL, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    ),
}  # fmt: skip

SEES, WINDOW = "change with the tokens of another one in the same row", "which the mask of layout='block' would replace"
CHUNK, OFF = "chunks are counted from the start of a row", "off those of the sequences apart"
# What layouts are refused with; those that are not named give the exact gradient.
REFUSED = {
    "Llama": {},
    "GPT-2": {},
    "Qwen2": {},
    "Mistral": {"block": WINDOW, "added mask": WINDOW},
    "Gemma 2": {"block": WINDOW, "added mask": WINDOW},
    "Gemma 3": {"block": WINDOW, "added mask": WINDOW},
    "OPT": {"positions": SEES, "flat": SEES},
    "Falcon": {"positions": SEES, "flat": SEES},
    "GPT-J": {"block": SEES},
    "MPT": {"positions": SEES, "flat": SEES, "block": SEES},
    "Llama 4": dict.fromkeys(LAYOUTS, CHUNK),
    "BERT": {"flat": SEES},
    "RoBERTa": {"flat": SEES, "block": OFF, "added mask": OFF},
}


def make(name):
    """Return a model in which what a token sees matters much."""
    if name in OTHERS:
        model, config, options = OTHERS[name]
        special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
        torch.manual_seed(0)
        found = getattr(transformers, model)(getattr(transformers, config)(**special, **options))
    else:
        found = make_model(name)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return found.eval()


def is_encoder(name):
    return name in ENCODERS or name == "RoBERTa"


def examples_of(name):
    return make_examples("BERT" if is_encoder(name) else name, LENGTHS)


def rows_of(name, layout):
    examples = examples_of(name)
    collator = PackCollator(causal=not is_encoder(name), **LAYOUTS[layout])
    return collator([examples[:3], examples[3:]])


def one_by_one(name):
    """Return the gradient of the mean over all labels, each example in a batch of its own, by hand."""
    model, total, num = make(name), torch.zeros(()), 0
    for example in examples_of(name):
        logits = model(input_ids=torch.tensor([example["input_ids"]])).logits[0]
        labels = torch.tensor(example["labels"])
        logits, labels = (logits, labels) if is_encoder(name) else (logits[:-1], labels[1:])
        total = total + F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        num += int((labels != -100).sum())
    (total / num).backward()
    return gradient(model), float(total.detach()) / num


def step(model, batch):
    stepper = Stepper(model, SGD(model.parameters(), lr=0.0), huggingface_loss())
    stepper.accumulate(batch)
    stepper.reduce()
    return gradient(model), stepper.update()


@pytest.mark.parametrize("name", REFUSED)
def test_every_layout_gives_the_gradient_of_examples_one_by_one_or_is_refused(name):
    expected, loss = one_by_one(name)
    for layout in LAYOUTS:
        if layout == "positions" and is_encoder(name):
            continue  # no such collator
        if layout in REFUSED[name]:
            with pytest.raises(ArgumentError, match=REFUSED[name][layout]):
                step(make(name), rows_of(name, layout))
            continue
        found, report = step(make(name), rows_of(name, layout))
        assert (found - expected).norm() < 2e-6 * expected.norm(), layout
        assert report.loss == pytest.approx(loss, rel=1e-6)


def test_rows_of_one_example_each_need_no_look_and_packed_ones_after_them_do():
    loss, examples = huggingface_loss(), make_examples("Llama", [6, 4, 5])
    model, pack = make("OPT"), PackCollator()
    loss(model, pack([[examples[0]]]))
    with pytest.raises(ArgumentError, match=rf"OPTForCausalLM cannot train on rows of Pack.*positions.*{SEES}"):
        loss(model, pack([examples]))


def test_a_mask_that_is_not_the_collators_is_the_users_own():
    model, batch = make("Mistral"), rows_of("Mistral", "block")
    width = batch["input_ids"].shape[1]
    window = torch.ones(width, width).tril().triu(-3).bool()  # a token sees itself and three before it
    batch["attention_mask"] = batch["attention_mask"] & window
    found, _ = step(model, batch)
    assert (found - one_by_one("Mistral")[0]).norm() < 2e-6 * found.norm()


def test_a_model_is_left_as_it_was():
    model = make("OPT").train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert SEES in why_not_packed(model, PackCollator())
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


# In half precision


def make_wide(cls=transformers.LlamaForCausalLM):
    """Return a model whose losses in bfloat16 differ by more than 1e-4 between rows of different lengths."""
    torch.manual_seed(0)
    options = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    return cls(transformers.LlamaConfig(**{**GROUPED, **options, "max_position_embeddings": 128}))


def flat_batch(lengths):
    generator = torch.Generator().manual_seed(2)
    rows = [{"input_ids": torch.randint(3, 2000, (length,), generator=generator).tolist()} for length in lengths]
    return PackCollator(layout="flat")([rows])


def in_half(how, model):
    """Return a model and the context that make it compute in bfloat16."""
    if how == "weights":
        return model.bfloat16(), torch.autocast("cpu", enabled=False)
    return model, torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("how", ["weights", "autocast"])
@pytest.mark.parametrize("is_prepared", [False, True], ids=["sdpa", "varlen"])
def test_flat_batches_in_bfloat16_are_read_as_those_in_float32(how, is_prepared):
    batch = flat_batch([40, 31, 57, 22, 64])
    expected, weight = huggingface_loss()(make_wide(), batch)
    model, context = in_half(how, make_wide())
    if is_prepared:
        use_varlen(model, attend=attend_plainly)
    with context:
        found, num = huggingface_loss()(model, batch)
    assert int(num) == int(weight) == 40 + 31 + 57 + 22 + 64 - 5
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=2e-3)


class _Miscounting(transformers.LlamaForCausalLM):
    """Divides the sum by another number than that of its labels."""

    def forward(self, *args, labels=None, **kwargs):
        kwargs.pop("num_items_in_batch", None)
        outputs = super().forward(*args, **kwargs)
        targets = labels[:, 1:].flatten()
        total = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), targets, reduction="sum")
        outputs.loss = total / self.divisor((targets != -100).sum())
        return outputs


class OneMore(_Miscounting):
    """Counts one label too many."""

    @staticmethod
    def divisor(num):
        return num + 1


class SquareRoot(_Miscounting):
    """Divides by the square root of the number."""

    @staticmethod
    def divisor(num):
        return num**0.5


class SumsOneMore(transformers.LlamaForCausalLM):
    """Is a right sum for num_items_in_batch=1, and without the number a mean over one label too many."""

    def forward(self, *args, labels=None, num_items_in_batch=None, **kwargs):
        outputs = super().forward(*args, labels=labels, num_items_in_batch=1, **kwargs)
        num = (labels[:, 1:] != -100).sum() + 1 if num_items_in_batch is None else num_items_in_batch
        outputs.loss = outputs.loss / num
        return outputs


@pytest.mark.parametrize("how", ["weights", "autocast"])
@pytest.mark.parametrize("cls", [OneMore, SquareRoot, SumsOneMore])
@pytest.mark.parametrize("lengths", [[4, 5], [40, 31, 57]], ids=["few labels", "many labels"])
def test_a_wrong_count_is_refused_in_bfloat16_too(how, cls, lengths):
    model, context = in_half(how, make_wide(cls))
    with context, pytest.raises(ArgumentError, match=f"the loss of {cls.__name__} is not a mean over its labels"):
        huggingface_loss()(model, flat_batch(lengths))


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_sequences_that_see_each_other_are_refused_in_bfloat16_too(how):
    model, context = in_half(how, make_wide())
    batch = {name: value for name, value in flat_batch([20, 30]).items() if name != "use_cache"}
    with context, pytest.raises(ArgumentError, match=SEES):
        huggingface_loss()(model, batch)


@pytest.mark.parametrize("how", ["weights", "autocast", "not at all"])
def test_half_precision_is_noticed_where_it_is_used(how):
    model = make_model("Llama")
    ids = torch.tensor([[3, 4, 5]])
    if how == "weights":
        model.bfloat16()
    with noting_half(model) as found, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        model(input_ids=ids)
    assert bool(found) == (how != "not at all")


@pytest.mark.needs_cuda
@pytest.mark.parametrize("how", ["weights", "autocast"])
@pytest.mark.parametrize("is_prepared", [False, True], ids=["sdpa", "varlen"])
def test_a_billion_parameters_in_bfloat16_are_read_on_flat_batches(how, is_prepared):
    """Sums of two sequences differ by 5e-4 between rows of different lengths."""
    torch.manual_seed(0)
    shape = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads))
    model = model.bfloat16() if how == "weights" else model
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(20, 700, (24,), generator=generator).tolist()
    examples = [{"input_ids": torch.randint(3, 32000, (num,), generator=generator).tolist()} for num in lengths]
    for example in examples:
        example["labels"] = example["input_ids"]
    sums = []
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
        for collate in (lambda rows: PadCollator()(rows), lambda rows: PackCollator(layout="flat")([rows])):
            batch = {
                name: value.cuda() if torch.is_tensor(value) else value for name, value in collate(examples).items()
            }
            is_slow = "cu_seq_lens_q" in batch and not is_prepared
            with pytest.warns(UserWarning, match="slower than padded batches") if is_slow else nullcontext():
                loss_sum, num = huggingface_loss()(model, batch)
            assert int(num) == sum(lengths) - len(lengths)
            sums.append(float(loss_sum))
            if is_prepared:
                use_varlen(model, dtype=torch.bfloat16)
    assert sums[1] == pytest.approx(sums[0], rel=1e-3)
