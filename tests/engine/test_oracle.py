"""The whole engine, with the real model in float32 and either decoder, against `transformers` with a prompt at a time.

The engine is kept short of everything: a pool that running requests outgrow, so that some are preempted, and a token
budget that cuts most prompts into chunks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
import texts
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from cuelight import Engine
from cuelight.actors.executor.batch import SamplingRow
from cuelight.actors.executor.model.sampling import sample
from cuelight.actors.executor.native.build import NoNativeCode, load_native
from cuelight.actors.executor.native.runner import NativeRunner
from cuelight.actors.executor.runner import ModelRunner
from cuelight.messages.request import BlockCopies, CopyKind, FinishReason, RequestId, Sampling
from cuelight.models.cache import cache_directory
from cuelight.stream import Result, Stream

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

EOS = 2
BLOCK_SIZE = 16
BUDGET = 96
LENGTHS = (200, 5, 15, 16, 17, 31, 32, 33, BUDGET - 1, BUDGET, BUDGET + 1)
"""Around the ends of a block, of several and of what one step computes, and one of three steps."""
QUESTION = "Answer with one word only: what is the capital of France?"


class Reference:
    """Outputs of `transformers` for a prompt alone."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        hf_logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model.generation_config.eos_token_id = None
        self._greedy: dict[tuple[int, ...], list[int]] = {}
        self._right: set[tuple[tuple[int, ...], tuple[int, ...], Sampling]] = set()
        """Outputs found to be right, with prompt and sampling: the other decoder's equal outputs need no check."""

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the next `count` tokens, end tokens included."""
        known = self._greedy.setdefault(tuple(prompt), [])
        if len(known) < count:
            known[:] = self._generate(prompt, max_new_tokens=count)
        return known[:count]

    def greedy_after(self, prompt: Sequence[int], count: int, min_tokens: int) -> list[int]:
        """Return up to `count` tokens, with no end token among the first `min_tokens`."""
        return self._generate(prompt, max_new_tokens=count, min_new_tokens=min_tokens, eos_token_id=EOS)

    def _generate(self, prompt: Sequence[int], **options: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """[len(output), vocabulary]: the logits that each token of `output` was chosen from, computed in one pass."""
        ids = torch.tensor([[*prompt, *output[:-1]]])
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=len(output)).logits[0]

    def check_greedy(self, prompt: Sequence[int], result: Result, max_tokens: int) -> None:
        """Check that the result is the greedy continuation, up to an end token or `max_tokens`."""
        self.check_best(prompt, result)
        self.check_end(result, max_tokens)

    def check_best(self, prompt: Sequence[int], result: Result) -> None:
        """Check that each token is the best after the tokens before it, and that the text is that of the tokens."""
        self.check_text(result)
        case = (tuple(prompt), result.token_ids, Sampling())
        if case in self._right:
            return
        output = list(result.token_ids)
        logits = self.logits(prompt, output)
        best = logits.argmax(dim=-1).tolist()
        if best != output:
            at = next(index for index, pair in enumerate(zip(best, output, strict=True)) if pair[0] != pair[1])
            gap = (logits[at, best[at]] - logits[at, output[at]]).item()
            pytest.fail(
                f"token {at} after a prompt of {len(prompt)} is {output[at]}, not {best[at]}, which is {gap:.2g} better"
            )
        self._right.add(case)

    def check_sampled(self, prompt: Sequence[int], result: Result, sampling: Sampling) -> None:
        """Check that `sampling` chooses each token after those before it, and that the text is theirs."""
        self.check_text(result)
        case = (tuple(prompt), result.token_ids, sampling)
        if case not in self._right:
            positions = range(len(prompt), len(prompt) + len(result.token_ids))
            rows = [SamplingRow(RequestId(1), 0, 0, at, at - len(prompt), sampling) for at in positions]
            assert sample(self.logits(prompt, result.token_ids), rows, ()).tolist() == list(result.token_ids)
            self._right.add(case)

    @staticmethod
    def check_end(result: Result, max_tokens: int) -> None:
        assert EOS not in result.token_ids[:-1]
        if result.token_ids[-1] == EOS:
            assert result.finish_reason is FinishReason.STOP
        else:
            assert len(result.token_ids) == max_tokens
            assert result.finish_reason is FinishReason.LENGTH

    def check_text(self, result: Result) -> None:
        assert result.text == self.tokenizer.decode(list(result.token_ids), skip_special_tokens=True)
        assert result.usage.output_tokens == len(result.token_ids)

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert isinstance(ids, list)
        return ids


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Iterator[Reference]:
    yield Reference(model_folder)


@pytest.fixture(scope="module", params=["transformers", "native"])
def decoder(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        try:
            load_native(cache_directory() / "native")
        except NoNativeCode as error:
            pytest.skip(str(error))
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_folder: Path, decoder: str) -> AsyncIterator[Engine]:
    options = {"block_size": BLOCK_SIZE, "block_count": 1 + 26, "token_budget": BUDGET, "running_max": 32}
    async with Engine(model_folder, dtype="float32", device="cpu", decoder=decoder, **options) as opened:
        yield opened


@pytest.fixture(scope="module")
def passages(reference: Reference) -> list[list[int]]:
    """Return the texts as tokens."""
    return [reference.tokenizer(text).input_ids for text in texts.ALL]


def cut(passages: list[list[int]], length: int, chance: random.Random) -> list[int]:
    """Return `length` consecutive tokens of one of the texts that are long enough."""
    text = chance.choice([text for text in passages if len(text) >= length])
    start = chance.randint(0, len(text) - length)
    return text[start : start + length]


class Arrivals:
    """Submit requests while others run: one after every few chunks, and at every end."""

    def __init__(self, at_once: int, chunks_each: int) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._chunks_each = chunks_each
        self._chunks = 0

    async def turn(self) -> None:
        await self._turns.acquire()

    def more(self) -> None:
        self._turns.release()

    async def read(self, stream: Stream) -> Result:
        """Read to the end, and check that the chunks add up to the result."""
        texts_read: list[str] = []
        token_ids: list[int] = []
        async for chunk in stream:
            assert chunk.position == len(token_ids)
            texts_read.append(chunk.text)
            token_ids.extend(chunk.token_ids)
            self._chunks += 1
            if self._chunks % self._chunks_each == 0:
                self.more()
        self.more()
        result = await stream.result()
        assert "".join(texts_read) == result.text
        assert tuple(token_ids) == result.token_ids
        return result


async def at_rest(engine: Engine) -> None:
    """Wait until every request has given its blocks back."""
    for _ in range(100):
        if not engine.stats().running and engine.stats().blocks_free == engine.stats().blocks_total:
            return
        # Each generate() takes a step or more, so this is no busy wait.
        await engine.generate([1], max_tokens=1)
    raise AssertionError("blocks are lost")


async def test_each_output_is_that_of_transformers_for_its_prompt_alone(
    engine: Engine, reference: Reference, passages: list[list[int]]
) -> None:
    chance = random.Random(1)
    lengths = chance.sample(LENGTHS, len(LENGTHS))
    # The first come at once and together outgrow the pool: 8 of 3 blocks each fit, with their output they take 32.
    prompts = [cut(passages, length, chance) for length in [*(chance.randint(40, 48) for _ in range(8)), *lengths]]
    limits = [10] * 8 + [chance.choice([1, 2, 5, 8]) for _ in lengths]
    before = engine.stats()
    arrivals = Arrivals(at_once=8, chunks_each=6)
    tasks = []
    as_text = 0
    for prompt, limit in zip(prompts, limits, strict=True):
        await arrivals.turn()
        text = reference.tokenizer.decode(prompt)
        same = reference.tokenizer(text).input_ids == prompt
        as_text += same
        stream = engine.stream(text if same else prompt, max_tokens=limit)
        tasks.append(asyncio.create_task(arrivals.read(stream)))
    results = await asyncio.gather(*tasks)
    await at_rest(engine)
    assert as_text > 8
    assert engine.stats().preemptions > before.preemptions
    assert engine.stats().finished - before.finished == len(prompts)
    for prompt, limit, result in zip(prompts, limits, results, strict=True):
        assert result.usage.prompt_tokens == len(prompt)
        reference.check_greedy(prompt, result, limit)


async def test_transformers_generate_agrees_with_the_reference(
    engine: Engine, reference: Reference, passages: list[list[int]]
) -> None:
    """The other tests check each token in one pass over prompt and output; here `generate` runs token by token."""
    chance = random.Random(2)
    prompts = [cut(passages, length, chance) for length in (5, 60, 130)]
    results = await engine.generate_many(prompts, max_tokens=8, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.token_ids) == reference.greedy(prompt, 8)


@pytest.mark.usefixtures("one_thread")
async def test_blocks_saved_to_and_loaded_from_host_memory_change_no_output(
    model_folder: Path, decoder: str, reference: Reference, passages: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool holds less than half of what the requests need at once: requests are preempted all the time."""
    moved = dict.fromkeys(CopyKind, 0)
    kind = {"transformers": ModelRunner, "native": NativeRunner}[decoder]
    copy = kind.copy

    def counted(runner: ModelRunner | NativeRunner, copies: BlockCopies) -> None:
        moved[copies.copying] += len(copies.sources)
        copy(runner, copies)

    async def serve(engine: Engine, limits: Sequence[int]) -> list[Result]:
        arrivals = Arrivals(at_once=7, chunks_each=20)
        tasks = []
        for prompt, limit in zip(prompts, limits, strict=True):
            await arrivals.turn()
            stream = engine.stream(prompt, max_tokens=limit, ignore_eos=True)
            tasks.append(asyncio.create_task(arrivals.read(stream)))
        return await asyncio.gather(*tasks)

    monkeypatch.setattr(kind, "copy", counted)
    chance = random.Random(6)
    prompts = [cut(passages, length, chance) for length in (*(chance.randint(30, 46) for _ in range(7)), 64, 110)]
    limits = [10] * 7 + [6, 6]
    options = {"block_size": BLOCK_SIZE, "block_count": 1 + 12, "token_budget": BUDGET, "running_max": 32}
    options |= {"dtype": "float32", "device": "cpu", "decoder": decoder, "host_block_count": 100}
    async with Engine(model_folder, **options) as engine:
        results = await serve(engine, limits)
        assert engine.stats().preemptions > 0
        again = await serve(engine, [2] * len(prompts))
        await at_rest(engine)
    # What the pool has long given away is found: it has room for 12 blocks, and those of the prompts alone are 29.
    assert sum(result.usage.cached_tokens > 0 for result in again) > 7
    assert moved[CopyKind.SAVE] > 20
    assert moved[CopyKind.LOAD] > 15
    for prompt, limit, result, repeated in zip(prompts, limits, results, again, strict=True):
        assert len(result.token_ids) == limit
        assert repeated.token_ids == result.token_ids[:2]
        reference.check_best(prompt, result)


