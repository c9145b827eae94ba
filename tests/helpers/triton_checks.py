"""What is done in a process of Triton's own: see `interpreter`."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
from attention_cases import SCALING, Case, Paged, check
from tiny_models import Driver, greedy_alone, options, random_prompts, save
from transformers import PreTrainedConfig

from cuelight.actors.executor.model.attention_triton import ITEM, MERGE, TritonBackend
from cuelight.actors.executor.model.backends import choose, planner_for
from cuelight.actors.executor.model.loading import load
from cuelight.actors.executor.runner import ModelRunner

CPU = torch.device("cpu")


def triton_backend(case: Case, device: torch.device, span: int | None, processors: int = 1) -> TritonBackend:
    """As it is chosen, but for how keys are divided."""
    from cuelight.actors.executor.model.triton_kernels import TritonKernels

    return TritonBackend(TritonKernels(), planner_for(case.spec(device), processors, span), device)


def kernels_are_right(case: Case, span: int | None, device: torch.device = CPU) -> None:
    check(case, triton_backend(case, device, span), device)


def a_row_is_the_same_in_any_company(case: Case, span: int, device: torch.device = CPU) -> None:
    """Bit for bit, where the division of keys is fixed."""
    paged = Paged(case, device, is_token_major=False)
    backend = triton_backend(case, device, span)
    k, v = paged.new(paged.keys[0]), paged.new(paged.values[0])
    together = backend.step(paged.pool, paged.batch).attend(0, paged.q, k, v, SCALING)
    for chunk in paged.batch.chunks:
        mine = slice(chunk.start, chunk.stop)
        batch = dataclasses.replace(
            paged.batch,
            token_ids=paged.batch.token_ids[mine],
            blocks=paged.batch.blocks[mine],
            offsets=paged.batch.offsets[mine],
            chunks=[dataclasses.replace(chunk, start=0, stop=chunk.stop - chunk.start)],
        )
        alone = backend.step(paged.pool, batch).attend(0, paged.q[mine], k[mine], v[mine], SCALING)
        assert torch.equal(alone, together[mine])


def padding_is_nothing(case: Case, tokens: int, device: torch.device = CPU) -> None:
    """A step of fewer tokens than its graph has: others' output is zeros, and they store nothing."""
    paged = Paged(case, device, is_token_major=False)
    backend = triton_backend(case, device, None, processors=8)
    plan = backend.plan(paged.batch, tokens)
    assert plan.key.merges, "some of what pads the grids is there"
    pads = tokens - len(case.rows)
    k, v, q = (
        torch.cat([each, torch.full((pads, *each.shape[1:]), 7.0, device=device)])
        for each in (paged.new(paged.keys[0]), paged.new(paged.values[0]), paged.q)
    )
    numbers = torch.cat([torch.from_numpy(plan.numbers), torch.full((99,), 1 << 30, dtype=torch.int32)]).to(device)
    got = backend.bind(paged.pool, plan.key, numbers).attend(0, q, k, v, SCALING)
    torch.testing.assert_close(got[:-pads].double().cpu(), paged.expected(0), rtol=1e-4, atol=1e-4)
    assert (got[-pads:] == 0).all()
    assert paged.pool.keys[0][0].isnan().all() and paged.pool.values[0][0].isnan().all()


def outputs_are_those_of_transformers(config: PreTrainedConfig, device: str = "cpu") -> None:
    """Random chunks of random rows, through the device's own code."""
    count = 2 if device == "cpu" else 4  # the interpreter takes a tenth of a second for each step
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save(config, folder)
        prompts = random_prompts(3)[:5]
        driver = Driver(ModelRunner(load(options(folder, attention="triton", device=device))), prompts, seed=5)
        driver.run(output_tokens=count)
    assert driver.failed == {}
    for index, prompt in enumerate(prompts):
        assert driver.outputs[index] == greedy_alone(model, prompt, count)


def chosen(case: Case) -> str:
    return choose("triton", case.spec(CPU), None).name


def compiled(capability: int, type_name: str, case: Case, rows: int) -> int:
    """Compile all three kernels for a GPU that need not be here; gives the shared memory that attention takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cuelight.actors.executor.model import triton_kernels as kernels

    padded = kernels._padded(case.head_dim)
    heads = {"GROUPS": case.groups, "HEADS": case.kv_heads * case.groups, "DIM": case.head_dim, "DIM_PADDED": padded}
    sizes = {**heads, "BLOCK_SIZE": case.block_size, "ROWS": rows, "ITEM": ITEM, "MERGE": MERGE}
    sizes |= {
        "KEYS": kernels._keys_at_once(case.head_dim, case.dtype),
        "HEADS_PADDED": kernels._padded(case.kv_heads, 1),
    }
    sizes |= {"HAS_WINDOW": case.window is not None, "HAS_CAP": case.softcap is not None, "IS_WIDENED": False}
    types = dict.fromkeys(("q", "k", "v", "keys", "values", "out"), f"*{type_name}")
    types |= dict.fromkeys(("items", "merges", "tables", "slots"), "*i32")
    types |= {"partials": "*fp32", "sums": "*fp32", "scale": "fp32", "cap": "fp32"}
    shared = 0
    for kernel in (kernels._write, kernels._attend, kernels._merge):
        constants = {name: sizes[name] for name in kernel.arg_names if name in sizes}
        signature = {name: "constexpr" if name in sizes else types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        target = GPUTarget("cuda", capability, 32)
        done = triton.compile(source, target=target, options=kernels.LAUNCH)
        assert done.asm["cubin"]
        shared = max(shared, done.metadata.shared)
    return shared
