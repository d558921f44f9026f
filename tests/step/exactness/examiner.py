"""The examiner: runs a case through Stepper and by hand, and says whether the update was exact, refused or wrong."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import Stepper

from .cases import Case
from .models import Setup
from .optimizers import make_optimizer
from .reference import clipped, distance, gradients_by_example, gradients_by_piece, loss_and_weight, norm_of
from .structures import collate, make_fields, pack, split_patches, trim, unpack

NUM_UPDATES = 3
CLIP = 0.05
EXACT = 1e-12
_OF_TOKENS = ("tied", "sparse", "sparse_only")  # no gradient reaches their inputs

_FORMS = {
    "int": lambda weight: round(float(weight)),
    "float": float,
    "numpy": lambda weight: np.float64(weight),
    "long": lambda weight: weight.long(),
    "tensor": lambda weight: weight,
}


@dataclass
class Outcome:
    """What became of a case: ``kind`` is "exact", "refused" or "wrong", the last with what differs and by how much."""

    case: Case
    kind: str
    what: str = ""
    error: float = 0.0

    def __str__(self):
        size = f" ({self.error:.2g})" if self.error else ""
        return f"{self.kind}: {self.what}{size}\n    outcome_of({self.case!r})"


class Wrong(Exception):
    """The update differs from the truth."""

    def __init__(self, what, error=0.0):
        super().__init__(what)
        self.what, self.error = what, error


def outcome_of(case, *, stepper_class=Stepper):
    """Run a case. Every exception but a refusal counts as wrong too: the contract is exact or refused."""
    run = Run(case, stepper_class)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run.everything()
            run.check_warnings([str(warning.message) for warning in seen])
        return Outcome(case, "exact", error=run.worst)
    except ArgumentError as error:
        if any(not torch.equal(a, b) for a, b in zip(run.before, run.setup.parameters(), strict=True)):
            return Outcome(case, "wrong", f"refused after a parameter had changed: {error}")
        return Outcome(case, "refused", str(error))
    except Wrong as error:
        return Outcome(case, "wrong", error.what, error.error)
    except Exception as error:
        return Outcome(case, "wrong", f"{type(error).__name__}: {error}".split("\n")[0][:300], math.inf)


class Run:
    """One case: the stepper under test, a twin that is driven by the truth, and one driven by the gradients seen."""

    def __init__(self, case, stepper_class):
        self.case = case
        self.setup = Setup(case.model, dtype=case.torch_dtype, seed=case.seed, bias=case.optimizer != "Muon")
        self.before = []
        self.worst = 0.0
        self._stepper_class = stepper_class
        self._seen = None  # the gradients at the last optimizer.step
        self._steps = 0
        self._calls = []  # the examples of every call of the loss in this accumulate
        self._armed = False
        self._mixed_up = ""

    def everything(self):
        case, setup = self.case, self.setup
        self.before = [parameter.detach().clone() for parameter in setup.parameters()]
        truth, replay = setup.copy(), setup.copy()
        optimizers = [
            make_optimizer(case.optimizer, case.options, part.for_optimizer()) for part in (setup, truth, replay)
        ]
        stepper = self._stepper(optimizers[0])
        optimizers[0].register_step_pre_hook(self._record)
        for number in range(NUM_UPDATES):
            for part, optimizer in zip((setup, truth, replay), optimizers, strict=True):
                part.before_update(number, optimizer)
            self.before = [parameter.detach().clone() for parameter in setup.parameters()]
            expected = self._update(stepper, number, optimizers[0])
            self._drive(replay, optimizers[2], self._seen)
            self._compare("parameters, driven by the gradients seen,", setup, replay, 0.0)
            if case.dtype == "float64" and case.optimizer != "Muon":  # Muon orthogonalizes in bfloat16
                self._drive(truth, optimizers[1], expected)
                self._compare("parameters", setup, truth, EXACT)

    def _stepper(self, optimizer):
        case = self.case
        options = {"clip_norm": CLIP} if case.clip else {}
        if case.micro_batch.startswith("Max"):
            name, number = case.micro_batch.rstrip(")").split("(")
            options["micro_batch"] = getattr(bw, name)(int(number))
            options["lengths"] = self._lengths
        else:
            options["micro_batch"] = "auto" if case.micro_batch == "auto" else int(case.micro_batch)
        if case.structure == "examples":
            options["collate"] = collate
        if case.structure == "hook":
            options["split"] = split_patches
        if case.trim:
            options["trim"] = trim
        if case.weight_of:
            options["weight_of"] = lambda batch: float(self._sums(self._unpack(batch))[1])
        if case.existing == "add":
            options["existing_gradients"] = "add"
        self._model = wrapped(self.setup.model, case.wrapper)
        stepper = self._stepper_class(self._model, optimizer, self._loss, **options)
        if case.warm_up:
            stepper.warm_up()
        return stepper

    def _lengths(self, batch):
        if self.case.structure == "examples":
            return len(batch["tokens"])
        return self._unpack(batch).lengths()

    def _unpack(self, batch):
        return unpack(self.case.structure, batch, self.case.torch_dtype)

    def _sums(self, fields):
        with torch.random.fork_rng(devices=[]):
            twin = self.setup.copy()
            return loss_and_weight(self.case, twin, twin.model, fields)

    def _loss(self, model, micro_batch):
        """Return the loss as a user would write it; it runs out of memory where the case says so."""
        case = self.case
        fields = self._unpack(micro_batch)
        if model.training:  # else some examples are only tried out, as the loss looks like a mean
            self._calls.append(fields.numbers())
        is_over = self._armed and model.training and len(fields) > case.room and len(self._calls) > case.oom_piece
        if is_over and case.oom == "backward" and fields.x.is_floating_point():
            fields.x = fields.x.detach().clone().requires_grad_()
            fields.x.register_hook(_run_out)
        loss, weight = loss_and_weight(case, self.setup, model, fields)
        if is_over and case.oom == "forward":
            _run_out(None)
        if is_over and case.oom == "backward" and loss.requires_grad and case.model in _OF_TOKENS:
            loss.register_hook(_run_out)
        return loss, _FORMS[case.form](weight.detach())

    def _update(self, stepper, number, optimizer):
        """Run one update and compare everything; return the gradient that the optimizer should have seen."""
        case, setup = self.case, self.setup
        batches = self._batches(number)
        start, random_state = setup.copy(), torch.get_rng_state()
        existing = self._leave_gradients(number)
        self._steps = 0
        total = math.fsum(float(self._sums(fields)[1]) for fields in batches) if case.total_weight else None
        pieces, report = [], None
        for place, fields in enumerate(batches):
            self._calls, self._armed = [], case.oom != "none" and place == case.oom_call
            batch = pack(case.structure, fields)
            if case.step:
                report = stepper.step(batch)
            else:
                stepper.accumulate(batch, **({} if total is None else {"total_weight": total}))
            pieces += self._last_pieces(fields)
        if not case.step:
            stepper.reduce()
            report = stepper.update()
        if self._steps != 1:
            raise Wrong(f"optimizer.step ran {self._steps} times")
        everything = batches[0] if len(batches) == 1 else _joined(batches)
        if setup.is_random:
            after = torch.get_rng_state()
            torch.set_rng_state(random_state)
            answer = gradients_by_piece(case, start, pieces, existing)
            self._compare_state(start, after)
        else:
            answer = gradients_by_example(case, start, everything, existing)
        return self._judge(answer, report, start, optimizer, everything)

    def _batches(self, number):
        case = self.case
        first, batches = 0, []
        for place, size in enumerate(case.sizes):
            seed = 1000 * case.seed + 10 * number + place
            zeros = case.weights != "count"
            batches.append(make_fields(size, seed=seed, first=first, zeros=zeros, dtype=case.torch_dtype))
            first += size
        return batches

    def _leave_gradients(self, number):
        """Put gradients of another backward in place; return those that the update has to add."""
        kind = self.case.existing
        if kind == "none":
            return None
        generator = torch.Generator().manual_seed(number)
        for parameter in self.setup.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.grad = torch.zeros_like(parameter) if kind == "zeros" else noise.to(parameter)
        if kind != "add":
            return None
        return [None if p.grad is None else p.grad.clone() for p in self.setup.parameters()]

    def _last_pieces(self, fields):
        """Return the examples of each piece of the last attempt, which must be those of the batch, each once."""
        numbers, pieces = fields.numbers(), []
        for call in reversed(self._calls):
            pieces.insert(0, call)
            if sum(map(len, pieces)) >= len(fields):
                break
        if sorted(number for piece in pieces for number in piece) != sorted(numbers):
            self._mixed_up = f"the loss saw examples {pieces} of {numbers}"
            return [fields]  # whatever the gradient is, by how much it is wrong is worth knowing
        rows = {number: row for row, number in enumerate(numbers)}
        return [_joined([fields.rows(rows[n], rows[n] + 1) for n in piece]) for piece in pieces]

    def _record(self, optimizer, args, kwargs):
        self._steps += 1
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._seen = [
            p.grad.detach().clone() if id(p) in trained and p.grad is not None else None
            for p in self.setup.parameters()
        ]

    def _judge(self, answer, report, start, optimizer, fields):
        case = self.case
        gradients, loss, weight = answer
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = self.setup.parameters()
        gradients = [g if id(p) in trained else None for g, p in zip(gradients, parameters, strict=True)]
        norm = norm_of(gradients)
        if case.clip:
            gradients = clipped(gradients, CLIP)
        seen = self._seen
        if case.existing == "zeros":  # a gradient of zeros may stay, or go as zero_grad() would let it go
            seen = [
                None if g is None and s is not None and not s.any() else s for g, s in zip(gradients, seen, strict=True)
            ]
            self._seen = seen
        error = distance(seen, gradients)
        allowed = self._allowed(start, fields, gradients)
        self.worst = max(self.worst, error)
        if not error <= allowed or self._mixed_up:
            raise Wrong(f"gradient, {self._mixed_up}" if self._mixed_up else "gradient", error)
        for found, wanted in zip(seen, gradients, strict=True):
            if found is not None and found.layout != wanted.layout:
                raise Wrong(f"a {wanted.layout} gradient came as {found.layout}")
        figures = [("loss", report.loss, loss), ("weight", report.weight, weight)]
        figures += [("grad_norm", report.grad_norm, norm)] if case.clip else []
        for name, found, wanted in figures:
            if not math.isclose(found, wanted, rel_tol=max(allowed, 1e-10), abs_tol=allowed):
                raise Wrong(f"report.{name} is {found}, not {wanted}", abs(found - wanted) / abs(wanted or 1))
        if report.batch_size != len(fields):
            raise Wrong(f"report.batch_size is {report.batch_size}, not {len(fields)}")
        if any(p.grad is not None and p.grad.any() for p in parameters if id(p) in trained):
            raise Wrong("a gradient is left after the update")
        return gradients

    def _allowed(self, start, fields, gradients):
        """Return the error allowed: that of double precision, or twice what the unsplit batch makes in less."""
        case = self.case
        if case.dtype == "float64":
            return EXACT
        if self.setup.is_random:
            return 40 * torch.finfo(case.torch_dtype).eps
        twin = start.copy()
        loss, weight = loss_and_weight(case, twin, twin.model, fields)
        (loss / weight).backward()
        own = [None if g is None else p.grad for p, g in zip(twin.parameters(), gradients, strict=True)]
        if case.existing == "add" or any(g is None for g, w in zip(own, gradients, strict=True) if w is not None):
            return 40 * torch.finfo(case.torch_dtype).eps
        own = clipped(own, CLIP) if case.clip else own
        return 2 * distance(own, gradients) + 4 * torch.finfo(case.torch_dtype).eps

    def _compare_state(self, by_hand, random_state):
        if not torch.equal(random_state, torch.get_rng_state()):
            raise Wrong("the random numbers stand elsewhere than after the pieces run by hand")
        for name, wanted in by_hand.model.named_buffers():
            found = self.setup.model.get_buffer(name)
            if not torch.equal(found, wanted):
                raise Wrong(f"the buffer {name} is {found.tolist()}, not {wanted.tolist()}")

    def _drive(self, part, optimizer, gradients):
        for parameter, gradient in zip(part.parameters(), gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()

    def _compare(self, what, setup, other, allowed):
        error = distance([p.detach() for p in setup.parameters()], [p.detach() for p in other.parameters()])
        if not error <= allowed:
            raise Wrong(what, error)

    def check_warnings(self, texts):
        found = any("gradient" in text for text in texts)
        if found != (self.case.existing == "clear"):
            raise Wrong(f"gradients left by another backward: {self.case.existing}, but the warnings are {texts}")


def wrapped(model, wrapper):
    """Return the model in its wrappers, the outermost named first."""
    for name in reversed(wrapper.rstrip(")").split("(")):
        if name == "compile":
            torch._dynamo.reset()
            model = torch.compile(model, backend="eager", dynamic=True)
        elif name == "ddp":
            model = DistributedDataParallel(model)
    return model


def _joined(parts):
    return type(parts[0])(*(torch.cat(values) for values in zip(*(part.values() for part in parts), strict=True)))


def _run_out(_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
