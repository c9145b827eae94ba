"""Reloads: another model takes over between two steps, and every request ends as its options say."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import signal
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Unpack

import pytest
from engines import NET_SECONDS, Gate, NextToken, at_rest, expected_tokens, next_capital, read, until

from cuelight import Engine, Stream, errors
from cuelight.actors.executor.stub import StubBatch, StubDevice
from cuelight.config import EngineConfig, EngineOptions
from cuelight.core.parts import EngineParts
from cuelight.messages.request import FinishReason
from cuelight.models.folder import ModelFacts, fingerprint
from cuelight.simulate.run import RunTotals, run_seed
from cuelight.testing import END_TOKEN, crash, stub_engine, stub_parts

CAPITALS = "_ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Models:
    """Stand-ins for models: the first one waits at a gate, the others load as each test decides."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.other_gate = Gate(next_capital)
        self.other_gate.allow()
        self.may_load = threading.Event()
        self.may_load.set()
        self.loads: list[str] = []
        self.devices: list[weakref.ref[StubDevice]] = []
        self.context_length = 4096
        self.block_count: int | None = None
        self.vocab_size = END_TOKEN + 1
        self.eos_token_ids = (END_TOKEN,)
        self.error: Exception | None = None

    def ensemble(self, name: str, next_token: NextToken, config: EngineConfig) -> EngineParts[StubBatch]:
        stub = stub_parts(config, next_token)

        def load() -> StubDevice:
            self.loads.append(name)
            if name != "first":
                assert self.may_load.wait(NET_SECONDS)
                if self.error is not None:
                    raise self.error
            count = self.block_count if name != "first" else None
            device = StubDevice(count or config.block_count or 1024, config.block_size, next_token)
            self.devices.append(weakref.ref(device))
            return device

        facts = stub.facts
        if name != "first":
            facts = ModelFacts(self.vocab_size, self.context_length, self.eos_token_ids)
        return EngineParts(facts, stub.encoder, stub.decode, load)

    def other(self, name: str, config: EngineConfig) -> EngineParts[StubBatch]:
        if name != "other":
            raise errors.ModelUnavailable(f"there is no {name}")
        return self.ensemble(name, self.other_gate.next_token, config)

    def engine(self, **options: Unpack[EngineOptions]) -> Engine:
        first = partial(self.ensemble, "first", self.gate.next_token)
        return Engine.from_parts("first", first, self.other, **options)


@asynccontextmanager
async def modelled(**options: Unpack[EngineOptions]) -> AsyncIterator[tuple[Engine, Models]]:
    models = Models()
    async with asyncio.timeout(NET_SECONDS), models.engine(**options) as engine:
        try:
            yield engine, models
        finally:
            models.may_load.set()
            models.gate.allow()
            models.other_gate.allow()


def continued(prompt: str, count: int, begun: int) -> tuple[int, ...]:
    """The output of a request whose first `begun` tokens the first model sampled and the other model the rest."""
    head = expected_tokens(prompt, begun)
    return head + expected_tokens(tuple(prompt.encode()) + head, count - begun, next_capital)


def by_first(stream: Stream) -> int:
    """Count the tokens of an output that the first model sampled."""
    tokens = stream.inbox.token_ids
    return next((at for at, token in enumerate(tokens) if chr(token) in CAPITALS), len(tokens))


def is_idle(engine: Engine) -> Callable[[], bool]:
    return lambda: at_rest(engine) and not engine._lifecycle.open_requests


async def test_running_requests_finish_on_the_first_model_and_the_rest_on_the_other() -> None:
    async with modelled(running_max=2) as (engine, models):
        prompts = [f"request {number}" for number in range(6)]
        streams = [engine.stream(prompt, max_tokens=10) for prompt in prompts]
        models.gate.allow(3)
        await until(lambda: models.gate.passed == 3)
        reload = asyncio.create_task(engine.reload("other", running="finish"))
        await until(lambda: models.loads == ["first", "other"])
        late = engine.stream("late", max_tokens=4)
        models.gate.allow()
        await reload
        for prompt, stream in zip(prompts, streams, strict=True):
            result = await stream.result()
            begun = by_first(stream)
            assert begun in (0, 10), "no output has tokens of both models"
            assert result.token_ids == continued(prompt, 10, begun)
        assert [by_first(stream) for stream in streams[:2]] == [10, 10]
        assert by_first(streams[-1]) == 0
        assert (await late.result()).token_ids == continued("late", 4, 0)
        await until(is_idle(engine))


