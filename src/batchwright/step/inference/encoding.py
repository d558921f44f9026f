"""Encoding: one vector per text, for any number of texts at once, and for live requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..._checks import as_whole, check_choice
from ..._lengths import as_lengths
from ..._progress import ProgressBar
from ..._types import MAX_INT32
from ...errors import ArgumentError
from ...plan import Buckets, Budget, MaxItems, MaxTokens, Plan, plan_batches
from ...plan.budget import check_budget
from ...serve import Batcher, LatencyModel
from .._loss_probe import evaluating
from ..graphs._rotary import renew, same_reach, sides_of
from ..graphs.backend import Choice
from ..graphs.functions import graphed
from ..graphs.summary import GraphSummary
from ..memory.monitor import MemoryMonitor
from ._pooling import Pooled, TokenIds, check_texts, longest_of, pad_id_of, read_all, stacked
from ._sharing import by_number
from .pieces import run_growing, run_in_pieces

# Without a budget, graphs are captured for batches of so many tokens: larger ones hardly gain.
_TOKENS, _ITEMS = 16_384, 1024
_NUM_SHAPES = 16
# A capture takes about as long as a few runs of its shape.
_RUNS_PER_CAPTURE = 8
_SHORTEST = 16
_MOST_IDS = 4096
# A time model needs eight calls, without the first one of each shape.
_NUM_TIMED = 12


def encode(
    model: Any,
    tokenizer: Any,
    texts: Sequence[Any],
    *,
    pool: str = "mean",
    normalize: bool = False,
    max_length: int | None = None,
    budget: Budget | str = "auto",
    graphs: Choice = "auto",
    memory: MemoryMonitor | None = None,
    progress: bool = False,
) -> Tensor:
    """Return one vector per text, as if each had been encoded on its own, in batches of similar length that fit.

    Texts are padded on the right and masked. A model that padding changes nevertheless (ConvBERT, FNet, Nystromformer),
    which one padded text shows, gets batches of texts of one length. A batch that runs out of memory is split.

    Args:
        model: an encoder of transformers as ``AutoModel`` loads it, a decoder, or an encoder-decoder, whose encoder
            runs; in any mode, it encodes in evaluation mode.
        tokenizer: of transformers, or a function from str to token ids; None if ``texts`` are token ids.
        texts: texts, or lists of token ids.
        pool: "mean" over the tokens of a text, "cls" for its first token, "last" for its last one.
        normalize: give every vector a length of 1.
        max_length: cut texts to so many tokens; None takes the tokenizer's maximum, or the model's.
        budget: what a batch may cost. "auto" lets batches grow as ``generate`` does, and takes 16,384 tokens where
            graphs are captured.
        graphs: False never captures; ``"auto"`` captures at most 16 shapes if the plan has enough batches of them on a
            CUDA device, and True in any case.
        memory: reads the peak of every batch that runs without a budget; None reads that of a CUDA device.
        progress: show a progress bar.

    Returns:
        ``float32`` of shape ``(N, width)`` on the CPU, in the order of the texts.

    >>> model = torch.nn.Embedding(10, 3)
    >>> _ = torch.nn.init.ones_(model.weight)
    >>> class Tiny(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = model
    ...     def get_input_embeddings(self):
    ...         return self.table
    ...     def forward(self, input_ids, attention_mask):
    ...         return (self.table(input_ids),)
    >>> encode(Tiny(), None, [[1, 2], [3]]).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    check_texts(texts)
    pooled = Pooled(model, pool=pool, normalize=normalize)
    longest = longest_of(tokenizer, pooled, max_length)
    tokens = TokenIds(tokenizer, max_length=longest, num_tokens=pooled.num_tokens)
    if not isinstance(budget, Budget):
        check_choice("budget", budget, ("auto",))
    rows = read_all(tokens, texts, None if tokenizer is not None else pooled.own_pad)
    if not rows:
        width = getattr(getattr(model, "config", None), "hidden_size", 0)
        return torch.zeros(0, width)
    pooled.check_longest(max(map(len, rows)))
    run = _Run(pooled, rows, pad_id_of(tokenizer, pooled))
    with ProgressBar(label="encoding", total=len(rows), enabled=progress) as bar, evaluating(pooled):
        is_off = graphs is False or (graphs == "auto" and pooled.device.type != "cuda")
        groups, may_pad = run.groups()
        if graphs is True and not may_pad:
            raise ArgumentError(
                "graphs=True cannot be followed: padding changes the vectors of this model, so texts share a batch "
                "only with those of their length; pass graphs='auto' or graphs=False"
            )
        for places in groups:
            plan = None if is_off or not may_pad else _static_plan(run.lengths[places], budget)
            if plan is not None and _is_worth(plan, graphs):
                run.over(places, plan, graphs, bar)
            else:
                run.growing(places, None if isinstance(budget, str) else check_budget(budget), memory, bar)
    return run.result()


def _static_plan(lengths: npt.NDArray[np.int32], budget: Budget | str) -> Plan:
    chosen = MaxTokens(_TOKENS) & MaxItems(_ITEMS) if isinstance(budget, str) else budget
    return plan_batches(lengths, chosen, grouping=Buckets(_NUM_SHAPES), shuffle=False, oversize="alone")


def _is_worth(plan: Plan, graphs: Choice) -> bool:
    """Say whether graphs are wanted: with "auto", where batches are many more than shapes."""
    if not isinstance(graphs, str):
        return True
    num_shapes = len(np.unique(plan.shapes, axis=0))
    return len(plan) >= _RUNS_PER_CAPTURE * num_shapes


@final
class _Run:
    """Encodes token ids batch by batch, and keeps the vectors by their places."""

    def __init__(self, pooled: Pooled, rows: list[list[int]], pad_id: int) -> None:
        self._pooled, self._rows, self._pad_id = pooled, rows, pad_id
        self.lengths = as_lengths([len(row) for row in rows])
        self._vectors: dict[int, Tensor] = {}

    def groups(self) -> tuple[list[npt.NDArray[np.int64]], bool]:
        """Return the places of texts that may share a batch, and whether padding leaves vectors as they are."""
        lengths = self.lengths[:, 0].tolist()
        may_pad = len(set(lengths)) == 1 or self._pooled.pads_freely(min(self._rows, key=len), self._pad_id) is True
        found = sides_of(self._pooled.rotary, lengths) if may_pad else by_number(lengths)
        return [np.array(places) for places in found], may_pad

    def over(self, places: npt.NDArray[np.int64], plan: Plan, graphs: Choice, bar: ProgressBar) -> None:
        """Run a plan of few shapes; what fits none of them, or into no memory, runs eagerly in pieces."""
        function = graphed(self._pooled, plan, pad={"input_ids": self._pad_id, "attention_mask": 0}, graphs=graphs)
        for number in np.argsort(-plan.shapes.prod(axis=1), kind="stable"):
            self._run(function, places[plan[number]].tolist(), bar)

    def growing(
        self, places: npt.NDArray[np.int64], budget: Budget | None, memory: MemoryMonitor | None, bar: ProgressBar
    ) -> None:
        """Run eagerly in batches of a budget, or in such that grow as far as memory allows."""
        run = partial(self._run, self._pooled, bar=bar)
        run_growing(run, self.lengths, places, budget=budget, memory=memory, device=self._pooled.device)

    def _run(self, function: Any, indices: list[int], bar: ProgressBar) -> int:
        """Encode some rows, and return how many fitted at once."""
        device = self._pooled.device

        def piece(chosen: list[int]) -> Tensor:
            ids, mask = stacked([self._rows[index] for index in chosen], self._pad_id)
            renew(self._pooled.rotary)
            found: Tensor = function(input_ids=ids.to(device), attention_mask=mask.to(device))
            return found.cpu()

        pieces = run_in_pieces(
            piece,
            lambda start, stop: indices[start:stop],
            len(indices),
            describe=lambda place: f"text {indices[place]} of {self.lengths[indices[place], 0]} tokens",
        )
        # Cloned outside inference mode: tensors made inside it cannot be trained on.
        vectors = [vector.clone() for vectors in pieces.results for vector in vectors]
        self._vectors.update(zip(indices, vectors, strict=True))
        bar.update(len(indices))
        return pieces.size

    def result(self) -> Tensor:
        """Return the vectors in the order of the texts."""
        return torch.stack([self._vectors[index] for index in range(len(self._rows))])


@final
class Encoder:
    """Encodes lists of texts for a ``Batcher``, over a few shapes that are all captured before the first request.

    ``encoder.batcher(deadline_ms=50)`` returns a ``Batcher`` whose lengths, ``max_items``, ``max_tokens`` and times
    come from here. A batch is padded to the smallest of the shapes that holds it, run (with ``graphs``, replayed
    as a CUDA graph), and cut. So no request pays for a shape that is new to the device, and every vector is the
    one that its text has on its own. A model that padding changes is refused.

    Args:
        model: as for ``encode``; in evaluation mode, ``model.eval()``.
        tokenizer: as for ``encode``; it is copied, as it runs in the threads of callers.
        pool: as for ``encode``.
        normalize: as for ``encode``.
        max_length: cut texts to so many tokens; None takes the tokenizer's maximum, or the model's.
        max_items: the most texts in a batch.
        max_tokens: the most padded tokens in a batch; at least one text of ``max_length`` always fits.
        shapes: ``(num_items, length)`` of the batches, None for powers of 2 up to these limits.
        graphs: ``"auto"``, True or False, as for ``graphed``; ``"auto"`` runs eagerly without a CUDA device.

    >>> import torch
    >>> class Tiny(torch.nn.Embedding):
    ...     def get_input_embeddings(self):
    ...         return self
    ...     def forward(self, input_ids, attention_mask):
    ...         return (super().forward(input_ids),)
    >>> encoder = Encoder(Tiny(10, 3).eval(), None, max_length=32, max_items=4)
    >>> encoder.shapes
    ((1, 16), (2, 16), (1, 32), (4, 16), (2, 32), (4, 32))
    >>> with encoder.batcher() as batcher:
    ...     batcher.submit_sync([1, 2, 3]).shape
    (3,)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        pool: str = "mean",
        normalize: bool = False,
        max_length: int | None = None,
        max_items: int = 64,
        max_tokens: int = _TOKENS,
        shapes: Any = None,
        graphs: Choice = "auto",
    ) -> None:
        self._pooled = Pooled(model, pool=pool, normalize=normalize)
        self._pooled.check_mode(any(part.training for part in self._pooled.model.modules()))
        self._pooled.eval()
        longest = longest_of(tokenizer, self._pooled, max_length)
        if shapes is None and longest is None:
            raise ArgumentError("neither the tokenizer nor the model has a longest input; give max_length=")
        reach = same_reach(self._pooled.rotary)
        self.shapes = _as_pairs(shapes) if shapes is not None else _pairs(longest or 1, max_items, max_tokens, reach)
        most = max(length for _, length in self.shapes)
        self._pooled.check_longest(most)
        self._tokens = TokenIds(
            tokenizer, max_length=most if longest is None else min(most, longest), num_tokens=self._pooled.num_tokens
        )
        self._lengths = sorted({length for _, length in self.shapes})
        self._pad_id = pad_id_of(tokenizer, self._pooled)
        if self._pooled.pads_freely(self._example(1, most)[0][0].tolist(), self._pad_id) is False:
            raise ArgumentError(
                "padding changes the vectors of this model, so requests cannot share batches; encode() puts texts of "
                "one length into a batch"
            )
        is_off = isinstance(graphs, str) and graphs == "auto" and self._pooled.device.type != "cuda"
        self._function = graphed(
            self._pooled,
            self.shapes,
            pad={"input_ids": self._pad_id, "attention_mask": 0},
            graphs=False if is_off else graphs,
        )
        self._seconds: list[tuple[int, int, float]] = []

    def __call__(self, items: Sequence[Any]) -> list[npt.NDArray[np.float32]]:
        """Return the vector of every item."""
        self._pooled.check_mode(self._pooled.model.training)  # a loop may train it meanwhile
        rows = [self._tokens(item) for item in items]
        found: dict[int, npt.NDArray[np.float32]] = {}
        for places in sides_of(self._pooled.rotary, list(map(len, rows))):
            vectors = self._run(*stacked([rows[place] for place in places], self._pad_id))
            found |= {place: vector.copy() for place, vector in zip(places, vectors, strict=True)}
        return [found[place] for place in range(len(rows))]

    def _run(self, ids: Tensor, mask: Tensor) -> npt.NDArray[np.float32]:
        renew(self._pooled.rotary)
        found: Tensor = self._function(input_ids=ids, attention_mask=mask)
        array: npt.NDArray[np.float32] = found.cpu().numpy()
        return array

    def length_of(self, item: Any) -> int:
        """Return the length that an item is padded to at the least; an item that cannot be encoded is refused here."""
        length = len(self._tokens(item))
        return next(one for one in self._lengths if one >= length)

    def warm_up(self) -> GraphSummary:
        """Capture and time every shape, once; ``batcher`` does it before it takes requests."""
        if not self._seconds:
            for rows, length in self.shapes[::-1]:
                self._run(*self._example(rows, length))
            for rows, length in self.shapes * (1 + -(-_NUM_TIMED // len(self.shapes))):
                start = time.perf_counter()
                self._run(*self._example(rows, length))
                self._seconds.append((rows, length, time.perf_counter() - start))
        return self.summary()

    def _example(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return rows of a shape, of token ids that are no padding."""
        num = self._pooled.num_tokens
        known = range(min(num, _MOST_IDS) if num < MAX_INT32 else 2)  # where nobody says, 0 and 1 are tokens
        allowed = [one for one in known if one != self._pad_id] or [self._pad_id]
        drawn = np.random.default_rng([rows, length]).integers(0, len(allowed), (rows, min(length, self._most)))
        ids = torch.from_numpy(np.asarray(allowed, dtype=np.int64)[drawn])
        return ids, torch.ones_like(ids)

    @property
    def _most(self) -> int:
        """Return the most tokens of an item."""
        return self._tokens.max_length or self._lengths[-1]

    def batcher(self, **options: Any) -> Batcher[Any, npt.NDArray[np.float32]]:
        """Return a ``Batcher`` of this encoder, after ``warm_up``.

        Args:
            **options: of ``Batcher``, such as ``deadline_ms``; ``length_of``, ``max_items``, ``max_tokens`` and
                ``time_model`` come from the shapes.
        """
        given = sorted({"length_of", "tokenizer", "worker"} & options.keys())
        if given:
            raise ArgumentError(f"{given[0]} comes from the encoder, which runs in threads; leave it out")
        self.warm_up()
        model = LatencyModel()
        for rows, length, seconds in self._seconds:
            model.observe(rows, length, seconds)
        return Batcher(self, length_of=self.length_of, **{**self.batcher_options, "time_model": model, **options})

    @property
    def batcher_options(self) -> dict[str, int]:
        """Return ``max_items`` and ``max_tokens`` of a ``Batcher``, with which a shape holds every batch."""
        return {
            "max_items": max(rows for rows, _ in self.shapes),
            "max_tokens": max(rows * length for rows, length in self.shapes),
        }

    def summary(self) -> GraphSummary:
        """Return what was captured and replayed so far, what ran eagerly, and why."""
        return self._function.summary()


def _as_pairs(shapes: Any) -> tuple[tuple[int, int], ...]:
    """Return shapes as pairs, those of the fewest tokens first."""
    pairs = [tuple(shape) for shape in shapes]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ArgumentError(f"shapes must be pairs (num_items, length), got {shapes!r}")
    checked = {(as_whole("num_items", rows, least=1), as_whole("length", length, least=1)) for rows, length in pairs}
    return tuple(sorted(checked, key=lambda pair: (pair[0] * pair[1], pair[1])))


def _pairs(max_length: int, max_items: Any, max_tokens: Any, reach: int | None = None) -> tuple[tuple[int, int], ...]:
    """Return powers of 2 up to the limits: for every length as many rows as its tokens allow.

    >>> _pairs(32, 4, 64)
    ((1, 16), (2, 16), (1, 32), (4, 16), (2, 32))
    """
    max_items, max_tokens = as_whole("max_items", max_items, least=1), as_whole("max_tokens", max_tokens, least=1)
    max_tokens = max(max_tokens, max_length)  # one of the longest texts always fits, and so do as many short ones
    found = []
    lengths = _powers(_SHORTEST, max_length)
    if reach is not None and reach < max_length:  # no text is padded beyond it
        lengths = sorted({*lengths, reach})
    for length in lengths:
        most = max(1, min(max_items, max_tokens // length))
        found += [(rows, length) for rows in _powers(1, most)]
    return _as_pairs(found)


def _powers(first: int, last: int) -> list[int]:
    """Return powers of 2 times the first number, up to the last one, which is always there.

    >>> _powers(16, 50), _powers(16, 7)
    ([16, 32, 50], [7])
    """
    return [*(value for power in range(32) if (value := first << power) < last), last]
