"""Several chats at once on one engine: their answers come interleaved, and their common beginning is computed once.

    python examples/concurrent_chats.py

Each chat asks two questions. All share a system prompt, and each second question repeats the first exchange. The prefix
cache holds those tokens already, and `engine.stats()` says how many it saved.
"""

from __future__ import annotations

import asyncio

from cuelight import Chat, Engine

SYSTEM = "You are a guide in a small museum of clocks. You are friendly and brief, and you speak about clocks only."

QUESTIONS = {
    "A": ("How does a sundial work?", "And at night?"),
    "B": ("Who invented the pendulum clock?", "When was that?"),
    "C": ("What is a cuckoo clock?", "Where do they come from?"),
}


async def visit(name: str, chat: Chat, order: list[tuple[str, int]]) -> None:
    """One visitor's conversation; `order` notes whose output came when, and how many tokens of it."""
    for question in QUESTIONS[name]:
        async for chunk in chat.say(question):
            order.append((name, len(chunk.token_ids)))  # noqa: PERF401  # at the moment it comes, not at the end


async def main() -> None:
    order: list[tuple[str, int]] = []
    async with Engine(progress=True) as engine:
        chats = {name: engine.chat(system=SYSTEM, max_tokens=16) for name in QUESTIONS}
        async with asyncio.TaskGroup() as group:
            for name, chat in chats.items():
                group.create_task(visit(name, chat, order))
        stats = engine.stats()
    for name, chat in chats.items():
        for message in chat.messages[1:]:
            print(f"{name} {message['role']:>9}: {message['content']}")
    print(f"Whose tokens came when: {''.join(name * token_count for name, token_count in order)}")
    print(f"{stats.finished} answers in {stats.steps} steps")
    print(f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens came from the prefix cache")


if __name__ == "__main__":
    asyncio.run(main())
