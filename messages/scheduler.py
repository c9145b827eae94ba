"""What the scheduler hears: requests from intake, blocks from the cache manager, results from the executor."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.observer import Switched, SwitchFailed
from cuelight.messages.request import FIRST_EXECUTOR, BlockCopies, ExecutorId, HostTier, RequestId, Sampling, Service


class Admit(msgspec.Struct, frozen=True, tag=True):
    """A validated request joins the queue. `sampling.seed` is set; prompt and output together fit `token_limit`.

    Harmless where the request is known already. One that goes on from an earlier time has had `output` tokens so far.

    `submitted_at` is when intake heard of it, in seconds of the system's clock; its deadlines count from there. It has
    the prompt of the request `sample_of`, another sample of which it is to draw.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    sampling: Sampling
    token_limit: int
    service: Service
    submitted_at: float
    sample_of: RequestId | None = None
    output: tuple[int, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request whose client has left, in whatever state it is. Idempotent; unknown ids are ignored."""

    request_id: RequestId


class FailRequest(msgspec.Struct, frozen=True, tag=True):
    """End a request that has brought an actor down, for this reason. Idempotent; unknown ids are ignored."""

    request_id: RequestId
    error: str


class SetPolicy(msgspec.Struct, frozen=True, tag=True):
    """Serve by this policy from now on: "fcfs", "priority", "deadline" or "fair". Not answered; nobody is dropped.

    `aging_seconds` of waiting are worth one level of priority. `weights` are the tenants' shares, above 0; a tenant
    without one has a share of 1.
    """

    name: str
    aging_seconds: float = 10.0
    weights: tuple[tuple[str, float], ...] = ()


class Occurrence(msgspec.Struct, frozen=True):
    """Something that happened to a request, or that kept it waiting from then on; `seconds` after its submission."""

    seconds: float
    what: str
    why: str = ""


class Explanation(msgspec.Struct, frozen=True, tag=True):
    """A request's life so far. `state` is "waiting", "running", a finish reason, or "unknown" for one long over."""

    request_id: RequestId
    state: str
    timeline: tuple[Occurrence, ...]


class Explain(msgspec.Struct, frozen=True, tag=True):
    """What has become of this request, and why does it wait? Answered once: `Explanation`."""

    request_id: RequestId
    reply_to: Address[Explanation]


class Grant(msgspec.Struct, frozen=True):
    """Blocks for one request: ids to append to its block table.

    `cached_tokens` of a newly admitted request need not be computed; `token_capacity` is what its table holds now.
    """

    request_id: RequestId
    block_ids: tuple[int, ...]
    cached_tokens: int
    token_capacity: int


class Granted(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Reserve`: what was granted, in the order asked, and which requests got nothing.

    A refused request is one that this pool could not serve now; admissions behind a refusal were not tried. A deferred
    one shares a prefix that a running request is computing, and had better wait for that. The next step makes `copies`
    first, in order. `round` is the question's.
    """

    round: int
    grants: tuple[Grant, ...]
    refused: tuple[RequestId, ...]
    deferred: tuple[RequestId, ...] = ()
    copies: tuple[BlockCopies, ...] = ()


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ExecuteStep`: the sampled token of each row that finished its prefill or decoded, in row order.

    `failed` rows sampled nothing usable (NaN logits, for example); the others are sound.
    """

    epoch: int
    step: int
    request_ids: tuple[RequestId, ...]
    token_ids: tuple[int, ...]
    failed: tuple[tuple[RequestId, str], ...] = ()


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """The other answer to `ExecuteStep`: the step raised, and every later step of its epoch is void.

    Its copies and theirs were made nevertheless, unless `contents_lost`: then nobody knows what is in the blocks. Where
    it was `out_of_memory`, a smaller step may do.
    """

    epoch: int
    step: int
    error: str
    contents_lost: bool = False
    out_of_memory: bool = False


class StopMatched(msgspec.Struct, frozen=True, tag=True):
    """A stop string ended a request's text at its `output_tokens`-th token; what was sampled beyond is dropped."""

    request_id: RequestId
    output_tokens: int


class ExecutorLoading(msgspec.Struct, frozen=True, tag=True):
    """This executor has come to this phase of its start (`phase` is for people)."""

    phase: str
    executor_id: ExecutorId = FIRST_EXECUTOR


class ExecutorReady(msgspec.Struct, frozen=True, tag=True):
    """Weights are loaded and the KV pool is allocated: `block_count` blocks of `block_size` tokens.

    `life` tells this executor from those before it, whose blocks and steps are gone with them. `seconds` it took, of
    which the loader's `phases` are a part, by name. `executor_id` tells it from those that may take over.
    """

    block_count: int
    block_size: int
    host: HostTier = HostTier()
    life: int = 0
    seconds: float = 0.0
    executor_id: ExecutorId = FIRST_EXECUTOR
    phases: tuple[tuple[str, float], ...] = ()


class ExecutorFailed(msgspec.Struct, frozen=True, tag=True):
    """This executor cannot load the model."""

    error: str
    executor_id: ExecutorId = FIRST_EXECUTOR


class Switch(msgspec.Struct, frozen=True, tag=True):
    """Another executor is loading `model` and is to take over. Answered: `Switched` or `SwitchFailed`.

    With `recompute`, it does so as soon as it is ready, and computes again what runs. Otherwise what runs then ends on
    the executor before, and whoever comes waits for this one. A request may hold `context_length` tokens there.
    Harmless where it was told already.
    """

    executor_id: ExecutorId
    model: str
    recompute: bool
    context_length: int
    eos_token_ids: tuple[int, ...]
    reply_to: Address[Switched | SwitchFailed]


class CancelSwitch(msgspec.Struct, frozen=True, tag=True):
    """This executor is not to take over any more: `SwitchFailed`. Harmless where it has, or will not."""

    executor_id: ExecutorId


class IntakeStarted(msgspec.Struct, frozen=True, tag=True):
    """Intake is new. Sent to the scheduler and to the detokenizer.

    The scheduler answers `CapacityChanged`, at once or when the executor is ready, and also `SchedulerStarted` while it
    still waits for `RestoreState`. The detokenizer answers `DetokenizerStarted` while it still waits for `Reopened`.
    """


class GetHistories(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer is new. Answered once, to it: `Histories`, of all whose end it has not confirmed."""


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer has ended these requests' streams: nobody listens, and nobody needs their histories any more.

    Where it had no stream to end, `is_ended` is false: then one that lives goes on, and may find a listener yet.
    """

    request_ids: tuple[RequestId, ...]
    is_ended: bool = True


class RestoreState(msgspec.Struct, frozen=True, tag=True):
    """The ledger and the streams, from which a new scheduler begins: all that was admitted and has not finished.

    `histories` are the output tokens that streams have been given, by request. Where intake `has_served`, another
    scheduler was there before.
    """

    life: int
    policy: SetPolicy | None
    admitted: tuple[Admit, ...]
    aborted: tuple[RequestId, ...]
    histories: tuple[tuple[RequestId, tuple[int, ...]], ...]
    has_served: bool = False


SchedulerMessage: TypeAlias = (
    Admit
    | Abort
    | FailRequest
    | SetPolicy
    | Explain
    | Granted
    | StepDone
    | StepFailed
    | StopMatched
    | Closed
    | ExecutorLoading
    | ExecutorReady
    | ExecutorFailed
    | IntakeStarted
    | GetHistories
    | RestoreState
    | Switch
    | CancelSwitch
)
