"""The shell around one shard's state machine: sends, reads and the engine. Decides nothing.

Order is everything here: appends reach the journal in the order in which the machine asked for them, and their
acknowledgements come back to it in that order.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from wire.bus import AtOffset, Bus, Commit, Member, Partition, Producer, Reader
from wire.clock import Clock
from wire.codec import decode, encode
from wire.errors import BusError, DecodeError
from wire.journal import Fold
from wire.messages import Attach, Begin, Cancel, Carry, Frames, Journal, Lane, Ref, Refusal, ReplyTo, Request, ref_lane
from wire.topics import FleetTopics
from workers.effects import (
    Append,
    Effect,
    Halt,
    HaltAll,
    Identity,
    Prepared,
    ReadTail,
    Reclaim,
    Reply,
    Run,
    SendUsage,
    Term,
)
from workers.engine.protocol import Emission, Key, Restored, Sequence
from workers.entries import Shown
from workers.gate import Engine
from workers.shard import Shard
from workers.watermark import BadHint, Hint

_log = logging.getLogger(__name__)
_POLL_MS = 200
_RETRY_S = 0.5
LANES: tuple[Lane, ...] = ("requests", "batch")
Prepare = Callable[[Request], Awaitable[Prepared | Refusal]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the owners of one worker share."""

    clock: Clock
    bus: Bus
    journal: Producer
    engine: Engine
    prepare: Prepare
    reply: Callable[[str, Frames], None]
    send_usage: Callable[[SendUsage, Callable[[Term, Ref], None]], None]
    fingerprint: Callable[[], str]


