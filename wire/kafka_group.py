"""Membership of a consumer group: join, heartbeat, notice, join again.

aiokafka's own coordinator takes a group that is still loading for one without commits, stops heartbeats for good
after an unexpected answer, and can't tell a session that ended from a place that was taken; hence this one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.group import JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest
from aiokafka.protocol.types import Int16, Int32, Schema, String

from wire import kafka_assignor
from wire.bus import Partition
from wire.kafka_assignor import Held
from wire.kafka_link import COORDINATOR_MOVED, Code, Link

_log = logging.getLogger(__name__)

REBALANCE_TIMEOUT_MS = 5_000
"""a member that doesn't answer for so long is left out of the new generation"""
HEARTBEAT_MS = 500
LEAVE_WITHIN_S = 2.0
COMPLAIN_EVERY_S = 5.0


class _HeartbeatResponse(Response):  # type: ignore[misc]
    API_KEY = 12
    API_VERSION = 3
    SCHEMA = Schema(("throttle_time_ms", Int32), ("error_code", Int16))


class _HeartbeatStruct(RequestStruct):  # type: ignore[misc]
    """Version 3 names the instance, so that a stolen place is told from an expired session; aiokafka stops at 1."""

    API_KEY = 12
    API_VERSION = 3
    RESPONSE_TYPE = _HeartbeatResponse
    SCHEMA = Schema(
        ("group", String("utf-8")),
        ("generation_id", Int32),
        ("member_id", String("utf-8")),
        ("group_instance_id", String("utf-8")),
    )


class _Heartbeat(Request[_HeartbeatStruct]):  # type: ignore[misc]
    API_KEY = 12

    def __init__(self, group: str, generation: int, member_id: str, instance_id: str | None) -> None:
        self._fields = (group, generation, member_id, instance_id)

    def build(self, request_struct_class: type[_HeartbeatStruct]) -> _HeartbeatStruct:
        return request_struct_class(*self._fields)


class Replaced(Exception):
    """Another process has joined with this member's instance id."""


class Listener(Protocol):
    """Told what the group decides, in the membership's own task."""

    async def lose(self) -> None: ...

    async def gain(self, partitions: frozenset[Partition]) -> None: ...


