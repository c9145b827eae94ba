"""The intake actor: accepts or rejects each request. Owns the queue limit and the ledger of live requests.

Blocks and the order of service are the scheduler's; output text is the detokenizer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeAlias, assert_never

import msgspec

from cuelight.actors.intake.admission import AdmissionLimits, CompletionRate, check_room
from cuelight.actors.intake.errors import Refused
from cuelight.actors.intake.ledger import Ledger, LiveRequest, RequestStage
from cuelight.actors.intake.parsing import check_stop_tokens, check_tenant, check_token_ids, text_length
from cuelight.kernel import Actor, Context, get_logger
from cuelight.messages.address import Address
from cuelight.messages.client import Accepted, ClientMessage, Rejected
from cuelight.messages.detokenizer import DropStream, GetStreams, Open, Reopened, RequestEnded, RetainStreams
from cuelight.messages.intake import (
    Cancel,
    CapacityChanged,
    DetokenizerStarted,
    Finished,
    IntakeMessage,
    Opened,
    ResendComplete,
    SchedulerStarted,
    SetTenants,
    Streams,
    Submit,
)
from cuelight.messages.observer import Ready
from cuelight.messages.request import FailureCause, FinishReason, Prompt, Refusal, RequestId, Usage
from cuelight.messages.scheduler import Abort, Admit, FailRequest, IntakeStarted, RestoreState, SetPolicy

INLINE_CHARS_MAX: Final = 400
"""Longest text, in characters, that the handler tokenizes itself, in about 0.2 ms; longer text goes to a thread.
Under load, a thread's round trip delays other requests by more than that. The bound is low because a mailbox may
deliver many submissions in one turn of the event loop."""

_log = get_logger("cuelight.intake")


class PromptTokenizer(Protocol):
    """The part of `PromptEncoder` that intake uses. `encode` raises `Refused`; any other error is the tokenizer's."""

    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        """Return the prompt's token ids. Safe to call from two threads at once."""


class _Encoded(msgspec.Struct, frozen=True, tag=True):
    """The worker thread has tokenized a prompt."""

    request_id: RequestId
    token_ids: tuple[int, ...]


class _EncodeFailed(msgspec.Struct, frozen=True, tag=True):
    """The worker thread could not tokenize a prompt."""

    request_id: RequestId
    refusal: Refusal
    reason: str


IntakeInbox: TypeAlias = IntakeMessage | _Encoded | _EncodeFailed
ToScheduler: TypeAlias = Admit | Abort | FailRequest | SetPolicy | IntakeStarted | RestoreState
ToDetokenizer: TypeAlias = Open | DropStream | RetainStreams | RequestEnded | IntakeStarted | Reopened | GetStreams


