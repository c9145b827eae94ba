"""Device streams of every kind: the same guarantees for each, and the model runner's rules on all of them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checked_streams import Checked, CheckedStream, watch_staging
from tiny_models import GROUPED, Driver, Pipeline, greedy_alone, options, random_prompts, save

from cuelight.actors.executor.batch import Batch, DeviceRows
from cuelight.actors.executor.model.loading import LoadedModel, load
from cuelight.actors.executor.runner import ModelBatch, ModelRunner, PendingStep
from cuelight.actors.executor.streams import (
    CudaStream,
    DeviceEvent,
    DeviceStream,
    DeviceStreams,
    Staging,
    StagingPool,
    ThreadStream,
)
from cuelight.messages.executor import ExecuteStep

CUDA = pytest.param("cuda", marks=[pytest.mark.cuda])
SECONDS = 60

pytestmark = pytest.mark.usefixtures("one_thread")


def needs_cuda(kind: str) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


class Pair:
    """Two streams of a kind, and the way the test waits for their events."""

    def __init__(self, kind: str) -> None:
        needs_cuda(kind)
        self._checked = Checked(0)
        self.streams: tuple[DeviceStream, DeviceStream]
        match kind:
            case "threads":
                self.streams = ThreadStream("test a"), ThreadStream("test b")
            case "checked":
                self.streams = CheckedStream(self._checked, "compute"), CheckedStream(self._checked, "read")
                self._checked._ways = {stream.name: stream for stream in self.streams}  # type: ignore[attr-defined]
            case "cuda":
                self.streams = CudaStream(torch.device("cuda")), CudaStream(torch.device("cuda"))

    def wait(self, stream: DeviceStream) -> None:
        with self._checked.waiting():
            stream.record().wait()


@pytest.fixture(params=["threads", "checked", CUDA])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    for stream in pair.streams:
        stream.close()


def test_work_is_done_in_order_and_before_the_event(pair: Pair) -> None:
    stream, _ = pair.streams
    done: list[int] = []
    for number in range(50):
        stream.enqueue(lambda number=number: done.append(number))
    pair.wait(stream)
    assert done == list(range(50))


def test_error_is_raised_at_the_next_event_only(pair: Pair) -> None:
    stream, other = pair.streams
    done: list[str] = []
    sound = stream.record()
    stream.enqueue(lambda: {}["first"])
    stream.enqueue(lambda: done.append("after"))
    stream.enqueue(lambda: {}["second"])
    bad = stream.record()
    other.follow(bad)
    other.enqueue(lambda: done.append("behind"))
    with pair._checked.waiting():
        sound.wait()
        with pytest.raises(KeyError, match="first"):
            bad.wait()
        other.record().wait()
        stream.record().wait()
    assert sorted(done) == ["after", "behind"]


def test_work_behind_an_event_is_done_after_it(pair: Pair) -> None:
    first, second = pair.streams
    done: list[str] = []
    for number in range(20):
        first.enqueue(lambda number=number: done.append(f"first {number}"))
        second.follow(first.record())
        second.enqueue(lambda number=number: done.append(f"second {number}"))
        first.follow(second.record())
    pair.wait(second)
    assert done == [f"{name} {number}" for number in range(20) for name in ("first", "second")]


def test_work_runs_on_the_streams_thread_and_enqueue_does_not_wait() -> None:
    stream, gate, threads = ThreadStream("test"), threading.Event(), set[int]()
    stream.enqueue(lambda: gate.wait(SECONDS) and threads.add(threading.get_ident()))  # type: ignore[arg-type,func-returns-value]
    follower = ThreadStream("follower")
    follower.follow(stream.record())
    behind = follower.record()
    gate.set()
    behind.wait()
    assert threads
    assert threading.get_ident() not in threads


def test_call_returns_the_result_or_raises() -> None:
    stream = ThreadStream("test")
    assert stream.call(lambda: threading.current_thread().name) == "test"
    with pytest.raises(KeyError):
        stream.call(lambda: {}["nothing"])
    assert stream.call(lambda: 5) == 5
    with pytest.raises(SystemExit):
        stream.call(lambda: exec("raise SystemExit"))
    assert stream.call(lambda: 6) == 6, "an exception does not end the thread"


def test_thread_ends_when_its_stream_is_closed_or_collected() -> None:
    closed, dropped = ThreadStream("closed"), ThreadStream("dropped")
    threads = [closed._thread, dropped._thread]
    done: list[int] = []
    for stream in (closed, dropped):
        stream.enqueue(lambda: done.append(1))
    closed.close()
    closed.close()
    gone = weakref.ref(dropped)
    del dropped, stream
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert done == [1, 1], "enqueued work is still done"


def test_idle_thread_keeps_no_reference_to_its_last_work() -> None:
    class Thing:
        pass

    stream, thing = ThreadStream("test"), Thing()
    gone = weakref.ref(thing)
    stream.enqueue(lambda thing=thing: None)
    del thing
    for _ in range(2):  # the second event is behind the end of the first work
        stream.record().wait()
    gc.collect()
    assert gone() is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A model, prompts, and the outputs of transformers."""
    folder = tmp_path_factory.mktemp("tiny")
    model = save(transformers.LlamaConfig(**GROUPED), folder)
    prompts = random_prompts(3) + [prompt[::-1] for prompt in random_prompts(4)]
    return folder, prompts, [greedy_alone(model, prompt, 8) for prompt in prompts]


