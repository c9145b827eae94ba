"""Messages to the scheduler: requests from intake, blocks from the cache manager, results from the executor."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cuelight.messages.address import Address
from cuelight.messages.observer import Switched, SwitchFailed
from cuelight.messages.request import FIRST_EXECUTOR, BlockCopies, ExecutorId, HostTier, RequestId, Sampling, Service


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Queue a validated request. `sampling.seed` is set; prompt and output together hold `token_limit` tokens at most.

    A known request gets its output or its end sent again. A resumed request has its earlier `output` tokens.

    `submitted_at` is when intake received the request, in seconds of the system's clock; its deadlines count from then.
    With `sample_of`, the request is another sample of that request's prompt.
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
    """End a request whose client has left, waiting or running. Idempotent; unknown ids are ignored."""

    request_id: RequestId


class FailRequest(msgspec.Struct, frozen=True, tag=True):
    """End a request that crashed an actor, with this error. Idempotent; unknown ids are ignored."""

    request_id: RequestId
    error: str


class SetPolicy(msgspec.Struct, frozen=True, tag=True):
    """Replace the policy: "fcfs", "priority", "deadline" or "fair". Not answered; no request is dropped.

    `aging_seconds` of waiting equal one level of priority. `weights` are the tenants' shares, above 0; a tenant that is
    not among them has a share of 1.
    """

    name: str
    aging_seconds: float = 10.0
    weights: tuple[tuple[str, float], ...] = ()


class Occurrence(msgspec.Struct, frozen=True):
    """An event of a request, or an obstacle that it waits for from then on; `seconds` after its submission."""

    seconds: float
    what: str
    why: str = ""


class Explanation(msgspec.Struct, frozen=True, tag=True):
    """A request's timeline. `state` is "waiting", "running", a finish reason, or "unknown" if no longer stored."""

    request_id: RequestId
    state: str
    timeline: tuple[Occurrence, ...]


class Explain(msgspec.Struct, frozen=True, tag=True):
    """Return the state and the timeline of a request. Answered once: `Explanation`."""

    request_id: RequestId
    reply_to: Address[Explanation]


class Grant(msgspec.Struct, frozen=True):
    """Blocks for one request: ids to append to its block table.

    `cached_tokens` of a newly admitted request need no computing; `token_capacity` is the capacity of its block table.
    """

    request_id: RequestId
    block_ids: tuple[int, ...]
    cached_tokens: int
    token_capacity: int


class Granted(msgspec.Struct, frozen=True, tag=True):
    """The answer to the `Reserve` of the same `round`: grants in the order requested, and the requests without one.

    The free blocks do not suffice for a `refused` request; admissions after a refusal were not tried. A `deferred`
    request shares a prefix that a running request is computing, and should wait for it. The next step makes `copies`
    first, in order.
    """

    round: int
    grants: tuple[Grant, ...]
    refused: tuple[RequestId, ...]
    deferred: tuple[RequestId, ...] = ()
    copies: tuple[BlockCopies, ...] = ()


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ExecuteStep`: the sampled token of each row that finished its prefill or decoded, in row order.

    `failed` rows have no usable sample (NaN logits, for example); the other rows are valid.
    """

    epoch: int
    step: int
    request_ids: tuple[RequestId, ...]
    token_ids: tuple[int, ...]
    failed: tuple[tuple[RequestId, str], ...] = ()


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    """The other answer to `ExecuteStep`: the step raised, and every later step of its epoch is void.

    The copies of all these steps were still made, unless `contents_lost`: then the contents of the blocks are unknown.
    If `out_of_memory`, a smaller step may succeed.
    """

    epoch: int
    step: int
    error: str
    contents_lost: bool = False
    out_of_memory: bool = False


class StopMatched(msgspec.Struct, frozen=True, tag=True):
    """A stop string ended a request's text at its `output_tokens`-th token; output beyond is to be dropped."""

    request_id: RequestId
    output_tokens: int


class ExecutorLoading(msgspec.Struct, frozen=True, tag=True):
    """This executor has reached a phase of its start, described by `phase`."""

    phase: str
    executor_id: ExecutorId = FIRST_EXECUTOR


class ExecutorReady(msgspec.Struct, frozen=True, tag=True):
    """Weights are loaded and the KV pool is allocated: `block_count` blocks of `block_size` tokens.

    `life` distinguishes the executor from those before a restart, whose blocks and steps are lost; `executor_id` from
    those of other reloads. `seconds` is its load time, of which the loader's named `phases` are parts.
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
    """Switch to another executor, which is loading `model`. Answered: `Switched` or `SwitchFailed`.

    With `recompute`, the executor takes over as soon as it is ready and recomputes the running requests. Otherwise,
    requests that have begun by then end on the executor before, and the others wait for this one. A request may hold
    `context_length` tokens there. A repeated `Switch` has no effect.
    """

    executor_id: ExecutorId
    model: str
    recompute: bool
    context_length: int
    eos_token_ids: tuple[int, ...]
    reply_to: Address[Switched | SwitchFailed]


class CancelSwitch(msgspec.Struct, frozen=True, tag=True):
    """Cancel the switch to this executor: `SwitchFailed`. Ignored if no such switch is in progress."""

    executor_id: ExecutorId


class IntakeStarted(msgspec.Struct, frozen=True, tag=True):
    """Intake is new. Sent to the scheduler and to the detokenizer.

    The scheduler answers `CapacityChanged`, at once or when the executor is ready, and also `SchedulerStarted` while it
    still waits for `RestoreState`. The detokenizer answers `DetokenizerStarted` while it still waits for `Reopened`.
    """


class GetHistories(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer is new. Answered to it once: `Histories` of live requests and unconfirmed ends."""


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer has ended these requests' streams: their histories are no longer needed.

    If it had no stream to end, `is_ended` is false: a live request continues, as its stream may be opened yet.
    """

    request_ids: tuple[RequestId, ...]
    is_ended: bool = True


class RestoreState(msgspec.Struct, frozen=True, tag=True):
    """The state that a new scheduler begins with: all requests that were admitted and have not finished.

    `histories` are the output tokens that the streams have received, by request. If intake `has_served`, an earlier
    scheduler was lost.
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
