"""The ledger app as a process: real Kafka, real ClickHouse, kill -9 of each."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import httpx
import orjson
import pytest
from clickhouse_process import ROOT, RunningClickHouse
from journals import begin, finish, spoken
from kafka_broker import RunningBroker
from usages import FLEET, NOON_MS, usage

from billing.errors import LedgerAway
from billing.store import LedgerStore
from billing.verify import verify
from wire import codec
from wire.bus import Partition, Producer
from wire.clock import SystemClock
from wire.journal import Fold, usage_of
from wire.kafka import KafkaBus
from wire.messages import Claim, Dead, Usage, Usages
from wire.topics import fleet_topics, shared_topics

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker that these tests may kill; the topic `usage` and the group `ledger` are theirs alone."""
    running = RunningBroker(tmp_path_factory.mktemp("kafka"))
    try:
        running.start()
        asyncio.run(create_topics(running))
        yield running
    finally:
        running.stop()


async def create_topics(running: RunningBroker) -> None:
    admin = await KafkaBus(running.cluster, SystemClock()).admin()
    await admin.create(shared_topics())
    await admin.stop()


@pytest.fixture(scope="module")
def own_clickhouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningClickHouse]:
    running = RunningClickHouse(tmp_path_factory.mktemp("clickhouse"))
    running.start()
    yield running
    running.stop()


class World:
    """Sends usage of one tenant, runs ledger processes, asks what the ledger holds."""

    def __init__(self, broker: RunningBroker, clickhouse: RunningClickHouse, tenant: str, directory: Path) -> None:
        self.broker = broker
        self.clickhouse = clickhouse
        self.tenant = tenant
        self.database = f"app_{tenant}"
        self.bus = KafkaBus(broker.cluster, SystemClock())
        self.store = LedgerStore(clickhouse.settings(self.database))
        self.log = directory / "ledger.log"
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []
        self.producer: Producer

    def environ(self) -> dict[str, str]:
        cluster = {"bootstrap": self.broker.cluster.bootstrap, "replication": 1}
        return {
            **os.environ,
            "MILLSTREAM_REGIONS": orjson.dumps({"local": cluster}).decode(),
            "MILLSTREAM_CLICKHOUSE": orjson.dumps({"port": self.clickhouse.port, "database": self.database}).decode(),
            "MILLSTREAM_STATE_DIR": str(self.directory / "state"),
        }

    def run(self, *args: str) -> subprocess.Popen[bytes]:
        return self._start("-m", "aggregator", "ledger", *args)

    def run_code(self, code: str) -> subprocess.Popen[bytes]:
        return self._start("-c", code)

    def _start(self, *args: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, *args]
        with self.log.open("ab") as out:
            process = subprocess.Popen(argv, cwd=ROOT, env=self.environ(), stdout=out, stderr=out)
        self.processes.append(process)
        return process

    async def send(self, entries: Sequence[Usage], per_record: int = 4) -> None:
        """Put usage on the topic, several a record, and wait until all of it is acknowledged."""
        for start in range(0, len(entries), per_record):
            value = codec.encode(Usages(entries=tuple(entries[start : start + per_record])))
            await self.producer.send("usage", value, partition=start % 4)
        await self.producer.flush()

    def usages(self, first: int, count: int) -> list[Usage]:
        return [usage(f"r{n:05}", tenant=self.tenant, ref=n) for n in range(first, first + count)]

    async def lines(self, count: int) -> None:
        """Wait until the ledger has so many lines of the tenant; then it has exactly those, each once."""
        await until(lambda: self.counted()[0] >= count)
        assert self.counted() == (count, count, 3_600 * count)

    def counted(self) -> tuple[int, int, int]:
        """(attempts, requests, nano-dollars) of the tenant."""
        asked = f"SELECT count() FROM attempts FINAL WHERE tenant = '{self.tenant}'"
        try:
            attempts = int(self.clickhouse.ask(asked, database=self.database).text)
            totals = self.store.totals(self.tenant, NOON_MS, NOON_MS + 1, "UTC")
        except (LedgerAway, httpx.HTTPError, ValueError):
            return 0, 0, 0
        return attempts, sum(t.requests for t in totals), sum(t.amount_nanodollars for t in totals)


