"""The rows of the executor and the flat batch of a step."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from support import Recorder

from cuelight.actors.executor.batch import Batch, DeviceRows
from cuelight.messages.executor import ExecuteStep, Extension, Row, RowChunk
from cuelight.messages.request import RequestId, Sampling

GREEDY = Sampling()


def row(request_id: int, tokens: list[int], blocks: list[int], computed: int = 0, prompt: int | None = None) -> Row:
    prompt_tokens = len(tokens) if prompt is None else prompt
    return Row(RequestId(request_id), tuple(tokens), prompt_tokens, computed, tuple(blocks), GREEDY)


def step(
    chunks: Mapping[int, int],
    *,
    rows: tuple[Row, ...] = (),
    ended: tuple[int, ...] = (),
    extensions: Mapping[int, list[int]] | None = None,
    epoch: int = 0,
    number: int = 0,
) -> ExecuteStep:
    return ExecuteStep(
        epoch=epoch,
        step=number,
        life=0,
        ended=tuple(RequestId(request_id) for request_id in ended),
        rows=rows,
        extensions=tuple(Extension(RequestId(r), tuple(blocks)) for r, blocks in (extensions or {}).items()),
        chunks=tuple(RowChunk(RequestId(r), count) for r, count in chunks.items()),
        reply_to=Recorder(),
    )


def flat(batch: Batch) -> list[tuple[int, int, int, int]]:
    """(token, position, block, offset) of each token."""
    columns = (batch.token_ids, batch.positions, batch.blocks, batch.offsets)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_whole_prompt_is_laid_out_over_its_blocks_and_samples_once() -> None:
    batch = DeviceRows(4).prepare(step({1: 6}, rows=(row(1, [10, 11, 12, 13, 14, 15], [7, 3]),), epoch=5, number=9))
    assert (batch.epoch, batch.step) == (5, 9)
    assert flat(batch) == [(10, 0, 7, 0), (11, 1, 7, 1), (12, 2, 7, 2), (13, 3, 7, 3), (14, 4, 3, 0), (15, 5, 3, 1)]
    assert batch.fed == []
    (chunk,) = batch.chunks
    assert (chunk.start, chunk.stop, chunk.context_length) == (0, 6, 6)
    assert chunk.block_ids.tolist() == [7, 3]
    (drawn,) = batch.sampling_rows
    assert (drawn.request_id, drawn.slot, drawn.index, drawn.position, drawn.output_index) == (1, 0, 5, 6, 0)


def test_rule_partial_chunk_samples_nothing_and_the_next_chunk_continues() -> None:
    rows = DeviceRows(4)
    first = rows.prepare(step({1: 3}, rows=(row(1, [10, 11, 12, 13, 14], [7, 3]),)))
    assert first.sampling_rows == []
    assert first.chunks[0].block_ids.tolist() == [7], "only the blocks that hold its context"
    second = rows.prepare(step({1: 1}))
    assert second.sampling_rows == []
    assert second.fed == [], "a chunk of one known token is not a decode"
    third = rows.prepare(step({1: 1}))
    assert flat(third) == [(14, 4, 3, 0)]
    assert third.chunks[0].context_length == 5
    assert [drawn.position for drawn in third.sampling_rows] == [5]


def test_decode_takes_its_token_from_the_device() -> None:
    rows = DeviceRows(4)
    rows.prepare(step({1: 2}, rows=(row(1, [10, 11], [7]),)))
    for index in range(1, 3):
        batch = rows.prepare(step({1: 1}))
        assert (batch.fed, batch.fed_slots) == ([0], [0])
        assert flat(batch)[0][1:] == (1 + index, 7, 1 + index)
        assert (batch.sampling_rows[0].position, batch.sampling_rows[0].output_index) == (2 + index, index)


def test_decodes_and_prefills_share_a_batch_in_the_given_order() -> None:
    rows = DeviceRows(2)
    rows.prepare(step({1: 2, 2: 1}, rows=(row(1, [10, 11], [1]), row(2, [20], [2]))))
    grown = {1: [3], 2: []}
    batch = rows.prepare(step({2: 1, 1: 1, 3: 3}, rows=(row(3, [30, 31, 32, 33], [4, 5]),), extensions=grown))
    assert (batch.fed, batch.fed_slots) == ([0, 1], [1, 0])
    assert [(s.start, s.stop, s.context_length) for s in batch.chunks] == [(0, 1, 2), (1, 2, 3), (2, 5, 3)]
    assert [(drawn.request_id, drawn.index) for drawn in batch.sampling_rows] == [(2, 0), (1, 1)]
    assert flat(batch)[2:] == [(30, 0, 4, 0), (31, 1, 4, 1), (32, 2, 5, 0)]
    assert flat(batch)[1][1:] == (2, 3, 0), "into the block that came with this step"


def test_row_with_cached_tokens_starts_behind_them() -> None:
    batch = DeviceRows(2).prepare(step({1: 1}, rows=(row(1, [10, 11, 12, 13, 14], [8, 9, 4], computed=4),)))
    assert flat(batch) == [(14, 4, 4, 0)]
    assert batch.fed == []
    assert batch.chunks[0].block_ids.tolist() == [8, 9, 4]
    assert len(batch.sampling_rows) == 1


def test_preempted_row_returns_with_its_output_as_known_tokens() -> None:
    """Earlier samples count as output, so that `min_tokens` and the seed's positions continue."""
    batch = DeviceRows(4).prepare(step({1: 5}, rows=(row(1, [10, 11, 90, 91, 92], [1, 2], prompt=2),)))
    assert batch.token_ids.tolist() == [10, 11, 90, 91, 92]
    assert batch.fed == []
    assert (batch.sampling_rows[0].position, batch.sampling_rows[0].output_index) == (5, 3)


