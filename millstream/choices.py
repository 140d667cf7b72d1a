"""`millstream choices`: why requests went where they went, from the log alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from millstream import runfile
from millstream.errors import StackError
from routing.hindsight import Hindsight, hindsight
from routing.replay import LEARN_MS, WARM_UP_MS, Decision, Moment, in_order, moments, replay
from wire import codec
from wire.bus import AtTime, Bus, Partition, Record, Start
from wire.clock import SystemClock
from wire.errors import DecodeError
from wire.ids import time_of
from wire.kafka import KafkaBus
from wire.messages import Dispatch, Message
from wire.topics import KEPT_FOR_REPLAY_MS, SIGNALS, USAGE, WEIGHTS, dispatches

Say = Callable[[str], None]

LAST_S = 300
ATTEMPTS_WITHIN_MS = 600_000
"""Of a request's coming in: much longer than anybody waits for it to be accepted"""
NAMED_BY = ("req_", "chatcmpl-", "cmpl-")
"""What stands before a request's id in an answer's headers and body"""
SAY_EVERY = 10_000
"""records, and choices"""
_POLL_MS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A time of the log."""

    from_ms: int
    until_ms: int


async def lately(state_dir: Path, last_s: int, say: Say) -> tuple[Hindsight, ...]:
    """What the choices of the last seconds come to, model by model. Unavailable."""
    now_ms = _now_ms()
    since_ms = now_ms - last_s * 1_000

    def recent(dispatch: Dispatch) -> bool:
        return dispatch.at_ms is not None and dispatch.at_ms >= since_ms

    return hindsight(_counted(await _replayed(state_dir, Span(from_ms=since_ms, until_ms=now_ms), recent, say), say))


async def about(state_dir: Path, name: str, say: Say) -> tuple[Decision, ...]:
    """The choices about one request, an attempt each, in order. Unavailable; StackError if the log has none."""
    request_id = id_of(name)
    came_ms = time_of(request_id)
    found: tuple[Decision, ...] = ()
    if came_ms is not None and came_ms >= _now_ms() - KEPT_FOR_REPLAY_MS:
        span = Span(from_ms=came_ms, until_ms=came_ms + ATTEMPTS_WITHIN_MS)
        found = tuple(await _replayed(state_dir, span, lambda dispatch: dispatch.request_id == request_id, say))
    else:
        runfile.running(state_dir)
    if not found:
        raise StackError(
            f"no choice about a request {name!r} is in the log, which keeps them for an hour; an answer's header"
            " x-request-id names its request. A request that was refused at once, as in overload, was never sent"
            " anywhere and so has no choice"
        )
    return found


def id_of(name: str) -> str:
    """A request's id, by what an answer calls it."""
    for prefix in NAMED_BY:
        name = name.removeprefix(prefix)
    return name.lower()


async def _replayed(state_dir: Path, span: Span, wanted: Callable[[Dispatch], bool], say: Say) -> Iterator[Decision]:
    """The wanted choices of a time, made again with what was known before."""
    run = runfile.running(state_dir)
    settings = run.settings()
    bus = KafkaBus(settings.cluster, SystemClock())
    told = await read(bus, run.region, span, say)
    return replay(told, run.region, trips_ms=settings.trips_ms(run.region), wanted=wanted)


async def read(bus: Bus, region: str, span: Span, say: Say) -> list[Moment]:
    """Everything that a region's choices of a time were made from, in order. Unavailable while the log is away."""
    warm, before = AtTime(round(span.from_ms - WARM_UP_MS)), AtTime(round(span.from_ms - LEARN_MS))
    starts: dict[Partition, Start] = {
        Partition(SIGNALS, 0): warm,
        Partition(dispatches(region), 0): warm,
        Partition(WEIGHTS, 0): "earliest",  # what was published before may be what is followed
    }
    found: list[Moment] = []
    snapshots: dict[bytes | None, Record] = {}
    """the latest of those published before, by key"""
    admin = await bus.admin()
    reader = await bus.reader(client_id="millstream-choices")
    try:
        starts |= {Partition(USAGE, number): before for number in range(await admin.partitions(USAGE) or 0)}
        await reader.assign(dict.fromkeys(starts, AtTime(span.until_ms)))
        ends = {at: reader.position(at) for at in starts}
        await reader.assign(starts)
        count = 0
        while any(reader.position(at) < end for at, end in ends.items()):
            for record in await reader.poll(_POLL_MS):
                count += 1
                if count % SAY_EVERY == 0:
                    say(f"{count:,} records read")
                if record.topic == WEIGHTS and record.timestamp_ms < warm.timestamp_ms:
                    snapshots[record.key] = record
                elif record.offset < ends[record.at]:
                    found += _told(record)
    finally:
        await reader.stop()
        await admin.stop()
    return in_order([*(moment for record in snapshots.values() for moment in _told(record)), *found])


def _told(record: Record) -> Iterator[Moment]:
    with contextlib.suppress(DecodeError):  # the part that reads the topic reports it
        message: Message = codec.decode(record.value)
        yield from moments(message, record.timestamp_ms)


def _counted(decisions: Iterable[Decision], say: Say) -> Iterator[Decision]:
    for count, decision in enumerate(decisions, 1):
        if count % SAY_EVERY == 0:
            say(f"{count:,} choices made again")
        yield decision


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
