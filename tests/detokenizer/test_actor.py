"""The detokenizer actor, driven message by message with lists for addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest
from support import Recorder

from cuelight.actors.detokenizer.actor import Detokenizer
from cuelight.kernel import ActorSpec, Context, Role
from cuelight.kernel.simulation.simulator import Simulation
from cuelight.messages.client import Chunk, End
from cuelight.messages.detokenizer import (
    DetokenizerMessage,
    DropStream,
    GetStreams,
    Histories,
    Open,
    Reopened,
    RequestEnded,
    RetainStreams,
    TokensReady,
)
from cuelight.messages.intake import DetokenizerStarted, Finished, Opened, Streams
from cuelight.messages.request import FinishReason, RequestId, Usage
from cuelight.messages.scheduler import Closed, GetHistories, IntakeStarted, StopMatched


def utf8(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes; 999 breaks it."""
    return bytes(token_ids).decode("utf-8", "replace")


def detokenizer(
    decode: Callable[[Sequence[int]], str], scheduler: Recorder[object], intake: Recorder[object]
) -> Detokenizer:
    built: list[Detokenizer] = []

    def build(context: Context[object]) -> Detokenizer:
        built.append(Detokenizer(context, decode, scheduler, intake))
        return built[0]

    Simulation([ActorSpec(Role("detokenizer", DetokenizerMessage, capacity=1), build)], seed=1)
    return built[0]


class Stage:
    """A detokenizer with its neighbours, and clients by request id."""

    def __init__(self) -> None:
        self.scheduler = Recorder[object]()
        self.intake = Recorder[object]()
        self.clients: dict[int, Recorder[object]] = {}
        self.actor = detokenizer(utf8, self.scheduler, self.intake)
        self.positions: Counter[int] = Counter()

    def open(self, request_id: int, stop: tuple[str, ...] = (), min_tokens: int = 0) -> Recorder[object]:
        client = self.clients[request_id] = Recorder[object]()
        del self.positions[request_id]
        self.actor.handle(Open(RequestId(request_id), stop, min_tokens, client, self.intake))
        return client

    def tokens(self, *pairs: tuple[int, int]) -> None:
        request_ids = tuple(RequestId(request_id) for request_id, _ in pairs)
        positions = tuple(self.positions[request_id] for request_id, _ in pairs)
        self.positions.update(request_ids)
        self.actor.handle(TokensReady(request_ids, tuple(token_id for _, token_id in pairs), positions))

    def write(self, request_id: int, text: str) -> None:
        for byte in text.encode():
            self.tokens((request_id, byte))

    def be_told_all_streams(self) -> None:
        """As intake does at the start, and the scheduler when it is asked."""
        self.actor.started()
        (started,) = self.intake.take()
        assert isinstance(started, DetokenizerStarted)
        self.actor.handle(Reopened(started.life))
        assert self.scheduler.take() == [GetHistories()]

    def end(self, request_id: int, reason: FinishReason = FinishReason.LENGTH, error: str = "") -> None:
        usage = Usage(prompt_tokens=5, cached_tokens=2, output_tokens=self.positions[request_id])
        self.actor.handle(RequestEnded(RequestId(request_id), reason, usage, 0.25, 3, error))


@pytest.fixture
def stage() -> Stage:
    return Stage()


def shown(messages: list[object]) -> str:
    return "".join(message.text for message in messages if isinstance(message, Chunk))


def test_open_is_answered(stage: Stage) -> None:
    stage.open(7)
    assert stage.intake.take() == [Opened(RequestId(7))]


def test_each_client_gets_a_chunk_of_its_own_for_each_step(stage: Stage) -> None:
    one, two = stage.open(1), stage.open(2)
    stage.tokens((1, ord("a")), (2, ord("x")))
    stage.tokens((2, ord("y")))
    assert one.take() == [Chunk(RequestId(1), 0, (97,), "a")]
    assert two.take() == [Chunk(RequestId(2), 0, (120,), "x"), Chunk(RequestId(2), 1, (121,), "y")]


