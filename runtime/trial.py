"""One history of the engine's own actors, around an executor without weights, drawn from a seed.

It is checked from outside: by what its clients were told, and by what is left when all is at rest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice, pairwise
from typing import Final

from cuelight.actors.executor.stub import StubBatch, StubDevice, hashed_token, stub_host
from cuelight.config import POLICIES, EngineConfig, ModelFacts
from cuelight.ensemble import Ensemble, assemble, roles
from cuelight.kernel import Delivered, Event
from cuelight.kernel.faults import Faults, SimulatedCrash
from cuelight.kernel.simulation import Simulation
from cuelight.messages.cache import ForgetPrefixes
from cuelight.messages.client import Accepted, Chunk, ClientMessage, End, Rejected
from cuelight.messages.intake import Cancel, Submit
from cuelight.messages.observer import BlockFigures, ObserverMessage, Ready, RequestFigures
from cuelight.messages.request import BlockCopies, FinishReason, Prompt, Refusal, RequestId, Sampling, Service
from cuelight.messages.scheduler import StepDone
from cuelight.testing import END_TOKEN, decode, encode

CONTEXT_LENGTH: Final = 700

_ALPHABET: Final = b"abcdefg "


@dataclass
class Tally:
    """What has happened in all histories so far."""

    seeds: int = 0
    deliveries: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: int = 0
    open: int = 0
    """Requests that an actor's crash left without an end."""
    crashes: int = 0

    def row(self) -> str:
        """The figures, in columns as wide as those of `HEADER`."""
        return "".join(f"{getattr(self, field.name):>11,}" for field in fields(self)) + "\n"


def next_token(token_ids: Sequence[int]) -> int:
    """A letter or, less often, the end: a pure function of all tokens before it."""
    number = hashed_token(token_ids, 4 * len(_ALPHABET))
    return END_TOKEN if number == 0 else _ALPHABET[number % len(_ALPHABET)]


def run_history(seed: int, request_count: int, total: Tally) -> None:
    """One history, drawn from the seed. Raises AssertionError where a promise is broken."""
    chance = random.Random(f"engine {seed}")
    config = _drawn_config(chance)
    device = FlakyDevice(config, chance.choice((0.0, 0.0, 0.05, 0.3)), chance)
    board = Board()
    facts = ModelFacts(END_TOKEN + 1, CONTEXT_LENGTH, (END_TOKEN,))
    cast = roles(config)
    parts = assemble(Ensemble(facts, _Encoder(), decode, lambda: device), config, cast, board)

    def count(event: Event) -> None:
        total.deliveries += isinstance(event, Delivered)

    faults = Faults(chance.choice((0.0, 0.0, 0.0, 0.003)), delay_seconds_max=chance.choice((0.0, 0.001, 0.1)))
    simulation = Simulation(parts, seed, tap=count, faults=faults, record=False)
    intake = simulation.find(cast.intake)
    clients = [Client(RequestId(number), chance) for number in range(request_count)]
    for first, client in pairwise(clients):
        if chance.random() < 0.2:
            client.is_sample_of(first)
    for client in clients:
        at = chance.random() if chance.random() < 0.8 else 0.5  # some come all at once
        simulation.at(at, partial(intake.tell, client.submit()))
        if chance.random() < 0.25:
            client.has_left = True
            simulation.at(at + chance.choice((0.0, 0.01, 0.3)) * chance.random(), partial(intake.tell, client.cancel()))
    if chance.random() < 0.2:
        forget = partial(simulation.find(cast.cache).tell, ForgetPrefixes())
        simulation.at(chance.random(), forget)
    simulation.run()
    if simulation.failure is not None:
        if not isinstance(simulation.failure.__cause__, SimulatedCrash):
            raise simulation.failure
        total.crashes += 1
    assert not device.complaints, device.complaints[0]
    for client in clients:
        client.check(device, is_over=simulation.failure is None)
        client.count(total)
    if simulation.failure is None:
        board.check()
        lengths = {name: figures.length for name, figures in simulation.statistics().items() if figures.length}
        assert not lengths, f"messages wait at rest: {lengths}"


def _drawn_config(chance: random.Random) -> EngineConfig:
    return EngineConfig(
        token_budget=chance.choice((3, 16, 64, 512)),
        running_max=chance.choice((1, 3, 16)),
        queue_limit=chance.choice((4, 100, 100)),
        block_size=chance.choice((1, 4, 16)),
        block_count=chance.choice((16, 32, 64, 1000)),
        watermark_fraction=chance.choice((0.0, 0.01, 0.2)),
        steps_in_flight=chance.choice((1, 2, 3)),
        host_block_count=chance.choice((0, 0, 8, 64)),
        policy=chance.choice(POLICIES),
        isolate_tenants=chance.random() < 0.2,
    )


