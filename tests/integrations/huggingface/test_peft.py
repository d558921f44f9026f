"""PEFT's adapters under the Trainer and under SFTTrainer: exact updates of what is trained, and nothing else."""

import pytest
import torch

import batchwright as bw
from batchwright.errors import ArgumentError

from ..dynabatch.models import MODELS, make_model
from ..dynabatch.trainer.training import flat_gradient
from .trainers import collate, flat, flat_parameters, make_trainer, relative_error

peft = pytest.importorskip("peft", reason="peft is not installed; it is in the group dev")

# PEFT 0.21 asks models by a name that transformers 5.23 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

TARGETS = {"llama": ["q_proj", "v_proj"], "t5": ["q", "v"]}


def with_lora(name):
    kind = {"llama": peft.TaskType.CAUSAL_LM, "t5": peft.TaskType.SEQ_2_SEQ_LM}[name]
    config = peft.LoraConfig(
        task_type=kind, r=2, target_modules=TARGETS[name], init_lora_weights="gaussian", lora_dropout=0.0
    )
    base = make_model(name)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, config).double()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:  # zeros at first, under which half of the gradient is zero
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def by_hand(name, examples):
    """Return the gradient of the mean over labels, from the logits of one example at a time."""
    model, total, num = with_lora(name).train(), 0.0, 0
    for example in examples:
        batch = collate([example])
        logits, labels = model(**batch).logits, batch["labels"]
        if MODELS[name][3]:
            logits, labels = logits[:, :-1], labels[:, 1:]
        total = total + torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        num += labels.numel()
    (total / num).backward()
    return flat_gradient(model)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("how", ["planned", "out of memory"])
def test_adapters_get_the_exact_gradient(name, how, tmp_path):
    model = with_lora(name)
    if how == "out of memory":

        def fail(module, args, kwargs):
            if len(kwargs["input_ids"]) > 2:
                raise torch.OutOfMemoryError("out of memory")

        model.register_forward_pre_hook(fail, with_kwargs=True)
    options = {"model": model, "budget": bw.MaxTokens(80), "gradient_accumulation_steps": 2}
    trainer, seen, gradients = make_trainer(name, tmp_path, **options)
    trainer.train()
    updates = [flat(seen[start : start + 2]) for start in range(0, len(seen), 2)]
    assert len(gradients.seen) == len(updates) > 1
    for found, numbers in zip(gradients.seen, updates, strict=True):
        expected = by_hand(name, [trainer.train_dataset[number] for number in numbers])
        assert relative_error(found, expected) < 1e-6
    assert sorted(flat(seen)) == list(range(24))
    assert (trainer.state.log_history[0]["ooms"] > 0) == (how == "out of memory")


def test_a_run_that_stops_within_an_epoch_continues_with_the_same_adapter(tmp_path):
    options = {"budget": bw.MaxTokens(80), "learning_rate": 0.1, "num_train_epochs": 2, "optim": "adamw_torch"}
    whole, expected, _ = make_trainer(
        "llama", tmp_path, model=with_lora("llama"), save_strategy="steps", save_steps=2, **options
    )
    whole.train()
    second, seen, _ = make_trainer("llama", tmp_path, model=with_lora("llama"), **options)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert seen == expected[2:]
    assert torch.equal(flat_parameters(second.model), flat_parameters(whole.model))
    assert not torch.equal(flat_parameters(whole.model), flat_parameters(with_lora("llama")))


def test_a_frozen_base_is_not_touched(tmp_path):
    trainer, *_ = make_trainer("llama", tmp_path, model=with_lora("llama"), budget=bw.MaxTokens(80), learning_rate=0.1)
    trainer.train()
    before, after = with_lora("llama").state_dict(), trainer.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_without_a_trained_parameter_an_update_is_refused(tmp_path):
    model = with_lora("llama")
    model.requires_grad_(False)
    with pytest.raises((ArgumentError, ValueError), match=r"no parameter is trained|empty parameter list"):
        make_trainer("llama", tmp_path, model=model, budget=bw.MaxTokens(80))[0].train()
