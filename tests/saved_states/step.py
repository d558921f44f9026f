"""States of steppers, of what follows memory, and of fitted models."""

import json
from functools import partial

import torch
from torch import nn

import batchwright as bw
from batchwright.serve import LatencyModel
from batchwright.step import BudgetTracker, Calibration, FitToMemory, HeldOutErrors, MemoryMonitor, Stepper
from batchwright.testing import FakeMemory

from .cases import Case, plain

SHAPES = [[b, length] for b in (1, 2, 4, 8) for length in (8, 16, 64)]
PAIR_SHAPES = [[b, source, target] for b in (1, 4, 8) for source in (8, 64) for target in (4, 32)]
MEMORY = bw.MemoryModel.from_json(
    '{"kind": "batchwright.MemoryModel", "version": 1, "num_axes": 1, "margin": 0.1, '
    '"coefficients": {"1": 100.0, "b": 0.0, "b*L0": 1.0, "b*L0^2": 0.0}}'
)


# Stepper


class Scene:
    """A small net in double precision whose steps take memory as on a device."""

    def __init__(self, *, most_items=100, **options):
        self.model = nn.Linear(3, 1, dtype=torch.float64)
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([[0.5, -0.25, 0.125]]))
            self.model.bias.fill_(0.0625)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.memory = FakeMemory(
            100_000, used_bytes=100, bytes_of=lambda num_items, per_token: num_items * 10 * per_token
        )
        self.most_items = most_items
        if "budget" in options:
            options |= {
                "micro_batch": MEMORY.budget(options.pop("budget")),
                "lengths": lambda batch: [10] * len(batch[0]),
            }
            options |= {"memory": MemoryMonitor(source=self.memory)}
        self.stepper = Stepper(self.model, self.optimizer, self.loss, **options)

    def loss(self, model, batch):
        inputs, targets = batch
        if len(inputs) > self.most_items:
            raise torch.OutOfMemoryError("CUDA out of memory. A stand-in.")
        self.memory.run_batch(len(inputs), 2)
        return (model(inputs).squeeze(1) - targets).square().sum(), len(inputs)

    def run(self, start, stop):
        return [self._report(self.stepper.step(make_batch(number))) for number in range(start, stop)]

    def _report(self, report):
        noise = None if report.noise is None else [report.noise.s, report.noise.g2, report.noise.reliable]
        counts = [report.batch_size, report.num_micro_batches, report.ooms]
        return {
            "loss": float(report.loss),
            "lr": report.lr,
            "noise": noise,
            "counts": counts,
            "peak": report.peak_bytes,
        }

    @property
    def weights(self):
        return {name: value.tolist() for name, value in self.model.state_dict().items()}


def make_batch(number, num=24):
    rows = torch.arange(num * 3, dtype=torch.float64).reshape(num, 3)
    inputs = ((rows * 7 + number * 5) % 11 - 5) / 8
    return inputs, (inputs.sum(dim=1) + ((rows[:, 0] + number) % 3 - 1) / 4)


def save_stepper(options):
    scene = Scene(**options)
    scene.run(0, 20)
    return {"stepper": scene.stepper.state_dict(), "weights": scene.weights}


def go_on_stepper(options, state):
    scene = Scene(**options)
    scene.model.load_state_dict({name: torch.tensor(value).double() for name, value in state["weights"].items()})
    scene.stepper.load_state_dict(state["stepper"])
    kept = scene.stepper.state_dict() == state["stepper"]
    return {"kept": kept, "reports": scene.run(20, 26), "weights": scene.weights, "state": scene.stepper.state_dict()}


STEPPERS = {
    "plain": {},
    "out of memory": {"most_items": 9},
    "noise": {"micro_batch": 6, "measure_noise": True},
    "adascale": {"micro_batch": 6, "measure_noise": True, "lr_rule": "adascale", "base_size": 8, "most_items": 5},
    "budget": {"budget": 330.0},
}


# What follows memory


def save_fit():
    fit = FitToMemory(64, initial=16)
    for fraction in (0.2, 0.85, 0.4, 0.4, 0.3):
        fit.observe(fraction)
    return fit.state_dict()


def go_on_fit(state):
    fit = FitToMemory(64, initial=16)
    fit.load_state_dict(state)
    kept = fit.state_dict() == state
    sizes = [fit.observe(fraction, baseline=0.05) for fraction in (0.3, 0.9, 0.2, 0.2, *[0.1] * 60)]
    return {"kept": kept, "sizes": sizes, "state": fit.state_dict()}


def save_tracker():
    tracker = BudgetTracker(MEMORY)
    for number in range(6):
        tracker = tracker.observe([[4, 40], [2, 90]], 280 + 20 * (number % 3))
    return tracker.to_state()


def go_on_tracker(state):
    tracker, factors = BudgetTracker(MEMORY).with_state(state), []
    for number in range(16):
        tracker = tracker.observe((4, 40), 240 + number % 2)
        factors.append(tracker.factor)
    return {"factors": factors, "state": tracker.to_state(), "budget": repr(tracker.budget(1000))}


# Fitted models, as JSON


