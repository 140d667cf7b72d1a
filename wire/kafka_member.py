"""The member of a consumer group; see `wire.bus.Member`. `kafka_group` keeps it in the group, `kafka_fetch` reads."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from aiokafka.errors import for_code
from aiokafka.protocol.commit import OffsetCommitRequest

from wire.bus import Assignee, Commit, Partition, Record
from wire.errors import BusError, NotMember, Unavailable
from wire.kafka_fetch import Fetcher
from wire.kafka_group import Membership, Replaced
from wire.kafka_link import ANSWER_WITHIN_S, COORDINATOR_MOVED, Code, Link, TryAgain
from wire.kafka_offsets import beginning_offsets, check_code, fetch_commits

_log = logging.getLogger(__name__)
_MOVED_ON = frozenset({Code.ILLEGAL_GENERATION, Code.UNKNOWN_MEMBER_ID, Code.FENCED_INSTANCE_ID})


class KafkaMember:
    """Joins in the background, and again whenever it must."""

    def __init__(
        self,
        link: Link,
        group: str,
        topics: Sequence[str],
        assignee: Assignee,
        instance_id: str | None,
        session_timeout_ms: int,
    ) -> None:
        self._link = link
        self._group = group
        self._assignee = assignee
        self._fetcher = Fetcher(link)
        self._membership = Membership(link, group, topics, self, instance_id, session_timeout_ms)
        self._assigned: frozenset[Partition] = frozenset()
        self._placing: asyncio.Task[None] | None = None
        self._membership.start()

    # ------------------------------------------------ what the group decides

    async def lose(self) -> None:
        lost, self._assigned = self._assigned, frozenset()
        self._stop_placing()
        self._fetcher.assign({})
        if lost:
            await self._assignee.revoked(lost)

    async def gain(self, partitions: frozenset[Partition]) -> None:
        self._assigned = partitions
        self._fetcher.assign(dict.fromkeys(sorted(partitions)))
        await self._assignee.assigned(partitions)
        # only now: what the assignee has sought itself needs no looking up
        self._placing = asyncio.create_task(self._place(), name=f"positions of {self._group}")

    async def _place(self) -> None:
        """Read from the committed offset on, from the log's start where nothing is committed."""
        while unplaced := self._fetcher.unplaced():
            try:
                commits = await fetch_commits(self._link, self._group, unplaced)
                starts = await beginning_offsets(self._link, [at for at in unplaced if at not in commits])
            except BusError as exc:
                _log.debug("group %s: positions aren't known yet: %s", self._group, exc)
                await asyncio.sleep(self._link.backoff_s)
                continue
            for at in self._fetcher.unplaced():
                if at in commits or at in starts:
                    self._fetcher.seek(at, commits[at].offset if at in commits else starts[at])

    def _stop_placing(self) -> None:
        if self._placing is not None:
            self._placing.cancel()
            self._placing = None

    # ------------------------------------------------ what the owner does

    async def poll(self, timeout_ms: int, max_records: int = 500) -> Sequence[Record]:
        try:
            self._membership.check()
        except Replaced as exc:
            raise NotMember(str(exc)) from exc
        return await self._fetcher.poll(timeout_ms, max_records)

    def assignment(self) -> frozenset[Partition]:
        return self._assigned

    async def committed(self, partition: Partition) -> Commit | None:
        return (await fetch_commits(self._link, self._group, [partition])).get(partition)

    async def commit(self, commits: Mapping[Partition, Commit]) -> None:
        if not self._assigned.issuperset(commits) or not self._membership.member_id:
            raise NotMember("the group has moved on; nothing was committed")
        if commits:
            await self._link.insist(lambda: self._commit(commits), ANSWER_WITHIN_S)
        else:
            await self._link.insist(self._check_membership, ANSWER_WITHIN_S)

    async def _commit(self, commits: Mapping[Partition, Commit]) -> None:
        topics: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for at, commit in commits.items():
            topics[at.topic].append((at.partition, commit.offset, commit.metadata))
        membership = self._membership
        response = await membership.ask(
            OffsetCommitRequest(self._group, membership.generation, membership.member_id, -1, list(topics.items()))
        )
        for topic, partitions in response.topics:
            for _, code in partitions:
                self._conclude(code, f"a commit to {topic}")

    async def _check_membership(self) -> None:
        self._conclude(await self._membership.heartbeat(), "a heartbeat")

    def _conclude(self, code: int, what: str) -> None:
        if code in _MOVED_ON:
            raise NotMember(f"the group has moved on ({for_code(code).__name__}); nothing was committed")
        if code == Code.REBALANCE_IN_PROGRESS:
            raise Unavailable("the group rebalances; nothing was committed")
        if code in (Code.OFFSET_METADATA_TOO_LARGE, Code.INVALID_COMMIT_OFFSET_SIZE):
            raise ValueError("a commit's metadata can't be over 4096 bytes")
        if code in COORDINATOR_MOVED:
            self._membership.lost_coordinator()
            raise TryAgain(what)
        check_code(code, what)

    def pause(self, partitions: Iterable[Partition]) -> None:
        for at in partitions:
            self._fetcher.pause(at, True)

    def resume(self, partitions: Iterable[Partition]) -> None:
        for at in partitions:
            self._fetcher.pause(at, False)

    def seek(self, partition: Partition, offset: int) -> None:
        if partition not in self._assigned:
            raise ValueError(f"{partition} isn't assigned")
        self._fetcher.seek(partition, offset)

    async def stop(self, *, leave: bool = True) -> None:
        self._stop_placing()
        await self._membership.stop(leave)
        await self._fetcher.stop()
        await self._link.close()
