"""Choosing tokens from logits on the device, all rows of a step at once.

What the rows want is laid out on the host beforehand, as arrays that go to the device with the rest of the step; the
logits stay there. Nothing is computed that no row of the step asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from cuelight.actors.executor.batch import SamplingRow
from cuelight.actors.executor.rng import TOKEN_FIRST, TOKEN_SECOND, keys
from cuelight.messages.request import Sampling

TOP_K_PICKED_MAX = 1024
"""Up to so many, the most probable tokens are picked out; beyond that all are sorted."""

ELEMENTS_MAX = 1 << 22
"""So many logits are treated at once, or one row's: what is computed from them takes 72 times as many bytes."""

ELEMENT_BYTES = 72
"""Of each logit that is treated: itself, sorted with its place, its noise, and scores, weights and sums in double."""

DeviceArrays = Callable[[str], torch.Tensor]
"""The array of a name, on the device."""


class SamplingMethod(StrEnum):
    """How the tokens of some rows are chosen."""

    PLAIN = "plain"
    """Every token may be chosen."""
    TOP_K = "top_k"
    """Only the best `top_k`, which are few."""
    SORTED = "sorted"
    """Only the best, however many that are."""


@dataclass(frozen=True)
class SamplingPlan:
    """How the rows of a step sample: `arrays` for the device, rows by method, and the largest `top_k` of `TOP_K`."""

    arrays: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]]
    counts: dict[SamplingMethod, int]
    top_k_max: int
    forbids: bool

    @classmethod
    def of(cls, sampling_rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> SamplingPlan:
        """One row of logits for each sampling row."""
        arrays: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]] = {}
        rows: dict[SamplingMethod, list[int]] = {}
        forbidden: list[tuple[int, int]] = []
        for row, sampling_row in enumerate(sampling_rows):
            if sampling_row.output_index < sampling_row.sampling.min_tokens:
                forbidden += [(row, token_id) for token_id in _ends(sampling_row, eos_token_ids)]
            if sampling_row.sampling.temperature > 0:
                rows.setdefault(_method(sampling_row.sampling), []).append(row)
        if forbidden:
            arrays["forbidden rows"], arrays["forbidden tokens"] = np.array(forbidden, np.int64).T
        for method, mine in rows.items():
            arrays.update(_options(method, mine, [sampling_rows[row] for row in mine]))
        top_k_max = max((sampling_rows[row].sampling.top_k for row in rows.get(SamplingMethod.TOP_K, ())), default=0)
        return cls(arrays, {method: len(mine) for method, mine in rows.items()}, top_k_max, bool(forbidden))


def _ends(sampling_row: SamplingRow, eos_token_ids: Sequence[int]) -> Sequence[int]:
    """What would end the request, and cannot be chosen before `min_tokens` (rule `stop-order`)."""
    return (*sampling_row.sampling.stop_token_ids, *(() if sampling_row.sampling.ignore_eos else eos_token_ids))


def _method(sampling: Sampling) -> SamplingMethod:
    if 0 < sampling.top_k <= TOP_K_PICKED_MAX:
        return SamplingMethod.TOP_K
    return SamplingMethod.SORTED if sampling.top_k > 0 or sampling.top_p < 1 else SamplingMethod.PLAIN


def _options(
    method: SamplingMethod, indices: Sequence[int], sampling_rows: Sequence[SamplingRow]
) -> dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]]:
    options = [row.sampling for row in sampling_rows]
    row_keys = keys([each.seed or 0 for each in options], [row.position for row in sampling_rows])
    arrays: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]] = {
        f"{method} rows": np.array(indices, np.int64),
        f"{method} temperature": np.array([each.temperature for each in options], np.float64),
        f"{method} key": row_keys.view(np.int64),
    }
    if method is not SamplingMethod.PLAIN:
        arrays[f"{method} top_k"] = np.array([each.top_k or 2**62 for each in options], np.int64)
        arrays[f"{method} top_p"] = np.array([each.top_p for each in options], np.float64)
    return arrays


