"""Streams, which are queues of a device's work, events that mark positions in them, and staging memory.

On CUDA streams and events are the driver's; on the CPU a stream is a thread that works through a queue. Enqueueing
blocks on neither, and both raise errors of the work at the next event, so `ModelRunner` supports both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")


class DeviceEvent(Protocol):
    """A position in a stream."""

    def wait(self) -> None:
        """Block the calling thread until the stream has reached this event.

        Raises the first error of the work between the stream's previous event and this one.
        """


class DeviceStream(Protocol):
    """A queue of work that is done in order. Use it from one thread at a time, or the order is undefined."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Do `work` after all earlier work. Does not block; an error is raised by the next event's `wait`.

        `work` is called at once, and then only launches work on the device, or later, on another thread.
        """

    def record(self) -> DeviceEvent:
        """Return an event behind all earlier work."""

    def follow(self, event: DeviceEvent) -> None:
        """Do later work after `event`, of a stream of the same kind, has been reached. Does not raise its errors."""

    def close(self) -> None:
        """Stop the stream after all earlier work is done."""


class ThreadEvent:
    """An event of a `ThreadStream`."""

    def __init__(self) -> None:
        self._ahead = threading.Lock()  # held until the thread reaches the event; cheaper than threading.Event
        self._ahead.acquire()
        self._error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        """Release the threads that wait. Called on the stream's thread."""
        self._error = error
        self._ahead.release()

    def pause(self) -> None:
        """Block until the stream has reached this event, without raising errors of its work."""
        with self._ahead:
            pass

    def wait(self) -> None:
        """As `DeviceEvent.wait`."""
        self.pause()
        if self._error is not None:
            raise self._error


class ThreadStream:
    """A stream whose work is done by a thread, which ends when the stream is closed or garbage-collected."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | ThreadEvent | None] = SimpleQueue()
        # A daemon, so that work which never returns cannot keep the host program from exiting.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    def enqueue(self, work: Callable[[], None]) -> None:
        """As `DeviceStream.enqueue`; `work` is called on the stream's thread."""
        self._jobs.put(work)

    def record(self) -> ThreadEvent:
        """As `DeviceStream.record`."""
        event = ThreadEvent()
        self._jobs.put(event)
        return event

    def follow(self, event: DeviceEvent) -> None:
        """As `DeviceStream.follow`; the stream's thread waits."""
        assert isinstance(event, ThreadEvent), "streams of one kind follow each other"
        self._jobs.put(event.pause)

    def call(self, work: Callable[[], T]) -> T:
        """Call `work` on the stream's thread, after all earlier work, and return its result or raise its error.

        Blocks. Also raises errors of earlier work since the last event.
        """
        results: list[T] = []
        self.enqueue(lambda: results.append(work()))
        self.record().wait()
        return results[0]

    def close(self) -> None:
        """As `DeviceStream.close`."""
        self._end()


def _serve(jobs: SimpleQueue[Callable[[], None] | ThreadEvent | None]) -> None:
    """Work through the queue on a stream's thread, without a reference that would keep the stream alive."""
    error: BaseException | None = None
    while (job := jobs.get()) is not None:
        if isinstance(job, ThreadEvent):
            job.reach(error)
            error = None
        else:
            try:
                job()
            except BaseException as raised:  # any error is raised at the next event, or its waiter hangs
                error = error or raised
        del job  # an idle thread would keep the objects of its last job alive


class CudaEvent:
    """An event of a `CudaStream`."""

    def __init__(self, event: torch.cuda.Event, error: Exception | None) -> None:
        self.event = event
        self._error = error

    def wait(self) -> None:
        """As `DeviceEvent.wait`. Also raises errors of the device itself, which every later wait raises again."""
        self.event.synchronize()
        if self._error is not None:
            raise self._error


class CudaStream:
    """A stream of the CUDA driver. Work is called at once, with this stream as torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._error: Exception | None = None

    def enqueue(self, work: Callable[[], None]) -> None:
        """As `DeviceStream.enqueue`."""
        try:
            with torch.cuda.stream(self._stream):
                work()
        except Exception as error:
            self._error = self._error or error

    def record(self) -> CudaEvent:
        """As `DeviceStream.record`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting threads sleep
        event.record(self._stream)
        error, self._error = self._error, None
        return CudaEvent(event, error)

    def follow(self, event: DeviceEvent) -> None:
        """As `DeviceStream.follow`; the device waits."""
        assert isinstance(event, CudaEvent), "streams of one kind follow each other"
        self._stream.wait_event(event.event)

    def close(self) -> None:
        """Do nothing: torch owns the driver's stream."""


