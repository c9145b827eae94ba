"""Streams: where a device's work waits in line, and events that mark how far a stream has come.

On CUDA these are the driver's own; on the CPU a stream is a thread that does one piece of work after another. Neither
lets whoever gives it work wait, and both tell of an error in the same place, so one runner serves both.
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
    """A mark in a stream."""

    def wait(self) -> None:
        """Block the calling thread until the stream has come here.

        Raises the first error of the work since the stream's mark before this one.
        """


class DeviceStream(Protocol):
    """Work in order. Used by one thread at a time; to have two threads give it work is to have no order."""

    def enqueue(self, work: Callable[[], None]) -> None:
        """Do this after all that came before. Waits for nothing and raises nothing: an error shows at the next mark.

        `work` may be called at once, and then only queues what it does, or later, by another thread.
        """

    def record(self) -> DeviceEvent:
        """Mark the place behind all that came before."""

    def follow(self, event: DeviceEvent) -> None:
        """What comes from now on is done after this mark of a stream of the same kind; its errors stay with it."""

    def close(self) -> None:
        """Take no more work; what was given is still done."""


class ThreadEvent:
    """A mark in a thread's work."""

    def __init__(self) -> None:
        self._ahead = threading.Lock()  # held until the thread comes here: the cheapest thing to wait for
        self._ahead.acquire()
        self._error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        """On the stream's thread."""
        self._error = error
        self._ahead.release()

    def pause(self) -> None:
        """Block until the stream has come here, whatever it met on its way."""
        with self._ahead:
            pass

    def wait(self) -> None:
        """As `DeviceEvent.wait`."""
        self.pause()
        if self._error is not None:
            raise self._error


class ThreadStream:
    """A thread that does what it is given, in order. It ends when the stream is closed, or nobody has it any more."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | ThreadEvent | None] = SimpleQueue()
        # A daemon, so that work which never returns cannot keep the host program from exiting.
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    def enqueue(self, work: Callable[[], None]) -> None:
        """As `DeviceStream.enqueue`; the thread calls it."""
        self._jobs.put(work)

    def record(self) -> ThreadEvent:
        """As `DeviceStream.record`."""
        event = ThreadEvent()
        self._jobs.put(event)
        return event

    def follow(self, event: DeviceEvent) -> None:
        """As `DeviceStream.follow`: the thread waits."""
        assert isinstance(event, ThreadEvent), "streams of one kind follow each other"
        self._jobs.put(event.pause)

    def call(self, work: Callable[[], T]) -> T:
        """What `work` gives on this thread, after all that came before. Raises what it raises."""
        results: list[T] = []
        self.enqueue(lambda: results.append(work()))
        self.record().wait()
        return results[0]

    def close(self) -> None:
        """As `DeviceStream.close`."""
        self._end()


def _serve(jobs: SimpleQueue[Callable[[], None] | ThreadEvent | None]) -> None:
    """What a stream's thread does. It knows the queue alone, so that it does not keep its stream alive."""
    error: BaseException | None = None
    while (job := jobs.get()) is not None:
        if isinstance(job, ThreadEvent):
            job.reach(error)
            error = None
        else:
            try:
                job()
            except BaseException as raised:  # whatever it is, somebody waits at the next mark
                error = error or raised
        del job  # an idle thread keeps nothing of its last job alive


class CudaEvent:
    """A mark in a CUDA stream."""

    def __init__(self, event: torch.cuda.Event, error: Exception | None) -> None:
        self.event = event
        self._error = error

    def wait(self) -> None:
        """As `DeviceEvent.wait`. A device's own errors show here too, and never go away again."""
        self.event.synchronize()
        if self._error is not None:
            raise self._error


class CudaStream:
    """A stream of the CUDA driver. Work is called at once, with this stream as torch's current one."""

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
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # whoever waits for it sleeps
        event.record(self._stream)
        error, self._error = self._error, None
        return CudaEvent(event, error)

    def follow(self, event: DeviceEvent) -> None:
        """As `DeviceStream.follow`: the device waits."""
        assert isinstance(event, CudaEvent), "streams of one kind follow each other"
        self._stream.wait_event(event.event)

    def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True)
