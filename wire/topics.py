"""The one table of topics. Nothing else creates a topic, and the broker never creates one by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from wire.fleet import Fleet

Acks = Literal["all", "leader"]

_MINUTE_MS = 60_000
_HOUR_MS = 60 * _MINUTE_MS
_DAY_MS = 24 * _HOUR_MS
KEPT_FOR_REPLAY_MS = _HOUR_MS
"""Signals, snapshots and dispatches are all kept for so long: a choice can be made again from them"""
LARGE_MESSAGE_BYTES = 16 * 1024 * 1024
"""Limit of a record on topics that hold whole requests or answers."""
SMALL_MESSAGE_BYTES = 1024 * 1024
SEGMENT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic as it is created. `retention_ms` None = compacted: only the latest value of a key is kept."""

    name: str
    partitions: int
    retention_ms: int | None
    acks: Acks = "all"
    max_message_bytes: int = SMALL_MESSAGE_BYTES
    retention_bytes: int | None = None
    compact_horizon_ms: int | None = None
    """compacted topics whose keys may be forgotten as well"""
    compact_after_ms: int | None = None
    """compacted topics whose older values, too, are kept for so long"""

    def config(self) -> dict[str, str]:
        """Kafka's topic settings."""
        settings = {
            "max.message.bytes": str(self.max_message_bytes),
            "segment.bytes": str(SEGMENT_BYTES),
            "message.timestamp.type": "CreateTime",
        }
        if self.retention_ms is None:
            settings |= {
                "cleanup.policy": "compact",
                "min.cleanable.dirty.ratio": "0.1",
                "segment.ms": str(10 * _MINUTE_MS),
            }
            if self.compact_horizon_ms is not None:
                settings |= {"cleanup.policy": "compact,delete", "retention.ms": str(self.compact_horizon_ms)}
            if self.compact_after_ms is not None:
                settings["min.compaction.lag.ms"] = str(self.compact_after_ms)
        else:
            settings |= {
                "cleanup.policy": "delete",
                "retention.ms": str(self.retention_ms),
                "segment.ms": str(max(self.retention_ms // 6, _MINUTE_MS)),
            }
        if self.retention_bytes is not None:
            settings["retention.bytes"] = str(self.retention_bytes)
        return settings


@dataclass(frozen=True, slots=True)
class FleetTopics:
    """Names of a fleet's topics and of its consumer group."""

    fleet: Fleet
    requests: str = field(init=False)
    batch: str = field(init=False)
    journal: str = field(init=False)
    group: str = field(init=False)

    def __post_init__(self) -> None:
        for kind in ("requests", "batch", "journal"):
            object.__setattr__(self, kind, f"{kind}.{self.fleet.name}")
        object.__setattr__(self, "group", f"workers.{self.fleet.name}")


USAGE = "usage"
RESPONSES = "responses"
SIGNALS = "signals"
WEIGHTS = "weights"
PLACEMENT = "placement"
LEASES = "leases"
INTENTS = "intents"
BATCHES = "batches"
CREDENTIALS = "credentials"
CATALOGUE = "catalogue"
DEAD = "dead"

JOURNAL_PREFIX = "journal."


def replies(region: str) -> str:
    """The topic an ingress of `region` reads its frames from; partition = slot."""
    return f"replies.{region}"


def dispatches(region: str) -> str:
    """The topic on which the ingresses of `region` tell one another what they sent."""
    return f"dispatches.{region}"


def weights_key(model: str, region: str) -> bytes:
    """Key of a Snapshot: one a model and ingress region."""
    return f"{region}/{model}".encode()


def journal_fleet(topic: str) -> Fleet:
    """The fleet of a journal topic's name."""
    return Fleet.parse(topic.removeprefix(JOURNAL_PREFIX))


def fleet_topics(fleet: Fleet, shards: int) -> tuple[Topic, ...]:
    """What a fleet of `shards` shards needs."""
    names = FleetTopics(fleet)
    return (
        Topic(
            name=names.requests,
            partitions=shards,
            retention_ms=6 * _HOUR_MS,
            max_message_bytes=LARGE_MESSAGE_BYTES,
        ),
        Topic(
            name=names.batch,
            partitions=shards,
            retention_ms=6 * _HOUR_MS,
            max_message_bytes=LARGE_MESSAGE_BYTES,
        ),
        Topic(
            name=names.journal,
            partitions=shards,
            retention_ms=7 * _DAY_MS,
            max_message_bytes=LARGE_MESSAGE_BYTES,
        ),
    )


def region_topics(region: str, slots: int) -> tuple[Topic, ...]:
    """What a region of `slots` reply slots needs."""
    return (
        Topic(
            name=replies(region),
            partitions=slots,
            retention_ms=10 * _MINUTE_MS,
            acks="leader",
            max_message_bytes=LARGE_MESSAGE_BYTES,
        ),
        Topic(name=dispatches(region), partitions=1, retention_ms=KEPT_FOR_REPLAY_MS, acks="leader"),
    )


def shared_topics(usage_partitions: int = 4) -> tuple[Topic, ...]:
    """What an installation needs once."""
    return (
        Topic(name=USAGE, partitions=usage_partitions, retention_ms=30 * _DAY_MS),
        Topic(name=RESPONSES, partitions=4, retention_ms=7 * _DAY_MS, max_message_bytes=LARGE_MESSAGE_BYTES),
        Topic(name=SIGNALS, partitions=1, retention_ms=KEPT_FOR_REPLAY_MS, acks="leader"),
        Topic(name=WEIGHTS, partitions=1, retention_ms=None, compact_after_ms=KEPT_FOR_REPLAY_MS),
        Topic(name=PLACEMENT, partitions=1, retention_ms=None),
        Topic(name=LEASES, partitions=1, retention_ms=_HOUR_MS),
        Topic(name=INTENTS, partitions=4, retention_ms=None, compact_horizon_ms=_DAY_MS),
        Topic(name=BATCHES, partitions=1, retention_ms=None),
        Topic(name=CREDENTIALS, partitions=1, retention_ms=None),
        Topic(name=CATALOGUE, partitions=1, retention_ms=None),
        Topic(name=DEAD, partitions=1, retention_ms=7 * _DAY_MS),
    )


def all_topics(fleets: Iterable[tuple[Fleet, int]], regions: Iterable[tuple[str, int]]) -> tuple[Topic, ...]:
    """Every topic of an installation: fleets with their shards, regions with their reply slots."""
    out = list(shared_topics())
    for region, slots in regions:
        out += region_topics(region, slots)
    for fleet, shards in fleets:
        out += fleet_topics(fleet, shards)
    return tuple(out)
