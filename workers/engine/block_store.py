"""The numbers of the prefix cache's blocks: copied out of the slot that computed them, into those that need them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.engine.scheduler import Work


class BlockStore:
    """Room for so many blocks of one runner's keys and values.

    A copy costs about a hundredth of computing a block. Memory: blocks · block_tokens · layers · 2 · key heads · head
    size · bytes of a number; touched only as it fills.
    """

    def __init__(self, kv: torch.Tensor, blocks: int, block_tokens: int) -> None:
        """`kv`: the slots, [layers, 2, slots, key heads, positions, size]."""
        layers, sides, _, heads, _, size = kv.shape
        self._kv = kv
        self._blocks = kv.new_empty(blocks, layers, sides, heads, block_tokens, size)

    def load(self, work: Sequence[Work]) -> None:
        """Bring what a step's pieces continue into their slots; before anything of the step is computed."""
        for item in work:
            start = item.start - len(item.loads) * self._tokens
            for at, block in enumerate(item.loads):
                self._piece(item.slot, start + at * self._tokens).copy_(self._blocks[block])

    def save(self, work: Sequence[Work]) -> None:
        """Keep the pieces of a step that shall be kept, once they are computed."""
        for item in work:
            if item.save is not None:
                self._blocks[item.save].copy_(self._piece(item.slot, item.start))

    @property
    def _tokens(self) -> int:
        return self._blocks.shape[4]

    def _piece(self, slot: int, start: int) -> torch.Tensor:
        return self._kv[:, :, slot, :, start : start + self._tokens]