class DeviceStreams:
    """The ways of a device: what a step needs goes there by `prepare`, its tokens come back by `read`.

    Neither is there where the host's memory is the device's, so that nothing has a way to go.
    """

    compute: DeviceStream
    prepare: DeviceStream | None = None
    read: DeviceStream | None = None

    @classmethod
    def cuda(cls, device: torch.device) -> Self:
        """Three streams of the driver."""
        return cls(CudaStream(device), CudaStream(device), CudaStream(device))

    @classmethod
    def threads(cls) -> Self:
        """Three threads, with memory of its own for the device."""
        return cls(*(ThreadStream(f"cuelight {name}") for name in ("compute", "prepare", "read")))

    def close(self) -> None:
        """Take no more work."""
        for stream in (self.compute, self.prepare, self.read):
            if stream is not None:
                stream.close()


Numbers = npt.NDArray[np.int64] | npt.NDArray[np.float64] | npt.NDArray[np.int32]

ALIGNED_BYTES = 16
"""Each array begins at a multiple, which is what any kernel may ask for."""

BYTES_MIN = 1 << 12
TYPES = {"i8": torch.int64, "f8": torch.float64, "i4": torch.int32}


class Staging:
    """Memory for one step: named arrays on the host, and the same on the device."""

    def __init__(self, device: torch.device, *, is_shared: bool) -> None:
        """With `is_shared` host and device see the same memory, and nothing is moved."""
        self._device = device
        self._is_shared = is_shared
        self._host = self._there = torch.empty(0, dtype=torch.uint8)
        self._sections: dict[str, tuple[int, int, torch.dtype]] = {}
        self._used = 0
        self._results = self._results_there = torch.empty(0, dtype=torch.int64)
        self._result_count = 0

    def fill(self, arrays: Mapping[str, Numbers], result_count: int) -> None:
        """Write these on the host, and make room for so many results. What was here before is gone."""
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
        """Have the arrays moved; the event says that they are there."""
        if stream is None:
            assert self._is_shared, "without a way nothing gets there"
            return None
        there, host = self._there[: self._used], self._host[: self._used]
        stream.enqueue(lambda: _copy(there, host))
        return stream.record()

    def on_device(self, name: str) -> torch.Tensor:
        """One of the arrays, in one dimension. To be read in a stream that is behind the event of `send`."""
        begin, end, dtype = self._sections[name]
        return self._there[begin:end].view(dtype)

    def results(self) -> torch.Tensor:
        """[result_count], where the step's results are to be on the device."""
        return self._results_there[: self._result_count]

    def fetch(self, stream: DeviceStream | None, computed: DeviceEvent) -> DeviceEvent | None:
        """Have the results moved to the host, once they are computed; the event says that they are there."""
        if stream is None:
            assert self._is_shared, "without a way nothing comes back"
            return None
        host, there = self._results[: self._result_count], self.results()
        stream.follow(computed)
        stream.enqueue(lambda: _copy(host, there))
        return stream.record()

    def fetched(self) -> list[int]:
        """The results, after the event of `fetch`."""
        found: list[int] = self._results[: self._result_count].tolist()
        return found


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    with torch.inference_mode():
        # Only there does an event of the stream come after the copy.
        to.copy_(source, non_blocking=to.is_cuda or source.is_cuda)


class StagingPool:
    """Memory for as many steps as are in flight at once, and no more."""

    def __init__(self, device: torch.device, *, is_shared: bool) -> None:
        self._device = device
        self._is_shared = is_shared
        self._free: SimpleQueue[Staging] = SimpleQueue()
        self.count = 0
        """How many there are. A step that is dropped before it runs takes its memory with it."""

    def take(self) -> Staging:
        """Memory that no step reads."""
        try:
            return self._free.get_nowait()
        except Empty:
            self.count += 1
            return Staging(self._device, is_shared=self._is_shared)

    def give_back(self, staging: Staging) -> None:
        """After the last event of its step."""
        self._free.put(staging)
