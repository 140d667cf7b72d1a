"""Which links of prefix chains an engine's cache has, as its signals tell it. Pure."""

from __future__ import annotations

import msgspec

from wire.messages import EngineSignal
from workers.engine.protocol import Prefixes

FULL_EVERY = 40
"""signals, 20 s: one in between that was lost is made good by then"""
MOST_LINKS = 32_768
"""told at most, about 700 kB in a full set: what comes beyond stays unknown"""


class PrefixReport:
    """Changes since the last signal, and the whole set in the first one and now and then."""

    def __init__(self) -> None:
        self._keeps = False
        self._known: dict[int, None] = {}
        self._added: dict[int, None] = {}
        self._evicted: dict[int, None] = {}
        self._since_full = FULL_EVERY

    def changed(self, prefixes: Prefixes) -> None:
        """The engine said so."""
        for link in prefixes.evicted:
            if link in self._known:
                del self._known[link]
                self._added.pop(link, None)
                self._evicted[link] = None
        for link in prefixes.added:
            if link not in self._known and len(self._known) < MOST_LINKS:
                self._known[link] = None
                self._evicted.pop(link, None)
                self._added[link] = None

    def began(self, *, keeps: bool) -> None:
        """An engine is ready, and what a former one had is lost. `keeps`: whether it keeps prompts at all; one that
        doesn't never says so, and is never hoped to have any."""
        self._keeps = keeps
        self._known.clear()
        self._since_full = FULL_EVERY

    def signal(self, base: EngineSignal) -> EngineSignal:
        """`base` with what changed since the last call, or with everything."""
        if not self._keeps:
            return base
        self._since_full += 1
        added, evicted = tuple(self._added), tuple(self._evicted)
        full = self._since_full > FULL_EVERY
        if full:
            added, evicted, self._since_full = tuple(self._known), (), 0
        self._added.clear()
        self._evicted.clear()
        return msgspec.structs.replace(base, prefixes_added=added, prefixes_evicted=evicted, prefixes_full=full)
