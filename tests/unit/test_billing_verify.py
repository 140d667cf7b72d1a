"""Journals against the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from journals import begin, finish, spoken
from usages import FLEET, NOON_MS

from billing import verify as module
from billing.charge import Line, rate
from billing.compare import Difference
from billing.fake import FakeLedger
from billing.prices import load
from billing.verify import Report, verify
from billing.walk import Walk
from wire import codec
from wire.bus import Commit, Partition
from wire.clock import ManualClock, SystemClock
from wire.errors import Unavailable
from wire.journal import Fold, usage_of
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog
from wire.messages import Carry, Claim, Finish, FinishReason, Journal, Message, Ref, Span
from wire.topics import Topic, fleet_topics, shared_topics

AT = Partition(f"journal.{FLEET.name}", 0)
PRICES = load(None)


class World:
    """One journal partition written by hand, a ledger, and what `verify` says of them."""

    def __init__(self) -> None:
        self.log = MemoryLog(ManualClock(NOON_MS))
        self.bus = MemoryBus(self.log)
        self.ledger = FakeLedger()
        self.ledger.adopt(PRICES.prices, NOON_MS)
        self.epoch = 0
        self.written: list[tuple[int, Journal]] = []

    async def start(self) -> World:
        admin = await self.bus.admin()
        await admin.create([*shared_topics(1), *fleet_topics(FLEET, 1)])
        self.producer = await self.bus.producer()
        return self

    async def write(self, record: Journal | bytes) -> int:
        value = codec.encode(record) if isinstance(record, Message) else record
        offset = await (await self.producer.send(AT.topic, value, partition=0))
        if not isinstance(record, bytes):
            self.written.append((offset, record))
        return offset

    async def claim(self) -> None:
        claim = Claim(engine="e", incarnation="i", nonce="n", fingerprint="f", at_ms=NOON_MS)
        self.epoch = await self.write(claim)

    async def request(self, n: int, tokens: Sequence[int] = (7, 8), reason: FinishReason = "stop") -> None:
        await self.write(begin(self.epoch, n))
        if tokens:
            await self.write(spoken(self.epoch, n, tokens))
        await self.write(finish(self.epoch, n, len(tokens), reason))

    def lines(self) -> list[Line]:
        """What a ledger that is right holds."""
        fold = Fold()
        ended = [attempt for offset, record in self.written if (attempt := fold.apply(offset, record)) is not None]
        return [rate(usage_of(FLEET, 0, attempt), PRICES) for attempt in ended]

    async def verify(self, wait_ms: int = 0) -> Report:
        return await verify(self.bus, self.ledger, SystemClock(), wait_ms=wait_ms)


@pytest.fixture
async def world() -> World:
    started = await World().start()
    await started.claim()
    return started


def named(report: Report) -> list[tuple[str, str, str]]:
    return [(each.request_id, each.journal, each.ledger) for each in report.differences]


async def test_a_ledger_that_is_right_is_content(world: World) -> None:
    for n in range(5):
        await world.request(n)
    await world.request(5, (), "refused")
    world.ledger.insert(world.lines())
    report = await world.verify()
    assert report.content, report.differences
    assert (report.partitions, report.finished, report.lines, report.records) == (1, 6, 6, 18)


async def test_an_empty_journal_is_content(world: World) -> None:
    assert (await world.verify()).content


async def test_a_request_that_still_runs_is_not_missed(world: World) -> None:
    await world.write(begin(world.epoch, 1))
    await world.write(spoken(world.epoch, 1, (1,)))
    assert (await world.verify()).content


async def test_a_lost_line_is_named(world: World) -> None:
    await world.request(1)
    await world.request(2)
    world.ledger.insert(world.lines()[:1])
    report = await world.verify()
    assert not report.content
    assert named(report) == [("r2", "stop 10+2 tokens (4 cached)", "nothing")]
    assert str(report.differences[0]).startswith("request r2 attempt 1, journal.local.cpu.simulated.1.sim[0] offset 6:")


async def test_every_field_that_differs_is_named(world: World) -> None:
    await world.request(1)
    (line,) = world.lines()
    wrong = rate(msgspec.structs.replace(line.usage, completion_tokens=3, reason="length"), PRICES)
    world.ledger.insert([wrong])
    assert named(await world.verify()) == [
        ("r1", "reason stop", "reason length"),
        ("r1", "completion_tokens 2", "completion_tokens 3"),
    ]


async def test_an_amount_that_does_not_follow_from_its_own_line_is_named(world: World) -> None:
    await world.request(1)
    (line,) = world.lines()
    world.ledger.insert([replace(line, amount_nanodollars=line.amount_nanodollars + 1)])
    ((who, journal, ledger),) = named(await world.verify())
    assert (who, journal) == ("r1", "gives another amount at the line's own prices")
    assert ledger == f"{line.amount_nanodollars + 1} nano-dollars"


async def test_prices_that_were_never_adopted_are_named(world: World) -> None:
    await world.request(1)
    await world.request(2)
    one, two = world.lines()
    dearer = two.input_picodollars * 2
    amount = two.amount_nanodollars + 6 * two.input_picodollars // 1_000
    world.ledger.insert(
        [
            replace(one, price_id="forged-0123"),
            replace(two, input_picodollars=dearer, amount_nanodollars=amount),
        ]
    )
    assert [(who, ledger) for who, _, ledger in named(await world.verify())] == [
        ("r1", "forged-0123, which was never adopted"),
        ("r2", f"other prices than those of {two.price_id}"),
    ]


async def test_a_line_without_a_finish_is_named(world: World) -> None:
    await world.request(1)
    (line,) = world.lines()
    ghost = rate(msgspec.structs.replace(line.usage, request_id="ghost"), PRICES)
    world.ledger.insert([line, ghost])
    assert named(await world.verify()) == [("ghost", "has no such Finish", "stop 10+2 tokens (4 cached)")]


async def test_what_a_former_owner_wrote_does_not_count(world: World) -> None:
    former = world.epoch
    await world.write(begin(former, 1))
    await world.claim()
    await world.write(spoken(former, 1, (9, 9, 9)))
    await world.write(finish(former, 1, 3))
    await world.write(spoken(world.epoch, 1, (7,)))
    await world.write(finish(world.epoch, 1, 1))
    world.ledger.insert(world.lines())
    report = await world.verify()
    assert report.content, report.differences
    assert report.finished == 1


async def test_a_carry_brings_back_what_was_compared_and_changes_nothing(world: World) -> None:
    await world.request(1)
    offset, ended = world.written[-1]
    assert isinstance(ended, Finish)
    await world.claim()
    for spans, n in (((Span(Ref(2), 0, 0, (7, 8)),), 1), ((), 2)):
        carry = Carry(
            epoch=world.epoch,
            begin=begin(0, n),
            begin_offset=1,
            spans=spans,
            crashes=0,
            at_ms=NOON_MS,
            finish=ended if n == 1 else None,
            finish_offset=offset if n == 1 else None,
        )
        await world.write(carry)
    await world.write(finish(world.epoch, 2, 0, "cancelled"))
    world.ledger.insert(world.lines())
    report = await world.verify()
    assert report.content, report.differences
    assert report.finished == 2


async def test_a_finish_whose_beginning_is_gone_is_compared_by_its_counts(world: World) -> None:
    for n in (1, 2, 3):
        await world.request(n)
    world.ledger.insert(world.lines()[1:])
    # Begin of 1 and 2 are past retention; 1 isn't in the ledger
    world.log.delete_before(AT, 3)
    report = await world.verify()
    assert named(report) == [("", "a Finish (stop)", "nothing")]
    world.log.delete_before(AT, 4)
    assert (await world.verify()).content
    two = world.lines()[1]
    world.log.delete_before(AT, 5)
    world.ledger.insert([rate(msgspec.structs.replace(two.usage, completion_tokens=1), PRICES)])
    assert named(await world.verify()) == [("r2", "completion_tokens 2", "completion_tokens 1")]


async def test_a_trimmed_journal_trusts_the_highest_epoch(world: World) -> None:
    former = world.epoch
    await world.write(begin(former, 1))
    await world.claim()
    await world.write(finish(former, 1, 0))
    await world.request(2)
    world.ledger.insert(world.lines())
    # what is left begins with the former owner's Finish
    world.log.delete_before(AT, 3)
    report = await world.verify()
    assert report.content, report.differences
    assert report.finished == 1


async def test_records_that_can_not_be_used_are_named(world: World) -> None:
    await world.write(b"{}")
    await world.request(1)
    await world.write(spoken(world.epoch, 2, (1,)))
    await world.write(begin(world.epoch, 3))
    world.ledger.insert(world.lines())
    await world.write(spoken(world.epoch, 3, (1,), first=5))
    told = named(await world.verify())
    assert [journal.split(":")[0] for _, journal, _ in told] == ["a record that can't be decoded", "contradicts itself"]


async def test_a_topic_that_is_no_fleets_is_named(world: World) -> None:
    admin = await world.bus.admin()
    await admin.create([Topic(name="journal.what", partitions=1, retention_ms=1_000)])
    ((_, journal, _),) = named(await world.verify())
    assert journal.startswith("is no fleet's")


async def test_windows_and_pages_are_put_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(module, "WINDOW_FINISHES", 4)
    for n in range(25):
        await world.request(n)
    lines = world.lines()
    world.ledger.insert(lines[:-1])
    # more lines at one offset than a page holds
    doubles = [rate(msgspec.structs.replace(lines[3].usage, request_id=f"double{i}"), PRICES) for i in range(2)]
    world.ledger.insert(doubles)
    report = await world.verify()
    assert {each.request_id for each in report.differences} == {"double0", "double1", "r24"}
    assert (report.finished, report.lines) == (25, 24)


async def test_more_differences_than_can_be_named_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMED", 3)
    monkeypatch.setattr(module, "MAX_MISSING", 5)
    for n in range(8):
        await world.request(n)
    report = await world.verify()
    assert (report.difference_count, len(report.differences)) == (8, 3)


async def test_usage_on_its_way_is_waited_for(world: World) -> None:
    await world.request(1)
    await world.request(2)
    checking = asyncio.create_task(world.verify(wait_ms=60_000))
    await asyncio.sleep(0.05)
    world.ledger.insert(world.lines()[:1])
    await asyncio.sleep(0.4)
    world.ledger.insert(world.lines()[1:])
    report = await checking
    assert report.content, report.differences
    assert report.lines == 2


async def test_usage_that_the_ledger_has_not_read_is_pending(world: World) -> None:
    await world.request(1)
    await (await world.producer.send("usage", b"{}", partition=0))
    report = await world.verify()
    assert (report.pending, report.difference_count, report.content) == (1, 0, False)
    member = await world.bus.member("ledger", ["usage"], Nobody())
    await member.poll(1_000)
    await member.commit({Partition("usage", 0): Commit(offset=1)})
    report = await world.verify()
    assert (report.pending, report.difference_count) == (0, 1)


async def test_unpriced_lines_are_counted_and_no_difference(world: World) -> None:
    await world.request(1)
    (line,) = world.lines()
    free = replace(
        line,
        price_id="unpriced",
        input_picodollars=0,
        cached_input_picodollars=0,
        output_picodollars=0,
        amount_nanodollars=0,
    )
    world.ledger.insert([free])
    report = await world.verify()
    assert (report.content, report.unpriced) == (True, 1)


async def test_a_log_that_goes_away_meanwhile_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("billing.walk.POLL_MS", 1)
    await world.request(1)
    reader = await world.bus.reader()
    end = await reader.end_offsets([AT])

    async def too_far(partitions: object) -> dict[Partition, int]:
        return {AT: end[AT] + 1}

    monkeypatch.setattr(reader, "end_offsets", too_far)
    with pytest.raises(Unavailable, match="can't be read to its end"):
        [window async for window in Walk(FLEET, AT).windows(reader)]


async def test_what_comes_after_the_end_as_of_now_is_left_for_next_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.request(1)
    reader = await world.bus.reader()
    end = await reader.end_offsets([AT])
    await world.request(2)

    async def as_of_then(partitions: object) -> dict[Partition, int]:
        return end

    monkeypatch.setattr(reader, "end_offsets", as_of_then)
    (window,) = [window async for window in Walk(FLEET, AT).windows(reader)]
    assert (set(window.usages), window.to_offset) == ({("r1", 1)}, end[AT])


async def test_a_window_that_is_full_at_the_very_end_is_the_last(world: World) -> None:
    await world.request(1)
    await world.request(2)
    windows = [window async for window in Walk(FLEET, AT, 1).windows(await world.bus.reader())]
    assert [(window.from_offset, window.to_offset) for window in windows] == [(0, 4), (4, 7)]


def test_a_difference_without_a_request_says_where() -> None:
    told = Difference(topic="journal.x", partition=1, offset=2, request_id="", attempt=0, journal="a", ledger="b")
    assert str(told) == "journal.x[1] offset 2: journal a; ledger b"


class Nobody:
    async def assigned(self, partitions: frozenset[Partition]) -> None: ...

    async def revoked(self, partitions: frozenset[Partition]) -> None: ...
