"""What one ingress knows of a model's engines, as rows of numbers, so that a choice weighs all of them at once.

A row starts from an engine's latest signal, which is up to a second old. What was sent since, by this ingress or by one
of the same region, is added; and time is let pass over it: prompts that wait are computed, choices gain on their pace.
The row is keyed by the engine's primary shard; a signal of another incarnation begins it anew. Nothing is ever counted
down, so nothing can become negative.

What isn't known is not taken for zero: an engine that never spoke is taken for the mean of those that did.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from routing.chains import Chains
from routing.lengths import Lengths
from routing.loss import Floats, State
from routing.penalties import HALF_LIFE_MS, Outcome, Penalty, punish
from routing.schedule import TARGETS, PrefillCost, Targets
from routing.slack import STANDINS
from wire.fleet import Fleet
from wire.messages import Dispatch, EngineSignal, StepCost

Rows = NDArray[np.intp]

TRAVEL_MS = 20.0
"""A send this much older than a signal may still be missing from it"""
MEMORY_MS = 10_000.0
"""How long a send counts towards an engine's share of the traffic"""
TRUST_MS = 3_000.0
"""A row's extrapolation ends here: after this long without a signal only what was sent is known"""
SENDS = 1_024
"""Sends remembered for an engine: what it gets in seconds, at most"""
PRIOR = StepCost(prefill_fixed_ms=20.0, prefill_token_ms=0.05, decode_ms=20.0)
"""Of an engine that measured nothing yet: slow for a GPU of today, so that it earns its traffic"""
PRIOR_COST = PrefillCost(fixed_ms=PRIOR.prefill_fixed_ms, token_ms=PRIOR.prefill_token_ms)
PRIOR_SLOTS = 32
LEAST_MS = 0.01
"""No step is shorter: what divides by a step's time must stay finite, whatever a signal says"""
NOWHERE: Mapping[str, float] = {}

(
    _AT,
    _BACKLOG,
    _DECODE,
    _DECODE_TOKEN,
    _FIXED,
    _TOKEN,
    _SQUARE,
    _PIECE,
    _PIECE_MS,
    _WAITING,
    _DECODING,
    _SLOTS,
    _OWN,
    _ROOM,
    _TRIP,
    _SENT,
    _SENT_AT,
    _PENALTY,
    _PENALTY_AT,
    _FIELDS,
) = range(20)


class Candidate(NamedTuple):
    """A shard that could serve a request."""

    fleet: Fleet
    shard: int


Shard = tuple[Fleet, int]
Name = tuple[str, int]
"""An attempt: request id and number"""


@dataclass(frozen=True, slots=True)
class _Send:
    at_ms: float
    new_tokens: float
    prompt_tokens: float


