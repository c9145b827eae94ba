"""The detokenizer actor, driven one message at a time, with recording addresses."""

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
    """Decode tokens as bytes; raise for token 999."""
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


class DetokenizerHarness:
    """A detokenizer with recording peers, and clients by request id."""

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

    def receive_all_streams(self) -> None:
        """Send the streams and histories, as intake and the scheduler do at the start."""
        self.actor.started()
        (started,) = self.intake.take()
        assert isinstance(started, DetokenizerStarted)
        self.actor.handle(Reopened(started.life))
        assert self.scheduler.take() == [GetHistories()]

    def end(self, request_id: int, reason: FinishReason = FinishReason.LENGTH, error: str = "") -> None:
        usage = Usage(prompt_tokens=5, cached_tokens=2, output_tokens=self.positions[request_id])
        self.actor.handle(RequestEnded(RequestId(request_id), reason, usage, 0.25, 3, error))


@pytest.fixture
def harness() -> DetokenizerHarness:
    return DetokenizerHarness()


def shown(messages: list[object]) -> str:
    return "".join(message.text for message in messages if isinstance(message, Chunk))


def test_open_is_answered(harness: DetokenizerHarness) -> None:
    harness.open(7)
    assert harness.intake.take() == [Opened(RequestId(7))]


def test_each_client_gets_a_chunk_of_its_own_for_each_step(harness: DetokenizerHarness) -> None:
    one, two = harness.open(1), harness.open(2)
    harness.tokens((1, ord("a")), (2, ord("x")))
    harness.tokens((2, ord("y")))
    assert one.take() == [Chunk(RequestId(1), 0, (97,), "a")]
    assert two.take() == [Chunk(RequestId(2), 0, (120,), "x"), Chunk(RequestId(2), 1, (121,), "y")]


def test_tokens_are_delivered_while_their_text_is_held(harness: DetokenizerHarness) -> None:
    client = harness.open(1)
    harness.write(1, "é")
    assert client.take() == [Chunk(RequestId(1), 0, (0xC3,), ""), Chunk(RequestId(1), 1, (0xA9,), "é")]


def test_the_end_flushes_held_text_and_forgets_the_stream(harness: DetokenizerHarness) -> None:
    client = harness.open(1, stop=("STOP",))
    harness.write(1, "go ST")
    harness.tokens((1, 0xC3))
    client.take()
    harness.intake.take()
    harness.end(1)
    usage = Usage(prompt_tokens=5, cached_tokens=2, output_tokens=6)
    assert client.take() == [
        Chunk(RequestId(1), 6, (), "ST\ufffd"),
        End(RequestId(1), FinishReason.LENGTH, usage, 0.25, 3),
    ]
    assert harness.intake.take() == [Finished((RequestId(1),))]
    assert harness.scheduler.take() == [Closed((RequestId(1),))]
    harness.tokens((1, 97))
    harness.end(1)
    assert client.take() == []


def test_held_text_is_shown_at_the_end(harness: DetokenizerHarness) -> None:
    client = harness.open(1, stop=("STOP",))
    harness.write(1, "go STO")
    assert shown(client.take()) == "go "
    harness.end(1)
    chunk, end = client.take()
    assert chunk == Chunk(RequestId(1), 6, (), "STO")
    assert isinstance(end, End)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.FAILED])
def test_a_stop_string_ends_text_and_usage_at_its_last_token(harness: DetokenizerHarness, reason: FinishReason) -> None:
    client = harness.open(1, stop=("STOP",))
    harness.write(1, "a STOP and more")
    messages = client.take()
    assert shown(messages) == "a "
    assert [message.position for message in messages if isinstance(message, Chunk)] == list(range(6))
    assert set(harness.scheduler.take()) == {StopMatched(RequestId(1), 6)}, "said again to one that goes on"
    harness.end(1, reason, error="late")
    usage = Usage(prompt_tokens=5, cached_tokens=2, output_tokens=6)
    assert client.take() == [End(RequestId(1), FinishReason.STOP, usage, 0.25, 3)]


def test_min_tokens_shows_text_at_once_and_finds_no_stop_in_it(harness: DetokenizerHarness) -> None:
    client = harness.open(1, stop=("aa",), min_tokens=3)
    harness.write(1, "aaaba")
    assert shown(client.take()) == "aaab"
    assert harness.scheduler.take() == []
    harness.write(1, "a")
    assert harness.scheduler.take() == [StopMatched(RequestId(1), 6)]


