"""The device with a real model on it: the transformers forward over one flat batch, and sampling."""

from __future__ import annotations

from typing import assert_never

import torch

from cuelight.actors.executor.batch import Batch, Rows
from cuelight.actors.executor.model.attention import attending
from cuelight.actors.executor.model.loading import LoadedModel
from cuelight.actors.executor.model.sampling import sample
from cuelight.messages.executor import ExecuteStep
from cuelight.messages.request import BlockCopies, Copying, HostTier, RequestId
from cuelight.messages.scheduler import StepDone


class ModelRunner:
    """Prepares batches of rows and runs them.

    Sampled tokens stay on the device in `_last_tokens`, by slot, and feed the next step from there.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._rows = Rows(loaded.pool.block_size)
        self._last_tokens = torch.zeros(0, dtype=torch.int64, device=loaded.device)

    @property
    def block_count(self) -> int:
        """Blocks in the KV pool, the null block included."""
        return self._loaded.pool.block_count

    @property
    def block_size(self) -> int:
        """Token slots per block."""
        return self._loaded.pool.block_size

    @property
    def host(self) -> HostTier:
        """Host memory for blocks that leave the pool, and what its use costs."""
        return self._loaded.host_tier

    def prepare(self, step: ExecuteStep) -> Batch:
        """Lay out one step on the host."""
        return self._rows.prepare(step)

    @torch.inference_mode()
    def copy(self, copies: BlockCopies) -> None:
        """Copy whole blocks. On CUDA this queues the copies, and what is computed later waits for them there."""
        pool, host = self._loaded.pool, self._loaded.host
        if copies.copying is Copying.FORK:
            pool.fork(copies.sources, copies.targets)
            return
        assert host is not None, "blocks are moved only where there is memory for them"
        match copies.copying:
            case Copying.SAVE:
                host.save(copies.sources, copies.targets)
            case Copying.LOAD:
                host.load(copies.sources, copies.targets)
            case _:
                assert_never(copies.copying)

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepDone:
        """One forward pass and one sampled token for each row that reached its end."""
        loaded = self._loaded
        logits = self._forward(batch)
        if logits is None:
            return StepDone(batch.epoch, batch.step, (), ())
        token_ids = sample(logits, batch.draws, loaded.eos_token_ids)
        self._keep(batch, token_ids)
        request_ids: list[RequestId] = []
        good: list[int] = []
        failed: list[tuple[RequestId, str]] = []
        for draw, token_id in zip(batch.draws, token_ids.tolist(), strict=True):
            if token_id < 0:
                failed.append((draw.request_id, "the model's logits are not finite numbers"))
            else:
                request_ids.append(draw.request_id)
                good.append(token_id)
        return StepDone(batch.epoch, batch.step, tuple(request_ids), tuple(good), tuple(failed))

    def _forward(self, batch: Batch) -> torch.Tensor | None:
        """Logits [draws, vocabulary] of the tokens to sample after; None when every chunk is partial (rule 8)."""
        loaded = self._loaded
        token_ids = torch.from_numpy(batch.token_ids).to(loaded.device)
        if batch.fed:
            token_ids[batch.fed] = self._last_tokens[batch.fed_slots]
        keep = torch.tensor([draw.index for draw in batch.draws], dtype=torch.int64, device=loaded.device)
        with attending(loaded.attention(batch)):
            positions = torch.from_numpy(batch.positions).to(loaded.device)
            logits = loaded.forward(token_ids[None], positions[None], keep)
        return logits if batch.draws else None

    def _keep(self, batch: Batch, token_ids: torch.Tensor) -> None:
        slots = [draw.slot for draw in batch.draws]
        missing = max(slots) + 1 - len(self._last_tokens)
        if missing > 0:
            self._last_tokens = torch.nn.functional.pad(self._last_tokens, (0, max(missing, len(self._last_tokens))))
        # A row without a usable token is ended by the scheduler; until then any valid id will do.
        self._last_tokens[slots] = token_ids.clamp(min=0)
