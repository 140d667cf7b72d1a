"""An engine's key/value cache: blocks in use, and prompts' blocks that are still held, least recently used first out.

A prompt is held in pieces of PREFIX_TOKENS, each of up to 8 blocks. When room is needed a piece loses its last blocks
first, and a prompt its last pieces first: so what remains is always the beginning of a prompt, as in vLLM.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from routing.simulator.timing import BLOCK_TOKENS
from routing.simulator.trace import PREFIX_TOKENS

WHOLE = PREFIX_TOKENS // BLOCK_TOKENS
"""Blocks of a whole piece"""


class Cache:
    """Room for `blocks`. Pieces in use are pinned; the others are idle and make room for new ones."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks
        """neither in use nor idle"""
        self.changed: dict[int, bool] | None = None
        """whole pieces that came (True) and went since somebody cleared this, if somebody wants to know"""
        self._held: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._idle_blocks = 0
        self._spent = 0

    @property
    def room(self) -> int:
        """Blocks that could be had, by giving up everything idle."""
        return self.free + self._idle_blocks

    def match(self, prefix: Sequence[int]) -> int:
        """Tokens of a prompt's beginning that are held."""
        get, total = self._held.get, 0
        for piece in prefix:
            blocks = get(piece, 0)
            total += blocks
            if blocks < WHOLE:
                break
        return total * BLOCK_TOKENS

    def pin(self, pieces: Iterable[int]) -> None:
        """Put held pieces to use."""
        for piece in pieces:
            pins = self._pins.get(piece, 0)
            self._pins[piece] = pins + 1
            if not pins:
                del self._idle[piece]
                self._idle_blocks -= self._held[piece]

    def fill(self, prefix: Sequence[int], pinned: int, blocks: int) -> int:
        """The first blocks of a prompt are computed; its first `pinned` pieces are pinned already. How many are now."""
        held, pins, changed = self._held, self._pins, self.changed
        pieces = max(-(-blocks // WHOLE), pinned)
        first = max(pinned - 1, 0)
        before = [held.get(piece, 0) for piece in prefix[first:pieces]]
        for piece, had in zip(prefix[pinned:pieces], before[pinned - first :], strict=True):
            if had:
                self.pin((piece,))
            else:
                pins[piece] = pins.get(piece, 0) + 1
        left, more = blocks - first * WHOLE, 0
        for piece, had in zip(prefix[first:pieces], before, strict=True):
            full = left if left < WHOLE else WHOLE
            left -= WHOLE
            if full > had:
                more += full - had
                held[piece] = full
                if full == WHOLE and changed is not None:
                    changed[piece] = True
        self.take(more)
        return pieces

    def unpin(self, pieces: Sequence[int]) -> None:
        """Take pieces out of use: the last one is the first to go when room is needed."""
        pins, idle, held = self._pins, self._idle, self._held
        for piece in reversed(pieces):
            left = pins[piece] - 1
            if left:
                pins[piece] = left
            else:
                del pins[piece]
                idle[piece] = None
                self._idle_blocks += held[piece]

    def take(self, blocks: int) -> None:
        """Take blocks out of what is free, giving up idle pieces where there is too little. There must be `room`."""
        held = self._held
        while self.free < blocks:
            piece = next(iter(self._idle))
            had, lost = held[piece], blocks - self.free
            if had == WHOLE and piece >= 0 and self.changed is not None:
                self.changed[piece] = False
            if lost >= had:
                lost = had
                del self._idle[piece], held[piece]
            else:
                held[piece] = had - lost
            self._idle_blocks -= lost
            self.free += lost
        self.free -= blocks

    def leave(self, blocks: int) -> None:
        """Blocks whose contents nobody will ask for become idle: what was generated."""
        if blocks > 0:
            self._spent -= 1
            self._held[self._spent] = blocks
            self._idle[self._spent] = None
            self._idle_blocks += blocks
