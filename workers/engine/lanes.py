"""Requests that wait for a slot: interactive before batch, first come first served in each. Pure.

Batch makes room: where an interactive request waits for slots or KV that batch requests have, those give theirs up and
wait again with what they generated. They lose no token, only the work of computing their KV anew; so the ones that lose
least go first, none goes if that wouldn't help, and none more than `MOST_YIELDS` times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from workers.engine.generation import Generation
from workers.engine.prefix_cache import Chain
from workers.engine.protocol import Key, Sequence

MOST_YIELDS = 3
"""so that whatever comes, a batch request is computed at most four times"""


@dataclass(slots=True, eq=False)
class Group:
    """A request that waits or runs, with its open choices."""

    sequence: Sequence
    generations: list[Generation]
    chain: Chain
    """its prompt, as the prefix cache sees it"""
    turn: int = 0
    """when it came, among all"""
    prefilled: int = 0
    """prompt tokens whose KV is there"""
    cached: int = 0
    """of these, what the prefix cache gave, until its count is fixed"""
    counted: bool = False
    """whether it is: the prompt was computed to its end once, or a former engine had generated something"""
    yields: int = 0
    """how often it made room"""

    @property
    def waits_for_prompt(self) -> bool:
        return self.prefilled < len(self.sequence.prompt)

    def most_found(self, block_tokens: int) -> int:
        """Blocks of its prompt that needn't be computed if the cache has them; its last token always is, and all are
        whose likelihood is asked for: the cache doesn't keep that."""
        if any(generation.scores_prompt for generation in self.generations):
            return 0
        return (len(self.sequence.prompt) - 1) // block_tokens

    @property
    def kv_tokens(self) -> int:
        """What it may need in all."""
        return len(self.generations) * self.kv_of_choice

    @property
    def kv_of_choice(self) -> int:
        return len(self.sequence.prompt) + self.sequence.max_tokens

    @property
    def computed(self) -> int:
        """Tokens that must be computed again once it gave its slots up."""
        return max(self.prefilled, sum(generation.computed for generation in self.generations))

    def leave(self) -> list[int]:
        """Give its slots up; which they were."""
        slots = [generation.slot for generation in self.generations]
        self.prefilled = 0
        for generation in self.generations:
            generation.slot, generation.computed = -1, 0
        return slots


@dataclass(slots=True)
class Lanes:
    """The two queues."""

    _interactive: deque[Group] = field(default_factory=deque)
    _batch: deque[Group] = field(default_factory=deque)
    _turns: int = 0

    def __bool__(self) -> bool:
        return bool(self._interactive or self._batch)

    def __iter__(self) -> Iterator[Group]:
        yield from self._interactive
        yield from self._batch

    def add(self, group: Group) -> None:
        """Queue a new request."""
        self._turns += 1
        group.turn = self._turns
        self._lane(group).append(group)

    def put_back(self, groups: Iterable[Group]) -> None:
        """Queue again what came before."""
        for group in groups:
            lane = self._lane(group)
            at = next((at for at, other in enumerate(lane) if other.turn > group.turn), len(lane))
            lane.insert(at, group)

    def first(self) -> Group | None:
        """Whose turn it is."""
        return next(iter(self), None)

    def take(self, group: Group) -> None:
        """It got its slots."""
        self._lane(group).remove(group)

    def forget(self, gone: Callable[[Key], bool]) -> None:
        for lane in (self._interactive, self._batch):
            kept = [group for group in lane if not gone(group.sequence.key)]
            if len(kept) < len(lane):
                lane.clear()
                lane.extend(kept)

    def _lane(self, group: Group) -> deque[Group]:
        return self._batch if group.sequence.batch else self._interactive


def makes_room(head: Group, running: Iterable[Group], fits: Callable[[list[Group]], bool]) -> list[Group]:
    """The batch requests that give their slots up for `head`; none if it wouldn't fit even then.

    `fits`: whether it does once these are gone.
    """
    if head.sequence.batch:
        return []
    yielding = [group for group in running if group.sequence.batch and group.yields < MOST_YIELDS]
    yielding.sort(key=lambda group: (group.computed, -group.turn))
    for count in range(1, len(yielding) + 1):
        if fits(yielding[:count]):
            return yielding[:count]
    return []
