"""How many tokens a step may have: fewer once the device ran out of memory, and by and by as many as before."""

from __future__ import annotations

from typing import Final

from cuelight.kernel import get_logger

STEPS_BEFORE_GROWTH: Final = 256
"""After so many steps that fitted, twice as many tokens are tried: what else took the memory may be gone."""

log = get_logger("cuelight.scheduler")


class Allowance:
    """The token budget of the steps to come."""

    def __init__(self, token_budget: int) -> None:
        self._most = token_budget
        self.token_budget = token_budget
        self._fitted = 0

    def exceeded(self, token_count: int) -> bool:
        """A step of so many tokens did not fit: from now on half of it at most. False where none can be smaller."""
        if token_count <= 1:
            return False
        self.token_budget = token_count // 2
        self._fitted = 0
        log.warning("out_of_memory", token_count=token_count, token_budget=self.token_budget)
        return True

    def fitted(self) -> bool:
        """A step was done. Whether there may be more tokens now."""
        if self.token_budget == self._most:
            return False
        self._fitted += 1
        if self._fitted < STEPS_BEFORE_GROWTH:
            return False
        self.token_budget, self._fitted = min(self._most, 2 * self.token_budget), 0
        return True
