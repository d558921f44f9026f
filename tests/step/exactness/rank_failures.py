"""Run by test_rank_failures in several processes: every rank fails in its own way at its own time.

``python -m tests.step.exactness.rank_failures RANK WORLD_SIZE STORE NUM_STEPS [KIND ...]`` runs only some kinds.
"""

import copy
import math
import random
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchwright.step import Stepper

from ...processes import leave_group
from .reference import distance

LIMIT_SECONDS = 20
SEED = 5

# What a rank may meet, and what must follow: every rank succeeds, every rank raises, or either.
KINDS = {
    "survived": "succeed", "no weight": "succeed",
    "too large": "raise", "value": "raise", "key": "raise", "custom": "raise", "weight is nan": "raise",
    "structure": "raise", "memory": "raise", "weight_of": "raise",
    "update before": "update", "update half": "update", "update after": "update", "update broken": "update",
    "empty": "either", "one metric": "either", "other metric": "either", "buffer": "either",
}  # fmt: skip
NAMES = {
    "too large": "DoesNotFitError", "value": "ValueError", "key": "KeyError", "custom": "Custom",
    "weight is nan": "ArgumentError", "structure": "ArgumentError", "memory": "OutOfMemoryError",
    "weight_of": "ZeroDivisionError", "update before": "UpdateMemoryError", "update half": "UpdateMemoryError",
    "update after": "UpdateMemoryError", "update broken": "LookupError",
}  # fmt: skip


