"""Generator: ``generate`` again and again for one model, with memory and graphs that stay between calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import ArgumentError
from ...plan import Budget
from ...plan.budget import check_budget
from ..graphs.backend import Choice, make_backend
from ..memory.monitor import MemoryMonitor
from ._decoding import Collate
from ._keeping import Kept, Settings
from .generation import generated


@final
class Generator:
    """Generate for one model again and again; memory and graphs of a call stay for the next one.

    A call gives what ``generate`` gives with the same arguments. On a CUDA device it captures only shapes that no
    earlier call has captured, so it is for evaluation between epochs of training, for rollouts, and for prompts that
    come in lists. Weights that are changed in place count at the next call. After any other change of the model
    (parameters that lie elsewhere, types, adapters, its configuration) shapes are captured anew, and so they are after
    a call with other settings of ``model.generate``, such as draws in place of the best token: make a ``Generator`` for
    each kind. ``max_new_tokens`` and ``lengths`` may differ from call to call.

    What stays counts as memory in use for everything else, such as training. A call itself takes it over, and gives it
    back first if its budget allows less, or if memory runs out. ``close()`` gives it back at once, as the end of a
    ``with`` block does; a later call takes memory anew. Calls from several threads take turns.

    Args:
        model: as for ``generate``.
        budget: as for ``generate``; a call may have one of its own.
        collate: as for ``generate``.
        count_output: as for ``generate``.
        pad_token_id: as for ``generate``.
        pad_multiple_of: as for ``generate``.
        memory: as for ``generate``.
        progress: as for ``generate``.
        graphs: as for ``generate``. ``"auto"`` decides for each call.
        **generate_kwargs: for ``model.generate``, in every call that does not give others.

    >>> import torch
    >>> class Echo(torch.nn.Linear):
    ...     def generate(self, input_ids, attention_mask, **options):
    ...         return torch.cat([input_ids, input_ids[:, -1:]], dim=1)
    >>> with Generator(Echo(1, 1), max_new_tokens=1) as generator:
    ...     generator([[3, 4], [5]])
    ...     generator([[6]])
    [tensor([4]), tensor([5])]
    [tensor([6])]
    """

    def __init__(
        self,
        model: Any,
        *,
        budget: Budget | None = None,
        collate: Collate | None = None,
        count_output: bool = False,
        pad_token_id: int | None = None,
        pad_multiple_of: int = 1,
        memory: MemoryMonitor | None = None,
        progress: bool = False,
        graphs: Choice = "auto",
        **generate_kwargs: Any,
    ) -> None:
        if graphs is not False:
            make_backend(graphs, torch.device("cuda"))  # says what is allowed
        self._model, self._budget = model, None if budget is None else check_budget(budget)
        self._settings = Settings(collate, count_output, pad_token_id, pad_multiple_of, memory, progress, graphs)
        self._kwargs = generate_kwargs
        self._begin()

    def _begin(self) -> None:
        """Hold nothing yet, in this process."""
        self._kept = Kept(stays=True, releases=not isinstance(self._settings.graphs, bool | str))
        self._lock = threading.Lock()
        self._thread: int | None = None  # whose call runs
        self._process = os.getpid()

    def __call__(
        self,
        examples: Sequence[Any],
        *,
        lengths: npt.ArrayLike | Callable[[Any], Any] | None = None,
        budget: Budget | None = None,
        **generate_kwargs: Any,
    ) -> list[Tensor]:
        """Return one tensor of token ids per example, as ``generate`` does.

        Args:
            examples: as for ``generate``.
            lengths: as for ``generate``.
            budget: what a batch of this call may cost; None takes that of the ``Generator``.
            **generate_kwargs: for ``model.generate``, before those of the ``Generator``.
        """
        given = sorted(generate_kwargs.keys() & set(Settings._fields))
        if given:
            raise ArgumentError(f"{given[0]} belongs to all calls: give it to Generator(model, {given[0]}=...)")
        return self._alone(
            lambda: generated(
                self._model, examples, self._kept, self._settings, {**self._kwargs, **generate_kwargs},
                budget=self._budget if budget is None else budget, lengths=lengths,
            )
        )  # fmt: skip

    def close(self) -> None:
        """Give memory and graphs back; a call that runs in another thread ends before."""
        self._alone(lambda: self._kept.drop())  # looked up there, as a fork begins with another one

    def _alone(self, function: Callable[[], Any]) -> Any:
        if self._process != os.getpid():  # after a fork, a call of a thread that is not here may hold the lock for ever
            self._begin()
        if self._thread == threading.get_ident():
            raise ArgumentError("a Generator was used inside its own call, as by collate=; use generate() there")
        with self._lock:
            self._thread = threading.get_ident()
            try:
                return function()
            finally:
                self._thread = None

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Generator belongs to its process and is neither copied nor pickled; make it there")
