"""An ingress as it is in production: `routing.policy` on a `routing.board`, told by messages what engines do."""

from __future__ import annotations

from routing.board import Board, Candidate
from routing.budget import RetryBudget
from routing.policy import SILENT_MS, Policy, Query
from routing.simulator.conditions import Conditions
from routing.simulator.engine import SLOTS
from routing.simulator.fleet import Seat
from routing.simulator.ingress import Ingress
from routing.simulator.sequence import Sequence
from routing.simulator.signals import Sent, Signal
from routing.simulator.timing import BLOCK_TOKENS, CHUNK_TOKENS, LINEAR_MS, SQUARE_MS, STEP_MS
from routing.simulator.trace import PREFIX_TOKENS, Arrival
from wire.fleet import Fleet
from wire.messages import Dispatch, EngineSignal, Route, Snapshot, StepCost

MODEL = "simulated"
SNAPSHOT_MS = 1_000.0
"""Between two rounds of control"""
_ALL_BUT_FULL = 64
"""The slope of the decode time is taken over this part of the cache"""


def fleet_of(region: str) -> Fleet:
    """The fleet of a region: it has one."""
    return Fleet(region=region or "here", pool="gpu", slug=MODEL, version="1", numerics="0")


def message(signal: Signal, conditions: Conditions) -> EngineSignal:
    """A simulated engine's signal as it is on the wire."""
    timing = signal.timing
    decode_ms, more = timing.decode_ms(signal.kv_tokens), timing.kv_tokens // _ALL_BUT_FULL
    return EngineSignal(
        engine=f"engine-{signal.engine}",
        incarnation=str(signal.life),
        fleet=fleet_of(conditions.region(signal.engine)),
        shards=(signal.engine,),
        state="ready",
        model=MODEL,
        fingerprint=None,
        at_ms=round(signal.at_ms),
        queued_requests=signal.waiting,
        queued_tokens=signal.backlog_tokens,
        running=signal.decoding,
        slots=SLOTS,
        kv_used_tokens=signal.used_blocks * BLOCK_TOKENS,
        kv_total_tokens=timing.kv_tokens,
        step=StepCost(
            prefill_fixed_ms=STEP_MS / timing.prefill_speed,
            prefill_token_ms=LINEAR_MS / timing.prefill_speed,
            prefill_square_ms=SQUARE_MS / timing.prefill_speed,
            piece_tokens=CHUNK_TOKENS,
            decode_ms=decode_ms,
            decode_token_ms=(timing.decode_ms(signal.kv_tokens + more) - decode_ms) / more,
        ),
        slacks_ms=signal.slacks_ms,
        context_tokens=timing.kv_tokens,
        prefixes_added=signal.added,
        prefixes_evicted=signal.evicted,
    )


class Production:
    """Makes ingresses. A message is made once, however many read it."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Signal, EngineSignal]] = {}

    def __call__(self, seat: Seat) -> Ingress:
        return ProductionIngress(seat, self)

    def message(self, signal: Signal, conditions: Conditions) -> EngineSignal:
        """The signal as a message."""
        known = self._latest.get(signal.engine)
        if known is None or known[0] is not signal:
            known = self._latest[signal.engine] = signal, message(signal, conditions)
        return known[1]


class ProductionIngress(Ingress):
    """The production policy, with a board and a retry budget of its own."""

    def __init__(self, seat: Seat, production: Production) -> None:
        self._number = seat.number
        self._production = production
        self._conditions = seat.conditions
        self._candidates = tuple(
            Candidate(fleet_of(seat.conditions.region(number)), number) for number in range(len(seat.engines))
        )
        self.board = Board(block_tokens=PREFIX_TOKENS)
        self.policy = Policy(self.board)
        self._rows = self.board.rows(self._candidates)
        self._budget = RetryBudget()
        self._followed_ms = -SNAPSHOT_MS

    def choose(self, arrival: Arrival, now_ms: float, tried: frozenset[int]) -> int | None:
        self._follow(now_ms)
        if not tried:
            self._budget.first_attempt(now_ms)
        query = Query(
            request_id=str(arrival.number),
            model=MODEL,
            candidates=self._candidates,
            prompt_tokens=arrival.prompt_tokens,
            prefix_chain=arrival.prefix,
            waited_ms=now_ms - arrival.at_ms,
        )
        choice = self.policy.choose(query, now_ms, frozenset(self._candidates[number] for number in tried))
        return None if choice is None else choice.shard

    def hear(self, signal: Signal) -> None:
        self.board.heard(self._production.message(signal, self._conditions))

    def sent(self, sent: Sent) -> None:
        arrival, (fleet, shard) = sent.arrival, self._candidates[sent.engine]
        if sent.ingress == self._number:
            name = (str(arrival.number), sent.attempt)
            self.board.sent(name, (fleet, shard), arrival.prompt_tokens, arrival.prefix, sent.at_ms)
        else:
            told = Dispatch(
                fleet=fleet, shard=shard, prompt_tokens_estimate=arrival.prompt_tokens, prefix_chain=arrival.prefix
            )
            self.board.told((told,), sent.at_ms)

    def ended(self, running: Sequence, attempt: int) -> None:
        self.board.ended((str(running.arrival.number), attempt), "answered", running.finished_ms)
        self.board.lengths.add(running.arrival.output_tokens)

    def lost(self, arrival: Arrival, attempt: int, engine: int, now_ms: float) -> None:
        self.board.ended((str(arrival.number), attempt), "timed_out", now_ms)

    def may_retry(self, now_ms: float) -> bool:
        return self._budget.try_retry(now_ms)

    def silent(self, now_ms: float) -> frozenset[int]:
        living = self.board.living(self._rows, SILENT_MS)
        return frozenset((~living).nonzero()[0].tolist())

    def _follow(self, now_ms: float) -> None:
        """Equal weights, as control would publish for equal engines."""
        if now_ms - self._followed_ms < SNAPSHOT_MS:
            return
        self._followed_ms = now_ms
        weight = 1 / len(self._candidates)
        routes = tuple(
            Route(fleet=fleet, shard=shard, engine=f"engine-{shard}", weight=weight)
            for fleet, shard in self._candidates
        )
        self.policy.follow(Snapshot(model=MODEL, region="here", version=1, created_ms=round(now_ms), routes=routes))
