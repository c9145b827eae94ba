"""Small random models in folders, as `transformers` saves them, and somebody who schedules a device by hand."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from support import Recorder, finished
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cuelight.actors.executor.batch import Batch
from cuelight.actors.executor.device import Device, Pending
from cuelight.actors.executor.options import LoadOptions
from cuelight.messages.executor import ExecuteStep, Extension, Row, RowChunk
from cuelight.messages.request import BlockCopies, CopyKind, RequestId, Sampling
from cuelight.messages.scheduler import StepDone
from cuelight.models.cache import cache_directory

VOCABULARY = 100
SHAPE: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
"""Six query heads share two of keys and values."""
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


ODD: dict[str, object] = {
    **SHAPE,
    "hidden_size": 45,
    "intermediate_size": 67,
    "num_attention_heads": 5,
    "vocab_size": 101,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NATIVE: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "llama, tied": lambda: transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "llama, biases": lambda: transformers.LlamaConfig(**GROUPED, attention_bias=True),
    "llama, odd": lambda: transformers.LlamaConfig(**ODD, num_key_value_heads=1, head_dim=14),
    "llama3": lambda: transformers.LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, num_key_value_heads=6, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
    "qwen3, wide": lambda: transformers.Qwen3Config(**GROUPED, head_dim=32),
    "qwen3, biases": lambda: transformers.Qwen3Config(**ODD, num_key_value_heads=5, head_dim=6, attention_bias=True),
}
"""What the native decoder serves."""


def save(config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """A model with weights large enough that its output depends on all of its context."""
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            # Norms are near one, and biases near nothing, but not so near that leaving them out would go unnoticed.
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def remove_tensor(folder: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def options(folder: Path, **others: object) -> LoadOptions:
    base = LoadOptions(
        folder=folder,
        decoder="auto",
        dtype="float32",
        quantization=None,
        attention="auto",
        device="cpu",
        block_size=4,
        block_count=128,
        kv_cache_bytes=None,
        eos_token_ids=(1,),
        token_budget=200,
        code_folder=cache_directory() / "native",
        now=time.perf_counter,
    )
    return replace(base, **others)  # type: ignore[arg-type]


class Driver:
    """Schedules a runner by hand: random chunks of random rows, blocks drawn from a shuffled pool."""

    def __init__(self, runner: Device[Batch], prompts: Sequence[Sequence[int]], seed: int, epoch: int = 0) -> None:
        self.epoch = epoch
        self.runner, self.prompts = runner, prompts
        self.chance = random.Random(seed)
        self.free = list(range(1, runner.block_count))
        self.chance.shuffle(self.free)
        self.computed = dict.fromkeys(range(len(prompts)), 0)
        self.blocks: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        self.entered: set[int] = set()
        self.outputs: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
        self.failed: dict[int, str] = {}
        self._step = 0
        self._ended: tuple[RequestId, ...] = ()

    def run(self, output_tokens: int) -> None:
        while unfinished := [i for i in self.outputs if i not in self.failed and len(self.outputs[i]) < output_tokens]:
            chosen = self.chance.sample(unfinished, self.chance.randint(1, len(unfinished)))
            self._run([(index, self._count(index)) for index in chosen])

    def _count(self, index: int) -> int:
        left = len(self.prompts[index]) - self.computed[index]
        return 1 if left <= 0 else self.chance.randint(1, min(left, 20))

    def _run(self, chunks: list[tuple[int, int]]) -> None:
        step = self._planned(chunks)
        self._heard(finished(self.runner.run(self.runner.prepare(step))))

    def _planned(self, chunks: list[tuple[int, int]]) -> ExecuteStep:
        chunks.sort(key=lambda chunk: chunk[1] > 1)
        rows, extensions = [], []
        for index, count in chunks:
            prompt, size = self.prompts[index], self.runner.block_size
            missing = -(-(self.computed[index] + count) // size) - len(self.blocks[index])
            blocks = [self.free.pop() for _ in range(missing)]
            self.blocks[index] += blocks
            if index not in self.entered:
                tokens, held = (*prompt, *self.outputs[index]), tuple(self.blocks[index])
                rows.append(Row(RequestId(index), tokens, len(prompt), self.computed[index], held, Sampling()))
                self.entered.add(index)
            elif blocks:
                extensions.append(Extension(RequestId(index), tuple(blocks)))
            self.computed[index] += count
        step = ExecuteStep(
            epoch=self.epoch,
            step=self._step,
            life=0,
            ended=self._ended,
            rows=tuple(rows),
            extensions=tuple(extensions),
            chunks=tuple(RowChunk(RequestId(index), count) for index, count in chunks),
            reply_to=Recorder(),
        )
        self._step += 1
        self._ended = ()
        return step

    def _heard(self, done: StepDone) -> None:
        self._ended = tuple(request_id for request_id, _ in done.failed)
        self.failed.update(done.failed)
        for request_id, token_id in zip(done.request_ids, done.token_ids, strict=True):
            self.outputs[request_id].append(token_id)


def greedy_alone(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Token by token, all of the context each time."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def random_prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(2, VOCABULARY) for _ in range(length)] for length in (1, 3, 4, 17, 40, 71)]


class Pipeline(Driver):
    """Steps are planned and prepared while others run: three are in flight at most, in any order that is allowed.

    No more than four rows are there at once. Each ends with the step after its last, and its slot is the next one's.
    """

    def __init__(self, runner: Device[Batch], prompts: Sequence[Sequence[int]], seed: int) -> None:
        super().__init__(runner, prompts, seed)
        self.in_flight_most = 0
        self._prepared: list[Batch] = []
        self._running: list[StepDone | Pending[StepDone]] = []
        self._sampled = dict.fromkeys(self.outputs, 0)

    def run(self, output_tokens: int) -> None:
        waiting, active = list(self.outputs), list[int]()
        while waiting or active:
            while waiting and len(active) < 4:
                active.append(waiting.pop(0))
            chosen = self.chance.sample(active, self.chance.randint(1, len(active)))
            chunks = [(index, self._count(index)) for index in chosen]
            while len(self._prepared) + len(self._running) > 2 or self.chance.random() < 0.5:
                self.go_on()
            self._prepared.append(self.runner.prepare(self._planned(chunks)))
            self.in_flight_most = max(self.in_flight_most, len(self._prepared) + len(self._running))
            for index in chosen:
                self._sampled[index] += self.computed[index] >= len(self.prompts[index])
                if self._sampled[index] == output_tokens:
                    active.remove(index)
                    self._ended += (RequestId(index),)
        while self._prepared or self._running:
            self.go_on()

    def go_on(self) -> None:
        """Launch a step, or wait for one."""
        if self._prepared and (not self._running or self.chance.random() < 0.5):
            self._running.append(self.runner.run(self._prepared.pop(0)))
        elif self._running:
            ended = self._ended
            self._heard(self.finish(self._running.pop(0)))
            assert not self._ended, "no row fails"
            self._ended = ended

    def finish(self, result: StepDone | Pending[StepDone]) -> StepDone:
        return finished(result)


class Mover(Driver):
    """After each step some rows leave the pool for host memory until they run again, or move within the pool.

    They come back in other blocks; `spoil` overwrites what they leave behind in the pool.
    """

    def __init__(
        self, runner: Device[Batch], prompts: Sequence[Sequence[int]], seed: int, spoil: Callable[[list[int]], None]
    ) -> None:
        super().__init__(runner, prompts, seed)
        self._spoil = spoil
        self.moves = dict.fromkeys(CopyKind, 0)
        self.slots = list(range(self.runner.host.block_count))
        self.away: dict[int, list[int]] = {}

    def _run(self, chunks: list[tuple[int, int]]) -> None:
        for index, _ in chunks:
            if index in self.away:
                self._load(index)
        super()._run(chunks)
        here = [index for index, blocks in self.blocks.items() if blocks]
        for index in self.chance.sample(here, len(here) // 2):
            self._fork(index) if self.chance.random() < 0.4 else self._save(index)

    def _save(self, index: int) -> None:
        self.chance.shuffle(self.slots)
        self.away[index] = [self.slots.pop() for _ in self.blocks[index]]
        self._copy(CopyKind.SAVE, self.blocks[index], self.away[index])
        self._leave(index)

    def _load(self, index: int) -> None:
        slots = self.away.pop(index)
        self.blocks[index] = [self.free.pop() for _ in slots]
        self._copy(CopyKind.LOAD, slots, self.blocks[index])
        self.slots += slots

    def _fork(self, index: int) -> None:
        copies = [self.free.pop() for _ in self.blocks[index]]
        self._copy(CopyKind.FORK, self.blocks[index], copies)
        self._leave(index)
        self.blocks[index] = copies

    def _copy(self, copying: CopyKind, sources: Sequence[int], targets: Sequence[int]) -> None:
        if (pending := self.runner.copy(BlockCopies(copying, tuple(sources), tuple(targets)))) is not None:
            pending.wait()
        self.moves[copying] += 1

    def _leave(self, index: int) -> None:
        self._spoil(self.blocks[index])
        self.free = self.blocks[index] + self.free
        self.blocks[index] = []
        if index in self.entered:
            self.entered.remove(index)
            self._ended += (RequestId(index),)
