"""The client's end of a request: an async iterator over its output; dropping it cancels the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self, assert_never

from cuelight import errors
from cuelight.messages.client import Accepted, Chunk, ClientMessage, End, Rejected
from cuelight.messages.request import FinishReason, Refusal, RequestId, Usage

REFUSALS: dict[Refusal, type[errors.RequestRejected]] = {
    Refusal.EMPTY_PROMPT: errors.EmptyPrompt,
    Refusal.PROMPT_TOO_LONG: errors.PromptTooLong,
    Refusal.BAD_PROMPT: errors.BadPrompt,
    Refusal.BAD_MESSAGE: errors.BadMessage,
    Refusal.TOKEN_OUT_OF_RANGE: errors.TokenOutOfRange,
    Refusal.BAD_SAMPLING: errors.BadSampling,
    Refusal.WRONG_TYPE: errors.WrongType,
    Refusal.BAD_SERVICE: errors.BadService,
    Refusal.UNKNOWN_TENANT: errors.UnknownTenant,
}


def rejection(refusal: Refusal, reason: str, retry_after_seconds: float | None) -> errors.RequestRejected:
    """Return the exception for a refusal of intake."""
    if refusal is Refusal.QUEUE_FULL:
        return errors.QueueFull(reason, retry_after_seconds)
    return REFUSALS[refusal](reason)


@dataclass(frozen=True)
class Timings:
    """Durations of a request in seconds.

    Attributes:
        queued_seconds: from the submission to the admission.
        first_token_seconds: from the submission to the first token; to the end if there was no token.
        total_seconds: from the submission to the end.
        running_seconds: the part of `total_seconds` in which the request held blocks.
    """

    queued_seconds: float
    first_token_seconds: float
    total_seconds: float
    running_seconds: float


@dataclass(frozen=True)
class Result:
    """The whole output of a finished request.

    Attributes:
        request_id: the request's id, as `Engine.explain` takes it.
        text: the decoded `token_ids`, cut before a stop string.
        token_ids: all output tokens, including those of a stop string up to its completion.
        finish_reason: why the output ended.
        usage: numbers of tokens.
        timings: durations.
    """

    request_id: RequestId
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings


class Inbox:
    """The address that collects a stream's output. Holds no reference to the stream, so that dropping it is noticed."""

    def __init__(
        self,
        request_id: RequestId,
        now: Callable[[], float],
        on_end: Callable[[Inbox], None],
        before_read: Callable[[], object] = lambda: None,
        check_here: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_read` is called before output is returned to the client.

        `check_here` is called before a wait, and raises EngineUnavailable in another thread or loop than the engine's,
        where the wait could not be woken.
        """
        self.request_id = request_id
        self.before_read = before_read
        self._check_here = check_here
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.end: End | None = None
        self.error: errors.EngineError | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.cancelled = False
        self.is_accepted = False
        self._is_flushed = False
        self._now = now
        self._on_end = on_end
        self.submitted_at = now()
        self._waiter: asyncio.Future[None] | None = None

    def tell(self, message: ClientMessage, /) -> None:
        """Receive a message from intake or the detokenizer; ignored once the request has ended."""
        if self.ended_at is not None:
            return
        match message:
            case Chunk():
                self._take(message)
            case Accepted():
                self.is_accepted = True
            case End():
                if message.reason is FinishReason.FAILED:
                    self.error = errors.RequestFailed(message.error)
                elif message.reason is FinishReason.EXPIRED:
                    self.error = errors.DeadlineExceeded(message.error)
                self.end = message
                self._finish()
            case Rejected(refusal=Refusal.QUEUE_FULL) if self.is_accepted:
                pass  # the reply to an earlier submission; a repeated one was accepted
            case Rejected():
                self.error = rejection(message.refusal, message.reason, message.retry_after_seconds)
                self._finish()
            case _:
                assert_never(message)

    def _take(self, chunk: Chunk) -> None:
        """Append new output; ignore tokens that a new detokenizer sends again, which have the same text."""
        if self.cancelled or chunk.position < len(self.token_ids) or (not chunk.token_ids and self._is_flushed):
            return
        assert chunk.position == len(self.token_ids), "a stream does not skip a token"
        if self.first_token_at is None:
            self.first_token_at = self._now()
        self._is_flushed = not chunk.token_ids  # the last chunk is text that was held back, without tokens
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self._wake()

    @property
    def over(self) -> bool:
        """Whether the request has ended or was cancelled."""
        return self.cancelled or self.ended_at is not None

    def fail(self, error: errors.EngineError) -> None:
        """End the request with `error`, unless it has ended."""
        if self.ended_at is None:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        self.ended_at = self._now()
        self._on_end(self)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def change(self) -> None:
        """Wait for the next message. Raises RuntimeError for a second concurrent wait, and as `check_here`."""
        self._check_here()
        if self._waiter is not None:
            raise RuntimeError("a stream can be read by one task at a time")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class _Lease:
    """Cancels the request when it is deleted; the stream and its readers hold it."""

    def __init__(self, inbox: Inbox, cancel: Callable[[RequestId], None], cancel_later: Callable[[RequestId], None]):
        self.inbox = inbox
        self._cancel = cancel
        self._cancel_later = cancel_later

    def cancel(self) -> None:
        """Cancel now, from the event loop's thread."""
        if not self.inbox.over:
            self.inbox.cancelled = True
            self._cancel(self.inbox.request_id)

    def cancel_later(self) -> None:
        """Cancel from a finalizer, which may run in any thread at any moment."""
        if not self.inbox.over:
            self.inbox.cancelled = True
            self._cancel_later(self.inbox.request_id)

    def __del__(self) -> None:
        self.cancel_later()


class Stream:
    """The output of one request: iterate over it for chunks, or await `result()` for the whole.

    The request is cancelled and its blocks are freed when the iteration is left early, the waiting task is cancelled,
    `aclose()` is called, or the last reference to the stream is dropped. A slow reader receives larger chunks. One task
    may read at a time.

    Raises:
        RequestRejected: the request was refused; from the iteration and `result()`, as are the others.
        RequestFailed: the request was accepted and then failed.
        EngineUnavailable: the engine was stopped or broke, or the stream is read in another thread or event loop.
    """

    def __init__(self, lease: _Lease, position: int = 0) -> None:
        self._lease = lease
        self._position = position
        self._reader: _Reader | None = None

    @property
    def request_id(self) -> RequestId:
        """The request's id, unique within its engine."""
        return self.inbox.request_id

    @property
    def inbox(self) -> Inbox:
        """The address that collects the output."""
        return self._lease.inbox

    def __aiter__(self) -> AsyncIterator[Chunk]:
        # Only the `async for` holds the reader, so leaving it drops the reader even if the stream is still referenced.
        return _Reader(self._lease, self._position)

    async def __anext__(self) -> Chunk:
        if self._reader is None:
            self._reader = _Reader(self._lease, self._position)
        return await self._reader.__anext__()

    async def result(self) -> Result:
        """Wait for the end and return the whole output, including chunks that were read before.

        Cancelling this call cancels the request. Raises as the iteration does.
        """
        inbox = self.inbox
        try:
            while inbox.ended_at is None:
                await inbox.change()
        except asyncio.CancelledError:
            self._lease.cancel()
            raise
        inbox.before_read()
        if inbox.error is not None:
            raise inbox.error
        assert inbox.end is not None, "a stream without error has an end"
        return _result(inbox, inbox.end)

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended. Does not wait for the engine."""
        self._lease.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Reader:
    """One iteration over a stream. Dropping it before the end cancels the request."""

    def __init__(self, lease: _Lease, position: int) -> None:
        self._lease = lease
        self._texts_read = position  # one text per token
        self._tokens_read = position

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        inbox = self._lease.inbox
        try:
            while self._texts_read >= len(inbox.texts):
                if inbox.error is not None:
                    raise inbox.error
                if inbox.over:
                    raise StopAsyncIteration
                await inbox.change()
        except asyncio.CancelledError:
            self._lease.cancel()
            raise
        return self._take(inbox)

    def _take(self, inbox: Inbox) -> Chunk:
        """Return all output since the last chunk as one chunk."""
        inbox.before_read()
        text = "".join(inbox.texts[self._texts_read :])
        chunk = Chunk(inbox.request_id, self._tokens_read, tuple(inbox.token_ids[self._tokens_read :]), text)
        self._texts_read = len(inbox.texts)
        self._tokens_read = len(inbox.token_ids)
        return chunk

    def __del__(self) -> None:
        self._lease.cancel_later()


def _result(inbox: Inbox, end: End) -> Result:
    assert inbox.ended_at is not None
    total = inbox.ended_at - inbox.submitted_at
    first = total if inbox.first_token_at is None else inbox.first_token_at - inbox.submitted_at
    return Result(
        request_id=inbox.request_id,
        text="".join(inbox.texts),
        token_ids=tuple(inbox.token_ids),
        finish_reason=end.reason,
        usage=end.usage,
        timings=Timings(end.queued_seconds, first, total, end.running_seconds),
    )


def open_stream(
    inbox: Inbox,
    cancel: Callable[[RequestId], None],
    cancel_later: Callable[[RequestId], None],
    position: int = 0,
) -> Stream:
    """Return a stream over `inbox` whose iteration starts at the output token `position`.

    `cancel_later` is called from any thread, at any moment.
    """
    return Stream(_Lease(inbox, cancel, cancel_later), position)
