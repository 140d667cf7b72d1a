"""Which engine has which prompts' beginnings in its cache, or will have: one lookup a link answers for all engines.

Two kinds of knowledge. What an engine reported it has, until it reports an eviction. And what was sent to it a moment
ago, which it will have but can't have reported: believed for HOPE_MS. Only an engine that reports is hoped for; one
that never did keeps no prompts.

Memory is bounded by what the engines can hold and by HOPES sends, however many different prompts come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

HOPE_MS = 10_000.0
"""Prompts wait for a few seconds at most, and engines signal twice a second: what isn't reported by then isn't there"""
HOPES = 8_192
"""Sends remembered at most: 16 engines' worth of HOPE_MS at 50 requests a second each"""
MAX_LINKS = 1_000_000
"""Of one engine: 16 million tokens in blocks of 16. A report beyond is not believed"""


class Chains:
    """Links of prefix chains, by engine; engines are numbered from 0."""

    def __init__(self) -> None:
        self._engines: dict[int, int] = {}
        """link → the engines that reported it, or are hoped to have it, as bits"""
        self._reported: dict[int, set[int]] = {}
        self._hoped: dict[int, dict[int, float]] = {}
        """engine → link → when it was sent last"""
        self._sends: deque[tuple[float, int, tuple[int, ...]]] = deque()

    def report(self, engine: int, added: Iterable[int], evicted: Iterable[int], *, full: bool) -> None:
        """An engine's changes, or with `full` all it has."""
        if not added and not evicted and not full:
            return
        known = self._reported.setdefault(engine, set())
        if full:
            self._drop(engine, known.difference(added))
        self._drop(engine, known.intersection(evicted))
        for link in added:
            if len(known) >= MAX_LINKS:
                return
            known.add(link)
            self._engines[link] = self._engines.get(link, 0) | 1 << engine

    def hope(self, engine: int, chain: Sequence[int], now_ms: float) -> None:
        """A prompt was sent to an engine."""
        self._expire(now_ms)
        if engine not in self._reported or not chain:
            return
        hoped = self._hoped.setdefault(engine, {})
        for link in chain:
            hoped[link] = now_ms
            self._engines[link] = self._engines.get(link, 0) | 1 << engine
        self._sends.append((now_ms, engine, tuple(chain)))

    def forget(self, engine: int) -> None:
        """An engine began a new life: it has nothing."""
        self._clear(engine, self._reported.pop(engine, set()).union(self._hoped.pop(engine, ())))

    def match(self, engine: int, chain: Sequence[int]) -> int:
        """How many of the chain's first links one engine has."""
        for depth, link in enumerate(chain):
            if not self._engines.get(link, 0) >> engine & 1:
                return depth
        return len(chain)

    def matches(self, chain: Sequence[int], engines: int) -> list[int]:
        """How many of the chain's first links each of the engines 0 to `engines` − 1 has."""
        found = [0] * engines
        get = self._engines.get
        have = (1 << engines) - 1
        depth = 0
        for link in chain:
            still = have & get(link, 0)
            if still != have:
                _mark(found, have ^ still, depth)
                have = still
                if not have:
                    return found
            depth += 1
        _mark(found, have, depth)
        return found

    def __len__(self) -> int:
        """Links known."""
        return len(self._engines)

    def _expire(self, now_ms: float) -> None:
        while self._sends and (now_ms - self._sends[0][0] > HOPE_MS or len(self._sends) >= HOPES):
            sent_ms, engine, chain = self._sends.popleft()
            hoped = self._hoped.get(engine, {})
            over = {link for link in chain if hoped.get(link) == sent_ms}
            for link in over:
                del hoped[link]
            self._clear(engine, over - self._reported.get(engine, set()))

    def _drop(self, engine: int, links: set[int]) -> None:
        """An engine doesn't have these any more; what was sent to it a moment ago it may get again."""
        self._reported.get(engine, set()).difference_update(links)
        self._clear(engine, links.difference(self._hoped.get(engine, ())))

    def _clear(self, engine: int, links: Iterable[int]) -> None:
        for link in links:
            left = self._engines.get(link, 0) & ~(1 << engine)
            if left:
                self._engines[link] = left
            else:
                self._engines.pop(link, None)


def _mark(found: list[int], engines: int, depth: int) -> None:
    if not depth:
        return
    while engines:
        lowest = engines & -engines
        found[lowest.bit_length() - 1] = depth
        engines ^= lowest
