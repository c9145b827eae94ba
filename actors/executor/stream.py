"""Streams: where a device's work waits in line, and events that mark how far a stream has come.

On CUDA these are the driver's own; on the CPU a stream is a thread that does one piece of work after another. Neither
lets whoever gives it work wait, and both tell of an error in the same place, so one runner serves both.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, Self, TypeVar

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
