"""Reload and warm restart with real arithmetic: small random models with the default model's tokens."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Unpack

import pytest
import transformers
from engines import NET_SECONDS, at_rest, until
from journals import killed, turns
from tiny_models import GROUPED, save

from cuelight import Engine, Result, errors
from cuelight.config import EngineOptions, RequestOptions

pytestmark = pytest.mark.model

VOCABULARY = 49_152
ASKED: list[tuple[str, RequestOptions]] = [
    (
        f"Tell me about number {number}.",
        RequestOptions(max_tokens=60, ignore_eos=True, temperature=number % 2, seed=number),
    )
    for number in range(6)
]


@pytest.fixture(scope="module")
def folders(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models with the same tokenizer."""
    made = []
    for name, theta in (("first", 10_000.0), ("other", 100.0)):
        folder = tmp_path_factory.mktemp(name)
        shape = {**GROUPED, "vocab_size": VOCABULARY}
        save(transformers.LlamaConfig(**shape, rope_parameters={"rope_type": "default", "rope_theta": theta}), folder)
        for file in model_folder.glob("*token*"):
            shutil.copy(file, folder)
        made.append(folder)
    return made[0], made[1]


@asynccontextmanager
async def serving(folder: Path, **options: Unpack[EngineOptions]) -> AsyncIterator[Engine]:
    small = EngineOptions(dtype="float32", block_count=256, block_size=8, running_max=4, device="cpu")
    async with asyncio.timeout(NET_SECONDS), Engine(folder, **small, **options) as engine:
        yield engine


UNDISTURBED: dict[Path, list[Result]] = {}


async def served(folder: Path) -> list[Result]:
    """The outputs of an undisturbed engine."""
    if folder not in UNDISTURBED:
        async with serving(folder) as engine:
            asking = [engine.generate(prompt, **asked) for prompt, asked in ASKED]
            UNDISTURBED[folder] = list(await asyncio.gather(*asking))
    return UNDISTURBED[folder]


async def test_streams_continue_with_the_same_arithmetic(folders: tuple[Path, Path], tmp_path: Path) -> None:
    expected = await served(folders[0])
    journal = tmp_path / "journal"
    async with serving(folders[0], journal=journal, resume=True) as engine:
        streams = [engine.stream(prompt, **asked) for prompt, asked in ASKED]
        await until(lambda: all(len(stream.inbox.token_ids) > 5 for stream in streams[:4]))
        seen = [len(stream.inbox.token_ids) for stream in streams]
        heads = ["".join(stream.inbox.texts) for stream in streams]
        await turns()
        file, same = killed(journal), killed(journal)
        for stream in streams:
            await stream.aclose()
    async with serving(folders[0], journal=file, resume=True) as engine:
        for stream, had, head, undisturbed in zip(streams, seen, heads, expected, strict=True):
            again = engine.resume(stream.request_id, had)
            text = "".join([chunk.text async for chunk in again])
            result = await again.result()
            assert result.token_ids == undisturbed.token_ids
            assert head + text == result.text == undisturbed.text
        await until(lambda: at_rest(engine))
    with pytest.raises(errors.WrongJournal, match="another model"):
        await Engine(folders[1], journal=same, resume=True).start()


@pytest.mark.parametrize("executor", ["thread", "process"])
async def test_other_model_takes_over(folders: tuple[Path, Path], executor: str) -> None:
    before, after = await served(folders[0]), await served(folders[1])
    async with serving(folders[0], executor=executor) as engine:
        streams = [engine.stream(prompt, **asked) for prompt, asked in ASKED]
        await until(lambda: all(len(stream.inbox.token_ids) > 5 for stream in streams[:4]))
        await engine.reload(folders[1], running="finish")
        for stream, old, new in zip(streams, before, after, strict=True):
            assert (await stream.result()).token_ids in (old.token_ids, new.token_ids)
        assert [(await stream.result()).token_ids for stream in streams[:4]] == [old.token_ids for old in before[:4]]

        streams = [engine.stream(prompt, **asked) for prompt, asked in ASKED]
        await until(lambda: all(len(stream.inbox.token_ids) > 5 for stream in streams[:4]))
        await engine.reload(folders[0], running="recompute")
        results = [await stream.result() for stream in streams]
        for result, old in zip(results[:4], after[:4], strict=True):
            assert result.token_ids[:5] == old.token_ids[:5], "the output continues after the first model's tokens"
            assert len(result.token_ids) == 60
        for (prompt, asked), new in zip(ASKED, before, strict=True):
            assert (await engine.generate(prompt, **asked)).token_ids == new.token_ids
        await until(lambda: at_rest(engine))


async def test_other_model_continues_as_if_the_tokens_were_its_prompt(folders: tuple[Path, Path]) -> None:
    from cuelight.actors.intake.tokenizer import PromptEncoder

    prompt, asked = "Tell me a long story.", RequestOptions(max_tokens=150, ignore_eos=True)
    ids = PromptEncoder.load(folders[0]).encode(prompt, 1000)
    async with serving(folders[0]) as engine:
        first = await engine.generate(prompt, **asked)
        stream = engine.stream(prompt, **asked)
        await until(lambda: len(stream.inbox.token_ids) > 5)
        await engine.reload(folders[1], running="recompute")
        tokens = (await stream.result()).token_ids
        common = next(at for at, pair in enumerate(zip(tokens, first.token_ids, strict=True)) if len({*pair}) > 1)
        rest = await engine.generate([*ids, *tokens[:common]], **{**asked, "max_tokens": 150 - common})
        assert rest.token_ids == tokens[common:]
