"""Plans of steps for the kernels on block tables, carried out in plain torch."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from attention_cases import MIXES, SCALING, SHAPES, Case, Paged, check
from plain_kernels import PlainKernels

from cuelight.actors.executor.batch import Batch, BatchChunk
from cuelight.actors.executor.model.attention_triton import ITEM, Tiling, TritonBackend, TritonPlanner

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def backend(case: Case, *, span: int | None = None, processors: int = 2) -> TritonBackend:
    least = 1 << (case.groups - 1).bit_length()
    tiling = Tiling(decode_rows=least, prefill_rows=4 * least, processors=processors)
    return TritonBackend(PlainKernels(), TritonPlanner(case.groups, case.kv_heads, case.block_size, tiling, span), CPU)


@pytest.mark.parametrize("span", [None, 7])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("shape", ["grouped", "window", "window, capped, bfloat16"])
def test_planned_attention_matches_float64(shape: str, mix: str, span: int | None) -> None:
    case = dataclasses.replace(SHAPES[shape], rows=MIXES[mix])
    check(case, backend(case, span=span), CPU)


@pytest.mark.parametrize("seed", range(20))
def test_plan_covers_each_token_and_key_once(seed: int) -> None:
    """Each pair of a token and a key it attends to is in exactly one item, and partial results are merged once."""
    chance = random.Random(seed)
    groups, size = chance.choice([1, 3, 8]), chance.choice([1, 16])
    rows = [(length, chance.choice([1, 1, chance.randint(1, length)])) for length in chance.sample(range(1, 5000), 9)]
    if seed % 3 == 0:
        rows = [(length, 1) for length, _ in rows]
    tiling = Tiling(16, 64, processors=chance.choice([1, 8, 132]))
    span = chance.choice([None, None, 100, 512])
    batch = step(rows, size)
    tokens = chance.choice([None, len(batch.token_ids), len(batch.token_ids) + 11])
    plan = TritonPlanner(groups, 2, size, tiling, span).plan(batch, tokens)
    at_items, at_merges, at_tables = plan.key.sections
    items = plan.numbers[at_items:at_merges].reshape(-1, ITEM).tolist()
    seen = np.zeros((tokens or len(batch.token_ids), 5000), int)
    of_tile: dict[int, list[int]] = {}
    tables = {each.start: each for each in batch.chunks}
    padded = set()
    for table, first, count, position, begin, end, place, _ in items:
        assert count * groups <= plan.key.rows
        if count == 0:
            continue
        if first >= len(batch.token_ids):
            assert end == 0 and place == -1
            padded |= set(range(first, first + count))
            continue
        seen[first : first + count, begin:end] += 1
        if place >= 0:
            of_tile.setdefault(first, []).append(place)
        mine = next(each for start, each in sorted(tables.items(), reverse=True) if start <= first)
        assert first + count <= mine.stop
        assert position == mine.context_length - mine.stop + first
        assert plan.numbers[at_tables:][table] == mine.block_ids[0]
        assert end <= position + count
    for each in batch.chunks:
        for token in range(each.start, each.stop):
            sees = each.context_length - each.stop + token + 1
            assert (seen[token, :sees] == 1).all()
    assert padded == set(range(len(batch.token_ids), tokens or 0))
    merges = plan.numbers[at_merges:at_tables][: 4 * plan.key.merges].reshape(-1, 4).tolist()
    merged = {first: list(range(place, place + parts)) for first, count, place, parts in merges if count}
    assert merged == of_tile
    places = [place for of_one in of_tile.values() for place in of_one]
    assert sorted(places) == list(range(len(places)))
    assert len(places) <= plan.key.partials


def step(rows: list[tuple[int, int]], size: int) -> Batch:
    chunks, start, block = [], 0, 1
    for length, count in rows:
        table = np.arange(block, block + -(-length // size))
        chunks.append(BatchChunk(start, start + count, length, table))
        start, block = start + count, block + len(table)
    zeros = np.zeros(start, np.int64)
    return Batch(0, 0, zeros, zeros, zeros, zeros, chunks=chunks)


def test_decodes_of_one_padded_size_share_a_key_whatever_their_contexts() -> None:
    planner = TritonPlanner(4, 8, 16, Tiling(16, 64, processors=132))
    chance = random.Random(1)
    keys = set()
    for _ in range(300):
        longest = chance.choice([10, 1000, 30000])
        rows = [(chance.randint(1, longest), 1) for _ in range(chance.randint(25, 32))]
        keys.add(planner.plan(step(rows, 16), 32).key)
    assert len(keys) == 1
    many = {planner.plan(step([(chance.randint(1, 2000), 1) for _ in range(250)], 16), 256).key for _ in range(50)}
    assert len(many) == 1
    assert many.pop().merges == 0, "rows enough for all processors"
    uneven = planner.plan(step([(30000, 1)] + [(100, 1)] * 249, 16), 256).key
    assert uneven.merges > 0, "the longest row would delay all others"


def test_few_long_rows_are_divided_among_all_processors() -> None:
    planner = TritonPlanner(4, 8, 16, Tiling(16, 64, processors=132))
    for rows in ([(30000, 1)], [(8000, 1)] * 4):
        programs = 8 * planner.plan(step(rows, 16)).key.items
        assert programs >= 132, "no processor is idle"
    assert planner.plan(step([(100, 1)] * 3, 16)).key.items == 3, "short rows are not worth dividing"


def test_bound_plan_serves_every_step_of_its_key() -> None:
    """As with a graph: bound once; afterwards only the numbers, queries, keys and values change."""
    case = Case(((9, 1), (300, 1), (31, 1)))
    backend_of_it = backend(case, processors=4)
    others = [dataclasses.replace(case, rows=rows, seed=1) for rows in (((700, 1), (1, 1)), ((5, 1),))]
    plan = backend_of_it.plan(Paged(case, CPU, is_token_major=False).batch, 4)
    numbers = torch.zeros(2 * len(plan.numbers) + 100, dtype=torch.int32)
    for one in (case, *others):
        paged = Paged(one, CPU, is_token_major=False)
        now = backend_of_it.plan(paged.batch, 4)
        assert now.key == plan.key
        numbers[: len(now.numbers)] = torch.from_numpy(now.numbers)
        pads = 4 - len(one.rows)
        k, v = (torch.cat([paged.new(each[0]), torch.full((pads, 2, 16), 7.0)]) for each in (paged.keys, paged.values))
        q = torch.cat([paged.q, torch.full((pads, 6, 16), 7.0)])
        got = backend_of_it.bind(paged.pool, plan.key, numbers).attend(0, q, k, v, SCALING)
        torch.testing.assert_close(got[: 4 - pads].double(), paged.expected(0), rtol=1e-4, atol=1e-4)
        assert (got[4 - pads :] == 0).all(), "padded rows give zeros"
        assert paged.pool.keys[0][0].isnan().all(), "padded rows are not stored"


@pytest.mark.parametrize("length", [250, 4321, 65_537, 300_001])
def test_no_part_of_a_long_row_is_without_keys(length: int) -> None:
    plan = TritonPlanner(4, 8, 16, Tiling(16, 64, processors=1), span=8 if length < 5000 else 256).plan(
        step([(length, 1)], 16)
    )
    at_items, at_merges, _ = plan.key.sections
    items = plan.numbers[at_items:at_merges].reshape(-1, ITEM)
    assert len(items) > 20
    assert (items[:, 4] < items[:, 5]).all()