async def test_shared_prefixes_are_found_and_change_no_output(
    engine: Engine, reference: Reference, passages: list[list[int]]
) -> None:
    chance = random.Random(3)
    stem = passages[1][300:420]
    prompts = [
        stem[: chance.choice([32, 50, 64, 100, 120])] + cut(passages, chance.randint(1, 40), chance) for _ in "12345678"
    ]
    # The same prompt twice, whole blocks long: all but its last block can be found.
    prompts += [stem[:96], stem[:96]]
    arrivals = Arrivals(at_once=2, chunks_each=6)
    tasks = []
    for prompt in prompts:
        await arrivals.turn()
        tasks.append(asyncio.create_task(arrivals.read(engine.stream(prompt, max_tokens=5))))
    results = await asyncio.gather(*tasks)
    assert sum(result.usage.cached_tokens > 0 for result in results) >= 5
    for prompt, result in zip(prompts, results, strict=True):
        assert result.usage.cached_tokens % BLOCK_SIZE == 0
        assert result.usage.cached_tokens < len(prompt)
        reference.check_greedy(prompt, result, 5)


async def test_chat_of_several_turns(engine: Engine, reference: Reference) -> None:
    chat = engine.chat(system="You are a patient teacher. Keep it short.", max_tokens=6)
    for turn, text in enumerate(["Why is the sky blue?", "And at sunset? 🌅", "Danke! Zähle bis fünf."]):
        prompt = reference.chat_ids([*chat.messages, {"role": "user", "content": text}])
        result = await chat.say(text).result()
        assert result.usage.prompt_tokens == len(prompt)
        assert (result.usage.cached_tokens > 0) or turn == 0
        reference.check_greedy(prompt, result, 6)
        assert chat.messages[-1] == {"role": "assistant", "content": result.text}