class Membership:
    """One member's life in its group, in the background from `start` to `stop`."""

    def __init__(
        self,
        link: Link,
        group: str,
        topics: Sequence[str],
        listener: Listener,
        instance_id: str | None,
        session_timeout_ms: int,
    ) -> None:
        self._link = link
        self._group = group
        self._topics = tuple(topics)
        self._listener = listener
        self._instance_id = instance_id
        self._session_timeout_ms = session_timeout_ms
        self._task: asyncio.Task[None] | None = None
        self._node: int | None = None
        self._held = Held()
        self._given: dict[str, Held] = {}
        self._counts: dict[str, int] = {}
        """partitions by topic at the last join; every member watches them, for a leader that has restarted doesn't
        know that it leads"""
        self.member_id = ""
        self.generation = -1

    def start(self) -> None:
        for topic in self._topics:
            self._link.watch(topic)
        self._task = asyncio.create_task(self._run(), name=f"member of {self._group}")

    def check(self) -> None:
        """Raises what ended this membership: Replaced, or a fault."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def coordinator(self) -> int:
        """The group's coordinator. KafkaError."""
        if self._node is None:
            self._node = await self._link.coordinator(self._group)
        return self._node

    def lost_coordinator(self) -> None:
        """Look for the coordinator again before the next question."""
        self._node = None

    async def ask(self, request: Any) -> Any:
        """Ask the coordinator. KafkaError."""
        try:
            return await self._link.send(await self.coordinator(), request, aside=True)
        except KafkaError:
            self.lost_coordinator()
            raise

    async def heartbeat(self) -> int:
        """Say that this member lives; the answer's code. KafkaError."""
        request = _Heartbeat(self._group, self.generation, self.member_id, self._instance_id)
        code = int((await self.ask(request)).error_code)
        if code in COORDINATOR_MOVED:
            self.lost_coordinator()
        return code

    async def stop(self, leave: bool) -> None:
        """End the background task; `leave` gives the place up at once."""
        if self._task is None:
            return
        self._task.cancel()
        # what ended it earlier has been told by `check`, or nobody asked
        await asyncio.gather(self._task, return_exceptions=True)
        if leave and self.member_id:
            try:
                async with asyncio.timeout(LEAVE_WITHIN_S):
                    await self.ask(LeaveGroupRequest(self._group, self.member_id))
            except (KafkaError, TimeoutError) as exc:
                _log.info("could not leave group %s, its place ends with its session: %s", self._group, exc)

    # ------------------------------------------------ the loop

    async def _run(self) -> None:
        while True:
            try:
                await self._join()
                await self._stay()
            except KafkaError as exc:
                _log.debug("group %s: %s", self._group, exc)
                await asyncio.sleep(self._link.backoff_s)
                await self._link.refresh()
            except Replaced:
                await self._listener.lose()
                raise

    async def _join(self) -> None:
        """Become a member of the next generation, and learn what it gives."""
        assignment, self._counts = None, {}
        while assignment is None:
            await self._listener.lose()
            response = await self.ask(self._join_request())
            if response.error_code == Code.NONE:
                self.member_id, self.generation = response.member_id, response.generation_id
                assignment = await self._sync(response)
            else:
                await self._refused("join", response)
        self._counts = self._counts or await self._count(set(self._topics))
        partitions = kafka_assignor.granted(assignment)
        self._held = Held(tuple({at.partition for at in partitions}), self.generation)
        _log.debug("group %s, generation %d: %s", self._group, self.generation, sorted(partitions))
        await self._listener.gain(partitions)

    def _join_request(self) -> Any:
        return JoinGroupRequest(
            self._group,
            self._session_timeout_ms,
            min(REBALANCE_TIMEOUT_MS, self._session_timeout_ms),
            self.member_id,
            self._instance_id,
            "consumer",
            [(kafka_assignor.NAME, kafka_assignor.describe(self._topics, self._held))],
        )

    async def _sync(self, joined: Any) -> bytes | None:
        """The assignment, shared out by the leader; None if the group has moved on."""
        grants = await self._share_out(joined) if joined.leader_id == self.member_id else []
        request = SyncGroupRequest(self._group, self.generation, self.member_id, self._instance_id, grants)
        response = await self.ask(request)
        if response.error_code != Code.NONE:
            await self._refused("sync", response)
            return None
        assignment: bytes = response.member_assignment
        return assignment

    async def _share_out(self, joined: Any) -> list[tuple[str, bytes]]:
        joiners = {
            member_id: kafka_assignor.joiner(instance_id or member_id, description)
            for member_id, instance_id, description in joined.members
        }
        self._counts = await self._count({topic for one in joiners.values() for topic in one.topics})
        count = self._counts.__getitem__
        shares = kafka_assignor.share(joiners, self._given, count)
        self._given = {joiners[member].name: Held(numbers, self.generation) for member, numbers in shares.items()}
        return [(m, kafka_assignor.grant(joiners[m].topics, numbers, count)) for m, numbers in shares.items()]

    async def _count(self, topics: set[str]) -> dict[str, int]:
        """Partitions by topic; 0 for one that doesn't exist yet."""
        for topic in topics:
            self._link.watch(topic)
        if any(self._link.partitions(topic) is None for topic in topics):
            await self._link.refresh()
        return {topic: self._link.partitions(topic) or 0 for topic in topics}

    async def _refused(self, what: str, response: Any) -> None:
        """Draw the conclusion from an error code, and wait where that helps."""
        code = response.error_code
        if code == Code.FENCED_INSTANCE_ID:
            raise Replaced(f"another process has joined group {self._group} as {self._instance_id}")
        if code == Code.MEMBER_ID_REQUIRED:
            self.member_id = response.member_id
        elif code == Code.UNKNOWN_MEMBER_ID:
            self.member_id, self.generation = "", -1
        elif code == Code.ILLEGAL_GENERATION:
            self.generation = -1
        elif code in COORDINATOR_MOVED:
            self.lost_coordinator()
            await asyncio.sleep(self._link.backoff_s)
        elif code != Code.REBALANCE_IN_PROGRESS:
            _log.error("group %s refuses to let this member %s: %s", self._group, what, for_code(code).__name__)
            await asyncio.sleep(COMPLAIN_EVERY_S)

    async def _stay(self) -> None:
        """Heartbeats, until there is a reason to join again. A coordinator that is away is none."""
        interval_s = min(HEARTBEAT_MS, self._session_timeout_ms / 5) / 1000
        while True:
            await asyncio.sleep(interval_s)
            now = await self._count(set(self._counts))
            if any(now[topic] > count for topic, count in self._counts.items()):
                return  # partitions were added
            try:
                code = await self.heartbeat()
            except KafkaError as exc:
                _log.debug("group %s: no heartbeat: %s", self._group, exc)
                await self._link.refresh()
                continue
            if code not in COORDINATOR_MOVED and code != Code.NONE:
                self._reason(code)
                return

    def _reason(self, code: int) -> None:
        """Why this member joins again."""
        if code == Code.FENCED_INSTANCE_ID:
            raise Replaced(f"another process has joined group {self._group} as {self._instance_id}")
        if code == Code.UNKNOWN_MEMBER_ID:
            _log.warning("group %s has ended this member's session; joining again", self._group)
            self.member_id, self.generation = "", -1
        elif code == Code.ILLEGAL_GENERATION:
            self.generation = -1
        else:
            _log.debug("group %s rebalances: %s", self._group, for_code(code).__name__)
