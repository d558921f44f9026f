"""A function of tensors: run ahead, captured for calls of one signature, replayed, and compared with an eager run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..._tree import leaves, map_leaves
from ..oom import Buffers, Snapshot
from ._capturing import captured, random_reason
from ._comparing import outputs_alike
from ._draws import CPU, Draws, HostRandom, draw_again, vain_draws
from ._inputs import Signature, StaticInputs, signature_of
from ._micro import ConstantsOnDevice, NotGraphableError, without_autocast_cache
from ._padding import Call, run
from ._reach import Reach
from ._rotary import rotary_of
from ._watch import Kept, Untouched, Watch, hooks_of, matmul_precision
from .backend import GraphBackend, Replay

_HALF = (torch.float16, torch.bfloat16)
# Names that torch has for products of matrices in single precision, see ``matmul_precision``.
_EXACT = {"highest", "ieee", "none"}


def without_gradients() -> ExitStack:
    """Return a context that computes without gradients, on tensors that may be written to later on.

    What is made in inference mode can be written to only in that mode, so static buffers are made outside of it.
    """
    contexts = ExitStack()
    contexts.enter_context(torch.inference_mode(False))
    contexts.enter_context(torch.no_grad())
    return contexts


def copied(output: Any) -> Any:
    """Return an output in memory of its own; a tensor that it holds twice is copied once."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.clone()
        return copies[id(tensor)]

    return map_leaves(output, copy)


@final
class FunctionGraph:
    """A captured call.

    Attributes:
        signature: of the calls that it can run.
        is_worth: replays are faster than eager runs, or need not be.
        eager_seconds: of a run that replays were compared with.
        seconds: of a replay.
        num_replayed: calls that were replayed.
    """

    def __init__(
        self,
        signature: Signature,
        call: Call,
        function: Callable[..., Any],
        backend: GraphBackend,
        device: torch.device,
    ) -> None:
        self.signature = signature
        self.is_worth = True
        self.eager_seconds = self.seconds = math.nan
        self.num_replayed = 0
        self._function = function
        self._inputs = StaticInputs(call, device)
        self._output: Any = None  # its tensors lie in the pool: a later replay of any graph may write there
        self._replay: Replay = backend.capture(self._launch)

    def _launch(self) -> None:
        with without_autocast_cache(), ConstantsOnDevice():
            self._output = run(self._function, self._inputs.batch)
        check_output(self._output)

    def run(self, call: Call, cut: Callable[[Any], Any] = lambda output: output) -> Any:
        """Replay a call of the same signature, and return a copy of its output, or of what is cut out of it."""
        self._inputs.fill_at_once(call)
        self._replay()
        return copied(cut(self._output))

    @property
    def types(self) -> str:
        """Return the types of the inputs, for people."""
        return " ".join(str(tensor.dtype).removeprefix("torch.") for tensor in leaves(self._inputs.batch))


def check_output(output: Any) -> None:
    """Refuse an output that holds more than tensors and single values: a replay would return the same object again.

    Raises:
        NotGraphableError: with what it is.
    """
    if signature_of(map_leaves(output, Tensor.detach)) is None:
        raise NotGraphableError(
            f"the function returns more than nested tensors and single values ({type(output).__name__}), such as a "
            "cache of keys and values; return only the tensors"
        )


