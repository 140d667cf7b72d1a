"""Questions about offsets: where a log begins, ends, or stood at a time, and what a group has committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.commit import OffsetFetchRequest
from aiokafka.protocol.offset import OffsetRequest

from wire.bus import AtOffset, AtTime, Commit, Partition, Start
from wire.errors import UnknownTopic
from wire.kafka_link import ANSWER_WITHIN_S, COORDINATOR_MOVED, MOVED, Code, Link, TryAgain

LATEST = -1
EARLIEST = -2
_NOTHING = -1


async def list_offsets(
    link: Link, at_ms: Mapping[Partition, int], within_s: float = ANSWER_WITHIN_S
) -> dict[Partition, int | None]:
    """The first offset of each partition at or after a time (or LATEST, EARLIEST); None if there is no such record.

    UnknownTopic, or Unavailable.
    """
    for topic in {at.topic for at in at_ms}:
        count = link.partitions(topic) or await link.learn(topic, within_s)
        for at in at_ms:
            if at.topic == topic and at.partition >= count:
                raise UnknownTopic(f"{topic}[{at.partition}]")
    found: dict[Partition, int | None] = {}

    async def ask() -> dict[Partition, int | None]:
        for node, wanted in _by_leader(link, {at: t for at, t in at_ms.items() if at not in found}).items():
            response = await link.send(node, OffsetRequest(-1, 0, _by_topic(wanted)), aside=True)
            found.update(_found(response))
        return found

    return await link.insist(ask, within_s)


def _by_leader(link: Link, at_ms: Mapping[Partition, int]) -> dict[int, dict[Partition, int]]:
    nodes: dict[int, dict[Partition, int]] = defaultdict(dict)
    for at, time_ms in at_ms.items():
        leader = link.leader(at)
        if leader is None:
            raise for_code(Code.LEADER_NOT_AVAILABLE)(at)
        nodes[leader][at] = time_ms
    return nodes


def _by_topic(values: Mapping[Partition, int]) -> list[tuple[str, list[tuple[int, int]]]]:
    topics: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for at, value in values.items():
        topics[at.topic].append((at.partition, value))
    return list(topics.items())


def _found(response: Any) -> dict[Partition, int | None]:
    found: dict[Partition, int | None] = {}
    for topic, partitions in response.topics:
        for partition, code, _, offset in partitions:
            if code in MOVED or code == Code.REQUEST_TIMED_OUT:
                raise for_code(Code.NOT_LEADER)(topic)
            if code != Code.NONE:
                raise for_code(code)(topic)
            found[Partition(topic, partition)] = None if offset == _NOTHING else offset
    return found


async def end_offsets(link: Link, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """The offset after the last record of each."""
    return {at: end or 0 for at, end in (await list_offsets(link, dict.fromkeys(partitions, LATEST))).items()}


async def beginning_offsets(link: Link, partitions: Iterable[Partition]) -> dict[Partition, int]:
    """The first offset kept of each."""
    return {at: start or 0 for at, start in (await list_offsets(link, dict.fromkeys(partitions, EARLIEST))).items()}


async def resolve(link: Link, starts: Mapping[Partition, Start]) -> dict[Partition, int]:
    """The offset each start means now."""
    first = await beginning_offsets(link, [at for at, s in starts.items() if not isinstance(s, AtTime)])
    last = await end_offsets(link, starts)
    times = {at: s.timestamp_ms for at, s in starts.items() if isinstance(s, AtTime)}
    timed = await list_offsets(link, times) if times else {}
    offsets = {}
    for at, start in starts.items():
        match start:
            case "earliest":
                offsets[at] = first[at]
            case "latest":
                offsets[at] = last[at]
            case AtOffset(offset):
                offsets[at] = min(max(offset, first[at]), last[at])
            case AtTime():
                found = timed[at]
                offsets[at] = last[at] if found is None else found
    return offsets


async def fetch_commits(
    link: Link, group: str, partitions: Iterable[Partition] | None = None, within_s: float = ANSWER_WITHIN_S
) -> dict[Partition, Commit]:
    """What a group has committed, of these partitions or of all. Unavailable."""
    wanted = None
    if partitions is not None:
        topics: dict[str, list[int]] = defaultdict(list)
        for at in partitions:
            topics[at.topic].append(at.partition)
        wanted = list(topics.items())

    async def ask() -> dict[Partition, Commit]:
        node = await link.coordinator(group)
        response = await link.send(node, OffsetFetchRequest(group, wanted), aside=True)
        # a group that is still loading is told here, beside an empty list that would pass for "nothing committed"
        check_code(response.error_code, f"the commits of group {group}")
        commits = {}
        for topic, found in response.topics:
            for partition, offset, metadata, code in found:
                check_code(code, f"the commit of group {group} for {topic}[{partition}]")
                if offset != _NOTHING:
                    commits[Partition(topic, partition)] = Commit(offset=offset, metadata=metadata or "")
        return commits

    return await link.insist(ask, within_s)


def check_code(code: int, what: str) -> None:
    """TryAgain for an error that passes, KafkaError for one that doesn't."""
    if code in COORDINATOR_MOVED or code in MOVED or code == Code.REQUEST_TIMED_OUT:
        raise TryAgain(f"{what}: {for_code(code).__name__}")
    if code != Code.NONE:
        error: KafkaError = for_code(code)(what)
        raise error
