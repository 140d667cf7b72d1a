"""Reading partitions: one fetch in flight a broker, records decoded when taken, positions kept through outages."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.memory_records import MemoryRecords

from wire.bus import Partition, Record
from wire.errors import BusError
from wire.kafka_link import MOVED, Code, Link
from wire.kafka_offsets import beginning_offsets
from wire.topics import LARGE_MESSAGE_BYTES

_log = logging.getLogger(__name__)

WAIT_MS = 100
"""the broker holds a fetch for so long while nothing comes, and what else is to be read waits for it"""
WAIT_STEADY_MS = 500
"""and for up to so long, twice as long each time, while what is read stays the same: at 100 ms idle readers were nearly
half of what an idle stack costs"""
WAIT_PAUSED_MS = 50
"""a partition that is resumed waits for the fetch in flight, so that one is kept short"""
PARTITION_BYTES = LARGE_MESSAGE_BYTES + 1024 * 1024
RESPONSE_BYTES = 2 * PARTITION_BYTES
AHEAD_BYTES = 4 * 1024 * 1024
"""a partition with more than this read, but not taken yet, isn't fetched"""


@dataclass(slots=True, eq=False)
class Place:
    """Where reading of one partition stands."""

    at: Partition
    position: int | None
    """next offset to hand out; None while it isn't known"""
    fetch_from: int | None
    """next offset to fetch"""
    batches: deque[tuple[Any, int]] = field(default_factory=deque)
    """fetched, not handed out: batch and the bytes that are freed when it is used up"""
    ahead_bytes: int = 0
    paused: bool = False
    not_before_s: float = 0.0
    stream: Iterator[Record] | None = None

    def records(self) -> Iterator[Record]:
        """What was fetched, decoded one by one; moves `position`."""
        while self.batches:
            batch, size = self.batches[0]
            if not batch.is_control_batch:
                yield from self._unpack(batch)
            # compaction and control batches leave offsets without records
            self.position = max(self.position or 0, batch.next_offset)
            self.batches.popleft()
            self.ahead_bytes -= size

    def _unpack(self, batch: Any) -> Iterator[Record]:
        topic, partition = self.at
        for raw in batch:
            if raw.offset >= (self.position or 0):
                self.position = raw.offset + 1
                yield Record(
                    topic=topic,
                    partition=partition,
                    offset=raw.offset,
                    key=raw.key,
                    value=raw.value,
                    timestamp_ms=raw.timestamp,
                )

    def take(self, limit: int) -> list[Record]:
        """Up to `limit` records."""
        taken: list[Record] = []
        while self.batches and len(taken) < limit:
            if self.stream is None:
                self.stream = self.records()
            record = next(self.stream, None)
            if record is None:
                self.stream = None
            else:
                taken.append(record)
        return taken


