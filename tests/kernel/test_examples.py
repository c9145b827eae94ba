"""The kernel's examples run as programs, and the blocks of its page as they stand."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType

import pytest
import uvloop

from cuelight.kernel import KernelError, RestartPolicy, Strategy
from cuelight.kernel.simulation.simulator import SimulationError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kernel.md").read_text(encoding="utf-8")


def run(program: str | Path, *arguments: str, status: int = 0, hash_seed: str = "random") -> tuple[str, str]:
    """Run a program in a process of its own; gives what it wrote to standard output and to standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def test_the_pipelines_mailboxes_stay_small(tmp_path: Path) -> None:
    out, err = run("pipeline.py", str(tmp_path / "lines"), "5000")
    lines = [f"{number} {hashlib.sha256(str(number).encode()).hexdigest()}\n" for number in range(5000)]
    assert (tmp_path / "lines").read_text() == "".join(lines)
    assert out.startswith("5000 lines written\n") and not err
    peaks = re.findall(r"^(\w+): (\d+) messages, at most (\d+) of (\d+) waiting at once$", out, re.MULTILINE)
    assert [name for name, *_ in peaks] == ["writer", "hasher", "source"]
    for _, messages, peak, capacity in peaks:
        assert int(messages) > 4900
        assert int(peak) <= int(capacity) <= 17


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_pipeline_whose_file_is_full_ends_with_the_error() -> None:
    _, err = run("pipeline.py", "/dev/full", "5000", status=1)
    assert "ActorCrashed: actor 'writer' crashed on _Written: OSError(28, 'No space left on device')" in err


def test_every_job_of_the_pool_has_an_outcome() -> None:
    out, err = run("worker_pool.py", "1000", "10000", "1000")
    assert sorted(out.splitlines()) == [
        "Job(limit=100, deaths=1): 25",
        "Job(limit=1000, deaths=0): 168",
        "Job(limit=1000, deaths=0): 168",
        "Job(limit=10000, deaths=0): 1229",
        "Job(limit=50, deaths=9): set aside",
    ]
    assert err.count("was killed by SIGKILL") == 3 == err.count("actor_crashed")


def test_the_replicas_agree_and_a_seed_is_a_history() -> None:
    one, _ = run("replicated_counter.py", "20", hash_seed="1")
    other, _ = run("replicated_counter.py", "20", hash_seed="2")
    assert one == other
    seeds = re.findall(r"^seed (\d+): \[30, 30, 30\], (\w{64})$", one, re.MULTILINE)
    assert [int(seed) for seed, _ in seeds] == list(range(20))
    assert len({digest for _, digest in seeds}) == 20


def test_the_simulator_finds_the_replicas_bug() -> None:
    _, err = run("replicated_counter.py", "100", "bug", status=1)
    assert re.search(r"SimulationError: seed \d+: AssertionError: the replicas count \[[\d, ]+\] of 30$", err.strip())


def blocks() -> Iterator[tuple[str, CodeType]]:
    """Each Python block of the page, as text and compiled so that a traceback names the page's own lines."""
    for match in re.finditer(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        padding = "\n" * PAGE.count("\n", 0, match.start(1))
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        yield match[1], compile(padding + match[1], "docs/kernel.md", "exec", flags=flags, dont_inherit=True)


def is_program(block: str) -> bool:
    return "asyncio.run(" in block


@pytest.mark.timeout(60)
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_pages_blocks_run_in_order(
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = ModuleType("kernel_page")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # where the types of its messages are looked up
    monkeypatch.chdir(tmp_path)
    excerpts = [code for text, code in blocks() if not is_program(text)]
    assert len(excerpts) >= 12

    async def run_excerpts() -> None:
        for code in excerpts:
            coroutine = eval(code, page.__dict__)
            if code.co_flags & inspect.CO_COROUTINE:
                await coroutine

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run_excerpts())
    shown = re.findall(r"^ *print\(.*\)  # (.+)$", PAGE, re.MULTILINE)
    assert len(shown) == 3
    assert capsys.readouterr().out.replace(page.__name__, "…").splitlines() == shown


def test_the_pages_programs_run(tmp_path: Path) -> None:
    programs = [text for text, _ in blocks() if is_program(text)]
    assert programs
    for text in programs:
        path = tmp_path / "program.py"
        path.write_text(text, encoding="utf-8")
        assert run(path) == ("", "")


def table(heading: str) -> dict[str, str]:
    """The first two columns of the table with this heading."""
    rows = PAGE.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| `?(.+?)`? \|", rows, re.MULTILINE))


def test_the_pages_tables_are_those_of_the_code() -> None:
    defaults = {name: getattr(RestartPolicy(), name) for name in RestartPolicy.__dataclass_fields__}
    shown = {name: value.name if isinstance(value, Strategy) else repr(value) for name, value in defaults.items()}
    assert table("field") == shown
    assert list(table("`Strategy`")) == [strategy.name for strategy in Strategy]
    errors = {error.__name__ for error in subclasses(KernelError) if error.__module__.startswith("cuelight.kernel.")}
    assert SimulationError.__name__ in errors and set(table("error")) == errors


def subclasses(kind: type[KernelError]) -> Iterator[type[KernelError]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_what_the_page_names_as_proof_exists() -> None:
    proofs = re.findall(r"`([\w/]*test_\w+\.py) -k (\w+)`", PAGE)
    assert len(proofs) >= 20
    for file, part in proofs:
        names = re.findall(r"def (test_\w+)", (ROOT / "tests" / file).read_text(encoding="utf-8"))
        assert any(part in name for name in names), f"{file} has no test {part}"
    for path in re.findall(r"`python (examples/\w+\.py)", re.sub(r"\s+", " ", PAGE)):
        assert (ROOT / path).exists()
