"""Every example runs as its docstring says, in this process, so that torch is loaded once for all."""

from __future__ import annotations

import ast
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run an example as a program; return its standard output."""

    def run_example(name: str, *arguments: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


@pytest.mark.model
@pytest.mark.usefixtures("one_thread")
def test_chat_answers_each_line_and_ends_with_the_input(run) -> None:
    out = run("chat.py", stdin="What is the capital of France? Answer in one word.\n\nNow say only: yes\n")
    assert out.count("you> ") == 4, "one prompt a line, and one that the end of input answers"
    assert "Paris" in out.split("you> ")[1]


@pytest.mark.model
@pytest.mark.usefixtures("one_thread")
def test_background_work_continues(run) -> None:
    out = run("background_work.py", "Count to ten.")
    echoed = re.search(r"^(\d+) lines echoed meanwhile, the slowest in [\d.]+ ms$", out, re.MULTILINE)
    assert echoed and int(echoed[1]) > 1


@pytest.mark.model
@pytest.mark.usefixtures("one_thread")
def test_batch_writes_one_json_line_a_question_in_order(run, tmp_path: Path, capsys) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("What do bees make?\n\nWhat is the capital of France?\n", encoding="utf-8")
    lines = [json.loads(line) for line in run("batch.py", str(questions), "--max-tokens", "12").splitlines()]
    assert [line["question"] for line in lines] == ["What do bees make?", "What is the capital of France?"]
    assert "Paris" in lines[1]["answer"]
    assert all(0 < line["output_tokens"] <= 12 for line in lines)


@pytest.mark.model
@pytest.mark.usefixtures("one_thread")
def test_concurrent_chats_interleave_and_share_their_prefix(run) -> None:
    out = run("concurrent_chats.py")
    order = re.search(r"^Whose tokens came when: ([ABC]+)$", out, re.MULTILINE)
    cached = re.search(r"^(\d+) of (\d+) prompt tokens came from the prefix cache$", out, re.MULTILINE)
    assert order and cached
    assert order[1].index("C") < order[1].rindex("A"), "the last to start does not wait for the first to end"
    assert 0 < int(cached[1]) < int(cached[2])


@pytest.mark.model
@pytest.mark.usefixtures("one_thread")
def test_answer_continues_in_the_next_process(run, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "warm_restart.py"), str(tmp_path / "journal"), "Count to a thousand."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as process:
        assert process.stdout is not None
        seen = b""
        while len(seen) < 20:
            seen += process.stdout.read(1)
        process.kill()
        seen += process.stdout.read()
    note, text = run("warm_restart.py", str(tmp_path / "journal"), "Nothing new is asked.").split("] ", 1)
    assert re.match(r"\[request 1 goes on after [1-9]\d* tokens", note)
    # Output that was printed and not noted is printed again.
    begin = next(at for at in range(len(seen) + 1) if text.startswith(seen.decode()[at:]))
    assert begin > 0, "the answer does not start again"
    assert text.strip()


def test_embed_actors_counts_words(run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be", encoding="utf-8")
    (tmp_path / "b.txt").write_text("Be quick", encoding="utf-8")
    paths = [str(tmp_path / name) for name in ("a.txt", "missing.txt", "b.txt")]
    lines = run("embed_actors.py", *paths).splitlines()
    assert [line.split() for line in lines[:2]] == [["3", "be"], ["2", "to"]]
    assert any("missing.txt" in line for line in lines)
    assert lines[-1].startswith("the tally handled 4 messages")


@pytest.mark.parametrize("name", ["pipeline.py", "warm_restart.py"])
def test_example_without_its_arguments_says_how_to_run_it(run, name: str) -> None:
    with pytest.raises(SystemExit, match=f"python examples/{name}"):
        run(name)


def test_every_example_is_run_here_and_says_how_to_run_it() -> None:
    here = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*examples.py"))
    for path in sorted(EXAMPLES.glob("*.py")):
        assert f'run("{path.name}"' in here, f"{path.name} is not tested"
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert f"python examples/{path.name}" in docstring, f"{path.name} does not say how to run it"
