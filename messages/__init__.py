"""The protocols of the cast: one module per receiver, one union per protocol.

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

Whoever is new asks its neighbours, at the start as after a crash:

```
intake ──IntakeStarted──▶ scheduler ──Serving──▶ intake ──Ready──▶ client ──Submit, …, AllSent──▶ intake
scheduler ──SchedulerStarted──▶ intake ──TellStreams──▶ detokenizer ──Streams──▶ intake ──Remembered──▶ scheduler
detokenizer ──DetokenizerStarted──▶ intake ──Open, …, Reopened──▶ detokenizer ──Recall──▶ scheduler ──Histories──▶
executor ──ExecutorReady──▶ scheduler ──Reset──▶ cache manager, Serving──▶ intake
```

Glossary. *Request*: one prompt and its output. *Row*: a request in the device's batch. *Block*: a fixed number of
token slots of the KV pool. *Block table*: the blocks of one request, in order. *Chunk*: the tokens of one row that one
step computes. *Prefill* computes known tokens, *decode* the token sampled by the step before. *Step*: one forward pass
over all chunks. *Epoch*: the steps between two failures of the executor. *Life*: an actor from its making to its
end; what is drawn for each tells answers to one from answers to another.

Messages are frozen and inert; sending one never waits. A message that expects an answer carries `reply_to`.
"""
