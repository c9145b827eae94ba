"""The detokenizer actor, driven message by message with lists for addresses."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from support import Recorder

from cuelight.actors.detokenizer.actor import Detokenizer
from cuelight.messages.client import Chunk, End
from cuelight.messages.detokenizer import Open, RequestEnded, TokensReady
from cuelight.messages.intake import Opened
from cuelight.messages.request import FinishReason, RequestId, Usage
from cuelight.messages.scheduler import StopMatched


def utf8(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes; 999 breaks it."""
    return bytes(token_ids).decode("utf-8", "replace")


class Stage:
    """A detokenizer with its neighbours, and clients by request id."""

    def __init__(self) -> None:
        self.scheduler = Recorder[object]()
        self.intake = Recorder[object]()
        self.clients: dict[int, Recorder[object]] = {}
        self.actor = Detokenizer(utf8, self.scheduler)

    def open(self, request_id: int, stop: tuple[str, ...] = (), min_tokens: int = 0) -> Recorder[object]:
        client = self.clients[request_id] = Recorder[object]()
        self.actor.handle(Open(RequestId(request_id), stop, min_tokens, client, self.intake))
        return client

    def tokens(self, *pairs: tuple[int, int]) -> None:
        request_ids = tuple(RequestId(request_id) for request_id, _ in pairs)
        self.actor.handle(TokensReady(request_ids, tuple(token_id for _, token_id in pairs)))

    def write(self, request_id: int, text: str) -> None:
        for byte in text.encode():
            self.tokens((request_id, byte))

    def end(self, request_id: int, reason: FinishReason = FinishReason.LENGTH, error: str = "") -> None:
        usage = Usage(prompt_tokens=5, cached_tokens=2, output_tokens=100)
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
    stage.end(1)
    usage = Usage(prompt_tokens=5, cached_tokens=2, output_tokens=100)
    assert client.take() == [
        Chunk(RequestId(1), 6, (), "ST\ufffd"),
        End(RequestId(1), FinishReason.LENGTH, usage, 0.25, 3),
    ]
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
    assert stage.scheduler.take() == [StopMatched(RequestId(1), 6)]
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
    assert stage.scheduler.take() == []


def test_rule_57_a_token_that_cannot_be_decoded_fails_its_request_alone(stage: Stage) -> None:
    broken, sound = stage.open(1, stop=("bc",)), stage.open(2)
    stage.tokens((1, ord("a")), (2, ord("x")))
    stage.tokens((1, ord("b")), (2, ord("y")))
    stage.tokens((1, 999), (2, ord("z")))
    stage.tokens((1, ord("c")), (2, ord("!")))
    assert shown(sound.take()) == "xyz!"
    assert stage.scheduler.take() == [StopMatched(RequestId(1), 3)]
    stage.end(1)
    messages = broken.take()
    assert shown(messages) == "ab"
    end = messages[-1]
    assert isinstance(end, End)
    assert (end.reason, end.usage.output_tokens) == (FinishReason.FAILED, 3)
    assert "could not decode" in end.error


def test_rule_57_a_flush_that_cannot_be_decoded_fails_its_request_alone() -> None:
    def fails_at_length_two(token_ids: Sequence[int]) -> str:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise RuntimeError("no more")
        return utf8(token_ids)

    calls = 0
    client = Recorder[object]()
    actor = Detokenizer(fails_at_length_two, Recorder[object]())
    actor.handle(Open(RequestId(1), ("bc",), 0, client, Recorder[object]()))
    for byte in b"ab":
        actor.handle(TokensReady((RequestId(1),), (byte,)))
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


def test_opening_twice_is_our_bug(stage: Stage) -> None:
    stage.open(1)
    with pytest.raises(AssertionError, match="opened twice"):
        stage.open(1)


def test_what_clients_hear_crosses_a_process_boundary(stage: Stage) -> None:
    client = stage.open(1)
    stage.write(1, "é")
    stage.end(1)
    for message in client.take():
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Chunk | End) == message
