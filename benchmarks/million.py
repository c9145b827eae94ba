"""Run a million simulated requests through the real scheduler and cache manager on a virtual clock.

    python -m benchmarks.million [--requests 1000000] [--policy fair] [--rate 45] [--svg FILE] [--json FILE]

Several tenants send prompts and want answers of lognormal lengths. Most prompts begin with a system prompt that others
have too, some continue an earlier request, prompt and answer; some clients leave early. They arrive as a Poisson
process whose rate rises and falls over each hour, with bursts, near what the device can do: a stand-in whose step
takes 2 ms and 50 µs a token of virtual time. What the actors themselves compute takes none, and no tokens are sampled.
In the end every request must have ended once, with all its tokens delivered and every block free.
"""

from __future__ import annotations

import math
import random
import resource
import sys
import time
from array import array
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.common import options, percentile, report
from benchmarks.control_plane import SAMPLED_TOKEN, TimedExecutor
from benchmarks.svg import Panel, picture, round_up
from cuelight.config import EngineConfig
from cuelight.messages import detokenizer, executor, scheduler
from cuelight.messages.request import RequestId, Sampling, Service
from cuelight.simulate.engine import LatestFigures, SimulatedEngine, stand_ins_without_clients

STEP_SECONDS: Final = 0.002
TOKEN_SECONDS: Final = 1 / 20_000
RUNNING_MAX: Final = 256
TOKEN_BUDGET: Final = 1024
BLOCK_SIZE: Final = 16
BLOCKS: Final = 5120
WATERMARK: Final = 0.01

TENANTS: Final = {"chat": 0.4, "search": 0.3, "agents": 0.2, "batch": 0.1}
"""Shares of the traffic."""
SYSTEM_PROMPTS: Final = 3
"""Number of system prompts of each tenant."""
WITH_SYSTEM_PROMPT: Final = 0.6
CONTINUING: Final = 0.15
LEAVING: Final = 0.02
STAY_SECONDS: Final = 10.0
"""Mean time after which a leaving client cancels, unless it has its answer by then."""
TOKENS_MAX: Final = 2048
"""Most tokens of a prompt."""
VOCABULARY: Final = 49_000

SWING: Final = 0.2
SWING_SECONDS: Final = 3600.0
"""The rate is a sine around its mean: SWING is its amplitude as a fraction of the mean, this its period."""
BURST_FACTOR: Final = 2.0
BURST_SECONDS: Final = 40.0
CALM_SECONDS: Final = 900.0
"""The mean lengths of bursts and of the times between them; both are exponentially distributed."""

SAMPLE_SECONDS: Final = 5.0
MAILBOX_CAPACITY: Final = 100_000


def step_seconds(step: executor.ExecuteStep) -> float:
    """Seconds that the modelled device takes for a step."""
    return STEP_SECONDS + sum(chunk.token_count for chunk in step.chunks) * TOKEN_SECONDS


class DeliveryLedger:
    """Receives every token and every end, and checks that they add up."""

    def __init__(self) -> None:
        self.open: set[RequestId] = set()
        self.reasons: Counter[str] = Counter()
        self.waits = array("d")
        self.preemptions = 0
        self.tokens = 0
        self._charged = 0

    def receive(self, message: detokenizer.DetokenizerMessage) -> None:
        """Count tokens and ends."""
        if isinstance(message, detokenizer.TokensReady):
            self.tokens += len(message.token_ids)
        elif isinstance(message, detokenizer.RequestEnded):
            self.open.remove(message.request_id)
            self.reasons[str(message.reason)] += 1
            self.waits.append(message.queued_seconds)
            self.preemptions += message.preemptions
            self._charged += message.usage.output_tokens

    def check(self, requests: int) -> None:
        """At the end."""
        assert not self.open, f"{len(self.open)} requests never ended"
        assert sum(self.reasons.values()) == requests, "a request that came must end, once"
        assert set(self.reasons) <= {"length", "cancelled"}, f"some ended otherwise: {self.reasons}"
        assert self.tokens == self._charged, f"{self.tokens} tokens were delivered and {self._charged} charged"