async def until(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    async with asyncio.timeout(within_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.1)


@pytest.fixture
async def world(
    own_broker: RunningBroker, own_clickhouse: RunningClickHouse, suffix: str, tmp_path: Path
) -> AsyncIterator[World]:
    started = World(own_broker, own_clickhouse, suffix, tmp_path)
    started.producer = await started.bus.producer()
    yield started
    for process in started.processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    await started.producer.stop()
    started.store.close()


async def test_usage_becomes_lines_and_a_signal_ends_the_app(world: World) -> None:
    app = world.run()
    await world.send(world.usages(0, 200))
    await world.lines(200)
    app.terminate()
    assert await asyncio.to_thread(app.wait, 30) == 0


async def test_kill_9_at_any_moment_loses_and_doubles_nothing(world: World) -> None:
    for life in range(4):
        app = world.run()
        await world.send(world.usages(life * 1_500, 1_500), per_record=2)
        await until(lambda life=life: world.counted()[0] > life * 1_500)  # type: ignore[misc]
        app.kill()
        app.wait()
    world.run()
    await world.lines(6_000)


async def test_what_is_replayed_changes_nothing(world: World) -> None:
    world.run()
    for _ in range(4):
        await world.send(world.usages(0, 100), per_record=7)
    await world.send(world.usages(100, 1))
    await world.lines(101)


FAULTY = """
import os, sys
from aggregator import __main__, recorder
record, faults = recorder.Recorder.record, iter([True, False, True])
async def faulty(self, batch):
    if next(faults, False):
        raise RuntimeError("a fault of ours")
    await record(self, batch)
recorder.Recorder.record = faulty
sys.exit(__main__.main(["ledger"], os.environ))
"""


async def test_a_batch_that_met_a_fault_comes_again(world: World) -> None:
    app = world.run_code(FAULTY)
    for n in range(5):
        await world.send(world.usages(n * 9, 9), per_record=1)
        await asyncio.sleep(0.3)
    await world.lines(45)
    assert app.poll() is None


async def test_a_killed_database_is_waited_for(world: World) -> None:
    app = world.run()
    await world.send(world.usages(0, 100))
    await world.lines(100)
    world.clickhouse.end(signal.SIGKILL)
    await world.send(world.usages(100, 400))
    await until(lambda: b"lines wait" in world.log.read_bytes())
    assert app.poll() is None
    world.clickhouse.start()
    await world.lines(500)


async def test_a_signal_ends_the_app_while_the_database_is_away(world: World) -> None:
    app = world.run()
    await world.send(world.usages(0, 10))
    await world.lines(10)
    world.clickhouse.end(signal.SIGKILL)
    await world.send(world.usages(10, 10))
    await until(lambda: b"lines wait" in world.log.read_bytes())
    app.terminate()
    assert await asyncio.to_thread(app.wait, 30) == 0
    world.clickhouse.start()
    world.run()
    await world.lines(20)


async def test_an_app_that_starts_before_its_database_waits_for_it(world: World) -> None:
    world.clickhouse.end(signal.SIGKILL)
    world.run()
    await until(lambda: b"waiting for the database" in world.log.read_bytes())
    world.clickhouse.start()
    await world.send(world.usages(0, 10))
    await world.lines(10)


async def test_a_killed_broker_is_waited_for_by_the_same_process(world: World) -> None:
    app = world.run()
    await world.send(world.usages(0, 100))
    await world.lines(100)
    for life in (1, 2):
        flow = asyncio.create_task(world.send(world.usages(100 * life, 100), per_record=1))
        await asyncio.sleep(0.05)
        world.broker.signal(signal.SIGKILL)
        await asyncio.to_thread(world.broker.start)
        await flow
        await world.send(world.usages(100 * life, 100), per_record=1)  # whatever was unknown is sent again
        await world.lines(100 * (life + 1))
        assert app.poll() is None


async def test_two_processes_share_the_work_and_bill_once(world: World) -> None:
    first = world.run("--member", "0")
    await world.send(world.usages(0, 300))
    await until(lambda: world.counted()[0] > 0)
    world.run("--member", "1")
    for start in range(300, 1_500, 100):
        await world.send(world.usages(start, 100))
    await world.lines(1_500)
    first.kill()
    first.wait()
    world.run("--member", "0")
    await world.send(world.usages(1_500, 100))
    await world.lines(1_600)


async def test_what_can_not_be_decoded_goes_to_dead_and_holds_nothing_up(world: World) -> None:
    reader = await world.bus.reader()
    at = Partition("dead", 0)
    await reader.assign({at: "latest"})
    world.run()
    offset = await (await world.producer.send("usage", b'{"t": "Usages", "v": 1, "entries": [{}]}', partition=2))
    await world.producer.send("usage", None, key=b"x", partition=2)
    await world.send(world.usages(0, 20))
    await world.lines(20)
    notes: list[Dead] = []
    async with asyncio.timeout(60):
        while len(notes) < 2:
            notes += [codec.decode(record.value, Dead) for record in await reader.poll(500)]
    await reader.stop()
    assert [(note.topic, note.partition, note.offset, note.reader) for note in notes] == [
        ("usage", 2, offset, "ledger"),
        ("usage", 2, offset + 1, "ledger"),
    ]


async def test_verify_is_content_until_a_line_is_lost(world: World) -> None:
    admin = await world.bus.admin()
    await admin.create(fleet_topics(FLEET, 2))
    await admin.stop()
    world.store.apply_schema()
    app = world.run()
    topic, fold, entries = f"journal.{FLEET.name}", Fold(), []
    claim = Claim(engine="e", incarnation="i", nonce="n", fingerprint="f", at_ms=NOON_MS)
    epoch = await (await world.producer.send(topic, codec.encode(claim), partition=1))
    fold.apply(epoch, claim)
    for n in range(50):
        for record in (begin(epoch, n, world.tenant), spoken(epoch, n, range(7)), finish(epoch, n, 7)):
            offset = await (await world.producer.send(topic, codec.encode(record), partition=1))
            if (attempt := fold.apply(offset, record)) is not None:
                entries.append(usage_of(FLEET, 1, attempt))
    sending = asyncio.create_task(world.send(entries))
    report = await verify(world.bus, world.store, SystemClock(), wait_ms=120_000)
    await sending
    assert report.content, report.differences
    assert (report.partitions, report.finished, report.lines) == (2, 50, 50)
    app.terminate()  # else a replay might put back what is now taken away
    assert await asyncio.to_thread(app.wait, 30) == 0
    deleted = world.clickhouse.ask(
        "DELETE FROM attempts WHERE request_id = 'r7' SETTINGS lightweight_deletes_sync = 2", database=world.database
    )
    assert deleted.status_code == 200, deleted.text
    report = await verify(world.bus, world.store, SystemClock(), wait_ms=0)
    assert [(each.request_id, each.ledger) for each in report.differences] == [("r7", "nothing")]


def fails_to_start(world: World, **environ: str) -> str:
    argv = [sys.executable, "-m", "aggregator", "ledger"]
    done = subprocess.run(
        argv, cwd=ROOT, env=world.environ() | environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


async def test_a_price_that_was_changed_stops_the_start_with_a_sentence(world: World) -> None:
    world.run()
    await world.send(world.usages(0, 10))
    await world.lines(10)
    text = (ROOT / "billing" / "price_book.toml").read_text()
    changed = world.directory / "book.toml"
    changed.write_text(text.replace('"0.40"', '"0.41"'))
    said = await asyncio.to_thread(fails_to_start, world, MILLSTREAM_PRICE_BOOK=str(changed))
    assert said.startswith("ledger: price 'simulated', in effect since")


async def test_a_database_of_a_newer_version_stops_the_start_with_a_sentence(world: World) -> None:
    world.store.apply_schema()
    world.clickhouse.ask("INSERT INTO schema_versions VALUES (999, 'later', 'x')", database=world.database)
    said = await asyncio.to_thread(fails_to_start, world)
    assert said == "ledger: the ledger's schema is at version 999, newer than this program; upgrade it"
