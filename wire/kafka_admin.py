"""Topics and groups of a cluster; see `wire.bus.Admin`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiokafka.errors import for_code
from aiokafka.protocol.admin import CreatePartitionsRequest, CreateTopicsRequest
from aiokafka.protocol.metadata import MetadataRequest

from wire.bus import Commit, Partition
from wire.errors import Unavailable
from wire.kafka_keep import keep_longer
from wire.kafka_link import Code, Link, TryAgain
from wire.kafka_offsets import check_code, fetch_commits
from wire.topics import Topic

CREATE_WITHIN_S = 30.0
_BROKER_TIMEOUT_MS = 10_000


class KafkaAdmin:
    """Creates and describes topics."""

    def __init__(self, link: Link, replication: int) -> None:
        self._link = link
        self._replication = replication

    async def create(self, topics: Iterable[Topic]) -> tuple[str, ...]:
        wanted = {topic.name: topic for topic in topics}
        before = await self._layouts()
        await self._create([topic for name, topic in wanted.items() if name not in before])
        raised = {n: t.partitions for n, t in wanted.items() if n in before and before[n] < t.partitions}
        if raised:
            await self._raise(raised)
        await keep_longer(self._link, [topic for name, topic in wanted.items() if name in before])
        await self._link.insist(lambda: self._led(wanted), CREATE_WITHIN_S)
        return tuple(name for name in wanted if name not in before)

    async def partitions(self, topic: str) -> int | None:
        return (await self._layouts()).get(topic)

    async def topics(self) -> frozenset[str]:
        return frozenset(await self._layouts())

    async def group_commits(self, group: str) -> dict[Partition, Commit]:
        return await fetch_commits(self._link, group)

    async def stop(self) -> None:
        await self._link.close()

    async def _metadata(self) -> dict[str, list[Any]]:
        """Topic → its partitions, as Kafka describes them; without those that are the broker's own."""
        response = await self._link.ask_any(MetadataRequest(None))
        topics = {}
        for code, name, internal, partitions in response.topics:
            if not internal and not name.startswith("__"):
                check_code(code, f"topic {name}")
                topics[name] = partitions
        return topics

    async def _layouts(self) -> dict[str, int]:
        topics = await self._link.insist(self._metadata)
        return {name: len(partitions) for name, partitions in topics.items()}

    async def _create(self, topics: list[Topic]) -> None:
        if not topics:
            return
        nowhere: list[Any] = []  # the cluster places the replicas
        described = [(t.name, t.partitions, self._replication, nowhere, list(t.config().items())) for t in topics]

        async def ask() -> None:
            response = await self._link.ask_any(CreateTopicsRequest(described, _BROKER_TIMEOUT_MS, False))
            for name, code, why in response.topic_errors:
                _conclude(code, f"topic {name} can't be created", why)

        await self._link.insist(ask, CREATE_WITHIN_S)

    async def _raise(self, counts: dict[str, int]) -> None:
        wanted = [(name, (count, None)) for name, count in counts.items()]

        async def ask() -> None:
            response = await self._link.ask_any(CreatePartitionsRequest(wanted, _BROKER_TIMEOUT_MS, False))
            for name, code, why in response.topic_errors:
                _conclude(code, f"topic {name} can't get more partitions", why)

        await self._link.insist(ask, CREATE_WITHIN_S)

    async def _led(self, wanted: dict[str, Topic]) -> None:
        """TryAgain until every partition has a leader: only then can it be written and read."""
        found = await self._metadata()
        for name, topic in wanted.items():
            led = [number for _, number, leader, *_ in found.get(name, []) if leader >= 0]
            if len(led) < topic.partitions:
                raise TryAgain(f"topic {name} is not ready yet")


def _conclude(code: int, what: str, why: str | None) -> None:
    if code in (Code.NOT_CONTROLLER, Code.REQUEST_TIMED_OUT):
        raise TryAgain(what)
    if code not in (Code.NONE, Code.TOPIC_ALREADY_EXISTS):
        raise Unavailable(f"{what}: {why or for_code(code).__name__}")
