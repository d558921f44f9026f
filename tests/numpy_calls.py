"""Every public call outside ``size`` and ``step`` that takes a number or a flag, on small data.

A call returns what it made, which must hold no number of NumPy, and what is read from it, which must be the same JSON.
"""

import asyncio
import dataclasses
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import batchwright as bw
from batchwright import errors, serve, size, testing
from batchwright.errors import ArgumentError, BudgetError
from batchwright.plan.models._terms import Terms

NO_NUMBERS = [math.nan, math.inf, True, np.True_, "3", None, np.array([3]), np.float64("nan"), np.float32("inf")]
NOT_WHOLE = [*NO_NUMBERS, 2.5, np.float64(2.5)]


class Option(NamedTuple):
    """What an option may be, what it must refuse, and how."""

    values: st.SearchStrategy
    refused: list
    error: type = ArgumentError


def whole(low, high, *, error=ArgumentError, or_none=False, refused=NOT_WHOLE):
    """Take whole numbers from ``low`` to ``high``."""
    return Option(st.integers(low, high), _without_none(refused, or_none), error)


def number(low, high, *, error=ArgumentError, or_none=False, refused=NO_NUMBERS):
    """Take numbers that 32 bits hold exactly, whole ones among them."""
    floats = st.floats(low, high, width=32, allow_subnormal=False, exclude_min=low == 0)
    first, last = int(low) + 1, int(high)
    values = floats | st.integers(first, last) if first <= last else floats
    return Option(values, _without_none(refused, or_none), error)


def flag():
    """Take True and False."""
    return Option(st.booleans(), ["yes", 1, np.int64(1), None, np.array([True])])


def _without_none(refused, or_none):
    return [value for value in refused if value is not None or not or_none]


FINITE_OR_NOT = [value for value in NO_NUMBERS if isinstance(value, str | bool | np.ndarray)]  # takes infinity too
UNCHECKED = []  # an exception must not fail while it is made

LENGTHS = [3, 5, 2, 9, 4, 4, 7, 1]
SHAPES = [[1, 64], [8, 64], [8, 128], [4, 256], [2, 512]]
MODEL = bw.MemoryModel(Terms(1, (100.0, 0.0, 3.0, 0.0)), margin=0.005)
TIMES = bw.TimeModel(Terms(1, (0.08, 0.0, 1e-5, 0.0)))
PRIOR = bw.MemoryModel.pretrained("generate")
SECONDS_OF = serve.LatencyModel.fixed(0.5, 0.25, 0.125)


def cost(num_items, lengths):
    return num_items * lengths[:, 0]


def planned(**options):
    plan = bw.plan_batches(LENGTHS, bw.MaxTokens(64), **options)
    return plan, [list(plan), plan.shapes.tolist(), plan.report().to_dict(), str(plan.report())]


def sampled(**options):
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(64), **options)
    return sampler, [list(sampler), sampler.state_dict(), sampler.report().to_dict(), sampler.pad_to([3])]


def resized(num_examples=8, controller=3, **options):
    sampler = bw.ResizableBatchSampler(num_examples, controller, **options)
    return sampler, [list(sampler), sampler.state_dict(), sampler.num_repeated]


def regrouped(controller=3, make=bw.regroup, **options):
    batches = make([["a", "b"], ["c", "d"], ["e", "f"]], controller, **options)
    return batches, [list(batches), batches.state_dict()]


def streamed(**options):
    agree = bool if np.any(options.get("sharded", False)) else None
    batcher = bw.StreamBatcher(
        LENGTHS, length_of=lambda example: np.int64(example), budget=bw.MaxTokens(64), agree=agree, **options
    )
    return batcher, [list(batcher), batcher.state_dict()]


def collated(num_workers):
    return None, list(streamed()[0].loader(collate_fn=list, num_workers=num_workers))


def measured(progress=False, **options):
    lengths = bw.measure_lengths(["a b", "c", "a b c d e"], str.split, progress=progress, **options)
    return None, lengths.tolist()


def grouped(grouping):
    return grouping, list(bw.plan_batches(LENGTHS, bw.MaxTokens(64), grouping=grouping))


