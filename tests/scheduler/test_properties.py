"""Any history of requests, failures and changes of policy, delivered in any order, against what each alone would get.

After every message the tables are walked, the bounds hold, and nothing idles that could run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from scheduling import WatchedDevice, check, finish, is_live, policy, scheduler_of
from support import Core, expected_output

from cuelight.actors.scheduler.request import Request
from cuelight.messages.request import FinishReason, Sampling, Service
from cuelight.messages.scheduler import SetPolicy

FAMILIES = (tuple(range(100, 140)), (7,) * 40, tuple(range(30)) + tuple(range(200, 210)))
EOS = frozenset(range(15))

policies = st.builds(
    SetPolicy,
    st.sampled_from(["fcfs", "priority", "deadline", "fair"]),
    st.sampled_from([1e-3, 0.05, 10.0]),
    st.sampled_from([(), (("a", 1.0), ("b", 3.0))]),
)
services = st.builds(
    Service,
    st.sampled_from("abc"),
    st.integers(-2, 2),
    st.sampled_from([*[None] * 8, 0.05, 0.5]),
    st.sampled_from([*[None] * 8, 0.1, 5.0]),
    st.sampled_from(["", "", "salt"]),
)
samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), tuple(range(500, 540))]),
    ignore_eos=st.booleans(),
)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """The beginning of one of a few well-known texts, then perhaps something of its own."""
    shared = draw(st.sampled_from(FAMILIES))[: draw(st.sampled_from([0, 9, 33, 40]))]
    return [*shared, *draw(st.lists(st.integers(0, 3), min_size=0 if shared else 1, max_size=4))]


@dataclass
class Asked:
    prompt: list[int]
    sampling: Sampling
    service: Service
    at: float
    is_aborted: bool = False
    stopped_at: int | None = None


class SchedulerMachine(RuleBasedStateMachine):
    """Clients, a device that fails now and then, and whoever changes the policy."""

    @initialize(
        seed=st.integers(0, 1_000),
        block_size=st.sampled_from([1, 2, 4, 16]),
        room=st.sampled_from([1, 2, 6]),
        token_budget=st.sampled_from([1, 8, 16, 64]),
        running_max=st.sampled_from([1, 3, 16, 16]),
        steps_in_flight=st.integers(1, 3),
        watermark=st.sampled_from([0.0, 0.2]),
        long_prefill_tokens=st.sampled_from([1, 4, 4, 2**63]),
        host_block_count=st.sampled_from([0, 0, 1, 8]),
        chosen=policies,
    )
    def start(
        self,
        seed: int,
        block_size: int,
        room: int,
        token_budget: int,
        running_max: int,
        steps_in_flight: int,
        watermark: float,
        long_prefill_tokens: int,
        host_block_count: int,
        chosen: SetPolicy,
    ) -> None:
        self.device = WatchedDevice(2 + -(-56 // block_size) * room, block_size, host_block_count)
        self.token_limit = (self.device.block_count - 1) * block_size
        self.core = Core(
            seed,
            device=self.device,
            token_budget=token_budget,
            running_max=running_max,
            steps_in_flight=steps_in_flight,
            watermark=watermark,
            eos=EOS,
            policy=chosen,
            long_prefill_tokens=long_prefill_tokens,
        )
        self.asked: dict[int, Asked] = {}
        self.faults = 0

    @property
    def running(self) -> list[Request]:
        return list(scheduler_of(self.core)._state.running.values())

    @rule(prompt=prompts(), sampling=samplings, service=services, count=st.sampled_from([1, 2, 4]))
    def arrive(self, prompt: list[int], sampling: Sampling, service: Service, count: int) -> None:
        """One, or several at once with the same beginning."""
        for twin in range(count):
            request_id = len(self.asked)
            own = prompt if count == 1 else [*prompt, twin]
            self.asked[request_id] = Asked(own, sampling, service, self.core.now())
            self.core.admit(request_id, own, sampling, service=service)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), sampling=samplings, count=st.sampled_from([1, 3]))
    def sample(self, data: st.DataObject, sampling: Sampling, count: int) -> None:
        """More outputs for the prompt of one that may be over by now."""
        sample_of = data.draw(st.sampled_from(sorted(self.asked)))
        first = self.asked[sample_of]
        for request_id in range(len(self.asked), len(self.asked) + count):
            self.asked[request_id] = Asked(first.prompt, sampling, first.service, self.core.now())
            self.core.admit(request_id, first.prompt, sampling, service=first.service, sample_of=sample_of)

    @rule(count=st.integers(1, 12))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.core.step()
            check(self.core)

    @rule(count=st.sampled_from([20, 60]))
    def deliver_many(self, count: int) -> None:
        self.deliver(count)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        self.asked[request_id].is_aborted = True
        self.core.abort(request_id)

    @precondition(lambda self: any(each.computed < each.prefill_tokens for each in self.running))
    @rule()
    def leave(self) -> None:
        """Whoever computes its prompt leaves, whatever others expect of it."""
        request_id = next(each.request_id for each in self.running if each.computed < each.prefill_tokens)
        self.asked[request_id].is_aborted = True
        self.core.abort(request_id)

    @precondition(lambda self: any(is_live(self.core, request_id) for request_id in self.core.outputs()))
    @rule(data=st.data())
    def match(self, data: st.DataObject) -> None:
        """The detokenizer has found a stop string in the output of one, as far as it knows that."""
        outputs = self.core.outputs()
        request_id = data.draw(st.sampled_from([i for i in sorted(outputs) if is_live(self.core, i)]))
        output_tokens = data.draw(st.integers(1, len(outputs[request_id])))
        if self.asked[request_id].stopped_at is None:
            self.asked[request_id].stopped_at = output_tokens
            self.core.stop_matched(request_id, output_tokens)

    @precondition(lambda self: not self.device.failures)
    @rule()
    def fail(self) -> None:
        self.faults += 1
        self.device.failures = 1

    @rule(chosen=policies)
    def change(self, chosen: SetPolicy) -> None:
        self.core.scheduler.tell(chosen)

    @rule(seconds=st.sampled_from([0.01, 0.1]))
    def wait(self, seconds: float) -> None:
        self.core.engine.pass_time(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.scheduler.tell(policy("fcfs"))
        finish(self.core, steps_max=20_000)
        assert not scheduler_of(self.core)._state._gate.prefix_waiters
        assert self.core.ends().keys() == self.asked.keys(), "everybody ends, nobody starves"
        for request_id, asked in self.asked.items():
            self._compare(request_id, asked)

    def _compare(self, request_id: int, asked: Asked) -> None:
        end, got = self.core.ends()[request_id], self.core.outputs().get(request_id, [])
        tokens, reason = expected_output(asked.prompt, asked.sampling, EOS, self.token_limit)
        assert got == tokens[: len(got)], "what comes is what this request alone would get"
        if end.reason is FinishReason.CANCELLED:
            assert asked.is_aborted
        elif end.reason is FinishReason.EXPIRED:
            seconds = [s for s in (asked.service.queue_seconds, asked.service.deadline_seconds) if s is not None]
            assert self.core.now() >= asked.at + min(seconds)
        elif end.reason is FinishReason.FAILED:
            assert self.faults >= 2 and "a step that fails" in end.error
        elif asked.stopped_at is not None and end.usage.output_tokens == asked.stopped_at:
            assert end.reason in (FinishReason.STOP, reason)
        else:
            assert (got, end.reason) == (tokens, reason)
            assert end.usage.output_tokens == len(tokens)


TestSchedulerMachine = SchedulerMachine.TestCase
HISTORIES = int(os.environ.get("CUELIGHT_HISTORIES", "40"))
TestSchedulerMachine.settings = settings(max_examples=HISTORIES, stateful_step_count=50, deadline=None)
