"""The intake actor, driven message by message with recorders for addresses and a worker run on demand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec
import pytest
from support import Recorder, VirtualClock

from cuelight.actors.intake.actor import INLINE_CHARS_MAX, Intake, IntakeInbox
from cuelight.actors.intake.admission import AdmissionLimits
from cuelight.actors.intake.errors import Refused
from cuelight.kernel import Context
from cuelight.messages.client import Accepted, Rejected
from cuelight.messages.detokenizer import DropStream, GetStreams, Open, Reopened, RequestEnded, RetainStreams
from cuelight.messages.intake import (
    Cancel,
    CapacityChanged,
    DetokenizerStarted,
    Finished,
    Opened,
    ResendComplete,
    SchedulerStarted,
    SetTenants,
    Streams,
    Submit,
)
from cuelight.messages.observer import Ready
from cuelight.messages.request import (
    Conversation,
    FailureCause,
    FinishReason,
    Prompt,
    Refusal,
    RequestId,
    Sampling,
    Service,
    Turn,
    Usage,
)
from cuelight.messages.scheduler import Abort, Admit, FailRequest, IntakeStarted, RestoreState, SetPolicy

LIMITS = AdmissionLimits(vocab_size=128, context_length=1000, queue_limit=3)
LONG = "x" * (INLINE_CHARS_MAX + 1)


class Encoder:
    """A tokenizer with one token a character, which raises or refuses some prompts."""

    def __init__(self) -> None:
        self.limits: list[int] = []

    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        self.limits.append(token_limit)
        if isinstance(prompt, str):
            if "broken" in prompt:
                raise RuntimeError("tokenizer bug")
            return tuple(map(ord, prompt))
        if isinstance(prompt, Conversation):
            raise Refused(Refusal.BAD_MESSAGE, "no template")
        return cast(tuple[int, ...], prompt)


@dataclass
class Worker:
    """Keeps its work until `run()`."""

    post: Callable[[IntakeInbox], None]
    jobs: list[Callable[[], IntakeInbox]] = field(default_factory=list)

    def submit(
        self,
        work: Callable[[], tuple[int, ...]],
        done: Callable[[tuple[int, ...]], IntakeInbox],
        failed: Callable[[Exception], IntakeInbox],
    ) -> None:
        def job() -> IntakeInbox:
            try:
                return done(work())
            except Exception as error:
                return failed(error)

        self.jobs.append(job)

    def run(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            self.post(job())


class Surroundings:
    """The part of a context that intake uses."""

    def __init__(self, seed: int = 1) -> None:
        self.ref = Recorder[object]()
        self.chance = random.Random(seed)
        self.clock = VirtualClock()
        self.tokenizing = Worker(self.ref.tell)

    def worker(self, name: str) -> Worker:
        assert name == "tokenize"
        return self.tokenizing


class Stage:
    """An intake with recorders for its peers, serving unless `token_capacity` is 0."""

    def __init__(self, *, token_capacity: int = 500, limits: AdmissionLimits = LIMITS, seed: int = 1) -> None:
        self.surroundings = Surroundings(seed)
        self.encoder = Encoder()
        self.scheduler, self.detokenizer, self.observer = Recorder[object](), Recorder[object](), Recorder[object]()
        context = cast(Context[IntakeInbox], self.surroundings)
        self.actor = Intake(context, self.encoder, limits, self.scheduler, self.detokenizer, self.observer)
        self.surroundings.tokenizing.post = self.actor.handle
        if token_capacity:
            self.actor.handle(CapacityChanged(token_capacity))
            self.observer.take()

    def submit(
        self,
        request_id: int,
        prompt: Prompt = "hi",
        sampling: Sampling | None = None,
        service: Service = Service(),  # noqa: B008  # frozen
        **again: object,
    ) -> Recorder[object]:
        client = Recorder[object]()
        submit = Submit(RequestId(request_id), prompt, sampling or Sampling(seed=5), client, service)
        self.actor.handle(msgspec.structs.replace(submit, **again))
        return client

    def opened(self, request_id: int) -> None:
        self.actor.handle(Opened(RequestId(request_id)))

    def cancel(self, request_id: int) -> None:
        self.actor.handle(Cancel(RequestId(request_id)))

    def finish(self, *request_ids: int) -> None:
        self.actor.handle(Finished(tuple(map(RequestId, request_ids))))

    def tokenize(self) -> None:
        self.surroundings.tokenizing.run()


@pytest.fixture
def stage() -> Stage:
    return Stage()


def refusal_of(client: Recorder[object]) -> Refusal:
    (rejected,) = client.take()
    assert isinstance(rejected, Rejected)
    assert rejected.reason
    return rejected.refusal


def test_request_is_accepted_then_opened_then_admitted(stage: Stage) -> None:
    sampling = Sampling(stop=("a", "b"), min_tokens=2, seed=9)
    client = stage.submit(1, "hey", sampling)
    assert client.take() == [Accepted(RequestId(1), 3)]
    opening = Open(RequestId(1), ("a", "b"), 2, client, stage.surroundings.ref)
    assert stage.detokenizer.take() == [opening]
    assert stage.scheduler.take() == [], "no token can come before the stream is open"
    stage.opened(1)
    assert stage.scheduler.take() == [
        Admit(RequestId(1), (104, 101, 121), sampling, token_limit=500, service=Service(), submitted_at=0.0)
    ]
    assert stage.detokenizer.take() == client.take() == []


def test_token_ids_are_taken_unchanged(stage: Stage) -> None:
    stage.submit(1, (5, 6))
    stage.opened(1)
    (admit,) = stage.scheduler.take()
    assert isinstance(admit, Admit)
    assert admit.token_ids == (5, 6)


def test_long_text_is_tokenized_by_the_worker(stage: Stage) -> None:
    long, short = stage.submit(1, "x" * 450), stage.submit(2, "hi")
    assert long.take() == [] == stage.encoder.limits[1:]
    assert short.take() == [Accepted(RequestId(2), 2)]
    stage.tokenize()
    assert long.take() == [Accepted(RequestId(1), 450)]
    assert stage.encoder.limits == [500, 500], "the smaller of context and pool"


def test_observer_is_sent_ready_when_requests_are_served() -> None:
    stage = Stage(token_capacity=0)
    assert stage.submit(1).take() == [], "its client sends it again"
    for token_capacity in (64, 32):
        stage.actor.handle(CapacityChanged(token_capacity))
    assert stage.observer.take() == [Ready(64)]
    assert stage.submit(1).take() == [Accepted(RequestId(1), 2)]
    (rejected,) = stage.submit(2, "x" * 40).take()
    assert isinstance(rejected, Rejected), "another executor may have less room"


def test_queue_limit_counts_every_live_request(stage: Stage) -> None:
    stage.submit(1, LONG)
    stage.submit(2)
    stage.submit(3)
    stage.opened(3)
    assert refusal_of(stage.submit(4)) is Refusal.QUEUE_FULL
    stage.finish(3)
    assert stage.submit(5).take() == [Accepted(RequestId(5), 2)]


def retry_after(stage: Stage, request_id: int) -> float | None:
    (rejected,) = stage.submit(request_id).take()
    assert isinstance(rejected, Rejected) and rejected.refusal is Refusal.QUEUE_FULL
    return rejected.retry_after_seconds


def test_full_queue_has_a_retry_time_once_requests_have_finished(stage: Stage) -> None:
    """A request finishes every two seconds, so there is room for one more in two."""
    for request_id in range(3):
        stage.submit(request_id)
        stage.opened(request_id)
    assert retry_after(stage, 100) is None
    for request_id in range(5):
        stage.surroundings.clock.seconds += 2.0
        stage.finish(request_id)
        stage.submit(request_id + 3)
        stage.opened(request_id + 3)
        assert retry_after(stage, 101 + request_id) == (pytest.approx(2.0) if request_id else None)


def test_service_reaches_the_scheduler_with_the_time_of_submission(stage: Stage) -> None:
    stage.surroundings.clock.seconds = 7.0
    service = Service("a", 3, 1.5, 20.0)
    stage.submit(1, LONG, service=service)
    stage.surroundings.clock.seconds = 9.0
    stage.tokenize()
    stage.opened(1)
    (admit,) = stage.scheduler.take()
    assert isinstance(admit, Admit)
    assert (admit.service, admit.submitted_at) == (service, 7.0), "tokenizing counts against a deadline"


def test_tenants_are_replaced_while_their_requests_live() -> None:
    stage = Stage(limits=replace(LIMITS, tenants=("a", "b")))
    assert refusal_of(stage.submit(1)) is Refusal.UNKNOWN_TENANT
    stage.submit(2, LONG, service=Service("b"))
    stage.actor.handle(SetTenants(("a",)))
    assert refusal_of(stage.submit(3, service=Service("b"))) is Refusal.UNKNOWN_TENANT
    stage.tokenize()
    stage.opened(2)
    assert len(stage.scheduler.take()) == 1, "accepted requests are kept"
    stage.actor.handle(SetTenants(None))
    assert stage.submit(4, service=Service("anybody")).take() == [Accepted(RequestId(4), 2)]


def test_refused_requests_do_not_count(stage: Stage) -> None:
    for request_id in range(10):
        assert refusal_of(stage.submit(request_id, "broken")) is Refusal.BAD_PROMPT
        assert refusal_of(stage.submit(request_id, "hi", Sampling(stop_token_ids=(128,)))) is Refusal.TOKEN_OUT_OF_RANGE
    client = stage.submit(11, "broken" + LONG)
    stage.tokenize()
    assert refusal_of(client) is Refusal.BAD_PROMPT
    assert stage.submit(12).take() == [Accepted(RequestId(12), 2)]


@pytest.mark.parametrize(
    ("prompt", "sampling", "refusal"),
    [
        ("", Sampling(), Refusal.EMPTY_PROMPT),
        ((), Sampling(), Refusal.EMPTY_PROMPT),
        ((0, 128), Sampling(), Refusal.TOKEN_OUT_OF_RANGE),
        ("é", Sampling(), Refusal.TOKEN_OUT_OF_RANGE),
        (Conversation((Turn("user", "x"),)), Sampling(), Refusal.BAD_MESSAGE),
        ("hi", Sampling(stop_token_ids=(128,)), Refusal.TOKEN_OUT_OF_RANGE),
    ],
)
def test_invalid_requests_are_refused(stage: Stage, prompt: Prompt, sampling: Sampling, refusal: Refusal) -> None:
    assert refusal_of(stage.submit(1, prompt, sampling)) is refusal
    assert stage.detokenizer.take() == stage.scheduler.take() == []


@pytest.mark.parametrize(
    ("token_capacity", "length", "words"),
    [
        (100, 99, None),
        (100, 100, "the prompt has 100 tokens and needs one more for output; the engine's whole block pool holds 100"),
        (5000, 999, None),
        (5000, 1000, "the model's context holds 1000"),
        (500, 1000, "the model's context holds 1000"),
    ],
)
def test_rule_reject_impossible_requests_that_never_fit_are_refused(
    token_capacity: int, length: int, words: str | None
) -> None:
    stage = Stage(token_capacity=token_capacity)
    (answer,) = stage.submit(1, (1,) * length).take()
    if words is None:
        assert answer == Accepted(RequestId(1), length)
    else:
        assert isinstance(answer, Rejected)
        assert answer.refusal is Refusal.PROMPT_TOO_LONG
        assert words in answer.reason


def test_far_too_many_token_ids_are_refused_before_validation() -> None:
    class Untouched(tuple):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[object]:
            raise AssertionError("the ids were read")

    (answer,) = Stage().submit(1, Untouched((1,) * 1000)).take()
    assert isinstance(answer, Rejected)
    assert answer.refusal is Refusal.PROMPT_TOO_LONG


def admitted(stage: Stage, request_id: int, sampling: Sampling) -> Sampling:
    stage.submit(request_id, "hi", sampling)
    stage.opened(request_id)
    (admit,) = stage.scheduler.take()
    assert isinstance(admit, Admit)
    return admit.sampling


def test_missing_seed_is_drawn() -> None:
    seeds = {seed: [admitted(Stage(seed=seed), 1, Sampling()).seed for _ in range(2)] for seed in (1, 2)}
    assert seeds[1][0] == seeds[1][1] == random.Random(1).getrandbits(64)
    assert seeds[1] != seeds[2]
    assert admitted(Stage(), 1, Sampling(seed=0)).seed == 0


def test_unbounded_numbers_are_clamped(stage: Stage) -> None:
    sampling = admitted(stage, 1, Sampling(max_tokens=2**62, min_tokens=2**61, top_k=128, seed=3))
    assert sampling == Sampling(max_tokens=500, min_tokens=500, top_k=0, seed=3)
    assert admitted(stage, 2, Sampling(top_k=127)).top_k == 127


def test_rule_abort_anywhere_cancel_while_tokenizing(stage: Stage) -> None:
    client = stage.submit(1, "x" * 450)
    stage.cancel(1)
    stage.tokenize()
    assert client.take() == [Accepted(RequestId(1), 450)]
    assert len(stage.detokenizer.take()) == 1
    stage.opened(1)
    assert stage.detokenizer.take() == [ended(1, 450)]
    assert stage.scheduler.take() == []


def test_rule_abort_anywhere_cancel_while_tokenizing_a_refused_prompt(stage: Stage) -> None:
    client = stage.submit(1, "broken" + LONG)
    stage.cancel(1)
    stage.tokenize()
    assert refusal_of(client) is Refusal.BAD_PROMPT
    stage.cancel(1)
    assert stage.detokenizer.take() == []
    assert stage.actor.request_count == 0


def test_rule_abort_anywhere_cancel_while_opening_frees_the_place(stage: Stage) -> None:
    for request_id in range(10):
        stage.submit(request_id)
        stage.cancel(request_id)
        stage.cancel(request_id)
        stage.detokenizer.take()
        stage.opened(request_id)
        assert stage.detokenizer.take() == [ended(request_id, 2)]
        stage.finish(request_id)
    assert stage.scheduler.take() == []
    assert stage.actor.request_count == 0


def test_rule_abort_anywhere_cancel_when_admitted_aborts_once_and_keeps_the_place(stage: Stage) -> None:
    for request_id in (1, 2, 3):
        stage.submit(request_id)
        stage.opened(request_id)
    stage.scheduler.take()
    stage.cancel(1)
    stage.cancel(1)
    assert stage.scheduler.take() == [Abort(RequestId(1))]
    assert refusal_of(stage.submit(4)) is Refusal.QUEUE_FULL
    stage.finish(1, 2)
    assert stage.submit(4).take() == [Accepted(RequestId(4), 2)]


def test_rule_abort_anywhere_cancel_of_an_unknown_request_is_sent_to_the_scheduler(stage: Stage) -> None:
    """The scheduler may have the request from an earlier intake, and ignores ended ones."""
    stage.cancel(9)
    assert stage.scheduler.take() == [Abort(RequestId(9))]


def test_repeated_messages_are_ignored(stage: Stage) -> None:
    stage.submit(1)
    assert stage.submit(1).take() == []
    stage.opened(1)
    stage.opened(1)
    assert stage.submit(1).take() == []
    stage.finish(1)
    stage.finish(1, 7)
    assert len(stage.detokenizer.take()) == len(stage.scheduler.take()) == 1


def test_new_intake_requests_the_state_and_starts_empty() -> None:
    stage = Stage(token_capacity=0)
    stage.actor.started()
    assert stage.scheduler.take() == [IntakeStarted()]
    assert stage.detokenizer.take() == [IntakeStarted()]
    stage.actor.handle(ResendComplete())
    assert stage.detokenizer.take() == [], "sent to an earlier intake"
    stage.actor.handle(CapacityChanged(500))
    stage.actor.handle(ResendComplete())
    assert stage.detokenizer.take() == [RetainStreams(())]
    stage.opened(8)
    assert stage.detokenizer.take() == [DropStream(RequestId(8))], "its client sends it again, if it still exists"


def test_requests_accepted_before_are_not_refused() -> None:
    stage = Stage(token_capacity=20, limits=replace(LIMITS, queue_limit=1, tenants=("a",)))
    stage.submit(1, service=Service("a"), is_accepted=True)
    (accepted,) = stage.submit(2, (1,) * 30, is_accepted=True, service=Service("b"), output=(5, 6)).take()
    assert accepted == Accepted(RequestId(2), 30)
    assert stage.detokenizer.take()[-1].output == (5, 6)  # type: ignore[attr-defined]  # an Open
    stage.opened(2)
    (admit,) = stage.scheduler.take()
    assert isinstance(admit, Admit)
    assert (admit.output, admit.token_limit) == ((5, 6), 31), "the scheduler ends a request that does not fit"
    assert refusal_of(stage.submit(3, service=Service("a"))) is Refusal.QUEUE_FULL


def in_each_stage(stage: Stage) -> tuple[Open, Open, Open]:
    """Leave request 1 encoded, 2 opened, 3 admitted and 4 closed; return the `Open` messages of the last three."""
    stage.submit(1, LONG)
    for request_id in (2, 3, 4):
        stage.submit(request_id)
    stage.cancel(4)
    stage.opened(3)
    stage.opened(4)
    two, three, four = [message for message in stage.detokenizer.take() if isinstance(message, Open)]
    return two, three, four


def test_new_detokenizer_is_sent_every_stream_again() -> None:
    stage = Stage(limits=replace(LIMITS, queue_limit=4))
    two, three, four = in_each_stage(stage)
    stage.actor.handle(DetokenizerStarted(life=77))
    assert stage.detokenizer.take() == [two, three, four, Reopened(77), ended(4, 2)]
    stage.scheduler.take()
    for request_id in (2, 3, 4):
        stage.opened(request_id)
    assert [message.request_id for message in stage.scheduler.take()] == [2]  # type: ignore[attr-defined]  # an Admit
    stage.finish(2, 3, 4)
    stage.tokenize()
    assert stage.actor.request_count == 1


def test_new_scheduler_is_sent_admitted_requests_with_their_histories() -> None:
    stage = Stage(limits=replace(LIMITS, queue_limit=5))
    in_each_stage(stage)
    (admit,) = stage.scheduler.take()
    policy = SetPolicy("fair")
    stage.actor.handle(policy)
    assert stage.scheduler.take() == [policy]
    stage.actor.handle(Streams(()))
    assert stage.scheduler.take() == [], "no scheduler has asked"
    stage.actor.handle(SchedulerStarted(life=8))
    stage.actor.handle(SchedulerStarted(life=9))
    stage.actor.handle(DetokenizerStarted(life=1))
    asked = [message for message in stage.detokenizer.take() if isinstance(message, GetStreams)]
    assert len(asked) == 3, "a detokenizer that has died does not answer"
    stage.cancel(3)
    stage.scheduler.take()
    histories = ((RequestId(2), ()), (RequestId(3), (7, 8)))
    for _ in range(2):
        stage.actor.handle(Streams(histories))
    remembered = RestoreState(9, policy, (admit,), (RequestId(3),), histories)
    assert stage.scheduler.take() == [remembered], "no scheduler has served yet, as far as intake can tell"
    stage.actor.handle(SchedulerStarted(life=10))
    stage.actor.handle(Streams(histories))
    assert stage.scheduler.take() == [msgspec.structs.replace(remembered, life=10, has_served=True)]


def test_end_during_a_resend_closes_the_stream(stage: Stage) -> None:
    """The client has received its end, so the request is not served again."""
    stage.submit(1, LONG, is_accepted=True)
    stage.submit(2, is_accepted=True)
    stage.finish(1, 2)
    stage.tokenize()
    stage.detokenizer.take()
    stage.opened(1)
    stage.opened(2)
    assert stage.detokenizer.take() == [ended(1, len(LONG)), ended(2, 2)]
    stage.finish(1, 2)
    assert stage.actor.request_count == 0
    assert stage.scheduler.take() == []


def test_request_at_fault_is_ended_in_any_stage() -> None:
    stage = Stage(limits=replace(LIMITS, queue_limit=4))
    in_each_stage(stage)
    stage.scheduler.take()
    failed = [FailRequest(RequestId(request_id), "crash") for request_id in (1, 2, 3, 4, 9)]
    for each in failed:
        stage.actor.handle(each)
    assert stage.scheduler.take() == [failed[2], failed[4]]
    assert stage.detokenizer.take() == [ended(9, 0, "crash")]
    stage.tokenize()
    stage.detokenizer.take()
    stage.opened(1)
    stage.opened(2)
    endings = stage.detokenizer.take()
    assert endings == [ended(1, len(LONG), "crash"), ended(2, 2, "crash")]
    stage.finish(1, 2, 3, 4)
    assert stage.actor.request_count == 0


def ended(request_id: int, prompt_tokens: int, error: str = "") -> RequestEnded:
    usage = Usage(prompt_tokens=prompt_tokens)
    reason = FinishReason.FAILED if error else FinishReason.CANCELLED
    failure = FailureCause.ACTOR_CRASHES if error else None
    return RequestEnded(RequestId(request_id), reason, usage, 0.0, 0, error, failure=failure)
