"""A batch job: many prompts in, one JSON line for each out, with a progress bar.

    python examples/batch.py > answers.jsonl
    python examples/batch.py prompts.txt --max-tokens 100 > answers.jsonl

The file has one question a line. Results come in the order of the questions, whichever finishes first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

from cuelight import Engine

QUESTIONS = (
    "What is the capital of France?",
    "Name a prime number above ten.",
    "What do bees make?",
    "Which planet is closest to the Sun?",
)


async def main(questions: list[str], max_tokens: int) -> None:
    prompts = [[{"role": "user", "content": question}] for question in questions]
    async with Engine(progress=True) as engine:
        results = await engine.generate_many(prompts, progress=True, max_tokens=max_tokens)
    for question, result in zip(questions, results, strict=True):
        answer = {"question": question, "answer": result.text, "finish_reason": result.finish_reason}
        print(json.dumps(answer | {"output_tokens": result.usage.output_tokens}, ensure_ascii=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Answer many questions in one batch.")
    parser.add_argument("file", nargs="?", type=Path, help="one question a line; without it, a few built-in ones")
    parser.add_argument("--max-tokens", type=int, default=48, help="length of an answer (default: %(default)s)")
    arguments = parser.parse_args()
    lines = arguments.file.read_text(encoding="utf-8").splitlines() if arguments.file else QUESTIONS
    asyncio.run(main([line.strip() for line in lines if line.strip()], arguments.max_tokens))