def test_a_stream_ended_within_min_tokens_shows_everything(harness: DetokenizerHarness) -> None:
    client = harness.open(1, stop=("a", "\ufffd"), min_tokens=3)
    harness.write(1, "a")
    harness.tokens((1, 0xC3))
    harness.end(1, FinishReason.CANCELLED)
    messages = client.take()
    assert shown(messages) == "a\ufffd"
    assert isinstance(messages[-1], End)
    assert messages[-1].reason is FinishReason.CANCELLED


def test_a_stop_string_completed_by_the_flush_counts(harness: DetokenizerHarness) -> None:
    client = harness.open(1, stop=("x\ufffd",))
    harness.write(1, "ax")
    harness.tokens((1, 0xC3))
    harness.end(1)
    messages = client.take()
    assert shown(messages) == "a"
    assert isinstance(messages[-1], End)
    assert (messages[-1].reason, messages[-1].usage.output_tokens) == (FinishReason.STOP, 3)
    assert harness.scheduler.take() == [Closed((RequestId(1),))]


def test_rule_errors_stay_alone_a_token_that_cannot_be_decoded_fails_its_request_alone(
    harness: DetokenizerHarness,
) -> None:
    broken, sound = harness.open(1, stop=("bc",)), harness.open(2)
    harness.tokens((1, ord("a")), (2, ord("x")))
    harness.tokens((1, ord("b")), (2, ord("y")))
    harness.tokens((1, 999), (2, ord("z")))
    harness.tokens((1, ord("c")), (2, ord("!")))
    assert shown(sound.take()) == "xyz!"
    assert set(harness.scheduler.take()) == {StopMatched(RequestId(1), 3)}
    harness.end(1)
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


def test_an_engine_failure_keeps_its_reason_and_its_text(harness: DetokenizerHarness) -> None:
    client = harness.open(1)
    harness.write(1, "ab")
    client.take()
    harness.end(1, FinishReason.FAILED, error="the device is gone")
    (end,) = client.take()
    assert isinstance(end, End)
    assert (end.reason, end.error) == (FinishReason.FAILED, "the device is gone")


def test_requests_that_were_never_opened_are_ignored(harness: DetokenizerHarness) -> None:
    harness.tokens((9, 97))
    harness.end(9)
    assert harness.scheduler.take() == []


def test_second_open_changes_nothing(harness: DetokenizerHarness) -> None:
    client = harness.open(1)
    harness.write(1, "ab")
    assert shown(client.take()) == "ab"
    other = Recorder[object]()
    harness.actor.handle(Open(RequestId(1), (), 0, other, harness.intake, output=(97,)))
    assert harness.intake.take() == [Opened(RequestId(1))] * 2
    harness.write(1, "c")
    assert client.take() == [Chunk(RequestId(1), 2, (99,), "c")]
    assert other.take() == []


def test_only_the_next_token_is_taken(harness: DetokenizerHarness) -> None:
    """A restarted scheduler may send tokens again that the earlier one had already sent."""
    client = harness.open(1)
    harness.write(1, "ab")
    client.take()
    for position, token_id in ((1, 98), (3, 100), (2, 99), (2, 99), (3, 100)):
        harness.actor.handle(TokensReady((RequestId(1),), (token_id,), (position,)))
    assert client.take() == [Chunk(RequestId(1), 2, (99,), "c"), Chunk(RequestId(1), 3, (100,), "d")]


def test_reopened_stream_continues_at_its_position(harness: DetokenizerHarness) -> None:
    client = Recorder[object]()
    harness.actor.handle(Open(RequestId(1), ("cd",), 0, client, harness.intake, output=tuple(b"abc")))
    assert shown(client.take()) == "ab"
    harness.actor.handle(TokensReady((RequestId(1),), (100,), (3,)))
    assert client.take() == [Chunk(RequestId(1), 3, (100,), "")]
    assert harness.scheduler.take() == [StopMatched(RequestId(1), 4)]


