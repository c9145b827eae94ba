"""Sampling on the device, for all rows of a step at once.

The sampling options of the rows are laid out on the host as arrays, which are sent to the device with the other arrays
of the step; the logits stay on the device. A method of sampling is computed only for the rows that use it.
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
"""Largest `top_k` for which only the most probable tokens are selected; for larger ones all tokens are sorted."""

ELEMENTS_MAX = 1 << 22
"""Maximum number of logits processed at once (at least one row's), since each takes `ELEMENT_BYTES`."""

ELEMENT_BYTES = 72
"""Bytes for each logit being processed: the logit, sorted with its index, noise, and float64 scores, weights, sums."""

DeviceArrays = Callable[[str], torch.Tensor]
"""Returns the array of a name on the device."""


class SamplingMethod(StrEnum):
    """How the tokens of a row are sampled."""

    PLAIN = "plain"
    """From all tokens."""
    TOP_K = "top_k"
    """From the `top_k` most probable tokens, at most `TOP_K_PICKED_MAX`, selected without sorting all."""
    SORTED = "sorted"
    """From the most probable tokens, after sorting all."""


@dataclass(frozen=True)
class SamplingPlan:
    """How the rows of a step sample: `arrays` for the device, rows by method, and the largest `top_k` of `TOP_K`."""

    arrays: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]]
    counts: dict[SamplingMethod, int]
    top_k_max: int
    forbids: bool

    @classmethod
    def of(cls, sampling_rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> SamplingPlan:
        """Lay out the plan for `sampling_rows`, in the order of their rows of logits."""
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
    """Return the tokens that end the request, and are not sampled before `min_tokens` (rule `stop-order`)."""
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
    """Return a token id for each row of `logits` [rows, vocabulary]; -1 for a row whose largest is not finite.

    `logits` may be modified. The token of a row depends on the row's own options alone. `top_k` is applied before
    `top_p`, which keeps the smallest set of most probable tokens whose probabilities reach it. Among the tokens kept,
    the token with the largest sum of logit / temperature and Gumbel noise is chosen.
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
    """Rows that are sampled by the same method, with their options."""

    def __init__(
        self, logits: torch.Tensor, best: torch.Tensor, method: SamplingMethod, piece: slice, device: DeviceArrays
    ) -> None:
        self._logits, self._best, self._method = logits, best[:, None], method
        self._piece, self._device = piece, device

    def _option(self, name: str) -> torch.Tensor:
        return self._device(f"{self._method} {name}")[self._piece, None]

    def choose(self, top_k_max: int) -> torch.Tensor:
        """Return a token id for each row."""
        if self._method is SamplingMethod.PLAIN:
            token_ids = torch.arange(self._logits.shape[-1], dtype=torch.int32, device=self._logits.device)
            return self._scaled(self._logits).add_(self._noise(token_ids[None])).argmax(dim=-1)
        if self._method is SamplingMethod.TOP_K:
            values, order = _largest(self._logits, top_k_max)
        else:
            # Without negative zero, which a device's sort may place below zero.
            values, order = (self._logits + 0.0).sort(dim=-1, descending=True, stable=True)
        scores = self._scaled(values)
        lost = self._lost(scores.exp())
        scores.add_(self._noise(order.to(torch.int32))).masked_fill_(lost, -torch.inf)
        return order.gather(-1, scores.argmax(dim=-1, keepdim=True))[:, 0]

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logarithms of unnormalized probabilities, in float64; the largest is 0."""
        return logits.double().sub_(self._best).div_(self._option("temperature"))

    def _lost(self, weights: torch.Tensor) -> torch.Tensor:
        """Return a mask of the tokens excluded by `top_k` and `top_p`, for weights in descending order.

        The sums are in float64, so that they do not depend on the order in which a device adds. Modifies `weights`.
        """
        rank = torch.arange(weights.shape[-1], device=weights.device)
        lost = rank >= self._option("top_k")
        weights.masked_fill_(lost, 0)
        limit = self._option("top_p") * weights.sum(dim=-1, keepdim=True)
        before = weights.cumsum(dim=-1).sub_(weights)
        return lost.logical_or_((before >= limit).logical_and_(rank > 0))

    def _noise(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `rng.noise` of each row's key and these tokens, in float64."""
        halves = self._device(f"{self._method} key")[self._piece].view(torch.int32).view(-1, 2)
        x = token_ids + halves[:, :1]
        spare = torch.empty_like(x)
        _mix(x, spare)
        _mix(x.bitwise_xor_(halves[:, 1:]), spare)
        # Flip the sign bit and add 2**31, to read signed 32-bit integers as unsigned ones.
        y = x.bitwise_xor_(-(2**31)).double().add_(2.0**31 + 0.5).mul_(2.0**-32)
        return y.neg_().log1p_().neg_().log_().neg_()


def _mix(x: torch.Tensor, spare: torch.Tensor) -> None:
    """Mix 32 bits as `rng._mixed_32` does, in place; `spare` is overwritten. Products wrap around."""
    for shift, factor in ((16, TOKEN_FIRST), (15, TOKEN_SECOND - 2**32), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=spare)
        x.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            x.mul_(factor)


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest logits of each row in descending order, and their token ids; ties by ascending id.

    Each logit is combined with its id into an integer that increases with the logit and decreases with the id, so that
    no two are equal, and the order does not depend on the device.
    """
    size = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # without negative zero
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    falling = torch.arange(size - 1, -1, -1, device=logits.device)
    keys = ((rising << 32) + falling).topk(count, dim=-1).values
    token_ids = size - 1 - (keys & 0xFFFFFFFF)
    return logits.gather(-1, token_ids), token_ids


def peak_bytes(rows: int, vocabulary: int) -> int:
    """Return the maximum bytes that `choose` allocates, beside the logits."""
    return ELEMENT_BYTES * min(rows * vocabulary, max(vocabulary, ELEMENTS_MAX))


def sample(logits: torch.Tensor, sampling_rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]) -> torch.Tensor:
    """Lay out the plan, copy its arrays to the device and call `choose`."""
    plan = SamplingPlan.of(sampling_rows, eos_token_ids)
    return choose(logits, plan, lambda name: torch.from_numpy(plan.arrays[name]).to(logits.device))
