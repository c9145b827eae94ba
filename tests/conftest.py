"""Fixtures that several test modules share."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from cuelight.actors.executor.native.build import NoNativeCode, load_native
from cuelight.models.cache import cache_directory
from cuelight.models.store import DEFAULT_MODEL, model_path

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKERS_MAX = 8
WORKER_BYTES = 2 << 30
"""Memory that one worker and its processes may take."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker a core, bounded by memory; 0 (this process) where a few tests are selected by name."""
    if config.option.keyword or config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    count = min(_cores(), WORKERS_MAX)
    if hasattr(os, "sysconf"):
        count = min(count, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // WORKER_BYTES)
    return count if count > 1 else 0


def pytest_configure() -> None:
    """Divide the cores among the workers: torch's threads spin while they wait for a core, and take twice the time."""
    if WORKERS > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // WORKERS)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection while modules are imported: it frees little there, and takes a third longer."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that are marked `cuda` where there is no GPU."""
    if item.get_closest_marker("cuda") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let one worker compile the native kernels for all: the compiler uses every core by itself."""
    if WORKERS == 1 or sys.platform == "win32":
        return
    import fcntl

    shared = tmp_path_factory.getbasetemp().parent
    with (shared / "native.lock").open("w") as file, contextlib.suppress(NoNativeCode):
        fcntl.flock(file, fcntl.LOCK_EX)
        load_native(cache_directory() / "native")


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Freeze the objects of imported libraries, so that tests that collect garbage scan only their own."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Unfreeze the heap: libraries complain of objects that are alive at the interpreter's end."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def unconfigured_logs() -> Iterator[None]:
    """Reset structlog: capturing its events configures it for good, but other tests read the standard library's log."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, fetched and converted on first use. Mark tests that use it with `model`."""
    return model_path(DEFAULT_MODEL)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch on one thread: several wait for each other at every product, for minutes where cores are shared."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


FORMS = {"portable": 0, "avx2": 1, "avx512": 2}


@pytest.fixture(scope="session")
def native() -> ctypes.CDLL:
    """The native kernels, compiled on first use."""
    try:
        return load_native(cache_directory() / "native")
    except NoNativeCode as error:
        pytest.skip(str(error))


@pytest.fixture(params=FORMS.items(), ids=lambda param: param[0])
def form(request: pytest.FixtureRequest, native: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """The native kernels in each form that this machine has."""
    name, wanted = request.param
    if native.cue_force_isa(wanted) != wanted:
        native.cue_force_isa(-1)
        pytest.skip(f"this machine has no {name}")
    yield native
    native.cue_force_isa(-1)


@pytest.fixture
def avx512_bf16(native: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """The kernels with AVX512-BF16, one level above the last form."""
    wanted = 1 + max(FORMS.values())
    if native.cue_force_isa(wanted) != wanted:
        native.cue_force_isa(-1)
        pytest.skip("this machine has no AVX512-BF16")
    yield native
    native.cue_force_isa(-1)
