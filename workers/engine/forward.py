"""What runs a model, whichever kernels it has: the slots' keys and values, and the rows of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.architecture import Architecture
from workers.engine.block_store import BlockStore
from workers.engine.scheduler import Work

Logits = npt.NDArray[np.float32]
KV_BLOCK = 16
"""positions whose keys may lie among one another; a copy of a slot's beginning takes whole blocks"""


class Runner(ABC):
    """Holds the weights, and the keys and values of every slot.

    The logits of a position depend on the tokens of its own sequence alone: not on what runs beside it, nor, but for
    `Work.stepwise` in the plain runner, on how the sequence was cut into steps (R8).
    """

    def __init__(self, architecture: Architecture, kv: torch.Tensor) -> None:
        """`kv`: [layers, 2, slots, key heads, positions, head size]."""
        self._shape = architecture
        self._kv = kv
        self.keep_blocks(0, KV_BLOCK)

    def keep_blocks(self, blocks: int, tokens: int) -> None:
        """Make room for so many blocks of the prefix cache, of so many tokens (whole blocks of KV_BLOCK); what was kept
        is lost."""
        self._blocks = BlockStore(self._kv, blocks, tokens)

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """The numerics class: what the numbers depend on, and nothing else."""

    @property
    def vocab_size(self) -> int:
        return self._shape.vocab_size

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> Logits:
        """Compute a step. Logits of the last `rows` positions of each item, in order: [all their rows, vocab]."""
        self._blocks.load(work)
        logits = self._compute(work, _drawing(work))
        for item in work:
            end = -(-(item.start + len(item.ids)) // KV_BLOCK) * KV_BLOCK
            for copy in item.copies:
                self._kv[:, :, copy, :, :end] = self._kv[:, :, item.slot, :, :end]
        self._blocks.save(work)
        return logits.numpy()

    @torch.inference_mode()
    def score(self, ids: Sequence[int], start: int = 0) -> Logits:
        """Logits after each of these tokens, which go on from position `start` of slot 0: [tokens, vocab]."""
        piece = Work(slot=0, start=start, ids=tuple(ids), stepwise=False)
        return self._compute([piece], list(range(len(ids)))).numpy()

    @abstractmethod
    def _compute(self, work: Sequence[Work], drawing: Sequence[int]) -> torch.Tensor:
        """Bring the slots up to date. Logits of the rows `drawing`: [drawing, vocab]; a row is a token of `work`."""


def _drawing(work: Sequence[Work]) -> list[int]:
    """The rows whose logits are asked for."""
    rows, end = list[int](), 0
    for item in work:
        end += len(item.ids)
        rows += range(end - item.rows, end)
    return rows