class Intake(Actor[IntakeInbox]):
    """The actor that accepts, tokenizes and counts requests, and opens their streams before it admits them.

    The client library has parsed prompts and options (`parse_prompt`, `parse_options`). Intake checks the rest, for
    which only it has the data: room in the queue, tenants, vocabulary and lengths.

    A new scheduler and a new detokenizer are restored from the ledger. A new intake starts with an empty ledger and
    accepts no request until it has received the token capacity: clients resubmit theirs once it is `Ready`.
    """

    def __init__(  # many parameters, but each of another type
        self,
        context: Context[IntakeInbox],
        encoder: PromptTokenizer,
        limits: AdmissionLimits,
        scheduler: Address[ToScheduler],
        detokenizer: Address[ToDetokenizer],
        observer: Address[Ready],
    ) -> None:
        self._self = context.ref
        self._clock = context.clock
        self._tenants = limits.tenants
        self._completions = CompletionRate()
        self._rng = context.chance
        self._tokenizing = context.worker("tokenize")
        self._encoder = encoder
        self._limits = limits
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._observer = observer
        self._token_capacity = 0  # 0 until the first `CapacityChanged`
        self._ledger = Ledger()
        self._policy: SetPolicy | None = None
        self._new_scheduler: int | None = None
        """Life of a new scheduler, from its start until the streams' histories arrive."""
        self._restored_scheduler: int | None = None
        """Life of the last scheduler that `RestoreState` was sent to."""

    @property
    def request_count(self) -> int:
        """Number of requests in the ledger."""
        return len(self._ledger)

    def started(self) -> None:
        self._scheduler.tell(IntakeStarted())
        self._detokenizer.tell(IntakeStarted())

    def handle(self, message: IntakeInbox) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel(request_id):
                self._cancel(request_id)
            case _Encoded(request_id, token_ids):
                self._encoded(request_id, token_ids)
            case _EncodeFailed(request_id, refusal, reason):
                self._refuse(request_id, Refused(refusal, reason))
            case Opened(request_id):
                self._opened(request_id)
            case Finished(request_ids):
                self._finished(request_ids)
            case FailRequest():
                self._fail_request(message)
            case SetTenants(names):
                self._tenants = names
            case SetPolicy():
                self._policy = message
                self._scheduler.tell(message)
            case CapacityChanged():
                self._set_capacity(message)
            case ResendComplete() | DetokenizerStarted() | SchedulerStarted() | Streams():
                self._recover(message)
            case _:
                assert_never(message)

    def _recover(self, message: ResendComplete | DetokenizerStarted | SchedulerStarted | Streams) -> None:
        """Restore another actor that has restarted, or complete this actor's own restart."""
        match message:
            case ResendComplete():
                if self._token_capacity:  # otherwise the message was meant for an earlier intake
                    self._detokenizer.tell(RetainStreams(tuple(self._ledger)))
            case DetokenizerStarted(life):
                self._open_again(life)
            case SchedulerStarted(life):
                self._new_scheduler = life
                self._detokenizer.tell(GetStreams(self._self))
            case Streams(histories):
                if self._new_scheduler is not None:
                    self._restore_scheduler(self._new_scheduler, histories)
                    self._new_scheduler = None
            case _:
                assert_never(message)

    def _set_capacity(self, message: CapacityChanged) -> None:
        if message.context_length is not None:
            self._limits = replace(self._limits, context_length=message.context_length)
        is_first, self._token_capacity = not self._token_capacity, message.token_capacity
        if is_first:
            self._observer.tell(Ready(message.token_capacity))

    @property
    def _token_limit(self) -> int:
        return min(self._limits.context_length, self._token_capacity)

    def _submit(self, submit: Submit) -> None:
        request_id = submit.request_id
        if request_id in self._ledger or not self._token_capacity:
            return  # a duplicate, or too early: the client resubmits once intake is `Ready`
        try:
            if not submit.is_accepted:
                check_room(len(self._ledger), 1, self._limits.queue_limit, self._completions)
            check_stop_tokens(submit.sampling, self._limits.vocab_size)
            check_tenant(submit.service.tenant, None if submit.is_accepted else self._tenants)
        except Refused as refused:
            _reject(submit.reply_to, request_id, refused)
            return
        live = LiveRequest(
            submit.reply_to,
            submit.sampling,
            submit.service,
            self._clock.now(),
            submit.sample_of,
            submit.is_accepted,
            submit.output,
        )
        self._ledger[request_id] = live
        first = None if live.sample_of is None else self._ledger.get(live.sample_of)
        if first is not None and first.stage is RequestStage.ENCODING:
            first.samples.append(request_id)
        elif first is not None and first.token_ids:
            self._encoded(request_id, first.token_ids)
        else:
            self._encode(request_id, submit.prompt)

    def _encode(self, request_id: RequestId, prompt: Prompt) -> None:
        work: Callable[[], tuple[int, ...]] = partial(self._encoder.encode, prompt, self._token_limit)
        if text_length(prompt) > INLINE_CHARS_MAX:
            self._tokenizing.submit(
                work, done=partial(_Encoded, request_id), failed=partial(_encode_failed, request_id)
            )
            return
        try:
            token_ids = work()
        except Exception as error:
            failure = _encode_failed(request_id, error)
            self._refuse(request_id, Refused(failure.refusal, failure.reason))
        else:
            self._encoded(request_id, token_ids)

    def _encoded(self, request_id: RequestId, token_ids: tuple[int, ...]) -> None:
        live = self._ledger[request_id]
        try:
            if not live.is_accepted:
                self._limits.check_length(len(token_ids), self._token_capacity)
            check_token_ids(token_ids, self._limits.vocab_size)
        except Refused as refused:
            self._refuse(request_id, refused)
            return
        live.stage = RequestStage.OPENING
        live.token_ids = token_ids
        live.client.tell(Accepted(request_id, len(token_ids)))
        stop, min_tokens = live.sampling.stop, live.sampling.min_tokens
        live.open = Open(request_id, stop, min_tokens, live.client, self._self, live.output)
        self._detokenizer.tell(live.open)
        for sample in live.samples:
            self._encoded(sample, token_ids)

    def _opened(self, request_id: RequestId) -> None:
        live = self._ledger.get(request_id)
        if live is None:
            # The stream was reopened for a new detokenizer just as it ended, or opened by an earlier intake.
            self._detokenizer.tell(DropStream(request_id))
            return
        if live.stage is not RequestStage.OPENING:
            return
        if live.is_aborted:
            live.stage = RequestStage.CLOSING
            ending = live.ending(request_id)
            self._detokenizer.tell(ending)
            prompt_tokens = ending.usage.prompt_tokens
            _log.info("request_finished", request_id=request_id, reason=str(ending.reason), prompt_tokens=prompt_tokens)
            return
        live.stage = RequestStage.ADMITTED
        # Admit only now that the stream is open: the detokenizer ignores tokens without a stream.
        live.admit = Admit(
            request_id,
            live.token_ids,
            self._limits.settled(live.sampling, self._token_limit, self._rng.getrandbits),
            # A request accepted when the capacity was larger keeps its length here; the scheduler fails it.
            max(self._token_limit, len(live.token_ids) + 1),
            self._limits.isolated(live.service),
            live.submitted_at,
            live.sample_of,
            live.output,
        )
        self._scheduler.tell(live.admit)

    def _restore_scheduler(self, life: int, histories: tuple[tuple[RequestId, tuple[int, ...]], ...]) -> None:
        """Send a new scheduler, which has no requests, the ledger and the streams' histories."""
        has_served = self._token_capacity > 0 and self._restored_scheduler not in (None, life)
        self._restored_scheduler = life
        self._scheduler.tell(self._ledger.restore_state(life, self._policy, histories, has_served=has_served))

    def _open_again(self, life: int) -> None:
        """Open all streams again for a new detokenizer, which has none."""
        for live in self._ledger.values():
            if live.open is not None:
                self._detokenizer.tell(live.open)
        self._detokenizer.tell(Reopened(life))
        for request_id, live in self._ledger.items():
            if live.stage is RequestStage.CLOSING:
                self._detokenizer.tell(live.ending(request_id))
        if self._new_scheduler is not None:
            self._detokenizer.tell(GetStreams(self._self))

    def _finished(self, request_ids: tuple[RequestId, ...]) -> None:
        for request_id in request_ids:
            live = self._ledger.get(request_id)
            if live is None:
                continue
            if live.stage in (RequestStage.ENCODING, RequestStage.OPENING):
                # The client resubmitted the request just before its end arrived; close the reopened stream.
                live.is_aborted = True
            else:
                del self._ledger[request_id]
                self._completions.note(1, self._clock.now())

    def _cancel(self, request_id: RequestId) -> None:
        live = self._ledger.get(request_id)
        if live is None:
            self._scheduler.tell(Abort(request_id))  # an earlier intake may have admitted it
        elif not live.is_aborted:
            # A request that is not admitted yet proceeds until its stream is open, and the stream is closed then.
            live.is_aborted = True
            if live.stage is RequestStage.ADMITTED:
                self._scheduler.tell(Abort(request_id))

    def _fail_request(self, message: FailRequest) -> None:
        live = self._ledger.get(message.request_id)
        if live is not None:
            live.is_aborted, live.error = True, message.error
        if live is None or live.stage is RequestStage.ADMITTED:
            self._scheduler.tell(message)
        if live is None:  # the detokenizer may still have a stream from an earlier intake: end it
            failure = FailureCause.ACTOR_CRASHES
            ended = RequestEnded(
                message.request_id, FinishReason.FAILED, Usage(), 0.0, 0, message.error, failure=failure
            )
            self._detokenizer.tell(ended)

    def _refuse(self, request_id: RequestId, refused: Refused) -> None:
        live = self._ledger.pop(request_id)
        _reject(live.client, request_id, refused)
        for sample in live.samples:  # same prompt, same refusal
            self._refuse(sample, refused)


def _encode_failed(request_id: RequestId, error: Exception) -> _EncodeFailed:
    if isinstance(error, Refused):
        return _EncodeFailed(request_id, error.refusal, error.reason)
    _log.error("tokenizer failed", request_id=request_id, error=repr(error))
    return _EncodeFailed(request_id, Refusal.BAD_PROMPT, f"the tokenizer failed on this prompt: {error!r}")


def _reject(client: Address[ClientMessage], request_id: RequestId, refused: Refused) -> None:
    _log.debug("rejected", request_id=request_id, refusal=refused.refusal.value, reason=refused.reason)
    client.tell(Rejected(request_id, refused.refusal, refused.reason, refused.retry_after_seconds))