Tiny = tuple[Path, list[list[int]], list[list[int]]]


@pytest.mark.parametrize("kind", ["one thread", "threads", CUDA])
def test_rule_device_tokens_steps_in_flight_give_the_output_of_each_prompt_alone(kind: str, tiny: Tiny) -> None:
    needs_cuda(kind)
    folder, prompts, expected = tiny
    loaded = load(options(folder, device="cuda" if kind == "cuda" else "cpu"))
    for seed in range(3):
        streams = DeviceStreams.threads() if kind == "threads" else None
        runner = ModelRunner(loaded, streams, debug_poison=True)
        pipeline = Pipeline(runner, prompts, seed)
        pipeline.run(output_tokens=8)
        assert [pipeline.outputs[index] for index in range(len(prompts))] == expected
        assert pipeline.in_flight_most == 3
        assert runner._staging.count <= 3, "as many staging buffers as steps in flight"
        runner._streams.close()


class CheckedPipeline(Pipeline):
    """A pipeline on checked streams, which run at random moments."""

    checked: Checked

    def go_on(self) -> None:
        while self.chance.random() < 0.7:
            self.checked.advance()
        super().go_on()

    def finish(self, result):  # type: ignore[no-untyped-def]  # as in the base class
        with self.checked.waiting():
            return super().finish(result)


def run_checked(loaded: LoadedModel, prompts: list[list[int]], seed: int, **others: object) -> dict[int, list[int]]:
    checked = Checked(seed)
    with pytest.MonkeyPatch.context() as patches:
        watch_staging(patches, checked)
        runner = ModelRunner(loaded, checked.streams, **others)  # type: ignore[arg-type]
        pipeline = CheckedPipeline(runner, prompts, seed)
        pipeline.checked = checked
        with checked:
            pipeline.run(output_tokens=6)
    assert pipeline.in_flight_most == 3
    return pipeline.outputs


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("debug_poison", [False, True])
def test_rule_double_buffers_every_access_to_memory_is_ordered(seed: int, debug_poison: bool, tiny: Tiny) -> None:
    folder, prompts, expected = tiny
    outputs = run_checked(load(options(folder)), prompts, seed, debug_poison=debug_poison)
    assert [outputs[index] for index in range(len(prompts))] == [tokens[:6] for tokens in expected]


def unordered(way: str) -> Callable[[pytest.MonkeyPatch], None]:
    def break_it(patches: pytest.MonkeyPatch) -> None:
        follow = CheckedStream.follow
        patches.setattr(CheckedStream, "follow", lambda s, event: None if s.name == way else follow(s, event))

    return break_it


def too_early(patches: pytest.MonkeyPatch) -> None:
    """A fault: staging memory is given back as soon as the step is launched."""
    run = ModelRunner.run

    def launched(runner: ModelRunner, batch: ModelBatch) -> PendingStep:
        runner._staging.give_back(batch.staging)
        return run(runner, batch)

    patches.setattr(ModelRunner, "run", launched)
    patches.setattr(StagingPool, "give_back", lambda pool, staging: pool._free.put(staging))


def not_waiting_for_the_last(patches: pytest.MonkeyPatch) -> None:
    made = PendingStep.__init__
    patches.setattr(PendingStep, "__init__", lambda flight, batch, events, pool: made(flight, batch, events[:-1], pool))


def waiting_to_prepare(patches: pytest.MonkeyPatch) -> None:
    prepare = ModelRunner.prepare

    def waits(runner: ModelRunner, step: ExecuteStep) -> Batch:
        batch = prepare(runner, step)
        assert isinstance(batch, ModelBatch)
        assert batch.moved is not None
        batch.moved.wait()
        return batch

    patches.setattr(ModelRunner, "prepare", waits)


def waiting_for_a_number(patches: pytest.MonkeyPatch) -> None:
    forward = ModelRunner._forward
    patches.setattr(ModelRunner, "_forward", lambda r, b: forward(r, b) * float(forward(r, b).sum().item() != 0.5))


def tokens_in_another_stream(patches: pytest.MonkeyPatch) -> None:
    """A fault: tokens are kept in the copy-back stream, not in the stream that feeds them."""
    fetch, index_copy = Staging.fetch, torch.Tensor.index_copy_

    def kept(staging: Staging, stream: DeviceStream, computed: DeviceEvent) -> DeviceEvent | None:
        event = fetch(staging, stream, computed)
        slots, tokens = staging.on_device("sampled slots"), staging.results()[: len(staging.on_device("sampled slots"))]
        stream.enqueue(lambda: index_copy(runners[0]._last_tokens, 0, slots, tokens))
        return event

    runners: list[ModelRunner] = []
    made = ModelRunner.__init__

    def noted(runner: ModelRunner, *args: object, **others: object) -> None:
        made(runner, *args, **others)  # type: ignore[arg-type]
        runners.append(runner)
        runner._last_tokens = torch.zeros(99, dtype=torch.int64)

    patches.setattr(ModelRunner, "__init__", noted)
    patches.setattr(Staging, "fetch", kept)