class Custom(Exception):
    """An exception that no other rank can make: it needs two values."""

    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("table", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        self.seen += len(x)
        return self.second(torch.tanh(self.first(x)))[:, 0]


class Failing(torch.optim.SGD):
    """Fails before it changes anything, half way, or when all is done."""

    place = ""

    def step(self, closure=None):
        if self.place in ("update before", "update broken"):
            raise LookupError("broken") if self.place == "update broken" else torch.OutOfMemoryError("out of memory")
        if self.place == "update half":
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise torch.OutOfMemoryError("out of memory half way")
        super().step()
        if self.place == "update after":
            raise torch.OutOfMemoryError("out of memory after the last parameter")


def draw_plan(step):
    """Return what all ranks know of a step: the stepper, and how many times it accumulates."""
    rng = random.Random(f"{SEED} {step}")
    return rng.choice(["split", "split", "raise"]), rng.choice([1, 1, 2])


def draw_event(step, rank, stepper, kinds):
    """Return what this rank alone meets in a step, and in which accumulate."""
    rng = random.Random(f"{SEED} {step} {rank}")
    other = ("memory", "weight_of") if stepper == "split" else ("survived", "too large")
    allowed = [kind for kind in kinds if kind not in other]
    quiet = 0.7 if rng.random() < 0.9 else 0.0
    if rng.random() < quiet or not allowed:
        return "none", 0
    return rng.choice(allowed), rng.randrange(2)


def make_share(step, rank, call):
    generator = torch.Generator().manual_seed(10_000 * step + 10 * rank + call)
    num = 2 + int(torch.randint(0, 6, (), generator=generator))
    w = torch.randint(0, 4, (num,), generator=generator).double()
    w[0] = 2.0
    x = torch.randn(num, 3, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randn(num, generator=generator, dtype=torch.float64), "w": w}


def changed_share(share, event):
    """Return the batch that a rank hands over when something is wrong with it."""
    if event == "empty":
        return {name: value[:0] for name, value in share.items()}
    if event == "no weight":
        return share | {"w": torch.zeros_like(share["w"])}
    if event == "structure":
        return share | {"y": share["y"][:-1]}
    return share


class Rank:
    """One process: its steppers, its twin of the training in one process, and what it expects."""

    def __init__(self, rank, world_size, kinds):
        self.rank, self.world_size, self.kinds = rank, world_size, kinds
        torch.manual_seed(0)
        self.model = Model().double()
        ddp = DistributedDataParallel(self.model)
        self.optimizer = Failing(ddp.parameters(), lr=0.02, momentum=0.9)
        clip = {"clip_norm": 0.5} if world_size == 2 else {}
        self.steppers = {
            "split": Stepper(ddp, self.optimizer, self.loss, micro_batch=3, **clip),
            "raise": Stepper(
                ddp, self.optimizer, self.loss, micro_batch=2, on_oom="raise", weight_of=self.weight_of, **clip
            ),
        }
        self.clip = clip.get("clip_norm", math.inf)
        self.twin = Model().double()
        self.twin.load_state_dict(self.model.state_dict())
        self.twin_optimizer = torch.optim.SGD(self.twin.parameters(), lr=0.02, momentum=0.9)
        self.event, self.worst = "none", 0.0
        self.counts = {"succeeded": 0, "raised": 0}

    def weight_of(self, batch):
        if self.event == "weight_of":
            raise ZeroDivisionError("weight_of is broken on this rank")
        return math.nan if self.event == "weight is nan" else batch["w"].sum()

    def loss(self, model, batch):
        event = self.event
        each = (model(batch["x"]) - batch["y"]).square() * batch["w"]
        if event == "too large" or (event == "survived" and len(each) > 1) or event == "memory":
            if event == "memory":
                each.register_hook(_run_out)
            else:
                _run_out(None)
        if event == "value":
            raise ValueError("a bad value on this rank")
        if event == "key":
            raise KeyError("missing")
        if event == "custom":
            raise Custom("two", "values")
        if event == "buffer":
            model.table = torch.zeros(4 + self.rank + len(each), dtype=torch.float64)
        weight = math.nan if event == "weight is nan" else batch["w"].sum()
        metrics = {"a": batch["w"].sum() * 10}
        if event == "other metric":
            metrics = {"b": batch["w"].sum() * 1000}
        return (each.sum(), weight) if event == "one metric" else (each.sum(), weight, metrics)

    def run(self, step):
        """Run one step and check what became of it on all ranks."""
        name, num_calls = draw_plan(step)
        event, place = draw_event(step, self.rank, name, self.kinds)
        place = min(place, num_calls - 1)
        started = time.perf_counter()
        report, error = None, None
        try:
            report = self.attempt(self.steppers[name], step, num_calls, event, place)
        except Exception as caught:
            error = caught
        seconds = time.perf_counter() - started
        assert seconds < LIMIT_SECONDS, f"step {step}: {event} took {seconds:.1f} s, then {error!r}"
        mine = (event, place, None if error is None else (type(error).__name__, str(error)), _figures(report))
        everyone = [None] * self.world_size
        dist.all_gather_object(everyone, mine, group=self.checks)
        self.model.table = torch.zeros(4, dtype=torch.float64)  # a user's repair of what "buffer" did
        where = f"step {step} ({name}, {num_calls} batches): {everyone}"
        shares = _shares(step, num_calls, everyone)
        succeeded = self.check_outcome(everyone, sum(float(share["w"].sum()) for _, share in shares), where)
        if succeeded:
            _check_metrics(dict(_figures(report)[-1]), shares, where)
        self.counts["succeeded" if succeeded else "raised"] += 1
        self.check_parameters(step, num_calls, everyone, succeeded, where)

    def attempt(self, stepper, step, num_calls, event, place):
        self.optimizer.place = event if event.startswith("update") else ""
        try:
            for call in range(num_calls):
                self.event = event if call == place else "none"
                batch = changed_share(make_share(step, self.rank, call), self.event)
                if num_calls == 1:
                    return stepper.step(batch)
                stepper.accumulate(batch)
            stepper.reduce()
            return stepper.update()
        except Exception:
            stepper.abandon()  # whoever calls the parts decides what becomes of the batches before the one that failed
            raise
        finally:
            self.event, self.optimizer.place = "none", ""

    def check_outcome(self, everyone, total_weight, where):
        """Return whether the step succeeded, on all ranks as it must."""
        events = [KINDS.get(event, "succeed") for event, *_ in everyone]
        if total_weight == 0 and "raise" not in events:
            assert all(error and error[0] == "ArgumentError" for _, _, error, _ in everyone), where
            return False
        errors = [error for _, _, error, _ in everyone]
        assert len({error is None for error in errors}) == 1, f"some ranks raise, some do not, {where}"
        succeeded = errors[0] is None
        if succeeded:
            assert not {"raise", "update"} & set(events), f"nobody raises, {where}"
            assert len({repr(figures) for *_, figures in everyone}) == 1, f"reports differ, {where}"
            return True
        assert set(events) != {"succeed"}, f"nobody failed, {where}"
        failing = [(event, place) for event, place, *_ in everyone if KINDS.get(event, "succeed") != "succeed"]
        # Where ranks fail one after the other, or only perhaps, the first error goes to all.
        is_certain = all(KINDS[event] == "raise" and event != "weight is nan" for event, _ in failing)
        is_own = len(failing) == 1 or (is_certain and len({place for _, place in failing}) == 1)
        names = {NAMES.get(event, "ArgumentError") for event, _ in failing}
        for event, _, (name, text), _ in everyone:
            if is_own and event in NAMES:
                assert name == NAMES[event], f"the failing rank raises {name}, not its own error, {where}"
            assert any(wanted == name or wanted in text for wanted in names), f"{name} is none of {names}, {where}"
        return False

    def check_parameters(self, step, num_calls, everyone, succeeded, where):
        """Check that all ranks have the same bits, and those of training in one process."""
        mine = [value.detach() for value in self.model.parameters()]
        mine += [state["momentum_buffer"] for state in self.optimizer.state.values() if state]
        flat = torch.cat([value.flatten() for value in mine])
        gathered = [torch.empty_like(flat) for _ in range(self.world_size)]
        dist.all_gather(gathered, flat, group=self.checks)
        for other, found in enumerate(gathered):
            assert torch.equal(found, gathered[0]), f"rank {other} differs from rank 0, {where}"
        failed = [error[0] for event, _, error, _ in everyone if event.startswith("update") and not succeeded]
        reached = bool({"UpdateMemoryError", "LookupError"} & set(failed))
        if succeeded or (reached and len(failed) < self.world_size):
            self.step_of_twin(step, num_calls, everyone)
        elif reached:
            self.follow()  # no rank has a whole update; equal on all ranks is all that can be asked
        error = distance([p.detach() for p in self.model.parameters()], [p.detach() for p in self.twin.parameters()])
        self.worst = max(self.worst, error)
        assert error < 1e-12, f"{error:.2e} from training in one process, {where}"

    def step_of_twin(self, step, num_calls, everyone):
        self.twin_optimizer.zero_grad()
        weight = 0.0
        for _, share in _shares(step, num_calls, everyone):
            for x, y, w in zip(*share.values(), strict=True):
                ((self.twin(x[None])[0] - y).square() * w).backward()
                weight += float(w)
        gradients = [parameter.grad for parameter in self.twin.parameters()]
        torch._foreach_div_(gradients, weight)
        norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        torch._foreach_mul_(gradients, min(1.0, self.clip / (norm + 1e-6)))
        self.twin_optimizer.step()

    def follow(self):
        self.twin.load_state_dict(self.model.state_dict(), strict=False)
        self.twin_optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))  # it would keep the tensors


