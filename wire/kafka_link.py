"""One client's connections to a cluster: made when the cluster can be reached, and made again after an outage.

aiokafka brings the protocol, the connections and the metadata. What must hold through an outage (order, outcomes,
positions, membership) is decided here and in the modules beside it; docs/decisions/kafka-client.md says why.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType
from aiokafka.errors import GroupCoordinatorNotAvailableError, KafkaError, StaleMetadata

from wire.bus import Partition
from wire.errors import SettingsError, Unavailable, UnknownTopic
from wire.settings import Cluster

_log = logging.getLogger(__name__)
T = TypeVar("T")
_SECURITY = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

REQUEST_TIMEOUT_MS = 15_000
BACKOFF_S = 0.1
AWAY_BACKOFF_S = 0.5
"""a cluster that stays away is asked less often: on one machine the asking would slow its return"""
METADATA_AGE_MS = 30_000
ANSWER_WITHIN_S = 5.0
"""how long a question may take before the log counts as away"""
UNKNOWN_AFTER_S = 1.5
"""a topic that was just created may take a moment to be known everywhere"""


class Code(enum.IntEnum):
    """Kafka's error codes, as far as something depends on them."""

    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER = 6
    REQUEST_TIMED_OUT = 7
    REPLICA_NOT_AVAILABLE = 9
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOADING = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    ILLEGAL_GENERATION = 22
    UNKNOWN_MEMBER_ID = 25
    REBALANCE_IN_PROGRESS = 27
    INVALID_COMMIT_OFFSET_SIZE = 28
    TOPIC_ALREADY_EXISTS = 36
    NOT_CONTROLLER = 41
    KAFKA_STORAGE_ERROR = 56
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    MEMBER_ID_REQUIRED = 79
    FENCED_INSTANCE_ID = 82


MOVED = frozenset(
    {
        Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.LEADER_NOT_AVAILABLE,
        Code.NOT_LEADER,
        Code.REPLICA_NOT_AVAILABLE,
        Code.NETWORK_EXCEPTION,
        Code.KAFKA_STORAGE_ERROR,
        Code.FENCED_LEADER_EPOCH,
        Code.UNKNOWN_LEADER_EPOCH,
    }
)
"""ask again where the partition is, then try again"""
COORDINATOR_MOVED = frozenset({Code.COORDINATOR_LOADING, Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR})


class TryAgain(Exception):
    """The broker can't say just now; asked again it may."""


def client_options(cluster: Cluster) -> dict[str, Any]:
    """How aiokafka's client reaches a cluster. SettingsError for settings that can't."""
    if cluster.security not in _SECURITY:
        raise SettingsError(f"a cluster's security is {cluster.security!r}; use one of {', '.join(_SECURITY)}")
    options: dict[str, Any] = {
        "bootstrap_servers": [host.strip() for host in cluster.bootstrap.split(",")],
        "security_protocol": cluster.security,
    }
    if cluster.security in ("SSL", "SASL_SSL"):
        options["ssl_context"] = _tls(cluster)
    if cluster.security.startswith("SASL"):
        if cluster.sasl_mechanism is None or cluster.sasl_username is None or cluster.sasl_password is None:
            raise SettingsError(
                f"a cluster with security {cluster.security} needs sasl_mechanism, sasl_username and sasl_password"
            )
        options |= {
            "sasl_mechanism": cluster.sasl_mechanism,
            "sasl_plain_username": cluster.sasl_username,
            "sasl_plain_password": cluster.sasl_password,
        }
    return options


def _tls(cluster: Cluster) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=cluster.ca_file)
        if cluster.cert_file is not None:
            context.load_cert_chain(cluster.cert_file, cluster.key_file)
    except OSError as exc:
        raise SettingsError(f"a cluster's ca_file, cert_file or key_file can't be used: {exc}") from exc
    return context


