"""Sentences about whether reacting to training matters, or only that the batch grows."""

from __future__ import annotations

from collections.abc import Sequence

from ._observe_best import Compared, compare_all
from ._observe_effects import LOSS, Effects, seed_means
from ._observe_groups import REPLAY, groups_of
from ._observe_record import Evidence, Observation
from ._observe_slices import Slice
from ._observe_words import change_text, interval_text, listed, p_text
from ._report_records import Record

_PREFIX = "replay_"


def replay_observation(records: Sequence[Record], found: Effects, part: Slice) -> Observation | None:
    """Compare each strategy with a replay of its own sizes from another seed.

    The replay has the same growth and does not react: what is left between the two is the reaction.

    Returns:
        The observation, None where no strategy and its replay have two seeds in common.
    """
    groups = groups_of(records)
    sources = [name.removeprefix(_PREFIX) for name, group in groups.items() if group == REPLAY]
    differences = {}
    for source in sources:
        own, replayed = (seed_means(found, part.cells, name) for name in (source, _PREFIX + source))
        differences[source] = [own[seed] - replayed[seed] for seed in sorted(own.keys() & replayed.keys())]
    compared = sorted(compare_all(differences), key=lambda one: (one.mean, one.strategy))
    if not compared:
        return None
    better, worse = ([one for one in compared if one.is_shown and sign * one.mean < 0] for sign in (1, -1))
    parts = [
        f"{listed([_brief(one) for one in some])} {'ends' if len(some) == 1 else 'end'} {where} than a replay of the "
        "same sizes"
        for some, where in ((better, "lower"), (worse, "higher"))
        if some
    ]
    open_ = [one.strategy for one in compared if not one.is_shown]
    if open_:
        parts.append(f"{listed(open_)} cannot be told apart from a replay of the same sizes")
    return Observation(
        topic="reacting",
        sentence=f"Reacting to training, or only growing? On {part}, {'; '.join(parts)}.",
        evidence=tuple(
            Evidence(what=f"{one.strategy} against {_PREFIX}{one.strategy}, {part}", measure=LOSS, compared=one)
            for one in compared
        ),
    )


def _brief(one: Compared) -> str:
    interval = interval_text(LOSS, one.low, one.high)
    return f"{one.strategy} ({change_text(LOSS, one.mean)}, {interval}, {p_text(one.p_corrected)})"