class Fetcher:
    """Keeps records at hand for `poll`. Never raises because of the cluster; tries again instead."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._places: dict[Partition, Place] = {}
        self._in_flight: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Event()
        self._wake: asyncio.TimerHandle | None = None
        self._wait_ms = WAIT_MS
        self._refreshing = False
        self._stopped = False

    # ------------------------------------------------ what is read

    def assign(self, positions: Mapping[Partition, int | None]) -> None:
        """Read exactly these; one without a position waits for `seek`."""
        self._places = {at: Place(at, position, position) for at, position in positions.items()}
        self._wait_ms = WAIT_MS
        for topic in {at.topic for at in positions}:
            self._link.watch(topic)
        self._pump()

    def seek(self, at: Partition, offset: int) -> None:
        """Go on from there. KeyError if it isn't assigned."""
        self._places[at] = Place(at, offset, offset, paused=self._places[at].paused)
        self._wait_ms = WAIT_MS
        self._pump()

    def unplaced(self) -> list[Partition]:
        """What waits for a position."""
        return [at for at, place in self._places.items() if place.position is None]

    def position(self, at: Partition) -> int | None:
        return self._places[at].position

    def pause(self, at: Partition, paused: bool) -> None:
        if at in self._places:
            self._places[at].paused = paused
            self._arrived.set()
            self._pump()

    async def poll(self, timeout_ms: int, max_records: int) -> list[Record]:
        """What is at hand, waiting for it for at most `timeout_ms`."""
        until_s = self._loop.time() + timeout_ms / 1000
        while True:
            self._arrived.clear()
            records = self._take(max_records)
            left_s = until_s - self._loop.time()
            if records or left_s <= 0:
                return records
            try:
                async with asyncio.timeout(left_s):
                    await self._arrived.wait()
            except TimeoutError:
                continue

    def _take(self, max_records: int) -> list[Record]:
        taken: list[Record] = []
        for at, place in list(self._places.items()):
            if place.paused or not place.batches:
                continue
            if len(taken) >= max_records:
                break
            taken += place.take(max_records - len(taken))
            # to the back, so that a busy partition can't starve the others
            self._places[at] = self._places.pop(at)
        if taken:
            self._pump()
        return taken

    async def stop(self) -> None:
        """End all work."""
        self._stopped = True
        if self._wake is not None:
            self._wake.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ------------------------------------------------ the loop

    def _own(self, work: Any, name: str) -> None:
        task = self._loop.create_task(work, name=f"fetch {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pump(self) -> None:
        """Fetch what can be fetched: at most one request a broker."""
        if self._stopped:
            return
        now_s, next_s, homeless, paused = self._loop.time(), float("inf"), False, False
        by_node: dict[int, list[Place]] = defaultdict(list)
        for place in self._places.values():
            paused = paused or place.paused
            if place.paused or place.fetch_from is None or place.ahead_bytes >= AHEAD_BYTES:
                continue
            if place.not_before_s > now_s:
                next_s = min(next_s, place.not_before_s)
            elif (leader := self._link.leader(place.at)) is None:
                homeless = True
            elif leader not in self._in_flight:
                by_node[leader].append(place)
        for node, places in by_node.items():
            self._in_flight.add(node)
            self._own(self._fetch(node, places, WAIT_PAUSED_MS if paused else self._wait_ms), f"from {node}")
        if homeless:
            self._look_for_leaders()
        if self._wake is not None:
            self._wake.cancel()
        self._wake = self._loop.call_at(next_s, self._pump) if next_s < float("inf") else None

    async def _fetch(self, node: int, places: list[Place], wait_ms: int) -> None:
        asked = {place.at: (place, place.fetch_from) for place in places}
        topics: dict[str, list[tuple[int, int | None, int]]] = defaultdict(list)
        for place in places:
            topics[place.at.topic].append((place.at.partition, place.fetch_from, PARTITION_BYTES))
        try:
            response = await self._link.send(node, FetchRequest(wait_ms, 1, RESPONSE_BYTES, 0, list(topics.items())))
            self._wait_ms = min(2 * self._wait_ms, WAIT_STEADY_MS)
            for topic, partitions in response.topics:
                for partition, code, _, *rest in partitions:
                    place, offset = asked[Partition(topic, partition)]
                    if self._places.get(place.at) is place and place.fetch_from == offset:
                        self._receive(place, code, rest[-1])
        except KafkaError as exc:
            _log.debug("a fetch from broker %d failed: %s", node, exc)
            self._put_off(places)
            self._look_for_leaders()
        except Exception:
            _log.exception("a fault while fetching from broker %d; trying again", node)
            self._put_off(places)
        finally:
            self._in_flight.discard(node)
        self._pump()

    def _receive(self, place: Place, code: int, data: bytes) -> None:
        if code == Code.NONE:
            self._keep(place, data)
        elif code == Code.OFFSET_OUT_OF_RANGE:
            place.not_before_s = float("inf")
            self._own(self._restart(place), f"restart {place.at}")
        else:
            if code in MOVED:
                self._look_for_leaders()
            else:
                _log.warning("%s[%d] can't be read: %s", *place.at, for_code(code).__name__)
            self._put_off([place])

    def _keep(self, place: Place, data: bytes) -> None:
        found = MemoryRecords(data)
        while found.has_next():
            batch = found.next_batch()
            if not batch.validate_crc():
                _log.error("%s[%d] offset %d: a batch is corrupt; fetching it again", *place.at, batch.base_offset)
                self._put_off([place])
                return
            # the whole response counts until its last batch is taken: they share its memory
            size = 0 if found.has_next() else len(data)
            place.batches.append((batch, size))
            place.ahead_bytes += size
            place.fetch_from = batch.next_offset
            self._arrived.set()

    def _put_off(self, places: list[Place]) -> None:
        for place in places:
            place.not_before_s = self._loop.time() + self._link.backoff_s

    # ------------------------------------------------ trouble

    async def _restart(self, place: Place) -> None:
        """The position isn't in the log any more: on from the log's start."""
        while self._places.get(place.at) is place:
            try:
                start = (await beginning_offsets(self._link, [place.at]))[place.at]
            except BusError as exc:
                _log.debug("%s: where its log starts isn't known yet: %s", place.at, exc)
                await asyncio.sleep(self._link.backoff_s)
            else:
                if self._places.get(place.at) is place:
                    _log.warning(
                        "%s[%d]: offset %s isn't in the log; reading on from its start, %d",
                        *place.at,
                        place.fetch_from,
                        start,
                    )
                    self.seek(place.at, start)
                return

    def _look_for_leaders(self) -> None:
        if not self._refreshing:
            self._refreshing = True
            self._own(self._refresh(), "refresh")

    async def _refresh(self) -> None:
        try:
            await self._link.connect()
            await self._link.refresh()
        except KafkaError as exc:
            _log.debug("the cluster can't be reached: %s", exc)
        await asyncio.sleep(self._link.backoff_s)
        self._refreshing = False
        self._pump()
