"""A step's numbers on their way to the device, and its tokens on their way back: memory for each step in flight.

Rule `double-buffers`: memory that a step in flight may still read is not written to. A step's memory returns to the
pool after its end was waited for, so there is nothing to check here, and goes to the next step that needs some.
"""

from __future__ import annotations

from collections.abc import Mapping
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from cuelight.actors.executor.stream import DeviceEvent, DeviceStream

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
