"""Measure one tenant's waits for first tokens while another floods the engine, on a virtual clock.

    python -m benchmarks.fairness [--seeds 5] [--requests 100] [--json FILE]

The real scheduler and cache manager serve two tenants. "flood" has 300 requests outstanding at all times; "light" sends
short and medium prompts as a Poisson process. The yardstick is the light tenant alone on half the machine: the same
requests at the same moments, and every step takes twice as long. Under "priority" its requests have a level more.

The device is a model of the built-in model in float32 on two CPU cores, after the packed layers of docs/decisions/0011:
a step takes 45 ms, 4.5 ms for each row that decodes, and 1.9 ms for each token of a prompt. What the actors themselves
compute takes no time, no tokens are sampled and nothing depends on the machine: a seed gives the same figures anywhere.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.common import options, percentile, report
from benchmarks.control_plane import TimedExecutor
from cuelight.config import EngineConfig
from cuelight.messages import detokenizer, executor, scheduler
from cuelight.messages.request import RequestId, Sampling, Service
from cuelight.simulate.engine import LatestFigures, SimulatedEngine, stand_ins_without_clients

STEP_SECONDS: Final = 0.0454
ROW_SECONDS: Final = 0.00445
TOKEN_SECONDS: Final = 0.00188
"""50 ms at 1 row, 188 ms at 32 rows, 1.0 s for 512 tokens of a prompt."""

RUNNING_MAX: Final = 32
TOKEN_BUDGET: Final = 512
BLOCK_SIZE: Final = 16
WATERMARK: Final = 0.01
MAILBOX_CAPACITY: Final = 10_000
TOKEN_LIMIT: Final = 8192
WORDS: Final = range(49_000)

FLOOD: Final = Service("flood")
OUTSTANDING: Final = 300
LIGHT: Final = Service("light", priority=1)
LIGHT_FROM: Final = 1_000_000
"""Request ids from here on are the light tenant's."""
LIGHT_RATE: Final = 0.15
"""Its requests a second."""
LIGHT_PROMPTS: Final = ((32, 128), (128, 512))
LIGHT_OUTPUTS: Final = (16, 96)
"""Tokens, at least and at most; of the prompts one kind is as likely as the other."""
WARM_UP_SECONDS: Final = 60.0

POLICIES: Final = ("fcfs", "priority", "fair")
SHARES: Final = {"p50": 0.5, "p99": 0.99}
WITHIN: Final = 1.5
"""Bound on the ratio to the yardstick, at the median and at the 99th percentile, for a policy to be fair."""


@dataclass(frozen=True)
class Scenario:
    """The size of the flood: least and most tokens of its prompts and outputs, and the number of blocks."""

    name: str
    prompts: tuple[int, int]
    outputs: tuple[int, int]
    blocks: int


SCENARIOS: Final = (
    Scenario("all seats", (200, 1000), (200, 600), 4096),
    Scenario("all blocks", (200, 1000), (200, 600), 1024),
    Scenario("seats and blocks", (200, 1000), (200, 600), 1536),
    Scenario("the token budget", (800, 2000), (16, 64), 4096),
)


def step_seconds(slowness: float, step: executor.ExecuteStep) -> float:
    """Return the seconds of a step on a device that is `slowness` times slower than the modelled one."""
    decodes = sum(chunk.token_count == 1 for chunk in step.chunks)
    prefill = sum(chunk.token_count for chunk in step.chunks) - decodes
    return slowness * (STEP_SECONDS + ROW_SECONDS * decodes + TOKEN_SECONDS * prefill)


class Clients:
    """Both tenants: receive every token and every end."""

    def __init__(self, run: FairnessRun) -> None:
        self._run = run
        self.waits: dict[RequestId, float] = {}
        """Seconds from arrival to the first token, of the light tenant's requests."""
        self.light_ended = 0
        self.flood_tokens = 0
        """Tokens in the prompts and outputs of the flood's requests that have ended."""
        self.preemptions = 0
        self.preemptions_most = 0
        """Most preemptions of a single request."""

    def receive(self, message: detokenizer.DetokenizerMessage) -> None:
        """Note the first tokens and the ends."""
        if isinstance(message, detokenizer.TokensReady):
            for request_id in message.request_ids:
                if request_id >= LIGHT_FROM and request_id not in self.waits:
                    self.waits[request_id] = self._run.waited(request_id)
        elif isinstance(message, detokenizer.RequestEnded):
            assert message.reason == "length", f"{message.request_id} ended otherwise: {message}"
            self.preemptions += message.preemptions
            self.preemptions_most = max(self.preemptions_most, message.preemptions)
            if message.request_id >= LIGHT_FROM:
                self.light_ended += 1
            else:
                self.flood_tokens += message.usage.prompt_tokens + message.usage.output_tokens
                self._run.flood()


