"""A worker with a real engine process (simulated model) over the in-memory log: a request's life and its failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from routing.prefix import prefix_chain
from wire.bus import Partition, Record
from wire.clock import SystemClock
from wire.codec import decode, encode
from wire.fleet import Fleet
from wire.ids import uuid7
from wire.journal import Fold
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog
from wire.messages import (
    Accepted,
    Attach,
    Body,
    Cancel,
    Delta,
    DemandSignal,
    End,
    EngineSignal,
    Entry,
    Frames,
    Journal,
    Refused,
    ReplyTo,
    Request,
    Sampling,
    Signal,
    Usage,
    Usages,
)
from wire.settings import Settings
from wire.topics import SIGNALS, USAGE, FleetTopics, all_topics, replies
from workers.worker import Worker, fleet_of

READER = ReplyTo(region="local", slot=0, incarnation="desk")


def settings_for(engine: str = "engine-0", **changes: object) -> Settings:
    base = {
        "engine": engine,
        "engine_kind": "simulated",
        "engine_slots": 8,
        "model": "simulated",
        "numerics": "sim",
        "simulated_ttft_ms": 2.0,
        "simulated_tbt_ms": 4.0,
        "drain_timeout_ms": 2_000,
    }
    return Settings(**{**base, **changes})


@dataclass
class Heard:
    """What one reader got of one request, in order."""

    entries: list[Entry] = field(default_factory=list)

    @property
    def end(self) -> Entry | None:
        return next((e for e in self.entries if isinstance(e, End | Refused)), None)

    def ids(self, choice: int = 0) -> list[int]:
        """Tokens by the rules of R7; a contradiction fails the test."""
        have: list[int] = []
        epoch = -1
        for entry in self.entries:
            if not isinstance(entry, Delta) or entry.choice != choice or entry.epoch < epoch:
                continue
            epoch = entry.epoch
            if entry.first == 0:
                common = min(len(have), len(entry.ids))
                assert list(entry.ids[:common]) == have[:common]
                have += entry.ids[common:]
            elif entry.first == len(have):
                have += entry.ids
        return have

    def text(self, choice: int = 0) -> str:
        """The text of an undisturbed stream."""
        return "".join(e.text for e in self.entries if isinstance(e, Delta) and e.choice == choice)


class Desk:
    """Sends requests as an ingress would, and reads the slot."""

    def __init__(self, log: MemoryLog, fleet: Fleet) -> None:
        self.clock = SystemClock()
        self.log, self.fleet, self.bus = log, fleet, MemoryBus(log)
        self.names = FleetTopics(fleet)
        self.heard: dict[str, Heard] = {}
        self.changed = asyncio.Condition()
        self.alive = True
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self.producer = await self.bus.producer()
        reader = await self.bus.reader()
        await reader.assign({Partition(replies("local"), 0): "latest"})

        async def follow() -> None:
            while True:
                for record in await reader.poll(50):
                    frames: Frames = decode(record.value, Frames)
                    for entry in frames.entries:
                        self.heard.setdefault(entry.request_id, Heard()).entries.append(entry)
                async with self.changed:
                    self.changed.notify_all()

        async def live() -> None:
            while True:
                if self.alive:
                    life = DemandSignal(
                        ingress="desk", slot=0, incarnation="desk", region="local", model="", at_ms=self.clock.now_ms()
                    )
                    with contextlib.suppress(Exception):
                        await self.producer.send(SIGNALS, encode(life))
                await asyncio.sleep(0.1)

        self.tasks = [asyncio.create_task(follow()), asyncio.create_task(live())]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.producer.stop()

    def request(self, text: str = "Say hi.", *, shard: int = 0, accept_ms: int = 20_000, **body: object) -> Request:
        now_ms = self.clock.now_ms()
        return Request(
            request_id=uuid7(now_ms),
            attempt=1,
            tenant="acme",
            project="p",
            key_id="k",
            model="simulated",
            version="1",
            body=Body(
                **{
                    "sampling": Sampling(seed=7),
                    "messages": ({"role": "user", "content": text},),
                    "max_tokens": 30,
                    "ignore_eos": True,
                    **body,
                }
            ),
            reply=READER,
            created_ms=now_ms,
            accept_by_ms=now_ms + accept_ms,
            deadline_ms=now_ms + 60_000,
        )

    async def send(self, message: Request | Cancel | Attach, shard: int = 0) -> str:
        await (await self.producer.send(self.names.requests, encode(message), partition=shard))
        return message.request_id

    async def until(self, request_id: str, ready: Callable[[Heard], bool]) -> Heard:
        async with self.changed, asyncio.timeout(30):
            await self.changed.wait_for(lambda: request_id in self.heard and ready(self.heard[request_id]))
        return self.heard[request_id]

    async def ended(self, request_id: str) -> Heard:
        return await self.until(request_id, lambda heard: heard.end is not None)

    async def tokens(self, request_id: str, count: int) -> Heard:
        return await self.until(request_id, lambda heard: len(heard.ids()) >= count)

    def read(self, topic: str, partition: int) -> list[bytes]:
        return [r.value or b"" for r in self.log.read(Partition(topic, partition), 0, 1_000_000)]

    def fold(self, shard: int = 0) -> Fold:
        fold = Fold()
        for offset, value in enumerate(self.read(self.names.journal, shard)):
            fold.apply(offset, decode(value, Journal))
        return fold

    def usages(self) -> list[Usage]:
        out: list[Usage] = []
        for partition in range(self.log.partition_count(USAGE)):
            for value in self.read(USAGE, partition):
                out += decode(value, Usages).entries
        return out


@dataclass
class Running:
    worker: Worker
    task: asyncio.Task[None]
    stopping: asyncio.Event

    @property
    def engine_pid(self) -> int:
        pid = self.worker._host.pid
        assert pid is not None
        return pid

    def stop_polling(self) -> None:
        """It takes no part in the group any more, yet its streams go on."""

        async def never(timeout_ms: int, max_records: int = 500) -> list[Record]:
            await asyncio.sleep(timeout_ms / 1000)
            return []

        assert self.worker._member is not None
        self.worker._member.poll = never  # type: ignore[method-assign]

    async def drain(self) -> None:
        self.stopping.set()
        await self.task

    async def kill_engine(self) -> None:
        """It dies, and another one is started."""
        dead = self.engine_pid
        os.kill(dead, signal.SIGKILL)
        while self.worker._host.pid in (None, dead):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)

    async def crash(self) -> None:
        """The I/O process is gone at once, and its engine with it."""
        os.kill(self.engine_pid, signal.SIGKILL)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Floor:
    """Workers over one log."""

    def __init__(self, shards: int = 1) -> None:
        settings = settings_for()
        self.fleet = fleet_of(settings)
        self.log = MemoryLog(SystemClock())
        self.desk = Desk(self.log, self.fleet)
        self.shards = shards
        self.running: list[Running] = []

    async def open(self) -> None:
        admin = await self.desk.bus.admin()
        await admin.create(all_topics([(self.fleet, self.shards)], [("local", 2)]))
        await self.desk.open()

    async def hire(self, engine: str = "engine-0", **changes: object) -> Running:
        worker = Worker(settings_for(engine, **changes), {"local": MemoryBus(self.log)}, SystemClock())
        stopping = asyncio.Event()
        running = Running(worker, asyncio.create_task(worker.run(stopping)), stopping)
        self.running.append(running)
        return running

    async def close(self) -> None:
        self.log.back()
        for running in self.running:
            if not running.task.done():
                await running.drain()
        await self.desk.close()


@pytest.fixture
async def floor() -> AsyncIterator[Floor]:
    floor = Floor()
    await floor.open()
    yield floor
    await floor.close()


async def undisturbed(floor: Floor, request: Request) -> list[int]:
    """The tokens of the same request when nothing goes wrong."""
    twin = Request(**{f: getattr(request, f) for f in request.__struct_fields__} | {"request_id": "twin"})
    return (await floor.desk.ended(await floor.desk.send(twin))).ids()


def check_bill(floor: Floor, request: Request, heard: Heard) -> None:
    """The journal, the reader and every copy of the usage say the same."""
    attempt = next(a for a in floor.desk.fold().attempts.values() if a.begin.request.request_id == request.request_id)
    assert attempt.finish is not None
    assert [c.ids for c in attempt.choices] == [heard.ids(i) for i in range(len(attempt.choices))]
    sent = [u for u in floor.desk.usages() if u.request_id == request.request_id]
    assert sent
    assert len({repr(u) for u in sent}) == 1
    assert sent[0].completion_tokens == attempt.completion_tokens


async def test_a_request_is_accepted_answered_and_billed(floor: Floor) -> None:
    await floor.hire()
    request = floor.desk.request(max_tokens=5)
    heard = await floor.desk.ended(await floor.desk.send(request))
    assert isinstance(heard.entries[0], Accepted)
    assert isinstance(heard.end, End)
    assert heard.end.reason == "length"
    assert len(heard.ids()) == 5 == heard.end.completion_tokens
    assert heard.end.prompt_tokens == heard.entries[0].prompt_tokens > 0
    await asyncio.sleep(0.1)
    check_bill(floor, request, heard)


async def test_two_choices_count_the_prompt_once(floor: Floor) -> None:
    await floor.hire()
    request = floor.desk.request(n=2, max_tokens=4)
    heard = await floor.desk.ended(await floor.desk.send(request))
    assert isinstance(heard.end, End)
    assert heard.end.tokens == (4, 4)
    assert heard.ids(0) != heard.ids(1)
    assert heard.end.completion_tokens == 8


async def test_what_the_cache_had_of_a_prompt_is_on_the_bill_and_in_the_signals(floor: Floor) -> None:
    await floor.hire()
    text = "the mill by the river " * 40
    chain = prefix_chain("acme", "simulated", messages=({"role": "user", "content": text},))
    cached = []
    for tenant in ("acme", "acme", "other"):
        request = replace(floor.desk.request(text, max_tokens=3), tenant=tenant, prefix_chain=chain)
        heard = await floor.desk.ended(await floor.desk.send(request))
        assert isinstance(heard.end, End)
        cached.append((heard.end.cached_tokens, heard.end.prompt_tokens))
        await asyncio.sleep(0.1)
        check_bill(floor, request, heard)
        assert next(u for u in floor.desk.usages() if u.request_id == request.request_id).cached_tokens == cached[-1][0]
    whole = (cached[0][1] - 1) // 64 * 64
    assert [count for count, _ in cached] == [0, whole, 0]
    await asyncio.sleep(0.6)
    told = signals(floor)
    assert any(signal.prefixes_full for signal in told)
    assert {link for signal in told for link in signal.prefixes_added} == set(chain[: whole * 256 // (256 * 64) + 1])


async def test_a_poison_request_ends_after_three_deaths_whatever_runs_beside_it(floor: Floor) -> None:
    running = await floor.hire(engine_slots=2)
    batch = [floor.desk.request(max_tokens=400) for _ in range(2)]
    for request in batch:
        await (await floor.desk.producer.send(floor.desk.names.batch, encode(request), partition=0))
    await asyncio.gather(*(floor.desk.tokens(request.request_id, 3) for request in batch))
    poison = floor.desk.request(max_tokens=1_500)
    await floor.desk.send(poison)  # began after the batch, which makes room for it
    said = 0
    for _ in range(3):
        said = len((await floor.desk.tokens(poison.request_id, said + 70)).ids())  # more than a dead engine was ahead
        await running.kill_engine()
    heard = await floor.desk.ended(poison.request_id)
    assert isinstance(heard.end, End)
    assert heard.end.reason == "error"
    for request in batch:
        ended = await floor.desk.ended(request.request_id)
        assert isinstance(ended.end, End)
        assert ended.end.reason == "length"
        assert ended.ids() == await undisturbed(floor, request)


async def test_killing_the_engine_changes_no_token(floor: Floor) -> None:
    running = await floor.hire()
    request = floor.desk.request(max_tokens=60)
    await floor.desk.send(request)
    await floor.desk.tokens(request.request_id, 10)
    os.kill(running.engine_pid, signal.SIGKILL)
    heard = await floor.desk.ended(request.request_id)
    assert heard.ids() == await undisturbed(floor, request)
    check_bill(floor, request, heard)
    told = signals(floor)
    assert [signal.restarts for signal in told] == sorted(signal.restarts for signal in told)
    assert (told[0].restarts, told[-1].restarts, told[-1].state) == (0, 1, "ready")


def signals(floor: Floor) -> list[EngineSignal]:
    """What the workers said of their engines."""
    return [s for v in floor.desk.read(SIGNALS, 0) if isinstance(s := decode(v, Signal), EngineSignal)]


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORCED = {
    "tools": ({"type": "function", "function": {"name": "weather", "description": "", "parameters": CITY}},),
    "tool_choice": "required",
    "stop": ("<", "city"),
    "max_tokens": 300,
}


async def test_a_forced_call_is_the_same_text_after_the_engines_death_and_ends_as_one(floor: Floor) -> None:
    running = await floor.hire()
    request = floor.desk.request(**FORCED)
    await floor.desk.send(request)
    await floor.desk.tokens(request.request_id, 10)
    os.kill(running.engine_pid, signal.SIGKILL)
    heard = await floor.desk.ended(request.request_id)
    assert heard.ids() == await undisturbed(floor, request)
    assert isinstance(heard.end, End)
    assert (heard.end.reason, heard.end.ends) == ("tool_calls", ("tool_calls",))
    late = Attach(request_id=request.request_id, attempt=1, reply=READER)
    before = len(heard.entries)
    await floor.desk.send(late)
    await floor.desk.until(request.request_id, lambda heard: len(heard.entries) >= before + 3)
    (whole,) = (entry for entry in heard.entries[before:] if isinstance(entry, Delta))
    assert whole.text.startswith('<tool_call>\n{"name": "weather", "arguments": {"city": "')
    assert whole.text.endswith('"}}\n</tool_call>')
    check_bill(floor, request, heard)


async def test_a_schema_that_cannot_be_compiled_is_refused_before_it_runs(floor: Floor) -> None:
    await floor.hire()
    broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}}
    heard = await floor.desk.ended(await floor.desk.send(floor.desk.request(response_format=broken)))
    assert isinstance(heard.end, Refused)
    assert (heard.end.status, heard.end.param) == (400, "response_format.json_schema.schema")
    assert "hiccup" in heard.end.message
    assert len(heard.entries) == 1


async def test_the_next_owner_continues_where_the_journal_stands(floor: Floor) -> None:
    first = await floor.hire()
    request = floor.desk.request(max_tokens=60)
    await floor.desk.send(request)
    await floor.desk.tokens(request.request_id, 10)
    await first.crash()
    await floor.hire()
    heard = await floor.desk.ended(request.request_id)
    assert heard.ids() == await undisturbed(floor, request)
    check_bill(floor, request, heard)


async def test_a_frozen_owner_releases_nothing_once_another_has_claimed(floor: Floor) -> None:
    frozen = await floor.hire()
    request = floor.desk.request(max_tokens=900)
    await floor.desk.send(request)
    await floor.desk.tokens(request.request_id, 10)
    frozen.stop_polling()
    await floor.log.expire(FleetTopics(floor.fleet).group, "engine-0")
    await floor.hire("engine-1")
    heard = await floor.desk.ended(request.request_id)
    epochs = {e.epoch for e in heard.entries if isinstance(e, Delta)}
    assert len(epochs) > 1
    assert heard.ids() == await undisturbed(floor, request)
    check_bill(floor, request, heard)


async def shared_out(floor: Floor) -> dict[str, tuple[int, ...]]:
    """What each engine says it owns, once they are ready and no shard is named twice or by nobody."""
    named: dict[str, tuple[int, ...]] = {}
    async with asyncio.timeout(20):
        while sorted(n for shards in named.values() for n in shards) != list(range(floor.shards)):
            told = len(signals(floor))
            while len(signals(floor)) < told + 2 * len(floor.running):  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.05)
            named = {one.engine: one.shards for one in signals(floor)}
    return named


async def test_shards_that_went_to_another_and_came_back_differently_are_named_by_one_engine_each() -> None:
    floor = Floor(shards=2)
    await floor.open()
    try:
        await floor.hire("engine-0")
        await floor.hire("engine-1")
        before = await shared_out(floor)
        # as after a freeze: its session ends, the other one takes all, and when it comes back they share anew
        await floor.log.expire(FleetTopics(floor.fleet).group, "engine-0")
        await asyncio.sleep(0.3)
        after = await shared_out(floor)
        assert before.keys() == after.keys() == {"engine-0", "engine-1"}
        for shard in range(2):
            request = floor.desk.request(max_tokens=3)
            await floor.desk.send(request, shard)
            assert isinstance((await floor.desk.ended(request.request_id)).end, End)
        assert await shared_out(floor) == after
    finally:
        await floor.close()


async def test_an_unknown_acknowledgement_makes_the_owner_claim_again(floor: Floor) -> None:
    await floor.hire()
    request = floor.desk.request(max_tokens=60)
    await floor.desk.send(request)
    await floor.desk.tokens(request.request_id, 5)
    floor.log.lose_ack(FleetTopics(floor.fleet).journal)
    heard = await floor.desk.ended(request.request_id)
    assert heard.ids() == await undisturbed(floor, request)
    check_bill(floor, request, heard)


async def test_while_the_log_is_away_streams_wait(floor: Floor) -> None:
    await floor.hire()
    request = floor.desk.request(max_tokens=60)
    await floor.desk.send(request)
    await floor.desk.tokens(request.request_id, 5)
    floor.log.away()
    await asyncio.sleep(0.5)
    floor.log.back()
    heard = await floor.desk.ended(request.request_id)
    assert heard.ids() == await undisturbed(floor, request)
    check_bill(floor, request, heard)


async def test_a_thousand_clients_that_hang_up_leave_no_slot_taken(floor: Floor) -> None:
    worker = await floor.hire()
    desk = floor.desk
    for batch in range(20):
        requests = [desk.request(f"Number {batch}.", n=1 + at % 2, max_tokens=200) for at in range(50)]
        for at, request in enumerate(requests):
            await desk.send(request)
            if at % 5 == 0:
                await desk.until(request.request_id, lambda heard: bool(heard.entries))
        for request in requests:
            cancel = Cancel(
                request_id=request.request_id, attempt=1, reason="client_gone", accept_by_ms=request.accept_by_ms
            )
            await desk.send(cancel)
        for request in requests:
            end = (await desk.ended(request.request_id)).end
            assert isinstance(end, End | Refused)
    after = desk.request("And now?")
    assert len((await desk.ended(await desk.send(after))).ids()) == 30
    load = worker.worker._meters.load
    assert load is not None
    assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)


async def test_how_likely_the_prompt_was_comes_once_and_again_to_a_late_reader(floor: Floor) -> None:
    await floor.hire()
    desk = floor.desk
    request = desk.request("a b c", prompt_logprobs=0, logprobs=0, n=2, max_tokens=20)
    heard = await desk.ended(await desk.send(request))
    accepted = next(e for e in heard.entries if isinstance(e, Accepted))
    scored = [e.prompt for e in heard.entries if isinstance(e, Delta) and e.prompt is not None]
    assert len(scored) == 1
    assert len(scored[0]) == accepted.prompt_tokens
    await desk.send(Attach(request_id=request.request_id, attempt=1, reply=READER))
    heard = await desk.until(request.request_id, lambda heard: sum(isinstance(e, End) for e in heard.entries) == 2)
    again = [e.prompt for e in heard.entries if isinstance(e, Delta) and e.prompt is not None]
    assert again == scored * 2


async def test_a_cancelled_request_is_billed_for_what_was_generated(floor: Floor) -> None:
    await floor.hire()
    request = floor.desk.request(max_tokens=1000)
    await floor.desk.send(request)
    await floor.desk.tokens(request.request_id, 5)
    cancel = Cancel(request_id=request.request_id, attempt=1, reason="client_gone", accept_by_ms=request.accept_by_ms)
    await floor.desk.send(cancel)
    heard = await floor.desk.ended(request.request_id)
    assert isinstance(heard.end, End)
    assert heard.end.reason == "cancelled"
    assert 5 <= heard.end.completion_tokens < 1000
    await asyncio.sleep(0.1)
    check_bill(floor, request, heard)


async def test_a_prompt_over_the_context_is_refused_before_it_runs(floor: Floor) -> None:
    await floor.hire()
    request = floor.desk.request("word " * 5_000)
    heard = await floor.desk.ended(await floor.desk.send(request))
    assert isinstance(heard.end, Refused)
    assert (heard.end.status, heard.end.code) == (400, "context_length_exceeded")
    assert "word" not in b"".join(floor.desk.read(floor.desk.names.journal, 0)).decode()


async def test_a_request_read_too_late_ends_expired_and_unrun(floor: Floor) -> None:
    request = floor.desk.request(accept_ms=-1)
    await floor.desk.send(request)
    await floor.hire()
    heard = await floor.desk.ended(request.request_id)
    assert isinstance(heard.end, End)
    assert (heard.end.reason, heard.end.completion_tokens) == ("expired", 0)


async def test_a_late_reader_attaches_and_gets_everything(floor: Floor) -> None:
    await floor.hire()
    request = floor.desk.request(max_tokens=50)
    await floor.desk.send(request)
    await floor.desk.ended(request.request_id)
    before = floor.desk.heard.pop(request.request_id)
    await floor.desk.send(Attach(request_id=request.request_id, attempt=1, reply=READER))
    again = await floor.desk.ended(request.request_id)
    assert again.ids() == before.ids()
    assert again.text() == before.text()


async def test_requests_of_a_reader_that_vanished_are_cancelled(floor: Floor) -> None:
    await floor.hire(orphan_grace_ms=2_000)
    request = floor.desk.request(max_tokens=1500)
    await floor.desk.send(request)
    await floor.desk.tokens(request.request_id, 5)
    floor.desk.alive = False
    heard = await floor.desk.ended(request.request_id)
    assert isinstance(heard.end, End)
    assert heard.end.reason == "cancelled"


async def test_draining_finishes_what_runs_and_turns_new_work_away(floor: Floor) -> None:
    running = await floor.hire()
    request = floor.desk.request(max_tokens=60)
    await floor.desk.send(request)
    await floor.desk.tokens(request.request_id, 5)
    running.stopping.set()
    await asyncio.sleep(0.05)
    late = floor.desk.request()
    await floor.desk.send(late)
    assert len((await floor.desk.ended(request.request_id)).ids()) == 60
    refused = (await floor.desk.ended(late.request_id)).end
    assert isinstance(refused, Refused)
    assert refused.elsewhere
    await running.task
    committed = (await (await floor.desk.bus.admin()).group_commits(floor.desk.names.group)).values()
    assert max(commit.offset for commit in committed) == 2