def test_tokens_are_delivered_while_their_text_is_held(stage: Stage) -> None:
    client = stage.open(1)
    stage.write(1, "é")
    assert client.take() == [Chunk(RequestId(1), 0, (0xC3,), ""), Chunk(RequestId(1), 1, (0xA9,), "é")]


def test_the_end_flushes_held_text_and_forgets_the_stream(stage: Stage) -> None:
    client = stage.open(1, stop=("STOP",))
    stage.write(1, "go ST")
    stage.tokens((1, 0xC3))
    client.take()
    stage.intake.take()
    stage.end(1)
    usage = Usage(prompt_tokens=5, cached_tokens=2, output_tokens=6)
    assert client.take() == [
        Chunk(RequestId(1), 6, (), "ST\ufffd"),
        End(RequestId(1), FinishReason.LENGTH, usage, 0.25, 3),
    ]
    assert stage.intake.take() == [Finished((RequestId(1),))]
    assert stage.scheduler.take() == [Closed((RequestId(1),))]
    stage.tokens((1, 97))
    stage.end(1)
    assert client.take() == []


def test_held_text_is_shown_at_the_end(stage: Stage) -> None:
    client = stage.open(1, stop=("STOP",))
    stage.write(1, "go STO")
    assert shown(client.take()) == "go "
    stage.end(1)
    chunk, end = client.take()
    assert chunk == Chunk(RequestId(1), 6, (), "STO")
    assert isinstance(end, End)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.FAILED])
def test_a_stop_string_ends_text_and_usage_at_its_last_token(stage: Stage, reason: FinishReason) -> None:
    client = stage.open(1, stop=("STOP",))
    stage.write(1, "a STOP and more")
    messages = client.take()
    assert shown(messages) == "a "
    assert [message.position for message in messages if isinstance(message, Chunk)] == list(range(6))
    assert set(stage.scheduler.take()) == {StopMatched(RequestId(1), 6)}, "said again to one that goes on"
    stage.end(1, reason, error="late")
    usage = Usage(prompt_tokens=5, cached_tokens=2, output_tokens=6)
    assert client.take() == [End(RequestId(1), FinishReason.STOP, usage, 0.25, 3)]


def test_min_tokens_shows_text_at_once_and_finds_no_stop_in_it(stage: Stage) -> None:
    client = stage.open(1, stop=("aa",), min_tokens=3)
    stage.write(1, "aaaba")
    assert shown(client.take()) == "aaab"
    assert stage.scheduler.take() == []
    stage.write(1, "a")
    assert stage.scheduler.take() == [StopMatched(RequestId(1), 6)]


def test_a_stream_ended_within_min_tokens_shows_everything(stage: Stage) -> None:
    client = stage.open(1, stop=("a", "\ufffd"), min_tokens=3)
    stage.write(1, "a")
    stage.tokens((1, 0xC3))
    stage.end(1, FinishReason.CANCELLED)
    messages = client.take()
    assert shown(messages) == "a\ufffd"
    assert isinstance(messages[-1], End)
    assert messages[-1].reason is FinishReason.CANCELLED


def test_a_stop_string_completed_by_the_flush_counts(stage: Stage) -> None:
    client = stage.open(1, stop=("x\ufffd",))
    stage.write(1, "ax")
    stage.tokens((1, 0xC3))
    stage.end(1)
    messages = client.take()
    assert shown(messages) == "a"
    assert isinstance(messages[-1], End)
    assert (messages[-1].reason, messages[-1].usage.output_tokens) == (FinishReason.STOP, 3)
    assert stage.scheduler.take() == [Closed((RequestId(1),))]


