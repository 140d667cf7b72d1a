"""What was sent just now, told to the region's other ingresses, so that they don't all choose the same idle engine.

With it the log has what each choice was made from, for who asks later why a request went where it went.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from routing.board import Candidate
from routing.policy import Choice, Query
from wire.bus import Producer
from wire.clock import Clock
from wire.codec import encode
from wire.errors import BusError
from wire.messages import Dispatch, Dispatches, ReplyTo, Request, Snapshot
from wire.topics import dispatches

log = logging.getLogger(__name__)
COALESCE_S = 0.005
LOSS_DIGITS = 6
"""after the point: far finer than losses are told apart, and short"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A choice, and what it was made from."""

    query: Query
    choice: Choice
    at_ms: int
    snapshot: Snapshot | None
    """that was followed"""
    tried: frozenset[Candidate]

    def sends(self, request: Request, to: Candidate) -> bool:
        """Whether it is this request that goes there."""
        return self.query.request_id == request.request_id and (self.choice.fleet, self.choice.shard) == to


def dispatch(request: Request, attempt: int, to: Candidate, prompt_tokens: int, decided: Decided | None) -> Dispatch:
    """What is told of an attempt that was sent; why there only if that is what was decided."""
    told = Dispatch(
        model=request.model,
        fleet=to.fleet,
        shard=to.shard,
        prompt_tokens_estimate=prompt_tokens,
        prefix_chain=request.prefix_chain,
    )
    if decided is None or not decided.sends(request, to):
        return told
    choice, snapshot = decided.choice, decided.snapshot
    return msgspec.structs.replace(
        told,
        request_id=request.request_id,
        attempt=attempt,
        at_ms=decided.at_ms,
        reason=choice.reason,
        loss=round(choice.loss, LOSS_DIGITS),
        cached_tokens=choice.cached_tokens,
        snapshot_version=None if snapshot is None else snapshot.version,
        waited_ms=round(decided.query.waited_ms),
        residency=request.residency,
        features=tuple(sorted(decided.query.features)),
        tried=tuple(sorted((fleet, shard) for fleet, shard in decided.tried)),
    )


class Broadcast:
    """Publishes this ingress's dispatches."""

    def __init__(self, producer: Producer, reply: ReplyTo, clock: Clock) -> None:
        """`producer`: acks leader."""
        self._producer = producer
        self._reply = reply
        self._clock = clock
        self._sent: list[Dispatch] = []
        self._filled = asyncio.Event()

    def note(self, dispatch: Dispatch) -> None:
        """A request was just sent."""
        self._sent.append(dispatch)
        self._filled.set()

    async def run(self) -> None:
        """Publish what was noted, a few milliseconds' worth at a time, until cancelled."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(COALESCE_S)
            self._filled.clear()
            sent, self._sent = tuple(self._sent), []
            message = Dispatches(
                ingress=f"{self._reply.region}/{self._reply.slot}",
                incarnation=self._reply.incarnation,
                at_ms=self._clock.now_ms(),
                sent=sent,
            )
            try:
                acked = await self._producer.send(dispatches(self._reply.region), encode(message))
            except BusError as exc:
                log.debug("dispatches can't be sent: %s", exc)
            else:
                acked.add_done_callback(_forget)


def _forget(acked: asyncio.Future[int]) -> None:
    # Whether siblings learnt of it matters to nobody here; asking keeps a failure from being reported as unseen.
    if not acked.cancelled():
        acked.exception()
