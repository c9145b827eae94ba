"""The detokenizer actor: sends each client its text, and ends a stream at a stop string.

Owns the streams: position, text and stop strings of each. Blocks and the order of service are the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias, assert_never

import msgspec

from cuelight.actors.detokenizer.decoder import Decoder
from cuelight.actors.detokenizer.text import Decode, IncrementalText, StopMatcher
from cuelight.kernel import Actor, Context, get_logger
from cuelight.messages.address import Address
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
from cuelight.messages.request import FailureCause, FinishReason, RequestId
from cuelight.messages.scheduler import Closed, GetHistories, IntakeStarted, StopMatched

ToIntake: TypeAlias = DetokenizerStarted | Finished
"""Messages to intake that are not replies."""

_INTERRUPTS = (KeyboardInterrupt, SystemExit)
"""Exceptions that end the whole program. A tokenizer's native code may raise other ones outside `Exception`, which
fail one request only."""

_log = get_logger("cuelight.detokenizer")


@dataclass(slots=True)
class _TextStream:
    """The output of one request so far. Takes no token after a stop string matched or decoding failed."""

    client: Address[Chunk | End]
    text: IncrementalText
    stops: StopMatcher
    min_tokens: int
    token_ids: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def position(self) -> int:
        """Position of the next token."""
        return len(self.token_ids)

    @property
    def over(self) -> bool:
        return self.stops.matched or bool(self.error)

    def push(self, token_id: int) -> str:
        """Add the next token and return the text to send. A character belongs to the token that completes it."""
        self.token_ids.append(token_id)
        text = self.text.push((token_id,))
        return text if self.position <= self.min_tokens else self.stops.feed(text)

    def finish(self) -> str:
        """Return all text still held back, up to a stop string that its last characters may complete."""
        text = self.text.finish()
        if self.position <= self.min_tokens:
            return text
        shown = self.stops.feed(text)
        return shown if self.stops.matched else shown + self.stops.finish()


class Detokenizer(Actor[DetokenizerMessage]):
    """The actor that decodes tokens, sends each client its text, and reports matched stop strings to the scheduler.

    A new detokenizer starts from the streams that intake opens again and the histories that the scheduler has. It
    sends all chunks again; clients skip those they have had, since the same tokens give the same text.
    """

    def __init__(
        self,
        context: Context[DetokenizerMessage],
        decode: Decode,
        scheduler: Address[StopMatched | GetHistories | Closed],
        intake: Address[ToIntake],
    ) -> None:
        self._life = context.chance.getrandbits(32)
        self._decode = decode
        self._byte_tokens = decode.byte_tokens if isinstance(decode, Decoder) else frozenset[int]()
        self._scheduler = scheduler
        self._intake = intake
        self._streams: dict[RequestId, _TextStream] = {}
        self._has_all_streams = False

    @property
    def request_count(self) -> int:
        """Number of open streams."""
        return len(self._streams)

    def started(self) -> None:
        self._intake.tell(DetokenizerStarted(self._life))

    def handle(self, message: DetokenizerMessage) -> None:
        match message:
            case TokensReady():
                self._take(message)
            case Open():
                self._open(message)
            case RequestEnded():
                self._end(message)
            case Histories():
                self._restore(message)
            case DropStream() | RetainStreams() | IntakeStarted() | Reopened() | GetStreams():
                self._handle_streams(message)
            case _:
                assert_never(message)

    def _handle_streams(self, message: DropStream | RetainStreams | IntakeStarted | Reopened | GetStreams) -> None:
        match message:
            case DropStream(request_id):
                self._streams.pop(request_id, None)
            case RetainStreams(request_ids):
                kept = frozenset(request_ids)
                self._streams = {request_id: each for request_id, each in self._streams.items() if request_id in kept}
            case IntakeStarted():
                if not self._has_all_streams:
                    self._intake.tell(DetokenizerStarted(self._life))
            case Reopened(life):
                if life == self._life and not self._has_all_streams:
                    self._has_all_streams = True
                    self._scheduler.tell(GetHistories())
            case GetStreams(reply_to):
                if self._has_all_streams:  # otherwise intake sends `GetStreams` again after `Reopened`
                    streams = self._streams.items()
                    reply_to.tell(Streams(tuple([(request_id, tuple(each.token_ids)) for request_id, each in streams])))
            case _:
                assert_never(message)

    def _take(self, ready: TokensReady) -> None:
        for request_id, token_id, position in zip(ready.request_ids, ready.token_ids, ready.positions, strict=True):
            # Tokens of steps that were in flight may arrive after their stream was closed.
            stream = self._streams.get(request_id)
            if stream is not None and position == len(stream.token_ids):
                self._push(request_id, stream, token_id)

    def _restore(self, histories: Histories) -> None:
        for request_id, token_ids in histories.live:
            self._catch_up(request_id, token_ids)
        for ended, token_ids in histories.ended:
            self._catch_up(ended.request_id, token_ids)
            self._end(ended)

    def _open(self, message: Open) -> None:
        request_id = message.request_id
        if request_id not in self._streams:
            text = IncrementalText(self._decode, self._byte_tokens)
            self._streams[request_id] = _TextStream(message.client, text, StopMatcher(message.stop), message.min_tokens)
        self._catch_up(request_id, message.output)
        message.reply_to.tell(Opened(request_id))

    def _catch_up(self, request_id: RequestId, token_ids: tuple[int, ...]) -> None:
        """Add those tokens that the stream lacks; `token_ids` is the request's history."""
        if (stream := self._streams.get(request_id)) is not None:
            for token_id in token_ids[stream.position :]:
                self._push(request_id, stream, token_id)
                if stream.over:
                    return

    def _push(self, request_id: RequestId, stream: _TextStream, token_id: int) -> None:
        was_over = stream.over
        if was_over:  # a new scheduler may not have received the first `StopMatched`
            self._scheduler.tell(StopMatched(request_id, stream.position))
            return
        position = stream.position
        try:
            text = stream.push(token_id)
        except _INTERRUPTS:
            raise
        except BaseException as error:  # a tokenizer failure on one request must not fail the others
            stream.error = _decode_error(request_id, error)
            text = stream.stops.finish()
        stream.client.tell(Chunk(request_id, position, (token_id,), text))
        if stream.over:
            self._scheduler.tell(StopMatched(request_id, stream.position))

    def _end(self, ended: RequestEnded) -> None:
        request_id = ended.request_id
        stream = self._streams.get(request_id)
        if stream is None:
            if self._has_all_streams:  # the stream was closed before, but the scheduler lacks the confirmation
                self._scheduler.tell(Closed((request_id,), is_ended=False))
            return
        if ended.usage.output_tokens > stream.position and not stream.over:
            return
        _finish(stream, ended)
        del self._streams[request_id]
        self._intake.tell(Finished((request_id,)))
        self._scheduler.tell(Closed((request_id,)))


def _finish(stream: _TextStream, ended: RequestEnded) -> None:
    """Send the client the text still held back, then the end. A matched stop string is the reason of the end."""
    text = ""
    if not stream.over:
        try:
            text = stream.finish()
        except _INTERRUPTS:
            raise
        except BaseException as error:
            stream.error = _decode_error(ended.request_id, error)
            text = stream.stops.finish()
    if text:
        stream.client.tell(Chunk(ended.request_id, stream.position, (), text))
    reason, usage, error_text, failure = ended.reason, ended.usage, ended.error, ended.failure
    if stream.over:
        reason = FinishReason.FAILED if stream.error else FinishReason.STOP
        usage = msgspec.structs.replace(usage, output_tokens=stream.position)
        error_text, failure = stream.error, FailureCause.UNDECODABLE if stream.error else None
    stream.client.tell(
        End(
            ended.request_id,
            reason,
            usage,
            ended.queued_seconds,
            ended.preemptions,
            error_text,
            ended.running_seconds,
            failure,
        )
    )


def _decode_error(request_id: RequestId, error: BaseException) -> str:
    _log.error("decode failed", request_id=request_id, error=repr(error))
    return f"the tokenizer could not decode the output: {error!r}"