def test_rule_errors_stay_alone_a_token_that_cannot_be_decoded_fails_its_request_alone(stage: Stage) -> None:
    broken, sound = stage.open(1, stop=("bc",)), stage.open(2)
    stage.tokens((1, ord("a")), (2, ord("x")))
    stage.tokens((1, ord("b")), (2, ord("y")))
    stage.tokens((1, 999), (2, ord("z")))
    stage.tokens((1, ord("c")), (2, ord("!")))
    assert shown(sound.take()) == "xyz!"
    assert set(stage.scheduler.take()) == {StopMatched(RequestId(1), 3)}
    stage.end(1)
    messages = broken.take()
    assert shown(messages) == "ab"
    end = messages[-1]
    assert isinstance(end, End)
    assert (end.reason, end.usage.output_tokens) == (FinishReason.FAILED, 3)
    assert "could not decode" in end.error


def test_rule_errors_stay_alone_a_flush_that_cannot_be_decoded_fails_its_request_alone() -> None:
    def fails_at_length_two(token_ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise RuntimeError("no more")
        return utf8(token_ids)

    calls = 0
    client = Recorder[object]()
    actor = detokenizer(fails_at_length_two, Recorder[object](), Recorder[object]())
    actor.handle(Open(RequestId(1), ("bc",), 0, client, Recorder[object]()))
    for position, byte in enumerate(b"ab"):
        actor.handle(TokensReady((RequestId(1),), (byte,), (position,)))
    actor.handle(RequestEnded(RequestId(1), FinishReason.LENGTH, Usage(output_tokens=2), 0.0, 0))
    messages = client.take()
    assert shown(messages) == "ab"
    end = messages[-1]
    assert isinstance(end, End)
    assert end.reason is FinishReason.FAILED


def test_an_engine_failure_keeps_its_reason_and_its_text(stage: Stage) -> None:
    client = stage.open(1)
    stage.write(1, "ab")
    client.take()
    stage.end(1, FinishReason.FAILED, error="the device is gone")
    (end,) = client.take()
    assert isinstance(end, End)
    assert (end.reason, end.error) == (FinishReason.FAILED, "the device is gone")


def test_requests_that_were_never_opened_are_ignored(stage: Stage) -> None:
    stage.tokens((9, 97))
    stage.end(9)
    assert stage.scheduler.take() == []


def test_opening_again_changes_nothing(stage: Stage) -> None:
    client = stage.open(1)
    stage.write(1, "ab")
    assert shown(client.take()) == "ab"
    other = Recorder[object]()
    stage.actor.handle(Open(RequestId(1), (), 0, other, stage.intake, output=(97,)))
    assert stage.intake.take() == [Opened(RequestId(1))] * 2
    stage.write(1, "c")
    assert client.take() == [Chunk(RequestId(1), 2, (99,), "c")]
    assert other.take() == []


def test_only_the_next_token_is_taken(stage: Stage) -> None:
    """A scheduler that began from less computes some again; one that is no more had come further."""
    client = stage.open(1)
    stage.write(1, "ab")
    client.take()
    for position, token_id in ((1, 98), (3, 100), (2, 99), (2, 99), (3, 100)):
        stage.actor.handle(TokensReady((RequestId(1),), (token_id,), (position,)))
    assert client.take() == [Chunk(RequestId(1), 2, (99,), "c"), Chunk(RequestId(1), 3, (100,), "d")]


def test_a_stream_goes_on_where_it_was(stage: Stage) -> None:
    client = Recorder[object]()
    stage.actor.handle(Open(RequestId(1), ("cd",), 0, client, stage.intake, output=tuple(b"abc")))
    assert shown(client.take()) == "ab"
    stage.actor.handle(TokensReady((RequestId(1),), (100,), (3,)))
    assert client.take() == [Chunk(RequestId(1), 3, (100,), "")]
    assert stage.scheduler.take() == [StopMatched(RequestId(1), 4)]


def test_a_new_one_is_told_the_streams_and_recalls_their_histories(stage: Stage) -> None:
    stage.actor.started()
    (started,) = stage.intake.take()
    assert isinstance(started, DetokenizerStarted)
    one, two, three = stage.open(1), stage.open(2, stop=("c",)), stage.open(3)
    stage.intake.take()
    stage.actor.handle(Reopened(started.life + 1))
    assert stage.scheduler.take() == [], "that was meant for one before"
    stage.actor.handle(IntakeStarted())
    assert stage.intake.take() == [started], "the intake that was told may be gone"
    for _ in range(2):
        stage.actor.handle(Reopened(started.life))
    assert stage.scheduler.take() == [GetHistories()]
    stage.actor.handle(TokensReady((RequestId(1),), (102,), (5,)))
    over = RequestEnded(RequestId(3), FinishReason.LENGTH, Usage(4, 0, 2), 0.5, 1)
    live = ((RequestId(1), tuple(b"abcde")), (RequestId(2), tuple(b"abcde")))
    stage.actor.handle(Histories(live, ((over, tuple(b"xy")),)))
    assert shown(one.take()) == "abcde"
    assert shown(two.take()) == "ab"
    assert three.take()[-1] == End(RequestId(3), FinishReason.LENGTH, Usage(4, 0, 2), 0.5, 1)
    assert stage.scheduler.take() == [StopMatched(RequestId(2), 3), Closed((RequestId(3),))]
    assert stage.intake.take() == [Finished((RequestId(3),))]
    stage.actor.handle(TokensReady((RequestId(1),), (102,), (5,)))
    assert one.take() == [Chunk(RequestId(1), 5, (102,), "f")]


def test_an_end_waits_for_the_tokens_before_it(stage: Stage) -> None:
    """It comes from a scheduler that has told them to a detokenizer before."""
    client = stage.open(1)
    stage.write(1, "ab")
    client.take()
    early = RequestEnded(RequestId(1), FinishReason.LENGTH, Usage(output_tokens=3), 0.0, 0)
    stage.actor.handle(early)
    assert client.take() == stage.scheduler.take() == []
    stage.write(1, "c")
    stage.actor.handle(early)
    assert isinstance(client.take()[-1], End)


def test_an_end_that_nobody_listens_for_is_closed_once_all_streams_are_known(stage: Stage) -> None:
    ended = RequestEnded(RequestId(9), FinishReason.LENGTH, Usage(output_tokens=1), 0.0, 0)
    stage.actor.handle(Histories((), ((ended, (97,)),)))
    assert stage.scheduler.take() == [], "its stream may be opened yet"
    stage.be_told_all_streams()
    stage.actor.handle(ended)
    stage.actor.handle(Histories((), ((ended, (97,)),)))
    assert stage.scheduler.take() == [Closed((RequestId(9),), is_ended=False)] * 2
    assert stage.intake.take() == []


def test_streams_are_told_with_all_their_tokens_once_all_are_known(stage: Stage) -> None:
    stage.open(1)
    stage.open(2, stop=("b",))
    stage.intake.take()
    stage.actor.handle(GetStreams(stage.intake))
    assert stage.intake.take() == []
    stage.be_told_all_streams()
    stage.write(1, "xy")
    stage.write(2, "abc")
    stage.scheduler.take()
    stage.actor.handle(GetStreams(stage.intake))
    assert stage.intake.take() == [Streams(((RequestId(1), (120, 121)), (RequestId(2), (97, 98))))]
    stage.actor.handle(TokensReady((RequestId(2),), (99,), (2,)))
    assert stage.scheduler.take() == [StopMatched(RequestId(2), 2)], "a new scheduler never heard of it"


def test_streams_can_be_forgotten_without_a_word(stage: Stage) -> None:
    clients = [stage.open(request_id) for request_id in (1, 2, 3)]
    stage.actor.handle(DropStream(RequestId(1)))
    stage.actor.handle(DropStream(RequestId(7)))
    assert stage.actor.request_count == 2
    stage.actor.handle(RetainStreams((RequestId(3), RequestId(8))))
    assert stage.actor.request_count == 1
    for request_id in (1, 2, 3):
        stage.tokens((request_id, 97))
    assert [len(client.take()) for client in clients] == [0, 0, 1]


def test_what_clients_hear_crosses_a_process_boundary(stage: Stage) -> None:
    client = stage.open(1)
    stage.write(1, "é")
    stage.end(1)
    for message in client.take():
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Chunk | End) == message
