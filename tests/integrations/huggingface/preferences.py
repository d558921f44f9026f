"""Preference data, tiny models for TRL's trainers of pairs, and the gradients that their updates should have."""

import datasets
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from batchwright.integrations.huggingface import adaptive

from ..dynabatch.models import MODELS, NUM_TOKENS
from ..dynabatch.trainer.training import Gradients, flat_gradient, make_args

NUM_PAIRS = 18
LLAMA = MODELS["llama"][2]


def make_tokenizer():
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    words = Tokenizer(WordLevel({**special, **{f"w{n}": n for n in range(3, NUM_TOKENS)}}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def text(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{n}" for n in torch.randint(3, NUM_TOKENS, (length,), generator=generator).tolist())


def make_pairs(num=NUM_PAIRS, *, seed=0, margins=False):
    """Return pairs whose rows have 4 to 21 tokens."""
    rows = [
        {
            "prompt": text(2 + n % 4, seed + n),
            "chosen": " " + text(1 + n % 5, seed + 100 + n),
            "rejected": " " + text(1 + (7 * n) % 15, seed + 200 + n),
            **({"margin": 0.1 * n} if margins else {}),
        }
        for n in range(num)
    ]
    return datasets.Dataset.from_list(rows)


def make_policy(kind, seed=0, **options):
    torch.manual_seed(seed)
    if kind == "rewards":
        return LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1, **options)).double()
    return LlamaForCausalLM(LlamaConfig(**LLAMA, **options)).double()


def record(trainer):
    """Note the token ids of every batch that the trainer collates, and return the list."""
    seen, kind = [], type(trainer.data_collator)

    class Recording(kind):
        def torch_call(self, examples):
            seen.append([(example["chosen_ids"], example["rejected_ids"], example) for example in examples])
            return super().torch_call(examples)

    trainer.data_collator.__class__ = Recording
    return seen


def names(batch):
    """Return what tells the pairs of a batch apart."""
    return [(tuple(chosen), tuple(rejected)) for chosen, rejected, _ in batch]


def make_preferences(kind, folder, *, wrap=adaptive, pairs=None, model=None, reference=1, callbacks=(), **options):
    """Return a trainer of pairs, "preferences" for DPO or "rewards", and the callback that keeps its gradients.

    Args:
        kind: of the trainer.
        folder: of its output.
        wrap: makes a class of the trainer's.
        pairs: to train on.
        model: to train.
        reference: seed of the reference model; that of the model is 0.
        callbacks: of the trainer.
        **options: of the trainer or of its configuration.
    """
    import trl

    trainer_cls, config = {
        "preferences": (trl.DPOTrainer, trl.DPOConfig),
        "rewards": (trl.RewardTrainer, trl.RewardConfig),
    }[kind]
    args = {name: options.pop(name) for name in list(options) if name in config.__dataclass_fields__}
    if kind == "preferences":
        options["ref_model"] = make_policy(kind, reference)
    gradients = Gradients()
    usual = {"bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": 4, "max_length": None}
    trainer = wrap(trainer_cls)(
        model=make_policy(kind) if model is None else model,
        args=make_args(folder, config, **{**usual, **args}),
        train_dataset=make_pairs() if pairs is None else pairs,
        processing_class=make_tokenizer(),
        callbacks=[gradients, *callbacks],
        **options,
    )
    return trainer, gradients


def plain(kind, folder, **options):
    """Return the trainer as TRL made it."""
    return make_preferences(kind, folder, wrap=lambda cls: cls, **options)[0]


def loss_in_one_piece(trainer, batches):
    """Return the gradient and the loss of all pairs of some batches at once, by the trainer's own loss."""
    examples = [example for batch in batches for *_, example in batch]
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(trainer.data_collator(examples)))
    loss.backward()
    return flat_gradient(trainer.model), float(loss.detach())
