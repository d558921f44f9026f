"""``budget="auto"`` of a trainer: batches of its data run through its own training step, and leave no trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from ..._lengths import pad_up
from ..._types import IntArray
from ...errors import ArgumentError, StateMismatchError
from ...plan.budget import Budget, MaxItems
from ...plan.plan import PlanSettings
from ...size.learning_rate import innermost
from ...step.calibration.finding import Probe, Row, find_budget, largest_batch
from ...step.calibration.found import FoundBudget
from ...step.filler import without_filler
from ...step.oom import Snapshot
from .._auto_budget import (
    BudgetFinder,
    agreement_of,
    monitor_of,
    own_collator,
    tell,
    with_whole_groups,
)
from .._devices import Devices, on_its_own
from .._keeping import is_plain, kept, kept_draws
from .._ranked import is_stream
from .._safe_steps import trained_parameters
from ._batches import Counted, Received
from ._data import ExampleLists, TwiceCollated
from ._key import key_of
from ._lengths import pad_multiple_of, tell_label_axis
from ._settings import Settings
from ._streams import first_buffer
from .callbacks import Batching

logger = logging.getLogger(__name__)

_SET_BY_ACCELERATE = ("forward", "_original_forward", "_is_accelerate_prepared")
_LEFT_ALONE = ("train_dataset", "eval_dataset")
_MISSING = object()


def budget_of_trainer(trainer: Any, settings: Settings, base: Any, finder: BudgetFinder) -> FoundBudget:
    """Return the budget that ``"auto"`` stands for: that of the checkpoint, a known one, or one that is measured now.

    Args:
        trainer: an adaptive one.
        settings: what the user asked for.
        base: the trainer's own loader, with the data and the collator.
        finder: of the trainer.
    """
    if finder.checkpoint is not None:
        saved = saved_budget(Path(finder.checkpoint), trainer.args.ignore_data_skip)
        if saved is not None:
            _warn_of_less_memory(trainer, settings, saved)
            return saved
    args, device = trainer.args, trainer.args.device
    agreement, monitor = agreement_of(device, args.world_size), monitor_of(device, settings.memory)
    lengths, failure = _made_ready(trainer)
    agreement.settle(failure)
    examples = base.dataset
    if lengths is None:
        examples, lengths = first_buffer(trainer.train_dataset, settings, Devices.of(trainer), trainer.model)
    tell_label_axis(base, lengths.shape[1])
    lengths = pad_up(lengths, pad_multiple_of(trainer.data_collator))
    accumulates = settings.controller is not None or args.gradient_accumulation_steps > 1
    reserved = _bytes_of_ranks(trainer)

    def search() -> FoundBudget:
        quiet = replace(settings, budget=MaxItems(1), memory=None, micro_batch=None, graphs=False, is_probe=True)
        with _probing(trainer, quiet) as model:
            return find_budget(
                TrainerProbe(trainer, model, examples, TwiceCollated(base.collate_fn)),
                lengths,
                modules=[trainer.model],
                optimizers=[innermost(trainer.optimizer)],
                device=device,
                monitor=monitor,
                wants_knee=settings.controller is None,
                accumulates=accumulates,
                reserved_bytes=reserved,
                agreement=agreement,
                progress=not args.disable_tqdm and args.process_index == 0,
            )

    found, is_known = finder.find(
        lambda: key_of(trainer, settings, lengths, accumulates),
        search,
        device=device,
        monitor=monitor,
        lengths=lengths,
        reserved_bytes=reserved,
        agreement=agreement,
        world_size=args.world_size,
    )
    found = with_whole_groups(found, lengths, PlanSettings(groups=settings.plan_options.get("groups")).groups)
    is_shown = not args.disable_tqdm and args.process_index == 0
    tell(found, lengths, how="as found before" if is_known else "measured now", is_shown=is_shown)
    return found


def _made_ready(trainer: Any) -> tuple[IntArray | None, Exception | None]:
    """Make the optimizer, and return the lengths of the data, None of a stream, or an error, which all ranks raise."""
    dataset = trainer.train_dataset
    try:
        _check(trainer)
        trainer.create_optimizer()  # as training does a moment later
        _check_hooks(trained_parameters(trainer.model, trainer.optimizer))
        if is_stream(dataset):
            return None, None
        return trainer._batching.data.lengths(dataset, trainer.args, trainer.model, trainer.data_collator), None
    except Exception as error:
        return None, error


def saved_budget(checkpoint: Path, ignores_place: bool) -> FoundBudget | None:
    """Return the budget that a checkpoint holds, so that the same batches are planned; None if it holds none."""
    path = checkpoint / "trainer_state.json"
    if not path.is_file():
        return None
    state = json.loads(path.read_text(encoding="utf-8")).get("stateful_callbacks", {}).get("batchwright")
    text = state.get("budget") if isinstance(state, Mapping) else None
    if text is not None:
        return FoundBudget.from_json(text)
    if isinstance(state, Mapping) and not ignores_place:
        raise StateMismatchError(
            "the checkpoint was saved with a budget that was given, and budget='auto' would plan other batches; give "
            "the same budget, or set ignore_data_skip=True to begin the epoch again"
        )
    return None


def _warn_of_less_memory(trainer: Any, settings: Settings, saved: FoundBudget) -> None:
    """Warn if the batches of a checkpoint were planned for more memory than there is here."""
    monitor = monitor_of(trainer.args.device, settings.memory)
    if monitor is None or saved.memory is None or saved.memory.max_bytes <= monitor.total_bytes:
        return
    then = "run in pieces" if settings.on_oom == "split" else "are left out" if settings.on_oom == "skip" else "fail"
    logger.warning(
        "The checkpoint was planned for %.1f GiB, and this device has %.1f: batches that do not fit %s. To plan for "
        "this device, give a budget and set ignore_data_skip=True, which begins the epoch again.",
        saved.memory.max_bytes / 2**30, monitor.total_bytes / 2**30, then,
    )  # fmt: skip


def _check(trainer: Any) -> None:
    """Refuse what cannot be measured by each rank on its own."""
    instead = "give a budget such as MaxTokens(8192)"
    model = trainer.model
    found = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(found) > 1:
        raise ArgumentError(f"budget='auto' measures one device, but the model lies on {', '.join(found)}; {instead}")
    if trainer.args.world_size > 1 and any(isinstance(part, nn.SyncBatchNorm) for part in model.modules()):
        raise ArgumentError(f"budget='auto' measures every rank by itself, but ranks meet in SyncBatchNorm; {instead}")


def _check_hooks(parameters: list[nn.Parameter]) -> None:
    if any(parameter._post_accumulate_grad_hooks for parameter in parameters):
        raise ArgumentError(
            "budget='auto' runs batches that must not count, but a parameter has a hook of "
            "register_post_accumulate_grad_hook, which may update it inside the backward pass; give a budget such as "
            "MaxTokens(8192)"
        )


def _bytes_of_ranks(trainer: Any) -> int:
    """Return what DDP takes besides the model: buckets for all gradients."""
    if trainer.args.world_size == 1 or type(trainer.model_wrapped) is not type(trainer.model):
        return 0  # or they are there already
    trained = trained_parameters(trainer.model)
    return sum(parameter.numel() * parameter.element_size() for parameter in trained)


@contextmanager
def _probing(trainer: Any, settings: Settings) -> Iterator[Any]:
    """Let a trainer run batches that leave no trace in it; parameters and random states are held by others.

    Yields:
        The model as it computes, without DDP.
    """
    batching, model, accelerator = trainer._batching, trainer.model, trainer.accelerator
    names = set(vars(trainer))
    held = {name: kept(value) for name, value in vars(trainer).items() if name not in _LEFT_ALONE and is_plain(value)}
    draws = [kept_draws(getattr(trainer, name, None)) for name in (*_LEFT_ALONE, "data_collator")]
    places = [(name, vars(model).get(name, _MISSING)) for name in _SET_BY_ACCELERATE]
    prepared, scaler, syncs = list(accelerator._models), accelerator.scaler, accelerator.sync_gradients
    scaler_state = None if scaler is None else dict(vars(scaler))
    try:
        trainer._batching = Batching(settings)
        trainer.current_gradient_accumulation_steps = 1
        accelerator.gradient_state._set_sync_gradients(True)
        # Autocast and the conversion of outputs, but not DDP: ranks measure by themselves.
        yield model if prepared else accelerator.prepare_model(model, evaluation_mode=True)
    finally:
        accelerator.gradient_state._set_sync_gradients(syncs)
        accelerator._models[:] = prepared
        for name, value in places:
            if value is not _MISSING:
                vars(model)[name] = value
            else:
                vars(model).pop(name, None)
        if scaler is not None and scaler_state is not None:
            vars(scaler).clear()
            vars(scaler).update(scaler_state)
        for name in set(vars(trainer)) - names:
            delattr(trainer, name)
        for name, put_back in held.items():
            setattr(trainer, name, put_back())
        for put_back in draws:
            put_back()
        trainer._batching = batching


@final
class TrainerProbe(Probe):
    """Runs batches through a trainer's own training step.

    Args:
        trainer: is made ready by ``_probing``.
        model: as it computes, without DDP.
        examples: that batches are made of.
        collate: of the trainer's own loader.
    """

    def __init__(self, trainer: Any, model: Any, examples: Any, collate: Any) -> None:
        self._trainer, self._model = trainer, model
        self._examples, self._collate = ExampleLists(examples), own_collator(collate)
        self._num_items: Any = None

    def load(self, indices: list[int]) -> Any:
        """Return the batch of some examples."""
        self._num = len(indices)
        batch = self._collate(self._examples[indices])
        return without_filler(batch) if isinstance(batch, Mapping) else batch  # which costs what examples cost

    def begin(self, batch: Any) -> None:
        """Begin an update of one micro-batch."""
        trainer = self._trainer
        trainer._batching.updates.begin(
            [batch],
            Received(Counted(self._num, 0, 0, 1), [False], False),
            loss=trainer._trainer_loss(),
            devices=Devices.of(trainer),
            optimizer=trainer.optimizer,
        )
        with on_its_own(trainer):
            self._num_items = trainer._get_num_items_in_batch([batch], trainer.args.device)

    def run(self, batch: Any) -> None:
        """Run forward and backward."""
        with on_its_own(self._trainer):
            self._trainer.training_step(self._model, dict(batch), self._num_items)


def evaluation_budget_of_trainer(
    trainer: Any, base: Any, lengths: IntArray, finder: BudgetFinder, *, loss_only: bool | None
) -> Budget:
    """Return the largest batches that a trainer evaluates, of what it evaluates; found once, and agreed by all ranks.

    Args:
        trainer: an adaptive one.
        base: its own loader, with the data and the collator.
        lengths: of the data, as padded.
        finder: of the trainer.
        loss_only: only the loss is returned; None leaves that to the trainer's arguments.
    """
    args, settings = trainer.args, trainer._batching.settings
    loss_only = args.prediction_loss_only if loss_only is None else loss_only
    pillars = tuple(dict.fromkeys(int(place) for place in lengths.argmax(axis=0)))
    row = Row(tuple(int(length) for length in lengths.max(axis=0)), pillars)
    key = (row.lengths, loss_only, _model_key(trainer.model))
    if key in finder.evaluation:
        return finder.evaluation[key]
    quiet = replace(settings, budget=MaxItems(1), memory=None, micro_batch=None, graphs=False, on_oom="raise")
    before, examples, collate = Snapshot.of(trainer.model), ExampleLists(base.dataset), own_collator(base.collate_fn)
    modes = [(part, part.training) for part in trainer.model.modules()]
    try:
        with _probing(trainer, quiet) as model:
            trainer.model.eval()

            def run(shape: tuple[int, ...]) -> None:
                batch = collate(examples[row.examples(shape[0], lengths)])
                with on_its_own(trainer):
                    found = trainer.prediction_step(model, dict(batch), loss_only, None)
                # Results of all ranks are gathered on each of them.
                _ = [nested(one, args.world_size) for one in found] if args.world_size > 1 else found

            finder.evaluation[key] = largest_batch(
                run,
                lengths,
                memory=monitor_of(args.device, settings.memory),
                device=args.device,
                agreement=agreement_of(args.device, args.world_size),
            )
    finally:
        before.restore()
        for part, mode in modes:
            part.training = mode
    return finder.evaluation[key]


def _model_key(model: nn.Module) -> Any:
    """Return what tells the models that a trainer evaluates apart."""
    return id(model), tuple((name, tuple(one.shape), one.dtype) for name, one in model.named_parameters())


def nested(value: Any, num: int) -> Any:
    """Return room for a result of several ranks: tensors that are larger so many times, nested as they came."""
    if isinstance(value, Mapping):
        return {name: nested(item, num) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [nested(item, num) for item in value]
    return value.new_empty((num, *value.shape)) if isinstance(value, Tensor) else None
