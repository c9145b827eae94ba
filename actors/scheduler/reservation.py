"""The question that is out to the cache manager, at most one: for whom blocks were asked, and as what."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cuelight.actors.scheduler.patience import Watchdog
from cuelight.actors.scheduler.rounds import PlannedRound
from cuelight.actors.scheduler.tracked import Request
from cuelight.messages import cache
from cuelight.messages.address import Address
from cuelight.messages.request import RequestId
from cuelight.messages.scheduler import Granted


class BlockRequests:
    """Tells the cache manager, with each question, what was computed since the last one.

    `watchdog` runs while a question is out.
    """

    def __init__(
        self,
        to: Address[cache.CacheMessage],
        reply_to: Address[Granted],
        first_round: int,
        watchdog: Watchdog,
        now: Callable[[], float],
    ) -> None:
        self._to = to
        self._reply_to = reply_to
        self.asked: dict[RequestId, int] | None = None
        """While it is out: the incarnations of those it asks for."""
        self.candidates: set[RequestId] = set()
        """Those of the last one that waited then."""
        self.generation = 0
        """What there had been then."""
        self._watchdog = watchdog
        self._now = now
        self._round = first_round
        self._prefilled: dict[RequestId, Request] = {}

    def note_computed(self, request: Request) -> None:
        """With the next question: more of this one's prompt has been computed."""
        self._prefilled[request.request_id] = request

    def leave(self, request: Request) -> None:
        """It gives its blocks back, and says then how far they are filled."""
        self._prefilled.pop(request.request_id, None)

    def ask(
        self, wanted: PlannedRound, running: Mapping[RequestId, Request], generation: int, copies_done: int
    ) -> None:
        """Ask for the blocks that the round wants; say that the copies of rounds up to `copies_done` have been made."""
        self._watchdog.asked(self._now())
        growing = {growth.request_id: running[growth.request_id] for growth in wanted.growths}
        candidates = {request.request_id: request for request in wanted.admitted}
        self.asked = {request_id: request.incarnation for request_id, request in (growing | candidates).items()}
        self.candidates = set(candidates)
        self.generation = generation
        filled = tuple([request.filled() for request in (self._prefilled | growing).values()])
        self._prefilled.clear()
        admissions = tuple([request.admission() for request in wanted.admitted])
        self._to.tell(
            cache.Reserve(
                self._round, filled, tuple(wanted.growths), admissions, wanted.tokens_left, self._reply_to, copies_done
            )
        )

    def answered(self, answer: Granted) -> dict[RequestId, int] | None:
        """An answer has come: what was asked, or None where nobody waits for it any more."""
        if answer.round != self._round:
            return None
        asked = self.asked
        assert asked is not None, "a question is answered once"
        self._watchdog.answered(self._now())
        self._end_round()
        return asked

    def void(self) -> None:
        """Await no answer any more: all blocks are lost."""
        self._end_round()
        self._watchdog.give_up()
        self.candidates.clear()
        self._prefilled.clear()

    def end_life(self) -> None:
        """Expect nothing from the cache manager that there was."""
        self._watchdog.begin_again()

    def _end_round(self) -> None:
        self.asked = None
        self._round += 1