@final
class FunctionCapturer:
    """Runs calls ahead, captures them, and compares replays with eager runs; all state is put back.

    Args:
        function: a module, a method of one, or any function.
        backend: captures.
        device: where the function computes.

    Attributes:
        reach: what the function reads, when ``look`` was called last.
        draws: random numbers that it draws on the host in vain.
        is_half: it computes in half precision.
        is_pure: it writes to no tensor that it reads, and draws nothing on the device: a replay too many is harmless.
    """

    def __init__(self, function: Callable[..., Any], backend: GraphBackend, device: torch.device) -> None:
        self._function, self._backend, self._device = function, backend, device
        self._module = root_of(function)
        self.reach = self.look()
        self.draws: Draws = []
        self.is_half = self.is_pure = False

    def look(self) -> Reach:
        """Find what the function reads now."""
        self.reach = reach_of(self._function, self._module)
        return self.reach

    def watch(self) -> Watch:
        """Return what notices a change of what the function reads."""
        return Watch(self.look(), parameters_of(self.reach), device=self._device)

    def keep(self) -> Kept:
        """Return what puts everything back after a run that must leave no trace."""
        devices = [] if self._device.type == "cpu" else [self._device]
        return Kept(Snapshot(Buffers(self._module), devices), Untouched(self.reach))

    def check(self, call: Call) -> None:
        """Run a call that came, and see whether a graph can hold what it does.

        Raises:
            NotGraphableError: with the reason.
        """
        reason = self.look().obstacle or self._obstacle()
        if reason is not None:
            raise NotGraphableError(reason)
        kept, host = self.keep(), HostRandom(self.reach.generators, self._device)
        copy, before = map_leaves(call, torch.clone), self._versions()
        versions = [tensor._version for tensor in leaves(copy)]
        try:
            with _Precision() as precision:
                output = run(self._function, copy)
            moved = host.moved()
            self.is_pure = self._versions() == before
            self._check_inputs(call, copy, versions)
            check_output(output)
            self.is_half = precision.is_half or is_rough(self._device)
            if moved == [CPU] or self._device.type == "cpu":
                self.draws = self._vain_draws(call, moved)
            elif moved:
                raise NotGraphableError(random_reason(moved))
        finally:
            kept.restore_values()

    def _versions(self) -> list[Any]:
        """Return what tells whether tensors were written to, or random numbers drawn on the device."""
        drawn = b"" if self._device.type == "cpu" else torch.cuda.get_rng_state(self._device).numpy().tobytes()
        buffers = [one for part in self.reach.modules for one in part._buffers.values() if one is not None]
        tensors = [*parameters_of(self.reach), *buffers, *(tensor for _, tensor in self.reach.tensors)]
        return [drawn, *(one._version for one in tensors if not one.is_inference())]

    def _obstacle(self) -> str | None:
        found = {value.device for value in parameters_of(self.reach)}
        if len(found) > 1:
            return f"what it reads lies on several devices, {', '.join(sorted(map(str, found)))}"
        if any(one.is_kept for one in rotary_of(self.reach.modules)):
            return "rotary positions of the model depend on the longest row so far, which Python keeps"
        inner = {id(child) for part in self.reach.modules for child in part._modules.values()}
        roots = [part for part in self.reach.modules if id(part) not in inner]
        return next(filter(None, map(hooks_of, roots)), None)

    def _check_inputs(self, call: Call, copy: Call, versions: Sequence[int]) -> None:
        for given, now, version in zip(leaves(call), leaves(copy), versions, strict=True):
            if now._version != version or not torch.equal(_bits(given), _bits(now)):
                raise NotGraphableError("the function changes its inputs in place, and a replay would change a copy")

    def _vain_draws(self, call: Call, moved: Sequence[str]) -> Draws:
        kept = self.keep()

        def forward() -> float:
            found = leaves(run(self._function, map_leaves(call, torch.clone)))
            return sum(float(tensor.double().sum()) for tensor in found)

        draws = vain_draws(forward, kept.put_back, is_on_host=self._device.type == "cpu")
        if draws is None or (moved and not draws):
            raise NotGraphableError(random_reason(moved or [CPU]))
        return draws

    def run_ahead(self, call: Call) -> int:
        """Run a call eagerly before its capture, and return its bytes: what is kept per shape exists afterwards."""
        kept = self.keep()
        try:
            return self._backend.measure(lambda: void(run(self._function, map_leaves(call, torch.clone))))
        finally:
            kept.restore_values()

    def capture(self, signature: Signature, call: Call, *, is_real: bool) -> FunctionGraph:
        """Return the graph of a call.

        Raises:
            NotGraphableError: a replay would not repeat what the call does.
            MadeUpError: inputs that were made of others do not go together.
        """
        host, kept = HostRandom(self.reach.generators, self._device), self.keep()
        return captured(
            lambda: FunctionGraph(signature, call, self._function, self._backend, self._device),
            host, kept, self.draws, is_real=is_real,
        )  # fmt: skip

    def compare(self, graph: FunctionGraph, call: Call) -> bool:
        """Say whether replays of a call give what an eager run gives, and time both."""
        wanted, replays = self._run_both(graph, call, call, lambda output: output)
        return outputs_alike(replays, wanted, is_half=self.is_half)

    def compare_padded(
        self,
        graph: FunctionGraph,
        call: Call,
        padded: Call,
        cut: Callable[[Any], Any],
        whole: Callable[[Call, Any], Any],
    ) -> bool:
        """Say whether a call that is padded and cut gives what it gives by itself.

        Args:
            graph: of the planned shape.
            call: as it came.
            padded: the same call.
            cut: makes the output of the padded call that of the call.
            whole: gives the output of the call the same form.
        """
        eager, replay = graph.eager_seconds, graph.seconds
        wanted, replays = self._run_both(graph, call, padded, cut)
        graph.eager_seconds, graph.seconds = eager, replay
        return outputs_alike(replays, whole(call, wanted), is_half=self.is_half)

    def _run_both(
        self, graph: FunctionGraph, call: Call, replayed: Call, cut: Callable[[Any], Any]
    ) -> tuple[Any, tuple[Any, Any]]:
        """Return the output of an eager run, and those of two replays; the second has another random state."""
        kept, seconds = self.keep(), self._backend.seconds
        try:
            first = graph.run(replayed, cut)
            start = seconds()
            second = graph.run(replayed, cut)  # the first replay also loads the graph
            graph.seconds = seconds() - start
            kept.restore_values()
            start = seconds()
            wanted = run(self._function, map_leaves(call, torch.clone))
            graph.eager_seconds = seconds() - start
        finally:
            kept.restore()
        return wanted, (first, second)

    def draw(self) -> None:
        """Move the generator of the host as an eager run would have."""
        if self.draws:
            draw_again(self.draws)


