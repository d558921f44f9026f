"""What is measured and how much of it, as plain records; the advice depends on nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from statistics import median
from typing import Any, final

# A step counts as no longer than the shortest one if it takes at most this much more.
FLAT = 0.25
# The best throughput counts as reached at this share of it.
REACHED = 0.9
# A loop that waits for nothing takes this many times its processor time when others want the processor too.
BUSY = 1.25
# Repeats that name neighbouring sizes, one twice the other, still give an answer: the range.
_MAX_RANGE = 2
# A graph pays if a step takes at least this many times as long without it.
PAYS = 1.1
# The width of one attention head of the models.
_HEAD_WIDTH = 64
# Rows that are decoded side by side.
_DECODED_ROWS = (16, 64, 256, 1024)
# A GPU with less free memory is measured with a smaller model.
_SMALL_DEVICE_BYTES = 8 * 2**30


@final
@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device and the software on it.

    Attributes:
        device: ``"cuda"``, ``"mps"`` or ``"cpu"``.
        name: the name of the device, as its maker calls it.
        num_devices: how many devices of that kind there are.
        total_bytes: the memory of one device.
        free_bytes: how much of it this process can use.
        has_bfloat16: whether it computes in bfloat16.
        allocator: the settings in ``PYTORCH_CUDA_ALLOC_CONF``.
        num_cores: the processor cores that this process may use.
        versions: the versions of Python, CUDA, cuDNN and packages; None for what is not installed.
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
    """The seconds of a step: the first with its shape, and a later one."""

    first_seconds: float
    later_seconds: float

    @property
    def extra_seconds(self) -> float:
        """Return how much longer the first visit takes."""
        return max(0.0, self.first_seconds - self.later_seconds)


@final
@dataclass(frozen=True, kw_only=True)
class Attention:
    """How long steps with one attention kernel take.

    Attributes:
        backend: ``"default"``, ``"flash"``, ``"efficient"``, ``"cudnn"`` or ``"math"``.
        visits: the shortest times over several shapes; None if the kernel cannot run here.
        takes_mask: whether it can run padded batches; if not, it was measured without padding.
        picks: for the default, the kernel that torch chose for such batches; None if torch does not say.
        repeats: the times of each shape.
    """

    backend: str
    visits: Visits | None = None
    takes_mask: bool = False
    picks: str | None = None
    repeats: tuple[Visits, ...] = ()

    @property
    def each(self) -> tuple[Visits, ...]:
        """Return the times of each shape, or the shortest ones if there are no others."""
        return self.repeats or (() if self.visits is None else (self.visits,))


@final
@dataclass(frozen=True)
class LaunchRow:
    """The tokens of a training step, and its seconds once its shape is known."""

    tokens: int
    seconds: float


@final
@dataclass(frozen=True, kw_only=True)
class Launch:
    """How long a training step takes, depending on the tokens of its batch.

    Attributes:
        model: the model that was trained, in words.
        rows: at least one, with rising tokens and seconds, the medians of the rounds.
        kernel_seconds: the time to launch one small operation, without waiting for it.
        noise: the largest factor by which a step took longer than a larger one; 1 on a quiet machine.
        rounds: the seconds of every row, once per round; each round ran all sizes in turn.
        in_processor_time: whether seconds are those of the processor, which others do not add to, or of the wall.

    >>> rows = (LaunchRow(64, 0.010), LaunchRow(128, 0.011), LaunchRow(256, 0.016), LaunchRow(512, 0.030))
    >>> found = Launch(model="any", rows=rows, kernel_seconds=1e-5)
    >>> found.floor_seconds, found.flat_tokens, found.knee_tokens
    (0.01, 128, 256)
    """

    model: str
    rows: tuple[LaunchRow, ...]
    kernel_seconds: float
    noise: float = 1.0
    rounds: tuple[tuple[float, ...], ...] = ()
    in_processor_time: bool = False

    @property
    def spread(self) -> float:
        """Return by how much rounds differ: the largest difference over the median, of the row that differs most."""
        if not self.rounds:
            return 0.0
        return max((max(each) - min(each)) / median(each) for each in zip(*self.rounds, strict=True))

    @property
    def flat_range(self) -> tuple[int, int] | None:
        """Return the fewest and the most ``flat_tokens`` that a round gives; None if they contradict each other."""
        return _range([one.flat_tokens for one in self._each])

    @property
    def knee_range(self) -> tuple[int, int] | None:
        """Return the fewest and the most ``knee_tokens`` that a round gives; None if they contradict each other."""
        return _range([one.knee_tokens for one in self._each])

    @property
    def _each(self) -> list[Launch]:
        """Return what each round alone would say, and all of them together."""
        rounds = [
            replace(self, rows=tuple(map(LaunchRow, [row.tokens for row in self.rows], seconds)), rounds=())
            for seconds in self.rounds
        ]
        return [self, *rounds]

    @property
    def floor_seconds(self) -> float:
        """Return the time of the shortest step."""
        return min(row.seconds for row in self.rows)

    @property
    def flat_tokens(self) -> int:
        """Return the most tokens whose step takes at most a quarter more than the shortest."""
        most = (1 + FLAT) * self.floor_seconds
        return [self.rows[0], *takewhile(lambda row: row.seconds <= most, self.rows)][-1].tokens

    @property
    def knee_tokens(self) -> int:
        """Return the fewest tokens with nine tenths of the best throughput."""
        best = max(row.tokens / row.seconds for row in self.rows)
        return next(row.tokens for row in self.rows if row.tokens / row.seconds >= REACHED * best)


def _range(votes: list[int]) -> tuple[int, int] | None:
    return (min(votes), max(votes)) if max(votes) <= _MAX_RANGE * min(votes) else None


@final
@dataclass(frozen=True)
class GraphRow:
    """The tokens of a pass, its seconds kernel by kernel, and replayed as a CUDA graph."""

    tokens: int
    eager_seconds: float
    replay_seconds: float

    @property
    def gain(self) -> float:
        """Return how many times as long the pass takes without the graph."""
        return self.eager_seconds / self.replay_seconds


@final
@dataclass(frozen=True, kw_only=True)
class Graphs:
    """What CUDA graphs save, depending on the tokens of a step.

    Attributes:
        model: the model that was run, in words.
        rows: with rising tokens, the medians of the rounds; only what was captured.
        rounds: the gain of every row, once per round.
        capture_seconds: the time of all captures.
        problem: why some sizes or all of them are missing; empty if none is.

    >>> found = Graphs(rows=(GraphRow(1024, 0.05, 0.01), GraphRow(2048, 0.05, 0.02), GraphRow(4096, 0.05, 0.05)))
    >>> found.paying_tokens
    2048
    """

    model: str = ""
    rows: tuple[GraphRow, ...] = ()
    rounds: tuple[tuple[float, ...], ...] = ()
    capture_seconds: float = 0.0
    problem: str = ""

    @property
    def paying_tokens(self) -> int:
        """Return the most tokens up to which every row gains at least a tenth; 0 if the first does not."""
        return self._paying([row.gain for row in self.rows])

    @property
    def paying_range(self) -> tuple[int, int] | None:
        """Return the fewest and the most ``paying_tokens`` that a round gives; None if they contradict each other."""
        return _range([self.paying_tokens, *map(self._paying, self.rounds)])

    def _paying(self, gains: Iterable[float]) -> int:
        paying = takewhile(lambda pair: pair[1] >= PAYS, zip((row.tokens for row in self.rows), gains, strict=True))
        return max((tokens for tokens, _ in paying), default=0)


@final
@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the machine was with other work.

    Attributes:
        wall_per_cpu: the time that a loop without any waiting takes, over its processor time; 1 on a quiet machine.
        average: the processes that ran or waited to run over the last minute; None where the system does not say.
    """

    wall_per_cpu: float = 1.0
    average: float | None = None

    @property
    def is_busy(self) -> bool:
        """Say whether other processes took the processor away."""
        return self.wall_per_cpu >= BUSY


