"""A process in which Triton interprets its kernels: that is decided where Triton is imported, once."""

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
    os.environ["OMP_NUM_THREADS"] = "1"  # torch's, which take longer to start than these sizes take


class TritonProcess:
    """Functions of modules that can be imported run there, one at a time, and raise here what they raise there."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
        return self._pool.submit(function, *arguments, **options).result()


@contextmanager
def triton_process() -> Iterator[TritonProcess]:
    """This module imports no torch, which might import Triton before the choice is made."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_choose) as pool:
        yield TritonProcess(pool)
