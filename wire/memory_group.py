"""A consumer group of the in-memory bus: eager rebalances, generations, static members, commits.

A rebalance runs in the call that causes it and ends before that call returns: first every member is told what it
loses, then every member what it has. That is the order in which the real broker's barrier lets things happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from wire.assign import spread
from wire.bus import Commit, Partition
from wire.errors import NotMember


class Occupant(Protocol):
    """What a group asks of the member in a seat."""

    async def lose(self) -> None:
        """Everything is revoked."""
        ...

    async def gain(self, partitions: frozenset[Partition]) -> None:
        """This is assigned."""
        ...


@dataclass(slots=True, eq=False)
class Seat:
    """A member's place in its group; a static one outlives the process in it."""

    name: str
    topics: tuple[str, ...]
    occupant: Occupant | None
    held: frozenset[int] = frozenset()


class Group:
    """One group."""

    def __init__(self, partition_count: Callable[[str], int]) -> None:
        self.generation = 0
        self.commits: dict[Partition, Commit] = {}
        self._partition_count = partition_count
        self._seats: dict[str, Seat] = {}
        self._dynamic = 0
        self._turn = asyncio.Lock()

    async def join(self, occupant: Occupant, topics: Sequence[str], instance_id: str | None) -> Seat:
        """Take a seat. A static member's empty or stolen seat is taken over as it stands: nobody else is disturbed."""
        async with self._turn:
            if instance_id is None:
                self._dynamic += 1
            name = instance_id or f"dynamic-{self._dynamic:06}"
            old = self._seats.get(name)
            seat = Seat(name, tuple(topics), occupant, held=old.held if old else frozenset())
            self._seats[name] = seat
            if old is not None and old.topics == seat.topics:
                await occupant.gain(self.partitions(seat))
            else:
                await self._rebalance()
            return seat

    async def leave(self, seat: Seat) -> None:
        """Give a seat up; the others share what it had."""
        async with self._turn:
            if self.holds(seat):
                del self._seats[seat.name]
                await self._rebalance()

    async def expire(self, name: str) -> None:
        """A seat's session ended; whoever sits in it isn't told."""
        async with self._turn:
            if self._seats.pop(name, None) is not None:
                await self._rebalance()

    async def recount(self, topic: str) -> None:
        """A topic has more partitions now: share them out."""
        async with self._turn:
            if any(topic in seat.topics for seat in self._seats.values()):
                await self._rebalance()

    def vacate(self, seat: Seat) -> None:
        """The process is gone, its seat stays until its session ends."""
        seat.occupant = None

    def holds(self, seat: Seat) -> bool:
        """Whether this is still the seat of its name."""
        return self._seats.get(seat.name) is seat

    def taken_over(self, seat: Seat) -> bool:
        """Whether another process sits in the place of this name."""
        return seat.name in self._seats and not self.holds(seat)

    def commit(self, seat: Seat, commits: Mapping[Partition, Commit]) -> None:
        """NotMember unless the seat counts and has all these partitions."""
        if not self.holds(seat) or not self.partitions(seat).issuperset(commits):
            raise NotMember("the group has moved on; nothing was committed")
        self.commits.update(commits)

    def partitions(self, seat: Seat) -> frozenset[Partition]:
        """What a seat's share means in its topics."""
        return frozenset(
            Partition(topic, number)
            for topic in seat.topics
            for number in seat.held
            if number < self._partition_count(topic)
        )

    async def _rebalance(self) -> None:
        self.generation += 1
        seats = list(self._seats.values())
        for seat in seats:
            if seat.occupant is not None:
                await seat.occupant.lose()
        counts = [self._partition_count(topic) for seat in seats for topic in seat.topics]
        shares = spread(range(max(counts, default=0)), {seat.name: seat.held for seat in seats})
        for seat in seats:
            seat.held = shares[seat.name]
            if seat.occupant is not None:
                await seat.occupant.gain(self.partitions(seat))
