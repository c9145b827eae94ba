"""Layers compiled by torch: equal results, shared code for all layers of a kind and all sizes, and failures.

Most tests run the graph that torch traced of a layer as it is: generating code for it takes a while.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
import transformers
from tiny_models import GROUPED, SHAPE, Driver, greedy_alone, options, random_prompts, save
from torch._dynamo.utils import counters
from transformers import PreTrainedConfig, PreTrainedModel

from cuelight.actors.executor.model import compiling, loading
from cuelight.actors.executor.model.attention import ATTENTION_NAME, attending
from cuelight.actors.executor.model.compiling import COMPILED_NAME, compile_layers
from cuelight.actors.executor.model.loading import LoadedModel, load
from cuelight.actors.executor.model.passes import FusedNorm, RecognizedNorm
from cuelight.actors.executor.runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., object]]

FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], int]] = {
    "llama": (lambda: transformers.LlamaConfig(**GROUPED), 1),
    "gemma2": (lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=16), 2),
    "gemma3": (
        lambda: transformers.Gemma3TextConfig(
            **{**GROUPED, "num_hidden_layers": 4},
            head_dim=8,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        2,
    ),
}
"""Model configurations, each with its number of kinds of layers."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(folder: Path, backend: str | Backend = "eager", **others: object) -> LoadedModel:
    loaded = load(options(folder, **others))
    assert compile_layers(loaded.model, partial(loading._warm, loaded), None, backend)
    return loaded


def logits(loaded: LoadedModel, count: int) -> torch.Tensor:
    batch = loading._batch([count], 4, np.arange(1, 31))
    ids, positions = torch.arange(5, 5 + count) % 100, torch.arange(count)
    with torch.inference_mode(), attending(loaded.attention(batch)):
        return loaded.forward(ids[None], positions[None], positions)