def limited(budget, num_axes=1):
    lengths = np.full((2, num_axes), [[8], [64]])
    sampler = bw.BatchSampler(LENGTHS, budget, oversize="alone") if num_axes == 1 else None
    return budget, [budget.max_items(lengths).tolist(), sampler and sampler.state_dict()["budget"]]


def at_epoch(make):
    def run(epoch):
        made = make()
        made.set_epoch(epoch)
        return made, [made.epoch, next(iter(made)), made.state_dict()]

    return run


def stored(model):
    return model, model.to_json()


def shown(made):
    return made, [repr(made)]


def served(use=None, **options):
    with serve.Batcher(list, **options) as batcher:
        answer = None if use is None else use(batcher)
        return batcher, [answer, dataclasses.asdict(batcher.settings)]


def decorated(use=None, **options):
    function = serve.batched(list, **options)
    answer = None if use is None else use(function)
    function.batcher.close_sync()
    return function.batcher, [answer, dataclasses.asdict(function.batcher.settings)]


def learned(num_items=4, length=16, seconds=0.5):
    model = serve.LatencyModel()
    for _ in range(10):
        model.observe(num_items, length, seconds)
    return stored(model)


def captured_fakes(*, max_captures=2, bytes_per_capture=8, used_bytes=3, total_bytes=1000):
    graphs = testing.EagerGraphs(
        max_captures=max_captures,
        bytes_per_capture=bytes_per_capture,
        used_bytes=used_bytes,
        total_bytes=total_bytes,
        clock=lambda: 0.0,
    )
    graphs.capture(lambda: None)
    return graphs.pool_bytes(), (graphs.used_bytes(), graphs.free_bytes())


def run_fake(total_bytes=100_000, used_bytes=10, first=2, second=3):
    memory = testing.FakeMemory(total_bytes, used_bytes=used_bytes)
    memory.run_batch(first, second)
    found = [memory.total_bytes, memory.used_bytes, memory.peak_bytes]
    with pytest.raises(MemoryError) as caught:
        memory.run_batch(second, total_bytes)
    return memory, [*found, str(caught.value)]


def advanced(seconds=1, now_seconds=0):
    clock = testing.FakeClock(now_seconds)
    clock.advance(seconds)
    return clock, clock()


def sampler_of_three(rank, world_size):
    return bw.BatchSampler([3, 1, 2], bw.MaxTokens(4), rank=rank, world_size=world_size)


def checked_sampler(num_examples=3, world_size=2):
    return None, testing.check_batch_sampler(sampler_of_three, num_examples=num_examples, world_sizes=(1, world_size))


def offline(**options):
    with serve.Batcher(list, background=serve.Background([["a", "b"], ["c"]], **options)) as batcher:
        return list(batcher.background)


def limits(**options):
    http = pytest.importorskip("batchwright.serve.http", exc_type=ImportError)
    made = http.Limits(**options)
    return made, dataclasses.asdict(made)


def app(**options):
    http = pytest.importorskip("batchwright.serve.http", exc_type=ImportError)
    return None, [route.path for route in http.make_app(serve.Batcher(list), **options).routes]


def lab(name):
    return pytest.importorskip(f"batchwright.lab.{name}" if name else "batchwright.lab", exc_type=ImportError)


def lab_plan(num_epochs=4, lr=None, seed=0, tuning_seed=9, rate=0.5, tuning_rounds=2):
    cell = lab("").Cell(dataset="wine", model="mlp", num_epochs=num_epochs, lr=lr)
    plan = lab("").LabPlan(
        name="small", cells=(cell,), strategies=("constant",), seeds=(seed,), tuning_seeds=(tuning_seed,),
        grids={"sgd": (rate,)}, tuning_rounds=tuning_rounds,
    )  # fmt: skip
    return plan, plan.to_dict()


def cell_settings(num_epochs=4, lr=0.5, base_size=8):
    options = {"base_size": base_size}
    cell = lab("").Cell(dataset="wine", model="mlp", num_epochs=num_epochs, lr=lr, options=options)
    return settings_of(cell.settings(SimpleNamespace(train=range(142))))


