"""A process in which Triton interprets its kernels; the mode is fixed when Triton is imported."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def _choose() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"  # starting torch's threads takes longer than these sizes


class TritonProcess:
    """Runs importable functions in the process, one at a time, and raises their errors here."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        return self._pool.submit(function, *arguments, **options).result()


@contextmanager
def triton_process() -> Iterator[TritonProcess]:
    """Yield the process. This module does not import torch, which might import Triton before the mode is set."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_choose) as pool:
        yield TritonProcess(pool)