async def test_running_requests_are_recomputed_on_the_other_model() -> None:
    async with modelled(running_max=3) as (engine, models):
        prompts = [f"request {number}" for number in range(5)]
        streams = [engine.stream(prompt, max_tokens=12, seed=number) for number, prompt in enumerate(prompts)]
        models.gate.allow(9)
        for stream in streams[:3]:
            await read(stream, 1)
        reload = asyncio.create_task(engine.reload("other", running="recompute"))
        await until(lambda: len(engine.system.statistics()) == 6)  # type: ignore[union-attr]
        await until(lambda: len(models.devices) == 2)
        models.gate.allow()
        await reload
        for prompt, stream in zip(prompts, streams, strict=True):
            result = await stream.result()
            assert result.token_ids == continued(prompt, 12, by_first(stream))
        assert all(0 < by_first(stream) < 12 for stream in streams[:3])
        assert [by_first(stream) for stream in streams[3:]] == [0, 0]
        await until(is_idle(engine))


@pytest.mark.parametrize("running", ["finish", "recompute"])
async def test_first_model_is_freed(running: str) -> None:
    async with modelled() as (engine, models):
        models.gate.allow()
        for number in range(3):
            await engine.reload("other", running=running)  # type: ignore[arg-type]
            assert (await engine.generate("x", max_tokens=3)).token_ids == continued("x", 3, 0)
            await until(lambda: len(engine.system.statistics()) == 5)  # type: ignore[union-attr]
            assert f"executor {number + 2}" in engine.system.statistics()  # type: ignore[union-attr]
        names = ("executor ", "executor 2", "executor 3")
        await until(lambda: not [t for t in threading.enumerate() if any(f"cuelight {n} " in t.name for n in names)])
        gc.collect()
        assert [device() is None for device in models.devices] == [True, True, True, False]


@pytest.mark.parametrize("running", ["finish", "recompute"])
async def test_crash_after_a_reload_loads_the_other_model(running: str) -> None:
    async with modelled() as (engine, models):
        models.gate.allow()
        await engine.reload("other", running=running)  # type: ignore[arg-type]
        models.other_gate._permits = 0
        stream = engine.stream("crashed", max_tokens=9)
        models.other_gate.allow(4)
        await read(stream, 1)
        for role in ("executor 2", "scheduler", "executor 2", "intake", "cache", "detokenizer"):
            crash(engine, role)
            models.other_gate.allow(1)
        models.other_gate.allow()
        assert (await stream.result()).token_ids == continued("crashed", 9, 0)
        assert models.loads.count("first") == 1
        assert models.loads.count("other") >= 2
        await until(is_idle(engine))


@pytest.mark.parametrize("running", ["finish", "recompute"])
@pytest.mark.parametrize("role", ["executor", "scheduler", "cache", "intake", "detokenizer"])
async def test_crash_during_a_reload_loses_nothing(role: str, running: str) -> None:
    async with modelled(running_max=2) as (engine, models):
        models.may_load.clear()
        streams = [engine.stream(f"request {number}", max_tokens=8) for number in range(4)]
        models.gate.allow(2)
        await until(lambda: models.gate.passed == 2)
        reload = asyncio.create_task(engine.reload("other", running=running))  # type: ignore[arg-type]
        await until(lambda: "other" in models.loads)
        crash(engine, role)
        await until(lambda: engine.health().restarts == {role: 1})
        models.may_load.set()
        models.gate.allow()
        await reload
        for number, stream in enumerate(streams):
            result = await stream.result()
            assert result.token_ids == continued(f"request {number}", 8, by_first(stream))
        assert (await engine.generate("after", max_tokens=3)).token_ids == continued("after", 3, 0)
        await until(is_idle(engine))


async def test_requests_are_served_while_the_other_model_loads() -> None:
    async with modelled() as (engine, models):
        models.may_load.clear()
        models.gate.allow()
        reload = asyncio.create_task(engine.reload("other"))
        await until(lambda: "other" in models.loads)
        assert (await engine.generate("meanwhile", max_tokens=5)).token_ids == expected_tokens("meanwhile", 5)
        with pytest.raises(errors.ReloadBusy):
            await engine.reload("other")
        assert not reload.done()
        models.may_load.set()
        await reload
        assert (await engine.generate("then", max_tokens=5)).token_ids == continued("then", 5, 0)