def settings_of(made):
    return made, [made.to_dict(), made.decay(900)]


def run_settings(share=0.5, **options):
    sizes = {"num_examples": 1000, "base_size": 8, "min_size": 4, "max_size": 64, **options}
    return settings_of(lab("strategies").RunSettings(decay_at=(share, 0.75), **sizes))


def served_page(port):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lab.json").touch()
        with lab("report").make_server(Path(folder), port=port) as server:
            return None, server.server_address[0]


def loaded(**options):
    pytest.importorskip("sklearn")
    return None, repr(lab("datasets").load("wine", **options))


def modelled(seed):
    dataset = lab("datasets").load("wine")
    weights = lab("models").make_model("mlp", dataset, seed=seed).state_dict().values()
    return None, [float(weight.sum()) for weight in weights]


def paired(**options):
    found = lab("statistics").paired_difference([3.0, 5.0, 7.0], [2.0, 3.0, 4.0], **options)
    return found, dataclasses.asdict(found)


def pooled(**options):
    found = lab("statistics").pooled_difference([[1.0, 2.0, 3.0], [2.0, 4.0]], **options)
    return found, dataclasses.asdict(found)


def conditions(examples=0, batch=16, **options):
    given = {"settings": run_settings()[0], "num_train": 100, "num_classes": 3, "schedule": {0: 8, examples: batch}}
    made = lab("strategies").Conditions(**{**given, **options})
    return made, [repr(lab("strategies").get(name).make(made).policy) for name in ("linear", "entropy", "replay_noise")]


PLANNING = {
    "shuffle": flag(), "seed": whole(0, 10**6), "size_multiple_of": whole(1, 3), "pad_multiple_of": whole(1, 8),
}  # fmt: skip
EPOCH = {**PLANNING, "keep_first": whole(0, 3), "drop_last": flag(), "balance_over": whole(1, 8, or_none=True)}
RANKS = {"rank": whole(0, 1), "world_size": whole(2, 4)}
REGROUPING = {"controller": whole(1, 9), "drop_last": flag(), "rank": whole(0, 1), "world_size": whole(2, 3)}
LIMIT = {"limit": whole(10, 5000, error=BudgetError)}
MAX_BYTES = {"max_bytes": number(200, 5000, error=BudgetError)}
DEADLINE = number(2**17, 2**20, or_none=True, refused=[*FINITE_OR_NOT, math.nan, 0, -1])
REQUEST = {"deadline_ms": DEADLINE, "priority": number(-10, 10)}
SERVING = {
    "max_items": whole(1, 99), "max_wait_ms": number(0, 50), "deadline_ms": DEADLINE,
    "max_tokens": whole(1, 9999, or_none=True), "max_queue": whole(1, 999),
}  # fmt: skip
BATCHER = {**SERVING, "num_workers": whole(1, 3), "run_timeout_ms": number(1000, 9999, or_none=True)}
CLOSING = {"drain": flag(), "timeout_seconds": number(5, 60, or_none=True, refused=[*FINITE_OR_NOT, math.nan])}
SECONDS = number(0, 50)
OR_INFINITE = [*FINITE_OR_NOT, None, math.nan]
FREEDOM = number(0.5, 9, refused=OR_INFINITE)
RUN_SETTINGS = {
    **dict.fromkeys(("num_examples", "max_size"), whole(64, 999)), "base_size": whole(8, 32), "min_size": whole(1, 8),
    "num_evaluations": whole(1, 9), "lr": number(0, 2), "momentum": number(0, 0.75), "decay_factor": number(1, 9),
    "share": number(0, 0.5),
}  # fmt: skip
TERMS = dict.fromkeys(("fixed", "per_item", "square", "longer_square"), number(0, 50))
FIGURES = dict.fromkeys(
    ("waited_seconds", "deadline_seconds", "predicted_seconds"), number(0, 9, refused=UNCHECKED)
)  # fmt: skip