class SampledFigures(LatestFigures):
    """The latest figures, and the samples taken of them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[float] = []
        self.held: list[float] = []
        self.hit_rate: list[float | None] = []
        self._sampled = self.requests

    def sample(self) -> None:
        """How it stands, and the hit rate of the requests that have ended since the last time."""
        now, before, self._sampled = self.requests, self._sampled, self.requests
        prompt_tokens = now.prompt_tokens - before.prompt_tokens
        self.waiting.append(now.waiting)
        self.held.append(100 * (1 - self.blocks.blocks_free / self.blocks.blocks_total))
        cached = now.cached_tokens - before.cached_tokens
        self.hit_rate.append(100 * cached / prompt_tokens if prompt_tokens else None)


class Population:
    """All those clients: what the next one asks for, drawn from a seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._words = tuple(rng.choices(range(VOCABULARY), k=65_536))
        self._beginnings = {
            tenant: [self._some(rng.randrange(64, 480)) for _ in range(SYSTEM_PROMPTS)] for tenant in TENANTS
        }
        self._earlier: dict[str, deque[tuple[int, ...]]] = {tenant: deque(maxlen=500) for tenant in TENANTS}
        self._samplings: dict[int, Sampling] = {}
        self._services = {tenant: Service(tenant) for tenant in TENANTS}

    def admit(self, number: int, now: float) -> scheduler.Admit:
        """The next request."""
        rng = self._rng
        tenant = rng.choices(tuple(TENANTS), tuple(TENANTS.values()))[0]
        earlier = self._earlier[tenant]
        before: tuple[int, ...] = ()
        if earlier and rng.random() < CONTINUING:
            before = rng.choice(earlier)
        elif rng.random() < WITH_SYSTEM_PROMPT:
            before = rng.choice(self._beginnings[tenant])
        # Two tokens say which request this is, so that no others begin alike by chance.
        own = (number % VOCABULARY, number // VOCABULARY, *self._some(self._length(4.7, 0.9, 1000)))
        prompt = (before + own)[:TOKENS_MAX]
        output_tokens = self._length(4.7, 0.8, 1000)
        earlier.append(prompt + (SAMPLED_TOKEN,) * output_tokens)
        sampling = self._samplings.setdefault(output_tokens, Sampling(max_tokens=output_tokens, ignore_eos=True))
        return scheduler.Admit(RequestId(number), prompt, sampling, 4096, self._services[tenant], now)

    def _length(self, mu: float, sigma: float, at_most: int) -> int:
        return max(1, min(at_most, round(self._rng.lognormvariate(mu, sigma))))

    def _some(self, count: int) -> tuple[int, ...]:
        start = self._rng.randrange(len(self._words) - count)
        return self._words[start : start + count]


class Arrivals:
    """Lets `total` clients come, one after another, and some of them leave; takes the samples meanwhile."""

    def __init__(self, run: MillionRun, total: int, rate: float) -> None:
        self.count = 0
        self._run = run
        self._total = total
        self._rate = rate
        self._rng = random.Random(f"arrivals {run.seed}")
        self._population = Population(random.Random(f"population {run.seed}"))
        self._burst_from = self._burst_until = 0.0

    def begin(self) -> None:
        """Let the first come."""
        self._arrive()
        self._sample()

    def _arrive(self) -> None:
        run, now = self._run, self._run.engine.now()
        admit = self._population.admit(self.count, now)
        run.ledger.open.add(admit.request_id)
        run.to.tell(admit)
        if self._rng.random() < LEAVING:
            leave = partial(run.to.tell, scheduler.Abort(admit.request_id))
            run.engine.simulation.at(now + self._rng.expovariate(1 / STAY_SECONDS), leave)
        self.count += 1
        if self.count % max(1, self._total // 10) == 0:
            print(f"{self.count:,} of {self._total:,} have come", file=sys.stderr, flush=True)
        if self.count < self._total:
            run.engine.simulation.at(now + self._rng.expovariate(self._rate_at(now)), self._arrive)

    def _rate_at(self, now: float) -> float:
        """Requests a second."""
        if now >= self._burst_until:
            self._burst_from = now + self._rng.expovariate(1 / CALM_SECONDS)
            self._burst_until = self._burst_from + self._rng.expovariate(1 / BURST_SECONDS)
        factor = BURST_FACTOR if now >= self._burst_from else 1.0
        return self._rate * factor * (1 + SWING * math.sin(2 * math.pi * now / SWING_SECONDS))

    def _sample(self) -> None:
        self._run.board.sample()
        if self.count < self._total or self._run.ledger.open:
            self._run.engine.simulation.at(self._run.engine.now() + SAMPLE_SECONDS, self._sample)


class MillionRun:
    """The cast, and what is seen of it."""

    def __init__(self, policy: str, seed: int) -> None:
        self.seed = seed
        self.ledger = DeliveryLedger()
        self.board = SampledFigures()
        config = EngineConfig(
            executor="thread",
            token_budget=TOKEN_BUDGET,
            running_max=RUNNING_MAX,
            queue_limit=MAILBOX_CAPACITY // 4,
            watermark_fraction=WATERMARK,
            policy=policy,
        )
        stand_ins = stand_ins_without_clients(config, detokenizer_receives=self.ledger.receive)
        stand_ins["executor"] = lambda context: TimedExecutor(context, step_seconds)
        self.engine = SimulatedEngine(seed, config, self.board, stand_ins=stand_ins)
        self.to = self.engine.find(self.engine.roles.scheduler)

    def run(self, total: int, rate: float) -> float:
        """Serve `total` requests that arrive at this mean rate, check the outcome, and return the seconds taken."""
        begin = time.perf_counter()
        self.to.tell(scheduler.ExecutorReady(BLOCKS, BLOCK_SIZE))
        self.engine.run(steps_max=sys.maxsize)
        Arrivals(self, total, rate).begin()
        self.engine.run(steps_max=sys.maxsize)
        seconds = time.perf_counter() - begin
        self.ledger.check(total)
        self.board.check_at_rest()
        self.engine.check_at_rest()
        return seconds

    def picture(self, total: int) -> str:
        """Queue, blocks and hits over time, as SVG."""
        board, hours = self.board, self.engine.now() / 3600
        queue_top = round_up(max(board.waiting))
        panels = (
            Panel("Requests waiting (peaks)", board.waiting, queue_top, "#b3402a", is_peak=True),
            Panel("Blocks held by running requests", board.held, 100.0, "#2f6f9f", "%"),
            Panel("Prompt tokens found in the prefix cache", board.hit_rate, 100.0, "#3b7d3b", "%"),
        )
        return picture(f"{total:,} simulated requests", panels, hours)

    def figures(self, seconds: float) -> dict[str, object]:
        """Return the figures of the run, which took `seconds`."""
        requests, waits = self.board.requests, self.ledger.waits
        tokens = requests.prompt_tokens + requests.output_tokens
        return {
            "wall seconds": f"{seconds:.0f}",
            "wall ms a step": f"{1e3 * seconds / requests.steps:.2f}",
            "virtual hours": f"{self.engine.now() / 3600:.2f}",
            "requests finished": f"{self.ledger.reasons['length']:,}",
            "requests that left": f"{self.ledger.reasons['cancelled']:,}",
            "steps": f"{requests.steps:,}",
            "prompt tokens": f"{requests.prompt_tokens:,}",
            "of these cached": f"{100 * requests.cached_tokens / requests.prompt_tokens:.1f} %",
            "output tokens": f"{requests.output_tokens:,}",
            "tokens a wall second": f"{tokens / seconds:,.0f}",
            "longest queue": f"{max(self.board.waiting):,.0f}",
            "wait p50, p99, s": f"{percentile(waits, 0.5):.3f}, {percentile(waits, 0.99):.1f}",
            "preemptions": f"{requests.preemptions:,}",
            "evictions": f"{self.board.blocks.evictions:,}",
            "memory peak, MiB": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}",
        }


def main() -> None:
    arguments = options(__doc__, requests=1_000_000, rate=45.0, policy="fair", seed=1, svg="")
    run = MillionRun(arguments.policy, arguments.seed)
    figures = run.figures(run.run(arguments.requests, arguments.rate))
    rows: list[dict[str, object]] = [{"figure": name, "value": value} for name, value in figures.items()]
    if arguments.svg:
        Path(arguments.svg).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.svg).write_text(run.picture(arguments.requests))
    facts = {name: getattr(arguments, name) for name in ("requests", "rate", "policy", "seed")}
    report(rows, arguments.json, **facts)


if __name__ == "__main__":
    main()
