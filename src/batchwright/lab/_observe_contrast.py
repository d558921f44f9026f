"""Sentences about whether a property of the data changes what a strategy does."""

from __future__ import annotations

from ._observe_best import compare_all
from ._observe_effects import LOSS, Effects, seed_means
from ._observe_record import Evidence, Observation
from ._observe_slices import Halves
from ._observe_words import change_text, counted, p_text


def contrast_observation(found: Effects, halves: Halves) -> Observation | None:
    """Say whether any strategy does more on one half of the data sets than on the other.

    The change of the upper half less that of the lower, seed by seed, for every strategy; all corrected together.

    Returns:
        The observation, None where no two seeds have both halves.
    """
    differences, sides = {}, {}
    for name in dict.fromkeys(strategy for _, strategy in found):
        low, high = (seed_means(found, part.cells, name) for part in (halves.low, halves.high))
        seeds = sorted(low.keys() & high.keys())
        differences[name] = [high[seed] - low[seed] for seed in seeds]
        sides[name] = [sum(side[seed] for seed in seeds) / len(seeds) if seeds else 0.0 for side in (low, high)]
    compared = sorted(compare_all(differences), key=lambda one: (one.p_corrected, -abs(one.mean), one.strategy))
    if not compared:
        return None
    first = compared[0]
    evidence = Evidence(
        what=f"{first.strategy}: its change on {halves.high.label} less that on {halves.low.label}",
        measure=LOSS,
        compared=first,
    )
    if first.is_shown:
        low_text, high_text = (change_text(LOSS, side) for side in sides[first.strategy])
        num_shown = sum(one.is_shown for one in compared)
        sentence = (
            f"What {first.strategy} does to the validation loss differs with the {halves.topic} of the data: "
            f"{low_text} on {halves.low}, {high_text} on {halves.high}; {p_text(first.p_corrected)}. "
            f"Such a difference is shown for {num_shown} of {counted(len(compared), 'strategy')}."
        )
    else:
        sentence = (
            f"No strategy is shown to do more or less with the {halves.topic} of the data: of "
            f"{counted(len(compared), 'strategy')} the clearest difference between {halves.low.label} and "
            f"{halves.high.label}, of {first.strategy}, could be chance ({p_text(first.p_corrected)})."
        )
    return Observation(topic=halves.topic, sentence=sentence, evidence=(evidence,))
