"""The engine's own cast under the seeded driver: it keeps its promises; where it does not, the seed is named."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cuelight.actors.cache.actor import CacheManager
from cuelight.actors.cache.pool import HostSlots
from cuelight.actors.cache.tables import BlockTables
from cuelight.actors.detokenizer.actor import Detokenizer, _TextStream
from cuelight.actors.executor.stub import StubDevice
from cuelight.actors.intake.actor import Intake
from cuelight.actors.intake.ledger import Ledger
from cuelight.actors.scheduler import recovery
from cuelight.actors.scheduler.in_flight import InFlightSteps
from cuelight.actors.scheduler.outbox import UnconfirmedEnds
from cuelight.actors.scheduler.steps import StepLoop
from cuelight.messages.cache import Filled, Reset
from cuelight.messages.client import Chunk
from cuelight.messages.detokenizer import DetokenizerMessage, Reopened
from cuelight.messages.request import RequestId, Sampling
from cuelight.messages.scheduler import RestoreState, SetPolicy
from cuelight.simulate import run
from cuelight.simulate.client import expected_output
from cuelight.simulate.faults import next_token, with_tight_pool
from cuelight.simulate.run import RunTotals, run_seed
from cuelight.simulate.table import simulate
from cuelight.stream import Inbox


def told(seeds: Sequence[int], requests: int = 12) -> tuple[int, str]:
    lines: list[str] = []
    status = simulate(seeds, requests, lines.append)
    return status, "".join(lines)


SEEDS = int(os.environ.get("CUELIGHT_HISTORIES", "40"))


@pytest.mark.timeout(300 + SEEDS)
def test_histories() -> None:
    """As many as the environment says, in ten thousand of which each kind of misfortune has met each other."""
    status, text = told(range(SEEDS))
    assert status == 0, text
    header, *_, row, summary = text.splitlines()
    figures = dict(zip(header.split(), [int(each.replace(",", "")) for each in row.split()], strict=True))
    ends = [figures[name] for name in ("finished", "aborted", "failed", "refused")]
    assert figures["seeds"] == SEEDS
    assert sum(ends) == SEEDS * 12
    assert all(ends), "everything that can become of a request is among them"
    assert min(figures["crashes"], figures["hangs"], figures["poisoned"]) > 0
    assert figures["deliveries"] > 1000
    assert re.fullmatch(rf"{SEEDS:,} histories passed every check, \d+ a second\.", summary)


def test_a_seed_is_all_there_is_to_a_history() -> None:
    tallies = [RunTotals(), RunTotals(), RunTotals()]
    for seed, tally in zip((5, 5, 6), tallies, strict=True):
        run_seed(seed, 12, tally)
    assert tallies[0] == tallies[1] != tallies[2]


def test_the_command_says_the_same_in_each_interpreter() -> None:
    command = [sys.executable, "-m", "cuelight", "simulate", "--seeds", "20", "--first", "40", "--requests", "9"]
    tables = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
        assert done.stderr == "", "failures that are wanted are not logged"
        *table, summary = done.stdout.splitlines()
        assert summary.startswith("20 histories passed every check")
        tables.append(table)
    assert tables[0] == tables[1], "no actor looks at the order of a set"


def test_logging_is_as_before() -> None:
    level = logging.getLogger("cuelight").level
    told(range(1))
    assert logging.getLogger("cuelight").level == level


def _confuses_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detokenizer gives the fourth token of each request for its neighbour in the vocabulary."""
    push = Detokenizer._push

    def confusing(self: Detokenizer, request_id: RequestId, stream: _TextStream, token_id: int) -> None:
        push(self, request_id, stream, token_id + (stream.position == 3))

    monkeypatch.setattr(Detokenizer, "_push", confusing)


def _keeps_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache manager forgets to take blocks back from every fifth request."""
    release = BlockTables.release

    def forgetting(self: BlockTables, filled: Filled) -> None:
        if filled.request_id % 5:
            release(self, filled)

    monkeypatch.setattr(BlockTables, "release", forgetting)


def _ends_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detokenizer hears of each end twice, and does not mind."""
    handle = Detokenizer.handle

    def again(self: Detokenizer, message: DetokenizerMessage) -> None:
        streams = dict(self._streams)
        handle(self, message)
        if len(self._streams) < len(streams):
            self._streams = streams
            handle(self, message)

    monkeypatch.setattr(Detokenizer, "handle", again)


def _forgets_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intake takes a request and does no more about it."""
    monkeypatch.setattr(Intake, "_encode", lambda *_: None)


def _computes_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device does not see the first token."""
    monkeypatch.setattr(StubDevice, "_read", lambda _, row: row.token_ids[1:])


