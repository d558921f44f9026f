"""Calibration: memory and time as fitted to measured shapes, and how well held-out shapes were predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ...errors import ArgumentError
from ...plan import MaxBytes, MemoryModel, TimeModel

Shape = tuple[int, ...]

JSON_VERSION = 1
# With fewer probes than this, each is held out in turn; with more, every third at once.
LEAVE_ONE_OUT_BELOW = 7


@final
@dataclass(frozen=True)
class Measurement:
    """One probe: the median of its steady seconds, the seconds of its first run, and its peak if memory is measured."""

    shape: Shape
    seconds: float
    first_visit_seconds: float
    peak_bytes: int | None


@final
@dataclass(frozen=True)
class HeldOutErrors:
    """Relative errors ``predicted / measured − 1`` of probes that the model was fitted without; below 0 is too little.

    Attributes:
        shapes: the probes that were held out.
        memory: one error per probe, None if memory was not measured.
        time: one error per probe.
    """

    shapes: tuple[Shape, ...]
    memory: tuple[float, ...] | None
    time: tuple[float, ...]


@final
@dataclass(frozen=True)
class Calibration:
    """What ``calibrate`` found; ``memory.budget(max_bytes)`` is ready for a plan or a ``Stepper``.

    Attributes:
        shapes: the shapes that were measured, cheapest first.
        seconds: the steady seconds of each shape.
        first_visit_seconds: the seconds of the first run of each shape.
        peak_bytes: the peak of each shape, None on the CPU.
        memory: the fitted memory model, None on the CPU.
        time: the fitted time model.
        errors: how well held-out probes were predicted; the models themselves are fitted to all probes.
        max_bytes: the limit that probing kept to, None on the CPU.
        stopped: why some shapes did not run, None if all ran.
    """

    shapes: tuple[Shape, ...]
    seconds: tuple[float, ...]
    first_visit_seconds: tuple[float, ...]
    peak_bytes: tuple[int, ...] | None
    memory: MemoryModel | None
    time: TimeModel
    errors: HeldOutErrors
    max_bytes: int | None = None
    stopped: str | None = None

    @classmethod
    def fit(cls, rows: list[Measurement], *, max_bytes: int | None = None, stopped: str | None = None) -> Calibration:
        """Fit both models to measured probes.

        >>> rows = [Measurement((b, 16), 0.1 + b / 10, 0.5 + b / 10, 1000 + 50 * b) for b in (1, 2, 4, 8)]
        >>> found = Calibration.fit(rows)
        >>> found.memory.predict([[6, 16]]).round(3).tolist(), round(found.time.first_visit_seconds, 3)
        ([1300.0], 0.4)
        """
        shapes = np.array([row.shape for row in rows])
        seconds = np.array([row.seconds for row in rows])
        first = np.array([row.first_visit_seconds for row in rows])
        found = [row.peak_bytes for row in rows if row.peak_bytes is not None]
        peaks = np.array(found, dtype=np.float64) if found else None
        return cls(
            shapes=tuple(row.shape for row in rows),
            seconds=tuple(seconds.tolist()),
            first_visit_seconds=tuple(first.tolist()),
            peak_bytes=tuple(found) if found else None,
            memory=None if peaks is None else MemoryModel.fit(shapes, peaks),
            time=TimeModel.fit(shapes, seconds, first_visit_seconds=first),
            errors=_held_out(shapes, seconds, peaks),
            max_bytes=max_bytes,
            stopped=stopped,
        )

    def budget(self, max_bytes: float | None = None) -> MaxBytes:
        """Return the memory budget of ``max_bytes``; None takes the limit that probing kept to."""
        limit = self.max_bytes if max_bytes is None else max_bytes
        if self.memory is None or limit is None:
            raise ArgumentError("no memory was measured, as on the CPU; use MaxTokens, or calibrate on the device")
        return self.memory.budget(limit)

    def to_json(self) -> str:
        """Return everything as JSON; ``from_json`` gives an equal calibration."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        models = {
            "memory": None if self.memory is None else json.loads(self.memory.to_json()),
            "time": json.loads(self.time.to_json()),
            "errors": vars(self.errors),
        }
        return json.dumps({"kind": "batchwright.Calibration", "version": JSON_VERSION, **plain, **models})

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Read a calibration that ``to_json`` wrote."""
        state = _read(text)
        memory, errors = state["memory"], state["errors"]
        return cls(
            **{name: _as_tuples(state[name]) for name in _PLAIN},
            memory=None if memory is None else MemoryModel.from_json(json.dumps(memory)),
            time=TimeModel.from_json(json.dumps(state["time"])),
            errors=HeldOutErrors(**{name: _as_tuples(value) for name, value in errors.items()}),
        )


_PLAIN = ("shapes", "seconds", "first_visit_seconds", "peak_bytes", "max_bytes", "stopped")


def _read(text: str) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"this is not the JSON of a Calibration: {error}") from error
    found = state.get("kind") if isinstance(state, dict) else state
    if found != "batchwright.Calibration":
        raise ArgumentError(f"expected the JSON of a batchwright.Calibration, got {str(found)[:80]!r}")
    if state.get("version") != JSON_VERSION:
        raise ArgumentError(
            f"this Calibration has version {state.get('version')!r}, not {JSON_VERSION}; calibrate again"
        )
    missing = {*_PLAIN, "memory", "time", "errors"} - state.keys()
    if missing:
        raise ArgumentError(f"the JSON of a Calibration needs {sorted(missing)}")
    return state


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _held_out(
    shapes: npt.NDArray[np.int64], seconds: npt.NDArray[np.float64], peaks: npt.NDArray[np.float64] | None
) -> HeldOutErrors:
    folds = _folds(len(shapes))
    held_out = [index for fold in folds for index in fold]
    return HeldOutErrors(
        shapes=tuple(tuple(shapes[index].tolist()) for index in held_out),
        memory=None if peaks is None else _errors(MemoryModel, shapes, peaks, folds),
        time=_errors(TimeModel, shapes, seconds, folds),
    )


def _folds(num: int) -> list[list[int]]:
    """Return which probes to hold out together: each on its own, or every third but never the smallest and largest."""
    if num < LEAVE_ONE_OUT_BELOW:
        return [[index] for index in range(num)]
    return [list(range(1, num - 1, 3))]


def _errors(
    model: type[MemoryModel] | type[TimeModel],
    shapes: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    folds: list[list[int]],
) -> tuple[float, ...]:
    errors: list[float] = []
    for fold in folds:
        rest = np.setdiff1d(np.arange(len(shapes)), fold)
        predicted = model.fit(shapes[rest], values[rest]).predict(shapes[fold])
        errors += (predicted / values[fold] - 1).tolist()
    return tuple(errors)
