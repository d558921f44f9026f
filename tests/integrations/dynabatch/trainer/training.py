"""Real trainers on tiny models, and the gradients their updates should have."""

import copy

import torch
import torch.nn.functional as F
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

from batchwright.integrations.dynabatch import DynaBatchSampler, make_dynabatch_trainer

from ..models import MODELS, collate, make_examples, make_model

ARGUMENTS = {Seq2SeqTrainer: Seq2SeqTrainingArguments}


def make_sampler(examples, batch_size=3, **options):
    lengths = [len(example["input_ids"]) for example in examples]
    settings = {"threshold": 0.9, "max_batch_range": 3.0, "task": "train", **options}
    return DynaBatchSampler(lengths, None, None, batch_size, **settings)


def make_task_dependent(num=120):
    """Return examples, and lengths of which training and generation make different plans."""
    examples = [{**example, "number": index} for index, example in enumerate(make_examples(num, causal=False))]
    return examples, [12 + (7 * index) % 90 for index in range(num)]


def make_args(folder, kind=TrainingArguments, **options):
    """Return arguments under which weights stay as they are, so that every update has the same reference."""
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "optim": "sgd",
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 3,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    settings |= options
    renamed = "activation_checkpointing"  # since transformers 5.23, which warns of the older name
    if "gradient_checkpointing" in settings and renamed in kind.__dataclass_fields__:
        settings[renamed] = settings.pop("gradient_checkpointing")
    return kind(**settings)


class Gradients(TrainerCallback):
    """Keeps the gradient of every update, as one vector."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append(flat_gradient(model))


def flat_gradient(model):
    """Return all gradients as one vector; zeros where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def make_trainer(name, folder, *, sampler=None, examples=None, model=None, trainer_cls=Trainer, **options):
    """Return a trainer on its sampler, and the callback that keeps its gradients."""
    examples = make_examples(causal=MODELS[name][3]) if examples is None else examples
    gradients = Gradients()
    args = {key: options.pop(key) for key in list(options) if key in TrainingArguments.__dataclass_fields__}
    trainer = make_dynabatch_trainer(trainer_cls)(
        model=make_model(name) if model is None else model,
        args=make_args(folder, ARGUMENTS.get(trainer_cls, TrainingArguments), **args),
        train_dataset=examples,
        data_collator=collate,
        callbacks=[gradients],
        dynabatch_sampler=make_sampler(examples) if sampler is None else sampler,
        **options,
    )
    return trainer, gradients


def windows(sampler, num):
    """Return the examples of every update: ``num`` batches each, fewer in the last."""
    batches = list(sampler.batches)
    return [batches[start : start + num] for start in range(0, len(batches), num)]


def exact_gradient(name, model, batches, examples):
    """Return the gradient of the mean over all labels of some batches, from the logits of one example at a time."""
    model = copy.deepcopy(model).train()
    model.zero_grad()
    shifts = MODELS[name][3]
    total, num = 0.0, 0
    for index in (index for batch in batches for index in batch):
        batch = collate([examples[index]])
        logits, labels = model(**batch).logits, batch["labels"]
        if shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        num += labels.numel()
    (total / num).backward()
    return flat_gradient(model), float(total.detach()) / num


def relative_error(found, expected):
    return float((found - expected).norm() / expected.norm())
