"""Sends Usage until it is acknowledged: several of a tenant in one record, and again after any doubt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from wire.bus import Producer
from wire.codec import encode
from wire.errors import BusError
from wire.messages import Ref, Usages
from wire.topics import USAGE
from workers.effects import SendUsage, Term

_log = logging.getLogger(__name__)
_AT_ONCE = 500
_RETRY_S = 0.5
Sent = Callable[[Term, Ref], None]


class UsageSender:
    """One queue for all shards of a worker. Doubles are harmless: the ledger counts a request once (R6)."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._queue: asyncio.Queue[tuple[SendUsage, Sent]] = asyncio.Queue()

    def put(self, effect: SendUsage, sent: Sent) -> None:
        """Send it; `sent(term, ref)` is called once it is acknowledged."""
        self._queue.put_nowait((effect, sent))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            waiting = [await self._queue.get()]
            while not self._queue.empty() and len(waiting) < _AT_ONCE:
                waiting.append(self._queue.get_nowait())
            by_tenant: dict[str, list[tuple[SendUsage, Sent]]] = {}
            for effect, sent in waiting:
                by_tenant.setdefault(effect.usage.tenant, []).append((effect, sent))
            for tenant, group in by_tenant.items():
                await self._send(tenant, group)

    async def _send(self, tenant: str, group: list[tuple[SendUsage, Sent]]) -> None:
        value = encode(Usages(entries=tuple(effect.usage for effect, _ in group)))
        while True:
            try:
                await (await self._producer.send(USAGE, value, key=tenant.encode()))
                break
            except BusError as exc:
                _log.warning("usage of %d requests is not acknowledged yet (%s); sending it again", len(group), exc)
                await asyncio.sleep(_RETRY_S)
        for effect, sent in group:
            sent(effect.term, effect.ref)