@dataclass(slots=True)
class _Engine:
    """What isn't a number, of one row."""

    shard: Shard
    signal: EngineSignal | None = None
    cost: PrefillCost = PRIOR_COST
    sends: deque[_Send] = field(default_factory=lambda: deque(maxlen=SENDS))

    def offers(self, features: frozenset[str]) -> bool:
        return self.signal is None or self.signal.features is None or features.issubset(self.signal.features)


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
        self.travel_ms = travel_ms
        self.trips = trips_ms
        self.block_tokens = block_tokens
        self.lengths = Lengths()
        self.chains = Chains()
        self.blamed = False
        """whether any attempt ever failed: most ingresses' didn't lately, and then there is no risk to compute"""
        self._rows: dict[Shard, int] = {}
        self._engines: list[_Engine] = []
        self._numbers: Floats = np.zeros((_FIELDS, 8))
        self._slacks: Floats = np.zeros((8, STANDINS))
        self._weights: Floats = np.zeros((8, STANDINS))
        self._heard = np.zeros(8, dtype=bool)
        self._said_ms: Floats = np.full(8, -np.inf)
        """when the engine's latest signal was measured; ∞ if that said that it isn't ready"""
        self._open: dict[Name, tuple[int, str | None]] = {}
        """unended attempts of this ingress: row, and the incarnation that it was sent to"""

    # ------------------------------------------------------------ what is told

    def heard(self, signal: EngineSignal) -> None:
        """An engine's signal: newer than what was heard of it before, or of another life."""
        if not signal.shards:
            return
        shard = (signal.fleet, signal.shards[0])
        self._retire(signal, shard)
        row = self.row(shard)
        engine = self._engines[row]
        if engine.signal is not None and engine.signal.incarnation != signal.incarnation:
            self.chains.forget(row)
            self._numbers[_PENALTY, row] = 0.0
        engine.signal = signal
        self._heard[row] = True
        self._said_ms[row] = signal.at_ms if signal.state == "ready" else np.inf
        self.chains.report(row, signal.prefixes_added, signal.prefixes_evicted, full=signal.prefixes_full)
        self._restart(row, engine, signal)

    def sent(self, name: Name, shard: Shard, prompt_tokens: int, chain: Sequence[int], now_ms: float) -> None:
        """This ingress sent an attempt. Sent again it is where it went last."""
        self.ended(name)
        row = self.row(shard)
        self._open[name] = row, self._life(row)
        self._numbers[_OWN, row] += 1
        self._add(row, prompt_tokens, chain, now_ms)

    def told(self, dispatches: Iterable[Dispatch], at_ms: float) -> None:
        """Another ingress of the region sent these."""
        for one in dispatches:
            self._add(self.row((one.fleet, one.shard)), one.prompt_tokens_estimate, one.prefix_chain, at_ms)

    def ended(self, name: Name, outcome: Outcome | None = None, now_ms: float = 0.0) -> None:
        """An attempt of this ingress is over; the second time, or for one that was never sent, nothing happens.

        What an earlier life of an engine did wrong is not held against the present one.
        """
        row, life = self._open.pop(name, (None, None))
        if row is None:
            return
        self._numbers[_OWN, row] -= 1
        if outcome is not None and life == self._life(row):
            known = Penalty(float(self._numbers[_PENALTY, row]), float(self._numbers[_PENALTY_AT, row]))
            penalty = punish(known, outcome, now_ms)
            self._numbers[_PENALTY, row], self._numbers[_PENALTY_AT, row] = penalty.value, penalty.at_ms
            self.blamed = self.blamed or penalty.value > 0

    # ------------------------------------------------------------ what is known

    def row(self, shard: Shard) -> int:
        """The row of a shard, made if it is new."""
        row = self._rows.get(shard)
        if row is None:
            row = self._rows[shard] = len(self._engines)
            self._engines.append(_Engine(Candidate(*shard)))
            self._grow()
        return row

    def rows(self, shards: Iterable[Shard]) -> Rows:
        """Rows of shards."""
        return np.fromiter(map(self.row, shards), dtype=np.intp)

    def shard(self, row: int) -> Shard:
        return self._engines[row].shard

    def signal(self, row: int) -> EngineSignal | None:
        """The engine's latest."""
        return self._engines[row].signal

    @property
    def size(self) -> int:
        """Rows there are."""
        return len(self._engines)

    @property
    def open(self) -> int:
        """This ingress's attempts that haven't ended."""
        return len(self._open)

    def open_at(self, shard: Shard) -> int:
        """Those of one shard; never negative, since they are members of a set."""
        row = self._rows.get(shard)
        return 0 if row is None else int(self._numbers[_OWN, row])

    def held(self, rows: Rows) -> Floats:
        """Requests at each engine, waiting or decoding; at least this ingress's own."""
        numbers = self._seen(rows)
        held: Floats = np.maximum(numbers[_WAITING] + numbers[_DECODING], numbers[_OWN])
        return held

    def lately(self, rows: Rows, now_ms: float) -> Floats:
        """Requests sent to each engine lately: an old one counts less, by e every MEMORY_MS."""
        numbers = self._numbers
        sent: Floats = numbers[_SENT, rows] * np.exp(np.minimum(numbers[_SENT_AT, rows] - now_ms, 0.0) / MEMORY_MS)
        return sent

    def risk(self, rows: Rows, now_ms: float) -> Floats:
        """The chance that an attempt fails at each engine, by how this ingress's last ones there ended: 1 − 2^−penalty.

        What is left of a penalty is `routing.penalties.penalty_at`.
        """
        age_ms = np.maximum(now_ms - self._numbers[_PENALTY_AT, rows], 0.0)
        risk: Floats = 1 - np.exp2(-self._numbers[_PENALTY, rows] * np.exp2(-age_ms / HALF_LIFE_MS))
        return risk

    def room(self, rows: Rows) -> Floats:
        """Tokens of prompt and answer together that each engine takes; what isn't known is enough."""
        room: Floats = self._numbers[_ROOM, rows]
        return room

    def trips_ms(self, rows: Rows) -> Floats:
        """Round trip to each engine's region."""
        trips: Floats = self._numbers[_TRIP, rows]
        return trips

    def speaks(self, rows: Rows) -> NDArray[np.bool_]:
        """Whose engine has been heard."""
        return self._heard[rows]

    def offers(self, rows: Rows, features: frozenset[str]) -> NDArray[np.bool_]:
        """Whose engine has all the features; one that says nothing of them has them all."""
        return np.array([self._engines[row].offers(features) for row in rows], dtype=bool)

    def living(self, rows: Rows, among: NDArray[np.bool_], silent_ms: float) -> NDArray[np.bool_]:
        """Whose engine is ready as far as is known, and didn't fall silent while others of `among` were heard.

        Silence is judged against the latest signal, not the clock: when all are silent, it's the log that is.
        """
        said_ms = self._said_ms[rows]
        ready = said_ms < np.inf
        latest_ms = said_ms.max(initial=-np.inf, where=among & ready)
        alive: NDArray[np.bool_] = ready & ((said_ms >= latest_ms - silent_ms) | ~self._heard[rows])
        return alive

    def state(self, rows: Rows, now_ms: float) -> State:
        """The engines as they are taken to be now."""
        numbers = self._seen(rows)
        decode_ms, piece_ms = numbers[_DECODE], numbers[_PIECE_MS]
        passed_ms = np.clip(now_ms - numbers[_AT], 0.0, TRUST_MS)
        stalled_ms = np.minimum(passed_ms * (piece_ms / (piece_ms + decode_ms)), numbers[_BACKLOG])
        gained_ms = (passed_ms - stalled_ms) * (self.targets.tbt_ms / decode_ms) - passed_ms
        waiting = np.maximum(numbers[_WAITING], numbers[_OWN] - numbers[_DECODING])
        over = np.maximum(waiting + numbers[_DECODING] + 1 - numbers[_SLOTS], 0.0)
        return State(
            backlog_ms=numbers[_BACKLOG] - stalled_ms,
            slot_ms=over * (decode_ms / numbers[_SLOTS]) * self.lengths.mean_tokens,
            decode_ms=decode_ms,
            decode_token_ms=numbers[_DECODE_TOKEN],
            fixed_ms=numbers[_FIXED],
            token_ms=numbers[_TOKEN],
            square_ms=numbers[_SQUARE],
            piece_tokens=numbers[_PIECE],
            piece_ms=piece_ms,
            waiting=waiting,
            decoding=numbers[_DECODING],
            slacks_ms=self._slacks[rows] + gained_ms[:, None],
            weights=self._weights[rows],
        )

    # ------------------------------------------------------------ rows

    def _life(self, row: int) -> str | None:
        signal = self._engines[row].signal
        return None if signal is None else signal.incarnation

    def _seen(self, rows: Rows) -> Floats:
        """The rows' numbers; for engines that never spoke the mean of those that did."""
        numbers: Floats = self._numbers[:, rows]
        heard = self._heard[rows]
        if not heard.all() and heard.any():
            means = numbers[_AT : _SLOTS + 1, heard].mean(axis=1, keepdims=True)
            numbers[_AT : _SLOTS + 1, ~heard] = means
        return numbers

    def _restart(self, row: int, engine: _Engine, signal: EngineSignal) -> None:
        """The row as of a signal, and what was sent since."""
        numbers = self._numbers[:, row]
        running, queued = max(signal.running, 0), max(signal.queued_requests, 0)
        slots = max(signal.slots, 1)
        step = signal.step or msgspec.structs.replace(
            PRIOR, decode_ms=PRIOR.decode_ms * (1 + (running + queued) / slots)
        )
        self._set_cost(row, step)
        queued_tokens = max(signal.queued_tokens, 0)
        numbers[_AT] = signal.at_ms
        numbers[_BACKLOG] = engine.cost.all_ms(queued_tokens, step.piece_tokens)
        numbers[_DECODE] = max(step.decode_ms + step.decode_token_ms * queued_tokens, LEAST_MS)
        numbers[_WAITING], numbers[_DECODING], numbers[_SLOTS] = queued, running, slots
        if signal.context_tokens is not None:
            numbers[_ROOM] = signal.context_tokens
        slacks = signal.slacks_ms or (0,)
        self._slacks[row, : len(slacks)] = slacks[:STANDINS]
        self._weights[row] = 0.0
        self._weights[row, : len(slacks)] = running / len(slacks)
        sends = engine.sends
        while sends and sends[0].at_ms <= signal.at_ms - self.travel_ms:
            sends.popleft()
        for send in sends:
            self._count(row, engine, send)

    def _add(self, row: int, prompt_tokens: int, chain: Sequence[int], now_ms: float) -> None:
        engine, numbers = self._engines[row], self._numbers[:, row]
        cached = min(self.chains.match(row, chain) * self.block_tokens, prompt_tokens - 1)
        self.chains.hope(row, chain, now_ms)
        numbers[_SENT] = numbers[_SENT] * math.exp(min(numbers[_SENT_AT] - now_ms, 0.0) / MEMORY_MS) + 1
        numbers[_SENT_AT] = max(now_ms, numbers[_SENT_AT])
        if engine.signal is None or now_ms > engine.signal.at_ms - self.travel_ms:
            send = _Send(now_ms, prompt_tokens - cached, prompt_tokens)
            engine.sends.append(send)
            self._count(row, engine, send)

    def _count(self, row: int, engine: _Engine, send: _Send) -> None:
        """One more request waits, from when it was sent."""
        numbers = self._numbers[:, row]
        self._pass(row, send.at_ms)
        numbers[_BACKLOG] += engine.cost.all_ms(send.new_tokens, int(numbers[_PIECE]))
        numbers[_DECODE] += numbers[_DECODE_TOKEN] * send.prompt_tokens
        numbers[_WAITING] += 1

    def _pass(self, row: int, to_ms: float) -> None:
        """Let time pass over a row, as `state` does over all."""
        numbers = self._numbers[:, row]
        passed_ms = min(max(to_ms - numbers[_AT], 0.0), TRUST_MS)
        share = numbers[_PIECE_MS] / (numbers[_PIECE_MS] + numbers[_DECODE])
        stalled_ms = min(passed_ms * share, numbers[_BACKLOG])
        numbers[_BACKLOG] -= stalled_ms
        self._slacks[row] += (passed_ms - stalled_ms) * self.targets.tbt_ms / numbers[_DECODE] - passed_ms
        numbers[_AT] = max(to_ms, numbers[_AT])

    def _set_cost(self, row: int, step: StepCost) -> None:
        numbers = self._numbers[:, row]
        cost = PrefillCost(
            fixed_ms=step.prefill_fixed_ms, token_ms=step.prefill_token_ms, square_ms=step.prefill_square_ms
        )
        self._engines[row].cost = cost
        numbers[_FIXED], numbers[_TOKEN], numbers[_SQUARE] = cost.fixed_ms, cost.token_ms, cost.square_ms
        numbers[_PIECE] = max(step.piece_tokens, 1)
        numbers[_PIECE_MS] = max(cost.ms(numbers[_PIECE]), LEAST_MS)
        numbers[_DECODE], numbers[_DECODE_TOKEN] = max(step.decode_ms, LEAST_MS), step.decode_token_ms

    def _retire(self, signal: EngineSignal, shard: Shard) -> None:
        """An engine has another primary now: its former row is nobody's."""
        for row, engine in enumerate(self._engines):
            known = engine.signal
            if known is not None and known.engine == signal.engine and engine.shard != shard:
                engine.signal = None
                self._heard[row], self._said_ms[row] = False, -np.inf

    def _grow(self) -> None:
        """Room for the newest row, which is empty."""
        row = self.size - 1
        if row >= len(self._heard):
            self._numbers = np.concatenate((self._numbers, np.zeros_like(self._numbers)), axis=1)
            self._slacks = np.concatenate((self._slacks, np.zeros_like(self._slacks)))
            self._weights = np.concatenate((self._weights, np.zeros_like(self._weights)))
            self._heard = np.concatenate((self._heard, np.zeros_like(self._heard)))
            self._said_ms = np.concatenate((self._said_ms, np.full_like(self._said_ms, -np.inf)))
        self._numbers[_SLOTS, row], self._numbers[_ROOM, row] = PRIOR_SLOTS, np.inf
        self._numbers[_TRIP, row] = self.trips.get(self._engines[row].shard[0].region, 0.0)
        self._set_cost(row, PRIOR)