async def test_timeline_of_a_waiting_request_names_the_reload() -> None:
    async with modelled() as (engine, models):
        running = engine.stream("running", max_tokens=3)
        models.gate.allow(1)
        await read(running, 1)
        reload = asyncio.create_task(engine.reload("other"))
        await until(lambda: len(models.devices) == 2)
        waiting = engine.stream("waiting", max_tokens=3)
        for _ in range(50):
            life = await engine.explain(waiting.request_id)
        assert life.state == "waiting"
        models.gate.allow()
        await reload
        assert (await running.result()).token_ids == expected_tokens("running", 3)
        assert (await waiting.result()).token_ids == continued("waiting", 3, 0)
        life = await engine.explain(waiting.request_id)
        assert any("another model" in moment.why for moment in life.timeline), life.timeline


async def check_undisturbed(engine: Engine, models: Models, stream: Stream, count: int) -> None:
    """Check that the first model serves as if no reload had been requested."""
    models.gate.allow()
    assert (await stream.result()).token_ids == expected_tokens("undisturbed", count)
    assert (await engine.generate("new", max_tokens=3)).token_ids == expected_tokens("new", 3)
    await until(is_idle(engine))
    await until(lambda: len(engine.system.statistics()) == 5)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocab_size": 300}, errors.ModelMismatch, "a vocabulary of 300 tokens"),
        ({"context_length": 40}, errors.ModelMismatch, "holds 40"),
        ({"block_count": 3}, errors.ModelMismatch, "holds 32"),
        ({"error": OSError("no such weights")}, errors.ModelUnavailable, "no such weights"),
    ],
    ids=["vocabulary", "context", "pool", "weights"],
)
@pytest.mark.parametrize("running", ["finish", "recompute"])
async def test_model_that_cannot_take_over_is_refused(
    change: dict[str, object], error: type[errors.EngineError], message: str, running: str
) -> None:
    async with modelled(running_max=1) as (engine, models):
        for name, value in change.items():
            setattr(models, name, value)
        stream = engine.stream("undisturbed", max_tokens=40)
        waiting = engine.stream("undisturbed", max_tokens=40)
        models.gate.allow(2)
        await read(stream, 2)
        with pytest.raises(error, match=message):
            await engine.reload("other", running=running)  # type: ignore[arg-type]
        await check_undisturbed(engine, models, stream, 40)
        assert (await waiting.result()).token_ids == expected_tokens("undisturbed", 40)
        assert engine.health().restarts == {}


async def test_requests_finished_by_the_first_model_need_not_fit_the_other() -> None:
    async with modelled() as (engine, models):
        models.context_length = 40
        stream = engine.stream("undisturbed", max_tokens=60)
        models.gate.allow(1)
        await read(stream, 1)
        reload = asyncio.create_task(engine.reload("other", running="finish"))
        await until(lambda: len(models.devices) == 2)
        models.gate.allow()
        await reload
        assert (await stream.result()).token_ids == expected_tokens("undisturbed", 60)
        with pytest.raises(errors.PromptTooLong, match="holds 40"):
            await engine.generate("x" * 40)
        result = await engine.generate("x" * 30, max_tokens=60)
        assert result.token_ids == continued("x" * 30, 10, 0)
        assert result.finish_reason is FinishReason.LENGTH


async def test_longer_context_holds_after_the_reload() -> None:
    async with modelled(block_count=1024) as (engine, models):
        models.gate.allow()
        models.context_length = 8192
        with pytest.raises(errors.PromptTooLong):
            await engine.generate("x" * 5000)
        await engine.reload("other")
        assert len((await engine.generate("x" * 5000, max_tokens=2)).token_ids) == 2


async def test_end_token_is_that_of_the_other_model() -> None:
    async with modelled() as (engine, models):
        models.gate.allow()
        models.eos_token_ids = (next_capital(b"end"),)
        await engine.reload("other")
        result = await engine.generate("end", max_tokens=5)
        assert (len(result.token_ids), result.finish_reason) == (1, FinishReason.STOP)
        crash(engine, "scheduler")
        result = await engine.generate("end", max_tokens=5)
        assert (len(result.token_ids), result.finish_reason) == (1, FinishReason.STOP)


async def test_bad_arguments_are_refused() -> None:
    async with modelled() as (engine, models):
        stream = engine.stream("undisturbed", max_tokens=3)
        for running in ("now", None, True):
            with pytest.raises(errors.ConfigError, match="running must be one of"):
                await engine.reload("other", running=running)  # type: ignore[arg-type]
        with pytest.raises(errors.ModelUnavailable, match="there is no nobody"):
            await engine.reload("nobody")
        await check_undisturbed(engine, models, stream, 3)
    with pytest.raises(errors.EngineClosed):
        await engine.reload("other")
    with pytest.raises(errors.NotStarted):
        await stub_engine().reload("other")
    async with asyncio.timeout(NET_SECONDS), stub_engine() as alone:
        with pytest.raises(errors.ModelUnavailable, match="no model 'other'"):
            await alone.reload("other")


