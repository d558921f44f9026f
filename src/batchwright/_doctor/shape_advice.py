"""What a new batch shape costs with each attention kernel, in a sentence or two."""

from __future__ import annotations

from dataclasses import replace

from .records import Advice, Attention, Machine, Visits

# A first visit is worth a word when it takes at least this many times a later one, and so much longer.
NOTABLE = 1.5
NOTABLE_SECONDS = 0.01
# Another kernel is worth a change when it leaves at most this share of the cost of a new shape.
WORTH = 0.5
FEW_SHAPES = "bw.plan_batches(lengths, budget, grouping=bw.Buckets(count=16))"
TURN_OFF = {
    "cudnn": "torch.backends.cuda.enable_cudnn_sdp(False)",
    "flash": "torch.backends.cuda.enable_flash_sdp(False)",
    "efficient": "torch.backends.cuda.enable_mem_efficient_sdp(False)",
}


def about_shapes(entries: tuple[Attention, ...], machine: Machine) -> Advice:
    """Say whether shapes should be few, and whether another kernel is the better way out."""
    default = _default(entries)
    visits = default.visits
    if visits is None:
        return Advice("shapes", "Attention could not be timed, so nothing is known of what a new shape costs.")
    first, later = milliseconds(visits.first_seconds), milliseconds(visits.later_seconds)
    if machine.device == "cpu":
        text = (
            f"On a CPU attention plans nothing for a shape ({first} when new, {later} later): lengths may vary freely."
        )
        return Advice("shapes", f"{text} Few shapes are needed only for torch.compile.")
    if visits.first_seconds < NOTABLE * visits.later_seconds or visits.extra_seconds < NOTABLE_SECONDS:
        text = f"A new batch shape costs little here: {first} against {later} later. Lengths may vary freely;"
        return Advice("shapes", f"{text} few shapes are needed only for torch.compile and CUDA graphs.")
    picked = "" if default.picks is None else f" ({default.picks})"
    cost = f"The first step of a batch shape takes {first} with the default attention{picked}, a later one {later}."
    better = _better(default, visits, entries)
    if better is None:
        return Advice("shapes", f"{cost} No other kernel is better, so plan few shapes.", FEW_SHAPES)
    what = "the default" if default.picks is None else f"{default.picks} attention"
    text = f"{cost} {_comparison(visits, *better, what=what)}"
    return Advice("shapes", text, TURN_OFF.get(default.picks or "", FEW_SHAPES))


def milliseconds(seconds: float) -> str:
    """Write seconds in milliseconds, with two figures at least.

    >>> milliseconds(0.0853), milliseconds(0.51), milliseconds(0.0012)
    ('85 ms', '510 ms', '1.2 ms')
    """
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"


def _default(entries: tuple[Attention, ...]) -> Attention:
    """Return the default, as fast as it was measured: by itself, or as the kernel it picks."""
    by_name = {entry.backend: entry for entry in entries}
    default = by_name.get("default", Attention(backend="default"))
    same = by_name.get(default.picks or "", default)
    if default.visits is None or same.visits is None or same.takes_mask != default.takes_mask:
        return default
    return replace(default, visits=min(default.visits, same.visits, key=lambda visits: visits.extra_seconds))


def _better(default: Attention, visits: Visits, entries: tuple[Attention, ...]) -> tuple[str, Visits] | None:
    """Return the kernel with the cheapest first visit, if that saves enough; it must run padded batches as well."""
    rest = [
        (entry.backend, entry.visits)
        for entry in entries
        if entry.visits is not None
        and entry.backend not in ("default", default.picks)
        and entry.visits.extra_seconds <= WORTH * visits.extra_seconds
        and (entry.takes_mask or not default.takes_mask)
    ]
    return min(rest, key=lambda pair: pair[1].first_seconds, default=None)


def _comparison(default: Visits, name: str, other: Visits, *, what: str) -> str:
    """Say what the other kernel gives, and when the default is better all the same."""
    first, later = milliseconds(other.first_seconds), milliseconds(other.later_seconds)
    gives = f"With {name} attention it is {first} and {later}"
    slower = other.later_seconds - default.later_seconds
    if slower <= 0:
        return f"{gives}: turn {what} off, or plan few shapes with {FEW_SHAPES}."
    visits = round((default.extra_seconds - other.extra_seconds) / slower)
    return (
        f"{gives}: turn {what} off where a shape comes fewer than about {visits:,} times. Where it comes more often, "
        f"keep it and plan few shapes with {FEW_SHAPES}."
    )
