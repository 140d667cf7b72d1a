"""What one ingress knows of a model's engines: rows of numbers, so that a choice weighs all of them at once.

A row (`routing.row`) starts from an engine's latest signal, which is up to a second old. What was sent since, by this
ingress or by another of its region, is added, and time is let pass over it. It is keyed by the engine's primary shard;
a signal of another incarnation begins it anew.

What isn't known is not taken for zero: an engine that never spoke is taken for the mean of those that did.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from routing.chains import Chains
from routing.lengths import Lengths
from routing.loss import WAITING_STALL, Crowd, Floats, State
from routing.penalties import HALF_LIFE_MS, Outcome, punish
from routing.row import TRUST_MS, Candidate, Name, Row, Send, Shard
from routing.schedule import TARGETS, Targets
from routing.slack import STANDINS
from wire.messages import Dispatch, EngineSignal

__all__ = ["Board", "Candidate", "Mask", "Name", "Rows", "Shard"]

TRAVEL_MS = 20.0
"""A send this much older than a signal may still be missing from it"""
MEMORY_MS = 10_000.0
"""How long a send counts towards an engine's share of the traffic"""
REBASE = 30.0
"""Memories after which counts of sends are scaled down, so that no exponential overflows"""

Rows = NDArray[np.intp] | slice
Mask = NDArray[np.bool_]
NOWHERE: Mapping[str, float] = {}

# the columns, in the order of Row.numbers, and two of the board's own
(
    _AT,
    _BACKLOG,
    _SHARE,
    _DECODE,
    _DECODE_TOKEN,
    _FIXED,
    _TOKEN,
    _SQUARE,
    _PIECE,
    _PIECE_MS,
    _GAINED,
    _RESTED,
    _WAITING,
    _DECODING,
    _SLOTS,
    _OWN,
    _ROOM,
    _PENALTY,
    _PENALTY_AT,
    _TRIP,
    _SENT,
    _COLUMNS,
) = range(22)


class Columns(NamedTuple):
    """What choices are made from, in C order; rows that nobody has yet are zeros."""

    numbers: Floats
    """[columns, rows]"""
    slacks: Floats
    """[rows, STANDINS]"""
    weights: Floats
    """[rows, STANDINS + 1]"""