def fit_memory():
    return bw.MemoryModel.fit(SHAPES, [1000 + 3 * b * length + b * length**2 / 4 for b, length in SHAPES])


def fit_phases():
    peaks = [max(5000 + 2 * b * length, 1000 + 30 * b * length) for b, length in SHAPES]
    return bw.MemoryModel.fit(SHAPES, peaks, quantile=0.9)


def fit_pairs():
    peaks = [500 + b * (2 * source + 3 * target + source * target) for b, source, target in PAIR_SHAPES]
    return bw.MemoryModel.fit(PAIR_SHAPES, peaks)


def fit_time():
    seconds = [0.01 + 1e-5 * b * length for b, length in SHAPES]
    return bw.TimeModel.fit(SHAPES, seconds, first_visit_seconds=[0.2 + second for second in seconds])


def save_json(make):
    return json.loads(make().to_json())


def go_on_memory(shapes, state):
    model = bw.MemoryModel.from_json(json.dumps(state))
    lengths = torch.tensor(shapes)[:, 1:].numpy()
    budget = model.budget(20_000)
    return {
        "again": json.loads(model.to_json()),
        "text": repr(budget),
        "predict": model.predict(shapes).tolist(),
        "upper": model.upper(shapes).tolist(),
        "max_items": budget.max_items(lengths).tolist(),
        "coefficients": model.coefficients,
        "least_bytes": model.least_bytes,
    }


def go_on_time(state):
    model = bw.TimeModel.from_json(json.dumps(state))
    return {
        "again": json.loads(model.to_json()),
        "predict": model.predict(SHAPES).tolist(),
        "plan": plain(float(model.predict_plan(SHAPES))),
        "knee": model.knee([8, 64]).tolist(),
        "knee of few": model.knee([8, 64], max_items=[30, 10], tolerance=0.1).tolist(),
    }


def make_calibration():
    return Calibration(
        shapes=((1, 8), (2, 8), (4, 16), (8, 16)),
        seconds=(0.011, 0.012, 0.016, 0.023),
        first_visit_seconds=(0.2, 0.21, 0.22, 0.23),
        peak_bytes=(1040, 1080, 1200, 1400),
        memory=bw.MemoryModel.from_json(json.dumps({**json.loads(MEMORY.to_json()), "margin": 0.05})),
        time=bw.TimeModel.from_json(fit_exact_time()),
        errors=HeldOutErrors(shapes=((2, 8), (4, 16)), memory=(0.01, -0.02), time=(0.1, -0.05)),
        max_bytes=2000,
        stopped="out of memory",
    )


def fit_exact_time():
    return (
        '{"kind": "batchwright.TimeModel", "version": 1, "num_axes": 1, "first_visit_seconds": 0.5, '
        '"coefficients": {"1": 0.1, "b": 0.0, "b*L0": 1e-05, "b*L0^2": 0.0}}'
    )


def go_on_calibration(state):
    calibration = Calibration.from_json(json.dumps(state))
    return {
        "again": json.loads(calibration.to_json()),
        "is equal": calibration == make_calibration(),
        "budget": repr(calibration.budget()),
        "shapes": calibration.shapes,
        "errors": [calibration.errors.memory, calibration.errors.time],
    }


def make_latency():
    model = LatencyModel(decay=0.97)
    observe_latency(model, 0, 60)
    return model


def observe_latency(model, start, stop):
    for number in range(start, stop):
        num_items, length = 1 + number % 7, 16 * (1 + number % 5)
        model.observe(num_items, length, 0.004 + 1e-5 * num_items * length * (1 + number % 3 / 50))


def go_on_latency(state):
    model = LatencyModel.from_json(json.dumps(state))
    again = json.loads(model.to_json())
    before = [model.predict(4, 64), model.upper(4, 64), model.margin, model.is_ready, model.num_observed]
    observe_latency(model, 60, 90)
    return {"again": again, "before": before, "after": [model.predict(4, 64), model.upper(4, 64), model.coefficients]}


CASES = [
    *[Case(f"stepper: {name}", partial(save_stepper, options), partial(go_on_stepper, options), tolerance=1e-9)
      for name, options in STEPPERS.items()],
    Case("FitToMemory", save_fit, go_on_fit),
    Case("BudgetTracker", save_tracker, go_on_tracker),
    Case("memory", partial(save_json, fit_memory), partial(go_on_memory, SHAPES), tolerance=1e-9),
    # Which shapes belong to which phase can hang on a rounding error, and with it the margin.
    Case("memory in two phases", partial(save_json, fit_phases), partial(go_on_memory, SHAPES), tolerance=0.05),
    Case("memory of two axes", partial(save_json, fit_pairs), partial(go_on_memory, PAIR_SHAPES), tolerance=1e-9),
    Case("time", partial(save_json, fit_time), go_on_time, tolerance=1e-9),
    Case("calibration", partial(save_json, make_calibration), go_on_calibration),
    Case("latency", partial(save_json, make_latency), go_on_latency, tolerance=1e-9),
    Case("latency, fixed", partial(save_json, partial(LatencyModel.fixed, 0.004, 1e-5, 1e-8)), go_on_latency),
]  # fmt: skip
