"""What the members of a group tell one another when they share partitions out: the group's leader decides for all.

Every member names itself (its instance id, where it has one) and what it had. Numbers are shared out, not partitions
of topics: who has number 3 has it of every topic, which is what keeps `requests.F` and `batch.F` together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment, ConsumerProtocolMemberMetadata

from wire.assign import spread
from wire.bus import Partition

NAME = "millstream"
_VERSION = 0


class Held(msgspec.Struct, frozen=True):
    """What a member had, and in which generation: of two that claim the same, the later one tells the truth."""

    numbers: tuple[int, ...] = ()
    generation: int = -1


class Joiner(msgspec.Struct, frozen=True):
    """A member as the leader sees it."""

    name: str
    topics: tuple[str, ...]
    held: Held


def describe(topics: Iterable[str], held: Held) -> bytes:
    """What a member sends when it joins."""
    encoded: bytes = ConsumerProtocolMemberMetadata(_VERSION, list(topics), msgspec.json.encode(held)).encode()
    return encoded


def joiner(name: str, description: bytes) -> Joiner:
    """A `describe` read again. Anything but ours counts as holding nothing."""
    metadata = ConsumerProtocolMemberMetadata.decode(description)
    try:
        held = msgspec.json.decode(metadata.user_data or b"{}", type=Held)
    except msgspec.DecodeError:
        held = Held()
    return Joiner(name, tuple(metadata.subscription), held)


def share(
    joiners: Mapping[str, Joiner], remembered: Mapping[str, Held], count: Callable[[str], int]
) -> dict[str, tuple[int, ...]]:
    """Member id → numbers. `remembered`: by name, what the leader gave out last: a member that is away can't tell.

    `count` gives a topic's partitions.
    """
    claims: dict[str, set[int]] = {member: set() for member in joiners}
    owner: dict[int, str] = {}
    latest: dict[str, Held] = {}
    for member, one in joiners.items():
        latest[member] = max(one.held, remembered.get(one.name, Held()), key=lambda held: held.generation)
    for member in sorted(joiners, key=lambda m: (latest[m].generation, joiners[m].name)):
        owner.update(dict.fromkeys(latest[member].numbers, member))
    for number, member in owner.items():
        claims[member].add(number)
    names = {one.name: member for member, one in joiners.items()}
    total = max((count(topic) for one in joiners.values() for topic in one.topics), default=0)
    shares = spread(range(total), {name: claims[member] for name, member in names.items()})
    return {names[name]: tuple(sorted(numbers)) for name, numbers in shares.items()}


def grant(topics: Iterable[str], numbers: Iterable[int], count: Callable[[str], int]) -> bytes:
    """A member's share as the group's protocol writes it."""
    given = [(topic, [n for n in numbers if n < count(topic)]) for topic in sorted(topics)]
    encoded: bytes = ConsumerProtocolMemberAssignment(_VERSION, given, b"").encode()
    return encoded


def granted(assignment: bytes) -> frozenset[Partition]:
    """A `grant` read again; nothing where the leader gave nothing."""
    if not assignment:
        return frozenset()
    decoded = ConsumerProtocolMemberAssignment.decode(assignment)
    return frozenset(Partition(topic, number) for topic, numbers in decoded.assignment for number in numbers)
