"""What a step's work is for the kernels: passes over rows, each row one token of one slot. Pure.

A prompt's piece is computed as one sequence of queries. A token that was generated is a sequence of its own, of one
query, whatever comes beside it: so several of one slot (a resumed answer, a guess that is checked) go through one pass,
since every layer writes all keys before any query reads, and each row sees no more than its own past.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from workers.engine.gpu.pages import PAGE_TOKENS, PageCopy, Pages, Table
from workers.engine.scheduler import Work

Ints = npt.NDArray[np.int32]


class Item(msgspec.Struct, frozen=True, array_like=True):
    """`Work` without the choices: what every rank has to know."""

    slot: int
    start: int
    ids: tuple[int, ...]
    stepwise: bool
    copies: tuple[int, ...] = ()
    rows: int = 0
    """of how many positions, the last ones, logits are asked for"""
    loads: tuple[int, ...] = ()
    """blocks of the prefix cache that hold what comes right before `start`"""
    save: int | None = None
    """block of the prefix cache that gets these positions, once they are computed"""

    @classmethod
    def of(cls, work: Work) -> Item:
        return cls(work.slot, work.start, work.ids, work.stepwise, work.copies, work.rows, work.loads, work.save)

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Rows that are computed together."""

    decode: bool
    """every row is a sequence of its own"""
    ids: Ints
    """[rows]"""
    positions: Ints
    """[rows]"""
    cells: Ints
    """[rows] where a row's key and value go: page · PAGE_TOKENS + offset"""
    begins: Ints
    """[sequences + 1] the first row of each sequence, and the number of rows"""
    lengths: Ints
    """[sequences] positions that a sequence's last row sees, itself included"""
    table: Table
    """[sequences, pages] as `Pages.table`"""
    drawing: Ints
    """rows whose logits are wanted"""
    items: Ints
    """for each of `drawing`, the number of its item in the step"""


def place(items: Sequence[Item], pages: Pages) -> None:
    """Give each item the pages that it reads and writes. A slot begins anew at 0, or with the blocks that fill it."""
    for item in items:
        if item.start == len(item.loads) * pages.block_tokens:
            pages.release((item.slot,))
        pages.load(item.slot, item.loads)
        pages.reach(item.slot, item.end)


def save(items: Sequence[Item], pages: Pages) -> None:
    """After the step: keep what it computed for the prefix cache."""
    for item in items:
        if item.save is not None:
            pages.save(item.save, item.slot, item.start)


def copies(items: Sequence[Item], pages: Pages) -> Iterator[PageCopy]:
    """After the step: let the other choices of a prompt have it too."""
    for item in items:
        for target in item.copies:
            if (copy := pages.copy(item.slot, target, item.end)) is not None:
                yield copy


def passes(items: Sequence[Item], pages: Pages, decode_rows: int) -> Iterator[Pass]:
    """The passes of a step, in order: one for the prompts' pieces, then tokens, at most `decode_rows` at once."""
    pieces = [(number, item) for number, item in enumerate(items) if not item.stepwise]
    if pieces:
        yield _pieces(pieces, pages)
    rows = _token_rows(items)
    for begin in range(0, rows.shape[1], decode_rows):
        yield _tokens(rows[:, begin : begin + decode_rows], pages)


def _pieces(pieces: Sequence[tuple[int, Item]], pages: Pages) -> Pass:
    counts = [len(item.ids) for _, item in pieces]
    slots = np.array([item.slot for _, item in pieces], np.int32)
    positions = np.concatenate([np.arange(item.start, item.end, dtype=np.int32) for _, item in pieces])
    begins = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    drawn = [
        (row, number)
        for end, (number, item) in zip(begins[1:], pieces, strict=True)
        for row in range(end - item.rows, end)
    ]
    drawing, numbers = np.array(drawn, np.int32).reshape(-1, 2).T
    return Pass(
        decode=False,
        ids=np.concatenate([np.array(item.ids, np.int32) for _, item in pieces]),
        positions=positions,
        cells=_cells(pages.table, np.repeat(slots, counts), positions),
        begins=begins,
        lengths=np.array([item.end for _, item in pieces], np.int32),
        table=pages.table[slots],
        drawing=drawing,
        items=numbers,
    )


_TOKEN, _SLOT, _POSITION, _ITEM = range(4)
"""rows of the array below; _ITEM is −1 where nothing is drawn"""


def _token_rows(items: Sequence[Item]) -> Ints:
    rows = [
        (token, item.slot, item.start + at, number if at >= len(item.ids) - item.rows else -1)
        for number, item in enumerate(items)
        if item.stepwise
        for at, token in enumerate(item.ids)
    ]
    return np.array(rows, np.int32).reshape(-1, 4).T


def _tokens(rows: Ints, pages: Pages) -> Pass:
    drawing = np.flatnonzero(rows[_ITEM] >= 0).astype(np.int32)
    return Pass(
        decode=True,
        ids=rows[_TOKEN],
        positions=rows[_POSITION],
        cells=_cells(pages.table, rows[_SLOT], rows[_POSITION]),
        begins=np.arange(rows.shape[1] + 1, dtype=np.int32),
        lengths=rows[_POSITION] + 1,
        table=pages.table[rows[_SLOT]],
        drawing=drawing,
        items=rows[_ITEM][drawing],
    )


def _cells(table: Table, slots: Ints, positions: Ints) -> Ints:
    pages, offsets = np.divmod(positions, np.int32(PAGE_TOKENS))
    return (table[slots, pages] * np.int32(PAGE_TOKENS) + offsets).astype(np.int32)
