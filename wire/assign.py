"""Which member of a group gets which partitions. Pure; the real bus and the in-memory one share it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


def spread(partitions: Iterable[int], held: Mapping[str, Collection[int]]) -> dict[str, frozenset[int]]:
    """Share partition numbers out evenly, moving as few as possible.

    `held`: member → the numbers it had before, empty for a new member. The result has every member; counts differ by
    one at most. A number that two members claim stays with the one that claims more.
    """
    if not held:
        return {}
    left = set(partitions)
    low, more = divmod(len(left), len(held))
    order = sorted(held, key=lambda member: (-len(left.intersection(held[member])), member))
    quotas = {member: low + (rank < more) for rank, member in enumerate(order)}
    given: dict[str, list[int]] = {}
    for member in order:
        given[member] = sorted(left.intersection(held[member]))[: quotas[member]]
        left.difference_update(given[member])
    free = sorted(left)
    for member in order:
        missing = quotas[member] - len(given[member])
        given[member] += free[:missing]
        del free[:missing]
    return {member: frozenset(numbers) for member, numbers in given.items()}
