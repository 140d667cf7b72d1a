"""What HTTP and the log add to the time to first token, and what a token event and an open stream cost the ingress.

The engine is the simulated one with no delay of its own, so a client's time to first token is all added. Each request
is followed by a bare trip through the same broker: neighbours in time share the machine's mood.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence

import msgspec

from millstream.bench.bare import Trip, bare_trip
from millstream.bench.client import Connection, chat_body
from millstream.bench.own import Own, own_stack
from millstream.table import table
from millstream.wish import Say
from wire.clock import SystemClock
from wire.kafka import KafkaBus

SETTINGS = {
    "MILLSTREAM_SIMULATED_TTFT_MS": "0",
    "MILLSTREAM_SIMULATED_TBT_MS": "5",
    "MILLSTREAM_ENGINE_SLOTS": "64",
    "MILLSTREAM_ENGINE_QUEUE": "4000",
    "MILLSTREAM_LOG_LEVEL": "WARNING",
}
_WARM_UP = 40
_TEXT = "Why is the sky blue? " * 20
_TOKENS = 4
_BUSY_STREAMS, _BUSY_TOKENS = 32, 200
_IDLE_STREAMS = 500
_SLOW = {**SETTINGS, "MILLSTREAM_SIMULATED_TTFT_MS": "60000", "MILLSTREAM_KEEP_ALIVE_MS": "60000"}


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Times:
        ordered = sorted(times_ms)
        return cls(count=len(ordered), p50_ms=round(statistics.median(ordered), 3), p99_ms=round(_p99(ordered), 3))


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run on one machine."""

    bare: Times
    """produce, echo, consume"""
    ttft: Times
    """HTTP request to first text"""
    added_p50_ms: float
    """goal: 3"""
    added_p99_ms: float
    """goal: 15"""
    ingress_cpu_us_per_event: float
    """goal: 20"""
    ingress_bytes_per_stream: float
    """goal: 40,000"""


async def measure(count: int, say: Say) -> Result:
    """`count` pairs of a request and a bare trip, then the ingress's costs."""
    async with own_stack(SETTINGS, say) as own:
        bare, ttft = await _pairs(own, count, say)
        say(f"{_BUSY_STREAMS} streams of {_BUSY_TOKENS} tokens")
        cpu_us = await _cpu_per_event_us(own)
    async with own_stack(_SLOW, say) as own:
        say(f"{_IDLE_STREAMS} open streams")
        stream_bytes = await _bytes_per_stream(own)
    return Result(
        bare=bare,
        ttft=ttft,
        added_p50_ms=round(ttft.p50_ms - bare.p50_ms, 3),
        added_p99_ms=round(ttft.p99_ms - bare.p99_ms, 3),
        ingress_cpu_us_per_event=round(cpu_us, 1),
        ingress_bytes_per_stream=round(stream_bytes),
    )


def as_json(result: Result) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode()


def as_text(result: Result) -> str:
    """For people, with the goals beside the figures."""
    times = table(
        ("ms", "p50", "p99", "count"),
        [
            ("bare produce-echo-consume", result.bare.p50_ms, result.bare.p99_ms, result.bare.count),
            ("HTTP to first token", result.ttft.p50_ms, result.ttft.p99_ms, result.ttft.count),
            ("added", result.added_p50_ms, result.added_p99_ms, None),
            ("goal: at most", 3, 15, None),
        ],
    )
    costs = table(
        ("the ingress", "measured", "goal"),
        [
            ("CPU per token event, µs", result.ingress_cpu_us_per_event, 20),
            ("memory per open stream, kB", round(result.ingress_bytes_per_stream / 1000, 1), 40),
        ],
    )
    return f"{times}\n\n{costs}"


async def _pairs(own: Own, count: int, say: Say) -> tuple[Times, Times]:
    settings = own.run.settings()
    connection = await Connection.open(own.run.port, own.key)
    bare_ms: list[float] = []
    ttft_ms: list[float] = []
    async with bare_trip(KafkaBus(settings.cluster, SystemClock()), settings.cluster.bootstrap) as trip:
        for number in range(_WARM_UP + count):
            pair = await _pair(own, connection, trip, number)
            if number >= _WARM_UP:
                ttft_ms.append(pair[0])
                bare_ms.append(pair[1])
            if number and number % 100 == 0:
                say(f"{number} pairs")
    connection.close()
    return Times.of(bare_ms), Times.of(ttft_ms)


async def _pair(own: Own, connection: Connection, trip: Trip, number: int) -> tuple[float, float]:
    body = chat_body(own.run.model, _TEXT, max_tokens=_TOKENS, seed=number)
    answer = await connection.chat(body)
    return answer.ttft_ms, await trip.measure(body)


async def _cpu_per_event_us(own: Own) -> float:
    ingress = own.processes()["ingress"]
    connections = [await Connection.open(own.run.port, own.key) for _ in range(_BUSY_STREAMS)]
    before = ingress.cpu_times()
    answers = await asyncio.gather(
        *(
            connection.chat(chat_body(own.run.model, _TEXT, max_tokens=_BUSY_TOKENS, seed=number))
            for number, connection in enumerate(connections)
        )
    )
    after = ingress.cpu_times()
    for connection in connections:
        connection.close()
    used_s = (after.user + after.system) - (before.user + before.system)
    return float(used_s) * 1e6 / sum(answer.events for answer in answers)


async def _bytes_per_stream(own: Own) -> float:
    ingress = own.processes()["ingress"]
    warm = [await _open_stream(own, number) for number in range(20)]
    await asyncio.sleep(1.0)
    before = ingress.memory_info().rss
    many = [await _open_stream(own, number) for number in range(_IDLE_STREAMS)]
    await asyncio.sleep(2.0)
    after = ingress.memory_info().rss
    for connection in warm + many:
        connection.close()
    return float(after - before) / _IDLE_STREAMS


async def _open_stream(own: Own, number: int) -> Connection:
    connection = await Connection.open(own.run.port, own.key)
    connection.send(chat_body(own.run.model, _TEXT, max_tokens=_TOKENS, seed=number))
    return connection


def _p99(ordered: Sequence[float]) -> float:
    return ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