class _Encoder:
    def encode(self, prompt: Prompt, token_limit: int) -> tuple[int, ...]:
        return encode(prompt)


class FlakyDevice(StubDevice):
    """A stub whose steps sometimes raise, before they have done their work or after."""

    def __init__(self, config: EngineConfig, failure_rate: float, chance: random.Random) -> None:
        assert config.block_count is not None
        super().__init__(config.block_count, config.block_size, next_token, stub_host(config.host_block_count))
        self.token_capacity = (config.block_count - 1) * config.block_size
        self.failures = 0
        self.complaints: list[str] = []
        """What the steps had wrong: the executor would answer for it as for any failure."""
        self._failure_rate = failure_rate
        self._chance = chance

    def run(self, batch: StubBatch) -> StepDone:
        """As a stub's, unless it fails."""
        fails = self._chance.random() < self._failure_rate
        if fails and self._chance.random() < 0.5:
            self._fail()
        try:
            done = super().run(batch)
        except Exception as error:
            self.complaints.append(f"step {batch.step.step}: {type(error).__name__}: {error}")
            raise
        if fails:
            self._fail()
        return done

    def copy(self, copies: BlockCopies) -> None:
        """As a stub's, unless it fails, and then nobody knows what is in the blocks."""
        try:
            super().copy(copies)
        except Exception as error:
            self.complaints.append(f"{copies}: {type(error).__name__}: {error}")
            raise
        if self._chance.random() < self._failure_rate / 4:
            self._fail()

    def _fail(self) -> None:
        self.failures += 1
        raise RuntimeError("the device failed")


class Board:
    """The observer: keeps the latest figures."""

    def __init__(self) -> None:
        self.requests = RequestFigures()
        self.blocks = BlockFigures()
        self.is_ready = False

    def tell(self, message: ObserverMessage, /) -> None:
        """Keep what is told."""
        match message:
            case RequestFigures():
                self.requests = message
            case BlockFigures():
                self.blocks = message
            case Ready():
                self.is_ready = True
            case _:
                raise AssertionError(f"the device could not be loaded: {message}")

    def check(self) -> None:
        """At rest, nothing is live and every block is free."""
        assert self.is_ready, "intake never said that it serves"
        assert self.requests.running == self.requests.waiting == 0, f"requests are live at rest: {self.requests}"
        assert self.blocks.blocks_free == self.blocks.blocks_total > 0, f"blocks are held at rest: {self.blocks}"