class Link:
    """Connections, metadata and the way to a partition's leader or a group's coordinator."""

    def __init__(self, options: dict[str, Any], client_id: str, *, metadata_age_ms: int = METADATA_AGE_MS) -> None:
        self._client = AIOKafkaClient(
            **options,
            client_id=client_id or "millstream",
            request_timeout_ms=REQUEST_TIMEOUT_MS,
            metadata_max_age_ms=metadata_age_ms,
        )
        self._connecting = asyncio.Lock()
        self._connected = False
        self._misses = 0

    @property
    def backoff_s(self) -> float:
        """How long to wait before trying again."""
        return min(BACKOFF_S * 2.0**self._misses, AWAY_BACKOFF_S)

    async def connect(self) -> None:
        """Reach the cluster for the first time; nothing to do later. KafkaError when it can't be reached."""
        if not self._connected:
            async with self._connecting:
                if not self._connected:
                    await self._client.bootstrap()
                    self._connected = True

    async def refresh(self) -> bool:
        """Ask for the cluster's layout again; whether it was told."""
        told = self._connected and (await self._client.force_metadata_update() or await self._start_over())
        self._misses = 0 if told else min(self._misses + 1, 8)
        return told

    async def _start_over(self) -> bool:
        """Every broker that was known is gone: the addresses of the settings may lead to others."""
        try:
            async with self._connecting:
                await self._client.bootstrap()
        except KafkaError:
            return False
        return True

    async def send(self, node: int, request: Any, *, aside: bool = False) -> Any:
        """Ask a broker; `aside` on a connection of its own, where no fetch stands in the way. KafkaError."""
        group = ConnectionGroup.COORDINATION if aside else ConnectionGroup.DEFAULT
        return await self._client.send(node, request, group=group)

    async def ask_any(self, request: Any) -> Any:
        """Ask any broker. KafkaError."""
        await self.connect()
        node = self._client.get_random_node()
        if node is None:
            raise StaleMetadata("no broker is known")
        return await self.send(node, request, aside=True)

    def watch(self, topic: str) -> None:
        """Keep the layout of this topic."""
        self._client.add_topic(topic)

    def leader(self, at: Partition) -> int | None:
        """The broker that leads a partition, as far as is known."""
        node = self._client.cluster.leader_for_partition(at)
        return None if node is None or node < 0 else int(node)

    def partitions(self, topic: str) -> int | None:
        """How many partitions a topic has, as far as is known."""
        known = self._client.cluster.partitions_for_topic(topic)
        return len(known) if known else None

    async def coordinator(self, group: str) -> int:
        """The broker that coordinates a group. KafkaError."""
        await self.connect()
        if self._client.get_random_node() is None:
            raise GroupCoordinatorNotAvailableError
        return int(await self._client.coordinator_lookup(CoordinationType.GROUP, group))

    async def learn(self, topic: str, within_s: float = ANSWER_WITHIN_S) -> int:
        """How many partitions a topic has. UnknownTopic, or Unavailable."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def ask() -> int:
            self.watch(topic)
            told = await self.refresh()
            count = self.partitions(topic)
            if count is not None:
                return count
            if told and loop.time() - began > UNKNOWN_AFTER_S:
                raise UnknownTopic(topic)
            raise TryAgain(f"the layout of topic {topic} is not known yet")

        return await self.insist(ask, within_s)

    async def insist(self, ask: Callable[[], Awaitable[T]], within_s: float = ANSWER_WITHIN_S) -> T:
        """`ask()`, again and again while the cluster can't answer. Unavailable when it takes too long."""
        why: Exception | None = None
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        await self.connect()
                        return await ask()
                    except KafkaError as exc:
                        why = exc
                        if not exc.retriable:
                            raise Unavailable(f"the log refuses: {exc}") from exc
                    except TryAgain as exc:
                        why = exc
                    await asyncio.sleep(self.backoff_s)
                    if isinstance(why, KafkaError):
                        await self.refresh()
        except TimeoutError as exc:
            raise Unavailable(f"the log can't be reached: {why or 'no answer in time'}") from exc

    async def close(self) -> None:
        """Close the connections, without waiting long for a broker that doesn't answer."""
        try:
            await asyncio.wait_for(self._client.close(), 2.0)
        except TimeoutError:
            _log.debug("a connection would not close in time")