async def test_cancelled_reload_is_called_off() -> None:
    async with modelled() as (engine, models):
        models.may_load.clear()
        stream = engine.stream("undisturbed", max_tokens=6)
        reload = asyncio.create_task(engine.reload("other", running="recompute"))
        await until(lambda: "other" in models.loads)
        reload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reload
        models.may_load.set()
        await check_undisturbed(engine, models, stream, 6)
        await engine.reload("other")
        assert (await engine.generate("then", max_tokens=3)).token_ids == continued("then", 3, 0)


async def test_cancelled_reload_is_called_off_by_a_new_scheduler() -> None:
    async with modelled() as (engine, models):
        models.may_load.clear()
        stream = engine.stream("undisturbed", max_tokens=6)
        reload = asyncio.create_task(engine.reload("other", running="recompute"))
        await until(lambda: "other" in models.loads)
        crash(engine, "scheduler")
        reload.cancel()
        await asyncio.wait([reload])
        await until(lambda: engine.health().restarts == {"scheduler": 1})
        await check_undisturbed(engine, models, stream, 6)
        models.may_load.set()


async def test_executor_does_not_take_over_from_itself() -> None:
    async with modelled() as (engine, models):
        models.may_load.clear()
        reload = asyncio.create_task(engine.reload("other", running="recompute"))
        await until(lambda: "other" in models.loads)
        reloading = engine._lifecycle.running.models._reload
        assert reloading is not None
        models.may_load.set()
        await reload
        models.other_gate._permits = 0
        stream = engine.stream("undisturbed", max_tokens=6)
        models.other_gate.allow(2)
        await read(stream, 1)
        reloading.repeat()  # as sent to a new scheduler that has found the executor by itself
        for _ in range(20):
            await engine.explain(stream.request_id)
        models.other_gate.allow()
        assert (await stream.result()).token_ids == continued("undisturbed", 6, 0)
        assert engine.stats().preemptions == 0


async def test_request_held_for_a_cancelled_reload_is_served_by_the_first_model() -> None:
    async with modelled() as (engine, models):
        stream = engine.stream("undisturbed", max_tokens=6)
        models.gate.allow(1)
        await read(stream, 1)
        reload = asyncio.create_task(engine.reload("other", running="finish"))
        await until(lambda: len(models.devices) == 2)
        held = engine.stream("undisturbed", max_tokens=6)
        for _ in range(20):
            await engine.explain(held.request_id)
        reload.cancel()
        await asyncio.wait([reload])
        await check_undisturbed(engine, models, stream, 6)
        assert (await held.result()).token_ids == expected_tokens("undisturbed", 6)


@pytest.mark.parametrize("running", ["finish", "recompute"])
async def test_other_executor_dies_before_it_takes_over(running: str) -> None:
    async with modelled() as (engine, models):
        models.may_load.clear()
        stream = engine.stream("undisturbed", max_tokens=6)
        reload = asyncio.create_task(engine.reload("other", running=running))  # type: ignore[arg-type]
        await until(lambda: "other" in models.loads)
        crash(engine, "executor 2")
        with pytest.raises(errors.ModelUnavailable, match="has died"):
            await reload
        models.may_load.set()
        await check_undisturbed(engine, models, stream, 6)


async def test_stop_ends_a_reload() -> None:
    async with modelled() as (engine, models):
        models.may_load.clear()
        reload = asyncio.create_task(engine.reload("other"))
        await until(lambda: "other" in models.loads)
        models.may_load.set()
        models.gate.allow()
        await engine.stop()
        with pytest.raises(errors.EngineClosed):
            await reload
    assert len(asyncio.all_tasks()) == 1


async def test_drain_waits_for_requests_of_the_other_model() -> None:
    async with modelled(running_max=1) as (engine, models):
        streams = [engine.stream(f"request {number}", max_tokens=5) for number in range(3)]
        models.gate.allow(1)
        await read(streams[0], 1)
        reload = asyncio.create_task(engine.reload("other"))
        await until(lambda: len(models.devices) == 2)
        drain = asyncio.create_task(engine.drain(NET_SECONDS))
        await asyncio.sleep(0)
        models.gate.allow()
        await reload
        assert await drain == 0
        assert [by_first(stream) for stream in streams] == [5, 0, 0]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline", "fair"])
