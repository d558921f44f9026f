"""What was measured, as plain records: advice is a function of these alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, final

# A step counts as just as long while it takes at most this much more than the shortest one.
FLAT = 0.25
# Throughput counts as reached at this share of the best.
REACHED = 0.9


@final
@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device and what runs on it.

    Attributes:
        device: ``"cuda"``, ``"mps"`` or ``"cpu"``.
        name: of the device, as its maker calls it.
        num_devices: of that kind.
        total_bytes: memory of one device.
        free_bytes: what this process could have of it.
        has_bfloat16: whether it computes in bfloat16.
        allocator: the settings in ``PYTORCH_CUDA_ALLOC_CONF``.
        num_cores: that this process may use.
        versions: of Python, CUDA, cuDNN and packages; None where one is not there.
    """

    device: str
    name: str
    num_devices: int
    total_bytes: int
    free_bytes: int
    has_bfloat16: bool
    allocator: str
    num_cores: int
    versions: Mapping[str, str | None]


@final
@dataclass(frozen=True)
class Visits:
    """The seconds of a step: the first of its shape, and a later one."""

    first_seconds: float
    later_seconds: float

    @property
    def extra_seconds(self) -> float:
        """Return what the first visit takes more."""
        return max(0.0, self.first_seconds - self.later_seconds)


@final
@dataclass(frozen=True, kw_only=True)
class Attention:
    """What steps with one attention kernel take.

    Attributes:
        backend: ``"default"``, ``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"math"``.
        visits: the least over several shapes; None where the kernel cannot run here.
        takes_mask: whether it runs batches with padding; if not, it was measured without.
        picks: of the default, the kernel that torch chose for such batches; None where it does not say.
    """

    backend: str
    visits: Visits | None = None
    takes_mask: bool = False
    picks: str | None = None


class LaunchRow(NamedTuple):
    """A training step of so many tokens, and its steady seconds."""

    tokens: int
    seconds: float


@final
@dataclass(frozen=True, kw_only=True)
class Launch:
    """How long a training step takes by the tokens of its batch.

    Attributes:
        model: what was trained, in words.
        rows: rising in tokens and in seconds, at least one.
        kernel_seconds: to launch one small operation, without waiting for it.
        noise: the most times longer that a step took than a larger one; 1 on a quiet machine.

    >>> rows = (LaunchRow(64, 0.010), LaunchRow(128, 0.011), LaunchRow(256, 0.016), LaunchRow(512, 0.030))
    >>> found = Launch(model="any", rows=rows, kernel_seconds=1e-5)
    >>> found.floor_seconds, found.flat_tokens, found.knee_tokens
    (0.01, 128, 256)
    """

    model: str
    rows: tuple[LaunchRow, ...]
    kernel_seconds: float
    noise: float = 1.0

    @property
    def floor_seconds(self) -> float:
        """Return the shortest step: no batch takes less."""
        return min(row.seconds for row in self.rows)

    @property
    def flat_tokens(self) -> int:
        """Return the most tokens whose step takes at most a quarter more than the shortest."""
        flat = self.rows[0].tokens
        for row in self.rows:
            if row.seconds > (1 + FLAT) * self.floor_seconds:
                break
            flat = row.tokens
        return flat

    @property
    def knee_tokens(self) -> int:
        """Return the fewest tokens with nine tenths of the best throughput."""
        best = max(row.tokens / row.seconds for row in self.rows)
        return next(row.tokens for row in self.rows if row.tokens / row.seconds >= REACHED * best)


@final
@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that was measured."""

    machine: Machine
    attention: tuple[Attention, ...]
    launch: Launch

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, what follows from the measurements included."""
        launch = self.launch
        derived = {
            "floor_seconds": launch.floor_seconds,
            "flat_tokens": launch.flat_tokens,
            "knee_tokens": launch.knee_tokens,
        }
        rows = [row._asdict() for row in launch.rows]
        return {
            "machine": asdict(self.machine),
            "attention": [asdict(entry) for entry in self.attention],
            "launch": {**asdict(launch), "rows": rows, **derived},
        }


@final
@dataclass(frozen=True)
class Advice:
    """A sentence or two, and a line to copy where there is one."""

    topic: str
    text: str
    code: str = ""
