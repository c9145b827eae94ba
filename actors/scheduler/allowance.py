"""The token budget of a step: halved when the device runs out of memory, and restored by and by."""

from __future__ import annotations

from typing import Final

from cuelight.kernel import get_logger

STEPS_BEFORE_GROWTH: Final = 256
"""Steps that must fit before the budget is doubled: the memory that another program took may be free again."""

log = get_logger("cuelight.scheduler")


class AdaptiveTokenBudget:
    """The only owner of the token budget: `tokens` is that of the next step, `most` is the configured one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens = most
        self._fitted = 0

    def shrink(self, token_count: int) -> bool:
        """Halve the budget after a step of `token_count` tokens ran out of memory; False where one token did."""
        if token_count <= 1:
            return False
        self.tokens = token_count // 2
        self._fitted = 0
        log.warning("out_of_memory", token_count=token_count, token_budget=self.tokens)
        return True

    def step_fitted(self) -> bool:
        """Count a finished step. Return whether the budget has grown."""
        if self.tokens == self.most:
            return False
        self._fitted += 1
        if self._fitted < STEPS_BEFORE_GROWTH:
            return False
        self.tokens, self._fitted = min(self.most, 2 * self.tokens), 0
        return True