class FairnessRun:
    """One seed's requests of the light tenant, beside the flood under a policy; without one, alone on half."""

    def __init__(self, scenario: Scenario, policy: str | None, seed: int, requests: int) -> None:
        self.clients = Clients(self)
        self._scenario = scenario
        self._is_alone = policy is None
        self._requests = requests
        self._light = random.Random(f"light {seed}")
        self._flood = random.Random(f"flood {seed}")
        self._flooded = 0
        self._came_at: dict[RequestId, float] = {}
        config = EngineConfig(
            executor="thread",
            token_budget=TOKEN_BUDGET,
            running_max=RUNNING_MAX,
            queue_limit=MAILBOX_CAPACITY // 4,
            watermark_fraction=WATERMARK,
            policy=policy or "fcfs",
        )
        slowness = 2.0 if self._is_alone else 1.0
        seconds = partial(step_seconds, slowness)
        stand_ins = stand_ins_without_clients(config, detokenizer_receives=self.clients.receive)
        stand_ins["executor"] = lambda context: TimedExecutor(context, seconds)
        self._engine = SimulatedEngine(seed, config, LatestFigures(), stand_ins=stand_ins)
        self._to = self._engine.find(self._engine.roles.scheduler)

    def run(self) -> None:
        """Until the light tenant has all its answers."""
        self._to.tell(scheduler.ExecutorReady(self._scenario.blocks + 1, BLOCK_SIZE))  # one is the null block
        if not self._is_alone:
            for _ in range(OUTSTANDING):
                self.flood()
        at = WARM_UP_SECONDS
        for number in range(self._requests):
            at += self._light.expovariate(LIGHT_RATE)
            self._engine.simulation.at(at, partial(self._light_comes, RequestId(LIGHT_FROM + number)))
        while self.clients.light_ended < self._requests:
            self._engine.run(until_seconds=at, steps_max=sys.maxsize)
            at += 1.0
        assert len(self.clients.waits) == self._requests, "each of them got a first token"

    def waits(self, share: float) -> float:
        """Return the percentile `share` of the light tenant's waits for first tokens, in seconds."""
        return percentile(list(self.clients.waits.values()), share)

    def waited(self, request_id: RequestId) -> float:
        """Seconds since this request of the light tenant came."""
        return self._engine.now() - self._came_at[request_id]

    def flood_rate(self) -> float:
        """Tokens of the flood a second."""
        return self.clients.flood_tokens / self._engine.now()

    def flood(self) -> None:
        """One more request of the flood."""
        self._flooded += 1
        length, outputs = self._flood.randint(*self._scenario.prompts), self._flood.randint(*self._scenario.outputs)
        self._send(RequestId(self._flooded), self._flood, length, outputs, FLOOD)

    def _light_comes(self, request_id: RequestId) -> None:
        self._came_at[request_id] = self._engine.now()
        length = self._light.randint(*self._light.choice(LIGHT_PROMPTS))
        self._send(request_id, self._light, length, self._light.randint(*LIGHT_OUTPUTS), LIGHT)

    def _send(self, request_id: RequestId, rng: random.Random, length: int, outputs: int, service: Service) -> None:
        prompt = tuple(rng.choices(WORDS, k=length))
        sampling = Sampling(max_tokens=outputs, ignore_eos=True)
        now = self._engine.now()
        self._to.tell(scheduler.Admit(request_id, prompt, sampling, TOKEN_LIMIT, service, now))


def runs(scenario: Scenario, policy: str | None, seeds: int, requests: int) -> list[FairnessRun]:
    """One for each seed, over and done with."""
    done = []
    for seed in range(seeds):
        print(f"{scenario.name}, {policy or 'alone'}, seed {seed}", file=sys.stderr, flush=True)
        run = FairnessRun(scenario, policy, seed, requests)
        run.run()
        done.append(run)
    return done


def ratios(beside: list[FairnessRun], alone: list[FairnessRun], share: float) -> list[float]:
    """Return, for each seed, the ratio of the wait beside the flood to the wait alone on half the machine."""
    return [ours.waits(share) / theirs.waits(share) for ours, theirs in zip(beside, alone, strict=True)]


def row(scenario: Scenario, policy: str | None, done: list[FairnessRun], alone: list[FairnessRun]) -> dict[str, object]:
    """Return a row of the table."""
    figures: dict[str, object] = {"the flood takes": scenario.name, "policy": policy or "(alone, on half)"}
    for name, share in SHARES.items():
        figures[f"{name}, s"] = f"{statistics.mean(run.waits(share) for run in done):.2f}"
    for name, share in SHARES.items():
        each = ratios(done, alone, share)
        figures[f"{name} to alone (range)"] = f"{statistics.mean(each):.2f} ({min(each):.2f}..{max(each):.2f})"
    figures["flood, tokens/s"] = f"{statistics.mean(run.flood_rate() for run in done):.0f}" if policy else "-"
    figures["preemptions"] = f"{statistics.mean(run.clients.preemptions for run in done):.0f}"
    figures["of one request"] = max(run.clients.preemptions_most for run in done)
    return figures


def main() -> None:
    arguments = options(__doc__, seeds=5, requests=100)
    rows: list[dict[str, object]] = []
    worst = 0.0
    for scenario in SCENARIOS:
        alone = runs(scenario, None, arguments.seeds, arguments.requests)
        rows.append(row(scenario, None, alone, alone))
        for policy in POLICIES:
            done = runs(scenario, policy, arguments.seeds, arguments.requests)
            rows.append(row(scenario, policy, done, alone))
            if policy == "fair":
                worst = max(worst, *(statistics.mean(ratios(done, alone, share)) for share in SHARES.values()))
    verdict = f"{worst:.2f}, {'within' if worst <= WITHIN else 'NOT within'} {WITHIN}"
    report(rows, arguments.json, seeds=arguments.seeds, requests=arguments.requests, fair_at_worst=verdict)


if __name__ == "__main__":
    main()