class Client:
    """A client that sends one drawn request, and knows what must come of it."""

    def __init__(self, request_id: RequestId, chance: random.Random) -> None:
        self.request_id = request_id
        self.has_left = False
        self._prompt = _drawn_prompt(chance)
        self._sampling = _drawn_sampling(chance)
        self._service = Service(tenant=chance.choice("ab"), cache_salt=chance.choice(("", "", "", "salt")))
        self._like: RequestId | None = None
        self._messages: list[ClientMessage] = []

    def tell(self, message: ClientMessage, /) -> None:
        """Keep what is told."""
        self._messages.append(message)

    def is_sample_of(self, first: Client) -> None:
        """It asks for another sample of that one's prompt."""
        self._prompt, self._service, self._like = first._prompt, first._service, first.request_id

    def submit(self) -> Submit:
        """The request."""
        return Submit(self.request_id, self._prompt, self._sampling, self, self._service, self._like)

    def cancel(self) -> Cancel:
        """The client leaves."""
        return Cancel(self.request_id)

    @property
    def end(self) -> End | Rejected | None:
        """The one message after which nothing comes."""
        last = self._messages[-1] if self._messages else None
        return last if isinstance(last, End | Rejected) else None

    def count(self, total: Tally) -> None:
        """Add this request to the figures."""
        match self.end:
            case None:
                total.open += 1
            case Rejected():
                total.refused += 1
            case End(reason=FinishReason.CANCELLED):
                total.aborted += 1
            case End(reason=FinishReason.FAILED):
                total.failed += 1
            case End():
                total.finished += 1

    def check(self, device: FlakyDevice, *, is_over: bool) -> None:
        """What came is what this request alone would have given. Where `is_over`, it has come to an end as well."""
        who = f"request {self.request_id}"
        assert all(message.request_id == self.request_id for message in self._messages), f"{who} hears of another"
        assert not any(isinstance(message, End | Rejected) for message in self._messages[:-1]), f"{who} ends twice"
        assert self.end is not None or not is_over, f"{who} never ends"
        token_limit = min(CONTEXT_LENGTH, device.token_capacity)
        if isinstance(self.end, Rejected):
            assert len(self._messages) == 1, f"{who} is refused after all"
            assert self._is_fair(self.end.refusal, token_limit), f"{who} is refused: {self.end}"
            return
        prompt = encode(self._prompt)
        if self._messages:
            assert self._messages[0] == Accepted(self.request_id, len(prompt)), f"{who} begins with {self._messages[0]}"
        tokens, text = self._received()
        expected, expected_text, reason = expected_output(prompt, self._sampling, token_limit)
        assert tokens == expected[: len(tokens)], f"{who} gets {tokens}, where {expected} is right"
        assert decode(tokens).startswith(text), f"{who} reads {text!r}, which {tokens} do not say"
        if self.end is None:
            return
        if self.end.reason is FinishReason.CANCELLED:
            assert self.has_left, f"{who} is cancelled by nobody"
        elif self.end.reason is FinishReason.FAILED:
            assert device.failures >= 2, f"{who} fails after {device.failures} failed steps: {self.end.error}"
        else:
            assert (tokens, text, self.end.reason) == (expected, expected_text, reason), (
                f"{who} ends for {self.end.reason} with {text!r}, and not for {reason} with {expected_text!r}"
            )
            assert self.end.usage.output_tokens == len(tokens), f"{who} is charged for {self.end.usage}"
            assert self.end.usage.prompt_tokens == len(prompt), f"{who} is charged for {self.end.usage}"

    def _is_fair(self, refusal: Refusal, token_limit: int) -> bool:
        length = len(encode(self._prompt))
        match refusal:
            case Refusal.PROMPT_TOO_LONG:
                return length + 1 > token_limit
            case Refusal.EMPTY_PROMPT:
                return length == 0
        return refusal is Refusal.QUEUE_FULL

    def _received(self) -> tuple[list[int], str]:
        tokens: list[int] = []
        text = ""
        for message in self._messages:
            if isinstance(message, Chunk):
                assert message.position == len(tokens), f"request {self.request_id} gets {message} as {len(tokens)}th"
                tokens.extend(message.token_ids)
                text += message.text
        return tokens, text


def expected_output(prompt: Sequence[int], sampling: Sampling, token_limit: int) -> tuple[list[int], str, FinishReason]:
    """Tokens, text and end of a request that is alone in the world: the slow, obvious path. One stop string at most."""
    tokens: list[int] = []
    limit = min(sampling.max_tokens, token_limit - len(prompt))
    while True:
        tokens.append(next_token([*prompt, *tokens]))
        text = decode(tokens)
        begin = len(decode(tokens[: sampling.min_tokens]))
        for stop in sampling.stop:
            if (found := text.find(stop, begin)) >= 0:
                return tokens, text[:found], FinishReason.STOP
        is_last = tokens[-1] in sampling.stop_token_ids or (tokens[-1] == END_TOKEN and not sampling.ignore_eos)
        if is_last and len(tokens) >= sampling.min_tokens:
            return tokens, text, FinishReason.STOP
        if len(tokens) >= limit:
            return tokens, text, FinishReason.LENGTH


_BEGINNINGS: Final = ("", "a bad cafe faced", "a bad cafe faced a bee and fed a beef cage ", "deaf")


def _drawn_prompt(chance: random.Random) -> Prompt:
    """Often with a beginning that others have too; rarely empty, or long."""
    length = chance.choice((0, 3, 10, 30, 30, 30, 420 if chance.random() < 0.2 else 5))
    letters = bytes(islice(iter(lambda: chance.choice(_ALPHABET), None), length))
    text = chance.choice(_BEGINNINGS) + letters.decode()
    return text if chance.random() < 0.7 else tuple(text.encode())


def _drawn_sampling(chance: random.Random) -> Sampling:
    max_tokens = chance.choice((1, 5, 20, 40))
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=chance.choice((0, 0, 3)) if max_tokens > 3 else 0,
        seed=chance.choice((None, 7)),
        stop=chance.choice(((), (), ("ab",), ("e",), ("g fa",))),
        stop_token_ids=chance.choice(((), (), (_ALPHABET[0],))),
        ignore_eos=chance.random() < 0.3,
    )
