"""A plan's candidates against one another, in C++ (`routing.native`): about ten times as fast as by numpy's arrays.

`routing.policy` has the same by arrays, for machines without a compiler: what one finds the other finds, but for the
last bits of a loss.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from routing.board import Board, Columns, Mask
from routing.lengths import BUCKET_TOKENS
from routing.loss import (
    CALM,
    DECODE_PRICE,
    LEAST_MARGIN,
    LOGISTIC,
    PREFILL_PRICE,
    TBT_DOUBT,
    TTFT_DOUBT,
    WAIT_PRICE,
    WAITING_STALL,
    Floats,
)
from routing.native.weigh import Ask, Weigh, function, pointer
from routing.penalties import HALF_LIFE_MS
from routing.row import TRUST_MS

if TYPE_CHECKING:
    from routing.policy import Plan
    from routing.query import Query

CLEARLY = 1.25
"""How many times its share of the recent requests an engine may get for nothing: one that holds the right prefixes, or
the short prompts of a burst, may well get more than others"""
NOISE = 2.0
"""And so many standard errors of a random count"""
EXCESS_PRICE = 1.0
"""Requests lost that each further share costs: twice what the snapshot allows is as bad as losing this request"""
TIE = 1e-3
"""Losses that differ by less are equal: a thousandth of a request is below what the estimates mean"""
TRIED = 16
"""Engines at which it is weighed what others would lose. An engine with the least sum is rarely far behind in what the
request itself would lose; it would be among the other 48 of 64 in fewer than one choice of a hundred"""


class Weighed(NamedTuple):
    """A plan's candidates against one another."""

    tied: list[int]
    """those with the least loss, or as good as that"""
    loss: float
    """of the best"""
    blocks: Sequence[int]
    """by candidate: of the prompt's beginning, thought to be cached"""
    most_blocks: int
    waits_ms: Floats
    """by candidate, if it is able: until the prompt would be begun"""
    busy: float
    """the share of the able ones where it would have to wait, or that make long steps"""


class Scales:
    """`Policy._weighed` in C++: about ten times as fast."""

    def __init__(self, board: Board, weigh: Weigh) -> None:
        self._board, self._weigh = board, weigh
        self._ask = Ask(
            trust_ms=TRUST_MS,
            prefill_price=PREFILL_PRICE,
            decode_price=DECODE_PRICE,
            wait_price=WAIT_PRICE,
            calm=CALM,
            ttft_doubt=TTFT_DOUBT,
            tbt_doubt=TBT_DOUBT,
            least_margin=LEAST_MARGIN,
            stall=WAITING_STALL,
            logistic=LOGISTIC,
            bucket_tokens=BUCKET_TOKENS,
            half_life_ms=HALF_LIFE_MS,
            clearly=CLEARLY,
            noise=NOISE,
            excess_price=EXCESS_PRICE,
            tie=TIE,
            tried=TRIED,
            ttft_ms=board.targets.ttft_ms,
            tbt_ms=board.targets.tbt_ms,
            block_tokens=board.block_tokens,
        )
        self._reference = ctypes.byref(self._ask)
        self._columns: Columns | None = None
        self._table: Floats | None = None
        self._plan: Plan | None = None
        self._places = self._tied = self._blocks = np.zeros(0, dtype=np.int64)
        self._able, self._shares, self._waits_ms = np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0)
        self._rows: list[int] | None = None
        """the candidates' rows, where these aren't the first ones in order"""

    @classmethod
    def made(cls, board: Board) -> Scales | None:
        """None on a machine where the library can't be had."""
        weigh = function()
        return None if weigh is None else cls(board, weigh)

    def weighed(self, query: Query, plan: Plan, able: Mask, weights: Floats, relax: float, now_ms: float) -> Weighed:
        """As `Policy._weighed`, where every engine has been heard."""
        board, ask = self._board, self._ask
        if plan is not self._plan:
            self._hold(plan)
        if board.columns is not self._columns:
            self._columns = columns = board.columns
            ask.stride = columns.numbers.shape[1]
            ask.numbers, ask.slacks, ask.weights = map(pointer, columns)
            self._blocks = np.zeros(ask.stride, dtype=np.int64)
            ask.blocks = pointer(self._blocks)
        if board.lengths.table is not self._table:
            self._table = board.lengths.table
            ask.table, ask.buckets = pointer(self._table), len(self._table)
        blocks = board.chains.matches(query.prefix_chain, board.size)
        self._blocks[: len(blocks)] = blocks
        self._able[:] = able
        self._shares[:] = weights
        ask.now_ms, ask.prompt_tokens, ask.waited_ms = now_ms, query.prompt_tokens, query.waited_ms
        ask.mean_tokens, ask.sent_scale, ask.binding = board.lengths.mean_tokens, board.sent_scale(now_ms), 1 - relax
        ask.blamed, ask.far = board.blamed, board.far
        self._weigh(self._reference)
        rows = self._rows
        return Weighed(
            tied=self._tied[: ask.ties].tolist(),
            loss=ask.loss,
            blocks=blocks if rows is None else [blocks[row] for row in rows],
            most_blocks=ask.most_blocks,
            waits_ms=self._waits_ms,
            busy=ask.busy,
        )

    def _hold(self, plan: Plan) -> None:
        """Room for a plan's candidates."""
        ask, count = self._ask, len(plan.candidates)
        self._plan, ask.count = plan, count
        self._places, self._tied = plan.places.astype(np.int64), np.zeros(count, dtype=np.int64)
        self._rows = None if self._places.tolist() == list(range(count)) else self._places.tolist()
        self._able, self._shares, self._waits_ms = np.zeros(count, dtype=bool), np.zeros(count), np.zeros(count)
        ask.places, ask.tied, ask.able = pointer(self._places), pointer(self._tied), pointer(self._able)
        ask.shares, ask.waits_ms = pointer(self._shares), pointer(self._waits_ms)