def _shares(step, num_calls, everyone):
    """Return the batches that all ranks handed over, each with what was the matter with it."""
    return [
        (
            event if call == place else "none",
            changed_share(make_share(step, rank, call), event if call == place else "none"),
        )
        for rank, (event, place, *_) in enumerate(everyone)
        for call in range(num_calls)
    ]


def _check_metrics(found, shares, where):
    """Check that a metric holds the sums of those ranks that gave it, over their weight or over all weight."""
    total = sum(float(share["w"].sum()) for _, share in shares)
    for name, scale, kinds in (("a", 10, ("one metric", "other metric")), ("b", 1000, ("other metric",))):
        given = [share for event, share in shares if (event in kinds) == (name == "b")]
        weight = sum(float(share["w"].sum()) for share in given)
        assert (name in found) <= bool(given), f"nobody gave {name}, {where}"
        if name in found and weight:
            allowed = (scale, scale * weight / total)
            assert any(math.isclose(found[name], value) for value in allowed), f"{name} is none of {allowed}, {where}"


def _figures(report):
    if report is None:
        return None
    return report.loss, report.weight, report.batch_size, sorted(report.metrics.items())


def _run_out(_):
    raise torch.OutOfMemoryError("CUDA out of memory")


def main(rank, world_size, store, num_steps, *kinds):
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    this = Rank(rank, world_size, kinds or tuple(KINDS))
    this.checks = dist.new_group(timeout=2 * limit)  # a rank that hangs for the limit can still say so
    for step in range(num_steps):
        this.run(step)
    print(f"rank {rank}: {this.counts}, worst {this.worst:.1e}")
    if not kinds:
        met = {
            draw_event(step, other, draw_plan(step)[0], tuple(KINDS))[0]
            for step in range(num_steps)
            for other in range(world_size)
        }
        assert met == {"none", *KINDS}, f"never drawn: {set(KINDS) - met}"
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