class Board:
    """Engines of one model. `now_ms` is wall time throughout, as in signals."""

    def __init__(
        self,
        *,
        targets: Targets = TARGETS,
        block_tokens: int = 64,
        trips_ms: Mapping[str, float] = NOWHERE,
        travel_ms: float = TRAVEL_MS,
    ) -> None:
        """`block_tokens`: what a link of a prefix chain stands for. `trips_ms`: round trips, by region."""
        self.targets = targets
        self.block_tokens = block_tokens
        self.lengths = Lengths()
        self.chains = Chains()
        self.signals = 0
        """heard so far: who is alive changes with these alone"""
        self.blamed = False
        """whether any attempt ever failed: most ingresses' didn't lately, and then there is no risk to compute"""
        self._trips_ms = trips_ms
        self._travel_ms = travel_ms
        self._rows: list[Row] = []
        self._places: dict[Shard, int] = {}
        self._primaries: dict[str, Shard] = {}
        """by engine"""
        self._open: dict[Name, tuple[int, str | None, int]] = {}
        """unended attempts of this ingress: row, the incarnation that it was sent to, and the prompt's tokens"""
        self.columns = Columns(np.zeros((_COLUMNS, 8)), np.zeros((8, STANDINS)), np.zeros((8, STANDINS + 1)))
        """replaced when there is no room for one more row"""
        self._said_ms: Floats = np.full(8, -np.inf)
        """when the engine's latest signal was measured; ∞ if that said that it isn't ready"""
        self._unheard = 0
        """rows of engines that never spoke"""
        self._sent_ms = 0.0
        """`_SENT` counts a send of this time as 1, a later one as more"""

    # ------------------------------------------------------------ what is told

    def heard(self, signal: EngineSignal) -> None:
        """An engine's signal: newer than what was heard of it before, or of another life."""
        self.signals += 1
        shard = (signal.fleet, signal.shards[0]) if signal.shards else None
        self._retire(signal, shard)
        if shard is None:
            return
        place = self.row(shard)
        row = self._rows[place]
        if row.signal is not None and row.life != signal.incarnation:
            self.chains.forget(place)
            row.penalty = type(row.penalty)()
        self.chains.report(place, signal.prefixes_added, signal.prefixes_evicted, full=signal.prefixes_full)
        self._unheard -= self._said_ms[place] == -np.inf
        self._said_ms[place] = signal.at_ms if signal.state == "ready" else np.inf
        row.restart(signal, self._travel_ms)
        self.columns.slacks[place, : len(row.slacks_ms)] = row.slacks_ms
        self._write(place)

    def sent(self, name: Name, shard: Shard, prompt_tokens: int, chain: Sequence[int], now_ms: float) -> None:
        """This ingress sent an attempt. Sent again it is where it went last."""
        self.ended(name)
        place = self.row(shard)
        row = self._rows[place]
        self._open[name] = place, row.life, prompt_tokens
        row.own += 1
        self._expect(place, name, prompt_tokens, chain, now_ms)

    def told(self, dispatches: Iterable[Dispatch], at_ms: float) -> None:
        """Another ingress of the region sent these."""
        for one in dispatches:
            place = self.row((one.fleet, one.shard))
            self._expect(place, None, one.prompt_tokens_estimate, one.prefix_chain, at_ms)

    def ended(self, name: Name, outcome: Outcome | None = None, now_ms: float = 0.0) -> None:
        """An attempt of this ingress is over; the second time, or for one that was never sent, nothing happens.

        What an earlier life of an engine did wrong is not held against the present one.
        """
        if name not in self._open:
            return
        place, life, prompt_tokens = self._open.pop(name)
        row = self._rows[place]
        row.own -= 1
        row.leave(name, prompt_tokens, self.lengths.mean_tokens, answered=outcome == "answered")
        if outcome is not None and life == row.life:
            row.penalty = punish(row.penalty, outcome, now_ms)
            self.blamed = self.blamed or row.penalty.value > 0
        self._write(place)

    # ------------------------------------------------------------ what is known

    def row(self, shard: Shard) -> int:
        """The row of a shard, made if it is new."""
        place = self._places.get(shard)
        if place is None:
            place = self._places[shard] = len(self._rows)
            self._rows.append(Row(shard, self.targets.tbt_ms))
            self._grow(place)
        return place

    def rows(self, shards: Iterable[Shard]) -> Rows:
        """Rows of shards; a slice where they follow one another, which is quicker to read."""
        places = list(map(self.row, shards))
        if places and places == list(range(places[0], places[0] + len(places))):
            return slice(places[0], places[-1] + 1)
        return np.array(places, dtype=np.intp)

    @property
    def size(self) -> int:
        """Rows there are."""
        return len(self._rows)

    def open_at(self, shard: Shard) -> int:
        """This ingress's attempts at a shard that haven't ended; never negative, since they are members of a set."""
        place = self._places.get(shard)
        return 0 if place is None else self._rows[place].own

    def held(self, rows: Rows) -> Floats:
        """Requests at each engine, waiting or decoding; at least this ingress's own."""
        numbers = self._seen(rows)
        held: Floats = np.maximum(numbers[_WAITING] + numbers[_DECODING], numbers[_OWN])
        return held

    def lately(self, rows: Rows, now_ms: float) -> Floats:
        """Requests sent to each engine lately: an old one counts less, by e every MEMORY_MS."""
        sent: Floats = self.columns.numbers[_SENT, rows] * self.sent_scale(now_ms)
        return sent

    def sent_scale(self, now_ms: float) -> float:
        """What a count of sends has to be multiplied by, to be one of now."""
        return math.exp((self._sent_ms - now_ms) / MEMORY_MS)

    @property
    def far(self) -> bool:
        """Whether any engine may be in another region."""
        return bool(self._trips_ms)

    def risk(self, rows: Rows, now_ms: float) -> Floats:
        """The chance that an attempt fails at each engine, by how this ingress's last ones there ended: 1 − 2^−penalty.

        What is left of a penalty is `routing.penalties.penalty_at`.
        """
        age_ms = np.maximum(now_ms - self.columns.numbers[_PENALTY_AT, rows], 0.0)
        risk: Floats = 1 - np.exp2(-self.columns.numbers[_PENALTY, rows] * np.exp2(-age_ms / HALF_LIFE_MS))
        return risk

    def takes(self, rows: Rows, tokens: float) -> Mask:
        """Which engines take so many tokens of prompt and answer together; where that isn't known, it is enough."""
        takes: Mask = self.columns.numbers[_ROOM, rows] >= tokens
        return takes

    def trips_ms(self, rows: Rows) -> Floats | float:
        """Round trip to each engine's region."""
        if not self._trips_ms:
            return 0.0
        trips: Floats = self.columns.numbers[_TRIP, rows]
        return trips

    def speaks(self, rows: Rows) -> Mask:
        """Whose engine has been heard."""
        speaks: Mask = self._said_ms[rows] > -np.inf
        return speaks

    def offers(self, rows: Rows, features: frozenset[str]) -> Mask:
        """Whose engine has all the features; one that says nothing of them has them all."""
        return np.array([self._rows[place].offers(features) for place in np.arange(self.size)[rows]], dtype=bool)

    def living(self, rows: Rows, silent_ms: float) -> Mask:
        """Whose engine is ready as far as is known, and isn't silent."""
        alive: Mask = (self._said_ms[rows] < np.inf) & ~self.silent(rows, silent_ms)
        return alive

    def silent(self, rows: Rows, silent_ms: float) -> Mask:
        """Whose engine was ready, and fell silent while others of these were heard.

        Silence is judged against the latest signal, not the clock: when all are silent, it's the log that is.
        """
        said_ms = self._said_ms[rows]
        latest_ms = said_ms.max(initial=-np.inf, where=said_ms < np.inf)
        silent: Mask = (said_ms > -np.inf) & (said_ms < latest_ms - silent_ms)
        return silent

    def state(self, rows: Rows, now_ms: float) -> State:
        """The engines as they are taken to be now."""
        numbers = self._seen(rows)
        decode_ms, decoding = numbers[_DECODE], numbers[_DECODING]
        passed_ms = np.minimum(np.maximum(now_ms - numbers[_AT], 0.0), TRUST_MS)
        stalled_ms = np.minimum(passed_ms * numbers[_SHARE], numbers[_BACKLOG])
        over = numbers[_WAITING] + decoding - numbers[_SLOTS] + 1
        full = over.max() > 0
        return State(
            backlog_ms=numbers[_BACKLOG] - stalled_ms,
            slot_ms=np.maximum(over, 0.0) * (decode_ms / numbers[_SLOTS]) * self.lengths.mean_tokens if full else 0.0,
            decode_ms=decode_ms,
            decode_token_ms=numbers[_DECODE_TOKEN],
            fixed_ms=numbers[_FIXED],
            token_ms=numbers[_TOKEN],
            square_ms=numbers[_SQUARE],
            piece_tokens=numbers[_PIECE],
            piece_ms=numbers[_PIECE_MS],
            decodes=decoding > 0,
            gained_ms=numbers[_GAINED] + (passed_ms - stalled_ms) * (self.targets.tbt_ms / decode_ms) - passed_ms,
            rested_ms=numbers[_RESTED],
        )

    def crowd(self, places: NDArray[np.intp], backlog_ms: Floats, gained_ms: Floats, rested_ms: Floats) -> Crowd:
        """Those that are at engines now; the times are of their `state`."""
        behind_ms = np.empty((len(places), STANDINS + 1))
        behind_ms[:, :STANDINS] = (backlog_ms - gained_ms)[:, None] - self.columns.slacks[places]
        behind_ms[:, STANDINS] = WAITING_STALL * backlog_ms - rested_ms
        return Crowd(behind_ms, self.columns.weights[places])

    # ------------------------------------------------------------ rows

    def _seen(self, rows: Rows) -> Floats:
        """The rows' numbers; for engines that never spoke the mean of those that did."""
        numbers: Floats = self.columns.numbers[:, rows]
        if not self._unheard:
            return numbers
        heard = self.speaks(rows)
        if not heard.all() and heard.any():
            numbers = numbers.copy()
            numbers[: _SLOTS + 1, ~heard] = numbers[: _SLOTS + 1, heard].mean(axis=1, keepdims=True)
        return numbers

    def _expect(self, place: int, name: Name | None, prompt_tokens: int, chain: Sequence[int], now_ms: float) -> None:
        if prompt_tokens > self._rows[place].room_tokens:
            prompt_tokens = 0  # it will be refused, and nothing of it computed
        cached = min(self.chains.match(place, chain) * self.block_tokens, max(prompt_tokens - 1, 0))
        self.chains.hope(place, chain, now_ms)
        if now_ms - self._sent_ms > REBASE * MEMORY_MS:
            self.columns.numbers[_SENT] *= math.exp((self._sent_ms - now_ms) / MEMORY_MS)
            self._sent_ms = now_ms
        self.columns.numbers[_SENT, place] += math.exp((now_ms - self._sent_ms) / MEMORY_MS)
        self._rows[place].expect(Send(name, now_ms, prompt_tokens - cached, prompt_tokens), self._travel_ms)
        self._write(place)

    def _write(self, place: int) -> None:
        row = self._rows[place]
        self.columns.numbers[:_TRIP, place] = row.numbers()
        self.columns.weights[place] = row.weights()

    def _retire(self, signal: EngineSignal, shard: Shard | None) -> None:
        """An engine has another primary now, or none: its former row is nobody's, unless another engine took it."""
        former = self._primaries.pop(signal.engine, None)
        if shard is not None:
            self._primaries[signal.engine] = shard
        if former is not None and former != shard:
            place = self._places[former]
            known = self._rows[place].signal
            if known is not None and known.engine == signal.engine:
                self._said_ms[place] = np.inf

    def _grow(self, place: int) -> None:
        """Room for the newest row."""
        self._unheard += 1
        if place >= len(self._said_ms):
            numbers, slacks, weights = self.columns
            self.columns = Columns(
                np.concatenate((numbers, np.zeros_like(numbers)), axis=1),
                np.concatenate((slacks, np.zeros_like(slacks))),
                np.concatenate((weights, np.zeros_like(weights))),
            )
            self._said_ms = np.concatenate((self._said_ms, np.full_like(self._said_ms, -np.inf)))
        self.columns.numbers[_TRIP, place] = self._trips_ms.get(self._rows[place].shard.fleet.region, 0.0)
        self._write(place)
