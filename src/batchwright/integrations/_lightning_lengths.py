"""Tell a Trainer how long an epoch is, each epoch: it asks once and would cut a longer one short."""

from __future__ import annotations

from typing import Any


def set_limit(trainer: Any, loader: Any, num_batches: int) -> int | None:
    """Set how many batches the Trainer fetches from a loader in the epoch that begins.

    Args:
        trainer: of Lightning, while it fits.
        loader: the one that is asked.
        num_batches: that it has.

    Returns:
        The limit, None before the Trainer has asked for it the first time.
    """
    combined = trainer.fit_loop._combined_loader
    if combined is None or not combined.limits or loader not in combined.flattened:
        return None
    limit = trainer.limit_train_batches
    num = min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
    # In place: the iterator that is being made holds the same list.
    combined.limits[combined.flattened.index(loader)] = num
    return num


def tell_length(trainer: Any, loader: Any, num_batches: int) -> None:
    """Set all that the Trainer derived from the length of the epoch before.

    A plan has a few batches more or fewer every epoch. The first number would drop the last batches of a longer epoch,
    and leave out the validation after a shorter one.
    """
    num = set_limit(trainer, loader, num_batches)
    if num is None or len(trainer.fit_loop._combined_loader.flattened) > 1:
        return
    trainer.fit_loop.max_batches = num
    interval = trainer.val_check_interval
    if isinstance(interval, float) and isinstance(getattr(trainer, "val_check_batch", None), int):
        trainer.val_check_batch = max(1, int(num * interval))


def is_resuming(trainer: Any) -> bool:
    """Say whether the Trainer is about to run its first epoch after a checkpoint."""
    loop = trainer.fit_loop
    return bool(getattr(loop, "is_resuming", False) or loop.restarting or loop.epoch_loop.restarting)


def begin_again(trainer: Any) -> None:
    """Make a Trainer that resumes begin its loader again; it does so by itself in later epochs alone."""
    if trainer.fit_loop._data_fetcher is not None:
        iter(trainer.fit_loop._data_fetcher)


def num_processed(trainer: Any) -> int:
    """Return the batches of the epoch that training is done with."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)
