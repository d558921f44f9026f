"""UpdateTime: what an update would take on a GPU, stated as two figures, so that seconds can be compared on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, final

from .._checks import as_plain, as_whole
from ..errors import ArgumentError
from .strategies.strategy import set_fields

__all__ = ["EAGER", "GRAPHS", "UpdateTime", "named"]


@final
@dataclass(frozen=True, kw_only=True)
class UpdateTime:
    """A stated model of the time of an update: ``milliseconds = fixed_ms · passes + per_example_ms · examples``.

    A pass is one forward and backward pass. An update is one pass, except where the strategy itself cuts it into parts,
    to measure gradient noise or to fit a memory. The lab's simulated seconds are sums of this. A comparison depends
    only on the quotient of the two figures: the batch size at which both parts take the same time.

    Args:
        fixed_ms: what a pass takes whatever it holds: launching kernels, the optimizer.
        per_example_ms: what every example adds.
        about: what the figures stand for, in words.

    >>> UpdateTime(fixed_ms=10, per_example_ms=0.5, about="a made-up machine").seconds(passes=100, examples=2000)
    2.0
    """

    fixed_ms: float
    per_example_ms: float
    about: str = "given by the user"

    def __post_init__(self) -> None:
        fixed, each = (
            as_plain("fixed_ms", self.fixed_ms, least=0),
            as_plain("per_example_ms", self.per_example_ms, least=0),
        )
        if fixed == each == 0:
            raise ArgumentError("fixed_ms and per_example_ms must not both be 0: no update takes no time")
        if not isinstance(self.about, str):
            raise ArgumentError(f"about must be a text, got {self.about!r}")
        set_fields(self, fixed_ms=fixed, per_example_ms=each)

    def seconds(self, *, passes: int, examples: int) -> float:
        """Return the simulated seconds of some passes over some examples."""
        passes, examples = as_whole("passes", passes, least=0), as_whole("examples", examples, least=0)
        return (self.fixed_ms * passes + self.per_example_ms * examples) / 1000

    def to_dict(self) -> dict[str, Any]:
        """Return the model as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> UpdateTime:
        """Return the model that ``to_dict`` wrote."""
        return cls(**values)


# Both are fitted to updates of one model, 60 million parameters that translate, measured on an H200 in bfloat16 at
# about 88 real tokens per example. Eager: 78, 74, 65, 84 and 97 ms for 16, 32, 86, 166 and 320 examples, because the
# host launches about 2,400 kernels whatever they hold. Replayed: 9.4, 13.2 and 21.3 ms for 35, 73 and 151 examples.
EAGER = UpdateTime(
    fixed_ms=70,
    per_example_ms=0.08,
    about="an H200 that trains a translation model of 60 million parameters, 88 tokens per example, eagerly",
)
GRAPHS = UpdateTime(
    fixed_ms=5.8,
    per_example_ms=0.1,
    about="an H200 that trains a translation model of 60 million parameters, 88 tokens per example, by CUDA graphs",
)
_NAMED = {"eager": EAGER, "graphs": GRAPHS}


def named(text: str) -> UpdateTime:
    """Return the model with a name, ``eager`` or ``graphs``, or that of two numbers: ``"FIXED_MS,PER_EXAMPLE_MS"``.

    >>> named("graphs").fixed_ms, named("10,0.5").per_example_ms
    (5.8, 0.5)
    """
    if text in _NAMED:
        return _NAMED[text]
    try:
        fixed, each = (float(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError(
            f"a time model is {', '.join(_NAMED)}, or two numbers of milliseconds, per update and per example, "
            f"e.g. 70,0.08; got {text!r}"
        ) from None
    return UpdateTime(fixed_ms=fixed, per_example_ms=each)