def judged(model: PreTrainedModel, count: int) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(5, 5 + count)[None] % 100, use_cache=False).logits[0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # gemma2 has the latter's kinds, and one layer of each
def test_layers_of_a_kind_share_code_for_any_number_of_tokens(family: str, tmp_path: Path) -> None:
    make, kinds = FAMILIES[family]
    model = save(make(), tmp_path)
    loaded = compiled(tmp_path)
    assert counters["graph_break"] == {}
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2 * kinds, "one for a single token, and one for more"
    for count in (1, 2, 7, 36, 37, 38, 90):
        torch.testing.assert_close(logits(loaded, count), judged(model, count), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == graphs, "nothing is compiled while requests wait"


@pytest.mark.parametrize("others", [{"attention": "cpu"}, {"quantization": "int8"}], ids=str)
def test_compiled_layers_serve_batches(others: dict[str, object], tmp_path: Path) -> None:
    model = save(transformers.LlamaConfig(**GROUPED), tmp_path)
    prompts = random_prompts(3)
    driver = Driver(ModelRunner(compiled(tmp_path, **others)), prompts, seed=5)
    driver.run(output_tokens=10)
    assert driver.failed == {}
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2
    if "quantization" not in others:
        assert [driver.outputs[index] for index in range(len(prompts))] == [
            greedy_alone(model, prompt, 10) for prompt in prompts
        ]


def test_layers_that_cannot_be_compiled_stay_eager(tmp_path: Path) -> None:
    model = save(transformers.LlamaConfig(**GROUPED), tmp_path)
    loaded = load(options(tmp_path))

    def broken(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        raise RuntimeError("no working C++ compiler\n\nand much more")

    with structlog.testing.capture_logs() as entries:
        assert not compile_layers(loaded.model, partial(loading._warm, loaded), None, broken)
    (warning,) = entries
    assert (warning["event"], warning["log_level"]) == ("not_compiled", "warning")
    assert "no working C++ compiler" in warning["reason"]
    assert loaded.model.config._attn_implementation == ATTENTION_NAME
    torch.testing.assert_close(logits(loaded, 9), judged(model, 9), rtol=1e-4, atol=1e-4)


def test_model_without_a_list_of_layers_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(transformers.LlamaConfig(**GROUPED), tmp_path)
    loaded = load(options(tmp_path))
    monkeypatch.setattr(compiling, "decoder_layers", lambda _: None)
    with structlog.testing.capture_logs() as entries:
        assert not compile_layers(loaded.model, partial(loading._warm, loaded), None, "eager")
    assert entries[0]["reason"] == "LlamaForCausalLM has no list of layers that attend"


@pytest.mark.parametrize(
    ("device", "eager", "wanted"),
    [("cpu", None, False), ("cpu", False, True), ("cpu", True, False), ("cuda", None, True), ("cuda", True, False)],
)
def test_compiling_depends_on_device_and_option(device: str, eager: bool | None, wanted: bool, tmp_path: Path) -> None:
    save(transformers.LlamaConfig(**GROUPED), tmp_path)
    start = loading._TransformersLoader(options(tmp_path, eager=eager), loading.memory_of)
    start._device = torch.device(device)
    assert start._wants_compiling is wanted


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the artifacts that torch loads, instead of compiling anything."""
    given: list[bytes] = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda data: [given.append(data)])
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"compiled", None))
    return given


def stored(model: PreTrainedModel, folder: Path) -> compiling._CompiledLayersFile:
    return compiling._CompiledLayersFile(folder, model)


def test_compiled_layers_are_stored_for_models_of_the_same_configuration(
    artifacts: list[bytes], tmp_path: Path
) -> None:
    code = tmp_path / "not yet" / "there"
    models = [save(transformers.LlamaConfig(**shape), tmp_path / "model") for shape in (GROUPED, SHAPE)]
    stored(models[0], code).load()
    assert artifacts == []
    stored(models[0], code).save()
    (file,) = code.iterdir()
    assert file.read_bytes() == b"compiled"
    file.write_bytes(b"kept")
    stored(models[0], code).save()
    stored(models[1], code).load()
    stored(models[0].bfloat16(), code).load()
    assert artifacts == []
    stored(models[0].float(), code).load()
    assert artifacts == [b"kept"]
    assert list(code.iterdir()) == [file]


def test_damaged_file_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(transformers.LlamaConfig(**GROUPED), tmp_path / "model")
    store = stored(model, tmp_path / "code")
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"no such thing", None))
    store.save()
    with structlog.testing.capture_logs() as entries:
        store.load()
    assert [entry["event"] for entry in entries] == ["compiled_layers_unread"]
    assert list((tmp_path / "code").iterdir()) == []


def test_unusable_folder_is_logged(artifacts: list[bytes], tmp_path: Path) -> None:
    model = save(transformers.LlamaConfig(**GROUPED), tmp_path / "model")
    (tmp_path / "file").write_text("")
    with structlog.testing.capture_logs() as entries:
        stored(model, tmp_path / "file" / "code").save()
    assert [entry["event"] for entry in entries] == ["compiled_layers_unsaved"]


@pytest.mark.timeout(900)  # a C++ compiler runs several times
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch needs a C++ compiler for code of its own")
@pytest.mark.usefixtures("native")  # compiled before, and not into this test's folder
def test_code_compiled_by_torch_matches_and_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only test that runs the compiler itself."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    # Else torch probes g++ in four processes, each of which imports torch.
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
    # The precompiled header is this test's own: a program that is killed leaves half of the user's.
    for place in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(f"torch._inductor.codecache.{place}", str(tmp_path / "headers"))
    monkeypatch.setattr(compiling, "WARM_TOKENS", compiling.WARM_TOKENS[:1])  # which saves half the time
    config = transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 1})
    model = save(config, tmp_path / "model")
    with structlog.testing.capture_logs() as entries:
        loaded = load(options(tmp_path / "model", eager=False, code_folder=tmp_path / "code"))
    (facts,) = (entry for entry in entries if entry["event"] == "model_loaded")
    assert facts["compiled"] is True
    assert loaded.model.config._attn_implementation == COMPILED_NAME
    for count in (5, 9):
        torch.testing.assert_close(logits(loaded, count), judged(model, count), rtol=1e-4, atol=1e-4)
    (kept,) = (tmp_path / "code").glob("layers-*.bin")
    assert kept.stat().st_size > 10_000


def test_layer_also_computes_the_norm_after_it(tmp_path: Path) -> None:
    model = save(transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 3}), tmp_path)
    given: list[int] = []

    def spy(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        (end,) = (node for node in graph.graph.nodes if node.op == "output")
        given.append(len(end.args[0]))
        return graph.forward

    loaded = compiled(tmp_path, spy)
    assert given == [2, 2], (
        "the output of the layer, and that output after the norm of the next layer; the first layer shares this code"
    )
    norms = [module for module in loaded.model.modules() if isinstance(module, FusedNorm)]
    assert len(norms) == 7
    torch.testing.assert_close(logits(loaded, 9), judged(model, 9), rtol=1e-4, atol=1e-4)
    assert not any(norm._ahead for norm in norms), "every norm computed ahead was used"


@torch.inference_mode()
def test_norm_of_another_tensor_than_computed_ahead_is_computed_anew() -> None:
    norm = FusedNorm(RecognizedNorm(torch.ones(8), 1e-6, is_offset=False), torch.float32, None)
    x, y = torch.randn(2, 3, 8)
    norm.compute_ahead(x)
    torch.testing.assert_close(norm(y), torch.nn.functional.rms_norm(y, (8,), eps=1e-6))
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
    ahead = norm.compute_ahead(x)
    assert norm(x) is ahead
    assert norm(x) is not ahead


def test_compiled_code_with_wrong_results_is_not_used(tmp_path: Path) -> None:
    model = save(transformers.LlamaConfig(**GROUPED), tmp_path)
    loaded = load(options(tmp_path))

    def wrong(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        return lambda *inputs: [1.5 * output for output in graph.forward(*inputs)]

    with structlog.testing.capture_logs() as entries:
        assert not compile_layers(loaded.model, partial(loading._warm, loaded), None, wrong)
    assert "logits are off by" in entries[0]["reason"]
    torch.testing.assert_close(logits(loaded, 9), judged(model, 9), rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_give_the_same_tokens_on_cuda(family: str, tmp_path: Path) -> None:
    model = save(FAMILIES[family][0](), tmp_path)
    prompts = random_prompts(3)
    with structlog.testing.capture_logs() as entries:
        loaded = load(options(tmp_path, device="cuda", block_count=None, memory_fraction=0.5, attention="reference"))
    (facts,) = (entry for entry in entries if entry["event"] == "model_loaded")
    assert facts["compiled"] is True and facts["memory"] is not None
    driver = Driver(ModelRunner(loaded), prompts, seed=5)
    driver.run(output_tokens=10)
    for index, prompt in enumerate(prompts):
        assert driver.outputs[index] == greedy_alone(model, prompt, 10)
