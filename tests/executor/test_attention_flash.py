"""The backend on torch's `varlen_attn`: the arguments of that function, and the reasons for refusing the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from attention_cases import MIXES, Case, check
from varlen import Varlen

from cuelight.actors.executor.model import attention_flash, backends
from cuelight.actors.executor.model.attention_flash import FlashBackend, varlen_attention
from cuelight.actors.executor.model.backends import AttentionSpec, choose
from cuelight.actors.executor.model.kv_pool import HostPool, KVPool
from cuelight.actors.executor.options import CannotLoad

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = Case((), is_spoilt=False, dtype=torch.bfloat16, block_size=256)
SHAPES = {
    "grouped": HALF,
    "alone": dataclasses.replace(HALF, groups=1, kv_heads=3, dtype=torch.float16),
    "window": dataclasses.replace(HALF, window=9),
    "window of one": dataclasses.replace(HALF, window=1),
}
LONG = {**MIXES, "several pages": ((700, 1), (256, 1), (257, 2), (512, 40), (300, 300))}


@pytest.mark.parametrize("mix", LONG)
@pytest.mark.parametrize("shape", SHAPES)
def test_flash_attention_matches_float64(shape: str, mix: str) -> None:
    case = dataclasses.replace(SHAPES[shape], rows=LONG[mix])
    second, third = Varlen(is_version_2=True), Varlen(is_version_2=False)
    check(case, FlashBackend(second, CPU, is_version_2=True), CPU)
    check(dataclasses.replace(case, block_size=16), FlashBackend(third, CPU, is_version_2=False), CPU)
    assert second.calls == third.calls == 2


def test_token_major_pool_copies_blocks_like_a_plain_one() -> None:
    shape = {"layers": 2, "block_count": 6, "block_size": 4, "kv_heads": 3, "head_dim": 8}
    pools = [KVPool(**shape, dtype=torch.float32, device=CPU, is_token_major=major) for major in (False, True)]
    for number, tensors in enumerate(zip(*((*pool.keys, *pool.values) for pool in pools), strict=True)):
        drawn = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(number))
        for tensor in tensors:
            tensor.copy_(drawn)
    assert pools[1].keys[0].transpose(1, 2).is_contiguous()
    for pool in pools:
        host = HostPool(pool, 3)
        host.save([1, 2, 4], [2, 0, 1])
        pool.fork([1], [3])
        pool.clear(0, torch.tensor([1, 2]))
        pool.write(1, torch.tensor([2, 5]), torch.tensor([3, 0]), torch.ones(2, 3, 8), torch.ones(2, 3, 8))
        host.load([0, 2], [4, 5])
    for plain, major in zip(*((*pool.keys, *pool.values) for pool in pools), strict=True):
        assert torch.equal(plain, major)


def spec(**others: object) -> AttentionSpec:
    base = AttentionSpec(device=CUDA, dtype=torch.bfloat16, heads=6, kv_heads=2, head_dim=64, block_size=256)
    return dataclasses.replace(base, **others)  # type: ignore[arg-type]


@pytest.fixture
def _no_trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Act as if there were a GPU on which the trial run succeeds."""
    monkeypatch.setattr(attention_flash, "varlen_attention", lambda: Varlen(is_version_2=True))
    monkeypatch.setattr(attention_flash, "is_version_2", lambda: True)
    monkeypatch.setattr(backends, "_try", lambda backend, spec: None)
    yield


@pytest.mark.usefixtures("_no_trial")
@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"device": CPU}, "CUDA, not on cpu"),
        ({"dtype": torch.float32}, "half precision"),
        ({"softcap": 30.0}, "caps no scores"),
        ({"head_dim": 512}, "at most 256, not 512"),
        ({"head_dim": 60}, "multiple of 8"),
        ({"block_size": 16}, "block_size must be a multiple of 256 for FlashAttention 2, not 16"),
        ({"block_size": 384}, "multiple of 256"),
    ],
)
def test_flash_is_refused_with_the_reason(others: dict[str, object], why: str) -> None:
    with pytest.raises(CannotLoad, match=f"attention 'flash' is not available: .*{why}"):
        choose("flash", spec(**others), None)


@pytest.mark.usefixtures("_no_trial")
def test_flash_is_chosen_where_it_supports_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for others in ({}, {"window": 128}, {"dtype": torch.float16}, {"block_size": 512}, {"head_dim": 256}):
        backend = choose("flash", spec(**others), None)
        assert isinstance(backend, FlashBackend) and backend.is_token_major
    monkeypatch.setattr(attention_flash, "is_version_2", lambda: False)
    assert choose("flash", spec(block_size=16), None).name == "flash"


def test_flash_needs_a_torch_with_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flash, "varlen_attention", lambda: None)
    with pytest.raises(CannotLoad, match=r"no varlen_attn that reads block tables: 2\.12 has"):
        choose("flash", spec(), None)


def test_flash_refuses_an_old_varlen_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")

    def old(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> None: ...

    monkeypatch.setattr(varlen, "varlen_attn", old)
    assert varlen_attention() is None


@pytest.mark.cuda
@pytest.mark.parametrize("mix", LONG)
@pytest.mark.parametrize("shape", SHAPES)
def test_flash_attention_on_the_gpu(shape: str, mix: str) -> None:
    case = dataclasses.replace(SHAPES[shape], rows=LONG[mix], head_dim=64)
    if varlen_attention() is None:
        pytest.skip("this torch has no varlen_attn that reads block tables")
    check(case, choose("flash", case.spec(CUDA), None), CUDA)
