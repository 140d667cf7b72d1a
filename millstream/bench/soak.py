"""Many requests through one stack, and an account of every one: an ending each, a ledger line each, memory flat."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import psutil

from millstream import ledger
from millstream.bench.client import Answer, Connection, chat_body
from millstream.bench.own import Own, own_stack
from millstream.errors import Refused
from millstream.stack import KAFKA
from millstream.table import table
from millstream.wish import Say

SETTINGS = {
    "MILLSTREAM_SIMULATED_TTFT_MS": "5",
    "MILLSTREAM_SIMULATED_TBT_MS": "1",
    "MILLSTREAM_ENGINE_SLOTS": "64",
    "MILLSTREAM_LOG_LEVEL": "WARNING",
}
AT_LEAST_S = 240.0
"""a worker remembers what has finished for a minute: a run must be long enough to see that forgotten again and again"""
WARM_UP_SAMPLES = 70
"""until as much is forgotten as is added; caches fill, allocators settle"""
MAY_GROW_SHARE, MAY_GROW_BYTES = 0.05, 8_000_000
HEAP_BYTES = 384 * 1024 * 1024
"""a JVM takes its heap before it collects: Kafka may grow by what was not yet taken"""
_SAMPLE_EVERY_S = 1.0
_LEDGER_WITHIN_S = 60.0
_TOKENS = (4, 8, 16, 24)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident memory of a process over the run."""

    process: str
    first_bytes: int
    """median of the first third after warming up"""
    last_bytes: int
    """median of the last third"""
    flat: bool


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The account."""

    requests: int
    endings: int
    ledger_lines: int
    client_tokens: int
    """completion tokens, as the clients were told"""
    ledger_tokens: int
    differences: int
    """between journals and ledger, as `millstream verify` counts them"""
    failures: tuple[str, ...]
    memory: tuple[Memory, ...]
    took_s: float

    @property
    def good(self) -> bool:
        counts = self.requests == self.endings == self.ledger_lines
        same = self.client_tokens == self.ledger_tokens and self.differences == 0
        return counts and same and not self.failures and all(one.flat for one in self.memory)


@dataclass(slots=True)
class _Tally:
    sent: int = 0
    endings: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)

    def count(self, answer: Answer) -> None:
        if answer.whole and answer.finish_reason is not None:
            self.endings += 1
        self.tokens += answer.completion_tokens or 0


async def run(count: int, at_once: int, say: Say) -> Result:
    """At least `count` streamed chats, `at_once` at a time, for at least AT_LEAST_S, and the account of them."""
    async with own_stack(SETTINGS, say) as own:
        began = time.monotonic()
        tally, samples = await _load(own, count, at_once, say)
        took_s = time.monotonic() - began
        lines, tokens = await _ledger_settled(own, tally.sent)
        report = await ledger.verify(own.state.path)
    return Result(
        requests=tally.sent,
        endings=tally.endings,
        ledger_lines=lines,
        client_tokens=tally.tokens,
        ledger_tokens=tokens,
        differences=report.difference_count + report.pending,
        failures=tuple(tally.failures[:20]),
        memory=judge(samples),
        took_s=round(took_s, 1),
    )


def judge(samples: dict[str, list[int]]) -> tuple[Memory, ...]:
    """First third against last, after the warm-up. Pure."""
    out = []
    for process, series in sorted(samples.items()):
        warm = series[WARM_UP_SAMPLES:] or series[-1:]
        third = max(1, len(warm) // 3)
        first, last = round(statistics.median(warm[:third])), round(statistics.median(warm[-third:]))
        room = MAY_GROW_BYTES + (max(0, HEAP_BYTES - first) if process == KAFKA else 0)
        flat = last <= first * (1 + MAY_GROW_SHARE) + room
        out.append(Memory(process=process, first_bytes=first, last_bytes=last, flat=flat))
    return tuple(out)


def as_json(result: Result) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode()


def as_text(result: Result) -> str:
    """For people."""
    rows = [
        (one.process, f"{one.first_bytes / 1e6:.0f}", f"{one.last_bytes / 1e6:.0f}", "flat" if one.flat else "GROWS")
        for one in result.memory
    ]
    verdict = "Every request is accounted for." if result.good else "NOT every request is accounted for."
    lines = [
        f"{verdict} {result.requests} requests in {result.took_s:.0f} s",
        f"endings        {result.endings}",
        f"ledger lines   {result.ledger_lines}",
        f"tokens         {result.client_tokens} by the clients, {result.ledger_tokens} by the ledger",
        f"differences    {result.differences}",
        *(f"failure        {text}" for text in result.failures),
        "",
        table(("memory, MB", "first third", "last third", ""), rows),
    ]
    return "\n".join(lines)


async def _load(own: Own, count: int, at_once: int, say: Say) -> tuple[_Tally, dict[str, list[int]]]:
    tally = _Tally()
    numbers = _numbers(count, time.monotonic() + AT_LEAST_S)
    samples: dict[str, list[int]] = {}
    sampling = asyncio.create_task(_sample(own.processes(), samples, tally, count, say))
    try:
        await asyncio.gather(*(_client(own, numbers, tally) for _ in range(at_once)))
    finally:
        sampling.cancel()
        await asyncio.wait({sampling})
    return tally, samples


def _numbers(count: int, until_s: float) -> Iterator[int]:
    """From 0 on, until there were `count` and the monotonic clock says `until_s`."""
    number = 0
    while number < count or time.monotonic() < until_s:
        yield number
        number += 1


async def _client(own: Own, numbers: Iterator[int], tally: _Tally) -> None:
    connection = await Connection.open(own.run.port, own.key)
    for number in numbers:
        tally.sent += 1
        body = chat_body(own.run.model, f"Question {number}", max_tokens=_TOKENS[number % len(_TOKENS)], seed=number)
        try:
            tally.count(await connection.chat(body))
        except (Refused, OSError, TimeoutError, asyncio.IncompleteReadError) as exc:
            tally.failures.append(f"request {number}: {exc}")
            connection.close()
            connection = await Connection.open(own.run.port, own.key)
    connection.close()


async def _sample(
    processes: dict[str, psutil.Process], samples: dict[str, list[int]], tally: _Tally, count: int, say: Say
) -> None:
    seconds = 0
    while True:
        for name, process in processes.items():
            samples.setdefault(name, []).append(process.memory_info().rss)
        if seconds % 10 == 0:
            say(f"{tally.endings} of {count}")
        seconds += 1
        await asyncio.sleep(_SAMPLE_EVERY_S)


async def _ledger_settled(own: Own, count: int) -> tuple[int, int]:
    """Lines and completion tokens in the ledger, once all are there or time is up."""
    give_up = time.monotonic() + _LEDGER_WITHIN_S
    while True:
        lines, tokens = await asyncio.to_thread(ledger.counts, own.state.path)
        if lines >= count or time.monotonic() > give_up:
            return lines, tokens
        await asyncio.sleep(0.5)