def void(value: Any) -> None:
    """Drop a value."""


def root_of(function: Callable[..., Any]) -> nn.Module:
    """Return the module that a function is or belongs to, an empty one for others."""
    owner = getattr(function, "__self__", function)
    return owner if isinstance(owner, nn.Module) else nn.Module()


def reach_of(function: Callable[..., Any], module: nn.Module) -> Reach:
    """Return what a function reads."""
    return Reach(module, None if function is module else function)


def parameters_of(reach: Reach) -> list[nn.Parameter]:
    """Return the parameters of all modules that a function reads."""
    found = {id(value): value for part in reach.modules for value in part._parameters.values() if value is not None}
    return list(found.values())


def device_of(reach: Reach, call: Call) -> torch.device:
    """Return where a function computes: with its parameters, else with its inputs."""
    values = [*parameters_of(reach), *(tensor for _, tensor in reach.tensors), *leaves(call)]
    found = (value.device for value in values if value.device.type != "cpu")
    return next(found, torch.device("cpu"))


def is_rough(device: torch.device) -> bool:
    """Say whether torch itself computes in less than single precision."""
    return torch.is_autocast_enabled(device.type) or not _EXACT.issuperset(matmul_precision())


def _bits(tensor: Tensor) -> Tensor:
    """Return values for a comparison to the bit: what is no number equals itself."""
    return tensor.nan_to_num() if tensor.is_floating_point() or tensor.is_complex() else tensor


@final
class _Precision(TorchDispatchMode):
    """Notes whether anything is computed in half precision, in whatever way that was asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_half = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        self.is_half |= isinstance(result, Tensor) and result.dtype in _HALF
        return result
