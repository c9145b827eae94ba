"""Intake: whether a request is served at all. Owns admission and the ledger of live requests.

Knows nothing of blocks, tensors or output text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final, Protocol, TypeAlias, assert_never

import msgspec

from cuelight.actors.intake.departures import DepartureRate
from cuelight.actors.intake.prompts import check_token_ids, parse_prompt, text_length
from cuelight.actors.intake.refusal import Refused
from cuelight.actors.intake.service import check_service
from cuelight.actors.intake.validation import check_sampling
from cuelight.kernel import Actor, Context, get_logger
from cuelight.messages.address import Address
from cuelight.messages.client import Accepted, ClientMessage, Rejected
from cuelight.messages.detokenizer import Open, RequestEnded
from cuelight.messages.intake import Cancel, Finished, IntakeMessage, Opened, Serving, SetTenants, Submit
from cuelight.messages.observer import Ready
from cuelight.messages.request import FinishReason, Prompt, Refusal, RequestId, Sampling, Service, Usage
from cuelight.messages.scheduler import Abort, Admit

INLINE_CHARS_MAX: Final = 400
"""Text up to here is tokenized in the handler: about 0.2 ms, less than a thread's round trip under load costs others.
A mailbox may hand over many submissions in one turn of the loop, so the bound is low."""

_log = get_logger("cuelight.intake")


class Encoder(Protocol):
    """What intake needs of a `PromptEncoder`. `encode` raises `Refused`; anything else is the tokenizer's fault."""

    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        """The prompt's token ids; safe to call on two threads at once."""


@dataclass(frozen=True)
class Limits:
    """`context_length` counts tokens, prompt and output together; `queue_limit` counts live requests.

    `tenants` are those whose requests are accepted; None is any. Isolated tenants share no prefixes.
    """

    vocab_size: int
    context_length: int
    queue_limit: int
    tenants: tuple[str, ...] | None = None
    isolate_tenants: bool = False


class _Encoded(msgspec.Struct, frozen=True, tag=True):
    """A prompt has become tokens."""

    request_id: RequestId
    token_ids: tuple[int, ...]


class _EncodeFailed(msgspec.Struct, frozen=True, tag=True):
    """A prompt cannot become tokens."""

    request_id: RequestId
    refusal: Refusal
    reason: str


IntakeInbox: TypeAlias = IntakeMessage | _Encoded | _EncodeFailed


class _Stage(Enum):
    ENCODING = auto()
    OPENING = auto()
    ADMITTED = auto()


@dataclass(slots=True)
class _Live:
    """A request in the ledger. It stays there until it is refused, or until the scheduler is done with it."""

    client: Address[ClientMessage]
    sampling: Sampling
    service: Service
    submitted_at: float
    stage: _Stage = _Stage.ENCODING
    token_ids: tuple[int, ...] = ()
    cancelled: bool = False
    like: RequestId | None = None
    samples: list[RequestId] = field(default_factory=list)
    """Other requests with the same prompt, which wait until it has become tokens."""


