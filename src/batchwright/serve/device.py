"""Device: what several batchers share, and only one of them uses at a time."""

from __future__ import annotations

from typing import final

from ._engine.turns import Turns


@final
class Device:
    """A processor that several batchers share: of all their batches, one runs at a time.

    The batcher whose most urgent request is due first goes next, and forms its batch only then. A request becomes no
    less urgent while it waits, so every batcher gets its turn. The time that a batch waits for the device is not part
    of the time that its batcher learns.

    A batched function that runs on a device may not submit to a batcher of the same device, directly or through
    batchers in between: the device would be held by a batch that waits for it. It may submit to a batcher of another
    device only if that was made later, so that no two batches wait for each other's device. Other requests are refused.
    Threads that a function starts itself are not seen by this check, and must keep to the rule.

    Args:
        name: what messages call it.

    >>> from batchwright.serve import Batcher
    >>> device = Device()
    >>> with Batcher(list, device=device) as one, Batcher(sorted, device=device) as two:
    ...     one.submit_sync(1), two.submit_sync(2)
    (1, 2)
    """

    def __init__(self, name: str = "device") -> None:
        self.name = name
        self._turns = Turns(name)

    def __repr__(self) -> str:
        return f"Device({self.name!r})"
