"""One producer id's life: queues by partition, one request in flight a broker, retries that keep order.

An idempotent batch keeps its sequence number and is sent again until the broker says yes, no, or two minutes have
passed. A no, and a yes without an offset, end this life: every record not acknowledged has an unknown outcome, and
none of them may land after one that is sent later by the next life. (The broker handles one connection's requests in
order, and the connection stays.)
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from wire.bus import Partition
from wire.errors import SendUnknown
from wire.kafka_link import MOVED, REQUEST_TIMEOUT_MS, Code, Link
from wire.topics import Acks

_log = logging.getLogger(__name__)

BATCH_BYTES = 512 * 1024
REQUEST_BYTES = 32 * 1024 * 1024
GIVE_UP_S = 120.0
_AGAIN = MOVED | {
    Code.CORRUPT_MESSAGE,
    Code.REQUEST_TIMED_OUT,
    Code.NOT_ENOUGH_REPLICAS,
    Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    Code.COORDINATOR_LOADING,
    Code.COORDINATOR_NOT_AVAILABLE,
    Code.NOT_CONTROLLER,
}


@dataclass(slots=True, eq=False)
class Pending:
    """A record whose outcome isn't known yet."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    size: int
    since_s: float
    ack: asyncio.Future[int]
    """its caller may cancel it, which changes nothing here"""
    settled: bool = False


@dataclass(slots=True, eq=False)
class Lane:
    """One partition's queue."""

    at: Partition
    limit_bytes: int
    waiting: deque[Pending] = field(default_factory=deque)
    waiting_bytes: int = 0
    sealed: list[Pending] = field(default_factory=list)
    """the batch being sent, or to be sent again"""
    data: bytes = b""
    sequence: int = 0
    busy: bool = False
    not_before_s: float = 0.0

    def pending(self) -> Iterator[Pending]:
        yield from self.sealed
        yield from self.waiting


