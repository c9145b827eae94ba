"""Graphs without a device that has them: the work is done at each replay, and must be what was captured.

So all that leads to a graph, and all that a graph relies on, is tried where there is no CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from cuelight.actors.executor.model.graphs import Graph

WAITING = ("item", "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")


def waits(function: Any, args: Sequence[Any]) -> bool:
    """Whether the host has to know what comes out, be it only its shape, so that on CUDA it waits."""
    by_mask = (
        isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
        for index in (args[1] if function.overloadpacket.__name__ in ("index", "index_put", "index_put_") else ())
    )
    return function.overloadpacket.__name__ in WAITING or any(by_mask)


_tracing: ContextVar[_Trace | None] = ContextVar("cuelight_trace", default=None)


@contextmanager
def launching(kernel: str, *arguments: object) -> Iterator[None]:
    """Within, whatever is done counts as one launch of a kernel: what it reads from its tensors is its own affair."""
    trace = _tracing.get()
    if trace is not None:
        trace.add(f"{kernel}({', '.join(map(trace.described, arguments))})")
    with _disable_current_modes():
        yield


class CheckedGraphs:
    """Capture in plain torch."""

    def capture(self, work: Callable[[], None], memory: Mapping[str, torch.Tensor]) -> Graph:
        """As `Capture.capture`. Raises AssertionError if the work touches memory that is not in `memory`."""
        return CheckedGraph(work, memory)


class CheckedGraph:
    """Remembers every operation: what it is, its numbers, the shapes of its tensors, and where those lie that the work
    did not make itself. A CUDA graph would replay just these."""

    def __init__(self, work: Callable[[], None], memory: Mapping[str, torch.Tensor]) -> None:
        # Kept, so that nothing else can come to lie there.
        self._memory = {tensor.untyped_storage().data_ptr(): (name, tensor) for name, tensor in memory.items()}
        self._operations = self._traced(work, None)

    def replay(self, work: Callable[[], None]) -> None:
        """As `Graph.replay`. Raises AssertionError if a graph would have done something else."""
        operations = self._traced(work, self._operations)
        assert len(operations) == len(self._operations), "a graph has as many operations as it was captured with"

    def _traced(self, work: Callable[[], None], expected: Sequence[str] | None) -> list[str]:
        trace = _Trace({address: name for address, (name, _) in self._memory.items()}, expected)
        token = _tracing.set(trace)
        try:
            with trace:
                work()
        finally:
            _tracing.reset(token)
        return trace.operations


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is not typed
    def __init__(self, names: Mapping[int, str], expected: Sequence[str] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self._expected = expected
        self._names = dict(names)
        self._made: list[torch.Tensor] = []  # kept, so that each has an address of its own

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = ", ".join(self.described(argument) for argument in tree_flatten((args, kwargs))[0])
        self.add(f"{function}({given})")
        assert not waits(function, args), f"a graph cannot wait for the result of {function}"
        result = function(*args, **kwargs)
        for each in tree_flatten(result)[0]:
            if isinstance(each, torch.Tensor):
                self._names.setdefault(each.untyped_storage().data_ptr(), f"made {len(self._made)}")
                self._made.append(each)
        return result

    def add(self, operation: str) -> None:
        """What is about to be done. Raises AssertionError if it is not what is expected."""
        if self._expected is not None:
            captured = self._expected[len(self.operations)] if len(self.operations) < len(self._expected) else "nothing"
            assert operation == captured, f"a graph has {captured} baked in, and this step is {operation}"
        self.operations.append(operation)

    def described(self, argument: object) -> str:
        """What of an argument a graph has baked in."""
        if not isinstance(argument, torch.Tensor):
            return repr(argument)
        if argument.layout is not torch.strided:  # a weight in a library's own layout; it shows no address
            return f"weight {id(argument)}"
        address = argument.untyped_storage().data_ptr()
        if address not in self._names and argument.dim() == 0:
            return f"number {argument.item()}"
        assert address in self._names or argument.numel() == 0, (
            "a graph reads no memory that may be another's next time"
        )
        where = self._names.get(address, "nothing")
        return f"{where}+{argument.storage_offset()}{list(argument.shape)}{list(argument.stride())}{argument.dtype}"