def choose(logits: torch.Tensor, plan: SamplingPlan, device: DeviceArrays) -> torch.Tensor:
    """One token id per row of `logits` ([rows, vocabulary]), which it may change; -1 for a row that is not finite.

    Each row is treated by its own options alone. `top_k` is applied before `top_p`, which keeps the smallest set of
    most probable tokens whose probabilities reach it. Of what is kept, the token with the largest sum of
    logit / temperature and noise is chosen.
    """
    if plan.forbids:
        nothing = logits.new_full((), -torch.inf)
        logits.index_put_((device("forbidden rows"), device("forbidden tokens")), nothing)
    best, token_ids = logits.max(dim=-1)
    for method, count in plan.counts.items():
        rows = device(f"{method} rows")
        at_once = max(1, ELEMENTS_MAX // logits.shape[-1])
        for begin in range(0, count, at_once):
            piece = slice(begin, min(begin + at_once, count))
            mine = rows[piece]
            some = _RowGroup(logits[mine].float(), best[mine].float(), method, piece, device)
            token_ids.index_copy_(0, mine, some.choose(min(plan.top_k_max, logits.shape[-1])))
    return torch.where(best.isfinite(), token_ids, -1)


class _RowGroup:
    """Some rows whose tokens are chosen by one method, with their options."""

    def __init__(
        self, logits: torch.Tensor, best: torch.Tensor, method: SamplingMethod, piece: slice, device: DeviceArrays
    ) -> None:
        self._logits, self._best, self._method = logits, best[:, None], method
        self._piece, self._device = piece, device

    def _option(self, name: str) -> torch.Tensor:
        return self._device(f"{self._method} {name}")[self._piece, None]

    def choose(self, top_k_max: int) -> torch.Tensor:
        """A token id for each."""
        if self._method is SamplingMethod.PLAIN:
            token_ids = torch.arange(self._logits.shape[-1], dtype=torch.int32, device=self._logits.device)
            return self._scaled(self._logits).add_(self._noise(token_ids[None])).argmax(dim=-1)
        if self._method is SamplingMethod.TOP_K:
            values, order = _largest(self._logits, top_k_max)
        else:
            # Not minus zero: to a device's sort it may be less than zero.
            values, order = (self._logits + 0.0).sort(dim=-1, descending=True, stable=True)
        scores = self._scaled(values)
        lost = self._lost(scores.exp())
        scores.add_(self._noise(order.to(torch.int32))).masked_fill_(lost, -torch.inf)
        return order.gather(-1, scores.argmax(dim=-1, keepdim=True))[:, 0]

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Logarithms of unnormalised probabilities, in double; the best is 0."""
        return logits.double().sub_(self._best).div_(self._option("temperature"))

    def _lost(self, weights: torch.Tensor) -> torch.Tensor:
        """Which may not be chosen, by their weights, the best first; in double, since the sums must not depend on how a
        device adds floats up. Changes the weights."""
        rank = torch.arange(weights.shape[-1], device=weights.device)
        lost = rank >= self._option("top_k")
        weights.masked_fill_(lost, 0)
        limit = self._option("top_p") * weights.sum(dim=-1, keepdim=True)
        before = weights.cumsum(dim=-1).sub_(weights)
        return lost.logical_or_((before >= limit).logical_and_(rank > 0))

    def _noise(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`chance.noise` of each row's key and these tokens, in double."""
        halves = self._device(f"{self._method} key")[self._piece].view(torch.int32).view(-1, 2)
        x = token_ids + halves[:, :1]
        spare = torch.empty_like(x)
        _mix(x, spare)
        _mix(x.bitwise_xor_(halves[:, 1:]), spare)
        # Numbers of 32 bits without a sign, from those with one.
        y = x.bitwise_xor_(-(2**31)).double().add_(2.0**31 + 0.5).mul_(2.0**-32)
        return y.neg_().log1p_().neg_().log_().neg_()


def _mix(x: torch.Tensor, spare: torch.Tensor) -> None:
    """`chance`'s mix of 32 bits, in place; `spare` is overwritten. Products wrap around."""
    for shift, factor in ((16, TOKEN_FIRST), (15, TOKEN_SECOND - 2**32), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=spare)
        x.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            x.mul_(factor)


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest of each row and where they lie, the first of equals first, whatever a device does of itself.

    Each is one number that grows with the logit and falls with the id, so no two are equal.
    """
    size = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # without minus zero
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    falling = torch.arange(size - 1, -1, -1, device=logits.device)
    keys = ((rising << 32) + falling).topk(count, dim=-1).values
    token_ids = size - 1 - (keys & 0xFFFFFFFF)
    return logits.gather(-1, token_ids), token_ids


def peak_bytes(rows: int, vocabulary: int) -> int:
    """Memory that `choose` takes at most, beside the logits."""
    return ELEMENT_BYTES * min(rows * vocabulary, max(vocabulary, ELEMENTS_MAX))


def sample(logits: torch.Tensor, sampling_rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> torch.Tensor:
    """`choose`, with the arrays of the plan moved to the device at once."""
    plan = SamplingPlan.of(sampling_rows, eos_token_ids)
    return choose(logits, plan, lambda name: torch.from_numpy(plan.arrays[name]).to(logits.device))
