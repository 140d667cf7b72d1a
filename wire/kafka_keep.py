"""How long topics that exist keep their records: longer where the table of topics says so, never shorter.

What an operator has set otherwise stays: Kafka replaces all of a topic's own settings at once, so they are read first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiokafka.errors import for_code
from aiokafka.protocol.admin import AlterConfigsRequest, DescribeConfigsRequest

from wire.errors import Unavailable
from wire.kafka_link import Link
from wire.topics import Topic

KEEPS = ("retention.ms", "min.compaction.lag.ms")
_TOPIC = 2
_ITS_OWN = 1
"""where Kafka says that a setting comes from"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one topic: those in force, and of these those that are its own."""

    all: Mapping[str, str]
    own: Mapping[str, str]


async def keep_longer(link: Link, topics: Iterable[Topic]) -> None:
    """Raise what is kept for less long than is wanted. Unavailable when the cluster refuses, or is away."""
    wanted = {topic.name: topic.config() for topic in topics}
    if not wanted:
        return
    found = await link.insist(lambda: _describe(link, wanted))
    raised = {name: longer(settings.all, wanted[name]) for name, settings in found.items()}
    changed = [
        (_TOPIC, name, list({**found[name].own, **settings}.items())) for name, settings in raised.items() if settings
    ]
    if changed:
        await link.insist(lambda: _alter(link, changed))


def longer(present: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """The settings to raise. A negative time is for ever."""
    return {
        name: wanted[name]
        for name in KEEPS
        if name in wanted and name in present and 0 <= int(present[name]) < int(wanted[name])
    }


async def _describe(link: Link, names: Iterable[str]) -> dict[str, Settings]:
    response = await link.ask_any(DescribeConfigsRequest([(_TOPIC, name, None) for name in names]))
    found = {}
    for code, why, _, name, entries in response.resources:
        _check(code, name, why)
        known = [(key, value, source) for key, value, _, source, *_ in entries if value is not None]
        found[name] = Settings(
            {key: value for key, value, _ in known}, {key: value for key, value, source in known if source == _ITS_OWN}
        )
    return found


async def _alter(link: Link, changed: list[Any]) -> None:
    response = await link.ask_any(AlterConfigsRequest(changed))
    for code, why, _, name in response.resources:
        _check(code, name, why)


def _check(code: int, name: str, why: str | None) -> None:
    if code:
        raise Unavailable(f"the settings of topic {name} can't be brought up to date: {why or for_code(code).__name__}")