# "name" or "Class.method": (a call, its options by name). Names outside plan begin with their room.
CALLS = {
    "plan_batches": (planned, {**EPOCH, "epoch": whole(0, 99), "world_size": whole(1, 4)}),
    "Plan.__getitem__": (lambda index: (None, planned()[0][index]), {"index": whole(-1, 0, refused=UNCHECKED)}),
    "Plan.report": (lambda **o: (None, planned()[0].report(**o).to_dict()), {"world_size": whole(1, 4, or_none=True)}),
    "BatchSampler": (sampled, {**EPOCH, **RANKS}),
    "BatchSampler.report": (
        lambda **o: (None, sampled()[0].report(**o).to_dict()), {"world_size": whole(1, 4, or_none=True)},
    ),
    "BatchSampler.set_epoch": (at_epoch(lambda: sampled()[0]), {"epoch": whole(0, 99)}),
    "BatchSampler.start_of": (lambda epoch: (None, sampled()[0].start_of(epoch)), {"epoch": whole(0, 99)}),
    "ResizableBatchSampler": (
        resized, {**RANKS, "num_examples": whole(1, 20), "controller": whole(1, 9), "shuffle": flag(),
                  "seed": whole(0, 99)},
    ),
    "ResizableBatchSampler.set_epoch": (at_epoch(lambda: resized()[0]), {"epoch": whole(0, 99)}),
    "regroup": (regrouped, REGROUPING),
    "Regrouped": (lambda **options: regrouped(make=bw.Regrouped, **options), REGROUPING),
    "Regrouped.set_epoch": (at_epoch(lambda: regrouped()[0]), {"epoch": whole(0, 99)}),
    "StreamBatcher": (
        streamed, {**PLANNING, **RANKS, "buffer_size": whole(4, 9), "sharded": flag()},
    ),
    "StreamBatcher.set_epoch": (at_epoch(lambda: streamed()[0]), {"epoch": whole(0, 99)}),
    "StreamBatcher.loader": (collated, {"num_workers": whole(0, 0)}),
    "measure_lengths": (
        measured, {"max_length": whole(1, 9, or_none=True), "num_workers": whole(0, 0), "batch_size": whole(1, 9),
                   "progress": flag()},
    ),
    "WindowSort": (lambda **o: grouped(bw.WindowSort(**o)), {"batches_per_window": whole(1, 9)}),
    "Buckets": (lambda **o: grouped(bw.Buckets(**o)), {"count": whole(1, 9)}),
    "Packed": (lambda **o: grouped(bw.Packed(**o)), {"capacity": whole(9, 64)}),
    "MaxItems": (lambda **o: limited(bw.MaxItems(**o)), LIMIT),
    "MaxTokens": (lambda **o: limited(bw.MaxTokens(**o)), LIMIT),
    "MaxCost": (lambda **o: limited(bw.MaxCost(cost, **o)), {"limit": number(10, 5000, error=BudgetError)}),
    "MaxBytes": (lambda **o: limited(bw.MaxBytes(MODEL, **o)), MAX_BYTES),
    "MemoryModel": (lambda **o: stored(bw.MemoryModel(MODEL.terms, **o)), {"margin": number(0, 1)}),
    "MemoryModel.budget": (lambda **o: limited(MODEL.budget(**o)), MAX_BYTES),
    "MemoryModel.fit": (
        lambda **o: stored(bw.MemoryModel.fit(SHAPES, [100 + b * n for b, n in SHAPES], **o)),
        {"quantile": number(0.5, 1)},
    ),
    "MemoryPrior": (lambda **o: shown(bw.MemoryPrior("train", **{**dict.fromkeys(TERMS, 1), **o})), TERMS),
    "MemoryPrior.budget": (
        lambda reference=8, new_tokens=9, **o: limited(
            PRIOR.budget(reference=(reference, 512), new_tokens=new_tokens, **o)
        ),
        {"reference": whole(1, 99), "fraction": number(0.5, 1), "new_tokens": whole(1, 99, or_none=True)},
    ),
    "MemoryPrior.relative": (
        lambda **o: (None, PRIOR.relative([[4, 100]], reference=(8, 50), **o).tolist()),
        {"new_tokens": whole(1, 99, or_none=True)},
    ),
    "TimeModel": (
        lambda **o: stored(bw.TimeModel(TIMES.terms, **o)),
        {"first_visit_seconds": number(0, 9), "launch_seconds": number(0, 9)},
    ),
    "TimeModel.fit": (
        lambda **o: stored(bw.TimeModel.fit(SHAPES, [1 + b * n for b, n in SHAPES], **o)),
        {"first_visit_seconds": number(1, 99, or_none=True)},
    ),
    "TimeModel.knee": (
        lambda **o: (None, TIMES.knee([30, 300], **o).tolist()),
        {"tolerance": number(0, 0.5), "max_items": whole(0, 99, or_none=True, refused=[*NO_NUMBERS, 2.5])},
    ),
    "PadTo": (
        lambda length=10, size=4, multiple_of=1, num_axes=None: (
            (pad := bw.PadTo(((length,),), (size,), multiple_of, num_axes)),
            [pad([3, 9]), pad([3, 9, 7, 1]), repr(pad)],
        ),
        {
            "length": whole(10, 30),
            "size": whole(2, 9),
            "multiple_of": whole(1, 8),
            "num_axes": whole(1, 1, or_none=True),
        },
    ),
    "BatchSizeController": (
        lambda min_size=1, max_size=512, initial=None: (
            (made := bw.BatchSizeController(size.linear(8, 2), min_size=min_size, max_size=max_size, initial=initial)),
            [made.observe(epoch=np.int64(1), loss=np.float32(0.5)), made.state_dict()],
        ),
        {"min_size": whole(1, 9), "max_size": whole(99, 999), "initial": whole(10, 90, or_none=True)},
    ),
    "errors.DeadlineExceeded": (
        lambda **o: ((made := errors.DeadlineExceeded("late", **o)), vars(made)), FIGURES,
    ),
    "serve.Settings": (lambda **o: ((made := serve.Settings(**o)), dataclasses.asdict(made)), SERVING),
    "serve.Batcher": (served, BATCHER),
    "serve.Batcher.configure": (lambda **o: served(lambda batcher: batcher.configure(**o)), SERVING),
    "serve.Batcher.submit": (lambda **o: served(lambda batcher: asyncio.run(batcher.submit("a", **o))), REQUEST),
    "serve.Batcher.submit_sync": (lambda **o: served(lambda batcher: batcher.submit_sync("a", **o)), REQUEST),
    "serve.Batcher.map": (
        lambda **o: served(lambda batcher: list(batcher.map("abc", **o))),
        {**REQUEST, "max_in_flight": whole(1, 9, or_none=True)},
    ),
    "serve.Batcher.close": (lambda **o: served(lambda batcher: asyncio.run(batcher.close(**o))), CLOSING),
    "serve.Batcher.close_sync": (lambda **o: served(lambda batcher: batcher.close_sync(**o)), CLOSING),
    "serve.batched": (decorated, BATCHER),
    "serve.BatchedFunction.__call__": (lambda **o: decorated(lambda run: asyncio.run(run("a", **o))), REQUEST),
    "serve.BatchedFunction.sync": (lambda **o: decorated(lambda run: run.sync("a", **o)), REQUEST),
    "serve.BatchedFunction.configure": (lambda **o: decorated(lambda run: run.configure(**o)), SERVING),
    "serve.BatchedFunction.close": (lambda **o: decorated(lambda run: asyncio.run(run.close(**o))), CLOSING),
    "serve.LatencyModel": (lambda **o: stored(serve.LatencyModel(**o)), {"decay": number(0.5, 1)}),
    "serve.LatencyModel.fixed": (
        lambda constant=1, **o: stored(serve.LatencyModel.fixed(constant, **o)),
        {"constant": SECONDS, "per_token": SECONDS, "per_square": SECONDS},
    ),
    "serve.LatencyModel.observe": (
        learned, {"num_items": whole(1, 99), "length": whole(1, 999), "seconds": number(0, 9, refused=FINITE_OR_NOT)},
    ),
    "serve.LatencyModel.per_item": (lambda **o: (None, SECONDS_OF.per_item(**o)), {"length": number(0, 999)}),
    "serve.LatencyModel.predict": (
        lambda num_items=1, length=1: (None, SECONDS_OF.predict(num_items, length)),
        {"num_items": whole(0, 99), "length": number(0, 999)},
    ),
    "serve.LatencyModel.upper": (
        lambda num_items=1, length=1: (None, SECONDS_OF.upper(num_items, length)),
        {"num_items": whole(0, 99), "length": number(0, 999)},
    ),
    "serve.Background": (lambda **o: (None, [batch.items for batch in offline(**o)]), {"max_ahead": whole(1, 99)}),
    "serve.http.Limits": (
        limits,
        {
            "max_items": whole(1, 999), "max_deadline_ms": number(1, 9999, refused=OR_INFINITE),
            "max_priority": number(0, 9),
            "max_headers": whole(1, 999), "max_header_bytes": whole(1024, 9999),
            "header_seconds": number(1, 99), "body_seconds": number(1, 99),
            "max_connections": whole(1, 999, or_none=True),
        },
    ),
    "serve.http.make_app": (
        app, {"max_body_bytes": whole(1, 10**6), "page": flag(),
              "drain_seconds": number(0, 99, or_none=True, refused=[*FINITE_OR_NOT, math.nan])},
    ),
    "testing.EagerGraphs": (
        captured_fakes,
        {
            "max_captures": whole(1, 9, or_none=True),
            "bytes_per_capture": whole(0, 99),
            "used_bytes": whole(0, 99),
            "total_bytes": whole(0, 9999, or_none=True),
        },
    ),
    "testing.FakeClock": (advanced, {"now_seconds": SECONDS}),
    "testing.FakeClock.advance": (advanced, {"seconds": SECONDS}),
    "testing.FakeMemory": (run_fake, {"total_bytes": whole(1000, 9999), "used_bytes": whole(0, 99)}),
    "testing.FakeMemory.run_batch": (
        run_fake, {"first": whole(1, 20, refused=NO_NUMBERS), "second": whole(1, 20, refused=NO_NUMBERS)},
    ),
    "testing.check_batch_sampler": (checked_sampler, {"num_examples": whole(3, 3), "world_size": whole(2, 3)}),
    "testing.check_policy": (
        lambda **o: (None, testing.check_policy(size.linear(8, 2), **o)),
        {"min_size": whole(1, 9), "max_size": whole(99, 999)},
    ),
    "lab.Cell": (
        lambda **o: lab_plan(**o), {"num_epochs": whole(1, 9), "lr": number(0, 1, or_none=True), "rate": number(0, 1)},
    ),
    "lab.Cell.settings": (
        cell_settings, {"num_epochs": whole(1, 9), "lr": number(0, 1, or_none=True), "base_size": whole(8, 16)},
    ),
    "lab.LabPlan": (
        lab_plan, {"seed": whole(0, 8), "tuning_seed": whole(9, 99), "tuning_rounds": whole(0, 9)},
    ),
    "lab.update_time.UpdateTime": (
        lambda fixed_ms=1, per_example_ms=1: (
            lab("update_time").UpdateTime(fixed_ms=fixed_ms, per_example_ms=per_example_ms), []
        ),
        {"fixed_ms": number(0.5, 99), "per_example_ms": number(0.5, 99)},
    ),
    "lab.update_time.UpdateTime.seconds": (
        lambda passes=1, examples=1: (lab("update_time").EAGER.seconds(passes=passes, examples=examples), []),
        {"passes": whole(0, 99), "examples": whole(0, 99)},
    ),
    "lab.callbacks.StepLogger": (
        lambda every: (lab("callbacks").StepLogger(SimpleNamespace(log=print), every=every), []),
        {"every": whole(1, 9)},
    ),
    "lab.report.make_server": (served_page, {"port": whole(0, 0)}),
    "lab.datasets.load": (loaded, {"limit": whole(50, 99, or_none=True), "max_length": whole(1, 99)}),
    "lab.models.make_model": (modelled, {"seed": whole(0, 99)}),
    "lab.statistics.paired_difference": (paired, {"confidence": number(0.5, 0.75), "resolution": SECONDS}),
    "lab.statistics.pooled_difference": (pooled, {"confidence": number(0.5, 0.75), "resolution": SECONDS}),
    "lab.statistics.smallest_detectable": (
        lambda error=1, freedom=3, **o: (None, lab("statistics").smallest_detectable(error, freedom, **o)),
        {"error": SECONDS, "freedom": FREEDOM, "level": number(0.125, 0.875), "power": number(0.5, 0.875)},
    ),
    "lab.statistics.equivalence": (
        lambda margin=1, **o: (None, lab("statistics").equivalence([1.0, 3.0], [1.0, 2.0], margin=margin, **o)),
        {"margin": SECONDS, "resolution": SECONDS},
    ),
    "lab.statistics.examples_to_reach": (
        lambda target: (None, lab("statistics").examples_to_reach([(0, 0.25), (100, 1)], target)),
        {"target": number(0, 1)},
    ),
    "lab.statistics.t_cdf": (
        lambda t=1, freedom=3: (None, lab("statistics").t_cdf(t, freedom)),
        {"t": number(-9, 9, refused=OR_INFINITE), "freedom": FREEDOM},
    ),
    "lab.statistics.t_quantile": (
        lambda probability=0.5, freedom=3: (None, lab("statistics").t_quantile(probability, freedom)),
        {"probability": number(0.125, 0.875), "freedom": FREEDOM},
    ),
    "lab.strategies.Conditions": (
        conditions, {"num_train": whole(50, 99), "num_classes": whole(2, 9, or_none=True),
                     "examples": whole(1, 99, refused=[math.nan, "3", None, 2.5]), "batch": whole(8, 16)},
    ),
    "lab.strategies.Setup": (
        lambda **o: shown(lab("strategies").Setup(**o)),
        {"noise_parts": whole(2, 9, or_none=True), "room": whole(1, 99, or_none=True), "fit_micro_batch": flag()},
    ),
    "lab.strategies.RunSettings": (run_settings, RUN_SETTINGS),
    "lab.strategies.RunSettings.decay": (
        lambda examples: (None, run_settings()[0].decay(examples)), {"examples": whole(0, 999)},
    ),
    "lab.strategies.RunSettings.fit": (
        lambda num_train=999, num_epochs=4, **o: settings_of(
            lab("strategies").RunSettings.fit(num_train, num_epochs=num_epochs, **o)
        ),
        {"num_train": whole(99, 999), "num_epochs": whole(1, 9), "base_size": whole(8, 16)},
    ),
    "lab.strategies.RunSettings.with_lr": (lambda lr: settings_of(run_settings()[0].with_lr(lr)), {"lr": number(0, 2)}),
    "lab.strategies.RunSettings.check_size_of": (
        lambda num_train: (None, run_settings()[0].check_size_of(num_train)), {"num_train": whole(999, 9999)},
    ),
    "lab.strategies.Strategy": (
        lambda **o: (
            (made := lab("strategies").Strategy(name="mine", group="constant", make=print, **o)),
            (made.needs_classes, made.min_epochs),
        ),
        {"needs_classes": flag(), "min_epochs": whole(1, 9)},
    ),
}  # fmt: skip

MADE_HERE = "made by the library, from numbers that it checked"
EXCEPTIONS = {
    "errors.UpdateMemoryError": MADE_HERE,
    "Plan": MADE_HERE, "PlanReport": MADE_HERE, "serve.Stats": MADE_HERE, "serve.Mapped": MADE_HERE,
    "serve.BackgroundBatch": MADE_HERE,
    "lab.statistics.PairedDifference": MADE_HERE, "lab.report.Lab": MADE_HERE, "lab.datasets.Dataset": MADE_HERE,
    "Grouping.check_axes": "called by the plan", "InOrder.check_axes": "called by the plan",
    "Sorted.check_axes": "called by the plan", "WindowSort.check_axes": "called by the plan",
    "Buckets.check_axes": "called by the plan", "Packed.check_axes": "called by the plan",
    "lab.Lab.forecast": "a trial trains a model; tests/lab makes it",
    "lab.Lab.run": "a run trains a model; tests/lab runs it",
    "lab.callbacks.TensorBoardLogger.log": "called by StepLogger",
    "lab.strategies.Strategy.fits": "asks only whether one number is None and how large the other is",
}  # fmt: skip
