"""The ceilings of this machine, measured in the same run as the kernels: arithmetic of all threads, and memory."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuelight.actors.executor.native.build import FLAGS, SOURCES, find_compiler

COLD_BYTES = 192 << 20
"""More than the caches of the machines this is meant for."""

SLICE_BYTES = 2 << 20
"""Read in slices, the best of which counts: another program on the machine spoils few of them."""

ROUNDS = 20_000


@dataclass(frozen=True)
class Limits:
    """Operations (a multiplication and an addition are two) and bytes, in billions a second; 0 is not known."""

    float32: float
    int8: float
    memory: float

    def seconds(self, operations: float, bytes_read: float, *, integer: bool) -> float:
        """Return the least seconds for these operations while `bytes_read` bytes come from memory."""
        peak = self.int8 if integer else self.float32
        return max(operations / peak if peak else 0.0, bytes_read / self.memory) / 1e9


class Ceilings:
    """Measures whenever asked and keeps the best so far."""

    def __init__(self, threads: int) -> None:
        self._library = _compile()
        self._library.cue_set_threads(threads)
        self._memory = np.full(COLD_BYTES, 1, np.uint8)
        self._best = {"float32": 0.0, "int8": 0.0, "memory": 0.0}

    def measure(self, repetitions: int = 300) -> Limits:
        for _ in range(repetitions):
            self._keep("float32", lambda: self._library.limit_float(ROUNDS))
            self._keep("int8", lambda: self._library.limit_int8(ROUNDS))
        for offset in range(0, COLD_BYTES, SLICE_BYTES):
            address = self._memory.ctypes.data + offset

            def read(address: int = address) -> int:
                self._library.limit_read(address, SLICE_BYTES)
                return SLICE_BYTES

            self._keep("memory", read)
        return Limits(**self._best)

    def _keep(self, name: str, work: Callable[[], int]) -> None:
        begin = time.perf_counter()
        done = work()
        self._best[name] = max(self._best[name], done / (time.perf_counter() - begin) / 1e9)


def _compile() -> ctypes.CDLL:
    here = Path(__file__).with_name("native_limits.cpp")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "limits.so"
        sources = [here, SOURCES / "threads.cpp", SOURCES / "isa.cpp"]
        command = [*find_compiler(), *FLAGS, "-shared", f"-I{SOURCES}", *map(str, sources), "-o", str(target)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(target))
    for name in ("limit_float", "limit_int8"):
        function = getattr(loaded, name)
        function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_int64
    loaded.limit_read.argtypes, loaded.limit_read.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_uint64
    return loaded
