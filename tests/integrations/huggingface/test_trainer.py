"""The class that ``adaptive`` makes, and what it takes over from its trainer."""

import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer

from batchwright.errors import ArgumentError
from batchwright.integrations import huggingface
from batchwright.integrations.huggingface import AdaptiveTrainerMixin, adaptive

from .trainers import check, flat_parameters, make_controller, make_trainer, numbered, windows


def test_the_class_is_made_once_and_named_after_its_trainer():
    made = adaptive(Seq2SeqTrainer)
    assert made is adaptive(Seq2SeqTrainer)
    assert adaptive(made) is made
    assert made.__name__ == "AdaptiveSeq2SeqTrainer"
    assert issubclass(made, AdaptiveTrainerMixin)
    assert issubclass(made, Seq2SeqTrainer)
    with pytest.raises(ArgumentError, match="takes a transformers Trainer class"):
        adaptive(dict)
    with pytest.raises(ArgumentError, match=r"got an object of type object; write adaptive\(Trainer\)\(model=…\)"):
        adaptive(object())


def test_the_mixin_can_be_inherited_from_and_losses_of_ones_own_are_weighed(tmp_path):
    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    trainer, seen, gradients = make_trainer("llama", tmp_path, trainer_cls=OwnLoss, gradient_accumulation_steps=2)
    trainer.train()
    check("llama", trainer, gradients, windows(seen, 2))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")  # of transformers 5.3 itself
class Passing(Trainer):
    """Overrides what the adaptive class reads arguments of, in the ways that classes of users do."""

    def _inner_training_loop(self, *args, **kwargs):
        return super()._inner_training_loop(*args, **kwargs)

    def _run_epoch(self, **kwargs):
        return super()._run_epoch(**kwargs)

    def get_batch_samples(self, batches, num, where):
        return super().get_batch_samples(batches, num, where)


def test_a_trainer_class_may_pass_arguments_on_as_it_likes(tmp_path):
    trainer, seen, gradients = make_trainer(
        "llama", tmp_path, trainer_cls=Passing, gradient_accumulation_steps=2, save_strategy="steps", save_steps=2
    )
    trainer.train()
    check("llama", trainer, gradients, windows(seen, 2))
    whole = flat_parameters(trainer.model)
    trainer, *_ = make_trainer("llama", tmp_path, trainer_cls=Passing, gradient_accumulation_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(flat_parameters(trainer.model), whole)


def test_the_trainer_counts_the_tokens_of_all_micro_batches(tmp_path):
    options = {"controller": make_controller(12), "include_num_input_tokens_seen": "non_padding"}
    trainer, *_ = make_trainer("t5", tmp_path, **options)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == sum(len(e["input_ids"]) for e in trainer.train_dataset)
    assert trainer.state.total_flos > 0


def test_a_trainer_goes_as_soon_as_nobody_holds_it(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, eval_strategy="epoch", eval_dataset=numbered(5))
    trainer.train()
    reference = weakref.ref(trainer)
    del trainer
    assert reference() is None  # garbage need not be collected: worker processes end at once


def test_what_a_trainer_keeps_can_be_copied_into_another_process(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, eval_dataset=numbered(5))
    trainer.evaluate()
    copied = pickle.loads(pickle.dumps(trainer._batching))  # as a search of hyperparameters with Ray does
    callbacks = trainer.callback_handler.callbacks
    callbacks[callbacks.index(trainer._batching.callback)] = copied.callback
    loss, trainer._batching = trainer.evaluate()["eval_loss"], copied
    assert trainer.evaluate()["eval_loss"] == loss
    trainer.train()
    assert trainer.state.epoch == 1


def test_seq2seq_trainers_train_too(tmp_path):
    trainer, seen, gradients = make_trainer("t5", tmp_path, trainer_cls=Seq2SeqTrainer)
    trainer.train()
    check("t5", trainer, gradients, windows(seen, 1))


def test_without_transformers_the_extra_is_named():
    code = "import sys; sys.modules['transformers'] = None; import batchwright.integrations.huggingface"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "transformers is not installed; run: pip install 'batchwright[hf]'" in found.stderr


def test_public_names():
    assert huggingface.__all__ == sorted(huggingface.__all__)


def test_the_mixin_keeps_two_attributes_of_its_own(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, eval_dataset=numbered(5))
    plain = Trainer(trainer.model, trainer.args, trainer.data_collator, trainer.train_dataset)
    assert set(vars(trainer)) - set(vars(plain)) == {"_batching", "_finder"}
    trainer.train()
    trainer.evaluate()
    plain.train()
    assert set(vars(trainer)) - set(vars(plain)) <= {"_batching", "_finder"}