class Intake(Actor[IntakeInbox]):
    """Validates, tokenizes and counts requests; opens their streams before the scheduler hears of them."""

    def __init__(  # whom it knows and what it owns, each of another type
        self,
        context: Context[IntakeInbox],
        encoder: Encoder,
        limits: Limits,
        scheduler: Address[Admit | Abort],
        detokenizer: Address[Open | RequestEnded],
        observer: Address[Ready],
    ) -> None:
        self._self = context.ref
        self._clock = context.clock
        self._tenants = limits.tenants
        self._leaving = DepartureRate()
        self._chance = context.chance
        self._tokenizing = context.worker("tokenize")
        self._encoder = encoder
        self._limits = limits
        self._scheduler = scheduler
        self._detokenizer = detokenizer
        self._observer = observer
        self._token_capacity = 0  # until the executor serves
        self._ledger: dict[RequestId, _Live] = {}

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
            case SetTenants(names):
                self._tenants = names
            case Finished(request_ids):
                self._leaving.note(len(request_ids), self._clock.now())
                for request_id in request_ids:
                    live = self._ledger.pop(request_id, None)
                    assert live is not None and live.stage is _Stage.ADMITTED, f"{request_id} finished unadmitted"
            case Serving(token_capacity):
                self._token_capacity = token_capacity
                self._observer.tell(Ready(token_capacity))
            case _:
                assert_never(message)

    @property
    def _token_limit(self) -> int:
        return min(self._limits.context_length, self._token_capacity)

    def _submit(self, submit: Submit) -> None:
        request_id = submit.request_id
        assert request_id not in self._ledger, f"request {request_id} is submitted twice"
        try:
            self._check_room()
            if isinstance(submit.prompt, tuple):
                self._check_length(len(submit.prompt))  # before millions of ids are looked at one by one
            prompt = parse_prompt(submit.prompt)
            sampling = check_sampling(submit.sampling, self._limits.vocab_size)
            service = check_service(submit.service, self._tenants)
        except Refused as refused:
            _reject(submit.reply_to, request_id, refused)
            return
        live = _Live(submit.reply_to, sampling, service, self._clock.now(), like=submit.like)
        self._ledger[request_id] = live
        first = None if live.like is None else self._ledger.get(live.like)
        if first is not None and first.stage is _Stage.ENCODING:
            first.samples.append(request_id)
        elif first is not None and first.token_ids:
            self._encoded(request_id, first.token_ids)
        else:
            self._encode(request_id, prompt)

    def _check_room(self) -> None:
        if not self._token_capacity:
            raise Refused(Refusal.QUEUE_FULL, "the engine is still starting")
        if len(self._ledger) >= self._limits.queue_limit:
            reason = f"{len(self._ledger)} requests are live, and the queue limit is {self._limits.queue_limit}"
            excess = len(self._ledger) - self._limits.queue_limit + 1
            raise Refused(Refusal.QUEUE_FULL, reason, self._leaving.seconds_for(excess))

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
            self._check_length(len(token_ids))
            check_token_ids(token_ids, self._limits.vocab_size)
        except Refused as refused:
            self._refuse(request_id, refused)
            return
        live.stage = _Stage.OPENING
        live.token_ids = token_ids
        live.client.tell(Accepted(request_id, len(token_ids)))
        sampling = live.sampling
        self._detokenizer.tell(
            Open(request_id, sampling.stop, sampling.min_tokens, client=live.client, reply_to=self._self)
        )
        for sample in live.samples:
            self._encoded(sample, token_ids)

    def _check_length(self, prompt_tokens: int) -> None:
        """Rule 10: what can never fit, with one token of output, is refused here and does not wait."""
        if prompt_tokens == 0:
            raise Refused(Refusal.EMPTY_PROMPT, "the prompt has no tokens")
        for limit, whose in (
            (self._limits.context_length, "the model's context"),
            (self._token_capacity, "the engine's whole block pool"),
        ):
            if prompt_tokens + 1 > limit:
                reason = f"the prompt has {prompt_tokens} tokens and needs one more for output; {whose} holds {limit}"
                raise Refused(Refusal.PROMPT_TOO_LONG, reason)

    def _opened(self, request_id: RequestId) -> None:
        live = self._ledger[request_id]
        assert live.stage is _Stage.OPENING, f"request {request_id} was opened twice"
        if live.cancelled:
            del self._ledger[request_id]
            usage = Usage(prompt_tokens=len(live.token_ids))
            self._detokenizer.tell(RequestEnded(request_id, FinishReason.CANCELLED, usage, 0.0, 0))
            _log.info("request_finished", request_id=request_id, reason="cancelled", prompt_tokens=usage.prompt_tokens)
            return
        live.stage = _Stage.ADMITTED
        # Streams never wait for tokens that the detokenizer does not expect: it has opened this one.
        self._scheduler.tell(
            Admit(
                request_id,
                live.token_ids,
                self._settled(live.sampling),
                self._token_limit,
                self._isolated(live.service),
                live.submitted_at,
                live.like,
            )
        )
        live.token_ids = ()  # the scheduler's from here on

    def _isolated(self, service: Service) -> Service:
        """The same service with a salt that no other tenant can have, where tenants are isolated."""
        if not self._limits.isolate_tenants:
            return service
        salt = f"{len(service.tenant)} {service.tenant} {service.cache_salt}"
        return msgspec.structs.replace(service, cache_salt=salt)

    def _settled(self, sampling: Sampling) -> Sampling:
        """The same sampling with a seed, and without numbers beyond what they can mean here."""
        max_tokens = min(sampling.max_tokens, self._token_limit)
        return msgspec.structs.replace(
            sampling,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            top_k=sampling.top_k if sampling.top_k < self._limits.vocab_size else 0,
            seed=self._chance.getrandbits(64) if sampling.seed is None else sampling.seed,
        )

    def _cancel(self, request_id: RequestId) -> None:
        live = self._ledger.get(request_id)
        if live is None or live.cancelled:
            return
        # One that is not admitted yet goes on to the next message about it: its stream is then closed in order.
        live.cancelled = True
        if live.stage is _Stage.ADMITTED:
            self._scheduler.tell(Abort(request_id))

    def _refuse(self, request_id: RequestId, refused: Refused) -> None:
        live = self._ledger.pop(request_id)
        _reject(live.client, request_id, refused)
        for sample in live.samples:  # they have the same prompt
            self._refuse(sample, refused)


def _encode_failed(request_id: RequestId, error: Exception) -> _EncodeFailed:
    if isinstance(error, Refused):
        return _EncodeFailed(request_id, error.refusal, error.reason)
    _log.error("tokenizer failed", request_id=request_id, error=repr(error))
    return _EncodeFailed(request_id, Refusal.BAD_PROMPT, f"the tokenizer failed on this prompt: {error!r}")


def _reject(client: Address[ClientMessage], request_id: RequestId, refused: Refused) -> None:
    _log.debug("rejected", request_id=request_id, refusal=refused.refusal.value, reason=refused.reason)
    client.tell(Rejected(request_id, refused.refusal, refused.reason, refused.retry_after_seconds))