def test_lowest_freed_slots_are_reused_even_within_the_step() -> None:
    rows = DeviceRows(4)
    rows.prepare(step({1: 1, 2: 1, 3: 1}, rows=tuple(row(i, [i], [i]) for i in (1, 2, 3))))
    assert rows.slot_count == 3
    batch = rows.prepare(step({3: 1, 4: 1, 5: 1, 6: 1}, ended=(2, 1), rows=tuple(row(i, [i], [i]) for i in (4, 5, 6))))
    assert [drawn.slot for drawn in batch.sampling_rows] == [2, 0, 1, 3]
    assert batch.fed_slots == [2]
    assert rows.slot_count == 4


def test_request_ends_and_returns_in_one_step() -> None:
    rows = DeviceRows(4)
    rows.prepare(step({1: 2}, rows=(row(1, [10, 11], [1]),)))
    batch = rows.prepare(step({1: 3}, ended=(1,), rows=(row(1, [10, 11, 12], [5], prompt=2),)))
    assert flat(batch) == [(10, 0, 5, 0), (11, 1, 5, 1), (12, 2, 5, 2)]


def test_new_epoch_starts_with_no_rows_and_all_slots() -> None:
    rows = DeviceRows(4)
    rows.prepare(step({1: 1, 2: 1}, rows=(row(1, [1], [1]), row(2, [2], [2]))))
    batch = rows.prepare(step({1: 2}, rows=(row(1, [1, 7], [3], prompt=1),), epoch=1))
    assert batch.token_ids.tolist() == [1, 7]
    assert batch.sampling_rows[0].slot == 0
    assert rows.slot_count == 1
    with pytest.raises(KeyError):
        rows.prepare(step({2: 1}, epoch=1))


def test_empty_step_is_an_empty_batch() -> None:
    rows = DeviceRows(4)
    rows.prepare(step({1: 1}, rows=(row(1, [1], [1]),)))
    batch = rows.prepare(step({}, ended=(1,)))
    assert (len(batch.token_ids), batch.chunks, batch.sampling_rows) == (0, [], [])


def test_earlier_batch_keeps_its_block_table_when_the_row_grows() -> None:
    """The device may still run the earlier batch while the next is prepared."""
    rows = DeviceRows(1)
    first = rows.prepare(step({1: 2}, rows=(row(1, [10, 11], [7, 8]),)))
    rows.prepare(step({1: 1}, extensions={1: [9, 4]}))
    assert first.chunks[0].block_ids.tolist() == [7, 8]


@pytest.mark.parametrize(
    ("chunk", "what"), [({1: 3}, "tokens that exist"), ({1: 2}, "covers the chunk")], ids=["tokens", "blocks"]
)
def test_impossible_step_is_an_assertion_error(chunk: dict[int, int], what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        DeviceRows(1).prepare(step(chunk, rows=(row(1, [10, 11], [7]),)))


@pytest.mark.parametrize("seed", range(20))
def test_each_token_is_computed_once_at_its_position_in_any_schedule(seed: int) -> None:
    chance = random.Random(seed)
    block_size = chance.choice([1, 3, 16])
    rows = DeviceRows(block_size)
    free = list(range(1, 400))
    chance.shuffle(free)
    blocks: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    for number in range(60):
        ended = [request_id for request_id in blocks if chance.random() < 0.08]
        for request_id in ended:
            free += blocks.pop(request_id)
        entering = []
        if len(blocks) < 8:
            prompt = [chance.randrange(1000) for _ in range(chance.randint(1, 20))]
            blocks[number] = [free.pop() for _ in range(-(-len(prompt) // block_size))]
            prompts[number], computed[number] = prompt, 0
            entering.append(row(number, prompt, blocks[number]))
        chunks: dict[int, int] = {}
        extensions: dict[int, list[int]] = {}
        for request_id, held in blocks.items():
            left = len(prompts[request_id]) - computed[request_id]
            chunks[request_id] = chance.randint(1, left) if left > 0 else 1
            if computed[request_id] + chunks[request_id] > len(held) * block_size:
                extensions[request_id] = [free.pop() for _ in range(chance.randint(1, 2))]
                held.extend(extensions[request_id])
        batch = rows.prepare(
            step(chunks, rows=tuple(entering), ended=tuple(ended), extensions=extensions, number=number)
        )
        laid_out = flat(batch)
        drawn = {int(sampling_row.request_id): sampling_row for sampling_row in batch.sampling_rows}
        for (request_id, count), chunk in zip(chunks.items(), batch.chunks, strict=True):
            begin, prompt = computed[request_id], prompts[request_id]
            for index, position in enumerate(range(begin, begin + count), start=chunk.start):
                place = (position, blocks[request_id][position // block_size], position % block_size)
                assert laid_out[index][1:] == place
                if position < len(prompt):
                    assert laid_out[index][0] == prompt[position]
                assert (index in batch.fed) == (position >= len(prompt))
            computed[request_id] = begin + count
            assert chunk.context_length == begin + count
            assert (request_id in drawn) == (begin + count >= len(prompt))
        slots = [sampling_row.slot for sampling_row in batch.sampling_rows]
        assert len(set(slots)) == len(slots), "a slot belongs to one row"
        assert [drawn_slot for drawn_slot in batch.fed_slots if drawn_slot not in slots] == []
