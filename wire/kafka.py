"""The bus on Apache Kafka. `wire.memory` is its double, and the contract suite holds both to the same answers."""

from __future__ import annotations

from collections.abc import Sequence

from wire.bus import Assignee
from wire.clock import Clock
from wire.kafka_admin import KafkaAdmin
from wire.kafka_link import Link, client_options
from wire.kafka_logs import tame
from wire.kafka_member import KafkaMember
from wire.kafka_producer import QUEUE_BYTES, KafkaProducer
from wire.kafka_reader import KafkaReader
from wire.settings import Cluster, Settings
from wire.topics import Acks

GROUP_METADATA_AGE_MS = 5_000
"""how soon a group notices that a topic has more partitions"""


class KafkaBus:
    """One region's cluster. Nothing is connected before it is needed, and nothing here waits for the cluster."""

    def __init__(self, cluster: Cluster, clock: Clock, *, queue_bytes: int = QUEUE_BYTES) -> None:
        """`queue_bytes`: what one producer holds for a cluster that is away before it raises Unavailable."""
        self._cluster = cluster
        self._options = client_options(cluster)
        self._clock = clock
        self._queue_bytes = queue_bytes
        tame()

    async def producer(self, *, acks: Acks = "all", linger_ms: int = 0, client_id: str = "") -> KafkaProducer:
        return KafkaProducer(Link(self._options, client_id), acks, linger_ms, self._clock, self._queue_bytes)

    async def reader(self, *, client_id: str = "") -> KafkaReader:
        return KafkaReader(Link(self._options, client_id))

    async def member(
        self,
        group: str,
        topics: Sequence[str],
        assignee: Assignee,
        *,
        instance_id: str | None = None,
        session_timeout_ms: int = 10_000,
        client_id: str = "",
    ) -> KafkaMember:
        link = Link(self._options, client_id, metadata_age_ms=GROUP_METADATA_AGE_MS)
        return KafkaMember(link, group, topics, assignee, instance_id, session_timeout_ms)

    async def admin(self) -> KafkaAdmin:
        return KafkaAdmin(Link(self._options, "admin"), self._cluster.replication)


def buses_of(settings: Settings, clock: Clock) -> dict[str, KafkaBus]:
    """Each region's bus; regions that are on one cluster share it, so that nothing is sent there twice."""
    made: list[tuple[Cluster, KafkaBus]] = []
    buses: dict[str, KafkaBus] = {}
    for region, cluster in settings.regions.items():
        bus = next((bus for other, bus in made if other == cluster), None)
        if bus is None:
            bus = KafkaBus(cluster, clock)
            made.append((cluster, bus))
        buses[region] = bus
    return buses
