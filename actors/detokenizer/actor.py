"""The detokenizer: what text each client has been given, and whether a stop string has ended it.

Owns the streams: position, text and stop strings of each. Knows nothing of blocks, tensors or the order of service.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import msgspec

from cuelight.actors.detokenizer.stops import StopMatcher
from cuelight.actors.detokenizer.text import Decode, IncrementalText
from cuelight.actors.detokenizer.vocabulary import Decoder
from cuelight.kernel import Actor, get_logger
from cuelight.messages.address import Address
from cuelight.messages.client import Chunk, End
from cuelight.messages.detokenizer import DetokenizerMessage, Open, RequestEnded, TokensReady
from cuelight.messages.intake import Opened
from cuelight.messages.request import FinishReason, RequestId
from cuelight.messages.scheduler import StopMatched

_log = get_logger("cuelight.detokenizer")


@dataclass(slots=True)
class _Stream:
    """One client's output. `position` tokens were given; none is taken after a match or a failure."""

    client: Address[Chunk | End]
    text: IncrementalText
    stops: StopMatcher
    min_tokens: int
    position: int = 0
    error: str = ""

    @property
    def over(self) -> bool:
        return self.stops.matched or bool(self.error)

    def push(self, token_id: int) -> str:
        """Take the next token; return the text to show. A character belongs to the token that completes it."""
        self.position += 1
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
    """Turns tokens into text and tells each client its own; tells the scheduler where a stop string ended one."""

    def __init__(self, decode: Decode, scheduler: Address[StopMatched]) -> None:
        self._decode = decode
        self._byte_tokens = decode.byte_tokens if isinstance(decode, Decoder) else frozenset[int]()
        self._scheduler = scheduler
        self._streams: dict[RequestId, _Stream] = {}

    def handle(self, message: DetokenizerMessage) -> None:
        match message:
            case TokensReady():
                for request_id, token_id in zip(message.request_ids, message.token_ids, strict=True):
                    # A stream that is gone or over may still get the tokens of steps that were already in flight.
                    stream = self._streams.get(request_id)
                    if stream is not None and not stream.over:
                        self._push(request_id, stream, token_id)
            case Open():
                self._open(message)
            case RequestEnded():
                stream = self._streams.pop(message.request_id, None)
                if stream is not None:
                    _end(stream, message)
            case _:
                assert_never(message)

    def _open(self, message: Open) -> None:
        assert message.request_id not in self._streams, f"request {message.request_id} is opened twice"
        text = IncrementalText(self._decode, self._byte_tokens)
        self._streams[message.request_id] = _Stream(message.client, text, StopMatcher(message.stop), message.min_tokens)
        message.reply_to.tell(Opened(message.request_id))

    def _push(self, request_id: RequestId, stream: _Stream, token_id: int) -> None:
        position = stream.position
        try:
            text = stream.push(token_id)
        except Exception as error:  # a tokenizer that fails on one request must not take the others with it
            stream.error = _decode_error(request_id, error)
            text = stream.stops.finish()
        stream.client.tell(Chunk(request_id, position, (token_id,), text))
        if stream.over:
            self._scheduler.tell(StopMatched(request_id, stream.position))


def _end(stream: _Stream, ended: RequestEnded) -> None:
    """Give out the text still held back, then the end. A stop string that matched is why the request ended."""
    text = ""
    if not stream.over:
        try:
            text = stream.finish()
        except Exception as error:
            stream.error = _decode_error(ended.request_id, error)
            text = stream.stops.finish()
    if text:
        stream.client.tell(Chunk(ended.request_id, stream.position, (), text))
    reason, usage, error_text = ended.reason, ended.usage, ended.error
    if stream.over:
        reason = FinishReason.FAILED if stream.error else FinishReason.STOP
        usage = msgspec.structs.replace(usage, output_tokens=stream.position)
        error_text = stream.error
    stream.client.tell(
        End(
            ended.request_id,
            reason,
            usage,
            ended.queued_seconds,
            ended.preemptions,
            error_text,
            ended.running_seconds,
        )
    )


def _decode_error(request_id: RequestId, error: Exception) -> str:
    _log.error("decode failed", request_id=request_id, error=repr(error))
    return f"the tokenizer could not decode the output: {error!r}"