def test_new_detokenizer_opens_the_streams_and_requests_their_histories(harness: DetokenizerHarness) -> None:
    harness.actor.started()
    (started,) = harness.intake.take()
    assert isinstance(started, DetokenizerStarted)
    one, two, three = harness.open(1), harness.open(2, stop=("c",)), harness.open(3)
    harness.intake.take()
    harness.actor.handle(Reopened(started.life + 1))
    assert harness.scheduler.take() == [], "that was meant for one before"
    harness.actor.handle(IntakeStarted())
    assert harness.intake.take() == [started], "the intake that was told may be gone"
    for _ in range(2):
        harness.actor.handle(Reopened(started.life))
    assert harness.scheduler.take() == [GetHistories()]
    harness.actor.handle(TokensReady((RequestId(1),), (102,), (5,)))
    over = RequestEnded(RequestId(3), FinishReason.LENGTH, Usage(4, 0, 2), 0.5, 1)
    live = ((RequestId(1), tuple(b"abcde")), (RequestId(2), tuple(b"abcde")))
    harness.actor.handle(Histories(live, ((over, tuple(b"xy")),)))
    assert shown(one.take()) == "abcde"
    assert shown(two.take()) == "ab"
    assert three.take()[-1] == End(RequestId(3), FinishReason.LENGTH, Usage(4, 0, 2), 0.5, 1)
    assert harness.scheduler.take() == [StopMatched(RequestId(2), 3), Closed((RequestId(3),))]
    assert harness.intake.take() == [Finished((RequestId(3),))]
    harness.actor.handle(TokensReady((RequestId(1),), (102,), (5,)))
    assert one.take() == [Chunk(RequestId(1), 5, (102,), "f")]


def test_an_end_waits_for_the_tokens_before_it(harness: DetokenizerHarness) -> None:
    """The scheduler sent those tokens to an earlier detokenizer."""
    client = harness.open(1)
    harness.write(1, "ab")
    client.take()
    early = RequestEnded(RequestId(1), FinishReason.LENGTH, Usage(output_tokens=3), 0.0, 0)
    harness.actor.handle(early)
    assert client.take() == harness.scheduler.take() == []
    harness.write(1, "c")
    harness.actor.handle(early)
    assert isinstance(client.take()[-1], End)


def test_end_without_a_stream_is_closed_once_all_streams_are_known(harness: DetokenizerHarness) -> None:
    ended = RequestEnded(RequestId(9), FinishReason.LENGTH, Usage(output_tokens=1), 0.0, 0)
    harness.actor.handle(Histories((), ((ended, (97,)),)))
    assert harness.scheduler.take() == [], "its stream may be opened yet"
    harness.receive_all_streams()
    harness.actor.handle(ended)
    harness.actor.handle(Histories((), ((ended, (97,)),)))
    assert harness.scheduler.take() == [Closed((RequestId(9),), is_ended=False)] * 2
    assert harness.intake.take() == []


def test_streams_are_sent_with_all_tokens_once_all_are_known(harness: DetokenizerHarness) -> None:
    harness.open(1)
    harness.open(2, stop=("b",))
    harness.intake.take()
    harness.actor.handle(GetStreams(harness.intake))
    assert harness.intake.take() == []
    harness.receive_all_streams()
    harness.write(1, "xy")
    harness.write(2, "abc")
    harness.scheduler.take()
    harness.actor.handle(GetStreams(harness.intake))
    assert harness.intake.take() == [Streams(((RequestId(1), (120, 121)), (RequestId(2), (97, 98))))]
    harness.actor.handle(TokensReady((RequestId(2),), (99,), (2,)))
    assert harness.scheduler.take() == [StopMatched(RequestId(2), 2)], "a new scheduler never heard of it"


def test_dropped_streams_send_nothing(harness: DetokenizerHarness) -> None:
    clients = [harness.open(request_id) for request_id in (1, 2, 3)]
    harness.actor.handle(DropStream(RequestId(1)))
    harness.actor.handle(DropStream(RequestId(7)))
    assert harness.actor.request_count == 2
    harness.actor.handle(RetainStreams((RequestId(3), RequestId(8))))
    assert harness.actor.request_count == 1
    for request_id in (1, 2, 3):
        harness.tokens((request_id, 97))
    assert [len(client.take()) for client in clients] == [0, 0, 1]


def test_client_messages_cross_a_process_boundary(harness: DetokenizerHarness) -> None:
    client = harness.open(1)
    harness.write(1, "é")
    harness.end(1)
    for message in client.take():
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Chunk | End) == message