def _asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device finds its slots overwritten, which the executor takes for a failed step."""

    def read(_self: StubDevice, _row: object) -> list[int]:
        raise AssertionError("overwritten")

    monkeypatch.setattr(StubDevice, "_read", read)


def _breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler crashes, and no fault was drawn."""

    def planned(self: StepLoop, **_: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(StepLoop, "plan", planned)


def _forgets_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intake tells a new detokenizer that there is nothing to open."""
    monkeypatch.setattr(Intake, "_open_again", lambda self, life: self._detokenizer.tell(Reopened(life)))


def _takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's end takes again what it had before."""

    def take(self: Inbox, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)

    monkeypatch.setattr(Inbox, "_take", take)


def _voids_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler goes on counting on steps that are lost."""
    monkeypatch.setattr(InFlightSteps, "void", lambda self: self._watchdog.give_up())


def _closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler remembers every end for ever."""
    monkeypatch.setattr(UnconfirmedEnds, "close", lambda *_: None)


def _blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler lets whoever brings the executor down do so for ever."""
    monkeypatch.setattr(recovery, "attribute_crash", lambda *_, **__: None)


def _forgets_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is rebuilt with the wrong tokens."""

    def restore_state(
        self: Ledger, life: int, policy: SetPolicy | None, histories: object, *, has_served: bool
    ) -> RestoreState:
        wrong = tuple((i, (*tokens[:-1], 97)) for i, tokens in histories if tokens)
        return original(self, life, policy, wrong, has_served=has_served)

    original = Ledger.restore_state
    monkeypatch.setattr(Ledger, "restore_state", restore_state)


def _crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every history blocks go to host memory and come back, and executors die of it."""
    config, plan = run.draw_config, run.draw_fault_plan
    monkeypatch.setattr(run, "draw_config", lambda rng: with_tight_pool(config(rng)))
    monkeypatch.setattr(run, "draw_fault_plan", lambda *drawn: replace(plan(*drawn), save_death_rate=0.3))


def _trusts_every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache manager counts on copies that an executor was told to make before it died."""
    _crowd(monkeypatch)
    monkeypatch.setattr(HostSlots, "forget_unconfirmed", lambda self: self._unconfirmed.clear())


def _trusts_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache manager does not look whether it is the memory of before."""
    _crowd(monkeypatch)

    def kept(self: CacheManager, message: Reset) -> HostSlots:
        self._tables.host.forget_unconfirmed()
        return self._tables.host

    monkeypatch.setattr(CacheManager, "_kept_slots", kept)


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        (_confuses_tokens, r"request \d+ gets \["),
        (_keeps_blocks, "blocks are held at rest|never ends|crashed|does not fit"),
        (_ends_twice, "ends twice"),
        (_forgets_streams, "never ends"),
        (_takes_all, "gets"),
        (_voids_nothing, "KeyError|steps end in the order|crashed|never ends"),
        (_closes_nothing, "scheduler has"),
        (_blames_nobody, "no hope|there is no executor|not at rest"),
        (_forgets_output, "gets|ends for"),
        (_forgets_prompts, "never ends"),
        (_computes_nonsense, r"request \d+ gets \["),
        (_asserts, "AssertionError: overwritten"),
        (_breaks, "'scheduler' crashed on .*a mistake"),
        (_trusts_every_save, "the slots hold this row's tokens and nothing else"),
        (_trusts_any_memory, "the slots hold this row's tokens and nothing else"),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    status, text = told(range(60))
    assert status == 1
    assert re.search(rf"^seed \d+: \w+: .*({complaint})", text, re.MULTILINE), text


def test_the_slow_path_is_not_the_fast_one() -> None:
    """What the clients are checked against knows nothing of the engine."""
    tokens, text, reason = expected_output((1, 2, 3), Sampling(max_tokens=9, ignore_eos=True), 700)
    assert len(tokens) == 9
    assert reason == "length"
    assert [next_token((1, 2, 3, *tokens[:index])) for index in range(9)] == tokens
    stopped, shorter, reason = expected_output(
        (1, 2, 3), Sampling(max_tokens=9, stop=(text[2:4],), ignore_eos=True), 700
    )
    assert (stopped, shorter, reason) == (tokens[: text.find(text[2:4]) + 2], text[: text.find(text[2:4])], "stop")
    assert expected_output((1, 2, 3), Sampling(max_tokens=9, ignore_eos=True), 7)[0] == tokens[:4]
