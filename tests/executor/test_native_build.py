"""Compiling, caching and loading the native library, and the thread pool inside it."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import structlog

from cuelight.actors.executor.native import build
from cuelight.actors.executor.native.build import NoNativeCode, load_native
from cuelight.models.cache import cache_directory

SOURCE = 'extern "C" int cue_answer() { return ANSWER; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library in place of the real one, so that compiling is fast; nothing is loaded yet."""
    if not any(map(shutil.which, build.COMPILERS)):
        pytest.skip("no C++ compiler")
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.cpp").write_text('#include "answer.h"\n' + SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "_loaded", None)
    monkeypatch.delenv("CXX", raising=False)
    return folder


def kept(cache: Path) -> Path:
    """The only library in `cache`."""
    (library,) = cache.glob(f"{build.native_name(build.find_compiler())}-*.so")
    return library


def again(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> ctypes.CDLL:
    """Load the library as another process would."""
    monkeypatch.setattr(build, "_loaded", None)
    return load_native(folder)


def test_library_is_compiled_once_and_then_loaded(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "not" / "there"
    assert load_native(cache).cue_answer() == 42
    assert load_native(None) is load_native(cache)  # one for the process
    monkeypatch.setattr(build, "compile_into", lambda *_: pytest.fail("compiled again"))
    assert again(monkeypatch, cache).cue_answer() == 42
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_changed_source_header_or_flag_gives_another_library(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = build.find_compiler()
    names = [build.native_name(compiler)]
    (sources / "answer.h").write_text("#define ANSWER 43\n")
    names.append(build.native_name(compiler))
    (sources / "answer.cpp").write_text('#include "answer.h"\n\n' + SOURCE)
    names.append(build.native_name(compiler))
    names.append(build.native_name([*compiler, "-g"]))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DX"))
    names.append(build.native_name(compiler))
    assert len(set(names)) == len(names)
    assert again(monkeypatch, tmp_path).cue_answer() == 43


def test_compiler_output_is_in_the_error(sources: Path, tmp_path: Path) -> None:
    (sources / "answer.h").write_text("#error no answer\n")
    with pytest.raises(NoNativeCode, match=r"failed with status 1:\n(.*\n)*.*no answer"):
        load_native(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_missing_compiler_is_refused(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler -O1")
    with pytest.raises(NoNativeCode, match="no C\\+\\+ compiler: looked for /no/such/compiler"):
        load_native(tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoNativeCode, match="looked for c\\+\\+, g\\+\\+, clang\\+\\+"):
        load_native(tmp_path)
    (tmp_path / "g++").write_text("#!/bin/sh\necho $0 is broken; exit 3\n")
    (tmp_path / "g++").chmod(0o755)
    with pytest.raises(NoNativeCode, match=r"failed with status 3:\n.*is broken"):
        load_native(tmp_path)
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    with pytest.raises(NoNativeCode, match=r"g\+\+ compiles nothing"):
        load_native(tmp_path)
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(NoNativeCode, match=r"\$CXX is no command"):
        load_native(tmp_path)


def test_cxx_may_have_options(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "answer.h").write_text("")
    monkeypatch.setenv("CXX", f"{build.find_compiler()[0]} '-DANSWER=(40 + 4)'")
    assert load_native(tmp_path).cue_answer() == 44


@pytest.mark.parametrize("blocked", ["none", "file", "beneath a file", "no rights", "full"])
def test_library_without_a_folder_is_compiled_for_this_process(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: str
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(build.tempfile, "tempdir", str(scratch))
    (tmp_path / "file").write_text("where a folder should be")
    places = {"none": None, "file": tmp_path / "file", "beneath a file": tmp_path / "file" / "cache"}
    folder = places.get(blocked, Path("/proc/self/cache" if blocked == "no rights" else tmp_path / "cache"))
    if blocked == "full":
        monkeypatch.setattr(build.shutil, "copy", full)
    with structlog.testing.capture_logs() as entries:
        assert load_native(folder).cue_answer() == 42
    assert list(scratch.iterdir()) == []
    assert [(each["event"], each["folder"]) for each in entries] == [("native_code_not_kept", str(folder))] * (
        folder is not None
    )
    assert blocked != "full" or list(folder.iterdir()) == []


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("damage", ["cut off", "zeroed", "no library"])
def test_damaged_library_is_compiled_again(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    assert load_native(tmp_path).cue_answer() == 42
    library = kept(tmp_path)
    whole = library.read_bytes()
    damaged = {"cut off": whole[:9000], "zeroed": whole[:4096] + bytes(4096) + whole[8192:], "no library": b"\x7fELF"}
    # Another file: this process has the former one mapped.
    library.unlink()
    library.write_bytes(damaged[damage])
    assert again(monkeypatch, tmp_path).cue_answer() == 42
    assert kept(tmp_path).read_bytes() == whole


def test_library_in_a_noexec_folder_is_loaded_from_elsewhere(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Act as on a disk that is mounted with `noexec`."""
    load, loaded = ctypes.CDLL, []

    def refuse(path: str) -> ctypes.CDLL:
        loaded.append(Path(path).parent)
        if loaded[-1] == tmp_path:
            raise OSError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    for _ in range(2):
        assert again(monkeypatch, tmp_path).cue_answer() == 42
        assert loaded[-1] != tmp_path
    assert kept(tmp_path).exists()


def test_processes_compile_at_the_same_time(sources: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from cuelight.actors.executor.native import build\n"
        "build.SOURCES = Path(sys.argv[1]); sys.stdin.readline()\n"
        "print(build.load_native(Path(sys.argv[2])).cue_answer())"
    )
    command = [sys.executable, "-c", program, str(sources), str(tmp_path / "cache")]
    several = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in several:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120)[0] for process in several] == ["42\n"] * 3
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


def test_least_recently_used_libraries_are_removed(sources: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    others = [cache / f"native-{number}.so" for number in range(build.LIBRARIES_KEPT + 2)]
    for age, path in enumerate(others):
        path.write_bytes(b"x")
        os.utime(path, (1e9 - age, 1e9 - age))
    killed, at_work = cache / "native-a.so.x.partial", cache / "native-b.so.y.partial"
    for path, seconds in ((killed, 1e9), (at_work, None)):
        path.mkdir()
        (path / "some.o").write_bytes(b"x")
        if seconds is not None:
            os.utime(path, (seconds, seconds))
    (cache / "else.so").write_bytes(b"x")
    assert load_native(cache).cue_answer() == 42
    used = {path.name for path in others[: build.LIBRARIES_KEPT - 1]}
    assert {path.name for path in cache.iterdir()} == used | {kept(cache).name, at_work.name, "else.so"}


def test_used_library_counts_as_new(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_native(tmp_path)
    library = kept(tmp_path)
    os.utime(library, (1e9, 1e9))
    assert again(monkeypatch, tmp_path).cue_answer() == 42
    assert library.stat().st_mtime > 1e9


TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)


@pytest.fixture(scope="module")
def native() -> ctypes.CDLL:
    try:
        return load_native(cache_directory() / "native")
    except NoNativeCode as error:
        pytest.skip(str(error))


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest, native: ctypes.CDLL) -> ctypes.CDLL:
    before = native.cue_threads()
    request.addfinalizer(lambda: native.cue_set_threads(before))
    native.cue_set_threads(request.param)
    assert native.cue_threads() == request.param
    return native


def run(native: ctypes.CDLL, tasks: int) -> list[int]:
    done: list[int] = []
    native.cue_parallel(tasks, TASK(lambda _context, task: done.append(task)), None)
    return sorted(done)


def test_every_task_runs_once(threads: ctypes.CDLL) -> None:
    for tasks in (0, 1, 2, 3, 7, 64, 1000):
        assert run(threads, tasks) == list(range(tasks))


def test_jobs_of_several_threads_take_turns(threads: ctypes.CDLL) -> None:
    results: list[list[int]] = []
    callers = [threading.Thread(target=lambda: results.extend(run(threads, 40) for _ in range(50))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
    assert results == [list(range(40))] * 200


def test_task_may_start_tasks(threads: ctypes.CDLL) -> None:
    inner: list[list[int]] = []
    threads.cue_parallel(6, TASK(lambda _context, _task: inner.append(run(threads, 5))), None)
    assert inner == [list(range(5))] * 6


def test_tasks_of_a_job_run_at_the_same_time(native: ctypes.CDLL) -> None:
    before = native.cue_threads()
    native.cue_set_threads(3)
    meeting = threading.Barrier(3)
    met: list[int] = []

    def task(_context: int, _task: int) -> None:
        met.append(meeting.wait(timeout=60))

    native.cue_parallel(3, TASK(task), None)
    native.cue_set_threads(before)
    assert sorted(met) == [0, 1, 2]


def test_invalid_thread_count_becomes_one(native: ctypes.CDLL) -> None:
    before = native.cue_threads()
    assert before == len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else before >= 1
    for wanted in (0, -5):
        native.cue_set_threads(wanted)
        assert native.cue_threads() == 1
    native.cue_set_threads(before)


FORKED = """
import ctypes, os, sys
from pathlib import Path
from cuelight.actors.executor.native.build import load_native
native = load_native(Path(sys.argv[1]))
native.cue_set_threads(3)
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
def count():
    done = []
    native.cue_parallel(100, TASK(lambda _, task: done.append(task)), None)
    return len(done), native.cue_threads()
assert count() == (100, 3)
child = os.fork()
if child == 0:
    os._exit(0 if count() == (100, 3) else 1)
assert os.waitpid(child, 0)[1] == 0
assert count() == (100, 3)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_starts_its_own_threads(native: ctypes.CDLL) -> None:
    folder = str(cache_directory() / "native")
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED, folder], check=True, timeout=120)