@final
@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that was measured.

    Attributes:
        machine: what it was measured on.
        attention: kernels on new and known shapes.
        launch: training steps from small to large.
        graphs: what CUDA graphs save of forward and backward passes.
        load: how busy the machine was.
        encoding: what they save of forward passes without gradients.
        decoding: what they save of steps that add one token to each row; their tokens are rows.
    """

    machine: Machine
    attention: tuple[Attention, ...]
    launch: Launch
    graphs: Graphs = Graphs()
    load: Load = Load()
    encoding: Graphs = Graphs()
    decoding: Graphs = Graphs()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, including what follows from the measurements."""
        figures = asdict(self)
        figures["launch"] |= {
            name: getattr(self.launch, name)
            for name in ("floor_seconds", "flat_tokens", "knee_tokens", "flat_range", "knee_range", "spread")
        }
        for name, graphs in (("graphs", self.graphs), ("encoding", self.encoding), ("decoding", self.decoding)):
            for row, figure in zip(graphs.rows, figures[name]["rows"], strict=True):
                figure["gain"] = row.gain
            figures[name] |= {key: getattr(graphs, key) for key in ("paying_tokens", "paying_range")}
        return figures


@final
@dataclass(frozen=True)
class Advice:
    """One or two sentences, and a line of code to copy if there is one."""

    topic: str
    text: str
    code: str = ""


@final
@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure.

    Args:
        width: the width of the models.
        num_layers: the layers of the models.
        num_shapes: the number of new shapes per attention kernel.
        repeats: the timed runs of a shape after the first.
        rounds: how often all sizes are timed, in turn.
        length: the length of the examples of a step.
        max_items: the largest batch, a power of two.
        most_seconds: after a step of this length, no larger batch is run.
        graph_items: the batches that are captured as CUDA graphs, the smallest first.
    """

    width: int
    num_layers: int
    num_shapes: int
    repeats: int
    rounds: int
    length: int
    max_items: int
    most_seconds: float
    graph_items: tuple[int, ...] = ()

    @property
    def num_heads(self) -> int:
        """Return the attention heads of the models."""
        return max(1, self.width // _HEAD_WIDTH)

    def of_decoding(self) -> Effort:
        """Return the same for steps of one token a row, where graphs are measured at all."""
        return replace(self, length=1, graph_items=_DECODED_ROWS if self.graph_items else ())


CPU = Effort(width=64, num_layers=2, num_shapes=4, repeats=3, rounds=7, length=16, max_items=128, most_seconds=0.5)
# Graphs from 1,024 to 32,768 tokens.
GPU = replace(
    CPU,
    width=1024,
    num_layers=12,
    num_shapes=5,
    rounds=5,
    length=64,
    max_items=1024,
    graph_items=(16, 32, 64, 128, 256, 512),
)


def effort_for(machine: Machine, *, quick: bool) -> Effort:
    """Return what a machine can measure in about half a minute, or with ``quick`` in a few seconds."""
    full = CPU if machine.device == "cpu" else GPU
    if full is GPU and machine.free_bytes < _SMALL_DEVICE_BYTES:
        full = replace(GPU, width=512)
    if not quick:
        return full
    return replace(
        full,
        num_shapes=3,
        max_items=full.max_items // 4,
        most_seconds=full.most_seconds / 4,
        graph_items=full.graph_items[::2],
    )
