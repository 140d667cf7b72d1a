"""A worker's I/O process: reads its shards' lanes, keeps their owners and the engine busy, and tells how it is.

    group → record → prepare → owner → journal → frames, usage
    engine → step → owners → journal → frames, usage

Nothing here waits for the control plane or a database, and torch never runs in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from wire.bus import Bus, Commit, Member, Partition, Producer, Record
from wire.clock import Clock
from wire.codec import decode, encode
from wire.errors import BusError, DecodeError
from wire.fleet import Fleet, slug_of
from wire.follow import Tail, dead_letters
from wire.ids import incarnation
from wire.lossy import LossySender
from wire.messages import EngineSignal, EngineState, Frames, Inbound, Ref, Refusal, Request, Signal
from wire.settings import Settings
from wire.topics import SIGNALS, FleetTopics, replies
from workers.effects import Identity, Prepared, SendUsage, Term
from workers.engine.host import Died, EngineHost
from workers.engine.link import Ready, Stepped
from workers.engine.make import config_of, make_vocabulary
from workers.engine.protocol import Key
from workers.errors import StartFailed
from workers.gate import Gate
from workers.meters import Meters
from workers.owner import Owner, Surroundings
from workers.prefixes import PrefixReport
from workers.prepare import DRAINING, is_quick, overloaded, prepare
from workers.presence import Presence
from workers.usage import UsageSender

_log = logging.getLogger(__name__)
POLL_MS = 100
SIGNAL_EVERY_S = 0.5
TICK_EVERY_S = 0.5
COMMIT_EVERY_S = 0.5
RESTART_AFTER_S = 0.2
UNSTABLE_DEATHS = 5
"""deaths without a step in between after which the worker gives up: its supervisor decides what comes next"""


class Worker:
    """One engine and the shards it owns."""

    def __init__(self, settings: Settings, buses: Mapping[str, Bus], clock: Clock) -> None:
        """`buses`: by region; regions of one cluster have the same one."""
        self._settings, self._buses, self._clock = settings, buses, clock
        self._bus = buses[settings.region]
        self._config = config_of(settings)
        self._host = EngineHost(self._config)
        self._gate = Gate(self._host)
        self._fleet = fleet_of(settings)
        self._incarnation = incarnation(clock.now_ms())
        self._owners: dict[int, Owner] = {}
        self._member: Member | None = None
        self._meters = Meters(clock)
        self._prefixes = PrefixReport()
        self._presence = Presence(settings.engine, self._incarnation, settings.orphan_grace_ms - 1_000)
        self._state: EngineState = "loading"
        self._fingerprint: str | None = None
        self._committed: dict[Partition, Commit] = {}
        self._deaths = self._restarts = 0
        self._stack = contextlib.AsyncExitStack()

    # ------------------------------------------------------------ life

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then drain and end. StartFailed when the engine can't be had."""
        async with self._stack:
            self._joined: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
            await self._open()
            work = [
                asyncio.create_task(step(), name=name)
                for name, step in (
                    ("engine events", self._follow_engine),
                    ("lanes", self._read_lanes),
                    ("signals", self._send_signals),
                    ("tick", self._tick),
                    ("commit", self._commit_regularly),
                    ("usage", self._usage.run),
                    *(("replies", sender.run) for sender in dict.fromkeys(self._replies.values())),
                    *(("signals out", sender.run) for sender in self._signals),
                )
            ]
            try:
                await self._until(stopping, work)
                await self._drain(work)
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)

    async def _open(self) -> None:
        name, settings = self._settings.engine, self._settings
        await self._host.start()  # first: loading a model takes longer than all the rest
        self._stack.push_async_callback(self._host.stop)
        _log.info("%s: engine %s is loading %s", self._fleet.name, name, settings.model)
        self._journal = await self._producer(f"{name}-journal")
        self._usage = UsageSender(await self._producer(f"{name}-usage"))
        clusters = dict.fromkeys(self._buses.values())
        senders = {bus: LossySender(await self._producer(f"{name}-replies", bus, leader=True)) for bus in clusters}
        self._replies = {region: senders[bus] for region, bus in self._buses.items()}
        signals = {bus: await self._producer(f"{name}-signals", bus, leader=True) for bus in clusters}
        self._signals = [LossySender(producer) for producer in signals.values()]
        self._dead = dead = dead_letters(signals[self._bus], name, self._clock)
        tail = Tail[Signal](self._bus, SIGNALS, Signal, lambda signal, _: self._presence.hear(signal), dead=dead)
        await tail.start()
        self._stack.push_async_callback(tail.stop)
        self._vocabulary = await asyncio.to_thread(make_vocabulary, self._config)

    async def _producer(self, client_id: str, bus: Bus | None = None, *, leader: bool = False) -> Producer:
        producer = await (bus or self._bus).producer(acks="leader" if leader else "all", client_id=client_id)
        self._stack.push_async_callback(producer.stop)
        return producer

    async def _join(self) -> None:
        """Offer to own shards: only once the engine is ready, so that what is accepted can be run."""
        names = FleetTopics(self._fleet)
        self._member = await self._bus.member(
            names.group,
            (names.requests, names.batch),
            self,
            instance_id=self._settings.engine,
            session_timeout_ms=self._settings.session_timeout_ms,
            client_id=self._settings.engine,
        )
        for owner in self._owners.values():
            owner.member = self._member
        self._joined.set_result(self._member)
        await self.assigned(self._member.assignment())

    async def _until(self, stopping: asyncio.Event, work: Sequence[asyncio.Task[None]]) -> None:
        """Until told to stop; a task that fails ends the worker with its error."""
        asked = asyncio.create_task(stopping.wait())
        done, _ = await asyncio.wait({asked, *work}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        for task in done - {asked}:
            await task
            raise StartFailed(f"the worker's task {task.get_name()!r} ended by itself")

    async def _drain(self, work: Sequence[asyncio.Task[None]]) -> None:
        """Take nothing new, finish what runs for a bounded time; what is left is the next owner's (R5)."""
        self._state = "draining"
        _log.info("%s: draining", self._settings.engine)
        deadline_ms = self._clock.monotonic_ms() + self._settings.drain_timeout_ms
        while self._clock.monotonic_ms() < deadline_ms and not all(task.done() for task in work):
            if all(owner.shard.settled for owner in self._owners.values()):
                break
            await asyncio.sleep(0.05)
        await self._commit()
        for owner in self._owners.values():
            await owner.stop()
        if self._member is not None:
            await self._member.stop(leave=True)

    # ------------------------------------------------------------ the group

    async def assigned(self, partitions: frozenset[Partition]) -> None:
        """The group's proposal. Owners of shards that went elsewhere go on until a foreign Claim (R3)."""
        numbers = {partition.partition for partition in partitions}
        for number in self._owners.keys() - numbers:
            self._owners[number].elsewhere()
        for number in sorted(numbers):
            owner = self._owners.get(number)
            if owner is None:
                owner = self._owners[number] = self._owner(number)
                owner.start()
            if self._member is not None:
                owner.member = self._member
                owner.assigned()

    async def revoked(self, partitions: frozenset[Partition]) -> None:
        """A rebalance stops nothing: only a foreign Claim does."""

    def _owner(self, shard: int) -> Owner:
        identity = Identity(engine=self._settings.engine, incarnation=self._incarnation, fleet=self._fleet, shard=shard)
        around = Surroundings(
            clock=self._clock,
            bus=self._bus,
            journal=self._journal,
            engine=self._gate,
            prepare=self._prepare,
            reply=self._reply,
            send_usage=self._send_usage,
            fingerprint=lambda: self._fingerprint or "",
        )
        return Owner(identity, self._vocabulary, around)

    async def _read_lanes(self) -> None:
        member, names = await self._joined, FleetTopics(self._fleet)
        while True:
            self._open_batch_lane(member, names.batch)
            for record in await member.poll(POLL_MS):
                await self._take(record, names)

    def _open_batch_lane(self, member: Member, batch: str) -> None:
        """The batch lane is read only while slots are idle; the interactive one always (Cancels come on it)."""
        lanes = [partition for partition in member.assignment() if partition.topic == batch]
        if self._open_choices() < self._settings.engine_slots:
            member.resume(lanes)
        else:
            member.pause(lanes)

    async def _take(self, record: Record, names: FleetTopics) -> None:
        owner = self._owners.get(record.partition)
        if owner is None:
            return
        lane = owner.lanes[record.at]
        message = None
        try:
            message = decode(record.value, Request if record.topic == names.batch else Inbound)
        except DecodeError as exc:
            await self._dead(record, exc.why)
        await owner.take(lane, record.offset, message)

    # ------------------------------------------------------------ requests

    def _open_choices(self) -> int:
        return sum(a.begin.request.body.n for owner in self._owners.values() for a in owner.shard.open_attempts)

    async def _prepare(self, request: Request) -> Prepared | Refusal:
        if self._state == "draining":
            return DRAINING
        waiting = self._open_choices() - self._settings.engine_slots
        if waiting >= self._settings.engine_queue:
            return overloaded(waiting)
        slots, context = self._settings.engine_slots, self._meters.context_tokens or self._settings.context_tokens
        if is_quick(request):
            return prepare(request, self._vocabulary, context, slots)
        return await asyncio.to_thread(prepare, request, self._vocabulary, context, slots)

    def _reply(self, region: str, frames: Frames) -> None:
        if (sender := self._replies.get(region)) is not None:
            sender.put(replies(region), encode(frames), partition=frames.slot)

    def _send_usage(self, effect: SendUsage, sent: Callable[[Term, Ref], None]) -> None:
        self._usage.put(effect, sent)

    # ------------------------------------------------------------ the engine

    async def _follow_engine(self) -> None:
        async for event in self._host.events():
            match event:
                case Ready():
                    await self._engine_is_ready(event)
                case Stepped():
                    self._engine_stepped(event)
                case Died():
                    await self._engine_died(event)

    async def _engine_is_ready(self, ready: Ready) -> None:
        self._fingerprint, self._meters.load = ready.fingerprint, ready.load
        self._meters.context_tokens = ready.context_tokens
        self._prefixes.began(keeps=ready.prefixes is not None)
        self._state = "ready" if self._state != "draining" else "draining"
        _log.info("engine ready: %s", ready.fingerprint)
        if self._member is None:
            await self._join()

    def _engine_stepped(self, step: Stepped) -> None:
        self._deaths = 0
        self._meters.load = step.load
        if step.prefixes is not None:
            self._prefixes.changed(step.prefixes)
        by_shard: dict[int, list[int]] = {}
        for index, emission in enumerate(step.emissions):
            by_shard.setdefault(emission.key.shard, []).append(index)
        left = len(by_shard)

        def applied() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self._host.applied(step.number)

        for shard, indexes in by_shard.items():
            owner = self._owners[shard]
            for index in indexes:
                emission = step.emissions[index]
                self._meters.emitted(emission, owner.started.get(emission.key.ref))
            owner.stepped([step.emissions[index] for index in indexes], applied)

    async def _engine_died(self, died: Died) -> None:
        """The Crash goes to the journal before the engine comes back (R4)."""
        self._state = "failed" if self._state != "draining" else "draining"
        self._deaths += 1
        self._meters.died()
        _log.error("the engine ended with status %d; restarting it. Its last words: %s", died.status, died.last_words)
        if self._deaths >= UNSTABLE_DEATHS:
            raise StartFailed(f"the engine died {self._deaths} times without a step: {died.last_words}")
        self._gate.shut()
        for owner in self._owners.values():
            owner.engine_died(died.suspects)
        await asyncio.sleep(RESTART_AFTER_S * self._deaths)
        await self._host.restart()
        self._restarts += 1
        self._state = "loading" if self._state != "draining" else "draining"
        self._gate.open()

    # ------------------------------------------------------------ time

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_EVERY_S)
            keys: set[Key] = set()
            for number, owner in self._owners.items():
                owner.tick()
                for reader in self._presence.vanished(owner.shard.readers()):
                    _log.warning("nobody reads slot %d any more; its requests are cancelled", reader.slot)
                    owner.vanished(reader)
                if (epoch := owner.shard.epoch) is not None:
                    keys |= {Key(number, epoch, attempt.ref) for attempt in owner.shard.open_attempts}
            self._meters.forget(keys)

    async def _commit_regularly(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_EVERY_S)
            await self._commit()

    async def _commit(self) -> None:
        """Here the guarantee of `Shard.commits` becomes the group's: what is committed is never read again."""
        if self._member is None:
            return
        mine = self._member.assignment()
        commits: dict[Partition, Commit] = {}
        for owner in self._owners.values():
            points = owner.shard.commits() or {}
            commits |= {p: points[lane] for p, lane in owner.lanes.items() if lane in points and p in mine}
        changed = {p.partition for p, commit in commits.items() if self._committed.get(p) != commit}
        commits = {p: commit for p, commit in commits.items() if p.partition in changed}
        if not commits:
            return
        with contextlib.suppress(BusError):  # a commit may be late or fail: it is a hint that may be too old
            await self._member.commit(commits)
            self._committed |= commits

    async def _send_signals(self) -> None:
        while True:
            signal = encode(self._prefixes.signal(self._meters.signal(self._signal())))
            for sender in self._signals:
                sender.put(SIGNALS, signal, key=self._settings.model.encode())
            await asyncio.sleep(SIGNAL_EVERY_S)

    def _signal(self) -> EngineSignal:
        # one that the group has elsewhere is finished here, but nothing new comes from it
        owned = [n for n, owner in sorted(self._owners.items()) if owner.wanted and owner.shard.phase == "owning"]
        load = self._meters.load
        state: EngineState = "warming" if self._state == "ready" and not owned else self._state
        running = load.running if load else 0
        return EngineSignal(
            engine=self._settings.engine,
            incarnation=self._incarnation,
            fleet=self._fleet,
            shards=tuple(owned),
            state=state,
            model=self._settings.model,
            fingerprint=self._fingerprint,
            at_ms=self._clock.now_ms(),
            queued_requests=max(0, self._open_choices() - self._settings.engine_slots),
            queued_tokens=load.waiting_tokens if load else 0,
            running=min(running, self._open_choices()),
            slots=self._settings.engine_slots,
            restarts=self._restarts,
        )


def fleet_of(settings: Settings) -> Fleet:
    """The fleet that a worker of these settings belongs to."""
    return Fleet(settings.region, settings.pool, slug_of(settings.model), settings.model_version, settings.numerics)