async def test_cancelled_requests_change_no_other_output(
    engine: Engine, reference: Reference, passages: list[list[int]]
) -> None:
    chance = random.Random(4)
    arrivals = Arrivals(at_once=8, chunks_each=4)

    async def leave(stream: Stream, chunks: int) -> None:
        if chunks == 0:
            await stream.aclose()
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == chunks:
                break

    kept, readers, leavers = [], [], []
    for index in range(14):
        await arrivals.turn()
        prompt = cut(passages, chance.randint(20, 60), chance)
        if index % 2:
            kept.append(prompt)
            readers.append(asyncio.create_task(arrivals.read(engine.stream(prompt, max_tokens=7))))
        else:
            leavers.append(asyncio.create_task(leave(engine.stream(prompt, max_tokens=40), index // 2)))
            arrivals.more()
    for task in leavers[-2:]:
        task.cancel()
    results = await asyncio.gather(*readers)
    await asyncio.gather(*leavers, return_exceptions=True)
    await at_rest(engine)
    for prompt, result in zip(kept, results, strict=True):
        reference.check_greedy(prompt, result, 7)


SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
)


async def test_sampled_output_depends_on_its_seed_alone(
    engine: Engine, reference: Reference, passages: list[list[int]]
) -> None:
    chance = random.Random(5)
    prompts = [cut(passages, length, chance) for length in (93, 94, 95, 92, 93, 94)]
    wishes = [{**SAMPLED[i % 4], "seed": 1000 + i, "max_tokens": 6, "ignore_eos": True} for i in range(len(prompts))]
    before = engine.stats().preemptions
    together = await asyncio.gather(*(engine.generate(p, **w) for p, w in zip(prompts, wishes, strict=True)))
    assert engine.stats().preemptions > before
    for prompt, wish, result in zip(prompts, wishes, together, strict=True):
        reference.check_sampled(prompt, result, Sampling(**wish))
    # Alone, and once more with the prompt's prefix from the cache; the newest are those that were preempted.
    for index in (0, 4, 4):
        alone = await engine.generate(prompts[index], **wishes[index])
        assert alone.token_ids == together[index].token_ids
    assert alone.usage.cached_tokens > 0
    other = await engine.generate(prompts[0], **{**wishes[0], "seed": 77})
    assert other.token_ids != together[0].token_ids


async def test_requests_end_where_their_tokens_say(engine: Engine, reference: Reference) -> None:
    prompt = reference.chat_ids([{"role": "user", "content": QUESTION}])
    tokens = reference.greedy(prompt, 16)
    end = tokens.index(EOS)
    assert 1 <= end < 12, "the answer to QUESTION must end within the limit"

    plain, beyond, least = await asyncio.gather(
        engine.generate(prompt, max_tokens=16),
        engine.generate(prompt, max_tokens=16, ignore_eos=True),
        engine.generate(prompt, max_tokens=16, min_tokens=end + 3),
    )
    assert list(plain.token_ids) == tokens[: end + 1]
    assert plain.finish_reason is FinishReason.STOP
    assert list(beyond.token_ids) == tokens
    assert beyond.finish_reason is FinishReason.LENGTH
    assert list(least.token_ids) == reference.greedy_after(prompt, 16, end + 3)
    assert EOS not in least.token_ids[: end + 3]
    for result in (plain, beyond, least):
        reference.check_text(result)


async def test_stop_tokens_and_stop_strings_cut_at_the_first_match(
    engine: Engine, reference: Reference, passages: list[list[int]]
) -> None:
    prompt = passages[0][100:160]
    tokens = reference.greedy(prompt, 16)
    assert EOS not in tokens
    decode = reference.tokenizer.decode
    text = decode(tokens)
    stop_id = tokens[9]
    stops = [text[20:24], text[41:42], decode(tokens[5:8])]
    at_token, *at_text = await asyncio.gather(
        engine.generate(prompt, max_tokens=16, stop_token_ids=[stop_id]),
        *(engine.generate(prompt, max_tokens=16, stop=["never said", stop]) for stop in stops),
    )
    assert list(at_token.token_ids) == tokens[: tokens.index(stop_id) + 1]
    assert at_token.finish_reason is FinishReason.STOP
    reference.check_text(at_token)
    for stop, result in zip(stops, at_text, strict=True):
        assert result.text == text[: text.index(stop)]
        assert result.finish_reason is FinishReason.STOP
        count = next(n for n in range(1, len(tokens) + 1) if stop in decode(tokens[:n]))
        assert list(result.token_ids) == tokens[:count]
    early = await engine.generate(prompt, max_tokens=16, stop_token_ids=[stop_id], min_tokens=12)
    assert stop_id not in early.token_ids[:12]
    assert list(early.token_ids[: tokens.index(stop_id)]) == tokens[: tokens.index(stop_id)]
