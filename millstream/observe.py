"""What the log says about the stack: engines, weights, the catalogue, and how far the groups are behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from wire import codec
from wire.bus import AtTime, Bus, Partition, Record, Start
from wire.errors import DecodeError
from wire.fleet import Fleet
from wire.messages import EngineSignal, Model, Snapshot
from wire.topics import CATALOGUE, SIGNALS, USAGE, WEIGHTS, FleetTopics

LOOK_BACK_MS = 10_000
_POLL_MS = 200


@dataclass(slots=True)
class Seen:
    """The latest of each engine, of each model's weights, and of each model of the catalogue."""

    engines: dict[str, EngineSignal] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)

    def take(self, message: object) -> None:
        match message:
            case EngineSignal():
                self.engines[message.engine] = message
            case Snapshot():
                self.snapshots[message.model] = message
            case Model():
                self.models[message.name] = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """How far a consumer group is behind."""

    group: str
    records: int


async def read_to_end(bus: Bus, starts: Mapping[Partition, Start]) -> list[Record]:
    """Every record from the starts to what is the log's end now. Unavailable while the log is away."""
    reader = await bus.reader(client_id="millstream")
    found: list[Record] = []
    try:
        ends = await reader.end_offsets(starts)
        await reader.assign(starts)
        while any(reader.position(at) < end for at, end in ends.items()):
            found += await reader.poll(_POLL_MS)
    finally:
        await reader.stop()
    return found


async def look(bus: Bus, now_ms: int) -> Seen:
    """What the log says now; engines are those that signalled in the last seconds."""
    starts: dict[Partition, Start] = {
        Partition(SIGNALS, 0): AtTime(now_ms - LOOK_BACK_MS),
        Partition(WEIGHTS, 0): "earliest",
        Partition(CATALOGUE, 0): "earliest",
    }
    seen = Seen()
    for record in await read_to_end(bus, starts):
        with contextlib.suppress(DecodeError):  # the part that owns the topic reports it
            seen.take(codec.decode(record.value))
    return seen


async def fleet_backlogs(bus: Bus, fleets: Iterable[Fleet]) -> tuple[Backlog, ...]:
    """Requests of each fleet that no worker has taken on yet: lag is queue depth (R5)."""
    out = []
    for fleet in fleets:
        names = FleetTopics(fleet)
        out.append(await backlog(bus, names.group, (names.requests, names.batch)))
    return tuple(out)


async def ledger_backlog(bus: Bus, group: str) -> Backlog:
    """Usage records that aren't in the ledger yet."""
    return await backlog(bus, group, (USAGE,))


async def backlog(bus: Bus, group: str, topics: Iterable[str]) -> Backlog:
    """Records of these topics behind which the group stands."""
    admin = await bus.admin()
    reader = await bus.reader(client_id="millstream-backlog")
    try:
        commits = await admin.group_commits(group)
        partitions = [Partition(topic, n) for topic in topics for n in range(await admin.partitions(topic) or 0)]
        ends = await reader.end_offsets(partitions)
        begins = await reader.beginning_offsets(partitions)
    finally:
        await reader.stop()
        await admin.stop()
    behind = 0
    for at in partitions:
        done = commits[at].offset if at in commits else begins[at]
        behind += max(0, ends[at] - max(done, begins[at]))
    return Backlog(group=group, records=behind)