BROKEN_RULES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "computing before the step is there": (
        unordered("compute"),
        "(compute|prepare) (does not wait for what|writes what) (compute|prepare)",
    ),
    "reading before it is computed": (
        unordered("read"),
        "(compute|read) (does not wait for what|writes what) (compute|read)",
    ),
    "staging comes back early": (too_early, "may still read|does not wait for what"),
    "the host reads early": (not_waiting_for_the_last, "host does not wait for what read writes|read writes what host"),
    "the host waits on the critical path": (waiting_to_prepare, "the host waits for the device only"),
    "the device's thread waits": (waiting_for_a_number, "does not wait for the result of aten.item"),
    "tokens in two streams": (tokens_in_another_stream, "may still read|does not wait for what"),
}


@pytest.mark.parametrize("broken", BROKEN_RULES)
def test_broken_rule_is_detected(broken: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted fault must fail the test above."""
    break_it, why = BROKEN_RULES[broken]
    folder, prompts, _ = tiny
    loaded = load(options(folder))
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=why):
        run_checked(loaded, prompts, seed=1)


def test_row_fed_the_token_of_an_ended_row_is_detected(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot is freed at once, so each token fed is stale."""
    folder, prompts, _ = tiny
    prepare = DeviceRows.prepare

    def freeing(rows: DeviceRows, step: ExecuteStep) -> Batch:
        batch = prepare(rows, step)
        batch.freed_slots += batch.fed_slots
        return batch

    monkeypatch.setattr(DeviceRows, "prepare", freeing)
    loaded = load(options(folder))
    with pytest.raises(AssertionError, match="no step reads the token of a free slot"):
        Pipeline(ModelRunner(loaded, debug_poison=True), prompts, 1).run(output_tokens=4)


def test_debug_mode_is_set_by_the_environment(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(options(tiny[0]))
    assert not ModelRunner(loaded)._debugs
    monkeypatch.setenv("CUELIGHT_DEBUG_POISON", "1")
    assert ModelRunner(loaded)._debugs
    assert not ModelRunner(loaded, debug_poison=False)._debugs


class Broken(Exception):
    """Raised by the model."""


def test_failed_step_raises_where_it_is_awaited_and_the_next_step_is_right(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts, expected = tiny
    runner = ModelRunner(load(options(folder)), DeviceStreams.threads())
    driver = Driver(runner, prompts, seed=1)
    first, second = (runner.prepare(driver._planned([(index, len(prompts[index]))])) for index in (0, 1))
    forward = ModelRunner._forward

    def breaks(runner: ModelRunner, batch: ModelBatch) -> torch.Tensor:
        if batch is first:
            raise Broken
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "_forward", breaks)
    flights = [runner.run(first), runner.run(second)]
    with pytest.raises(Broken):
        flights[0].wait()
    assert flights[1].wait().token_ids == (expected[1][0],)
    assert runner._staging._free.qsize() == 2, "both give their memory back"
    runner._streams.close()


def test_dropped_step_costs_only_its_own_memory(tiny: Tiny) -> None:
    folder, prompts, expected = tiny
    runner = ModelRunner(load(options(folder)), DeviceStreams.threads(), debug_poison=True)
    void = Driver(runner, prompts, seed=1)
    for index in range(3):
        runner.prepare(void._planned([(index, 1)]))
    driver = Driver(runner, prompts, seed=2, epoch=1)
    driver.run(output_tokens=8)
    assert [driver.outputs[index] for index in range(len(prompts))] == expected
    assert runner._staging.count == 3 + 1
    runner._streams.close()


def test_staging_holds_any_arrays_and_grows(tiny: Tiny) -> None:
    streams, pool = DeviceStreams.threads(), StagingPool(torch.device("cpu"), is_shared=False)
    for size in (0, 1, 5, 3, 1000, 7):
        staging = pool.take()
        arrays = {
            "whole": np.arange(size),
            "real": np.arange(size) / 3,
            "small": np.arange(size, dtype=np.int32),
            "none": np.zeros(0, np.int64),
            "square": np.arange(4 * size).reshape(2, -1)[:, ::2],
        }
        staging.fill(arrays, size)
        event = staging.send(streams.prepare)
        assert event is not None
        event.wait()
        for name, array in arrays.items():
            assert np.array_equal(staging.on_device(name).numpy(), array.reshape(-1)), name
            assert staging.on_device(name).data_ptr() % 16 == 0 or array.size == 0
        staging.results().copy_(torch.arange(size) * 2)
        fetched = staging.fetch(streams.read, streams.compute.record())
        assert fetched is not None
        fetched.wait()
        assert staging.fetched() == list(range(0, 2 * size, 2))
        pool.give_back(staging)
    assert pool.count == 1
    streams.close()
