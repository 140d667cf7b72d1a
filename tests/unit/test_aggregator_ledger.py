"""What the ledger app does with a batch, without Kafka and without a database."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from usages import usage

from aggregator import recorder as module
from aggregator.__main__ import main
from aggregator.ledger import prepared, serve_metrics
from aggregator.recorder import Metrics, Recorder, rated
from billing.charge import Line
from billing.errors import LedgerAway
from billing.fake import FakeLedger
from billing.prices import UNPRICED, load
from billing.store import LedgerStore
from millstream.ports import free_port
from wire import codec
from wire.bus import Record
from wire.clock import ManualClock
from wire.errors import SettingsError
from wire.messages import Dead, Usage, Usages
from wire.settings import ClickHouse

BOOK = load(None)


def record(offset: int, *entries: Usage, value: bytes | None = None) -> Record:
    value = codec.encode(Usages(entries=entries)) if entries else value
    return Record(topic="usage", partition=1, offset=offset, key=None, value=value, timestamp_ms=0)


class World:
    """A recorder with a fake ledger, and what it put on `dead`."""

    def __init__(self) -> None:
        self.ledger = FakeLedger()
        self.dead: list[tuple[int, str]] = []
        self.registry = CollectorRegistry()
        self.recorder = Recorder(self.ledger, BOOK, self.dump, ManualClock(), Metrics(self.registry))

    async def dump(self, entry: Record, why: str) -> None:
        self.dead.append((entry.offset, why))

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"millstream_ledger_{name}")

    def request_ids(self) -> set[str]:
        return {line.usage.request_id for line in self.ledger.lines({("acme", f"r{n}") for n in range(100)}).values()}


async def test_every_usage_of_a_batch_becomes_a_line() -> None:
    world = World()
    await world.recorder.record([record(0, usage("r0"), usage("r1")), record(1, usage("r2"))])
    assert world.request_ids() == {"r0", "r1", "r2"}
    assert (world.metric("lines_total"), world.metric("dead_total"), world.metric("waiting_lines")) == (3, 0, 0)


async def test_what_can_not_be_decoded_goes_to_dead_and_holds_nothing_up() -> None:
    world = World()
    await world.recorder.record(
        [
            record(0, value=b"\xff"),
            record(1, usage("r1")),
            record(2, value=None),
            record(3, value=codec.encode(Dead(topic="t", partition=0, offset=0, why="w", reader="r", at_ms=0))),
            record(4, usage("r2", cached_tokens=11), usage("r3")),
        ]
    )
    assert world.request_ids() == {"r1", "r3"}
    assert [offset for offset, _ in world.dead] == [0, 2, 3, 4]
    assert world.dead[-1][1] == "entry 0: more cached tokens than prompt tokens"
    assert world.metric("dead_total") == 4


async def test_a_model_without_a_price_is_recorded_and_counted() -> None:
    world = World()
    await world.recorder.record([record(0, usage("r0", model="unheard-of"))])
    assert world.ledger.lines({("acme", "r0")})["r0"].price_id == UNPRICED
    assert world.metric("unpriced_total") == 1


async def test_a_database_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    world = World()
    world.ledger.away = True
    tries, loop, insert = asyncio.Semaphore(0), asyncio.get_running_loop(), world.ledger.insert

    def tried(lines: Sequence[Line]) -> None:
        loop.call_soon_threadsafe(tries.release)
        insert(lines)

    monkeypatch.setattr(world.ledger, "insert", tried)
    recording = asyncio.create_task(world.recorder.record([record(0, usage("r0"))]))
    for _ in range(3):
        await tries.acquire()
    assert not recording.done()
    assert (world.metric("away"), world.metric("waiting_lines")) == (1, 1)
    world.ledger.away = False
    await recording
    assert world.request_ids() == {"r0"}
    assert world.metric("away") == 0


async def test_an_insert_that_fails_three_times_gives_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    world = World()
    attempts, insert = [], world.ledger.insert

    def unsure(lines: Sequence[Line]) -> None:
        insert(lines)
        attempts.append(len(lines))
        if len(attempts) <= 3:
            raise LedgerAway("the answer was lost")

    monkeypatch.setattr(world.ledger, "insert", unsure)
    await world.recorder.record([record(0, usage("r0"))])
    assert attempts == [1, 1, 1, 1]
    assert world.ledger.attempts_since("*", "*", 0) == 1


async def test_waiting_is_said_now_and_then_not_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.001)
    world, tries = World(), 0
    clock = ManualClock()
    waiting = Recorder(world.ledger, BOOK, world.dump, clock, Metrics(CollectorRegistry()))

    def away(lines: Sequence[Line]) -> None:
        nonlocal tries
        tries += 1
        clock.advance(10_000)
        if tries < 8:
            raise LedgerAway("it is away")

    monkeypatch.setattr(world.ledger, "insert", away)
    with caplog.at_level(logging.INFO):
        await waiting.record([record(0, usage("r0"))])
    # at 10, 40 and 70 seconds, then that it is back
    assert [entry.levelname for entry in caplog.records] == ["WARNING", "WARNING", "WARNING", "INFO"]


async def test_a_large_batch_is_inserted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INSERT_LINES", 4)
    world = World()
    await world.recorder.record([record(0, *(usage(f"r{n}") for n in range(10)))])
    assert len(world.request_ids()) == 10


def test_lines_keep_the_order_of_their_records() -> None:
    lines, broken = rated([record(0, usage("r0"), usage("r1")), record(1, usage("r2"))], BOOK)
    assert [line.usage.request_id for line in lines] == ["r0", "r1", "r2"]
    assert broken == []


async def test_being_stopped_ends_the_wait_for_the_database() -> None:
    stop = asyncio.Event()
    store = LedgerStore(ClickHouse(port=1))
    asyncio.get_running_loop().call_later(0.05, stop.set)
    assert await prepared(store, BOOK, ManualClock(), stop) is False


def test_a_port_for_metrics_that_is_taken_is_named() -> None:
    port, registry = free_port(), CollectorRegistry()
    serve_metrics(0, registry)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(SettingsError, match=f"MILLSTREAM_METRICS_PORT is {port}, but"):
            serve_metrics(port, registry)


def test_a_bad_setting_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger"], {"MILLSTREAM_PORT": "no"}) == 1
    assert "ledger: MILLSTREAM_PORT is 'no'" in capsys.readouterr().err


def test_check_reads_the_price_book(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--check"], {}) == 0
    missing = tmp_path / "none.toml"
    assert main(["ledger", "--check"], {"MILLSTREAM_PRICE_BOOK": str(missing)}) == 1
    assert "can't be read" in capsys.readouterr().err
