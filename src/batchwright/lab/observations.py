"""What the runs of a lab show, in sentences made from the numbers, each with the tests behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._observe_best import rank
from ._observe_cells import cell_tests, count_observation, no_better_observation
from ._observe_contrast import contrast_observation
from ._observe_cost import cost_observation
from ._observe_effects import CONVERGENCE, LOSS, METRIC, Effects, Measure, effects
from ._observe_groups import adaptive_of, fixed_of
from ._observe_limits import failures, limits, nothing_to_conclude, scope
from ._observe_ranked import best_observation
from ._observe_record import Evidence as Evidence
from ._observe_record import Observation as Observation
from ._observe_replay import replay_observation
from ._observe_slices import Slice, by_halves, by_kind, by_model, overall
from ._report_records import Record, newest_records

__all__ = ["Evidence", "Observation", "observe"]


def observe(records: Iterable[Record]) -> list[Observation]:
    """Say what runs show: which strategy is best, on which data, at what cost, and where none is better.

    Strategies are compared with the strategy ``constant`` in pairs of runs with the same data set, model and seed, by
    the final validation loss as a quotient, which can be averaged over data sets. Tests are paired t tests over
    seeds, corrected by Holm over all strategies of the same question. What cannot be told apart is called a tie.

    Args:
        records: runs as in ``runs.jsonl``.

    Returns:
        The observations, the most general first.

    >>> def run(strategy, seed, loss):
    ...     place = {"dataset": "wine", "model": "mlp", "strategy": strategy, "seed": seed, "status": "ok"}
    ...     return place | {"final": {"validation_loss": loss}}
    >>> runs = [run("constant", seed, 0.5 + seed / 100) for seed in range(5)]
    >>> runs += [run("linear", seed, 0.4 + seed / 99) for seed in range(5)]
    >>> print(observe(runs)[1].sentence.partition(" against")[0])
    On the data set wine (1 model), linear has the lowest final validation loss: −19 % (−20 to −18 %, p < 0.001)
    """
    runs = newest_records(records)
    first = scope(runs)
    losses = effects(runs, LOSS)
    if not any(len(changes) > 1 for changes in losses.values()):
        return [first, nothing_to_conclude(runs, losses), *failures(runs)]
    return [first, *_general(runs, losses), *_by_property(runs, losses), *_single(runs, losses), *limits(runs)]


def _general(runs: Sequence[Record], losses: Effects) -> list[Observation]:
    whole = overall(runs)
    found = _best(runs, whole, losses, LOSS)
    way = _best(runs, whole, effects(runs, CONVERGENCE), CONVERGENCE)
    others = [cost_observation(runs, whole), replay_observation(runs, losses, whole)]
    return [*found, *(_about(one, "convergence") for one in way), *(one for one in others if one is not None)]


def _by_property(runs: Sequence[Record], losses: Effects) -> list[Observation]:
    """Say what is best by type, dimensionality, size, noise and model; the same runs are judged once."""
    halves = by_halves(runs)
    contrasts = {half.topic: contrast_observation(losses, half) for half in halves}
    slices = [*by_kind(runs), *(part for half in halves for part in (half.low, half.high)), *by_model(runs)]
    seen: dict[tuple[object, ...], Slice] = {overall(runs).cells: overall(runs)}
    found: list[Observation] = []
    for part in slices:
        twin = seen.setdefault(part.cells, part)
        found += _best(runs, part, losses, LOSS) if twin is part else [_same(part, twin)]
        contrast = contrasts.pop(part.topic, None) if part.label == _last_label(slices, part.topic) else None
        found += [contrast] if contrast else []
    return found


def _single(runs: Sequence[Record], losses: Effects) -> list[Observation]:
    tests = cell_tests(losses, LOSS)
    adaptive = adaptive_of(runs)
    metrics = cell_tests(effects(runs, METRIC), METRIC)
    if not any(one.strategy in adaptive for test in tests for one in test.compared):
        return []
    found = [no_better_observation(tests, adaptive), count_observation(tests, adaptive, topic="no better")]
    return [*found, *([count_observation(metrics, adaptive, topic="quality")] if metrics else [])]


def _best(runs: Sequence[Record], part: Slice, found: Effects, measure: Measure) -> list[Observation]:
    ranking = rank(found, part, measure)
    return [] if ranking is None else [best_observation(ranking, fixed_of(runs))]


def _same(part: Slice, twin: Slice) -> Observation:
    what = "the whole lab" if twin.topic == "overall" else f"the same runs as {twin.label}"
    text = str(part)
    return Observation(topic=part.topic, sentence=f"{text[0].upper()}{text[1:]}: {what}, see there.")


def _about(observation: Observation, topic: str) -> Observation:
    return Observation(
        topic=topic,
        sentence=observation.sentence,
        evidence=observation.evidence,
        strategies=observation.strategies,
    )


def _last_label(slices: Sequence[Slice], topic: str) -> str:
    return [part.label for part in slices if part.topic == topic][-1]