class Delivery:
    """From the first send under a producer id to the first failure."""

    def __init__(self, link: Link, acks: Acks, linger_ms: int, failed: Callable[[Delivery], None]) -> None:
        self._link = link
        self._acks = acks
        self._linger_s = linger_ms / 1000
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[Partition, Lane] = {}
        self._active: dict[Partition, Lane] = {}
        self._in_flight: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()
        self._refreshing = False
        self._over = False
        self._producer_id: tuple[int, int] | None = None
        self.queued_bytes = 0
        self._own(self._open(), "open")

    # ------------------------------------------------ in and out

    def put(self, at: Partition, limit_bytes: int, record: Pending) -> None:
        """Queue a record; it is on its way before this returns if its broker is idle."""
        lane = self._lanes.get(at)
        if lane is None:
            lane = self._lanes[at] = Lane(at, min(limit_bytes, BATCH_BYTES))
        lane.waiting.append(record)
        lane.waiting_bytes += record.size
        self.queued_bytes += record.size
        self._active[at] = lane
        if self._link.leader(at) not in self._in_flight:
            self._pump()

    async def flush(self) -> None:
        """Wait for the outcome of all that is queued now."""
        last = [(lane.waiting or lane.sealed)[-1] for lane in self._active.values()]
        while not all(record.settled for record in last):
            self._progress.clear()
            await self._progress.wait()

    def fail(self, why: str) -> None:
        """End this life: nothing more is sent, all that is open raises SendUnknown."""
        if self._over:
            return
        self._over = True
        for task in self._tasks:
            task.cancel()
        if self._wake is not None:
            self._wake.cancel()
        for lane in self._active.values():
            for record in lane.pending():
                record.settled = True
                if not record.ack.done():
                    record.ack.set_exception(SendUnknown(f"no telling whether {lane.at.topic} has the record: {why}"))
                    record.ack.exception()  # a caller that doesn't ask is none to warn
        self._active.clear()
        self.queued_bytes = 0
        self._progress.set()
        self._failed(self)

    async def closed(self) -> None:
        """Wait until nothing of it runs any more; after `fail`."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ------------------------------------------------ the loop

    def _own(self, work: Any, name: str) -> None:
        task = self._loop.create_task(work, name=f"produce {name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            _log.error("a fault of the producer", exc_info=exc)
            self.fail(f"a fault of the producer: {exc}")

    async def _open(self) -> None:
        """Reach the cluster and, where sends are idempotent, get a producer id."""
        while True:
            try:
                await self._link.connect()
                self._producer_id = await self._init() if self._acks == "all" else (-1, -1)
            except KafkaError as exc:
                _log.debug("no producer id yet: %s", exc)
                self._expire()
                await asyncio.sleep(self._link.backoff_s)
                await self._link.refresh()
            else:
                self._pump()
                return

    async def _init(self) -> tuple[int, int]:
        response = await self._link.ask_any(InitProducerIdRequest(None, 2**31 - 1))
        if response.error_code != Code.NONE:
            raise for_code(response.error_code)("no producer id")
        return response.producer_id, response.producer_epoch

    def _pump(self) -> None:
        """Send what can be sent: at most one request a broker, one batch a partition."""
        if self._over or self._producer_id is None:
            return
        now_s, next_s, homeless = self._loop.time(), float("inf"), False
        by_node: dict[int, list[Lane]] = defaultdict(list)
        for lane in self._active.values():
            if lane.busy:
                continue
            if (due_s := self._due(lane)) > now_s:
                next_s = min(next_s, due_s)
            elif (leader := self._link.leader(lane.at)) is None:
                homeless = True
            elif leader not in self._in_flight:
                by_node[leader].append(lane)
        for node, lanes in by_node.items():
            self._in_flight.add(node)
            self._own(self._exchange(node, self._load(lanes)), f"to {node}")
        if homeless:
            self._look_for_leaders()
        self._pump_at(next_s)

    def _due(self, lane: Lane) -> float:
        if lane.sealed or not self._linger_s or lane.waiting_bytes >= lane.limit_bytes:
            return lane.not_before_s
        return max(lane.not_before_s, lane.waiting[0].since_s + self._linger_s)

    def _pump_at(self, when_s: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if when_s < float("inf"):
            self._wake = self._loop.call_at(when_s, self._pump)

    def _load(self, lanes: list[Lane]) -> list[Lane]:
        """Seal a batch in each lane, for as many lanes as fit one request."""
        loaded: list[Lane] = []
        size = 0
        for lane in lanes:
            if not lane.sealed:
                self._seal(lane)
            size += len(lane.data)
            if loaded and size > REQUEST_BYTES:
                break
            lane.busy = True
            loaded.append(lane)
        return loaded

    def _seal(self, lane: Lane) -> None:
        """Make the batch; from now on it keeps its sequence number."""
        assert self._producer_id is not None
        idempotent = self._acks == "all"
        builder = DefaultRecordBatchBuilder(2, 0, 0, *self._producer_id, lane.sequence if idempotent else -1, 2**31 - 1)
        size = 0
        while lane.waiting and (not lane.sealed or size + lane.waiting[0].size <= lane.limit_bytes):
            record = lane.waiting.popleft()
            builder.append(len(lane.sealed), record.timestamp_ms, record.key, record.value, [])
            lane.sealed.append(record)
            size += record.size
        lane.waiting_bytes -= size
        lane.data = builder.build()
        lane.sequence = (lane.sequence + len(lane.sealed)) & 0x7FFFFFFF

    async def _exchange(self, node: int, lanes: list[Lane]) -> None:
        topics: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        for lane in lanes:
            topics[lane.at.topic].append((lane.at.partition, lane.data))
        acks = -1 if self._acks == "all" else 1
        try:
            response = await self._link.send(
                node, ProduceRequest(None, acks, REQUEST_TIMEOUT_MS * 2 // 3, list(topics.items()))
            )
        except KafkaError as exc:
            _log.debug("a produce request to broker %d failed: %s", node, exc)
            answers = {}
        else:
            answers = {
                Partition(topic, partition): (code, offset)
                for topic, partitions in response.topics
                for partition, code, offset, *_ in partitions
            }
        self._in_flight.discard(node)
        for lane in lanes:
            self._settle(lane, *answers.get(lane.at, (Code.NETWORK_EXCEPTION, -1)))
        self._pump()

    def _settle(self, lane: Lane, code: int, offset: int) -> None:
        lane.busy = False
        if self._over:
            return
        if code in _AGAIN:
            lane.not_before_s = self._loop.time() + self._link.backoff_s
            if code in MOVED:
                self._look_for_leaders()
            self._expire()
        elif code != Code.NONE or offset < 0:
            why = for_code(code).__name__ if code != Code.NONE else "the broker gave no offset"
            _log.warning("%s: %s; a new producer id is needed", lane.at, why)
            self.fail(why)
        else:
            self._acknowledge(lane, offset)

    def _acknowledge(self, lane: Lane, offset: int) -> None:
        for record in lane.sealed:
            record.settled = True
            if not record.ack.done():
                record.ack.set_result(offset)
            self.queued_bytes -= record.size
            offset += 1
        lane.sealed, lane.data = [], b""
        if not lane.waiting:
            del self._active[lane.at]
        self._progress.set()

    # ------------------------------------------------ trouble

    def _look_for_leaders(self) -> None:
        if not self._refreshing:
            self._refreshing = True
            self._own(self._refresh(), "refresh")

    async def _refresh(self) -> None:
        await self._link.refresh()
        await asyncio.sleep(self._link.backoff_s)
        self._refreshing = False
        self._expire()
        self._pump()

    def _expire(self) -> None:
        """A record that could not be sent for two minutes ends this life."""
        oldest_s = min((next(lane.pending()).since_s for lane in self._active.values()), default=float("inf"))
        if self._loop.time() - oldest_s > GIVE_UP_S:
            self.fail(f"no acknowledgement in {GIVE_UP_S:.0f} s")
