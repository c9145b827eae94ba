"""Streams that are nobody's: work is done in any order that the events allow, and every access to memory is watched.

Two accesses of which one writes must be ordered by a stream, an event or a wait of the host: else some device does them
the other way round, some day. Clocks are vectors, one number for each stream and one for the host.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from checked_graphs import waits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cuelight.actors.executor.streams import DeviceEvent, DeviceStreams, Numbers, Staging

HOST = "host"
Clock = Counter[str]


@dataclass
class _Accesses:
    """Of one piece of memory: the last write, and each one's last read since then."""

    written: tuple[str, int] = (HOST, 0)
    read: dict[str, int] = field(default_factory=dict)


class CheckedEvent:
    def __init__(self, checked: Checked) -> None:
        self._checked = checked
        self.clock: Clock | None = None
        self.error: BaseException | None = None

    def wait(self) -> None:
        self._checked.wait(self)
        if self.error is not None:
            raise self.error


class CheckedStream:
    def __init__(self, checked: Checked, name: str) -> None:
        self._checked, self.name = checked, name
        self.jobs: deque[tuple[Callable[[], None] | None, CheckedEvent | None, Clock]] = deque()
        self._error: BaseException | None = None

    def enqueue(self, work: Callable[[], None]) -> None:
        self.jobs.append((work, None, self._checked.tick()))

    def record(self) -> CheckedEvent:
        event = CheckedEvent(self._checked)

        def mark() -> None:
            event.clock = Clock(self._checked.clocks[self.name])
            event.error, self._error = self._error, None

        self.jobs.append((mark, None, self._checked.tick()))
        return event

    def follow(self, event: DeviceEvent) -> None:
        assert isinstance(event, CheckedEvent)
        self.jobs.append((None, event, self._checked.tick()))

    def close(self) -> None:
        pass

    def can_go_on(self) -> bool:
        return bool(self.jobs) and (self.jobs[0][1] is None or self.jobs[0][1].clock is not None)

    def go_on(self) -> None:
        work, event, clock = self.jobs.popleft()
        mine = self._checked.clocks[self.name]
        mine |= clock
        if event is not None:
            assert event.clock is not None
            mine |= event.clock
        mine[self.name] += 1
        if work is not None:
            try:
                with self._checked.acting(self.name):
                    work()
            except AssertionError:
                raise  # a rule was broken, or the test's own check failed
            except Exception as error:
                self._error = self._error or error


class Checked(TorchDispatchMode):
    """Streams to enter: within, torch's operations are watched.

    `known`: memory that the device has from the start. With it, a stream's work touches that, what it was sent, what it
    made, and nothing else: all else would have to come from the host, which would wait for it.
    """

    def __init__(self, seed: int, known: Iterable[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self._ways = {name: CheckedStream(self, name) for name in ("compute", "prepare", "read")}
        self.streams = DeviceStreams(**self._ways)  # type: ignore[arg-type]  # as a Protocol's
        self.clocks: dict[str, Clock] = {name: Clock() for name in (HOST, *self._ways)}
        self._actor = HOST
        self._may_wait = False
        self._accesses: dict[int, _Accesses] = {}
        self._kept: list[torch.Tensor] = []  # so that no two pieces of memory share an address
        self._is_strict = known is not None
        for tensor in known or ():
            self._made(tensor)

    def tick(self) -> Clock:
        """The host gives work: what it did before happened before."""
        clock = Clock(self.clocks[HOST])
        self.clocks[HOST][HOST] += 1
        return clock

    def advance(self) -> bool:
        """Let one stream do one thing; False if none can."""
        ready = [stream for stream in self._ways.values() if stream.can_go_on()]
        if ready:
            self._chance.choice(ready).go_on()
        return bool(ready)

    def wait(self, event: CheckedEvent) -> None:
        assert self._may_wait, "nothing on the host waits for the device but who reads the tokens"
        while event.clock is None:
            assert self.advance(), "somebody waits for what never comes"
        self.clocks[HOST] |= event.clock

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, the host may wait."""
        self._may_wait = True
        try:
            yield
        finally:
            self._may_wait = False

    @contextmanager
    def acting(self, actor: str) -> Iterator[None]:
        before, self._actor = self._actor, actor
        try:
            yield
        finally:
            self._actor = before

    def touch(self, tensor: torch.Tensor, *, writes: bool) -> None:
        """Whoever acts now reads or writes this memory."""
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return
        address = tensor.untyped_storage().data_ptr()
        if address not in self._accesses:
            assert not self._is_strict or self._actor == HOST, "a stream's work brings nothing from the host"
            self._made(tensor)
        accesses, clock = self._accesses[address], self.clocks[self._actor]
        writer, when = accesses.written
        assert clock[writer] >= when, f"{self._actor} does not wait for what {writer} writes"
        if writes:
            for reader, time in accesses.read.items():
                assert clock[reader] >= time, f"{self._actor} writes what {reader} may still read"
            accesses.read.clear()
            accesses.written = self._actor, clock[self._actor]
        else:
            accesses.read[self._actor] = clock[self._actor]

    def _made(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            self._accesses.setdefault(tensor.untyped_storage().data_ptr(), _Accesses())
            self._kept.append(tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._actor != HOST:
            assert not waits(function, args), f"a stream's work does not wait for the result of {function}"
        given = list(zip(function._schema.arguments, args, strict=False))
        given += [(each, kwargs[each.name]) for each in function._schema.arguments if each.name in kwargs]
        shaped = function.overloadpacket.__name__.startswith(("new_", "empty_", "zeros_", "ones_", "full_"))
        views = shaped or any(
            each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns
        )
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_flatten(value)[0]:
                # To look at a part is not to read it, nor is to make another of the same shape.
                if isinstance(tensor, torch.Tensor) and not views:
                    self.touch(tensor, writes=writes)
        result = function(*args, **kwargs)
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, torch.Tensor):
                self._made(tensor)
        return result


def watch_staging(monkeypatch: pytest.MonkeyPatch, checked: Checked) -> None:
    """The host's own accesses, which are none of torch's operations."""
    fill, fetched = Staging.fill, Staging.fetched

    def filled(staging: Staging, arrays: Mapping[str, Numbers], result_count: int) -> None:
        fill(staging, arrays, result_count)
        checked.touch(staging._host, writes=True)

    def read(staging: Staging) -> list[int]:
        checked.touch(staging._results, writes=False)
        return fetched(staging)

    monkeypatch.setattr(Staging, "fill", filled)
    monkeypatch.setattr(Staging, "fetched", read)
