"""A member of a group in a process of its own, for a test to freeze. Says on stdout what happens to it."""

from __future__ import annotations

import asyncio
import sys

from wire.bus import Commit, Member, Partition
from wire.clock import SystemClock
from wire.errors import NotMember
from wire.kafka import KafkaBus
from wire.settings import Cluster


def say(*words: object) -> None:
    print(*words, flush=True)


class Saying:
    """Says what the group proposes."""

    async def assigned(self, partitions: frozenset[Partition]) -> None:
        say("assigned", *sorted(at.partition for at in partitions))

    async def revoked(self, partitions: frozenset[Partition]) -> None:
        say("revoked", *sorted(at.partition for at in partitions))


async def commit(member: Member, partitions: frozenset[Partition]) -> None:
    """Commit the position 1 of everything it believes to have."""
    try:
        await member.commit({at: Commit(offset=1, metadata="frozen") for at in partitions})
    except NotMember:
        say("refused")
    else:
        say("committed")


async def main(bootstrap: str, group: str, topic: str, instance_id: str) -> None:
    bus = KafkaBus(Cluster(bootstrap=bootstrap, replication=1), SystemClock())
    member = await bus.member(group, [topic], Saying(), instance_id=instance_id, session_timeout_ms=1_500)
    believed: frozenset[Partition] = frozenset()
    while True:
        for record in await member.poll(20):
            say("read", (record.value or b"").decode())
        # a process that was frozen doesn't know: it tries with what it had
        if member.assignment() and member.assignment() != believed:
            believed = member.assignment()
        await commit(member, believed)


asyncio.run(main(*sys.argv[1:]))
