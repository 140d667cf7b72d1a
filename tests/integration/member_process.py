"""A member of a group in a process of its own, for a test to freeze. Says on stdout what happens to it.

A line on stdin makes it commit everything it believes to have.
"""

from __future__ import annotations

import asyncio
import sys

from wire.bus import Commit, Member, Partition
from wire.clock import SystemClock
from wire.errors import NotMember, Unavailable
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


async def commit(member: Member) -> None:
    try:
        await member.commit({at: Commit(offset=0, metadata="frozen") for at in member.assignment()})
    except (NotMember, Unavailable) as exc:
        say("refused", type(exc).__name__)
    else:
        say("committed")


async def obey(member: Member) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        await commit(member)


async def main(bootstrap: str, group: str, topic: str, instance_id: str) -> None:
    bus = KafkaBus(Cluster(bootstrap=bootstrap, replication=1), SystemClock())
    member = await bus.member(group, [topic], Saying(), instance_id=instance_id, session_timeout_ms=3_000)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(obey(member))
        while True:
            for record in await member.poll(100):
                say("read", (record.value or b"").decode())


asyncio.run(main(*sys.argv[1:]))