async def test_preempted_requests_finish_on_the_first_model(policy: str) -> None:
    async with modelled(running_max=8, block_count=9, block_size=4, policy=policy) as (engine, models):
        prompts = [f"request {number}" for number in range(8)]
        streams = [
            engine.stream(prompt, max_tokens=12, tenant="ab"[number % 2], priority=number % 3)
            for number, prompt in enumerate(prompts)
        ]
        models.gate.allow(10)
        await until(lambda: models.gate.passed == 10)
        reload = asyncio.create_task(engine.reload("other", running="finish"))
        await until(lambda: len(models.devices) == 2)
        models.gate.allow()
        await reload
        for prompt, stream in zip(prompts, streams, strict=True):
            assert (await stream.result()).token_ids == continued(prompt, 12, by_first(stream))
            assert by_first(stream) in (0, 12)
        assert any(by_first(stream) == 12 for stream in streams)
        await until(is_idle(engine))


def test_random_histories_of_switches_and_crashes() -> None:
    total = RunTotals()
    for seed in range(1000, 1060):
        run_seed(seed, 8, total)
    assert total.changes > 20
    assert total.crashes > 20


# In separate processes.


async def test_reload_in_a_process(tmp_path: Path) -> None:
    options = EngineOptions(executor="process", running_max=2)
    models = {"other": next_capital}
    async with asyncio.timeout(NET_SECONDS), stub_engine(models=models, **options) as engine:
        for running in ("finish", "recompute"):
            streams = [engine.stream(f"request {number}", max_tokens=300) for number in range(4)]
            await read_some(streams[0])
            await engine.reload("other", running=running)  # type: ignore[arg-type]
            for number, stream in enumerate(streams):
                result = await stream.result()
                assert result.token_ids == continued(f"request {number}", 300, by_first(stream))
        await until(lambda: len(engine.system.statistics()) == 5)  # type: ignore[union-attr]
        await until(is_idle(engine))
        assert len(children()) == 1
        os.kill(children()[0], signal.SIGKILL)
        assert (await engine.generate("after", max_tokens=5)).token_ids == continued("after", 5, 0)
    assert not children()


async def read_some(stream: Stream) -> None:
    await anext(stream)


def children() -> list[int]:
    """The living processes that this one has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_text()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] != "Z" and "cuelight.kernel.child" in command:
                found.append(int(folder.name))
    return found


# Model fingerprints.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a model folder, without weights."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"vocab_size": 3, "hidden_size": 4}))
    (made / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "version": "1.0"}))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}", "name_or_path": "here"}))
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def changed(folder: Path, name: str, content: str | bytes) -> Path:
    """Copy the folder with another file of this name."""
    copy = folder.with_name(f"{folder.name}, other {name}")
    shutil.copytree(folder, copy)
    (copy / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return copy


def test_other_weights_are_another_model_with_the_same_tokenizer(folder: Path) -> None:
    before, after = fingerprint(folder), fingerprint(changed(folder, "model.safetensors", b"other weights"))
    assert before.tokenizer == after.tokenizer
    assert before.model != after.model


def test_equivalent_files_have_the_same_fingerprint(folder: Path) -> None:
    tokens = {"version": "1.0", "model": {"vocab": {"c": 2, "b": 1, "a": 0}}}
    assert fingerprint(changed(folder, "tokenizer.json", json.dumps(tokens, indent=2))) == fingerprint(folder)
    moved = json.dumps({"name_or_path": "there", "chat_template": "{{ x }}"})
    assert fingerprint(changed(folder, "tokenizer_config.json", moved)) == fingerprint(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", json.dumps({"model": {"vocab": {"a": 0, "b": 2, "c": 1}}, "version": "1.0"})),
        ("tokenizer.json", b"\xff no JSON"),
        ("tokenizer_config.json", json.dumps({"chat_template": "{{ y }}"})),
        ("chat_template.jinja", "{{ z }}"),
        ("merges.txt", "a b"),
    ],
)
def test_other_tokenizer_or_template_has_another_fingerprint(folder: Path, name: str, content: str | bytes) -> None:
    other = fingerprint(changed(folder, name, content))
    assert other.tokenizer != fingerprint(folder).tokenizer
    assert other.model != fingerprint(folder).model


def test_folder_without_a_configuration_is_no_model(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(errors.ModelUnavailable, match="cannot be read"):
        fingerprint(folder)
