"""The cache manager: keeps the books of the KV blocks and answers the scheduler. `tables.py` decides on grants."""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from cuelight.actors.cache.pool import BlockPool, HostSlots
from cuelight.actors.cache.tables import BlockTables
from cuelight.kernel import Actor, get_logger
from cuelight.messages import scheduler
from cuelight.messages.address import Address
from cuelight.messages.cache import CacheMessage, ForgetPrefixes, Release, Reserve, Reset
from cuelight.messages.observer import BlockFigures
from cuelight.messages.request import CopyKind, RequestId

_log = get_logger("cuelight.cache")


class CacheManager(Actor[CacheMessage]):
    """The actor that grants blocks. Sends `observer` its figures after each message that changes them.

    Has no blocks until the first `Reset`. Messages before that were meant for an earlier cache manager and are ignored.
    """

    def __init__(self, observer: Address[BlockFigures], watermark_fraction: float) -> None:
        self._observer = observer
        self._watermark_fraction = watermark_fraction
        self._tables = BlockTables(BlockPool(1), 1, watermark_fraction)
        self._has_blocks = False
        self._host_memory = 0
        self._evictions_before = 0
        self._tokens_looked_up = 0
        self._tokens_found = 0
        self._copied: Counter[CopyKind] = Counter()
        self._reported = BlockFigures()

    def handle(self, message: CacheMessage) -> None:
        if not self._has_blocks and not isinstance(message, Reset):
            return
        match message:
            case Reserve():
                self._reserve(message)
            case Release(poisoned=poisoned):
                for filled in message.released:
                    self._tables.release(filled, is_poisoned=filled.request_id in poisoned)
            case Reset():
                self._reset(message)
            case ForgetPrefixes():
                self._tables.forget_prefixes()
            case _:
                assert_never(message)
        figures = self._figures()
        if figures != self._reported or isinstance(message, Reset):
            self._reported = figures
            self._observer.tell(figures)

    def _reserve(self, message: Reserve) -> None:
        self._tables.host.confirm(message.copies_done)
        for filled in message.filled:
            self._tables.fill(filled)
        grants: list[scheduler.Grant] = []
        refused: list[RequestId] = []
        deferred: list[RequestId] = []
        for growth in message.growths:
            grant = self._tables.grow(growth)
            if grant is None:
                refused.append(growth.request_id)
            else:
                grants.append(grant)
        if not refused:  # a round that must preempt admits no request (rule `running-first`)
            self._admit(message, grants, refused, deferred)
        if refused:
            _log.debug("blocks refused", request_ids=refused, blocks_free=self._tables.pool.free_count)
        copies = self._tables.take_copies()
        for batch in copies:
            self._copied[batch.copying] += len(batch.sources)
            if batch.copying is CopyKind.SAVE:
                self._tables.host.mark_unconfirmed(batch.targets, message.round)
        message.reply_to.tell(scheduler.Granted(message.round, tuple(grants), tuple(refused), tuple(deferred), copies))

    def _admit(
        self,
        message: Reserve,
        grants: list[scheduler.Grant],
        refused: list[RequestId],
        deferred: list[RequestId],
    ) -> None:
        budget = message.token_budget
        for admission in message.admissions:
            if budget <= 0:
                return
            if self._tables.is_being_computed(admission):
                deferred.append(admission.request_id)
                continue
            grant = self._tables.admit(admission)
            if grant is None:
                refused.append(admission.request_id)
                return
            grants.append(grant)
            self._tokens_looked_up += len(admission.token_ids)
            self._tokens_found += grant.cached_tokens
            budget -= min(budget, len(admission.token_ids) - grant.cached_tokens)

    def _reset(self, message: Reset) -> None:
        self._has_blocks = True
        self._evictions_before += self._tables.pool.evictions
        pool = BlockPool(message.block_count)
        kept = self._kept_slots(message)
        self._tables = BlockTables(pool, message.block_size, self._watermark_fraction, message.host, kept)
        self._host_memory = message.host.memory
        if message.host.block_count > self._tables.host.total:
            _log.info(
                "host_memory_unused",
                why="moving a block takes longer than computing it",
                move_seconds=message.host.move_seconds,
                recompute_seconds=message.block_size * message.host.recompute_seconds,
            )

    def _kept_slots(self, message: Reset) -> HostSlots | None:
        """Return the host slots whose contents survive this reset and are confirmed; None if host memory is new."""
        if message.host.memory != self._host_memory or not self._host_memory:
            return None
        slots = self._tables.host
        slots.confirm(message.copies_done)
        slots.forget_unconfirmed()
        _log.info("host_memory_kept", blocks=slots.used_count)
        return slots

    def _figures(self) -> BlockFigures:
        pool, host = self._tables.pool, self._tables.host
        return BlockFigures(
            blocks_total=pool.total,
            blocks_free=pool.free_count,
            blocks_cached=pool.indexed_count,
            evictions=self._evictions_before + pool.evictions,
            tokens_looked_up=self._tokens_looked_up,
            tokens_found=self._tokens_found,
            host_blocks_total=host.total,
            host_blocks_used=host.used_count,
            blocks_saved=self._copied[CopyKind.SAVE],
            blocks_loaded=self._copied[CopyKind.LOAD],
            blocks_forked=self._copied[CopyKind.FORK],
        )
