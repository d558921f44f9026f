"""An observation: one sentence, and the tests it rests on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, final

from ._observe_best import Compared
from ._observe_effects import Measure
from ._observe_words import change_text, counted, interval_text, p_text


@final
@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One test behind a sentence.

    Args:
        what: what was compared with what, and where.
        measure: by which figure.
        compared: seeds, mean change, interval and corrected p.
        metric_name: the metric of the data set, where the measure is the metric.
    """

    what: str
    measure: Measure
    compared: Compared
    metric_name: str | None = None

    def __str__(self) -> str:
        one = self.compared
        return (
            f"{self.what}: {self.measure.title} {change_text(self.measure, one.mean, self.metric_name)} "
            f"(95 % interval {interval_text(self.measure, one.low, one.high, self.metric_name)}; "
            f"n = {counted(one.num_pairs, 'seed')}; {p_text(one.p_corrected)} after {one.correction} over "
            f"{counted(one.num_tests, 'test')})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the test as plain JSON."""
        return {"what": self.what, "measure": self.measure.name, **asdict(self.compared)}


@final
@dataclass(frozen=True, kw_only=True)
class Observation:
    """A sentence about a lab that its numbers support.

    Args:
        topic: what it is about, e.g. ``"overall"``, ``"type"``, ``"dimensionality"``, ``"limits"``.
        sentence: the finding, in words.
        evidence: the tests behind it; empty where it counts or describes.
        strategies: those it puts first; empty where it names none.
    """

    topic: str
    sentence: str
    evidence: tuple[Evidence, ...] = ()
    strategies: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(f"  {one}" for one in self.evidence)])

    def to_dict(self) -> dict[str, Any]:
        """Return the observation as plain JSON."""
        return {
            "topic": self.topic,
            "sentence": self.sentence,
            "strategies": list(self.strategies),
            "evidence": [one.to_dict() for one in self.evidence],
        }