@dataclass(frozen=True)
class DeviceStreams:
    """The streams of a device: `prepare` sends a step's arrays to it, `read` fetches the step's tokens.

    Both are None if host and device share memory, so that nothing is transferred.
    """

    compute: DeviceStream
    prepare: DeviceStream | None = None
    read: DeviceStream | None = None

    @classmethod
    def cuda(cls, device: torch.device) -> Self:
        """Return three streams of the CUDA driver."""
        return cls(CudaStream(device), CudaStream(device), CudaStream(device))

    @classmethod
    def threads(cls) -> Self:
        """Return three threads, for a device with memory of its own."""
        return cls(*(ThreadStream(f"cuelight {name}") for name in ("compute", "prepare", "read")))

    def close(self) -> None:
        """Stop all streams after their earlier work is done."""
        for stream in (self.compute, self.prepare, self.read):
            if stream is not None:
                stream.close()


Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64] | npt.NDArray[np.int32]

ALIGNED_BYTES = 16
"""Alignment of each array, enough for every kernel."""

BYTES_MIN = 1 << 12
TYPES = {"i8": torch.int64, "f8": torch.float64, "i4": torch.int32}


class Staging:
    """Memory for one step: named arrays on the host and their copies on the device, and the step's results."""

    def __init__(self, device: torch.device, *, is_shared: bool) -> None:
        """With `is_shared`, host and device use the same memory, and nothing is copied."""
        self._device = device
        self._is_shared = is_shared
        self._host = self._there = torch.empty(0, dtype=torch.uint8)
        self._sections: dict[str, tuple[int, int, torch.dtype]] = {}
        self._used = 0
        self._results = self._results_there = torch.empty(0, dtype=torch.int64)
        self._result_count = 0

    def fill(self, arrays: Mapping[str, Numbers], result_count: int) -> None:
        """Write the arrays on the host and reserve `result_count` results. Replaces all earlier arrays and results."""
        self._sections.clear()
        begin = 0
        for name, array in arrays.items():
            self._sections[name] = (begin, begin + array.nbytes, TYPES[array.dtype.str[1:]])
            begin += -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        self._used, self._result_count = begin, result_count
        if len(self._host) < begin:
            size = max(begin, 2 * len(self._host), BYTES_MIN)
            self._host, self._there = self._memory(size, torch.uint8)
        if len(self._results) < result_count:
            size = max(result_count, 2 * len(self._results))
            self._results, self._results_there = self._memory(size, torch.int64)
        host = self._host.numpy()
        for name, array in arrays.items():
            begin, end, _ = self._sections[name]
            host[begin:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def _memory(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.empty(size, dtype=dtype, pin_memory=self._device.type == "cuda")
        return host, host if self._is_shared else torch.empty(size, dtype=dtype, device=self._device)

    def send(self, stream: DeviceStream | None) -> DeviceEvent | None:
        """Enqueue the copy of the arrays to the device and return the event of its end; None if nothing is copied."""
        if stream is None:
            assert self._is_shared, "device memory of its own needs a stream"
            return None
        there, host = self._there[: self._used], self._host[: self._used]
        stream.enqueue(lambda: _copy(there, host))
        return stream.record()

    def on_device(self, name: str) -> torch.Tensor:
        """Return an array, flattened to one dimension. Read it in a stream that follows the event of `send`."""
        begin, end, dtype = self._sections[name]
        return self._there[begin:end].view(dtype)

    def results(self) -> torch.Tensor:
        """Return the tensor [result_count] on the device that takes the step's results."""
        return self._results_there[: self._result_count]

    def fetch(self, stream: DeviceStream | None, computed: DeviceEvent) -> DeviceEvent | None:
        """Enqueue the copy of the results to the host, after `computed`, and return the event of its end.

        None if nothing is copied.
        """
        if stream is None:
            assert self._is_shared, "device memory of its own needs a stream"
            return None
        host, there = self._results[: self._result_count], self.results()
        stream.follow(computed)
        stream.enqueue(lambda: _copy(host, there))
        return stream.record()

    def fetched(self) -> list[int]:
        """Return the results. Call after the event of `fetch`."""
        found: list[int] = self._results[: self._result_count].tolist()
        return found


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode():
        # Without CUDA the copy must block, since the stream's event would not wait for it.
        to.copy_(source, non_blocking=to.is_cuda or source.is_cuda)


class StagingPool:
    """A pool of `Staging` that grows to the number of steps in flight at once."""

    def __init__(self, device: torch.device, *, is_shared: bool) -> None:
        self._device = device
        self._is_shared = is_shared
        self._free: SimpleQueue[Staging] = SimpleQueue()
        self.count = 0
        """Number of `Staging` created. The memory of a step that is dropped before it runs does not come back."""

    def take(self) -> Staging:
        """Return memory that no step in flight uses."""
        try:
            return self._free.get_nowait()
        except Empty:
            self.count += 1
            return Staging(self._device, is_shared=self._is_shared)

    def give_back(self, staging: Staging) -> None:
        """Return `staging` to the pool. Call after the last event of its step."""
        self._free.put(staging)