class Owner:
    """One shard of this worker."""

    def __init__(self, identity: Identity, shown: Shown, around: Surroundings) -> None:
        names = FleetTopics(identity.fleet)
        self.shard = Shard(identity, shown)
        self.lanes = {Partition(getattr(names, lane), identity.shard): lane for lane in LANES}
        self.member: Member | None = None
        self.wanted = False
        """whether the group's latest proposal has the shard here; a rebalance under way changes nothing"""
        self.started: dict[Ref, float] = {}
        """when each open attempt was given to the engine, by the monotonic clock"""
        self._identity = identity
        self._around = around
        self._journal = Partition(names.journal, identity.shard)
        self._outbox: asyncio.Queue[Append | Callable[[], None]] = asyncio.Queue()
        self._acks: asyncio.Queue[tuple[Term, asyncio.Future[int]] | Callable[[], None]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gaps: dict[Lane, tuple[int, int]] = {}
        self._reclaiming = False

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start sending; nothing is claimed yet."""
        self._spawn(self._send())
        self._spawn(self._hear())

    async def stop(self) -> None:
        """End all tasks. What isn't acknowledged stays so: the journal decides what the next owner sees."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def assigned(self) -> None:
        """The group proposes this worker. A shard that is owned, or being claimed, stays as it is (R3)."""
        self.wanted = True
        if self.shard.phase == "idle":
            self._claim()

    def elsewhere(self) -> None:
        """The group proposes another worker. What runs goes on until a foreign Claim (R3)."""
        self.wanted = False

    def _claim(self) -> None:
        nonce = secrets.token_hex(8)
        self.apply(self.shard.claim(nonce, self._around.fingerprint(), self._around.clock.now_ms()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            loop = task.get_loop()
            loop.call_exception_handler({"message": "a shard's task failed", "exception": error, "task": task})

    # ------------------------------------------------------------ what comes in

    async def take(self, lane: Lane, offset: int, message: Request | Cancel | Attach | None) -> None:
        """A record of a lane; None if it couldn't be decoded. Ignored unless the shard is owned."""
        if not self._in_place(lane, offset):
            return
        shard, now_ms = self.shard, self._around.clock.now_ms()
        match message:
            case Request():
                await self._take_request(lane, offset, message)
            case Cancel():
                self.apply(shard.cancel(lane, offset, message, now_ms))
            case Attach():
                self.apply(shard.attach(lane, offset, message))
            case None:
                shard.skip(lane, offset)

    def _in_place(self, lane: Lane, offset: int) -> bool:
        """Whether a record is the next one. What was fetched before a takeover's seek can lie ahead of it.

        Then the lane is read again from where it should go on; if the same offset comes once more, the log has
        nothing in between (retention took it).
        """
        expected = self.shard.expected(lane)
        if expected is None:
            return False
        if offset <= expected:
            self._gaps.pop(lane, None)
            return True
        gap = self._gaps.get(lane)
        if gap is not None and gap[0] == expected:
            return gap[1] == offset
        self._gaps[lane] = (expected, offset)
        self._seek(lane, expected)
        return False

    async def _take_request(self, lane: Lane, offset: int, request: Request) -> None:
        term = self.shard.term
        # One that the journal has needs no prompt: whatever is given here, the machine only passes it.
        known = self.shard.knows(lane, offset)
        prepared = _KNOWN if known else await self._around.prepare(request)
        if term == self.shard.term:  # the shard may have changed hands while the prompt was tokenised
            now_ms = self._around.clock.now_ms()
            self.apply(self.shard.request(lane, offset, request, prepared, now_ms))

    def tick(self) -> None:
        """Deadlines, Carries, early Cancels; and a shard that the group proposes but nobody claims.

        One that the group has elsewhere is given up once nothing is left to do: nothing would be appended there any
        more, so a foreign Claim would never be noticed.
        """
        self.apply(self.shard.tick(self._around.clock.now_ms()))
        if not self.wanted and self.shard.phase == "owning" and self.shard.settled:
            _log.info("%s: given up, as the group has it elsewhere", self._name)
            self.apply(self.shard.release())
        if self.shard.phase == "idle" and self._proposed() and not self._reclaiming:
            self._spawn(self._reclaim(self.shard.term))

    def vanished(self, reader: ReplyTo) -> None:
        """A reader is gone for good (R4)."""
        self.apply(self.shard.vanished(reader, self._around.clock.now_ms()))

    def engine_died(self, suspects: Iterable[Key]) -> None:
        """The engine died; `suspects` is what it ran, of all shards.

        The Crash goes to the journal, and what is unfinished to the engine once more.
        """
        mine = (self._identity.shard, self.shard.epoch)
        running = frozenset(key.ref for key in suspects if (key.shard, key.epoch) == mine)
        self.apply(self.shard.engine_died(running, self._around.clock.now_ms()))

    def stepped(self, emissions: list[Emission], applied: Callable[[], None]) -> None:
        """An engine step's part for this shard; `applied` is called once it is in the journal, or dropped."""
        errors = {emission.key.ref: emission.error for emission in emissions if emission.error is not None}
        for attempt in self.shard.open_attempts if errors else ():
            if attempt.ref in errors:
                name = attempt.begin.request.request_id
                _log.error("%s: the engine failed on request %s: %s", self._name, name, errors[attempt.ref])
        self.apply(self.shard.stepped(emissions, self._around.clock.now_ms()))
        self._outbox.put_nowait(applied)

    # ------------------------------------------------------------ what goes out

    def apply(self, effects: Iterable[Effect]) -> None:
        """Do what the machine says."""
        for effect in effects:
            match effect:
                case Append():
                    self._outbox.put_nowait(effect)
                case Reply():
                    self._around.reply(effect.region, effect.frames)
                case SendUsage():
                    self._around.send_usage(effect, self.shard.usage_sent)
                case Run():
                    self._run(effect)
                case Halt():
                    self.started.pop(effect.ref, None)
                    self._around.engine.cancel(Key(self._identity.shard, effect.epoch, effect.ref))
                case HaltAll():
                    self.started.clear()
                    self._around.engine.drop(self._identity.shard, effect.epoch)
                case ReadTail():
                    self._spawn(self._take_over(effect))
                case Reclaim():
                    _log.warning("%s: somebody else may own the shard; nothing more of it leaves here", self._name)
                    self._spawn(self._reclaim(effect.term))

    async def _send(self) -> None:
        """Appends in order. After one that couldn't be queued, the rest of its term is stale."""
        while True:
            item = await self._outbox.get()
            if not isinstance(item, Append):
                self._acks.put_nowait(item)
                continue
            if item.term != self.shard.term:
                continue
            value = encode(item.record)
            self.shard.written(len(value))
            try:
                ack = await self._around.journal.send(self._journal.topic, value, partition=self._journal.partition)
            except (BusError, ValueError) as exc:
                _log.warning("%s: a journal record could not be queued: %s", self._name, exc)
                self.apply(self.shard.append_failed(item.term))
                continue
            self._acks.put_nowait((item.term, ack))

    async def _hear(self) -> None:
        """Acknowledgements in order (R2: what they release leaves here)."""
        while True:
            item = await self._acks.get()
            if not isinstance(item, tuple):
                item()
                continue
            term, ack = item
            try:
                offset = await ack
            except BusError as exc:
                if term == self.shard.term:
                    _log.warning("%s: a journal send's outcome is unknown (%s)", self._name, exc)
                self.apply(self.shard.append_failed(term))
                continue
            self.apply(self.shard.appended(term, offset))

    def _run(self, effect: Run) -> None:
        self.started[effect.attempt.ref] = self._around.clock.monotonic_ms()
        if effect.prepared is not None:
            self._around.engine.add(self._sequence(effect, effect.prepared))
        else:
            self._spawn(self._run_again(effect))

    async def _run_again(self, effect: Run) -> None:
        prepared = await self._around.prepare(effect.attempt.begin.request)
        if self.shard.epoch != effect.epoch or effect.attempt.finish is not None:
            return
        if isinstance(prepared, Refusal):
            now_ms = self._around.clock.now_ms()
            self.apply(self.shard.failed(effect.epoch, effect.attempt.ref, prepared.message, now_ms))
        else:
            self._around.engine.add(self._sequence(effect, prepared))

    def _sequence(self, effect: Run, prepared: Prepared) -> Sequence:
        attempt, body = effect.attempt, effect.attempt.begin.request.body
        resumed = any(choice.ids or choice.end for choice in attempt.choices)
        restored = tuple(Restored(tuple(choice.ids), choice.end) for choice in attempt.choices)
        return Sequence(
            key=Key(self._identity.shard, effect.epoch, attempt.ref),
            prompt=prepared.prompt,
            max_tokens=prepared.max_tokens,
            sampling=body.sampling,
            n=body.n,
            stop=body.stop,
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
            logprobs=body.logprobs,
            grammar=prepared.grammar,
            prompt_logprobs=body.prompt_logprobs,
            restored=restored if resumed else (),
            alone=effect.alone,
            batch=ref_lane(attempt.ref) == "batch",
            tenant=attempt.begin.request.tenant,
            links=prepared.links,
        )

    # ------------------------------------------------------------ ownership

    @property
    def _name(self) -> str:
        return f"{self._journal.topic}[{self._journal.partition}]"

    async def _take_over(self, effect: ReadTail) -> None:
        """Read the journal's tail up to our own Claim. While the log is away this waits; a newer term ends it."""
        while effect.term == self.shard.term:
            try:
                commits = await self._committed()
                fold, sizes = await self._fold_tail(effect, commits)
            except BusError as exc:
                _log.warning("%s: the journal's tail can't be read yet (%s)", self._name, exc)
                await asyncio.sleep(_RETRY_S)
                continue
            starts = {lane: commit.offset if commit else 0 for lane, commit in commits.items()}
            now_ms = self._around.clock.now_ms()
            effects = self.shard.tail_read(effect.term, fold, sizes, starts, now_ms)
            for lane, start in starts.items():
                self._seek(lane, start)
            self.apply(effects)
            running = len(self.shard.open_attempts)
            _log.info("%s: owned in epoch %s, %d unfinished requests taken over", self._name, fold.epoch, running)
            return

    async def _committed(self) -> dict[Lane, Commit | None]:
        if self.member is None:
            return dict.fromkeys(LANES)
        return {lane: await self.member.committed(partition) for partition, lane in self.lanes.items()}

    def _seek(self, lane: Lane, offset: int) -> None:
        partition = next(p for p, name in self.lanes.items() if name == lane)
        if self.member is not None and partition in self.member.assignment():
            self.member.seek(partition, offset)

    async def _fold_tail(self, effect: ReadTail, commits: dict[Lane, Commit | None]) -> tuple[Fold, dict[Ref, int]]:
        hint = oldest_hint(commit.metadata for commit in commits.values() if commit is not None)
        reader = await self._around.bus.reader(client_id=f"{self._identity.engine}-tail")
        try:
            await reader.assign({self._journal: AtOffset(hint.offset) if hint else "earliest"})
            return await self._read(reader, Fold(hint.epoch if hint else None), effect)
        finally:
            await reader.stop()

    async def _read(self, reader: Reader, fold: Fold, effect: ReadTail) -> tuple[Fold, dict[Ref, int]]:
        total, at = 0, dict[Ref, int]()
        while reader.position(self._journal) <= effect.until and effect.term == self.shard.term:
            for record in await reader.poll(_POLL_MS):
                if record.offset > effect.until:
                    break
                message = self._decoded(record.value, record.offset)
                if message is None:
                    continue
                if isinstance(message, Begin | Carry):
                    at[message.ref if isinstance(message, Begin) else message.begin.ref] = total
                total += len(record.value or b"")
                fold.apply(record.offset, message)
        return fold, {ref: total - start for ref, start in at.items()}

    def _decoded(self, value: bytes | None, offset: int) -> Journal | None:
        try:
            message: Journal = decode(value, Journal)
        except DecodeError as exc:
            _log.error("%s: offset %d is no journal record: %s", self._name, offset, exc)
            return None
        return message

    async def _reclaim(self, term: Term) -> None:
        """Ask the group whether it still proposes us; a former owner that was frozen finds out here."""
        self._reclaiming = True
        try:
            while term == self.shard.term and self._proposed():
                if await self._confirmed():
                    await asyncio.sleep(_RETRY_S)  # lets a rebalance that is under way arrive first
                    if term == self.shard.term and self._proposed():
                        self._claim()
                    return
                await asyncio.sleep(_RETRY_S)
        finally:
            self._reclaiming = False

    async def _confirmed(self) -> bool:
        try:
            if self.member is not None:
                await self.member.commit({})
        except BusError as exc:  # NotMember: the member rejoins by itself, and then the group proposes anew
            _log.info("%s: the group doesn't confirm this worker (%s)", self._name, exc)
            return False
        return True

    def _proposed(self) -> bool:
        return self.member is not None and any(p in self.member.assignment() for p in self.lanes)


_KNOWN = Refusal(status=500, code=None, message="")


def oldest_hint(metadata: Iterable[str]) -> Hint | None:
    """The oldest of the lanes' hints; None (the journal's start) if there is none, or one can't be read."""
    hints = []
    for text in metadata:
        try:
            hints.append(Hint.parse(text))
        except BadHint:
            return None
    return min(hints, key=lambda hint: hint.offset, default=None)
