"""Runs a step's work: pages, passes, logits; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from workers.engine.gpu.device import Runs
from workers.engine.gpu.model import Model
from workers.engine.gpu.pages import Pages
from workers.engine.gpu.passes import Item, copies, passes, place, save
from workers.engine.scheduler import Work

Logits = npt.NDArray[np.float32]


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One step, as every rank is told."""

    ended: tuple[int, ...]
    """slots whose sequences have ended since the last step"""
    items: tuple[Item, ...]


class Rank:
    """One rank's share of every step. All ranks are told the same and keep the same pages, so nothing else is said."""

    def __init__(self, model: Model, runs: Runs, pages: Pages) -> None:
        self._model = model
        self._runs = runs
        self.pages = pages

    @torch.inference_mode()
    def obey(self, order: Order) -> torch.Tensor:
        """Compute a step. Logits of the rows that are asked for, in order of items: float32, on the device."""
        self.pages.release(order.ended)
        place(order.items, self.pages)
        parts: list[torch.Tensor] = []
        numbers: list[int] = []
        for work in passes(order.items, self.pages, self._runs.decode_rows):
            logits = self._runs.run(work)
            if len(work.items):
                parts.append(logits)
                numbers += work.items.tolist()
        for copy in copies(order.items, self.pages):
            self._model.copy_page(copy.source, copy.target)
        save(order.items, self.pages)
        return _in_order(parts, numbers)


class PagedRunner:
    """`workers.engine.torch_engine.Runner` over pages, for rank 0."""

    def __init__(
        self, rank: Rank, *, fingerprint: str, vocab_size: int, tell: Callable[[Order], None] | None = None
    ) -> None:
        """`tell`: how the other ranks hear of a step, if there are any."""
        self.fingerprint = fingerprint
        self.vocab_size = vocab_size
        self._rank = rank
        self._tell = tell
        self._ended: list[int] = []

    def keep_blocks(self, blocks: int, tokens: int) -> None:
        """Nothing to make room for: blocks are pages, which were counted when the pages were made."""

    def release(self, slots: Iterable[int]) -> None:
        """The sequences of these slots have ended: their pages are free in the next step."""
        self._ended += slots

    def run(self, work: Sequence[Work]) -> Logits:
        """Compute a step. Logits of the last `rows` positions of each item, in order: [all their rows, vocab]."""
        order = Order(tuple(self._ended), tuple(map(Item.of, work)))
        self._ended.clear()
        if self._tell is not None:
            self._tell(order)
        logits: Logits = self._rank.obey(order).cpu().numpy()
        return logits


def _in_order(parts: Sequence[torch.Tensor], numbers: Sequence[int]) -> torch.Tensor:
    """Rows by the number of their item; of one item, in order of positions."""
    if not parts:
        return torch.empty(0, 0)
    order = torch.from_numpy(np.argsort(numbers, kind="stable"))
    return torch.cat(list(parts)).index_select(0, order.to(parts[0].device))
