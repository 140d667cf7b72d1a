"""Which page of the cache holds which positions of which slot. Pure: no torch, and the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.engine.errors import EngineError

PAGE_TOKENS = 256
"""what flash attention's paged kernels take: a multiple of 256"""
SCRATCH = 0
"""a page that belongs to no slot: rows that only fill a batch up write there"""
Table = npt.NDArray[np.int32]


class PagesExhausted(EngineError):
    """A slot grew past what there are pages for: more was admitted than `kv_tokens` allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """The contents of a page that another page has to get."""

    source: int
    target: int


def pages_of(tokens: int) -> int:
    """Pages that so many tokens of one sequence fill, the last one in part."""
    return -(-tokens // PAGE_TOKENS)


def kv_tokens(pages: int, slots: int, context_tokens: int) -> int:
    """How many tokens may be promised to `slots` sequences so that `pages` pages (one is scratch) always suffice.

    What the prefix cache may hold comes on top.

    A sequence of t tokens takes at most (t + PAGE_TOKENS − 1) / PAGE_TOKENS pages: each slot may waste all but one
    token of a page. With a whole context's pages for every slot nothing can run out.
    """
    usable = pages - 1
    if usable >= slots * pages_of(context_tokens):
        return slots * context_tokens
    return max(0, usable * PAGE_TOKENS - slots * (PAGE_TOKENS - 1))


class Pages:
    """Gives slots their pages as they grow.

    Full pages, which nobody writes, are shared: by the slots of one prompt, and with the prefix cache, whose blocks are
    whole pages, so that to keep and to find one copies nothing.
    """

    def __init__(self, pages: int, *, slots: int, context_tokens: int, block_tokens: int = PAGE_TOKENS) -> None:
        """`block_tokens`: of the prefix cache's blocks; a multiple of PAGE_TOKENS."""
        self.block_tokens = block_tokens
        self._blocks: dict[int, list[int]] = {}
        self._free = list(range(pages - 1, SCRATCH, -1))
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._holders = [0] * pages
        self.table: Table = np.full((slots, pages_of(context_tokens)), SCRATCH, np.int32)
        """[slot, n-th page of its positions] → page; scratch where it has none"""

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def held(self, slot: int) -> tuple[int, ...]:
        """A slot's pages, in order of positions."""
        return tuple(self._held[slot])

    def reach(self, slot: int, tokens: int) -> None:
        """Give a slot the pages for its first `tokens` positions. PagesExhausted."""
        while len(self._held[slot]) < pages_of(tokens):
            if not self._free:
                raise PagesExhausted("the cache has no page left; this is a fault of the engine, not of a request")
            self._append(slot, self._free.pop())

    def release(self, slots: Iterable[int]) -> None:
        """Take back what these slots hold. A slot that holds nothing may be named."""
        for slot in slots:
            self._drop(self._held[slot])
            self._held[slot].clear()
            self.table[slot] = SCRATCH

    def copy(self, source: int, target: int, tokens: int) -> PageCopy | None:
        """Let `target` begin with the first `tokens` positions of `source`; what has to be copied for that.

        Full pages are shared; one filled in part is the target's own.
        """
        self.release((target,))
        whole = tokens // PAGE_TOKENS
        for page in self._held[source][:whole]:
            self._append(target, page)
        if whole * PAGE_TOKENS == tokens:
            return None
        self.reach(target, tokens)
        return PageCopy(source=self._held[source][whole], target=self._held[target][whole])

    def load(self, slot: int, blocks: Iterable[int]) -> None:
        """Let a slot go on with what these blocks hold."""
        for block in blocks:
            for page in self._blocks[block]:
                self._append(slot, page)

    def save(self, block: int, slot: int, start: int) -> None:
        """Let a block hold a slot's positions from `start` on, instead of what it held."""
        self._drop(self._blocks.pop(block, []))
        kept = self._held[slot][start // PAGE_TOKENS : (start + self.block_tokens) // PAGE_TOKENS]
        for page in kept:
            self._holders[page] += 1
        self._blocks[block] = kept

    def _drop(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _append(self, slot: int, page: int) -> None:
        self.table[slot, len(self._held[slot])] = page
        self._held[slot].append(page)
        self._holders[page] += 1
