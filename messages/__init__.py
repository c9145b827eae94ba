"""The protocols of the five actors: one module per receiver, one union per protocol, and the glossary.

Messages are frozen and inert; sending one never waits. A message that expects an answer carries `reply_to`.

```
client ──Submit, Cancel──▶ intake ──Open──▶ detokenizer ──Chunk, End──▶ client
                             │ ▲──Opened,──┘   ▲   │
                        Admit│    Finished     │   │StopMatched,
                        Abort▼     TokensReady,│   ▼Closed
                           scheduler ──────────┴─ RequestEnded
              Reserve, Release│ ▲Granted   │ExecuteStep ▲ StepDone, StepFailed
                              ▼ │          ▼            │
                        cache manager     executor ─────┘
```

A new actor asks the others for the state that it needs, at the start as after a crash:

```
intake ──IntakeStarted──▶ scheduler ──CapacityChanged──▶ intake ──Ready──▶ client ──Submit, …, ResendComplete──▶ intake
scheduler ──SchedulerStarted──▶ intake ──GetStreams──▶ detokenizer ──Streams──▶ intake ──RestoreState──▶ scheduler
detokenizer ──DetokenizerStarted──▶ intake ──Open, …, Reopened──▶ detokenizer ──GetHistories──▶ scheduler
          scheduler ──Histories──▶ detokenizer
scheduler ──GetExecutorState──▶ executor ──ExecutorReady──▶ scheduler ──Reset──▶ cache manager
          scheduler ──CapacityChanged──▶ intake
```

Glossary, one word for each thing:

request         one prompt and its output, from `Submit` to `End`
prompt, output  the tokens that a client sent; the tokens sampled after them
sample          one of several outputs of the same prompt (`sample_of` names the request whose prompt it has)
history         the output tokens of a request so far
block           `block_size` token slots of the KV pool; block 0, the null block, holds padding
slot            the K/V of one token in every layer
block table     the block ids of one request, in order
prefix          full blocks of computed tokens that later requests with the same tokens and salt reuse
salt            bytes that separate the prefixes of tenants; part of the hash of a request's first block
fork            a copy of a half-full block for another sample of the same prompt
host memory     where blocks that leave the pool are saved, and from which they are loaded
step            one forward pass over the chunks of many rows
row             a request in the executor's batch
chunk           the tokens of one row that one step computes (`RowChunk`); toward a client, new output (`Chunk`)
prefill         computing known tokens: of the prompt, or of a preempted request's history
decode          computing the one token that the step before sampled
token budget    tokens that one step may compute
admission       giving a waiting request its first blocks
preemption      taking the blocks of a running request, which waits again and is recomputed
in flight       sent to the executor and not yet answered
tenant          whose share a request counts against
fault           what a failed step or a dead executor is attributed to: one request, or an event outside the engine

Counters that tell one thing from an earlier one of its kind:

life            of an actor, drawn at its start: an answer to an earlier life is ignored
epoch           steps between two failures of the executor, counted by the scheduler; a new one starts with no rows
step            counted by the scheduler within its life
round           one `Reserve` and its `Granted`
incarnation     of a request: how often it lost its blocks
executor id     of an executor, counted by reloads: the one that serves, or the one that takes over
memory          of host memory, drawn when it is allocated: blocks saved there survive the executor's death

Names changed since the first decision records were written:

Keep → RetainStreams             Recall → GetHistories             Serving → CapacityChanged
Abandon → DropStream             Remembered → RestoreState         Report → GetExecutorState
TellStreams → GetStreams         Condemn → FailRequest             Part → ActorSpec
AllSent → ResendComplete         CallOff → CancelSwitch            Fate → RestartPolicy
Chunk (executor) → RowChunk      Copying → CopyKind                Address (kernel) → Recipient
Tracked → Request                Workload → SchedulerState         Door → AdmissionGate
Flights → InFlightSteps          NextStep → StepLoop               Rounds → AdmissionPlanner
Succession → ExecutorManager     Switching → ExecutorSwitch        Deferred → PrefixWaiters
Reservation → BlockRequests      Allowance → AdaptiveTokenBudget   Patience → Watchdog
Chronicle → Timeline             Endings → UnconfirmedEnds         Neighbours → Peers
Ensemble → EngineParts           Submissions → RequestRouter       Board → StatusBoard
Record → RotatingJournal         Past → RestoredState              Lead → ActiveExecutor
"""
